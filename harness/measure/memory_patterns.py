"""Patterns for a test of memory: what is written into each cell, and must be read back.

A cell is an int64. Each pattern looks for another fault:

zeros, ones, 0x55, 0xAA      bits that are stuck, and neighbours that pull at each other
address, inverted address    cells that answer under a wrong address: each holds its own number
walking one                  every single bit of every cell, one at a time
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CELL_BYTES = 8
_BITS = 64
_CONSTANT = {
    "zeros": 0,
    "ones": -1,
    "0x55": 0x5555555555555555,
    "0xAA": ~0x5555555555555555,
}


class Pattern(NamedTuple):
    """One pass over the memory.

    name: of the pattern.
    turn: for the walking one, by how many bits it is moved.
    """

    name: str
    turn: int = 0

    @property
    def of_address(self) -> bool:
        """Whether a cell holds something of its own number, and so each block something else."""
        return self.name.endswith("address")

    def values(self, first: int, count: int, place: torch.device) -> Tensor:
        """What `count` cells from number `first` on hold, int64 [count] on `place`. first: a multiple of 64."""
        if self.of_address:
            numbers = torch.arange(first, first + count, dtype=torch.int64, device=place)
            if self.name.startswith("inverted"):
                return ~numbers
            return numbers
        if self.name == "walking one":
            ones = torch.ones(_BITS, dtype=torch.int64, device="cpu")
            shifts = (torch.arange(_BITS, device="cpu") + self.turn) % _BITS
            period = ones << shifts
            repeats = -(-count // _BITS)
            return period.to(place).repeat(repeats)[:count]
        return torch.full((count,), _CONSTANT[self.name], dtype=torch.int64, device=place)


def patterns() -> Iterator[Pattern]:
    """All passes, in order. Between two of them most bits of a cell change."""
    for name in (*_CONSTANT, "address", "inverted address"):
        yield Pattern(name)
    for turn in range(_BITS):
        yield Pattern("walking one", turn)
