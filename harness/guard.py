"""`harness.Guard`: what watches a run and steers it, in any loop: judging, switches, limits, snapshots, rollback."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.checkpoint.recovery import Recovery
from harness.checkpoint.snapshots import Snapshots, room_for_snapshots
from harness.core.collectives import RankComparison
from harness.core.config import CheckpointConfig, GuardConfig, snapshot_gap, unwatched
from harness.core.errors import HaltedError, MisuseError, Problem
from harness.core.facts import Action, Continue, Halt, Rollback, StepFacts
from harness.core.schema import validate
from harness.core.state import ExternalState, TrainState, state_bytes
from harness.core.update import InFlight
from harness.engines.torch_engine import ModelPart
from harness.monitors.registry import build_monitors
from harness.monitors.responder import Judge, Judgement
from harness.precision.standard import unwrapped
from harness.telemetry import Telemetry

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from harness.precision.api import Precision

# Of the optimizers that are known Adam keeps the most: to guess what a snapshot takes before there is one.
_MOMENT_BYTES = 8


_FIX_IN_A_LOOP = (
    "Look at the samples of the windows named, lower the learning rate, or, if nothing is wrong with them, raise that "
    "setting of Guard.for_precision; go on from a checkpoint of your own"
)
"""Of a halt that proposes a command of ours, where no run folder and no command is."""


class Guard:
    """Watches one run: every step is judged one step later, and what the verdicts ask for is done.

        precision = harness.Precision.from_recipe("fp8_hybrid")
        model = precision.prepare(model)
        guard = harness.Guard.for_precision(precision, optimizer, keep=[scheduler])
        while guard.step < steps:
            inputs, targets = batches[guard.window]       # the place in your data order: bad windows are passed over
            with precision.context():
                loss = loss_function(model(inputs), targets)
            precision.backward(loss)
            precision.step(optimizer, max_grad_norm=1.0)   # keeps to the guard's limits
            optimizer.zero_grad()
            scheduler.step()
            guard.end_step()                               # may roll back; raises HaltedError where nothing helps

    memory: snapshots for the short way back; None where none are taken. disk: checkpoints for the long one; None where
    the loop keeps its own. stopping: some rank was asked to stop.
    """

    def __init__(
        self,
        judge: Judge,
        telemetry: Telemetry,
        memory: Snapshots | None = None,
        disk: Recovery | None = None,
    ) -> None:
        self.judge, self.telemetry, self.memory, self.disk = judge, telemetry, memory, disk
        self.state: TrainState = judge.state
        self.stopping = False
        self.pending: deque[InFlight] = deque()
        self._precision: Precision | None = None
        self._streams = False
        self._optimizers: list[Optimizer] = []
        self._seen: InFlight | None = None
        self._loaded = 0
        self._groups: list[int] | None = None

    @classmethod
    def for_precision(
        cls,
        precision: Precision,
        optimizers: Optimizer | Sequence[Optimizer],
        *,
        keep: Any = (),
        telemetry: Telemetry | None = None,
        max_grad_norm: float = math.inf,
        healthy_steps: int | None = None,
        streams: bool = False,
        **settings: Any,
    ) -> Guard:
        """For a loop of your own: after `prepare` and before its first step, on every rank.

        optimizers: all that train the model, wrapped or not. keep: what a rollback must put back beside model,
        optimizers and FP8 state, one or several: anything with `state_dict` and `load_state_dict`, such as schedulers.
        telemetry: where it is written; by default events are said on stderr and nothing is kept. max_grad_norm: what
        you give `precision.step` or `wrap`, for the monitor that tells of constant clipping. healthy_steps: steps in a
        row that make a snapshot good. streams: the loop does not look at `window`, its data just go on: a rollback
        passes over everything since the step that it goes back to, so that `window` stays the loop's batch number.
        settings: keys of the section `guard` of a run's config, such as snapshot_every, max_rollbacks or enabled.

        What your loop feeds the model is not seen: samples that are out of range are not named, and random numbers go
        on after a rollback. Raises MisuseError naming what cannot be kept, ConfigError for settings.
        """
        ready = precision.prepared
        chosen = unwrapped(optimizers)
        parts = {f"optimizer.{number}": each for number, each in enumerate(chosen)}
        if hasattr(keep, "state_dict"):
            keep = [keep]  # a module may be gone through, too
        parts |= {f"kept.{number}": each for number, each in enumerate(keep)}
        problems = [
            Problem(
                f"{type(each).__name__} lacks state_dict or load_state_dict",
                "Guard.for_precision",
                fix="wrap it",
            )
            for each in parts.values()
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict"))
        ]
        if ready.guarded or ready.state.step:
            what = (
                "the model has a guard already"
                if ready.guarded
                else "the model has trained already"
            )
            fix = "make one Guard for each Precision, before its first step and before load_state_dict"
            problems.append(Problem(what, "Guard.for_precision", fix=fix))
        if ready.told if telemetry is None else not telemetry.is_of(precision):
            what = (
                "the model's Telemetry is not given"
                if telemetry is None
                else "this Telemetry is another model's"
            )
            problems.append(
                Problem(what, "Guard.for_precision", fix="telemetry=..., made for this Precision")
            )
        if not max_grad_norm > 0:
            fix = "over 0, or none for no clipping"
            problems.append(
                Problem(f"max_grad_norm is {max_grad_norm}", "Guard.for_precision", fix=fix)
            )
        if problems:
            raise MisuseError(problems)
        config = validate(GuardConfig, settings, "Guard.for_precision")
        fixed = [
            each for each in chosen if any(group.get("lr") is None for group in each.param_groups)
        ]
        if fixed and config.rollback_lr_factor != 1:
            what = f"rollback_lr_factor: {type(fixed[0]).__name__} has no learning rate that could be lowered"
            raise MisuseError(
                Problem(
                    what, "Guard.for_precision", fix="rollback_lr_factor=1, or an optimizer with lr"
                )
            )
        chosen_steps = {} if healthy_steps is None else {"healthy_steps": healthy_steps}
        healthy = validate(CheckpointConfig, chosen_steps, "Guard.for_precision").healthy_steps
        telemetry = telemetry or Telemetry.for_precision(None, precision)
        if text := unwatched(
            config.enabled, ready.context.fallback.enabled, bool(ready.context.layers)
        ):
            telemetry.tell(0, "precision.unwatched", text)
        monitors = build_monitors(replace(ready.context, guard=config, max_grad_norm=max_grad_norm))
        comparison = RankComparison.of(config, ready.model, ready.device)
        memory = None
        if config.enabled and config.snapshot_every:
            ready.state.parts["model"] = ModelPart(ready.model)
            ready.state.parts |= {name: ExternalState(name, each) for name, each in parts.items()}
            ready.state.state_dict()  # refuses now what cannot be kept
            trained = sum(
                param.numel() for param in ready.model.parameters() if param.requires_grad
            )
            size = state_bytes(ready.model, _MOMENT_BYTES * trained)
            memory = room_for_snapshots(size, healthy, ready.device, telemetry)
        guard = cls(ready.watch(config, monitors, comparison, chosen), telemetry, memory)
        guard.pending = ready.pending
        guard._precision, guard._optimizers, guard._streams = precision, chosen, streams
        return guard

    def end_step(self) -> Action:
        """In a loop of your own, once after every `precision.step`: judge the step before it, and do what follows.

        Returns what was done: Continue, Switch, or Rollback: then model, optimizers, FP8 state and what is kept are
        those of `guard.step`, and the gradients are gone. Raises HaltedError where going on would only be worse.
        Collective under a process group.
        """
        precision = self._precision
        assert precision is not None, (
            "for loops with harness.Precision; ours takes arrived, observe and act"
        )
        if not self.pending or self.pending[-1] is self._seen:
            fix = "call it once after every precision.step()"
            raise MisuseError(Problem("no step since the last call", "end_step()", fix=fix))
        self._seen = self.pending[-1]
        if (
            self._loaded != precision.prepared.loaded
        ):  # the loop went back by itself: what is in memory is not its past
            self._loaded, self.telemetry.attempt = (
                precision.prepared.loaded,
                self.state.ledger.attempt,
            )
            if self.memory is not None:
                self.memory.clear()
        groups = [
            len(group["params"])
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]
        if self._groups not in (None, groups) and self.memory is not None:
            self.memory.clear()  # an optimizer that grew cannot be put back to what it was
        self._groups = groups
        done: Action = Continue()
        while (facts := self.arrived(0 if self.snapshot_due() else 1)) is not None:
            action = self.act(self.observe(facts))
            if isinstance(action, Halt):
                raise HaltedError(Problem(action.reason, f"step {facts.step}", fix=action.fix))
            if isinstance(action, Rollback):
                precision.drop_window()
                for optimizer in self._optimizers:
                    optimizer.zero_grad(set_to_none=True)
            done = done if isinstance(action, Continue) else action
        if self.snapshot_due():
            self.snapshot()
        self.begin()
        return done

    @property
    def step(self) -> int:
        """Steps done so far, of those that count: a rollback takes the later ones away."""
        return self.state.step

    @property
    def window(self) -> int:
        """The place in the data order that the next step consumes: a rollback passes over those that broke the run."""
        return self.state.ledger.window_index(self.state.step)

    def begin(self) -> None:
        """Carry out the switches that are due before the next step. Harmless twice."""
        for step, switch in self.judge.switch_due():
            moved = {
                "demote": list(switch.demote),
                "promote": list(switch.promote),
                "lowered": switch.whole_run_to,
            }
            self.telemetry.event(step, "precision.switched", **moved)

    def arrived(self, keep: int) -> StepFacts | None:
        """The facts of the oldest step that is not judged yet, unless only `keep` are left; waits for the step.

        Once some rank was asked to stop none is kept.
        """
        if len(self.pending) <= (0 if self.stopping else keep):
            return None
        facts = self.pending.popleft().facts()
        self.stopping = self.stopping or facts.stop
        return facts

    def observe(self, facts: StepFacts) -> Judgement:
        """Judge a step and tell of it. What it asks for beside switches and limits is left to `act`."""
        judged = self.judge.observe(facts)
        self.telemetry.record(facts, self.state.ledger, judged)
        if self.memory is not None:
            self.memory.observe(facts.step, judged.healthy)
        if self.disk is not None:
            self.disk.observe(facts.step, judged.healthy)
        return judged

    def act(self, judged: Judgement) -> Action:
        """Carry out a rollback; a Halt in its place where there is nothing to go back to. Collective."""
        step, action = judged.facts.step, judged.action
        if isinstance(action, Rollback):
            self.pending.clear()
            target = self._roll_back(step, action)
            if target is None:
                action = Halt(str(self._nothing_to_return_to(step, action)))
            else:
                self.telemetry.screen.event(
                    f"step {step}: rolled back to step {target}: {action.reason}"
                )
        if isinstance(action, Halt):
            if action.fix and self._precision is not None:
                action = replace(action, fix=_FIX_IN_A_LOOP)
            self.telemetry.event(step, "guard.halt", reason=action.text)
            self.telemetry.flush()
        return action

    def snapshot_due(self) -> bool:
        """Whether the state is kept in memory after the present step, once all of its steps are judged.

        A function of the step alone: what a rollback goes back to must not depend on the machine.
        """
        step = self.state.step
        gap = snapshot_gap(self.judge.config, step)
        return self.memory is not None and gap > 0 and step % gap == 0

    def snapshot(self) -> None:
        """Keep the state in memory, if it can be copied. Collective."""
        if self.memory is None:
            return
        try:
            self.memory.take(self.state.step, *self.state.state_dict())
        except (
            MisuseError,
            MemoryError,
            OSError,
        ) as error:  # an optimizer makes its state as it goes
            self.memory = None
            what = (
                error.problems[0].what
                if isinstance(error, MisuseError)
                else f"no room for a copy ({error})"
            )
            self.telemetry.tell(self.state.step, "snapshot.off", f"{what}: nothing to roll back to")

    def _roll_back(self, step: int, action: Rollback) -> int | None:
        """Go back to the newest good state, in memory or on disk, and pass over the bad windows; its step, or None.

        The event comes before the commit, as saying it twice is harmless.
        """
        on_disk = self.disk.newest_good() if self.disk is not None else None
        in_memory = self.memory.good if self.memory is not None and not action.from_disk else None
        target = max((each for each in (on_disk, in_memory) if each is not None), default=None)
        if target is None:
            return None
        from_memory = self.memory is not None and target == in_memory
        bad, ledger = list(action.bad), self.state.ledger
        if self._streams:
            since = range(ledger.window_index(target), ledger.window_index(self.state.step))
            bad = sorted({*bad, *since} - set(ledger.skipped_windows))
        source = "memory" if from_memory else "disk"
        fields = {"reason": action.reason, "to_step": target, "passed_over": bad, "source": source}
        self.telemetry.event(step, "guard.rollback", **fields)
        held = set(self.judge.held)
        ledger.go_back(target, bad)
        if self.disk is not None:
            self.disk.commit(target)
        if self.memory is not None and from_memory:
            self.state.load_state_dict(*self.memory.load())
        elif self.disk is not None:
            self.state.load_state_dict(*self.disk.read(target))
            if self.memory is not None:
                self.memory.clear()
        self.state.drop_fallback()
        self.judge.stay_fallen_back()
        self.judge.stay_held(held)
        self.telemetry.attempt = ledger.attempt
        return target

    def _nothing_to_return_to(self, step: int, action: Rollback) -> Problem:
        """Why a rollback could not be done, for the post-mortem."""
        if self.disk is None:
            why = (
                "a snapshot is good once healthy steps enough followed it; each serves one rollback"
            )
            if self.memory is None:
                why = (
                    "no snapshots are taken: snapshot_every is 0, or an event snapshot.off says why"
                )
            if action.from_disk:
                why = "ranks that differ have no state in common"
            fix = "go on from a checkpoint of your own, with a lower learning rate"
            return Problem(
                f"step {step}: {action.reason}; and no snapshot is good", "guard", why, fix
            )
        return Problem(
            f"step {step}: {action.reason}; and no checkpoint is good yet",
            "guard",
            why="a checkpoint is good once checkpoint.healthy_steps healthy steps followed it",
            fix="lower train.lr, lengthen train.warmup_steps, or save more often (checkpoint.every)",
        )
