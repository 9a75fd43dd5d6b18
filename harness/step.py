"""One training step, shared by the loop and every tool that re-runs a step: forward, backward, gate, update, facts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.core.facts import Limits, Window
from harness.core.health import check_batch, harmless, l2_norm
from harness.core.protocols import NO_LIMITS
from harness.core.state import seed_torch
from harness.core.update import InFlight, StepClock, to_device, update
from harness.run import Run

_SEED_STRIDE = 1_000_003


class Share(NamedTuple):
    """What one rank computes of a window: its micro-batches, with that rank's random numbers."""

    rank: int
    batches: Sequence[tuple[Tensor, Tensor]]


def train_step(run: Run, window: Window, shares: Sequence[Share] = (), limits: Limits | None = None) -> InFlight:
    """Train on one window; the update is applied unless, on any rank, the samples are unfit to train on, or loss or
    gradients are not finite or over the step's limits.

    shares: what this process computes, one after the other, each as a rank of its own would; by default its own rank's.
    limits: in place of those that earlier steps decided.

    Nothing here reads the device (DeepSpeed, and optimizers without `found_inf`, do so inside `engine.apply`).
    """
    clock = StepClock(run.engine.device)
    engine, precision = run.engine, run.precision
    step = window.step + 1
    limits = run.state.limits.get(step, NO_LIMITS) if limits is None else limits
    precision.begin_window(sample=step % run.stats_every == 0 or step in run.state.closer_look)
    demoted, lowered = precision.demoted, precision.lowered
    shares = shares or [Share(engine.rank, run.data.micro_batches(window, engine.rank, engine.world_size))]
    own = _accumulate(run, window, shares)
    measure = _measures(run, step)
    if measure:
        own["param_norm"] = l2_norm([param.detach() for param in engine.module.parameters() if param.requires_grad])
    figures, slots = update(engine, precision, own, limits, measure)
    compared, differs = run.comparison.after(step) if run.comparison is not None else ((), None)
    return InFlight.send(
        figures,
        slots,
        clock,
        differs,
        step=step,
        window=window.index,
        tokens=len(window.samples) * run.data.tokens_per_sample,
        demoted=demoted,
        lowered=lowered,
        limits=limits,
        slot_names=precision.slot_names,
        compared=compared,
    )


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
    bad = 0
    for share in shares:
        seed_step(run, window, share.rank)
        for number, (inputs, targets) in enumerate(share.batches, start=1):
            found = check_batch(inputs, targets, run.task.vocab_size)
            bad |= found
            if found:
                inputs, targets = harmless(inputs, targets)
            inputs, targets = to_device(inputs, engine.device), to_device(targets, engine.device)
            last = share is shares[-1] and number == len(share.batches)
            with engine.micro_batch(last):
                with run.forward_clock.forward(), precision.context():
                    loss = run.task.loss(engine.module, inputs, targets)
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


def _measures(run: Run, step: int) -> bool:
    """Whether this step measures what costs: from the first on, every so many, and all of a closer look."""
    guard = run.config.guard
    return guard.enabled and ((step - 1) % guard.measure_every == 0 or step in run.state.closer_look)
