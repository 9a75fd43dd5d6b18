"""Settings that a run is too short for, its data too small, or its guard off: valid, and without the effect that they
were set for.

Nothing here is an error: a trial of ten steps is meant to be short. What changes the training is told as an event, what
only leaves something out (a save, a validation, a statistic) in one line before the first step. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.core.config import RunConfig, TrainConfig
from harness.core.errors import some

_NAMED = 5


def warmup_doubt(train: TrainConfig) -> str:
    """What is wrong with the warm-up of a run of this length; empty if nothing is.

    Update n of the warm-up has n / warmup_steps of the peak (`optim.schedule.Schedule`).
    """
    steps, warmup = train.steps, train.warmup_steps
    fix = f"set train.warmup_steps={max(1, steps // 10)}, or more train.steps"
    if warmup > steps:
        return (
            f"the warm-up is longer than the run (train.warmup_steps {warmup}, train.steps {steps}): the learning rate "
            f"ends at {train.lr * steps / warmup:.3g}, {steps / warmup:.0%} of train.lr, and never reaches it; {fix}"
        )
    if warmup == steps and warmup > 1:
        return (
            f"the warm-up is as long as the run (train.warmup_steps {warmup}, train.steps {steps}): the learning rate "
            f"reaches train.lr at the last update, and there is no {_after(train)}; {fix}"
        )
    decay = round(train.decay_share * steps)
    if train.schedule == "wsd" and warmup and warmup + decay > steps:
        return (
            f"warm-up and decay are longer together than the run (train.warmup_steps {warmup}, train.decay_share "
            f"{train.decay_share:g} of train.steps {steps}): the decay begins with the end of the warm-up, has "
            f"{steps - warmup} steps in place of {decay}, and nothing lies between them; lower one of the two"
        )
    return ""


def _after(train: TrainConfig) -> str:
    return "time at it" if train.schedule == "constant" else f"decay ({train.schedule}) after it"


def left_out(config: RunConfig, stats_every: int | None, ranks: int = 1) -> str:
    """What does not happen in a run of this length, in a line; empty if everything does.

    stats_every: of the recipe; None: nothing runs in FP8.
    """
    steps, guard = config.train.steps, config.guard
    periods = [
        ("train.eval_every", config.train.eval_every, "validated at its end only"),
        ("checkpoint.every", config.checkpoint.every, "saved at its end only"),
    ]
    if stats_every is not None:
        periods.append(("fp8.stats_every", stats_every, "underflow and SQNR sampled once at most"))
    if guard.enabled:
        periods.append(("guard.snapshot_every", guard.snapshot_every, "no snapshot to roll back to"))
        if ranks > 1:
            periods.append(("guard.compare_ranks_every", guard.compare_ranks_every, "the ranks' weights not compared"))
    told = [f"{why} ({name} {period})" for name, period, why in periods if period > steps]
    return f"in {steps:,} step{'s' if steps > 1 else ''}: {'; '.join(told)}" if told else ""


def unwatched(guard: bool, fallback: bool, in_fp8: bool) -> str:
    """What a guard that is off takes with it; empty if nothing that is on. in_fp8: the run has FP8 layers."""
    if guard or not (fallback and in_fp8):
        return ""
    return (
        "guard.enabled is false, so the recipe's fallback is off, too: no layer leaves FP8, whatever it loses there; "
        "leave the guard on, or say fallback.enabled: false in the recipe"
    )


def data_doubts(config: RunConfig, facts: Mapping[str, Any]) -> list[str]:
    """Settings that the data are too small for, each in a line. facts: what the data say of themselves."""
    told: list[str] = []
    samples, batch, counted = facts.get("train_samples"), config.train.global_batch, facts.get("counted", "tokens")
    if samples is not None and samples < batch:
        told.append(
            f"a step takes {batch:,} samples (train.global_batch) and there are {samples:,}: every step has some of "
            "them more than once"
        )
    told += [
        f"of {part['source']} a step takes {part['share'] * batch:.3g} samples, and it has {part['train_samples']:,}: "
        "every step has some of them more than once"
        for part in facts.get("mixture", ())
        if part["share"] * batch > part["train_samples"]
    ]
    if copies := facts.get("repeated"):
        told.append(
            f"{len(copies):,} of the files to validate on have the content of one to train on "
            f"({some(copies, _NAMED)}): their loss is no validation; take the copies out"
        )
    used = facts.get("val_used", facts.get("val_samples"))
    if used is not None and used < config.data.val_samples:
        told.append(f"validation has {used:,} samples, data.val_samples asks for {config.data.val_samples:,}")
    longest = facts.get("longest_document")
    if longest is not None and counted == "tokens" and longest <= config.data.context // 2:
        told.append(
            f"the longest document has {longest:,} tokens: no position of the {config.data.context:,} of data.context "
            "after that is ever trained, since positions begin anew with each document"
        )
    return told
