"""Dynamic FP8 scaling by torchao: its own casts and GEMMs, watched, eager or inside `torch.compile`.

Under dynamic scaling each cast computes its scale from its own tensor. torchao makes the casts and the three GEMMs of
each planned Linear (see `native` for them), and keeps neither amax nor scale. `WatchedLinear` measures both.

Under torch.compile a layer goes one of two ways:

- Usually the compiler traces torchao's casts and GEMMs. An amax leaves the graph through the operator torchao_note,
  which claims to write to the GEMM's result. The compiler can therefore not drop it, it costs no copy, and the state
  that it writes to is no input of the graph. In a sampled window torchao_observe takes its place, which measures the
  tensor itself.
- In a block in which a layer is demoted, one operator does everything when it runs, as in native_fp8. torchao's casts
  are then eager, and slow: a step in which every block did so took three to five times as long (inferred from an H100's
  record, docs/studies/hopper.md).

A block is compiled three times at most, however often layers switch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import function
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import ScalingType
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole
from torchao.float8.float8_utils import amax_to_scale

from harness.core.errors import CheckpointError, Problem
from harness.core.facts import pad_numbers
from harness.core.protocols import Meta, TensorDict
from harness.precision import scaling
from harness.precision.backends.native_triton import load_stats
from harness.precision.blocks import Block, Blocks
from harness.precision.layers import pickled_as_plain, shallow_copy, swap_linears
from harness.precision.once import once_differentiable
from harness.precision.operators import define, layer_of, register
from harness.precision.plan import Plan
from harness.precision.products import planned_autocast
from harness.precision.recipe import Recipe
from harness.precision.scaling import SampledStats

# Attributes that torchao adds to a Linear.
_OF_TORCHAO = (
    "config",
    "linear_mm_config",
    "scaling_type_input",
    "scaling_type_weight",
    "scaling_type_grad_output",
)
# Attributes that a plain Linear does not have, or that a copy must not share.
_OF_THE_LAYER = {"watch", "slot", "block", "handle", "follows", "_compiled_call_impl"}


class Watch:
    """What the layers of one model measure, and which of them are in BF16.

    amax: float32 [slots], the largest of this window.
    stats: sums of what casts lose, in sampled windows.
    demoted: first slots of the layers in BF16.
    active: whether a precision context is entered.
    """

    def __init__(self, stats: SampledStats, device: torch.device) -> None:
        self.amax = torch.zeros(len(stats.formats), device=device)
        self.stats = stats
        self.demoted: set[int] = set()
        self.active = False

    def observe(self, slot: int, x: Tensor) -> None:
        """Measure `x`, which is cast, or which would be if its layer were in FP8."""
        self.note(slot, scaling.amax(x).reshape(1))
        self.stats.add(slot, x)

    def note(self, slot: int, amax: Tensor) -> None:
        """Raise the amaxes of the slots from `slot` on to `amax`, float32 [n]."""
        noted = self.amax[slot : slot + len(amax)]
        torch.maximum(noted, amax, out=noted)


class WatchedLinear(Float8Linear):
    """torchao's Linear inside a precision context, in BF16 there while demoted, and a plain Linear outside of it.

    watch: what is measured, shared by all layers of the model.
    slot: number of its first slot; the three are input, weight, grad_output.
    block: the layers that are compiled together with it.
    handle: int64 0-d on the CPU, by which a compiled graph finds the layer; neither parameter nor buffer.
    follows: whether this is a deep copy. It computes in FP8 or BF16 as the original does, and measures nothing.
    """

    watch: Watch
    slot: int
    block: Block
    handle: Tensor
    follows: bool = False

    def attach(self, watch: Watch, slot: int, block: Block) -> None:
        """Take slots `slot` to `slot + 2` of `watch`."""
        self.watch = watch
        self.slot = slot
        self.block = block
        self.handle = register(self)

    @property
    def demoted(self) -> bool:
        """Whether it runs in BF16 now. It is measured all the same."""
        return self.slot in self.watch.demoted

    def in_bf16(self, x: Tensor) -> bool:
        """Whether products with `x` run in BF16: the layer is demoted, or `x` is empty, which has no scale."""
        return self.demoted or not x.numel()

    def forward(self, input: Tensor) -> Tensor:
        weight = cast("Tensor", self.weight)
        bias = cast("Tensor | None", self.bias)
        # Integers go to F.linear too: its error says what is wrong with them.
        if not self.watch.active or not input.is_floating_point():
            return F.linear(input, weight, bias)

        # torchao casts under CUDA's autocast only. Cast here, the input is the same on every device.
        dtype = input.dtype
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.bfloat16
        x = input.to(torch.bfloat16)

        record = torch.is_grad_enabled() and not self.follows
        if not torch.compiler.is_compiling():
            out: Tensor = _Watched.apply(x, weight, bias, self, record)
        elif self.block.demoted:
            out = _ops.torchao_switching(x, weight, bias, self.handle, record)
        else:
            # The compiler makes a guard of every attribute that is read here. Blocks share code if they agree on all.
            # What records nothing is not measured, so no guard may compile it again in a sampled window.
            sample = record and self.watch.stats.sampling
            given = (x, weight, bias, self.handle, record, sample)
            out = _traced(*given, self.linear_mm_config, self.config)
        return out.to(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> WatchedLinear:
        made = memo[id(self)] = type(self).__new__(type(self))
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_THE_LAYER}
        made.__dict__.update(copy.deepcopy(state, memo))
        made.follows = True
        made.attach(self.watch, self.slot, self.block)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is not WatchedLinear:  # parametrised: torch refuses it with a reason
            return super().__reduce_ex__(protocol)
        return pickled_as_plain(self, {*_OF_TORCHAO, *_OF_THE_LAYER})

    def multiply(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        record: bool,
    ) -> Tensor:
        """y = x W^T + b, bfloat16 [..., n], in FP8 or BF16. x: bfloat16 [..., k]."""
        if record:
            self.watch.observe(self.slot, x)
            self.watch.observe(self.slot + 1, weight)
        if self.in_bf16(x):
            if bias is not None:
                bias = bias.to(x.dtype)
            return _with_bias(F.linear(x, weight.to(x.dtype), bias), None)
        return _with_bias(_product(x, weight, self.linear_mm_config, self.config), bias)

    def gradients(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        record: bool,
        bias: bool,
        frozen: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of x [..., k], weight [n, k] and bias [n], bfloat16.

        grad: bfloat16 [..., n].
        bias: whether the bias wants one; else its gradient is None.
        frozen: whether the weight wants none; its gradient is None then.
        """
        if record:
            self.watch.observe(self.slot + 2, grad)
        rows = grad.reshape(-1, grad.shape[-1])
        grad_bias = rows.sum(0) if bias else None
        if self.in_bf16(x):
            grad_x = grad @ weight.to(grad.dtype)
            grad_weight = None
            if not frozen:
                grad_weight = rows.t() @ x.reshape(-1, x.shape[-1])
            return grad_x, grad_weight, grad_bias
        # A frozen weight has no gradient, so its product is left out.
        if frozen:
            grad_x = _input_gradient(grad, weight, self.linear_mm_config, self.config)
            return grad_x, None, grad_bias
        grad_x, grad_weight = _gradients(grad, x, weight, self.linear_mm_config, self.config)
        return grad_x, grad_weight, grad_bias


