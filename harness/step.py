"""One training step, shared by the loop and every tool that re-runs a step: forward, backward, gate, update, facts."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.core.facts import SlotStats, StepFacts, Window
from harness.run import Run

_SEED_STRIDE = 1_000_003
_SCALARS = 8


@dataclass(frozen=True, slots=True)
class PendingFacts:
    """StepFacts on their way to the host: one packed float32 tensor, copied while the next step already runs.

    packed: [loss, grad_norm, skipped, loss_scale, lr, applied, stop, scrubbed], then [6, slots] row by row (see
    `PrecisionBackend.end_window`). clock: how to tell when it has arrived and how long the step took.
    """

    step: int
    window: int
    tokens: int
    clock: StepClock
    demoted: tuple[str, ...]
    lowered: str
    slot_names: tuple[str, ...]
    packed: Tensor


class StepClock:
    """Times one step: by events on a GPU's own stream, by the wall on a CPU (where a step ends when it returns)."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._started = time.perf_counter()
        self._ended = self._started
        if self._events:
            self._events[0].record()

    def stop(self) -> None:
        """The step's last work, the copy to the host included, has been queued."""
        self._ended = time.perf_counter()
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        """Duration of the step; waits until it is over."""
        if self._events:
            self._events[1].synchronize()
            return self._events[0].elapsed_time(self._events[1]) / 1000
        return self._ended - self._started


def train_step(run: Run, window: Window) -> PendingFacts:
    """Train on one window; the update is applied unless loss or gradients are not finite on any rank.

    Nothing here reads the device (DeepSpeed, and optimizers without `found_inf`, do so inside `engine.step`).
    """
    clock = StepClock(run.engine.device)
    engine, precision = run.engine, run.precision
    batches = run.data.micro_batches(window, engine.rank, engine.world_size)
    # Random numbers (dropout) are a function of the step, so that a resume on any world size repeats them.
    seed = (run.config.train.seed * _SEED_STRIDE + window.index) * _SEED_STRIDE + engine.rank
    torch.manual_seed(seed % 2**63)
    step = window.step + 1
    precision.begin_window(sample=step % run.stats_every == 0 or step in run.state.closer_look)
    demoted, lowered = precision.demoted, precision.lowered
    total = torch.zeros((), dtype=torch.float32, device=engine.device)
    for number, (inputs, targets) in enumerate(batches, start=1):
        inputs = inputs.to(engine.device, non_blocking=True)
        targets = targets.to(engine.device, non_blocking=True)
        with engine.micro_batch(last=number == len(batches)):
            with precision.context():
                loss = run.task.loss(engine.module, inputs, targets)
            with precision.backward_context():
                engine.backward(loss / len(batches))
        total += loss.detach().float()
        precision.end_micro_batch(engine.max)
    mean_loss = engine.mean(total / len(batches))
    # torch.full fills on the device; a tensor from a Python number would be a synchronising copy on CUDA.
    stop = torch.full((), float(run.stop.requested()), device=engine.device)
    flags = torch.stack([(~torch.isfinite(mean_loss)).float(), stop])
    agree = torch.cat([flags, precision.amax()])
    update = engine.step(agree)
    slots = precision.end_window(agree[2:], update.skipped, engine.mean)
    scalars = [mean_loss, update.grad_norm, update.skipped, update.loss_scale, update.lr, update.applied, agree[1]]
    scalars.append(precision.scrubbed())
    packed = torch.cat([*(value.float().reshape(1) for value in scalars), slots.flatten()])
    packed = packed.to("cpu", non_blocking=True)
    clock.stop()
    return PendingFacts(
        step=step,
        window=window.index,
        tokens=len(window.samples) * run.data.tokens_per_sample,
        clock=clock,
        demoted=demoted,
        lowered=lowered,
        slot_names=precision.slot_names,
        packed=packed,
    )


def to_host(pending: PendingFacts) -> StepFacts:
    """A step's facts, once they have arrived."""
    seconds = pending.clock.seconds()
    loss, grad_norm, skipped, loss_scale, lr, applied, stop, scrubbed = pending.packed[:_SCALARS].tolist()
    slots = None
    if pending.slot_names:
        rows = pending.packed[_SCALARS:].reshape(-1, len(pending.slot_names)).numpy()
        slots = SlotStats(pending.slot_names, *rows, scrubbed=int(scrubbed))
    return StepFacts(
        step=pending.step,
        window=pending.window,
        loss=loss,
        grad_norm=grad_norm,
        lr=lr,
        loss_scale=loss_scale,
        applied=skipped == 0.0,
        applied_steps=int(applied),
        tokens=pending.tokens,
        seconds=seconds,
        stop=stop > 0.0,
        demoted=pending.demoted,
        slots=slots,
        lowered=pending.lowered,
    )
