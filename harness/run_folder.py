"""Run folders: which one a command means, whether it can be resumed, what is written into it, and by whom. Torch-free.

One run has one writer: a lock on its folder, which the kernel releases with its owner, however that ends.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from harness.core.config import RunConfig, changed_keys
from harness.core.errors import CheckpointError, ConfigError, Problem, tell_wrapper
from harness.core.facts import Outcome
from harness.core.files import MAX_LARGE, atomic_file, dump_json, read_json, read_mapping, write_json
from harness.core.schema import read_yaml, validate

RUNS = Path("runs")
_SOURCE = "started_from.json"
# Without corpus.json the copy of the text is made again.
_BEGINNINGS = (
    "config.yaml",
    "plan.json",
    "journal.jsonl",
    "incidents.json",
    "shipper.json",
    "data/corpus.json",
    "data/dataset.json",
    _SOURCE,
)
# Bytes of a run's name: file systems take 255, and `-2` or `.tmp-` may be added.
_MAX_NAME = 200
_MAY_CHANGE = ("train.steps", "train.max_minutes", "checkpoint.", "engine.timeout_seconds")


def choose_folder(config_name: str, recipe_name: str, name: str | None, resume: str, steps: int) -> Path:
    """The run folder that a command means.

    Without a name it is `<config>-<recipe>`, so that the same command finds its own run again; once that run has
    finished (or with resume "never") the next free `-2`, `-3`, ... is taken. Raises ConfigError if a name is no
    folder name, or is taken and resume is "never".
    """
    if name is not None:
        plain = name.isprintable() and len(name.encode()) <= _MAX_NAME
        if not name or name.startswith(".") or "/" in name or not plain:
            raise ConfigError(Problem(f"{name!r} is no folder name", "--name", fix="use letters, digits, - and _"))
        folder = RUNS / name
        if resume != "auto" and (folder / "config.yaml").exists():
            fix = "choose another --name, or use --resume auto"
            raise ConfigError(Problem("this run exists already", str(folder), fix=fix))
        if _has_remains(folder) and not (folder / "config.yaml").exists():
            fix = "choose another --name, or move the folder away"
            raise ConfigError(Problem("holds the remains of a run without its config.yaml", str(folder), fix=fix))
        return folder
    base = base_name(config_name, recipe_name)
    number = 1
    while True:
        folder = RUNS / (base if number == 1 else f"{base}-{number}")
        resumable = (folder / "config.yaml").exists()
        if not _has_remains(folder) or (resumable and resume == "auto" and not is_finished(folder, steps)):
            return folder
        number += 1


def base_name(config_name: str, recipe_name: str) -> str:
    """The name of a run that was given none; the second is this with -2, and so on."""
    return f"{Path(config_name).stem}-{Path(recipe_name).stem}"


def _has_remains(folder: Path) -> bool:
    """Whether a run was here: its checkpoints must never be taken for another run's."""
    return any((folder / name).exists() for name in ("config.yaml", "journal.jsonl", "checkpoints"))


def is_finished(folder: Path, steps: int) -> bool:
    """Whether the run in `folder` ended as planned, with at least `steps` steps done."""
    outcome = read_outcome(folder)
    step = outcome.get("step")
    return outcome.get("status") == "done" and isinstance(step, int) and step >= steps


def read_outcome(folder: Path) -> dict[str, Any]:
    """outcome.json, or an empty mapping while there is none."""
    return read_mapping(folder / "outcome.json")


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """How the run ended, for wrappers: launchers swallow exit codes."""
    loss = outcome.val_loss
    spelled = loss if loss is None or math.isfinite(loss) else str(loss)  # strict JSON has no NaN
    write_json(folder / "outcome.json", {**asdict(outcome), "val_loss": spelled, "exit_code": int(outcome.exit_code)})
    tell_wrapper(outcome.exit_code, overrule=True)


def forget_outcome(folder: Path) -> None:
    """A run that goes on has no outcome: an old one would be taken for the new one's if it is killed."""
    (folder / "outcome.json").unlink(missing_ok=True)


