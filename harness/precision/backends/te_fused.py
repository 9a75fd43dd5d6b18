"""A norm and its Linear as one te.LayerNormLinear; with SwiGLU and a second Linear as one te.LayerNormMLP.

The model's code is not changed: it calls the norm, then the Linear. So the call of the norm must compute nothing yet,
and the call of the Linear must compute both. Between the two calls a stand-in for the norm's output travels through the
model's code, a `Deferred`. It has the shape of the output, and no values.

1. The norm returns a `Normed` if its Linear is going to take it.
2. The Linear receives the Normed, and computes norm and Linear in one TE block.
3. In a fused MLP the first Linear returns a `Hidden` instead. Each operation of SwiGLU on it returns a `Part`. The
   second Linear receives the last Part, and computes norm, both Linears and SwiGLU in one TE block.

Any other code that works on a Deferred makes it compute its value first, and works on that. A settled Deferred keeps
that value: the Linear takes it too, and fuses nothing. Any such code settles a Hidden or a Part. A Normed is settled
only if the code could change the value, or asks for its gradient. A module that declared too much as fusible is
therefore slower, not wrong.

A Linear here is one of te_linear.py. Beside what a te.Linear has, it offers:

- `takes_over(norm, x)`: whether it is going to take the output of `norm` for the input x.
- `separately(x)`: its forward, computed here instead of left to the second Linear of an MLP.
- `window`: the step whose scales and weights are in use; None outside of the precision's context.
- `nothing(device)`: a NaN, to be expanded to the shape of a Deferred.
- `name_in_model`: for errors.
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
from torch.nn.modules import module as module_globals
from torch.utils._pytree import tree_leaves, tree_map_only

from harness.core.errors import MisuseError, Problem
from harness.precision.backends.te_library import RECOMPUTED

# What a Deferred can answer without its value. Its dtype is not among it: that depends on autocast.
_KNOWN = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel}
    | {getattr(Tensor, name).__get__ for name in ("shape", "ndim", "device")}
)  # fmt: skip
# What asks for a tensor's gradient.
_HOOKS = frozenset({Tensor.register_hook, Tensor.retain_grad})
# The operations of SwiGLU, beside silu.
_CHUNKS = {Tensor.chunk, torch.chunk}
_SPLITS = {Tensor.split, torch.split}
_PRODUCTS = {Tensor.mul, torch.mul}
# Results of functions that hold no tensor.
_HARMLESS = (
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    type(None),
)


class Deferred(Tensor):
    """A tensor that has not been computed. It has the tensor's shape, and NaN as its values.

    A fused block may take it. If other code gets hold of it first, it may be settled instead: its value is computed,
    and no block takes it any more.

    linear: the layer that may take it, and compute what it stands for.
    gradients: whether gradients were on when it was made.
    settled: its value, after other code got hold of it; None: the value is not needed yet.
    taken: whether the layer has computed it in a fused block.
    whole: in an MLP the Hidden that this is, or is made of; None for a Normed.

    Code that bypasses __torch_function__ (an autograd.Function, an extension) sees the NaN. If a gradient then flows
    back into the Deferred, it raises MisuseError, because that gradient would be lost.

    No attribute here has the name of one of Tensor's, as model code would then get ours.
    """

    linear: Any
    gradients: bool
    settled: Tensor | None = None
    taken = False
    whole: Hidden | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Every PyTorch function that gets a Deferred comes here first."""
        kwargs = kwargs or {}

        # Neither a question about the shape nor an operation of SwiGLU needs the value.
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        made = _swiglu(func, args, kwargs)
        if made is not None:
            return made

        # After a fused block has run, there is no tensor left whose gradient a hook could see.
        leaves = tree_leaves((args, kwargs))
        found = [each for each in leaves if isinstance(each, Deferred)]
        if func in _HOOKS:
            first = found[0]
            owner = first if first.whole is None else first.whole
            if owner.taken:
                what = "a hook is put on the gradient of a tensor that a fused layer has taken"
                why = "the layer was computed together with what comes before it, so that tensor has no gradient"
                raise _misuse(first.linear, what, why)

        # Run the function on computed values.
        for each in found:
            each.settle_others()
        values = {id(each): each.value() for each in found}
        args, kwargs = tree_map_only(Deferred, lambda each: values[id(each)], (args, kwargs))
        result = func(*args, **kwargs)

        # If the function wrote to a value, or its result may do so later, the Linear must take that value.
        # A freshly computed tensor has version 0; a higher one means that somebody wrote to it.
        for each in found:
            value = values[id(each)]
            may_change = func in _HOOKS or value._version > 0
            if may_change or any(_holds(leaf, value) for leaf in tree_leaves(result)):
                each.settled = value
        return result

    def value(self) -> Tensor:
        """The tensor, computed now as it would have been then. Raises MisuseError if that is no longer possible."""
        if self.settled is not None:
            return self.settled
        with (
            torch.set_grad_enabled(self.gradients),
            torch.autocast(self.device.type, dtype=torch.bfloat16),
        ):
            return self.computed()

    def computed(self) -> Tensor:
        """Compute the value, for `value`."""
        raise NotImplementedError

    def settle_others(self) -> None:
        """Compute the Deferreds that were made from this one, before other code gets its value and may change it."""

    def hand_over(self) -> tuple[Sequence[Any], Tensor]:
        """For `linear`: the modules that it computes before itself, first to last, and the input of the first.

        No modules: the input is that of `linear` itself.
        """
        return (), self.value()


