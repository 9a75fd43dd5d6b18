"""Run folders of somebody else, read by every command: nothing in them is obeyed, and nothing holds a reader up.

Row 24 of the fault matrix.

What is measured is processor time, against SECONDS, which is some hundred times what an ordinary folder takes.
"""

from __future__ import annotations

import io
import json
import math
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hostile import SECONDS, make_run
from test_hostile_runs import STEP, forge, tensors

from harness.core.errors import CheckpointError, ExitCode
from harness.core.screen import Screen
from harness.report.explain import explain
from harness.report.inspect import inspect, summary
from harness.report.page import write
from harness.tracking.journal import MAX_ROW, read_rows
from harness.tracking.slot_file import FIGURES, SlotSteps
from tests.support.matrix import rest_nightly
from tests.support.runs import harness, train

pytestmark = pytest.mark.faults(24)

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\x85\u202egnp.exe\u2066\u200f\u2028"
OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


@contextmanager
def in_time() -> Iterator[None]:
    begin = time.process_time()
    yield
    assert time.process_time() - begin < SECONDS


def read_all(run_dir: Path) -> str:
    """What every reader of the journal shows; the report is drawn too."""
    screen = Screen(file=io.StringIO(), width=200)
    assert inspect(run_dir, screen) == explain(str(run_dir), screen) == ExitCode.DONE
    screen.print(summary(run_dir))
    assert isinstance(screen.file, io.StringIO)
    write(run_dir)
    return screen.file.getvalue() + (run_dir / "report.html").read_text()


def append(run_dir: Path, *rows: Mapping[str, Any]) -> None:
    with (run_dir / "journal.jsonl").open("a") as journal:
        journal.writelines(json.dumps(row) + "\n" for row in rows)


def event(code: str, step: int = 1, **fields: Any) -> dict[str, Any]:
    return {"kind": "event", "step": step, "attempt": 1, "time": 1.0, "code": code} | fields


def poisoned(value: Any) -> Any:
    """The same, every text in it made hostile; names of keys too, where there are several."""
    if isinstance(value, str):
        return value + EVIL
    if isinstance(value, dict):
        return {name: poisoned(item) for name, item in value.items()}
    return [poisoned(item) for item in value] if isinstance(value, list) else value


