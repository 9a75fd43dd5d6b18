"""What ranks exchange: small reductions, fingerprints of the weights, and times of the forward passes.

Reductions run over the default process group. Without one they return their argument.

Ranks of data parallel training must hold the same weights, bit for bit. `RankComparison` checks that without sending
any weights: each rank hashes every parameter on its device (`Fingerprint`), and one maximum over ranks finds the hashes
that differ (`differing`).
"""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

# Imported here, before a process group exists. DistributedDataParallel imports it anyway, and its defaults are
# `group.WORLD`. Imported later, they would keep the group until the interpreter ends, whose finalisation then aborts or
# hangs in the group's threads.
import torch.distributed.nn.functional
from torch import Tensor, nn

from harness.core.config import GuardConfig
from harness.core.shards import Rows


def world_size() -> int:
    """Ranks of the default process group; 1 where none is initialised."""
    return dist.get_world_size() if _has_group() else 1


def world_rank() -> int:
    """This process's rank in the default process group; 0 where none is initialised."""
    return dist.get_rank() if _has_group() else 0


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def max_over_ranks(values: Tensor) -> Tensor:
    """Maximum over ranks, in place and in one collective; `values` itself is returned.

    Infinities are kept, NaN is not defined.
    """
    if world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether `flag` is true on any rank; the same on every rank. Of several ranks, the host waits for the device."""
    if world_size() == 1:
        return flag
    return bool(max_over_ranks(torch.tensor(float(flag), device=device)).item())


def mean_over_ranks(values: Tensor) -> Tensor:
    """Mean over ranks, summed in rank order: the same bits on every rank."""
    # No all_reduce(SUM): the order in which it adds, and so the bits, are the library's choice.
    if world_size() == 1:
        return values
    return gather_over_ranks(values).mean(dim=0)


def gather_over_ranks(values: Tensor) -> Tensor:
    """Every rank's `values`, of one shape: [ranks, *shape], the same on every rank."""
    ranks = world_size()
    if ranks == 1:
        return values[None]
    gathered = [torch.empty_like(values) for _ in range(ranks)]
    dist.all_gather(gathered, values.contiguous())
    return torch.stack(gathered)


def gather_texts(text: str) -> list[str]:
    """Every rank's `text`, in rank order."""
    texts = [text] * world_size()
    if len(texts) > 1:
        dist.all_gather_object(texts, text)
    return texts


def ranks_here() -> int:
    """Ranks on this machine, this one included: they share its memory. Collective."""
    machines = gather_texts(_machine())
    return machines.count(machines[world_rank()])


