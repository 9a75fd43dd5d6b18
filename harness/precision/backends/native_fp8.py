"""The native backend's casts on a GPU with FP8 units: straight to FP8 bytes, and their transpose beside them.

Whatever backward keeps is FP8: the input transposed, and the weight for as long as it is needed. Nothing waits for the
device: scales and inverses are read there. Bit for bit the values of the bfloat16 carriers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.precision.backends import native_traced, native_triton
from harness.precision.backends.arena import Arena
from harness.precision.backends.native_gemm import Fp8Pair
from harness.precision.recipe import Fp8Config
from harness.precision.scaling import SampledStats


class Fp8Arena(Arena):
    """An arena that casts to `Fp8Pair`s, with statistics on samples of large tensors.

    A quantised weight serves all micro-batches of a window. In the last one backward gives it up layer by layer, as
    autograd does with the bfloat16 weights of autocast: kept until the update it would add to the peak. Where nobody
    says which one is the last, it is taken to be as in the window before, the first in the first; a wrong guess costs
    casts or memory and changes no result.
    """

    traced = native_traced.linear, native_traced.switching

    def __init__(self, names: Sequence[str], formats: Sequence[str], config: Fp8Config, device: torch.device) -> None:
        super().__init__(names, formats, config, device)
        self.sampled = SampledStats(formats, device)
        self.sums = self.sampled.sums
        self.cast, self.kernel_note = native_triton.load(device)
        self._backwards, self._expected, self._last = 0, 1, True

    def begin_window(self, sample: bool = False) -> None:
        """As `Arena.begin_window`."""
        super().begin_window(sample)
        self.sampled.sampling = sample
        self._backwards = 0

    def activation(self, rows: Tensor, slot: int, record: bool, rights: bool = True) -> Fp8Pair:
        """As `Arena.activation`; the rounding to bfloat16 is part of the cast."""
        if rows.dtype not in native_triton.DTYPES:
            rows = rows.to(torch.bfloat16)
        if record and self.sampling:
            self.sampled.add(slot, rows.to(torch.bfloat16), self.scale[slot])
        return self._pair(rows.contiguous(), slot, record, rights, through_bf16=True)

    def operand(self, x: Tensor, slot: int, record: bool, rights: bool = True) -> Fp8Pair:
        """As `Arena.operand`."""
        if x.dtype not in native_triton.DTYPES:
            x = x.float()
        if record and self.sampling:
            self.sampled.add(slot, x, self.scale[slot])
        return self._pair(x.contiguous(), slot, record, rights, through_bf16=False)

    def _pair(self, x: Tensor, slot: int, record: bool, rights: bool, through_bf16: bool) -> Fp8Pair:
        amax = self.history[0, slot : slot + 1] if record else None
        fmt = self.formats[slot]
        rows, columns = self.cast(x.detach(), self.scale[slot : slot + 1], amax, fmt, through_bf16, rights)
        return Fp8Pair(rows, columns if rights else None, self.inverse[slot : slot + 1])

    def again(self, rows: Tensor, scale: Tensor, inverse: Tensor, slot: int) -> Fp8Pair:
        """`rows` [m, n] as a right operand under the scale of an earlier moment, float32 [1] as its inverse."""
        pair = self.cast(rows, scale, None, self.formats[slot], False, True)
        return Fp8Pair(None, pair[1], inverse)

    def observe(self, x: Tensor, slot: int) -> None:
        """As `Arena.observe`."""
        if self.sampling:
            self.sampled.add(slot, x, self.scale[slot])
        self._stage(x, slot)

    def may_release(self) -> bool:
        """Whether this is the window's last micro-batch, as far as one can know."""
        return self._last

    def backward_begins(self, last: bool | None) -> None:
        """As `Arena.backward_begins`."""
        self._backwards += 1
        self._last = self._backwards >= self._expected if last is None else last

    def before_update(self) -> None:
        """As `Arena.before_update`; the weights that are left are of no more use."""
        self.weights.clear()
        self._expected = max(1, self._backwards)

    def _read_scales(self) -> None:
        """The host needs none of them."""
