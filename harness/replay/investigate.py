"""Runs one step of a run again under observation, to find where it went bad and why.

1. Build the run again in one process, load the newest checkpoint before the step, and go up to the step with the
   training loop's own code. The ranks of the run become shares that are computed one after the other.
2. Watch the step before, to know which non-finite values are usual (a mask of -inf, for example).
3. Run the step with hooks on every module, and again without them from the same state: does it repeat?
4. Run every sample of its window alone: is it one of them?
5. Run the step in float32 from the same weights: is it precision?

`answer` draws the conclusion.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from harness.checkpoint.store import Store
from harness.core.config import RunConfig
from harness.core.errors import CheckpointError, Problem, number_of
from harness.core.facts import Limits, StepFacts, Window
from harness.core.health import one_sample
from harness.core.layer_norms import layer_of
from harness.core.metrics import OF_LAYERS
from harness.core.protocols import Batch, Meta
from harness.core.state import RunLedger
from harness.monitors.responder import Judgement
from harness.replay.answer import (
    SHOWN,
    Answer,
    Gradient,
    LayerHistory,
    Sample,
    growth,
    stopped_by_gate,
)
from harness.replay.flight import BadStep, Branches, Difference, Environment
from harness.replay.kept import Kept, keep, restore, restore_buffers
from harness.replay.origin import Finding, Origin, locate, watch
from harness.replay.step_tensors import StepTensors, watched
from harness.run import Run, Share, next_window, observe, train_step
from harness.run_folder import read_plan

NEVER_APPLIED = Limits(loss=float("-inf"))
"""Limits that every update exceeds: nothing is applied."""


@dataclass
class Rerun:
    """A run that is run again in one process.

    run: at its initial state, with a journal that nobody reads.
    model: the user's, without wrappers.
    ranks: of the original run. Here their shares of a window are computed one after the other.
    resolved: the rung of the recipe.
    environment: of this process.
    """

    run: Run
    model: nn.Module
    ranks: int
    resolved: str
    environment: Environment

    @property
    def compiled(self) -> bool:
        """Whether blocks of the model run as compiled code."""
        return self.run.watch is not None

    def start(self, step: int, store: Store, keeps_precision: bool = True) -> None:
        """Load the checkpoint of `step` and the budgets that were spent by then. Raises CheckpointError.

        keeps_precision: stay downgraded, where the whole run had been downgraded by then. False for a run in another
            precision than the original, which that downgrade does not concern.
        """
        recovery = self.run.recovery
        recovery.store = store
        self._resumed(recovery.load(step), keeps_precision)

    def resume(self, kept: Kept) -> None:
        """`start`, from a state that `keep` gave."""
        restore(self.run, kept)
        self._resumed(kept.meta)

    def _resumed(self, meta: Meta, keeps_precision: bool = True) -> None:
        budgets = meta["budgets"]
        ledger = self.run.state.ledger
        ledger.skips = budgets["skips"]
        ledger.switches = budgets["switches"]
        ledger.recent_skips = list(budgets["recent_skips"])
        if not keeps_precision:
            ledger.lowered = ""
            self.run.state.drop_fallback()
        self.run.guard.judge.stay_fallen_back()

    def close(self) -> None:
        """Release telemetry and engine. The state can still be read."""
        self.run.telemetry.close()
        self.run.engine.close()

    def shares(self, window: Window) -> list[Share]:
        """The share of a window that each rank of the run computed."""
        batches = self.run.data.micro_batches
        shares: list[Share] = []
        for rank in range(self.ranks):
            own = batches(window, rank, self.ranks)
            shares.append(Share(rank, own))
        return shares

    def samples(self, window: Window) -> list[int]:
        """Sample numbers in the order in which they are computed here: rank 0's, then rank 1's, and so on."""
        rows = window.samples.reshape(-1, self.run.config.train.micro_batch)
        numbers: list[int] = []
        for rank in range(self.ranks):
            numbers += [int(sample) for sample in rows[rank :: self.ranks].reshape(-1)]
        return numbers

    def advance(self) -> Judgement:
        """Do the run's next step and judge it. Of the guard's actions only switches and limits are carried out."""
        return self.judge(self.take())

    def judge(self, facts: StepFacts) -> Judgement:
        """End a step that was taken: count it and judge it, as `advance`."""
        self.run.state.advance()
        return observe(self.run, facts)

    def take(self, limits: Limits | None = None) -> StepFacts:
        """Do the next step without advancing. limits: used in place of the step's own."""
        window = next_window(self.run)
        return train_step(self.run, window, self.shares(window), limits).facts()

    def watched(
        self, known: set[str] | None, limits: Limits | None = None
    ) -> tuple[StepFacts, Origin]:
        """`take`, as eager code with hooks on every module. known: non-finite values that are usual."""
        with eager(self.compiled), watch(self.model, known, lines=True) as origin:
            facts = self.take(limits)
        return facts, origin

    def noted(self, into: StepTensors, *, every: bool) -> StepFacts:
        """`take`, with the hashes of its tensors.

        every: those of all modules and gradients too, by hooks on eager code.
        """
        window = next_window(self.run)
        shares = self.shares(window)
        into.add_data(window, shares)
        hooks = watched(self.model, into) if every else nullcontext()
        with eager(self.compiled and every), hooks:
            facts = train_step(self.run, window, shares).facts()
        into.add_figures(facts)
        into.add_state(*self.run.state.state_dict(), after_update=True)
        return facts

    def located(self, finding: Finding) -> Finding:
        """Add operation and source line to a finding in forward, by `take` as eager code."""
        with eager(self.compiled), locate(self.model, finding) as first:
            self.take()
        return replace(finding, operation=first.operation, where=first.where)

    def alone(self, place: int, kept: Kept) -> tuple[Batch, StepFacts]:
        """Do the next step with one sample only, the one at `place` of `samples`. Returns it as a batch, and the facts.

        There is no update: weights and optimizer stay as they are, and everything else is restored from `kept`.
        """
        window = next_window(self.run)
        number, row = divmod(place, self.run.config.train.micro_batch)

        # Its micro-batch, counted over all ranks.
        micro_batches: list[tuple[int, Batch]] = []
        for share in self.shares(window):
            micro_batches += [(share.rank, batch) for batch in share.batches]
        rank, batch = micro_batches[number]
        one = one_sample(batch, row)

        try:
            with eager(self.compiled):  # another batch size would be compiled anew
                step = train_step(self.run, window, [Share(rank, [one])], NEVER_APPLIED)
                return one, step.facts()
        finally:
            self._restore_the_rest(kept)

    def _restore_the_rest(self, kept: Kept) -> None:
        """Load all but weights and optimizer. Buffers of the model may have changed in forward, so they are loaded."""
        for name, part in self.run.state.parts.items():
            if name not in ("model", "optimizer"):
                meta = copy.deepcopy(kept.meta["parts"][name])
                part.load_state_dict(kept.tensors.get(name, {}), meta)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in kept.tensors["model"]:
                    buffer.copy_(kept.tensors["model"][name])
        restore_buffers(self.run, kept)


