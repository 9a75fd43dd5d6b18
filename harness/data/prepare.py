"""Text into files of token ids, once for many runs: in parallel, in bounded memory, restartable after any kill.

1. `_plan` lists the parts of the source and groups them into tasks: prepare.json.
2. Each task makes one training and one validation shard (Megatron's `.bin` and `.idx`), the counts of ids, and last its
   marker `done-<task>.json`. One process reads and writes; tokenizing is shared among workers (`encoding`).
3. `_finish` joins the markers into dataset.json: what a run needs to know, with the hash of every block.

What a task makes depends only on the source, the tokenizer and the share held out. So the same command goes on with the
tasks that are not done after a kill, and the result has the bytes of one that was not killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.config import Documents
from harness.core.errors import DataError, MachineError, Problem, some
from harness.core.files import MAX_LARGE, read_json, read_mapping, write_json
from harness.data.blocks import BLOCK, Stamp
from harness.data.corpus import add_counts, entropy
from harness.data.documents import Files, Part, Piece, is_skipped
from harness.data.encoding import Batch, Encoded, Encoding
from harness.data.hub import PREFIX, Fetched
from harness.data.rows import FORMATS, open_source
from harness.data.shards import ShardWriter, smallest_dtype
from harness.data.source import record_of_files
from harness.data.text import BadFiles
from harness.data.tokenizer import load_encoder, tokenizer_file

FORMAT = 1
PREPARED = "dataset.json"
"""Describes a prepared folder; nothing else writes a file of that name with a vocabulary in it."""
TASK_BYTES = 16 << 20
"""Least bytes of a task's source."""

_MOST_TASKS = 128
_INLINE = 4 << 20  # bytes up to which starting workers takes longer than tokenizing
_BATCH_BYTES, _BATCH_PIECES = 1 << 20, 1024
_PLAN = "prepare.json"
_NAMED, _CHANGED_NAMED = 20, 5


@dataclass(frozen=True, slots=True)
class Preparation:
    """What is to be made.

    source: as a run's data.path.
    kind: its format.
    key: column of rows that has the text.
    bad: what to do about rows without text, and files that are none.
    tokenizer: as data.tokenizer; None: bytes.
    val_fraction: share of the documents held out where the source has no validation files.
    hub: what was fetched from the hub, if `source` is its folder.
    """

    source: str
    kind: Documents
    key: str = "text"
    bad: BadFiles = "auto"
    tokenizer: str | None = None
    val_fraction: float = 0.01
    hub: Fetched | None = None


@dataclass(slots=True)
class Progress:
    """How far a preparation is.

    total, done: bytes of the source, about.
    tasks, finished: tasks in all, and those that are done.
    kept: tasks that an earlier try had done.
    """

    total: int
    tasks: int
    done: int = 0
    finished: int = 0
    kept: int = 0


def prepare_dataset(
    wanted: Preparation,
    out: Path,
    processes: int = 0,
    tell: Callable[[Progress], None] = lambda progress: None,
    most: int | None = None,
    anew: bool = False,
) -> dict[str, Any]:
    """Make `out`. Returns the contents of its dataset.json.

    processes: number of workers; 0: one for each core.
    tell: is called with the progress whenever it changes.
    most: bytes of the source that are allowed; None: any number.
    anew: whether to delete what `out` holds if it is something else.

    Raises DataError for a source that cannot be used, naming every problem of it, or if `out` holds something else;
    ConfigError for a tokenizer that cannot be read; MachineError if a worker dies; OSError.
    """
    plan = _plan(wanted)
    if most is not None and sum(_size(task) for task in plan["tasks"]) > most:
        raise too_large(
            wanted.hub.name if wanted.hub else wanted.source, wanted.kind, most, wanted.tokenizer
        )
    if anew and out.exists() and read_mapping(out / _PLAN, MAX_LARGE) != plan:
        shutil.rmtree(out)
    with _alone(out):
        if made := _begin(out, plan):
            return made
        _run_tasks(out, plan, processes, tell)
        return _finish(out, plan)


