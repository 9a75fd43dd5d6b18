"""Random damage to every format the harness reads: only its own errors may come out, and never changed bytes.

Row 24 of the fault matrix. FAULTS_FUZZ: examples of each test; the slow tests take FAULTS_FUZZ_SLOW.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fuzzing import PIECES, Damage, damage, damaged, fuzz, one_screen
from hypothesis import strategies as st

from harness.checkpoint.manifest import add_mark, check_folder, read_marks
from harness.checkpoint.policy import load_ledger, save_ledger
from harness.checkpoint.store import Store
from harness.core.config import DataConfig, RunConfig, load_config
from harness.core.errors import CheckpointError, ConfigError, DataError
from harness.core.files import parse_json
from harness.core.schema import parse_yaml, read_yaml, validate
from harness.core.state import RandomState, RunLedger, TrainState
from harness.data.source import source_changes
from harness.data.text import read_text
from harness.data.tokens import prepare
from harness.precision.recipe import Recipe, load_recipe
from harness.replay.flight import read_records
from harness.run_folder import read_outcome, read_plan
from harness.tracking.journal import Position, decode, encode, read_rows
from tests.support.runs import ROOT, TEXT

pytestmark = pytest.mark.faults(24)

FEW = int(os.environ.get("FAULTS_FUZZ", "60"))
MANY = int(os.environ.get("FAULTS_FUZZ_SLOW", "2000"))
BOTH = pytest.mark.parametrize(
    "examples", [FEW, pytest.param(MANY, marks=(pytest.mark.slow, pytest.mark.attack))]
)
VALID = [
    path.read_bytes()
    for kind in ("configs", "recipes")
    for path in sorted((ROOT / kind).glob("*.yaml"))
]
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.dates()
)
KEYS = [
    *RunConfig.model_fields,
    *Recipe.model_fields,
    "steps",
    "lr",
    "path",
    "args",
    "target",
    "patterns",
]
names = st.sampled_from(KEYS) | st.text(max_size=6)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=6), inner, max_size=5)
    ),
    max_leaves=25,
)


@BOTH
def test_yaml_gives_plain_data_or_a_config_error(
    examples: int, figure: Callable[..., None]
) -> None:
    def test(given: tuple[bytes, Damage]) -> None:
        text = damaged(*given).decode("utf-8", "surrogateescape")
        try:
            data = parse_yaml(text, "fuzz")
            for model in (RunConfig, Recipe):
                validate(model, data if isinstance(data, dict) else {}, "fuzz")
        except ConfigError as error:
            one_screen(error)

    fuzz(
        examples,
        test,
        st.tuples(st.sampled_from(VALID) | st.binary(max_size=200), damage),
        figure,
        "configs and recipes",
    )


@pytest.mark.slow
@BOTH
def test_any_tree_is_a_config_or_a_config_error(examples: int, figure: Callable[..., None]) -> None:
    def test(tree: Any) -> None:
        text = yaml.safe_dump(tree)
        for model in (RunConfig, Recipe):
            try:
                made = validate(
                    model,
                    parse_yaml(text, "fuzz") if isinstance(tree, dict) else {"train": tree},
                    "fuzz",
                )
                json.dumps(made.model_dump(mode="json"))
            except ConfigError as error:
                one_screen(error)

    fuzz(examples, test, trees, figure, "values of configs and recipes")


@BOTH
def test_overrides_are_a_config_or_a_config_error(
    examples: int, figure: Callable[..., None]
) -> None:
    keys = st.sampled_from(
        ["train.lr", "data.path", "model.args", "train", "x.y", "guard.spike_sigma", "recipe"]
    )
    pieces = st.lists(st.sampled_from(PIECES) | st.binary(max_size=6), max_size=6).map(b"".join)

    def test(given: tuple[str, bytes]) -> None:
        key, value = given
        try:
            load_config("tiny", [f"{key}={value.decode('utf-8', 'surrogateescape')}"])
        except ConfigError as error:
            one_screen(error)

    fuzz(examples, test, st.tuples(keys, pieces), figure, "overrides")


@functools.cache
def files() -> tuple[Path, Mapping[str, bytes]]:
    """A run folder, and what is in its files. The caller damages one and puts it back."""
    root = Path(tempfile.mkdtemp(prefix="fuzz-"))
    store = Store(root / "checkpoints")
    store.save(
        7,
        {"model": {"w": torch.arange(6.0), "b": torch.ones(2, dtype=torch.bfloat16)}},
        {"step": 7, "parts": {}},
    )
    add_mark(store.root, 7)
    save_ledger(root, RunLedger(2, [3], 1, returned_to=[4]))
    prepare(DataConfig(path=str(TEXT), context=32), root)
    (root / "outcome.json").write_text('{"status": "done", "step": 7, "reason": "because"}')
    (root / "plan.json").write_text(
        '{"resolved": "fp8", "layers": [{"module": "a", "shape": [1, 2], "reason": "x"}]}'
    )
    Position("id", 0, "key").save(root)
    rows = [
        {"kind": "metrics", "step": step, "attempt": 1, "metrics": {"a": 1.5, "b": "NaN"}}
        for step in range(5)
    ]
    (root / "journal.jsonl").write_bytes(b"".join(map(encode, rows)))
    return root, {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def read_all(root: Path) -> None:
    """Everything that only advises: it has to be passed over, whatever it holds."""
    assert isinstance(read_outcome(root), dict)
    assert isinstance(read_plan(root), dict)
    assert all(type(step) is int for step in read_marks(root / "checkpoints"))
    assert read_records(root) == []
    assert Position.load(root).offset >= 0
    assert all(isinstance(row["kind"], str) for row in read_rows(root / "journal.jsonl"))


CHECKPOINT = "checkpoints/step-00000007"


@BOTH
def test_a_damaged_checkpoint_is_never_loaded(examples: int, figure: Callable[..., None]) -> None:
    root, contents = files()
    names = sorted(name for name in contents if name.startswith(CHECKPOINT))
    store = Store(root / "checkpoints", readonly=True)
    whole = store.load(7)[1]

    def test(given: tuple[str, Damage]) -> None:
        name, changes = given
        content = damaged(contents[name], changes)
        (root / name).write_bytes(content)
        try:
            problems = check_folder(store.path(7), 7)
            try:
                _, meta = store.load(7)
            except CheckpointError as error:
                one_screen(error)
                assert problems
            else:
                assert (content, problems, meta) == (contents[name], [], whole)
        finally:
            (root / name).write_bytes(contents[name])

    assert len(names) == 3
    fuzz(examples, test, st.tuples(st.sampled_from(names), damage), figure, "checkpoints")


@BOTH
def test_damaged_files_of_a_run_are_passed_over_or_refused(
    examples: int, figure: Callable[..., None]
) -> None:
    root, contents = files()
    names = sorted(name for name in contents if not name.startswith(CHECKPOINT))

    def test(given: tuple[str, Damage]) -> None:
        name, changes = given
        content = damaged(contents[name], changes)
        (root / name).write_bytes(content)
        try:
            read_all(root)
            try:
                load_ledger(root)
            except CheckpointError as error:
                one_screen(error)
            if name.startswith("data/"):
                try:
                    prepare(DataConfig(path=str(TEXT), context=32), root)
                except DataError as error:
                    one_screen(error)
                else:
                    assert content == contents[name] or name.endswith(
                        ("corpus.json", "source.json")
                    )
                assert isinstance(source_changes(DataConfig(path=str(TEXT)), root / "data"), list)
        finally:
            (root / name).write_bytes(contents[name])

    fuzz(examples, test, st.tuples(st.sampled_from(names), damage), figure, "files of a run folder")


@BOTH
def test_journal_rows_decode_or_are_none(examples: int, figure: Callable[..., None]) -> None:
    row = encode(
        {"kind": "event", "step": 1, "attempt": 1, "code": "a.b", "list": [1, {"a": float("inf")}]}
    )

    def test(changes: Damage) -> None:
        found = decode(damaged(row, changes))
        assert found is None or isinstance(found, dict)

    fuzz(examples, test, damage, figure, "rows of the journal")


@BOTH
def test_texts_are_read_or_refused(examples: int, figure: Callable[..., None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.txt"

        def test(given: tuple[bytes, Damage]) -> None:
            content = damaged(*given)
            path.write_bytes(content)
            try:
                assert read_text(path).documents[0].content == content
            except DataError as error:
                one_screen(error)

        fuzz(
            examples,
            test,
            st.tuples(st.just("grüße und text\n".encode() * 3), damage),
            figure,
            "texts",
        )


@BOTH
def test_files_are_read_as_parsed(examples: int, figure: Callable[..., None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.yaml"

        def test(given: tuple[bytes, Damage]) -> None:
            path.write_bytes(damaged(*given))
            for read in (
                read_yaml,
                lambda path: load_config(str(path)),
                lambda path: load_recipe(str(path)),
            ):
                try:
                    read(path)
                except ConfigError as error:
                    one_screen(error)
                    named = str(path) in str(error)
                    assert named

        fuzz(
            max(examples // 4, 1),
            test,
            st.tuples(st.sampled_from(VALID), damage),
            figure,
            "config and recipe files",
        )


@BOTH
def test_a_state_of_another_shape_is_refused(examples: int, figure: Callable[..., None]) -> None:
    state = TrainState({"rng": RandomState()})
    tensors, meta = state.state_dict()
    plain = json.dumps({**meta, "parts": {}}).encode()

    def test(changes: Damage) -> None:
        try:
            found = parse_json(damaged(plain, changes))
        except ValueError:
            return  # the store says so before
        parts = {"parts": meta["parts"]} if changes[0][1] % 2 else {}
        try:
            state.load_state_dict(tensors, {**found, **parts} if isinstance(found, dict) else found)
        except CheckpointError as error:
            one_screen(error)

    fuzz(examples, test, damage, figure, "the state in a checkpoint")