class Normed(Deferred):
    """A norm's output.

    source: the norm's input.
    normaliser: the norm.
    version: of `source` when the norm was called, which shows whether it was written to since.
    onward: the Hiddens that its Linear returned, one for each call.
    """

    source: Tensor
    normaliser: Any
    version: int
    onward: list[ref[Hidden]]

    def computed(self) -> Tensor:
        separately: Callable[[Tensor], Tensor] = self.normaliser.separately
        return separately(self.untouched())

    def untouched(self) -> Tensor:
        """`source`. Raises MisuseError if it was written to since the norm was called."""
        if self.source._version != self.version:
            what = "the norm's input was changed in place before its output was used"
            why = "the norm is computed together with the Linear, and would read the changed input"
            raise _misuse(self.linear, what, why)
        return self.source

    def settle_others(self) -> None:
        for reference in self.onward:
            hidden = reference()
            if hidden is not None and hidden.settled is None and not hidden.taken:
                # Keep the norm's present value: the Hidden is computed from it.
                self.settled = self.value()
                hidden.settle_others()

    def hand_over(self) -> tuple[Sequence[Any], Tensor]:
        if self.settled is not None:
            return (), self.settled
        self.taken = True
        return (self.normaliser,), self.untouched()


class Hidden(Deferred):
    """The output of the first Linear of an MLP, for the second.

    normed: the first Linear's input.
    window: the step that it was made in.
    parts: what SwiGLU's operations made of it, in their order.
    """

    normed: Normed
    window: Any
    parts: list[ref[Part]]

    def computed(self) -> Tensor:
        if self.linear.window != self.window:
            what = "the output of an MLP's first layer is read after its forward"
            why = "it was left to the second layer, and weights or scales may have changed since"
            raise _misuse(self.linear, what, why)

        # If the fused block has run, code may have changed the norm's output since. Start again from the norm's input.
        normed = self.normed
        if self.taken:
            normed = deferred(normed.normaliser, normed.linear, normed.untouched())
        made: Tensor = normed.linear.separately(normed)
        self.settled = made
        return made

    def halves(self) -> tuple[Tensor, ...]:
        """The two halves of the value. Every call returns the same two views."""
        if "_halves" not in vars(self):
            self._halves = self.value().chunk(2, dim=-1)
        return self._halves

    def settle_others(self) -> None:
        self.value()
        for reference in self.parts:
            part = reference()
            if part is not None:
                part.value()


class Part(Deferred):
    """A result within SwiGLU, silu(first half) * second half.

    step: which one.
        "gate": the first half.
        "up": the second half.
        "silu": silu of the first half.
        "gated": that times the second half, which is the second Linear's input.
    made: function and arguments that made "silu" or "gated".
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
    """The Part, or pair of Parts, that an operation of SwiGLU returns.

    None if the function is no operation of SwiGLU, or if a fused block can no longer compute it.
    """
    first = args[0] if args else None
    whole = first.whole if isinstance(first, Deferred) else None
    if whole is None or whole.settled is not None or whole.taken:
        return None
    # The block would compute with gradients on or off, as they are where it runs.
    if whole.gradients != torch.is_grad_enabled():
        return None
    # The Hidden itself is at no step yet.
    step = getattr(first, "step", "")

    # The output is cut into two halves along its last dimension.
    if not step and (func in _CHUNKS or func in _SPLITS) and kwargs.keys() <= {"dim"}:
        size = 2 if func in _CHUNKS else whole.shape[-1] // 2
        if (*args[1:], *kwargs.values()) in ((size, -1), (size, whole.ndim - 1)):
            return _part(whole, "gate"), _part(whole, "up")
        return None

    # silu of the first half, not in place.
    if step == "gate" and func is F.silu and len(args) == 1 and not any(kwargs.values()):
        return _part(whole, "silu", func, args)

    # The product of that with the second half of the same output, in either order.
    if func in _PRODUCTS and len(args) == 2 and not kwargs:
        second = args[1]
        if not isinstance(second, Part) or second.whole is not whole:
            return None
        if {step, second.step} == {"silu", "up"}:
            return _part(whole, "gated", func, args)
    return None


def _holds(leaf: Any, value: Tensor) -> bool:
    """Whether `leaf`, a part of a function's result, may give its holder a way to write to `value`."""
    if isinstance(leaf, Tensor):
        if leaf.layout != torch.strided:
            return False
        return leaf.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    return not isinstance(leaf, _HARMLESS)


