"""The ladder on real runs: alarm, skip, roll back past the windows, halt; each rung asserted to have fired.

Rows 11, 13 and 17 of the fault matrix.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from safetensors.numpy import load_file

from tests.support.runs import ROOT, events, metrics, train

pytestmark = pytest.mark.faults(11, 13, 17)

FIXED = (
    "--name", "r", "train.global_batch=2", "train.micro_batch=2", "train.warmup_steps=10", "train.lr=5e-4",
    "train.eval_every=0",
)  # fmt: skip


def run(
    folder: Path, target: str, args: str, *arguments: str
) -> tuple[Path, CompletedProcess[str]]:
    shutil.copy(ROOT / "tests" / "faults" / "spiking_models.py", folder)
    model = (f"model.target=spiking_models:{target}", f"model.args={{{args}}}")
    return folder / "runs" / "r", train(folder, *FIXED, *model, *arguments)


def same(one: Path, other: Path, *names: str) -> bool:
    pairs = [(load_file(one / name), load_file(other / name)) for name in names]
    return all(a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "times", "code"),
    [
        pytest.param("gradient", 10.0, "gradient.skip", marks=pytest.mark.nightly),
        pytest.param("gradient", 100.0, "gradient.skip", marks=pytest.mark.nightly),
        ("gradient", 1000.0, "gradient.skip"),
        ("loss", 10.0, "loss.skip"),
    ],
)
def test_a_spike_is_told_and_skipped_and_leaves_no_trace(
    tmp_path: Path, target: str, times: float, code: str
) -> None:
    where, done = run(
        tmp_path, target, f"first: 60, last: 61, times: {times}", "train.steps=64", "checkpoint.every=1",
        "checkpoint.keep=10", "guard.snapshot_every=0",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    values = dict(metrics(where, {"gradient": "train/grad_norm", "loss": "train/loss"}[target]))
    applied = dict(metrics(where, "train/step_applied"))
    assert values[60] > 0.3 * times * values[59], "the fault fired"
    assert [step for step, value in applied.items() if value == 0.0] == [60]
    (event,) = events(where, code)
    assert event["step"] == 60
    assert f"{event['window']}" in event["text"]
    assert code in done.stdout
    before, after = where / "checkpoints" / "step-00000059", where / "checkpoints" / "step-00000060"
    assert same(before, after, "model.safetensors", "optimizer.safetensors", "fp8.safetensors"), (
        "bit for bit"
    )
    assert not same(
        after, where / "checkpoints" / "step-00000061", "model.safetensors", "fp8.safetensors"
    )


@pytest.mark.nightly
def test_without_the_guard_the_spike_is_applied(tmp_path: Path) -> None:
    where, done = run(
        tmp_path,
        "gradient",
        "first: 60, last: 61, times: 1000.0",
        "train.steps=62",
        "guard.enabled=false",
    )
    assert done.returncode == 0, done.stdout
    assert dict(metrics(where, "train/step_applied"))[60] == 1.0


@pytest.mark.slow
def test_spikes_in_a_row_roll_back_from_memory_and_the_run_goes_on(tmp_path: Path) -> None:
    where, done = run(
        tmp_path, "gradient", "first: 72, last: 76, times: 100.0", "train.steps=90", "checkpoint.every=30",
        "checkpoint.healthy_steps=4", "guard.snapshot_every=10", "guard.max_consecutive_skips=3",
        "guard.rollback_lr_factor=0.5",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (rollback,) = events(where, "guard.rollback")
    assert (rollback["source"], rollback["to_step"]) == ("memory", 60), (
        "70's snapshot had not earned it"
    )
    assert rollback["passed_over"] == [71, 72, 73]
    assert json.loads((where / "incidents.json").read_text())["skipped_windows"] == [71, 72, 73]
    before, after = (dict(metrics(where, attempt=attempt)) for attempt in (1, 2))
    lr_before, lr_after = (dict(metrics(where, "train/lr", attempt=attempt)) for attempt in (1, 2))
    assert min(after) == 61
    assert before[61] == after[61], (
        "the same weights, scales and data as the first time, bit for bit"
    )
    assert lr_after[61] == pytest.approx(0.5 * lr_before[61], rel=1e-6)
    assert max(after) == 90
    assert dict(metrics(where, "train/step_applied", attempt=2))[90] == 1.0


@pytest.mark.slow
def test_norms_that_are_large_for_a_while_are_accepted(tmp_path: Path) -> None:
    where, done = run(
        tmp_path,
        "gradient",
        "first: 60, last: 68, times: 10.0",
        "train.steps=110",
        "guard.snapshot_every=10",
    )
    assert done.returncode == 0, done.stdout
    norms, applied = (
        dict(metrics(where, "train/grad_norm")),
        dict(metrics(where, "train/step_applied")),
    )
    assert min(norms[step] for step in range(60, 68)) > 3 * max(
        norms[step] for step in range(50, 60)
    ), "it fired"
    (accepted,) = events(where, "gradient.accepted")
    assert accepted["step"] == 64
    assert [step for step, value in applied.items() if value == 0.0] == [60, 61, 62, 63, 64, 65]
    assert events(where, "guard.rollback") == []
    assert "gradient.accepted" in done.stdout


@pytest.mark.slow
def test_a_fault_that_stays_ends_in_a_halt_that_says_what_to_do(tmp_path: Path) -> None:
    where, done = run(
        tmp_path, "loss", "first: 45, last: 100000, times: 50.0", "train.steps=300", "checkpoint.every=10",
        "checkpoint.healthy_steps=4", "guard.max_rollbacks=2", "guard.spike_steps=3",
    )  # fmt: skip
    assert done.returncode == 3, done.stdout
    rollbacks = events(where, "guard.rollback")
    assert len(rollbacks) == 2
    passed_over = [window for event in rollbacks for window in event["passed_over"]]
    assert len(passed_over) == len(set(passed_over)), "no window is passed over twice"
    outcome = json.loads((where / "outcome.json").read_text())
    assert outcome["status"] == "halted"
    assert "guard.max_rollbacks (2)" in outcome["reason"]
    assert max(step for step, _ in metrics(where)) < 70
    assert all(math.isfinite(loss) for _, loss in metrics(where))
