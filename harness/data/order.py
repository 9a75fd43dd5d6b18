"""The order of samples: which ones a window holds is a pure function of (seed, window).

Nothing is shuffled and nothing is remembered, so a resume is exact and the number of ranks does not matter. The order
is endless. Each epoch, n positions, reads each of the n samples once, in the order of a keyed permutation of [0, n).

The permutation is computed position by position, without memory: a balanced Feistel network (Luby & Rackoff, 1988) over
the next even number of bits; an output beyond n is fed back in until it falls inside (cycle walking: Black & Rogaway,
"Ciphers with arbitrary finite domains", 2002).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from harness.data.arrays import Ints

Words = npt.NDArray[np.uint64]

_ROUNDS = 8
_BLOCK = 1024
_MASK64 = (1 << 64) - 1


def sample_numbers(seed: int, index: int, global_batch: int, n_samples: int) -> Ints:
    """The samples of window `index`: int64 [global_batch], each in [0, n_samples).

    Position p = index * global_batch + j of the endless order is sample permutation(seed, p // n_samples) at
    p % n_samples: a window may end one epoch and begin the next.
    """
    begin = index * global_batch
    return ordered_samples(seed, begin, begin + global_batch, n_samples)


def ordered_samples(seed: int, begin: int, end: int, n_samples: int) -> Ints:
    """The samples at positions [begin, end) of the endless order, int64; see `sample_numbers`."""
    first = begin // _BLOCK
    last = (end - 1) // _BLOCK
    key = seed & _MASK64
    blocks = [_block(key, number, n_samples) for number in range(first, last + 1)]
    order = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    start = begin - first * _BLOCK
    # A copy: the block stays in the cache, and a caller may write into its own.
    return order[start : start + end - begin].copy()


def keyed_places(seed: int, cycle: int, count: int) -> Ints:
    """A permutation of [0, count), int64, keyed by seed and cycle."""
    cycles = np.full(count, cycle, dtype=np.uint64)
    keys = _round_keys(seed & _MASK64, cycles)
    places = np.arange(count, dtype=np.uint64)
    return _permute(places, count, keys).astype(np.int64)


@lru_cache(maxsize=64)  # a window may lie across two, of each source of a mixture
def _block(seed: int, number: int, n_samples: int) -> Ints:
    """Samples at positions [number * _BLOCK, (number + 1) * _BLOCK) of the order, int64; read only.

    The network takes hundreds of small operations, however few positions go through it: many windows share one pass.
    """
    positions = np.uint64(number * _BLOCK) + np.arange(_BLOCK, dtype=np.uint64)
    epochs, places = np.divmod(positions, np.uint64(n_samples))
    keys = _round_keys(seed, epochs)
    return _permute(places, n_samples, keys).astype(np.int64)


def _permute(places: Words, n: int, keys: Words) -> Words:
    """places: uint64 [k] in [0, n); keys: uint64 [rounds, k]. A permutation of [0, n) for each column of keys."""
    # Bits of each half: together the least even number of bits that all places fit into.
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    places = places.copy()

    # Cycle walking. The network covers at most 4 n numbers, so a position takes at most 4 passes on average.
    outside = np.arange(len(places))
    while len(outside):
        places[outside] = _feistel(places[outside], half, keys[:, outside])
        outside = outside[places[outside] >= n]
    return places


def _feistel(values: Words, half: int, keys: Words) -> Words:
    """A bijection of 2 * `half` bits: each round swaps the halves and masks one with a hash of the other."""
    bits = np.uint64(half)
    low = np.uint64((1 << half) - 1)
    left, right = values >> bits, values & low
    for key in keys:
        mask = _mix(right ^ key) & low
        left, right = right, left ^ mask
    return (left << bits) | right


def _round_keys(seed: int, epochs: Words) -> Words:
    """uint64 [rounds, k]: keys of the rounds for each of k positions, from the seed and the position's epoch."""
    # Mixed twice, so that neighbouring seeds and neighbouring epochs have unrelated keys.
    of_seed = _mix(np.full_like(epochs, seed))
    base = _mix(of_seed ^ epochs)
    states = [base + np.uint64(number) for number in range(_ROUNDS)]
    return np.stack([_mix(state) for state in states])


def _mix(words: Words) -> Words:
    """The splitmix64 generator's output for state `words` (Steele, Lea & Flood, 2014): every bit moves every bit."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
