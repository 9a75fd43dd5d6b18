"""The roofline model: how long an operation takes on a card. Torch-free.

An operation moves bytes and does arithmetic, and a card does both at the same time. So the operation takes as long as
the slower of the two:

    seconds = max(bytes / bandwidth, FLOPs / rate of the unit that computes it)

No kernel is shorter than a minimum. The times of a step's operations add up. If the host cannot queue the kernels as
fast as the card runs them, the step takes the host's time instead. In eager steps that is what Python and autograd
need for each kernel, in those with compiled blocks a bare launch.

Eager steps take longer than that: the card idles between kernels, and most kernels fall short of the rates. A
calibration can have one constant for both, `gap_seconds` for each kernel launch (`benchmarks/estimated.py` fits it).

No kernel reaches the peaks of a datasheet, so each rate is a peak times a usual share. The shares stand for sustained
training on a card that nothing else uses. Measurements from a real card replace them (`harness estimate
--calibration`). They are never tuned to please a result: everything here is a prediction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from harness.capability.cards import CARDS, GIB, Card
from harness.core.errors import ConfigError, Problem, near_match
from harness.core.files import read_json

Unit = Literal["fp8", "half", "tf32", "fp32", "none"]


_ALIASES = {"A100": "A100-80GB", "V100": "V100-16GB", "4090": "RTX4090"}

# Share of the dense peak that large GEMMs reach. torchao's own roofline of float8 training on an H100 takes 0.78
# (torchao/testing/training/roofline_utils.py); a step of many sizes, on a card that lowers its clock, a little less.
_GEMM_SHARE = 0.75
# FlashAttention-2, forward and backward, causal, head_dim 128, reaches half of the 16-bit peak of an A100 and more (Dao
# 2023, arXiv 2307.08691). It reaches less of an H100, for which it was not written.
_ATTENTION_SHARE = 0.5
# Share of the datasheet's bandwidth that a streaming kernel reaches: torchao's roofline takes 0.84 to 0.92.
_BANDWIDTH_SHARE = 0.85
# The next three are usual figures; no datasheet has them.
# The shortest kernel, from its start to the start of the next one in the same stream.
_SHORTEST_SECONDS = 2e-6
# What the host spends on a kernel of a step with compiled blocks: allocator, launch.
_LAUNCH_SECONDS = 4e-6
# The same in eager PyTorch, with Python, autograd and the dispatcher. Measured: native FP8 steps that the host held up
# took 43 to 53 us for each kernel (one H100, docs/guide/estimate.md#how-far-to-trust-it).
_EAGER_SECONDS = 50e-6
# A process's CUDA context with its loaded kernels, and cuBLAS's workspaces.
_CONTEXT_BYTES = int(0.65 * GIB)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a card sustains.

    gemm_half, gemm_fp8, gemm_tf32, gemm_fp32: FLOP/s of GEMMs by unit.
    attention: FLOP/s of attention in 16 bits.
    bandwidth: bytes a second.
    shortest_seconds: the shortest kernel.
    launch_seconds: the host's time for a kernel of a step with compiled blocks.
    eager_seconds: the same in an eager step.
    gap_seconds: what a kernel of a step adds to its own roofline; 0 where it was not fitted.
    context_bytes: memory of the CUDA context.
    """

    gemm_half: float
    gemm_fp8: float
    gemm_tf32: float
    gemm_fp32: float
    attention: float
    bandwidth: float
    shortest_seconds: float = _SHORTEST_SECONDS
    launch_seconds: float = _LAUNCH_SECONDS
    eager_seconds: float = _EAGER_SECONDS
    gap_seconds: float = 0.0
    context_bytes: int = _CONTEXT_BYTES

    def gemm(self, unit: Unit) -> float:
        """FLOP/s of GEMMs on `unit`; 0 where the card has none."""
        rates: dict[Unit, float] = {
            "fp8": self.gemm_fp8,
            "half": self.gemm_half,
            "tf32": self.gemm_tf32,
            "fp32": self.gemm_fp32,
            "none": 0.0,
        }
        return rates[unit]


