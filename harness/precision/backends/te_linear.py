"""te.Linear on a Linear's own Parameters, and what a planned layer needs beside it.

`convert` replaces a Linear by `PlannedLinear`, which is mixed into te.Linear. TE computes the three GEMMs. This file
adds what TE does not do:

- A layer can leave FP8 for BF16 and return, from one step to the next.
- Amaxes are measured where TE keeps none: under current and block scaling, and of layers in BF16.
- A forward without gradients, and a deep copy, record no amax.
- Any number of tokens is accepted. TE's GEMMs take multiples of 16 or 128.
- A norm before the layer, or the first half of an MLP, may be computed in one TE block with it (te_fused).
- A forward that runs again in backward gets the scales of its first run, or an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.core.errors import ConfigError, MisuseError, Problem
from harness.precision.backends import te_block, te_fused
from harness.precision.backends.te_library import Library, Recomputations
from harness.precision.layers import pickled_as_plain
from harness.precision.scaling import SampledStats

# TE's GEMMs take token counts that are multiples of this: tokens are the weight gradient's common dimension. 128 is a
# block of block scaling.
_TOKENS = {"delayed": 16, "current": 16, "block": 128}
# Attributes that a layer makes when it first needs them. A copy makes its own.
_NOT_COPIED = ("silent", "fused")
# The attributes of a plain Linear. On "meta" no random numbers are drawn.
_PLAIN = frozenset(vars(nn.Linear(1, 1, device="meta")))


class Watch:
    """What all converted layers of a model share. Nothing here waits for the device.

    recomputations: finds the forward that a recomputation repeats, and the scales of that forward.
    amax: float32 [slots], running max|x| under current and block scaling, where TE keeps none.
    sampled: sums of what casts lose; None under block scaling, whose casts have a scale for every block.
    everything: whether hooks measure layers in FP8 too, as TE keeps no amax.
    demoted: first slots of the layers in BF16.
    unmeasured: under delayed scaling, `ScalingState.unmeasured`.
    active: whether a forward or backward runs in the precision context.
    with_gradients: whether that context was entered with gradients on.
    in_backward: whether backward runs, so that a forward now is a recomputation.
    rolled_under: whether scales have moved since a forward whose backward is still to come.
    nested: whether this backward recomputes something that itself calls te.checkpoint.
    window: the step's number.
    """

    def __init__(
        self,
        slots: int,
        device: torch.device,
        recomputations: Recomputations,
        everything: bool,
        sampled: SampledStats | None = None,
    ) -> None:
        self.recomputations = recomputations
        self.amax = torch.zeros(slots, device=device)
        self.sampled = sampled
        self.everything = everything
        self.demoted: set[int] = set()
        self.unmeasured: Callable[[int, bool], bool] | None = None
        self.active = False
        self.with_gradients = False
        self.in_backward = False
        self.rolled_under = False
        self.nested = False
        self.window = 0
        self._nothing = torch.full((), torch.nan, device=device)

    def nothing(self, device: torch.device) -> Tensor:
        """NaN, float32 0-d."""
        return self._nothing.to(device)


@torch.no_grad()
def observe(amax: Tensor, x: Tensor) -> None:
    """Raise `amax`, one float32, to max|x|. An infinity counts. A tensor with a NaN changes nothing.

    It is one reduction without temporaries, because under current scaling it runs for every tensor of every layer. That
    a NaN hides the rest of its tensor does no harm: a step with a NaN is not applied.
    """
    if x.numel():
        largest = torch.linalg.vector_norm(x.detach(), torch.inf).float()
        torch.fmax(amax, largest, out=amax)


def check_convertible(model: nn.Module, layers: Sequence[str]) -> None:
    """Raises ConfigError naming every layer (as in the model) that te.Linear could not replace."""
    problems: list[Problem] = []
    for name in layers:
        linear = model.get_submodule(name)
        odd = sorted(linear._parameters.keys() - {"weight", "bias"})
        if odd or "weight" not in linear._parameters:
            what = f"its weight is not its own Parameter ({', '.join(odd) or 'a plain tensor'})"
            fix = f'add "{name}" to layers.exclude in the recipe'
            problems.append(Problem(what, f"layer {name}", fix=fix))
    if problems:
        raise ConfigError(problems)


def convert(linear: nn.Linear, linear_class: type[Any]) -> Any:
    """A `linear_class` with the Parameters, hooks and other attributes of `linear`, all by identity."""
    # On "meta" TE neither allocates nor draws random numbers for weights that are about to be replaced.
    made = linear_class(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        params_dtype=linear.weight.dtype,
        device="meta",
    )
    made.weight = linear.weight
    if linear.bias is not None:
        made.bias = linear.bias
    # The same containers, not copies: a hook's handle removes the hook from the dict that it was put in.
    own = {"_parameters", "in_features", "out_features"}
    others = {name: value for name, value in vars(linear).items() if name not in own}
    made.__dict__.update(others)
    return made


@dataclass(frozen=True, slots=True)
class Shared:
    """What all converted layers of a model have in common.

    library: Transformer Engine.
    recipe: TE's recipe object.
    kind: the recipe's scaling, "delayed" | "current" | "block".
    watch: what is measured, and the state of the run.
    """

    library: Library
    recipe: Any
    kind: str
    watch: Watch

    @property
    def delayed(self) -> bool:
        """Whether scales come from amax histories, which a forward writes."""
        return self.kind == "delayed"

    @property
    def multiple(self) -> int:
        """TE's GEMMs take token counts that are multiples of it."""
        return _TOKENS[self.kind]


