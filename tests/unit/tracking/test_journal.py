"""The journal: what is written is what is read, once, whatever happens to the writer."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from harness.core.errors import ConfigError
from harness.tracking import journal as journal_rows
from harness.tracking.journal import Journal, read_rows

REPO = Path(__file__).resolve().parents[3]


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPO,
    )


def metrics_of(path: Path) -> list[tuple[int, int, dict[str, float]]]:
    return [
        (row["attempt"], row["step"], row["metrics"])
        for row in read_rows(path)
        if row["kind"] == "metrics"
    ]


def codes_of(path: Path) -> list[str]:
    return [row["code"] for row in read_rows(path) if row["kind"] == "event"]


def test_values_come_back_bit_for_bit(tmp_path: Path) -> None:
    awkward = [
        0.1,
        -0.0,
        5e-324,
        1.7976931348623157e308,
        1 / 3,
        float(np.float32(0.1)),
        math.inf,
        -math.inf,
    ]
    with Journal(tmp_path / "j") as journal:
        journal.metrics(3, {f"m{i}": value for i, value in enumerate(awkward)} | {"nan": math.nan})
        journal.metrics(np.int64(4), {"loss": np.float32(2.5)})  # type: ignore[arg-type]
    (_, step, first), (_, _, second) = metrics_of(tmp_path / "j")
    assert step == 3
    assert [repr(first[f"m{i}"]) for i in range(len(awkward))] == [repr(value) for value in awkward]
    assert math.isnan(first["nan"])
    assert second == {"loss": 2.5}


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.metrics(0, {"a": math.nan, "b": math.inf})
        journal.event(
            0, "guard.test", figures={"x": [math.nan, 1.0]}, path=Path("a/b"), array=np.arange(2)
        )
        journal.note("run", tags={"tier": "CPU"}, params={"train.lr": 1e-3}, data={"bytes": 7})

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    lines = (tmp_path / "j").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [row["kind"] for row in rows] == ["metrics", "event", "run"]
    assert rows[1]["path"] == "a/b"
    assert rows[1]["array"] == [0, 1]
    assert rows[2]["params"] == {"train.lr": 1e-3}
    assert all(row["attempt"] == 1 and row["time"] > 1.7e9 for row in rows)


def test_attempt_can_be_raised(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.metrics(5, {"loss": 1.0})
        journal.attempt = 2
        journal.metrics(5, {"loss": 1.0})
    assert metrics_of(tmp_path / "j") == [(1, 5, {"loss": 1.0}), (2, 5, {"loss": 1.0})]


@pytest.mark.parametrize("size", [1, 30, 200_000])
def test_a_torn_last_line_is_passed_over_and_cut_at_resume(tmp_path: Path, size: int) -> None:
    path = tmp_path / "j"
    with Journal(path) as journal:
        journal.metrics(0, {"loss": 1.0})
        journal.metrics(1, {"loss": 2.0})
    whole = path.read_bytes()
    path.write_bytes(whole + (b'{"kind": "metrics", "step": 2, "x": "' + b"y" * size)[:size])
    assert [step for _, step, _ in metrics_of(path)] == [0, 1]
    with Journal(path, resume_step=2) as journal:
        journal.metrics(2, {"loss": 3.0})
    assert path.read_bytes().startswith(whole)
    assert [step for _, step, _ in metrics_of(path)] == [0, 1, 2]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_row_torn_at_the_very_start_leaves_an_empty_journal(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b'{"kind": "run"')
    Journal(tmp_path / "j").close()
    assert (tmp_path / "j").read_bytes() == b""


def write_steps(journal: Journal, steps: range, change: dict[int, float] | None = None) -> None:
    for step in steps:
        loss = (change or {}).get(step, 1.0 / (step + 1))
        journal.metrics(
            step,
            {"train/loss": loss, "train/tokens_per_second": float(np.random.rand()), "n": math.nan},
        )
        if step % 2 == 0:
            journal.metrics(step, {"val/loss": 2.0 * step})
        if step % 3 == 0:
            journal.event(step, "nonfinite.skip", window=step)


def test_replayed_rows_stand_once(tmp_path: Path) -> None:
    with Journal(tmp_path / "undisturbed") as journal:
        write_steps(journal, range(10))
    path = tmp_path / "j"
    with Journal(path) as journal:
        write_steps(journal, range(7))
    with Journal(path, resume_step=4) as journal:
        write_steps(journal, range(4, 9))
    with Journal(path, resume_step=0) as journal:
        write_steps(journal, range(10))

    def plain(rows: list[tuple[int, int, dict[str, float]]]) -> list[str]:
        return [
            repr((a, s, {k: v for k, v in m.items() if k != "train/tokens_per_second"}))
            for a, s, m in rows
        ]

    assert plain(metrics_of(path)) == plain(metrics_of(tmp_path / "undisturbed"))
    assert codes_of(path) == codes_of(tmp_path / "undisturbed")


@pytest.mark.parametrize("changed", [np.nextafter(0.2, 1), -0.2, math.nan])
def test_a_replay_that_differs_is_written_and_named(tmp_path: Path, changed: float) -> None:
    path = tmp_path / "j"
    with Journal(path) as journal:
        write_steps(journal, range(7))
    with Journal(path, resume_step=3) as journal:
        write_steps(journal, range(3, 8), change={4: changed, 5: 9.0})
    rows = list(read_rows(path))
    assert [row["step"] for row in rows if row.get("replay") == "differs"] == [4, 5]
    (mismatch,) = [row for row in rows if row.get("code") == "resume.mismatch"]
    assert mismatch["step"] == 4
    assert mismatch["metric"] == "train/loss"
    assert mismatch["before"] == 0.2
    assert repr(mismatch["now"]) == repr(float(changed))
    assert len([row for row in rows if row["kind"] == "metrics" and row["step"] == 6]) == 2, (
        "train and val, once each"
    )


def test_events_of_a_process_stand_each_time_those_of_a_step_once(tmp_path: Path) -> None:
    path = tmp_path / "j"
    for resume_step in (None, 5):
        with Journal(path, resume_step=resume_step) as journal:
            journal.metrics(5, {"train/loss": 1.0})
            journal.event(5, "nonfinite.skip")
            journal.event(5, "checkpoint.failed", text="no room")
            journal.event(5, "run.failed", text="out of memory")
    assert codes_of(path) == ["nonfinite.skip", *["checkpoint.failed", "run.failed"] * 2]


def test_events_of_a_step_that_comes_out_different_stand_beside_the_old(tmp_path: Path) -> None:
    path = tmp_path / "j"
    for resume_step, loss in ((None, 1.0), (4, 2.0)):
        with Journal(path, resume_step=resume_step) as journal:
            for step in (4, 5):
                journal.metrics(step, {"train/loss": loss if step == 4 else 3.0})
                journal.event(step, "loss.spike")
    spikes = [row["step"] for row in read_rows(path) if row.get("code") == "loss.spike"]
    assert spikes == [4, 5, 4]


def test_other_attempts_and_earlier_steps_are_no_replays(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path) as journal:
        write_steps(journal, range(4))
    with Journal(path, attempt=2, resume_step=2) as journal:
        journal.metrics(2, {"val/loss": 4.0})
        journal.attempt = 1
        journal.metrics(0, {"val/loss": 0.0})
    assert [(attempt, step) for attempt, step, _ in metrics_of(path)][-2:] == [(2, 2), (1, 0)]


def test_kill_9_loses_no_finished_row(tmp_path: Path) -> None:
    path = tmp_path / "j"
    writer = python(
        """
        import sys, pathlib
        from harness.tracking.journal import Journal
        journal = Journal(pathlib.Path(sys.argv[1]))
        step = 0
        while True:
            journal.metrics(step, {f"fp8_amax/slot{i}": step + i / 7 for i in range(50)})
            print(step, flush=True)
            step += 1
        """,
        str(path),
    )
    assert writer.stdout is not None
    acknowledged = -1
    while acknowledged < 300:
        acknowledged = int(writer.stdout.readline())
    writer.kill()
    rest, _ = writer.communicate()
    assert writer.returncode == -signal.SIGKILL
    acknowledged = int(rest.split("\n")[-2]) if "\n" in rest else acknowledged
    steps = [step for _, step, _ in metrics_of(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) - 1 >= acknowledged


def test_a_full_disk_drops_rows_counts_them_and_recovers(tmp_path: Path) -> None:
    path = tmp_path / "j"
    writer = python(
        """
        import pathlib, resource, signal, sys
        from harness.tracking.journal import Journal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        journal = Journal(pathlib.Path(sys.argv[1]))
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        for step in range(20):
            journal.metrics(step, {"train/loss": float(step)})
        print(journal.dropped)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        for step in range(20, 23):
            journal.metrics(step, {"train/loss": float(step)})
        """,
        str(path),
    )
    output, _ = writer.communicate(timeout=300)
    assert writer.returncode == 0
    dropped = int(output)
    assert 0 < dropped < 20
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "metrics"] == list(range(23)), (
        "they waited in memory"
    )
    (event,) = [row for row in rows if row["kind"] == "event"]
    assert (event["code"], event["rows"], event["late"]) == ("journal.late", 0, dropped)


def test_logging_after_close_is_counted_not_raised(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.close()
    journal.close()
    journal.metrics(0, {"a": 1.0})
    assert journal.dropped == 1


def test_an_unwritable_place_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"journal cannot be opened"):
        Journal(tmp_path / "file" / "j")


def test_the_journal_starts_without_torch_and_mlflow() -> None:
    code = """
    import sys
    import harness.tracking.journal, harness.tracking.shipper
    print([name for name in ("torch", "mlflow") if name in sys.modules])
    """
    assert python(code).communicate()[0].strip() == "[]"


def test_a_row_without_an_end_is_read_in_bounded_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_rows, "MAX_ROW", 4096)
    with Journal(tmp_path / "j") as journal:
        journal.event(1, "guard.test", text="x" * 3000)
        journal.event(2, "guard.test", text="x" * 50_000)
        journal.event(3, "guard.test")
    assert [row["step"] for row in read_rows(tmp_path / "j")] == [1, 3]


def test_metrics_are_left_unread_where_nobody_asks_for_them(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.event(1, "guard.test")
        journal.metrics(1, {"a": 1.0})
        journal.event(2, "guard.test")
        end = (tmp_path / "j").stat().st_size
        journal.event(3, "guard.test")
    assert [row["step"] for row in read_rows(tmp_path / "j", end, metrics=False)] == [1, 2]