@contextmanager
def eager(compiled: bool) -> Iterator[None]:
    """Run eager code inside of the block: hooks see nothing inside of compiled code."""
    if not compiled:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


_PROGRESS_SECONDS = 5.0
# Steps before the one that is replayed whose norms by layer are listed.
_HUNTED_STEPS = 6
# The unit of the loss where tokens are bytes.
_BYTES = "nats per byte"
# Tokens of a sample that are shown.
_TEXT = 48

Say = Callable[[str], None]
Builder = Callable[[RunConfig, str, RunLedger, int], Rerun]
"""(config, recipe, ledger, ranks of the run) -> the run at its initial state, in one process."""


class Investigation:
    """The replay of one step."""

    def __init__(
        self, branches: Branches, step: int, config: RunConfig, build: Builder, say: Say
    ) -> None:
        self.folder = branches.folder
        self.history = branches
        self.step = step
        self.say = say
        # The run's present config. A resume may have changed it since the step.
        self._present_config = config
        self._setting = branches.setting_of(step, config)
        self.config, self.world_size = self._setting
        self.build = build
        self.attempt = branches.attempt_of(step)
        self.record: BadStep | None = branches.records.get(step)
        if self.record:
            # The number of threads decides the order in which sums are rounded.
            torch.set_num_threads(self.record.threads)
        self.rerun = build(self.config, config.recipe, branches.ledger_of(step), self.world_size)
        self.difference: Difference | None = None
        # Facts and observations of the step before; None if it is not re-run.
        self.before: tuple[StepFacts, Origin] | None = None

    def answer(self, anomaly: bool) -> Answer:
        """Everything that can be said of the step. anomaly: run it under autograd's anomaly mode too."""
        # Get to the state before the step, with the limits that were in force.
        base = self._start()
        self._up_to_the_step()
        rerun = self.rerun
        if self.record is not None:
            rerun.run.state.limits[self.step] = self.record.limits_then
        window = next_window(rerun.run)
        kept = keep(rerun.run)

        # With hooks, and without. Hooks need eager code: if the run was compiled, only the pass without hooks computes
        # what the run did.
        self.say(f"step {self.step}: under observation")
        compiled = self._again(kept) if rerun.compiled else None
        watched, origin = rerun.watched(self._usual())
        restore(rerun.run, kept)
        here = compiled or watched
        again = None if rerun.compiled else self._again(kept)
        finding = origin.first
        if finding is not None and finding.direction == "forward":
            finding = rerun.located(finding)
            restore(rerun.run, kept)

        # Against the journal.
        self._compare(here)
        row = self.history.row(self.step, self.attempt) or {}
        codes = list(self.record.codes) if self.record else []
        gradients = self._gradients(watched, origin)

        # If it is bad: sample by sample, under anomaly mode, in float32.
        bad = stopped_by_gate(here) or "loss.spike" in codes
        samples = self._samples(kept, window) if bad else []
        trace = self._anomaly(kept) if anomaly else ""
        rerun.close()
        exact: StepFacts | None = None
        exact_origin = Origin()
        if bad and not here.bad_data:
            exact, exact_origin = self._in_float32(kept)

        return Answer(
            run=str(self.folder),
            step=self.step,
            base=base,
            attempt=self.attempt,
            window=here.window,
            codes=codes,
            was_bad=self.record is not None or _was_bad(row),
            here=here,
            again=again,
            in_float32=exact,
            loss_before=self.before[0].loss if self.before else None,
            journal_loss=row.get("train/loss", here.loss),
            difference=self.difference,
            setup_differences=self._setup_differences(),
            finding=finding,
            finding_in_float32=exact_origin.first,
            gradients=gradients,
            hunted=self._hunted(gradients[:SHOWN]),
            samples=samples,
            window_size=len(window.samples),
            ranks=self.world_size,
            precision=_precision(rerun.resolved, here),
            anomaly=trace,
        )

    def _usual(self) -> set[str] | None:
        """Non-finite values of the step before, which was well; None if it was not re-run."""
        return self.before[1].usual if self.before else None

    def _gradients(self, watched: StepFacts, origin: Origin) -> list[Gradient]:
        """The step's gradients against those of the step before."""
        usual: dict[str, tuple[float, float, int]] = {}
        scale = 1.0
        if self.before:
            facts, origin_before = self.before
            usual = origin_before.gradients
            scale = facts.loss_scale
        # What hooks see is the sum over all ranks' shares, still scaled.
        ranks = self.world_size
        return growth(origin.gradients, usual, watched.loss_scale * ranks, scale * ranks)

    def _hunted(self, gradients: Sequence[Gradient]) -> list[LayerHistory]:
        """What the journal has of these gradients' layers: their norms in the step and those before it."""
        # A step that was not measured has no such figures, so it is not listed.
        norms: dict[str, dict[int, float]] = {}
        for step in range(max(1, self.step - _HUNTED_STEPS), self.step + 1):
            row = self.history.row(step, self.attempt) or {}
            for name, norm in row.items():
                prefix, _, layer = name.partition("/")
                if prefix == OF_LAYERS.key:
                    norms.setdefault(layer, {})[step] = norm

        found: dict[str, LayerHistory] = {}
        for gradient in gradients:
            layer = layer_of(gradient.parameter, norms)
            if layer:
                found[layer] = LayerHistory(layer, norms[layer])
        return list(found.values())

    def _start(self) -> int:
        """Load the best state before the step that verifies. Returns its step, 0 for the initial state."""
        for base, store in self.history.bases(self.step):
            try:
                self.rerun.start(base, store)
            except CheckpointError as error:
                self.say(f"skipped: {error}")
                continue
            self.say(f"from the checkpoint of step {base}: {store.path(base)}")
            return base

        # The seed gives the initial state, unless it was another run's checkpoint.
        if self.history.started_from is not None:
            what = f"no checkpoint before step {self.step} is left"
            what += ", and the run began from another's"
            recorded = ", ".join(map(str, sorted(self.history.records))) or "none"
            fix = f"replay a later step, or one with a record: {recorded}"
            raise CheckpointError(Problem(what, str(self.folder), fix=fix))
        self.say("from the run's initial state, which its seed gives")
        return 0

    def _up_to_the_step(self) -> None:
        """Run the steps before it as the loop does. Watch the last of them, to know what is usual."""
        reported = time.monotonic()
        while (done := self.rerun.run.state.step) < self.step - 1:
            self._follow_changes()
            if done == self.step - 2:
                self.before = self._watch_the_step_before()
            facts = self.rerun.advance().facts
            self._compare(facts)
            if time.monotonic() - reported > _PROGRESS_SECONDS:
                reported = time.monotonic()
                left = self.step - 1 - facts.step
                self.say(f"step {facts.step}: re-run, {left} more before step {self.step}")

        self._follow_changes()

    def _follow_changes(self) -> None:
        """Build the re-run anew if the next step ran with another config or number of ranks, as after a resume."""
        step = self.rerun.run.state.step + 1
        setting = self.history.setting_of(step, self._present_config)
        if setting == self._setting:
            return
        kept = keep(self.rerun.run)
        self.rerun.close()
        config, ranks = self._setting = setting
        self.rerun = self.build(config, config.recipe, self.history.ledger_of(self.step), ranks)
        self.rerun.resume(kept)

    def _watch_the_step_before(self) -> tuple[StepFacts, Origin]:
        kept = keep(self.rerun.run)
        watched = self.rerun.watched(None)
        restore(self.rerun.run, kept)
        return watched

    def _compare(self, facts: StepFacts) -> None:
        """Note the first figure of all steps that is not the journal's."""
        if self.difference is None:
            self.difference = self.history.difference(facts, self.attempt)

    def _again(self, kept: Kept) -> StepFacts:
        """The step without hooks."""
        facts = self.rerun.take()
        restore(self.rerun.run, kept)
        return facts

    def _samples(self, kept: Kept, window: Window) -> list[Sample]:
        """Every sample of the window alone."""
        order = self.rerun.samples(window)
        data = self.rerun.run.data
        own_data = self.config.data.target is not None
        reported = time.monotonic()

        found: list[Sample] = []
        for place, number in enumerate(order):
            batch, facts = self.rerun.alone(place, kept)
            # A data set of the user's own has no tokens that could be counted from its beginning.
            first_token = None
            if not own_data:
                first_token = number * data.tokens_per_sample
            sample = Sample(
                number=number,
                rank=place * self.world_size // len(order),
                micro_batch=place // self.config.train.micro_batch + 1,
                first_token=first_token,
                text=_text(batch, data.unit),
                loss=facts.loss,
                grad_norm=facts.grad_norm,
                bad_data=facts.bad_data,
            )
            found.append(sample)
            if time.monotonic() - reported > _PROGRESS_SECONDS:
                reported = time.monotonic()
                self.say(f"sample {place + 1} of {len(order)}")
        return found

    def _anomaly(self, kept: Kept) -> str:
        """What autograd's anomaly mode says: the forward call behind the operation, and the operation."""
        with warnings.catch_warnings(record=True) as caught, eager(self.rerun.compiled):
            warnings.simplefilter("always")
            try:
                with torch.autograd.set_detect_anomaly(True):
                    self.rerun.take()
            except RuntimeError as error:
                messages = [str(each.message) for each in caught]
                traces = [message for message in messages if "forward call" in message]
                return "\n".join([*traces, str(error)])
            finally:
                self.rerun.model.zero_grad(set_to_none=True)
                restore(self.rerun.run, kept)
        return "no NaN in backward"

    def _in_float32(self, kept: Kept) -> tuple[StepFacts, Origin]:
        """The same step, from the same weights, without any low precision."""
        self.say(f"step {self.step}: in float32")
        engine = self.config.engine.model_copy(update={"compile": "none"})
        config = self.config.model_copy(update={"engine": engine})
        exact = self.build(config, "fp32", self.history.ledger_of(self.step), self.world_size)
        # The weights alone: optimizer and loss scale do not change a step's loss and gradients.
        model = exact.run.state.parts["model"]
        model.load_state_dict(kept.tensors["model"], kept.meta["parts"]["model"])
        exact.run.state.step = self.step - 1
        try:
            limits = self.rerun.run.state.limits.get(self.step)
            return exact.watched(self._usual(), limits)
        finally:
            exact.close()

    def _setup_differences(self) -> list[str]:
        """Why the bits of this re-run may differ from the run's."""
        found: list[str] = []
        planned = read_plan(self.folder).get("resolved")
        resolved = self.rerun.resolved
        if planned and planned != resolved:
            found.append(f"the run computed with {planned}, this machine with {resolved}")
        if self.record is None:
            return found
        here = self.rerun.environment
        if self.world_size > 1:
            found.append(
                f"the run had {self.world_size} ranks; here their samples run one after the other, and sums are "
                "rounded in another order"
            )
        for name in ("engine", "torch_version", "device", "threads"):
            was = getattr(self.record, name)
            now = getattr(here, name)
            # One process stands in for the ranks of DDP; the number of ranks is named above.
            expected = name == "engine" and was == "ddp"
            if was != now and not expected:
                found.append(f"{name}: {was} in the run, {now} here")
        return found


