"""`harness inspect --follow` on run folders that are written as a run writes them."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.core.errors import ConfigError
from harness.core.facts import SLOT_ROWS, SlotStats
from harness.core.screen import Screen
from harness.report import follow
from harness.report.follow import PARSED, STEPS, Follower, as_json, header, view
from harness.report.inspect import ASCII_BARS
from harness.report.overview import State
from harness.run_folder import RunLock
from harness.tools import inspect as inspect_command
from harness.tracking import slot_file
from harness.tracking.journal import Journal
from harness.tracking.slot_file import SlotFile

NAMES = ("a.input", "a.weight", "b.input")


def stats(names: tuple[str, ...] = NAMES, **figures: list[float]) -> SlotStats:
    """Quiet figures, but for those given."""
    quiet = {"amax": 1.0, "scale": 2.0, "saturation": 0.5}
    quiet |= dict.fromkeys(("sqnr_db", "even_db", "centred_db"), 30.0)
    arrays: dict[str, Any] = {}
    for name in SLOT_ROWS:
        values = figures.get(name, [quiet.get(name, 0.0)] * len(names))
        arrays[name] = np.array(values, np.float32)
    return SlotStats(names, **arrays)


def begin(folder: Path, steps: int = 100) -> Journal:
    folder.mkdir(exist_ok=True)
    journal = Journal(folder / "journal.jsonl")
    journal.note("run", tags={}, params={"train.steps": steps}, data={}, where={})
    return journal


def step(journal: Journal, number: int, loss: float = 2.0) -> None:
    journal.metrics(number, {"train/loss": loss, "train/tokens_per_second": 100.0})


def shown(run: Follower, rows: int = 100) -> str:
    console = Screen(file=io.StringIO(), width=140, highlight=False)
    console.print(view(run, rows, ASCII_BARS))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_it_follows_what_a_run_writes(tmp_path: Path) -> None:
    run = Follower(tmp_path)
    assert run.look(locked=False)
    assert "has not begun" in header(run)[0]
    assert not run.look(locked=False), "nothing has changed"

    with begin(tmp_path) as journal:
        slots = SlotFile(tmp_path / "fp8_telemetry.bin")
        step(journal, 1)
        slots.add(1, 1, stats())
        assert run.look(locked=True)
        assert (run.state, run.totals.step) == (State.RUNNING, 1)
        assert {each.slot.name for each in run.slots()} == set(NAMES)

        # Figures that are not sampled in a step keep their value; the other ones are those of the newest step.
        step(journal, 2, loss=1.5)
        slots.add(1, 2, stats(saturation=[0.5, 0.5, 3.0], sqnr_db=[math.nan] * 3))
        journal.event(2, "precision.switched", demote=["a"], promote=[], lowered="")
        assert run.look(locked=True)
        assert [each.slot.name for each in run.slots()] == ["a.weight", "a.input", "b.input"]
        text = shown(run)
        assert "step 2/100  loss 1.5000  100 tokens/s" in text
        assert "in BF16" in text
        assert "saturation 3 (limit 1.5)" in text
        assert "30.0" in text
        assert "precision.switched: to BF16: 1 layer, back: 0" in text

        # A rollback brings the layer back.
        journal.event(2, "guard.rollback", to_step=1, reason="why")
        assert run.look(locked=True)
        assert run.slots()[0].slot.name == "b.input"
        assert not any("in BF16" in each.why for each in run.slots())
        assert not run.look(locked=True)
        slots.close()
        journal.note("end", status="done")
    (tmp_path / "outcome.json").write_text('{"status": "done", "step": 2, "reason": "2 steps"}')
    assert run.look(locked=False)
    assert run.ended
    assert "done: 2 steps" in header(run)[0]


def test_the_speed_counts_what_the_run_s_data_are(tmp_path: Path) -> None:
    with begin(tmp_path) as journal:
        journal.note("run", tags={}, params={}, data={"counted": "samples"})
        step(journal, 1)
    run = Follower(tmp_path)
    run.look(locked=True)
    assert "100 samples/s" in shown(run)


def test_a_look_costs_the_same_however_long_the_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rows that are parsed and frames that are unpacked, not by time."""
    counted = {"rows": 0, "frames": 0}
    decode, unpack = follow.decode, slot_file._payload

    def counting_decode(line: bytes) -> Any:
        counted["rows"] += 1
        return decode(line)

    def counting_unpack(*arguments: Any) -> Any:
        counted["frames"] += 1
        return unpack(*arguments)

    monkeypatch.setattr(follow, "decode", counting_decode)
    monkeypatch.setattr(slot_file, "_payload", counting_unpack)
    with begin(tmp_path, 10_000) as journal:
        slots = SlotFile(tmp_path / "fp8_telemetry.bin")
        for number in range(1, 3001):
            step(journal, number)
            slots.add(1, number, stats())
        run = Follower(tmp_path)
        run.look(locked=True)
        assert counted["rows"] <= PARSED + 2
        assert counted["frames"] <= STEPS + 1

        # The next look reads the new bytes alone.
        at = run._at
        assert at == (tmp_path / "journal.jsonl").stat().st_size
        counted |= {"rows": 0, "frames": 0}
        step(journal, 3001, loss=0.25)
        slots.add(1, 3001, stats())
        assert run.look(locked=True)
        assert counted == {"rows": 1, "frames": 1}
        assert run.totals.metrics["train/loss"] == 0.25
        assert math.isfinite(run.seconds_left)


