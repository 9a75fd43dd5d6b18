"""Text into files of token ids, once and for many runs: in parallel, in bounded memory, restartable after any kill.

The source is cut into tasks, and every task makes one training and one validation shard of its own, in Megatron's
format (`.bin` and `.idx`), and at last `done-<task>.json`. What a task makes depends on the source, the tokenizer and
the share held out alone: a preparation that was killed goes on with the tasks that are not done, and ends with the
bytes of one that was not. `dataset.json`, written at the end, has what a run needs to know, with every block's hash.

One process reads and writes, in the order of the source; tokenizing, which takes the time, is shared among workers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, astuple, dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from harness.core.config import Documents
from harness.core.errors import DataError, MachineError, Problem, some
from harness.core.files import MAX_LARGE, read_json, read_mapping, write_json
from harness.data.blocks import BLOCK, Stamp
from harness.data.corpus import add_counts, entropy
from harness.data.documents import DocumentSource, Files, Part, Piece
from harness.data.hub import PREFIX, Fetched
from harness.data.registry import DOCUMENTS, PREPARED, ROWS
from harness.data.rows import skipped as passed_over
from harness.data.shards import ShardWriter, smallest_dtype
from harness.data.source import origin_of_files
from harness.data.text import BadFiles
from harness.data.tokenizer import Encoder, load_encoder, tokenizer_file

_T = TypeVar("_T")
Encoded = npt.NDArray[np.int64] | Problem
"""Ids of a text, int64 [tokens], or why the tokenizer fails on it."""
FORMAT = 1
TASK_BYTES = 16 << 20
"""Least bytes of a task's source."""
_TASKS = 128
_INLINE = 4 << 20
_BATCH_BYTES, _BATCH_PIECES = 1 << 20, 1024
_PLAN = "prepare.json"
_NAMED, _CHANGED = 20, 5
_AHEAD = 2  # batches of each worker that are read before its next result is taken


@dataclass(frozen=True, slots=True)
class Preparation:
    """What is to be made. source: as a run's data.path. kind: of DOCUMENTS. tokenizer: None for bytes. val_fraction:
    share of the documents held out where the source has no validation files. hub: what was fetched from the hub, of
    which `source` is the folder."""

    source: str
    kind: Documents
    key: str = "text"
    bad: BadFiles = "auto"
    tokenizer: str | None = None
    val_fraction: float = 0.01
    hub: Fetched | None = None


@dataclass(slots=True)
class Progress:
    """How far it is. total, done: bytes of the source, about. kept: tasks that an earlier try had done."""

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
    """Make `out`; the contents of its dataset.json.

    processes: 0: one for each core. most: bytes of the source that are taken. anew: delete what `out` holds if it is
    something else.

    Raises DataError for a source that cannot be used, naming every problem of it, or if `out` holds something else;
    ConfigError for a tokenizer that cannot be read; MachineError if a worker dies; OSError.
    """
    plan = _plan(wanted)
    tasks = plan["tasks"]
    if most is not None and sum(part[3] for task in tasks for part in task) > most:
        raise too_large(wanted.hub.name if wanted.hub else wanted.source, wanted.kind, most, wanted.tokenizer)
    if anew and out.exists() and read_mapping(out / _PLAN, MAX_LARGE) != _as_json(plan):
        shutil.rmtree(out)
    with _alone(out):
        return _begin(out, plan) or _make(out, plan, processes, tell)


def too_large(source: str, kind: str, most: int, tokenizer: str | None) -> DataError:
    """What to say of a source that a run does not make into token ids by itself."""
    name, _, commit = source.partition("@") if source.startswith(PREFIX) else (source, "", "")
    given = (f" --revision {commit}" if commit else "") + (f" --tokenizer {tokenizer}" if tokenizer else "")
    fix = f"once, for all runs: harness data prepare {name}{given} --out DIR; then data.path=DIR"
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
            raise DataError(Problem("is being made by another process", f"--out {out}", fix="wait for it")) from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


def _make(out: Path, plan: Mapping[str, Any], processes: int, tell: Callable[[Progress], None]) -> dict[str, Any]:
    tasks = plan["tasks"]
    sizes = [sum(part[3] for part in task) for task in tasks]
    progress = Progress(sum(sizes), len(tasks))
    todo = [number for number in range(len(tasks)) if not _is_done(out, number)]
    progress.kept = progress.finished = len(tasks) - len(todo)
    progress.done = sum(sizes) - sum(sizes[number] for number in todo)
    tell(progress)
    left = sum(sizes[number] for number in todo)
    many = plan["tokenizer"] and left > _INLINE
    problems: list[Problem] = []
    with _Encoding(plan["tokenizer"], (processes or len(os.sched_getaffinity(0))) if many else 1) as encoding:
        work = _Work(out, encoding)
        try:
            for number in todo:
                problems += work.run(number, lambda count: _advance(progress, count, tell))
                progress.finished += 1
                tell(progress)
                if problems:
                    raise DataError(problems[:_NAMED])
        except BrokenProcessPool as error:
            why = "perhaps the memory did not suffice: --processes takes fewer"
            raise MachineError(Problem("a worker died", str(out), why, "the same command goes on")) from error
    return _finish(out, plan)


