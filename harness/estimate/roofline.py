"""The roofline: how long an operation takes at a usual share of a card's peaks. Torch-free.

Everything that this gives is a prediction. The constants stand for sustained training on a card that nothing else
uses; they change only with measurements from a card (`harness estimate --calibration`), never to please a result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from harness.capability.cards import CARDS, GIB, Card
from harness.core.errors import ConfigError, Problem, near_match
from harness.core.files import read_json

Unit = Literal["fp8", "half", "tf32", "fp32", "none"]


_ALIASES = {"A100": "A100-80GB", "V100": "V100-16GB", "4090": "RTX4090"}

# Share of the dense peak that large GEMMs reach. torchao's own roofline of float8 training on an H100 takes 0.78
# (torchao/testing/training/roofline_utils.py); a step of many sizes, on a card that lowers its clock, a little less.
_GEMM_SHARE = 0.75
# FlashAttention-2, forward and backward, causal, head_dim 128: half of the 16-bit peak of an A100 and more (Dao 2023,
# arXiv 2307.08691); less of an H100, for which it was not written.
_ATTENTION_SHARE = 0.5
# Share of the datasheet's bandwidth that a streaming kernel reaches: torchao's roofline takes 0.84 to 0.92.
_BANDWIDTH_SHARE = 0.85
# The shortest kernel, from its start to the start of the next one in the same stream. Usual figures, of no datasheet.
_SHORTEST_SECONDS = 2e-6
# What eager PyTorch's host side spends on an operation: dispatcher, allocator, launch. The same.
_LAUNCH_SECONDS = 4e-6
# A process's CUDA context with its loaded kernels, and cuBLAS's workspaces. The same.
_CONTEXT_BYTES = int(0.65 * GIB)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a card sustains. GEMMs and attention: FLOP/s; bandwidth: B/s; times: seconds a kernel; context: bytes."""

    gemm_half: float
    gemm_fp8: float
    gemm_tf32: float
    gemm_fp32: float
    attention: float
    bandwidth: float
    shortest_seconds: float = _SHORTEST_SECONDS
    launch_seconds: float = _LAUNCH_SECONDS
    context_bytes: int = _CONTEXT_BYTES

    def gemm(self, unit: Unit) -> float:
        """FLOP/s of GEMMs on `unit`; 0 where the card has none."""
        return {
            "fp8": self.gemm_fp8,
            "half": self.gemm_half,
            "tf32": self.gemm_tf32,
            "fp32": self.gemm_fp32,
            "none": 0.0,
        }[unit]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation on the device, as the recorder saw it.

    reads, writes: bytes, each distinct element once. flops: of GEMMs and attention, else 0. unit: what computes them.
    kernels: launches. phase: forward, backward, update or step (what is around them). purpose: for people. shapes: of
    the tensors in, then out. where: `file:line function`, innermost first. step: which step of the trace.
    """

    name: str
    phase: str
    purpose: str
    reads: int
    writes: int
    flops: float
    unit: Unit
    attention: bool
    kernels: int
    shapes: tuple[tuple[int, ...], ...] = ()
    where: tuple[str, ...] = ()
    step: str = ""


def usual_rates(card: Card) -> Rates:
    """The uncalibrated roofline: datasheet peaks times a usual share."""
    return Rates(
        gemm_half=card.half * _GEMM_SHARE,
        gemm_fp8=card.fp8 * _GEMM_SHARE,
        gemm_tf32=card.tf32 * _GEMM_SHARE,
        gemm_fp32=card.fp32 * _GEMM_SHARE,
        attention=card.half * _ATTENTION_SHARE,
        bandwidth=card.bandwidth * _BANDWIDTH_SHARE,
    )


def seconds_of(op: Op, rates: Rates) -> float:
    """Predicted seconds on the device: traffic or arithmetic, whichever takes longer, and no kernel under a minimum."""
    seconds = (op.reads + op.writes) / rates.bandwidth
    if op.flops:
        rate = rates.gemm(op.unit)
        if op.attention and op.unit == "half":
            rate = rates.attention
        seconds = max(seconds, op.flops / rate)
    return max(seconds, rates.shortest_seconds * op.kernels)


def device_seconds(ops: Iterable[Op], rates: Rates) -> float:
    """Predicted seconds of a stream that runs `ops` one after the other."""
    return sum(seconds_of(op, rates) for op in ops)


def step_seconds(ops: Sequence[Op], rates: Rates) -> float:
    """Predicted seconds of a step: the device's, or the host's if it cannot launch as fast as the device works."""
    return max(device_seconds(ops, rates), rates.launch_seconds * sum(op.kernels for op in ops))


def find_card(name: str) -> Card:
    """The card of that short name, in any case. Raises ConfigError that lists the cards."""
    key = name.upper().replace("RTX ", "RTX").replace(" ", "-")
    key = _ALIASES.get(key, key)
    if key in CARDS:
        return CARDS[key]
    hint = near_match(key, [*CARDS, *_ALIASES])
    fix = f"{hint + ' ' if hint.startswith('did') else ''}known cards: {', '.join(CARDS)}"
    raise ConfigError(Problem("no such card on paper", f"--card {name}", fix=fix))


_SECTION = "roofline"
# Without these a prediction is not called calibrated; a card without FP8 units cannot give their rate.
_NEEDED = ("gemm_bf16", "bandwidth")
_FIELDS = {
    "gemm_bf16": "gemm_half",
    "gemm_fp8": "gemm_fp8",
    "attention": "attention",
    "bandwidth": "bandwidth",
    "launch_seconds": "launch_seconds",
    "context_bytes": "context_bytes",
}
# How far a measurement may be over the datasheet, and under it.
_FASTER, _SLOWER = 2.0, 1e-9
_KNOWN = ("card", "capability", *_FIELDS)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates of a card. calibrated: what predictions rest on most was measured on this very card. notes: for people."""

    rates: Rates
    calibrated: bool = False
    notes: tuple[str, ...] = ()


