"""Text into files of token ids, once and for many runs: in parallel, in bounded memory, restartable after any kill.

The source is cut into tasks, and every task makes one training and one validation shard of its own, in Megatron's
format (`.bin` and `.idx`), and at last `done-<task>.json`. What a task makes depends on the source, the tokenizer and
the share held out alone: a preparation that was killed goes on with the tasks that are not done, and ends with the
bytes of one that was not. `dataset.json`, written at the end, has what a run needs to know, with every block's hash.

Workers are processes of this file (`python -m harness.data.prepare OUT`) that are told task numbers line by line.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt

from harness.core.errors import DataError, MachineError, Problem, some
from harness.core.files import MAX_LARGE, read_json, read_mapping, with_this_package, write_json
from harness.data.blocks import BLOCK, Stamp
from harness.data.corpus import add_counts, entropy
from harness.data.registry import DOCUMENTS, PREPARED
from harness.data.rows import Part, Piece
from harness.data.shards import ShardWriter, smallest_dtype
from harness.data.source import origin_of_files
from harness.data.text import BadFiles
from harness.data.tokenizer import Encoder, load_encoder, tokenizer_file

_T = TypeVar("_T")
FORMAT = 1
TASK_BYTES = 16 << 20
"""Least bytes of a task's source."""
_TASKS = 128
_INLINE = 4 << 20
_BATCH_BYTES, _BATCH_PIECES = 1 << 20, 1024
_PLAN = "prepare.json"
_NAMED, _CHANGED = 20, 5
_TOLD_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Preparation:
    """What is to be made. source: as a run's data.path. kind: of DOCUMENTS. tokenizer: None for bytes. val_fraction:
    share of the documents held out where the source has no validation files."""

    source: str
    kind: str
    key: str = "text"
    bad: BadFiles = "auto"
    tokenizer: str | None = None
    val_fraction: float = 0.01


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
        tokenizer = f" --tokenizer {wanted.tokenizer}" if wanted.tokenizer else ""
        fix = f"once, for all runs: harness data prepare {wanted.source}{tokenizer} --out DIR; then data.path=DIR"
        raise DataError(Problem(f"has over {most} bytes of {wanted.kind}", f"data.path: {wanted.source}", fix=fix))
    if anew and out.exists() and read_mapping(out / _PLAN, MAX_LARGE) != _as_json(plan):
        shutil.rmtree(out)
    with _alone(out):
        return _begin(out, plan) or _make(out, plan, processes, tell)


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
    workers = min(processes or len(os.sched_getaffinity(0)), len(todo))
    if workers <= 1 or sum(sizes[number] for number in todo) <= _INLINE:
        problems: list[Problem] = []
        work = _Work(out)
        for number in todo:
            problems += work.run(number, lambda count: _advance(progress, count, tell))
            progress.finished += 1
            tell(progress)
    else:
        problems = _Pool(out, todo, workers, progress).run(tell)
    if problems:
        raise DataError(problems[:_NAMED])
    return _finish(out, plan)


def _advance(progress: Progress, count: int, tell: Callable[[Progress], None]) -> None:
    progress.done += count
    tell(progress)


def _plan(wanted: Preparation) -> dict[str, Any]:
    """What prepare.json says: everything that the result depends on."""
    source = DOCUMENTS[wanted.kind]
    encoder = load_encoder(wanted.tokenizer)
    listed = source.parts(Path(wanted.source).expanduser().resolve(), wanted.key, wanted.bad)
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
        "source": plan["source"],
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
    made = origin_of_files(Path(plan["source"]), suffixes, plan["kind"] != "Arrow", files, known)
    if changed := [path for path, stamp in files.items() if Stamp.of(path) != stamp]:
        fix = f"once nothing writes there any longer: delete {out}, and give the same command again"
        raise DataError([Problem("changed while it was prepared", f"data.path: {path}", fix=fix) for path in changed])
    return made


def _stamped(path: Path) -> dict[str, int]:
    stamp = Stamp.of(path)
    return {"mtime_ns": stamp.mtime_ns, "inode": stamp.inode}


def _counts(out: Path, task: int) -> Path:
    return out / f"counts-{task:05d}.npy"


