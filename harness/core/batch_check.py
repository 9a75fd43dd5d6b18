"""Samples that no update should come from: found before the forward pass, where a bad label would end the process."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.core.facts import BAD_LABEL, NO_LABEL, NON_FINITE_INPUT

IGNORED_LABEL = -100
"""PyTorch's mark of a target that has no loss (`torch.nn.functional.cross_entropy`, ignore_index)."""


def check_batch(inputs: Tensor, targets: Tensor, vocab_size: int | None = None) -> int:
    """What is wrong with a batch, as bits of `StepFacts.bad_data`; 0: nothing. Meant for tensors on the host.

    inputs, targets: any shape and dtype; token ids (integers) of both are checked against [0, vocab_size), or for
    being negative where vocab_size is None, but for targets of -100. A batch without any other target is NO_LABEL.
    """
    found = 0
    if inputs.is_floating_point() or targets.is_floating_point():
        floats = [values for values in (inputs, targets) if values.is_floating_point()]
        found |= 0 if all(bool(torch.isfinite(values).all()) for values in floats) else NON_FINITE_INPUT
    if not inputs.is_floating_point() and not _in_range(inputs, vocab_size):
        found |= BAD_LABEL
    if targets.numel() == 0:
        return found | NO_LABEL
    if not targets.is_floating_point() and not _in_range(targets, vocab_size):
        kept = targets[targets != IGNORED_LABEL]
        found |= NO_LABEL if kept.numel() == 0 else 0 if _in_range(kept, vocab_size) else BAD_LABEL
    return found


def harmless(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A batch of the same shapes that any model computes: it takes the place of one whose update will be skipped."""
    return torch.zeros_like(inputs), torch.zeros_like(targets)


def _in_range(ids: Tensor, vocab_size: int | None) -> bool:
    if ids.numel() == 0 or ids.dtype == torch.bool:
        return True
    low, high = torch.aminmax(ids)
    return low.item() >= 0 and (vocab_size is None or high.item() < vocab_size)
