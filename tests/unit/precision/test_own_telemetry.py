"""`harness.Telemetry` in a loop that is not ours: a run folder that every reader of run folders takes."""

from __future__ import annotations

import json
import math
import os
import shutil
import sqlite3
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pandas
import pytest
from api_support import EAGER, adamw, forward_backward, prepared, recipe
from typer.testing import CliRunner

from harness import Guard, Telemetry
from harness.cli import app
from harness.core.errors import CheckpointError, ConfigError, HaltedError, MisuseError
from harness.tracking.history import RunHistory

STEPS = 14


def train(
    folder: Path | None,
    poison: tuple[int, ...] = (),
    steps: int = STEPS,
    saved: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    """A loop of somebody else's under guard and telemetry, with a layer that leaves FP8; its Precision."""
    precision, model = prepared(recipe(fallback=EAGER))
    optimizer = adamw(model)
    settings = {"mlflow": False, "fp8_every": 2, **more}
    with Telemetry.for_precision(
        folder, precision, steps=steps, params={"lr": 1e-2}, **settings
    ) as telemetry:
        guard = Guard.for_precision(
            precision,
            optimizer,
            telemetry=telemetry,
            max_consecutive_skips=2,
            snapshot_every=4,
            healthy_steps=2,
        )
        if saved:
            for part, owner in (
                ("model", model),
                ("optimizer", optimizer),
                ("precision", precision),
            ):
                owner.load_state_dict(saved[part])
        forwards = 0
        while guard.step < steps:
            forward_backward(
                precision, model, guard.window, poison=math.nan if forwards in poison else 0.0
            )
            forwards += 1
            precision.step(optimizer, max_grad_norm=1.0, tokens=16)
            optimizer.zero_grad()
            guard.end_step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "precision": precision.state_dict(),
    }


