"""The picture in the README shows what its runs did, and its runs do what the README says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from benchmarks.demotion import CASE, LOOKS, look, main, picture, table
from harness.tracking.journal import encode

LOSS = {"bf16": 2.0, "plain": 3.0, "fallback": 2.01}


def result(seed: int, demoted_at: int | None) -> dict[str, Any]:
    """A study's figures: 40 steps, losses constant, underflow sampled every 10 steps and growing."""
    runs = {
        kind: {
            "val_loss": loss,
            "switches": [],
            "verdicts": [],
            "loss": [(step, loss + seed) for step in range(1, 41)],
            "underflow": [(step, step / 40) for step in range(10, 41, 10)],
        }
        for kind, loss in LOSS.items()
    }
    if demoted_at:
        runs["fallback"]["switches"] = [{"step": demoted_at, "demote": [CASE.layer], "promote": []}]
    return {"seed": seed, "runs": runs, "guard": {"step": 33, "reason": "halted"}}


def test_a_journal_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    rows = [
        {
            "kind": "metrics",
            "step": 1,
            "metrics": {"train/loss": 5.0, f"fp8_underflow/{CASE.guilty}": math.nan},
        },
        {
            "kind": "metrics",
            "step": 2,
            "metrics": {"train/loss": 4.0, f"fp8_underflow/{CASE.guilty}": 0.5},
        },
        {
            "kind": "event",
            "step": 3,
            "code": "precision.switched",
            "demote": [CASE.layer],
            "promote": [],
        },
        {"kind": "metrics", "step": 4, "metrics": {"val/loss": 3.0}},
    ]
    (tmp_path / "journal.jsonl").write_bytes(
        b"".join(encode({**row, "attempt": 1}) for row in rows)
    )
    (tmp_path / "outcome.json").write_text(json.dumps({"val_loss": 3.0}))
    found = look(tmp_path)
    assert found["loss"] == [(1, 5.0), (2, 4.0)]
    assert found["underflow"] == [(2, 0.5)]
    assert found["switches"] == [{"step": 3, "demote": [CASE.layer], "promote": []}]


def points(axes: Axes, name: str) -> dict[float, float]:
    """Value by step of the line with that name in the legend."""
    (line,) = (line for line in axes.get_lines() if line.get_label() == name)
    return dict(np.asarray(line.get_xydata()).tolist())


def marks(axes: Axes) -> list[float]:
    """Steps of the vertical lines."""
    ends = [np.asarray(line.get_xdata()).tolist() for line in axes.get_lines()]
    return [each[0] for each in ends if len(each) == 2 and each[0] == each[1]]


def test_the_picture_has_each_run_its_mean_and_the_step_of_the_demotion() -> None:
    above, below = picture([result(0, 20), result(2, 20)]).axes
    for kind, (_, _, name) in LOOKS.items():
        mean = dict.fromkeys(range(1, 41), LOSS[kind] + 1)
        assert points(above, name) == pytest.approx(mean), "of seeds 0 and 2"
    assert "step 20" in above.texts[0].get_text()
    assert marks(above) == marks(below) == [20]
    assert points(below, LOOKS["plain"][2]) == pytest.approx(
        {step: step / 40 for step in range(10, 41)}
    )
    used = {step: step / 40 for step in range(10, 21)}
    assert points(below, LOOKS["fallback"][2]) == pytest.approx(used), (
        "then FP8's values are not used"
    )


def test_seeds_that_sample_other_steps_have_a_mean_too() -> None:
    results = [result(0, 20), result(2, 25)]
    results[1]["runs"]["plain"]["underflow"] = [(step, step / 20) for step in range(7, 40, 10)]
    above, below = picture(results).axes
    mean = points(below, LOOKS["plain"][2])
    assert mean == pytest.approx({step: 1.5 * step / 40 for step in range(10, 38)}), (
        "where both have values"
    )
    assert "step 20 or 25" in above.texts[0].get_text()


def test_a_run_without_a_demotion_gets_no_mark() -> None:
    above, below = picture([result(0, None)]).axes
    assert not above.texts
    assert marks(above) == marks(below) == []
    assert points(below, LOOKS["fallback"][2]) == pytest.approx(
        {step: step / 40 for step in range(10, 41)}
    )


def test_a_line_of_the_table_has_the_differences_and_both_steps() -> None:
    line = table([result(1, 20)]).splitlines()[-1]
    for figure in ("+50.00%", "+0.50%", f"{CASE.layer}, 20", "33"):
        assert figure in line


@pytest.mark.nightly
def test_one_layer_leaves_fp8_and_that_saves_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, drawn = tmp_path / "demotion.json", tmp_path / "demotion.png"
    main(["--seeds", "0", "--out", str(out), "--picture", str(drawn)])
    (found,) = json.loads(out.read_text())["results"]
    bf16, plain, fallback = (
        found["runs"][kind]["val_loss"] for kind in ("bf16", "plain", "fallback")
    )
    assert plain > 1.1 * bf16, "the fault fired"
    assert fallback == pytest.approx(bf16, rel=0.01)
    assert [switch["demote"] for switch in found["runs"]["fallback"]["switches"]] == [[CASE.layer]]
    (switch,) = found["runs"]["fallback"]["switches"]
    assert switch["step"] < found["guard"]["step"] < 250, "the guard alone ends the run, and later"
    assert f"{CASE.layer}, {switch['step']}" in capsys.readouterr().out
    assert imread(drawn).shape[:2] == (1080, 1600)
