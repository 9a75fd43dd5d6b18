"""Ranks that stop agreeing, on real runs of two: rows 21 and 22 of the fault matrix."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.support.runs import ROOT, events, metrics, train_ranks

pytestmark = [pytest.mark.faults(21, 22), pytest.mark.dist, pytest.mark.slow]

GUILTY = "gpt.blocks.0.mlp.down.weight"
# launch/train.py where one bit of one weight turns over on rank 1 after one update; each rank tells its final bits.
FLIPPER = """
import os, sys
sys.path.insert(0, {root!r})
import torch
from harness.core.collectives import Fingerprint
from harness.engines import torch_engine
engines, real = [], torch_engine.TorchEngine.apply
def apply(self, *given):
    engines.append(self)
    figures = real(self, *given)
    if len(engines) == {at} and self.rank == 1:
        weight = self._model.get_parameter({guilty!r})
        weight.data.view(torch.int32)[3, 5] ^= 1 << 16  # the next updates' rounding could swallow the lowest bits
    return figures
torch_engine.TorchEngine.apply = apply
close = torch_engine.TorchEngine.close
def tell(self):
    hashes = Fingerprint(self.device).of(p for _, p in self._model.named_parameters())
    open(f"hashes-{{self.rank}}-{{len(engines)}}", "w").write(repr(hashes.tolist()))
    close(self)
torch_engine.TorchEngine.close = tell
from harness.cli import train_main
train_main()
"""
# On rank 1 alone: NaN in the sixth training forward, an input out of range in the share of the fourth window.
ONE_SIDED = """
import math, os, torch
from torch import nn
from harness.models.gpt import build
class OneSided(nn.Module):
    vocab_size = 256
    def __init__(self):
        super().__init__()
        self.gpt, self.forwards = build(dim=64, layers=1, heads=2, ffn=176, tied=True), 0
    def forward(self, inputs, targets):
        loss = self.gpt(inputs, targets)
        self.forwards += torch.is_grad_enabled()
        return loss * math.nan if self.forwards == 6 and os.environ["RANK"] == "1" else loss
def one_sided(): return OneSided()
"""
BAD_SHARE = """
from harness.data import batches
read = batches.TokenBatches.micro_batches
def micro_batches(self, window, rank, world_size):
    given = read(self, window, rank, world_size)
    if window.index == 3 and rank == world_size - 1:
        given[-1]["inputs"][1, 2] = 999  # the last micro-batch, which is rank 1's share
    return given
batches.TokenBatches.micro_batches = micro_batches
"""


def two_ranks(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "start.py").write_text(script)
    fixed = ("--name", "r", "--recipe", "fp32", "train.micro_batch=2")
    return train_ranks(folder, 2, *fixed, *arguments, program=folder / "start.py")


def final_hashes(folder: Path) -> tuple[list[int], list[int]]:
    one, other = (json.loads(next(folder.glob(f"hashes-{rank}-*")).read_text()) for rank in (0, 1))
    assert len(one) > 5
    return one, other


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One run with all three faults: bad samples for rank 1 in step 4, NaN on it in step 6, a bit turned in step 10.

    The snapshot of step 11 in each rank's memory has the fault, and is good when it is found.
    """
    folder = tmp_path_factory.mktemp("broken")
    (folder / "mine.py").write_text(ONE_SIDED)
    script = FLIPPER.format(root=str(ROOT), at=10, guilty=GUILTY)
    done = two_ranks(
        folder, script.replace("from harness.cli", BAD_SHARE + "from harness.cli"), "train.steps=20",
        "model.target=mine:one_sided", "data.bad=skip", "checkpoint.every=1", "checkpoint.keep=20",
        "checkpoint.healthy_steps=4", "guard.snapshot_every=11", "guard.compare_ranks_every=8",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return folder, done.stdout


def test_one_bit_on_one_rank_is_found_named_and_undone(broken: tuple[Path, str]) -> None:
    folder, output = broken
    run = folder / "runs" / "r"
    (found,) = events(run, "ranks.diverged")
    assert found["step"] == 16, (
        "the first comparison after the fault; the first step after the rollback agrees"
    )
    assert found["parameters"] == [GUILTY]
    assert GUILTY in found["text"]
    assert GUILTY in output
    (rollback,) = events(run, "guard.rollback")
    assert (rollback["to_step"], rollback["passed_over"], rollback["source"]) == (11, [], "disk")
    assert [step for step, _ in metrics(run, attempt=2)] == list(range(12, 21))
    one, other = final_hashes(folder)
    assert one == other


def test_ranks_cannot_disagree_on_a_skip(broken: tuple[Path, str]) -> None:
    run = broken[0] / "runs" / "r"
    skipped = [step for step, applied in metrics(run, "train/step_applied") if applied == 0.0]
    assert skipped == [4, 6], "both faults fired, and rank 0 knew"
    (bad,), (nan,) = events(run, "data.label"), events(run, "nonfinite.skip")
    assert (bad["step"], nan["step"]) == (4, 6)
    assert "input 999 at position 2" in bad["text"]
    assert len(bad["samples"]) == 1
    for step in skipped:
        before, after = (run / "checkpoints" / f"step-{number:08}" for number in (step - 1, step))
        for name in ("model.safetensors", "optimizer.safetensors"):
            one, other = load_file(before / name), load_file(after / name)
            assert all(one[key].tobytes() == other[key].tobytes() for key in one | other)
    assert 8 not in [event["step"] for event in events(run, "ranks.diverged")], (
        "compared after both skips, and equal"
    )


def test_unwatched_ranks_stay_apart(tmp_path: Path) -> None:
    script = FLIPPER.format(root=str(ROOT), at=3, guilty=GUILTY.removeprefix("gpt."))
    done = two_ranks(tmp_path, script, "train.steps=6", "guard.compare_ranks_every=0")
    assert done.returncode == 0, done.stdout
    assert events(tmp_path / "runs" / "r", "ranks.diverged") == []
    one, other = final_hashes(tmp_path)
    assert one != other, "the fault fired, and nothing but the comparison undoes it"


def test_a_rank_that_is_slow_in_its_forward_passes_is_told_once(tmp_path: Path) -> None:
    # Many times as slow as it is by itself, however fast the machine, and whoever else uses it.
    timed = "        began = time.perf_counter()\n        loss = self.gpt(inputs, targets)\n"
    timed += "        took = time.perf_counter() - began\n"
    timed += "        time.sleep((0.1 + 9 * took) * int(os.environ['RANK']))\n"
    sleepy = ONE_SIDED.replace("        loss = self.gpt(inputs, targets)\n", timed)
    assert "perf_counter" in sleepy
    (tmp_path / "mine.py").write_text("import time\n" + sleepy)
    script = FLIPPER.format(root=str(ROOT), at=0, guilty=GUILTY)
    done = two_ranks(
        tmp_path, script, "train.steps=70", "model.target=mine:one_sided", "checkpoint.every=0"
    )
    assert done.returncode == 0, done.stdout
    (event,) = events(tmp_path / "runs" / "r", "ranks.straggler")
    assert 50 <= event["step"] <= 60
    assert event["slowest"] > 2 * event["fastest"]
