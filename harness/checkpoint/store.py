"""The folder of a run's checkpoints, and the protocol by which one is written: completely, or not at all.

A process can be killed, or a disk can fill up, between any two file calls. A reader must never take a half-written
checkpoint for a good one. So a save builds the checkpoint under another name and gives it its own name last:

1. Make the temporary folder `.tmp-step-N/`. Readers ignore that name.
2. Write the files: one `<part>.safetensors` for each part of the state, and `state.json`. Call fsync on each file:
   after a power cut, bytes that were only in the page cache would be missing.
3. Write `manifest.json` with the size and SHA-256 of every file, and fsync it. It comes last, because a manifest claims
   that all other files are there.
4. fsync the folder, rename it to `step-N/`, and fsync the parent. A rename happens completely or not at all. It is the
   commit.

What a kill leaves behind:

| killed             | on disk                       | at the next start                                      |
|--------------------|-------------------------------|--------------------------------------------------------|
| before the rename  | `.tmp-step-N/`                | it is deleted; the run resumes from the one before it  |
| after the rename   | `step-N/`, complete           | it counts                                              |
| during a deletion  | `.tmp-trash-step-N/`          | the deletion is completed                              |
| during a rollback  | some checkpoints renamed      | incidents.json names the target; the rest is renamed   |

**Several ranks that share the state** each write their own rows. They meet in the temporary folder, through files and
without collectives (`meeting.py`), so that each can do its part on a thread:

1. Rank 0 makes `.tmp-step-N-<start>-<try>/`, at once, as the others wait for it. Only rank 0 makes folders. The name
   is that of this one try, so that nothing of another try gets in.
2. Every rank writes its pieces (`pieces.py`), calls fsync, reads them back, and leaves their sizes and SHA-256 in an
   entry. Rank 0 also writes what is whole, and state.json.
3. Rank 0 waits for all entries, compares them with what it expects of every rank, removes them, and writes the
   manifest, which appears completely or not at all.
4. Every rank that sees the manifest reads its share of all files again and says so. Rank 0 waits for all of them,
   removes what they left, and looks whether the folder holds exactly the manifest's files.
5. fsync the folder, rename it, fsync the parent: the commit, by rank 0 alone. What the other ranks did before counts
   only if it comes to that.

| fails or is lost             | what happens                                                                        |
|------------------------------|-------------------------------------------------------------------------------------|
| another rank, with a reason  | it leaves the reason; rank 0 gives up, naming the rank, and removes the folder      |
| another rank, in silence     | rank 0 gives up after its wait, naming the rank, and removes the folder             |
| rank 0, which goes on        | it removes the folder; the others find it gone, or are told, and end their part     |
| rank 0, killed               | the others end after their wait; the folder is deleted at the next start            |
| a rank that comes late       | the folder is gone, and it cannot make one: nothing is written                      |

A folder that a rank was writing into while rank 0 removed it may leave something behind. The next try removes it first,
and so does the next start.

No file points to the latest checkpoint: such a pointer could be older than the folder, or damaged. Readers list the
folder and verify the newest checkpoint against its manifest. A damaged checkpoint, or one that a rollback discards, is
renamed. It is never overwritten or deleted.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import resource
import shutil
import stat
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from harness.checkpoint import manifest
from harness.checkpoint.failures import cannot_save, is_of_the_disk
from harness.checkpoint.manifest import (
    MANIFEST,
    STATE,
    check_files,
    check_folder,
    failed,
    file_entry,
    manifest_bytes,
    read_manifest,
    read_shards,
)
from harness.checkpoint.meeting import CHECKED, ENTRY, FAILED, Meeting
from harness.checkpoint.pieces import SHARDS, Shards, part_file, piece_file
from harness.checkpoint.slices import read_tensors
from harness.core.errors import CheckpointError, MisuseError, Problem
from harness.core.files import MAX_LARGE, dump_json, read_json, step_name, sync_folder
from harness.core.protocols import Meta, TensorDict, Tensors
from harness.core.shards import Rows, ShardedRows

_STEP = re.compile(r"step-(\d{8,})")
_TMP = ".tmp-"
_UNFINISHED = ".tmp"
# How often a folder is deleted into which another rank may be writing, and the seconds in between.
_DELETIONS, _PAUSE = 10, 0.02
# Seconds: the coarsest resolution of modification times (FAT). A newer file can change again without a new time.
_COARSEST_MTIME = 2.0

# For each file of a checkpoint: name, inode, size, modification time and status change time, both in nanoseconds.
_Files = list[tuple[str, int, int, int, int]]


@dataclass(frozen=True, slots=True)
class _Verified:
    """A checkpoint that was read completely and matched its manifest.

    files: what its files looked like then.
    settled: all of them were old enough that a later change must show in their times.
    """

    files: _Files
    settled: bool


class Store:
    """The checkpoints of one run.

    A writer must hold the run's lock: opening deletes the temporary folders of killed writers. Raises CheckpointError
    if `root` cannot be made.

    root: the folder that holds them.
    versions: of torch and of this package; written into every manifest, for people.
    readonly: never change anything on disk. For tools, and for ranks other than 0.
    damaged: problems of checkpoints that `newest_valid` skipped, by step. `set_aside` empties it.
    quarantined: problems of checkpoints that were renamed since the store was opened.
    """

    def __init__(
        self, root: Path, versions: Mapping[str, str] | None = None, *, readonly: bool = False
    ) -> None:
        self.root = root
        self.damaged: dict[int, list[Problem]] = {}
        self.quarantined: list[Problem] = []
        self._versions = dict(versions or {})
        self._readonly = readonly
        self._verified: dict[int, _Verified] = {}
        self._looked: dict[int, _Files] = {}
        if readonly:
            return

        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise failed("the checkpoint folder cannot be made", root, error) from error

        # Unfinished saves and deletions of a writer that was killed.
        for leftover in root.glob(f"{_TMP}*"):
            shutil.rmtree(leftover, ignore_errors=True)

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
        """Write and commit the checkpoint of `step`; returns its folder.

        An existing checkpoint of this step is kept if it verifies, and quarantined if it is damaged. Raises
        CheckpointError if the disk takes it not, and CannotSaveError for whatever else fails. Then nothing is left
        behind, and older checkpoints are untouched.

        tensors: by part and name, of any dtype, device and layout. Memory that two names share is written twice.
        meta: JSON-able; becomes state.json.
        metrics: recorded in the manifest, for example the validation loss. Values that are not finite are dropped.
        """
        self._check_writer()

        final = self.path(step)
        there, problems = self._earlier_save(step)
        if there:
            try:
                # An earlier save of this step may have failed in exactly this call.
                sync_folder(self.root)
            except OSError as error:
                raise failed("the checkpoint was not written", final, error) from error
            return final

        temporary = self.root / f"{_TMP}{final.name}"
        try:
            self._write(temporary, step, tensors, meta, metrics or {})
            self._commit(temporary, step, problems)
        except Exception as error:
            raise self._not_written(final, error) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return final

    def save_piece(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        rows: ShardedRows,
        meeting: Meeting,
        meta: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Write this rank's part of the checkpoint of `step`, together with all other ranks; returns its folder.

        Every rank calls it, on any thread: no collective is used. On rank 0 it commits when all ranks have done their
        part, and returns after that. On other ranks a return says that this rank's part was done, not that the
        checkpoint is there. Raises CheckpointError as `save`; on rank 0 it names the rank that failed.

        tensors: what this rank holds; of sharded ones its rows.
        rows: which tensors are sharded, and which rows of them are here: those of `Rows.of_rank`.
        meeting: this try of the save.
        meta, metrics: as for `save`; those of rank 0 count.
        """
        final = self.path(step)
        folder = self.root / f"{_TMP}{final.name}-{meeting.name}"
        if meeting.rank:
            self._write_for_rank_0(folder, tensors, rows, meeting)
            return final

        self._check_writer()
        try:
            folder.mkdir()
            self._remove_leftovers(but=folder)
            there, problems = self._earlier_save(step)
            if there:
                sync_folder(self.root)
                return final
            looks = self._write_with_others(
                folder, step, tensors, rows, meeting, meta, metrics or {}
            )
            self._commit(folder, step, problems)
        except CheckpointError as error:
            # Of another rank, which it names.
            first, *others = error.problems
            why = f"{first.what}; {first.why}" if first.why else first.what
            named = Problem("the checkpoint was not written", str(final), why, first.fix)
            raise type(error)([named, *others]) from error
        except Exception as error:
            raise self._not_written(final, error) from error
        finally:
            self._discard(folder)

        # All ranks together have read every byte of it.
        self._register(step, looks)
        return final

    def _earlier_save(self, step: int) -> tuple[bool, list[Problem]]:
        """Whether `step` was saved already, after a rollback or a repeated command, and what is wrong with that save.

        A damaged one counts as not saved.
        """
        final = self.path(step)
        problems = self.verify(step) if os.path.lexists(final) else []
        return final.exists() and not problems, problems

    def _commit(self, temporary: Path, step: int, problems: list[Problem]) -> None:
        """Give a finished checkpoint its name. problems: of the damaged one that has the name now. Raises OSError."""
        if problems:
            self._quarantine(step, problems)
        temporary.rename(self.path(step))
        sync_folder(self.root)

    def _manifest_bytes(
        self, step: int, files: Mapping[str, Mapping[str, Any]], metrics: Mapping[str, float]
    ) -> bytes:
        """The manifest of `files`, without metrics that are not finite."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        return manifest_bytes(step, files, self._versions, finite)

    def _write_with_others(
        self,
        folder: Path,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        rows: ShardedRows,
        meeting: Meeting,
        meta: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> _Files:
        """Rank 0's part: the protocol up to the rename. Raises CheckpointError naming a rank that failed.

        Returns what the files looked like before all ranks read them.
        """
        # What is whole, state.json, and this rank's own rows.
        shards = Shards.of_rows(rows, meeting.ranks)
        if not shards.tensors:
            raise ValueError("no tensor is sharded, so other ranks have nothing to write")
        state = _state_bytes(meta, shards)
        contents: dict[str, TensorDict] = {}
        for part, named in tensors.items():
            whole = {name: each for name, each in named.items() if name not in rows.get(part, {})}
            if whole:
                contents[part_file(part)] = _plain(whole)
        contents |= _own_pieces(tensors, rows, meeting)
        _write_synced(folder / STATE, state)
        _write_tensors(folder, contents, _file_mode(folder))
        files = {name: file_entry(folder / name) for name in (*contents, STATE)}

        # What the other ranks wrote must be what this one knows of them.
        layout = _layout(tensors, rows)
        for rank, entry in meeting.gather(folder, ENTRY).items():
            if "layout" not in entry:
                what = f"rank {rank} left an entry that cannot be read"
                raise CheckpointError(Problem(what, str(folder)))
            if entry["layout"] != layout:
                raise ValueError(f"rank {rank} holds other tensors than rank 0")
            theirs: dict[str, Any] = entry.get("files", {})
            if set(theirs) != set(shards.names_of(rank)):
                raise ValueError(f"rank {rank} wrote other files than its pieces: {sorted(theirs)}")
            files |= theirs
        files = dict(sorted(files.items()))  # not in the order in which ranks were done
        meeting.clear(folder, ENTRY)

        # The other ranks begin to read when they see the manifest, so it must appear at once.
        unfinished = folder / f"{MANIFEST}{_UNFINISHED}"
        _write_synced(unfinished, self._manifest_bytes(step, files, metrics))
        looks = [look for look in _look(folder) if look[0] in files]
        unfinished.rename(folder / MANIFEST)
        looks = sorted([*looks, *(look for look in _look(folder) if look[0] == MANIFEST)])
        problems = check_files(folder, files, meeting.rank, meeting.ranks)
        if problems:
            raise CheckpointError(problems)
        mine = {"manifest": _read_again(folder)["sha256"]}
        for rank, content in meeting.gather(folder, CHECKED).items():
            if content != mine:
                what = f"rank {rank} did not say that it read these files"
                raise CheckpointError(Problem(what, str(folder)))
        meeting.clear(folder, CHECKED, FAILED)

        if differ := set(os.listdir(folder)) ^ {*files, MANIFEST}:
            what = f"files came or went meanwhile: {sorted(differ)}"
            raise CheckpointError(Problem(what, str(folder)))
        sync_folder(folder)
        return looks

    def _write_for_rank_0(
        self,
        folder: Path,
        tensors: Mapping[str, Mapping[str, Tensor]],
        rows: ShardedRows,
        meeting: Meeting,
    ) -> None:
        """The part of a rank other than 0. Raises CheckpointError; rank 0 then finds the reason in `folder`."""
        written: list[str] = []
        try:
            meeting.await_folder(folder)
            _leave_pieces(folder, tensors, rows, meeting, written)
            meeting.await_file(folder, MANIFEST)
            # From here on rank 0 may commit: the files are no longer this rank's to remove.
            written.clear()
            _leave_check(folder, meeting)
        except BaseException as error:
            defect = None if is_of_the_disk(error) else cannot_save(folder, error)
            meeting.leave_failure(folder, written, defect or error)
            if isinstance(error, CheckpointError) or not isinstance(error, Exception):
                raise
            if defect is not None:
                raise defect from error
            what = f"rank {meeting.rank} could not write its part of the checkpoint"
            raise failed(what, folder, error) from error

    def _remove_leftovers(self, but: Path) -> None:
        """Delete the temporary folders of tries that failed, in which some rank was still writing at that time."""
        for leftover in self.root.glob(f"{_TMP}*"):
            if leftover != but:
                shutil.rmtree(leftover, ignore_errors=True)

    def _discard(self, folder: Path) -> None:
        """Delete the temporary folder of a try, if it is there. Another rank may be writing into it."""
        # Under another name it gets no new files, and can be emptied.
        trash = self.root / f"{_TMP}trash-{folder.name.removeprefix(_TMP)}"
        with suppress(OSError):
            folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)
        # It could not be renamed: a file may come while it is emptied.
        for _ in range(_DELETIONS):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(_PAUSE)

    def verify(self, step: int) -> list[Problem]:
        """Read every byte of the checkpoint of `step`; returns everything that is wrong with it."""
        # The files are listed before they are read: a change in between must not pass for verified.
        files = self._files(step)
        problems = check_folder(self.path(step), step)
        self._verified.pop(step, None)
        if not problems:
            self._register(step, files)
        return problems

    def verify_share(self, step: int, rank: int, ranks: int) -> list[Problem]:
        """As `verify`, by `ranks` ranks together: this one reads every `ranks`-th file. See `check_folder`.

        If all ranks found nothing, call `verified_together`.
        """
        self._looked[step] = self._files(step)
        self._verified.pop(step, None)
        return check_folder(self.path(step), step, rank, ranks)

    def verified_together(self, step: int) -> None:
        """All ranks have read their share of the checkpoint of `step`, and none found a problem."""
        self._register(step, self._looked.pop(step, []))

    def _register(self, step: int, files: _Files) -> None:
        """Remember that the checkpoint of `step` verified. files: what its files looked like before they were read."""
        if files:
            newest_change = max(modified for *_, modified, _ in files)
            settled = newest_change < time.time_ns() - _COARSEST_MTIME * 1e9
            self._verified[step] = _Verified(files, settled)

    def is_whole(self, step: int, settled: bool = False) -> bool:
        """Whether the checkpoint of `step` verifies.

        A checkpoint that verified once is not read again while its files keep their inodes, sizes and times.

        settled: read it again also if its files were so new at that time that a change may not show in their times.
        """
        return not self._problems(step, settled)

    def is_verified(self, step: int) -> bool:
        """Whether the checkpoint of `step` has verified, and a change since then would show. Reads no file."""
        earlier = self._verified.get(step)
        return earlier is not None and earlier.settled and earlier.files == self._files(step)

    def _problems(self, step: int, settled: bool) -> list[Problem]:
        earlier = self._verified.get(step)
        if earlier is None or earlier.files != self._files(step):
            return self.verify(step)
        if settled and not earlier.settled:
            return self.verify(step)
        return []

    def _files(self, step: int) -> _Files:
        """What the files of the checkpoint of `step` look like; empty if the folder cannot be listed."""
        return _look(self.path(step))

    def file_names(self, step: int) -> list[str]:
        """The files in the manifest of `step`, in the order in which ranks share them. Raises CheckpointError."""
        return sorted(self._manifest(step)["files"])

    def manifest_sha256(self, step: int) -> str:
        """The hash in the manifest of `step`, which stands for every byte of the checkpoint. Raises CheckpointError."""
        return str(self._manifest(step)["sha256"])

    def _manifest(self, step: int) -> dict[str, Any]:
        try:
            return read_manifest(self.path(step))
        except (OSError, ValueError) as error:
            raise failed("the manifest cannot be read", self.path(step), error) from error

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics in the manifest of `step`; empty if it cannot be read. The other files are not verified."""
        try:
            return dict(read_manifest(self.path(step))["metrics"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def load(
        self,
        step: int,
        parts: Container[str] | None = None,
        rows: ShardedRows | None = None,
        *,
        verified: bool = False,
    ) -> tuple[Tensors, Meta]:
        """Tensors by part and name, on the CPU, and the meta data of the checkpoint of `step`.

        It is verified first (see `is_whole`). Raises CheckpointError with every problem. A part that had no tensors
        when it was saved is not among the tensors. By how many ranks it was written makes no difference.

        parts: the parts whose tensors are read; None: all.
        rows: of these tensors only these rows are read; None: all tensors are read whole.
        verified: ranks have verified it together just now.
        """
        folder = self.path(step)
        if not verified and (problems := self._problems(step, settled=True)):
            raise CheckpointError(problems)

        try:
            files, shards = read_manifest(folder)["files"], read_shards(folder)
            tensors = read_tensors(folder, files, shards, parts, rows or {})
            meta: Meta = read_json(folder / STATE, MAX_LARGE)
        except (OSError, SafetensorError, ValueError, TypeError, RuntimeError) as error:
            raise failed("the checkpoint cannot be loaded", folder, error) from error
        meta.pop(SHARDS, None)
        return tensors, meta

    def take_over(self, step: int, source: Store) -> None:
        """Copy the checkpoint of `step` from `source`, file by file, and commit it. Raises CheckpointError as `save`.

        However many ranks wrote it, one process copies it without its tensors being in memory.
        """
        self._check_writer()
        final = self.path(step)
        problems = self.verify(step) if os.path.lexists(final) else []
        if final.exists() and not problems:
            return
        folder = self.root / f"{_TMP}{final.name}"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            # The manifest comes last: a copy that was interrupted has none, and counts as no checkpoint.
            files = [*read_manifest(source.path(step))["files"], MANIFEST]
            for name in files:
                shutil.copyfile(source.path(step) / name, folder / name)
                _sync(folder / name)
            # What was copied is checked before it replaces anything.
            if wrong := check_folder(folder, step):
                raise CheckpointError(wrong)
            sync_folder(folder)
            if problems:
                self._quarantine(step, problems)
            folder.rename(final)
            sync_folder(self.root)
        except (OSError, ValueError) as error:
            deleted = self._recreate_deleted_root()
            raise failed("the checkpoint was not written", final, deleted or error) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def newest_valid(self) -> int | None:
        """Step of the newest checkpoint that verifies; None if the folder holds no checkpoint.

        Newer ones that do not verify go into `damaged`. They stay in place until the run goes on without them
        (`set_aside`). Raises CheckpointError if there are checkpoints and none verifies: a run must not start over, and
        lose its progress, without being asked to.
        """
        damaged: dict[int, list[Problem]] = {}
        for step in reversed(self.steps()):
            problems = self.verify(step)
            if not problems:
                self.damaged = damaged
                return step
            damaged[step] = problems
        if damaged:
            raise self.nothing_valid(damaged)
        return None

    def nothing_valid(self, damaged: Mapping[int, list[Problem]]) -> CheckpointError:
        """The error of a run all of whose checkpoints are `damaged`."""
        what = "not one of its checkpoints is whole, so there is nothing to go on from"
        fix = "restore one from a copy of this run, or start a new run with another --name"
        everything = [Problem(what, str(self.root), fix=fix)]
        for problems in damaged.values():
            everything += problems
        return CheckpointError(everything)

    def set_aside(self) -> None:
        """Rename the checkpoints in `damaged` to `quarantine-*`. Raises CheckpointError."""
        for step in [*self.damaged]:
            self._check_writer()
            try:
                self._quarantine(step, self.damaged[step])
            except OSError as error:
                what = "a damaged checkpoint cannot be moved aside"
                raise failed(what, self.path(step), error) from error
            del self.damaged[step]

    def discard_after(self, step: int) -> None:
        """Rename checkpoints newer than `step` to `rolledback-*`, and remove their good marks. Raises CheckpointError.

        A kill may leave it half done. incidents.json still holds `return_to` then, and the next start calls this again
        (`recovery.finish_rollback`). A second call renames only what is left.
        """
        self._check_writer()
        try:
            # Marks go first: a mark without its checkpoint is harmless, a new checkpoint under an old mark is not.
            manifest.forget_after(self.root, step)
            for newer in self.steps():
                if newer > step:
                    self._rename_aside(newer, "rolledback")
            sync_folder(self.root)
        except OSError as error:
            what = f"the checkpoints after step {step} cannot be set aside"
            raise failed(what, self.root, self._recreate_deleted_root() or error) from error

    def remove(self, step: int) -> None:
        """Delete the checkpoint of `step`. Raises CheckpointError.

        It is renamed first: after a kill no half-deleted folder has the name of a checkpoint.
        """
        self._check_writer()
        trash = self.root / f"{_TMP}trash-{self.path(step).name}"
        try:
            self.path(step).rename(trash)
            self._verified.pop(step, None)
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
        """Write and sync all files: the protocol up to the rename."""
        # What cannot be written is refused before the first file is made.
        state = _state_bytes(meta)
        contents = {part_file(part): _plain(named) for part, named in tensors.items() if named}

        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        _write_synced(folder / STATE, state)
        _write_tensors(folder, contents, stat.S_IMODE((folder / STATE).stat().st_mode))

        # The hashes are of what the files hold now, read back.
        files = {name: file_entry(folder / name) for name in (*contents, STATE)}
        _write_synced(folder / MANIFEST, self._manifest_bytes(step, files, metrics))
        sync_folder(folder)

    def _not_written(self, final: Path, error: Exception) -> CheckpointError:
        """The error of a save that failed because of `error`."""
        if not is_of_the_disk(error):
            return cannot_save(final, error)
        cause = self._recreate_deleted_root() or error
        return failed("the checkpoint was not written", final, cause)

    def _recreate_deleted_root(self) -> OSError | None:
        """Make `root` again if somebody deleted it, and return an error that says so; None if it was not deleted.

        A failed write would look like a full disk otherwise, and the run would wait for room for ever.
        """
        try:
            self.root.mkdir()
            sync_folder(self.root.parent)
        except OSError:  # it exists, or the run's folder is gone too
            return None
        why = "the folder was deleted, with every checkpoint in it; it is made again for the next save"
        return FileNotFoundError(errno.ENOENT, why)

    def _check_writer(self) -> None:
        if self._readonly:
            what = "this store was opened to read"
            raise MisuseError(Problem(what, str(self.root), fix="open it on rank 0, to write"))

    def _quarantine(self, step: int, problems: list[Problem]) -> None:
        self._rename_aside(step, "quarantine")
        sync_folder(self.root)
        self.quarantined += problems

    def _rename_aside(self, step: int, prefix: str) -> None:
        """Rename the checkpoint of `step` to the first free `<prefix>-step-N-<number>`."""
        source = self.path(step)
        number = 1
        while os.path.lexists(target := self.root / f"{prefix}-{source.name}-{number}"):
            number += 1
        source.rename(target)


def _look(folder: Path) -> _Files:
    """What the files in `folder` look like, by name; empty if it cannot be listed."""
    files: _Files = []
    try:
        for entry in os.scandir(folder):
            s = entry.stat(follow_symlinks=False)
            files.append((entry.name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))
    except OSError:
        return []
    return sorted(files)


def _state_bytes(meta: Mapping[str, Any], shards: Shards | None = None) -> bytes:
    """state.json. Raises ValueError or TypeError for what cannot be written, or not be read again."""
    if SHARDS in meta and shards is None:
        raise ValueError(f"the key {SHARDS!r} is for what several ranks write")
    state = dump_json(meta if shards is None else {**meta, SHARDS: shards.as_json()})
    if len(state) > MAX_LARGE:
        raise ValueError(
            f"state.json would have {len(state)} bytes; at most {MAX_LARGE} can be read again"
        )
    return state


def _own_pieces(
    tensors: Mapping[str, Mapping[str, Tensor]], rows: ShardedRows, meeting: Meeting
) -> dict[str, TensorDict]:
    """The pieces of this rank by file name, as safetensors takes them.

    Raises ValueError for a tensor that is not here, or of which other rows are here.
    """
    contents: dict[str, TensorDict] = {}
    for part, named in rows.items():
        if not named:
            continue
        piece: dict[str, Tensor] = {}
        for name, each in named.items():
            if name not in tensors.get(part, {}):
                raise ValueError(f"rank {meeting.rank} has no tensor {name!r} of {part}")
            piece[name] = tensors[part][name]
            shape = tuple(piece[name].shape)
            due = Rows.of_rank(each.shape, meeting.rank, meeting.ranks)
            if each != due or shape != due.local_shape:
                text = f"rank {meeting.rank} holds {list(shape)} of {name!r} of {part}"
                raise ValueError(
                    f"{text}, its rows {due.begin} to {due.end} are {list(due.local_shape)}"
                )
        contents[piece_file(part, meeting.rank, meeting.ranks)] = _plain(piece)
    return contents


def _leave_pieces(
    folder: Path,
    tensors: Mapping[str, Mapping[str, Tensor]],
    rows: ShardedRows,
    meeting: Meeting,
    written: list[str],
) -> None:
    """Write the pieces of a rank other than 0, and leave its entry. Raises OSError, SafetensorError, ValueError.

    written: gets the names of its files before they are written.
    """
    contents = _own_pieces(tensors, rows, meeting)
    written += contents
    _write_tensors(folder, contents, _file_mode(folder))
    files = {name: file_entry(folder / name) for name in contents}
    meeting.leave(folder, ENTRY, {"files": files, "layout": _layout(tensors, rows)})


def _leave_check(folder: Path, meeting: Meeting) -> None:
    """Read this rank's share of all files, and say that it is as the manifest has it.

    Raises CheckpointError and OSError.
    """
    manifest = _read_again(folder)
    if problems := check_files(folder, manifest["files"], meeting.rank, meeting.ranks):
        raise CheckpointError(problems)
    meeting.leave(folder, CHECKED, {"manifest": manifest["sha256"]})


def _read_again(folder: Path) -> dict[str, Any]:
    """The manifest that rank 0 has just written. Raises CheckpointError: a disk did not keep it."""
    try:
        return read_manifest(folder)
    except (OSError, ValueError) as error:
        raise failed("the manifest cannot be read", folder, error) from error


def _layout(tensors: Mapping[str, Mapping[str, Tensor]], rows: ShardedRows) -> str:
    """SHA-256 of names, dtypes and whole shapes of the sharded tensors: the same on ranks that hold the same ones."""
    layout: list[tuple[str, str, str, list[int]]] = []
    for part, named in rows.items():
        for name, each in named.items():
            layout.append((part, name, str(tensors[part][name].dtype), list(each.shape)))
    return hashlib.sha256(dump_json(sorted(layout))).hexdigest()


def _file_mode(folder: Path) -> int:
    """What the umask leaves of a file's permissions, as `folder` shows it."""
    return stat.S_IMODE(folder.stat().st_mode) & 0o666


def _write_tensors(folder: Path, contents: Mapping[str, TensorDict], mode: int) -> None:
    """Write and sync one file for each of `contents`.

    mode: safetensors ignores the umask and makes private files: other users could list the checkpoint, not load it.
    """
    for name, named in contents.items():
        save_file(named, folder / name)
        (folder / name).chmod(mode)
        _sync(folder / name)


def _plain(named: Mapping[str, Tensor]) -> TensorDict:
    """Tensors as safetensors takes them: on the CPU, contiguous, and no two in the same memory."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}

    # Tied weights share memory. In the order of their addresses, an overlap is with an earlier neighbour.
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
"""Checkpoints that must fit on the disk: the two that are always kept, and the one that is being written."""
# Free inodes that a checkpoint and the files of its run may need.
_FILES = 64
# Pieces and entries of one rank in one checkpoint.
_FILES_OF_A_RANK = 4
_PROBE = ".preflight"


def lacks_room(folder: Path, bytes_each: int, existing: int, ranks: int = 1) -> list[Problem]:
    """Why an existing `folder` has no room for the checkpoints of a run; empty if it has. Asked before any training.

    bytes_each: size of one checkpoint. `COPIES` of them must fit.
    existing: committed checkpoints that are there already. At least one more must fit.
    ranks: how many write each checkpoint together, in files of their own.
    """
    # Permissions and read-only disks show only when something is written.
    try:
        _write_probe(folder / _PROBE)
        disk = os.statvfs(folder)
    except OSError as error:
        fix = "start from a working folder that you may write to, or let runs be a link to such a folder"
        why = error.strerror or str(error)
        return [Problem("checkpoints cannot be written here", str(folder), why, fix)]

    # All limits are reported at once, so that one correction is enough.
    problems: list[Problem] = []
    count = max(COPIES - existing, 1)
    free = disk.f_bavail * disk.f_frsize
    if free < count * bytes_each:
        needed = f"{_size(count * bytes_each)} needed: {count} checkpoint(s) of {_size(bytes_each)}"
        why = "two that verify must stay while the next is written"
        fix = "free space, start from a folder on a larger disk, or train a smaller model"
        problems.append(Problem(f"{_size(free)} free, {needed}", str(folder), why, fix))
    files = _FILES
    if ranks > 1:
        files += count * ranks * _FILES_OF_A_RANK
    if disk.f_files and disk.f_favail < files:
        fix = "delete files on this disk, or start from a folder on another"
        what = f"the disk has room for {disk.f_favail} more files"
        problems.append(Problem(what, str(folder), fix=fix))
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = bytes_each // ranks
    if limit != resource.RLIM_INFINITY and limit < largest:
        why = f"a checkpoint's files may need up to {_size(largest)}"
        what = f"this process may write files of at most {_size(limit)}"
        problems.append(Problem(what, str(folder), why, fix="raise it: ulimit -f unlimited"))
    return problems


def _write_probe(path: Path) -> None:
    """Write one byte to `path`, fsync it and delete it. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        os.write(descriptor, b"\0")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        os.unlink(path)


def _size(count: int) -> str:
    """`count` bytes as people read them, such as "1.7 GB", in powers of ten."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
