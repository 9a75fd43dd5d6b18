"""Counted FLOPs against closed forms, and what becomes of them: MFU, where the card's peak is known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.capability.cards import CARDS, card_named
from harness.core.facts import StepFacts
from harness.core.metrics import row
from harness.core.state import RunLedger
from harness.models import Task
from harness.models.gpt import build
from harness.models.task import training_flops

T, BATCH, DIM, LAYERS, FFN, VOCAB = 32, 3, 64, 2, 96, 256


def batch() -> dict[str, Tensor]:
    ids = torch.zeros(BATCH, T, dtype=torch.int64)
    return {"inputs": ids, "targets": ids}


def gpt(**more: Any) -> nn.Module:
    return build(dim=DIM, layers=LAYERS, heads=2, ffn=FFN, **more)


def closed_form() -> int:
    """6 N + 12 L H Q T for each token (PaLM, appendix B); N: what multiplies, the output layer among it."""
    matrices = LAYERS * (3 * DIM * DIM + DIM * DIM + 2 * DIM * FFN + FFN * DIM) + DIM * VOCAB
    return BATCH * T * (6 * matrices + 12 * LAYERS * DIM * T)


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformer_has_palms_closed_form(tied: bool) -> None:
    model = gpt(tied=tied)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert training_flops(model, Task(model, "x:y"), batch()) == closed_form()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 16, 10)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.convolution(inputs)))
        return nn.functional.cross_entropy(self.head(hidden.flatten(1)), targets)


def test_convolutions_count_and_buffers_stay() -> None:
    model = Vision()
    images = {"inputs": torch.zeros(5, 3, 4, 4), "targets": torch.zeros(5, dtype=torch.int64)}
    flops = training_flops(model, Task(model, "x:y"), images)
    assert flops == 3 * 2 * 5 * (16 * 8 * 3 * 9 + 8 * 16 * 10)
    assert model.norm.num_batches_tracked == 0


def test_frozen_weights_have_no_weight_gradient() -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    model[0].weight.requires_grad_(False)

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            return self.inner(inputs).mean()

    whole = Mean()
    data = {"inputs": torch.zeros(4, 16), "targets": torch.zeros(4)}
    forward = 2 * 4 * 2 * 16 * 16
    assert training_flops(whole, Task(whole, "x:y"), data) == 2.5 * forward


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.weight * float(inputs.sum().item())).mean()


def test_a_model_that_reads_values_has_none() -> None:
    model = Reading()
    assert math.isnan(training_flops(model, Task(model, "x:y"), batch()))


def test_cards_are_known_by_the_very_name() -> None:
    card = card_named("NVIDIA H100 80GB HBM3")
    assert card is not None
    assert card is CARDS["H100"]
    assert card_named("NVIDIA H100 PCIe") is None
    assert card.peaks() == {"fp8": 1979e12, "bf16": 989e12, "fp16": 989e12, "fp32": 67e12}
    assert card.peaks(tf32=True)["fp32"] == 989e12 / 2
    turing = card_named("Tesla T4")
    assert turing is not None
    assert turing.peaks(tf32=True) == {"fp8": 0.0, "bf16": 0.0, "fp16": 65e12, "fp32": 8.1e12}


@pytest.mark.parametrize(("ideal", "expected"), [(0.025, 0.5), (math.nan, None)])
def test_mfu_is_the_ideal_over_the_steps_time_or_left_out(
    ideal: float, expected: float | None
) -> None:
    facts = StepFacts(1, 0, 2.0, 1.0, 1e-3, 1.0, True, 1, 4096, 0.05, ideal_seconds=ideal)
    found = row(facts, RunLedger())
    assert found.get("train/mfu") == expected
