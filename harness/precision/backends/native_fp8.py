"""The native backend on a GPU with FP8 units: casts straight to FP8 bytes, and their transpose beside them.

Whatever backward keeps is FP8: the input transposed, and the weight for as long as it is needed. Nothing waits for the
device: scales and inverses are read there. Bit for bit the values of the bfloat16 carriers.

Under torch.compile GEMMs, weights and the FP8 state are in operators that the compiler calls, and so are casts with
amax and transpose, where our kernel casts. Where it does not, the compiler makes kernels of them, and fuses them with
their neighbours; it transposes slowly: on an H100 with torch 2.13 a step took 1.05 of bf16's time so, 0.81 with our
kernel (docs/studies/hopper.md). A graph finds its layer by its handle (`precision.operators`); what such an operator
reads and writes of the FP8 state is not known to the compiler. An amax reaches its slot through the GEMM that follows
it, so that
none can be dropped, and recomputed activations record the same one again.

Layers of a block in which one is demoted, and all layers in a sampled window, go another way, through one operator that
does everything when it runs: a block is compiled twice at most, however often that changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness.precision.backends import native_triton
from harness.precision.backends.native_gemm import (
    ALIGNMENT,
    Carrier,
    Fp8Pair,
    Operand,
    operands_as_they_are,
    padded,
)
from harness.precision.backends.native_gemm import plain_operand as plain
from harness.precision.backends.slot_buffers import SlotBuffers
from harness.precision.operators import define, layer_of
from harness.precision.recipe import Fp8Config
from harness.precision.scaling import FORMATS, SampledStats

# `fp8_scales_apart`: the scales of input, weight and grad_output, then _APART floats for each of their inverses, as
# cuBLASLt refuses a scale whose address is no multiple of 16 bytes (CUBLAS_STATUS_NOT_SUPPORTED, seen on an H100).
_APART = ALIGNMENT // 4
_INPUT, _WEIGHT, _GRADIENT = range(3)


@torch._dynamo.allow_in_graph
def linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    handle: Tensor,
    record: bool,
    gradient: str,
    own_casts: bool,
) -> Tensor:
    """rows W^T + b of the FP8 layer behind `handle`, bfloat16 [m, n].

    rows: [m, k] of any float dtype, rounded to bfloat16. gradient: format of grad_output. own_casts: our
    kernel casts, else what the compiler makes of it.
    """
    return _Linear.apply(rows, weight, bias, handle, record, gradient, own_casts)


class _Linear(torch.autograd.Function):
    """Traced by the compiler, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        handle: Tensor,
        record: bool,
        gradient: str,
        own_casts: bool,
    ) -> Tensor:
        scales = _ops.fp8_scales_apart(handle, rows)
        wants_weight = ctx.needs_input_grad[1]
        cast = _own_cast if own_casts else _cast
        _, amax, left, columns = cast(rows, _scale(scales, _INPUT), handle, "e4m3", wants_weight)
        ctx.record, ctx.gradient, ctx.dtype, ctx.cast = record, gradient, rows.dtype, cast
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(columns, scales, weight, handle)
        return _ops.fp8_forward(left, amax, scales, weight, bias, handle, record)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        columns, then, weight, handle = ctx.saved_tensors
        needs = [bool(need) for need in ctx.needs_input_grad[:3]]
        # The argument says that these are of now: scales may have rolled since forward.
        scales = _ops.fp8_scales_apart(handle, grad)
        values, amax, left, turned = ctx.cast(
            grad, _scale(scales, _GRADIENT), handle, ctx.gradient, needs[1]
        )
        rows, weights = _ops.fp8_backward(
            left, turned, amax, scales, columns, then, weight, handle, ctx.record, needs[:2]
        )
        bias = values.sum(0).to(ctx.bias_dtype) if needs[2] else None
        return (
            rows.to(ctx.dtype) if needs[0] else None,
            weights if needs[1] else None,
            bias,
            None,
            None,
            None,
            None,
        )


