"""How the ranks that write one checkpoint together find out about each other: through files, without a collective.

A save runs on a thread while training goes on, and training has the collectives. So the ranks meet in the temporary
folder of the save (`Store.save_piece` has the protocol). A rank that has done its part leaves a file there, which
rank 0 waits for:

- `entry-<rank>.json`: the rank has written its pieces; their sizes and SHA-256.
- `checked-<rank>.json`: the rank has read its share of the checkpoint again, and every byte is right.
- `failed-<rank>.json`: the rank cannot do its part, and why. Empty if its disk has no room for the reason.

Each is written under another name and renamed, so that it is there completely or not at all. Making an empty file needs
no room.

**Nobody waits for ever.** In each of the two rounds rank 0 does its own part, then waits `seconds` for the others, and
then fails naming those that left nothing. The others wait twice as long for rank 0, since its own part comes before its
wait. A rank that waits learns sooner in two ways that it need not: the folder is gone, so rank 0 has ended the save; or
its caller, whose ranks learned it in a collective, called `give_up`.

**No try gets files of another one.** Every try of every save has a folder of its own. Its name has the start of the
run, which is random, and the number of the try, which all ranks count alike. Only rank 0 makes the folder. A rank that
comes late finds it gone, and cannot bring it back.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.checkpoint.failures import CannotSaveError
from harness.core.errors import CheckpointError, Problem
from harness.core.files import dump_json, read_json

ENTRY, CHECKED = "entry", "checked"
"""The two rounds of a save: pieces written, shares read again."""
FAILED = "failed"
_LEFT = re.compile(rf"({ENTRY}|{CHECKED}|{FAILED})-(\d{{5,}})\.json")
# Seconds between two looks into the folder: at first, and at most. With 1,024 ranks a look costs milliseconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.5
# A rank's patience with rank 0, in waits of rank 0.
_PATIENCE = 2
_SLOW = (
    "if the disk is only slow: a higher engine.timeout_seconds, or a faster disk for the run folder"
)
# Ranks that one message names, and characters of a reason.
_NAMED = 8
_SHOWN = 400


@dataclass
class Writers:
    """The ranks that write the checkpoints of one run together, as one of them sees it.

    rank, ranks: of this process.
    start: of a file name; the same on every rank, and not that of another start of the run.
    seconds: how long rank 0 waits for the others in a round, after its own part. Less than the ranks' own timeout:
        rank 0 may wait for a save while the others wait for it in a collective.
    """

    rank: int
    ranks: int
    start: str
    seconds: float
    _tries: int = field(default=0, init=False)

    def next_try(self) -> Meeting:
        """The next try of a save. Every rank calls it for the same saves in the same order."""
        self._tries += 1
        return Meeting(self.rank, self.ranks, f"{self.start}-{self._tries}", self.seconds)


class Meeting:
    """One try of a save, as one of its ranks sees it.

    rank, ranks: of this process.
    name: of the try; the same on every rank.
    seconds: as for `Writers`.
    """

    def __init__(self, rank: int, ranks: int, name: str, seconds: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self.name = name
        self._seconds = seconds
        self._given_up = threading.Event()
        self._why = ""

    def give_up(self, why: str) -> None:
        """Let this rank wait no longer. Any thread may call it. why: for the error of the wait."""
        if not self._given_up.is_set():
            self._why = why
            self._given_up.set()

    # What rank 0 does.

    def gather(self, folder: Path, kind: str) -> dict[int, dict[str, Any]]:
        """What the other ranks left in this round, by rank. Waits for all of them.

        Raises CheckpointError naming the ranks that left an error, or nothing in time.
        """
        until = time.monotonic() + self._seconds
        found: dict[int, dict[str, Any]] = {}
        pause = _FIRST_PAUSE
        while True:
            # What is there counts before the time and before a call of `give_up`: it may say more.
            given_up = self._given_up.is_set()
            late = time.monotonic() > until
            self._look(folder, kind, found)
            waits = sorted(set(range(1, self.ranks)) - found.keys())
            if not waits:
                return found
            if given_up:
                raise CheckpointError(Problem(self._why, str(folder)))
            if late:
                what = f"{_ranks(waits)} left nothing within {self._seconds:g} s"
                why = "lost, hanging, or not in the same folder; every rank's log names one that hangs"
                raise CheckpointError(Problem(what, str(folder), why, _SLOW))
            self._given_up.wait(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def _look(self, folder: Path, kind: str, found: dict[int, dict[str, Any]]) -> None:
        """Add what has been left since the last look to `found`.

        Raises CheckpointError if a rank has failed; CannotSaveError if it was not because of its disk.
        """
        failures: list[Problem] = []
        by_disk = True
        # Listing the folder makes NFS ask its server; a question for one name may be answered from a cache.
        for name in sorted(os.listdir(folder)):
            match = _LEFT.fullmatch(name)
            if match is None:
                continue
            rank, failed = int(match[2]), match[1] == FAILED
            wanted = match[1] == kind and rank not in found and 0 < rank < self.ranks
            if not failed and not wanted:
                continue
            try:
                content = read_json(folder / name)
            except OSError:  # not there yet for this machine: the next look finds it
                continue
            except ValueError:  # an empty file, or one that a broken disk has spoilt
                content = {}
            if not isinstance(content, dict):
                content = {}
            if failed:
                why = str(content.get("why", "it had no room to say why"))
                what = f"rank {rank} could not write its part: {why[:_SHOWN]}"
                failures.append(
                    Problem(what, str(folder), fix=str(content.get("fix", ""))[:_SHOWN])
                )
                by_disk = by_disk and content.get("by_disk") is not False
            else:
                found[rank] = content
        if failures and by_disk:
            raise CheckpointError(failures[:_NAMED])
        if failures:
            raise CannotSaveError(failures[:_NAMED])

    def clear(self, folder: Path, *kinds: str) -> None:
        """Remove what ranks left of these kinds. Raises OSError.

        After the first round FAILED stays: a rank may have failed since the last look. After the last round it goes,
        since that rank has done its part before it failed.
        """
        for name in os.listdir(folder):
            match = _LEFT.fullmatch(name)
            if match is not None and match[1] in kinds:
                (folder / name).unlink()

    # What the other ranks do.

    def await_folder(self, folder: Path) -> None:
        """Wait until rank 0 has made `folder`. Raises CheckpointError."""
        self._await(lambda: _is_there(folder.parent, folder.name), "began no save")

    def await_file(self, folder: Path, name: str) -> None:
        """Wait until rank 0 has written the file `name` in `folder`. Raises CheckpointError, if need be sooner."""
        self._await(lambda: _is_there(folder, name), f"wrote no {name}")

    def _await(self, there: Callable[[], bool], lacking: str) -> None:
        patience = _PATIENCE * self._seconds
        until = time.monotonic() + patience
        pause = _FIRST_PAUSE
        while not there():
            if self._given_up.is_set():
                raise CheckpointError(Problem(self._why, f"rank {self.rank}"))
            if time.monotonic() > until:
                what = f"rank 0 {lacking} within {patience:g} s"
                raise CheckpointError(Problem(what, f"rank {self.rank}", fix=_SLOW))
            self._given_up.wait(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def leave(self, folder: Path, kind: str, content: Mapping[str, Any]) -> None:
        """Say that this rank has done its part of a round. Raises OSError."""
        path = folder / f"{kind}-{self.rank:05d}.json"
        temporary = path.with_suffix(".tmp")
        with temporary.open("xb") as stream:
            stream.write(dump_json(content))
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(path)

    def leave_failure(self, folder: Path, written: Iterable[str], error: BaseException) -> None:
        """Say that this rank cannot do its part, as far as its disk lets it. Raises no OSError.

        written: its files, which are removed first: that may make the room that the reason needs.
        error: a CannotSaveError where the disk is not the reason.
        """
        for name in written:
            with suppress(OSError):
                (folder / name).unlink(missing_ok=True)
        try:
            content: dict[str, Any] = {"why": _reason(error)}
            if isinstance(error, CannotSaveError):
                content |= {"by_disk": False, "fix": error.problems[0].fix}
            self.leave(folder, FAILED, content)
        except OSError:
            with suppress(OSError):
                (folder / f"{FAILED}-{self.rank:05d}.json").open("xb").close()


def _is_there(folder: Path, name: str) -> bool:
    """Whether `name` is in `folder`. Raises CheckpointError if the folder itself is gone.

    The folder is opened first: that makes NFS ask its server whether it has changed.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        what = "is gone: rank 0 has ended this save, or somebody deleted it"
        raise CheckpointError(Problem(what, str(folder), error.strerror or "")) from error
    try:
        os.stat(name, dir_fd=descriptor)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _reason(error: BaseException) -> str:
    """Why a rank failed, in a few words."""
    if isinstance(error, CannotSaveError):
        return error.problems[0].why[:_SHOWN]
    if isinstance(error, CheckpointError):
        first = error.problems[0]
        return f"{first.where}: {first.what}; {first.why}".rstrip("; ")[:_SHOWN]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"[:_SHOWN]


def _ranks(ranks: Sequence[int]) -> str:
    """The ranks by number, such as "ranks 1, 5 and 9 more"."""
    named = ", ".join(map(str, ranks[:_NAMED]))
    if len(ranks) > _NAMED:
        named += f" and {len(ranks) - _NAMED} more"
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
