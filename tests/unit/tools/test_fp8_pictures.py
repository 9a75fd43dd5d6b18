"""The pictures of FP8 figures: what goes into them against an oracle, and that there is something on them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from harness.core.facts import ROLES, SlotStats
from harness.report.fp8_pictures import (
    LOWEST,
    MAX_COLUMNS,
    RANKS,
    _look_past_the_start,
    gather,
    pictures,
)
from harness.report.page import write
from harness.tracking.history import RunHistory
from harness.tracking.journal import JOURNAL, Journal
from harness.tracking.slot_file import FIGURES, SLOT_FILE, SlotFile, SlotSteps
from tests.support.pages import content_of

LAYERS = 11


def amaxes(step: int) -> np.ndarray:
    return np.random.default_rng(step).uniform(1.0, 3.9, 3 * LAYERS).astype(np.float32)


def make_run(
    folder: Path,
    steps: int,
    overflow_at: int = 0,
    scaled: bool = False,
    norm_there: float = math.inf,
) -> Path:
    names = tuple(f"blocks.{layer:02d}.up.{role}" for layer in range(LAYERS) for role in ROLES)
    folder.mkdir()
    file = SlotFile(folder / SLOT_FILE)
    with Journal(folder / JOURNAL) as journal:
        journal.note("run", tags={}, params={}, data={})
        scale = 1024.0 if scaled else 1.0
        for step in range(1, steps + 1):
            amax = amaxes(step)
            unknown = np.full(len(names), np.nan, np.float32)
            scales = np.full(len(names), 64, np.float32)
            file.add(
                1,
                step,
                SlotStats(
                    names, amax, scales, (amax / 4).astype(np.float32), unknown, unknown, unknown
                ),
            )
            scale = scale / 2 if step == overflow_at else scale
            values = {
                "train/loss": 1.0,
                "train/loss_scale": scale,
                "train/grad_norm": norm_there if step == overflow_at else 1.0,
                "train/step_applied": float(step != overflow_at),
            }
            journal.metrics(step, values)
        journal.note("end", status="done")
    file.close()
    return folder


def test_steps_of_a_long_run_come_many_at_once(tmp_path: Path) -> None:
    """A pass that takes one at a time makes a report of 100,000 steps take minutes."""
    names = ("a.input", "a.weight", "b.input")
    amax, scale, saturation, clipped, underflow, sqnr = np.ones((6, 2), np.float32)
    file = SlotFile(tmp_path / SLOT_FILE)
    for step in range(1, 1001):
        # The layer `b` is there from step 701 on.
        there = names[:2] if step <= 700 else names[1:]
        stats = SlotStats(there, amax, scale, saturation, clipped, underflow, sqnr)
        file.add(1, step, stats)
    file.close()
    blocks = list(SlotSteps(tmp_path / SLOT_FILE).neighbours(300))
    spans = [(int(places[0]), int(places[-1]), slots) for places, slots, _ in blocks]
    first, second = names[:2], names[1:]
    assert spans == [
        *((0, 255, first), (256, 299, first), (300, 555, first), (556, 599, first)),
        *((600, 699, first), (700, 899, second), (900, 999, second)),
    ]
    assert [values.shape for _, _, values in blocks][:2] == [
        (256, len(FIGURES), 2),
        (44, len(FIGURES), 2),
    ]


@pytest.mark.parametrize("logarithmic", [True, False])
def test_a_fan_s_axis_is_not_that_of_its_first_step(logarithmic: bool) -> None:
    """Scales are 1 then, a million times from what they are later."""
    axes = Figure().add_subplot()
    if logarithmic:
        axes.set_yscale("log", base=2)
    steps = np.arange(1.0, 21.0)
    values = np.outer([0.8, 0.9, 1.0, 1.1, 1.2], np.where(steps == 1, 1e6, 3.0 + 0.01 * steps))
    axes.plot(steps, values[2])
    _look_past_the_start(axes, steps, values, logarithmic)
    low, high = axes.get_ylim()
    assert 0.5 < low < values[:, 1:].min()
    assert values[:, 1:].max() < high < 10
    _look_past_the_start(axes, steps[:1], values[:, :1], logarithmic)
    assert axes.get_ylim()[1] > 1e6, "of one step there is no other"


def test_a_fan_has_the_quantiles_of_each_step(tmp_path: Path) -> None:
    found = SlotSteps.of(make_run(tmp_path / "r", 20))
    assert found is not None
    gathered = gather(found)
    assert gathered.steps.tolist() == list(range(1, 21))
    weights = np.sort(amaxes(7)[1::3])
    oracle = [weights[round(rank * (LAYERS - 1))] for rank in RANKS]
    assert gathered.fans["weight", "amax"][:, 6].tolist() == oracle
    assert np.isnan(gathered.fans["weight", "sqnr_db"]).all(), "never measured"


def test_many_steps_are_joined_without_losing_an_extreme(tmp_path: Path) -> None:
    steps = 2 * MAX_COLUMNS + 1
    found = SlotSteps.of(make_run(tmp_path / "r", steps))
    assert found is not None
    gathered = gather(found)
    assert len(gathered.steps) <= MAX_COLUMNS
    largest = max(float(amaxes(step)[0::3].max()) for step in range(1, steps + 1))
    assert np.nanmax(gathered.fans["input", "amax"]) == largest


def test_exponents_are_counted_before_and_after_scaling(tmp_path: Path) -> None:
    found = SlotSteps.of(make_run(tmp_path / "r", 30))
    assert found is not None
    gathered = gather(found)
    every = np.concatenate([amaxes(step)[2::3] for step in range(1, 31)])
    small = int((every < 2).sum())
    for scaled, shift in ((False, 0), (True, 6)):
        counts = gathered.exponents["grad_output", scaled]
        assert counts[shift - LOWEST : shift - LOWEST + 2].tolist() == [small, len(every) - small]
        assert counts.sum() == len(every)


@pytest.mark.slow
def test_the_report_has_a_picture_for_what_there_is(tmp_path: Path) -> None:
    plain = [path.name for path in write(make_run(tmp_path / "plain", 20))]
    assert {"fp8_saturation.png", "fp8_fan.png", "fp8_exponents.png"} <= set(plain)
    assert "loss_scale.png" not in plain, "there never was a loss scale"
    run = make_run(tmp_path / "fp16", 20, overflow_at=9, scaled=True)
    assert "loss_scale.png" in [path.name for path in write(run)]
    kept = content_of(run / "report.html")["pictures"]
    assert len(kept) == 2, "charts of the page stand for the others"
    assert all(each["source"].startswith("data:image/png;base64,iVBOR") for each in kept)


@pytest.mark.nightly
def test_overflows_are_marked_on_the_loss_scale(tmp_path: Path) -> None:
    def red(folder: Path, at: int, norm: float = math.inf) -> int:
        run = make_run(folder, 20, overflow_at=at, scaled=True, norm_there=norm)
        made = pictures(RunHistory.read(run), run / "plots")
        picture = np.asarray(imread(made[-1]))[:, :, :3]
        assert math.isclose(float(picture.max()), 1.0)
        return int(
            ((picture[:, :, 0] > 0.6) & (picture[:, :, 1] < 0.3) & (picture[:, :, 2] < 0.3)).sum()
        )

    assert red(tmp_path / "none", 0) == 0
    assert red(tmp_path / "one", 9) > 0
    assert red(tmp_path / "nan", 9, math.nan) > 0
    assert red(tmp_path / "over a limit", 9, 50.0) == 0, "skipped for another reason"