def too_large(source: str, kind: str, most: int, tokenizer: str | None) -> DataError:
    """The error for a source that is too large to be prepared at the start of a run."""
    name, _, commit = source.partition("@") if source.startswith(PREFIX) else (source, "", "")
    options = f" --revision {commit}" if commit else ""
    options += f" --tokenizer {tokenizer}" if tokenizer else ""
    fix = f"once, for all runs: harness data prepare {name}{options} --out DIR; then data.path=DIR"
    return DataError(Problem(f"has over {most} bytes of {kind}", f"data.path: {source}", fix=fix))


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Raises DataError if another process is making `out`."""
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_NB | fcntl.LOCK_EX)
        except BlockingIOError as error:
            raise DataError(
                Problem("is being made by another process", f"--out {out}", fix="wait for it")
            ) from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


def _plan(wanted: Preparation) -> dict[str, Any]:
    """What prepare.json says: everything that the result depends on, as JSON has it."""
    hub = wanted.hub
    path = Path(wanted.source).expanduser().resolve()
    source = open_source(wanted.kind, hub.options if hub else None)
    encoder = load_encoder(wanted.tokenizer)
    files: Files | None = None
    if hub:
        files = [(Path(file), split) for file, split in hub.files], list(hub.left_out)
    listed = source.parts(path, wanted.key, wanted.bad, files)

    # A task is as many parts as have TASK_BYTES, or more where there would be too many tasks.
    least = max(TASK_BYTES, -(-sum(part.size for part in listed.parts) // _MOST_TASKS))
    tasks: list[list[Any]] = [[]]
    size = 0
    for part in listed.parts:
        if size >= least:
            tasks.append([])
            size = 0
        tasks[-1].append(astuple(part))
        size += part.size

    paths = sorted({part.path for part in listed.parts})
    plan = {
        "format": FORMAT,
        **asdict(replace(wanted, source=str(path))),
        "tokenizer": str(tokenizer_file(Path(wanted.tokenizer)).resolve())
        if wanted.tokenizer
        else None,
        "vocabulary": asdict(encoder.vocabulary),
        "files": [(each, *astuple(Stamp.of(Path(each)))) for each in paths],
        "left_out": listed.left_out,
        "tasks": tasks,
    }
    return json.loads(json.dumps(plan))  # lists for tuples, so that it equals a plan that was read


def _size(task: Sequence[Sequence[Any]]) -> int:
    """Bytes of a task's source, about."""
    return sum(Part(*part).size for part in task)