def _advance(progress: Progress, count: int, tell: Callable[[Progress], None]) -> None:
    progress.done += count
    tell(progress)


def _plan(wanted: Preparation) -> dict[str, Any]:
    """What prepare.json says: everything that the result depends on."""
    source, hub = _source(wanted.kind, wanted.hub and wanted.hub.options), wanted.hub
    encoder = load_encoder(wanted.tokenizer)
    files: Files | None = ([(Path(path), split) for path, split in hub.files], [*hub.left_out]) if hub else None
    listed = source.parts(Path(wanted.source).expanduser().resolve(), wanted.key, wanted.bad, files)
    total = sum(part.size for part in listed.parts)
    least = max(TASK_BYTES, -(-total // _TASKS))
    tasks: list[list[Any]] = [[]]
    size = 0
    for part in listed.parts:
        if size >= least:
            tasks.append([])
            size = 0
        tasks[-1].append(list(astuple(part)))
        size += part.size
    wanted = replace(wanted, source=str(Path(wanted.source).expanduser().resolve()))
    paths = sorted({part.path for part in listed.parts})
    return {
        "format": FORMAT,
        **asdict(wanted),
        "tokenizer": str(tokenizer_file(Path(wanted.tokenizer)).resolve()) if wanted.tokenizer else None,
        "vocabulary": asdict(encoder.vocabulary),
        "files": [[path, *astuple(Stamp.of(Path(path)))] for path in paths],
        "left_out": [list(each) for each in listed.left_out],
        "tasks": tasks,
    }


def _source(kind: Documents, options: Mapping[str, Any] | None) -> DocumentSource:
    return ROWS[kind](options) if kind in ROWS else DOCUMENTS[kind]()


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _begin(out: Path, plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """Make `out` ready; its dataset.json if it is made already. Raises DataError if it holds something else."""
    there = read_mapping(out / _PLAN, MAX_LARGE)
    if out.is_dir() and any(out.iterdir()) and there != _as_json(plan):
        changed = sorted(key for key in plan if there.get(key) != _as_json(plan[key]))
        why = f"of an earlier preparation, with another {', '.join(changed)}" if there else "it is not empty"
        if there and "files" in changed and (files := _changed_files(there, plan)):
            why = f"of an earlier preparation, since when these have changed: {some(files, _CHANGED)}"
        raise DataError(
            Problem("holds something else", f"--out {out}", why, "give an empty folder, or delete this one")
        )
    out.mkdir(parents=True, exist_ok=True)
    for left in out.glob(".*.tmp"):
        left.unlink(missing_ok=True)
    done = read_mapping(out / PREPARED, MAX_LARGE)
    if done and there:
        return done
    write_json(out / _PLAN, plan)
    if plan["tokenizer"]:
        shutil.copyfile(plan["tokenizer"], out / "tokenizer.json")
        beside = Path(plan["tokenizer"]).with_name("tokenizer_config.json")
        if beside.is_file():
            shutil.copyfile(beside, out / "tokenizer_config.json")
    return None


def _changed_files(there: Mapping[str, Any], plan: Mapping[str, Any]) -> list[str]:
    """Names of files that are new, gone or touched since the plan of `there`."""
    before, now = ({str(each): each for each in files} for files in (there.get("files", ()), _as_json(plan["files"])))
    changed = before.keys() ^ now.keys()
    return sorted({Path(str(entry[0])).name for key, entry in (before | now).items() if key in changed})


def _marker(out: Path, task: int) -> Path:
    return out / f"done-{task:05d}.json"


def _is_done(out: Path, task: int) -> bool:
    """Whether a task's marker and shards are there, whole. Its shards were written before the marker was."""
    try:
        made = read_json(_marker(out, task), MAX_LARGE)
        return all((out / shard["name"]).stat().st_size == shard["bytes"] for shard in made["shards"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _finish(out: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Write dataset.json from what the tasks left, and take their markers away."""
    made = [read_json(_marker(out, task), MAX_LARGE) for task in range(len(plan["tasks"]))]
    shards: list[dict[str, Any]] = [shard for each in made for shard in each["shards"]]
    skipped: Counter[str] = Counter()
    counts = np.zeros(0, dtype=np.int64)
    for task, each in enumerate(made):
        skipped.update(each["skipped"])
        counts = add_counts(counts, np.load(_counts(out, task)))
    if not any(shard["split"] == "train" for shard in shards):
        why = "; ".join(f"{count} x {reason}" for reason, count in skipped.items()) or "it has no rows"
        raise DataError(Problem("has nothing to train on", f"data.path: {plan['source']}", why))
    origin = _origin(out, plan)
    left_out = [{"name": name, "reason": reason} for name, reason in plan["left_out"]]
    left_out += [{"name": f"{count} rows", "reason": reason} for reason, count in sorted(skipped.items())]
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
        "shards": [{**shard, **_stamped(out / shard["name"])} for shard in shards],
    }
    hashes = [[shard["name"], shard["blocks"], shard["index_sha256"]] for shard in shards]
    info["sha256"] = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
    write_json(out / PREPARED, info)
    for task in range(len(made)):
        _marker(out, task).unlink(missing_ok=True)
        _counts(out, task).unlink(missing_ok=True)
    return info


def _origin(out: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """What the source is, once all of it was read. Raises DataError if a file is not what it was before that."""
    files = {Path(path): Stamp(*stamp) for path, *stamp in plan["files"]}
    source, tokenizer = DOCUMENTS[plan["kind"]], plan["tokenizer"]
    suffixes = None if plan["kind"] == "text" else source.suffixes
    known = [tokenizer, plan["vocabulary"]["tokenizer"]] if tokenizer else None
    whole = plan["kind"] != "Arrow" and not plan["hub"]
    made = origin_of_files(Path(plan["source"]), suffixes, whole, files, known)
    if changed := [path for path, stamp in files.items() if Stamp.of(path) != stamp]:
        fix = f"once nothing writes there any longer: delete {out}, and give the same command again"
        raise DataError([Problem("changed while it was prepared", f"data.path: {path}", fix=fix) for path in changed])
    return made


def _stamped(path: Path) -> dict[str, int]:
    stamp = Stamp.of(path)
    return {"mtime_ns": stamp.mtime_ns, "inode": stamp.inode}


def _counts(out: Path, task: int) -> Path:
    return out / f"counts-{task:05d}.npy"


def _encode(encoder: Encoder, texts: Sequence[str | bytes]) -> list[Encoded]:
    """Ids of each text; the tokenizer's problem with one on which it fails."""
    try:
        return [*encoder.encode(texts)]
    except DataError as error:
        if len(texts) == 1:
            return [error.problems[0]]
        return [_encode(encoder, [text])[0] for text in texts]


_worker: list[Encoder] = []
"""Of a worker's process: its own tokenizer."""


def _begin_work(tokenizer: str | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is its parent's
    _worker.append(load_encoder(tokenizer))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)  # else it would wait for work for ever


def _work(texts: Sequence[str | bytes]) -> list[Encoded]:
    return _encode(_worker[0], texts)


class _Encoding:
    """Makes ids of batches of pieces, in their order, in this process or in others."""

    def __init__(self, tokenizer: str | None, processes: int) -> None:
        self.encoder = load_encoder(tokenizer)
        self._ahead = _AHEAD * processes
        # Not forked: this process may have threads, and a GPU.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, context, _begin_work, (tokenizer,)) if processes > 1 else None

    def __enter__(self) -> _Encoding:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def of(self, batches: Iterator[_Batch]) -> Iterator[tuple[_Batch, list[Encoded]]]:
        """Each batch with what was made of its pieces. Raises BrokenProcessPool if a worker dies."""
        begun: deque[tuple[_Batch, Future[list[Encoded]]]] = deque()
        for batch in batches:
            texts = [piece.text for piece, _ in batch.pieces]
            if self._pool is None:
                yield batch, _encode(self.encoder, texts)
                continue
            begun.append((batch, self._pool.submit(_work, texts)))
            if len(begun) > self._ahead:
                first, made = begun.popleft()
                yield first, made.result()
        while begun:
            first, made = begun.popleft()
            yield first, made.result()


@dataclass(frozen=True, slots=True)
class _Batch:
    """Pieces with their splits, and the bytes of their texts."""

    pieces: list[tuple[Piece, str]]
    size: int


class _Work:
    """Runs tasks of a plan, one after the other."""

    def __init__(self, out: Path, encoding: _Encoding) -> None:
        self.out, self.encoding = out, encoding
        self._inside = False  # a document, at the end of the pieces that were encoded last
        self.plan: dict[str, Any] = read_json(out / _PLAN, MAX_LARGE)
        hub = self.plan["hub"]
        self.source = _source(self.plan["kind"], hub and hub["options"])

    def run(self, task: int, advance: Callable[[int], None]) -> list[Problem]:
        """Make a task's shards and its marker; what is wrong with its documents instead. advance: is told bytes.

        Raises OSError, DataError.
        """
        plan, vocabulary = self.plan, self.encoding.encoder.vocabulary
        self._inside = False
        dtype = smallest_dtype(vocabulary.ids)
        shards = {split: ShardWriter(self.out / f"{split}-{task:05d}.bin", dtype, split) for split in ("train", "val")}
        end = np.zeros(0, dtype=np.int64) if vocabulary.separator is None else np.array([vocabulary.separator])
        counts = np.zeros(0, dtype=np.int64)
        skipped: Counter[str] = Counter()
        problems: list[Problem] = []
        last = ""
        text_bytes = 0
        batches = self.encoding.of(self._batches(plan["tasks"][task], task, skipped, problems))
        for batch, encoded in self._or_abandon(shards, batches):
            made = self._usable([piece for piece, _ in batch.pieces], encoded, skipped, problems)
            text_bytes += batch.size
            flat: list[npt.NDArray[Any]] = []
            for (piece, split), ids in zip(batch.pieces, made, strict=True):
                if ids is None:
                    continue
                if last and last != split:
                    shards[last].end_document()
                last = split
                ids = np.concatenate([ids, end]) if piece.ends else ids
                shards[split].add(ids)
                flat.append(ids)
                if piece.ends:
                    shards[split].end_document()
            if flat:
                counts = add_counts(counts, np.bincount(np.concatenate(flat).astype(np.int64)))
            advance(batch.size)
            if len(problems) >= _NAMED:
                break
        if problems:
            for shard in shards.values():
                shard.abandon()
            return problems
        written = [shard.commit() for shard in shards.values()]
        with _counts(self.out, task).open("wb") as stream:
            np.save(stream, counts)
        made = {
            "shards": [each for each in written if each],
            "skipped": dict(skipped),
            "text_bytes": text_bytes,
        }
        write_json(_marker(self.out, task), made)
        advance(sum(part[3] for part in plan["tasks"][task]) - text_bytes)  # the source has more than its texts
        return []

    def _usable(
        self, pieces: Sequence[Piece], made: Sequence[Encoded], skipped: Counter[str], problems: list[Problem]
    ) -> list[npt.NDArray[np.int64] | None]:
        """Ids of each piece. None of one on which the tokenizer fails: it is counted, or named, as a bad row is."""
        usable: list[npt.NDArray[np.int64] | None] = []
        for piece, ids in zip(pieces, made, strict=True):
            if not isinstance(ids, Problem):
                usable.append(ids)
            else:
                what = f"{ids.where} {ids.what}"
                if self.plan["bad"] == "skip":
                    skipped[what] += 1
                else:
                    fix = f"{ids.fix}; or pass over such rows: data.bad=skip (--bad skip)"
                    problems.append(Problem(what, f"data.path: {piece.where}", ids.why, fix))
                # What is left of a document still needs its end.
                usable.append(np.zeros(0, dtype=np.int64) if self._inside and piece.ends else None)
            self._inside = not piece.ends
        return usable

    def _or_abandon(self, shards: Mapping[str, ShardWriter], batches: Iterator[_T]) -> Iterator[_T]:
        """`batches`; the shards are given up if the source cannot be read, a worker dies, or the task is left."""
        try:
            yield from batches
        except BaseException:
            for shard in shards.values():
                shard.abandon()
            raise

    def _batches(
        self, parts: Sequence[Sequence[Any]], task: int, skipped: Counter[str], problems: list[Problem]
    ) -> Iterator[_Batch]:
        """Pieces with their splits, some at a time."""
        batch: list[tuple[Piece, str]] = []
        size = number = 0
        for given in parts:
            part = Part(*given)
            for piece in self.source.read(part, self.plan["key"]):
                if piece.fault:
                    if passed_over(piece.fault, self.plan["bad"]):
                        skipped[piece.fault] += 1
                        continue
                    fix = "repair it, or pass over such rows and files: data.bad=skip (--bad skip)"
                    problems.append(Problem(piece.fault, f"data.path: {piece.where}", fix=fix))
                    if len(problems) >= _NAMED:
                        break
                    continue
                batch.append((piece, part.split or _split(task, number, self.plan["val_fraction"])))
                number += 1
                size += len(piece.text if isinstance(piece.text, bytes) else piece.text.encode())
                if size >= _BATCH_BYTES or len(batch) >= _BATCH_PIECES:
                    yield _Batch(batch, size)
                    batch, size = [], 0
        if batch:
            yield _Batch(batch, size)


def _split(task: int, number: int, share: float) -> str:
    """The split of a task's piece `number`: one of every 1/share is validation, the first of a task never.

    Which one of them is decided by a hash, so that it does not fall in with a pattern of the data.
    """
    every = max(2, round(1 / share)) if share else 0
    if not every:
        return "train"
    stratum, place = divmod(number, every)
    chosen = int.from_bytes(hashlib.sha256(f"{task}/{stratum}".encode()).digest()[:8], "little") % (every - 1)
    return "val" if place == 1 + chosen else "train"
