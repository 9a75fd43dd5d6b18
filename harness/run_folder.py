"""Run folders: which one a command means, whether it can be resumed, what is written into it, and by whom. Torch-free.

One run has one writer, which holds a lock on its folder. The kernel releases the lock when that process ends, however
it ends.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from harness.core.config import (
    DATA_MAY_CHANGE,
    RESUME_MAY_CHANGE,
    RESUME_NEVER,
    RunConfig,
    changed_keys,
    flat,
)
from harness.core.errors import CheckpointError, ConfigError, Problem, near_match, tell_wrapper
from harness.core.facts import Outcome
from harness.core.files import (
    MAX_LARGE,
    RUNS,
    atomic_file,
    dump_json,
    read_json,
    read_mapping,
    sync_folder,
    write_json,
)
from harness.core.schema import read_yaml, validate

_SOURCE = "started_from.json"
_RESERVE = ".reserve"
# Bytes kept free for outcome.json, and characters of its reason, which take up to twelve bytes each.
_RESERVED, _MAX_REASON = 256 << 10, 16 << 10
# What a run writes before it trains. Without corpus.json the copy of the text is made again.
_STARTING_FILES = (
    "config.yaml",
    "plan.json",
    "journal.jsonl",
    "fp8_telemetry.bin",
    "incidents.json",
    "shipper.json",
    "data/corpus.json",
    "data/source.json",
    "data/target.json",
    _SOURCE,
    _RESERVE,
)
# Bytes of a run's name: file systems take 255, and `-2` or `.tmp-` may be added.
_MAX_NAME = 200
# Not allowed in a run's name.
_SHELL_METACHARACTERS = set("*?[]{}$`\\\"'|&;<>!")
# Size of a vocabulary of bytes.
_BYTES = 256
# Why --accept-changed does not open some keys. Keys of `data` that only say how the same data are cut are open.
_OTHER_DATA = (
    "the run goes on with the data that it began with: others need a run of their own, which may start from one of its "
    "checkpoints: --name NEW --resume RUN/checkpoints/step-N"
)
_OTHER_OPTIMIZER = "the state in its checkpoints is of another kind"
_CUT_SHORT = "config.yaml does not have it: the file was cut short"


def choose_folder(
    config_name: str, recipe_name: str, name: str | None, resume: str, steps: int
) -> Path:
    """The run folder that a command means.

    Without a name it is `<config>-<recipe>`, so that the same command finds its own run again; once that run has
    finished (or with resume "never") the next free `-2`, `-3`, ... is taken. Raises ConfigError if a name is no
    folder name, or is taken and resume is "never".
    """
    if name is not None:
        return _named_folder(name, resume)
    base = base_name(config_name, recipe_name)
    number = 1
    while True:
        folder = RUNS / (base if number == 1 else f"{base}-{number}")
        if not _has_remains(folder):
            return folder
        resumable = os.path.exists(folder / "config.yaml")
        if resumable and resume == "auto" and not is_finished(folder, steps):
            return folder
        number += 1


def _named_folder(name: str, resume: str) -> Path:
    """The folder of --name. Raises ConfigError as `choose_folder` does."""
    plain = name.isprintable() and not _SHELL_METACHARACTERS & set(name)
    # What is not printable may not be encoded either.
    fits = plain and len(name.encode()) <= _MAX_NAME
    # A file that begins with a dot is hidden; a shell reads - as an option, and ~ as a home folder.
    if not name or name[0] in ".-~" or "/" in name or not fits:
        fix = "use letters, digits, - and _"
        raise ConfigError(Problem(f"{name!r} is no folder name", "--name", fix=fix))
    folder = RUNS / name
    # os.path's answer for a folder that may not be read is no. What refuses it is its lock, with the reason.
    has_config = os.path.exists(folder / "config.yaml")
    if resume != "auto" and has_config:
        fix = "choose another --name, or use --resume auto"
        raise ConfigError(Problem("this run exists already", str(folder), fix=fix))
    if _has_remains(folder) and not has_config:
        what = "holds the remains of a run without its config.yaml"
        fix = "restore its config.yaml to resume it; else choose another --name, or move the folder away"
        raise ConfigError(Problem(what, str(folder), fix=fix))
    return folder


def base_name(config_name: str, recipe_name: str) -> str:
    """The name of a run without --name; later ones get -2, -3, ... at the end."""
    return f"{Path(config_name).stem}-{Path(recipe_name).stem}"


def _has_remains(folder: Path) -> bool:
    """Whether a run was here, whose checkpoints must never be taken for another run's."""
    names = ("config.yaml", "journal.jsonl", "checkpoints")
    return any(os.path.exists(folder / name) for name in names)


