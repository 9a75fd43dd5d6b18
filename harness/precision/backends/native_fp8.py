"""The native backend on a GPU with FP8 units: casts give FP8 bytes, and GEMMs run on FP8 tensor cores.

The method is that of `native`, with the same values bit for bit. Three things differ:

- A cast also gives the transpose, because FP8 GEMMs take both operands with the common dimension last (`Fp8Pair`).
- Backward keeps FP8 only: the transposed input, and the weight for as long as it is needed.
- Nothing waits for the device. Scales and their inverses stay there and are read there.

Under torch.compile a layer goes one of two ways. Whichever it is, the graph finds the layer by its handle, an int64
tensor with the layer's number, as operators take only tensors (`precision.operators`). The compiler does not know what
operators read and write of the FP8 state.

`linear` is the usual way, which the compiler traces:

    forward    fp8_scales_apart -> cast of x  -> fp8_forward  (weight, GEMM 1)
    backward   fp8_scales_apart -> cast of dy -> fp8_backward (weight, GEMMs 2 and 3)

The cast is the operator fp8_cast_slot where our kernel casts. It reads a bfloat16 tensor from memory and writes FP8 and
its transpose. In a sampled step it also measures the tensor, so the compiled code is the same in every step.

With `layers.fuse`, or where our kernel does not work, the cast is torch operations. The compiler fuses them with what
makes the tensor: a norm, SwiGLU, a gradient of one. The tensor then leaves that kernel as FP8, and bfloat16 is never
written. The compiler transposes slowly (a step of 1.05 of bf16's time on an H100, and 0.81 with our kernel,
docs/studies/hopper.md), so the FP8 bytes are transposed in backward, by a kernel of ours, right before GEMM 3.

An amax reaches its slot through the GEMM that follows its cast. The compiler can therefore drop none, and recomputed
activations record the same amax again.

`switching` is for blocks in which a layer is demoted and, where the compiler casts, for all blocks in a sampled step.
One operator does everything when it runs. A block is compiled twice at most, however often layers switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness.core.facts import ROLES
from harness.precision import scaling
from harness.precision.backends import native_triton
from harness.precision.backends.native_gemm import (
    ALIGNMENT,
    Carrier,
    Fp8Pair,
    Operand,
    gradient_dtype,
    operands_as_they_are,
    padded,
    plain_operand,
)
from harness.precision.backends.native_gradients import (
    as_autograd_wants,
    as_tensors,
    fake_gradients,
)
from harness.precision.backends.slot_buffers import SlotBuffers
from harness.precision.operators import define, layer_of
from harness.precision.recipe import Fp8Config
from harness.precision.scaling import FORMATS, SampledStats

# Inverse scales lie this many floats apart. cuBLASLt refuses a scale whose address is not a multiple of 16 bytes
# (CUBLAS_STATUS_NOT_SUPPORTED, seen on an H100).
_STRIDE = ALIGNMENT // 4
# The roles of a layer's three slots, in their order.
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
    wide: bool = False,
) -> Tensor:
    """y = x W^T + b of the FP8 layer behind `handle`, bfloat16 [m, n], for a compiled graph.

    rows: x [m, k] of any float dtype; it is rounded to bfloat16.
    record: whether to record amaxes.
    gradient: format of grad_output.
    own_casts: whether our kernel casts; else the compiler casts in the kernels that make the tensors.
    wide: whether the weight's gradient leaves its GEMM in float32.
    """
    return _Linear.apply(rows, weight, bias, handle, record, gradient, own_casts, wide)


class _Linear(torch.autograd.Function):
    """`linear` as the compiler traces it, forward and backward."""

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
        wide: bool,
    ) -> Tensor:
        scales = _ops.fp8_scales_apart(handle, weight)
        wants_weight = ctx.needs_input_grad[1]
        cast_rows = _own_cast if own_casts else _cast
        _, amax, left, columns = cast_rows(
            rows, _scale(scales, _INPUT), handle, _INPUT, "e4m3", wants_weight
        )

        # Backward needs the input, which is transposed now or there, and the scales that it was cast under.
        kept = columns if own_casts or not wants_weight else left
        ctx.record = record
        ctx.gradient = gradient
        ctx.wide = wide
        ctx.dtype = rows.dtype
        ctx.cast = cast_rows
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(kept, scales, weight, handle)
        return _ops.fp8_forward(left, amax, scales, weight, bias, handle, record)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        kept, then, weight, handle = ctx.saved_tensors
        needs = [bool(need) for need in ctx.needs_input_grad[:3]]
        # Read again, as scales may have rolled since forward. The argument `then` keeps the compiler from merging
        # this call with forward's.
        scales = _ops.fp8_scales_apart(handle, then)
        values, amax, left, turned = ctx.cast(
            grad, _scale(scales, _GRADIENT), handle, _GRADIENT, ctx.gradient, needs[1]
        )
        rows, weights = _ops.fp8_backward(
            left,
            turned,
            amax,
            scales,
            kept,
            then,
            weight,
            handle,
            ctx.record,
            needs[:2],
            ctx.wide,
        )
        bias = values.sum(0).to(ctx.bias_dtype) if needs[2] else None
        # Autograd wants None for the operators' empty tensors, and for what is no tensor of the model.
        grad_rows = rows.to(ctx.dtype) if needs[0] else None
        grad_weights = weights if needs[1] else None
        return grad_rows, grad_weights, bias, None, None, None, None, None


def _own_cast(
    x: Tensor, scale: Tensor, handle: Tensor, role: int, fmt: str, transpose: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `_cast`, and the transpose if asked for: by our kernel, which also casts for a layer that is not compiled."""
    given = x.detach().to(torch.bfloat16)
    amax, rows, turned = _ops.fp8_cast_slot(given, scale, handle, role, fmt, transpose)
    return _rounded(x), amax, rows, turned if transpose else None


