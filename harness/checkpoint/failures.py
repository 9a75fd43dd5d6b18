"""Why a save failed: the disk, which may have room again, or anything else, which would fail again.

A run waits for a disk (`checkpoint.on_failure`). To wait for a defect, or for memory that the run itself takes, would
be for ever. So every other error ends the run, on every rank; the checkpoints that are there stay.
"""

from __future__ import annotations

import errno
import re
import traceback
from pathlib import Path

from safetensors import SafetensorError

from harness.core.errors import CheckpointError, ExitCode, Problem, is_out_of_memory

_OS_ERROR = re.compile(r"os error (\d+)")
# Limits of the process, which no disk lifts: memory, and open files.
_OF_THE_PROCESS = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class CannotSaveError(CheckpointError):
    """A save failed by something other than the disk. Another try would fail as well."""

    exit_code = ExitCode.FAILED


def is_of_the_disk(error: BaseException) -> bool:
    """Whether a save failed because of its disk: full, over a quota, read-only, gone, slow, or not keeping what it got.

    A CheckpointError says so itself: it is one of the disk, or a CannotSaveError.
    """
    if isinstance(error, OSError | SafetensorError):
        number = _error_number(error)
        # A timeout of Python's own has no number.
        return number not in _OF_THE_PROCESS and (number is not None or isinstance(error, OSError))
    return isinstance(error, CheckpointError) and not isinstance(error, CannotSaveError)


def cannot_save(where: Path, error: BaseException) -> CannotSaveError:
    """The error of a save that failed because of `error`, which is not of the disk. where: the checkpoint's folder."""
    if isinstance(error, CannotSaveError):
        return error
    why = f"{type(error).__name__}: {error}".rstrip(": ")
    if _is_of_memory(error):
        what = "the checkpoint was not written: this process got no more memory"
        fix = "end what else takes this machine's memory, or checkpoint.background=false, which needs no copy; then "
        fix += "give the same command again: it goes on from the newest checkpoint"
        return CannotSaveError(Problem(what, str(where), f"{why} (no more memory)", fix))

    # The user sees no traceback of it: the innermost line says where to look.
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        why += f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})"
    what = "the checkpoint was not written, and not because of the disk"
    fix = "mend the code named here (a model's or data set's own state must be JSON and tensors), then give the same "
    fix += "command again: it goes on from the newest checkpoint"
    return CannotSaveError(Problem(what, str(where), why, fix))


def _is_of_memory(error: BaseException) -> bool:
    return is_out_of_memory(error) or _error_number(error) == errno.ENOMEM


def _error_number(error: BaseException) -> int | None:
    """The operating system's number of an error, which safetensors has in its text alone; None if there is none."""
    if isinstance(error, OSError):
        return error.errno
    found = _OS_ERROR.search(str(error)) if isinstance(error, SafetensorError) else None
    return None if found is None else int(found[1])
