"""The cards that `harness estimate` compares, and what an hour of each costs. Torch-free.

`read_offers` reads the options --card, --price and --calibration, and reports everything wrong with them at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.capability.cards import Card
from harness.core.errors import ConfigError, Problem
from harness.estimate.roofline import Calibration, find_card, read_calibration, uncalibrated

_WRITE = "write it as --price H100=2.20: the card, and what one costs for an hour"


@dataclass(frozen=True, slots=True)
class Offer:
    """A card that the run could be trained on.

    name: as the user gave it.
    card: its datasheet.
    calibration: its rates.
    price: of one such card for an hour, in the user's own currency; None: not given.
    """

    name: str
    card: Card
    calibration: Calibration
    price: float | None = None


def read_offers(
    names: Sequence[str], prices: Sequence[str], calibration: Path | None
) -> list[Offer]:
    """An offer for each name, in their order.

    names: of cards, see `find_card`.
    prices: such as "H100=2.20".
    calibration: measurements of one kind of card; the others keep the constants, and their notes say so.

    Raises ConfigError with every problem: a card that is not known or is given twice, a price that is no number, is
    negative or is of a card that is not given, and a calibration that cannot be used.
    """
    problems: list[Problem] = []
    # Two names may mean one card, which would be listed twice.
    cards: dict[str, Card] = {}
    for name in names:
        try:
            card = find_card(name)
        except ConfigError as error:
            problems += error.problems
            continue
        if card in cards.values():
            what = f"this card is given twice: it is a {card.name}"
            problems.append(Problem(what, f"--card {name}", fix="give each card once"))
        else:
            cards[name] = card

    paid = _read_prices(prices, list(cards.values()), problems)

    offers: list[Offer] = []
    for name, card in cards.items():
        try:
            rates = read_calibration(calibration, card) if calibration else uncalibrated(card)
        except ConfigError as error:
            # A file that cannot be read is one problem, not one for each card.
            problems += [problem for problem in error.problems if problem not in problems]
            continue
        offers.append(Offer(name, card, rates, paid.get(card.name)))
    if problems:
        raise ConfigError(problems)
    return offers


def _read_prices(
    prices: Sequence[str], cards: Sequence[Card], problems: list[Problem]
) -> dict[str, float]:
    """Prices by the name of the card; what is wrong with them is added to `problems`."""
    found: dict[str, float] = {}
    for text in prices:
        where = f"--price {text}"
        # Every price is looked at, so that all mistakes are reported at once.
        name, equals, number = text.partition("=")
        if not equals or not name.strip():
            problems.append(Problem("is not a card and its price", where, fix=_WRITE))
            continue
        price = _number(number)
        if price is None:
            problems.append(Problem(f"{number!r} is not a number", where, fix=_WRITE))
        elif price < 0:
            problems.append(Problem("a price is not negative", where, fix=_WRITE))

        try:
            # A price for a card that is not asked for is a slip of the keyboard.
            card = find_card(name, where)
        except ConfigError as error:
            problems += error.problems
            continue
        if card not in cards:
            fix = f"add --card {name.strip()}, or leave the price out"
            problems.append(Problem("no such card is estimated for", where, fix=fix))
        elif card.name in found:
            problems.append(Problem("this card has two prices", where, fix="give one"))
        elif price is not None:
            found[card.name] = price
    return found


def _number(text: str) -> float | None:
    """The finite number that `text` is; None if it is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
