"""te.Linear on a Linear's own Parameters: leaves FP8 for BF16 and returns, and measures what TE keeps no amax of."""

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
from harness.precision.backends import te_fused
from harness.precision.backends.te_library import Library, Recomputations
from harness.precision.layers import pickled_as_linear
from harness.precision.scaling import SampledStats

# Token counts that TE's GEMMs take: the weight gradient's common dimension. 128: a block of block scaling.
_TOKENS = {"delayed": 16, "current": 16, "block": 128}
# Of one object, made when first wanted: a copy makes its own.
_OF_ONE = ("silent", "fused")
_PLAIN = frozenset(vars(nn.Linear(1, 1, device="meta")))  # on "meta" nothing is drawn


class Watch:
    """What all converted layers of a model share. Nothing here waits for the device.

    amax: float32 [slots], running max|x| under current and block scaling, where TE keeps none. everything: they are
    measured by hook, for layers in FP8 too. sampled: what casts lose; None under block scaling, whose casts have a
    scale for every block. demoted: first slots of layers in BF16. active: in a forward or backward under the precision
    context. with_gradients: it was entered with gradients on. in_backward: a forward that runs now is a recomputation.
    rolled_under: scales have moved since a forward whose backward is still to come. again: of which forward it is the
    recomputation. nested: te.checkpoint was called in what this backward computes again. window: the step's number.
    """

    def __init__(
        self,
        slots: int,
        device: torch.device,
        again: Recomputations,
        everything: bool,
        sampled: SampledStats | None = None,
    ) -> None:
        self.again = again
        self.amax = torch.zeros(slots, device=device)
        self.sampled = sampled
        self.everything = everything
        self.demoted: set[int] = set()
        self.active = False
        self.with_gradients = False
        self.in_backward = False
        self.rolled_under = False
        self.nested = False
        self.window = 0
        self._nothing = torch.full((), torch.nan, device=device)

    def nothing(self, device: torch.device) -> Tensor:
        """NaN, float32 0-d."""
        return self._nothing if self._nothing.device == device else self._nothing.to(device)


@torch.no_grad()
def observe(amax: Tensor, x: Tensor) -> None:
    """Raise `amax`, one float32, to max|x|; an infinity counts, a tensor with a NaN in it gives no evidence.

    One reduction without temporaries, as this runs for every tensor of every layer under current scaling. A step
    with a NaN is not applied anyway.
    """
    if x.numel():
        largest = torch.linalg.vector_norm(x.detach(), torch.inf).float()
        torch.fmax(amax, largest, out=amax)


def check_convertible(model: nn.Module, layers: Sequence[str]) -> None:
    """Raises ConfigError naming every layer (as in the model) that te.Linear could not stand in for."""
    problems: list[Problem] = []
    for name in layers:
        linear = model.get_submodule(name)
        odd = sorted(linear._parameters.keys() - {"weight", "bias"})
        what = ""
        if "forward" in vars(linear):
            what = "its forward was replaced on the instance, which Transformer Engine's would undo"
        elif odd or "weight" not in linear._parameters:
            what = f"its weight is not its own Parameter ({', '.join(odd) or 'a plain tensor'})"
        if what:
            problems.append(
                Problem(what, f"layer {name}", fix=f'add "{name}" to layers.exclude in the recipe')
            )
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
    # The very same containers: a hook's handle removes it from the dict it was put in.
    own = {"_parameters", "in_features", "out_features"}
    made.__dict__.update({name: value for name, value in vars(linear).items() if name not in own})
    return made


@dataclass(frozen=True, slots=True)
class Shared:
    """What all converted layers of a model have in common. kind: "delayed" | "current" | "block", what `recipe` scales
    by."""

    library: Library
    recipe: Any
    kind: str
    watch: Watch

    @property
    def delayed(self) -> bool:
        """Whether scales follow amax histories, which a forward writes."""
        return self.kind == "delayed"

    @property
    def multiple(self) -> int:
        """Token counts that TE's GEMMs take are multiples of it."""
        return _TOKENS[self.kind]


