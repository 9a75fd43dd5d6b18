"""A run built again in one process: its loop, precision and data take any step of it, as often as is asked for."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from harness import loop
from harness.checkpoint.store import Store
from harness.core.facts import Limits, StepFacts, Window
from harness.core.protocols import Meta, Tensors
from harness.replay.flight import Surroundings
from harness.replay.origin import Finding, Origin, locate, watch
from harness.run import Run
from harness.step import Share, train_step

NEVER_APPLIED = Limits(loss=float("-inf"))
"""Limits that no update keeps to."""

Kept = tuple[Tensors, Meta]


@dataclass
class Rerun:
    """run: at its initial state, with a journal that nobody reads. ranks: of the run that is run again; here their
    shares of a window are computed one after the other. resolved: the rung. surroundings: where this one computes."""

    run: Run
    model: nn.Module
    ranks: int
    resolved: str
    surroundings: Surroundings

    @property
    def compiled(self) -> bool:
        """Whether blocks of the model run as compiled code."""
        return self.run.watch is not None

    def start(self, step: int, store: Store) -> None:
        """Go to the checkpoint of `step`, with the budgets that were spent by then. Raises CheckpointError."""
        recovery, incidents = self.run.recovery, self.run.state.incidents
        recovery.store = store
        meta = recovery.load(step)
        incidents.skips, incidents.switches = meta["budgets"]["skips"], meta["budgets"]["switches"]
        self.run.guard.judge.stay_lowered()

    def close(self) -> None:
        """Nothing more will be run; the state can still be read."""
        self.run.telemetry.close()
        self.run.engine.close()

    def shares(self, window: Window) -> list[Share]:
        """What each rank of the run computed of a window."""
        batches = self.run.data.micro_batches
        return [Share(rank, batches(window, rank, self.ranks)) for rank in range(self.ranks)]

    def samples(self, window: Window) -> list[int]:
        """Sample numbers in the order in which they are taken: rank 0's, then rank 1's, and so on."""
        rows = window.samples.reshape(-1, self.run.config.train.micro_batch)
        return [int(sample) for rank in range(self.ranks) for sample in rows[rank :: self.ranks].reshape(-1)]

    def advance(self) -> StepFacts:
        """The run's own next step, judged at once; what the guard would do beside switches and limits is not done."""
        facts = self.take()
        self.run.state.advance()
        self.run.guard.observe(facts)
        return facts

    def take(self, limits: Limits | None = None) -> StepFacts:
        """The next step, without moving on. limits: in place of its own."""
        window = loop.next_window(self.run)
        return train_step(self.run, window, self.shares(window), limits).facts()

    def watched(self, known: set[str] | None, limits: Limits | None = None) -> tuple[StepFacts, Origin]:
        """`take`, as eager code with hooks on every module."""
        with eager(self.compiled), watch(self.model, known, lines=True) as origin:
            facts = self.take(limits)
        return facts, origin

    def located(self, finding: Finding) -> Finding:
        """A finding in forward with its operation and line, from `take` as eager code."""
        with eager(self.compiled), locate(self.model, finding) as first:
            self.take()
        return replace(finding, operation=first.operation, where=first.where)

    def alone(self, place: int, kept: Kept) -> tuple[Tensor, StepFacts]:
        """The next step with the sample at `place` of `samples` only: its inputs, int64 [1, context], and its facts.

        No update: weights and optimizer stay, the rest goes back to `kept`.
        """
        window = loop.next_window(self.run)
        number, row = divmod(place, self.run.config.train.micro_batch)
        taken = [(share.rank, batch) for share in self.shares(window) for batch in share.batches]
        rank, (inputs, targets) = taken[number]
        one = inputs[row : row + 1], targets[row : row + 1]
        try:
            with eager(self.compiled):  # another batch size would be compiled anew
                return one[0], train_step(self.run, window, [Share(rank, [one])], NEVER_APPLIED).facts()
        finally:
            self._put_back(*kept)

    def keep(self) -> Kept:
        """A copy of the whole state on the host."""
        tensors, meta = self.run.state.state_dict()
        copied = {part: {name: t.detach().to("cpu", copy=True) for name, t in each.items()} for part, each in
                  tensors.items()}  # fmt: skip
        return copied, copy.deepcopy(meta)

    def restore(self, kept: Kept) -> None:
        """Back to `kept`; incidents stay."""
        tensors, meta = kept
        self.run.state.load_state_dict(tensors, copy.deepcopy(meta))

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
