"""One step of a run, run again under observation: where it went bad, and why.

The run is built again in one process, taken to the state before the step by the training loop's own code, and its step
is run with hooks on every module, again without them, sample by sample, and in float32.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from harness.checkpoint.store import Store
from harness.core.config import RunConfig
from harness.core.errors import CheckpointError, Problem
from harness.core.facts import Limits, StepFacts, Window
from harness.core.health import one_sample
from harness.core.protocols import Batch, Meta, Tensors
from harness.core.state import RunLedger
from harness.replay.answer import Answer, Sample, growth, unfit
from harness.replay.flight import BadStep, Branches, Difference, Surroundings
from harness.replay.origin import Finding, Origin, locate, watch
from harness.run import Run, Share, next_window, observe, train_step
from harness.run_folder import read_plan

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
        recovery, ledger = self.run.recovery, self.run.state.ledger
        recovery.store = store
        meta = recovery.load(step)
        budgets = meta["budgets"]
        ledger.skips, ledger.switches = budgets["skips"], budgets["switches"]
        ledger.recent_skips = list(budgets["recent_skips"])
        self.run.guard.judge.stay_fallen_back()

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
        return [
            int(sample)
            for rank in range(self.ranks)
            for sample in rows[rank :: self.ranks].reshape(-1)
        ]

    def advance(self) -> StepFacts:
        """The run's own next step, judged at once; what the guard would do beside switches and limits is not done."""
        facts = self.take()
        self.run.state.advance()
        observe(self.run, facts)
        return facts

    def take(self, limits: Limits | None = None) -> StepFacts:
        """The next step, without moving on. limits: in place of its own."""
        window = next_window(self.run)
        return train_step(self.run, window, self.shares(window), limits).facts()

    def watched(
        self, known: set[str] | None, limits: Limits | None = None
    ) -> tuple[StepFacts, Origin]:
        """`take`, as eager code with hooks on every module."""
        with eager(self.compiled), watch(self.model, known, lines=True) as origin:
            facts = self.take(limits)
        return facts, origin

    def located(self, finding: Finding) -> Finding:
        """A finding in forward with its operation and line, from `take` as eager code."""
        with eager(self.compiled), locate(self.model, finding) as first:
            self.take()
        return replace(finding, operation=first.operation, where=first.where)

    def alone(self, place: int, kept: Kept) -> tuple[Batch, StepFacts]:
        """The next step with the sample at `place` of `samples` only: that sample, as a batch, and its facts.

        No update: weights and optimizer stay, the rest goes back to `kept`.
        """
        window = next_window(self.run)
        number, row = divmod(place, self.run.config.train.micro_batch)
        taken = [(share.rank, batch) for share in self.shares(window) for batch in share.batches]
        rank, batch = taken[number]
        one = one_sample(batch, row)
        try:
            with eager(self.compiled):  # another batch size would be compiled anew
                return one, train_step(
                    self.run, window, [Share(rank, [one])], NEVER_APPLIED
                ).facts()
        finally:
            self._put_back(*kept)

    def keep(self) -> Kept:
        """A copy of the whole state on the host."""
        tensors, meta = self.run.state.state_dict()
        copied = {part: {name: t.detach().to("cpu", copy=True) for name, t in each.items()} for part, each in
                  tensors.items()}  # fmt: skip
        return copied, copy.deepcopy(meta)

    def restore(self, kept: Kept) -> None:
        """Back to `kept`; the ledger stays."""
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


_PROGRESS_SECONDS = 5.0
_BYTES = "nats per byte"
# Tokens of a sample that are shown.
_TEXT = 48

Say = Callable[[str], None]
Builder = Callable[[RunConfig, str, RunLedger, int], Rerun]
"""(config, recipe, ledger, ranks of the run) -> that run at its initial state, in one process."""


