"""Which rung of a recipe's ladder is taken: what each machine can do with each rung, and what all of them can do.

Pure functions, torch-free; `harness.precision.ranks` brings the ranks' answers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from harness.capability.tier import can_run, tier_of
from harness.core.facts import RungVerdict
from harness.precision.recipe import Recipe, Rung

if TYPE_CHECKING:
    from harness.capability.probe import MachineFacts


class Judgement(NamedTuple):
    """One machine on one rung. able: hardware and libraries can. listed: the recipe names its tier. reason: of both."""

    able: bool
    listed: bool
    reason: str

    @property
    def takes(self) -> bool:
        """Alone this machine may take the rung."""
        return self.able and self.listed


def judge(recipe: Recipe, facts: MachineFacts) -> list[Judgement]:
    """This machine on every rung of `recipe`, in the ladder's order."""
    tier, _ = tier_of(facts)
    judged: list[Judgement] = []
    for rung in recipe.ladder:
        able, reason = can_run(rung.backend, rung.precision, facts, tier, recipe.fp8.scaling)
        listed = tier.name in rung.tiers
        if not listed:
            reason = f"not for tier {tier.name} (for {', '.join(rung.tiers)})"
        judged.append(Judgement(able, listed, reason))
    return judged


def first_taken(judged: Sequence[Judgement]) -> int | None:
    """Index of the rung that one machine takes alone, None if it can take none."""
    return next((index for index, judgement in enumerate(judged) if judgement.takes), None)


def common_rung(able: Sequence[Sequence[bool]], listed: Sequence[Sequence[bool]]) -> int | None:
    """Index of the rung that several machines take together; [rank][rung] each.

    The weakest decide: the ranks whose own first rung is furthest down the ladder. It is the first rung that they take
    by the recipe and that every other rank is able to run, whether or not the recipe lists its tier: on an H100 beside
    a T4 the T4's fp16 is right, though no recipe would give fp16 to an H100. None if there is none.
    """
    takes = [[a and b for a, b in zip(*rows, strict=True)] for rows in zip(able, listed, strict=True)]
    if not all(map(any, takes)):
        return None
    firsts = [row.index(True) for row in takes]
    weakest = [row for row, first in zip(takes, firsts, strict=True) if first == max(firsts)]
    return next((index for index in range(len(takes[0])) if all(row[index] for row in (*able, *weakest))), None)


def verdicts(ladder: Sequence[Rung], judged: Sequence[Judgement], chosen: int | None) -> list[RungVerdict]:
    """What this machine has to say to every rung, once rung `chosen` (None: none) is taken by all ranks."""
    own = first_taken(judged)
    told: list[RungVerdict] = []
    for index, (rung, judgement) in enumerate(zip(ladder, judged, strict=True)):
        reason = judgement.reason
        if index == chosen and index != own:
            reason = "the best that every rank can take"
        elif chosen is not None and index < chosen and judgement.takes:
            reason = "another rank cannot take it"
        elif chosen is not None and index > chosen and judgement.listed:
            reason = f"not needed: {ladder[chosen].name} runs"
        told.append(RungVerdict(rung.name, index == chosen, reason))
    return told
