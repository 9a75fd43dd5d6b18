"""The embedded corpus: the source of Python's own standard library, real text that is on every machine."""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path

from harness.core.errors import DataError, Problem
from harness.data.text import Text, read_files


def standard_library() -> Text:
    """The top-level modules of the running Python's standard library, sorted by name.

    No packages, so no tests and no site-packages; no links (distributions link local configuration into the folder)
    and none of the build's own generated variables. Raises DataError if this Python ships without its source.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in folder.glob("*.py")
        if path.is_file() and not path.is_symlink() and not path.name.startswith("_sysconfigdata")
    ]
    if not paths:
        raise DataError(
            Problem(
                "this Python has no standard library source to train on",
                str(folder),
                fix="give your own text: data.path=<file or folder>",
            )
        )
    return read_files(f"Python {platform.python_version()} standard library", folder, paths)