class PlannedLinear(nn.Module):
    """te.Linear's forward in a planned model. It is mixed into te.Linear, which is imported only where it runs.

    shared: what all layers of the model have in common.
    slot: number of its first slot; the three are input, weight, grad_output.
    name_in_model: for messages.

    In the precision context the input is cast to BF16 first, as in every Linear. TE would quantise a float32 input as
    it is. Outside of the context, or in that of another model, the layer is a plain Linear. Where a model turns
    autocast off, the output has the input's dtype.

    A number of tokens that TE's GEMMs do not take is padded with zeros, which change no sum and no amax. If a layer is
    called several times in a forward, all calls share one scale, and its amax is the largest of them.

    A forward without gradients computes in FP8, or in BF16 until a training step has set the scales, and records
    nothing, wherever it is called. A deep copy (an EMA of the weights, a teacher) computes in FP8 or BF16 as the
    original does, with the same scales, and records nothing. A pickle of the layer is that of a plain Linear.
    """

    # Attributes of te.Linear.
    weight: nn.Parameter
    in_features: int
    use_bias: bool
    fp8_meta: dict[str, Any]
    quantizers: dict[str, Any]

    shared: Shared
    slot: int
    name_in_model: str
    # Whether this is a deep copy, which records nothing.
    follows = False
    # Quantizers for forwards that record nothing: the same scales, other amaxes. Made when first needed.
    silent: Sequence[Any] | None = None
    # te.LayerNormLinear or te.LayerNormMLP with the same FP8 state. Made when first needed.
    fused: Any = None
    # Modules whose boundary lies between this layer and what is fused with it.
    around: Sequence[nn.Module] = ()
    # Checkpoints hold no extra state of TE: it is a pickle, and empty after a BF16 forward.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    @property
    def demoted(self) -> bool:
        """Whether it runs in BF16 now. Its three tensors are measured all the same."""
        return self.slot in self.shared.watch.demoted

    @property
    def in_bf16(self) -> bool:
        """Whether a forward multiplies in BF16 now: the layer is demoted, or nothing has set its scales yet."""
        watch = self.shared.watch
        if self.demoted or watch.unmeasured is None:
            return self.demoted
        sets_scales = self._records() and not self.follows
        return not sets_scales and watch.unmeasured(self.slot, self.training)

    @property
    def window(self) -> int | None:
        """The step whose scales and weights are in use; None outside of the precision context."""
        watch = self.shared.watch
        return watch.window if watch.active else None

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, te_fused.Placeholder):
            return self.compute(input)
        # A norm that was left to this layer is computed in one TE block with it.
        if input.linear is self and self._may_compute_norm(input):
            return self.compute(input.untouched(), (input.normaliser,))
        return self.compute(input.computed())

    def compute(self, input: Tensor, before: Sequence[Any] = ()) -> Tensor:
        """This layer's output.

        before: what one TE block computes with it: a norm, maybe also the first layer of an MLP.
        """
        if torch.compiler.is_compiling():
            _refuse_compiled(self.name_in_model)
        watch = self.shared.watch
        self._refuse_moved_scales()

        # TE would quantise a float32 input as it is: every Linear's input is BF16 in the precision context.
        autocast_on = torch.is_autocast_enabled(input.device.type)
        own_dtype = input.dtype
        if autocast_on:
            own_dtype = torch.get_autocast_dtype(input.device.type)
        if input.is_floating_point():
            input = input.to(torch.bfloat16 if watch.active else own_dtype)

        # TE computes in the dtype of torch's autocast: it is entered where the model has switched it off.
        in_fp8 = watch.active and not self.in_bf16
        needs_autocast = watch.active and not autocast_on
        with _bf16_autocast(input.device.type, needs_autocast):
            out = self._product(input, before, in_fp8)

        # TE cannot give gradients of gradients, nor go backward twice: that is refused by name.
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(_Once(self.name_in_model))
            # TE returns a view out of its own autograd Function. PyTorch forbids in-place work on such a view.
            out = torch.ops.aten._unsafe_view.default(out, out.shape)

        if watch.active and not self.follows:
            self._measure_call(input, before, out)
        return out if autocast_on else out.to(own_dtype)

    def _refuse_moved_scales(self) -> None:
        """Raise MisuseError if this forward is a recomputation whose scales have moved and were not kept."""
        library, watch = self.shared.library, self.shared.watch
        without_te_checkpoint = (
            self.shared.delayed
            and watch.in_backward
            and watch.rolled_under
            and not library.recomputing()
        )
        # Within te.checkpoint this forward will be recomputed for a node that another thread may have made.
        if without_te_checkpoint and (library.checkpointing() or watch.recomputations.moved()):
            raise _recomputed(self.name_in_model)

    def _product(self, input: Tensor, before: Sequence[Any], in_fp8: bool) -> Tensor:
        """te.Linear of `input`, or the TE block of this layer and the modules `before` it. In BF16: torch's product."""
        if not in_fp8:
            # Under FSDP2, TE's backward of a layer without FP8 asks for a cast of the weight that its forward dropped.
            return F.linear(input, self.weight, self._parameters.get("bias"))
        run = partial(self._with, before) if before else super().forward
        delayed = self.shared.delayed
        if delayed:
            self._match_recomputation(before)
        with self._autocast():
            # Only delayed scaling records amaxes in a cast. A copy's quantizers record nowhere anyway.
            if not delayed or self.follows or self._records():
                return filled_up(run, input, self.shared.multiple)
            return self._silently(run, input, before)

    def _measure_call(self, input: Tensor, before: Sequence[Any], out: Tensor) -> None:
        """Measure input and weight of this forward now, and grad_output when its backward runs."""
        watch = self.shared.watch
        if self._records() and not self.shared.library.recomputing():
            # A fused block casts the norm's output, which is computed here for sampled statistics only.
            if not before:
                self._measure(0, input)
            elif self._samples():
                self._measure(0, te_block.quantised(before[0], input))
            self._measure(1, self.weight)
        if out.requires_grad and (watch.everything or self.demoted or self._samples()):
            out.register_hook(lambda grad: self._measure(2, grad))

    def _autocast(self) -> AbstractContextManager[Any]:
        """TE's autocast with this model's recipe.

        TE has one autocast state for the process, so another model's may be on. Entering it where it is right already
        would only cost time.
        """
        library, recipe = self.shared.library, self.shared.recipe
        state = library.manager.quantization_state
        as_it_is = state.fp8_enabled and state.fp8_recipe is recipe
        if as_it_is:
            return nullcontext()
        return library.pytorch.autocast(True, recipe=recipe)

    def takes_over(self, norm: nn.Module, x: Tensor) -> bool:
        """Whether this layer will compute `norm`, which feeds it, of `x` in one block with itself.

        It does in FP8, on inputs that TE takes.
        """
        # A subclass of Tensor may do anything, and an inference tensor has no version to check.
        is_plain = type(x) is Tensor and x.is_floating_point() and not x.is_inference()
        if not is_plain or not self._fuses():
            return False
        if not _is_bf16_autocast(x.device.type) or te_fused.hooked(self, *self.around):
            return False
        if x.shape[-1:] != (self.in_features,) or not x.numel():
            return False

        # Rows of zeros may pad an RMSNorm's input: its output there is zero. A LayerNorm's would be its bias.
        rows = x.numel() // x.shape[-1]
        return te_block.is_rms(norm) or rows % self.shared.multiple == 0

    def nothing(self, device: torch.device) -> Tensor:
        """What a norm that is computed here returns instead of values: NaN, float32 0-d."""
        return self.shared.watch.nothing(device)

    def takes_mlp(self, placeholder: te_fused.Placeholder, first: Any) -> bool:
        """Whether this layer computes a whole MLP: the norm that the placeholder stands for, `first` and SwiGLU."""
        watch = self.shared.watch
        grads = torch.is_grad_enabled()
        is_next = placeholder.linear is first and first._may_compute_norm(placeholder)
        if not is_next or not self._fuses():
            return False

        # Where casts are sampled the tensors between the layers are needed, and a block does not return them.
        if self._samples() and (grads or watch.with_gradients or watch.in_backward):
            return False

        # If neither input nor weight wants a gradient, TE's backward asks the norm's bias, which an RMSNorm lacks.
        source, norm = placeholder.source, placeholder.normaliser
        if grads and not source.requires_grad and not norm.weight.requires_grad:
            return False
        # Rows of zeros may pad a first layer without a bias only: else they would not stay zero.
        rows = source.numel() // first.in_features
        if first.use_bias and rows % self.shared.multiple:
            return False
        return not te_fused.hooked(first, self, *self.around)

    def _may_compute_norm(self, placeholder: te_fused.Placeholder) -> bool:
        """Whether it may compute this layer's norm now: in FP8, with gradients as they were when it was called."""
        as_then = placeholder.gradients == torch.is_grad_enabled()
        return as_then and self._fuses() and _is_bf16_autocast(placeholder.device.type)

    def _fuses(self) -> bool:
        """Whether it may run in a fused block now: in FP8, under delayed scaling."""
        return self.shared.delayed and self.shared.watch.active and not self.in_bf16

    def _with(self, before: Sequence[Any], rows: Tensor) -> Tensor:
        """The TE block of `before` and this layer, on `rows`."""
        return te_block.apply(self._block(before), self, *before)(rows)

    def _block(self, before: Sequence[Any]) -> Any:
        """The TE block of `before` and this layer, made when it is first needed."""
        if self.fused is None:
            made = te_block.block(self.shared.library.pytorch, self, *before)
            self.__dict__["fused"] = made  # not as a submodule
        return self.fused

    def _match_recomputation(self, before: Sequence[Any]) -> None:
        """Under te.checkpoint: note the first run's queue, or give the second run the entry of its own first run.

        Raises MisuseError if there is no such entry.
        """
        library, watch = self.shared.library, self.shared.watch
        recomputing = library.recomputing()
        if not recomputing and not library.checkpointing():
            return
        meta = (self._block(before) if before else self).fp8_meta
        if not recomputing:
            watch.recomputations.note(meta)
            watch.nested |= watch.in_backward
            return
        # A nested checkpoint's node was made in backward, maybe by another thread, and then cannot be looked up. If no
        # scales have moved, it need not be: all entries have the same scales.
        look_up = watch.rolled_under or not watch.nested
        if look_up and not watch.recomputations.put_in_front(meta):
            raise _not_kept(self.name_in_model)

    def _records(self) -> bool:
        """Whether amaxes of this forward count: gradients follow, even if te.checkpoint runs it without them first."""
        shared = self.shared
        if torch.is_grad_enabled():
            return True
        return shared.watch.with_gradients and shared.library.checkpointing()

    def _silently(
        self, run: Callable[[Tensor], Tensor], input: Tensor, before: Sequence[Any]
    ) -> Tensor:
        """`run` with quantizers that have the same scales and record their amaxes elsewhere."""
        layers = (*before[1:], self)
        own = [layer.quantizers for layer in layers]
        for layer in layers:
            if layer.silent is None:
                layer.silent = list(map(_unrecorded, layer.quantizers["scaling_fwd"]))
            layer.quantizers = {**layer.quantizers, "scaling_fwd": layer.silent}
        try:
            return filled_up(run, input, self.shared.multiple)
        finally:
            for layer, quantizers in zip(layers, own, strict=True):
                layer.quantizers = quantizers

    def _measure(self, role: int, x: Tensor) -> None:
        """Raise the amax of a slot to that of `x` where TE does not, and add its cast to sampled statistics.

        role: 0 input, 1 weight, 2 grad_output.
        """
        watch = self.shared.watch
        key, column = ("scaling_bwd", 0) if role == 2 else ("scaling_fwd", role)
        # Under current and block scaling TE keeps no amax. Under delayed scaling a demoted layer has no cast of TE's.
        if watch.everything:
            observe(watch.amax[self.slot + role], x)
        elif self.demoted:
            observe(self.fp8_meta[key].amax_history[0, column], x)
        if watch.sampled is not None and self._samples():
            scale = self.fp8_meta[key].scale[column] if self.shared.delayed else None
            watch.sampled.add(self.slot + role, x, scale)

    def _samples(self) -> bool:
        """Whether this window measures statistics of casts."""
        sampled = self.shared.watch.sampled
        return sampled is not None and sampled.sampling

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The copy shares the scales, in `fp8_meta`. Its quantizers record their amaxes elsewhere.
        memo[id(self.fp8_meta)] = self.fp8_meta
        silent: dict[str, list[Any]] = {}
        for key, own in self.quantizers.items():
            silent[key] = list(map(_unrecorded, own))
        memo[id(self.quantizers)] = silent
        made = memo[id(self)] = object.__new__(type(self))
        state = {name: value for name, value in vars(self).items() if name not in _NOT_COPIED}
        made.__dict__.update(copy.deepcopy(state, memo))
        made.follows = True
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        made, arguments, state = pickled_as_plain(self, vars(self).keys() - _PLAIN)
        parameters = {"weight": self.weight, "bias": self._parameters.get("bias")}
        return made, arguments, {**state, "_parameters": parameters}


