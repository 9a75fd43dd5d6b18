"""What a start is asked for: which run it means, where that begins, and whether it may and can be written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.checkpoint.lock import RunLock
from harness.checkpoint.preflight import lacks_room
from harness.checkpoint.store import Store
from harness.core.config import RunConfig
from harness.core.errors import CheckpointError, Problem
from harness.precision.recipe import Recipe
from harness.runs import RUNS, base_name, choose_folder, is_checkpoint_name, is_finished, read_source


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for, validated. resume: "auto", "never" or the path of a checkpoint."""

    config: RunConfig
    recipe: Recipe
    config_name: str
    name: str | None
    resume: str
    strict: bool
    launcher: str


def find_source(resume: str, name: str | None) -> Path | None:
    """The checkpoint that --resume names; None for auto and never. Raises CheckpointError if it cannot be one.

    A run that has begun from it goes on, whether it is still there or not.
    """
    if resume in ("auto", "never"):
        return None
    path = Path(resume)
    try:
        there = (path / "manifest.json").is_file() or (name is not None and read_source(RUNS / name) == path.resolve())
    except OSError:  # such as a name that is too long
        there = False
    if not there or not is_checkpoint_name(path):
        fix = "give auto, never, or a folder runs/<run>/checkpoints/step-<number>"
        raise CheckpointError(Problem("is no checkpoint", f"--resume {resume}", fix=fix))
    return path


def find_folder(request: Request, source: Path | None) -> Path:
    """The run folder that the command means: with --resume PATH a new one, or the one that has begun from there.

    Raises ConfigError as `choose_folder` does.
    """
    config_name, recipe, steps = request.config_name, request.config.recipe, request.config.train.steps
    if source is None:
        return choose_folder(config_name, recipe, request.name, request.resume, steps)
    if request.name is not None:
        begun = [RUNS / request.name]
    else:
        base = base_name(config_name, recipe)
        numbered = (folder for folder in RUNS.glob("*") if folder.name.removeprefix(f"{base}-").isdecimal())
        begun = [folder for folder in (RUNS / base, *sorted(numbered)) if not is_finished(folder, steps)]
    for folder in begun:
        if read_source(folder) == source.resolve() and (folder / "config.yaml").exists():
            return folder
    return choose_folder(config_name, recipe, request.name, "never", steps)


class Locked:
    """The run's lock on rank 0, nothing on the others."""

    def __init__(self, folder: Path, lead: bool) -> None:
        self._lock = RunLock(folder) if lead else None

    def __enter__(self) -> None:
        if self._lock:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        if self._lock:
            self._lock.release()


def room(folder: Path, bytes_each: int) -> list[Problem]:
    """Why the checkpoints of the run in `folder` will not fit, or cannot be written; empty if nothing is wrong."""
    checkpoints = folder / "checkpoints"
    try:
        there = Store(checkpoints, readonly=True).steps()
    except OSError as error:
        fix = "move it away, or give the run another --name"
        return [Problem("the checkpoints cannot be looked at", str(checkpoints), str(error.strerror), fix)]
    return lacks_room(checkpoints if checkpoints.is_dir() else folder, bytes_each, len(there))
