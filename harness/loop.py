"""The training loop: step, judge one step later, act; save and validate on drained boundaries."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence

from harness.core.collectives import gather_texts
from harness.core.errors import ExitCode
from harness.core.facts import (
    SWITCH_DELAY,
    Continue,
    Halt,
    Limits,
    Outcome,
    Rollback,
    StepFacts,
    Switch,
    Verdict,
    Window,
)
from harness.core.metrics import row
from harness.core.protocols import NO_LIMITS
from harness.core.update import InFlight
from harness.evaluate import evaluate
from harness.run import Flight, Run
from harness.step import train_step


def run(r: Run) -> Outcome:
    """Train from the run's state to `train.steps`, a stop request or a halt. The outcome is the same on every rank."""
    total = r.config.train.steps
    pending: deque[InFlight] = deque()
    stopping = False
    known: dict[str, float] = {}
    stay_lowered(r)
    while r.state.step < total and not stopping:
        pending.append(next_step(r))
        _tell_eager(r)
        lag = 0 if _boundary(r) else 1
        returned = False
        while len(pending) > (0 if stopping else lag):
            facts = pending.popleft().facts()
            stopping = stopping or facts.stop
            known = {"train_loss": facts.loss}
            action = judge(r, facts)
            if isinstance(action, Halt):
                return _halt(r, facts.step, action.reason)
            if isinstance(action, Rollback):
                pending.clear()
                if not _rollback(r, facts, action):
                    return _halt(r, facts.step, str(r.recovery.nothing_to_return_to(facts.step, action.reason)))
                returned, known = True, {}
        if r.state.step >= total or _every(r.config.train.eval_every, r.state.step):
            known["val_loss"] = _validate(r)
        # What a rollback went back to is there already, and known by the figures of its own step.
        due = _every(r.config.checkpoint.every, r.state.step) and not returned
        if r.state.step >= total or stopping or due:
            r.recovery.save(known, wait=stopping or r.state.step >= total)
        if _snapshot_due(r):
            r.recovery.snapshot()
    if r.state.step < total:
        reason = _reason(r)
        r.tracker.event(r.state.step, "run.stopped", reason=reason)
        return Outcome("stopped", ExitCode.STOPPED, reason, r.state.step)
    val_loss = known["val_loss"] if "val_loss" in known else _validate(r)
    return Outcome("done", ExitCode.DONE, f"{total} steps", r.state.step, val_loss)


def _reason(r: Run) -> str:
    """Why the run was asked to stop, and on which rank if not on the first; the same on every rank."""
    reasons = gather_texts(r.stop.reason)
    rank = next((number for number, text in enumerate(reasons) if text), 0)
    return f"rank {rank}: {reasons[rank]}" if rank else reasons[rank]


def next_step(r: Run) -> InFlight:
    """Train on the next window. Its facts are to be judged, in order."""
    pending = train_step(r, next_window(r))
    r.state.advance()
    return pending


def next_window(r: Run) -> Window:
    """The next window, after what is due before its step: switches, and the learning rate's factor. Harmless twice."""
    _switch_due(r)
    # Every rollback lowers the learning rate of the steps after it, for good.
    past = r.state.incidents.rollbacks_before(r.state.step + 1)
    r.engine.lr_factor = r.config.guard.rollback_lr_factor**past
    return r.data.window(r.state.step, r.state.incidents.window_index(r.state.step))


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0


def _boundary(r: Run) -> bool:
    """Whether something follows this step that must not see an unjudged one: a save, a validation, the end."""
    step, config = r.state.step, r.config
    periodic = _every(config.checkpoint.every, step) or _every(config.train.eval_every, step)
    return periodic or _snapshot_due(r) or step >= config.train.steps


def _snapshot_due(r: Run) -> bool:
    return r.recovery.memory is not None and _every(r.config.guard.snapshot_every, r.state.step)