def _stand_in(
    kind: type[Any],
    shape: Sequence[int],
    linear: Any,
    device: torch.device,
) -> Any:
    """A Deferred of class `kind` and this shape for `linear`."""
    with torch.no_grad():
        made = linear.nothing(device).expand(shape).as_subclass(kind)
    made.linear = linear
    made.gradients = torch.is_grad_enabled()
    if made.gradients:
        with torch._C.DisableTorchFunctionSubclass():
            made.requires_grad_()
            made.register_hook(_Lost(linear))
    return made


def deferred(norm: Any, linear: Any, source: Tensor) -> Any:
    """What `norm` returns for the input `source`, to be taken by `linear`."""
    made = _stand_in(Normed, source.shape, linear, source.device)
    made.source = source
    made.normaliser = norm
    made.version = source._version
    made.onward = []
    return made


def hidden(normed: Normed, second: Any) -> Any:
    """What a first Linear returns for the input `normed`, to be taken by `second` after SwiGLU."""
    shape = (*normed.shape[:-1], normed.linear.out_features)
    made = _stand_in(Hidden, shape, second, normed.device)
    made.normed = normed
    made.window = second.window
    made.parts = []
    made.whole = made
    normed.onward.append(ref(made))
    return made


def _part(whole: Hidden, step: str, func: Any = None, args: Sequence[Any] = ()) -> Any:
    shape = (*whole.shape[:-1], whole.shape[-1] // 2)
    made = _stand_in(Part, shape, whole.linear, whole.device)
    made.whole = whole
    made.step = step
    made.made = (func, args)
    whole.parts.append(ref(made))
    return made


class _Lost:
    """A hook on a Deferred. A gradient that reaches it would be lost, as nothing was computed from its values."""

    def __init__(self, linear: Any) -> None:
        self._linear = linear

    def __call__(self, grad: Tensor) -> Tensor:
        what = "the tensor that it was to compute did not reach it, and the gradient would be lost"
        why = "an autograd.Function, a full backward hook or reentrant checkpointing hid that tensor from PyTorch"
        raise _misuse(self._linear, what, why)


class _Deferring(nn.Module):
    """A norm that leaves its computation to the Linear that it feeds, where that one runs in FP8.

    feeds: that Linear.

    It is pickled as a plain nn.RMSNorm or nn.LayerNorm.
    """

    feeds: Any

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        # A hook, or a call in another form, wants the norm's own output.
        if hooked(self) or kwargs or len(args) != 1:
            return self.separately(*args, **kwargs)
        if not self.feeds.takes_over(self, args[0]):
            return self.separately(args[0])
        return deferred(self, self.feeds, args[0])

    def separately(self, *args: Any, **kwargs: Any) -> Tensor:
        """The norm alone, computed here."""
        return super().forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__.update(copy.deepcopy(vars(self), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in vars(self).items() if name != "feeds"}
        plain = nn.RMSNorm if is_rms(self) else nn.LayerNorm
        return object.__new__, (plain,), state


class RMSNorm(_Deferring, nn.RMSNorm):
    """nn.RMSNorm before a fused Linear."""


class LayerNorm(_Deferring, nn.LayerNorm):
    """nn.LayerNorm before a fused Linear."""


def fuse(norm: Any, linear: Any) -> None:
    """Make `norm`, an nn.RMSNorm or nn.LayerNorm, leave its computation to `linear` where that runs in FP8."""
    norm.__class__ = RMSNorm if is_rms(norm) else LayerNorm
    norm.__dict__["feeds"] = linear  # not as a submodule: names and checkpoints stay as they are


def is_rms(norm: nn.Module) -> bool:
    """Whether it is an RMSNorm; else it is a LayerNorm."""
    return isinstance(norm, nn.RMSNorm)


def hooked(*modules: nn.Module) -> bool:
    """Whether one of them has a backward hook. PyTorch wraps inputs and outputs for it, which hides a Deferred."""
    if module_globals._global_backward_hooks or module_globals._global_backward_pre_hooks:
        return True
    return any(module._backward_hooks or module._backward_pre_hooks for module in modules)


def block(te: Any, linear: Any, norm: Any, first: Any = None) -> Any:
    """A te.LayerNormLinear of `norm` and `linear`, or a te.LayerNormMLP of `norm`, `first`, SwiGLU and `linear`.

    It has no Parameters, and shares the FP8 state of the te.Linears. In that state a column belongs to one tensor that
    is cast. The columns keep their order; those of `first` come before those of `linear`. `apply` runs it.
    """
    common: dict[str, Any] = {
        "eps": norm.eps,
        "bias": linear.use_bias,
        "normalization": "RMSNorm" if is_rms(norm) else "LayerNorm",
        "params_dtype": linear.weight.dtype,
        "device": "meta",
    }
    if first is None:
        made = te.LayerNormLinear(linear.in_features, linear.out_features, **common)
        meta = linear.fp8_meta
    else:
        sizes = (first.in_features, linear.in_features)
        made = te.LayerNormMLP(*sizes, **common, activation="swiglu")
        meta = _both_metas(first.fp8_meta, linear.fp8_meta)
    # Its own Parameters are on the meta device: the Linears' and the norm's are given at each call.
    made._parameters.clear()
    # With these flags TE does not make an FP8 state of its own.
    made.__dict__.update(fp8_meta=meta, fp8_initialized=True, fp8_meta_tensors_initialized=True)
    return made


def apply(
    block: Any,
    linear: Any,
    norm: Any,
    first: Any = None,
) -> Callable[[Tensor], Tensor]:
    """The function that runs `block` on BF16 [..., in_features].

    Parameters are looked up at every call, because FSDP replaces them.
    """
    own = {"layer_norm_weight": norm.weight, "layer_norm_bias": getattr(norm, "bias", None)}
    layers = {"": linear} if first is None else {"fc1_": first, "fc2_": linear}
    for name, layer in layers.items():
        own[f"{name}weight"] = layer.weight
        if layer.use_bias:
            own[f"{name}bias"] = layer.bias

    # Quantizers too: those of an evaluation differ from those of training.
    casts: dict[str, list[Any]] = {key: [] for key in linear.quantizers}
    for layer in layers.values():
        for key in casts:
            casts[key] += layer.quantizers[key]
    block.__dict__.update(own, quantizers=casts, training=linear.training)
    return block.forward


def _both_metas(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """TE's FP8 state of two layers as that of one module.

    te.checkpoint keeps one queue of states for a module: it copies the state in forward, and restores it to recompute.
    """
    made = {key: value for key, value in first.items() if key != RECOMPUTED}
    made["num_gemms"] = 2
    for key in ("scaling_fwd", "scaling_bwd"):
        history = _Joined([first[key].amax_history, second[key].amax_history])
        scale = _Joined([first[key].scale, second[key].scale])
        made[key] = SimpleNamespace(amax_history=history, scale=scale)
    return made


class _Joined:
    """Several tensors that te.checkpoint copies and restores as if they were one."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def clone(self) -> list[Tensor]:
        return [each.clone() for each in self._tensors]

    def copy_(self, saved: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._tensors, saved, strict=True):
            tensor.copy_(value)


@torch.no_grad()
def quantised(norm: Any, x: Tensor) -> Tensor:
    """The tensor that a fused block casts, float32: the norm of BF16 rows by a BF16 weight, not rounded to BF16.

    For sampled statistics.
    """
    weight = norm.weight.to(x.dtype).float()
    if is_rms(norm):
        return F.rms_norm(x.float(), norm.normalized_shape, weight, norm.eps)
    bias = norm.bias.to(x.dtype).float()
    return F.layer_norm(x.float(), norm.normalized_shape, weight, bias, norm.eps)


def _misuse(linear: Any, what: str, why: str) -> MisuseError:
    fix = "take the layer out of its module's fusible_norms or fusible_swiglu, or set layers.fuse: false"
    return MisuseError(Problem(what, f"layer {linear.name_in_model}", why, fix))
