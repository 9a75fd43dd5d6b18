"""Estimates one run on several cards: its precision on each, whether it fits, and its cost in hours and money."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness.capability.cards import GIB
from harness.core.config import RunConfig
from harness.core.errors import HarnessError, Problem
from harness.estimate.fitting import Way, ways_to_fit
from harness.estimate.offers import Offer
from harness.estimate.prediction import Prediction, Timing, Traces, predict
from harness.precision.recipe import Recipe


@dataclass(frozen=True, slots=True)
class CardEstimate:
    """The prediction for one offer.

    offer: the card, and its price.
    made: the prediction; None where the run cannot be trained on this card.
    ways: changes that would make the run fit, if it does not.
    problems: why the run cannot be trained on this card.
    """

    offer: Offer
    made: Prediction | None
    ways: tuple[Way, ...] = ()
    problems: tuple[Problem, ...] = ()

    def cost(self, hours: float, ranks: int) -> float | None:
        """Money for `hours` on `ranks` such cards; None without a price."""
        price = self.offer.price
        return None if price is None else hours * ranks * price

    def as_dict(self, with_plan: bool) -> dict[str, Any]:
        """The card's entry in `cards` of `--json`: that of `Prediction.as_dict`, with price, hours and cost.

        with_plan: also the content of plan.json.
        For a card that cannot train the run there are no figures; `entries` adds them as null.
        """
        # The name as it was asked for, and that of the datasheet.
        named: dict[str, Any] = {"card": self.offer.name, "device": self.offer.card.name}
        price = {"price_per_hour": self.offer.price}
        if self.made is None:
            problems = [str(problem) for problem in self.problems]
            nothing = {"fits": False, "layers": {}, "would_fit": []}
            return {**named, **nothing, **price, "problems": problems}

        made = self.made
        cost = self.cost(made.hours, made.ranks)
        found = {
            **made.as_dict(),
            **named,
            "resolved": made.plan.resolved,
            "layers": made.layers,
            "tokens_per_second": tokens_per_second(made, made.timing),
            "bottleneck": made.timing.bottleneck,
            "steps": made.steps,
            "hours": round(made.hours, 6),
            **price,
            "cost": None if cost is None else round(cost, 6),
            "would_fit": [self._way_as_dict(made, way) for way in self.ways],
            "problems": [],
        }
        if with_plan:
            found["plan"] = made.plan.as_dict()
        return found

    def _way_as_dict(self, made: Prediction, way: Way) -> dict[str, Any]:
        hours = made.hours_of(way.timing)
        cost = self.cost(hours, way.ranks)
        return {
            "overrides": list(way.overrides),
            "ranks": way.ranks,
            "peak_gib": round(way.trace.peak / GIB, 3),
            "needed_gib": round(way.needed / GIB, 3),
            "tokens_per_second": tokens_per_second(made, way.timing),
            "hours": round(hours, 6),
            "cost": None if cost is None else round(cost, 6),
            "another_training": way.retrains,
        }


def entries(found: Sequence[CardEstimate], with_plan: bool) -> list[dict[str, Any]]:
    """`cards` of `--json`: an entry for each card, all with the same keys.

    found: as `compare` returns it, so at least one card can train the run.
    """
    cards = [each.as_dict(with_plan) for each in found]

    # A card that cannot train the run lacks the figures of the others: it gets their keys with null.
    nulls: dict[str, None] = {}
    for card in cards:
        nulls |= dict.fromkeys(card)
    return [{**nulls, **card} for card in cards]


def tokens_per_second(made: Prediction, timing: Timing) -> int | None:
    """Tokens a second over all ranks, for steps of this timing; None for data whose samples have no tokens."""
    return round(made.tokens / timing.mean) if made.counted == "tokens" else None


def compare(
    config: RunConfig,
    recipe: Recipe,
    offers: Sequence[Offer],
    ranks: int,
    say: Callable[[str], None],
) -> list[CardEstimate]:
    """An estimate for each offer, in their order. A card that cannot train the run has its reasons instead.

    ranks: processes that share the global batch, each on a card of its own.
    say: called with a line before each trace.
    If no card can train the run, raises an error of the first card's type with the problems of all.
    """
    traces = Traces()
    found: list[CardEstimate] = []
    errors: list[HarnessError] = []
    for offer in offers:
        say(f"{offer.name}: a training step on fake tensors")
        try:
            made = predict(config, recipe, offer.card, offer.calibration, ranks, traces)
        except HarnessError as error:
            errors.append(error)
            found.append(CardEstimate(offer, None, problems=error.problems))
            continue
        ways = ways_to_fit(config, recipe, made, traces, partial(_said_of, offer.name, say))
        found.append(CardEstimate(offer, made, ways))

    # A problem of the model or the config is the same on every card, and is listed once.
    if len(errors) == len(offers):
        problems = dict.fromkeys(problem for error in errors for problem in error.problems)
        raise type(errors[0])(list(problems)) from errors[0]
    return found


def _said_of(name: str, say: Callable[[str], None], text: str) -> None:
    """Print `text` with the card's name before it."""
    say(f"{name}: {text}")