def _own_cast(
    x: Tensor, scale: Tensor, handle: Tensor, fmt: str, transpose: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `_cast`, by what casts for the layer when it is not compiled."""
    amax, rows, turned = _ops.fp8_cast(x.detach().to(torch.bfloat16), scale, handle, fmt, transpose)
    return _rounded(x), amax, rows, turned if transpose else None


def _cast(
    x: Tensor, scale: Tensor, handle: Tensor, fmt: str, transpose: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x rounded to bfloat16 (as float32), its amax [1], its FP8 bytes and their transpose, as of `quantize_pair`."""
    spec = FORMATS[fmt]
    values = _rounded(x)
    sizes = torch.where(values.isnan(), 0.0, values.abs())
    amax = sizes.amax().reshape(1) if x.numel() else values.new_zeros(1)
    rows = (values * scale).clamp(-spec.max, spec.max).to(spec.dtype)
    if not transpose:
        return values, amax, rows, None
    turned = rows.view(torch.uint8).t()
    return (
        values,
        amax,
        rows,
        F.pad(turned, (0, padded(len(x)) - len(x))).contiguous().view(spec.dtype),
    )


def _rounded(x: Tensor) -> Tensor:
    """x rounded to bfloat16, as float32. By arithmetic: a compiler that keeps the values of bfloat16 operations in
    float32 would leave a rounding that is a cast out.
    """
    wide = x.detach().float()
    bits = wide.view(torch.int32)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return torch.where(wide.isnan(), wide, even.view(torch.float32))


def _fp8_cast(
    x: Tensor, scale: Tensor, handle: Tensor, fmt: str, transpose: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The amax [1] of x, bfloat16, its FP8 bytes and their transpose, as of `quantize_pair`."""
    buffers = cast("Fp8SlotBuffers", layer_of(handle).slot_buffers)
    amax = x.new_zeros(1, dtype=torch.float32)
    return amax, *buffers.cast(x.contiguous(), scale, amax, fmt, False, transpose)


def _fake_cast(
    x: Tensor, scale: Tensor, handle: Tensor, fmt: str, transpose: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = FORMATS[fmt].dtype
    columns = (x.shape[1], padded(x.shape[0])) if transpose else (0,)
    return (
        x.new_empty(1, dtype=torch.float32),
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(columns, dtype=dtype),
    )


def _fp8_scales(handle: Tensor, after: Tensor) -> Tensor:
    """float32 [16]: what `_scale` and `_inverse` find there. after: says when they are read."""
    layer = layer_of(handle)
    buffers, slot = cast("Fp8SlotBuffers", layer.slot_buffers), layer.slot
    return torch.cat(
        [
            buffers.scale[slot : slot + 3],
            buffers.scale.new_ones(1),
            buffers.apart[slot : slot + 3].flatten(),
        ]
    )


def _fake_scales(handle: Tensor, after: Tensor) -> Tensor:
    return after.new_empty(4 * _APART, dtype=torch.float32)


def _scale(scales: Tensor, role: int) -> Tensor:
    """float32 [1]: the scale of a role, out of `fp8_scales_apart`."""
    return scales[role : role + 1]


def _inverse(scales: Tensor, role: int) -> Tensor:
    """float32 [1]: its inverse, where cuBLASLt takes it."""
    place = (1 + role) * _APART
    return scales[place : place + 1]


def _fp8_forward(
    rows: Tensor,
    amax: Tensor,
    scales: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    handle: Tensor,
    record: bool,
) -> Tensor:
    """The forward GEMM: rows FP8 [m, k], cast under `scales`; bfloat16 [m, n]. Quantises the weight if need be."""
    layer = layer_of(handle)
    if record:
        layer.slot_buffers.stage(layer.slot, amax)
    left = Fp8Pair(rows, None, _inverse(scales, _INPUT))
    return left.nt(layer.quantized_weight(weight, record), bias)


def _fake_forward(
    rows: Tensor,
    amax: Tensor,
    scales: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    handle: Tensor,
    record: bool,
) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0], dtype=torch.bfloat16)


def _fp8_backward(
    grad: Tensor,
    turned: Tensor | None,
    amax: Tensor,
    scales: Tensor,
    columns: Tensor | None,
    then: Tensor,
    weight: Tensor,
    handle: Tensor,
    record: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients of rows and weight, bfloat16; one that is not in `needs` has shape [0].

    grad: FP8 [m, n] under `scales`, turned: its transpose. columns: the input's, under the scales of `then`. The
    quantised weight is forward's unless scales were rolled in between, which leaves an equally good one.
    """
    layer = layer_of(handle)
    if record:
        layer.slot_buffers.stage(layer.slot + 2, amax)
    left = Fp8Pair(grad, turned, _inverse(scales, _GRADIENT))
    nothing = grad.new_empty(0, dtype=torch.bfloat16)
    rows = left.nn(layer.quantized_weight(weight, record)) if needs[0] else nothing
    weights = (
        left.tn(Fp8Pair(None, columns, _inverse(then, _INPUT))) if needs[1] else nothing.clone()
    )
    layer.release(record)
    return rows, weights


def _fake_backward(
    grad: Tensor,
    turned: Tensor | None,
    amax: Tensor,
    scales: Tensor,
    columns: Tensor | None,
    then: Tensor,
    weight: Tensor,
    handle: Tensor,
    record: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    rows = (grad.shape[0], weight.shape[1]) if needs[0] else (0,)
    return (
        grad.new_empty(rows, dtype=torch.bfloat16),
        grad.new_empty(weight.shape if needs[1] else (0,), dtype=torch.bfloat16),
    )


def _fp8_switching(
    rows: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, record: bool
) -> tuple[Tensor, Tensor]:
    """As `linear`, in FP8 or, while the layer is demoted, in BF16, with statistics in sampled windows; and the scales.

    rows: bfloat16. Backward casts them again, under the scale of now: what it keeps must not depend on the precision.
    """
    layer = layer_of(handle)
    with operands_as_they_are(rows.device.type):
        out = layer.multiply(rows, weight, bias, record, (False, False, False))[0]
    return out, _fp8_scales(handle, rows)


def _fake_switching(
    rows: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, record: bool
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape[0], weight.shape[0]), _fake_scales(handle, rows)


def _fp8_switching_backward(
    grad: Tensor,
    rows: Tensor,
    then: Tensor,
    weight: Tensor,
    handle: Tensor,
    record: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows, weight (bfloat16) and bias (float32); one that is not in `needs` has shape [0]."""
    layer = layer_of(handle)
    with operands_as_they_are(grad.device.type):
        if layer.demoted:
            left: Operand = Carrier(rows)
            right: Operand = plain(weight)
        else:
            buffers = cast("Fp8SlotBuffers", layer.slot_buffers)
            left = buffers.again(
                rows.contiguous(), _scale(then, _INPUT), _inverse(then, _INPUT), layer.slot
            )
            right = layer.quantized_weight(weight, record)
        found = layer.gradients(grad, left, right, record, (needs[0], needs[1], needs[2]))
    nothing = [grad.new_empty(0) if value is None else value for value in found[:2]]
    return (
        nothing[0],
        nothing[1],
        grad.new_empty(0, dtype=torch.float32) if found[2] is None else found[2],
    )


def _fake_switching_backward(
    grad: Tensor,
    rows: Tensor,
    then: Tensor,
    weight: Tensor,
    handle: Tensor,
    record: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        grad.new_empty(rows.shape if needs[0] else (0,)),
        grad.new_empty(weight.shape if needs[1] else (0,)),
        grad.new_empty(grad.shape[1:] if needs[2] else (0,), dtype=torch.float32),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, weight, bias, handle, ctx.record = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(rows, output[1], weight, handle)


def _switching_gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    needs = [bool(need) for need in ctx.needs_input_grad[:3]]
    found = _ops.fp8_switching_backward(grad, *ctx.saved_tensors, ctx.record, needs)
    rows, weights, bias = (
        value if need else None for value, need in zip(found, needs, strict=True)
    )
    return rows, weights, None if bias is None else bias.to(ctx.bias_dtype), None, None


define("fp8_cast", _fp8_cast, _fake_cast)
define("fp8_scales_apart", _fp8_scales, _fake_scales)
define("fp8_forward", _fp8_forward, _fake_forward)
define("fp8_backward", _fp8_backward, _fake_backward)
define("fp8_switching_apart", _fp8_switching, _fake_switching, _switching_gradients, _setup)
define("fp8_switching_backward", _fp8_switching_backward, _fake_switching_backward)
_ops: Any = torch.ops.hopper_harness


def switching(
    rows: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, record: bool
) -> Tensor:
    """As `linear`, for a layer whose precision or statistics are known only when it runs."""
    return _ops.fp8_switching_apart(rows, weight, bias, handle, record)[0]


class Fp8SlotBuffers(SlotBuffers):
    """Slot buffers that cast to `Fp8Pair`s, with statistics on samples of large tensors.

    A quantised weight serves all micro-batches of a window. In the last one backward gives it up layer by layer, as
    autograd does with the bfloat16 weights of autocast: kept until the update it would add to the peak. Where nobody
    says which one is the last, it is taken to be as in the window before, the first in the first; a wrong guess costs
    casts or memory and changes no result.
    """

    traced = linear, switching

    def __init__(
        self, names: Sequence[str], formats: Sequence[str], config: Fp8Config, device: torch.device
    ) -> None:
        super().__init__(names, formats, config, device)
        self.sampled = SampledStats(formats, device, measure=native_triton.load_stats(device))
        self.sums = self.sampled.sums
        self.cast, self.kernel_note = native_triton.load(device)
        self.own_casts = self.cast is not native_triton.quantize_pair
        self._backwards, self._expected, self._last = 0, 1, True

    def begin_window(self, sample: bool = False) -> None:
        """As `SlotBuffers.begin_window`."""
        super().begin_window(sample)
        self.sampled.sampling = sample
        self._backwards = 0

    def activation(self, rows: Tensor, slot: int, record: bool, rights: bool = True) -> Fp8Pair:
        """As `SlotBuffers.activation`; the rounding to bfloat16 is part of the cast."""
        if rows.dtype not in native_triton.DTYPES:
            rows = rows.to(torch.bfloat16)
        if record and self.sampling:
            self.sampled.add(slot, rows, self.scale[slot], torch.bfloat16)
        return self._pair(rows.contiguous(), slot, record, rights, through_bf16=True)

    def operand(self, x: Tensor, slot: int, record: bool, rights: bool = True) -> Fp8Pair:
        """As `SlotBuffers.operand`."""
        if x.dtype not in native_triton.DTYPES:
            x = x.float()
        if record and self.sampling:
            self.sampled.add(slot, x, self.scale[slot])
        return self._pair(x.contiguous(), slot, record, rights, through_bf16=False)

    def _pair(
        self, x: Tensor, slot: int, record: bool, rights: bool, through_bf16: bool
    ) -> Fp8Pair:
        amax = self.history[0, slot : slot + 1] if record else None
        fmt = self.formats[slot]
        rows, columns = self.cast(
            x.detach(), self.scale[slot : slot + 1], amax, fmt, through_bf16, rights
        )
        return Fp8Pair(rows, columns if rights else None, self.apart[slot, :1])

    def again(self, rows: Tensor, scale: Tensor, inverse: Tensor, slot: int) -> Fp8Pair:
        """`rows` [m, n] as a right operand under the scale of an earlier moment, float32 [1] as its inverse."""
        pair = self.cast(rows, scale, None, self.formats[slot], False, True)
        return Fp8Pair(None, pair[1], inverse)

    def observe(self, x: Tensor, slot: int) -> None:
        """As `SlotBuffers.observe`."""
        if self.sampling:
            self.sampled.add(slot, x, self.scale[slot])
        self._stage(x, slot)

    def may_release(self) -> bool:
        """Whether this is the window's last micro-batch, as far as one can know."""
        return self._last

    def backward_begins(self, last: bool | None) -> None:
        """As `SlotBuffers.backward_begins`."""
        self._backwards += 1
        self._last = self._backwards >= self._expected if last is None else last

    def before_update(self) -> None:
        """As `SlotBuffers.before_update`; the weights that are left are of no more use."""
        self.weights.clear()
        self._expected = max(1, self._backwards)

    def _read_scales(self) -> None:
        """The host needs none of them. apart: the inverses, float32 [slots, _APART], each where cuBLASLt takes it."""
        self.apart = F.pad(self.inverse[:, None], (0, _APART - 1))
