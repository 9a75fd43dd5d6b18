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
import unicodedata
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, astuple, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from harness.core.config import Documents
from harness.core.errors import DataError, MachineError, Problem, some
from harness.core.files import MAX_LARGE, read_json, read_mapping, write_json
from harness.data.arrays import Ints
from harness.data.blocks import BLOCK, Stamp
from harness.data.corpus import add_counts, entropy
from harness.data.documents import Files, Part, Piece, is_skipped
from harness.data.encoding import Encoded, Encoding, TextBatch
from harness.data.hub import PREFIX, Fetched
from harness.data.rows import FORMATS, open_source
from harness.data.shards import ShardWriter, smallest_dtype
from harness.data.source import record_of_files
from harness.data.text import BadFiles
from harness.data.tokenizer import Encoder, load_encoder, tokenizer_file

FORMAT = 1
PREPARED = "dataset.json"
"""Describes a prepared folder; nothing else writes a file of that name with a vocabulary in it."""
TASK_BYTES = 16 << 20
"""Least bytes of a task's source."""

_MOST_TASKS = 128
_INLINE = 4 << 20  # bytes up to which starting workers takes longer than tokenizing
_BATCH_BYTES, _BATCH_PIECES = 1 << 20, 1024
_DECODED_PIECES, _DECODED_LETTERS = 16, 2000
_GROUP = 20  # pieces that are divided together, if the share can be had of so many
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
    val_fraction: share of the pieces held out where the source has no validation files. A document is one piece, unless
      it is text of over a MiB: its pieces may then be in both splits.
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
    report: Callable[[Progress], None] = lambda progress: None,
    most: int | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Make `out`. Returns the contents of its dataset.json.

    processes: number of workers; 0: one for each core.
    report: is called with the progress whenever it changes.
    most: bytes of the source that are allowed; None: any number.
    overwrite: whether to delete what `out` holds if it is something else.

    Raises DataError for a source that cannot be used, naming every problem of it, or if `out` holds something else;
    ConfigError for a tokenizer that cannot be read; MachineError if a worker dies; OSError.
    """
    plan = _plan(wanted)
    if most is not None and sum(map(_size, plan["tasks"])) > most:
        source = wanted.hub.name if wanted.hub else wanted.source
        raise too_large(source, wanted.kind, most, wanted.tokenizer)
    if overwrite and out.exists() and read_mapping(out / _PLAN, MAX_LARGE) != plan:
        shutil.rmtree(out)
    with _alone(out):
        if made := _begin(out, plan):
            return made
        _run_tasks(out, plan, processes, report)
        return _finish(out, plan)


def too_large(source: str, kind: str, most: int, tokenizer: str | None) -> DataError:
    """The error for a source that is too large to be prepared at the start of a run."""
    # A name of the hub has the commit that was fetched, hf:NAME@COMMIT; the command takes it apart.
    name, options = source, ""
    if source.startswith(PREFIX):
        name, _, commit = source.partition("@")
        if commit:
            options += f" --revision {commit}"
    if tokenizer:
        options += f" --tokenizer {tokenizer}"
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
            what = "is being made by another process"
            raise DataError(Problem(what, f"--out {out}", fix="wait for it")) from error
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
        # A folder of the hub's cache may have files of other configurations beside these.
        files = [(Path(file), split) for file, split in hub.files], list(hub.left_out)
    listed = source.parts(path, wanted.key, wanted.bad, files)

    # With their stamps: a source that was touched is another plan, and `_record` sees what changes during the reading.
    stamped: list[tuple[Any, ...]] = []
    for each in sorted({part.path for part in listed.parts}):
        stamp = Stamp.of(Path(each))
        stamped.append((each, *astuple(stamp)))

    tokenizer = None
    if wanted.tokenizer:
        tokenizer = str(tokenizer_file(Path(wanted.tokenizer)).resolve())
    plan = {
        "format": FORMAT,
        **asdict(replace(wanted, source=str(path))),
        "tokenizer": tokenizer,
        "vocabulary": asdict(encoder.vocabulary),
        "files": stamped,
        "left_out": listed.left_out,
        "tasks": _tasks(listed.parts),
    }
    return json.loads(json.dumps(plan))  # lists for tuples, so that it equals a plan that was read


def _tasks(parts: Sequence[Part]) -> list[list[Any]]:
    """The parts of each task: as many as have TASK_BYTES, or more where there would be too many tasks.

    The number of workers does not count: the same source gives the same shards on every machine.
    """
    total = sum(part.size for part in parts)
    least = max(TASK_BYTES, -(-total // _MOST_TASKS))
    tasks: list[list[Any]] = [[]]
    size = 0
    for part in parts:
        if size >= least:
            tasks.append([])
            size = 0
        tasks[-1].append(astuple(part))
        size += part.size
    return tasks


def _size(task: Sequence[Sequence[Any]]) -> int:
    """Bytes of a task's source, about."""
    return sum(Part(*part).size for part in task)


