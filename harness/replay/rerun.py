"""A run built again in one process, in a scratch folder, with its own loop, precision and data; nothing is logged."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from harness import loop
from harness.core.facts import Limits, StepFacts, Window
from harness.core.protocols import Batches, CheckpointStore, Engine, Meta, Tensors
from harness.replay.flight import Surroundings
from harness.replay.origin import Finding, Origin, locate, watch
from harness.run import Run
from harness.step import seed_step, to_host, train_step
from harness.tracking.journal import Journal

Batch = tuple[Tensor, Tensor]
NEVER_APPLIED = Limits(loss=float("-inf"))
"""Limits that no update keeps to."""


class Feed:
    """A run's batches as one process takes them: rank 0's micro-batches, then rank 1's, and so on.

    world_size: ranks of the run. only: take just the sample at this place of `order`; None: all.
    """

    def __init__(self, data: Batches, micro_batch: int, world_size: int) -> None:
        self.name, self.tokens_per_sample = data.name, data.tokens_per_sample
        self.only: int | None = None
        self.run: Run | None = None
        self._data, self._micro_batch, self._world_size = data, micro_batch, world_size

    def window(self, step: int, index: int) -> Window:
        """As the run's own."""
        return self._data.window(step, index)

    def order(self, window: Window) -> list[int]:
        """Sample numbers in the order in which they are taken."""
        rows = window.samples.reshape(-1, self._micro_batch)
        ranks = [rows[rank :: self._world_size] for rank in range(self._world_size)]
        return [int(sample) for part in ranks for sample in part.reshape(-1)]

    def micro_batches(self, window: Window, rank: int, world_size: int) -> Sequence[Batch]:
        """All ranks' micro-batches, or the one sample that is to be taken alone."""
        found = [
            (each, batch)
            for each in range(self._world_size)
            for batch in self._data.micro_batches(window, each, self._world_size)
        ]
        if self.only is not None:
            number, row = divmod(self.only, self._micro_batch)
            each, (inputs, targets) = found[number]
            found = [(each, (inputs[row : row + 1], targets[row : row + 1]))]
        return _PerRank(found, self.run, window)

    def validation(self, rank: int, world_size: int) -> Sequence[Batch]:
        """As the run's own."""
        return self._data.validation(rank, world_size)


class _PerRank(Sequence[Batch]):
    """Batches that, in passing to another rank's, start the random numbers of that rank."""

    def __init__(self, batches: list[tuple[int, Batch]], run: Run | None, window: Window) -> None:
        self._batches, self._run, self._window = batches, run, window

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return [batch for _, batch in self._batches][index]

    def __iter__(self) -> Iterator[Batch]:
        seeded = 0
        for rank, batch in self._batches:
            if rank != seeded and self._run is not None:
                seed_step(self._run, self._window, rank)
                seeded = rank
            yield batch


class Together:
    """An engine of one process in which gradients come out as those of `ranks` ranks do: each rank's at full size, with
    its own loss scale and FP8 range, their mean taken before the update."""

    def __init__(self, engine: Engine, ranks: int) -> None:
        self.__dict__.update(_engine=engine, _ranks=ranks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._engine, name, value)

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss * self._ranks)

    def step(self, *arguments: Any, **named: Any) -> Any:
        gradients = [param.grad for param in self._engine.module.parameters() if param.grad is not None]
        torch._foreach_div_(gradients, float(self._ranks))
        return self._engine.step(*arguments, **named)


@dataclass
class Rerun:
    """The run, its bare model and its feed. compiled: blocks of it run as compiled code. resolved: the rung."""

    run: Run
    model: nn.Module
    feed: Feed
    compiled: bool
    resolved: str
    surroundings: Surroundings
    journal: Journal

    def start(self, step: int, store: CheckpointStore) -> None:
        """Go to the checkpoint of `step`, with the budgets that were spent by then. Raises CheckpointError."""
        recovery, incidents = self.run.recovery, self.run.state.incidents
        recovery.store = store
        meta = recovery.load(step)
        incidents.skips, incidents.switches = meta["budgets"]["skips"], meta["budgets"]["switches"]
        loop.stay_lowered(self.run)

    def close(self) -> None:
        """Nothing more will be run; the state can still be read."""
        self.journal.close()
        self.run.engine.close()

    def window(self) -> Window:
        """The next step's."""
        state = self.run.state
        return self.feed.window(state.step, state.incidents.window_index(state.step))

    def advance(self) -> StepFacts:
        """The run's own next step, judged at once; what the guard would do beside switches and limits is not done."""
        facts = to_host(loop.next_step(self.run))
        loop.judge(self.run, facts)
        return facts

    def step_here(self) -> StepFacts:
        """The next step, without moving on."""
        return to_host(train_step(self.run, self.window()))

    def watched(self, known: set[str] | None) -> tuple[StepFacts, Origin]:
        """`step_here`, as eager code with hooks on every module."""
        with eager(self.compiled), watch(self.model, known, lines=True) as origin:
            facts = self.step_here()
        return facts, origin

    def located(self, finding: Finding) -> Finding:
        """A finding in forward with its operation and line, from `step_here` as eager code."""
        with eager(self.compiled), locate(self.model, finding) as first:
            self.step_here()
        return replace(finding, operation=first.operation, where=first.where)

    def keep(self) -> tuple[Tensors, Meta]:
        """A copy of the whole state on the host."""
        tensors, meta = self.run.state.state_dict()
        copied = {part: {name: t.detach().to("cpu", copy=True) for name, t in each.items()} for part, each in
                  tensors.items()}  # fmt: skip
        return copied, copy.deepcopy(meta)

    def restore(self, kept: tuple[Tensors, Meta]) -> None:
        """Back to `kept`; incidents stay."""
        tensors, meta = kept
        self.run.state.load_state_dict(tensors, copy.deepcopy(meta))

    def alone(self, place: int, kept: tuple[Tensors, Meta]) -> StepFacts:
        """The next step with one sample only, and no update: weights and optimizer stay, the rest is put back."""
        state, step = self.run.state, self.run.state.step + 1
        limits, self.feed.only = state.limits.get(step), place
        state.limits[step] = NEVER_APPLIED
        try:
            with eager(self.compiled):  # another batch size would be compiled anew
                return self.step_here()
        finally:
            self.feed.only = None
            state.limits.pop(step)
            if limits is not None:
                state.limits[step] = limits
            self._put_back(*kept)

    def _put_back(self, tensors: Tensors, meta: Meta) -> None:
        for name, part in self.run.state.parts.items():
            if name not in ("model", "optimizer"):
                part.load_state_dict(tensors.get(name, {}), copy.deepcopy(meta["parts"][name]))
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in tensors["model"]:
                    buffer.copy_(tensors["model"][name])


@contextmanager
def eager(compiled: bool) -> Iterator[None]:
    """Compiled code off, where there is any: its inside cannot be watched."""
    if not compiled:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
