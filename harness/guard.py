"""`harness.Guard`: judges every step of a run and reacts, in our loop or in your own.

A step is judged one step later, when its figures have arrived on the host: no step waits for them. Monitors turn the
figures into verdicts, and the judge turns the verdicts into one action. The guard carries it out: switch layers to
another precision, roll back to a good state, or halt.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.checkpoint.overlapped import CopyError
from harness.checkpoint.recovery import Recovery
from harness.checkpoint.snapshots import Snapshots, room_for_snapshots
from harness.core.collectives import RankComparison, world_size
from harness.core.config import CheckpointConfig, GuardConfig, snapshot_gap, unwatched
from harness.core.errors import HaltedError, MisuseError, Problem
from harness.core.facts import Action, Continue, Halt, Rollback, StepFacts
from harness.core.protocols import Meta, TensorDict
from harness.core.schema import validate
from harness.core.state import ExternalState, TrainState, state_bytes
from harness.core.update import InFlight
from harness.engines.parts import ModelPart, Shards
from harness.monitors.registry import build_monitors
from harness.monitors.responder import Judge, Judgement
from harness.precision.misuse import parameters_of
from harness.precision.standard import unwrapped
from harness.telemetry import Telemetry

if TYPE_CHECKING:
    from harness.precision.api import Precision
    from harness.precision.prepared import Prepared

# Bytes of optimizer state for each trained element, to estimate a snapshot before any state exists: Adam's two moments.
_MOMENT_BYTES = 8

_FIX_IN_A_LOOP = (
    "Look at the samples of the windows named, lower the learning rate, or, if nothing is wrong with them, raise that "
    "setting of Guard.for_precision; go on from a checkpoint of your own"
)
"""The fix of a halt in your own loop. The usual text names commands of `harness`, which need its run folder."""


class Guard:
    """Watches one run: judges every step one step later, and does what the verdicts ask for.

        precision = harness.Precision.from_recipe("fp8_hybrid")
        model = precision.prepare(model)
        guard = harness.Guard.for_precision(precision, optimizer, keep=[scheduler])
        while guard.step < steps:
            inputs, targets = batches[guard.window]       # the place in your data order: bad windows are skipped
            with precision.context():
                loss = loss_function(model(inputs), targets)
            precision.backward(loss)
            precision.step(optimizer, max_grad_norm=1.0)   # keeps to the guard's limits
            optimizer.zero_grad()
            scheduler.step()
            guard.end_step()                               # may roll back; raises HaltedError where nothing helps

    judge: turns the facts of a step into an action.
    telemetry: where steps and events are written.
    memory: snapshots in host memory, for rollbacks over a few steps; None: none are taken.
    disk: checkpoints, for longer rollbacks; None: the loop has its own.
    stopping: whether some rank was asked to stop.
    """

    def __init__(
        self,
        judge: Judge,
        telemetry: Telemetry,
        memory: Snapshots | None = None,
        disk: Recovery | None = None,
    ) -> None:
        self.judge = judge
        self.telemetry = telemetry
        self.memory = memory
        self.disk = disk
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
        """A guard for a loop of your own. Call it after `prepare` and before the first step, on every rank.

        It does not see what your loop feeds the model: it cannot name samples that are out of range. Random generators
        are not restored by a rollback.

        precision: the one that prepared the model.
        optimizers: all that train the model, wrapped or not.
        keep: what a rollback must restore beside model, FP8 state, optimizers and all that these train, such as
          schedulers. One object or several, each with `state_dict` and `load_state_dict`.
        telemetry: where steps and events are written; None: events are printed on stderr, and nothing is kept.
        max_grad_norm: what you give `precision.step` or `wrap`, for the monitor that reports constant clipping.
        healthy_steps: healthy steps in a row after which a snapshot is good; None: as checkpoint.healthy_steps.
        streams: the loop does not read `window`, as its data cannot go back. A rollback then skips every window since
          the step that it returns to, so that `window` stays the number of the loop's batch.
        settings: keys of the section `guard` of a run's config, such as snapshot_every, max_rollbacks or enabled.

        Raises:
          MisuseError: something in `keep` cannot be kept, the model has a guard or has trained already, or an argument
            does not fit the others.
          ConfigError: a setting is unknown or out of range.
        """
        # Everything that is wrong with the arguments is reported at once.
        ready = precision.prepared
        ready.find_shards(_HERE)
        chosen = unwrapped(optimizers)
        parts: dict[str, Any] = {f"optimizer.{number}": each for number, each in enumerate(chosen)}
        if hasattr(keep, "state_dict"):  # one object, which may be iterable too, such as a module
            keep = [keep]
        parts |= {f"kept.{number}": each for number, each in enumerate(keep)}
        if problems := _misused(precision, parts.values(), telemetry, max_grad_norm):
            raise MisuseError(problems)

        # The same settings as in a run's config.
        config = validate(GuardConfig, settings, _HERE)
        _require_rates(chosen, config)
        chosen_steps: dict[str, int] = {}
        if healthy_steps is not None:
            chosen_steps["healthy_steps"] = healthy_steps
        healthy = validate(CheckpointConfig, chosen_steps, _HERE).healthy_steps

        telemetry = telemetry or Telemetry.for_precision(None, precision)
        fallback = ready.context.fallback.enabled
        if text := unwatched(config.enabled, fallback, bool(ready.context.layers)):
            telemetry.tell(0, "precision.unwatched", text)
        context = replace(ready.context, guard=config, max_grad_norm=max_grad_norm)
        monitors = build_monitors(context)
        # Ranks that hold different rows have nothing to compare.
        comparison = None
        if ready.shards is None:
            comparison = RankComparison.of(config, ready.model, ready.device)

        # Snapshots, if every rank has the memory for them.
        memory = None
        if config.enabled and config.snapshot_every:
            ready.state.parts["model"] = _model_part(ready)
            for name, each in parts.items():
                ready.state.parts[name] = ExternalState(name, each)
            ready.state.parts["beside"] = _WeightsBeside(ready, chosen)
            ready.state.state_dict()  # raises now for what cannot be kept
            trained = [param for param in ready.parameters() if param.requires_grad]
            elements = sum(param.numel() for param in trained)
            size = state_bytes(ready.model, _MOMENT_BYTES * elements)
            # Of a sharded model each rank keeps its rows.
            if ready.shards is not None:
                size = -(-size // world_size())
            overlapped = config.snapshot_copy == "overlapped"
            memory = room_for_snapshots(size, healthy, ready.device, telemetry, overlapped)

        guard = cls(ready.watch(config, monitors, comparison, chosen), telemetry, memory)
        guard.pending = ready.pending
        guard._precision = precision
        guard._optimizers = chosen
        guard._streams = streams
        return guard

    def end_step(self) -> Action:
        """Judge the step before the one just done, and react. In your own loop, call it after every `precision.step`.

        Returns what was done: Continue, Switch or Rollback. After a Rollback, model, optimizers, FP8 state and kept
        objects are those of `guard.step`, and the gradients are gone. Collective under a process group.

        Raises:
          HaltedError: going on would make it worse.
          MisuseError: there was no step since the last call.
        """
        precision = self._precision
        assert precision is not None, (
            "for loops with harness.Precision; ours takes arrived, observe and act"
        )
        if not self.pending or self.pending[-1] is self._seen:
            fix = "call it once after every precision.step()"
            raise MisuseError(Problem("no step since the last call", "end_step()", fix=fix))
        self._seen = self.pending[-1]
        self.telemetry.halt = None  # the loop goes on
        self.telemetry.step_ends(self.state.step)
        self._drop_unrelated_snapshots(precision)

        # With a snapshot due, the present step must be judged first. Else it stays on the device for one more step.
        done: Action = Continue()
        while (facts := self.arrived(0 if self.snapshot_due() else 1)) is not None:
            action = self.act(self.observe(facts))
            if isinstance(action, Halt):
                halt = HaltedError(Problem(action.reason, f"step {facts.step}", fix=action.fix))
                self.telemetry.halt = halt
                raise halt
            if isinstance(action, Rollback):
                precision.drop_window()
                for optimizer in self._optimizers:
                    optimizer.zero_grad(set_to_none=True)
            if not isinstance(action, Continue):
                done = action

        if self.snapshot_due():
            self.snapshot()
        self.begin()
        self.telemetry.step_begins(self.state.step + 1)
        return done

    def _drop_unrelated_snapshots(self, precision: Precision) -> None:
        """Drop the snapshots if they are not a past of this run that could be restored."""
        # The loop has loaded a checkpoint of its own, whose attempt is another one, too.
        if self._loaded != precision.prepared.loaded:
            self._loaded = precision.prepared.loaded
            self.telemetry.attempt = self.state.ledger.attempt
            if self.memory is not None:
                self.memory.clear()

        # An optimizer that has got more parameters cannot be restored to what it was before.
        groups: list[int] = []
        for optimizer in self._optimizers:
            groups += [len(group["params"]) for group in optimizer.param_groups]
        if self._groups not in (None, groups) and self.memory is not None:
            self.memory.clear()
        self._groups = groups

    @property
    def step(self) -> int:
        """Steps done so far. A rollback sets it back."""
        return self.state.step

    @property
    def window(self) -> int:
        """The place in the data order that the next step consumes. It skips the windows that broke the run."""
        return self.state.ledger.window_index(self.state.step)

    def begin(self) -> None:
        """Carry out the switches that are due before the next step. A second call does nothing."""
        for step, switch in self.judge.switch_due():
            moved = {
                "demote": list(switch.demote),
                "promote": list(switch.promote),
                "lowered": switch.whole_run_to,
            }
            self.telemetry.event(step, "precision.switched", **moved)

    def arrived(self, keep: int) -> StepFacts | None:
        """The facts of the oldest step that is not judged yet, once they are on the host.

        keep: None is returned if only this many steps are left. They stay on the device. Once some rank was asked to
          stop none stays.
        """
        left = 0 if self.stopping else keep
        if len(self.pending) <= left:
            return None
        facts = self.pending.popleft().facts()
        self.stopping = self.stopping or facts.stop
        return facts

    def observe(self, facts: StepFacts) -> Judgement:
        """Judge a step and write it down. Switches and limits are set for later steps; `act` does the rest."""
        judged = self.judge.observe(facts)
        self.telemetry.record(facts, self.state.ledger, judged)
        if self.memory is not None:
            self.memory.observe(facts.step, judged.healthy)
        if self.disk is not None:
            self.disk.observe(facts.step, judged.healthy)
        return judged

    def act(self, judged: Judgement) -> Action:
        """Carry out a rollback, or log a halt; returns what was done. Collective.

        A rollback becomes a halt if there is no good state to return to.
        """
        step, action = judged.facts.step, judged.action
        if isinstance(action, Rollback):
            self.pending.clear()
            target = self._roll_back(step, action)
            if target is None:
                action = Halt(str(self._nothing_to_return_to(step, action)))
            else:
                text = f"step {step}: rolled back to step {target}: {action.reason}"
                self.telemetry.screen.event(text)
        if isinstance(action, Halt):
            if action.fix and self._precision is not None:
                action = replace(action, fix=_FIX_IN_A_LOOP)
            self.telemetry.event(step, "guard.halt", reason=action.text)
            self.telemetry.flush()
        return action

    def snapshot_due(self) -> bool:
        """Whether a snapshot is taken after the present step.

        It depends on the step only: what a rollback returns to must not depend on the machine.
        """
        step = self.state.step
        gap = snapshot_gap(self.judge.config, step)
        return self.memory is not None and gap > 0 and step % gap == 0

    def snapshot(self) -> None:
        """Take a snapshot of the state; no more snapshots are taken if it cannot be copied. Collective."""
        if self.memory is None:
            return
        try:
            self.memory.take(self.state.step, *self.state.state_dict())
        except MisuseError as error:
            # An optimizer makes its state as it goes: only now it may turn out that it cannot be kept.
            self._no_more_snapshots(self.state.step, error.problems[0].what)
        except CopyError as error:
            self._no_more_snapshots(self.state.step, f"the copy failed ({error})")

    def _no_more_snapshots(self, step: int, why: str) -> None:
        self.memory = None
        self.telemetry.tell(step, "snapshot.off", f"{why}: nothing to roll back to")

    def _roll_back(self, step: int, action: Rollback) -> int | None:
        """Return to the newest good state, in memory or on disk, and skip the bad windows.

        Returns the step of that state, or None if there is none. Collective.
        """
        # The newest good state. Both answers are the same on every rank.
        on_disk: int | None = None
        in_memory: int | None = None
        if self.disk is not None:
            on_disk = self.disk.newest_good()
        # Copies in memory are each rank's own: where ranks differ, they differ there as well.
        if self.memory is not None and not action.from_disk:
            try:
                in_memory = self.memory.newest_good()
            except CopyError as error:
                self._no_more_snapshots(step, f"the copy failed ({error})")
        states = [each for each in (on_disk, in_memory) if each is not None]
        if not states:
            return None
        target = max(states)
        from_memory = self.memory is not None and target == in_memory

        # A stream cannot go back: what it has fed since that state is skipped as well.
        bad = list(action.bad)
        ledger = self.state.ledger
        if self._streams:
            since = range(ledger.window_index(target), ledger.window_index(self.state.step))
            bad = sorted({*bad, *since} - set(ledger.skipped_windows))

        # The event comes before the commit: after a kill in between it is logged twice, which is harmless.
        source = "memory" if from_memory else "disk"
        fields = {"reason": action.reason, "to_step": target, "passed_over": bad, "source": source}
        self.telemetry.event(step, "guard.rollback", **fields)
        held = set(self.judge.held)
        ledger.go_back(target, bad)
        if self.disk is not None:
            self.disk.commit(target)

        # Restore the state. Snapshots are newer than a checkpoint on disk, so they no longer fit.
        if self.memory is not None and from_memory:
            self.state.load_state_dict(*self.memory.load())
        elif self.disk is not None:
            self.state.load_state_dict(*self.disk.read(target))
            if self.memory is not None:
                self.memory.clear()

        # The old state must not bring back precisions that the run, or the user, has left since.
        self.state.drop_fallback()
        self.judge.stay_fallen_back()
        self.judge.stay_held(held)
        self.telemetry.attempt = ledger.attempt
        return target

    def _nothing_to_return_to(self, step: int, action: Rollback) -> Problem:
        """Why a rollback was not possible, for the post-mortem."""
        if self.disk is not None:
            what = f"step {step}: {action.reason}; and no checkpoint is good yet"
            why = "a checkpoint is good once checkpoint.healthy_steps healthy steps followed it"
            fix = (
                "lower train.lr, lengthen train.warmup_steps, or save more often (checkpoint.every)"
            )
            return Problem(what, "guard", why, fix)

        what = f"step {step}: {action.reason}; and no snapshot is good"
        if action.from_disk:
            why = "ranks that differ have no state in common"
            fix = (
                "call the model through DistributedDataParallel in every forward that trains, or look at `harness "
                "explain ranks.diverged`; then go on from a checkpoint of your own, the same on every rank"
            )
            return Problem(what, "guard", why, fix)

        why = "a snapshot is good once healthy steps enough followed it; each serves one rollback"
        if self.memory is None:
            why = "no snapshots are taken: snapshot_every is 0, or an event snapshot.off says why"
        fix = "go on from a checkpoint of your own, with a lower learning rate"
        return Problem(what, "guard", why, fix)


def _model_part(ready: Prepared) -> ModelPart:
    """The model as a part of the state: of a sharded one this rank's rows."""
    if ready.shards is None:
        return ModelPart(ready.model)
    local = ready.shards.local
    shards = Shards(local.weights, local.rows, None, local.reshard)
    return ModelPart(ready.model, shards)