def _begin(out: Path, plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """Make `out` ready; its dataset.json if it is made already. Raises DataError if it holds something else."""
    there = read_mapping(out / _PLAN, MAX_LARGE)
    if any(out.iterdir()) and there != plan:
        raise DataError(_something_else(out, there, plan))
    for left in out.glob(".*.tmp"):
        left.unlink(missing_ok=True)
    made = read_mapping(out / PREPARED, MAX_LARGE)
    if made and there:
        return made

    write_json(out / _PLAN, plan)
    if plan["tokenizer"]:
        tokenizer = Path(plan["tokenizer"])
        shutil.copyfile(tokenizer, out / "tokenizer.json")
        beside = tokenizer.with_name("tokenizer_config.json")
        if beside.is_file():
            shutil.copyfile(beside, out / beside.name)
    return None


def _something_else(out: Path, there: Mapping[str, Any], plan: Mapping[str, Any]) -> Problem:
    """What to say of a folder that is not empty, and was not made by this plan."""
    why = "it is not empty"
    if there:
        changed = sorted(key for key in plan if there.get(key) != plan[key])
        why = f"of an earlier preparation, with another {', '.join(changed)}"
        if "files" in changed and (files := _changed_files(there, plan)):
            why = f"of an earlier preparation, since when these have changed: {some(files, _CHANGED_NAMED)}"
    return Problem(
        "holds something else", f"--out {out}", why, "give an empty folder, or delete this one"
    )


def _changed_files(there: Mapping[str, Any], plan: Mapping[str, Any]) -> list[str]:
    """Names of files that are new, gone or touched since the plan `there` was made."""
    before = {tuple(entry) for entry in there.get("files", ())}
    now = {tuple(entry) for entry in plan["files"]}
    return sorted({Path(str(path)).name for path, *_ in before ^ now})


def _run_tasks(
    out: Path, plan: Mapping[str, Any], processes: int, tell: Callable[[Progress], None]
) -> None:
    """Make the shards of all tasks that are not done."""
    tasks = plan["tasks"]
    todo = [number for number in range(len(tasks)) if not _is_done(out, number)]
    left = sum(_size(tasks[number]) for number in todo)
    total = sum(_size(task) for task in tasks)
    kept = len(tasks) - len(todo)
    progress = Progress(total, len(tasks), total - left, kept, kept)
    tell(progress)

    if processes == 0:
        processes = len(os.sched_getaffinity(0))
    if not plan["tokenizer"] or left <= _INLINE:
        processes = 1
    try:
        with Encoding(plan["tokenizer"], processes) as encoding:
            for number in todo:
                end = progress.done + _size(tasks[number])
                with contextlib.closing(_Task(out, plan, number).run(encoding)) as counts:
                    for count in counts:
                        progress.done += count
                        tell(progress)
                progress.done = end  # a source has more bytes than its texts
                progress.finished += 1
                tell(progress)
    except BrokenProcessPool as error:
        why = "perhaps the memory did not suffice: --processes takes fewer"
        raise MachineError(
            Problem("a worker died", str(out), why, "the same command goes on")
        ) from error


def _marker(out: Path, task: int) -> Path:
    return out / f"done-{task:05d}.json"


def _counts(out: Path, task: int) -> Path:
    return out / f"counts-{task:05d}.npy"


def _is_done(out: Path, task: int) -> bool:
    """Whether a task's marker and shards are there, whole. Its shards were written before the marker was."""
    try:
        made = read_json(_marker(out, task), MAX_LARGE)
        return all(
            (out / shard["name"]).stat().st_size == shard["bytes"] for shard in made["shards"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


@dataclass(slots=True)
class _Task:
    """One task of a plan: what it has made, skipped and found wrong so far.

    inside: whether the piece that came last did not end its document.
    """

    out: Path
    plan: Mapping[str, Any]
    number: int
    skipped: Counter[str] = field(default_factory=Counter[str])
    problems: list[Problem] = field(default_factory=list[Problem])
    inside: bool = False

    def run(self, encoding: Encoding) -> Generator[int, None, None]:
        """Make the shards and the marker; the bytes of text that were read, batch by batch.

        Raises DataError with what is wrong with the documents; OSError, BrokenProcessPool. No shard is left then.
        """
        vocabulary = encoding.encoder.vocabulary
        dtype = smallest_dtype(vocabulary.ids)
        names = {split: self.out / f"{split}-{self.number:05d}.bin" for split in ("train", "val")}
        shards = {split: ShardWriter(path, dtype, split) for split, path in names.items()}
        end = np.array(
            [] if vocabulary.separator is None else [vocabulary.separator], dtype=np.int64
        )
        counts = np.zeros(0, dtype=np.int64)
        text_bytes = 0
        last = ""
        try:
            for batch, encoded in encoding.encode(self._batches()):
                text_bytes += batch.size
                made: list[npt.NDArray[np.int64]] = []
                for (piece, split), found in zip(batch.pieces, encoded, strict=True):
                    ids = self._usable(piece, found)
                    if ids is None:
                        continue
                    if last and last != split:
                        shards[last].end_document()
                    last = split
                    if piece.ends:
                        ids = np.concatenate([ids, end])
                    shards[split].add(ids)
                    made.append(ids)
                    if piece.ends:
                        shards[split].end_document()
                if made:
                    counts = add_counts(counts, np.bincount(np.concatenate(made)))
                yield batch.size
                if len(self.problems) >= _NAMED:
                    break
            if self.problems:
                raise DataError(self.problems[:_NAMED])
        except BaseException:
            for shard in shards.values():
                shard.abandon()
            raise

        written = [shard.commit() for shard in shards.values()]
        with _counts(self.out, self.number).open("wb") as stream:
            np.save(stream, counts)
        marker = {
            "shards": [shard for shard in written if shard],
            "skipped": dict(self.skipped),
            "text_bytes": text_bytes,
        }
        write_json(_marker(self.out, self.number), marker)

    def _batches(self) -> Iterator[Batch]:
        """The task's pieces with their splits, some at a time."""
        hub = self.plan["hub"]
        source = open_source(self.plan["kind"], hub["options"] if hub else None)
        pieces: list[tuple[Piece, str]] = []
        size = number = 0
        for given in self.plan["tasks"][self.number]:
            part = Part(*given)
            for piece in source.read(part, self.plan["key"]):
                if piece.fault:
                    self._reject(piece)
                    if len(self.problems) >= _NAMED:
                        break
                    continue
                pieces.append(
                    (piece, part.split or _split(self.number, number, self.plan["val_fraction"]))
                )
                number += 1
                size += len(piece.text if isinstance(piece.text, bytes) else piece.text.encode())
                if size >= _BATCH_BYTES or len(pieces) >= _BATCH_PIECES:
                    yield Batch(pieces, size)
                    pieces, size = [], 0
        if pieces:
            yield Batch(pieces, size)

    def _reject(self, piece: Piece) -> None:
        """Count a piece that is skipped, or note the problem."""
        if is_skipped(piece.fault, self.plan["bad"]):
            self.skipped[piece.fault] += 1
        else:
            fix = "repair it, or pass over such rows and files: data.bad=skip (--bad skip)"
            self.problems.append(Problem(piece.fault, f"data.path: {piece.where}", fix=fix))

    def _usable(self, piece: Piece, found: Encoded) -> npt.NDArray[np.int64] | None:
        """Ids of a piece; None for one on which the tokenizer fails, which is counted or noted as a bad row is."""
        inside, self.inside = self.inside, not piece.ends
        if not isinstance(found, Problem):
            return found
        what = f"{found.where} {found.what}"
        if self.plan["bad"] == "skip":
            self.skipped[what] += 1
        else:
            fix = f"{found.fix}; or pass over such rows: data.bad=skip (--bad skip)"
            self.problems.append(Problem(what, f"data.path: {piece.where}", found.why, fix))
        # The earlier pieces of the document still need its end.
        return np.zeros(0, dtype=np.int64) if inside and piece.ends else None


def _split(task: int, number: int, share: float) -> str:
    """The split of a task's piece `number`: one of every 1/share is validation, the first of a task never.

    Which one of them is decided by a hash, so that it does not coincide with a pattern of the data.
    """
    every = max(2, round(1 / share)) if share else 0
    if not every:
        return "train"
    stratum, place = divmod(number, every)
    chosen = int.from_bytes(hashlib.sha256(f"{task}/{stratum}".encode()).digest()[:8], "little") % (
        every - 1
    )
    return "val" if place == 1 + chosen else "train"


def _finish(out: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Write dataset.json from what the tasks left, and take their markers away."""
    made = [read_json(_marker(out, task), MAX_LARGE) for task in range(len(plan["tasks"]))]
    shards: list[dict[str, Any]] = []
    skipped: Counter[str] = Counter()
    counts = np.zeros(0, dtype=np.int64)
    for task, each in enumerate(made):
        shards += each["shards"]
        skipped.update(each["skipped"])
        counts = add_counts(counts, np.load(_counts(out, task)))
    if not any(shard["split"] == "train" for shard in shards):
        why = (
            "; ".join(f"{count} x {reason}" for reason, count in skipped.items())
            or "it has no rows"
        )
        raise DataError(Problem("has nothing to train on", f"data.path: {plan['source']}", why))

    origin = _record(out, plan)
    left_out = [{"name": name, "reason": reason} for name, reason in plan["left_out"]]
    left_out += [
        {"name": f"{count} rows", "reason": reason} for reason, count in sorted(skipped.items())
    ]
    for shard in shards:
        stamp = Stamp.of(out / shard["name"])
        shard |= {"mtime_ns": stamp.mtime_ns, "inode": stamp.inode}
    hashes = [[shard["name"], shard["blocks"], shard["index_sha256"]] for shard in shards]
    info: dict[str, Any] = {
        "format": FORMAT,
        "source": plan["hub"]["name"] if plan["hub"] else plan["source"],
        "kind": plan["kind"],
        "vocabulary": plan["vocabulary"],
        "dtype": smallest_dtype(plan["vocabulary"]["ids"]),
        "source_files": len(plan["files"]),
        "block_bytes": BLOCK,
        "text_bytes": sum(each["text_bytes"] for each in made),
        "documents": sum(shard["documents"] for shard in shards),
        "unigram_nats": entropy(counts),
        "skipped": left_out,
        "origin": origin,
        "shards": shards,
        "sha256": hashlib.sha256(json.dumps(hashes).encode()).hexdigest(),
    }
    write_json(out / PREPARED, info)
    for task in range(len(made)):
        _marker(out, task).unlink(missing_ok=True)
        _counts(out, task).unlink(missing_ok=True)
    return info


def _record(out: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """The record of the source, once all of it was read. Raises DataError if a file changed meanwhile."""
    files = {Path(path): Stamp(*stamp) for path, *stamp in plan["files"]}
    suffixes = None if plan["kind"] == "text" else FORMATS[plan["kind"]].suffixes
    tokenizer = (plan["tokenizer"], plan["vocabulary"]["tokenizer"]) if plan["tokenizer"] else None
    # save_to_disk and the hub name their files: others in the folder do not belong to the source.
    listed = plan["kind"] != "Arrow" and not plan["hub"]
    made = record_of_files(Path(plan["source"]), suffixes, listed, files, tokenizer)
    if changed := [path for path, stamp in files.items() if Stamp.of(path) != stamp]:
        fix = f"once nothing writes there any longer: delete {out}, and give the same command again"
        raise DataError(
            [
                Problem("changed while it was prepared", f"data.path: {path}", fix=fix)
                for path in changed
            ]
        )
    return made