def _cast(
    x: Tensor, scale: Tensor, handle: Tensor, role: int, fmt: str, transpose: bool
) -> tuple[Tensor, Tensor, Tensor, None]:
    """x rounded to bfloat16 (as float32), its amax [1], and its FP8 bytes. `fp8_backward` makes the transpose.

    In torch operations, of which the compiler makes one kernel together with what makes x.
    """
    values = _rounded(x)
    # NaN is no amax. A maximum of each row is found in the kernel that casts the row; one of the whole tensor is not.
    sizes = torch.where(values.isnan(), 0.0, values.abs())
    amax = sizes.amax(1).amax().reshape(1) if x.numel() else values.new_zeros(1)
    # Rounded before the conversion to FP8, which on Ada goes through float16 and would round twice.
    rows = scaling.quantize(values, scale, fmt).to(FORMATS[fmt].dtype)
    # GEMMs and the transpose read rows one after the other; x may be a transposed view.
    return values, amax, rows.contiguous(), None


def _rounded(x: Tensor) -> Tensor:
    """x rounded to bfloat16, as float32.

    It rounds by integer arithmetic. A compiler may keep bfloat16 values in float32, and would then drop a cast there
    and back.
    """
    wide = x.detach().float()
    bits = wide.view(torch.int32)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return torch.where(wide.isnan(), wide, even.view(torch.float32))


