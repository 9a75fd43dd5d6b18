"""Every FP8 figure of every slot and step: a compact file beside the journal, and the Parquet table made of it.

`fp8_telemetry.bin` is written while the run trains: one frame a step, by one `os.write` on an O_APPEND descriptor, so
that a kill -9 loses no finished step. A frame is a header (magic, bytes of the payload, attempt, step) and a zlib
payload with its checksum: the slots' names as JSON where they are new, else float32 [figures, slots] in the order of
`core.facts.SLOT_ROWS`, byte planes apart, which compresses better. Steps that a rollback threw away and steps that a
resume repeated stand in the file too; readers pass over them.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
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
"""Of the Parquet table. step: int64; layer, role: text; the figures: float32, null where not measured."""

_HEADER = struct.Struct("<4sIiq")
_NAMES, _STATS = b"FP8n", b"FP8s"
_MAX_PAYLOAD = 256 << 20
_ROWS_AT_ONCE = 1 << 20
_ALWAYS_MEASURED = ("amax", "scale", "saturation")
Floats = npt.NDArray[np.float32]


class SlotFile:
    """Writer. Opened at the first step with slots; trouble with the disk is counted in `lost` and never raised.

    lost: steps that did not get down so far. trouble: the last error, empty if there was none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self.trouble = ""
        self._fd = -1
        self._end = 0
        self._names: tuple[str, ...] | None = None

    def add(self, attempt: int, step: int, slots: SlotStats) -> None:
        """One step's figures."""
        try:
            if self._fd < 0:
                self._open()
            if slots.names is not self._names and slots.names != self._names:
                self._append(_NAMES, attempt, step, json.dumps(slots.names).encode())
            self._names = slots.names
            planes = slots.stacked().view(np.uint8).reshape(len(FIGURES), -1, 4).transpose(0, 2, 1)
            self._append(_STATS, attempt, step, planes.tobytes())
        except OSError as error:
            self.lost += 1
            self.trouble = str(error)
            self._names = None

    def flush(self) -> None:
        """Everything so far is on disk."""
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
            raise OSError("the disk took only a part of a step's figures")
        self._end += len(frame)

    def _cut(self) -> None:
        """Take away what stands of a frame that did not get down whole."""
        if os.fstat(self._fd).st_size != self._end:
            os.ftruncate(self._fd, self._end)


class Frame(NamedTuple):
    """Where a frame begins, how long its payload is, and whose it is."""

    magic: bytes
    at: int
    size: int
    attempt: int
    step: int


def _frames(path: Path) -> Iterator[Frame]:
    """Headers in order, up to the first that is torn or none."""
    end = path.stat().st_size
    with path.open("rb") as file:
        at = 0
        while at + _HEADER.size <= end:
            file.seek(at)
            magic, size, attempt, step = _HEADER.unpack(file.read(_HEADER.size))
            if (
                magic not in (_NAMES, _STATS)
                or size > _MAX_PAYLOAD
                or at + _HEADER.size + size > end
            ):
                return
            yield Frame(magic, at, size, attempt, step)
            at += _HEADER.size + size