def is_finished(folder: Path, steps: int) -> bool:
    """Whether the run in `folder` ended as planned, with at least `steps` steps done."""
    outcome = read_outcome(folder)
    step = outcome.get("step")
    return outcome.get("status") == "done" and isinstance(step, int) and step >= steps


def read_outcome(folder: Path) -> dict[str, Any]:
    """outcome.json, or an empty mapping while there is none."""
    return read_mapping(folder / "outcome.json")


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Write how the run ended, into outcome.json and for the wrapper (see `tell_wrapper`). Raises OSError.

    On a full disk it takes the place that `forget_outcome` has kept for it.
    """
    tell_wrapper(outcome.exit_code, overrule=True)
    loss = outcome.val_loss
    # Strict JSON has no NaN and no infinities.
    val_loss: float | str | None = loss
    if loss is not None and not math.isfinite(loss):
        val_loss = str(loss)
    content = {
        **asdict(outcome),
        "reason": outcome.reason[:_MAX_REASON],
        "val_loss": val_loss,
        "exit_code": int(outcome.exit_code),
    }
    path, reserve = folder / "outcome.json", folder / _RESERVE
    try:
        write_json(path, content)
    except OSError:
        # Overwrite the reserve in place: space that it gave up could be taken by others first, and there may be no room
        # for another name.
        descriptor = os.open(reserve, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            os.ftruncate(descriptor, os.pwrite(descriptor, dump_json(content), 0))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        reserve.replace(path)
        sync_folder(folder)
    reserve.unlink(missing_ok=True)


def forget_outcome(folder: Path) -> None:
    """Remove the outcome of a run that goes on, and keep room for the next one, whatever else fills the disk.

    If the run were killed now, an old outcome would be taken for the new one.
    """
    (folder / "outcome.json").unlink(missing_ok=True)
    with suppress(OSError), atomic_file(folder / _RESERVE) as stream:
        # Random bytes, as file systems that compress would shrink any others.
        stream.write(os.urandom(_RESERVED))


def forget_run(folder: Path) -> None:
    """Remove the files of a run that never began to train, so that its name is free again."""
    for name in _STARTING_FILES:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def write_config(folder: Path, config: RunConfig) -> None:
    """Write the resolved config, loadable as --config."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    with atomic_file(folder / "config.yaml") as stream:
        stream.write(text.encode())


SHIPPED_MODEL = "harness.models.gpt:build"


def adopt_vocab(folder: Path, config: RunConfig) -> RunConfig:
    """`config` with the vocabulary that the run in `folder` recorded, if the user gives none for the shipped model.

    A run that goes on, or that starts from another's checkpoint, needs a model of that size.
    """
    if config.model.target != SHIPPED_MODEL or "vocab" in config.model.args:
        return config
    try:
        saved = validate(RunConfig, read_yaml(folder / "config.yaml"), str(folder / "config.yaml"))
    except ConfigError:  # reported when it is read for its own sake
        return config
    if saved.model.target != SHIPPED_MODEL:
        return config
    vocab = saved.model.args.get("vocab")
    return config if vocab is None else _with_vocab(config, vocab)


def place_of_runs() -> Path:
    """A folder on the disk that a new run would be written to: `RUNS`, or the working folder, which would hold it."""
    return RUNS if RUNS.is_dir() else Path()


def fit_vocab(config: RunConfig, ids: int, vocab: int | None) -> RunConfig:
    """`config` with a model for the data: the shipped one gets `vocab` where none is given.

    ids: how many different token ids the data have.
    vocab: None for data of which that is not known.

    Raises ConfigError if a given vocabulary is too small.
    """
    if config.model.target != SHIPPED_MODEL or vocab is None:
        return config
    given = config.model.args.get("vocab")
    if given is None:
        # 256 is the model's own default: configs of runs on bytes stay as they always were.
        return config if vocab == _BYTES else _with_vocab(config, vocab)
    if isinstance(given, int) and given < ids:
        why = f"the data has token ids up to {ids - 1}"
        fix = f"set model.args.vocab={vocab}, or leave it out; a model that was begun with less cannot take these data"
        what = f"a vocabulary of {given} is too small"
        raise ConfigError(Problem(what, "model.args.vocab", why, fix))
    return config


def _with_vocab(config: RunConfig, vocab: int) -> RunConfig:
    args = {**config.model.args, "vocab": vocab}
    return config.model_copy(update={"model": config.model.model_copy(update={"args": args})})


