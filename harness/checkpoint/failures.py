"""What an operating system error means to the user of a run folder."""

from __future__ import annotations

from pathlib import Path

from harness.core.errors import CheckpointError, Problem


def failed(what: str, path: Path, error: Exception) -> CheckpointError:
    """The error for something under `path` that could not be written or read."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return CheckpointError(Problem(what, str(path), why, fix="check free space and permissions of the folder"))