def harness(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
def test_a_run_of_ones_own_can_be_read_like_any_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    train(folder, poison=(10, 11))
    history = RunHistory.read(folder)
    assert sorted(history.series["train/loss"]) == list(range(1, STEPS + 1))
    assert len(history.slots()) == 6
    assert [(each.to_step, each.passed_over) for each in history.rollbacks] == [(8, (10, 11))]
    assert {event["code"] for event in history.events} >= {
        "precision.switched",
        "nonfinite.skip",
        "guard.rollback",
    }
    assert history.outcome["status"] == "done"
    assert history.run["params"] == {"lr": 0.01, "steps": STEPS}
    assert history.run["tags"]["precision.resolved"] == "native:fp8"
    assert "modules" in history.run["tags"]["precision.effective"]
    assert all(rate > 0 for rate in history.series["train/tokens_per_second"].values())
    shown = capsys.readouterr().out
    assert "rolled back to step 8" in shown
    assert "per byte" not in shown, "nobody knows what this loss is"
    assert "6 of 6 FP8 slots saw a nonzero amax" in shown
    assert "now in BF16" in harness("inspect", str(folder))
    assert "guard.rollback" in harness("explain", str(folder))
    assert "report.html" in harness("report", str(folder))
    assert len((folder / "plots" / "fp8_saturation.png").read_bytes()) > 1000


@pytest.mark.slow
def test_a_loop_that_goes_on_writes_no_row_twice(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    saved = train(folder, steps=8)
    train(folder, steps=8, saved=saved)
    train(folder, steps=14, saved=saved)
    rows = [row.step for row in RunHistory.read(folder).rows]
    assert rows == list(range(1, 15))
    whole = tmp_path / "whole"
    train(whole, steps=14)
    losses = [RunHistory.read(each).series["train/loss"] for each in (folder, whole)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("more", "status"), [(0, "halted"), (1, "done")])
def test_a_halt_that_the_loop_catches_is_one_unless_it_goes_on(
    tmp_path: Path, more: int, status: str
) -> None:
    precision, model = prepared(recipe())
    optimizer = adamw(model)
    settings: dict[str, Any] = {"snapshot_every": 0, "max_consecutive_skips": 2}

    def go_on(poison: float, steps: int) -> None:
        for _ in range(steps):
            forward_backward(precision, model, guard.window, poison=poison)
            precision.step(optimizer)
            optimizer.zero_grad()
            guard.end_step()

    with Telemetry.for_precision(tmp_path / "mine", precision, mlflow=False, report=False) as kept:
        guard = Guard.for_precision(precision, optimizer, telemetry=kept, **settings)
        with pytest.raises(HaltedError):
            go_on(math.nan, steps=10)
        go_on(0.0, steps=more)
    outcome = json.loads((tmp_path / "mine" / "outcome.json").read_text())
    assert outcome["status"] == status
    assert ("no snapshots are taken" in outcome["reason"]) == (status == "halted")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("poison", "status", "code"),
    [((1, 2), "halted", 3), ((), "failed", 1)],
    ids=["halted", "failed"],
)
def test_how_a_loop_ended_is_written(
    tmp_path: Path, poison: tuple[int, ...], status: str, code: int
) -> None:
    folder = tmp_path / "mine"
    if status == "halted":
        with pytest.raises(HaltedError):
            train(folder, poison=poison)
    else:
        broken = Telemetry.for_precision(folder, prepared(recipe())[0], mlflow=False)
        with pytest.raises(RuntimeError, match="mine"), broken:
            raise RuntimeError("mine")
    outcome = json.loads((folder / "outcome.json").read_text())
    assert (outcome["status"], outcome["exit_code"]) == (status, code)
    shown = harness("explain", str(folder))
    assert "train --config" not in shown, "there is no such command for it"
    assert "checkpoint.healthy_steps" not in shown
    ends = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert [row["status"] for row in ends if row["kind"] == "end"] == [status]


@pytest.mark.slow
def test_without_a_guard_steps_are_recorded_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precision, model = prepared(recipe())
    optimizer = adamw(model)
    with Telemetry.for_precision(
        tmp_path / "mine", precision, mlflow=False, fp8_every=1
    ) as telemetry:
        for step in range(3):
            forward_backward(precision, model, step)
            precision.step(optimizer)
            optimizer.zero_grad()
            telemetry.record(precision.facts())  # type: ignore[arg-type]
        telemetry.validation(3, 0.5)
    assert "validation after step 3: 0.5\n" in capsys.readouterr().out
    history = RunHistory.read(tmp_path / "mine")
    assert sorted(history.series["train/loss"]) == [1, 2, 3]
    assert [row.step for row in history.rows if "train/loss" in row.values] == [1, 2, 3], (
        "each once"
    )
    assert "not measured" in harness("inspect", str(tmp_path / "mine")), (
        "nobody said how many tokens there were"
    )
    assert history.last("val/loss") == 0.5
    assert len(history.series["fp8_amax/00.weight"]) == 3


@pytest.mark.slow
def test_without_pyarrow_the_run_ends_as_well_as_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    folder = tmp_path / "mine"
    train(folder, steps=4)
    history = RunHistory.read(folder)
    assert history.outcome["status"] == "done"
    (told,) = [event for event in history.events if event["code"] == "fp8.no_table"]
    assert "pyarrow" in told["text"]
    monkeypatch.undo()
    assert "fp8_telemetry.parquet" in harness("report", str(folder))
    assert len(pandas.read_parquet(folder / "fp8_telemetry.parquet")) == 4 * 6


@pytest.mark.slow
def test_a_disk_that_refuses_the_figures_is_told_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    (folder / "fp8_telemetry.bin").mkdir(parents=True)
    train(folder, steps=4)
    history = RunHistory.read(folder)
    assert history.outcome["status"] == "done"
    (told,) = [event for event in history.events if event["code"] == "fp8.dropped"]
    assert told["steps"] == 4
    assert sorted(history.series["fp8_amax/00.weight"]) == [2, 4], "the journal has what is due"


@pytest.mark.nightly
@pytest.mark.parametrize("resumed", ["early", "unguarded", "afresh"])
def test_what_counts_is_what_was_trained_last(tmp_path: Path, resumed: str) -> None:
    """After a rollback rows come under a second attempt: those of a lower one would pass for thrown away."""
    folder = tmp_path / "mine"
    early = train(None, steps=6)
    late = train(folder, poison=(10, 11))
    if resumed == "unguarded":
        precision, model = prepared(recipe(fallback=EAGER))
        optimizer = adamw(model)
        model.load_state_dict(late["model"])
        precision.load_state_dict(late["precision"])
        with Telemetry.for_precision(folder, precision, mlflow=False, report=False) as telemetry:
            for step in range(STEPS, 20):
                forward_backward(precision, model, step)
                precision.step(optimizer)
                optimizer.zero_grad()
                telemetry.record(precision.facts())  # type: ignore[arg-type]
    else:
        train(folder, steps=20, saved=early if resumed == "early" else None)
    history = RunHistory.read(folder)
    assert sorted(history.series["train/loss"]) == list(range(1, 21))
    newest = {row.step: row.values["train/loss"] for row in history.rows}
    assert {step: history.series["train/loss"][step] for step in (12, 20)} == {
        12: newest[12],
        20: newest[20],
    }


def test_a_shorter_run_in_the_folder_of_a_longer_one_is_told_alone(tmp_path: Path) -> None:
    train(tmp_path, report=False)
    train(tmp_path, steps=5, report=False)
    history = RunHistory.read(tmp_path)
    assert sorted(history.series["train/loss"]) == [1, 2, 3, 4, 5]
    assert len(history.abandoned["train/loss"]) == STEPS


def test_steps_that_would_be_told_nowhere_are_refused(tmp_path: Path) -> None:
    precision, model = prepared(recipe())
    other, _ = prepared(recipe())
    optimizer = adamw(model)
    with Telemetry.for_precision(
        tmp_path / "mine", precision, mlflow=False, report=False
    ) as telemetry:
        with pytest.raises(MisuseError, match="the model's Telemetry is not given"):
            Guard.for_precision(precision, optimizer)
        with pytest.raises(MisuseError, match="this Telemetry is another model's"):
            Guard.for_precision(other, optimizer, telemetry=telemetry)
        guard = Guard.for_precision(precision, optimizer, telemetry=telemetry)
        with pytest.raises(MisuseError, match="the model's guard has another Telemetry already"):
            Telemetry.for_precision(tmp_path / "other", precision, mlflow=False)
    for step in range(2):
        forward_backward(precision, model, step)
        precision.step(optimizer)
        optimizer.zero_grad()
        if step == 1:
            with pytest.raises(MisuseError, match="the telemetry was closed"):
                guard.end_step()
        else:
            guard.end_step()


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    first = Telemetry.for_precision(
        tmp_path / "mine", prepared(recipe())[0], mlflow=False, report=False
    )
    with pytest.raises(CheckpointError, match="another Telemetry writes this run"):
        Telemetry.for_precision(tmp_path / "mine", prepared(recipe())[0], mlflow=False)
    first.close()
    Telemetry.for_precision(
        tmp_path / "mine", prepared(recipe())[0], mlflow=False, report=False
    ).close()


@pytest.mark.parametrize("name", ["file", "file/below", "n" * 300, "a\0b"])
def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="cannot be written"):
        Telemetry.for_precision(tmp_path / name, prepared(recipe())[0], mlflow=False)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, "the end of the run could not be written to"),
        (RuntimeError("mine"), "outcome.json could not be written"),
    ],
    ids=["done", "failed"],
)
def test_a_folder_that_is_lost_takes_no_trained_model_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception | None, told: str
) -> None:
    precision, model = prepared(recipe())
    optimizer = adamw(model)
    telemetry = Telemetry.for_precision(tmp_path / "mine", precision, mlflow=False, report=False)
    guard = Guard.for_precision(precision, optimizer, telemetry=telemetry)
    with pytest.raises(RuntimeError, match="mine") if error else nullcontext(), telemetry:
        forward_backward(precision, model, 0)
        precision.step(optimizer)
        guard.end_step()
        shutil.rmtree(tmp_path / "mine")
        if error:
            raise error
    assert told in capsys.readouterr().out