def forget_run(folder: Path) -> None:
    """Take away what a run that never began has left, so that its name is free for the command that was meant."""
    for name in _BEGINNINGS:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def write_config(folder: Path, config: RunConfig) -> None:
    """The resolved config, loadable as --config."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    with atomic_file(folder / "config.yaml") as stream:
        stream.write(text.encode())


def check_resumable(folder: Path, config: RunConfig, recipe_sha256: str) -> None:
    """Refuse to resume under another config or recipe. Raises CheckpointError naming every changed key.

    Allowed to change: train.steps, train.max_minutes, checkpoint.* and engine.timeout_seconds.
    """
    saved = validate(RunConfig, read_yaml(folder / "config.yaml"), str(folder / "config.yaml"))
    old, new = saved.model_dump(mode="json"), config.model_dump(mode="json")
    refused = [key for key in changed_keys(old, new) if not key.startswith(_MAY_CHANGE)]
    fix = "use the old value, or give the new run another --name"
    problems = [
        Problem(f"changed from {_value(old, key)!r} to {_value(new, key)!r}", f"{folder}: {key}", fix=fix)
        for key in refused
    ]
    plan = read_plan(folder)
    if plan and plan.get("recipe_sha256") != recipe_sha256 and "recipe" not in refused:
        problems.append(Problem("the recipe's contents changed since this run began", f"{folder}: recipe", fix=fix))
    if problems:
        raise CheckpointError(problems)


def same_data_order(folder: Path, other: Path) -> bool:
    """Whether two runs consume the same windows in the same order: then what one passed over, the other must too."""

    def order(run: Path) -> tuple[Any, ...]:
        config = validate(RunConfig, read_yaml(run / "config.yaml"), str(run / "config.yaml"))
        kept = "corpus.json" if config.data.target is None else "dataset.json"
        corpus = read_json(run / "data" / kept, MAX_LARGE)
        return corpus["sha256"], config.train.seed, config.train.global_batch, config.data.context

    try:
        return order(folder) == order(other)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_source(folder: Path, source: Path) -> None:
    """Which checkpoint of another run this one starts from."""
    write_json(folder / _SOURCE, {"path": str(source.resolve())})


def read_source(folder: Path) -> Path | None:
    """What `write_source` wrote; None for a run that started afresh."""
    try:
        path = Path(read_json(folder / _SOURCE)["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if is_checkpoint_name(path) else None


def is_checkpoint_name(path: Path) -> bool:
    """Whether `path` ends in step-<number>."""
    return path.name.startswith("step-") and path.name.removeprefix("step-").isdecimal()


def write_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """plan.json: per layer precision, backend and why; requested, resolved, effective."""
    write_json(folder / "plan.json", dict(plan))


def read_plan(folder: Path) -> dict[str, Any]:
    """What plan.json says; empty if it is missing or unreadable."""
    return read_mapping(folder / "plan.json", MAX_LARGE)


def _value(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


_FILE = "lock"


class RunLock:
    """The exclusive right to write into `run_dir`, as a context manager or by `acquire` and `release`.

    A killed owner's lock is free at once; the file that stays behind means nothing by itself.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / _FILE
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises CheckpointError naming the owner if another process has it, or if nobody could."""
        descriptor: int | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Not through a link: what it leads to would be cut off.
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, dump_json(_self()), 0)
        except OSError as error:
            owner = _owner(descriptor) if isinstance(error, BlockingIOError) else ""
            if descriptor is not None:
                os.close(descriptor)
            raise CheckpointError(self._refusal(error, owner)) from error
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back; safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _refusal(self, error: OSError, owner: str) -> Problem:
        where = str(self._path.parent)
        if isinstance(error, BlockingIOError):
            fix = "wait for it, stop it, or give this run another --name"
            return Problem(f"another process is writing this run: {owner}", where, fix=fix)
        fix = "choose a folder on a writable disk that supports file locks"
        return Problem("the run folder cannot be locked", where, why=error.strerror or str(error), fix=fix)


def _self() -> dict[str, int | str]:
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": started}


def _owner(descriptor: int | None) -> str:
    """Who has the lock, from what the owner wrote; it may still be writing."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0)) if descriptor is not None else {}
        return f"process {owner['pid']} on {owner['host']} since {owner['started']}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "owner not known"
