"""Clocks, throttling, temperature, power and memory errors of a device, and what of them will trouble a run.

Of an NVIDIA card `nvidia-smi` reports them. Of a processor Linux counts the memory errors that ECC found (EDAC), where
the memory has ECC and the kernel a driver for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.capability.smi import nvidia_smi
from harness.core.errors import Problem
from harness.core.findings import Finding, refused, warning

_EDAC = Path("/sys/devices/system/edac/mc")
# A card knows some of these fields and not others, and one unknown field fails the whole question: groups are asked one
# by one, and of two names for the same field the newer one first.
_CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "temperature.gpu", "power.draw")
_REASONS = (("clocks_event_reasons.active",), ("clocks_throttle_reasons.active",))
_ECC = ("ecc.errors.corrected.volatile.total", "ecc.errors.uncorrected.volatile.total")
# nvml.h, nvmlClocksEventReason*: bits that say that the card runs slower than it could, for want of something.
_SLOWED = {
    0x08: "hardware slowdown",
    0x20: "too hot (driver)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
_AT_POWER_LIMIT = 0x04
# A card at full load runs at two thirds of its highest clock and more; at its power limit it may be less.
_LEAST_CLOCK = 0.5
_MOST_CLOCK = 1.05


@dataclass(frozen=True, slots=True)
class Readings:
    """What a device reported at one moment; None: it does not report that.

    sm_mhz, most_sm_mhz, memory_mhz: clocks of the card's processors, now and at most, and of its memory.
    celsius, watts: temperature and power.
    reasons: bits of nvml.h that say why the clock is not higher.
    corrected, uncorrected: memory errors since the driver was loaded (of a processor: since the machine started).
    """

    sm_mhz: float | None = None
    most_sm_mhz: float | None = None
    memory_mhz: float | None = None
    celsius: float | None = None
    watts: float | None = None
    reasons: int | None = None
    corrected: int | None = None
    uncorrected: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def card_readings(index: int) -> Readings:
    """What the card with torch's number `index` reports now."""
    clocks = nvidia_smi(_CLOCKS, index)
    errors = nvidia_smi(_ECC, index)
    reasons: int | None = None
    for fields in _REASONS:
        text = nvidia_smi(fields, index).get(fields[0])
        if reasons is None and text is not None:
            reasons = _bits(text)
    return Readings(
        sm_mhz=_number(clocks.get("clocks.sm")),
        most_sm_mhz=_number(clocks.get("clocks.max.sm")),
        memory_mhz=_number(clocks.get("clocks.mem")),
        celsius=_number(clocks.get("temperature.gpu")),
        watts=_number(clocks.get("power.draw")),
        reasons=reasons,
        corrected=_count(errors.get(_ECC[0])),
        uncorrected=_count(errors.get(_ECC[1])),
    )


def processor_readings(folder: Path = _EDAC) -> Readings:
    """Memory errors that Linux has counted; None where it counts none. folder: EDAC's memory controllers."""
    return Readings(corrected=_edac(folder, "ce_count"), uncorrected=_edac(folder, "ue_count"))


def _edac(folder: Path, name: str) -> int | None:
    total: int | None = None
    for path in folder.glob(f"mc*/{name}"):
        try:
            total = (total or 0) + int(path.read_text())
        except (OSError, ValueError):
            continue
    return total


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _count(text: str | None) -> int | None:
    number = _number(text)
    return None if number is None else int(number)


def _bits(text: str) -> int | None:
    try:
        return int(text, 0)
    except ValueError:
        return None


def reading_findings(
    where: str, before: Readings, loaded: Sequence[Readings], after: Readings
) -> list[Finding]:
    """Errors for memory errors that ECC could not correct; warnings for corrected ones, throttling and odd clocks.

    before, after: without load. loaded: while the device multiplied matrices.
    """
    found = _memory_errors(where, before, after)
    found += _throttling(where, loaded)
    found += _odd_clocks(where, loaded)
    return found


def _memory_errors(where: str, before: Readings, after: Readings) -> list[Finding]:
    found: list[Finding] = []
    if after.uncorrected:
        rise = after.uncorrected - (before.uncorrected or 0)
        what = f"{after.uncorrected} memory errors that ECC could not correct, {rise} of them now"
        why = "values in memory were lost; a run may have used them"
        fix = "reset the card or take another one; on a rented machine, report it"
        found += refused("machine.ecc", [Problem(what, where, why, fix)])
    if after.corrected:
        rise = after.corrected - (before.corrected or 0)
        what = f"{after.corrected} memory errors that ECC corrected, {rise} of them now"
        why = "no value was lost; many of them announce one that cannot be corrected"
        found.append(warning("machine.ecc", where, what, why, "watch the count"))
    return found


def _throttling(where: str, loaded: Sequence[Readings]) -> list[Finding]:
    names: list[str] = []
    for bit, name in _SLOWED.items():
        if any(each.reasons is not None and each.reasons & bit for each in loaded):
            names.append(name)
    if not names:
        return []
    hottest = max((each.celsius for each in loaded if each.celsius is not None), default=None)
    what = f"the card lowers its clock under load: {', '.join(names)}"
    if hottest is not None:
        what += f", at {hottest:.0f} degrees Celsius"
    why = "every step takes longer than it must"
    fix = "look at cooling and power supply; on a rented machine, take another one"
    return [warning("machine.throttled", where, what, why, fix)]


def _odd_clocks(where: str, loaded: Sequence[Readings]) -> list[Finding]:
    """A clock that is far too low though nothing slows the card down, or one that no such card can have."""
    clocks = [each for each in loaded if each.sm_mhz is not None and each.most_sm_mhz]
    if not clocks:
        return []
    # The first readings under load may still be of a card that was idle.
    best = max(clocks, key=lambda each: each.sm_mhz or 0.0)
    assert best.sm_mhz is not None
    assert best.most_sm_mhz is not None
    share = best.sm_mhz / best.most_sm_mhz
    limited = any((each.reasons or 0) & (_AT_POWER_LIMIT | sum(_SLOWED)) for each in clocks)
    what = f"{best.sm_mhz:.0f} MHz under load, of {best.most_sm_mhz:.0f} MHz"
    if share > _MOST_CLOCK:
        why = "that is more than the card's own limit: the driver's figures cannot be right"
        fix = "update the driver, and reset overclocking"
    elif share < _LEAST_CLOCK and not limited:
        why = "nothing that the card reports slows it down"
        fix = "look for a locked clock: nvidia-smi -q -d CLOCK; nvidia-smi -rgc resets it"
    else:
        return []
    return [warning("machine.slow_clock", where, what, why, fix)]
