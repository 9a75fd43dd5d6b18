"""Do all ranks hold the same weights? Every parameter is hashed where it lives; one collective compares the hashes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from harness.core.collectives import max_over_ranks

_CPU_CHUNK, _GPU_CHUNK = 1 << 16, 1 << 22
"""Words hashed at once: on a CPU what fits its cache, on a GPU what keeps kernel launches few (32 MiB, twice)."""
_MOST_CHUNKS = 1 << 16
_LOWER_HALF = (1 << 32) - 1


class Fingerprint:
    """Hashes of tensors on one device.

    A tensor's bytes are read as 64-bit words w[i], zero-padded, and hash = sum of f[i](w[i]) modulo 2^64, with f[i] a
    bijection of its own for each place: times an odd random number (which is invertible), upper half onto lower half,
    times the number again. So a change within one word, of one bit or all, always changes the hash; changes of several
    words, swaps included, escape once in some 2^32 or less. (A plain sum of products would lose every second of two
    sign flips: the top bit times any odd number is the top bit.) Bits are compared, not values: signed zeros and NaN
    payloads count. A tensor has at most 32 GB on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._chunk = _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK
        # The factor of word i of chunk c is within[i] * between[c].
        self._within = torch.from_numpy(_odd(0, self._chunk)).to(device)
        self._between = torch.from_numpy(_odd(1, _MOST_CHUNKS)).to(device)

    @torch.no_grad()
    def of(self, tensors: Iterable[Tensor]) -> Tensor:
        """int64 [tensors], on the device; nothing is read by the host. Any dtype, shape and stride."""
        hashes = [self._hash(tensor.detach()) for tensor in tensors]
        return torch.stack(hashes) if hashes else self._within[:0]

    def _hash(self, tensor: Tensor) -> Tensor:
        data = tensor.contiguous().reshape(-1).view(torch.uint8)
        whole = data.numel() // 8 * 8
        words, rest = data[:whole], data[whole:]
        # A view into a larger buffer may begin between two words.
        words = (words.clone() if words.storage_offset() % 8 else words).view(torch.int64)
        pieces = [*words.split(self._chunk), rest.to(torch.int64)]
        sums = torch.stack([self._sum(piece) for piece in pieces])
        return (sums * self._between[: len(pieces)]).sum()

    def _sum(self, words: Tensor) -> Tensor:
        factors = self._within[: len(words)]
        mixed = words * factors
        mixed ^= (mixed >> 32) & _LOWER_HALF  # the shift copies the sign, the mask removes the copies
        mixed *= factors
        return mixed.sum()


def differing(hashes: Tensor) -> Tensor:
    """Which of `hashes` (int64 [n]) are not the same on every rank: bool [n]. One collective."""
    count = len(hashes)
    both = max_over_ranks(torch.cat([hashes, ~hashes]))  # ~ turns the order round and, unlike -, never overflows
    return both[:count] != ~both[count:]


class RankComparison:
    """Compares the ranks' parameters every `every` steps, and in the first step after a gap.

    A resume and a rollback are gaps: what every rank has just loaded must be the same everywhere.
    """

    def __init__(self, every: int, parameters: Mapping[str, Tensor], device: torch.device) -> None:
        self.every = every
        self._parameters = dict(parameters)
        self._fingerprint = Fingerprint(device)
        self._last = 0

    def after(self, step: int) -> tuple[tuple[str, ...], Tensor]:
        """After a step's update: the parameters compared and, float32 [n], 1.0 for each that differs between ranks.

        Empty if nothing is due. To be called once a step on every rank: collective.
        """
        gap, self._last = self._last != step - 1, step
        if not gap and step % self.every:
            return (), torch.zeros(0, device=self._fingerprint.device)
        return tuple(self._parameters), differing(self._fingerprint.of(self._parameters.values())).float()


def _odd(stream: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """`count` odd numbers, the same everywhere: int64 [count], by splitmix64 (Steele, Lea & Flood, 2014)."""
    words = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 40)) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((words ^ (words >> np.uint64(31))) | np.uint64(1)).view(np.int64)
