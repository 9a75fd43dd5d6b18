"""The files of a checkpoint by name, and the pieces of those parts that several ranks hold together. Free of torch.

A part of the state whose tensors are whole has one file, `<part>.safetensors`. A part that ranks share has a file for
each rank, its piece: `<part>-<rank>-of-<ranks>.safetensors`, both numbers with five digits. A piece has the rows that
its rank holds of every sharded tensor of the part. A rank that holds no row of a tensor writes it with 0 rows, so that
all pieces of a part name the same tensors. What is whole in such a part (a step counter) is in `<part>.safetensors`.

state.json says what the pieces are of, under the key `shards`:

    {"ranks": 4, "tensors": {"model": {"embed.weight": [50257, 768]}, "optimizer": {...}}}

These are the whole shapes. Which rows a rank has follows from them (`Rows.of_rank`). A checkpoint without that key has
no pieces.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from harness.core.shards import Rows, ShardedRows

TENSORS = ".safetensors"
SHARDS = "shards"
"""The key of state.json."""
PLAIN_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9]+)?")
"""A file name of a checkpoint: it cannot lead out of the folder, and is the same on every file system."""

# What torch allows: dimensions of a tensor, and the length of one.
MAX_DIMENSIONS = 64
MAX_LENGTH = 1 << 63
_PIECE = re.compile(r".+-\d{5,}-of-\d{5,}")
# Names that one problem lists.
_LISTED = 8


def part_file(part: str) -> str:
    """The name of the file for a part's whole tensors.

    Raises ValueError for a part that makes no plain file name, or one that looks like a piece.
    """
    name = part + TENSORS
    if not PLAIN_NAME.fullmatch(name) or _PIECE.fullmatch(part):
        raise ValueError(f"part name {part!r} is not of the form a-z, 0-9, _ and -")
    return name


def piece_file(part: str, rank: int, ranks: int) -> str:
    """The name of the file for the rows of `part` that `rank` of `ranks` holds. Raises ValueError as `part_file`."""
    return part_file(part).removesuffix(TENSORS) + f"-{rank:05d}-of-{ranks:05d}{TENSORS}"


def is_piece(name: str) -> bool:
    """Whether a file name is that of a piece, of whatever checkpoint."""
    return name.endswith(TENSORS) and bool(_PIECE.fullmatch(name.removesuffix(TENSORS)))


@dataclass(frozen=True, slots=True)
class Shards:
    """What the pieces of a checkpoint are of.

    ranks: how many wrote it; each has a piece of every part in `tensors`.
    tensors: whole shapes, by part and name.
    """

    ranks: int
    tensors: Mapping[str, Mapping[str, tuple[int, ...]]]

    @classmethod
    def of_rows(cls, rows: ShardedRows, ranks: int) -> Shards:
        """As `ranks` ranks write them, each of which holds its `rows`; a part without sharded tensors is left out."""
        tensors: dict[str, dict[str, tuple[int, ...]]] = {}
        for part, named in rows.items():
            if named:
                tensors[part] = {name: each.shape for name, each in named.items()}
        return cls(ranks, tensors)

    @classmethod
    def from_json(cls, raw: Any) -> Shards:
        """What `as_json` gave. Raises ValueError saying why `raw` is not of that form.

        Costs no more than `raw` is long, whatever numbers are in it.
        """
        if not isinstance(raw, dict) or set(raw) != {"ranks", "tensors"}:
            raise ValueError("its shards are not ranks and tensors")
        # `bool` is an int to isinstance, so the type itself is compared.
        ranks, parts = raw["ranks"], raw["tensors"]
        if type(ranks) is not int or not 1 <= ranks < MAX_LENGTH:
            raise ValueError(f"its shards are of {ranks!r:.40} ranks")
        if not isinstance(parts, dict) or not parts:
            raise ValueError("its shards have no tensors")

        tensors: dict[str, dict[str, tuple[int, ...]]] = {}
        for part, named in parts.items():
            try:
                part_file(part)
            except ValueError as error:
                raise ValueError(f"its shards are of a part {part[:80]!r}") from error
            if not isinstance(named, dict) or not named:
                raise ValueError(f"its shards of {part} have no tensors")
            tensors[part] = {}
            for name, shape in named.items():
                if not _is_shape(shape):
                    raise ValueError(f"its shards have an impossible shape for {name[:80]!r}")
                tensors[part][name] = tuple(shape)
        return cls(ranks, tensors)

    def as_json(self) -> dict[str, Any]:
        """For state.json."""
        tensors: dict[str, dict[str, list[int]]] = {}
        for part, named in self.tensors.items():
            tensors[part] = {name: list(shape) for name, shape in named.items()}
        return {"ranks": self.ranks, "tensors": tensors}

    def names_of(self, rank: int) -> Iterator[str]:
        """The file names of the pieces of `rank`, one for each part."""
        for part in self.tensors:
            yield piece_file(part, rank, self.ranks)

    def rows_of(self, part: str, rank: int) -> dict[str, Rows]:
        """What the piece of `rank` has of `part`."""
        rows: dict[str, Rows] = {}
        for name, shape in self.tensors[part].items():
            rows[name] = Rows.of_rank(shape, rank, self.ranks)
        return rows

    def piece_of(self, name: str) -> tuple[str, int] | None:
        """Part and rank of the piece in the file `name`; None for any other file."""
        stem = name.removesuffix(TENSORS)
        if not is_piece(name):
            return None
        part, rank, _, _ = stem.rsplit("-", 3)
        number = int(rank[:20])
        known = part in self.tensors and number < self.ranks
        return (part, number) if known and piece_file(part, number, self.ranks) == name else None


def set_problems(shards: Shards | None, files: Mapping[str, Any]) -> list[str]:
    """The problems of a checkpoint that has not exactly one piece for each rank and part; empty if it has.

    They are texts that begin with a verb.

    shards: what state.json says of the pieces; None if it says nothing.
    files: by name, the files that the manifest lists.

    The cost grows with `files` alone: a damaged state.json may claim any number of ranks.
    """
    pieces = [name for name in files if is_piece(name)]
    if shards is None:
        return [f"has pieces that state.json does not know: {_some(pieces)}"] if pieces else []

    problems: list[str] = []
    foreign = [name for name in pieces if shards.piece_of(name) is None]
    if foreign:
        problems.append(
            f"lists pieces that are not of these {shards.ranks} ranks: {_some(foreign)}"
        )

    # No list of all names: `shards` may claim millions of ranks. There are len(pieces) files, so among the first
    # len(pieces) + _LISTED names of a rank at least _LISTED are missing, and that is as many as the message lists.
    missing: list[str] = []
    for rank in range(min(shards.ranks, len(pieces) + 1)):
        names = islice(shards.names_of(rank), len(pieces) + _LISTED)
        missing += [name for name in names if name not in files]
        if len(missing) >= _LISTED:
            break
    if missing:
        count = shards.ranks * len(shards.tensors) - (len(pieces) - len(foreign))
        problems.append(f"lacks pieces of its {shards.ranks} ranks: {_some(missing, count)}")
    return problems


def piece_problems(
    shards: Shards, name: str, header: Mapping[str, Any], first: Mapping[str, Any]
) -> list[str]:
    """What is wrong with the piece in the file `name`, as texts that begin with a verb; empty if nothing is.

    header: of that file: for each tensor `shape` and `dtype`, as `manifest.check_header` gives it.
    first: the same of the first rank's piece of that part. All pieces have the dtypes of that one.
    """
    found = shards.piece_of(name)
    if found is None:
        return ["is no piece of this checkpoint"]
    rows = shards.rows_of(*found)

    problems: list[str] = []
    if missing := [each for each in rows if each not in header]:
        problems.append(f"lacks tensors: {_some(missing)}")
    if additional := [each for each in header if each not in rows]:
        problems.append(f"has tensors that state.json does not know: {_some(additional)}")
    for each in rows:
        if each not in header:
            continue
        shape, dtype = header[each]["shape"], header[each].get("dtype")
        if tuple(shape) != rows[each].local_shape:
            expected = list(rows[each].local_shape)
            problems.append(f"has {each[:80]!r} of shape {shape}, its rank holds {expected}")
        elif each in first and dtype != first[each].get("dtype"):
            other = first[each].get("dtype")
            problems.append(f"has {each[:80]!r} in {dtype!r:.20}, the first rank in {other!r:.20}")
    return problems[:_LISTED]


def whole_problems(sharded: Mapping[str, Any], header: Mapping[str, Any]) -> list[str]:
    """What is wrong with the file of a part's whole tensors, beside its pieces: it must have none of those.

    sharded: the part's sharded tensors.
    header: of that file.
    """
    twice = [each for each in header if each in sharded]
    return [f"has tensors that are in the pieces too: {_some(twice)}"] if twice else []


def _is_shape(shape: Any) -> bool:
    if not isinstance(shape, list) or not 1 <= len(shape) <= MAX_DIMENSIONS:
        return False
    whole = all(type(length) is int and 0 <= length < MAX_LENGTH for length in shape)
    return whole and math.prod(shape) < MAX_LENGTH


def _some(names: list[str], count: int = 0) -> str:
    """The first of `names`, and how many more there are. count: of all, if `names` are not all."""
    shown = names[:_LISTED]
    text = ", ".join(name[:80] for name in shown)
    more = max(count, len(names)) - len(shown)
    return f"{text} and {more} more" if more else text
