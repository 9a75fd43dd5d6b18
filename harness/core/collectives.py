"""What ranks tell each other: small reductions over the default process group, whether all hold the same weights, and
how long each one's forward passes take. Without a process group, reductions return their argument.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

# Before anybody joins a group: this module's defaults are `group.WORLD`, and DistributedDataParallel imports it. Later,
# the defaults would hold the group to the interpreter's end, whose finalisation aborts or hangs in the group's threads.
import torch.distributed.nn.functional
from torch import Tensor, nn

from harness.core.config import GuardConfig


def world_size() -> int:
    """Ranks of the default process group; 1 where none is initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def world_rank() -> int:
    """This process's rank in the default process group; 0 where none is initialised."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def max_over_ranks(values: Tensor) -> Tensor:
    """Maximum over ranks, in place and in one collective; `values` itself is returned.

    Infinities are kept, NaN is not defined.
    """
    if world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def mean_over_ranks(values: Tensor) -> Tensor:
    """Mean over ranks, summed in rank order: the same bits on every rank."""
    return values if world_size() == 1 else gather_over_ranks(values).mean(dim=0)


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
        mixed ^= (
            mixed >> 32
        ) & _LOWER_HALF  # the shift copies the sign, the mask removes the copies
        mixed *= factors
        return mixed.sum()


def differing(hashes: Tensor) -> Tensor:
    """Which of `hashes` (int64 [n]) are not the same on every rank: bool [n]. One collective."""
    count = len(hashes)
    both = max_over_ranks(
        torch.cat([hashes, ~hashes])
    )  # ~ turns the order round and, unlike -, never overflows
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

    @classmethod
    def of(
        cls, guard: GuardConfig, model: nn.Module, device: torch.device
    ) -> RankComparison | None:
        """What the guard compares between ranks; None where there is one rank, or it is not wanted."""
        if world_size() == 1 or not guard.enabled or not guard.compare_ranks_every:
            return None
        return cls(guard.compare_ranks_every, dict(model.named_parameters()), device)

    def after(self, step: int) -> tuple[tuple[str, ...], Tensor]:
        """After a step's update: the parameters compared and, float32 [n], 1.0 for each that differs between ranks.

        Empty if nothing is due. To be called once a step on every rank: collective.
        """
        gap, self._last = self._last != step - 1, step
        if not gap and step % self.every:
            return (), torch.zeros(0, device=self._fingerprint.device)
        return tuple(self._parameters), differing(
            self._fingerprint.of(self._parameters.values())
        ).float()


def _odd(stream: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """`count` odd numbers, the same everywhere: int64 [count], by splitmix64 (Steele, Lea & Flood, 2014)."""
    words = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 40)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((words ^ (words >> np.uint64(31))) | np.uint64(1)).view(np.int64)


class ForwardClock:
    """Seconds of the forward passes of one step on this rank.

    On a CPU they are known when the step has run. A GPU is still busy then: events on its own stream time it, and what
    is told is of the newest step that it has finished, one to three steps ago (0.0 before the first), without waiting.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._queued: deque[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = deque()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward pass."""
        if self._on_gpu:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            yield
            pair[1].record()
            self._events.append(pair)
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def step(self) -> float:
        """The step's last forward pass is over (on a GPU: queued); the seconds to tell."""
        if not self._on_gpu:
            seconds, self._seconds = self._seconds, 0.0
            return seconds
        self._queued.append(self._events)
        self._events = []
        while self._queued and all(end.query() for _, end in self._queued[0]):
            self._seconds = (
                sum(begin.elapsed_time(end) for begin, end in self._queued.popleft()) / 1000
            )
        return self._seconds