class _Work:
    """Runs tasks of a plan, one after the other."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.plan: dict[str, Any] = read_json(out / _PLAN, MAX_LARGE)
        self.encoder: Encoder = load_encoder(self.plan["tokenizer"])

    def run(self, task: int, advance: Callable[[int], None]) -> list[Problem]:
        """Make a task's shards and its marker; what is wrong with its documents instead. advance: is told bytes.

        Raises OSError, DataError.
        """
        plan, vocabulary = self.plan, self.encoder.vocabulary
        dtype = smallest_dtype(vocabulary.ids)
        shards = {split: ShardWriter(self.out / f"{split}-{task:05d}.bin", dtype, split) for split in ("train", "val")}
        end = np.zeros(0, dtype=np.int64) if vocabulary.separator is None else np.array([vocabulary.separator])
        counts = np.zeros(0, dtype=np.int64)
        skipped: Counter[str] = Counter()
        problems: list[Problem] = []
        last = ""
        text_bytes = 0
        for batch, size in self._or_abandon(shards, self._batches(plan["tasks"][task], task, skipped, problems)):
            made = self._encoded([piece for piece, _ in batch], skipped, problems)
            text_bytes += size
            flat: list[npt.NDArray[Any]] = []
            for (piece, split), ids in zip(batch, made, strict=True):
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
            advance(size)
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

    def _encoded(
        self, pieces: Sequence[Piece], skipped: Counter[str], problems: list[Problem]
    ) -> list[npt.NDArray[np.int64] | None]:
        """Ids of each piece. None of one on which the tokenizer fails: it is counted, or named, as a bad row is."""
        try:
            return [*self.encoder.encode([piece.text for piece in pieces])]
        except DataError:
            made = [self._encoded_alone(piece) for piece in pieces]
        for piece, ids in zip(pieces, made, strict=True):
            if not isinstance(ids, DataError):
                continue
            (problem,) = ids.problems
            if self.plan["bad"] == "skip":
                skipped[f"{problem.where} {problem.what}"] += 1
            else:
                fix = f"{problem.fix}; or pass over such rows: data.bad=skip (--bad skip)"
                problems.append(
                    Problem(f"{problem.where} {problem.what}", f"data.path: {piece.where}", problem.why, fix)
                )
        # What is left of a document still needs its end.
        empty = np.zeros(0, dtype=np.int64)
        inside = [False, *(not piece.ends for piece in pieces[:-1])]
        return [
            each if not isinstance(each, DataError) else (empty if began and piece.ends else None)
            for each, began, piece in zip(made, inside, pieces, strict=True)
        ]

    def _encoded_alone(self, piece: Piece) -> npt.NDArray[np.int64] | DataError:
        try:
            return self.encoder.encode([piece.text])[0]
        except DataError as error:
            return error

    def _or_abandon(self, shards: Mapping[str, ShardWriter], batches: Iterator[_T]) -> Iterator[_T]:
        """`batches`; the shards are given up if reading the source fails."""
        try:
            yield from batches
        except (OSError, DataError):
            for shard in shards.values():
                shard.abandon()
            raise

    def _batches(
        self, parts: Sequence[Sequence[Any]], task: int, skipped: Counter[str], problems: list[Problem]
    ) -> Iterator[tuple[list[tuple[Piece, str]], int]]:
        """Pieces with their splits, some at a time, and their bytes."""
        source, bad = DOCUMENTS[self.plan["kind"]], self.plan["bad"]
        batch: list[tuple[Piece, str]] = []
        size = number = 0
        for given in parts:
            part = Part(*given)
            for piece in source.read(part, self.plan["key"]):
                if piece.fault:
                    if bad == "skip" or (bad == "auto" and piece.fault == "empty"):
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
                    yield batch, size
                    batch, size = [], 0
        yield batch, size


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


class _Pool:
    """Worker processes, each with a thread here that gives it tasks and hears how far it is."""

    def __init__(self, out: Path, todo: Sequence[int], workers: int, progress: Progress) -> None:
        self._out, self._workers, self._progress = out, workers, progress
        self._todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for task in todo:
            self._todo.put(task)
        self._lock = threading.Lock()
        self._problems: list[Problem] = []
        self._dead = ""
        self._stop = False

    def run(self, tell: Callable[[Progress], None]) -> list[Problem]:
        """Until every task is done, or one is not to be done. Raises MachineError if a worker dies."""
        threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(self._workers)]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                time.sleep(_TOLD_SECONDS / 4)
                tell(self._progress)
        except BaseException:
            self._stop = True
            raise
        if self._dead:
            raise MachineError(Problem("a worker died", str(self._out), self._dead, "the same command goes on"))
        return self._problems

    def _serve(self) -> None:
        command = [sys.executable, "-m", "harness.data.prepare", str(self._out), str(os.getpid())]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=with_this_package()
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(queue.Empty, BrokenPipeError):
                while not (self._stop or self._problems or self._dead):
                    task = self._todo.get_nowait()
                    process.stdin.write(f"{task}\n")
                    process.stdin.flush()
                    if not self._hear(process.stdout):
                        self._dead = f"with exit code {process.wait()}, at task {task}"
            if self._stop:
                process.terminate()
            process.stdin.close()

    def _hear(self, stream: IO[str]) -> bool:
        for line in stream:
            told = json.loads(line)
            with self._lock:
                self._progress.done += told.get("bytes", 0)
                if "problems" in told:
                    self._problems += [Problem(*each) for each in told["problems"]]
                    self._progress.finished += not told["problems"]
                    return True
        return False


def work(out: Path, parent: int) -> None:
    """A worker: does the tasks that come by number on stdin, until there are no more or its parent is gone."""
    job = _Work(out)
    pending = 0
    told = time.monotonic()

    def advance(count: int) -> None:
        nonlocal pending, told
        pending += count
        if os.getppid() != parent:
            raise SystemExit(1)
        if time.monotonic() - told >= _TOLD_SECONDS:
            print(json.dumps({"bytes": pending}), flush=True)
            pending, told = 0, time.monotonic()

    for line in sys.stdin:
        try:
            problems = job.run(int(line), advance)
        except DataError as error:
            problems = list(error.problems)
        except OSError as error:
            problems = [Problem("cannot be read or written", str(error.filename), str(error.strerror))]
        print(json.dumps({"bytes": pending, "problems": [astuple(each) for each in problems]}), flush=True)
        pending = 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is its parent's, and it ends when that is gone
    work(Path(sys.argv[1]), int(sys.argv[2]))