def _begin(out: Path, plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """Make `out` ready; its dataset.json if it is made already. Raises DataError if it holds something else."""
    there = read_mapping(out / _PLAN, MAX_LARGE)
    if any(out.iterdir()) and there != plan:
        raise DataError(_something_else(out, there, plan))

    # Shards that a killed process had not finished.
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


def _something_else(
    out: Path,
    there: Mapping[str, Any],
    plan: Mapping[str, Any],
) -> Problem:
    """What to say of a folder that is not empty, and was not made by this plan."""
    why = "it is not empty"
    if there:
        changed = sorted(key for key in plan if there.get(key) != plan[key])
        why = f"of an earlier preparation, with another {', '.join(changed)}"
        if "files" in changed and (files := _changed_files(there, plan)):
            why = f"of an earlier preparation, since when these have changed: {some(files, _CHANGED_NAMED)}"
    fix = "give an empty folder, or delete this one"
    return Problem("holds something else", f"--out {out}", why, fix)


def _changed_files(there: Mapping[str, Any], plan: Mapping[str, Any]) -> list[str]:
    """Names of files that are new, gone or touched since the plan `there` was made."""
    before = {tuple(entry) for entry in there.get("files", ())}
    now = {tuple(entry) for entry in plan["files"]}
    # Entries of one plan alone. A file that was touched is in both, with another stamp.
    changed = before ^ now
    return sorted({Path(str(path)).name for path, *_ in changed})


def _run_tasks(
    out: Path, plan: Mapping[str, Any], processes: int, report: Callable[[Progress], None]
) -> None:
    """Make the shards of all tasks that are not done."""
    # An earlier try may have been killed: its finished tasks stay.
    tasks = plan["tasks"]
    todo = [number for number in range(len(tasks)) if not _is_done(out, number)]
    left = sum(_size(tasks[number]) for number in todo)
    total = sum(map(_size, tasks))
    kept = len(tasks) - len(todo)
    progress = Progress(total, len(tasks), total - left, kept, kept)
    report(progress)

    if processes == 0:
        processes = len(os.sched_getaffinity(0))
    # Bytes need no tokenizing, and little text is done before the workers have begun.
    if not plan["tokenizer"] or left <= _INLINE:
        processes = 1
    try:
        with Encoding(plan["tokenizer"], processes) as encoding:
            for number in todo:
                end = progress.done + _size(tasks[number])
                with contextlib.closing(_Task(out, plan, number).run(encoding)) as counts:
                    for count in counts:
                        progress.done += count
                        report(progress)
                progress.done = end  # a source has more bytes than its texts
                progress.finished += 1
                report(progress)
    except BrokenProcessPool as error:
        why = "perhaps the memory did not suffice: --processes takes fewer"
        problem = Problem("a worker died", str(out), why, "the same command goes on")
        raise MachineError(problem) from error


def _marker(out: Path, task: int) -> Path:
    return out / f"done-{task:05d}.json"


def _counts(out: Path, task: int) -> Path:
    return out / f"counts-{task:05d}.npy"


def _hashes(out: Path, task: int) -> Path:
    return out / f"hashes-{task:05d}.npz"


def _is_done(out: Path, task: int) -> bool:
    """Whether a task's marker and shards are there, whole. Its shards were written before the marker was."""
    try:
        made = read_json(_marker(out, task), MAX_LARGE)
        for shard in made["shards"]:
            if (out / shard["name"]).stat().st_size != shard["bytes"]:
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


@dataclass(slots=True)
class _Task:
    """One task of a plan: what it has made, skipped and found wrong so far.

    inside: whether the piece that came last did not end its document.
    kept: of the texts whose ids were made into text again (`Encoder.decode`), characters that came back, and all.
    """

    out: Path
    plan: Mapping[str, Any]
    number: int
    skipped: Counter[str] = field(default_factory=Counter[str])
    problems: list[Problem] = field(default_factory=list[Problem])
    inside: bool = False
    kept: list[int] = field(default_factory=lambda: [0, 0])

    def run(self, encoding: Encoding) -> Generator[int, None, None]:
        """Make the shards and the marker; the bytes of text that were read, batch by batch.

        Raises DataError with what is wrong with the documents; OSError, BrokenProcessPool. No shard is left then.
        """
        vocabulary = encoding.encoder.vocabulary
        dtype = smallest_dtype(vocabulary.ids)
        shards: dict[str, ShardWriter] = {}
        for split in ("train", "val"):
            path = self.out / f"{split}-{self.number:05d}.bin"
            shards[split] = ShardWriter(path, dtype, split)
        # Added to each document; empty for a tokenizer without such a token.
        separator = [] if vocabulary.separator is None else [vocabulary.separator]
        end = np.array(separator, dtype=np.int64)
        counts = np.zeros(0, dtype=np.int64)
        hashes: dict[str, list[int]] = {"train": [], "val": []}  # of each piece's text
        text_bytes = 0
        last = ""  # the split of the piece before
        try:
            for batch, encoded in encoding.encode(self._batches()):
                text_bytes += batch.size
                if self.plan["tokenizer"] and not any(self.kept):
                    self._decode(batch, encoding.encoder)
                made: list[Ints] = []
                for (piece, split), found in zip(batch.pieces, encoded, strict=True):
                    ids = self._usable(piece, found)
                    if ids is None:
                        continue

                    # A piece of a long document has a split of its own: in each split the part there is a document.
                    if last and last != split:
                        shards[last].end_document()
                    last = split
                    hashes[split].append(_hash(piece.text))
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

        # The marker last: it says that the rest is there.
        written = [shard.commit() for shard in shards.values()]
        with _counts(self.out, self.number).open("wb") as stream:
            np.save(stream, counts)
        arrays = {split: np.array(found, dtype=np.int64) for split, found in hashes.items()}
        with _hashes(self.out, self.number).open("wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)
        # A split without a document has no shard.
        filled = [shard for shard in written if shard]
        marker = {
            "shards": filled,
            "skipped": dict(self.skipped),
            "text_bytes": text_bytes,
            "kept": self.kept,
        }
        write_json(_marker(self.out, self.number), marker)

    def _decode(self, batch: TextBatch, encoder: Encoder) -> None:
        """Count what comes back of the beginnings of some texts: a tokenizer may drop what it does not know."""
        for piece, _ in batch.pieces[:_DECODED_PIECES]:
            text = _raw(piece.text).decode()[:_DECODED_LETTERS]
            with contextlib.suppress(DataError):
                (ids,) = encoder.encode([text])
                given = _letters(text)
                back = _letters(encoder.decode(ids.tolist()))
                self.kept[0] += (given & back).total()
                self.kept[1] += given.total()

    def _batches(self) -> Iterator[TextBatch]:
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
                    # As many as a message names: the rest would only take time.
                    if len(self.problems) >= _NAMED:
                        break
                    continue
                split = part.split or _split(self.number, number, self.plan["val_fraction"])
                pieces.append((piece, split))
                number += 1
                size += _bytes_of(piece.text)
                # Tokenizers are fast on many texts at once; memory bounds how many.
                if size >= _BATCH_BYTES or len(pieces) >= _BATCH_PIECES:
                    yield TextBatch(pieces, size)
                    pieces, size = [], 0
        if pieces:
            yield TextBatch(pieces, size)

    def _reject(self, piece: Piece) -> None:
        """Count a piece that is skipped, or note the problem."""
        if is_skipped(piece.fault, self.plan["bad"]):
            self.skipped[piece.fault] += 1
        else:
            fix = "repair it, or skip such rows and files: data.bad=skip (--bad skip)"
            self.problems.append(Problem(piece.fault, f"data.path: {piece.where}", fix=fix))

    def _usable(self, piece: Piece, found: Encoded) -> Ints | None:
        """Ids of a piece; None for one on which the tokenizer fails, which is counted or noted as a bad row is."""
        inside = self.inside
        self.inside = not piece.ends
        if not isinstance(found, Problem):
            return found

        # The tokenizer failed on it.
        what = f"{found.where} {found.what}"
        if self.plan["bad"] == "skip":
            self.skipped[what] += 1
        else:
            fix = f"{found.fix}; or skip such rows: data.bad=skip (--bad skip)"
            self.problems.append(Problem(what, f"data.path: {piece.where}", found.why, fix))
        # The earlier pieces of the document still need its end.
        return np.zeros(0, dtype=np.int64) if inside and piece.ends else None


def _bytes_of(text: str | bytes) -> int:
    return len(_raw(text))


def _raw(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def _letters(text: str) -> Counter[str]:
    """How often each character occurs, without what tokenizers change on purpose: spaces, capitals, forms."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    return Counter("".join(plain.split()))


def _hash(text: str | bytes) -> int:
    """64 bits of the text's hash, as a signed number."""
    digest = hashlib.blake2b(_raw(text), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _split(task: int, number: int, share: float) -> str:
    """The split of a task's piece `number`: of every group of pieces a share is validation, the first of a task never.

    Which ones is decided by a hash, so that they do not coincide with a pattern of the data.
    """
    if not share:
        return "train"
    # Groups as small as the share allows: 1 of 10, 2 of 5.
    largest = max(_GROUP, round(1 / share), round(1 / (1 - share)))
    held, every = Fraction(share).limit_denominator(largest).as_integer_ratio()
    group, place = divmod(number, every)
    # Of each group `held` places that follow one another are chosen, never the group's first.
    drawn = hashlib.sha256(f"{task}/{group}".encode()).digest()[:8]
    chosen = int.from_bytes(drawn, "little") % (every - 1)
    return "val" if place and (place - 1 - chosen) % (every - 1) < held else "train"


def _finish(out: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Write dataset.json from what the tasks left, and take their markers away."""
    count_of_tasks = len(plan["tasks"])
    shards: list[dict[str, Any]] = []
    skipped: Counter[str] = Counter()
    counts = np.zeros(0, dtype=np.int64)
    text_bytes = 0
    kept = [0, 0]
    for task in range(count_of_tasks):
        made = read_json(_marker(out, task), MAX_LARGE)
        shards += made["shards"]
        skipped.update(made["skipped"])
        counts = add_counts(counts, np.load(_counts(out, task)))
        text_bytes += made["text_bytes"]
        # Tasks that an earlier version had done do not say it.
        kept = [sum(pair) for pair in zip(kept, made.get("kept", (0, 0)), strict=True)]
    if all(shard["split"] != "train" for shard in shards):
        reasons = [f"{count} x {reason}" for reason, count in skipped.items()]
        why = "; ".join(reasons) or "it has no rows"
        raise DataError(Problem("has nothing to train on", f"data.path: {plan['source']}", why))

    # Before anything says that the result is whole: the source must still be what was read.
    origin = _record(out, plan)
    left_out: list[dict[str, str]] = []
    for name, reason in plan["left_out"]:
        left_out.append({"name": name, "reason": reason})
    for reason, count in sorted(skipped.items()):
        left_out.append({"name": f"{count} rows", "reason": reason})

    # Stamps let a run on this machine take untouched shards without reading them. They are not part of the hash of the
    # whole, which a copy elsewhere has too.
    hashes: list[list[str]] = []
    for shard in shards:
        stamp = Stamp.of(out / shard["name"])
        shard |= {"mtime_ns": stamp.mtime_ns, "inode": stamp.inode}
        hashes.append([shard["name"], shard["blocks"], shard["index_sha256"]])
    source = plan["source"]
    if plan["hub"]:
        source = plan["hub"]["name"]
    vocabulary = plan["vocabulary"]
    documents = sum(shard["documents"] for shard in shards)
    overall = hashlib.sha256(json.dumps(hashes).encode())
    info: dict[str, Any] = {
        "format": FORMAT,
        "source": source,
        "kind": plan["kind"],
        "vocabulary": vocabulary,
        "dtype": smallest_dtype(vocabulary["ids"]),
        "source_files": len(plan["files"]),
        "block_bytes": BLOCK,
        "text_bytes": text_bytes,
        "documents": documents,
        "unigram_nats": entropy(counts),
        "kept_characters": kept,
        "skipped": left_out,
        "origin": origin,
        "shards": shards,
        "sha256": overall.hexdigest(),
    }
    if repeated := _repeated(out, count_of_tasks):
        info["repeated_documents"] = repeated
    write_json(out / PREPARED, info)

    # Markers are needed no longer; a kill here leaves some, which do no harm.
    for task in range(count_of_tasks):
        _marker(out, task).unlink(missing_ok=True)
        _counts(out, task).unlink(missing_ok=True)
        _hashes(out, task).unlink(missing_ok=True)
    return info


def _repeated(out: Path, tasks: int) -> list[int] | None:
    """[validation pieces whose text is that of a training piece, too; all validation pieces].

    None if a task was done by a version that did not say it.
    """
    found: list[Mapping[str, Ints]] = []
    for task in range(tasks):
        if not _hashes(out, task).exists():
            return None
        with np.load(_hashes(out, task)) as arrays:
            found.append({"train": arrays["train"], "val": arrays["val"]})
    val = np.concatenate([each["val"] for each in found])
    is_repeated = np.zeros(len(val), dtype=np.bool_)
    for each in found:
        is_repeated |= np.isin(val, each["train"])
    return [int(is_repeated.sum()), len(val)]


def _record(out: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """The record of the source, once all of it was read. Raises DataError if a file changed meanwhile."""
    files: dict[Path, Stamp] = {}
    for path, *stamp in plan["files"]:
        files[Path(path)] = Stamp(*stamp)
    kind = plan["kind"]
    suffixes = None if kind == "text" else FORMATS[kind].suffixes
    tokenizer: tuple[str, str] | None = None
    if plan["tokenizer"]:
        tokenizer = plan["tokenizer"], plan["vocabulary"]["tokenizer"]
    # save_to_disk and the hub name their files: others in the folder do not belong to the source.
    listed = kind != "Arrow" and not plan["hub"]
    made = record_of_files(Path(plan["source"]), suffixes, listed, files, tokenizer)

    # After the hashes were made: they must be of what was read.
    changed = [path for path, stamp in files.items() if Stamp.of(path) != stamp]
    if changed:
        what = "changed while it was prepared"
        fix = f"once nothing writes there any longer: delete {out}, and give the same command again"
        problems = [Problem(what, f"data.path: {path}", fix=fix) for path in changed]
        raise DataError(problems)
    return made