def judge(r: Run, facts: StepFacts) -> Continue | Rollback | Halt:
    """Monitors, journal, responder: one step's facts become one action. Switches and limits are queued here."""
    verdicts = [monitor.observe(facts) for monitor in r.monitors]
    action = r.responder.decide(verdicts)
    incidents = r.state.incidents
    r.tracker.metrics(facts.step, row(facts, incidents, _every(r.config.tracking.fp8_every, facts.step)))
    for verdict in (*verdicts, *r.responder.notes):
        if verdict.text:
            r.tracker.event(facts.step, verdict.code, text=verdict.text, **verdict.evidence)
            r.screen.event(f"step {facts.step}: {verdict.code}: {verdict.text}")
    total = len(r.precision.layers)
    r.screen.step(facts, total - len(facts.demoted), total, incidents.skips, incidents.rollbacks)
    r.recovery.observe(facts.step, r.responder.healthy(verdicts))
    if r.flight is not None and r.responder.suspect(facts, verdicts, action):
        _keep_flight(r, r.flight, facts, verdicts)
    due = facts.step + SWITCH_DELAY
    closer = max((verdict.look_closer for verdict in verdicts), default=0)
    if closer:
        r.state.closer_look = r.state.closer_look.extended(due, closer)
    limits = functools.reduce(Limits.stricter, (verdict.limits for verdict in verdicts), NO_LIMITS)
    if limits != NO_LIMITS:
        r.state.limits[due] = limits
    if isinstance(action, Switch):
        r.state.switches.append((due, list(action.demote), list(action.promote), action.lower))
        return Continue()
    return action


def _keep_flight(r: Run, flight: Flight, facts: StepFacts, verdicts: Sequence[Verdict]) -> None:
    """Of a step that went bad, keep what a re-run needs."""
    r.recovery.settle()  # a record keeps the checkpoint to start from, and which one must not depend on the disk
    try:
        samples = r.data.window(facts.step - 1, facts.window).samples
        codes = [verdict.code for verdict in verdicts if not verdict.ok]
        begins = flight.keep(facts, samples.tolist(), codes, r.state.incidents)
    except OSError as error:
        r.tracker.event(facts.step, "flight.failed", text=str(error))
        return
    if begins and not r.replay_told:
        r.replay_told = True
        r.screen.event(f"step {facts.step}: what made it bad: harness replay {r.folder} --step {facts.step}")


def _switch_due(r: Run) -> None:
    """Carry out the switches whose step has come, between two steps, the same on every rank."""
    due = [switch for switch in r.state.switches if switch[0] <= r.state.step + 1]
    r.state.switches = [switch for switch in r.state.switches if switch not in due]
    for step, demote, promote, lower in due:
        before = r.precision.demoted
        if lower:
            r.precision.lower(lower)
        else:
            r.precision.switch(demote, promote)
        moved = [layer for layer in r.precision.demoted if layer not in before]
        r.tracker.event(step, "precision.switched", demote=moved, promote=promote, lowered=lower)


def stay_lowered(r: Run) -> None:
    """After a checkpoint was loaded: one from before the whole run's fall must not bring the old precision back."""
    fallen = r.state.incidents.lowered
    if fallen and not r.precision.lowered and not any(lower for *_, lower in r.state.switches):
        r.precision.lower(fallen)


def _tell_eager(r: Run) -> None:
    """Compiled code that was given up costs speed, and torch tells only its own logger."""
    fallen = r.watch.take() if r.watch is not None else ""
    if fallen:
        r.tracker.event(r.state.step, "compile.eager", text=fallen)
        r.screen.event(f"step {r.state.step}: compile.eager: {fallen}")


def _rollback(r: Run, facts: StepFacts, action: Rollback) -> bool:
    target = r.recovery.rollback(facts.step, action)
    if target is None:
        return False
    stay_lowered(r)
    r.tracker.attempt = r.state.incidents.attempt
    r.screen.event(f"step {facts.step}: rolled back to step {target}: {action.reason}")
    return True


def _validate(r: Run) -> float:
    loss = evaluate(r)
    r.tracker.metrics(r.state.step, {"val/loss": loss})
    r.screen.validation(r.state.step, loss)
    return loss


def _halt(r: Run, step: int, reason: str) -> Outcome:
    r.tracker.event(step, "guard.halt", reason=reason)
    r.tracker.flush()
    return Outcome("halted", ExitCode.HALTED, reason, step)
