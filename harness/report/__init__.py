"""Commands that read run folders, one file each; and here commands and paths in the form in which a user types them."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from harness.core.errors import shown

RunFolder = Annotated[Path, typer.Argument(help="run folder, runs/<run>")]


def tool(name: str) -> str:
    """How to call a program of this environment: by its path, if the environment is not activated in the shell."""
    in_environment = sys.prefix != sys.base_prefix
    activated = os.environ.get("VIRTUAL_ENV") == sys.prefix
    if in_environment and not activated:
        return short(Path(sys.prefix) / "bin" / name)
    return name


def label(text: str) -> str:
    """`text` as a label in a picture: control characters are shown, and `$` starts no formula."""
    return shown(text).replace("$", r"\$")


def short(path: Path) -> str:
    """The path relative to the working folder if it is below it, else absolute."""
    absolute = path.absolute()
    if absolute.is_relative_to(Path.cwd()):
        absolute = absolute.relative_to(Path.cwd())
    return str(absolute)


def typed(path: Path) -> str:
    """`short` as a word of a command: quoted where a shell would read it otherwise, as a name with a space."""
    return shlex.quote(short(path))
