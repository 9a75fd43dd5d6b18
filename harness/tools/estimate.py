"""`harness estimate`: predict what a config and a recipe take on cards that this machine does not have.

Its arguments, and JSON. The text for people is in estimate_text.py.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import Annotated, Any

import typer

from harness.core.config import RunConfig
from harness.core.errors import ConfigError, Problem
from harness.core.screen import say
from harness.estimate.offers import Offer, read_offers
from harness.precision.recipe import Recipe
from harness.tools.start import Calibration, ConfigName, Overrides, RecipeName, read_policies

_CARD = "H100"


def command(
    overrides: Overrides = None,
    card: Annotated[
        list[str] | None,
        typer.Option(
            help=f"card to estimate for, such as {_CARD}; several: one table [default: {_CARD}]"
        ),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CARD=PRICE", help="what such a card costs for an hour, in your currency"
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="also print each card's plan, layer by layer")
    ] = False,
    recipe: RecipeName = None,
    config: ConfigName = "quickstart",
    ranks: Annotated[
        int, typer.Option(min=1, help="processes that share the global batch, a card each")
    ] = 1,
    calibration: Calibration = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> int:
    # Report the problems of config, recipe, cards, prices and calibration together.
    problems: list[Problem] = []
    asked = offers = None
    try:
        asked = read_policies(config, overrides, recipe)
    except ConfigError as error:
        problems += error.problems
    try:
        offers = read_offers(card or [_CARD], price or [], calibration)
    except ConfigError as error:
        problems += error.problems
    if asked is None or offers is None:
        raise ConfigError(problems)

    from harness.estimate import device

    device.load()  # before anything imports torch
    return estimate(*asked, offers, ranks, as_json, plan)


def estimate(
    config: RunConfig,
    recipe: Recipe,
    offers: list[Offer],
    ranks: int,
    as_json: bool,
    with_plan: bool,
) -> int:
    """Predict and print; returns 0 whether it fits or not. Raises as `comparison.compare` does."""
    from rich.console import Console

    from harness.estimate.comparison import compare, entries
    from harness.tools.estimate_text import show_estimates

    # What the model prints as it is built and run is not part of the answer.
    with redirect_stdout(sys.stderr):
        found = compare(config, recipe, offers, ranks, _progress)
    if as_json:
        print(json.dumps(_as_dict(entries(found, with_plan)), indent=2, allow_nan=False))
    else:
        show_estimates(found, with_plan, Console())
    return 0


def _progress(text: str) -> None:
    """A line on stderr: a step of a large model takes some ten seconds to trace."""
    say(f"estimate: {text}", sys.stderr)


def _as_dict(cards: list[dict[str, Any]]) -> dict[str, Any]:
    """The output of `--json`. The top level also has a single card's entry, under torch's name of the card."""
    if len(cards) > 1:
        return {"cards": cards}
    return {**cards[0], "card": cards[0]["device"], "cards": cards}
