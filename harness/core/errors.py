"""Errors that say what is wrong, where, why, and how to fix it; the exit codes of a rank, and their way past a launcher
that swallows them: a file that the wrapper in launch/ names and reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from enum import IntEnum
from math import isfinite
from pathlib import Path

CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that have no place in text. Terminals obey some of them, C libraries end a name at others, and half of a
surrogate pair cannot be printed."""
_OBEYED = re.compile(f"{CONTROL.pattern}|[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class ExitCode(IntEnum):
    """Exit codes of one rank. Launchers may swallow them: wrappers read `outcome.json`."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    HALTED = 3
    MACHINE = 4
    STOPPED = 75


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `where` is a file and key, a module name or a path."""

    what: str
    where: str = ""
    why: str = ""
    fix: str = ""

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.why:
            lines.append(f"    why: {self.why}")
        if self.fix:
            lines.append(f"    fix: {self.fix}")
        return shown("\n".join(lines))


class HarnessError(Exception):
    """Base of every error meant for the user; carries all problems found, not only the first."""

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (
            (problems,) if isinstance(problems, Problem) else tuple(problems)
        )
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[HarnessError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class ConfigError(HarnessError, ValueError):
    """A recipe, config, override or combination of them that cannot be right."""

    exit_code = ExitCode.USAGE


class DataError(HarnessError, ValueError):
    """Training data that is missing, unreadable, binary, empty or too short."""

    exit_code = ExitCode.USAGE


class CheckpointError(HarnessError, RuntimeError):
    """A checkpoint that cannot be written, verified or loaded into this run."""

    exit_code = ExitCode.USAGE


class MachineError(HarnessError, RuntimeError):
    """This machine cannot run the plan (no usable GPU, no compiler, too little disk)."""

    exit_code = ExitCode.MACHINE


class LostRankError(HarnessError, RuntimeError):
    """Another rank was killed, froze or failed, so that this one cannot go on."""


class MisuseError(HarnessError, RuntimeError):
    """The Python interface was called in an order that would train wrongly."""

    exit_code = ExitCode.USAGE


class HaltedError(HarnessError, RuntimeError):
    """The guard ended a loop: it would only get worse."""

    exit_code = ExitCode.HALTED


def shown(text: str) -> str:
    """`text` as a terminal, or a page, shows it and obeys none of it: control characters, those that turn the order of
    others around, and separators of lines are spelled out; line feeds and tabs stay. Names of files, keys and figures
    are other people's.
    """
    return _OBEYED.sub(lambda found: repr(found[0])[1:-1], text)


def clipped(text: str, most: int) -> str:
    """The first `most` characters of `text`, and how many there were."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def some(items: Sequence[object], most: int) -> str:
    """The first `most` of `items`, and how many more there are: `a, b and 3 more`."""
    rest = len(items) - most
    return ", ".join(map(str, items[:most])) + (f" and {rest} more" if rest > 0 else "")


def clock(seconds: float) -> str:
    """`0:41`, `2:05:09`."""
    if not isfinite(seconds):
        return "-"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def near_match(name: str, known: Sequence[str]) -> str:
    """A hint such as `did you mean "margin"?`, else the list of what is known."""
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f'did you mean "{close[0]}"?'
    return "known: " + ", ".join(sorted(known)) if known else ""


EXIT_CODE_FILE = "HARNESS_EXIT_CODE_FILE"


def tell_wrapper(exit_code: int, *, overrule: bool = False, starting: bool = False) -> None:
    """Leave `exit_code` for the wrapper that started the launcher, if there is one.

    Every rank may tell and the first one counts; `overrule`: the run's outcome, which counts more than what a rank
    that fails because of it ends with. starting: a signal came before the run had begun, which only the wrapper can
    tell from a launcher that ends this rank because another one died: every rank leaves a line, with their number.
    """
    name = os.environ.get(EXIT_CODE_FILE)
    if not name:
        return
    with suppress(OSError):  # the wrapper then has the launcher's code
        path = Path(name)
        if starting:
            with path.open("a") as file:
                file.write(f"{int(exit_code)} starting {os.environ.get('WORLD_SIZE', '1')}\n")
        elif overrule or path.stat().st_size == 0:
            path.write_text(f"{int(exit_code)}\n")
