"""Where checkpoints live: each is committed whole or not at all, and verified before it is trusted.

A save writes `.tmp-step-N/`, fsyncs every file, writes the manifest last, fsyncs it, renames the folder to `step-N/`
and fsyncs the parent. There is no pointer to the latest: readers scan and verify. Damaged checkpoints and those that
a rollback passed over are renamed, never overwritten or deleted. Whether there is room is asked before any work.
"""

from __future__ import annotations

import errno
import math
import os
import re
import resource
import shutil
import stat
import time
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.checkpoint import manifest
from harness.checkpoint.manifest import (
    MANIFEST,
    STATE,
    TENSORS,
    check_folder,
    failed,
    file_entry,
    manifest_bytes,
    part_file,
    read_manifest,
)
from harness.core.errors import CheckpointError, MisuseError, Problem
from harness.core.files import MAX_LARGE, dump_json, read_json, step_name, sync_folder, write_json
from harness.core.protocols import Meta, TensorDict, Tensors
from harness.core.state import RunLedger

_STEP = re.compile(r"step-(\d{8,})")
_TMP = ".tmp-"
_ROLLBACK = "rollback.json"
LEDGER = "incidents.json"
"""Beside the checkpoints' folder; see `policy.load_ledger`."""
_KEEP_ALL = "delete this file to keep every checkpoint"
# Seconds: the coarsest clocks that file systems keep of changes. What changed so lately could change again unseen.
_CLOCK = 2.0

_Files = list[tuple[str, int, int, int, int]]


