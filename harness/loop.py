"""The training loop: step, judge one step later, act; save and validate on drained boundaries."""

from __future__ import annotations

from harness.checkpoint.recovery import Kept
from harness.core.collectives import gather_texts
from harness.core.errors import ExitCode
from harness.core.facts import Halt, Outcome, Rollback, StepFacts, Window
from harness.core.update import InFlight
from harness.monitors.responder import Judgement
from harness.run import Run, evaluate, train_step


def train(run: Run) -> Outcome:
    """Train from the run's state to `train.steps`, a stop request or a halt. The outcome is the same on every rank."""
    total, guard = run.config.train.steps, run.guard
    known: dict[str, float] = {}
    kept = Kept()
    guard.judge.stay_fallen_back()
    while run.state.step < total and not guard.stopping:
        guard.pending.append(next_step(run))
        _tell_eager(run)
        lag = 0 if _boundary(run) else 1
        returned = False
        while (facts := guard.arrived(lag)) is not None:
            known = {"train_loss": facts.loss}
            action = guard.act(observe(run, facts))
            if isinstance(action, Halt):
                return Outcome("halted", ExitCode.HALTED, action.reason, facts.step)
            if isinstance(action, Rollback):
                returned, known = True, {}
        if run.state.step >= total or _every(run.config.train.eval_every, run.state.step):
            known["val_loss"] = _validate(run)
        # What a rollback went back to is there already, and known by the figures of its own step.
        due = _every(run.config.checkpoint.every, run.state.step) and not returned
        if run.state.step >= total or guard.stopping or due:
            kept = run.recovery.keep(known, "stop" if guard.stopping else "end" if run.state.step >= total else "")
            guard.stopping = guard.stopping or kept.asked
            if kept.halts:
                return Outcome("halted", ExitCode.HALTED, f"checkpoint.on_failure: halt; {kept.note}", run.state.step)
        if guard.snapshot_due():
            guard.snapshot()
    if run.state.step < total:
        reason = _with_note(_reason(run), kept)
        if not kept.safe:
            return _lost(run, reason)
        run.telemetry.event(run.state.step, "run.stopped", reason=reason)
        return Outcome("stopped", ExitCode.STOPPED, reason, run.state.step)
    val_loss = known["val_loss"] if "val_loss" in known else _validate(run)
    reason = _with_note(f"{total} steps", kept)
    if not kept.safe:
        return _lost(run, _with_note(_reason(run), kept) if kept.asked else reason, val_loss)
    return Outcome("done", ExitCode.DONE, reason, run.state.step, val_loss)


def _with_note(reason: str, kept: Kept) -> str:
    return f"{reason}; {kept.note}" if kept.note else reason


def _lost(run: Run, reason: str, val_loss: float | None = None) -> Outcome:
    """The end of a run whose last steps no checkpoint has: to start it again is not to go on from here."""
    run.telemetry.tell(run.state.step, "run.failed", reason)
    return Outcome("failed", ExitCode.FAILED, reason, run.state.step, val_loss)


def _reason(run: Run) -> str:
    """Why the run was asked to stop, and on which rank if not on the first; the same on every rank."""
    reasons = gather_texts(run.stop.reason)
    rank = next((number for number, text in enumerate(reasons) if text), 0)
    return f"rank {rank}: {reasons[rank]}" if rank else reasons[rank]


def observe(run: Run, facts: StepFacts) -> Judgement:
    """Judge a step; of one that went bad keep what a re-run needs, before anything is rolled back."""
    judged = run.guard.observe(facts)
    if judged.suspect:
        _keep_flight(run, judged)
    return judged


def next_step(run: Run) -> InFlight:
    """Train on the next window. Its facts are to be judged, in order."""
    pending = train_step(run, next_window(run))
    run.state.advance()
    return pending


def next_window(run: Run) -> Window:
    """The next window, after what is due before its step: switches, and the learning rate's factor. Harmless twice."""
    run.guard.begin()
    run.engine.lr_factor = run.guard.judge.lr_factor
    return run.data.window(run.guard.window)


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0


def _boundary(run: Run) -> bool:
    """Whether something follows this step that must not see an unjudged one: a save, a validation, the end."""
    step, config = run.state.step, run.config
    periodic = _every(config.checkpoint.every, step) or _every(config.train.eval_every, step)
    return periodic or run.guard.snapshot_due() or step >= config.train.steps


def _keep_flight(run: Run, judged: Judgement) -> None:
    if run.keep_flight is None:
        return
    facts = judged.facts
    run.recovery.settle()  # a record keeps the checkpoint to start from, and which one must not depend on the disk
    try:
        samples = run.data.window(facts.window).samples
        codes = [verdict.code for verdict in judged.verdicts if not verdict.ok]
        begins = run.keep_flight(facts, samples.tolist(), codes, run.state.ledger)
    except OSError as error:
        run.telemetry.event(facts.step, "flight.failed", text=str(error))
        return
    if begins and not run.replay_told:
        run.replay_told = True
        told = f"step {facts.step}: what made it bad: harness replay {run.folder} --step {facts.step}"
        run.telemetry.screen.event(told)


def _tell_eager(run: Run) -> None:
    """Compiled code that was given up costs speed, and torch tells only its own logger."""
    fallen = run.watch.take() if run.watch is not None else ""
    if fallen:
        run.telemetry.tell(run.state.step, "compile.eager", fallen)


def _validate(run: Run) -> float:
    loss, accuracy = evaluate(run)
    run.telemetry.validation(run.state.step, loss, accuracy)
    return loss