class Investigation:
    """One step on its way to an answer."""

    def __init__(
        self, branches: Branches, step: int, config: RunConfig, build: Builder, say: Say
    ) -> None:
        self.folder, self.history, self.step, self.say = branches.folder, branches, step, say
        self.config, self.build = branches.config_of(step, config), build
        self.attempt = branches.attempt_of(step)
        self.record: BadStep | None = branches.records.get(step)
        self.world_size, _ = branches.ranks_of(step)
        if self.record:
            torch.set_num_threads(self.record.threads)
        self.run = build(self.config, config.recipe, branches.ledger_of(step), self.world_size)
        self.difference: Difference | None = None
        self.before: tuple[StepFacts, Origin] | None = None

    def answer(self, anomaly: bool) -> Answer:
        """Everything that can be said of the step."""
        base = self._start()
        self._up_to_the_step()
        run, step, before = self.run, self.step, self.before
        if self.record is not None:
            run.run.state.limits[step] = self.record.limits_then
        window = next_window(run.run)
        kept = run.keep()
        self.say(f"step {step}: under observation")
        plainly = self._again(kept) if run.compiled else None  # compiled code is what ran
        watched, origin = run.watched(before[1].usual if before else None)
        run.restore(kept)
        here = plainly or watched
        again = None if run.compiled else self._again(kept)
        finding = origin.first
        if finding is not None and finding.direction == "forward":
            finding = run.located(finding)
            run.restore(kept)
        self._compare(here)
        row = self.history.row(step, self.attempt) or {}
        codes = list(self.record.codes) if self.record else []
        usual, scale = (before[1].gradients, before[0].loss_scale) if before else ({}, 1.0)
        bad = unfit(here) or "loss.spike" in codes
        samples = self._samples(kept, window) if bad else []
        trace = self._anomaly(kept) if anomaly else ""
        run.close()
        exact, exact_origin = (
            self._in_float32(kept) if bad and not here.bad_data else (None, Origin())
        )
        return Answer(
            run=str(self.folder), step=step, base=base, attempt=self.attempt, window=here.window, codes=codes,
            was_bad=self.record is not None or _was_bad(row), here=here, again=again, in_float32=exact,
            loss_before=before[0].loss if before else None, journal_loss=row.get("train/loss", here.loss),
            difference=self.difference, setup_differences=self._setup_differences(), finding=finding,
            finding_in_float32=exact_origin.first,
            gradients=growth(
                origin.gradients, usual, watched.loss_scale * self.world_size, scale * self.world_size
            ),
            samples=samples, window_size=len(window.samples), ranks=self.world_size,
            precision=_precision(run.resolved, here), anomaly=trace,
        )  # fmt: skip

    def _start(self) -> int:
        """Load the newest state before the step that verifies; its step."""
        for base, store in self.history.bases(self.step):
            try:
                self.run.start(base, store)
            except CheckpointError as error:
                self.say(f"passed over: {error}")
                continue
            self.say(f"from the checkpoint of step {base}: {store.path(base)}")
            return base
        if self.history.started_from is not None:
            what = (
                f"no checkpoint before step {self.step} is left, and the run began from another's"
            )
            kept = ", ".join(map(str, sorted(self.history.records))) or "none"
            raise CheckpointError(
                Problem(
                    what, str(self.folder), fix=f"replay a later step, or one with a record: {kept}"
                )
            )
        self.say("from the run's initial state, which its seed gives")
        return 0

    def _up_to_the_step(self) -> None:
        """Run the steps before it as the loop does; the last of them is watched, to know what is usual."""
        state, told = self.run.run.state, time.monotonic()
        while state.step < self.step - 1:
            if state.step == self.step - 2:
                self.before = self._watch_the_step_before()
            facts = self.run.advance()
            self._compare(facts)
            if time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                self.say(
                    f"step {facts.step}: re-run, {self.step - 1 - facts.step} more before step {self.step}"
                )

    def _watch_the_step_before(self) -> tuple[StepFacts, Origin]:
        kept = self.run.keep()
        watched = self.run.watched(None)
        self.run.restore(kept)
        return watched

    def _compare(self, facts: StepFacts) -> None:
        if self.difference is None:
            self.difference = self.history.difference(facts, self.attempt)

    def _again(self, kept: Kept) -> StepFacts:
        facts = self.run.take()
        self.run.restore(kept)
        return facts

    def _samples(self, kept: Kept, window: Window) -> list[Sample]:
        """Every sample of the window alone."""
        order, told, found = self.run.samples(window), time.monotonic(), list[Sample]()
        data, own = self.run.run.data, self.config.data.target is not None
        for place, number in enumerate(order):
            sample, facts = self.run.alone(place, kept)
            first = None if own else number * data.tokens_per_sample
            micro_batch, rank = (
                place // self.config.train.micro_batch,
                place * self.world_size // len(order),
            )
            found.append(
                Sample(
                    number,
                    rank,
                    micro_batch + 1,
                    first,
                    _text(sample, data.unit),
                    facts.loss,
                    facts.grad_norm,
                    facts.bad_data,
                )
            )
            if time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                self.say(f"sample {place + 1} of {len(order)}")
        return found

    def _anomaly(self, kept: Kept) -> str:
        """What autograd's own search for NaN says: the forward call behind the operation, and the operation."""
        with warnings.catch_warnings(record=True) as told, eager(self.run.compiled):
            warnings.simplefilter("always")
            try:
                with torch.autograd.set_detect_anomaly(True):
                    self.run.take()
            except RuntimeError as error:
                traces = [str(each.message) for each in told if "forward call" in str(each.message)]
                return "\n".join([*traces, str(error)])
            finally:
                self.run.model.zero_grad(set_to_none=True)
                self.run.restore(kept)
        return "no NaN in backward"

    def _in_float32(self, kept: Kept) -> tuple[StepFacts, Origin]:
        """The same step, from the same weights, without any low precision."""
        self.say(f"step {self.step}: in float32")
        engine = self.config.engine.model_copy(update={"compile": "none"})
        config = self.config.model_copy(update={"engine": engine})
        exact = self.build(config, "fp32", self.history.ledger_of(self.step), self.world_size)
        tensors, meta = kept
        exact.run.state.parts["model"].load_state_dict(tensors["model"], meta["parts"]["model"])
        exact.run.state.step = self.step - 1
        try:
            limits = self.run.run.state.limits.get(self.step)
            return exact.watched(self.before[1].usual if self.before else None, limits)
        finally:
            exact.close()

    def _setup_differences(self) -> list[str]:
        """Why the bits of this re-run need not be the run's."""
        found: list[str] = []
        planned = read_plan(self.folder).get("resolved")
        if planned and planned != self.run.resolved:
            found.append(f"the run computed with {planned}, this machine with {self.run.resolved}")
        if self.record is None:
            return found
        here = self.run.surroundings
        if self.world_size > 1:
            found.append(
                f"the run had {self.world_size} ranks; here their samples run one after the other, and sums are "
                "rounded in another order"
            )
        for name in ("engine", "torch_version", "device", "threads"):
            was, now = getattr(self.record, name), getattr(here, name)
            if was != now and (name, was) != ("engine", "ddp"):
                found.append(f"{name}: {was} in the run, {now} here")
        return found


def _precision(resolved: str, facts: StepFacts) -> str:
    """The rung, and what of it ran in another precision by then."""
    if facts.fell_back_to:
        return f"{resolved}, all of it in {facts.fell_back_to}"
    return f"{resolved}, {len(facts.demoted)} layers in bf16" if facts.demoted else resolved


def _was_bad(row: Mapping[str, float]) -> bool:
    figures = [row.get(name, 0.0) for name in ("train/loss", "train/grad_norm")]
    return row.get("train/step_applied", 1.0) == 0.0 or not all(map(math.isfinite, figures))


def _text(sample: Batch, unit: str) -> str:
    """How a sample begins, if its tokens are bytes; else its names and shapes, and how its whole numbers begin."""
    if unit == _BYTES and sample["inputs"].min() >= 0 and sample["inputs"].max() < 256:
        return bytes(sample["inputs"].reshape(-1)[:_TEXT].tolist()).decode(
            errors="backslashreplace"
        )
    told = {
        name: "" if values.is_floating_point() else f" {values.reshape(-1)[:_TEXT].tolist()}"
        for name, values in sample.items()
    }
    return ", ".join(
        f"{name} {list(sample[name].shape[1:])}{numbers}" for name, numbers in told.items()
    )
