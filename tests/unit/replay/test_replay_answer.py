"""From what a replay saw to its cause: a pure decision."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.core.facts import BAD_LABEL, Limits, SlotStats, StepFacts
from harness.replay.answer import Answer, LayerHistory, Sample, growth, lines, plain
from harness.replay.flight import Difference
from harness.replay.origin import Finding

WELL = StepFacts(
    step=8, window=7, loss=2.0, grad_norm=1.0, lr=1e-3, loss_scale=1.0, applied=True, applied_steps=8, tokens=4,
    seconds=0.1,
)  # fmt: skip
BROKEN = replace(WELL, loss=math.nan, grad_norm=math.nan, applied=False)
OVER = replace(WELL, grad_norm=50.0, limits=Limits(norm=5.0), applied=False)
FINDING = Finding(
    "blocks.1.mlp", "FeedForward", "forward", "output", (2, 3), "float16", 0, 6, 6, (0, 1)
)
OTHER = Difference(7, "train/loss", 2.0, 2.5)


def answer(here: StepFacts, **changes: Any) -> Answer:
    values: dict[str, Any] = {
        "run": "runs/r", "step": 8, "base": 5, "attempt": 1, "window": 7, "codes": [], "was_bad": True, "here": here,
        "again": here, "in_float32": WELL, "loss_before": 2.1, "journal_loss": here.loss, "difference": None,
        "setup_differences": [], "finding": None, "finding_in_float32": None, "gradients": [], "hunted": [],
        "samples": [], "window_size": 4, "ranks": 1, "precision": "autocast:fp16",
    }  # fmt: skip
    return Answer(**{**values, **changes})


SPIKE = {"codes": ["loss.spike"], "journal_loss": 40.0}
# From a loss of -90 to one of -10.
RISE = {"codes": ["loss.spike"], "journal_loss": -10.0, "loss_before": -90.0}
LOW, RISEN = replace(WELL, loss=-90.0), replace(WELL, loss=-10.0)


@pytest.mark.parametrize(
    ("cause", "given"),
    [
        ("numerics", answer(BROKEN)),
        ("numerics", answer(OVER)),
        ("model or data", answer(BROKEN, in_float32=BROKEN)),
        ("model or data", answer(OVER, in_float32=replace(OVER, grad_norm=6.0))),
        ("numerics", answer(OVER, in_float32=replace(OVER, grad_norm=4.0))),
        ("data", answer(replace(WELL, bad_data=BAD_LABEL), in_float32=None)),
        ("sound", answer(WELL, was_bad=False)),
        ("not reproducible", answer(WELL)),
        ("not reproducible", answer(BROKEN, again=WELL)),
        ("not reproducible", answer(OVER, again=replace(OVER, grad_norm=50.00001))),
        ("not reproducible", answer(BROKEN, difference=OTHER)),
        ("numerics", answer(BROKEN, difference=OTHER, setup_differences=["the run had 2 ranks"])),
        ("numerics", answer(BROKEN, again=None)),
        (
            "model or data",
            answer(replace(WELL, loss=40.0), in_float32=replace(WELL, loss=39.0), **SPIKE),
        ),
        ("numerics", answer(replace(WELL, loss=40.0), **SPIKE)),
        ("not reproducible", answer(WELL, **SPIKE)),
        # Losses below zero, such as log-likelihoods, have no geometric mean.
        ("numerics", answer(replace(WELL, loss=40.0), **(SPIKE | {"loss_before": -2.0}))),
        ("not reproducible", answer(WELL, **(SPIKE | {"loss_before": -2.0}))),
        ("numerics", answer(RISEN, in_float32=LOW, **RISE)),
        ("not reproducible", answer(LOW, **RISE)),
        ("numerics", answer(RISEN, in_float32=LOW, **(RISE | {"loss_before": None}))),
        ("not reproducible", answer(LOW, **(RISE | {"loss_before": None}))),
    ],
)
def test_cause(cause: str, given: Answer) -> None:
    assert given.cause == cause
    shown = lines(given)
    assert any(line.startswith(f"verdict: {cause}: ") for line in shown)
    assert (given.advice == "") == (cause == "sound")
    assert given.advice == "" or shown[-1] == f"what to do: {given.advice}"


def sample(number: int, loss: float) -> Sample:
    return Sample(number, 0, 1, number * 64, "text", loss, 1.0, 0)


def test_what_is_shown_names_module_tensor_and_samples() -> None:
    text = "\n".join(
        lines(answer(BROKEN, finding=FINDING, samples=[sample(3, math.nan), sample(4, 2.0)]))
    )
    assert (
        "forward, module blocks.1.mlp (FeedForward), output: 0 NaN and 6 Inf of 6 elements (2x3, float16)"
        in text
    )
    assert (
        "1 of 4 are bad alone:\n  sample 3 (rank 0, micro-batch 1, training token 192 on)" in text
    )
    assert "sample 4" not in text
    assert "layers.keep_fp32" in text
    spike = answer(replace(WELL, loss=40.0), samples=[sample(3, 2.0), sample(4, 90.0)], **SPIKE)
    text = "\n".join(lines(spike))
    assert text.index("sample 4 ") < text.index("sample 3 "), "largest loss first"


def test_samples_that_are_not_shown_are_counted() -> None:
    shown = lines(answer(BROKEN, samples=[sample(each, math.nan) for each in range(12)]))
    assert sum(line.startswith("  sample ") for line in shown) == 8
    assert "  and 4 more: replay.json lists them" in shown


def test_gradients_are_unscaled_and_the_fastest_grown_come_first() -> None:
    now = {"a": (8.0, 4.0, 0), "b": (20.0, 10.0, 0), "c": (math.nan, math.inf, 7)}
    found = growth(now, {"a": (1.0, 1.0, 0), "b": (40.0, 1.0, 0)}, scale=2.0, scale_before=4.0)
    assert [(each.parameter, each.norm, each.largest, each.growth) for each in found[:2]] == [
        ("a", 4.0, 2.0, 16.0),
        ("b", 10.0, 5.0, 1.0),
    ]
    assert (found[2].parameter, found[2].bad) == ("c", 7)


def test_the_report_is_strict_json_without_slots() -> None:
    row = np.zeros(1, np.float32)
    slots = SlotStats(("a.input",), row, row, row, row, row, row)
    given = answer(replace(BROKEN, slots=slots), finding=FINDING, samples=[sample(3, math.inf)])
    text = json.dumps(plain(given), allow_nan=False)
    assert '"slots"' not in text
    assert json.loads(text)["here"]["loss"] == "nan"
    assert json.loads(text)["samples"][0]["bad"] is True


def test_the_norms_that_a_hunt_measured_are_listed() -> None:
    of_a_hunt = [LayerHistory("blocks.01.up", {7: 0.25, 8: 4e4})]
    text = "\n".join(lines(answer(OVER, hunted=of_a_hunt)))
    assert "blocks.01.up: 0.25 at step 7, 4e+04 at step 8" in text
    assert json.loads(json.dumps(plain(answer(OVER, hunted=of_a_hunt))))["hunted"]
    assert "guard.hunt" not in "\n".join(lines(answer(OVER)))
