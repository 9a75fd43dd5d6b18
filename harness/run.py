"""A run: the pieces that `build` put together, one training step of it, its validation, and the loop.

The loop steps, judges one step later, and acts; it saves and validates on drained boundaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from harness.checkpoint.recovery import Kept, Recovery
from harness.core.collectives import ForwardClock, gather_texts
from harness.core.config import RunConfig
from harness.core.errors import ExitCode
from harness.core.facts import NO_LABEL, Halt, Limits, Outcome, Rollback, StepFacts, Window
from harness.core.health import check_batch, harmless, name_faults
from harness.core.protocols import Batch, Batches, Engine, PrecisionBackend
from harness.core.state import seed_torch
from harness.core.update import InFlight, StepClock, finish_step, peak_memory, to_device
from harness.monitors.responder import Judgement
from harness.stop import StopRequest

if TYPE_CHECKING:
    from torch import nn

    from harness.core.state import RunLedger, TrainState
    from harness.guard import Guard
    from harness.precision.compiling import EagerWatch
    from harness.telemetry import Telemetry

    KeepFlight = Callable[[StepFacts, Sequence[int], Sequence[str], RunLedger], bool]


class Loss(Protocol):
    """The task's loss: mean over the targets that have one, 0-d. vocab_size: of tokens, classes: of labels, None if
    nothing tells."""

    vocab_size: int | None
    classes: int | None

    def loss(self, module: nn.Module, batch: Batch) -> Tensor: ...

    def count(self, batch: Batch) -> int:
        """Targets that the loss is a mean over; samples, where there are none."""
        ...

    def judged(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The loss, and how many labels the model hits, None where that means nothing."""
        ...


class Validation(NamedTuple):
    """loss: mean over all ranks' targets that have one. accuracy: share of labels that are hit, None where labels are
    not one class a sample."""

    loss: float
    accuracy: float | None = None


@dataclass
class Run:
    """Everything `train_step` and the loop touch.

    stats_every: one of so many steps samples underflow and SQNR. watch: None unless something was compiled.
    keep_flight: keeps what a re-run of a bad step needs (its facts, samples, codes of verdicts, and the ledger), and
    says whether it begins a streak of bad ones; raises OSError; None but on rank 0. ideal: seconds that a sample's
    matrix products take on all ranks at the cards' peak, by precision (RUNG: the rung's own); empty where it is not
    known. fp8_weights: see `Plan.fp8_weights`. replay_told: the user has seen how to find out what made a step bad;
    validation_told: that samples of the validation are bad.
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
    replay_told: bool = False
    validation_told: bool = False


RUNG = "rung"
_SEED_STRIDE = 1_000_003


class Share(NamedTuple):
    """What one rank computes of a window: its micro-batches, with that rank's random numbers."""

    rank: int
    batches: Sequence[Batch]


def train_step(run: Run, window: Window, shares: Sequence[Share] = (), limits: Limits | None = None) -> InFlight:
    """Train on one window; the update is applied unless, on any rank, the samples are unfit to train on, or loss or
    gradients are not finite or over the step's limits.

    shares: what this process computes, one after the other, each as a rank of its own would; by default its own rank's.
    limits: in place of those that earlier steps decided.

    Nothing here reads the device (DeepSpeed, and optimizers without `found_inf`, do so inside `engine.apply`).
    """
    clock = StepClock(run.engine.device)
    engine, precision, judge = run.engine, run.precision, run.guard.judge
    terms = judge.terms()
    if limits is not None:
        terms = replace(terms, limits=limits)

    # Forward and backward; converted layers cast with the scales of earlier steps and record this window's amax.
    precision.begin_window(sample=judge.samples(run.stats_every))
    shares = shares or [Share(engine.rank, run.data.micro_batches(window, engine.rank, engine.world_size))]
    own = _accumulate(run, window, shares)
    own["peak_memory"] = peak_memory(engine.device)

    # Gate and update, then the facts leave for the host: the same for every loop.
    _, facts = finish_step(
        engine,
        precision,
        engine.module.parameters(),
        own,
        terms,
        judge.comparison,
        clock,
        fp8_weights=run.fp8_weights,
        window=window.index,
        tokens=len(window.samples) * run.data.tokens_per_sample,
        ideal_seconds=len(window.samples) * run.ideal.get(_fastest(precision), math.nan),
    )
    return facts


def _fastest(precision: PrecisionBackend) -> str:
    """The key in `Run.ideal` of the fastest precision that something runs in."""
    all_left = precision.layers and len(precision.demoted) == len(precision.layers)
    return precision.fell_back_to or ("bf16" if all_left else RUNG)


def seed_step(run: Run, window: Window, rank: int) -> None:
    """Random numbers (dropout) are a function of the step and rank: a resume, and a replay, repeat them."""
    seed = (run.config.train.seed * _SEED_STRIDE + window.index) * _SEED_STRIDE + rank
    seed_torch(seed % 2**63)


