"""Rates that somebody measured on a card, in place of the roofline's own constants. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.core.errors import ConfigError, Problem, near_match
from harness.core.files import read_json
from harness.estimate.roofline import Card, Rates, usual_rates

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
            problems.append(Problem(f"{value!r} is not a positive number", f"{path}: {_SECTION}.{name}"))
        else:
            rates[name] = value
    if not isinstance(section.get("card"), str):
        problems.append(Problem("must name the card, as torch does", f"{path}: {_SECTION}.card"))
    if problems:
        raise ConfigError(problems)
    measured_on = section["card"]
    if measured_on != card.name:
        return replace(uncalibrated(card), notes=(f"{path} is of a {measured_on}, not of a {card.name}: not used",))
    _check_plausible(rates, path, card)
    own = [name for name in _FIELDS if name not in rates and (name != "gemm_fp8" or card.fp8)]
    notes = (f"{path} has no {', '.join(own)}: the roofline's own constants stand for them",) if own else ()
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
        Problem(f"{value:g} is not a figure of a {card.name}", f"{path}: {_SECTION}.{name}", f"at most {most[name]:g}")
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
