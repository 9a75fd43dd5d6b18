"""Run folders and checkpoints that somebody else made: every file the harness reads in them. Row 24."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hostile import JSON, SCREEN, SECONDS, Trap, data_config, make_run, state

from harness.checkpoint.manifest import read_marks
from harness.checkpoint.policy import load_ledger
from harness.checkpoint.store import Store
from harness.core.errors import CheckpointError, ConfigError, DataError, HarnessError
from harness.core.files import dump_json
from harness.data.tokens import prepare
from harness.replay.flight import read_records
from harness.run_folder import read_outcome, read_plan, same_data_order
from harness.tracking.history import RunHistory
from harness.tracking.journal import Position

pytestmark = [pytest.mark.faults(24), pytest.mark.slow]

STEP = "checkpoints/step-00000001"
CONTENTS: dict[str, bytes] = JSON | {
    "null": b"null",
    "text": b'"x"',
    "odd": b'{"good": [1e3, "3", -1, true], "run_id": [], "offset": -1, "key": 5, "layers": 5}',
    "far": b'{"good": {"a": 1}, "run_id": "x", "offset": 99999999999999999999, "key": "k", "step": "../x"}',
}
KINDS = [*CONTENTS, "pickle", "pipe", "folder", "device", "sparse", "link out"]


def place(path: Path, kind: str, canary: Path) -> None:
    """Put something hostile at `path`."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link out":
        path.symlink_to("/etc/passwd")
    elif kind == "sparse":
        with path.open("wb") as stream:
            stream.truncate(1 << 40)
    else:
        path.write_bytes(CONTENTS[kind] if kind in CONTENTS else pickle.dumps(Trap(canary)))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def record(folder: Path) -> tuple[Any, Any]:
    made = RunHistory.read(folder)
    made.slots()
    made.expected_slots()
    return made.plan.get("layers", []), made.outcome.get("status", [])


ADVISORY: Mapping[str, tuple[Callable[[Path], Any], Any]] = {
    "outcome.json": (lambda folder: read_outcome(folder).get("status", []), []),
    "plan.json": (lambda folder: read_plan(folder).get("resolved", ""), ""),
    "checkpoints/good.json": (lambda folder: read_marks(folder / "checkpoints"), []),
    "flight/step-00000003/record.json": (read_records, []),
    "shipper.json": (lambda folder: Position.load(folder).offset, 0),
}
"""By file: its reader, and what it says where there is none. These files only advise."""
NEEDED: Mapping[str, tuple[Callable[[Path], Any], type[HarnessError]]] = {
    "incidents.json": (load_ledger, CheckpointError),
    "data/corpus.json": (lambda folder: prepare(data_config(), folder), DataError),
    "data/train.bin": (lambda folder: prepare(data_config(), folder), DataError),
    f"{STEP}/manifest.json": (
        lambda folder: Store(folder / "checkpoints", readonly=True).load(1),
        CheckpointError,
    ),
    f"{STEP}/state.json": (
        lambda folder: Store(folder / "checkpoints", readonly=True).load(1),
        CheckpointError,
    ),
    f"{STEP}/rng.safetensors": (
        lambda folder: Store(folder / "checkpoints", readonly=True).load(1),
        CheckpointError,
    ),
    f"{STEP}/model.pt": (
        lambda folder: Store(folder / "checkpoints", readonly=True).load(1),
        CheckpointError,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ADVISORY)
def test_hostile_advice_is_passed_over(run_dir: Path, name: str, kind: str) -> None:
    read, nothing = ADVISORY[name]
    place(run_dir / name, kind, run_dir / "canary")
    begin = time.process_time()
    assert read(run_dir) == nothing
    record(run_dir)
    assert not same_data_order(run_dir, run_dir), "there is no config.yaml"
    assert time.process_time() - begin < SECONDS
    assert not (run_dir / "canary").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NEEDED)
def test_hostile_state_is_refused_with_its_path(run_dir: Path, name: str, kind: str) -> None:
    read, expected = NEEDED[name]
    read(run_dir) if not name.endswith(".pt") else None
    place(run_dir / name, kind, run_dir / "canary")
    begin = time.process_time()
    with pytest.raises(expected) as caught:
        read(run_dir)
    assert time.process_time() - begin < SECONDS
    text = str(caught.value)
    assert str(run_dir / name) in text
    assert len(text.splitlines()) <= SCREEN
    assert all(problem.fix for problem in caught.value.problems)
    assert not (run_dir / "canary").exists()


@pytest.mark.parametrize("kind", [*CONTENTS, "pickle"])
def test_a_hostile_journal_has_no_rows(run_dir: Path, kind: str) -> None:
    place(run_dir / "journal.jsonl", kind, run_dir / "canary")
    assert record(run_dir) == ([], [])
    assert not (run_dir / "canary").exists()


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_journal_that_is_no_file_is_no_run(run_dir: Path, kind: str) -> None:
    place(run_dir / "journal.jsonl", kind, run_dir / "canary")
    with pytest.raises(ConfigError, match="not a run"):
        record(run_dir)