class Store:
    """The checkpoints of one run, in `root`.

    versions: written into every manifest, for people. damaged: what `newest_valid` passed over, by step, until it is
    set aside. quarantined: what was moved aside since the store was opened. A writer must hold the run's lock: opening
    removes what dead writers left half done and finishes an interrupted `discard_after`. With `readonly` (tools, ranks
    other than 0) nothing on disk is ever changed. Raises CheckpointError if `root` cannot be made.
    """

    def __init__(
        self, root: Path, versions: Mapping[str, str] | None = None, *, readonly: bool = False
    ) -> None:
        self.root = root
        self.damaged: dict[int, list[Problem]] = {}
        self.quarantined: list[Problem] = []
        self._versions = dict(versions or {})
        self._readonly = readonly
        self._whole: dict[int, tuple[_Files, bool]] = {}
        if readonly:
            return
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise failed("the checkpoint folder cannot be made", root, error) from error
        for leftover in root.glob(f"{_TMP}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if (target := unfinished_rollback(root)) is not None:
            self.discard_after(target)

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return self.root / step_name(step)

    def steps(self) -> list[int]:
        """Steps of committed checkpoints, oldest first; not verified."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        numbers = [int(match[1]) for match in map(_STEP.fullmatch, names) if match]
        return sorted(step for step in set(numbers) if self.path(step).name in names)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        meta: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Commit the state of `step`: one `<part>.safetensors` per part that has tensors, and `meta` as state.json.

        tensors: by part and name, any dtype, device and layout; shared memory is written once per name. metrics: what
        the checkpoint is known by, in its manifest; those that are not finite are left out. A committed
        checkpoint of this step that verifies is kept as it is; a damaged one is quarantined. Raises CheckpointError,
        with nothing left behind and older checkpoints untouched, if anything cannot be written (training can go on).
        """
        self._check_writer()
        final = self.path(step)
        problems = self.verify(step) if os.path.lexists(final) else []
        if final.exists() and not problems:
            try:
                sync_folder(
                    self.root
                )  # which may be what an earlier save of this step has failed in
            except OSError as error:
                raise failed("the checkpoint was not written", final, error) from error
            return final
        temporary = self.root / f"{_TMP}{final.name}"
        try:
            self._write(temporary, step, tensors, meta, metrics or {})
            if problems:
                self._quarantine(step, problems)
            temporary.rename(final)
            sync_folder(self.root)
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            raise failed(
                "the checkpoint was not written", final, self._made_again() or error
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return final

    def verify(self, step: int) -> list[Problem]:
        """What is wrong with the checkpoint of `step`: every byte is read. Empty if nothing is."""
        files = self._files(step)
        problems = check_folder(self.path(step), step)
        self._whole.pop(step, None)
        if files and not problems:
            settled = max(modified for *_, modified, _ in files) < time.time_ns() - _CLOCK * 1e9
            self._whole[step] = files, settled
        return problems

    def is_whole(self, step: int, settled: bool = False) -> bool:
        """Whether the checkpoint of `step` verifies. What has verified once is not read again while its files stay the
        same, by number, size and times; settled: nor if it was so new that their times may tell too little.
        """
        return not self._problems(step, settled)

    def _problems(self, step: int, settled: bool) -> list[Problem]:
        known = self._whole.get(step)
        if known is not None and known[0] == self._files(step) and (known[1] or not settled):
            return []
        return self.verify(step)

    def _files(self, step: int) -> _Files:
        """Name, number, size and times of each file of the checkpoint of `step`; empty if it cannot be looked at."""
        try:
            files = [
                (each.name, each.stat(follow_symlinks=False))
                for each in os.scandir(self.path(step))
            ]
        except OSError:
            return []
        return sorted(
            (name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in files
        )

    def metrics(self, step: int) -> dict[str, float]:
        """What the checkpoint of `step` is known by; empty if its manifest cannot be read. Verifies nothing else."""
        try:
            return dict(read_manifest(self.path(step))["metrics"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def load(self, step: int, parts: Container[str] | None = None) -> tuple[Tensors, Meta]:
        """(tensors by part and name, on the CPU; meta), verified (see `is_whole`). Raises CheckpointError with every
        problem.

        parts: those whose tensors are wanted, None for all. Ones that had no tensors when saved are not in the first
        mapping.
        """
        folder = self.path(step)
        if problems := self._problems(step, settled=True):
            raise CheckpointError(problems)
        try:
            tensors: Tensors = {
                name.removesuffix(TENSORS): load_file(folder / name)
                for name in read_manifest(folder)["files"]
                if name.endswith(TENSORS) and (parts is None or name.removesuffix(TENSORS) in parts)
            }
            meta: Meta = read_json(folder / STATE, MAX_LARGE)
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            raise failed("the checkpoint cannot be loaded", folder, error) from error
        return tensors, meta

    def newest_valid(self) -> int | None:
        """Step of the newest checkpoint that verifies, None if there are none. Newer ones are `damaged`, and stay where
        they are until the run goes on without them (`set_aside`).

        Raises CheckpointError if there are checkpoints and not one verifies: a run that came far must not start over
        unasked.
        """
        damaged: dict[int, list[Problem]] = {}
        for step in reversed(self.steps()):
            problems = self.verify(step)
            if not problems:
                self.damaged = damaged
                return step
            damaged[step] = problems
        if damaged:
            fix = "restore one from a copy of this run, or start a new run with another --name"
            none = Problem(
                "not one of its checkpoints is whole, so there is nothing to go on from",
                str(self.root),
                fix=fix,
            )
            raise CheckpointError(
                [none, *(problem for problems in damaged.values() for problem in problems)]
            )
        return None

    def set_aside(self) -> None:
        """Rename what is `damaged` to `quarantine-*`. Raises CheckpointError."""
        for step in [*self.damaged]:
            self._check_writer()
            try:
                self._quarantine(step, self.damaged[step])
            except OSError as error:
                raise failed(
                    "a damaged checkpoint cannot be moved aside", self.path(step), error
                ) from error
            del self.damaged[step]

    def discard_after(self, step: int) -> None:
        """Rename checkpoints newer than `step` to `rolledback-*` and take their good marks away.

        The intent is on disk first, so that a writer killed half-way is finished by the next one to open the store.
        Raises CheckpointError.
        """
        self._check_writer()
        intent = self.root / _ROLLBACK
        try:
            write_json(intent, {"to": step})
            manifest.forget_after(self.root, step)
            for newer in self.steps():
                if newer > step:
                    self._aside(newer, "rolledback")
            sync_folder(self.root)
            intent.unlink()
            sync_folder(self.root)
        except OSError as error:
            what = f"the checkpoints after step {step} cannot be set aside"
            raise failed(what, self.root, self._made_again() or error) from error

    def remove(self, step: int) -> None:
        """Delete the checkpoint of `step`; killed half-way, it is gone from `steps` all the same.

        Raises CheckpointError.
        """
        self._check_writer()
        trash = self.root / f"{_TMP}trash-{self.path(step).name}"
        try:
            self.path(step).rename(trash)
            self._whole.pop(step, None)
            shutil.rmtree(trash)
        except OSError as error:
            raise failed("the checkpoint cannot be deleted", self.path(step), error) from error

    def _write(
        self,
        folder: Path,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        meta: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> None:
        state = dump_json(meta)
        if len(state) > MAX_LARGE:
            raise ValueError(f"{len(state)} bytes of state are more than will be read again")
        contents = {part_file(part): _plain(named) for part, named in tensors.items() if named}
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        _write_synced(folder / STATE, state)
        # safetensors makes private files, whatever the umask: others would see a checkpoint they cannot load.
        mode = stat.S_IMODE((folder / STATE).stat().st_mode)
        for name, named in contents.items():
            save_file(named, folder / name)
            (folder / name).chmod(mode)
            _sync(folder / name)
        files = {name: file_entry(folder / name) for name in (*contents, STATE)}
        known = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        _write_synced(folder / MANIFEST, manifest_bytes(step, files, self._versions, known))
        sync_folder(folder)

    def _made_again(self) -> OSError | None:
        """Why a write has failed, if somebody has deleted `root`: a run must not wait for room that never comes."""
        try:
            self.root.mkdir()
            sync_folder(self.root.parent)
        except OSError:  # it is there, or the folder of the run is gone too
            return None
        why = "the folder was deleted, with every checkpoint in it; it is made again for the next save"
        return FileNotFoundError(errno.ENOENT, why)

    def _check_writer(self) -> None:
        if self._readonly:
            raise MisuseError(
                Problem(
                    "this store was opened to read",
                    str(self.root),
                    fix="open it on rank 0, to write",
                )
            )

    def _quarantine(self, step: int, problems: list[Problem]) -> None:
        self._aside(step, "quarantine")
        sync_folder(self.root)
        self.quarantined += problems

    def _aside(self, step: int, prefix: str) -> None:
        source = self.path(step)
        number = 1
        while os.path.lexists(target := self.root / f"{prefix}-{source.name}-{number}"):
            number += 1
        source.rename(target)


def unfinished_rollback(root: Path) -> int | None:
    """The step that a writer was going back to when it was killed: whoever opens the store next sets the later ones
    aside. None if there is nothing to finish. Raises CheckpointError.
    """
    intent = root / _ROLLBACK
    try:
        target = read_json(intent)["to"]
        if type(target) is not int or target < 0:
            raise ValueError("names no step")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = "an unfinished rollback cannot be read"
        raise CheckpointError(Problem(what, str(intent), str(error), fix=_KEEP_ALL)) from error
    return target


def check_unfinished(root: Path, ledger: RunLedger) -> None:
    """Refuse an unfinished rollback that is not the one in the ledger, as a folder copied over another may have it: the
    run would go back, or start over. Raises CheckpointError.
    """
    target = unfinished_rollback(root)
    if target in (None, ledger.return_to or None):
        return
    known = (
        f"that is finished, by {LEDGER}"
        if target in ledger.returned_to
        else f"of which {LEDGER} knows nothing"
    )
    what = f"tells of a rollback to step {target} {known}"
    raise CheckpointError(Problem(what, str(root / _ROLLBACK), fix=_KEEP_ALL))


def _plain(named: Mapping[str, Tensor]) -> TensorDict:
    """Tensors as safetensors takes them: on the CPU, contiguous, no two in the same memory (tied weights are)."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    end = 0
    for name, tensor in sorted(plain.items(), key=lambda item: item[1].data_ptr()):
        begin = tensor.data_ptr()
        if begin < end:
            plain[name] = tensor.clone()
        end = max(end, begin + tensor.numel() * tensor.element_size())
    return plain


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


COPIES = 3
"""Checkpoints that must fit: the two that always verify, and the one that is being written."""
_FILES = 64
_PROBE = ".preflight"


def lacks_room(folder: Path, bytes_each: int, existing: int) -> list[Problem]:
    """Why `folder`, which exists, cannot take files, or three checkpoints of `bytes_each` bytes; empty if it can.

    existing: committed checkpoints that are there already; one more must fit in any case.
    """
    try:
        _write(folder / _PROBE)
        disk = os.statvfs(folder)
    except OSError as error:
        fix = "choose a folder that you may write to: start from another working folder, or give another --name"
        return [
            Problem(
                "checkpoints cannot be written here",
                str(folder),
                why=error.strerror or str(error),
                fix=fix,
            )
        ]
    problems: list[Problem] = []
    count = max(COPIES - existing, 1)
    free = disk.f_bavail * disk.f_frsize
    if free < count * bytes_each:
        problems.append(
            Problem(
                f"{_size(free)} free, {_size(count * bytes_each)} needed: {count} checkpoint(s) of {_size(bytes_each)}",
                str(folder),
                why="two that verify must stay while the next is written",
                fix="free space, start from a folder on a larger disk, or train a smaller model",
            )
        )
    if disk.f_files and disk.f_favail < _FILES:
        fix = "delete files on this disk, or start from a folder on another"
        problems.append(
            Problem(f"the disk has room for {disk.f_favail} more files", str(folder), fix=fix)
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < bytes_each:
        why = f"a checkpoint's files may need up to {_size(bytes_each)}"
        text = f"this process may write files of at most {_size(limit)}"
        problems.append(Problem(text, str(folder), why=why, fix="raise it: ulimit -f unlimited"))
    return problems


def _write(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        os.write(descriptor, b"\0")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        os.unlink(path)


def _size(count: int) -> str:
    """Such as "1.7 GB", in powers of ten."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
