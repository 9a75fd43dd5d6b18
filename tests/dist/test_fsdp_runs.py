"""`launch/train.py engine.name=fsdp` on two ranks, beside the same run under DDP: figures, checkpoints, resume.

Run as a script, this file is one rank of `launch/train.py`. Rank 0 is killed while it saves the state of step 8.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.core.files import read_json
from tests.support.fsdp_pairs import SHARED_DEVICE, assert_bits_of
from tests.support.pairs import assert_same_state, different, figures, ran, state
from tests.support.runs import ROOT, events, harness, train_ranks

pytestmark = pytest.mark.dist

CASES = {
    "fp8": ("train.eval_every=4", "guard.snapshot_every=3"),
    "bf16": ("--recipe", "bf16"),
    "torchao": ("--recipe", "fp8_dynamic"),
    "compiled": ("engine.compile=blocks",),
    "recomputed": ("model.args.recompute=block",),
}


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


@pytest.mark.parametrize(
    ("other", "rung", "anew"),
    [
        pytest.param("single", "native:fp8", False, marks=pytest.mark.slow),
        pytest.param("single", "autocast:bf16", False, marks=pytest.mark.nightly),
        pytest.param("ddp", "native:fp8", True, marks=pytest.mark.nightly),
    ],
)
def test_one_rank_has_the_bits_of_a_run_that_is_not_sharded(
    tmp_path: Path, other: str, rung: str, anew: bool
) -> None:
    """tests/gpu/test_fsdp_gpu.py on a CPU."""
    assert_bits_of(other, tmp_path, rung, 1, anew=anew)


@pytest.mark.nightly
@pytest.mark.parametrize("rung", ["native:fp8", "autocast:bf16"])
def test_ranks_that_share_a_device_have_the_bits_of_ddp(tmp_path: Path, rung: str) -> None:
    """tests/gpu/test_fsdp_gpu.py on a CPU: the process group is made before the harness joins it."""
    assert_bits_of("ddp", tmp_path, rung, 2, program=SHARED_DEVICE)


@pytest.mark.slow
def test_one_process_reads_what_two_ranks_wrote(tmp_path: Path) -> None:
    """Commands say of fsdp's checkpoints what they say of DDP's."""
    said: dict[str, list[str]] = {"ddp": [], "fsdp": []}
    for engine, outputs in said.items():
        folder = tmp_path / engine
        ran(folder, engine, "r", steps=8)
        for words in (
            ("verify", "runs/r"),
            ("eval", "runs/r", "--samples", "2", "--json"),
            ("sample", "runs/r", "the", "--tokens", "8"),
            ("export", "runs/r", "--format", "safetensors", "--out", "out"),
        ):
            done = harness(folder, *words)
            assert done.returncode == 0, done.stdout + done.stderr
            # Each has its own folder.
            outputs.append(done.stdout.replace(str(folder), "FOLDER"))
        weights = (folder / "out" / "model.safetensors").read_bytes()
        outputs.append(hashlib.sha256(weights).hexdigest())
    assert said["fsdp"][0].count(", written by 2 ranks") == 2
    said["fsdp"][0] = said["fsdp"][0].replace(", written by 2 ranks", "")
    assert said["fsdp"] == said["ddp"]
    replayed = harness(tmp_path / "fsdp", "replay", "runs/r", "--step", "7")
    # Here one process adds up what two ranks did, so the last bit of a sum depends on the CPU.
    assert "from the checkpoint of step 4" in replayed.stdout, replayed.stderr
    assert "verdict: sound" in replayed.stdout


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
def test_a_replay_follows_a_change_of_ranks_on_its_way(tmp_path: Path) -> None:
    """It computed the steps before the change with the later number of ranks, and said that their bits differ."""
    fixed = ("train.schedule=constant", "--recipe", "fp32")
    ran(tmp_path, "fsdp", "r", *fixed, steps=4)
    run = ran(tmp_path, "single", "r", *fixed, "--accept-changed", "engine.name", steps=8, ranks=1)
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    replayed = harness(tmp_path, "replay", "runs/r", "--step", "5")
    assert "steps 1 to 5 reproduced bit for bit" in replayed.stdout, replayed.stdout


@pytest.mark.slow
@pytest.mark.faults(1, 20)
def test_a_rank_that_is_killed_in_a_save_costs_no_bit(tmp_path: Path) -> None:
    """The other rank does not wait for half of the timeout, which is longer than this test may take."""
    fixed = ("--recipe", "fp32", "engine.timeout_seconds=1600")
    straight = ran(tmp_path / "straight", "fsdp", "r", *fixed)
    killed = ran(tmp_path / "killed", "fsdp", "r", *fixed, killer=Path(__file__))
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


class Turning(nn.Module):
    """Two blocks of one shape. From the third step on rank 1 calls the second one first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.steps = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += self.training
        blocks = list(self.blocks)
        if self.steps > 2 and os.environ["RANK"] == "1":
            blocks.reverse()
        for block in blocks:
            x = torch.tanh(block(x))
        return (x - y).square().mean()


def build_turning(**_: object) -> nn.Module:
    return Turning()


class Partly(nn.Module):
    """Rank 1 does not use `second`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.first(x)
        if os.environ["RANK"] == "0":
            out = out + self.second(x)
        return (out - y).square().mean()


def build_partly(**_: object) -> nn.Module:
    return Partly()


class Numbers(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        x = torch.full((8,), number / 64)
        return {"x": x, "y": x}


@pytest.mark.slow
@pytest.mark.faults(20)
def test_ranks_that_call_blocks_in_another_order_halt_the_run(tmp_path: Path) -> None:
    done = train_ranks(
        tmp_path,
        2,
        *("--config", "tiny", "--recipe", "fp32", "--name", "r"),
        "model.target=tests.dist.test_fsdp_runs:build_turning",
        "data.target=tests.dist.test_fsdp_runs:Numbers",
        "data.path=null",
        "engine.name=fsdp",
        "train.steps=6",
        "train.global_batch=4",
        "train.micro_batch=2",
        program=ROOT / "launch/train.py",
    )
    assert done.returncode == 3, done.stdout
    run = tmp_path / "runs/r"
    [found] = events(run, "ranks.calls")
    assert found["step"] == 3
    assert read_json(run / "outcome.json")["exit_code"] == 3
    assert "Call every block" in done.stdout


@pytest.mark.slow
@pytest.mark.faults(20)
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_parameters_that_one_rank_does_not_use(tmp_path: Path, engine: str) -> None:
    """Under DDP the other rank waited for their gradients until engine.timeout_seconds, and no parameter was named."""
    done = train_ranks(
        tmp_path,
        2,
        *("--config", "tiny", "--recipe", "fp32", "--name", "r"),
        "model.target=tests.dist.test_fsdp_runs:build_partly",
        "data.target=tests.dist.test_fsdp_runs:Numbers",
        "data.path=null",
        f"engine.name={engine}",
        "engine.timeout_seconds=60",
        "train.steps=3",
        "train.global_batch=8",
        "train.micro_batch=2",
        program=ROOT / "launch/train.py",
    )
    if engine == "fsdp":
        assert done.returncode == 0, done.stdout
        return
    assert done.returncode != 0
    assert "rank 1: 2 parameters took no part in the loss, such as second.weight" in done.stdout
    assert "engine.name=fsdp" in done.stdout


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
