"""How a card, a range and a mantissa lead to a precision: the tree that `harness doctor` prints. Torch-free.

The ladder of a recipe is such a tree: each precision is a question, asked from the fewest bits to the most, and the
first one that the machine answers with yes is taken.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.capability.probe import MachineFacts
from harness.precision.plan import resolve
from harness.precision.recipe import Recipe


class Format(NamedTuple):
    """What a precision can hold, and what it needs.

    bits: of the mantissa, without the implicit one.
    largest: its largest value.
    means: what follows for training.
    needs: the card.
    """

    bits: str
    largest: str
    means: str
    needs: str


FORMATS = {
    "fp8": Format(
        "3 (E4M3) and 2 (E5M2)",
        "448 and 57344",
        "each tensor needs a scale; sums are kept in float32",
        "compute capability 8.9; a CPU emulates it",
    ),
    "bf16": Format("7", "3.4e38", "float32's range: no loss scale", "compute capability 8.0"),
    "fp16": Format(
        "10",
        "65504",
        "gradients under 6e-8 are 0: a loss scale is needed",
        "compute capability 7.0",
    ),
    "fp32": Format("23", "3.4e38", "nothing is lost, and nothing is gained", "any card"),
}
"""By precision, in the order in which the tree asks."""


class Question(NamedTuple):
    """One node of the tree.

    precision: a key of FORMATS.
    answer: "taken", "no", or "not asked" for what comes after the one that is taken.
    why: the reason.
    """

    precision: str
    answer: str
    why: str


def decide(recipe: Recipe, facts: MachineFacts) -> list[Question]:
    """The questions in the tree's order, with this machine's answers by `recipe`."""
    chosen, verdicts = resolve(recipe, facts)
    reasons: dict[str, list[str]] = {}
    for rung, verdict in zip(recipe.ladder, verdicts, strict=True):
        if verdict.taken:
            reasons[rung.precision] = [f"{rung.name}: {verdict.reason}"]
        # Of the precision that is taken, only the rung that is taken gives a reason.
        elif chosen is None or rung.precision != chosen.precision:
            reasons.setdefault(rung.precision, []).append(f"{rung.name}: {verdict.reason}")

    asked: list[Question] = []
    taken = False
    for precision in FORMATS:
        nothing = [f"recipe {recipe.name} has no such rung"]
        why = "; ".join(reasons.get(precision, nothing))
        answer = "not asked" if taken else "no"
        if chosen is not None and precision == chosen.precision:
            answer, taken = "taken", True
        asked.append(Question(precision, answer, why))
    return asked