class PlannedLinear(nn.Module):
    """te.Linear's forward in a planned model; mixed into te.Linear, which is imported only where it runs.

    shared: what all layers of the model have in common. slot: number of its first slot (input, weight, grad_output).
    name_in_model: for messages.

    In the precision context the input is cast to BF16 first, as every Linear's is: TE would quantise a float32 one
    as it is. Outside of it, or in that of another model only, the layer is a plain one. Where a model turns
    autocast off, the output has the input's dtype. A number of tokens that TE's GEMMs do not take is filled up with
    zeros, which change no sum and no amax. Called several times in a forward, a layer's amax is the largest of all
    calls, which share one scale.

    A forward without gradients computes in FP8 and records nothing, wherever it is called. A deep copy (an EMA of
    the weights, a teacher) follows the original: it computes in FP8 or BF16 as that does, with the same scales, and
    records nothing. Pickled, it is a plain Linear.
    """

    # te.Linear's own.
    weight: nn.Parameter
    in_features: int
    use_bias: bool
    fp8_meta: dict[str, Any]
    quantizers: dict[str, Any]

    shared: Shared
    slot: int
    name_in_model: str
    follows = False
    # Quantizers of the forward with the same scales, whose amaxes are nobody's; made when first wanted.
    silent: Sequence[Any] | None = None
    # te.LayerNormLinear or te.LayerNormMLP with the same FP8 state; made when first wanted.
    fused: Any = None
    # Modules whose boundary lies between this layer and what is fused with it.
    around: Sequence[nn.Module] = ()
    # Where the output goes through SwiGLU: the layer that takes all of an MLP. Not as a submodule.
    second: Any = None
    # TE's own extra state is a pickle, and empty after a BF16 forward.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    @property
    def demoted(self) -> bool:
        """In BF16 now; its three tensors go on being measured."""
        return self.slot in self.shared.watch.demoted

    @property
    def window(self) -> int | None:
        """What scales and weights are of; None outside of the precision context."""
        watch = self.shared.watch
        return watch.window if watch.active else None

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            _refuse_compiled(self.name_in_model)
        if isinstance(input, te_fused.Normed) and self._hands_on(input):
            return te_fused.hidden(input, self.second)
        return self.separately(input)

    def separately(self, input: Tensor) -> Tensor:
        """This layer, not left to a second one."""
        watch = self.shared.watch
        self._refuse_moved_scales()

        # What was left to this layer, a norm or the first half of an MLP, is computed in one block with it.
        around = torch.is_autocast_enabled(input.device.type)
        before: Sequence[Any] = ()
        if isinstance(input, te_fused.Deferred):
            mine = (
                around
                and input.linear is self
                and input.gradients == torch.is_grad_enabled()
                and self._fuses()
            )
            before, input = input.hand_over() if mine else ((), input.value())
        own_dtype = torch.get_autocast_dtype(input.device.type) if around else input.dtype
        if input.is_floating_point():
            input = input.to(torch.bfloat16 if watch.active else own_dtype)

        in_fp8 = watch.active and not self.demoted
        with self._autocast(in_fp8), _in_bf16(input.device.type, watch.active and not around):
            out = self._product(input, before, in_fp8)
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(_Once(self.name_in_model))
            # TE returns a view out of a Function of its own, on which nothing may work in place.
            out = torch.ops.aten._unsafe_view.default(out, out.shape)

        if watch.active and not self.follows:
            self._measure_call(input, before, out)
        return out if around else out.to(own_dtype)

    def _refuse_moved_scales(self) -> None:
        """Raise MisuseError where a forward runs again in backward, and the scales of the first one are not kept."""
        library, watch = self.shared.library, self.shared.watch
        alone = (
            self.shared.delayed
            and watch.in_backward
            and watch.rolled_under
            and not library.recomputing()
        )
        # What te.checkpoint is called for here will be computed again for a node that another thread may have made.
        if alone and (library.checkpointing() or watch.again.moved()):
            raise _recomputed(self.name_in_model)

    def _product(self, input: Tensor, before: Sequence[Any], in_fp8: bool) -> Tensor:
        """What te.Linear makes of `input`, or the block of this layer and what comes before it."""
        run = partial(self._with, before) if before else super().forward
        delayed = self.shared.delayed
        if not in_fp8:
            return run(input)
        if delayed:
            self._keep_apart(before)
        if not delayed or self.follows or self._records():
            return filled_up(run, input, self.shared.multiple)
        return self._silently(run, input, before)

    def _measure_call(self, input: Tensor, before: Sequence[Any], out: Tensor) -> None:
        """What this forward, and the backward to come, show of the three tensors."""
        watch = self.shared.watch
        if self._records() and not self.shared.library.recomputing():
            if not before:
                self._measure(0, input)
            elif self._samples():
                self._measure(0, te_fused.quantised(before[0], input))
            self._measure(1, self.weight)
        if out.requires_grad and (watch.everything or self.demoted or self._samples()):
            out.register_hook(lambda grad: self._measure(2, grad))

    def _autocast(self, in_fp8: bool) -> AbstractContextManager[Any]:
        """TE's autocast is one for the process: around this layer it is this model's, or none."""
        library, recipe = self.shared.library, self.shared.recipe
        state = library.manager.quantization_state
        as_it_is = state.fp8_enabled == in_fp8 and (not in_fp8 or state.fp8_recipe is recipe)
        return nullcontext() if as_it_is else library.pytorch.autocast(in_fp8, recipe=recipe)

    def takes_over(self, norm: nn.Module, x: Tensor) -> bool:
        """Whether this layer will apply `norm`, which feeds it, to `x` by itself: in FP8, on what TE takes.

        Rows of zeros fill up an RMSNorm's input; a LayerNorm would make its bias of them.
        """
        if (
            type(x) is not Tensor
            or not x.is_floating_point()
            or x.is_inference()
            or not self._fuses()
        ):
            return False
        if not _is_bf16_around(x.device.type) or te_fused.hooked(self, *self.around):
            return False
        whole = x.shape[-1:] == (self.in_features,) and x.numel() > 0
        return whole and (
            te_fused.is_rms(norm) or not x.numel() // x.shape[-1] % self.shared.multiple
        )

    def nothing(self, device: torch.device) -> Tensor:
        """What a norm that was taken over hands on instead of values: NaN, float32 0-d."""
        return self.shared.watch.nothing(device)

    def _hands_on(self, normed: te_fused.Normed) -> bool:
        """Whether the second layer of an MLP will apply this one and its norm, if SwiGLU is all that comes between.

        Not where a step's casts are sampled, as what lies between comes out of no block. TE's backward asks a bias
        that an RMSNorm does not have whether it wants a gradient, if neither input nor weight does.
        """
        watch = self.shared.watch
        second, grads = self.second, torch.is_grad_enabled()
        if (
            second is None
            or normed.linear is not self
            or normed.settled is not None
            or normed.gradients != grads
        ):
            return False
        if not _is_bf16_around(normed.device.type):
            return False
        if self._samples() and (grads or watch.with_gradients or watch.in_backward):
            return False
        wanted = not grads or normed.source.requires_grad or normed.normaliser.weight.requires_grad
        whole = not self.use_bias or not normed.numel() // self.in_features % self.shared.multiple
        return wanted and whole and not te_fused.hooked(self, second, *self.around, *second.around)

    def _fuses(self) -> bool:
        return self.shared.delayed and self.shared.watch.active and not self.demoted

    def _with(self, before: Sequence[Any], rows: Tensor) -> Tensor:
        return te_fused.apply(self._block(before), self, *before)(rows)

    def _block(self, before: Sequence[Any]) -> Any:
        if self.fused is None:
            self.__dict__["fused"] = te_fused.block(
                self.shared.library.pytorch, self, *before
            )  # not as a submodule
        return self.fused

    def _keep_apart(self, before: Sequence[Any]) -> None:
        """What te.checkpoint keeps, or takes out, is of the forward that it computes again."""
        library, watch = self.shared.library, self.shared.watch
        recomputing = library.recomputing()
        if not recomputing and not library.checkpointing():
            return
        meta = (self._block(before) if before else self).fp8_meta
        if not recomputing:
            watch.again.note(meta)
            watch.nested |= watch.in_backward
        # A node that is made in backward may be another thread's; without a roll all that is kept is the same.
        elif (watch.rolled_under or not watch.nested) and not watch.again.put_in_front(meta):
            raise _not_kept(self.name_in_model)

    def _records(self) -> bool:
        """Gradients are wanted: te.checkpoint may run a forward that is to have some without them."""
        shared = self.shared
        return torch.is_grad_enabled() or (
            shared.watch.with_gradients and shared.library.checkpointing()
        )

    def _silently(
        self, run: Callable[[Tensor], Tensor], input: Tensor, before: Sequence[Any]
    ) -> Tensor:
        """`run` with quantizers that have the same scales and note their amaxes where nobody looks."""
        layers = (*before[1:], self)
        own = [layer.quantizers for layer in layers]
        for layer in layers:
            if layer.silent is None:
                layer.silent = [
                    _unrecorded(quantizer) for quantizer in layer.quantizers["scaling_fwd"]
                ]
            layer.quantizers = {**layer.quantizers, "scaling_fwd": layer.silent}
        try:
            return filled_up(run, input, self.shared.multiple)
        finally:
            for layer, quantizers in zip(layers, own, strict=True):
                layer.quantizers = quantizers

    def _measure(self, role: int, x: Tensor) -> None:
        """role: 0 input, 1 weight, 2 grad_output."""
        watch = self.shared.watch
        key, column = ("scaling_bwd", 0) if role == 2 else ("scaling_fwd", role)
        if watch.everything:
            observe(watch.amax[self.slot + role], x)
        elif self.demoted:
            observe(self.fp8_meta[key].amax_history[0, column], x)
        if watch.sampled is not None and self._samples():
            scale = self.fp8_meta[key].scale[column] if self.shared.delayed else None
            watch.sampled.add(self.slot + role, x, scale)

    def _samples(self) -> bool:
        sampled = self.shared.watch.sampled
        return sampled is not None and sampled.sampling

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self.fp8_meta)] = self.fp8_meta
        memo[id(self.quantizers)] = {
            key: [_unrecorded(q) for q in own] for key, own in self.quantizers.items()
        }
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__.update(
            copy.deepcopy({k: v for k, v in vars(self).items() if k not in _OF_ONE}, memo)
        )
        made.follows = True
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        made, arguments, state = pickled_as_linear(self, vars(self).keys() - _PLAIN)
        parameters = {"weight": self.weight, "bias": self._parameters.get("bias")}
        return made, arguments, {**state, "_parameters": parameters}