def test_a_row_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    with begin(tmp_path) as journal:
        step(journal, 1)
    path = tmp_path / "journal.jsonl"
    whole = path.read_bytes()
    row = b'{"kind": "event", "step": 1, "attempt": 1, "time": 1.0, "code": "loss.spike"}\n'
    run = Follower(tmp_path)
    run.look(locked=True)
    path.write_bytes(whole + row[:40])
    assert not run.look(locked=True)
    path.write_bytes(whole + row)
    assert run.look(locked=True)
    assert run.events[-1][1] == "loss.spike"


def test_a_run_that_begins_anew_in_the_folder_is_read_anew(tmp_path: Path) -> None:
    with begin(tmp_path, 7) as journal:
        step(journal, 5)
    run = Follower(tmp_path)
    run.look(locked=True)
    (tmp_path / "journal.jsonl").unlink()
    with begin(tmp_path, 9) as journal:
        step(journal, 1)
    assert run.look(locked=True)
    assert (run.totals.step, run.totals.steps) == (1, 9)


def test_a_run_that_was_killed_is_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with begin(tmp_path) as journal:
        step(journal, 1)
    assert inspect_command.command(tmp_path, follow=True) == 0
    assert "crashed: killed: it wrote no outcome" in capsys.readouterr().out


def test_a_foreign_journal_can_neither_paint_the_screen_nor_stop_it(tmp_path: Path) -> None:
    hostile = "x\x1b[31m\x1b]0;owned\x07\n.input"
    with begin(tmp_path) as journal:
        step(journal, 1)
        journal.event(1, "evil\x1b[2J", text="\x1b[1mboo\nsecond line")
        journal.event(1, "precision.switched", demote=3, promote=[{}], lowered=[])
        journal.event(1, "guard.rollback", to_step="far")
    slots = SlotFile(tmp_path / "fp8_telemetry.bin")
    slots.add(1, 1, stats((hostile, "no_role", "b.input"), amax=[math.inf, 1.0, 1.0]))
    slots.close()
    # More steps than a float can count.
    with (tmp_path / "journal.jsonl").open("a") as file:
        row = {"kind": "run", "attempt": 1, "time": 1.0, "params": {"train.steps": 10**400}}
        file.write(json.dumps(row) + "\n")
        for number, time in ((2, 2.0), (3, 3.0)):
            row = {"kind": "metrics", "attempt": 1, "step": number, "time": time}
            file.write(json.dumps({**row, "metrics": {"train/loss": 2.0}}) + "\n")
    run = Follower(tmp_path)
    run.look(locked=True)
    text = shown(run)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "not finite" in text
    json.dumps(as_json(run), allow_nan=False)


def test_json_is_one_object_a_line_and_one_object_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with begin(tmp_path) as journal:
        step(journal, 1, loss=math.nan)
        journal.note("end", status="halted")
    slots = SlotFile(tmp_path / "fp8_telemetry.bin")
    slots.add(1, 1, stats(amax=[1.0, math.inf, 1.0]))
    slots.close()
    assert inspect_command.command(tmp_path, follow=True, slots=2, as_objects=True) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found: Mapping[str, Any] = json.loads(line)
    assert (found["state"], found["step"], found["train_loss"]) == ("halted", 1, "nan")
    assert [slot["slot"] for slot in found["slots"]] == ["a.weight", "a.input"]
    assert found["slots"][0]["amax"] == "inf"
    assert inspect_command.command(tmp_path, as_objects=True) == 0
    assert len(json.loads(capsys.readouterr().out)["slots"]) == 3


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        inspect_command.command(tmp_path / "missing", follow=True)
    with begin(tmp_path / "one"):
        pass
    with pytest.raises(ConfigError, match="a folder of 1 run, "):
        inspect_command.command(tmp_path, follow=True)


def test_a_terminal_shows_as_many_slots_as_it_has_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tuple(f"blocks.{number:02d}.up.input" for number in range(60))
    with begin(tmp_path) as journal:
        step(journal, 1)
        journal.note("end", status="done")
    slots = SlotFile(tmp_path / "fp8_telemetry.bin")
    slots.add(1, 1, stats(names, saturation=[0.1 + number / 100 for number in range(60)]))
    slots.close()
    out = io.StringIO()

    class Terminal(Screen):
        def __init__(self) -> None:
            super().__init__(file=out, force_terminal=True, width=100, height=20)

    monkeypatch.setattr(inspect_command, "Screen", Terminal)
    assert inspect_command.command(tmp_path, follow=True) == 0
    text = out.getvalue()
    assert 5 < sum(name in text for name in names) < 16, "twenty lines less those around"
    assert "blocks.59" in text, "the most saturated"
    assert "less troubled" in text


def test_it_holds_no_lock(tmp_path: Path) -> None:
    """A run that starts while somebody looks is not refused."""
    with begin(tmp_path) as journal, RunLock(tmp_path):
        step(journal, 1)
        run = Follower(tmp_path)
        assert inspect_command.is_locked(tmp_path)
        run.look(locked=True)
    with RunLock(tmp_path):
        pass