def uncalibrated(card: Card) -> Calibration:
    """The roofline's own constants."""
    return Calibration(usual_rates(card))


def read_calibration(path: Path, card: Card) -> Calibration:
    """The rates in the `roofline` section of a proof's JSON; what it lacks (or says null) keeps the constant, and a
    note says so. Those of another card are not used.

    Raises ConfigError with every problem of the file.
    """
    section = _section(path)
    problems = [
        Problem("no such key", f"{path}: {_SECTION}.{name}", fix=near_match(name, _KNOWN))
        for name in sorted(section.keys() - set(_KNOWN))
    ]
    rates: dict[str, float] = {}
    for name in _FIELDS:
        value = section.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            problems.append(
                Problem(f"{value!r} is not a positive number", f"{path}: {_SECTION}.{name}")
            )
        else:
            rates[name] = value
    if not isinstance(section.get("card"), str):
        problems.append(Problem("must name the card, as torch does", f"{path}: {_SECTION}.card"))
    if problems:
        raise ConfigError(problems)
    measured_on = section["card"]
    if measured_on != card.name:
        return replace(
            uncalibrated(card),
            notes=(f"{path} is of a {measured_on}, not of a {card.name}: not used",),
        )
    _check_plausible(rates, path, card)
    own = [name for name in _FIELDS if name not in rates and (name != "gemm_fp8" or card.fp8)]
    notes = (
        (f"{path} has no {', '.join(own)}: the roofline's own constants stand for them",)
        if own
        else ()
    )
    known = {_FIELDS[name]: value for name, value in rates.items()}
    if "context_bytes" in known:
        known["context_bytes"] = int(known["context_bytes"])
    made = replace(usual_rates(card), **known)  # type: ignore[arg-type]
    needed = (*_NEEDED, "gemm_fp8") if card.fp8 else _NEEDED
    return Calibration(made, all(name in rates for name in needed), notes)


def _check_plausible(rates: Mapping[str, float], path: Path, card: Card) -> None:
    """Raises ConfigError naming what no such card does: another unit, most likely."""
    most = {
        "gemm_bf16": _FASTER * card.half,
        "gemm_fp8": _FASTER * card.fp8,
        "attention": _FASTER * card.half,
        "bandwidth": _FASTER * card.bandwidth,
        "launch_seconds": 1.0,
        "context_bytes": card.memory,
    }
    problems = [
        Problem(
            f"{value:g} is not a figure of a {card.name}",
            f"{path}: {_SECTION}.{name}",
            f"at most {most[name]:g}",
        )
        for name, value in rates.items()
        if not most[name] * _SLOWER <= value <= most[name]
    ]
    if problems:
        raise ConfigError(problems)


def _section(path: Path) -> Mapping[str, Any]:
    where, fix = f"--calibration {path}", "give the JSON file that `make proof` wrote on a card"
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(Problem("cannot be read", where, str(error), fix)) from error
    section = content.get(_SECTION) if isinstance(content, dict) else None
    if not isinstance(section, dict):
        raise ConfigError(Problem(f'has no section "{_SECTION}"', where, fix=fix))
    return section
