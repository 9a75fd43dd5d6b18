"""FP8 training harness: one recipe that degrades by capability, scales you can watch, runs that survive."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from harness.core.noise import leave_out_noise

if TYPE_CHECKING:
    from harness.guard import Guard
    from harness.precision.api import Precision
    from harness.telemetry import Telemetry

leave_out_noise()

__all__ = ["Guard", "Precision", "Telemetry"]

_HOMES = {
    "Guard": "harness.guard",
    "Precision": "harness.precision.api",
    "Telemetry": "harness.telemetry",
}


def __getattr__(name: str) -> Any:
    # Lazy: the command line and every check of its input start without torch.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
