"""Runs under FSDP2 beside the same ones under another engine, on CPUs or on one card: equal in every bit.

tests/dist plays them on a CPU, tests/gpu on a card. Run as a script, this file is one of several ranks of
`launch/train.py` that share one device, over gloo: NCCL refuses two ranks on a card.
"""

from __future__ import annotations

import os
from pathlib import Path

from harness.core.files import read_json
from harness.precision.recipe import TIERS
from tests.support.pairs import assert_same_state, different, figures, ran, state

RUNGS = ("native:fp8", "transformer_engine:fp8", "autocast:bf16")
SHARED_DEVICE = Path(__file__)
STEPS, RESUMED_AFTER = 8, 4


def assert_bits_of(
    other: str,
    folder: Path,
    rung: str,
    ranks: int,
    *arguments: str,
    program: Path | None = None,
    anew: bool = False,
) -> None:
    """Train under `other`, and under fsdp with a resume on the way; every figure and the whole state must be equal.

    Figures are losses, norms and, of FP8, amaxes and scales. The state has weights, moments, histories and scales.

    other: "single" or "ddp". rung: one of RUNGS. program, anew: as for `pairs.ran`.
    """
    backend, precision = rung.split(":")
    recipe = folder / "rung.yaml"
    recipe.write_text(
        f"name: rung\nladder: [{{backend: {backend}, precision: {precision}, tiers: [{', '.join(TIERS)}]}}]\n"
        "fp8: {stats_every: 3}\nlayers: {min_features: 16}\n"
    )
    # A run that stops validates at its end: the other one does so at the same step.
    same = ("train.schedule=constant", f"train.eval_every={RESUMED_AFTER}")
    given = ("--recipe", str(recipe), *same, *arguments)

    def played(engine: str, steps: int) -> Path:
        where = folder / engine
        return ran(where, engine, "r", *given, steps=steps, ranks=ranks, program=program, anew=anew)

    straight = played(other, STEPS)
    played("fsdp", RESUMED_AFTER)
    resumed = played("fsdp", STEPS)
    for run in (straight, resumed):
        assert read_json(run / "plan.json")["resolved"] == rung
    ours, theirs = figures(resumed), figures(straight)
    assert different(ours, theirs) == []
    names = {name for _, name in ours}
    assert {"train/loss", "train/grad_norm"} <= names
    if precision == "fp8":
        assert {name.split("/")[0] for name in names} >= {"fp8_amax", "fp8_scale"}
    for step in (RESUMED_AFTER, STEPS):
        assert_same_state(state(resumed, step), state(straight, step))


def _one_rank_of_a_shared_device() -> None:
    """What launch/train.py does, on the first card, or the CPU where there is none."""
    import torch.distributed as dist

    from harness.cli import train_main

    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("gloo")
    train_main()


if __name__ == "__main__":
    _one_rank_of_a_shared_device()
