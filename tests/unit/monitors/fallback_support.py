"""Step facts and the loop's order of things, for tests of the fallback."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from harness.core.facts import ROLES, SlotStats, StepFacts, Switch
from harness.monitors.fallback import FallbackController

LAYERS = tuple(f"blocks.{index:02d}.mlp.down" for index in range(6))
NAMES = tuple(f"{layer}.{role}" for layer in LAYERS for role in ROLES)
Trace = Callable[[int, tuple[str, ...]], StepFacts]


def make_facts(
    step: int,
    saturation: Mapping[str, float] | None = None,
    underflow: Mapping[str, float] | None = None,
    demoted: tuple[str, ...] = (),
    applied: bool = True,
    applied_steps: int | None = None,
    **statistics: Mapping[str, float],
) -> StepFacts:
    """Slots are at ratio and amax 0.9 and unsampled unless said otherwise.

    statistics: `amax`, `clipped`, `sqnr_db`, `even_db`, `centred_db`, each by slot; amax follows the ratio by default:
    scales are 1.
    """
    ratios = np.array([(saturation or {}).get(name, 0.9) for name in NAMES], dtype=np.float32)
    flushed = np.array([(underflow or {}).get(name, math.nan) for name in NAMES], dtype=np.float32)
    unsampled = np.full(len(NAMES), np.nan, dtype=np.float32)

    def given(kind: str, usual: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        values = statistics.get(kind, {})
        return np.array(
            [values.get(name, usual[i]) for i, name in enumerate(NAMES)], dtype=np.float32
        )

    amax, clipped, sqnr_db = (
        given("amax", ratios),
        given("clipped", unsampled),
        given("sqnr_db", unsampled),
    )
    even_db, centred_db = given("even_db", unsampled), given("centred_db", unsampled)
    slots = SlotStats(
        NAMES, amax, np.ones_like(ratios), ratios, clipped, flushed, sqnr_db, even_db, centred_db
    )
    count = step + 1 if applied_steps is None else applied_steps
    return StepFacts(
        step, step, 2.0, 1.0, 1e-3, 1.0, applied, count, 4096, 0.1, demoted=demoted, slots=slots
    )


def drive(
    controller: FallbackController, trace: Trace, steps: range, lag: int = 1, refuse: bool = False
) -> list[tuple[int, Switch]]:
    """Run the loop's order of things: a switch decided on step t first acts on step t + 1 + lag."""
    demoted: tuple[str, ...] = ()
    switches: list[tuple[int, Switch]] = []
    due: deque[Switch | None] = deque([None] * lag)
    for step in steps:
        proposal = controller.observe(trace(step, demoted)).proposal
        due.append(proposal if isinstance(proposal, Switch) and not refuse else None)
        if isinstance(proposal, Switch):
            switches.append((step, proposal))
        acting = due.popleft()
        if acting is not None:
            demoted = tuple(
                layer for layer in LAYERS if layer in {*demoted, *acting.demote} - {*acting.promote}
            )
    return switches


def over(slot: str) -> Trace:
    return lambda step, demoted: make_facts(step, {slot: 100.0}, demoted=demoted)