@pytest.mark.nightly
def test_no_command_prints_what_a_terminal_obeys(tmp_path: Path) -> None:
    wanted = (
        "--name",
        "r",
        "--recipe",
        "fp8_hybrid",
        "train.steps=4",
        "checkpoint.every=2",
        "data.val_samples=2",
    )
    assert train(tmp_path, *wanted).returncode == 0
    run = tmp_path / "runs" / "r"
    rows = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    kept = ("kind", "state", "path")
    for row in rows:
        row |= {
            name: poisoned(item)
            for name, item in row.items()
            if name not in kept and row["kind"] != "checkpoint"
        }
        if row["kind"] == "metrics":
            row["metrics"] |= {f"fp8_{figure}/{EVIL}.input": 1.0 for figure in FIGURES}
    (run / "journal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = ("guard.halt", "loss.skip", "precision.switched", "run.failed", EVIL)
    append(
        run,
        *(event(code, 4, text=EVIL, reason=EVIL, demote=[EVIL], promote=[EVIL]) for code in told),
    )
    (run / "fp8_telemetry.bin").unlink()
    for name, keep in (("outcome.json", ()), ("plan.json", ("recipe_sha256", "resolved"))):
        content = json.loads((run / name).read_text())
        poison = {key: poisoned(item) for key, item in content.items() if key not in keep}
        (run / name).write_text(json.dumps(content | poison | {"status": "halted"}))
    run = run.rename(tmp_path / "runs" / f"r{EVIL.replace('/', '')}")
    said, codes = "", list[int]()
    for line in (
        ["inspect"], ["explain"], ["report"], ["verify"], ["replay", "--step", "2"], ["sync"], ["eval"],
        ["export", "--out", str(tmp_path / f"out{EVIL}"), "--format", "safetensors"],
        ["sample", "--tokens", "3", "the"],
    ):  # fmt: skip
        words = [line[0], str(run), *line[1:]]
        done = harness(tmp_path, *words)
        assert "Traceback" not in done.stderr, (line, done.stderr)
        said += f"\n{line[0]}\n{done.stdout}\n{done.stderr}"
        codes.append(done.returncode)
    assert codes == [0] * 9
    said += (run / "report.html").read_text()
    for made in (*tmp_path.glob("out*/README.md"), run / "shipper.log"):
        said += made.read_text() if made.exists() else ""
    found = OBEYED.search(said)
    assert found is None, said[max(0, found.start() - 200) : found.start() + 20]
    assert said.count("gnp.exe") > 20, "shown, but spelled out"


ODD: Mapping[str, Any] = {
    "null": None, "true": True, "negative": -1, "huge": 1e300, "NaN": "NaN", "text": r"$x$ \frac $",
    "list": [], "nested list": [1, [2, None]], "mapping": {}, "nested mapping": {"a": [1], "train_samples": 0},
    "digits": "9" * 5000,
}  # fmt: skip


def rows_of_all_kinds() -> list[dict[str, Any]]:
    where = {
        "tags": {"ranks": "1", "loop": "x"},
        "params": {"train.steps": 4, "train.global_batch": 2, "train.lr": 0.1},
    }
    data = {
        "source": "a",
        "kind": "text",
        "files": 1,
        "train_tokens": 9,
        "val_tokens": 9,
        "vocab": 9,
        "skipped": ["a"],
    }
    data |= {"train_samples": 3, "unit": "nats per token", "counted": "tokens", "unigram_nats": 3.0}
    data |= {
        "mixture": [{"share": 0.5, "source": "b", "train_tokens": 3, "train_samples": 3}],
        "val_samples": 3,
    }
    data |= {
        "fields": {"x": ["int64", 3]},
        "unreadable": [1],
        "looked_at": [1],
        "unigram_bits_per_byte": 3.0,
    }
    switched = event("precision.switched", 2, demote=["a"], promote=["a"], lowered="bf16")
    rolled = event("guard.rollback", 3, reason="x", to_step=1, passed_over=[2], source="disk")
    figures = {
        "train/loss": 1.0,
        "val/loss": 1.0,
        "train/step_applied": 1.0,
        "guard/rollbacks": 1.0,
        "train/mfu": 0.5,
    }
    figures |= {"train/loss_scale": 2.0, "fp8_amax/a.input": 1.0, "fp8_saturation/a.input": 1.0}
    metrics = {"kind": "metrics", "step": 2, "attempt": 1, "time": 1.0, "metrics": figures}
    return [
        {"kind": "run", "attempt": 1, "time": 1.0, "data": data, **where}, metrics, switched, rolled,
        event("guard.halt", 4, reason="x"), event("loss.skip", 4, text="x", window=3),
        event("run.changed", 4, text="x"),
        {"kind": "checkpoint", "attempt": 1, "time": 1.0, "step": 2, "state": "saved", "path": "x", "metrics": {}},
        {"kind": "artifact", "attempt": 1, "time": 1.0, "path": "x"}, {"kind": "end", "status": "x", "time": 1.0},
    ]  # fmt: skip


def with_odd(value: Any, odd: Any) -> Iterator[Any]:
    """`value` with one thing in it odd, or gone, one after the other."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield {key: each for key, each in value.items() if key != name}
            yield value | {name: odd}
            yield from (value | {name: changed} for changed in with_odd(item, odd))
    elif isinstance(value, list):
        yield [odd]
        yield from ([changed] for item in value for changed in with_odd(item, odd))


@pytest.mark.slow
@pytest.mark.parametrize("kind", rest_nightly(ODD, "null", "list"))
def test_odd_and_missing_fields_end_in_no_traceback(run_dir: Path, kind: str) -> None:
    plan = {
        "recipe": "a",
        "recipe_sha256": "b",
        "tier": "c",
        "requested": "d",
        "resolved": "e",
        "effective": "f",
    }
    layer = {
        "module": "a.9",
        "kind": "Linear",
        "precision": "fp8",
        "backend": "native",
        "reason": "",
        "shape": [3],
    }
    plan |= {
        "keeps_amax": True,
        "layers": [layer],
        "rungs": [{"rung": "a", "taken": True, "reason": "b"}],
        "notes": [""],
    }
    outcome = {
        "status": "halted",
        "reason": "a",
        "step": 3,
        "applied": 1,
        "skipped": 1,
        "rollbacks": 1,
    }
    for name, content in (("plan.json", plan), ("outcome.json", outcome)):
        for changed in with_odd(content, ODD[kind]):
            (run_dir / name).write_text(json.dumps(changed))
            Screen(file=io.StringIO(), width=200).print(summary(run_dir))
        (run_dir / name).write_text(json.dumps(content))
    append(
        run_dir, *(each for row in rows_of_all_kinds() for each in (row, *with_odd(row, ODD[kind])))
    )
    assert "What happened" in read_all(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("kind", rest_nightly(ODD, "nested list"))
def test_odd_and_missing_fields_of_one_row_end_in_no_traceback(run_dir: Path, kind: str) -> None:
    journal = run_dir / "journal.jsonl"
    first = journal.read_text()
    for whole in rows_of_all_kinds():
        for changed in with_odd(whole, ODD[kind]):
            journal.write_text(first)
            append(run_dir, *(changed if each == whole else each for each in rows_of_all_kinds()))
            screen = Screen(file=io.StringIO(), width=200)
            screen.print(summary(run_dir))
            inspect(run_dir, screen)
    assert "What happened" in read_all(run_dir)


def test_a_row_without_a_time_or_of_no_date_is_told_all_the_same(run_dir: Path) -> None:
    timeless = event("loss.skip", text="without")
    del timeless["time"]
    append(
        run_dir,
        timeless,
        event("loss.skip", time=1e300, text="of no date"),
        event("loss.skip", time=2.5e11),
    )
    said = read_all(run_dir)
    assert "without" in said
    assert "of no date" not in said, "a line that is no row"


LONG = {
    "loss.skip": "text",
    "guard.halt": "reason",
    "run.started_from": "path",
    "guard.rollback": "else",
}


@pytest.mark.parametrize("size", rest_nightly([3 << 20, 60 << 20], 3 << 20))
@pytest.mark.slow
def test_a_line_without_an_end_is_shown_in_part_or_not_at_all(run_dir: Path, size: int) -> None:
    fields: dict[str, dict[str, Any]] = {
        code: {key: "word " * (size // 5)} for code, key in LONG.items()
    }
    append(run_dir, *(event(code, **each) for code, each in fields.items()))
    (run_dir / "outcome.json").write_text('{"status": "halted"}')
    append(run_dir, event("precision.switched", demote=["blocks.0"] * (size // 12), promote=[]))
    with in_time():
        said = read_all(run_dir)
    assert len(said) < 1 << 20
    assert ("word word" in said) is (size < MAX_ROW)


@pytest.mark.nightly
def test_many_attempts_and_events_take_time_by_their_number(run_dir: Path) -> None:
    rows = [
        {"kind": "metrics", "step": 9, "attempt": n, "time": 1.0, "metrics": {"a": 1.0}}
        for n in range(1, 20_000)
    ]
    rows += [
        event("loss.skip" if n % 2 else "loss.spike", n, window=n, text="x") for n in range(60_000)
    ]
    rows += [
        event("precision.switched", n, demote=[f"a.{n}"], promote=[f"a.{n - 9}"])
        for n in range(20_000)
    ]
    append(run_dir, *rows)
    begin = time.process_time()
    assert sum(1 for _ in read_rows(run_dir / "journal.jsonl")) > len(rows)
    plain = time.process_time() - begin
    begin = time.process_time()
    read_all(run_dir)
    assert time.process_time() - begin < 40 * plain, (
        "four readers, each of which decodes, checks and shows the rows"
    )


def endless_names() -> bytes:
    return zlib.compress(json.dumps([f"{number:0900d}" for number in range(18_000)]).encode(), 9)


def frame(magic: bytes, payload: bytes, step: int = 1) -> bytes:
    return struct.pack("<4sIiq", magic, len(payload), 1, step) + payload


SLOTS: Mapping[str, Callable[[], bytes]] = {
    "lists of names": lambda: frame(b"FP8n", endless_names()) * 2000,
    "figures": lambda: (
        frame(b"FP8n", zlib.compress(b'["a.input"]'))
        + b"".join(frame(b"FP8s", zlib.compress(bytes(128 << 20), 9), step) for step in (1, 2)) * 60
    ),
    "names that are none": lambda: frame(b"FP8n", zlib.compress(b'[[1], {"a": 2}]')),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SLOTS)
def test_figures_that_unpack_without_an_end_are_bounded(run_dir: Path, kind: str) -> None:
    (run_dir / "fp8_telemetry.bin").write_bytes(SLOTS[kind]())
    with in_time():
        found = SlotSteps.of(run_dir)
        assert found is None or not list(found.read())


def endless_header() -> bytes:
    return tensors({"__metadata__": {f"k{number}": "x" * 8 for number in range(3_500_000)}}, b"")


@pytest.mark.nightly
def test_a_header_without_an_end_is_refused_before_it_is_parsed(run_dir: Path) -> None:
    store = forge(run_dir, "rng.safetensors", endless_header())
    with in_time(), pytest.raises(CheckpointError, match="claims a header of"):
        store.load(1)


@pytest.mark.nightly
def test_inspect_opens_no_tensors_without_an_end(run_dir: Path) -> None:
    (run_dir / STEP / "fp8.safetensors").write_bytes(endless_header())
    append(
        run_dir,
        {
            "kind": "metrics",
            "step": 1,
            "attempt": 1,
            "time": 1.0,
            "metrics": {"fp8_amax/a.input": 1.0},
        },
    )
    with in_time():
        assert "the last steps" in read_all(run_dir)


def test_figures_that_are_not_finite_are_drawn(run_dir: Path) -> None:
    names = (
        "train/loss",
        "val/loss",
        "train/loss_scale",
        "guard/rollbacks",
        "train/mfu",
        r"fp8_saturation/$\frac$.input",
    )
    for step, value in enumerate(
        (math.inf, -math.inf, math.nan, 1.7e308, -1.7e308, 5e-324), start=2
    ):
        row = {
            "kind": "metrics",
            "step": step,
            "attempt": 1,
            "time": 1.0,
            "metrics": dict.fromkeys(names, value),
        }
        spelled = (
            json.dumps(row).replace("-Infinity", '"-Infinity"').replace(" Infinity", ' "Infinity"')
        )
        with (run_dir / "journal.jsonl").open("a") as journal:
            journal.write(spelled.replace("NaN", '"NaN"') + "\n")
    assert '"charts":[{' in read_all(run_dir)
    assert (run_dir / "plots" / "loss.png").is_file()


def test_a_config_of_its_own_says_nothing_to_the_terminal(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text(yaml.safe_dump({"train": {EVIL: EVIL}}))
    done = harness(run_dir.parent, "eval", str(run_dir))
    assert done.returncode == ExitCode.USAGE
    assert OBEYED.search(done.stdout + done.stderr) is None