def _watched(linear: nn.Linear, config: Float8LinearConfig) -> WatchedLinear:
    """A shallow copy of `linear`, with what torchao adds to a Linear. torchao's own layer would lose its hooks."""
    theirs = convert_to_float8_training(linear, config=config)
    made = shallow_copy(linear, WatchedLinear)
    for name in _OF_TORCHAO:
        setattr(made, name, getattr(theirs, name))
    return made


class _Kept(SimpleNamespace):
    """The context for torchao's autograd.Function, whose forward and backward are called here one by one."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def _product(x: Tensor, weight: Tensor, gemms: Any, config: Any) -> Tensor:
    """torchao's forward: casts of x [..., k] and weight [n, k], and their product [..., n]."""
    return matmul_with_hp_or_float8_args.forward(_Kept(), x, weight.t(), gemms, config)


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, gemms: Any, config: Any
) -> tuple[Tensor, Tensor]:
    """torchao's backward: gradients of x and weight. It casts both again, so nothing else is kept for it."""
    kept = _Kept(saved_tensors=(x, weight.t()), linear_mm_config=gemms, config=config)
    grad_x, turned, *_ = matmul_with_hp_or_float8_args.backward(kept, grad)
    return grad_x, turned.t()


def _input_gradient(grad: Tensor, weight: Tensor, gemms: Any, config: Any) -> Tensor:
    """The input gradient alone, for a frozen weight. torchao's backward would compute the weight gradient too."""

    def cast(x: Tensor, how: Any, role: GemmInputRole) -> Tensor:
        if how.scaling_type is ScalingType.DISABLED:
            return x
        return hp_tensor_to_float8_dynamic(
            x,
            how.target_dtype,
            gemms,
            gemm_input_role=role,
            scaling_granularity=how.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(-1, how.scaling_granularity),
            round_scales_to_power_of_2=config.round_scales_to_power_of_2,
        )

    # The two casts and the one product of torchao's backward that the input gradient is made of.
    rows = grad.reshape(-1, grad.shape[-1])
    left = cast(rows, config.cast_config_grad_output, GemmInputRole.GRAD_OUTPUT)
    right = cast(weight.t(), config.cast_config_weight_for_grad_input, GemmInputRole.WEIGHT)
    product = torch.mm(left, right.t())
    return product.reshape(*grad.shape[:-1], weight.shape[1])


