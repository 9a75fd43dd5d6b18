"""One training step, shared by the loop and every tool that re-runs a step: forward, backward, gate, update, facts."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.core.batch_check import check_batch, harmless
from harness.core.facts import BAD_LABEL, NO_LABEL, NON_FINITE_INPUT, Limits, SlotStats, StepFacts, Window
from harness.core.gradients import l2_norm
from harness.core.protocols import NO_LIMITS
from harness.core.state import seed_torch
from harness.run import Run

_SEED_STRIDE = 1_000_003
# What a step's packed facts begin with.
_SCALARS = (
    "loss", "grad_norm", "skipped", "loss_scale", "lr", "applied", "stop", "scrubbed",
    "bad_data", "fastest", "slowest", "grad_zeros", "grad_near_limit", "param_norm",
)  # fmt: skip
# What the ranks agree on beside the amaxes: bad flag, stop, the three bits of bad_data, -fastest and slowest forward,
# norm of the parameters.
_AGREED = 8


@dataclass(frozen=True, slots=True)
class PendingFacts:
    """StepFacts on their way to the host: one packed float32 tensor, copied while the next step already runs.

    packed: the scalars named in _SCALARS, then [6, slots] row by row (see `PrecisionBackend.end_window`), then 1.0 for
    each parameter in `compared` that differs between ranks and 0.0 for the others. clock: how to tell when it has
    arrived and how long the step took.
    """

    step: int
    window: int
    tokens: int
    clock: StepClock
    demoted: tuple[str, ...]
    lowered: str
    limits: Limits
    slot_names: tuple[str, ...]
    compared: tuple[str, ...]
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
    """Train on one window; the update is applied unless, on any rank, the samples are unfit to train on, or loss or
    gradients are not finite or over the step's limits.

    Nothing here reads the device (DeepSpeed, and optimizers without `found_inf`, do so inside `engine.step`).
    """
    clock = StepClock(run.engine.device)
    engine, precision = run.engine, run.precision
    step = window.step + 1
    limits = run.state.limits.get(step, NO_LIMITS)
    seed_step(run, window, engine.rank)
    precision.begin_window(sample=step % run.stats_every == 0 or step in run.state.closer_look)
    demoted, lowered = precision.demoted, precision.lowered
    loss, bad, forward = _accumulate(run, window)
    mean_loss = engine.mean(loss)
    over = ~(mean_loss <= limits.loss)  # NaN is over every limit
    told = _to(engine.device, torch.tensor(_told(run, bad, forward), dtype=torch.float32))
    bad_flag = (over | ~torch.isfinite(mean_loss) | (told[1:4].amax() > 0)).float().reshape(1)
    measure = _measures(run, step)
    agree = torch.cat([bad_flag, told, _param_norm(run, measure), precision.amax()])
    update = engine.step(agree, limits, measure)
    slots = precision.end_window(agree[_AGREED:], update.skipped, engine.mean)
    scalars = [mean_loss, update.grad_norm, update.skipped, update.loss_scale, update.lr, update.applied, agree[1]]
    scalars += [precision.scrubbed(), agree[2] + 2 * agree[3] + 4 * agree[4], -agree[5], agree[6]]
    scalars += [update.zeros, update.near_limit, agree[7]]
    compared, differs = run.comparison.after(step) if run.comparison is not None else ((), slots.new_empty(0))
    packed = torch.cat([*(value.float().reshape(1) for value in scalars), slots.flatten(), differs])
    packed = packed.to("cpu", non_blocking=True)
    clock.stop()
    return PendingFacts(
        step=step,
        window=window.index,
        tokens=len(window.samples) * run.data.tokens_per_sample,
        clock=clock,
        demoted=demoted,
        lowered=lowered,
        limits=limits,
        slot_names=precision.slot_names,
        compared=compared,
        packed=packed,
    )


def seed_step(run: Run, window: Window, rank: int) -> None:
    """Random numbers (dropout) are a function of the step and rank: a resume, and a replay, repeat them."""
    seed = (run.config.train.seed * _SEED_STRIDE + window.index) * _SEED_STRIDE + rank
    seed_torch(seed % 2**63)


def _accumulate(run: Run, window: Window) -> tuple[Tensor, int, float]:
    """Forward and backward of this rank's micro-batches: mean loss (fp32, 0-d), bits of bad_data, forward seconds."""
    engine, precision = run.engine, run.precision
    batches = run.data.micro_batches(window, engine.rank, engine.world_size)
    total = torch.zeros((), dtype=torch.float32, device=engine.device)
    bad = 0
    for number, (inputs, targets) in enumerate(batches, start=1):
        found = check_batch(inputs, targets, run.task.vocab_size)
        bad |= found
        if found:
            inputs, targets = harmless(inputs, targets)
        inputs, targets = _to(engine.device, inputs), _to(engine.device, targets)
        last = number == len(batches)
        with engine.micro_batch(last):
            with run.forward_clock.forward(), precision.context():
                loss = run.task.loss(engine.module, inputs, targets)
            with precision.backward_context(last):
                engine.backward(loss / len(batches))
        total += loss.detach().float()
        precision.end_micro_batch(engine.max)
    return total / len(batches), bad, run.forward_clock.step()


