"""Every FP8 figure of every slot and step: a compact file beside the journal, and the Parquet table made of it.

MLflow's pages die at some thousand series, so the journal has only some slots of some steps (`slot_series`). This file
has all of them, at a few bytes a figure. `fp8_telemetry.bin` is a sequence of frames, one a step, each written by one
`os.write` on an O_APPEND descriptor, so that a kill -9 loses no finished step:

    header    4 bytes magic | uint32 payload bytes | int32 attempt | int64 step       (little-endian)
    payload   zlib, which has a checksum of its own
      FP8n      the slots' names as a JSON list; written where they differ from those before
      FP8s      float32 [figures, slots], figures in the order of `core.facts.SLOT_ROWS`

The four bytes of a float32 are stored as four planes: all first bytes, all second bytes, and so on. Neighbouring
figures share sign and exponent, so planes compress better. Steps that a rollback discarded or a resume repeated stay in
the file; readers skip them.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import struct
import zlib
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.core.facts import SLOT_ROWS, SlotStats
from harness.core.files import atomic_file, parse_json

SLOT_FILE = "fp8_telemetry.bin"
PARQUET = "fp8_telemetry.parquet"
FIGURES = tuple(SLOT_ROWS)
COLUMNS = ("step", "layer", "role", *FIGURES)
"""Columns of the Parquet table. step: int64; layer, role: text; figures: float32, null where not measured."""

_HEADER = struct.Struct("<4sIiq")
_NAMES, _STATS = b"FP8n", b"FP8s"
_MAX_PAYLOAD = 256 << 20
_ROWS_AT_ONCE = 1 << 20
_ALWAYS_MEASURED = ("amax", "scale", "saturation")
MOST_AT_ONCE = 256
"""Steps of a block at most: thousands of slots have 10 MB in so many."""
Floats = npt.NDArray[np.float32]
Neighbours = tuple[npt.NDArray[np.int64], tuple[str, ...], Floats]
"""Places of neighbouring steps in `SlotSteps.steps`, their slots, and float32 [steps, figures, slots]."""


class SlotFile:
    """Writer; creates the file at the first step that has slots. An error of the disk is counted and never raised.

    lost: steps so far that could not be written.
    trouble: the last error; empty if there was none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self.trouble = ""
        self._fd = -1
        self._end = 0
        self._names: tuple[str, ...] | None = None

    def add(self, attempt: int, step: int, slots: SlotStats) -> None:
        """Write one step's figures."""
        try:
            if self._fd < 0:
                self._open()
            # Names are written where they change. Identity first: a model has thousands, and they nearly never do.
            if slots.names is not self._names and slots.names != self._names:
                self._append(_NAMES, attempt, step, json.dumps(slots.names).encode())
            self._names = slots.names

            # [figures, slots, 4 bytes] -> [figures, 4 bytes, slots]
            numbers = slots.stacked().view(np.uint8).reshape(len(FIGURES), -1, 4)
            planes = numbers.transpose(0, 2, 1)
            self._append(_STATS, attempt, step, planes.tobytes())
        except OSError as error:
            self.lost += 1
            self.trouble = str(error)
            self._names = None  # the names may not be in the file: write them again

    def flush(self) -> None:
        """Bring everything so far to the disk."""
        if self._fd >= 0:
            try:
                os.fsync(self._fd)
            except OSError as error:
                self.trouble = str(error)

    def close(self) -> None:
        """Flush and close; safe to call twice."""
        if self._fd >= 0:
            self.flush()
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        """Open the file, and cut off a frame that an earlier process did not finish."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        self._fd = os.open(self.path, flags, 0o644)
        whole = 0
        for frame in _frames(self.path):
            whole = frame.at + _HEADER.size + frame.size
        self._end = whole
        self._cut()

    def _append(self, magic: bytes, attempt: int, step: int, payload: bytes) -> None:
        packed = zlib.compress(payload, 1)
        frame = _HEADER.pack(magic, len(packed), attempt, step) + packed
        self._cut()
        if os.write(self._fd, frame) != len(frame):
            # `_end` stays: the part is cut off before the next frame.
            raise OSError("the disk took only a part of a step's figures")
        self._end += len(frame)

    def _cut(self) -> None:
        """Cut off the part of a frame that was not written whole."""
        if os.fstat(self._fd).st_size != self._end:
            os.ftruncate(self._fd, self._end)


class Frame(NamedTuple):
    """The header of a frame. at: byte at which the frame begins. size: bytes of its payload."""

    magic: bytes
    at: int
    size: int
    attempt: int
    step: int


def _frames(path: Path, at: int = 0) -> Iterator[Frame]:
    """Headers in order from byte `at` on, up to the first frame that is torn or damaged."""
    end = path.stat().st_size
    with path.open("rb") as file:
        while at + _HEADER.size <= end:
            file.seek(at)
            magic, size, attempt, step = _HEADER.unpack(file.read(_HEADER.size))
            known = magic in (_NAMES, _STATS)
            whole = size <= _MAX_PAYLOAD and at + _HEADER.size + size <= end
            if not (known and whole):
                return
            yield Frame(magic, at, size, attempt, step)
            at += _HEADER.size + size


class SlotSteps:
    """Reader of the steps that count: neither discarded by a rollback nor repeated by a resume.

    names: every slot that ever was, in the order of appearance.
    steps: numbers of the steps that count, ascending.
    before: (attempt, step) of a run that goes on; it sees only what is before that.
    as_executed: take each step as it was executed for the first time instead, whatever a rollback discarded.
    """

    def __init__(
        self, path: Path, before: tuple[int, int] | None = None, as_executed: bool = False
    ) -> None:
        self._path = path
        self._named: list[tuple[str, ...]] = []
        self._lists: dict[bytes, tuple[str, ...]] = {}
        # Columns of whole numbers, 40 bytes a step: a run may have millions of steps.
        attempts, steps, at, sizes, which = (array("q") for _ in range(5))
        begins: dict[int, int] = {} if before is None else {before[0]: before[1]}
        with path.open("rb") as file:
            for frame in _frames(path):
                if frame.magic == _NAMES:
                    self._named.append(self._names_in(file, frame))
                elif self._named:
                    attempts.append(frame.attempt)
                    steps.append(frame.step)
                    at.append(frame.at)
                    sizes.append(frame.size)
                    which.append(len(self._named) - 1)  # the names of this frame
                    begins[frame.attempt] = min(frame.step, begins.get(frame.attempt, frame.step))

        # Of each step one frame counts; the others stay in the file, unread.
        if as_executed:
            kept = np.unique(np.array(steps, np.int64), return_index=True)[1]
        else:
            end = None if before is None else before[1]
            kept = _kept(np.array(attempts), np.array(steps), begins, end)
        self.steps: npt.NDArray[np.int64] = np.array(steps)[kept]
        self._at = np.array(at)[kept]
        self._sizes = np.array(sizes)[kept]
        self._which = np.array(which)[kept]

        # A dict keeps the order in which slots appeared; a set would not.
        seen: dict[str, None] = {}
        for names in self._named:
            seen |= dict.fromkeys(names)
        self.names = tuple(seen)

    def _names_in(self, file: Any, frame: Frame) -> tuple[str, ...]:
        """A list of names; the same object as an equal list before it. Raises ValueError if it is no list of names."""
        file.seek(frame.at + _HEADER.size)
        packed = hashlib.sha256(file.read(frame.size)).digest()
        if packed not in self._lists:
            self._lists[packed] = _names_of(file, frame)
        return self._lists[packed]

    @classmethod
    def of(cls, run_dir: Path) -> SlotSteps | None:
        """The steps of a run's folder; None if it has none that can be read."""
        try:
            found = cls(run_dir / SLOT_FILE)
        except (OSError, ValueError):
            return None
        return found if len(found.steps) else None

    def read(
        self, first: int = 0, back: bool = False
    ) -> Iterator[tuple[int, tuple[str, ...], Floats]]:
        """(step, slots, float32 [figures, slots]) from step `first` on; `back` reads from the last one.

        A damaged frame is skipped.
        """
        places = range(int(np.searchsorted(self.steps, first)), len(self.steps))
        with self._path.open("rb") as file:
            for place in reversed(places) if back else places:
                step = int(self.steps[place])
                names = self._named[self._which[place]]
                at, packed = int(self._at[place]), int(self._sizes[place])
                values = _floats(file, at, packed, len(names))
                if values is not None:
                    yield step, names, values

    def neighbours(self, each: int) -> Iterator[Neighbours]:
        """Blocks of at most MOST_AT_ONCE neighbouring steps, none across a multiple of `each` places.

        A step at a time costs more in calls than in arithmetic: a long run of a small model took a minute. A damaged
        step is left out.
        """
        places: list[int] = []
        values: list[Floats] = []
        slots: tuple[str, ...] = ()
        for step, names, figures in self.read():
            place = int(np.searchsorted(self.steps, step))
            # A block ends where its slots or its group of steps do, or where it is full.
            if places:
                is_other = names is not slots or place // each != places[0] // each
                if is_other or len(places) == MOST_AT_ONCE:
                    yield np.array(places), slots, np.stack(values)
                    places, values = [], []
            slots = names
            places.append(place)
            values.append(figures)
        if places:
            yield np.array(places), slots, np.stack(values)

    def heard(self) -> list[str]:
        """Slots whose amax was ever over 0."""
        found: set[str] = set()
        for _, names, values in self.read():
            if len(found) == len(self.names):
                break
            amaxes = values[0]
            for place in np.flatnonzero(amaxes > 0):
                found.add(names[place])
        return [name for name in self.names if name in found]

    def newest(
        self, slots: Sequence[str], count: int
    ) -> tuple[dict[str, dict[int, float]], dict[str, list[float]]]:
        """({`fp8_<figure>/<slot>`: {step: its last measured value}}, {slot: its last `count` amaxes})."""
        keys = [metric.key for metric in SLOT_ROWS.values()]
        last: dict[str, dict[int, float]] = {}
        amaxes: dict[str, list[float]] = {}
        for slot in slots:
            amaxes[slot] = []
            for key in keys:
                last[f"{key}/{slot}"] = {}

        # From the last step back, until every slot has both: figures that are sampled may be many steps old.
        for step, names, values in self.read(back=True):
            for place, name in enumerate(names):
                if name in amaxes and len(amaxes[name]) < count:
                    amaxes[name].insert(0, float(values[0, place]))
                for row, key in enumerate(keys):
                    value = float(values[row, place])
                    series = f"{key}/{name}"
                    if not math.isnan(value) and last.get(series) == {}:
                        last[series] = {step: value}
            if all(last.values()) and all(len(each) == count for each in amaxes.values()):
                break
        return last, amaxes

    def joined(
        self, figure: str, slots: Sequence[str], columns: int | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """(first step of each column [n], largest value in it [slots, n]); NaN where there is none.

        columns: neighbouring steps are joined where there are more; None: a column for each step.
        """
        # `each` steps are joined in a column.
        count = len(self.steps)
        each = 1
        if columns is not None:
            each = max(1, -(-count // columns))
        values = np.full((len(slots), -(-count // each)), np.nan)
        rows = {name: row for row, name in enumerate(slots)}
        which = FIGURES.index(figure)

        # Places of the wanted slots in a frame, and their rows here; looked up anew where a frame's names change.
        chosen, targets = np.zeros(0, np.int64), np.zeros(0, np.int64)
        looked_up: tuple[str, ...] | None = None
        for step, names, figures in self.read():
            if names is not looked_up:
                looked_up = names
                places = [place for place, name in enumerate(names) if name in rows]
                chosen = np.array(places, np.int64)
                targets = np.array([rows[names[place]] for place in places], np.int64)
            # A view: what is written into it is in `values`.
            number = int(np.searchsorted(self.steps, step)) // each
            column = values[:, number]
            column[targets] = np.fmax(column[targets], figures[which, chosen])
        return self.steps[::each], values


class SlotTail:
    """Reader of the newest steps of a file that still grows: each call reads what was written since the last one.

    at: byte up to which the file has been read.
    """

    def __init__(self, path: Path) -> None:
        self.at = 0
        self._path = path
        self._inode = 0
        self._names: tuple[str, ...] = ()

    def take(self, most: int) -> list[tuple[int, tuple[str, ...], Floats]]:
        """(step, slots, float32 [figures, slots]) of the last `most` steps since the last call, in order.

        Of earlier ones only the headers are read. Raises OSError, and ValueError for slots without a name.
        """
        # Another file in its place, or a shorter one, is read from its beginning.
        status = self._path.stat()
        if status.st_ino != self._inode or status.st_size < self.at:
            self.at, self._inode = 0, status.st_ino

        newest: deque[tuple[Frame, tuple[str, ...]]] = deque(maxlen=most)
        found: list[tuple[int, tuple[str, ...], Floats]] = []
        with self._path.open("rb") as file:
            for frame in _frames(self._path, self.at):
                self.at = frame.at + _HEADER.size + frame.size
                if frame.magic == _NAMES:
                    self._names = _names_of(file, frame)
                else:
                    newest.append((frame, self._names))
            for frame, names in newest:
                values = _floats(file, frame.at, frame.size, len(names))
                if values is not None:
                    found.append((frame.step, names, values))
        return found


def _kept(
    attempts: npt.NDArray[np.int64],
    steps: npt.NDArray[np.int64],
    begins: Mapping[int, int],
    end: int | None,
) -> npt.NDArray[np.int64]:
    """Places of the frames that count, by step: of each step before `end` the last one that no rollback discarded."""
    replaced_from = rewritten(begins)
    limits = np.full(len(steps), np.inf if end is None else float(end))
    for attempt in np.unique(attempts):
        of_attempt = attempts == attempt
        limits[of_attempt] = np.minimum(limits[of_attempt], replaced_from(int(attempt)))

    # Sort by step, then attempt; frames with the same of both stay in the order of the file.
    order = np.lexsort((attempts, steps))
    order = order[steps[order] < limits[order]]
    if not len(order):
        return order
    is_last = np.append(np.diff(steps[order]) != 0, True)
    return order[is_last]


def rewritten(begins: Mapping[int, int]) -> Callable[[int], float]:
    """A function that gives, for an attempt, the first step that a later attempt did again; infinity if none did.

    begins: the first step of each attempt.
    """
    attempts = sorted(begins)
    # firsts[i]: the smallest first step of attempts[i] and all later ones; nothing comes after the last.
    firsts = [math.inf] * (len(attempts) + 1)
    for place in reversed(range(len(attempts))):
        firsts[place] = min(begins[attempts[place]], firsts[place + 1])
    return lambda attempt: firsts[bisect_right(attempts, attempt)]


def _payload(file: Any, at: int, packed: int, size: int) -> bytes | None:
    """The payload of the frame at byte `at`, which has `packed` bytes there.

    None if it is damaged, or would be larger than `size`.
    """
    file.seek(at + _HEADER.size)
    stream = zlib.decompressobj()
    try:
        payload = stream.decompress(file.read(packed), size + 1)
    except zlib.error:
        return None
    # At most one byte more than allowed was unpacked: a small frame cannot fill the memory.
    return payload if stream.eof and len(payload) <= size else None


def _names_of(file: Any, frame: Frame) -> tuple[str, ...]:
    """The slots that a frame names. Raises ValueError if it has no list of names."""
    names = parse_json(_payload(file, frame.at, frame.size, _MAX_PAYLOAD) or b"[]")
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise ValueError("has slots without a name")
    return tuple(names)


def _floats(file: Any, at: int, packed: int, slots: int) -> Floats | None:
    """float32 [figures, slots] of the frame at byte `at`, whose payload has `packed` bytes; None if it is damaged."""
    size = 4 * len(FIGURES) * slots
    payload = _payload(file, at, packed, size)
    if payload is None or len(payload) != size or not slots:
        return None
    # The planes of bytes back into floats; see `SlotFile.add`.
    planes = np.frombuffer(payload, np.uint8).reshape(len(FIGURES), 4, -1)
    numbers = np.ascontiguousarray(planes.transpose(0, 2, 1))
    return numbers.view(np.float32)[..., 0]


def write_parquet(run_dir: Path) -> Path | None:
    """Write `fp8_telemetry.parquet`, a row for each step and slot. None if there is nothing to write.

    Raises ImportError without pyarrow, OSError for a disk that refuses.
    """
    found = SlotSteps.of(run_dir)
    if found is None:
        return None
    arrow = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    text = arrow.dictionary(arrow.int32(), arrow.string())
    kinds = {"step": arrow.int64(), "layer": text, "role": text}
    # What is not named is a figure.
    columns = [(name, kinds.get(name, arrow.float32())) for name in COLUMNS]
    schema = arrow.schema(columns)

    # A slot keeps its scale for many steps, so a dictionary of scales is small. All else compresses better in planes.
    in_planes = {name: "BYTE_STREAM_SPLIT" for name in FIGURES if name != "scale"}
    path = run_dir / PARQUET
    with (
        atomic_file(path) as stream,
        parquet.ParquetWriter(
            stream,
            schema,
            compression="zstd",
            use_dictionary=["step", "layer", "role", "scale"],
            column_encoding=in_planes,
        ) as writer,
    ):
        for names, block in _blocks(found):
            writer.write_table(_table(arrow, schema, names, block))
    return path


Block = list[tuple[int, Floats]]


def _blocks(found: SlotSteps) -> Iterator[tuple[tuple[str, ...], Block]]:
    """(slots, steps with these slots), about a million rows at once."""
    block: Block = []
    slots: tuple[str, ...] = ()
    for step, names, values in found.read():
        is_full = len(block) * len(slots) >= _ROWS_AT_ONCE
        if block and (names != slots or is_full):
            yield slots, block
            block = []
        slots = names
        block.append((step, values))
    if block:
        yield slots, block


def _table(arrow: Any, schema: Any, names: Sequence[str], block: Block) -> Any:
    """One block as an Arrow table: step by step, and in a step slot by slot."""
    steps = np.array([step for step, _ in block], np.int64)
    values = np.stack([figures for _, figures in block])
    arrays: dict[str, Any] = {"step": np.repeat(steps, len(names))}

    # Layer and role repeat in every step: numbers into a list of words, instead of the words.
    layers = [name.rpartition(".")[0] for name in names]
    roles = [name.rpartition(".")[2] for name in names]
    for column, words in (("layer", layers), ("role", roles)):
        places: dict[str, int] = {}
        indices = [places.setdefault(word, len(places)) for word in words]
        of_block = np.tile(np.array(indices, np.int32), len(block))
        arrays[column] = arrow.DictionaryArray.from_arrays(of_block, list(places))

    # NaN in a figure that is sampled means that it was not measured: null in the table.
    for place, name in enumerate(FIGURES):
        figures = values[:, place, :].reshape(-1)
        missing = None if name in _ALWAYS_MEASURED else np.isnan(figures)
        arrays[name] = arrow.array(figures, mask=missing)
    return arrow.table([arrays[name] for name in schema.names], schema=schema)
