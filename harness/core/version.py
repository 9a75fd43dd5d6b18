"""Which harness this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def harness_version() -> str:
    """The installed package's version; "source tree" where it is not installed."""
    try:
        return version("hopper-harness")
    except PackageNotFoundError:
        return "source tree"
