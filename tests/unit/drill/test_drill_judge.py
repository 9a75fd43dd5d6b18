"""Each judge of a drill passes what is right, and fails what a run does whose protection is off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.drill.exercises import flip_bit
from harness.drill.judge import (
    Account,
    Check,
    Ran,
    Verdict,
    ended_well,
    failed_save,
    found_by_verify,
    full_disk_met,
    killed,
    near,
    not_applicable,
    on_ranks,
    rolled_back,
    same_bits,
    stopped,
    sync_named,
    went_on_from,
)
from harness.report.divergence import FORWARD, Compared, Split
from harness.tracking.figures import Points

STEPS = 6
GOOD = Ran(0, "done", STEPS, tuple(range(1, STEPS + 1)), finite=True, resumed=3, ranks=1)
HOLDS = Check("a", "a", True)
BROKEN = Check("a", "b", False)
SAME = Compared(steps=STEPS, first=1, last=STEPS, slots=True)
SPLIT = Split(4, "blocks.0.mlp.down.input", "amax", 1.0, 1.0000001, FORWARD)


@pytest.mark.parametrize(
    ("account", "verdict"),
    [
        (Account("x", "killed", [HOLDS]), Verdict.PASSED),
        (Account("x", "killed", [HOLDS, BROKEN]), Verdict.FAILED),
        (Account("x", "", [HOLDS]), Verdict.NOT_SHOWN),
        (Account("x", "", [BROKEN]), Verdict.NOT_SHOWN),
        (Account("x", "killed", []), Verdict.NOT_SHOWN),
        (not_applicable("one GPU"), Verdict.NOT_APPLICABLE),
    ],
)
def test_a_fault_that_is_not_shown_passes_nothing(account: Account, verdict: Verdict) -> None:
    assert account.verdict is verdict


@pytest.mark.parametrize(
    "ran",
    [
        replace(GOOD, code=1),
        replace(GOOD, code=-9, status=""),
        replace(GOOD, status="stopped"),
        replace(GOOD, step=5),
        replace(GOOD, steps=(1, 2, 3, 5, 6)),
        replace(GOOD, steps=()),
        replace(GOOD, finite=False),
    ],
)
def test_a_run_that_did_not_end_as_planned(ran: Ran) -> None:
    assert ended_well(GOOD, STEPS).holds
    assert not ended_well(ran, STEPS).holds


def test_figures_that_differ_are_named() -> None:
    assert same_bits(SAME, STEPS).holds
    apart = same_bits(replace(SAME, splits=[SPLIT]), STEPS)
    assert not apart.holds
    assert "step 4" in apart.seen
    assert SPLIT.tensor in apart.seen
    assert not same_bits(replace(SAME, steps=4), STEPS).holds, "steps that nobody compared"


@pytest.mark.parametrize(("code", "status"), [(-15, ""), (0, "done"), (75, ""), (1, "failed")])
def test_a_stop_that_saved_nothing(code: int, status: str) -> None:
    assert stopped(replace(GOOD, code=75, status="stopped")).holds
    assert not stopped(replace(GOOD, code=code, status=status)).holds


def test_a_kill_is_shown_by_the_signal_alone() -> None:
    assert killed(-9, has_outcome=False)
    assert not killed(-15, has_outcome=False)
    assert not killed(0, has_outcome=False)
    assert not killed(-9, has_outcome=True), "it had ended before"


@pytest.mark.parametrize("resumed", [None, 0, 2, 4])
def test_a_start_from_elsewhere(resumed: int | None) -> None:
    assert went_on_from(GOOD, 3).holds
    assert not went_on_from(replace(GOOD, resumed=resumed), 3).holds


def test_damage_that_verify_misses_or_finds_elsewhere() -> None:
    checkpoint, file = Path("runs/r/checkpoints/step-00000004"), "model.safetensors"
    named = f"{checkpoint}: {file}: other bytes than its hash"
    assert found_by_verify(1, named, checkpoint, file).holds
    assert not found_by_verify(0, f"{checkpoint}: ok", checkpoint, file).holds
    assert not found_by_verify(0, named, checkpoint, file).holds
    assert not found_by_verify(1, named.replace(file, "state.json"), checkpoint, file).holds
    assert not found_by_verify(1, named.replace("4:", "2:"), checkpoint, file).holds


@pytest.mark.parametrize(
    ("policy", "right", "wrong"),
    [("pause", (0,), (1, 3, -9)), ("halt", (3,), (0, 1)), ("continue", (0, 1), (3, -9))],
)
def test_a_full_disk_by_policy(policy: str, right: tuple[int, ...], wrong: tuple[int, ...]) -> None:
    assert all(full_disk_met(policy, code).holds for code in right)
    assert not any(full_disk_met(policy, code).holds for code in wrong)


def test_a_full_disk_is_shown_by_a_save_that_failed() -> None:
    told = "! step 6: checkpoint.failed: step-6: the checkpoint was not written\n    why: File too large\n    fix: x\n"
    evidence = failed_save(f"step 5\n{told}{told.replace('6', '9')}")
    assert "step 6" in evidence
    assert "File too large" in evidence
    assert "step 9" not in evidence
    assert not failed_save("step 5\nstep 6\n")


def test_a_screen_that_names_no_sync() -> None:
    assert sync_named("done\n! deliver the rest with: harness sync runs/a\n").holds
    assert not sync_named("done\n").holds


def losses(*values: float) -> Points:
    return Points(np.arange(1, len(values) + 1), np.array(values))


@pytest.mark.parametrize(
    "ours",
    [
        losses(5.0, 4.0, 3.03, 2.0),  # other samples in the first step
        losses(5.0, 4.0, 3.0, 2.1),
        losses(5.0, 4.0, 3.0),
        losses(5.0, 4.0, 3.0, float("nan")),
        losses(5.0, 4.0, float("nan"), 2.0),
    ],
)
def test_ranks_that_trained_something_else(ours: Points) -> None:
    reference = losses(5.0, 4.0, 3.0, 2.0)
    assert near(losses(9.0, 9.0, 3.0005, 2.005), reference, first=3).holds
    assert not near(ours, reference, first=3).holds
    assert not near(reference, reference, first=5).holds, "nothing was compared"
    assert not on_ranks(GOOD, 2).holds
    assert on_ranks(replace(GOOD, ranks=2), 2).holds


@pytest.mark.parametrize("rollbacks", [(), (4,), (5,), (2, 4)])
def test_a_weight_that_nothing_repaired(rollbacks: tuple[int, ...]) -> None:
    assert rolled_back(replace(GOOD, rollbacks=(3,)), damaged=4).holds
    assert not rolled_back(replace(GOOD, rollbacks=rollbacks), damaged=4).holds


def test_one_bit_is_flipped(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    before = bytes(range(200))
    file.write_bytes(before)
    evidence = flip_bit(file)
    after = file.read_bytes()
    changed = [place for place in range(len(before)) if before[place] != after[place]]
    assert (len(after), len(changed)) == (len(before), 1)
    assert (before[changed[0]] ^ after[changed[0]]).bit_count() == 1
    assert f"byte {changed[0]}" in evidence