def _machine() -> str:
    """Identifies the running kernel, which containers of one machine share; where it does not say, the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


# 64-bit words hashed at once: on a CPU what fits its cache, on a GPU what keeps kernel launches few (32 MiB, twice).
_CPU_CHUNK, _GPU_CHUNK = 1 << 16, 1 << 22
# Chunks of the largest tensor: 32 GiB on a CPU.
_MOST_CHUNKS = 1 << 16
_LOWER_HALF = (1 << 32) - 1


class Fingerprint:
    """Hashes of tensors on one device.

    A tensor's bytes are read as 64-bit words w[i]; of the up to seven bytes that are left over each is a word. The hash
    is the sum of f[i](w[i]) modulo 2^64, where f[i] is a bijection of its own for each place i: multiply by an odd
    random number (which is invertible), XOR the upper half onto the lower half, multiply again.

    So a change within one word, of one bit or of all, always changes the hash. Changes of several words, swaps
    included, escape once in some 2^32 or less. A plain sum of products would miss every second case of two flipped
    signs: the top bit times any odd number is the top bit, and two of them cancel.

    Bits are compared, not values: signed zeros and NaN payloads count. A tensor has at most 32 GB on a CPU.

    portable: whether a GPU's hashes are those of a CPU, for hashes that are kept. It takes more kernel launches, and
        limits a tensor to 32 GB there, too.
    """

    def __init__(self, device: torch.device, portable: bool = False) -> None:
        self.device = device
        self._chunk = _CPU_CHUNK if portable or device.type == "cpu" else _GPU_CHUNK
        # The factor of word i of chunk c is within[i] * between[c].
        self._within = torch.from_numpy(_odd(0, self._chunk)).to(device)
        self._between = torch.from_numpy(_odd(1, _MOST_CHUNKS)).to(device)

    @torch.no_grad()
    def of(self, tensors: Iterable[Tensor]) -> Tensor:
        """One hash for each tensor: int64 [tensors], on the device; no host read. Any dtype, shape and stride."""
        hashes = [self._hash(tensor.detach()) for tensor in tensors]
        return torch.stack(hashes) if hashes else self._within[:0]

    def _hash(self, tensor: Tensor) -> Tensor:
        data = _bytes_of(tensor)
        return self._part(data, 0, data.numel(), data.numel())

    @torch.no_grad()
    def of_rows(self, data: Tensor, rows: Rows) -> Tensor:
        """What `rows` add to the hash of their tensor: int64 0-d, on the device.

        The parts of all rows of a tensor add up to its hash, modulo 2^64.

        data: contiguous, from row `rows.begin` to at least row `rows_to_hash`.
        """
        width = _row_bytes(rows, data.dtype)
        begin, end, size = (count * width for count in (rows.begin, rows.end, rows.shape[0]))
        return self._part(_bytes_of(data), begin, end, size)

    def _part(self, data: Tensor, begin: int, end: int, size: int) -> Tensor:
        """The sum over the words that begin in the bytes [begin, end) of a tensor of `size` bytes.

        data: uint8, the tensor's bytes from `begin` on.
        """
        # Whole 64-bit words, and up to seven bytes that are left over, each as a word of its own.
        whole = size // 8 * 8
        first, last = _next_word(begin), min(_next_word(end), whole)
        words = data[first - begin : max(first, last) - begin]
        rest = data[max(begin, whole) - begin : max(end, whole) - begin]
        # A view into a larger buffer may begin between two words, where int64 cannot be read.
        if words.storage_offset() % 8:
            words = words.clone()

        # The first piece may begin within a chunk. The bytes that are left over have the chunk after the last one.
        chunk, skipped = divmod(first // 8, self._chunk)
        head, others = words.view(torch.int64).tensor_split([self._chunk - skipped])
        sums = [self._sum(head, skipped)]
        if len(others):
            sums += [self._sum(piece, 0) for piece in others.split(self._chunk)]
        total = (torch.stack(sums) * self._between[chunk : chunk + len(sums)]).sum()
        after = max(1, -(-whole // (8 * self._chunk)))
        left_over = self._sum(rest.to(torch.int64), max(begin, whole) - whole)
        return total + left_over * self._between[after]

    def _sum(self, words: Tensor, place: int) -> Tensor:
        """place: of the first word within its chunk."""
        # Multiply, fold, multiply, see the class. In place: no second copy of a chunk.
        factors = self._within[place : place + len(words)]
        mixed = words * factors
        # The shift copies the sign, and the mask removes the copies.
        mixed ^= (mixed >> 32) & _LOWER_HALF
        mixed *= factors
        return mixed.sum()


def rows_to_hash(rows: Rows, dtype: torch.dtype) -> int:
    """The row before which the bytes end that `Fingerprint.of_rows` needs: `rows.end`, or a little more.

    The last word that begins in `rows` may end in the rows after them.
    """
    width = _row_bytes(rows, dtype)
    if rows.begin >= rows.end or not width:
        return rows.end
    needed = min(_next_word(rows.end * width), rows.shape[0] * width)
    return -(-needed // width)


def _row_bytes(rows: Rows, dtype: torch.dtype) -> int:
    return math.prod(rows.shape[1:]) * dtype.itemsize


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _next_word(place: int) -> int:
    """The first byte, from `place` on, at which a 64-bit word begins."""
    return -(-place // 8) * 8


def differing(hashes: Tensor) -> Tensor:
    """Which of `hashes` (int64 [n]) are not the same on every rank: bool [n]. One collective."""
    # The maximum equals the minimum only where all ranks agree. ~ reverses the order, so the maximum of ~hashes is ~ of
    # the minimum. Unlike -, it never overflows.
    count = len(hashes)
    both = max_over_ranks(torch.cat([hashes, ~hashes]))
    return both[:count] != ~both[count:]


class RankComparison:
    """Compares the ranks' parameters every `every` steps, and in the first step after a gap.

    A resume and a rollback are gaps: what every rank has just loaded must be the same everywhere.
    """

    def __init__(
        self,
        every: int,
        parameters: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.every = every
        self._parameters = dict(parameters)
        self._fingerprint = Fingerprint(device)
        self._last = 0

    @classmethod
    def of(
        cls, guard: GuardConfig, model: nn.Module, device: torch.device
    ) -> RankComparison | None:
        """What the guard compares between ranks; None with one rank, or where the config switches it off."""
        if world_size() == 1 or not guard.enabled or not guard.compare_ranks_every:
            return None
        return cls(guard.compare_ranks_every, dict(model.named_parameters()), device)

    def after(self, step: int) -> tuple[tuple[str, ...], Tensor]:
        """After a step's update: the parameters compared and, float32 [n], 1.0 for each that differs between ranks.

        Empty if nothing is due. Collective: call it once a step on every rank.
        """
        gap = self._last != step - 1
        self._last = step
        if not gap and step % self.every:
            return (), torch.zeros(0, device=self._fingerprint.device)
        hashes = self._fingerprint.of(self._parameters.values())
        return tuple(self._parameters), differing(hashes).float()


def _odd(stream: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """`count` odd numbers, the same everywhere: int64 [count], by splitmix64 (Steele, Lea & Flood, 2014)."""
    places = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 40)
    words = places * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((words ^ (words >> np.uint64(31))) | np.uint64(1)).view(np.int64)


_Events = tuple[torch.cuda.Event, torch.cuda.Event]
"""Begin and end of one forward pass."""


class ForwardClock:
    """Seconds of the forward passes of one step on this rank.

    On a CPU they are known when the step has run. A GPU is still busy then, so events on its own stream time it. What
    `step` returns there is of the newest step that the GPU has finished, one to three steps ago (0.0 before the first).
    It never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[_Events] = []
        self._queued: deque[list[_Events]] = deque()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward pass."""
        if self._on_gpu:
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def step(self) -> float:
        """Call it after the step's last forward pass (on a GPU: when it is queued); returns the seconds to report."""
        if not self._on_gpu:
            seconds, self._seconds = self._seconds, 0.0
            return seconds

        # Only steps that the GPU has finished can be read without waiting for it.
        self._queued.append(self._events)
        self._events = []
        while self._queued and _over(self._queued[0]):
            milliseconds = 0.0
            for begin, end in self._queued.popleft():
                milliseconds += begin.elapsed_time(end)
            self._seconds = milliseconds / 1000
        return self._seconds


def _over(passes: list[_Events]) -> bool:
    """Whether the GPU has finished these forward passes. Asks, and never waits."""
    return all(end.query() for _, end in passes)
