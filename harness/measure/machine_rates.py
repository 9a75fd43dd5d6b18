"""Measures what this machine reaches: FLOP/s of products in each precision, bytes a second, seconds of a launch."""

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

# Precision -> its name in `known_answers.PRECISIONS`.
_PRODUCTS = {"fp8": "fp8_e4m3", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
# Rows and columns of the square matrices, and bytes that are copied: on a card, and on a CPU.
_CARD_SIZE, _SIZE = 4096, 256
_CARD_COPY, _COPY = 2**30, 2**25
# Seconds of a turn, rounds of turns, and launches in a round.
_TURN, _ROUNDS, _LAUNCHES = 0.05, 3, 500
# Seconds after which no further round begins, so that a slow machine is measured in bounded time.
_SECONDS = 10.0


def measure_machine(device: TorchDevice) -> Machine:
    """Measure `device`; takes a few seconds. A precision that it lacks has no rate."""
    # What is timed: a product in each precision, and a copy.
    size = _CARD_SIZE if device.is_card else _SIZE
    left, right = torch.randn(2, size, size, device="cpu")
    actions: dict[str, Callable[[], object]] = {}
    for name, known in _PRODUCTS.items():
        if not device.lacks(known):
            actions[name] = device.multiplication(known, left, right)
    # A float32 has four bytes.
    values = (_CARD_COPY if device.is_card else _COPY) // 4
    source = torch.ones(values, device=device.place)
    target = torch.empty_like(source)
    actions["copy"] = lambda: target.copy_(source)

    # Medians, so that one disturbed turn does not count.
    deadline = time.monotonic() + _SECONDS
    times, _ = in_turns(actions, device.place, _TURN, _ROUNDS, deadline)
    copied = statistics.median(times.pop("copy"))
    products: dict[str, float] = {}
    for name, seconds in times.items():
        products[name] = 2.0 * size**3 / statistics.median(seconds)

    # A copy reads every byte and writes it.
    bandwidth = 2.0 * source.nbytes / copied
    launch = statistics.median(launch_seconds(device.place, _LAUNCHES, _ROUNDS))
    return Machine(products, bandwidth, launch)


def roofline_rates(machine: Machine, is_card: bool) -> Rates:
    """The measured rates as the roofline takes them.

    A CPU queues nothing: the call is the computation. So no operation there is shorter than a launch, while a card's
    shortest kernel keeps the default of `Rates`.
    """
    # A machine without 16-bit products computes them in float32.
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
