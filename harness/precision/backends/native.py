"""Native FP8 delayed scaling in PyTorch: the backend and its Linear, eager or inside `torch.compile`.

The three GEMMs
---------------
A Linear computes y = x W^T + b. Let m be the number of tokens, k in_features, n out_features, and dy the gradient of
y (grad_output). Training multiplies three pairs of matrices:

    1. forward          y  = x W^T     [m, k] x [k, n]    `Operand.nt`
    2. input gradient   dx = dy W      [m, n] x [n, k]    `Operand.nn`
    3. weight gradient  dW = dy^T x    [n, m] x [m, k]    `Operand.tn`

Both operands of every GEMM are FP8. Three tensors serve all three GEMMs. Each is quantised once and reused:

    tensor  slot         format              cast from       cast when                          used by
    x       input        E4M3                bfloat16        in forward, kept for backward      1, 3
    W       weight       E4M3                the Parameter   once per optimizer step            1, 2
    dy      grad_output  E5M2 (see below)    bfloat16        in backward                        2, 3

`fp8.format: hybrid` takes E5M2 for dy, because gradients need range more than precision; `e4m3` takes E4M3. The
weight is cast again if scales move within the step (`fp8.roll: micro_batch`). The bias gradient is the sum of the
unquantised bfloat16 dy.

The scales
----------
A cast stores q = round_to_fp8(clamp(t * scale)), so t is about q / scale. A GEMM multiplies the q of both operands, and
the product with both inverse scales: y is about (q_x q_W^T) / (scale_x * scale_W). The result is rounded to bfloat16
once, as in Transformer Engine.

The scaling is delayed: a cast uses the scale that the amaxes (max|t|) of earlier steps gave, so it needs no pass over
the tensor before it. The same cast records the amax of now in the slot's staging entry. At the end of the window
`slot_buffers` rolls that amax into the history, and the history gives the next scale (`scaling.roll`). Scales may
move between the cast of an operand and its use. Each operand therefore carries the inverse of its own scale.

Where the GEMMs run
-------------------
On a GPU with FP8 units the GEMMs are `torch._scaled_mm` on FP8 tensors (native_fp8). Elsewhere FP8 values are held in
bfloat16, which represents each of them exactly, and the inverse scales go into the GEMM's alpha (native_gemm).

torch.compile
-------------
A compiled Linear is made of operators that the compiler cannot look into, so a block compiles into one graph. An
operator reads scales, demotion and sampling from the layer when it runs, so a switch between steps recompiles nothing.
The compiler does not know that operators read and write FP8 state. It may drop a call whose results are unused, and it
may merge two calls with equal inputs. Neither changes an amax that matters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.core.errors import MisuseError, Problem
from harness.core.facts import pad_numbers
from harness.core.protocols import Meta, TensorDict
from harness.precision.backends.native_gemm import (
    Carrier,
    Operand,
    has_fp8_units,
    operands_as_they_are,
    plain_operand,
)
from harness.precision.backends.native_gradients import (
    as_autograd_wants,
    as_tensors,
    fake_gradients,
)
from harness.precision.backends.slot_buffers import SlotBuffers
from harness.precision.blocks import Block, Blocks
from harness.precision.layers import pickled_as_plain, shallow_copy, swap_linears
from harness.precision.once import once_differentiable
from harness.precision.operators import define, layer_of, register
from harness.precision.plan import Plan
from harness.precision.products import planned_autocast
from harness.precision.recipe import Recipe

Needs = tuple[bool, bool, bool]
"""Which gradients autograd wants: of input, weight and bias."""

# Attributes that a plain Linear does not have, or that a copy must not share.
_OF_THE_LAYER = {"slot_buffers", "slot", "block", "handle", "follows", "_compiled_call_impl"}


class NativeLayer(nn.Module):
    """A Linear whose GEMMs run in FP8 inside a precision context, and which is a plain Linear outside of it.

    A subclass lists it before the class that it replaces, and uses that layer's own Parameters.

    plain: the class of the layer that it replaces.
    slot_buffers: the FP8 state of all layers of the model.
    slot: number of its first slot; the three are input, weight, grad_output.
    block: the layers that are compiled together with it.
    handle: int64 0-d on the CPU, by which a compiled graph finds the layer; neither parameter nor buffer.
    follows: whether this is a deep copy, which records nothing.

    A deep copy (an EMA of the weights, a teacher) has Parameters of its own. Inside a precision context it computes in
    FP8 or BF16 as the original does, with the same scales. It records no amax and no statistics, whether or not
    gradients flow through it: only the original's tensors set scales. A copy of a compiled block is not compiled.
    """

    plain: ClassVar[type[nn.Module]]
    weight: Tensor
    bias: Tensor | None
    slot_buffers: SlotBuffers
    slot: int
    block: Block
    handle: Tensor
    follows: bool = False

    def matrix(self) -> Tensor:
        """The weight as [out, in]."""
        return self.weight

    def attach(self, buffers: SlotBuffers, slot: int, block: Block) -> None:
        """Take slots `slot` to `slot + 2` of `buffers`."""
        self.slot_buffers = buffers
        self.slot = slot
        self.block = block
        self.handle = register(self)

    @property
    def demoted(self) -> bool:
        """Whether it runs in BF16 now. It still records amaxes, so that it can return to FP8 with a warm scale."""
        return self.slot in self.slot_buffers.demoted

    def in_bf16(self, record: bool) -> bool:
        """Whether a forward multiplies in BF16: the layer is demoted, or nothing has set its scales yet."""
        if self.demoted:
            return True
        return not record and self.slot_buffers.unmeasured(self.slot, self.training)

    def forward(self, input: Tensor) -> Tensor:
        # Integers go to F.linear too: its error says what is wrong with them.
        if not self.slot_buffers.active or not input.is_floating_point():
            return F.linear(input, self.matrix(), self.bias)

        # Only a training forward of the original sets scales.
        record = torch.is_grad_enabled() and not self.follows
        weight = self.matrix()
        if torch.compiler.is_compiling():
            out = self._compiled(input.reshape(-1, input.shape[-1]), weight, record)
            out = out.reshape(*input.shape[:-1], weight.shape[0])
        else:
            out: Any = _Matmul.apply(input, weight, self.bias, self, record)

        # Where a model turns autocast off, it continues in its own dtype, as after Transformer Engine's Linear.
        if torch.is_autocast_enabled(input.device.type):
            return out
        return out.to(input.dtype)

    @property
    def wide(self) -> bool:
        """Whether the weight's gradient leaves its GEMM in float32, the Parameter's own dtype."""
        return self.slot_buffers.wide and self.weight.dtype == torch.float32

    def _compiled(self, rows: Tensor, weight: Tensor, record: bool) -> Tensor:
        """`forward` as the compiler traces it.

        Every attribute that is read here becomes a guard. Blocks and windows share compiled code if they agree on all.
        """
        given = (weight, self.bias, self.handle, record)
        buffers = self.slot_buffers
        if buffers.traced is None:
            return linear_operator(rows.to(torch.bfloat16), *given, self.wide)[0]
        linear, switching = buffers.traced
        # Our kernel's operator measures in sampled steps. The compiler's own casts cannot.
        apart = self.block.demoted if buffers.own_casts else self.block.switching
        # What records nothing may have no scales yet: only when it runs is it known whether that is in BF16.
        if apart or not record:
            return switching(rows.to(torch.bfloat16), *given, self.wide)
        return linear(rows, *given, buffers.gradient, buffers.own_casts, self.wide)

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeLayer:
        made = memo[id(self)] = type(self).__new__(type(self))
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_THE_LAYER}
        made.__dict__.update(copy.deepcopy(state, memo))
        made.follows = True
        made.attach(self.slot_buffers, self.slot, self.block)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        if "plain" not in vars(type(self)):  # parametrised: torch refuses it with a reason
            return super().__reduce_ex__(protocol)
        return pickled_as_plain(self, _OF_THE_LAYER, self.plain)

    def quantized_weight(self, weight: Tensor, record: bool, rights: bool = True) -> Operand:
        """`weight` as an operand under the current scale, quantised once per optimizer step.

        rights: backward needs it too, as a right operand.
        """
        buffers = self.slot_buffers
        # An evaluation may run with other weights, such as averaged ones: nothing is cached for it.
        if not record:
            return buffers.operand(weight.detach(), self.slot + 1, record, rights)

        # A gathered weight is freed after the layer, and so is its cast. Amax and statistics are recorded at the first
        # cast under a scale, as they are where the cast is cached.
        if buffers.gathered:
            cast = buffers.epoch, buffers.window
            first = buffers.recorded.get(self.slot) != cast
            buffers.recorded[self.slot] = cast
            return buffers.operand(weight.detach(), self.slot + 1, first, rights)

        # Fused optimizers do not bump a Parameter's version: epoch and window stand for it.
        key = (buffers.epoch, buffers.window, weight._version, weight.data_ptr())
        held = buffers.weights.get(self.slot)
        if held is not None and held[0] == key:
            return held[1]

        plain = weight.detach()
        quantized = buffers.operand(plain, self.slot + 1, record)
        # The entry holds the weight too: if it were freed, another weight could get its address, and so its key.
        buffers.weights[self.slot] = (key, quantized, plain)
        return quantized

    def cast_again(self, weight: Tensor, left: Operand) -> Operand:
        """`weight` as the right operand that it was in forward, for backward. It records nothing.

        left: the operand x of that forward. Whether it is in FP8 says whether the weight was.
        """
        if isinstance(left, Carrier) and left.inverse is None:
            return plain_operand(weight)
        return self.slot_buffers.operand(weight.detach(), self.slot + 1, False)

    def multiply(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        record: bool,
        needs: Needs = (True, True, True),
    ) -> tuple[Tensor, Operand, Operand]:
        """GEMM 1, y = x W^T + b: bfloat16 [m, n], and both operands, which backward needs.

        rows: x [m, k] of any float dtype.
        needs: which gradients autograd will want. x serves the weight gradient, and W the input gradient.

        In BF16 the operands are plain bfloat16.
        """
        buffers, slot = self.slot_buffers, self.slot
        if self.in_bf16(record):
            # BF16 needs no scale, but the layer's return to FP8 does: amaxes are recorded all the same.
            left, right = plain_operand(rows), plain_operand(weight)
            if record:
                buffers.record_demoted(left.values, slot)
                buffers.record_demoted(weight, slot + 1)
        else:
            left = buffers.activation(rows, slot, record, needs[1])
            right = self.quantized_weight(weight, record, needs[0])
        return left.nt(right, bias), left, right

    def gradients(
        self, grad: Tensor, left: Operand, right: Operand | None, record: bool, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """GEMMs 2 and 3: dx (bfloat16 [m, k]), dW (bfloat16 [n, k], or float32), and the bias gradient (float32 [n]).

        Each is None where `needs` does not ask for it.

        grad: dy [m, n] of any float dtype.
        left, right: the operands x and W, as `multiply` returned them. W is not needed where x wants no gradient.
        """
        buffers, slot = self.slot_buffers, self.slot + 2
        grad = grad.to(torch.bfloat16).contiguous()
        grad_bias = grad.sum(0, dtype=torch.float32) if needs[2] else None

        # dy goes the way that x went in forward. A demotion between the two must not mix FP8 and BF16 operands.
        if isinstance(left, Carrier) and left.inverse is None:
            scaled: Operand = Carrier(grad)
            if record:
                buffers.record_demoted(grad, slot)
        else:
            scaled = buffers.activation(grad, slot, record, needs[1])

        grad_rows = None if right is None or not needs[0] else scaled.nn(right)
        grad_weight = scaled.tn(left, self.wide) if needs[1] else None
        self.release(record)
        return grad_rows, grad_weight, grad_bias

    def release(self, record: bool) -> None:
        """Backward has used the quantised weight: drop it where the buffers allow that."""
        if record and self.slot_buffers.may_release():
            self.slot_buffers.weights.pop(self.slot, None)


class NativeLinear(NativeLayer, nn.Linear):  # pyright: ignore[reportIncompatibleVariableOverride]
    """Replaces an nn.Linear."""

    plain = nn.Linear


@cache
def _in_place_of(kind: type[nn.Module]) -> type[NativeLayer]:
    """The class that replaces layers of class `kind`: one for each, so that equal blocks share their compiled code."""
    if kind is nn.Linear:
        return NativeLinear
    # Conv1D keeps its weight as [in, out]. The transposed view costs a copy when it is cast.
    body = {"plain": kind, "matrix": lambda self: self.weight.t(), "__module__": __name__}
    return type(f"Native{kind.__name__}", (NativeLayer, kind), body)


class _Matmul(torch.autograd.Function):
    """The eager Linear: GEMM 1 in forward, GEMMs 2 and 3 in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: NativeLayer, record: bool
    ) -> Tensor:
        ctx.layer = layer
        ctx.record = record
        ctx.shape = x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        with operands_as_they_are(x.device.type):
            rows = x.reshape(-1, x.shape[-1])
            out, left, right = layer.multiply(rows, weight, bias, record, ctx.needs_input_grad[:3])

        # Keep of each operand what backward uses: x for the weight gradient, W for the input gradient. A tensor that is
        # not kept leaves a None. Of a gathered weight only the Parameter is kept, whose memory the engine frees and
        # fills again.
        kept_left, ctx.left = left.kept()
        kept_right, ctx.right = right.kept()
        if layer.slot_buffers.gathered:
            kept_right, ctx.right = (weight,), None
        ctx.of_left = len(kept_left)
        wants_rows, wants_weight = ctx.needs_input_grad[:2]
        if not wants_weight:
            kept_left = (None,) * len(kept_left)
        if not wants_rows:
            kept_right = (None,) * len(kept_right)
        ctx.save_for_backward(*kept_left, *kept_right)
        # Not a view: the code that follows may work on it in place.
        return torch.ops.aten._unsafe_view.default(out, [*x.shape[:-1], weight.shape[0]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        left = ctx.left(*saved[: ctx.of_left])
        of_right = saved[ctx.of_left :]
        right = None
        if ctx.right is not None:
            right = ctx.right(*of_right)
        elif ctx.needs_input_grad[0]:
            with operands_as_they_are(grad_output.device.type):
                right = ctx.layer.cast_again(of_right[0], left)

        grad = grad_output.reshape(-1, grad_output.shape[-1])
        with operands_as_they_are(grad.device.type):
            grad_rows, grad_weight, grad_bias = ctx.layer.gradients(
                grad, left, right, ctx.record, ctx.needs_input_grad[:3]
            )

        grad_x = None if grad_rows is None else grad_rows.reshape(ctx.shape)
        if grad_bias is not None:
            grad_bias = grad_bias.to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None


def _linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    handle: Tensor,
    record: bool,
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The compiled Linear's forward: y, and the quantised x with its inverse scale, which only backward uses.

    rows: x, bfloat16 [m, k].
    handle: of the layer.
    wide: as the layer's. Only the fake kernel of backward needs it, which cannot find the layer.

    Returns y bfloat16 [m, n], x as a carrier's bfloat16 [m, k], and its inverse scale float32 [1]. The quantised
    weight stays with the layer: it serves several calls, and the compiler may reuse the memory of an operator's output.
    """
    layer: NativeLayer = layer_of(handle)
    with operands_as_they_are(rows.device.type):
        out, left, _ = layer.multiply(rows, weight, bias, record)
    assert isinstance(left, Carrier)
    # An operator's outputs may not alias its inputs, and a demoted layer's operand may be the input itself.
    values = left.values.clone() if left.inverse is None else left.values
    # Backward may come after the scales have moved: it needs the one of this cast.
    inverse = layer.slot_buffers.inverses[layer.slot]
    return out, values, torch.tensor([inverse], device=rows.device)


def _fake_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    handle: Tensor,
    record: bool,
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    return out, rows.new_empty(rows.shape), rows.new_empty(1, dtype=torch.float32)


def _linear_backward(
    grad: Tensor,
    left: Tensor,
    left_inverse: Tensor,
    weight: Tensor,
    handle: Tensor,
    record: bool,
    needs: list[bool],
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The compiled Linear's backward: gradients of x, W (bfloat16, or float32 if `wide`) and bias (float32).

    A gradient that `needs` does not ask for has shape [0].

    left, left_inverse: the quantised x and its inverse scale, from forward.
    """
    layer: NativeLayer = layer_of(handle)
    with operands_as_they_are(grad.device.type):
        x: Operand = Carrier(left)
        if layer.in_bf16(record):
            w: Operand = plain_operand(weight)
        else:
            # The weight is forward's operand, or one under a newer scale if scales moved since. Both are right.
            x = Carrier(left, left_inverse.item())
            w = layer.quantized_weight(weight, record)
        wanted = (needs[0], needs[1], needs[2])
        rows, weights, bias = layer.gradients(grad, x, w, record, wanted)

    return as_tensors(grad, rows, weights, bias, wide)


def _fake_linear_backward(
    grad: Tensor,
    left: Tensor,
    left_inverse: Tensor,
    weight: Tensor,
    handle: Tensor,
    record: bool,
    needs: list[bool],
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(grad, left, weight, needs, wide)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, weight, bias, handle, ctx.record, ctx.wide = inputs
    _, left, left_inverse = output
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(left, left_inverse, weight, handle)


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    needs = [bool(need) for need in ctx.needs_input_grad[:3]]
    found = _ops.fp8_linear_backward(grad, *ctx.saved_tensors, ctx.record, needs, ctx.wide)
    return *as_autograd_wants(found, needs, ctx.bias_dtype), None, None, None


define("fp8_linear", _linear, _fake_linear, _backward, _setup)
define("fp8_linear_backward", _linear_backward, _fake_linear_backward)
_ops: Any = torch.ops.hopper_harness
linear_operator: Callable[..., tuple[Tensor, Tensor, Tensor]] = _ops.fp8_linear


# The largest block, in bytes, that glibc still takes from its heap after it has seen one of that size freed.
_LARGEST_IN_HEAP = 32 * 2**20 - 2**13


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step, in the whole process. Harmless without glibc.

    By default glibc returns large freed blocks to the system. Each of their pages then costs a page fault when it is
    allocated again: 5% of a step on a CPU. How much glibc keeps grows with the largest block that was ever freed
    (M_MMAP_THRESHOLD in mallopt(3)).
    """
    torch.empty(_LARGEST_IN_HEAP, dtype=torch.uint8, device="cpu")


class NativeBackend:
    """Delayed scaling for the Linear layers that the plan names. One SlotBuffers holds the state of all of them.

    fp8_units: whether GEMMs are `torch._scaled_mm` on FP8 bytes; None: where the GPU has FP8 units. Tests set it to
    True on a CPU, which emulates `torch._scaled_mm`.
    """

    def __init__(
        self,
        plan: Plan,
        recipe: Recipe,
        model: nn.Module,
        device: torch.device,
        fp8_units: bool | None = None,
    ) -> None:
        self.layers = plan.fp8_layers()
        if device.type == "cpu":
            _keep_freed_memory()

        # One state for all slots: input, weight and grad_output of each layer.
        backward = "e5m2" if recipe.fp8.format == "hybrid" else "e4m3"
        formats = ["e4m3", "e4m3", backward] * len(self.layers)
        on_units = fp8_units
        if on_units is None:
            on_units = has_fp8_units(device)
        buffers = _buffers_of(on_units)
        self.slot_buffers = buffers(plan.slot_names(), formats, recipe.fp8, device)
        if recipe.layers.fuse:
            self.slot_buffers.fuse_casts()

        # Each planned layer is replaced by one of ours with the same Parameters.
        def native(linear: nn.Linear) -> NativeLayer:
            return shallow_copy(linear, _in_place_of(type(linear)))

        self.modules = swap_linears(model, self.layers, native)
        self._blocks = Blocks(model, NativeLayer)
        for index, module in enumerate(self.modules.values()):
            module.attach(self.slot_buffers, 3 * index, self._blocks.of(module))
        self.slot_names = self.slot_buffers.names
        self.note = self.slot_buffers.kernel_note
        self.fell_back_to = ""

    @property
    def demoted(self) -> tuple[str, ...]:
        """Layers that run in BF16 now, as named in slots (block numbers padded)."""
        names = [name for name, module in self.modules.items() if module.demoted]
        return tuple(map(pad_numbers, names))

    @contextmanager
    def context(self) -> Iterator[None]:
        """FP8 in the converted layers, bf16 autocast elsewhere. With gradients off the FP8 state does not change."""
        with self._active(), planned_autocast(self.slot_buffers.device, torch.bfloat16):
            yield

    @contextmanager
    def backward_context(self, last: bool | None = None) -> Iterator[None]:
        """Around backward. Activation checkpointing recomputes forwards there, which must give the same bits."""
        self.slot_buffers.backward_begins(last)
        with self._active():
            yield

    @contextmanager
    def _active(self) -> Iterator[None]:
        if self.slot_buffers.active:
            fix = "leave the first context before the next"
            raise MisuseError(Problem("precision contexts do not nest", "context()", fix=fix))
        self.slot_buffers.active = True
        try:
            yield
        finally:
            self.slot_buffers.active = False

    def gather_weights(self) -> None:
        """As `PrecisionBackend.gather_weights`: backward casts the weight again, to the same bits."""
        self.slot_buffers.gathered = True

    def begin_window(self, sample: bool) -> None:
        """An optimizer step begins. sample: measure underflow, clipped share and SQNR too."""
        if sample is not self.slot_buffers.sampling:
            self.slot_buffers.sampling = sample
            self._mark_blocks()
        self.slot_buffers.begin_window(sample)

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Backward of one micro-batch is done. reduce: MAX over ranks, used only under `roll: micro_batch`."""
        self.slot_buffers.end_micro_batch(reduce)

    def amax(self) -> Tensor:
        """The staged amaxes, float32 [slots], for the window's one MAX all-reduce; a copy."""
        self.slot_buffers.before_update()
        return self.slot_buffers.staged()

    def end_window(
        self,
        amax: Tensor,
        skip: Tensor,
        mean: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Update scales unless the step was skipped; float32 [8, slots] statistics, rows as in `facts.SlotStats`."""
        self.slot_buffers.end_window(amax, skip)
        sums = self.slot_buffers.sums
        if self.slot_buffers.sampling:
            sums = mean(sums)
        return self.slot_buffers.stats(sums)

    def scrubbed(self) -> Tensor:
        """Infinite amaxes dropped in this window, float32 0-d."""
        return self.slot_buffers.scrubbed

    def switch(self, demote: Sequence[str], promote: Sequence[str]) -> None:
        """Move layers (padded names) to BF16 and back, between two steps."""
        by_name = {pad_numbers(name): module for name, module in self.modules.items()}
        self.slot_buffers.demoted |= {by_name[name].slot for name in demote}
        self.slot_buffers.demoted -= {by_name[name].slot for name in promote}
        self._mark_blocks()

    def _mark_blocks(self) -> None:
        demoted = [module for module in self.modules.values() if module.demoted]
        self._blocks.mark(self.slot_buffers.sampling, demoted)

    def fall_back(self, precision: str) -> None:
        """Every layer to BF16 for good: FP8 layers have no other precision below them, whatever `precision` names."""
        self.fell_back_to = precision
        self.switch([pad_numbers(layer) for layer in self.layers], ())

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """The slots' state and the demoted set."""
        tensors, meta = self.slot_buffers.state_dict()
        return tensors, {**meta, "demoted": list(self.demoted), "lowered": self.fell_back_to}

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore scales, histories and which layers are in BF16. Raises CheckpointError if slots differ.

        A checkpoint of a run without FP8 resets the FP8 state. A downgrade in that run says nothing about FP8.
        """
        self.slot_buffers.load_state_dict(tensors, meta)
        self.fell_back_to = meta["lowered"] if meta["slots"] else ""
        self.slot_buffers.demoted.clear()
        self.switch(meta["demoted"], ())


def _buffers_of(on_units: bool) -> type[SlotBuffers]:
    if not on_units:
        return SlotBuffers
    # Imported only where it is used: it brings Triton and dynamo, which take seconds to import.
    from harness.precision.backends.native_fp8 import Fp8SlotBuffers

    return Fp8SlotBuffers
