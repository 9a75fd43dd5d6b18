"""`launch/train.py engine.name=fsdp` on two ranks, beside the same run under DDP: figures, checkpoints, resume.

Run as a script, this file is one rank of `launch/train.py`. Rank 0 is killed while it saves the state of step 8.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoint.store import Store
from harness.core.protocols import Tensors
from harness.tracking.history import read_rows
from tests.support.runs import train_ranks

pytestmark = pytest.mark.dist

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
CASES = {
    "fp8": ("train.eval_every=4", "guard.snapshot_every=3"),
    "bf16": ("--recipe", "bf16"),
    "torchao": ("--recipe", "fp8_dynamic"),
    "compiled": ("engine.compile=blocks",),
    "recomputed": ("model.args.recompute=block",),
}


def ran(
    folder: Path,
    engine: str,
    name: str,
    *arguments: str,
    steps: int = 12,
    ranks: int = RANKS,
    killed: bool = False,
) -> Path:
    """The folder of a finished run of `steps` steps, each of two micro-batches a rank.

    killed: rank 0 dies in its second save.
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
        program=Path(__file__) if killed else None,
    )
    if killed:
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
                if name not in ("train/tokens_per_second", "train/peak_memory_gib"):
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


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("fp8", marks=pytest.mark.slow),
        *(pytest.param(case, marks=pytest.mark.nightly) for case in CASES if case != "fp8"),
    ],
)
def test_a_run_has_the_bits_of_ddp(tmp_path: Path, case: str) -> None:
    ddp = ran(tmp_path / "ddp", "ddp", "r", *CASES[case])
    fsdp = ran(tmp_path / "fsdp", "fsdp", "r", *CASES[case])
    ours = figures(fsdp)
    assert len(ours) > 100
    assert different(ours, figures(ddp)) == []
    if case == "fp8":
        assert any(value for (_, name), value in ours.items() if name == "guard/demoted_layers")
    for step in (4, 8, 12):
        files = {file.name for file in (fsdp / "checkpoints" / f"step-{step:08d}").iterdir()}
        assert "model-00001-of-00002.safetensors" in files, "each rank wrote its own file"
        assert_same_state(state(fsdp, step), state(ddp, step))


@pytest.mark.slow
def test_a_run_goes_on_under_another_engine(tmp_path: Path) -> None:
    constant = "train.schedule=constant"  # whatever the number of steps
    straight = ran(tmp_path / "straight", "ddp", "r", constant)
    hopping = tmp_path / "hopping"
    accept = ("--accept-changed", "engine.name")
    ran(hopping, "fsdp", "r", constant, steps=4)
    ran(hopping, "ddp", "r", constant, *accept, steps=8)
    last = ran(hopping, "fsdp", "r", constant, *accept, steps=12)
    assert_same_state(state(last, 12), state(straight, 12))


@pytest.mark.slow
@pytest.mark.faults(1, 20)
def test_a_rank_that_is_killed_in_a_save_costs_no_bit(tmp_path: Path) -> None:
    """The other rank does not wait for half of the timeout, which is longer than this test may take."""
    fixed = ("--recipe", "fp32", "engine.timeout_seconds=1600")
    straight = ran(tmp_path / "straight", "fsdp", "r", *fixed)
    killed = ran(tmp_path / "killed", "fsdp", "r", *fixed, killed=True)
    checkpoints = killed / "checkpoints"
    assert [each.name for each in sorted(checkpoints.glob("step-*"))] == ["step-00000004"]
    unfinished = list(checkpoints.glob(".tmp*"))
    assert unfinished, "it was killed while it wrote"

    # As many ranks repeat the run to the last bit. Other numbers of ranks add in another order.
    shutil.copytree(tmp_path / "killed", tmp_path / "alone")
    again = ran(tmp_path / "killed", "fsdp", "r", *fixed)
    assert not any(each.exists() for each in unfinished)
    assert_same_state(state(again, 12), state(straight, 12))
    alone = state(ran(tmp_path / "alone", "fsdp", "r", *fixed, ranks=1), 12)
    torch.testing.assert_close(alone["model"], state(straight, 12)["model"])


def _killed_in_a_save() -> None:
    """What `launch/train.py` does, up to the moment in which rank 0 waits for the pieces of step 8."""
    from harness.checkpoint.meeting import Meeting
    from harness.cli import train_main

    gather = Meeting.gather

    def dies(self: Meeting, folder: Path, kind: str) -> Any:
        if "step-00000008" in folder.name:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(self, folder, kind)

    Meeting.gather = dies  # type: ignore[method-assign]
    train_main()


if __name__ == "__main__":
    _killed_in_a_save()