def _told(run: Run, bad: int, forward: float) -> list[float]:
    """What this rank tells the others of itself; the maximum over ranks of each is agreed on."""
    bits = [float(bool(bad & bit)) for bit in (NON_FINITE_INPUT, BAD_LABEL, NO_LABEL)]
    return [float(run.stop.requested()), *bits, -forward, forward]


def _measures(run: Run, step: int) -> bool:
    """Whether this step measures what costs: from the first on, every so many, and all of a closer look."""
    guard = run.config.guard
    return guard.enabled and ((step - 1) % guard.measure_every == 0 or step in run.state.closer_look)


def _param_norm(run: Run, measure: bool) -> Tensor:
    """float32 [1] for the MAX over ranks: the parameters' norm before the update, infinite for NaN too; -1: unknown."""
    if not measure:
        return torch.full((1,), -1.0, device=run.engine.device)
    norm = l2_norm([param.detach() for param in run.engine.module.parameters() if param.requires_grad])
    return torch.nan_to_num(norm, nan=math.inf, posinf=math.inf).to(run.engine.device).reshape(1)


def _to(device: torch.device, tensor: Tensor) -> Tensor:
    """The tensor on `device`. From pinned memory, so that the host need not wait until the copy is made."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def to_host(pending: PendingFacts) -> StepFacts:
    """A step's facts, once they have arrived."""
    seconds = pending.clock.seconds()
    count = len(_SCALARS)
    scalar = dict(zip(_SCALARS, pending.packed[:count].tolist(), strict=True))
    slots = None
    if pending.slot_names:
        rows = pending.packed[count : len(pending.packed) - len(pending.compared)]
        rows = rows.reshape(-1, len(pending.slot_names)).numpy()
        slots = SlotStats(pending.slot_names, *rows, scrubbed=int(scalar["scrubbed"]))
    return StepFacts(
        step=pending.step,
        window=pending.window,
        loss=scalar["loss"],
        grad_norm=scalar["grad_norm"],
        lr=scalar["lr"],
        loss_scale=scalar["loss_scale"],
        applied=scalar["skipped"] == 0.0,
        applied_steps=int(scalar["applied"]),
        tokens=pending.tokens,
        seconds=seconds,
        stop=scalar["stop"] > 0.0,
        demoted=pending.demoted,
        slots=slots,
        lowered=pending.lowered,
        limits=pending.limits,
        bad_data=int(scalar["bad_data"]),
        grad_zeros=scalar["grad_zeros"],
        grad_near_limit=scalar["grad_near_limit"],
        param_norm=scalar["param_norm"] if scalar["param_norm"] >= 0 else math.nan,
        forward_seconds=(scalar["fastest"], scalar["slowest"]),
        diverged=_diverged(pending),
    )


def _diverged(pending: PendingFacts) -> tuple[str, ...]:
    differs = pending.packed[len(pending.packed) - len(pending.compared) :].tolist()
    return tuple(name for name, one in zip(pending.compared, differs, strict=True) if one)
