"""Every FP8 figure of every step: through kills, resumes and rollbacks, read back bit for bit, and as Parquet."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas
import pytest

from harness.core.facts import SlotStats
from harness.tracking.slot_file import (
    COLUMNS,
    FIGURES,
    PARQUET,
    SLOT_FILE,
    SlotFile,
    SlotSteps,
    write_parquet,
)

ROLES = ("input", "weight", "grad_output")


def names(layers: int = 2) -> tuple[str, ...]:
    return tuple(f"blocks.{layer:02d}.up.{role}" for layer in range(layers) for role in ROLES)


def stats(step: int, attempt: int = 1, slots: tuple[str, ...] | None = None) -> SlotStats:
    """Figures that tell the step and attempt they are of; the sampled ones at even steps only."""
    slots = names() if slots is None else slots
    made = (
        np.random.default_rng(step * 10 + attempt)
        .normal(size=(len(FIGURES), len(slots)))
        .astype(np.float32)
    )
    if step % 2:
        made[3:] = np.nan
    return SlotStats(slots, *made)


def write(run_dir: Path, steps: Iterable[int], attempt: int = 1) -> None:
    file = SlotFile(run_dir / SLOT_FILE)
    for step in steps:
        file.add(attempt, step, stats(step, attempt))
    file.close()
    assert file.lost == 0, file.trouble


def read(run_dir: Path) -> dict[int, np.ndarray]:
    found = SlotSteps.of(run_dir)
    return {} if found is None else {step: values for step, _, values in found.read()}


def test_every_figure_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    write(tmp_path, range(1, 31))
    found = read(tmp_path)
    assert list(found) == list(range(1, 31))
    for step, values in found.items():
        assert values.tobytes() == stats(step).stacked().tobytes()


def test_a_kill_in_mid_frame_costs_that_frame_alone(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    path = tmp_path / SLOT_FILE
    path.write_bytes(path.read_bytes()[:-7])
    assert list(read(tmp_path)) == [1, 2, 3, 4]
    write(tmp_path, range(5, 8))
    assert list(read(tmp_path)) == list(range(1, 8))


def test_a_resume_repeats_steps_and_a_rollback_replaces_them(tmp_path: Path) -> None:
    write(tmp_path, range(1, 13))
    write(tmp_path, range(9, 15))
    assert list(read(tmp_path)) == list(range(1, 15))
    write(tmp_path, range(5, 8), attempt=2)
    found = read(tmp_path)
    assert list(found) == [1, 2, 3, 4, 5, 6, 7], "steps 8 to 14 were thrown away"
    assert found[4].tobytes() == stats(4).stacked().tobytes()
    assert found[6].tobytes() == stats(6, attempt=2).stacked().tobytes()


def test_steps_are_read_as_they_were_executed_first(tmp_path: Path) -> None:
    write(tmp_path, range(1, 13))
    write(tmp_path, range(5, 8), attempt=2)
    steps = SlotSteps(tmp_path / SLOT_FILE, as_executed=True)
    found = {step: values for step, _, values in steps.read()}
    assert list(found) == list(range(1, 13)), "what the rollback discarded, too"
    assert found[6].tobytes() == stats(6).stacked().tobytes()


def test_a_damaged_frame_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    path = tmp_path / SLOT_FILE
    data = bytearray(path.read_bytes())
    data[-3] ^= 16
    path.write_bytes(data)
    assert list(read(tmp_path)) == [1, 2, 3, 4]
    path.write_bytes(b"something else" * 100)
    assert SlotSteps.of(tmp_path) is None
    assert write_parquet(tmp_path) is None


def test_slots_that_change_keep_their_names(tmp_path: Path) -> None:
    file = SlotFile(tmp_path / SLOT_FILE)
    file.add(1, 1, stats(1, slots=names(2)))
    file.add(1, 2, stats(2, slots=names(3)))
    file.close()
    found = SlotSteps.of(tmp_path)
    assert found is not None
    assert [len(slots) for _, slots, _ in found.read()] == [6, 9]
    assert found.names == names(3)
    steps, values = found.joined("amax", names(3))
    assert list(steps) == [1, 2]
    assert np.isnan(values[6:, 0]).all()
    assert not np.isnan(values[:, 1]).any()


def test_columns_join_neighbours_by_their_largest(tmp_path: Path) -> None:
    write(tmp_path, range(1, 11))
    found = SlotSteps.of(tmp_path)
    assert found is not None
    steps, values = found.joined("amax", names(), columns=4)
    assert list(steps) == [1, 4, 7, 10]
    oracle = [
        max(float(stats(step).amax[2]) for step in part)
        for part in ((1, 2, 3), (4, 5, 6), (7, 8, 9), (10,))
    ]
    assert values[2].tolist() == oracle


def test_a_disk_that_refuses_is_counted_and_never_raised(tmp_path: Path) -> None:
    (tmp_path / SLOT_FILE).mkdir()
    file = SlotFile(tmp_path / SLOT_FILE)
    file.add(1, 1, stats(1))
    assert (file.lost, "directory" in file.trouble) == (1, True)
    (tmp_path / SLOT_FILE).rmdir()
    file.add(1, 2, stats(2))
    file.close()
    assert file.lost == 1
    assert list(read(tmp_path)) == [2]


def test_the_table_has_a_row_for_each_step_and_slot(tmp_path: Path) -> None:
    write(tmp_path, range(1, 9))
    assert write_parquet(tmp_path) == tmp_path / PARQUET
    table = pandas.read_parquet(tmp_path / PARQUET)
    assert tuple(table.columns) == COLUMNS
    measured = (
        "amax",
        "scale",
        "saturation",
        "clipped",
        "underflow",
        "sqnr_db",
        "even_db",
        "centred_db",
    )
    assert ("step", "layer", "role", *measured) == COLUMNS
    assert len(table) == 8 * 6
    one = table[(table.step == 4) & (table.layer == "blocks.01.up") & (table.role == "weight")]
    assert [one[figure].item() for figure in FIGURES] == [
        getattr(stats(4), figure)[4].item() for figure in FIGURES
    ]
    assert table[table.step == 3].underflow.isna().all(), "not measured"
    assert not table[table.step == 4].underflow.isna().any()


def test_what_was_not_measured_is_null_and_not_nan(tmp_path: Path) -> None:
    from pyarrow import parquet

    write(tmp_path, range(1, 9))
    write_parquet(tmp_path)
    table = parquet.read_table(tmp_path / PARQUET)
    assert table.column("sqnr_db").null_count == 4 * 6
    assert table.column("amax").null_count == 0
    assert str(table.schema.field("step").type) == "int64"
    assert {str(table.schema.field(name).type) for name in FIGURES} == {"float"}


def test_without_pyarrow_there_is_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, range(1, 3))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError):
        write_parquet(tmp_path)
    assert not (tmp_path / PARQUET).exists()
