"""A norm and its Linear as one te.LayerNormLinear, and with SwiGLU and a second Linear as one te.LayerNormMLP.

Where a fused pair runs, the norm hands on a `Deferred` in the place of its output, and the Linear applies both. Where
an MLP is fused, its first Linear hands on a Deferred too, SwiGLU's operations on it give further ones, and the second
Linear applies all. What else is done with a Deferred computes it first, and what could change it, or look at its
gradient, makes the Linear take it too: a module that declared too much is slower, not wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as every
from torch.utils._pytree import tree_leaves, tree_map_only

from harness.core.errors import MisuseError, Problem
from harness.precision.backends.te_library import RECOMPUTED

# Known of what is not there yet. Its dtype is not: autocast has a say.
_KNOWN = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel}
    | {getattr(Tensor, name).__get__ for name in ("shape", "ndim", "device")}
)  # fmt: skip
_HOOKS = frozenset({Tensor.register_hook, Tensor.retain_grad})
_CHUNKS, _SPLITS, _PRODUCTS = (
    {Tensor.chunk, torch.chunk},
    {Tensor.split, torch.split},
    {Tensor.mul, torch.mul},
)


class Deferred(Tensor):
    """A tensor that has not been computed: NaN for what looks past Python, of the tensor's shape.

    linear: who may take it and apply what it stands for. gradients: whether they were on. settled: its value, once
    somebody else has a hold on it. taken: the Linear has applied it. Code that takes it apart without PyTorch's Python
    functions (an autograd.Function, an extension) would see the NaN, and a gradient that comes back to it raises
    MisuseError: it would be lost. No name here is one of Tensor's, which code may mean.
    """

    linear: Any
    gradients: bool
    settled: Tensor | None = None
    taken = False
    # What a first Linear handed on, of which this is a part.
    whole: Hidden | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        made = _swiglu(func, args, kwargs)
        if made is not None:
            return made
        found = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Deferred)]
        if func in _HOOKS and (found[0] if found[0].whole is None else found[0].whole).taken:
            why = "the layer was applied together with what comes before it, whose output has no gradient of its own"
            raise _misuse(
                found[0].linear, "a hook is put on the gradient of what a fused layer took", why
            )
        for each in found:
            each.settle_others()
        values = {id(each): each.value() for each in found}
        args, kwargs = tree_map_only(Deferred, lambda each: values[id(each)], (args, kwargs))
        result = func(*args, **kwargs)
        for each in found:
            value = values[id(each)]
            if (
                func in _HOOKS
                or value._version
                or any(_holds(leaf, value) for leaf in tree_leaves(result))
            ):
                each.settled = value
        return result

    def value(self) -> Tensor:
        """The tensor, computed now as it would have been then. Raises MisuseError if it can no longer be."""
        if self.settled is not None:
            return self.settled
        with (
            torch.set_grad_enabled(self.gradients),
            torch.autocast(self.device.type, dtype=torch.bfloat16),
        ):
            return self.computed()

    def computed(self) -> Tensor:
        """`value`, for the first time."""
        raise NotImplementedError

    def settle_others(self) -> None:
        """Something may be about to change this: compute what was made of it before."""

    def hand_over(self) -> tuple[Sequence[Any], Tensor]:
        """For `linear`: the modules whose work it does, first to last, and their input. None: the input is its own."""
        return (), self.value()


class Normed(Deferred):
    """A norm's output. source: the norm's input. onward: what its Linear handed on in turn, at each call."""

    source: Tensor
    normaliser: Any
    version: int
    onward: list[ref[Hidden]]

    def computed(self) -> Tensor:
        separately: Callable[[Tensor], Tensor] = self.normaliser.separately
        return separately(self.untouched())

    def untouched(self) -> Tensor:
        """`source`. Raises MisuseError if it was written to since."""
        if self.source._version != self.version:
            why = "the norm is applied together with the Linear, and would see what was written"
            raise _misuse(
                self.linear, "the norm's input was changed in place before its output was used", why
            )
        return self.source

    def settle_others(self) -> None:
        for hidden in (each() for each in self.onward):
            if hidden is not None and hidden.settled is None and not hidden.taken:
                self.settled = self.value()
                hidden.settle_others()

    def hand_over(self) -> tuple[Sequence[Any], Tensor]:
        if self.settled is not None:
            return (), self.settled
        self.taken = True
        return (self.normaliser,), self.untouched()


class Hidden(Deferred):
    """The output of the first Linear of an MLP, for the second. parts: what SwiGLU made of it, in this order."""

    normed: Normed
    window: Any
    parts: list[ref[Part]]

    def computed(self) -> Tensor:
        if self.linear.window != self.window:
            why = "it was left to the second layer, and weights or scales may have changed since"
            raise _misuse(
                self.linear,
                "the output of an MLP's first layer is looked at after its forward",
                why,
            )
        normed = self.normed
        # What was done with the norm's output after the second layer was applied is not in this.
        again = (
            deferred(normed.normaliser, normed.linear, normed.untouched()) if self.taken else normed
        )
        made: Tensor = normed.linear.separately(again)
        self.settled = made
        return made

    def halves(self) -> tuple[Tensor, ...]:
        """The value's two halves, one pair of views of it."""
        if "_halves" not in vars(self):
            self._halves = self.value().chunk(2, dim=-1)
        return self._halves

    def settle_others(self) -> None:
        self.value()
        for part in (each() for each in self.parts):
            if part is not None:
                part.value()


