"""Commands that read run folders, one file each. Here: commands and paths as the user would type them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from harness.core.errors import shown

RunFolder = Annotated[Path, typer.Argument(help="a run folder, runs/<run>")]


def tool(name: str) -> str:
    """How to call a program of this environment: with its path, if the environment is not activated in the shell."""
    in_environment = sys.prefix != sys.base_prefix and os.environ.get("VIRTUAL_ENV") != sys.prefix
    return short(Path(sys.prefix) / "bin" / name) if in_environment else name


def label(text: str) -> str:
    """`text` as a label in a picture: control characters are shown, and `$` starts no formula."""
    return shown(text).replace("$", r"\$")


def short(path: Path) -> str:
    """The path relative to the working folder if it lies below it, else absolute."""
    absolute = path.absolute()
    return (
        str(absolute.relative_to(Path.cwd()))
        if absolute.is_relative_to(Path.cwd())
        else str(absolute)
    )