def _accumulate(run: Run, window: Window, shares: Sequence[Share]) -> dict[str, float | Tensor]:
    """Forward and backward of the shares' micro-batches: what this process measured of itself, and the mean loss over
    ranks.

    Shares are of one size. Gradients become their mean, each at its full size, with its own FP8 range, before that.
    """
    engine, precision = run.engine, run.precision
    total = torch.zeros((), dtype=torch.float32, device=engine.device)
    weights = _weights(run, shares) if run.data.masked else None
    bad = 0
    for share in shares:
        seed_step(run, window, share.rank)
        for number, batch in enumerate(share.batches, start=1):
            found = check_batch(batch, run.task.vocab_size, run.task.classes)
            if found:
                batch = harmless(batch)
            weight = None if weights is None else next(weights)
            # One without a target weighs nothing; where all of the window are, the weights are NaN, and so is the loss.
            bad |= found if weight is None else found & ~NO_LABEL
            batch = {name: to_device(values, engine.device) for name, values in batch.items()}
            last = share is shares[-1] and number == len(share.batches)
            with engine.micro_batch(last):
                with run.forward_clock.forward(), precision.context():
                    loss = run.task.loss(engine.module, batch)
                loss = loss if weight is None else loss * weight
                with precision.backward_context(last):
                    engine.backward(loss / len(share.batches))
            total += loss.detach().float()
            precision.end_micro_batch(engine.max)
    if len(shares) > 1:
        gradients = [param.grad for param in engine.module.parameters() if param.grad is not None]
        torch._foreach_div_(gradients, float(len(shares)))
    forward = run.forward_clock.step()
    return {
        "loss": engine.mean(total / sum(len(share.batches) for share in shares)),
        "stop": float(run.stop.requested()),
        "bad_data": bad,
        "forward_fastest": forward,
        "forward_slowest": forward,
    }


def _weights(run: Run, shares: Sequence[Share]) -> Iterator[Tensor]:
    """What each micro-batch weighs, float32 0-d: its targets that have a loss, over their mean among all of the window.

    The mean over micro-batches, shares and ranks is then one over targets. Where none has a loss the weights are NaN.
    """
    counts = [run.task.count(batch) for share in shares for batch in share.batches]
    mean = run.engine.mean(torch.tensor(sum(counts) / len(counts), dtype=torch.float32, device=run.engine.device))
    return iter(torch.tensor(counts, dtype=torch.float32, device=mean.device) / mean)


@torch.no_grad()
def evaluate(run: Run) -> Validation:
    """The validation of all ranks, identical on every rank."""
    engine = run.engine
    module = engine.module
    was_training = module.training
    module.eval()
    try:
        total = torch.zeros((), dtype=torch.float64, device=engine.device)
        right = torch.zeros_like(total)
        counted, judges = 0, False
        for batch in run.data.validation(engine.rank, engine.world_size):
            batch, weight = _fit(run, batch) if run.data.masked else (batch, 1)
            counted += weight
            batch = {name: values.to(engine.device) for name, values in batch.items()}
            with run.precision.context():
                loss, hits = run.task.judged(module, batch)
            total += loss.double() * weight
            if hits is not None:
                judges, right = True, right + hits * (weight > 0)
        if not run.data.masked:
            return Validation(float(engine.mean((total / counted).float())))
        # Of ranks that count different numbers: the mean of sums over the mean of counts.
        sums = engine.mean(torch.stack([total.float(), right.float(), total.new_tensor(counted).float()]))
        nats, hits, counts = sums.tolist()
        return Validation(nats / counts, hits / counts if judges else None)
    finally:
        module.train(was_training)


def _fit(run: Run, batch: Batch) -> tuple[Batch, int]:
    """A validation batch without the samples that nothing can be learned of, and what it weighs; told once a run."""
    known = run.task.vocab_size, run.task.classes
    if check_batch(batch, *known) & ~NO_LABEL:
        faults = [fault for fault in name_faults(batch, *known) if fault.row is not None]
        bad = {fault.row for fault in faults}
        if not run.validation_told:
            run.validation_told = True
            named = "; ".join(f"place {fault.row} of a batch: {fault.text}" for fault in faults[:3])
            run.telemetry.tell(
                run.state.step, "data.validation", f"bad samples are left out of the validation: {named}"
            )
        kept = [row for row in range(len(next(iter(batch.values())))) if row not in bad]
        if not kept:
            return harmless(batch), 0
        batch = {name: values[kept] for name, values in batch.items()}
    weight = run.task.count(batch)
    return batch if weight else harmless(batch), weight


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
                return Outcome("halted", ExitCode.HALTED, action.text, facts.step)
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
