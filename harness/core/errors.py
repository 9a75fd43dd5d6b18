"""Errors that say what is wrong, where, why, and how to fix it; and the exit codes of a rank.

Launchers swallow exit codes: torchrun turns every failure into 1. So a rank also writes its code into a file. The
wrapper in launch/ names that file in an environment variable, and reads it when the launcher has ended.
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
"""Characters that have no place in text. Terminals obey some of them. C libraries end a name at NUL. Half of a
surrogate pair cannot be printed."""
# The same, and characters that turn the order of others around or separate lines.
_OBEYED = re.compile(f"{CONTROL.pattern}|[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class ExitCode(IntEnum):
    """Exit codes of one rank.

    DONE: as planned.
    FAILED: an error of the harness, of a library or of the machine.
    USAGE: a config, data set, checkpoint or command that cannot be right.
    HALTED: the guard ended the run.
    MACHINE: this machine cannot run the plan.
    STOPPED: asked to stop; the same command resumes, or begins if nothing had been trained.

    Launchers may swallow them. The wrappers in launch/ (outcome.sh) read them from the file that HARNESS_EXIT_CODE_FILE
    names, see `tell_wrapper`. Programs that look at a run later find its code in `outcome.json`.
    """

    DONE = 0
    FAILED = 1
    USAGE = 2
    HALTED = 3
    MACHINE = 4
    STOPPED = 75


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    what: in a few words.
    where: a file and key, a module name or a path.
    why: the reason, or what follows from it.
    fix: what to do instead.
    """

    what: str
    where: str = ""
    why: str = ""
    fix: str = ""

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines = [f"{self.where}: {self.what}"]
        if self.why:
            lines.append(f"    why: {self.why}")
        if self.fix:
            lines.append(f"    fix: {self.fix}")
        return shown("\n".join(lines))


class HarnessError(Exception):
    """Base of every error meant for the user. It carries all problems found, not only the first."""

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        if isinstance(problems, Problem):
            problems = (problems,)
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[HarnessError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class ConfigError(HarnessError, ValueError):
    """A recipe, config, override or combination of them that cannot be right."""

    exit_code = ExitCode.USAGE


class DataError(HarnessError, ValueError):
    """Training data that is missing, unreadable, binary, empty or too short."""

    exit_code = ExitCode.USAGE


class TooShortError(DataError):
    """Data with too few tokens, in `train` or in `val`; one sample takes `sample` of them."""

    def __init__(self, problem: Problem, train: int, val: int, sample: int) -> None:
        super().__init__(problem)
        self.train, self.val, self.sample = train, val, sample


class CheckpointError(HarnessError, RuntimeError):
    """A checkpoint that cannot be written, verified or loaded into this run."""

    exit_code = ExitCode.USAGE


class MachineError(HarnessError, RuntimeError):
    """This machine cannot run the plan (no usable GPU, no compiler, too little disk)."""

    exit_code = ExitCode.MACHINE


class LostRankError(HarnessError, RuntimeError):
    """Another rank was killed, froze or failed, so this one cannot go on."""


class MisuseError(HarnessError, RuntimeError):
    """The Python interface was called in an order that would train wrongly."""

    exit_code = ExitCode.USAGE


class HaltedError(HarnessError, RuntimeError):
    """The guard ended a loop that would only get worse."""

    exit_code = ExitCode.HALTED


def shown(text: str) -> str:
    """`text`, safe to show on a terminal or a page: what they would obey is spelled out.

    That is control characters, characters that turn the order of others around, and separators of lines. Line feeds
    and tabs stay. Names of files, keys and figures come from other people.
    """
    return _OBEYED.sub(lambda found: repr(found[0])[1:-1], text)


def clipped(text: str, most: int) -> str:
    """The first `most` characters of a longer `text`, and how many it has."""
    if len(text) <= most:
        return text
    return f"{text[:most]}... ({len(text):,} characters)"


def some(items: Sequence[object], most: int) -> str:
    """The first `most` of `items`, and how many more there are: `a, b and 3 more`."""
    rest = len(items) - most
    text = ", ".join(map(str, items[:most]))
    return f"{text} and {rest} more" if rest > 0 else text


def number_of(count: int, noun: str) -> str:
    """A count with its noun: `1 step`, `100,000 steps`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def in_a_row(count: int, noun: str) -> str:
    """How often something came without a pause: `1 update`, `3 updates in a row`."""
    return number_of(count, noun) + (" in a row" if count > 1 else "")


def clock(seconds: float) -> str:
    """A duration as `0:41` or `2:05:09`; `-` if it is not finite."""
    if not isfinite(seconds):
        return "-"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}"


def near_match(name: str, known: Sequence[str]) -> str:
    """A hint such as `did you mean "margin"?`, else the list of what is known."""
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f'did you mean "{close[0]}"?'
    if not known:
        return ""
    return "known: " + ", ".join(sorted(known))


EXIT_CODE_FILE = "HARNESS_EXIT_CODE_FILE"


def tell_wrapper(
    exit_code: int,
    *,
    overrule: bool = False,
    starting: bool = False,
) -> None:
    """Write `exit_code` for the wrapper that started the launcher, if there is one.

    Every rank may write, and the first one counts.

    overrule: this is the run's outcome; it overrides the exit codes of ranks that failed because of it.
    starting: a signal came before the run had begun. It may mean a request to stop, or that the launcher ends this rank
        because another one died. Only the wrapper can know, from how many ranks got one: each adds a line, with the
        number of all ranks.
    """
    name = os.environ.get(EXIT_CODE_FILE)
    if not name:
        return
    # If this fails, the wrapper falls back on the launcher's own code.
    with suppress(OSError):
        path = Path(name)
        if starting:
            with path.open("a") as file:
                file.write(f"{int(exit_code)} starting {os.environ.get('WORLD_SIZE', '1')}\n")
        elif overrule or path.stat().st_size == 0:
            path.write_text(f"{int(exit_code)}\n")


# How memory that is lacking is worded in a RuntimeError: by torch's allocator for the CPU, by CUDA (pinned memory, a
# context), and by cuBLAS and cuDNN, which allocate a workspace at their first call.
_NO_MEMORY = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was lacking, of the host or of a card. Only torch's allocator has an error of its own for it."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def one_line(error: BaseException) -> str:
    """The error's kind and text in one line of at most 400 characters, safe to print."""
    kind, text = type(error).__name__, " ".join(str(error).split())
    line = f"{kind}: {text}"
    if kind == "OutOfMemoryError":
        line = f"out of memory: {text}"
    return shown(line[:400])
