"""In what torch's own layers that are no Linear multiply matrices: measured, by one tiny layer of each kind.

Their weights stay in float32 on every rung, and autocast decides for each operation. What it decides is up to torch
and differs between layers (a convolution runs in bf16, `nn.Bilinear` in float32), so that the plan asks instead of
knowing: a layer of the same class, 8 wide, runs once under the rung's autocast, and the operands of its products are
looked at on their way to the kernel.
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

_WIDTH, _BATCH, _LONG = 8, 2, 5
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Parts of the names of operations that multiply matrices, by whatever library.
_PRODUCTS = ("mm", "convolution", "rnn", "lstm", "gru", "_trilinear", "attention")


@contextmanager
def planned_autocast(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """torch.autocast to `dtype` (None: autocast off), in which every layer is called.

    In eval mode without gradients torch computes an nn.TransformerEncoderLayer in one operation that reads the weights
    of its Linears: validation would run without the FP8 that training has. On a CPU alone, where torch takes no notice
    of autocast there.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


Layer = tuple[Callable[..., nn.Module], Callable[[], tuple[Tensor, ...]]]


def _of(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.zeros(shape),)


def _convolution(kind: Callable[..., nn.Module], dimensions: int) -> Layer:
    return lambda: kind(_WIDTH, _WIDTH, 3), _of(_BATCH, _WIDTH, *[_LONG] * dimensions)


def _recurrent(kind: Callable[..., nn.Module], *shape: int) -> Layer:
    return lambda: kind(_WIDTH, _WIDTH), _of(*shape, _BATCH, _WIDTH)


# Class -> how to make a small one, and what to call it with.
_SMALL: dict[type[nn.Module], Layer] = {
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
        lambda: (torch.zeros(_BATCH, _WIDTH), torch.zeros(_BATCH, _WIDTH)),
    ),
    nn.MultiheadAttention: (
        lambda: nn.MultiheadAttention(2 * _WIDTH, 2),
        lambda: (torch.zeros(_LONG, _BATCH, 2 * _WIDTH),) * 3,
    ),
}


def half_of(precision: str) -> torch.dtype | None:
    """What autocast casts to on a rung of that precision; None: there is none."""
    return {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def is_embedding(module: nn.Module) -> bool:
    """Whether its matrix is looked up in, not multiplied with."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def products_in(module: nn.Module, half: torch.dtype | None) -> str:
    """ "bf16", "fp16" or "fp32": in what `module` multiplies matrices under autocast to `half` (None: no autocast).

    Empty where that is not known: a class that is not torch's own, or whose forward is another, or a machine on which
    that layer does not run.
    """
    parameter = next(module.parameters(recurse=False), None)
    kind = next((known for known in _SMALL if type(module).forward is known.forward), None)
    if (
        kind is None
        or parameter is None
        or isinstance(parameter, FakeTensor)
        or "forward" in vars(module)
    ):
        return ""
    return _measured(kind, "cuda" if parameter.device.type == "cuda" else "cpu", half)


@cache
def _measured(kind: type[nn.Module], device: str, half: torch.dtype | None) -> str:
    make, inputs = _SMALL[kind]
    # Random numbers and defaults of the user's are as they were.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        layer, given = make().float().to(device), [tensor.float().to(device) for tensor in inputs()]
    seen = _Seen()
    try:
        with torch.autocast(device, half or torch.bfloat16, enabled=half is not None), seen:
            layer(*given)
    except RuntimeError:
        return ""  # a library has no kernel for it here: fp16 in a CPU's LSTM
    dtypes = {NAMES[dtype] for dtype in seen.dtypes}
    return dtypes.pop() if len(dtypes) == 1 else " and ".join(sorted(dtypes))


class _Seen(TorchDispatchMode):
    """dtypes: of the operands of every matrix product. Modes see operations after autocast has cast for them."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(part in func.overloadpacket.__name__ for part in _PRODUCTS):
            operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.dtypes |= {tensor.dtype for tensor in operands if tensor.dtype in NAMES}
        return func(*args, **(kwargs or {}))
