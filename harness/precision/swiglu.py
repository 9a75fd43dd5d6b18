"""Whether the forward of a module is SwiGLU between two of its Linears, and nothing else.

    [x = norm(x)]
    gate, up = first(x).chunk(2, dim=-1)
    return second(silu(gate) * up)

The forward runs on a copy of the module with an input without values, and every function of PyTorch that it calls is
looked at. The copy's norm and Linears are stand-ins. It runs in training and in evaluation, with and without gradients,
on inputs of two and three dimensions: code may look at any of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.weak import WeakIdKeyDictionary

# The functions that an MLP may call, beside silu.
_CHUNKS = {Tensor.chunk, torch.chunk}
_SPLITS = {Tensor.split, torch.split}
_PRODUCTS = {Tensor.mul, torch.mul}
# What it may ask the first Linear's output.
_QUESTIONS = {Tensor.size, Tensor.dim} | {
    getattr(Tensor, name).__get__ for name in ("shape", "ndim")
}
# Attributes that every module has. The others are settings of its own, but for what fusing adds.
_PLAIN = frozenset(vars(nn.Module()))
_NO_SETTINGS = _PLAIN | {"fused_with"}
# Shapes of the inputs that are tried, without their last dimension.
_TOKENS = ((16,), (2, 16))


class _Unlike(BaseException):
    """The forward is another one. No Exception: the forward itself could catch that."""


class _Reading(TorchFunctionMode):
    """Follows one forward. Raises _Unlike at the first call that does not belong there.

    widths: features that norm, first and second Linear give out.

    steps: what a tensor is, while it lives: "input", "norm", "first", "gate", "up", "silu", "gated" or "second".
    """

    def __init__(self, widths: Mapping[str, int]) -> None:
        super().__init__()
        self._widths = widths
        self._state = _state()
        self.steps = WeakIdKeyDictionary()
        self.called: list[str] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        first: Any = args[0] if args else None
        step = self.step(first)
        asks = func in _QUESTIONS and step == "first"

        # The output is cut into two halves along its last dimension.
        if step == "first" and (func in _CHUNKS or func in _SPLITS) and kwargs.keys() <= {"dim"}:
            size = 2 if func in _CHUNKS else first.shape[-1] // 2
            arguments = (*args[1:], *kwargs.values())
            last = first.ndim - 1
            if arguments in ((size, -1), (size, last)):
                self.steps[made[0]] = "gate"
                self.steps[made[1]] = "up"
                return made

        # silu of the first half, not in place; and the product of that with the second half, in either order.
        if func is F.silu and step == "gate" and len(args) == 1 and not any(kwargs.values()):
            self.steps[made] = "silu"
        elif func in _PRODUCTS and {step, self.step(args[-1])} == {"silu", "up"}:
            self.steps[made] = "gated"
        elif not asks:
            name = resolve_name(func) or getattr(func, "__name__", func)
            raise _Unlike(f"its forward calls {name}")
        return made

    def step(self, x: Any) -> Any:
        """What `x` is; empty for anything unknown."""
        return self.steps.get(x, "") if isinstance(x, Tensor) else ""

    def run(self, part: str, wanted: Sequence[str], x: Tensor) -> Tensor:
        """A forward of the stand-in for `part`, which takes one of the tensors that are `wanted`."""
        if self.step(x) not in wanted or part in self.called:
            raise _Unlike(f"its forward calls {part} on something else")
        if _state() != self._state:
            raise _Unlike("its forward switches gradients or autocast")
        self.called.append(part)
        # These calls are not the forward's.
        with torch._C.DisableTorchFunction():
            return self.new(part, (*x.shape[:-1], self._widths[part]))

    def new(self, step: str, shape: Sequence[int]) -> Tensor:
        """A tensor without values, as the result of `step`."""
        made = torch.empty(shape, device="meta", requires_grad=torch.is_grad_enabled())
        self.steps[made] = step
        return made


class _StandIn(nn.Module):
    """A norm or a Linear of the copy."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def difference(module: nn.Module, norm: nn.Module, first: Any, second: Any) -> str:
    """How the forward of `module` differs from the MLP of these parts; empty if it does not.

    norm: before the MLP. It may be outside of `module`.
    """
    parts = {"first": first, "second": second}
    inner = set(module.modules())
    if norm in inner:
        parts["norm"] = norm

    # A module beside the parts may have settings, as a Dropout has `p`. Its forward may depend on them: it is refused.
    read = {module, *parts.values()}
    for name, each in module.named_modules():
        if each not in read and vars(each).keys() - _PLAIN - {"inplace"}:
            return f"its forward may depend on {name}, a {type(each).__name__}"

    # A forward may branch on its mode, on gradients or on the number of tokens, so several of each are tried.
    both = (True, False)
    for training, gradients, tokens in product(both, both, _TOKENS):
        try:
            _read(module, parts, training, gradients, tokens)
        except _Unlike as unlike:
            return str(unlike)
        except Exception as error:  # whatever the forward raises without values
            return f"its forward fails on a tensor without values: {error}"
    return ""


def snapshot(module: nn.Module) -> tuple[Any, ...]:
    """What `difference` rests on. It holds as long as this is the same."""
    settings = {name: value for name, value in vars(module).items() if name not in _NO_SETTINGS}
    forward = getattr(module, "fused_from", type(module)).forward
    return forward, list(module.modules()), settings


def _read(
    module: nn.Module,
    parts: Mapping[str, Any],
    training: bool,
    gradients: bool,
    tokens: Sequence[int],
) -> None:
    """One forward. Raises _Unlike if it is no MLP of these `parts`, by name."""
    width = parts["first"].in_features
    widths = {"norm": width, "first": 2 * parts["second"].in_features, "second": width}
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(gradients))
        for device in ("cpu", "cuda"):
            if device == "cpu" or torch.cuda.is_available():
                stack.enter_context(torch.autocast(device, dtype=torch.bfloat16))
        reading = _Reading(widths)

        def stand_in(part: str) -> nn.Module:
            # Each part takes what the one before it gives; without a norm the first takes the input itself.
            before = {"norm": "input", "second": "gated"}
            first_takes = "norm" if "norm" in parts else "input"
            wanted = before.get(part, first_takes)
            return _StandIn(lambda x: reading.run(part, (wanted,), x))

        stand_ins = {each: stand_in(part) for part, each in parts.items()}
        copy: Any = _copy(module, stand_ins, training)
        before = dict(vars(copy))
        x = reading.new("input", (*tokens, width))
        with reading:
            out = copy.forward(x)

    if reading.step(out) != "second":
        raise _Unlike("its forward does not return what the second layer gives")
    # Whoever keeps a tensor in between would miss it.
    del out
    if vars(copy) != before or set(reading.steps.values()) != {"input"}:
        raise _Unlike("its forward keeps what it has computed")


def _copy(module: nn.Module, stand_ins: Mapping[nn.Module, nn.Module], training: bool) -> nn.Module:
    """A shallow copy of `module` and of what is in it, without hooks."""
    made = object.__new__(type(module))
    made.__dict__.update(vars(module))
    for name, value in vars(nn.Module()).items():
        if name.endswith("_hooks"):
            made.__dict__[name] = value
    made.__dict__["training"] = training
    inner = made.__dict__["_modules"] = dict(module._modules)
    for name, each in module.named_children():
        inner[name] = stand_ins.get(each) or _copy(each, stand_ins, training)
    return made


def _state() -> tuple[bool, ...]:
    """What a forward may switch for a part of itself."""
    autocast = [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]
    return (torch.is_grad_enabled(), *autocast)
