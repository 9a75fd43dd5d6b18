from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.core.facts import (
    BAD_LABEL,
    NO_LABEL,
    NON_FINITE_INPUT,
    Continue,
    Halt,
    StepFacts,
    Window,
)
from harness.core.protocols import Batch
from harness.monitors.base import BadData
from harness.monitors.data import DataMonitor

MakeFacts = Callable[..., StepFacts]


class Source:
    """Windows of four samples in two micro-batches: sample n of window w is 10 * w + n. damage: what is wrong."""

    name = "made up"
    tokens_per_sample = 3
    masked, unit = False, "nats per byte"

    def __init__(self, damage: Callable[[Tensor, Tensor, Tensor], None] = lambda *_: None) -> None:
        self.damage = damage
        self.read: list[int] = []

    def window(self, index: int) -> Window:
        self.read.append(index)
        return Window(index, np.arange(4, dtype=np.int64) + 10 * index)

    def micro_batches(self, window: Window, rank: int, world_size: int) -> Sequence[Batch]:
        assert (rank, world_size) == (0, 1), "every rank reads the whole window"
        batches: list[Batch] = []
        for numbers in torch.as_tensor(window.samples).split(2):
            inputs, targets = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64)
            self.damage(numbers, inputs, targets)
            batches.append({"inputs": inputs, "targets": targets})
        return batches

    def validation(self, rank: int, world_size: int) -> Sequence[Batch]:
        raise AssertionError("the monitor reads windows, never the validation set")


def set_label(sample: int, value: int) -> Callable[[Tensor, Tensor, Tensor], None]:
    def damage(numbers: Tensor, inputs: Tensor, targets: Tensor) -> None:
        targets[numbers == sample, 2] = value

    return damage


def set_input(sample: int, value: float) -> Callable[[Tensor, Tensor, Tensor], None]:
    def damage(numbers: Tensor, inputs: Tensor, targets: Tensor) -> None:
        inputs[numbers == sample, 1] = value

    return damage


def no_labels(numbers: Tensor, inputs: Tensor, targets: Tensor) -> None:
    if 52 in numbers:
        targets[:] = -100


def bad(make_facts: MakeFacts, bits: int, **fields: Any) -> StepFacts:
    return make_facts(8, window=5, applied=False, bad_data=bits, **fields)


def test_good_data_is_never_read_again(make_facts: MakeFacts) -> None:
    source = Source()
    monitor = DataMonitor(source, 8, "auto")
    assert {monitor.observe(make_facts(step)).code for step in range(50)} == {"data.ok"}
    assert source.read == []


@pytest.mark.parametrize("value", [8, -2])
def test_a_label_out_of_range_halts_and_names_the_sample(make_facts: MakeFacts, value: int) -> None:
    verdict = DataMonitor(Source(set_label(53, value)), 8, "auto").observe(
        bad(make_facts, BAD_LABEL)
    )
    assert (verdict.code, verdict.healthy, verdict.skip) == ("data.label", False, True)
    assert f"sample 53: label {value} at position 2, not in [0, 8)" in verdict.text
    assert verdict.evidence["samples"] == [53]
    assert isinstance(verdict.proposal, Halt)
    assert "data.bad=skip" in verdict.proposal.reason
    assert "sample 53" in verdict.proposal.reason


def test_an_input_that_is_not_finite_is_skipped_and_named(make_facts: MakeFacts) -> None:
    verdict = DataMonitor(Source(set_input(50, math.inf)), 8, "auto").observe(
        bad(make_facts, NON_FINITE_INPUT)
    )
    assert (verdict.code, verdict.healthy, verdict.proposal, verdict.skip) == (
        "data.nonfinite",
        False,
        Continue(),
        True,
    )
    assert "window 5 of made up: sample 50: input inf at position 1" in verdict.text
    assert verdict.evidence == {
        "window": 5, "samples": [50], "found": ["sample 50: input inf at position 1"], "count": 1,
    }  # fmt: skip


def test_a_micro_batch_without_labels_is_skipped_and_its_samples_named(
    make_facts: MakeFacts,
) -> None:
    verdict = DataMonitor(Source(no_labels), 8, "auto").observe(bad(make_facts, NO_LABEL))
    assert (verdict.code, verdict.proposal, verdict.skip) == ("data.empty", Continue(), True)
    assert "samples 52, 53: no target has a label" in verdict.text


@pytest.mark.parametrize(
    ("policy", "bits", "halts"),
    [
        ("skip", BAD_LABEL, False),
        ("skip", BAD_LABEL | NON_FINITE_INPUT, False),
        ("fail", NON_FINITE_INPUT, True),
        ("fail", NO_LABEL, True),
        ("auto", NO_LABEL | NON_FINITE_INPUT, False),
        ("auto", BAD_LABEL | NON_FINITE_INPUT, True),
    ],
)
def test_the_policy_decides_what_halts(
    make_facts: MakeFacts, policy: BadData, bits: int, halts: bool
) -> None:
    verdict = DataMonitor(Source(), 8, policy).observe(bad(make_facts, bits))
    assert isinstance(verdict.proposal, Halt) == halts
    worst = (
        "data.label"
        if bits & BAD_LABEL
        else "data.nonfinite"
        if bits & NON_FINITE_INPUT
        else "data.empty"
    )
    assert verdict.code == worst


def test_what_is_gone_when_read_again_is_said_to_be(make_facts: MakeFacts) -> None:
    verdict = DataMonitor(Source(), 8, "auto").observe(bad(make_facts, NON_FINITE_INPUT))
    assert "values that are not finite, but not when read again" in verdict.text
    assert verdict.evidence["samples"] == []


def test_many_bad_samples_are_counted(make_facts: MakeFacts) -> None:
    def all_bad(numbers: Tensor, inputs: Tensor, targets: Tensor) -> None:
        inputs[:] = math.nan
        targets[:] = 9

    verdict = DataMonitor(Source(all_bad), 8, "skip").observe(
        bad(make_facts, BAD_LABEL | NON_FINITE_INPUT)
    )
    assert verdict.evidence["count"] == 8
    assert verdict.evidence["samples"] == [50, 51, 52, 53]
    assert "and 5 more" in verdict.text
    assert "sample 50: input nan at position 0 (3 such values)" in verdict.text
