"""Cards and prices of `harness estimate`: what is read, and that everything wrong is told at once."""

from __future__ import annotations

import pytest

from harness.capability.cards import CARDS
from harness.core.errors import ConfigError
from harness.estimate.offers import read_offers


def test_cards_keep_their_order_and_names_and_get_their_prices() -> None:
    found = read_offers(["t4", "A100-40GB", "H100"], ["H100=2.20", "T4=0"], None)
    assert [offer.name for offer in found] == ["t4", "A100-40GB", "H100"]
    assert [offer.card for offer in found] == [CARDS["T4"], CARDS["A100-40GB"], CARDS["H100"]]
    assert [offer.price for offer in found] == [0.0, None, 2.2]


@pytest.mark.parametrize(
    ("cards", "prices", "expected"),
    [
        (["H1000"], [], "--card H1000: no datasheet of such a card"),
        (["A100", "A100-80GB"], [], "--card A100-80GB: this card is given twice"),
        (["H100", "h100"], [], "--card h100: this card is given twice"),
        (["H100"], ["T4=1"], "--price T4=1: no such card is estimated for"),
        (["H100"], ["H1000=1"], "--price H1000=1: no datasheet of such a card"),
        (["H100"], ["H100=-0.1"], "--price H100=-0.1: a price is not negative"),
        (["H100"], ["H100=two"], "--price H100=two: 'two' is not a number"),
        (["H100"], ["H100=nan"], "--price H100=nan: 'nan' is not a number"),
        (["H100"], ["H100=inf"], "--price H100=inf: 'inf' is not a number"),
        (["H100"], ["H100"], "--price H100: is not a card and its price"),
        (["H100"], ["=2"], "--price =2: is not a card and its price"),
        (["H100"], ["H100=2", "h100=3"], "--price h100=3: this card has two prices"),
    ],
)
def test_what_cannot_be_right_is_refused(
    cards: list[str], prices: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_offers(cards, prices, None)
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith(expected)
    assert "fix:" in str(caught.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_offers(["H1000", "T4", "t4"], ["L4=1", "T4=x", "V1=-1"], None)
    assert len(caught.value.problems) == 6


def test_an_unknown_card_is_answered_with_all_names() -> None:
    with pytest.raises(ConfigError) as caught:
        read_offers(["P100"], [], None)
    for name in (*CARDS, "A100 for A100-80GB", "V100 for V100-16GB"):
        assert name in str(caught.value)