def linear_class(library: Library, recipe: Any, kind: str, watch: Watch) -> type[Any]:
    """The subclass of te.Linear for one model. kind: as in `Shared`."""
    own = {"shared": Shared(library, recipe, kind, watch), "__module__": __name__}
    return type("Linear", (PlannedLinear, library.pytorch.Linear), own)


class _Once:
    """Called before a layer's backward. Raises MisuseError where TE would fail obscurely, or leave a term out."""

    def __init__(self, name: str) -> None:
        self._name, self._passed = name, False

    def __call__(self, *_: Any) -> None:
        where, fix = (
            f"layer {self._name}",
            "keep the layer out of FP8 (layers.exclude), or take a native rung",
        )
        if torch.is_grad_enabled():
            why = "its backward cannot be differentiated: the terms through this layer would be missing in silence"
            what = "Transformer Engine has no gradients of gradients (create_graph=True)"
            raise MisuseError(Problem(what, where, why, fix))
        if self._passed:
            why = "it frees what the layer saved in the first one"
            what = "Transformer Engine has one backward for each forward (retain_graph=True)"
            raise MisuseError(
                Problem(what, where, why, f"run the forward again, or add up the losses; or {fix}")
            )
        self._passed = True


def _in_bf16(device_type: str, wanted: bool) -> AbstractContextManager[Any]:
    """Without autocast TE refuses inputs of another dtype than its Parameters'."""
    return torch.autocast(device_type, dtype=torch.bfloat16) if wanted else nullcontext()


