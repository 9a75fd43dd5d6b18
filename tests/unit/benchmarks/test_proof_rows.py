"""A row of a proof that crashes, hangs, dies or talks rubbish becomes a line with its reason, and leaves nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.proof import __main__ as command
from benchmarks.proof.checks import ESTIMATED
from benchmarks.proof.children import ROOT, children_of, environment, run_row
from benchmarks.proof.registry import BUDGET, NEEDS, ROWS, Row, lacks

HERE = Path(__file__).parent
MINUTES = 300.0
H100: dict[str, Any] = {
    "card": {"capability": [9, 0]},
    "libraries": {"transformer_engine": "", "torchao": ""},
    "no_compiling": "",
    "versions": {"torch": "2.13.0+cu130"},
    "packages": ["numpy", "pydantic", "pytest", "rich", "safetensors", "triton", "yaml"],
}


def run(tmp_path: Path, function: str, seconds: float = MINUTES, **extra: str) -> dict[str, Any]:
    work, keep = tmp_path / "work", tmp_path / "keep"
    for folder in (work, keep):
        folder.mkdir(exist_ok=True)
    environ = environment(work, True, os.environ | {"PYTHONPATH": str(HERE)} | extra)
    row = Row(function, "Does it?", (), 1, f"proof_rows:{function}")
    return run_row(
        row, seconds, work, rehearsal=True, environ=environ, earlier={"machine": {}}, keep=keep
    )


@pytest.fixture
def adopting() -> Iterator[None]:
    """This process is a parent to orphans, as the command makes itself one, for the time of a test."""
    ctypes.CDLL(None).prctl(36, 1)
    yield
    ctypes.CDLL(None).prctl(36, 0)


def alive(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_row_that_is_well(tmp_path: Path) -> None:
    outcome = run(tmp_path, "fine")
    assert (outcome["status"], outcome["reason"], outcome["summary"]) == (
        "passed",
        "",
        "all is well",
    )
    assert outcome["figures"] == {"number": 1, "told": ["machine"]}
    assert (tmp_path / "keep" / "kept.json").exists()


@pytest.mark.parametrize(
    ("function", "status", "reason"),
    [
        ("wrong", "failed", "it is not what it should be"),
        ("absent", "not run", "this machine has no such thing"),
        ("raises", "failed", "ValueError: two lines of text"),
        ("memory", "failed", "out of memory: CUDA out of memory. Tried to allocate 20.00 GiB"),
        ("rubbish", "failed", "ended with code 0 and left no readable result"),
        ("lies", "failed", "ended with code 0 and left no readable result"),
        ("not_an_answer", "failed", "gave dict, not an Answer"),
        ("infinite", "failed", "ValueError: Out of range float values"),
        ("dies", "failed", "ended by SIGSEGV"),
        ("no_such_function", "failed", "AttributeError"),
    ],
)
def test_a_bad_row_becomes_a_reason(
    tmp_path: Path, function: str, status: str, reason: str
) -> None:
    outcome = run(tmp_path, function)
    assert outcome["status"] == status
    assert reason in outcome["reason"]
    assert "\n" not in outcome["reason"]
    if function == "raises":
        assert any("Traceback" in line for line in outcome["log"])
    if function == "rubbish":
        assert all(line.isprintable() for line in outcome["log"])
    if function == "dies":
        assert outcome["figures"] == {"so far": 2}, "what it had found stays"


def hang(tmp_path: Path) -> list[int]:
    """Ids of a row that hung until it was killed, of its child, and of a child in a session of its own."""
    pids = tmp_path / "pids"
    for attempt, seconds in enumerate((4.0, 15.0, 60.0, 240.0)):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        outcome = run(folder, "hangs", seconds, PROOF_PIDS=str(pids))
        assert outcome["status"] == "failed"
        assert "stopped after its" in outcome["reason"]
        if pids.exists():
            assert outcome["figures"] == {"so far": 3}
            break
    found = [int(pid) for pid in pids.read_text().split()]
    assert len(found) == 3
    return found


@pytest.mark.slow
def test_a_row_that_hangs_is_killed_with_all_that_it_started(
    tmp_path: Path, adopting: None
) -> None:
    others = children_of(os.getpid())
    assert [pid for pid in hang(tmp_path) if alive(pid)] == []
    assert children_of(os.getpid()) <= others


@pytest.mark.slow
def test_its_process_group_goes_where_orphans_cannot_be_adopted(tmp_path: Path) -> None:
    row, child, elsewhere = hang(tmp_path)
    assert alive(elsewhere), "or this test shows nothing"
    os.kill(elsewhere, signal.SIGKILL)
    assert not alive(row)
    deadline = time.monotonic() + MINUTES
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_a_row_ends_when_the_command_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, pathlib; from benchmarks.proof.children import environment, run_row\n"
        "from benchmarks.proof.registry import Row\n"
        f"work = pathlib.Path({str(tmp_path)!r}); row = Row('waits', '?', (), 1, 'proof_rows:waits')\n"
        "run_row(row, 3600, work, rehearsal=True, environ=environment(work, True, os.environ), earlier={}, keep=work)"
    )
    pids = tmp_path / "pids"
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}", "PROOF_PIDS": str(pids)}
    command = subprocess.Popen([sys.executable, "-c", code], env=environ)
    deadline = time.monotonic() + MINUTES
    while not pids.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    row = int(pids.read_text())
    assert alive(row)
    command.kill()
    command.wait()
    while alive(row) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(row)


def test_what_a_row_leaves_behind_is_killed(tmp_path: Path, adopting: None) -> None:
    pids = tmp_path / "pids"
    assert run(tmp_path, "leaves", PROOF_PIDS=str(pids))["status"] == "passed"
    assert not alive(int(pids.read_text()))


def test_every_row_has_a_function_and_a_known_need() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert ROWS[0].name == "machine"
    assert sum(row.budget for row in ROWS) == BUDGET < 30 * 60, "half an hour, as the pages say"
    for row in ROWS:
        module, _, function = row.target.partition(":")
        assert callable(getattr(import_module(module), function)), row.name
        assert set(row.needs) <= set(NEEDS)
        assert row.question.strip()


def test_a_machine_that_has_everything_lacks_nothing() -> None:
    assert {row.name: lacks(row, H100) for row in ROWS if lacks(row, H100)} == {}


@pytest.mark.parametrize(
    ("change", "rows", "reason"),
    [
        (
            {"card": {"capability": [7, 5]}},
            {"kernels", "golden", "native", "te", "torchao", "estimated"},
            "has 7.5",
        ),
        ({"card": None}, {"kernels", "golden", "syncs", "estimated"}, "needs a card"),
        (
            {"no_compiling": "no compiler"},
            {"kernels", "native_compiled", "torchao_compiled"},
            "no compiler",
        ),
        (
            {"packages": ["pytest"]},
            {"native", "watching", "saves", "syncs"},
            "needs numpy, pydantic",
        ),
        (
            {"packages": [*H100["packages"][:2], "rich", "safetensors", "yaml"]},
            {"tests"},
            "needs pytest",
        ),
        (
            {"libraries": {**H100["libraries"], "transformer_engine": "no TE"}},
            {"golden", "te", "te_fused", "te_compiled"},
            "no TE",
        ),
        (
            {"libraries": {**H100["libraries"], "torchao": "no AO"}},
            {"torchao", "torchao_compiled"},
            "no AO",
        ),
        (
            {"versions": {"torch": "2.11.0+cu128"}},
            {"fsdp"},
            "needs torch 2.13 or later, this is 2.11.0+cu128",
        ),
    ],
)
def test_what_a_machine_lacks_is_named(change: dict[str, Any], rows: set[str], reason: str) -> None:
    found = {row.name: lacks(row, H100 | change) for row in ROWS}
    for name in rows:
        assert reason in found[name]
    assert not found["gemm"]
    assert not found["machine"]


def unsaved(outcomes: object, complete: bool) -> None:
    """Instead of files."""


def limits_of(monkeypatch: pytest.MonkeyPatch, machine: float | None = None) -> dict[str, float]:
    """How long each row was allowed to run. Each takes all of it, by a clock of this test.

    machine: seconds that the row of that name takes instead.
    """
    clock, limits = [0.0], dict[str, float]()

    def instead(row: Row, seconds: float, work: Path, **_: Any) -> dict[str, Any]:
        limits[row.name] = seconds
        clock[0] += machine if machine is not None and row.name == "machine" else seconds
        return command.skipped(row, "") | {"status": "passed", "figures": H100}

    monkeypatch.setattr(command, "run_row", instead)
    monkeypatch.setattr(command.time, "monotonic", lambda: clock[0])
    return limits


def test_a_row_may_use_what_others_left_and_nothing_that_others_are_owed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 200 s: the first row takes 1 of its 60, so the second may run for 139 of the 140 that both have; it hangs
    that long, and the third still has its own 60."""
    rows = [
        Row(name, "?", (), budget, "x:y")
        for name, budget in (("machine", 60), ("hangs", 80), ("last", 60))
    ]
    limits = limits_of(monkeypatch, machine=1.0)
    outcomes, complete = command.ask(rows, {}, {}, True, 200.0, tmp_path, unsaved)
    assert complete
    assert [row["status"] for row in outcomes] == ["passed"] * 3
    assert limits == {"machine": 60.0, "hangs": 139.0, "last": 60.0}


