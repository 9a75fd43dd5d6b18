"""A run: the parts that `build` put together, one training step, the validation, and the loop.

One step, in order, with the file that does it:

1. forward and backward: `train_step`, here
2. gate, update, and the step's figures on their way to the host: core/update.py, `finish_step`
3. one step later the figures arrive: guard.py, `Guard.arrived`
4. judgement: guard.py, `Guard.observe`, which asks monitors/responder.py, `Judge.observe`
5. record: telemetry.py, `Telemetry.record`
6. action, such as a rollback: guard.py, `Guard.act`

Judging one step later keeps the device busy: the host reads the figures of a step while the next one runs. Before a
save, a validation and the end all steps are judged.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from harness.checkpoint.recovery import Kept, Recovery
from harness.core.collectives import ForwardClock, gather_texts
from harness.core.config import RunConfig
from harness.core.errors import ExitCode, number_of, some
from harness.core.facts import NO_LABEL, Halt, Limits, Outcome, Rollback, StepFacts, Window
from harness.core.health import check_batch, harmless, name_faults, to_device
from harness.core.progress import training
from harness.core.protocols import Batch, Batches, Engine, PrecisionBackend
from harness.core.state import seed_torch
from harness.core.update import InFlight, StepClock, finish_step, peak_memory
from harness.monitors.responder import Judgement
from harness.stop import StopRequest

if TYPE_CHECKING:
    from harness.core.state import RunLedger, TrainState
    from harness.guard import Guard
    from harness.precision.compiling import EagerWatch
    from harness.telemetry import Telemetry

    KeepFlight = Callable[[StepFacts, Sequence[int], Sequence[str], RunLedger], bool]


class Loss(Protocol):
    """The loss of a model on a batch.

    vocab_size: number of token ids; None if not known.
    classes: number of label classes; None if not known.
    """

    vocab_size: int | None
    classes: int | None

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Mean over the targets that are not masked, 0-d."""
        ...

    def count(self, batch: Batch) -> int:
        """Number of targets that the loss is a mean over; of samples, for data without targets."""
        ...

    def judged(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The loss, and the number of labels that the model predicts; None where there is no one class a sample."""
        ...


class Validation(NamedTuple):
    """Result of a validation over the samples of all ranks.

    loss: mean over the targets that are not masked.
    accuracy: share of labels predicted; None where labels are not one class a sample.
    """

    loss: float
    accuracy: float | None = None


@dataclass
class Run:
    """Everything that `train_step` and the loop use.

    config: of the run.
    folder: where the run writes.
    engine: owns the wrapped model, gradients and optimizer; collectives of the ranks.
    precision: computes layers as planned, and owns the FP8 scales.
    task: the loss.
    data: windows and micro-batches.
    state: everything that a resume needs.
    guard: judges steps and acts on what it finds.
    telemetry: journal, screen, MLflow and report.
    recovery: saves and loads checkpoints.
    stop: whether this process was asked to stop.
    forward_clock: time of the forwards of a step, to compare ranks.
    stats_every: one of so many steps samples underflow and SQNR.
    watch: reports compiled code that fell back to eager; None if nothing was compiled.
    keep_flight: keeps the repro bundle of a bad step, from its facts, samples, codes of verdicts and the ledger.
        Returns whether this step begins a streak of bad ones; raises OSError. None on ranks other than 0.
    ideal: precision (RUNG: the rung's own) -> seconds that the matrix products of a sample take on all ranks at the
        cards' peak; empty if the peak is not known.
    fp8_weights: see `Plan.fp8_weights`.
    replay_suggested: whether the user has been shown the command that finds out what made a step bad.
    bad_validation_logged: whether bad samples of the validation have been logged.
    validation_finite: whether the last validation's loss was finite, or there was none.
    """

    config: RunConfig
    folder: Path
    engine: Engine
    precision: PrecisionBackend
    task: Loss
    data: Batches
    state: TrainState
    guard: Guard
    telemetry: Telemetry
    recovery: Recovery
    stop: StopRequest
    forward_clock: ForwardClock
    stats_every: int = 10
    watch: EagerWatch | None = None
    keep_flight: KeepFlight | None = None
    ideal: Mapping[str, float] = field(default_factory=dict[str, float])
    fp8_weights: Mapping[str, nn.Parameter] = field(default_factory=dict[str, nn.Parameter])
    replay_suggested: bool = False
    bad_validation_logged: bool = False
    validation_finite: bool = True


RUNG = "rung"
# Larger than any number of ranks, so that no rank gets the random numbers of another rank's window.
_SEED_STRIDE = 1_000_003


class Share(NamedTuple):
    """One rank's part of a window: its micro-batches, computed with that rank's random numbers."""

    rank: int
    batches: Sequence[Batch]


def train_step(
    run: Run, window: Window, shares: Sequence[Share] = (), limits: Limits | None = None
) -> InFlight:
    """Train on one window. Collective.

    The update is skipped on every rank if, on any rank, the samples are unfit to train on, or loss or gradients are not
    finite or over the step's limits.

    shares: parts of the window that this process computes, one after the other, each with the random numbers of its
        rank. By default only its own.
    limits: to use instead of those that earlier steps decided.

    Nothing here reads the device (DeepSpeed, and optimizers without `found_inf`, do so inside `engine.apply`).
    """
    # What earlier steps decided about this one, its limits and what to measure: monitors/responder.py, `Judge`.
    clock = StepClock(run.engine.device)
    engine, precision, judge = run.engine, run.precision, run.guard.judge
    terms = judge.terms()
    if limits is not None:
        terms = replace(terms, limits=limits)

    # Forward and backward. Converted layers cast with the scales of earlier steps and record this window's amax.
    precision.begin_window(sample=judge.samples(run.stats_every))
    training.enter("data", run.state.step + 1)
    shares = shares or [
        Share(engine.rank, run.data.micro_batches(window, engine.rank, engine.world_size))
    ]
    own = _accumulate(run, window, shares)
    own["peak_memory"] = peak_memory(engine.device)

    training.enter("update")

    # The gate and the update, then the step's figures leave for the host: core/update.py, the same for every loop. The
    # engine applies the update: torch's optimizers by engines/own_update.py, DeepSpeed by its own.
    # One step later `train` below has them judged (guard.py, which asks monitors/responder.py) and recorded
    # (telemetry.py).
    samples = len(window.samples)
    ideal = run.ideal.get(_fastest(precision), math.nan)
    _, in_flight = finish_step(
        engine,
        precision,
        own,
        terms,
        judge.comparison,
        clock,
        fp8_weights=run.fp8_weights,
        window=window.index,
        tokens=samples * run.data.tokens_per_sample,
        ideal_seconds=samples * ideal,
    )
    return in_flight


def _fastest(precision: PrecisionBackend) -> str:
    """The key in `Run.ideal` of the fastest precision that any layer runs in."""
    if precision.fell_back_to:
        return precision.fell_back_to
    if precision.layers and len(precision.demoted) == len(precision.layers):
        return "bf16"
    return RUNG


def seed_step(run: Run, window: Window, rank: int) -> None:
    """Seed dropout by window and rank, so that a resume and a replay draw the same numbers."""
    seed = (run.config.train.seed * _SEED_STRIDE + window.index) * _SEED_STRIDE + rank
    seed_torch(seed % 2**63)


def _accumulate(
    run: Run,
    window: Window,
    shares: Sequence[Share],
) -> dict[str, float | Tensor]:
    """Forward and backward of all micro-batches of `shares`. Collective.

    All shares have the same number of micro-batches. Gradients are the mean over micro-batches and shares; each
    micro-batch is divided before its backward, and the shares after all backwards, so that the gradients of one share
    are quantised at the size that they have on a rank of their own.

    Returns this process's figures by the names of StepFacts; the loss is the mean over ranks already.
    """
    engine, precision = run.engine, run.precision
    total = torch.zeros((), dtype=torch.float32, device=engine.device)
    weights = _weights(run, shares) if run.data.masked else None
    bad = 0
    for share in shares:
        seed_step(run, window, share.rank)
        for number, batch in enumerate(share.batches, start=1):
            # Bad samples could crash the kernels: train on harmless ones instead, and let the gate skip the update.
            found = check_batch(batch, run.task.vocab_size, run.task.classes)
            if found:
                batch = harmless(batch)
            weight = None
            if weights is not None:
                # A micro-batch without targets is no fault here, as it weighs nothing. If the whole window has none,
                # the weights and so the loss are NaN, and the update is skipped.
                weight = next(weights)
                found &= ~NO_LABEL
            bad |= found
            batch = {name: to_device(values, engine.device) for name, values in batch.items()}

            # Engines reduce gradients over ranks in the last backward only.
            last = share is shares[-1] and number == len(share.batches)
            training.enter("forward")
            with engine.micro_batch(last):
                with run.forward_clock.forward(), precision.context():
                    loss = run.task.loss(engine.module, batch)
                if weight is not None:
                    loss = loss * weight
                training.enter("backward")
                with precision.backward_context(last):
                    engine.backward(loss / len(share.batches))
            total += loss.detach().float()
            precision.end_micro_batch(engine.max)

    # The backwards have added up the gradients of all shares.
    if len(shares) > 1:
        parameters = engine.module.parameters()
        gradients = [param.grad for param in parameters if param.grad is not None]
        torch._foreach_div_(gradients, float(len(shares)))

    micro_batches = sum(len(share.batches) for share in shares)
    forward = run.forward_clock.step()
    return {
        "loss": engine.mean(total / micro_batches),
        "stop": float(run.stop.requested()),
        "bad_data": bad,
        "forward_fastest": forward,
        "forward_slowest": forward,
    }


def _weights(run: Run, shares: Sequence[Share]) -> Iterator[Tensor]:
    """The weight of each micro-batch's loss, float32 0-d: its targets over the mean number of targets. Collective.

    Micro-batches with masked labels have different numbers of targets. With these weights the mean over micro-batches,
    shares and ranks is the mean over targets. If the window has no targets at all, the weights are NaN.
    """
    counts: list[int] = []
    for share in shares:
        counts += [run.task.count(batch) for batch in share.batches]
    own_mean = sum(counts) / len(counts)

    # The mean and the counts go to the device in one copy, for which the host does not wait.
    on_host = torch.tensor([own_mean, *counts], dtype=torch.float32, device="cpu")
    numbers = to_device(on_host, run.engine.device)
    # Ranks must divide by one number, or samples of ranks with few targets would weigh more.
    mean = run.engine.mean(numbers[0])
    return iter(numbers[1:] / mean)


@torch.no_grad()
def evaluate(run: Run) -> Validation:
    """Validate on the samples of all ranks; the result is the same on every rank. Collective."""
    engine = run.engine
    module = engine.module
    was_training = module.training
    module.eval()
    try:
        total = torch.zeros((), dtype=torch.float64, device=engine.device)
        right = torch.zeros_like(total)
        counted, has_labels = 0, False
        training.enter("validation")
        for batch in run.data.validation(engine.rank, engine.world_size):
            training.again()
            weight = len(next(iter(batch.values())))
            if run.data.masked:
                batch, weight = _without_bad_samples(run, batch)
            counted += weight
            batch = {name: values.to(engine.device) for name, values in batch.items()}
            with run.precision.context():
                loss, hits = run.task.judged(module, batch)
            total += loss.double() * weight
            if hits is not None:
                has_labels = True
                right = right + hits * (weight > 0)

        own_count = total.new_tensor(counted)
        if not run.data.masked:
            # Ranks may have a few samples more than others: all divide by the mean number.
            count = engine.mean(own_count.float()).double()
            return Validation(float(engine.mean((total / count).float())))

        # Ranks have different numbers of targets: the mean of sums over the mean of counts.
        sums = torch.stack([total, right, own_count]).float()
        nats, hits, counts = engine.mean(sums).tolist()
        if not counts:
            _log_bad_validation(run, "no target of the validation counts: its loss is not a number")
            return Validation(math.nan)
        accuracy = hits / counts if has_labels else None
        return Validation(nats / counts, accuracy)
    finally:
        module.train(was_training)


def _without_bad_samples(run: Run, batch: Batch) -> tuple[Batch, int]:
    """A validation batch without its bad samples, and its weight: the number of targets that are left.

    With weight 0 the batch is a harmless one, as every rank must compute as many batches as the others.
    """
    sizes = run.task.vocab_size, run.task.classes
    if check_batch(batch, *sizes) & ~NO_LABEL:
        # A fault without a row is of the whole batch.
        faults = [fault for fault in name_faults(batch, *sizes) if fault.row is not None]
        named = [f"place {fault.row} of a batch: {fault.text}" for fault in faults[:3]]
        text = f"bad samples are left out of the validation: {'; '.join(named)}"
        _log_bad_validation(run, text)
        bad = {fault.row for fault in faults}
        rows = len(next(iter(batch.values())))
        good = [row for row in range(rows) if row not in bad]
        if not good:
            return harmless(batch), 0
        batch = {name: values[good] for name, values in batch.items()}
    weight = run.task.count(batch)
    if not weight:
        return harmless(batch), 0
    return batch, weight


def _log_bad_validation(run: Run, text: str) -> None:
    """Log what is wrong with the samples of the validation, once a run: every validation has the same ones."""
    if not run.bad_validation_logged:
        run.bad_validation_logged = True
        run.telemetry.tell(run.state.step, "data.validation", text)


def train(run: Run) -> Outcome:
    """Train from the run's state to `train.steps`, a stop request or a halt. The outcome is the same on every rank."""
    config, guard = run.config, run.guard
    metrics: dict[str, float] = {}  # of the present state; its checkpoint is compared by them
    kept = Kept()
    guard.judge.stay_fallen_back()
    while run.state.step < config.train.steps and not guard.stopping:
        # Train on the next window: forward, backward, gate and update.
        guard.pending.append(next_step(run))
        _log_eager(run)

        # Judge, record and act. The newest step stays unjudged while the device computes it, unless something follows
        # that must not use an unjudged state.
        rolled_back = False
        lag = 0 if _on_boundary(run) else 1
        while (facts := guard.arrived(lag)) is not None:
            metrics = {"train_loss": facts.loss}
            action = guard.act(observe(run, facts))
            if isinstance(action, Halt):
                return Outcome("halted", ExitCode.HALTED, action.text, facts.step)
            if isinstance(action, Rollback):
                rolled_back, metrics = True, {}

        # Validate before saving: the checkpoint is stored with its validation loss. A step that a rollback returned to
        # was validated when it was done.
        at_end = run.state.step >= config.train.steps
        due = _every(config.train.eval_every, run.state.step) and not rolled_back
        if at_end or due:
            metrics["val_loss"] = _validate(run)

        # Save. After a rollback the state has a checkpoint already, stored with the figures of its own step.
        due = _every(config.checkpoint.every, run.state.step) and not rolled_back
        if at_end or guard.stopping or due:
            kept = run.recovery.keep(metrics, _last_save(run))
            guard.stopping = guard.stopping or kept.asked
            if kept.halts:
                return Outcome(
                    "halted",
                    ExitCode.HALTED,
                    f"checkpoint.on_failure: halt; {kept.note}",
                    run.state.step,
                )

        # Snapshots in memory serve rollbacks that need not go back to a checkpoint.
        if guard.snapshot_due():
            guard.snapshot()

    if run.state.step < config.train.steps:
        return _stopped(run, kept)
    return _completed(run, kept, metrics)


def _last_save(run: Run) -> Literal["", "stop", "end"]:
    """Why no step follows the save at this step; empty if steps follow."""
    if run.guard.stopping:
        return "stop"
    return "end" if run.state.step >= run.config.train.steps else ""


def _stopped(run: Run, kept: Kept) -> Outcome:
    """The outcome of a run that was asked to stop before its last step. Collective. kept: its last save."""
    reason = _with_note(_stop_reason(run), kept)
    if not kept.safe:
        return _unsaved(run, reason)
    run.telemetry.event(run.state.step, "run.stopped", reason=reason)
    return Outcome("stopped", ExitCode.STOPPED, reason, run.state.step)


def _completed(run: Run, kept: Kept, metrics: Mapping[str, float]) -> Outcome:
    """The outcome of a run that has done all its steps. Collective. kept: its last save."""
    val_loss = metrics["val_loss"] if "val_loss" in metrics else _validate(run)
    reason = number_of(run.config.train.steps, "step")
    if not kept.safe and kept.asked:
        reason = _stop_reason(run)
    reason = _with_note(reason, kept)
    if not kept.safe:
        return _unsaved(run, reason, val_loss)
    return Outcome("done", ExitCode.DONE, reason, run.state.step, val_loss)


def _with_note(reason: str, kept: Kept) -> str:
    return f"{reason}; {kept.note}" if kept.note else reason


def _unsaved(run: Run, reason: str, val_loss: float | None = None) -> Outcome:
    """The outcome of a run whose last steps are in no checkpoint: the same command would not go on from here."""
    run.telemetry.tell(run.state.step, "run.failed", reason)
    return Outcome("failed", ExitCode.FAILED, reason, run.state.step, val_loss)


def _stop_reason(run: Run) -> str:
    """Why the run was asked to stop, and on which rank if not on rank 0; the same on every rank. Collective."""
    reasons = gather_texts(run.stop.reason)
    rank = next((number for number, text in enumerate(reasons) if text), 0)
    return f"rank {rank}: {reasons[rank]}" if rank else reasons[rank]


def observe(run: Run, facts: StepFacts) -> Judgement:
    """Have a step judged and recorded; keep the repro bundle of a bad one before a rollback. Collective."""
    judged = run.guard.observe(facts)
    if judged.suspect:
        # The bundle links the newest checkpoint before the step: which one that is must not depend on how fast the disk
        # is. All ranks wait in rounds, as one that waited in a collective for a slow disk of rank 0 would give up.
        if run.keep_flight is not None or run.engine.world_size > 1:
            run.recovery.wait()
        _keep_flight(run, judged)
    return judged


def next_step(run: Run) -> InFlight:
    """Train on the next window. The figures returned must be judged, in order."""
    step = run.state.step + 1
    run.telemetry.step_begins(step)
    pending = train_step(run, next_window(run))
    run.state.advance()
    run.telemetry.step_ends(step)
    return pending


def next_window(run: Run) -> Window:
    """The next window, after what is due before its step: switches, and the learning rate's factor. Idempotent."""
    run.guard.begin()
    run.engine.lr_factor = run.guard.judge.lr_factor
    return run.data.window(run.guard.window)


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0


def _on_boundary(run: Run) -> bool:
    """Whether something follows this step that needs it judged: a save, a validation, a snapshot, the end."""
    step, config = run.state.step, run.config
    if step >= config.train.steps:
        return True
    return (
        _every(config.checkpoint.every, step)
        or _every(config.train.eval_every, step)
        or run.guard.snapshot_due()
    )


def _keep_flight(run: Run, judged: Judgement) -> None:
    """Keep the repro bundle of a bad step, and show once how to use it."""
    if run.keep_flight is None:
        return
    facts = judged.facts
    try:
        samples = run.data.window(facts.window).samples
        codes = [verdict.code for verdict in judged.verdicts if not verdict.ok]
        begins = run.keep_flight(facts, samples.tolist(), codes, run.state.ledger)
    except OSError as error:
        run.telemetry.event(facts.step, "flight.failed", text=str(error))
        return
    if begins and not run.replay_suggested:
        run.replay_suggested = True
        command = f"harness replay {shlex.quote(str(run.folder))} --step {facts.step}"
        run.telemetry.screen.event(f"step {facts.step}: what made it bad: {command}")


def _log_eager(run: Run) -> None:
    """Log what was to be compiled and runs eager: it costs speed, and torch reports it to its own logger at most."""
    if run.watch is None:
        return
    for text in (run.watch.take(), run.watch.take_uncalled()):
        if text:
            run.telemetry.tell(run.state.step, "compile.eager", text)


def _validate(run: Run) -> float:
    loss, accuracy = evaluate(run)
    run.telemetry.validation(run.state.step, loss, accuracy)
    was_finite, run.validation_finite = run.validation_finite, math.isfinite(loss)
    if was_finite and not run.validation_finite and not run.bad_validation_logged:
        buffers = _not_finite_buffers(run.engine.module)
        text = f"the validation loss is {loss:g}"
        if buffers:
            text += f"; not finite: {some(buffers, 3)}"
        run.telemetry.tell(run.state.step, "validation.nonfinite", text, buffers=buffers[:32])
    return loss


def _not_finite_buffers(module: nn.Module) -> list[str]:
    """Names of the buffers that hold a NaN or +infinity. Masks hold -infinity, and nothing is wrong with that."""
    found: list[str] = []
    for name, buffer in module.named_buffers():
        if not buffer.is_floating_point():
            continue
        values = buffer.float()  # torch does not compare FP8
        if (values.isnan() | (values == math.inf)).any():
            found.append(name)
    return found