def _fp8_cast(
    x: Tensor, scale: Tensor, handle: Tensor, role: int, fmt: str, transpose: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator fp8_cast_slot: x's amax [1], its FP8 bytes and their transpose, as `quantize_pair` gives them.

    x: bfloat16, the input or grad_output of a recorded forward.
    role: which of the two.

    In a sampled step it adds the cast to the statistics.
    """
    layer = layer_of(handle)
    buffers = cast("Fp8SlotBuffers", layer.slot_buffers)
    if buffers.sampling:
        buffers.sampled.add(layer.slot + role, x, scale[0])
    amax = x.new_zeros(1, dtype=torch.float32)
    return amax, *buffers.cast(
        x.contiguous(), scale, amax, fmt, through_bf16=False, transpose=transpose
    )


def _fake_cast(
    x: Tensor, scale: Tensor, handle: Tensor, role: int, fmt: str, transpose: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = FORMATS[fmt].dtype
    columns = (x.shape[1], padded(x.shape[0])) if transpose else (0,)
    return (
        x.new_empty(1, dtype=torch.float32),
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(columns, dtype=dtype),
    )


def _fp8_scales(handle: Tensor, after: Tensor) -> Tensor:
    """The operator fp8_scales_apart: the layer's scales and inverses of now, float32 [16].

    First come the scales of input, weight and grad_output and a filler, then each inverse with its filler.

    after: a tensor of the device. Calls with different ones are not merged. Not an activation: the compiler would write
        one to memory for this call, although it is fused with what uses it.
    """
    layer = layer_of(handle)
    # A copy: an operator's output may not share memory with what is kept.
    return cast("Fp8SlotBuffers", layer.slot_buffers).by_layer[layer.slot // len(ROLES)].clone()


def _fake_scales(handle: Tensor, after: Tensor) -> Tensor:
    return after.new_empty(4 * _STRIDE, dtype=torch.float32)


def _scale(scales: Tensor, role: int) -> Tensor:
    """float32 [1]: the scale of a role, from the result of `fp8_scales_apart`."""
    return scales[role : role + 1]


def _inverse(scales: Tensor, role: int) -> Tensor:
    """float32 [1]: its inverse, at an address that cuBLASLt takes."""
    first = (1 + role) * _STRIDE
    return scales[first : first + 1]


def _fp8_forward(
    rows: Tensor,
    amax: Tensor,
    scales: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    handle: Tensor,
    record: bool,
) -> Tensor:
    """The operator fp8_forward, GEMM 1: y, bfloat16 [m, n].

    rows: x as FP8 [m, k], cast under `scales`.
    amax: of x; it is recorded here.

    The weight is quantised here if it has not been in this step.
    """
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
    kept: Tensor | None,
    then: Tensor,
    weight: Tensor,
    handle: Tensor,
    record: bool,
    needs: list[bool],
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """The operator fp8_backward, GEMMs 2 and 3: dx and dW, bfloat16. One that `needs` does not ask for has shape [0].

    grad, turned: dy as FP8 [m, n] and its transpose, cast under `scales`.
    amax: of dy; it is recorded here.
    kept: x transposed, as FP8, cast in forward under the scales `then`.
    wide: whether dW is float32.

    Where the compiler casts, `turned` is None and `kept` is x as it is. Both are transposed here.
    """
    layer = layer_of(handle)
    if record:
        layer.slot_buffers.stage(layer.slot + 2, amax)
    if needs[1] and turned is None:
        assert kept is not None
        turn = cast("Fp8SlotBuffers", layer.slot_buffers).turn
        turned, kept = turn(grad), turn(kept)
    left = Fp8Pair(grad, turned, _inverse(scales, _GRADIENT))

    # The weight is forward's operand, or one under a newer scale if scales moved since. Both are right.
    rows = weights = None
    if needs[0]:
        rows = left.nn(layer.quantized_weight(weight, record))
    # x was cast under forward's scale, so forward's inverse goes with it.
    if needs[1]:
        weights = left.tn(Fp8Pair(None, kept, _inverse(then, _INPUT)), wide)
    layer.release(record)

    # Two tensors of their own: an operator's outputs may not share memory.
    if rows is None:
        rows = grad.new_empty(0, dtype=torch.bfloat16)
    if weights is None:
        weights = grad.new_empty(0, dtype=gradient_dtype(wide))
    return rows, weights


def _fake_backward(
    grad: Tensor,
    turned: Tensor | None,
    amax: Tensor,
    scales: Tensor,
    kept: Tensor | None,
    then: Tensor,
    weight: Tensor,
    handle: Tensor,
    record: bool,
    needs: list[bool],
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    nothing = (0,)
    of_rows = (grad.shape[0], weight.shape[1]) if needs[0] else nothing
    of_weight = weight.shape if needs[1] else nothing
    grad_rows = grad.new_empty(of_rows, dtype=torch.bfloat16)
    grad_weight = grad.new_empty(of_weight, dtype=gradient_dtype(wide))
    return grad_rows, grad_weight


def _fp8_switching(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    handle: Tensor,
    record: bool,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """The operator fp8_switching_apart: y, and the scales that x was cast under.

    It computes in FP8, or in BF16 while the layer is demoted, and measures statistics in sampled steps.

    wide: as the layer's. Only the fake kernel of backward needs it, which cannot find the layer.

    rows: x, bfloat16. Backward keeps it as it is and casts it again under these scales. What an operator gives to
    backward must not depend on the precision.
    """
    layer = layer_of(handle)
    with operands_as_they_are(rows.device.type):
        out = layer.multiply(rows, weight, bias, record, (False, False, False))[0]
    return out, _fp8_scales(handle, rows)


def _fake_switching(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    handle: Tensor,
    record: bool,
    wide: bool = False,
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
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator fp8_switching_backward: gradients of x, W (bfloat16, or float32 if `wide`) and bias (float32).

    One that `needs` does not ask for has shape [0].

    rows, then: x as bfloat16, and the scales of forward.
    """
    layer = layer_of(handle)
    with operands_as_they_are(grad.device.type):
        if layer.in_bf16(record):
            left: Operand = Carrier(rows)
            right: Operand = plain_operand(weight)
        else:
            # The bytes of forward again: under its scale, not under one that has rolled since.
            buffers = cast("Fp8SlotBuffers", layer.slot_buffers)
            scale = _scale(then, _INPUT)
            inverse = _inverse(then, _INPUT)
            left = buffers.recast(rows.contiguous(), scale, inverse, layer.slot)
            right = layer.quantized_weight(weight, record)
        wanted = (needs[0], needs[1], needs[2])
        grad_rows, grad_weight, grad_bias = layer.gradients(grad, left, right, record, wanted)

    return as_tensors(grad, grad_rows, grad_weight, grad_bias, wide)


def _fake_switching_backward(
    grad: Tensor,
    rows: Tensor,
    then: Tensor,
    weight: Tensor,
    handle: Tensor,
    record: bool,
    needs: list[bool],
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(grad, rows, weight, needs, wide)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, weight, bias, handle, ctx.record, ctx.wide = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(rows, output[1], weight, handle)


def _switching_gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    needs = [bool(need) for need in ctx.needs_input_grad[:3]]
    found = _ops.fp8_switching_backward(grad, *ctx.saved_tensors, ctx.record, needs, ctx.wide)
    return *as_autograd_wants(found, needs, ctx.bias_dtype), None, None, None


define("fp8_cast_slot", _fp8_cast, _fake_cast)
define("fp8_scales_apart", _fp8_scales, _fake_scales)
define("fp8_forward", _fp8_forward, _fake_forward)
define("fp8_backward", _fp8_backward, _fake_backward)
define("fp8_switching_apart", _fp8_switching, _fake_switching, _switching_gradients, _setup)
define("fp8_switching_backward", _fp8_switching_backward, _fake_switching_backward)
_ops: Any = torch.ops.hopper_harness


def switching(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    handle: Tensor,
    record: bool,
    wide: bool = False,
) -> Tensor:
    """As `linear`, for a layer that decides when it runs: FP8 or BF16, with or without statistics."""
    return _ops.fp8_switching_apart(rows, weight, bias, handle, record, wide)[0]


class Fp8SlotBuffers(SlotBuffers):
    """Slot buffers that cast to `Fp8Pair`s. Statistics are measured on samples of large tensors.

    sampled: the sums behind the statistics of a sampled step.
    cast: the function that casts, our kernel or `quantize_pair`.
    turn: the function that transposes FP8 bytes, our kernel or `native_triton.turned`.
    padded_inverse: inverse scales, float32 [slots, _STRIDE]: 16 bytes each, as cuBLASLt takes their addresses.
    by_layer: float32 [layers, 16], a row as `_fp8_scales` gives it.

    A quantised weight serves all micro-batches of a window. In the last micro-batch backward drops it layer by layer,
    as autograd does with autocast's bfloat16 weights: kept until the update, it would add to the peak of memory. If
    the loop does not say which micro-batch is the last, a window is expected to have as many as the one before, and
    the first window one. A wrong guess costs casts or memory and changes no result.
    """

    traced = linear, switching

    def __init__(
        self, names: Sequence[str], formats: Sequence[str], config: Fp8Config, device: torch.device
    ) -> None:
        super().__init__(names, formats, config, device)
        measure, in_pytorch = native_triton.load_stats(device)
        self.sampled = SampledStats(formats, device, measure=measure)
        self.sums = self.sampled.sums
        self.cast, self.kernel_note = native_triton.load(device)
        self.kernel_note += in_pytorch
        self.own_casts = self.cast is not native_triton.quantize_pair
        self.turn = native_triton.turned
        # Backwards of this window so far, how many are expected, and whether this one is the last.
        self._backwards = 0
        self._expected = 1
        self._last = True

    def fuse_casts(self) -> None:
        """As `SlotBuffers.fuse_casts`. Without a kernel that transposes it would be slower, and nothing changes."""
        self.turn = native_triton.load_turn(self.device)
        if self.turn is not native_triton.turned:
            self.own_casts = False
            self.kernel_note += ", in compiled blocks by the compiler"

    def begin_window(self, sample: bool = False) -> None:
        """As `SlotBuffers.begin_window`."""
        super().begin_window(sample)
        self.sampled.sampling = sample
        self._backwards = 0

    def activation(
        self,
        rows: Tensor,
        slot: int,
        record: bool,
        rights: bool = True,
    ) -> Fp8Pair:
        """As `SlotBuffers.activation`. The cast itself rounds to bfloat16 first."""
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
        """Cast under the slot's scale. The cast itself raises the amax in the staging row if `record`.

        rights: make the transpose too, for a right operand or a transposed left one.
        """
        amax = self.history[0, slot : slot + 1] if record else None
        fmt = self.formats[slot]
        rows, columns = self.cast(
            x.detach(), self.scale[slot : slot + 1], amax, fmt, through_bf16, rights
        )
        return Fp8Pair(rows, columns if rights else None, self.padded_inverse[slot, :1])

    def recast(self, rows: Tensor, scale: Tensor, inverse: Tensor, slot: int) -> Fp8Pair:
        """`rows` [m, n] cast again under an earlier scale, as a right operand. It records nothing.

        scale, inverse: float32 [1].
        """
        fmt = self.formats[slot]
        _, columns = self.cast(rows, scale, None, fmt, through_bf16=False, transpose=True)
        return Fp8Pair(None, columns, inverse)

    def record_demoted(self, x: Tensor, slot: int) -> None:
        """As `SlotBuffers.record_demoted`."""
        if self.sampling:
            self.sampled.add(slot, x, self.scale[slot])
        self.stage(slot, scaling.amax(x))

    def may_release(self) -> bool:
        """Whether this is the window's last micro-batch, as far as is known."""
        return self._last

    def backward_begins(self, last: bool | None) -> None:
        """As `SlotBuffers.backward_begins`."""
        self._backwards += 1
        if last is None:
            last = self._backwards >= self._expected
        self._last = last

    def before_update(self) -> None:
        """As `SlotBuffers.before_update`. Drops quantised weights that are left, as the update changes the weights."""
        self.weights.clear()
        self._expected = max(1, self._backwards)

    def _read_scales(self) -> None:
        """Lay the inverses out for cuBLASLt. The host reads no scale."""
        self.padded_inverse = F.pad(self.inverse[:, None], (0, _STRIDE - 1))
        # One row for each layer, made once for all: compiled code asks twice for each layer in every micro-batch.
        layers = len(self.names) // len(ROLES)
        scales = F.pad(self.scale.reshape(layers, len(ROLES)), (0, 1), value=1.0)
        inverses = self.padded_inverse.reshape(layers, len(ROLES) * _STRIDE)
        self.by_layer = torch.cat([scales, inverses], dim=1)