def test_with_little_time_the_first_rows_have_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Budgets of 200 s in 100 s: the second row may run for its 80 of them, and the last is not started."""
    rows = [
        Row(name, "?", (), budget, "x:y")
        for name, budget in (("machine", 20), ("first", 80), ("last", 100))
    ]
    monkeypatch.setattr(command, "FIRST", 0.0)
    limits = limits_of(monkeypatch)
    outcomes, _ = command.ask(rows, {}, {}, True, 100.0, tmp_path, unsaved)
    assert limits == {"machine": 20.0, "first": 80.0}
    assert "no time left" in outcomes[2]["reason"]


def test_rows_come_after_those_whose_figures_they_read() -> None:
    names = [row.name for row in ROWS]
    assert names[1] == "profiles", "what tells most"
    read = {"gemm", "bandwidth", "attention", "launch", *ESTIMATED}
    assert {names.index(name) for name in read} <= set(range(names.index("estimated")))


def test_no_time_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(name, "?", (), budget, "x:y") for name, budget in (("machine", 20), ("last", 20))]
    monkeypatch.setattr(
        command, "run_row", lambda row, *_, **__: command.skipped(row, "") | {"figures": H100}
    )
    outcomes, _ = command.ask(rows, {}, {}, True, 0.5, tmp_path, unsaved)
    assert not outcomes[0]["reason"], "the machine is looked at in any case"
    assert "no time left" in outcomes[1]["reason"]
    assert "--only last" in outcomes[1]["reason"]


def test_the_environment_of_a_row(tmp_path: Path) -> None:
    given = {
        "RANK": "3",
        "MASTER_ADDR": "x",
        "CUDA_VISIBLE_DEVICES": "2,5",
        "PYTHONPATH": "mine",
        "HOME": "/h",
    }
    row = environment(tmp_path, False, given)
    assert row["CUDA_VISIBLE_DEVICES"] == "2", "one card"
    assert environment(tmp_path, False, {})["CUDA_VISIBLE_DEVICES"] == "0"
    assert environment(tmp_path, True, given)["CUDA_VISIBLE_DEVICES"] == "", (
        "a rehearsal touches none"
    )
    assert not {"RANK", "MASTER_ADDR"} & row.keys()
    assert row["PYTHONPATH"].endswith(os.pathsep + "mine")
    for name in ("TMPDIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert Path(row[name]).is_relative_to(tmp_path)


def test_the_command_itself_stays_free_of_torch() -> None:
    code = "import sys, benchmarks.proof.__main__ as m; m.parse([]); print(*({'torch', 'numpy'} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
