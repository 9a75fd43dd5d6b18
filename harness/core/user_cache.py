"""The user's cache folder: what is built or measured once per machine and used by later runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """~/.cache/hopper-harness (or under XDG_CACHE_HOME), made if need be.

    A new temporary folder where that one cannot be written, or belongs to somebody else, whose files must not be
    trusted.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hopper-harness"
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(base, os.W_OK) and base.stat().st_uid == os.getuid():
            return base
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="hopper-harness-"))
