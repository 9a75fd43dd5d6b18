"""In which precision torch's own layers other than Linear multiply matrices. Measured with one tiny layer of each kind.

Their weights stay in float32 on every rung, and autocast decides for each operation. What it decides is up to torch
and differs between layers: a convolution runs in bf16, `nn.Bilinear` in float32. So the plan measures instead of
assuming. A layer of the same class, 8 wide, runs once under the rung's autocast, and the dtypes of its operands are
noted on their way to the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The small layers and their inputs.
_WIDTH, _BATCH, _LONG = 8, 2, 5

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# An operation multiplies matrices if one of these is in its name, whatever library computes it.
_PRODUCTS = ("mm", "convolution", "rnn", "lstm", "gru", "_trilinear", "attention")


@contextmanager
def planned_autocast(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """torch.autocast to `dtype` (None: autocast off), around every call of a layer.

    It also switches off torch's fast path for encoder layers. In eval mode without gradients that path computes an
    nn.TransformerEncoderLayer in one operation, which reads the weights of its Linears without calling them: validation
    would run without the FP8 that training has. This matters on a CPU only, where the fast path ignores autocast.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        enabled = dtype is not None
        with torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=enabled):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


Make = Callable[..., nn.Module]
Shape = tuple[int, ...]
Small = tuple[Callable[[], nn.Module], list[Shape]]
"""How to make a small layer, and the shapes of its inputs."""


def _convolution(kind: Make, dimensions: int) -> Small:
    image = (_LONG,) * dimensions
    return lambda: kind(_WIDTH, _WIDTH, 3), [(_BATCH, _WIDTH, *image)]


def _recurrent(kind: Make, *time: int) -> Small:
    return lambda: kind(_WIDTH, _WIDTH), [(*time, _BATCH, _WIDTH)]


_SMALL: dict[type[nn.Module], Small] = {
    nn.Conv1d: _convolution(nn.Conv1d, 1),
    nn.Conv2d: _convolution(nn.Conv2d, 2),
    nn.Conv3d: _convolution(nn.Conv3d, 3),
    nn.ConvTranspose1d: _convolution(nn.ConvTranspose1d, 1),
    nn.ConvTranspose2d: _convolution(nn.ConvTranspose2d, 2),
    nn.ConvTranspose3d: _convolution(nn.ConvTranspose3d, 3),
    nn.RNN: _recurrent(nn.RNN, _LONG),
    nn.LSTM: _recurrent(nn.LSTM, _LONG),
    nn.GRU: _recurrent(nn.GRU, _LONG),
    nn.RNNCell: _recurrent(nn.RNNCell),
    nn.LSTMCell: _recurrent(nn.LSTMCell),
    nn.GRUCell: _recurrent(nn.GRUCell),
    nn.Bilinear: (
        lambda: nn.Bilinear(_WIDTH, _WIDTH, _WIDTH),
        [(_BATCH, _WIDTH)] * 2,
    ),
    nn.MultiheadAttention: (
        lambda: nn.MultiheadAttention(2 * _WIDTH, 2),
        [(_LONG, _BATCH, 2 * _WIDTH)] * 3,
    ),
}


def half_of(precision: str) -> torch.dtype | None:
    """The dtype that autocast casts to on a rung of that precision; None: no autocast."""
    return {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def is_embedding(module: nn.Module) -> bool:
    """Whether its matrix is looked up in, not multiplied with."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def products_in(module: nn.Module, half: torch.dtype | None) -> str:
    """In which precision `module` multiplies matrices under autocast to `half` (None: no autocast).

    Returns "bf16", "fp16", "fp32", or several joined by " and ". Empty if unknown: the class is not torch's own, its
    forward was replaced, or this machine cannot run the layer.
    """
    if "forward" in vars(module):
        return ""
    parameter = next(module.parameters(recurse=False), None)
    if parameter is None or isinstance(parameter, FakeTensor):
        return ""
    device = "cuda" if parameter.device.type == "cuda" else "cpu"
    for kind in _SMALL:
        # A subclass that keeps the forward computes the same.
        if type(module).forward is kind.forward:
            return _measured(kind, device, half)
    return ""


@cache
def _measured(kind: type[nn.Module], device: str, half: torch.dtype | None) -> str:
    """`products_in` for a small layer of class `kind`."""
    make, shapes = _SMALL[kind]
    # The user's random numbers and default device stay as they are.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        layer = make().float().to(device)
        given: list[Tensor] = []
        for shape in shapes:
            values = torch.zeros(shape, device="cpu")
            given.append(values.float().to(device))
    seen = _Seen()
    try:
        autocast = torch.autocast(device, half or torch.bfloat16, enabled=half is not None)
        with autocast, seen:
            layer(*given)
    except RuntimeError:
        # A library has no kernel for it here, for example for fp16 in a CPU's LSTM.
        return ""
    dtypes = {NAMES[dtype] for dtype in seen.dtypes}
    return " and ".join(sorted(dtypes))


class _Seen(TorchDispatchMode):
    """Notes the dtypes of the operands of every matrix product, after autocast has cast them."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if any(part in name for part in _PRODUCTS):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.dtype in NAMES:
                    self.dtypes.add(leaf.dtype)
        return func(*args, **(kwargs or {}))