def linear_class(library: Library, recipe: Any, kind: str, watch: Watch) -> type[Any]:
    """The subclass of te.Linear for the layers of one model. kind: as in `Shared`."""
    own = {"shared": Shared(library, recipe, kind, watch), "__module__": __name__}
    return type("Linear", (PlannedLinear, library.pytorch.Linear), own)


class _Once:
    """A hook before a layer's backward. Raises MisuseError where TE would fail obscurely, or lose a term."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._passed = False

    def __call__(self, *_: Any) -> None:
        where = f"layer {self._name}"
        fix = "keep the layer out of FP8 (layers.exclude), or take a native rung"
        if torch.is_grad_enabled():
            why = "its backward cannot be differentiated: the terms through this layer would be missing in silence"
            what = "Transformer Engine has no gradients of gradients (create_graph=True)"
            fix = "keep the layer out of FP8 (layers.exclude), or take the recipe bf16"
            raise MisuseError(Problem(what, where, why, fix))
        if self._passed:
            what = "Transformer Engine has one backward for each forward (retain_graph=True)"
            why = "it frees what the layer saved in the first one"
            fix = f"run the forward again, or add up the losses; or {fix}"
            raise MisuseError(Problem(what, where, why, fix))
        self._passed = True


def _bf16_autocast(device_type: str, wanted: bool) -> AbstractContextManager[Any]:
    """bf16 autocast if `wanted`. Without autocast TE refuses inputs whose dtype is not that of its Parameters."""
    if not wanted:
        return nullcontext()
    return torch.autocast(device_type, dtype=torch.bfloat16)


def _is_bf16_autocast(device_type: str) -> bool:
    return (
        torch.is_autocast_enabled(device_type)
        and torch.get_autocast_dtype(device_type) == torch.bfloat16
    )


def filled_up(run: Callable[[Tensor], Tensor], x: Tensor, multiple: int) -> Tensor:
    """`run` on the rows of `x`, padded with zeros to a multiple of `multiple`. The padding's results are cut off.

    An expert may get no token. TE would skip its casts then, and leave their inverse scales uninitialised.
    """
    tokens = x.numel() // x.shape[-1]
    missing = -tokens % multiple if tokens else multiple
    if not missing:
        return run(x)
    rows = F.pad(x.reshape(tokens, x.shape[-1]), (0, 0, 0, missing))
    out = run(rows)[:tokens]
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _unrecorded(quantizer: Any) -> Any:
    """A quantizer with the same scale, which records its amax in a tensor that nothing reads."""
    made = copy.copy(quantizer)
    if hasattr(quantizer, "amax"):
        made.amax = torch.zeros_like(quantizer.amax)
    return made


def _recomputed(name: str) -> MisuseError:
    what = (
        "torch.utils.checkpoint, or te.checkpoint within either, with two forwards before a backward, or two backwards "
        "for one context, does not go with fp8.roll: micro_batch"
    )
    why = "scales have moved since the first run of this forward: its recomputation in backward would differ from it"
    fix = "checkpoint the block with transformer_engine.pytorch.checkpoint alone, or take fp8.roll: step"
    return MisuseError(Problem(what, f"layer {name}", why, fix))


def _not_kept(name: str) -> MisuseError:
    what = "te.checkpoint has no scales of the forward that it has to recompute"
    why = (
        "that forward was in an earlier optimizer step, in another thread, or in eval() under a Transformer Engine "
        "before 2.20, and other scales would give another result"
    )
    fix = "call backward in the step, and the thread, of the forward, with the model in train()"
    return MisuseError(Problem(what, f"layer {name}", why, fix))


@torch.compiler.disable(reason="layers.fuse does not go with torch.compile: leave the model eager")
def _refuse_compiled(name: str) -> None:
    """Raise MisuseError outside of the graph.

    The compiler breaks the graph at this call. It may swallow an error that is raised while it traces, and run the code
    eager.
    """
    why = "what a fused norm returns has no values yet, which no graph can hold"
    fix = "leave the model eager, or set layers.fuse: false in the recipe"
    raise MisuseError(
        Problem("layers.fuse does not go with torch.compile", f"layer {name}", why, fix)
    )
