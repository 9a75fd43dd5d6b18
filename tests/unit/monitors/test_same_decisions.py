"""The same facts lead to the same samples and switches, whenever they are judged, and through resumes and rollbacks.

Which loop it is does not matter, as both ask the same judge; that they bring it the same facts is for
tests/dist/test_one_update.py to say.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from fallback_support import LAYERS, NAMES, make_facts
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.config import FallbackConfig, GuardConfig
from harness.core.facts import StepFacts
from harness.core.state import TrainState
from harness.monitors.fallback import FallbackController
from harness.monitors.registry import MonitorsPart
from harness.monitors.responder import Judge

STEPS, EVERY = 90, 7
POLICY = FallbackConfig(dwell_steps=6, hits=2, window=5)


class Switched:
    """What a backend has of switches: its layers, and which of them are in BF16."""

    def __init__(self) -> None:
        self.demoted: tuple[str, ...] = ()
        self.fell_back_to = ""

    def switch(self, demote: Sequence[str], promote: Sequence[str]) -> None:
        now = {*self.demoted, *demote} - {*promote}
        self.demoted = tuple(layer for layer in LAYERS if layer in now)

    def fall_back(self, precision: str) -> None:
        self.fell_back_to = precision
        self.demoted = LAYERS

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"demoted": list(self.demoted), "fell": self.fell_back_to}

    def load_state_dict(self, tensors: dict[str, Any], meta: dict[str, Any]) -> None:
        self.demoted, self.fell_back_to = tuple(meta["demoted"]), meta["fell"]


@dataclass
class Loop:
    """A run of which nothing is there but its facts; seed: of them."""

    seed: int
    told: dict[int, tuple[bool, tuple[str, ...], str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self, saved: str = "") -> None:
        """A process: new, or from what was saved."""
        self.backend, self.pending = Switched(), list[StepFacts]()
        monitors = [FallbackController(POLICY, LAYERS)]
        parts = {"fp8": self.backend, "monitors": MonitorsPart(monitors)}
        self.state = TrainState(parts)  # pyright: ignore[reportArgumentType]
        self.judge = Judge(GuardConfig(), self.state, self.backend, monitors, seed=3)  # pyright: ignore[reportArgumentType]
        if saved:
            self.state.load_state_dict({}, json.loads(saved))

    def save(self) -> str:
        """All that is on its way is judged first, as before a checkpoint."""
        self.catch_up(0)
        return json.dumps(self.state.state_dict()[1], allow_nan=False)

    def step(self) -> None:
        number = self.state.step + 1
        sampled = self.judge.samples(EVERY)
        self.told[number] = sampled, self.backend.demoted, self.backend.fell_back_to
        self.pending.append(
            facts(self.seed, number, sampled, self.backend.demoted, self.backend.fell_back_to)
        )
        self.state.advance()
        self.catch_up(1)

    def catch_up(self, lag: int) -> None:
        """Judge all but the last `lag` steps, and carry out what is due."""
        while len(self.pending) > lag:
            self.judge.observe(self.pending.pop(0))
        self.judge.switch_due()


def facts(seed: int, step: int, sampled: bool, demoted: tuple[str, ...], fell: str) -> StepFacts:
    """A function of its arguments: some slots go over, under or lose values for a while, some steps are skipped."""
    usual = np.random.default_rng([seed, step])
    bad = np.random.default_rng([seed, step // 5]).random(len(NAMES)) < 0.02
    size = 2.0 ** usual.uniform(0.1, 8, len(NAMES))
    kind = usual.integers(0, 4, len(NAMES))
    ratios = {
        n: 8.0 * float(size[i]) if bad[i] and kind[i] == 0 else 0.9 for i, n in enumerate(NAMES)
    }
    ratios |= {n: math.inf for i, n in enumerate(NAMES) if bad[i] and kind[i] == 1}
    flushed = (
        {n: 0.95 if bad[i] and kind[i] == 2 else 0.01 for i, n in enumerate(NAMES)}
        if sampled
        else None
    )
    even = (
        {n: 1.0 if bad[i] and kind[i] == 3 else 30.0 for i, n in enumerate(NAMES)}
        if sampled
        else {}
    )
    made = make_facts(step, ratios, flushed, demoted, bool(usual.random() < 0.9), even_db=even)
    return replace(made, fell_back_to=fell)


def straight(seed: int) -> Loop:
    loop = Loop(seed)
    for _ in range(STEPS):
        loop.step()
    return loop


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_resumes_rollbacks_and_early_judgement_change_no_decision(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    events = data.draw(
        st.dictionaries(
            st.integers(1, STEPS - 1), st.sampled_from(["resume", "early", "back"]), max_size=12
        )
    )
    expected, loop = straight(seed), Loop(seed)
    saved = ""
    while loop.state.step < STEPS:
        loop.step()
        event = events.pop(loop.state.step, "")
        if event == "early":
            loop.catch_up(0)
        elif event == "resume":
            saved = loop.save()
            loop.begin(saved)
        elif event == "back" and saved:
            loop.begin(saved)
    assert loop.told == expected.told


def test_the_facts_of_the_property_lead_to_switches_both_ways() -> None:
    """Else it would say nothing: over some seeds layers leave, return, and steps are sampled densely."""
    seen = [straight(seed) for seed in range(10)]
    away = [len(demoted) for loop in seen for _, demoted, fell in loop.told.values() if not fell]
    assert sum(a < b for a, b in itertools.pairwise(away)) > 10
    assert sum(a > b for a, b in itertools.pairwise(away)) > 10
    dense = sum(sampled for loop in seen for sampled, _, _ in loop.told.values())
    assert 2 * 10 * STEPS / EVERY < dense < 10 * STEPS