def test_leaving_by_exit_zero_is_no_failure(tmp_path: Path) -> None:
    with (
        pytest.raises(SystemExit),
        Telemetry.for_precision(tmp_path, prepared(recipe())[0], mlflow=False, report=False),
    ):
        sys.exit(0)
    assert json.loads((tmp_path / "outcome.json").read_text())["status"] == "done"


@pytest.mark.slow
def test_amaxes_of_a_loop_of_ones_own_arrive_in_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store}")
    folder = tmp_path / "mine"
    train(folder, mlflow=True, drain_seconds=500.0, experiment="own", report=False)
    with closing(sqlite3.connect(store)) as database:
        amax = database.execute(
            "select step, value from metrics where key = 'fp8_amax/00.weight' order by step"
        ).fetchall()
        experiments = {name for (name,) in database.execute("select name from experiments")}
        tags = dict(database.execute("select key, value from tags").fetchall())
    told = [
        (row["step"], row["metrics"]["fp8_amax/00.weight"])
        for row in rows_of(folder)
        if row["step"] % 2 == 0
    ]
    assert amax == told
    assert len(amax) == STEPS // 2
    assert "own" in experiments
    assert tags["precision.resolved"] == "native:fp8"
    assert tags["outcome"] == "done"
    assert "delivered" in harness("sync", str(folder))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "metrics"]


def test_a_folder_of_harness_train_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("recipe: auto\n")
    precision, _ = prepared(recipe())
    with pytest.raises(CheckpointError, match="give your loop a folder of its own"):
        Telemetry.for_precision(tmp_path, precision)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_settings_are_checked_as_those_of_a_run() -> None:
    precision, _ = prepared(recipe())
    with pytest.raises(ConfigError, match='unknown key "fp8_evry"'):
        Telemetry.for_precision(None, precision, fp8_evry=2)


def test_ranks_other_than_0_leave_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_files() -> list[str]:
        numbers = list(Path("/proc/self/fd").iterdir())
        return sorted(os.readlink(number) for number in numbers if number.is_symlink())

    monkeypatch.setattr("harness.telemetry.world_rank", lambda: 1)
    precision, _ = prepared(recipe())
    before = open_files()
    telemetry = Telemetry.for_precision(tmp_path / "mine", precision, steps=2, mlflow=False)
    telemetry.close()
    assert open_files() == before
    telemetry.close()
    assert not (tmp_path / "mine").exists()


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(None, poison=(10, 11))
    assert list(tmp_path.iterdir()) == []