class SlotSteps:
    """Reader of the steps that count. names: every slot that ever was, in the order in which they came.

    before: as (attempt, step): only what stands below it, as a run sees it that goes on from there.
    """

    def __init__(self, path: Path, before: tuple[int, int] | None = None) -> None:
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
                    values = (frame.attempt, frame.step, frame.at, frame.size, len(self._named) - 1)
                    for column, value in zip(
                        (attempts, steps, at, sizes, which), values, strict=True
                    ):
                        column.append(value)
                    begins[frame.attempt] = min(frame.step, begins.get(frame.attempt, frame.step))
        kept = _kept(
            np.array(attempts), np.array(steps), begins, None if before is None else before[1]
        )
        self.steps: npt.NDArray[np.int64] = np.array(steps)[kept]
        """Steps that count, in order."""
        self._at, self._sizes, self._which = (
            np.array(column)[kept] for column in (at, sizes, which)
        )
        self.names = tuple(dict.fromkeys(name for names in self._named for name in names))

    def _names_in(self, file: Any, frame: Frame) -> tuple[str, ...]:
        """A list of slots; one that came before is the same object. Raises ValueError for what is none."""
        file.seek(frame.at + _HEADER.size)
        packed = hashlib.sha256(file.read(frame.size)).digest()
        if packed not in self._lists:
            names = parse_json(_payload(file, frame.at, frame.size, _MAX_PAYLOAD) or b"[]")
            if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
                raise ValueError("has slots without a name")
            self._lists[packed] = tuple(names)
        return self._lists[packed]

    @classmethod
    def of(cls, run_dir: Path) -> SlotSteps | None:
        """Those of a run's folder; None where it has none that can be read."""
        try:
            found = cls(run_dir / SLOT_FILE)
        except (OSError, ValueError):
            return None
        return found if len(found.steps) else None

    def read(
        self, first: int = 0, back: bool = False
    ) -> Iterator[tuple[int, tuple[str, ...], Floats]]:
        """(step, slots, float32 [figures, slots]) from step `first` on, or `back` from the last one.

        A frame that is damaged is passed over.
        """
        places = range(int(np.searchsorted(self.steps, first)), len(self.steps))
        with self._path.open("rb") as file:
            for place in reversed(places) if back else places:
                step, names = int(self.steps[place]), self._named[self._which[place]]
                size = 4 * len(FIGURES) * len(names)
                payload = _payload(file, int(self._at[place]), int(self._sizes[place]), size)
                if payload is None:
                    continue
                if names and len(payload) == size:
                    planes = np.frombuffer(payload, np.uint8).reshape(len(FIGURES), 4, -1)
                    yield (
                        step,
                        names,
                        np.ascontiguousarray(planes.transpose(0, 2, 1)).view(np.float32)[..., 0],
                    )

    def heard(self) -> list[str]:
        """Slots whose amax ever was over 0."""
        found: set[str] = set()
        for _, names, values in self.read():
            if len(found) == len(self.names):
                break
            found |= {names[place] for place in np.flatnonzero(values[0] > 0)}
        return [name for name in self.names if name in found]

    def newest(
        self, slots: Sequence[str], count: int
    ) -> tuple[dict[str, dict[int, float]], dict[str, list[float]]]:
        """({`fp8_<figure>/<slot>`: {step: its last measured value}}, {slot: its last `count` amaxes})."""
        keys = [metric.key for metric in SLOT_ROWS.values()]
        last: dict[str, dict[int, float]] = {f"{key}/{slot}": {} for key in keys for slot in slots}
        amaxes: dict[str, list[float]] = {slot: [] for slot in slots}
        for step, names, values in self.read(back=True):
            for place, name in enumerate(names):
                if name in amaxes and len(amaxes[name]) < count:
                    amaxes[name].insert(0, float(values[0, place]))
                for row, key in enumerate(keys):
                    value = float(values[row, place])
                    if not math.isnan(value) and last.get(f"{key}/{name}") == {}:
                        last[f"{key}/{name}"] = {step: value}
            if all(last.values()) and all(len(each) == count for each in amaxes.values()):
                break
        return last, amaxes

    def joined(
        self, figure: str, slots: Sequence[str], columns: int | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """(first step of each column [n], largest value in it [slots, n]), NaN where there is none."""
        each = 1 if columns is None else max(1, -(-len(self.steps) // columns))
        values = np.full((len(slots), -(-len(self.steps) // each)), np.nan)
        rows = {name: row for row, name in enumerate(slots)}
        which = FIGURES.index(figure)
        chosen, targets, of = np.zeros(0, np.int64), np.zeros(0, np.int64), None
        for step, names, figures in self.read():
            if names is not of:
                of = names
                chosen = np.array(
                    [place for place, name in enumerate(names) if name in rows], np.int64
                )
                targets = np.array([rows[names[place]] for place in chosen], np.int64)
            column = values[:, int(np.searchsorted(self.steps, step)) // each]
            column[targets] = np.fmax(column[targets], figures[which, chosen])
        return self.steps[::each], values


def _kept(
    attempts: npt.NDArray[np.int64],
    steps: npt.NDArray[np.int64],
    begins: Mapping[int, int],
    end: int | None,
) -> npt.NDArray[np.int64]:
    """Places of the frames that count, by step: of each step before `end` the last that no rollback threw away."""
    replaced_from = rewritten(begins)
    limits = np.full(len(steps), np.inf if end is None else float(end))
    for attempt in np.unique(attempts):
        of_attempt = attempts == attempt
        limits[of_attempt] = np.minimum(limits[of_attempt], replaced_from(int(attempt)))
    # By step, then attempt; frames of the same stay in the order of the file.
    order = np.lexsort((attempts, steps))
    order = order[steps[order] < limits[order]]
    last = np.append(np.diff(steps[order]) != 0, True) if len(order) else np.zeros(0, bool)
    return order[last]


def rewritten(begins: Mapping[int, int]) -> Callable[[int], float]:
    """From the first step of each attempt: of an attempt the step from which on later ones did its steps again."""
    attempts = sorted(begins)
    firsts = [
        *reversed([*accumulate((begins[attempt] for attempt in reversed(attempts)), min)]),
        math.inf,
    ]
    return lambda attempt: firsts[bisect_right(attempts, attempt)]


def _payload(file: Any, at: int, packed: int, size: int) -> bytes | None:
    """The payload of the frame at byte `at`, `packed` bytes there; None if it is damaged or larger than `size`."""
    file.seek(at + _HEADER.size)
    stream = zlib.decompressobj()
    try:
        payload = stream.decompress(file.read(packed), size + 1)
    except zlib.error:
        return None
    return payload if stream.eof and len(payload) <= size else None


def write_parquet(run_dir: Path) -> Path | None:
    """`fp8_telemetry.parquet` of a run: a row for each step and slot. None where there is nothing to write.

    Raises ImportError without pyarrow, OSError for a disk that refuses.
    """
    found = SlotSteps.of(run_dir)
    if found is None:
        return None
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    text = arrow.dictionary(arrow.int32(), arrow.string())
    kinds = {"step": arrow.int64(), "layer": text, "role": text}
    schema = arrow.schema([(name, kinds.get(name, arrow.float32())) for name in COLUMNS])
    path = run_dir / PARQUET
    with (
        atomic_file(path) as stream,
        parquet.ParquetWriter(
            stream,
            schema,
            compression="zstd",
            use_dictionary=["step", "layer", "role", "scale"],
            column_encoding={name: "BYTE_STREAM_SPLIT" for name in FIGURES if name != "scale"},
        ) as writer,
    ):
        for names, block in _blocks(found):
            writer.write_table(_table(arrow, schema, names, block))
    return path


Block = list[tuple[int, Floats]]


def _blocks(found: SlotSteps) -> Iterator[tuple[tuple[str, ...], Block]]:
    """Steps with the same slots, about a million rows at once."""
    block: Block = []
    of: tuple[str, ...] = ()
    for step, names, values in found.read():
        if block and (names != of or len(block) * len(of) >= _ROWS_AT_ONCE):
            yield of, block
            block = []
        of = names
        block.append((step, values))
    if block:
        yield of, block


def _table(arrow: Any, schema: Any, names: Sequence[str], block: Block) -> Any:
    layers, roles = zip(
        *((layer, role) for layer, _, role in (name.rpartition(".") for name in names)), strict=True
    )
    values = np.stack([figures for _, figures in block])
    arrays: dict[str, Any] = {
        "step": np.repeat(np.array([step for step, _ in block], np.int64), len(names))
    }
    for name, words in (("layer", layers), ("role", roles)):
        known = tuple(dict.fromkeys(words))
        places = {word: place for place, word in enumerate(known)}
        indices = np.tile(np.array([places[word] for word in words], np.int32), len(block))
        arrays[name] = arrow.DictionaryArray.from_arrays(indices, list(known))
    for place, name in enumerate(FIGURES):
        column = values[:, place, :].reshape(-1)
        missing = None if name in _ALWAYS_MEASURED else np.isnan(column)
        arrays[name] = arrow.array(column, mask=missing)
    return arrow.table([arrays[name] for name in schema.names], schema=schema)