def _with_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    """out + bias, and no view: the code that follows may work on it in place."""
    if bias is None:
        return torch.ops.aten._unsafe_view.default(out, out.shape)
    return out + bias.to(out.dtype)


class _Watched(torch.autograd.Function):
    """The eager layer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: WatchedLinear, record: bool
    ) -> Tensor:
        ctx.layer = layer
        ctx.record = record
        ctx.save_for_backward(x, weight)
        return layer.multiply(x, weight, bias, record)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        gradients = ctx.layer.gradients(
            grad, x, weight, ctx.record, wants_bias, frozen=not wants_weight
        )
        return *gradients, None, None


@torch._dynamo.allow_in_graph
def _traced(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    handle: Tensor,
    record: bool,
    sample: bool,
    gemms: Any,
    config: Any,
) -> Tensor:
    return _Traced.apply(x, weight, bias, handle, record, sample, gemms, config)


class _Traced(torch.autograd.Function):
    """The FP8 layer behind `handle` as the compiler traces it, forward and backward.

    record: whether to record amaxes.
    sample: whether to measure statistics with them; only where `record` is true.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        handle: Tensor,
        record: bool,
        sample: bool,
        gemms: Any,
        config: Any,
    ) -> Tensor:
        ctx.record = record
        ctx.sample = sample
        ctx.gemms = gemms
        ctx.config = config
        ctx.save_for_backward(x, weight, handle)
        out = _product(x, weight, gemms, config)
        # Slots 0 and 1 of the layer: input and weight.
        if sample:
            _ops.torchao_observe(out, x, handle, 0)
            _ops.torchao_observe(out, weight, handle, 1)
        elif record:
            amaxes = torch.stack([scaling.amax(x), scaling.amax(weight)])
            _ops.torchao_note(out, amaxes, handle, 0)
        return _with_bias(out, bias)

    @staticmethod
    @function.once_differentiable  # the compiler traces this one
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, handle = ctx.saved_tensors
        needs = ctx.needs_input_grad
        bias = None
        if needs[2]:
            bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        found = *_gradients(grad, x, weight, ctx.gemms, ctx.config), bias
        if ctx.record:
            # The compiler drops a gradient that nobody needs, and every operator that writes to it. So the operator
            # claims to write to one that is needed.
            needed = found[needs.index(True)]
            if ctx.sample:
                _ops.torchao_observe(needed, grad, handle, 2)
            else:
                amax = scaling.amax(grad).reshape(1)
                _ops.torchao_note(needed, amax, handle, 2)
        return *found, None, None, None, None, None


def _note(after: Tensor, amax: Tensor, handle: Tensor, first: int) -> None:
    """The operator torchao_note: raise the amaxes of the layer's slots from `first` on to `amax`, float32 [n].

    after: a tensor that the schema declares as written. It is left alone.
    """
    layer = layer_of(handle)
    layer.watch.note(layer.slot + first, amax)


def _fake_note(after: Tensor, amax: Tensor, handle: Tensor, first: int) -> None:
    return None


def _observe(after: Tensor, x: Tensor, handle: Tensor, role: int) -> None:
    """The operator torchao_observe: measure `x`, which the layer casts in that role. after: as for `_note`."""
    layer = layer_of(handle)
    layer.watch.observe(layer.slot + role, x)


def _fake_observe(after: Tensor, x: Tensor, handle: Tensor, role: int) -> None:
    return None


