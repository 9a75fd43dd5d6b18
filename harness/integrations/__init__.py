"""Thin adapters for other trainers, on harness.Precision, harness.Guard and harness.Telemetry alone."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from harness.core.errors import ConfigError, Problem


def extra(module: str, name: str) -> Any:
    """A module of the library that the extra `name` installs. Raises ConfigError where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        fix = f"pip install 'hopper-harness[{name}]'"
        what = f"{module} cannot be imported: {error}"
        raise ConfigError(Problem(what, f"harness.integrations.{name}", fix=fix)) from error
