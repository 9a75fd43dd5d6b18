"""FP8 training harness: one recipe that degrades by capability, scales you can watch, runs that survive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.precision.api import Precision

__all__ = ["Precision"]


def __getattr__(name: str) -> Any:
    # Lazy: the command line and every check of its input start without torch.
    if name == "Precision":
        from harness.precision.api import Precision

        return Precision
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
