"""Refused combinations, missing tools and conflicting keys, all known before DeepSpeed is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.build import Worker, build_plan
from harness.capability.probe import MachineFacts
from harness.core.config import load_config
from harness.core.errors import ConfigError
from harness.engines.deepspeed_setup import PrecisionName, build_config, check, preflight
from harness.engines.process_group import Launch, ProcessGroup
from harness.precision.recipe import load_recipe


def build(
    precision: PrecisionName = "fp32", user: str | None = None, **changes: Any
) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "zero_stage": 1,
        "micro_batch": 4,
        "accumulation": 2,
        "max_grad_norm": 0.5,
        "precision": precision,
        "tested_optimizer": True,
        "user": user,
    }
    return build_config(**{**arguments, **changes})


@pytest.mark.parametrize("precision", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_supported(precision: PrecisionName, stage: int, device: str) -> None:
    assert check(stage, precision, device) == []


@pytest.mark.parametrize(
    ("stage", "precision", "device", "alternative"),
    [
        (3, "bf16", "cuda", "0, 1 or 2"),
        (1, "fp16", "cpu", "torchrun"),
        (0, "fp16", "cuda", "engine.zero_stage=1"),
        (2, "fp16", "cuda", "engine.zero_stage=1"),
    ],
)
def test_broken_combinations_name_the_alternative(
    stage: int, precision: PrecisionName, device: str, alternative: str
) -> None:
    (problem,) = check(stage, precision, device)
    assert alternative in problem.fix
    assert problem.why


def test_fp16_on_cuda_is_zero_1_only() -> None:
    assert check(1, "fp16", "cuda") == []


def test_every_problem_at_once() -> None:
    assert len(check(3, "fp16", "cpu")) == 2


def test_missing_tools_are_named_with_another_way_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    problems = preflight("cpu")
    assert [problem.what for problem in problems] == ["no C++ compiler on PATH", "no ninja on PATH"]
    assert all(
        "torchrun" in problem.fix and "python launch/train.py" in problem.fix
        for problem in problems
    )
    assert preflight("cuda") == []
    for tool in ("g++", "ninja"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    assert preflight("cpu") == []


def test_gradients_stay_fp32_under_autocast() -> None:
    for precision in ("fp8", "bf16"):
        section = build(precision)["torch_autocast"]
        assert section == {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    assert "torch_autocast" not in build("fp32")
    assert "bf16" not in build("bf16")
    assert build("fp16")["fp16"]["initial_scale_power"] == 16


def test_batch_stage_and_clipping_come_from_the_run() -> None:
    config = build()
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["gradient_accumulation_steps"] == 2
    assert config["gradient_clipping"] == 0.5
    assert config["zero_optimization"]["stage"] == 1


def test_the_users_json_is_merged_under_ours(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps(
            {"zero_optimization": {"reduce_bucket_size": 77, "stage": 1}, "memory_breakdown": True}
        )
    )
    config = build(user=str(path))
    assert config["zero_optimization"]["reduce_bucket_size"] == 77
    assert config["zero_optimization"]["allgather_bucket_size"] == 50_000_000
    assert config["memory_breakdown"] is True


def test_a_shipped_name_is_found() -> None:
    assert build(user="buckets")["zero_optimization"]["reduce_bucket_size"] == 500_000_000


def test_every_conflicting_key_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps(
            {
                "bf16": {"enabled": True},
                "optimizer": {"type": "Adam"},
                "train_batch_size": 64,
                "gradient_clipping": 9.0,
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            }
        )
    )
    with pytest.raises(ConfigError) as caught:
        build(user=str(path))
    text = str(caught.value)
    for key in (
        "bf16",
        "optimizer",
        "train_batch_size",
        "gradient_clipping",
        "zero_optimization.stage",
    ):
        assert f'"{key}"' in text
    assert '"zero_optimization.offload_optimizer"' in text
    assert len(caught.value.problems) == 6


@pytest.mark.parametrize("content", ["{", "[1]", '"text"', '{"zero_optimization": 3}'])
def test_a_broken_json_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"mine\.json"):
        build(user=str(path))


def test_a_missing_json_names_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match="buckets"):
        build(user="no_such_name")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_plan_names_the_norm_that_deepspeed_measures(stage: int) -> None:
    config = load_config("tiny", [f"engine.zero_stage={stage}"])
    cpu = torch.device("cpu")
    launch = Launch(rank=0, local_rank=0, world_size=1, local_world_size=1, launched=True)
    worker = Worker(launch, "deepspeed", cpu, MachineFacts(), ProcessGroup(cpu))
    plan, _ = build_plan(config, load_recipe("fp32"), worker)
    assert any("DeepSpeed's own" in note for note in plan.notes) == (stage > 0)


def test_checks_need_neither_torch_nor_deepspeed() -> None:
    code = "import sys, harness.engines.deepspeed_setup as m; assert m.check(3, 'fp32', 'cpu'); "
    code += "print(sorted({'torch', 'deepspeed'} & sys.modules.keys()))"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=True,
    )
    assert done.stdout.strip() == "[]"