class _WeightsBeside:
    """The weights that the optimizers train beside the model: of a loss, or a temperature. A part of the state."""

    def __init__(self, ready: Prepared, optimizers: Sequence[Optimizer]) -> None:
        self._ready = ready
        self._optimizers = optimizers

    def _weights(self) -> list[nn.Parameter]:
        # Asked anew each time: groups may join later.
        own = {id(parameter) for parameter in self._ready.parameters()}
        return [each for each in parameters_of(self._optimizers) if id(each) not in own]

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """Tensors by their number in the optimizers."""
        return {str(number): each.detach() for number, each in enumerate(self._weights())}, {}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for number, each in enumerate(self._weights()):
            each.copy_(tensors[str(number)])


_HERE = "Guard.for_precision"


def _misused(
    precision: Precision, parts: Iterable[Any], telemetry: Telemetry | None, max_grad_norm: float
) -> list[Problem]:
    """What is wrong with the arguments of `Guard.for_precision`. parts: optimizers, and what is kept."""
    ready = precision.prepared
    problems: list[Problem] = []
    of_shards = ready.of_shards()
    for each in parts:
        if of_shards is not None and isinstance(each, Optimizer):
            problems += of_shards(_HERE, each)
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            what = f"{type(each).__name__} lacks state_dict or load_state_dict"
            problems.append(Problem(what, _HERE, fix="wrap it"))

    # A guard must see every step.
    if ready.guarded or ready.state.step:
        what = "the model has trained already"
        if ready.guarded:
            what = "the model has a guard already"
        fix = "make one Guard for each Precision, before its first step and before load_state_dict"
        problems.append(Problem(what, _HERE, fix=fix))

    # A model has one Telemetry. With another one the record would be torn in two.
    what = ""
    if telemetry is None and ready.has_telemetry:
        what = "the model's Telemetry is not given"
    if telemetry is not None and not telemetry.is_of(precision):
        what = "this Telemetry is another model's"
    if what:
        problems.append(Problem(what, _HERE, fix="telemetry=..., made for this Precision"))

    if not max_grad_norm > 0:
        what = f"max_grad_norm is {max_grad_norm}"
        problems.append(Problem(what, _HERE, fix="over 0, or none for no clipping"))
    return problems


def _require_rates(optimizers: Sequence[Optimizer], config: GuardConfig) -> None:
    """Raise MisuseError if a rollback must lower the learning rate and an optimizer has none."""
    for each in optimizers:
        fixed = any(group.get("lr") is None for group in each.param_groups)
        if fixed and config.rollback_lr_factor != 1:
            what = f"rollback_lr_factor: {type(each).__name__} has no learning rate that could be lowered"
            fix = "rollback_lr_factor=1, or an optimizer with lr"
            raise MisuseError(Problem(what, _HERE, fix=fix))
