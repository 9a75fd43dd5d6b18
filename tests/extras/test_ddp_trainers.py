"""Lightning, Fabric, Hugging Face's Trainer and accelerate on two ranks: one launch by torchrun for all cases.

Under DDP; Lightning and Fabric under FSDP2, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ddp_cases
import pytest
import torch
from ddp_cases import RUNGS
from loop_support import ROOT, recipe

from harness import Precision

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SAME = ("weights", "fp8", "scale", "steps", "applied", "norm")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ddp")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, *launcher, ddp_cases.__file__, str(folder)]
    done = subprocess.run(command, env=environment, timeout=540, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def both(ranks: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    """What each rank saw in a case, once they are known to agree."""
    found = [rank[case] for rank in ranks]
    errors = [each["error"] for each in found if "error" in each]
    assert not errors, "\n".join([*errors, *(each["trace"] for each in found)])
    return found


@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize("trainer", ["lightning", "fabric", "fabric sharded", "hf", "accelerate"])
def test_two_ranks_give_the_plain_loops_losses(
    ranks: list[dict[str, Any]], trainer: str, name: str
) -> None:
    """With accumulation and clipping. accelerate steps a scheduler once for every process."""
    expected = both(ranks, f"{'faster' if trainer == 'accelerate' else 'plain'} {name}")
    found = both(ranks, f"{trainer} {name}")
    for mine, theirs in zip(found, expected, strict=True):
        assert {key: mine[key] for key in ("losses", *SAME)} == {
            key: theirs[key] for key in ("losses", *SAME)
        }
    assert [found[0][key] for key in SAME] == [found[1][key] for key in SAME]
    assert found[0]["losses"] != found[1]["losses"], "each has data of its own"
    assert found[0]["applied"] == found[0]["steps"] == ddp_cases.BATCHES / ddp_cases.ACCUMULATE
    assert found[0]["norm"] > ddp_cases.CLIP, "the clip was in use"


def test_manual_optimization_is_the_plain_loop_too(ranks: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(
        both(ranks, "manual fp8_hybrid"), both(ranks, "plain fp8_hybrid"), strict=True
    ):
        assert {key: mine[key] for key in ("losses", *SAME)} == {
            key: theirs[key] for key in ("losses", *SAME)
        }


@pytest.mark.parametrize("trainer", ["lightning", "hf", "accelerate"])
def test_guard_and_telemetry_act_on_both_ranks(ranks: list[dict[str, Any]], trainer: str) -> None:
    """The second rank alone has NaN: every one is skipped by both, three in a row are rolled back; layers leave FP8."""
    first, second = both(ranks, f"{trainer} guarded")
    for key in (*SAME, "moved", "counted", "returned", "passed_over", "demoted"):
        assert first[key] == second[key], key
    assert first["codes"].count("nonfinite.skip") == 4
    assert first["codes"].count("guard.rollback") == len(first["returned"]) == 1
    assert "precision.demote" in first["codes"]
    assert first["moved"][0] == 0 < max(first["moved"])
    assert all(loss == loss for loss in first["losses"]), "the first rank saw no NaN of its own"
    assert [each != each for each in second["losses"]].count(True) == 4
    assert (first["writes"], second["writes"]) == (True, False)
    assert first["counted"] < 24


def test_a_sharded_run_is_guarded_as_under_ddp(ranks: list[dict[str, Any]]) -> None:
    for whole, rows in zip(
        both(ranks, "lightning guarded"), both(ranks, "lightning sharded guarded"), strict=True
    ):
        # The net alone is prepared, so its layers' names have no "net." before them.
        named = {**rows, "demoted": [f"net.{name}" for name in rows["demoted"]]}
        assert json.dumps(named) == json.dumps(whole), "NaN equals NaN"


@pytest.mark.parametrize("trainer", ["lightning", "lightning sharded", "hf", "accelerate"])
def test_two_ranks_go_on_bit_for_bit(ranks: list[dict[str, Any]], trainer: str) -> None:
    for found in both(ranks, f"{trainer} resumed"):
        whole, again = found["whole"], found["again"]
        assert again["losses"] == whole["losses"][-6:]
        assert [again[key] for key in SAME] == [whole[key] for key in SAME]


def test_unequal_numbers_of_labels_are_one_mean(
    ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Hugging Face's Trainer on two ranks against one process that has the batches of both."""
    alone = ddp_cases.Ours(
        ddp_cases.tiny_llama(), ddp_cases.arguments(tmp_path, per_device_train_batch_size=4, max_grad_norm=0.5),
        train_dataset=ddp_cases.Uneven(), precision=Precision(recipe("fp32")),
    )  # fmt: skip
    alone.losses, alone.moved = [], []
    alone.train()
    first, second = both(ranks, "tokens")
    together = [
        (one + other) / 2 for one, other in zip(first["losses"], second["losses"], strict=True)
    ]
    assert together == pytest.approx(alone.losses, rel=1e-5)
    assert first["losses"][0] > 2 * second["losses"][0], "the first rank has most of the labels"
    weights = torch.cat([p.detach().flatten() for p in alone.harness.prepared.model.parameters()])
    torch.testing.assert_close(torch.tensor(first["all_weights"]), weights, rtol=1e-3, atol=1e-4)
    assert (
        first["norm"] == second["norm"] == pytest.approx(alone.harness.facts().grad_norm, rel=1e-3)
    )  # pyright: ignore