def _precision(resolved: str, facts: StepFacts) -> str:
    """The rung of the recipe, and how much of it ran in another precision by then."""
    if facts.fell_back_to:
        return f"{resolved}, all of it in {facts.fell_back_to}"
    if facts.demoted:
        return f"{resolved}, {number_of(len(facts.demoted), 'layer')} in bf16"
    return resolved


def _was_bad(row: Mapping[str, float]) -> bool:
    """Whether the journal's row is that of a bad step."""
    skipped = row.get("train/step_applied", 1.0) == 0.0
    loss = row.get("train/loss", 0.0)
    norm = row.get("train/grad_norm", 0.0)
    return skipped or not (math.isfinite(loss) and math.isfinite(norm))


def _text(sample: Batch, unit: str) -> str:
    """How a sample begins, if its tokens are bytes; else the names, shapes and first whole numbers of its tensors."""
    if unit == _BYTES:
        inputs = sample["inputs"]
        # Ids out of range may be why the step is bad.
        if inputs.min() >= 0 and inputs.max() < 256:
            first = inputs.reshape(-1)[:_TEXT].tolist()
            return bytes(first).decode(errors="backslashreplace")

    parts: list[str] = []
    for name, values in sample.items():
        numbers = ""
        if not values.is_floating_point():
            numbers = f" {values.reshape(-1)[:_TEXT].tolist()}"
        parts.append(f"{name} {list(values.shape[1:])}{numbers}")
    return ", ".join(parts)