@dataclass(frozen=True, slots=True)
class Change:
    """One key whose value is not what the run began with; for the recipe's contents the values are hashes."""

    key: str
    old: Any
    new: Any

    @property
    def values(self) -> str:
        """Both, in words."""
        return f"from {self.old!r} to {self.new!r}"

    def __str__(self) -> str:
        return f"{self.key} {self.values}"


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run that goes on.

    saved: its config so far.
    changes: every key that this start changes.
    accepted: keys of --accept-changed.
    """

    saved: RunConfig
    changes: tuple[Change, ...]
    accepted: tuple[str, ...]


def check_resumable(
    folder: Path, config: RunConfig, recipe_sha256: str, accepted: Sequence[str] = ()
) -> Resumed:
    """What a resume would change.

    The keys in RESUME_MAY_CHANGE may change. Other keys may change only if `accepted` names them. The data and the kind
    of optimizer may never change. Accepted keys that did not change do no harm, so the same command resumes again.

    Raises CheckpointError naming every changed key that may not be, and ConfigError for names in `accepted` that are
    not keys.
    """
    raw = read_yaml(folder / "config.yaml")
    saved = validate(RunConfig, raw, str(folder / "config.yaml"))
    old, new = saved.model_dump(mode="json"), config.model_dump(mode="json")
    check_accepted(accepted, old, new)

    # A recipe may change by name, or in its contents.
    changes = _changes(old, new)
    renamed = any(change.key == "recipe" for change in changes)
    sha256 = read_plan(folder).get("recipe_sha256", recipe_sha256)
    if sha256 != recipe_sha256 and not renamed:
        changes.append(Change("recipe", sha256, recipe_sha256))

    # Keys that the file lacks have their defaults in `old`.
    absent = flat(old).keys() - flat(raw).keys()
    problems: list[Problem] = []
    for change in changes:
        where = f"{folder}: {change.key}"
        what = f"changed {change.values}"
        if change.key == "recipe" and config.recipe == saved.recipe:
            what = "the recipe's contents changed since this run began"
        why = _why_never(change.key)
        cut = _CUT_SHORT if change.key in absent else ""
        if why:
            # Somebody who asked for it must learn why it is refused.
            reason = why if change.key in accepted else cut
            fix = "use the old value, or give the new run another --name"
            problems.append(Problem(what, where, reason, fix))
        elif not change.key.startswith(RESUME_MAY_CHANGE) and change.key not in accepted:
            fix = f"use the old value, give the new run another --name, or --accept-changed {change.key}"
            problems.append(Problem(what, where, cut, fix))
    if problems:
        raise CheckpointError(problems)
    return Resumed(saved, tuple(changes), tuple(accepted))


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    keys = changed_keys(old, new)
    return [Change(key, _value(old, key), _value(new, key)) for key in keys]


def _why_never(key: str) -> str:
    """Why a key may never change in a run; empty if --accept-changed opens it."""
    if key.startswith("data.") and key not in DATA_MAY_CHANGE:
        return _OTHER_DATA
    return _OTHER_OPTIMIZER if key in RESUME_NEVER else ""


def check_accepted(accepted: Sequence[str], *configs: Mapping[str, Any]) -> None:
    """Raises ConfigError for names that are no keys of `configs`, which are dumped."""
    keys: set[str] = set()
    for config in configs:
        keys |= flat(config).keys()
    # Below these, users name keys of their own.
    free = ("model.args.", "train.optimizer_args.", "data.args.")
    problems: list[Problem] = []
    for key in accepted:
        if key not in keys and not key.startswith(free):
            fix = near_match(key, sorted(keys))
            problems.append(Problem("no such key", f"--accept-changed {key}", fix=fix))
    if problems:
        raise ConfigError(problems)


def bound(
    config: RunConfig,
    recipe_sha256: str,
    data: Mapping[str, Any],
) -> dict[str, Any]:
    """What a checkpoint is bound to: the config, and hashes of the recipe's contents and of the data; JSON-able."""
    return {
        "config": config.model_dump(mode="json"),
        "recipe": recipe_sha256,
        "data": data.get("sha256"),
    }


