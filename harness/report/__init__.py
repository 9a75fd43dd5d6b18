"""A file for each command. Here: commands and paths as a person types them into the shell at hand."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from harness.core.errors import shown

RunFolder = Annotated[Path, typer.Argument(help="a run folder, runs/<run>")]


def tool(name: str) -> str:
    """How to call a program of this environment from a shell that may not have it activated."""
    in_environment = sys.prefix != sys.base_prefix and os.environ.get("VIRTUAL_ENV") != sys.prefix
    return short(Path(sys.prefix) / "bin" / name) if in_environment else name


def label(text: str) -> str:
    """`text` in a picture: not obeyed, and no formula."""
    return shown(text).replace("$", r"\$")


def short(path: Path) -> str:
    """Relative to the working folder where it lies below it."""
    absolute = path.absolute()
    return (
        str(absolute.relative_to(Path.cwd()))
        if absolute.is_relative_to(Path.cwd())
        else str(absolute)
    )
