"""The first windows of a run's data, held in memory, so that reading data is not part of what is timed."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.facts import Window
from harness.core.protocols import Batch, Batches


class HeldBatches:
    """Windows of `data` that come again and again. Implements `core.protocols.Batches` for one process.

    data: whose first `windows` windows are read now. Raises DataError as `data` does.
    """

    def __init__(self, data: Batches, windows: int) -> None:
        self.name = data.name
        self.tokens_per_sample = data.tokens_per_sample
        self.masked = data.masked
        self.unit = data.unit
        self._windows = [data.window(index) for index in range(windows)]
        # Made now: a micro-batch that is made while it is asked for would be part of the time.
        self._batches: list[list[Batch]] = []
        for window in self._windows:
            batches = data.micro_batches(window, 0, 1)
            self._batches.append(list(batches))

    def window(self, index: int) -> Window:
        """As `Batches.window`; its samples are those of one of the windows that are held."""
        held = self._windows[index % len(self._windows)]
        return Window(index, held.samples)

    def micro_batches(self, window: Window, rank: int, world_size: int) -> Sequence[Batch]:
        """All micro-batches of the window."""
        return self._batches[window.index % len(self._batches)]

    def validation(self, rank: int, world_size: int) -> Sequence[Batch]:
        """None: nothing is validated here."""
        return []
