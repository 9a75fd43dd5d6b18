"""What this machine reaches: FLOP/s of products in each precision, bytes a second, seconds of a launch. Measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from harness.core.timing import in_turns, launch_seconds
from harness.estimate.roofline import Rates
from harness.measure.card_device import TorchDevice
from harness.measure.speed_verdict import Machine

# Precision -> what it is called among known answers.
_PRODUCTS = {"fp8": "fp8_e4m3", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
_CARD_SIZE, _SIZE = 4096, 256
_CARD_COPY, _COPY = 2**30, 2**25
_TURN, _ROUNDS, _LAUNCHES = 0.05, 3, 500
# However slow the machine is, its rates are known after about this long.
_SECONDS = 10.0


def measure_machine(device: TorchDevice) -> Machine:
    """Measure `device`; takes a few seconds. A precision that it lacks has no rate."""
    size = _CARD_SIZE if device.is_card else _SIZE
    left, right = torch.randn(2, size, size)
    actions: dict[str, Callable[[], object]] = {}
    for name, known in _PRODUCTS.items():
        if not device.lacks(known):
            actions[name] = device.multiplication(known, left, right)
    source = torch.ones((_CARD_COPY if device.is_card else _COPY) // 4, device=device.place)
    target = torch.empty_like(source)
    actions["copy"] = lambda: target.copy_(source)

    deadline = time.monotonic() + _SECONDS
    times, _ = in_turns(actions, device.place, _TURN, _ROUNDS, deadline)
    copied = statistics.median(times.pop("copy"))
    products: dict[str, float] = {}
    for name, seconds in times.items():
        products[name] = 2.0 * size**3 / statistics.median(seconds)
    launch = statistics.median(launch_seconds(device.place, _LAUNCHES, _ROUNDS))
    return Machine(products, 2.0 * source.nbytes / copied, launch)


def roofline_rates(machine: Machine, is_card: bool) -> Rates:
    """The same as rates of a roofline.

    A processor computes an operation as soon as it is called: its shortest kernel takes as long as a launch.
    """
    half = machine.products.get("bf16") or machine.products.get("fp16") or 0.0
    full = machine.products.get("fp32", half)
    rates = Rates(
        gemm_half=half or full,
        gemm_fp8=machine.products.get("fp8", half or full),
        gemm_tf32=full,
        gemm_fp32=full,
        attention=half or full,
        bandwidth=machine.bandwidth,
        launch_seconds=machine.launch_seconds,
        context_bytes=0,
    )
    if is_card:
        return rates
    return replace(rates, shortest_seconds=machine.launch_seconds)
