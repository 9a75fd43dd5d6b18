"""Samples that no update should come from: found before the forward pass, where a bad label would end the process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.core.facts import BAD_LABEL, NO_LABEL, NON_FINITE_INPUT

IGNORED_LABEL = -100
"""PyTorch's mark of a target that has no loss (`torch.nn.functional.cross_entropy`, ignore_index)."""
_ORDERED = {
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one sample. row: its place in the batch, None for the batch as a whole. bit: of bad_data."""

    row: int | None
    bit: int
    text: str


def check_batch(inputs: Tensor, targets: Tensor, vocab_size: int | None = None) -> int:
    """What is wrong with a batch, as bits of `StepFacts.bad_data`; 0: nothing. Meant for tensors on the host.

    inputs, targets: any shape and dtype. Floating-point values must be finite. Integers are token ids and must be in
    [0, vocab_size), or not negative where vocab_size is None, but for targets of -100. A batch without any other
    target is NO_LABEL. One pass over each tensor (two over targets that hold a -100).
    """
    found = 0
    if inputs.numel():
        inputs = _ordered(inputs)
        low, high = (bound.item() for bound in torch.aminmax(inputs))
        found |= _judge(inputs, low, high, vocab_size)
    if not targets.numel():
        return found | NO_LABEL
    targets = _ordered(targets)
    low, high = (bound.item() for bound in torch.aminmax(targets))
    if low == IGNORED_LABEL and not targets.is_floating_point():
        if high == IGNORED_LABEL:
            return found | NO_LABEL
        low = targets.where(targets != IGNORED_LABEL, 0).min().item()
    return found | _judge(targets, low, high, vocab_size)


def name_faults(inputs: Tensor, targets: Tensor, vocab_size: int | None = None) -> list[Fault]:
    """What `check_batch` found, sample by sample: the first wrong value of each and where in the sample it is.

    The first dimension counts samples. Slow: for batches that are known to be bad.
    """
    inputs, targets = (t if t.is_floating_point() else t.to(torch.int64) for t in map(_ordered, (inputs, targets)))
    faults = _name("input", inputs, vocab_size, torch.zeros_like(inputs, dtype=torch.bool))
    ignored = (targets == IGNORED_LABEL) & (not targets.is_floating_point())
    if ignored.all():  # so is an empty tensor
        return [*faults, Fault(None, NO_LABEL, "no target has a label")]
    return faults + _name("label", targets, vocab_size, ignored)


def harmless(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A batch of the same shapes that any model computes: it takes the place of one whose update will be skipped."""
    return torch.zeros_like(inputs), torch.zeros_like(targets)


def _ordered(values: Tensor) -> Tensor:
    """The values in a dtype that has an order on every device: complex parts side by side, odd floats as float32."""
    if values.dtype in _ORDERED:
        return values
    if values.is_complex():
        return torch.view_as_real(values)
    return values.float() if values.is_floating_point() else values.to(torch.int64)


def _judge(values: Tensor, low: float, high: float, vocab_size: int | None) -> int:
    """Bits for a tensor with these bounds; both are NaN if any value is."""
    if values.is_floating_point():
        return 0 if -torch.inf < low and high < torch.inf else NON_FINITE_INPUT
    return 0 if low >= 0 and (vocab_size is None or high < vocab_size) else BAD_LABEL


def _name(kind: str, values: Tensor, vocab_size: int | None, ignored: Tensor) -> list[Fault]:
    """Faults of a float or int64 tensor; ignored: bool, of its shape."""
    floating = values.is_floating_point()
    allowed = "" if floating else f", not in [0, {'...' if vocab_size is None else vocab_size})"
    wrong = ~torch.isfinite(values) if floating else (values < 0) & ~ignored
    if not floating and vocab_size is not None:
        wrong |= values >= vocab_size
    faults: list[Fault] = []
    for row, (sample, bad) in enumerate(zip(values, wrong, strict=True) if values.ndim else [(values, wrong)]):
        places = bad.reshape(-1, 1).nonzero() if bad.ndim < 2 else bad.nonzero()
        if len(places):
            index = places[0].tolist()[: bad.ndim]
            where = f" at position {index[0] if len(index) == 1 else index}" if index else ""
            more = f" ({len(places)} such values)" if len(places) > 1 else ""
            text = f"{kind} {sample[tuple(index)].item()}{where}{allowed}{more}"
            faults.append(Fault(row, NON_FINITE_INPUT if floating else BAD_LABEL, text))
    return faults