class Piece(NamedTuple):
    """A tensor's part of a storage.

    storage: its number; no two storages of a trace have the same.
    offset: of the tensor's first element.
    elements: distinct ones.
    itemsize: bytes of one.
    """

    storage: int
    offset: int
    elements: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class Op:
    """One operation on the device, as the recorder saw it.

    name: the ATen operation.
    phase: forward, backward, update, or step (everything around them).
    purpose: what it is for, as reports group it.
    reads, writes: bytes; each distinct element counts once.
    flops: FLOPs of GEMMs, convolutions and attention; 0 for all else.
    unit: the arithmetic unit that computes them.
    attention: whether it is an attention kernel.
    kernels: kernel launches.
    shapes: shapes of the inputs, then of the outputs.
    where: `file:line function` of the calling code, innermost frame first.
    step: name of the step in the trace.
    micro: number of the micro-batch, from 1; 0 outside of them.
    block: which of the model's repeated blocks it belongs to, from 0; None outside of them.
    inputs, outputs: the memory that it reads and writes.
    own: whether it is one of this project's operators, which a compiler calls as they are.
    compiled: whether its step has compiled blocks.
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
    micro: int = 0
    block: int | None = None
    inputs: tuple[Piece, ...] = ()
    outputs: tuple[Piece, ...] = ()
    own: bool = False
    compiled: bool = False


def usual_rates(card: Card) -> Rates:
    """The uncalibrated roofline: the datasheet's peaks times a usual share."""
    return Rates(
        gemm_half=card.half * _GEMM_SHARE,
        gemm_fp8=card.fp8 * _GEMM_SHARE,
        gemm_tf32=card.tf32 * _GEMM_SHARE,
        gemm_fp32=card.fp32 * _GEMM_SHARE,
        attention=card.half * _ATTENTION_SHARE,
        bandwidth=card.bandwidth * _BANDWIDTH_SHARE,
    )


def seconds_of(op: Op, rates: Rates) -> float:
    """Predicted seconds on the device: memory traffic or arithmetic, whichever takes longer; at least the minimum."""
    seconds = (op.reads + op.writes) / rates.bandwidth
    if op.flops:
        rate = rates.gemm(op.unit)
        if op.attention and op.unit == "half":
            rate = rates.attention
        seconds = max(seconds, op.flops / rate)
    return max(seconds, rates.shortest_seconds * op.kernels)


def device_seconds(ops: Iterable[Op], rates: Rates) -> float:
    """Predicted seconds on the device for `ops`, one after the other."""
    return sum(seconds_of(op, rates) for op in ops)


def step_seconds(ops: Sequence[Op], rates: Rates) -> float:
    """Predicted seconds of a step: the device's time with gaps, or the host's for all kernels if that is longer."""
    return max(_on_device(ops, rates), _on_host(ops, rates))


def gap_seconds(ops: Iterable[Op], rates: Rates) -> float:
    """Predicted seconds that the kernels of `ops` add to their rooflines."""
    return rates.gap_seconds * _launches(ops)


def is_host_bound(ops: Sequence[Op], rates: Rates) -> bool:
    """Whether the host queues the kernels of a step more slowly than the card runs them."""
    return _on_host(ops, rates) > _on_device(ops, rates)


def _on_device(ops: Sequence[Op], rates: Rates) -> float:
    return device_seconds(ops, rates) + gap_seconds(ops, rates)


def _on_host(ops: Sequence[Op], rates: Rates) -> float:
    seconds = 0.0
    for op in ops:
        seconds += op.kernels * (rates.launch_seconds if op.compiled else rates.eager_seconds)
    return seconds


def _launches(ops: Iterable[Op]) -> int:
    return sum(op.kernels for op in ops)


Bottleneck = Literal[
    "fp8-gemms", "gemms", "attention", "optimizer", "memory-bandwidth", "host/launches"
]
OPTIMIZER = "optimizer"
"""The purpose of an update's operations, see `Op.purpose`."""


def bottleneck(ops: Sequence[Op], rates: Rates) -> Bottleneck:
    """What most of a step's time goes to.

    fp8-gemms, gemms, attention: arithmetic in these; convolutions count as GEMMs.
    optimizer: the update's traffic.
    memory-bandwidth: all other traffic, that of GEMMs too where it takes longer than their arithmetic.
    host/launches: kernels so short that their minimum counts, gaps, or a host that queues kernels more slowly than the
        card runs them.
    """
    if is_host_bound(ops, rates):
        return "host/launches"
    seconds = seconds_by_cause(ops, rates)
    seconds["host/launches"] = seconds.get("host/launches", 0.0) + gap_seconds(ops, rates)
    return max(seconds, key=lambda cause: seconds[cause])


def seconds_by_cause(ops: Iterable[Op], rates: Rates) -> dict[Bottleneck, float]:
    """Predicted seconds on the device of `ops`, by what decides how long each of them takes."""
    seconds: dict[Bottleneck, float] = {}
    for op in ops:
        cause = _cause(op, rates)
        seconds[cause] = seconds.get(cause, 0.0) + seconds_of(op, rates)
    return seconds


def _cause(op: Op, rates: Rates) -> Bottleneck:
    """What decides how long one operation takes."""
    took = seconds_of(op, rates)
    if took <= rates.shortest_seconds * op.kernels:
        return "host/launches"
    if took <= (op.reads + op.writes) / rates.bandwidth:
        return "optimizer" if op.purpose == OPTIMIZER else "memory-bandwidth"
    if op.attention:
        return "attention"
    return "fp8-gemms" if op.unit == "fp8" else "gemms"