def check_bound(
    step: int, saved: Any, now: Mapping[str, Any], accepted: Collection[str] = ()
) -> None:
    """Refuse to go on from a checkpoint of another config, recipe or data than this process has.

    The folder's own files may have been changed, swapped or lost since. The checkpoint still knows what it came from.

    saved: what the checkpoint is bound to.
    now: the same of this process.
    accepted: keys that may differ, `recipe` and `data` among them.

    Raises CheckpointError naming every difference.
    """
    place = f"checkpoint of step {step}"
    try:
        old = validate(RunConfig, saved["config"], place).model_dump(mode="json")
        hashes = {key: saved[key] for key in ("recipe", "data")}
    except (ConfigError, LookupError, TypeError) as error:
        what = "what it is bound to cannot be read"
        fix = "resume with the version that wrote it"
        raise CheckpointError(Problem(what, place, str(error)[:400], fix)) from error

    why = "its weights come from what was; config.yaml or data/ may have been replaced since"
    fix = "restore the run's own files, or give the new run another --name and --resume this checkpoint"
    problems: list[Problem] = []
    # Keys that every resume may change are no difference.
    for change in _changes(old, now["config"]):
        if not change.key.startswith(RESUME_MAY_CHANGE):
            what = f"changed {change.values}"
            problems.append(Problem(what, change.key, why, _or_accept(fix, change.key)))
    texts = {"recipe": "the recipe's contents differ", "data": "the data differ"}
    for key, text in texts.items():
        if hashes[key] != now[key]:
            problems.append(Problem(f"{text} from those it was trained with", key, why, fix))

    # What the user has accepted by name is let through.
    refused = [each for each in problems if each.where not in accepted]
    if refused:
        placed = [replace(each, where=f"{place}: {each.where}") for each in refused]
        raise CheckpointError(placed)


def _or_accept(fix: str, key: str) -> str:
    if _why_never(key):
        return fix
    return f"{fix}; where it is meant: --accept-changed {key}"


def run_identity(folder: Path, bound_to: Mapping[str, Any]) -> str:
    """A hash of the run's name and of what it begins with. Its checkpoints recognise their own incidents.json by it.

    bound_to: see `bound`. The same command in the same folder gives the same identity.
    """
    # A resume may change the other keys, and must still be recognised.
    config = flat(bound_to["config"])
    kept = [key for key in config if not key.startswith(RESUME_MAY_CHANGE)]
    fixed = {key: config[key] for key in kept}
    held = [folder.name, fixed, bound_to["recipe"], bound_to["data"]]
    text = json.dumps(held, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def same_data_order(folder: Path, other: Path) -> bool:
    """Whether two runs consume the same windows in the same order. Then a window bad for one is bad for both."""

    def order(run: Path) -> tuple[Any, ...]:
        config = validate(RunConfig, read_yaml(run / "config.yaml"), str(run / "config.yaml"))
        kept = "corpus.json" if config.data.target is None else "target.json"
        corpus = read_json(run / "data" / kept, MAX_LARGE)
        return corpus["sha256"], config.train.seed, config.train.global_batch, config.data.context

    try:
        return order(folder) == order(other)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_source(folder: Path, source: Path) -> None:
    """Write which checkpoint of another run this one starts from."""
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
    """Write plan.json: per layer precision, backend and why; requested, resolved, effective."""
    write_json(folder / "plan.json", dict(plan))


def read_plan(folder: Path) -> dict[str, Any]:
    """The contents of plan.json; empty if it is missing or unreadable."""
    return read_mapping(folder / "plan.json", MAX_LARGE)


def _value(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


_FILE = "lock"
_NO_OWNER = "owner not known"
# Tries to take a lock, and seconds between them: `is_locked` holds it for an instant.
_TRIES, _BETWEEN = 10, 0.02


class RunLock:
    """The exclusive right to write into `run_dir`, as a context manager or by `acquire` and `release`.

    A killed owner's lock is free at once; the file that stays behind means nothing by itself.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / _FILE
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises CheckpointError naming its owner, or why the folder cannot be locked at all."""
        descriptor: int | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Not through a link, whose target would be emptied.
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            _lock(descriptor)
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
        if error.errno in (errno.EACCES, errno.EPERM):
            fix = "check the permissions of this folder and of those above it, or give the run another --name"
        if error.errno in (errno.ELOOP, errno.EISDIR):
            where, fix = str(self._path), "move away what is there: it is no lock of a run"
        return Problem(
            "the run folder cannot be locked", where, why=error.strerror or str(error), fix=fix
        )


def _lock(descriptor: int) -> None:
    """Take the exclusive lock. Raises BlockingIOError if another process has it and keeps it."""
    for _ in range(_TRIES - 1):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_BETWEEN)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(run_dir: Path) -> bool:
    """Whether a process is writing this run. Nothing is changed. False if the lock cannot be read."""
    try:
        # Non-blocking open: somebody else may have put a pipe there.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(run_dir / _FILE, flags)
    except OSError:
        return False
    try:
        # A shared lock: several readers may look at the same time.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _self() -> dict[str, int | str]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _owner(descriptor: int | None) -> str:
    """Who has the lock, from what the owner wrote into the file, which may be incomplete."""
    if descriptor is None:
        return _NO_OWNER
    try:
        return _owner_of(json.loads(os.pread(descriptor, 4096, 0)))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return _NO_OWNER


def _owner_of(content: Mapping[str, Any]) -> str:
    return f"process {content['pid']} on {content['host']} since {content['started']}"