def forge(run_dir: Path, name: str, content: bytes) -> Store:
    """A file of the checkpoint, with a manifest that fits it: what its author could have written."""
    folder = run_dir / STEP
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    del manifest["sha256"]
    seal = hashlib.sha256(dump_json(manifest)).hexdigest()
    (folder / "manifest.json").write_bytes(dump_json({**manifest, "sha256": seal}))
    return Store(run_dir / "checkpoints", readonly=True)


def tensors(header: object, data: bytes = bytes(64)) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def one(
    dtype: object = "U8", shape: object = (64,), offsets: object = (0, 64)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


TWICE = b'{"a": %s, "a": %s}' % ((json.dumps(one()).encode(),) * 2)
HEADERS: dict[str, bytes] = {
    "no header": b"",
    "longer than the file": (1 << 60).to_bytes(8, "little") + b"{}",
    "over the limit": (101 << 20).to_bytes(8, "little") + b"{}",
    "overlap": tensors(
        {"a": one(shape=(40,), offsets=(0, 40)), "b": one(shape=(40,), offsets=(24, 64))}
    ),
    "hole": tensors(
        {"a": one(shape=(10,), offsets=(0, 10)), "b": one(shape=(10,), offsets=(54, 64))}
    ),
    "beyond the end": tensors({"a": one(shape=(128,), offsets=(0, 128))}),
    "negative offset": tensors({"a": one(offsets=(-64, 0))}),
    "negative shape": tensors({"a": one(shape=(-64,))}),
    "shape overflow": tensors({"a": one(shape=(2**63 - 1, 2**63 - 1, 2))}),
    "empty and endless": tensors({"a": one("F32", (2**63, 0), (0, 0))}, b""),
    "many dimensions": tensors({"a": one(shape=[1] * 100_000, offsets=(0, 1))}, b"\0"),
    "unknown type": tensors({"a": one("X9")}),
    "type of another type": tensors({"a": one(5)}),
    "name twice": tensors(TWICE),
    "deep": tensors(b'{"a": ' + b"[" * 100_000),
    "list": tensors(b"[]"),
    "no object": tensors({"a": 5}),
    "metadata": tensors({"__metadata__": {"a": 1}, "a": one()}),
    "not utf-8": tensors(b'{"\xff": 1}'),
    "half a character": tensors(b'{"a\\ud800": %s}' % json.dumps(one()).encode()),
    "more data": tensors({"a": one(shape=(32,), offsets=(0, 32))}),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_forged_tensors_are_refused_even_with_the_right_hash(run_dir: Path, kind: str) -> None:
    store = forge(run_dir, "rng.safetensors", HEADERS[kind])
    with pytest.raises(CheckpointError) as caught:
        store.load(1)
    assert STEP in str(caught.value)
    assert "SHA-256" not in str(caught.value), "the hash fits: something else found it"
    assert len(str(caught.value)) < 2000


def changed(**values: object) -> bytes:
    _, meta = state().state_dict()
    return dump_json(meta | values)


STATES: dict[str, Callable[[], bytes]] = {
    "list": lambda: b"[]\n",
    "empty": lambda: b"{}\n",
    "deep": lambda: b'{"parts": ' + b"[" * 100_000,
    "endless number": lambda: b'{"step": ' + b"9" * 5_000 + b"}",
    "pickle": lambda: pickle.dumps({"step": 1}),
    "no parts": lambda: changed(parts=None),
    "parts a list": lambda: changed(parts=["rng"]),
    "other parts": lambda: changed(parts={"evil": {}}),
    "part a number": lambda: changed(parts={"rng": 5}),
    "no budgets": lambda: changed(budgets={}),
    "odd limits": lambda: changed(limits={"x": [1]}),
    "odd switches": lambda: changed(switches=[1]),
    "odd look": lambda: changed(closer_look=[1, 2, 3]),
    "odd step": lambda: changed(step="x"),
}


@pytest.mark.parametrize("kind", STATES)
def test_forged_state_is_refused_even_with_the_right_hash(run_dir: Path, kind: str) -> None:
    store = forge(run_dir, "state.json", STATES[kind]())
    with pytest.raises(CheckpointError) as caught:
        state().load_state_dict(*store.load(1))
    assert "SHA-256" not in str(caught.value), "the hash fits: something else found it"


def test_a_checkpoint_behind_a_link_is_refused(run_dir: Path) -> None:
    (run_dir / STEP).rename(run_dir / "elsewhere")
    (run_dir / STEP).symlink_to(run_dir / "elsewhere")
    with pytest.raises(CheckpointError, match="link"):
        Store(run_dir / "checkpoints", readonly=True).load(1)
