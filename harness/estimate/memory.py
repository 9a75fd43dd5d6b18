"""The most memory that is live in a step, as it was recorded or with compiled blocks. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Change(NamedTuple):
    """Live memory grows or shrinks.

    place: how many operations were recorded before.
    storage: number of the storage, as in `roofline.Piece`.
    bytes: by which it grows; negative where it shrinks.
    kind: of the storage, such as "gradients".
    """

    place: int
    storage: int
    bytes: int
    kind: str


@dataclass(frozen=True, slots=True)
class Kept:
    """What compiled blocks do to storages, by their numbers.

    share: what a storage takes of its bytes; 0 where it is in no memory. One that is not named takes all.
    until: the place of the last operation that reads it, where compiled code frees it at another time.
    """

    share: Mapping[int, float] = field(default_factory=dict[int, float])
    until: Mapping[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that were live at one time, and the bytes at that time by kind."""

    bytes: int
    kinds: Counter[str]


def as_compiled(changes: Sequence[Change], kept: Iterable[Kept]) -> list[Change]:
    """`changes` as steps with compiled blocks make them, in the order of compiled code.

    kept: of each such step.
    """
    share: dict[int, float] = {}
    until: dict[int, int] = {}
    for each in kept:
        share |= each.share
        until |= each.until

    # Some storages are freed earlier there, and others later. One that is freed and filled again, as FSDP2 gathers
    # weights, is no memory of the compiler's.
    freed = Counter(change.storage for change in changes if change.bytes < 0)
    found: list[Change] = []
    for change in changes:
        place = change.place
        if change.bytes < 0 and change.storage in until and freed[change.storage] == 1:
            place = until[change.storage] + 1
        size = round(change.bytes * share.get(change.storage, 1.0))
        found.append(change._replace(place=place, bytes=size))
    return sorted(found, key=lambda change: change.place)


def peak(before: Mapping[str, int], changes: Iterable[Change]) -> Peak:
    """The peak of the memory that `changes` describe, in their order. before: bytes that were live before, by kind."""
    kinds = Counter(before)
    live = most = sum(kinds.values())
    at_most = Counter(kinds)
    for change in changes:
        live += change.bytes
        kinds[change.kind] += change.bytes
        if live > most:
            most = live
            at_most = Counter(kinds)
    return Peak(most, at_most)
