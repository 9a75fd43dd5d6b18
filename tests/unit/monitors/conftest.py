"""Facts of an uneventful step, to be changed where a test needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.core.facts import StepFacts

MakeFacts = Callable[..., StepFacts]


@pytest.fixture
def make_facts() -> MakeFacts:
    """`make_facts(step, **fields)`: applied, finite, window 1000 + step unless said otherwise."""

    def make(step: int, **fields: Any) -> StepFacts:
        usual = StepFacts(
            step=step,
            window=1000 + step,
            loss=2.0,
            grad_norm=1.0,
            lr=1e-3,
            loss_scale=1.0,
            applied=True,
            applied_steps=step + 1,
            tokens=4096,
            seconds=0.1,
        )
        return replace(usual, **fields)

    return make