@contextmanager
def _as_outside() -> Iterator[None]:
    """Inside an operator: autograd's dispatch keys are on, as they are outside of it.

    torchao's scales by row support `reshape` only with these keys on. torch.utils.checkpoint switches a key on in the
    same way.
    """
    with (
        torch.no_grad(),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False),
    ):
        yield


def _switching(
    x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, record: bool
) -> Tensor:
    """The operator torchao_switching: the eager layer's forward, in FP8 or BF16, with statistics in sampled windows."""
    with _as_outside():
        return layer_of(handle).multiply(x, weight, bias, record)


def _fake_switching(
    x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, record: bool
) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _switching_backward(
    grad: Tensor, x: Tensor, weight: Tensor, handle: Tensor, record: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator torchao_switching_backward: gradients of x, weight and bias, bfloat16.

    The bias gradient has shape [0] unless `bias`.
    """
    with _as_outside():
        grad_x, grad_weight, grad_bias = layer_of(handle).gradients(grad, x, weight, record, bias)
    assert grad_weight is not None
    if grad_bias is None:
        grad_bias = grad.new_empty(0)
    return grad_x, grad_weight.contiguous(), grad_bias


def _fake_switching_backward(
    grad: Tensor, x: Tensor, weight: Tensor, handle: Tensor, record: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = grad.new_empty(x.shape)
    grad_weight = grad.new_empty(weight.shape)
    grad_bias = grad.new_empty(grad.shape[-1] if bias else 0)
    return grad_x, grad_weight, grad_bias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, handle, ctx.record = inputs
    ctx.save_for_backward(x, weight, handle)


def _switching_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    wants_bias = ctx.needs_input_grad[2]
    grad_x, grad_weight, grad_bias = _ops.torchao_switching_backward(
        grad, *ctx.saved_tensors, ctx.record, wants_bias
    )
    # Autograd wants None for the operator's empty tensor, and for handle and record.
    if not wants_bias:
        grad_bias = None
    return grad_x, grad_weight, grad_bias, None, None


define("torchao_note", _note, _fake_note, mutates=("after",))
define("torchao_observe", _observe, _fake_observe, mutates=("after",))
define("torchao_switching", _switching, _fake_switching, _switching_gradients, _setup)
define("torchao_switching_backward", _switching_backward, _fake_switching_backward)
_ops: Any = torch.ops.hopper_harness


class TorchaoBackend:
    """torchao's Linears in the planned layers. Each cast computes its own scale from its own amax.

    Saturation is therefore never over 1. Scales by rows are powers of two, and torchao takes an amax under 1e-12 for
    1e-12: saturation is under 1 there. FP8 runs inside a precision context only. Outside of one, and in demoted layers,
    it is `F.linear` on the same Parameters. On a CPU torchao emulates its GEMMs. On a GPU it gains speed only under
    torch.compile.
    """

    def __init__(
        self,
        plan: Plan,
        recipe: Recipe,
        model: nn.Module,
        device: torch.device,
    ) -> None:
        self.layers = plan.fp8_layers()
        self.device = device
        self.slot_names = plan.slot_names()
        self.note = f"torchao {recipe.fp8.dynamic}"

        # Each planned layer is replaced by one of ours.
        config = Float8LinearConfig.from_recipe_name(recipe.fp8.dynamic)
        config = replace(config, emulate=device.type == "cpu")
        swapped = swap_linears(model, self.layers, lambda linear: _watched(linear, config))
        self.modules = {pad_numbers(name): module for name, module in swapped.items()}

        # Each has three slots. By rows, torchao casts gradients to e4m3.
        tensorwise = recipe.fp8.dynamic == "tensorwise"
        self._gradient = "e5m2" if tensorwise else "e4m3"
        formats = ["e4m3", "e4m3", self._gradient] * len(self.layers)
        largest = [scaling.FORMATS[fmt].max for fmt in formats]
        self._fp8_max = torch.tensor(largest, device=device)
        measure, in_pytorch = load_stats(device)
        self.note += in_pytorch
        self._powers = config.round_scales_to_power_of_2
        sampled = SampledStats(
            formats, device, by_row=not tensorwise, measure=measure, scale_of=self._scale_of
        )
        self._watch = Watch(sampled, device)
        self._blocks = Blocks(model, WatchedLinear)
        for index, module in enumerate(self.modules.values()):
            module.attach(self._watch, 3 * index, self._blocks.of(module))
        self.fell_back_to = ""

    @property
    def demoted(self) -> tuple[str, ...]:
        """Layers that run in BF16 now (padded names)."""
        return tuple(name for name, module in self.modules.items() if module.demoted)

    @contextmanager
    def context(self) -> Iterator[None]:
        """bf16 autocast. Converted layers cast to FP8 themselves. With gradients off nothing is measured."""
        with self.backward_context(), planned_autocast(self.device, torch.bfloat16):
            yield

    @contextmanager
    def backward_context(self, last: bool | None = None) -> Iterator[None]:
        """Around backward. Activation checkpointing recomputes forwards there, which must give the same bits."""
        self._watch.active = True
        try:
            yield
        finally:
            self._watch.active = False

    def gather_weights(self) -> None:
        """Nothing to change: torchao's backward casts the weight again."""

    def begin_window(self, sample: bool) -> None:
        """An optimizer step begins: forget the last one's amaxes. sample: also measure what casts lose."""
        self._watch.amax.zero_()
        self._watch.stats.begin(sample)
        self._mark_blocks()

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Nothing to roll."""

    def amax(self) -> Tensor:
        """float32 [slots]; a copy."""
        return self._watch.amax.clone()

    def end_window(
        self,
        amax: Tensor,
        skip: Tensor,
        mean: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """float32 [8, slots] as the protocol says. The scale is that of the tensor with the largest amax.

        Clipped share, underflow and SQNR are those of casts whose scales lie along the last dimension.
        """
        scale = self._scale_of(amax, "e4m3")
        scale[2::3] = self._scale_of(amax[2::3], self._gradient)
        scale = torch.where(amax > 0, scale, torch.ones_like(amax))
        first_rows = torch.stack([amax, scale, amax * scale / self._fp8_max])
        return torch.cat([first_rows, self._watch.stats.rows(mean)])

    def _scale_of(self, amax: Tensor, fmt: str) -> Tensor:
        """The scale with which torchao casts a tensor or row of this amax."""
        return amax_to_scale(amax, scaling.FORMATS[fmt].dtype, self._powers)

    def scrubbed(self) -> Tensor:
        """Always 0: there is no history to scrub."""
        return torch.zeros((), device=self.device)

    def switch(self, demote: Sequence[str], promote: Sequence[str]) -> None:
        """Move layers (padded names) to BF16 and back, between two steps."""
        self._watch.demoted |= {self.modules[name].slot for name in demote}
        self._watch.demoted -= {self.modules[name].slot for name in promote}
        self._mark_blocks()

    def _mark_blocks(self) -> None:
        demoted = [module for module in self.modules.values() if module.demoted]
        self._blocks.mark(self._watch.stats.sampling, demoted)

    def fall_back(self, precision: str) -> None:
        """Every layer to BF16 for good: FP8 layers have no other precision below them, whatever `precision` names."""
        self.fell_back_to = precision
        self.switch([pad_numbers(layer) for layer in self.layers], ())

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """The last amaxes (as a history of one row) and the demoted layers. Dynamic scaling has no other state."""
        tensors = {"history": self._watch.amax[None], "scale": torch.ones_like(self._watch.amax)}
        meta: Meta = {
            "slots": list(self.slot_names),
            "formats": ["dynamic"] * len(self.slot_names),
            "demoted": list(self.demoted),
            "lowered": self.fell_back_to,
        }
        return tensors, meta

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore the last amaxes and which layers are in BF16. Raises CheckpointError if the slots differ.

        A checkpoint of a run without FP8 resets all of it. A downgrade in that run says nothing about FP8.
        """
        if not meta["slots"]:
            self._watch.amax.zero_()
            self.fell_back_to = ""
            self._watch.demoted.clear()
            self.switch((), ())
            return

        # Delayed scaling has a history of several rows.
        same_slots = list(meta["slots"]) == list(self.slot_names)
        if not same_slots or tensors["history"].shape[0] != 1:
            what = "the saved FP8 state has other slots, or is that of delayed scaling"
            fix = "resume with the recipe and model that wrote the checkpoint"
            raise CheckpointError(Problem(what, "fp8 state", fix=fix))
        self._watch.amax.copy_(tensors["history"][0])
        self.fell_back_to = meta["lowered"]
        self._watch.demoted.clear()
        self.switch(demote=meta["demoted"], promote=())
