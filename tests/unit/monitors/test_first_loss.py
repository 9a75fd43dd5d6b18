"""The first loss of a language model against ln(vocabulary)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.core.config import DataConfig, FallbackConfig, GuardConfig
from harness.core.facts import StepFacts
from harness.data.batches import TokenBatches
from harness.data.tokens import prepare
from harness.monitors.base import MonitorContext
from harness.monitors.loss import FirstLossMonitor
from tests.support.runs import TEXT

BLIND = math.log(256)
CONTEXT = 32
STEP = StepFacts(1, 0, BLIND, 1.0, 1e-3, 1.0, True, 1, 4096, 0.1)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> TokenBatches:
    config = DataConfig(path=str(TEXT), context=CONTEXT, val_samples=4)
    return TokenBatches(prepare(config, tmp_path_factory.mktemp("run")), 0, CONTEXT, 2, 2, 4)


def watching(data: Any, vocab_size: int | None = None) -> FirstLossMonitor | None:
    return FirstLossMonitor.build(
        MonitorContext(GuardConfig(), FallbackConfig(), data=data, vocab_size=vocab_size)
    )


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (BLIND, ""),
        (1.4 * BLIND, ""),
        (0.35 * BLIND, ""),
        (math.nan, ""),
        (math.inf, ""),
        (1.6 * BLIND, "logits are far too large"),
        (CONTEXT * BLIND, f"the sum over the {CONTEXT} tokens"),
        (2 * CONTEXT * BLIND, f"the sum over the {CONTEXT} tokens"),
        (0.2 * BLIND, "not shifted by one"),
    ],
)
def test_a_first_loss_far_from_blind_guessing_is_told(
    batches: TokenBatches, loss: float, told: str
) -> None:
    monitor = watching(batches)
    assert monitor is not None
    verdict = monitor.observe(replace(STEP, loss=loss))
    assert verdict.healthy
    assert verdict.ok is not bool(told)
    assert told in verdict.text
    if told:
        assert f"{loss / BLIND:.3g} times ln(256) = 5.545" in verdict.text
    assert monitor.observe(replace(STEP, step=2, loss=loss)).ok, (
        "later steps have a past of their own"
    )


def test_the_models_own_vocabulary_counts(batches: TokenBatches) -> None:
    monitor = watching(batches, vocab_size=1_000_000)
    assert monitor is not None
    assert monitor.observe(replace(STEP, loss=math.log(1_000_000))).ok
    assert not monitor.observe(replace(STEP, loss=0.2 * math.log(1_000_000))).ok


def test_only_runs_on_tokens_are_watched() -> None:
    class Own:
        """A data set of one's own; ids, vocab: nothing is known of token ids."""

        name, tokens_per_sample, masked, ids, vocab = "own", 16, False, 0, 256

        def __init__(self, unit: str) -> None:
            self.unit = unit

    assert watching(None, 256) is None
    assert watching(Own("loss"), 256) is None
    assert watching(Own("nats per label"), 256) is None
    assert watching(Own("nats per token")) is None, "of an unknown vocabulary"
    assert watching(Own("nats per token"), 256) is not None


def test_an_untrained_gpt_says_nothing_and_a_summed_loss_does(batches: TokenBatches) -> None:
    from harness.models.gpt import build

    torch.manual_seed(0)
    model = build(dim=64, layers=2, heads=2, ffn=96)
    batch = batches.micro_batches(batches.window(0), 0, 1)[0]
    loss = model(batch["inputs"], batch["targets"]).item()
    monitor = watching(batches, model.vocab_size)
    assert monitor is not None
    assert monitor.observe(replace(STEP, loss=loss)).ok
    assert monitor.observe(replace(STEP, loss=loss * batch["targets"].numel())).code == "loss.first"