class Part(Deferred):
    """SwiGLU under way. step: "gate" | "up", a half; "silu", of the first; "gated", that times the second.

    made: function and arguments of the last two.
    """

    whole: Hidden  # type: ignore[assignment]
    step: str
    made: tuple[Any, Sequence[Any]]

    def computed(self) -> Tensor:
        if self.step in ("gate", "up"):
            made = self.whole.halves()[self.step == "up"]
        else:
            func, args = self.made
            made = func(*(each.value() for each in args))
        self.settled = made
        return made

    def settle_others(self) -> None:
        self.whole.settle_others()

    def hand_over(self) -> tuple[Sequence[Any], Tensor]:
        whole, normed = self.whole, self.whole.normed
        if self.step != "gated" or whole.settled is not None or normed.settled is not None:
            return (), self.value()
        whole.taken = normed.taken = True
        return (normed.normaliser, normed.linear), normed.untouched()


def _swiglu(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What the next operation of silu(first half) * second half hands on; None if this is another, or too late."""
    first = args[0] if args else None
    whole = first.whole if isinstance(first, Deferred) else None
    if (
        whole is None
        or whole.settled is not None
        or whole.taken
        or whole.gradients != torch.is_grad_enabled()
    ):
        return None
    step, half = getattr(first, "step", ""), whole.shape[-1] // 2
    if not step and (func in _CHUNKS or func in _SPLITS) and kwargs.keys() <= {"dim"}:
        size = 2 if func in _CHUNKS else half
        if (*args[1:], *kwargs.values()) in ((size, -1), (size, whole.ndim - 1)):
            return tuple(_part(whole, each) for each in ("gate", "up"))
    elif step == "gate" and func is F.silu and len(args) == 1 and not any(kwargs.values()):
        return _part(whole, "silu", func, args)
    elif func in _PRODUCTS and len(args) == 2 and not kwargs:
        other = args[1] if isinstance(args[1], Part) and args[1].whole is whole else None
        return (
            _part(whole, "gated", func, args)
            if {step, getattr(other, "step", "")} == {"silu", "up"}
            else None
        )
    return None


def _holds(leaf: Any, value: Tensor) -> bool:
    """Whether `leaf`, a part of what a function returned, may be a way to write to `value`."""
    if isinstance(leaf, Tensor):
        strided = leaf.layout == torch.strided
        return strided and leaf.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    return not isinstance(
        leaf, int | float | complex | str | torch.dtype | torch.device | torch.layout | None
    )


def _handed_on(kind: type[Any], shape: Sequence[int], linear: Any, device: torch.device) -> Any:
    """A `kind` of this shape for `linear`."""
    with torch.no_grad():
        made = linear.nothing(device).expand(shape).as_subclass(kind)
    made.linear, made.gradients = linear, torch.is_grad_enabled()
    if made.gradients:
        with torch._C.DisableTorchFunctionSubclass():
            made.requires_grad_()
            made.register_hook(_Lost(linear))
    return made


def deferred(norm: Any, linear: Any, source: Tensor) -> Any:
    """What `norm` hands on to `linear` for the input `source`."""
    made = _handed_on(Normed, source.shape, linear, source.device)
    made.source, made.normaliser, made.version, made.onward = source, norm, source._version, []
    return made


def hidden(normed: Normed, second: Any) -> Any:
    """What a first Linear hands on to `second` when it was given `normed`."""
    shape = (*normed.shape[:-1], normed.linear.out_features)
    made = _handed_on(Hidden, shape, second, normed.device)
    made.normed, made.window, made.parts, made.whole = normed, second.window, [], made
    normed.onward.append(ref(made))
    return made


def _part(whole: Hidden, step: str, func: Any = None, args: Sequence[Any] = ()) -> Any:
    made = _handed_on(Part, (*whole.shape[:-1], whole.shape[-1] // 2), whole.linear, whole.device)
    made.whole, made.step, made.made = whole, step, (func, args)
    whole.parts.append(ref(made))
    return made


class _Lost:
    """Called with a gradient of a Deferred itself."""

    def __init__(self, linear: Any) -> None:
        self._linear = linear

    def __call__(self, grad: Tensor) -> Tensor:
        why = "an autograd.Function, a full backward hook or reentrant checkpointing took it from PyTorch's sight"
        raise _misuse(
            self._linear, "what was left to it did not arrive, and the gradient would be lost", why
        )


class _Deferring(nn.Module):
    """A norm that leaves its computation to the Linear it feeds, where that runs in FP8. Pickled, it is a plain one."""

    feeds: Any

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if hooked(self) or kwargs or len(args) != 1 or not self.feeds.takes_over(self, args[0]):
            return self.separately(*args, **kwargs)
        return deferred(self, self.feeds, args[0])

    def separately(self, *args: Any, **kwargs: Any) -> Tensor:
        """The norm alone."""
        return super().forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__.update(copy.deepcopy(vars(self), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in vars(self).items() if name != "feeds"}
        return object.__new__, (nn.RMSNorm if is_rms(self) else nn.LayerNorm,), state


class RMSNorm(_Deferring, nn.RMSNorm):
    """nn.RMSNorm before a fused Linear."""


class LayerNorm(_Deferring, nn.LayerNorm):
    """nn.LayerNorm before a fused Linear."""


def fuse(norm: Any, linear: Any) -> None:
    """From now on `norm`, an nn.RMSNorm or nn.LayerNorm, leaves its work to `linear` where that runs in FP8."""
    norm.__class__ = RMSNorm if is_rms(norm) else LayerNorm
    norm.__dict__["feeds"] = linear  # not as a submodule: names and checkpoints stay as they are


def is_rms(norm: nn.Module) -> bool:
    """Else it is a LayerNorm."""
    return isinstance(norm, nn.RMSNorm)


def hooked(*modules: nn.Module) -> bool:
    """Whether a hook waits for gradients at a boundary of theirs: it would take a Deferred from PyTorch's sight."""
    own = any(module._backward_hooks or module._backward_pre_hooks for module in modules)
    return bool(own or every._global_backward_hooks or every._global_backward_pre_hooks)


def block(te: Any, linear: Any, norm: Any, first: Any = None) -> Any:
    """A te.LayerNormLinear of norm and `linear`, or a te.LayerNormMLP if `first` comes between: without Parameters of
    its own, with the FP8 state of the te.Linear: the columns are the same, first those of `first`. `apply` runs it.
    """
    kind: Any = te.LayerNormLinear if first is None else te.LayerNormMLP
    made = kind(
        linear.in_features if first is None else first.in_features,
        linear.out_features if first is None else linear.in_features,
        eps=norm.eps,
        bias=linear.use_bias,
        normalization="RMSNorm" if is_rms(norm) else "LayerNorm",
        params_dtype=linear.weight.dtype,
        device="meta",
        **({} if first is None else {"activation": "swiglu"}),
    )
    made._parameters.clear()
    meta = linear.fp8_meta if first is None else _both_metas(first.fp8_meta, linear.fp8_meta)
    made.__dict__.update(fp8_meta=meta, fp8_initialized=True, fp8_meta_tensors_initialized=True)
    return made


def apply(block: Any, linear: Any, norm: Any, first: Any = None) -> Callable[[Tensor], Tensor]:
    """What computes all for BF16 [..., in_features]. Parameters are looked up anew: FSDP replaces them."""
    own = {"layer_norm_weight": norm.weight, "layer_norm_bias": getattr(norm, "bias", None)}
    layers = {"": linear} if first is None else {"fc1_": first, "fc2_": linear}
    for name, layer in layers.items():
        own[f"{name}weight"] = layer.weight
        if layer.use_bias:
            own[f"{name}bias"] = layer.bias
    casts = {
        key: [each for layer in layers.values() for each in layer.quantizers[key]]
        for key in linear.quantizers
    }
    block.__dict__.update(own, quantizers=casts, training=linear.training)
    return block.forward


def _both_metas(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """What TE keeps of a module's FP8 state, for both; te.checkpoint has one queue of their histories and scales."""
    made = {key: value for key, value in first.items() if key != RECOMPUTED}
    made["num_gemms"] = 2
    for key in ("scaling_fwd", "scaling_bwd"):
        states = (first[key], second[key])
        history, scale = (
            _Joined([getattr(each, name) for each in states]) for name in ("amax_history", "scale")
        )
        made[key] = SimpleNamespace(amax_history=history, scale=scale)
    return made


class _Joined:
    """Tensors that te.checkpoint copies and puts back as one."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def clone(self) -> list[Tensor]:
        return [each.clone() for each in self._tensors]

    def copy_(self, saved: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._tensors, saved, strict=True):
            tensor.copy_(value)


@torch.no_grad()
def quantised(norm: Any, x: Tensor) -> Tensor:
    """What a fused block casts, float32: the norm of BF16 rows by a BF16 weight, not rounded. For statistics."""
    weight = norm.weight.to(x.dtype).float()
    if is_rms(norm):
        return F.rms_norm(x.float(), norm.normalized_shape, weight, norm.eps)
    return F.layer_norm(
        x.float(), norm.normalized_shape, weight, norm.bias.to(x.dtype).float(), norm.eps
    )


def _misuse(linear: Any, what: str, why: str) -> MisuseError:
    fix = "take the layer out of its module's fusible_norms or fusible_swiglu, or set layers.fuse: false"
    return MisuseError(Problem(what, f"layer {linear.name_in_model}", why, fix))
