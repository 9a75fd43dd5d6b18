"""A norm and its Linear as one te.LayerNormLinear; with SwiGLU and a second Linear as one te.LayerNormMLP.

The model's code is not changed: it calls the norm, then the Linear. So a fused norm computes nothing. It returns a
`Placeholder`, which has the shape of its output and no values, and the Linear computes both in one TE block. Nobody
else can use the Placeholder: whatever reads it raises MisuseError, and so does a gradient that reaches it.

A fused MLP (`fuse_mlp`) is a module whose forward the plan has read (precision/swiglu.py): it is SwiGLU between its two
Linears, and nothing else. If its first Linear is due to take a Placeholder, one TE block computes the whole forward.

The norm computes its output as usual, and the MLP runs its own forward, wherever one block may not take their place:
where the Linear is in BF16, outside of the precision's context, or where a hook would see a tensor that a block skips.

A Linear here is one of te_linear.py. Beside what a te.Linear has, it offers:

- `takes_over(norm, x)`: whether it is going to take the output of `norm` for the input x.
- `takes_mlp(placeholder, first)`: whether it is going to take `first`, SwiGLU and the norm before them.
- `compute(x, before)`: its output, with the modules `before` it in one block.
- `nothing(device)`: a NaN, to be expanded to the shape of a Placeholder.
- `name_in_model`: for errors.
"""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_globals
from torch.utils._pytree import tree_leaves

from harness.core.errors import MisuseError, Problem
from harness.precision.layers import pickled_as_plain
from harness.precision.swiglu import snapshot

# What a Placeholder can answer. Its dtype is not among it: that depends on autocast.
_KNOWN = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel}
    | {getattr(Tensor, name).__get__ for name in ("shape", "ndim", "device")}
)  # fmt: skip
# The kinds of hook that see a module's input or output. Each is also a global one.
_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


class Placeholder(Tensor):
    """A norm's output, which only its Linear may take: it has the shape, and NaN as its values.

    linear: the layer that computes it.
    normaliser: the norm.
    source: the norm's input.
    version: of `source` when the norm was called, which shows whether it was written to since.
    gradients: whether gradients were on then.

    Code that bypasses __torch_function__ (an autograd.Function, an extension) sees the NaN. A gradient that flows back
    from it raises MisuseError.

    No attribute here has the name of one of Tensor's.
    """

    linear: Any
    normaliser: Any
    source: Tensor
    version: int
    gradients: bool

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Every PyTorch function that gets a Placeholder comes here first."""
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        first = next(each for each in leaves if isinstance(each, Placeholder))
        name = torch.overrides.resolve_name(func) or func
        what = f"the output of the norm before it is read elsewhere too, by {name}"
        raise _misuse(
            first.linear, what, "it is never computed: the norm is part of the layer's block"
        )

    def untouched(self) -> Tensor:
        """`source`. Raises MisuseError if it was written to since the norm was called."""
        if self.source._version != self.version:
            what = "the norm's input was changed in place before its output was used"
            why = "the norm is computed together with the Linear, and would read the changed input"
            raise _misuse(self.linear, what, why)
        return self.source

    def computed(self) -> Tensor:
        """The norm's output as it would have been, for a Linear that cannot compute both in one."""
        with (
            torch.set_grad_enabled(self.gradients),
            torch.autocast(self.device.type, dtype=torch.bfloat16),
        ):
            made: Tensor = self.normaliser.separately(self.untouched())
            return made


def _lost(linear: Any, grad: Tensor) -> Tensor:
    """A gradient has reached the Placeholder of `linear`. It would be lost: nothing was computed from its values."""
    what = "the tensor that it was to compute did not reach it, and the gradient would be lost"
    why = (
        "an autograd.Function, an extension or reentrant checkpointing hid that tensor from PyTorch"
    )
    raise _misuse(linear, what, why)


