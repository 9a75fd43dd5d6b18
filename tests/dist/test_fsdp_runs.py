"""`launch/train.py engine.name=fsdp` on two ranks, beside the same run under DDP: figures, checkpoints, resume.

Run as a script, this file is one rank of `launch/train.py`. Rank 0 is killed while it saves the state of step 8.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pairs import assert_same_state, different, figures, ran, state

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
