"""The exit code's way past a launcher that swallows it: a file that the wrapper in launch/ names and reads."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

EXIT_CODE_FILE = "HARNESS_EXIT_CODE_FILE"


def tell_wrapper(exit_code: int, *, overrule: bool = False) -> None:
    """Leave `exit_code` for the wrapper that started the launcher, if there is one.

    Every rank may tell and the first one counts; `overrule`: the run's outcome, which counts more than what a rank
    that fails because of it ends with.
    """
    name = os.environ.get(EXIT_CODE_FILE)
    if not name:
        return
    with suppress(OSError):  # the wrapper then has the launcher's code
        path = Path(name)
        if overrule or path.stat().st_size == 0:
            path.write_text(f"{int(exit_code)}\n")
