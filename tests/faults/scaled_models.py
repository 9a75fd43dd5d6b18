"""GPTs of which some Linear layers see their input scaled up or down from a step on, as a user's `model.target`.

The output is divided by the same power of two: bf16 and fp32 do not notice, FP8 scales made from earlier steps do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from harness.models.gpt import GPT, build


def jump(at: int, bits: int) -> Callable[[int], int]:
    """From training forward `at` on, the factor is 2^bits."""
    return lambda step: bits if step >= at else 0


def ramp(at: int, bits: int) -> Callable[[int], int]:
    """Over four forwards, `bits` more in each."""
    return lambda step: bits * min(4, max(0, step - at + 1))


def oscillate(
    at: int, bits: int, low: int, on: int = 1 << 30, off: int = 0
) -> Callable[[int], int]:
    """`bits` and `low` in turn, for `on` forwards; then 0 for `off`; and so on."""

    def exponent(step: int) -> int:
        phase = step - at
        bad = phase >= 0 and phase % (on + off) < on
        return (low if phase % 2 else bits) if bad else 0

    return exponent


KINDS: dict[str, Callable[..., Callable[[int], int]]] = {
    "jump": jump,
    "ramp": ramp,
    "oscillate": oscillate,
}


def scaled(kind: str, layers: list[str], **given: Any) -> GPT:
    """kind: a name in KINDS, with its arguments. layers: Linear layers by name; none: all of them."""
    model = build(dim=64, layers=1, heads=2, ffn=176, tied=True)
    exponent = KINDS[kind](**given)
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += torch.is_grad_enabled()

    def factor() -> float:
        return 2.0 ** exponent(forwards) if torch.is_grad_enabled() else 1.0

    def enter(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * factor(),)

    def leave(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output / factor()

    model.register_forward_pre_hook(count)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (name in layers or not layers):
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)
    return model
