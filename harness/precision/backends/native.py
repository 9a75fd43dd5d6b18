"""Native FP8 delayed scaling in PyTorch: the backend and its Linear, eager or inside `torch.compile`.

The three GEMMs of a Linear y = x W^T: forward multiplies x and W, both E4M3; backward multiplies grad_output (E5M2)
with W for the input gradient and with x for the weight gradient. Each operand is quantised once and reused. On a GPU
with FP8 units the GEMMs are `torch._scaled_mm` on real FP8 tensors. Elsewhere raw FP8 values ride in bfloat16, which
holds each of them exactly, and the scales go into the GEMM's alpha, so that an output is rounded once, as in
Transformer Engine. The bias gradient comes from the unquantised grad_output.

For the compiler a Linear is operators that it cannot look into, so that a block compiles into one graph. What may
change between two steps (scales, demotion, sampling) is read from the layer when the operator runs, so no switch
recompiles. The operators read and write FP8 state that the compiler does not know of. It may drop a call whose
results nobody uses, or merge two calls with equal inputs, neither of which changes an amax that matters.
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
from torch.autograd.function import once_differentiable

from harness.core.errors import MisuseError, Problem
from harness.core.protocols import Meta, TensorDict
from harness.precision.backends.native_gemm import (
    Carrier,
    Operand,
    has_fp8_units,
    operands_as_they_are,
    plain_operand,
)
from harness.precision.backends.slot_buffers import SlotBuffers
from harness.precision.blocks import Block, Blocks
from harness.precision.layers import pickled_as_linear, swap_linears, twin
from harness.precision.operators import define, layer_of, register
from harness.precision.plan import Plan, pad_numbers
from harness.precision.products import planned_autocast
from harness.precision.recipe import Recipe

Needs = tuple[bool, bool, bool]
# Attributes that a plain Linear has not, or that must not be copied.
_OF_THE_LAYER = {"slot_buffers", "slot", "block", "handle", "follows", "_compiled_call_impl"}


class NativeLayer(nn.Module):
    """A Linear whose GEMMs run in FP8 inside a precision context, plain outside of it. Comes before the class of what
    it replaces, `plain`, whose Parameters it shares.

    slot: number of its first slot (input, weight, grad_output).
    handle: int64 0-d on the CPU, how a compiled graph finds the layer; neither parameter nor buffer.

    A deep copy (an EMA of the weights, a teacher) has Parameters of its own and follows the original: inside a
    precision context it computes in FP8 or BF16 as the original does, with the same scales, but it records no amax and
    no statistics, whether or not gradients flow through it. Only the original's tensors set scales. A copy of a
    compiled block is not compiled.
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
        self.slot_buffers, self.slot, self.block, self.handle = buffers, slot, block, register(self)

    @property
    def demoted(self) -> bool:
        """In BF16 now, keeping a shadow amax so that the layer can return to FP8 with a warm scale."""
        return self.slot in self.slot_buffers.demoted

    def forward(self, input: Tensor) -> Tensor:
        if (
            not self.slot_buffers.active or not input.is_floating_point()
        ):  # F.linear says what is wrong with integers
            return F.linear(input, self.matrix(), self.bias)
        record = torch.is_grad_enabled() and not self.follows
        weight = self.matrix()
        if torch.compiler.is_compiling():
            out = self._compiled(input.reshape(-1, input.shape[-1]), weight, record)
            out = out.reshape(*input.shape[:-1], weight.shape[0])
        else:
            out: Any = _Matmul.apply(input, weight, self.bias, self, record)
        # Where a model turns autocast off it goes on in its own dtype, as after Transformer Engine's Linear.
        return out if torch.is_autocast_enabled(input.device.type) else out.to(input.dtype)

    def _compiled(self, rows: Tensor, weight: Tensor, record: bool) -> Tensor:
        """Traced: every attribute read here is a guard, which two blocks or two windows may share or not."""
        given = (weight, self.bias, self.handle, record)
        if self.slot_buffers.traced is None:
            return linear_operator(rows.to(torch.bfloat16), *given)[0]
        linear, switching = self.slot_buffers.traced
        if self.block.switching:
            return switching(rows.to(torch.bfloat16), *given)
        return linear(rows, *given, self.slot_buffers.gradient, self.slot_buffers.own_casts)

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeLayer:
        made = memo[id(self)] = type(self).__new__(type(self))
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_THE_LAYER}
        made.__dict__.update(copy.deepcopy(state, memo))
        made.follows = True
        made.attach(self.slot_buffers, self.slot, self.block)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        if "plain" not in vars(type(self)):  # parametrised: torch refuses, and says why
            return super().__reduce_ex__(protocol)
        return pickled_as_linear(self, _OF_THE_LAYER, self.plain)

    def quantized_weight(self, weight: Tensor, record: bool, rights: bool = True) -> Operand:
        """`weight` as an operand under the current scale, quantised once per optimizer step.

        Fused optimizers do not bump a Parameter's version: epoch and window stand for it. Without `record` the
        weights may be anything (an evaluation of averaged ones, say) and are quantised every time. rights: backward
        wants it, too.
        """
        if not record:
            return self.slot_buffers.operand(weight.detach(), self.slot + 1, record, rights)
        key = (
            self.slot_buffers.epoch,
            self.slot_buffers.window,
            weight._version,
            weight.data_ptr(),
        )
        held = self.slot_buffers.weights.get(self.slot)
        if held is not None and held[0] == key:
            return held[1]
        plain = weight.detach()
        quantized = self.slot_buffers.operand(plain, self.slot + 1, record)
        # Holding the weight keeps its address: freed, it could be that of the next one that somebody computes.
        self.slot_buffers.weights[self.slot] = (key, quantized, plain)
        return quantized

    def multiply(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        record: bool,
        needs: Needs = (True, True, True),
    ) -> tuple[Tensor, Operand, Operand]:
        """rows W^T + b: bfloat16 [m, n], and both operands, for backward.

        rows: [m, k] of any float dtype. needs: gradients of rows, weight and bias that somebody will want. A demoted
        layer's operands are plain bfloat16.
        """
        buffers, slot = self.slot_buffers, self.slot
        if self.demoted:
            left, right = plain_operand(rows), plain_operand(weight)
            if record:
                buffers.observe(left.values, slot)
                buffers.observe(weight, slot + 1)
        else:
            left = buffers.activation(rows, slot, record, needs[1])
            right = self.quantized_weight(weight, record, needs[0])
        return left.nt(right, bias), left, right

    def gradients(
        self, grad: Tensor, left: Operand, right: Operand, record: bool, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of rows (bfloat16 [m, k]), weight (bfloat16 [n, k]) and bias (float32 [n]); None where not in `needs`.

        grad: [m, n] of any float dtype. The operands are `multiply`'s.
        """
        buffers, slot = self.slot_buffers, self.slot + 2
        grad = grad.to(torch.bfloat16).contiguous()
        grad_bias = grad.sum(0, dtype=torch.float32) if needs[2] else None
        if isinstance(left, Carrier) and left.inverse is None:
            scaled: Operand = Carrier(grad)
            if record:
                buffers.observe(grad, slot)
        else:
            scaled = buffers.activation(grad, slot, record, needs[1])
        grad_rows = scaled.nn(right) if needs[0] else None
        grad_weight = scaled.tn(left) if needs[1] else None
        self.release(record)
        return grad_rows, grad_weight, grad_bias

    def release(self, record: bool) -> None:
        """Backward has used the quantised weight."""
        if record and self.slot_buffers.may_release():
            self.slot_buffers.weights.pop(self.slot, None)


class NativeLinear(NativeLayer, nn.Linear):  # pyright: ignore[reportIncompatibleVariableOverride]
    """In place of a Linear."""

    plain = nn.Linear


@cache
def _in_place_of(kind: type[nn.Module]) -> type[NativeLayer]:
    """The class for layers of class `kind`: one for each, so that equal blocks share their compiled code."""
    if kind is nn.Linear:
        return NativeLinear
    # A transposed view: what it costs is a copy when it is cast.
    body = {"plain": kind, "matrix": lambda self: self.weight.t(), "__module__": __name__}
    return type(f"Native{kind.__name__}", (NativeLayer, kind), body)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: NativeLayer, record: bool
    ) -> Tensor:
        ctx.layer, ctx.record, ctx.shape = layer, record, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        with operands_as_they_are(x.device.type):
            rows = x.reshape(-1, x.shape[-1])
            out, left, right = layer.multiply(rows, weight, bias, record, ctx.needs_input_grad[:3])
        (kept_left, ctx.left), (kept_right, ctx.right) = left.kept(), right.kept()
        wants_rows, wants_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            *(part if wants_weight else None for part in kept_left),
            *(part if wants_rows else None for part in kept_right),
        )
        # Not a view: what follows may work in place on it.
        return torch.ops.aten._unsafe_view.default(out, [*x.shape[:-1], weight.shape[0]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        left, right = ctx.left(*saved[: len(saved) // 2]), ctx.right(*saved[len(saved) // 2 :])
        grad = grad_output.reshape(-1, grad_output.shape[-1])
        with operands_as_they_are(grad.device.type):
            grad_rows, grad_weight, grad_bias = ctx.layer.gradients(
                grad, left, right, ctx.record, ctx.needs_input_grad[:3]
            )
        grad_x = None if grad_rows is None else grad_rows.reshape(ctx.shape)
        return (
            grad_x,
            grad_weight,
            None if grad_bias is None else grad_bias.to(ctx.bias_dtype),
            None,
            None,
        )


def _linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, record: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """rows W^T + b of the layer behind `handle`: bfloat16 [m, n]; then what backward wants, for nobody else.

    rows: bfloat16 [m, k]. The quantised weight stays with the layer: it serves several calls, and the compiler may
    reuse the memory of whatever an operator returns.
    """
    layer: NativeLayer = layer_of(handle)
    with operands_as_they_are(rows.device.type):
        out, left, _ = layer.multiply(rows, weight, bias, record)
    assert isinstance(left, Carrier)
    # An operator's outputs may not alias its inputs.
    values = left.values.clone() if left.inverse is None else left.values
    return out, values, torch.tensor([layer.slot_buffers.inverses[layer.slot]], device=rows.device)


def _fake_linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, record: bool
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows, weight (bfloat16) and bias (float32); one that is not in `needs` has shape [0].

    The quantised weight is the one of forward unless scales were rolled in between, which leaves an equally good one.
    """
    layer: NativeLayer = layer_of(handle)
    with operands_as_they_are(grad.device.type):
        if layer.demoted:
            operands = Carrier(left), plain_operand(weight)
        else:
            operands = Carrier(left, left_inverse.item()), layer.quantized_weight(weight, record)
        rows, weights, bias = layer.gradients(
            grad, *operands, record, (needs[0], needs[1], needs[2])
        )
    nothing = [grad.new_empty(0) if found is None else found for found in (rows, weights)]
    return nothing[0], nothing[1], grad.new_empty(0, dtype=torch.float32) if bias is None else bias


def _fake_linear_backward(
    grad: Tensor,
    left: Tensor,
    left_inverse: Tensor,
    weight: Tensor,
    handle: Tensor,
    record: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    rows = grad.new_empty(left.shape if needs[0] else (0,))
    weights = grad.new_empty(weight.shape if needs[1] else (0,))
    return rows, weights, grad.new_empty(grad.shape[1:] if needs[2] else (0,), dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, weight, bias, handle, ctx.record = inputs
    _, left, left_inverse = output
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(left, left_inverse, weight, handle)


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    needs = [bool(need) for need in ctx.needs_input_grad[:3]]
    found = _ops.fp8_linear_backward(grad, *ctx.saved_tensors, ctx.record, needs)
    rows, weights, bias = (
        value if need else None for value, need in zip(found, needs, strict=True)
    )
    return rows, weights, None if bias is None else bias.to(ctx.bias_dtype), None, None


define("fp8_linear", _linear, _fake_linear, _backward, _setup)
define("fp8_linear_backward", _linear_backward, _fake_linear_backward)
_ops: Any = torch.ops.hopper_harness
linear_operator: Callable[..., tuple[Tensor, Tensor, Tensor]] = _ops.fp8_linear


# The largest block, in bytes, that glibc still takes from its heap once it has seen one freed.
_LARGEST_IN_HEAP = 32 * 2**20 - 2**13


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step, in the whole process; harmless without glibc.

    glibc returns freed memory to the system, and each page costs a page fault when it is allocated again: 5% of a step
    here. How much glibc keeps grows with the largest block that was ever freed (M_MMAP_THRESHOLD in mallopt(3)).
    """
    torch.empty(_LARGEST_IN_HEAP, dtype=torch.uint8, device="cpu")


class NativeBackend:
    """Delayed scaling for the Linear layers that the plan names, in one SlotBuffers.

    fp8_units: multiply FP8 bytes by `torch._scaled_mm`, which a CPU has too, for tests; None: where the GPU can.
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
        backward = "e5m2" if recipe.fp8.format == "hybrid" else "e4m3"
        formats = ["e4m3", "e4m3", backward] * len(self.layers)
        on_units = has_fp8_units(device) if fp8_units is None else fp8_units
        self.slot_buffers = _buffers_of(on_units)(plan.slot_names(), formats, recipe.fp8, device)
        self.modules = swap_linears(
            model, self.layers, lambda linear: twin(linear, _in_place_of(type(linear)))
        )
        self._blocks = Blocks(model, NativeLayer)
        for index, module in enumerate(self.modules.values()):
            module.attach(self.slot_buffers, 3 * index, self._blocks.of(module))
        self.slot_names = self.slot_buffers.names
        self.note = self.slot_buffers.kernel_note
        self.fell_back_to = ""

    @property
    def demoted(self) -> tuple[str, ...]:
        """Layers that run in BF16 now, as named in slots (block numbers padded)."""
        return tuple(pad_numbers(name) for name, module in self.modules.items() if module.demoted)

    @contextmanager
    def context(self) -> Iterator[None]:
        """FP8 in the converted layers, bf16 autocast elsewhere. With gradients off it leaves no trace."""
        with self._active(), planned_autocast(self.slot_buffers.device, torch.bfloat16):
            yield

    @contextmanager
    def backward_context(self, last: bool | None = None) -> Iterator[None]:
        """Around backward: activation checkpointing recomputes forward there, and must compute the same."""
        self.slot_buffers.backward_begins(last)
        with self._active():
            yield

    @contextmanager
    def _active(self) -> Iterator[None]:
        if self.slot_buffers.active:
            raise MisuseError(
                Problem(
                    "precision contexts do not nest",
                    "context()",
                    fix="leave the first context before the next",
                )
            )
        self.slot_buffers.active = True
        try:
            yield
        finally:
            self.slot_buffers.active = False

    def begin_window(self, sample: bool) -> None:
        """An optimizer step begins; `sample`: measure underflow, clipped share and SQNR too."""
        if sample is not self.slot_buffers.sampling:
            self.slot_buffers.sampling = sample
            self._mark_blocks()
        self.slot_buffers.begin_window(sample)

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """After backward of one micro-batch. reduce: MAX over ranks, used only under `roll: micro_batch`."""
        self.slot_buffers.end_micro_batch(reduce)

    def amax(self) -> Tensor:
        """What the window's one MAX all-reduce must carry: staging amax, float32 [slots]; a copy."""
        self.slot_buffers.before_update()
        return self.slot_buffers.staged()

    def end_window(self, amax: Tensor, skip: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        """Update scales unless skipped; float32 [8, slots] statistics (rows: figures of `facts.SlotStats`)."""
        self.slot_buffers.end_window(amax, skip)
        return self.slot_buffers.stats(
            mean(self.slot_buffers.sums) if self.slot_buffers.sampling else self.slot_buffers.sums
        )

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
        self._blocks.mark(
            self.slot_buffers.sampling,
            [module for module in self.modules.values() if module.demoted],
        )

    def fall_back(self, precision: str) -> None:
        """Every layer to BF16 for good: what FP8 layers have to fall to, whatever is asked for."""
        self.fell_back_to = precision
        self.switch([pad_numbers(layer) for layer in self.layers], ())

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """The slots' state and the demoted set."""
        tensors, meta = self.slot_buffers.state_dict()
        return tensors, {**meta, "demoted": list(self.demoted), "lowered": self.fell_back_to}

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore scales, histories and which layers are in BF16. Raises CheckpointError if slots differ.

        What a run without FP8 saved makes all of it new; what such a run fell to says nothing of FP8.
        """
        self.slot_buffers.load_state_dict(tensors, meta)
        self.fell_back_to = meta["lowered"] if meta["slots"] else ""
        self.slot_buffers.demoted.clear()
        self.switch(meta["demoted"], ())


def _buffers_of(on_units: bool) -> type[SlotBuffers]:
    if not on_units:
        return SlotBuffers
    from harness.precision.backends.native_fp8 import (
        Fp8SlotBuffers,
    )  # and with it Triton and dynamo: seconds

    return Fp8SlotBuffers
