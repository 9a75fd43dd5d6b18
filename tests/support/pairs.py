"""Runs of `launch/train.py` on two ranks under one engine or another, and what two such runs must have alike."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import torch

from harness.checkpoint.store import Store
from harness.core.protocols import Tensors
from harness.tracking.existing import is_speed
from harness.tracking.history import read_rows
from tests.support.runs import train_ranks

RANKS = 2
# Layers of a healthy run are over these limits now and then: some leave FP8, and return.
RECIPE = """
name: nervous
ladder:
  - {backend: native, precision: fp8, tiers: [CPU]}
fp8: {roll: step, stats_every: 3}
layers: {min_features: 16}
fallback: {saturation_input: 1.02, saturation_weight: 1.5, hits: 2, window: 4, dwell_steps: 4, max_demoted_share: 0.9}
"""


def ran(
    folder: Path,
    engine: str,
    name: str,
    *arguments: str,
    steps: int = 12,
    ranks: int = RANKS,
    killer: Path | None = None,
    program: Path | None = None,
    anew: bool = False,
) -> Path:
    """The folder of a finished run of `steps` steps, each of two micro-batches a rank.

    program: what to run in the place of launch/train.py.
    killer: the same, where rank 0 is killed in it.
    anew: as for `train_ranks`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "nervous.yaml"
    recipe.write_text(RECIPE)
    chosen = [] if "--recipe" in arguments else ["--recipe", str(recipe)]
    done = train_ranks(
        folder,
        ranks,
        *chosen,
        *arguments,
        "--name",
        name,
        f"engine.name={engine}",
        f"train.steps={steps}",
        "train.global_batch=8",
        "guard.measure_every=1",
        "checkpoint.every=4",
        program=killer or program,
        anew=anew,
    )
    if killer:
        assert done.returncode == -signal.SIGKILL, done.stdout
        assert "lost rank 0" in done.stdout, "the other rank ends by itself, and says why"
    else:
        assert done.returncode == 0, done.stdout
    return folder / "runs" / name


def figures(run: Path) -> dict[tuple[int, str], float]:
    """Every figure that was logged and tells no time or memory, the last one of each step."""
    found: dict[tuple[int, str], float] = {}
    for row in read_rows(run / "journal.jsonl"):
        if row["kind"] == "metrics":
            for name, value in row["metrics"].items():
                if not is_speed(name):
                    found[row["step"], name] = value
    return found


def different(ours: dict[Any, float], theirs: dict[Any, float]) -> list[Any]:
    assert ours.keys() == theirs.keys()
    both_nan = {key for key in ours if math.isnan(ours[key]) and math.isnan(theirs[key])}
    return [key for key in ours if ours[key] != theirs[key] and key not in both_nan]


def state(run: Path, step: int) -> Tensors:
    """The whole state, read by one process from whatever files the ranks wrote."""
    return Store(run / "checkpoints", readonly=True).load(step)[0]


def assert_same_state(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    for part, named in ours.items():
        assert named.keys() == theirs[part].keys()
        assert [name for name in named if not torch.equal(named[name], theirs[part][name])] == []
