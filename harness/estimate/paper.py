"""In here PyTorch has one CUDA card, and every new tensor is a fake: shapes, dtypes and addresses, no memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from harness.estimate import device
from harness.estimate.roofline import Card

# Kernels that CUDA has and a CPU-only build takes apart into many.
_ONLY_ON_CUDA = ("_fused_rms_norm", "silu_backward", "mish_backward")
# What FlashAttention-2 takes (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
_FLASH_CAPABILITY = (8, 0)
_FLASH_HEAD_DIM = 256


class PaperEvent:
    """torch.cuda.Event of a device that is always done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: PaperEvent) -> float:
        return 1.0


class _Attention(TorchFunctionMode):
    """Which attention kernel a real card would take: flash from 8.0 on, memory-efficient below (not with grouped
    queries), else plain mathematics. A CPU-only build knows the last one alone."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not _on_cuda(args, kwargs):
            return func(*args, **kwargs)
        return self._attend(func, *args, **kwargs)

    def _attend(
        self,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        half = query.dtype in (torch.bfloat16, torch.float16)
        kernels = torch.ops.aten
        flashes = self._card.capability >= _FLASH_CAPABILITY and query.shape[-1] <= _FLASH_HEAD_DIM
        if attn_mask is None and half and flashes:
            flash = kernels._scaled_dot_product_flash_attention
            return flash(query, key, value, dropout_p, is_causal, return_debug_mask=False, scale=scale)[0]
        if attn_mask is None and not enable_gqa:
            efficient = kernels._scaled_dot_product_efficient_attention
            trains = any(tensor.requires_grad for tensor in (query, key, value))
            return efficient(query, key, value, None, trains, dropout_p, is_causal, scale=scale)[0]
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _on_cuda(args: Any, kwargs: dict[str, Any]) -> bool:
    query = args[0] if args else kwargs.get("query")
    return isinstance(query, FakeTensor) and query.device.type == "cuda"


@contextmanager
def on_paper(card: Card) -> Iterator[FakeTensorMode]:
    """One CUDA device, `card`, and fake tensors. What is changed in torch is as before when the context ends.

    Call `device.load()` before torch is imported; raises MisuseError as that does.
    """
    device.load()
    properties = SimpleNamespace(
        name=card.name,
        major=card.capability[0],
        minor=card.capability[1],
        total_memory=card.memory,
        multi_processor_count=card.processors,
        gcnArchName="",
    )
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "set_device", lambda *_: None),
        (torch.cuda, "is_initialized", lambda: True),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "manual_seed_all", lambda *_: None),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.cuda, "get_device_capability", lambda *_: card.capability),
        (torch.cuda, "get_device_name", lambda *_: card.name),
        (torch.cuda, "Event", PaperEvent),
        (torch.version, "cuda", torch.version.cuda or "13.0"),
        # Fakes would otherwise start CUDA, to be sure that it can.
        (FakeTensorMode, "avoid_device_init", property(lambda _: True)),
    ]
    with ExitStack() as stack:
        for owner, name, value in answers:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(warnings.catch_warnings())
        # An address tells one weight from another; fakes have none, and one weight is not taken for another here.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        stack.enter_context(_cuda_kernels())
        stack.enter_context(_Attention(card))
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


@contextmanager
def _cuda_kernels() -> Iterator[None]:
    """Where torch has no CUDA kernels, say that there are those which it would otherwise do without."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name in _ONLY_ON_CUDA:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                library.impl(name, _never, "CUDA")
        yield
    finally:
        library._destroy()


def _never(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a device on paper was asked to compute")
