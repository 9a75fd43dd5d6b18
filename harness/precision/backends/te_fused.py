"""A norm and its Linear as one te.LayerNormLinear on the Parameters of both: the norm's output is written in FP8.

Where a fused pair runs, the norm hands on a `Deferred` in the place of its output, and the Linear applies both. What
else is done with a Deferred makes the norm's output first, and what could change that output, or look at its gradient,
makes the Linear take it too: a module that declared too much is slower, not wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from harness.core.errors import MisuseError, Problem

# Known of a norm's output before it is there. Its dtype is not: autocast has a say.
_KNOWN = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel}
    | {getattr(Tensor, name).__get__ for name in ("shape", "ndim", "device")}
)  # fmt: skip
_HOOKS = frozenset({Tensor.register_hook, Tensor.retain_grad})


class Deferred(Tensor):
    """A norm's output that has not been computed: NaN for what looks past Python, of the output's shape.

    source: the norm's input. norm, linear: the pair. settled: the output, once somebody else has a hold on it. taken:
    the Linear has applied both. Code that takes it apart without PyTorch's Python functions (an
    autograd.Function, an extension) would see the NaN, and a gradient that comes back to it raises MisuseError: it
    would be lost.
    """

    source: Tensor
    norm: Any
    linear: Any
    gradients: bool
    version: int
    settled: Tensor | None
    taken: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = [each for each in tree_leaves((args, kwargs or {})) if isinstance(each, Deferred)]
        if func in _HOOKS and found[0].taken:
            why = "the layer was applied together with the norm, whose output has no gradient of its own"
            raise _misuse(found[0].linear, "a hook is put on the gradient of its norm's output", why)
        values = {id(each): each.value() for each in found}
        args, kwargs = tree_map_only(Deferred, lambda each: values[id(each)], (args, kwargs or {}))
        result = func(*args, **kwargs)
        for each in found:
            value = values[id(each)]
            if func in _HOOKS or value._version or any(_holds(leaf, value) for leaf in tree_leaves(result)):
                each.settled = value
        return result

    def value(self) -> Tensor:
        """The norm's output, computed now as it would have been then. Raises MisuseError as `untouched` does."""
        if self.settled is not None:
            return self.settled
        source = self.untouched()
        with torch.set_grad_enabled(self.gradients), torch.autocast(source.device.type, dtype=torch.bfloat16):
            return self.norm.separately(source)

    def untouched(self) -> Tensor:
        """`source`. Raises MisuseError if it was written to since."""
        if self.source._version != self.version:
            why = "the norm is applied together with the Linear, and would see what was written"
            raise _misuse(self.linear, "the norm's input was changed in place before its output was used", why)
        return self.source


def _holds(leaf: Any, value: Tensor) -> bool:
    """Whether `leaf`, a part of what a function returned, may be a way to write to `value`."""
    if isinstance(leaf, Tensor):
        strided = leaf.layout == torch.strided
        return strided and leaf.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    return not isinstance(leaf, int | float | complex | str | torch.dtype | torch.device | torch.layout | None)


def deferred(norm: Any, linear: Any, source: Tensor) -> Tensor:
    """What `norm` hands on to `linear` for the input `source`."""
    with torch.no_grad():
        made: Any = linear.nothing(source.device).expand(source.shape).as_subclass(Deferred)
    made.source, made.norm, made.linear = source, norm, linear
    made.gradients, made.version = torch.is_grad_enabled(), source._version
    made.settled, made.taken = None, False
    if made.gradients:
        with torch._C.DisableTorchFunctionSubclass():
            made.requires_grad_()
            made.register_hook(_Lost(linear))
    return made


class _Lost:
    """Called with a gradient of a Deferred itself."""

    def __init__(self, linear: Any) -> None:
        self._linear = linear

    def __call__(self, grad: Tensor) -> Tensor:
        why = "an autograd.Function, a full backward hook or reentrant checkpointing took it from PyTorch's sight"
        raise _misuse(self._linear, "what its norm handed on did not arrive, and the gradient would be lost", why)


class _Deferring(nn.Module):
    """A norm that leaves its computation to the Linear it feeds, where that runs in FP8. Pickled, it is a plain one."""

    feeds: Any

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        hooked = self._backward_hooks or self._backward_pre_hooks
        if hooked or kwargs or len(args) != 1 or not self.feeds.takes_over(self, args[0]):
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


def block(te: Any, norm: Any, linear: Any) -> Any:
    """A te.LayerNormLinear without Parameters, with the FP8 state of `linear`, a te.Linear: their columns are the same.

    `apply` runs it.
    """
    made = te.LayerNormLinear(
        linear.in_features,
        linear.out_features,
        eps=norm.eps,
        bias=linear.use_bias,
        normalization="RMSNorm" if is_rms(norm) else "LayerNorm",
        params_dtype=linear.weight.dtype,
        device="meta",
    )
    made._parameters.clear()
    made.__dict__.update(fp8_meta=linear.fp8_meta, fp8_initialized=True, fp8_meta_tensors_initialized=True)
    return made


def apply(block: Any, norm: Any, linear: Any) -> Callable[[Tensor], Tensor]:
    """What computes both for BF16 [..., in_features]. Parameters are looked up anew: FSDP replaces them."""
    own = {"weight": linear.weight, "layer_norm_weight": norm.weight, "layer_norm_bias": getattr(norm, "bias", None)}
    if linear.use_bias:
        own["bias"] = linear.bias
    block.__dict__.update(own, quantizers=linear.quantizers, training=linear.training)
    return block.forward


@torch.no_grad()
def quantised(norm: Any, x: Tensor) -> Tensor:
    """What a fused block casts, float32: the norm of BF16 rows by a BF16 weight, not rounded. For statistics."""
    weight = norm.weight.to(x.dtype).float()
    if is_rms(norm):
        return F.rms_norm(x.float(), norm.normalized_shape, weight, norm.eps)
    return F.layer_norm(x.float(), norm.normalized_shape, weight, norm.bias.to(x.dtype).float(), norm.eps)


def _misuse(linear: Any, what: str, why: str) -> MisuseError:
    fix = "take the pair out of its module's fusible_norms, or set layers.fuse: false"
    return MisuseError(Problem(what, f"layer {linear.name_in_model}", why, fix))
