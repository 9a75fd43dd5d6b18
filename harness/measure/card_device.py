"""A device as torch computes on it: products in each precision, cells of memory, and what the device reports."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from harness.capability.probe import MachineFacts
from harness.capability.readings import Readings, card_readings, processor_readings
from harness.core.memory import free_memory
from harness.precision.backends.native_gemm import (
    MULTIPLE,
    Carrier,
    Fp8Pair,
    Operand,
    has_fp8_units,
)

_CELLS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TorchDevice:
    """One device of torch. Implements `card_check.CardDevice`.

    name: for people.
    place: where its tensors are.
    multiple: what k and n of FP8 products are multiples of.
    """

    multiple = MULTIPLE

    def __init__(self, place: torch.device, name: str) -> None:
        self.place = place
        self.name = name
        self.is_card = place.type == "cuda"

    def lacks(self, precision: str) -> str:
        """Why the device cannot multiply in `precision`; empty if it can."""
        if not self.is_card:
            return "a processor has no TF32" if precision == "tf32" else ""
        capability = torch.cuda.get_device_capability(self.place)
        if precision in ("tf32", "bf16") and capability < (8, 0):
            return f"{precision} needs compute capability 8.0"
        if precision in _CELLS and not has_fp8_units(self.place):
            return "FP8 units need compute capability 8.9"
        return ""

    def computes(self, precision: str) -> str:
        """What computes products in `precision`, for people."""
        if precision not in _CELLS:
            return "torch.mm"
        if has_fp8_units(self.place):
            return "torch._scaled_mm"
        return "emulation: FP8 values in bf16"

    def multiplication(self, precision: str, left: Tensor, right: Tensor) -> Callable[[], Tensor]:
        """A function that multiplies `left` [m, k] and `right` [k, n] once, and gives [m, n] on the device.

        left, right: of any dtype. fp32 and TF32 give float32, fp16 gives float16, bf16 and FP8 give bfloat16.
        """
        if precision in _CELLS:
            # Only gradients are in E5M2, and a GEMM has one of them at most: the right operand is E4M3.
            one = self._fp8(left, _CELLS[precision])
            other = self._fp8(right.t(), _CELLS["fp8_e4m3"])
            return lambda: one.nt(other)
        dtype = _HALVES.get(precision, torch.float32)
        a = left.to(self.place, dtype)
        b = right.to(self.place, dtype)

        def multiply() -> Tensor:
            with _float32_products("tf32" if precision == "tf32" else "ieee"):
                return torch.mm(a, b)

        return multiply

    def _fp8(self, values: Tensor, cells: torch.dtype) -> Operand:
        """An operand with the scale 1: FP8 bytes where the card has FP8 units, else FP8 values in bfloat16."""
        rows = values.to(self.place, torch.float32).contiguous().to(cells)
        if not has_fp8_units(self.place):
            return Carrier(rows.to(torch.bfloat16), 1.0)
        inverse = torch.ones(1, dtype=torch.float32, device=self.place)
        return Fp8Pair(rows, None, inverse)

    def free_memory(self) -> int:
        """Bytes that can be allocated now."""
        return memory_on(self.place)

    def write(self, block: Tensor, values: Tensor) -> None:
        """Write `values` into `block`, both int64 of one shape on the device."""
        block.copy_(values)

    def read(self, block: Tensor) -> Tensor:
        """The cells of `block`, as they are now."""
        return block

    def readings(self) -> Readings:
        """Clocks, temperature and memory errors now."""
        if self.is_card:
            return card_readings(self.place.index or 0)
        return processor_readings()


def memory_on(place: torch.device) -> int:
    """Bytes that can be allocated now on a card, or for the CPU on this machine."""
    if place.type != "cuda":
        return free_memory()
    # To the driver, the memory that torch keeps of tensors which are gone is in use.
    free_unused()
    return torch.cuda.mem_get_info(place)[0]


def free_unused() -> None:
    """Free what nothing refers to from outside: models hold themselves in circles, and torch keeps a card's memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    """Products of float32 in `precision`, "ieee" or "tf32", whatever a script of the user's has set.

    torch.get_float32_matmul_precision is not asked: it raises where somebody has set one backend's precision.
    """
    backends: Any = torch.backends  # its stubs lack `mkldnn.matmul`
    places = [backends.cuda.matmul, backends.mkldnn.matmul]
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = precision
        yield
    finally:
        for place, own in zip(places, before, strict=True):
            place.fp32_precision = own


def devices_here(facts: MachineFacts) -> list[TorchDevice]:
    """Every GPU that torch sees; the processor where there is none."""
    if not facts.cuda_available:
        return [TorchDevice(torch.device("cpu"), "processor")]
    found: list[TorchDevice] = []
    for index, card in enumerate(facts.devices):
        found.append(TorchDevice(torch.device("cuda", index), f"gpu {index} ({card.name})"))
    return found
