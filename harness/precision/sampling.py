"""Clipped share, underflow and SQNR where a library makes the casts and hands out no FP8 tensor: casts of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness.precision import scaling

LARGEST = 1 << 20
"""Elements looked at in one tensor: enough for a share, and some 20 MB of temporaries, however large the tensor."""


class SampledStats:
    """Sums over the sampled casts of a window, for every slot.

    formats: "e4m3" or "e5m2" for each slot. sampling: on in windows that are measured. by_row: dynamic scales are one
    for each row of the last dimension, not one for the tensor. Nothing here waits for the device.
    """

    def __init__(self, formats: Sequence[str], device: torch.device, by_row: bool = False) -> None:
        self.formats, self.by_row, self.sampling = tuple(formats), by_row, False
        self.sums = torch.zeros(len(self.formats), 5, dtype=torch.float64, device=device)

    def begin(self, sample: bool) -> None:
        """A window begins."""
        self.sampling = sample
        self.sums.zero_()

    @torch.no_grad()
    def add(self, slot: int, x: Tensor, scale: Tensor | None = None) -> None:
        """What the cast of `x` does, in a sampled window only. scale: float32 0-d; None: dynamic, from `x` itself."""
        if not self.sampling or not x.numel():
            return
        fmt = self.formats[slot]
        rows = x.detach().reshape(-1, x.shape[-1])
        if scale is None and not self.by_row:
            scale = scaling.FORMATS[fmt].max / scaling.amax(rows)
        # Whole rows, evenly spread: every channel is in the sample.
        rows = rows[:: -(-rows.numel() // LARGEST)]
        if scale is None:
            scale = scaling.FORMATS[fmt].max / rows.abs().amax(dim=-1, keepdim=True).float()
        # A tensor or row of zeros has an infinite scale; under any other it is zeros as well.
        scale = torch.where(torch.isfinite(scale), scale, 1.0)
        self.sums[slot] += scaling.quantization_stats(rows, scaling.quantize(rows, scale, fmt), scale, fmt)

    def rows(self, mean: Callable[[Tensor], Tensor]) -> Tensor:
        """float32 [3, slots]: clipped, underflow, SQNR in dB; NaN where not sampled. mean: over ranks."""
        return scaling.shares(mean(self.sums) if self.sampling else self.sums)