def _placeholder(norm: Any, linear: Any, source: Tensor) -> Placeholder:
    """What `norm` returns for the input `source`, which `linear` is going to take."""
    with torch.no_grad():
        made = linear.nothing(source.device).expand(source.shape).as_subclass(Placeholder)
    made.linear = linear
    made.normaliser = norm
    made.source = source
    made.version = source._version
    made.gradients = torch.is_grad_enabled()
    if made.gradients:
        with torch._C.DisableTorchFunctionSubclass():
            made.requires_grad_()
            made.register_hook(partial(_lost, linear))
    return made


class _Fused(nn.Module):
    """A module of the model whose class was replaced, so that a TE block may compute it. It is pickled as before.

    fused_from: its class before.
    fused_with: the other modules of the block. Not submodules: names and checkpoints stay as they are.
    """

    fused_from: type[nn.Module]
    fused_with: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__.update(copy.deepcopy(vars(self), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return pickled_as_plain(self, ("fused_with",), self.fused_from)


class _Norm(_Fused):
    """A norm that leaves its computation to the Linear that it feeds (`fused_with`), where that one takes it."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        left = None if kwargs or len(args) != 1 else self.leave(args[0])
        return self.separately(*args, **kwargs) if left is None else left

    def leave(self, x: Tensor) -> Placeholder | None:
        """What stands for this norm of `x`, if its Linear is going to take it; else None."""
        if hooked(self) or not self.fused_with.takes_over(self, x):
            return None
        return _placeholder(self, self.fused_with, x)

    def separately(self, *args: Any, **kwargs: Any) -> Tensor:
        """The norm alone, computed here."""
        made: Tensor = super().forward(*args, **kwargs)
        return made


class _Mlp(_Fused):
    """A SwiGLU MLP that leaves its forward to its second Linear, where that one takes it.

    fused_with: norm, first and second Linear, and `swiglu.snapshot` of when its forward was read. The norm is None
        if it is outside of this module.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        norm, first, second, as_read = self.fused_with
        if len(args) == 1 and not kwargs and snapshot(self) == as_read:
            left = args[0] if norm is None else norm.leave(args[0])
            if isinstance(left, Placeholder) and second.takes_mlp(left, first):
                return second.compute(left.untouched(), (left.normaliser, first))
        return super().forward(*args, **kwargs)


@cache
def _fused_class(kind: type[_Fused], base: type[nn.Module]) -> type[nn.Module]:
    own = {"fused_from": base, "__module__": base.__module__}
    return type(base.__name__, (kind, base), own)


def fuse(norm: nn.Module, linear: Any) -> None:
    """Make `norm`, an nn.RMSNorm or nn.LayerNorm, leave its computation to `linear` where that takes it."""
    norm.__class__ = _fused_class(_Norm, type(norm))
    norm.__dict__["fused_with"] = linear


def fuse_mlp(module: nn.Module, norm: nn.Module, first: Any, second: Any) -> None:
    """Make `module`, whose forward is an MLP of these parts, leave it to `second` where that takes it."""
    inner = norm if norm in set(module.modules()) else None
    as_read = snapshot(module)
    module.__class__ = _fused_class(_Mlp, type(module))
    module.__dict__["fused_with"] = (inner, first, second, as_read)


def hooked(*modules: nn.Module) -> bool:
    """Whether one of them has a hook, which would see a tensor that a fused block does not compute.

    A hook whose object has a method `looks_at` (precision/standard.py) says itself whether it reads tensors.
    """
    for kind in _HOOKS:
        if getattr(module_globals, f"_global_{kind}"):
            return True
        for module in modules:
            for hook in getattr(module, f"_{kind}").values():
                owner = getattr(hook, "__self__", None)
                looks_at = getattr(owner, "looks_at", None)
                if looks_at is None or looks_at(module):
                    return True
    return False


def _misuse(linear: Any, what: str, why: str) -> MisuseError:
    fix = "take the layer out of its module's fusible_norms or fusible_swiglu, or set layers.fuse: false"
    return MisuseError(Problem(what, f"layer {linear.name_in_model}", why, fix))
