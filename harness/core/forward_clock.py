"""How long a rank's forward passes take: the part of a step in which no rank waits for another."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
            self._seconds = sum(begin.elapsed_time(end) for begin, end in self._queued.popleft()) / 1000
        return self._seconds
