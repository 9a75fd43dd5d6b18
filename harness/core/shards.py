"""Tensors that several ranks hold in parts: the whole shape, and the rows that are here.

A sharded tensor is cut along its first dimension, the way `torch.chunk` and FSDP2 cut it: each rank gets
ceil(rows / ranks) rows, the last ranks fewer, or none. So shape, rank and number of ranks say which rows a rank holds,
and a checkpoint that was written by N ranks can be read by any other number of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a tensor that one rank holds.

    shape: of the whole tensor, at least one dimension.
    begin, end: the rows [begin, end) are here; equal where the rank holds none.
    """

    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def of_rank(cls, shape: tuple[int, ...], rank: int, ranks: int) -> Rows:
        """What `rank` of `ranks` holds of a tensor of `shape`."""
        each = -(-shape[0] // ranks)  # rounded up
        begin = min(rank * each, shape[0])
        return cls(tuple(shape), begin, min(begin + each, shape[0]))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what is here."""
        return (self.end - self.begin, *self.shape[1:])

    def holders(self, ranks: int) -> range:
        """Which of `ranks` ranks that share the tensor hold some of these rows; empty if there are no rows."""
        if self.begin >= self.end:
            return range(0)
        each = -(-self.shape[0] // ranks)
        return range(self.begin // each, (self.end - 1) // each + 1)


ShardedRows = Mapping[str, Mapping[str, Rows]]
"""By part of the state and name of the tensor: those that are sharded. All others are whole on every rank."""
