"""Which forward a recomputation repeats, so that it takes the scales of that one.

te.checkpoint keeps amax history and scale of every module's first forward in a queue, oldest first, and the second
forward takes what is in front: of another forward, where one had no backward or came later in line. Autograd numbers
the nodes that a thread makes, in their order, and knows which node is running: its number tells between which rolls its
forward ran. All forwards between two rolls have the same scales.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

RECOMPUTED = "global_fp8_buffer_pos_fwd_recompute"
"""Where a module's `fp8_meta` names its queue of what te.checkpoint is to compute again."""


class Recomputations:
    """What te.checkpoint keeps for one model in an optimizer step, by the roll that ended its time.

    manager: TE's global FP8 state, which has the queues. Forwards and rolls belong in one thread; where they do not,
    no node's forward is known. Nothing here waits for the device.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._noted: dict[int, Mapping[str, Any]] = {}
        self.forget()

    def forget(self) -> None:
        """A step begins: what is left is of losses that were dropped and forwards that failed, and none's to repeat."""
        for queue in self._queues().values():
            queue.clear()
        self._noted.clear()
        self._thread, self._one_thread = threading.get_ident(), True
        # Nodes numbered below the first are of earlier steps, for which nothing is kept.
        self._rolls = [torch.autograd._get_sequence_nr()]
        self._kept: list[dict[int, deque[Any]]] = [{}]

    def forward_begins(self) -> None:
        """One with gradients."""
        self._one_thread &= threading.get_ident() == self._thread

    def note(self, meta: Mapping[str, Any]) -> None:
        """te.checkpoint runs a forward of a module with this `fp8_meta`, and TE keeps what its queue names."""
        self._noted[id(meta)] = meta

    def rolled(self) -> None:
        """Scales have moved: what is in the queues now is of the time before."""
        self._one_thread &= threading.get_ident() == self._thread
        self._rolls.append(torch.autograd._get_sequence_nr())
        queues = self._queues()
        self._kept.append({place: deque(queue) for place, queue in queues.items()})
        for queue in queues.values():
            queue.clear()

    def moved(self) -> bool:
        """Whether scales have moved since the forward whose backward runs now, or that forward is unknown."""
        return self._time() != len(self._rolls)

    def put_in_front(self, meta: Mapping[str, Any]) -> bool:
        """Into this module's queue: what was kept when the forward ran whose backward runs now. False: nothing was."""
        time, place = self._time(), meta.get(RECOMPUTED)
        queue = self._queue(place)
        if time is None or place is None or queue is None:
            return False
        if time < len(self._rolls):
            kept = self._kept[time].get(place)
            if not kept:
                return False
            queue.appendleft(kept.popleft())
        return len(queue) > 0

    def _time(self) -> int | None:
        """Of the node that runs: how many rolls, and the step's beginning, came before it; None if that is unknown."""
        node = torch._C._current_autograd_node()
        return None if node is None or not self._one_thread else bisect_right(self._rolls, node._sequence_nr())

    def _queue(self, place: int | None) -> deque[Any] | None:
        queues = self._manager.quantization_state.fp8_tensors_recompute_buffer
        return None if place is None or place >= len(queues) else queues[place]

    def _queues(self) -> dict[int, deque[Any]]:
        found = {meta.get(RECOMPUTED): self._queue(meta.get(RECOMPUTED)) for meta in self._noted.values()}
        return {place: queue for place, queue in found.items() if place is not None and queue is not None}
