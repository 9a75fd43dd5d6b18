"""The tree from a card, a range and a mantissa to a precision."""

from __future__ import annotations

import pytest
import torch

from harness.capability.probe import Device, MachineFacts
from harness.precision.decision import FORMATS, decide
from harness.precision.recipe import load_recipe


def card(name: str, capability: tuple[int, int]) -> MachineFacts:
    return MachineFacts(
        torch_version="2.13.0+cu130",
        cuda_available=True,
        devices=(Device(name, capability, 2**34),),
    )


CPU = MachineFacts(torch_version="2.13.0+cpu")
TAKEN = [
    ("fp8_hybrid", card("NVIDIA H100", (9, 0)), "fp8"),
    ("fp8_hybrid", card("NVIDIA A100", (8, 0)), "bf16"),
    ("fp8_hybrid", card("Tesla T4", (7, 5)), "fp16"),
    ("fp8_hybrid", CPU, "fp8"),
    ("bf16", CPU, "bf16"),
    ("fp32", CPU, "fp32"),
]


@pytest.mark.parametrize(("recipe", "facts", "precision"), TAKEN)
def test_one_answer_is_taken_and_those_before_it_are_no(
    recipe: str, facts: MachineFacts, precision: str
) -> None:
    questions = decide(load_recipe(recipe), facts)
    assert [question.precision for question in questions] == list(FORMATS)
    place = list(FORMATS).index(precision)
    answers = [question.answer for question in questions]
    assert answers == ["no"] * place + ["taken"] + ["not asked"] * (len(FORMATS) - place - 1)
    assert all(question.why for question in questions)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_figures_of_16_bits_are_torchs(precision: str, dtype: torch.dtype) -> None:
    form, info = FORMATS[precision], torch.finfo(dtype)
    assert float(form.largest) == pytest.approx(info.max, rel=0.01)
    assert 2.0 ** -int(form.bits) == info.eps