def _is_bf16_around(device_type: str) -> bool:
    return (
        torch.is_autocast_enabled(device_type)
        and torch.get_autocast_dtype(device_type) == torch.bfloat16
    )


def filled_up(run: Callable[[Tensor], Tensor], x: Tensor, multiple: int) -> Tensor:
    """`run` on the rows of `x`, zeros added up to a multiple of `multiple` and taken off again."""
    tokens = x.numel() // x.shape[-1]
    missing = -tokens % multiple
    if not missing:
        return run(x)
    rows = F.pad(x.reshape(tokens, x.shape[-1]), (0, 0, 0, missing))
    return run(rows)[:tokens].reshape(*x.shape[:-1], -1)


def _unrecorded(quantizer: Any) -> Any:
    """A quantizer with the same scale, which notes its amaxes where nobody looks."""
    made = copy.copy(quantizer)
    if hasattr(quantizer, "amax"):
        made.amax = torch.zeros_like(quantizer.amax)
    return made


def _recomputed(name: str) -> MisuseError:
    what = (
        "torch.utils.checkpoint, or te.checkpoint within either, with two forwards before a backward, or two backwards "
        "for one context, does not go with fp8.roll: micro_batch"
    )
    why = "the forward that runs again in backward would use scales that have moved since, unlike the first"
    fix = "checkpoint the block with transformer_engine.pytorch.checkpoint alone, or take fp8.roll: step"
    return MisuseError(Problem(what, f"layer {name}", why, fix))


def _not_kept(name: str) -> MisuseError:
    what = "te.checkpoint has no scales of the forward that it is to compute again"
    why = (
        "that forward was in an earlier optimizer step, in another thread, or in eval() under a Transformer Engine "
        "before 2.20: others would give another result"
    )
    fix = "call backward in the step, and the thread, of the forward, with the model in train()"
    return MisuseError(Problem(what, f"layer {name}", why, fix))


@torch.compiler.disable(
    reason="the transformer_engine backend does not compile: leave the model eager"
)
def _refuse_compiled(name: str) -> None:
    """A call that graphs break at: what is raised while a graph is traced may be swallowed, and the code run eager."""
    why = "it refuses DelayedScaling in a graph, and what is measured by hook would be lost under any scaling"
    fix = "leave the model eager, or take a recipe whose rung here is native"
    raise MisuseError(
        Problem("the transformer_engine backend does not compile", f"layer {name}", why, fix)
    )
