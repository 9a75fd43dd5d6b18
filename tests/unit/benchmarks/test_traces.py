"""Recorded statistics come back from a journal as they were; synthetic runs keep cadence, blocks and start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_support import CADENCE, SLOTS, clean_trace

from benchmarks.traces import read_trace, resample
from harness.core.errors import ConfigError, DataError
from harness.core.metrics import row
from harness.core.state import RunLedger
from harness.tracking.journal import encode
from harness.tracking.slot_file import SLOT_FILE, SlotFile

RECORDED, START, BLOCK = 100, 20, 40


@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 700))
def test_a_synthetic_run_samples_at_the_steps_at_which_a_real_one_does(seed: int, steps: int) -> None:
    order = resample(RECORDED, steps, START, BLOCK, CADENCE, np.random.default_rng(seed))
    assert len(order) == steps
    assert (order % CADENCE == np.arange(steps) % CADENCE).all()


@given(seed=st.integers(0, 2**32 - 1))
def test_it_begins_as_recorded_and_goes_on_in_whole_blocks_of_the_rest(seed: int) -> None:
    order = resample(RECORDED, 500, START, BLOCK, CADENCE, np.random.default_rng(seed))
    assert order[:START].tolist() == list(range(START))
    rest = RECORDED - START
    for block in order[START:].reshape(-1, BLOCK) - START:
        assert (np.diff(block) % rest == 1).all()
        assert block.min() >= 0
        assert block.max() < rest


def test_every_step_of_the_rest_is_equally_likely() -> None:
    order = resample(RECORDED, START + 400 * BLOCK, START, BLOCK, CADENCE, np.random.default_rng(0))
    counts = np.bincount(order[START:], minlength=RECORDED)[START:]
    # Blocks fall on 8 places, 4 of which hold any one step: 200 of 400 blocks, standard deviation 10.
    assert counts.min() > 150
    assert counts.max() < 250


def test_other_random_numbers_make_another_run() -> None:
    one, same, other = (resample(RECORDED, 500, START, BLOCK, CADENCE, np.random.default_rng(n)) for n in (0, 0, 1))
    assert one.tolist() == same.tolist() != other.tolist()


@pytest.mark.parametrize(
    ("recorded", "start", "block", "said"),
    [(105, 20, 40, "recorded 105"), (100, 15, 40, "start 15"), (100, 20, 25, "block 25"), (100, 20, 90, "block 90")],
)
def test_blocks_that_would_break_the_cadence_or_do_not_fit_are_refused(
    recorded: int, start: int, block: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        resample(recorded, 500, start, block, CADENCE, np.random.default_rng(0))


def _rows(steps: int) -> list[dict[str, Any]]:
    facts = clean_trace(steps).facts()
    return [
        {"kind": "metrics", "step": one.step, "attempt": 1, "metrics": row(one, RunLedger(), True)} for one in facts
    ]


def _journal(folder: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path = folder / "journal.jsonl"
    path.write_bytes(b"".join(encode(row) for row in rows))
    return path


def test_a_journal_gives_back_what_the_run_recorded(tmp_path: Path) -> None:
    others = [
        {"kind": "run", "attempt": 1},
        {"kind": "event", "step": 3, "attempt": 1, "code": "precision.switched"},
        {"kind": "metrics", "step": 30, "attempt": 1, "metrics": {"val/loss": 2.0}},
    ]
    trace = read_trace(_journal(tmp_path, [*_rows(30), *others]))
    assert trace.slots == SLOTS
    assert trace.switches == 1
    np.testing.assert_array_equal(trace.values, clean_trace(30).values)


@pytest.mark.parametrize("whole", [True, False])
def test_what_stands_beside_the_journal_is_the_trace(tmp_path: Path, whole: bool) -> None:
    """Runs of today keep every step in a file of its own, and a few rows in the journal."""
    made = clean_trace(30)
    file = SlotFile(tmp_path / SLOT_FILE)
    for one in made.facts():
        if whole or one.step != 7:
            assert one.slots is not None
            file.add(1, one.step, one.slots)
    file.close()
    journal = _journal(tmp_path, [*_rows(2), {"kind": "event", "step": 3, "code": "precision.switched", "attempt": 1}])
    if not whole:
        with pytest.raises(DataError, match=r"fp8_every=1"):
            read_trace(journal)
        return
    trace = read_trace(journal)
    assert (trace.slots, trace.switches) == (SLOTS, 1)
    np.testing.assert_array_equal(trace.values, made.values)


@pytest.mark.parametrize("broken", ["no statistics", "a step is missing", "a step twice", "a slot is missing"])
def test_a_journal_without_every_step_once_is_refused(tmp_path: Path, broken: str) -> None:
    rows = _rows(12)
    if broken == "no statistics":
        rows = [{"kind": "metrics", "step": 1, "attempt": 1, "metrics": {"train/loss": 2.0}}]
    elif broken == "a step is missing":
        del rows[5]
    elif broken == "a step twice":
        rows.insert(6, rows[5])
    else:
        del rows[7]["metrics"][f"fp8_amax/{SLOTS[4]}"]
    with pytest.raises(DataError, match=r"fp8_every=1"):
        read_trace(_journal(tmp_path, rows))


def test_a_storm_is_put_into_a_copy() -> None:
    trace = clean_trace(20)
    stormy = trace.with_storm(SLOTS[2], range(4, 6), 9.0)
    changed = np.argwhere(~np.isclose(stormy.values, trace.values, equal_nan=True))
    assert changed.tolist() == [[2, 4, 2], [2, 5, 2]]
    np.testing.assert_array_equal(trace.values, clean_trace(20).values)