def find_card(name: str, where: str = "") -> Card:
    """The card with that short name; upper and lower case are the same. Raises ConfigError that lists the cards.

    where: the option and its value, for the message; empty: --card.
    """
    key = name.strip().upper().replace("RTX ", "RTX").replace(" ", "-")
    key = _ALIASES.get(key, key)
    if key in CARDS:
        return CARDS[key]

    aliases = ", ".join(f"{alias} for {card}" for alias, card in _ALIASES.items())
    fix = f"known cards: {', '.join(CARDS)}; also {aliases}"
    hint = near_match(key, [*CARDS, *_ALIASES])
    if hint.startswith("did"):
        fix = f"{hint} {fix}"
    raise ConfigError(Problem("no datasheet of such a card", where or f"--card {name}", fix=fix))


_SECTION = "roofline"
# Predictions rest mostly on these, so a calibration has to have them; on a card with FP8 units, gemm_fp8 too.
_NEEDED = ("gemm_bf16", "bandwidth")
# Keys of the file, and the fields of `Rates`.
_FIELDS = {
    "gemm_bf16": "gemm_half",
    "gemm_fp8": "gemm_fp8",
    "attention": "attention",
    "bandwidth": "bandwidth",
    "launch_seconds": "launch_seconds",
    "gap_seconds": "gap_seconds",
    "context_bytes": "context_bytes",
}
# How far a measurement may be above the datasheet, and below it.
_FASTER, _SLOWER = 2.0, 1e-9
_KEYS = ("card", "capability", *_FIELDS)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates of a card.

    calibrated: whether the rates that matter most were measured on such a card.
    notes: what the reader has to know of the rates.
    """

    rates: Rates
    calibrated: bool = False
    notes: tuple[str, ...] = ()


def uncalibrated(card: Card) -> Calibration:
    """The roofline's own constants."""
    return Calibration(usual_rates(card))


def read_calibration(path: Path, card: Card) -> Calibration:
    """The rates in the section `roofline` of the JSON that `make proof` wrote.

    A rate that is missing (or null) keeps the constant, and a note says so. Rates of another card are not used.
    Raises ConfigError with every problem of the file.
    """
    section = _section(path)

    # Check every key before anything is refused.
    problems: list[Problem] = []
    for name in sorted(section.keys() - set(_KEYS)):
        where = f"{path}: {_SECTION}.{name}"
        problems.append(Problem("no such key", where, fix=near_match(name, _KEYS)))
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
        note = f"{path} is of a {measured_on}, not of a {card.name}: not used"
        return replace(uncalibrated(card), notes=(note,))
    _check_plausible(rates, path, card)

    # A card without FP8 units has no rate for them. The gap is fitted after the proof, and has a note of its own.
    expected = [name for name in _FIELDS if name != "gemm_fp8" or card.fp8]
    missing = [name for name in expected if name not in rates and name != "gap_seconds"]
    notes: list[str] = []
    if missing:
        notes.append(
            f"{path} has no {', '.join(missing)}: the roofline's own constants stand for them"
        )
    if "gap_seconds" not in rates:
        notes.append(
            f"{path} has no gap_seconds, so eager steps are predicted too short: "
            f"python -m benchmarks.estimated --fit {path} prints rates that have it"
        )

    measured = {_FIELDS[name]: value for name, value in rates.items()}
    if "context_bytes" in measured:
        measured["context_bytes"] = int(measured["context_bytes"])
    made = replace(usual_rates(card), **measured)  # type: ignore[arg-type]
    needed = (*_NEEDED, "gemm_fp8") if card.fp8 else _NEEDED
    calibrated = all(name in rates for name in needed)
    return Calibration(made, calibrated, tuple(notes))


def _check_plausible(rates: Mapping[str, float], path: Path, card: Card) -> None:
    """Raise ConfigError naming rates that no such card can have. Most likely they are in another unit."""
    most = {
        "gemm_bf16": _FASTER * card.half,
        "gemm_fp8": _FASTER * card.fp8,
        "attention": _FASTER * card.half,
        "bandwidth": _FASTER * card.bandwidth,
        "launch_seconds": 1.0,
        "gap_seconds": 1e-3,
        "context_bytes": card.memory,
    }
    problems: list[Problem] = []
    for name, value in rates.items():
        if not most[name] * _SLOWER <= value <= most[name]:
            what = f"{value:g} is not a figure of a {card.name}"
            problems.append(Problem(what, f"{path}: {_SECTION}.{name}", f"at most {most[name]:g}"))
    if problems:
        raise ConfigError(problems)


def _section(path: Path) -> Mapping[str, Any]:
    """The file's section `roofline`. Raises ConfigError."""
    where = f"--calibration {path}"
    fix = "give the JSON file that `make proof` wrote on a card"
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(Problem("cannot be read", where, str(error), fix)) from error
    section = content.get(_SECTION) if isinstance(content, dict) else None
    if not isinstance(section, dict):
        raise ConfigError(Problem(f'has no section "{_SECTION}"', where, fix=fix))
    return section
