"""The plan's advice under fsdp and autocast: the bytes that it names are those that autograd keeps.

Run as a script, this file is one rank.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.started import start_run
from harness.core.config import RunConfig
from harness.core.memory import size_text
from harness.models import build_model
from harness.precision.recipe import load_recipe
from harness.precision.sharding import kept_copies
from harness.run import train_step
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow]

# No activation has the shape of a weight: micro-batches of 2 samples of 16 tokens.
ARGS = {"vocab": 256, "dim": 64, "layers": 3, "heads": 2, "ffn": 128}
IN_BLOCKS = 3 * (192 * 64 + 64 * 64 + 2 * 128 * 64 + 64 * 128)
HEAD = 256 * 64


class Own(nn.Module):
    """Somebody's own model, of which nobody knows whether it recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        self.head = nn.Linear(64, 256, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def own(**_: object) -> nn.Module:
    return Own()


CASES: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "recomputed": {"args": {**ARGS, "recompute": "block"}},
    "ddp": {"engine": "ddp"},
    "fp8": {"recipe": "fp8_hybrid"},
    "fp32": {"recipe": "fp32"},
    "own": {"target": "tests.dist.test_kept_copies:own", "args": {}},
}


def kept(
    folder: Path,
    target: str = "harness.models.gpt:build",
    args: dict[str, Any] = ARGS,
    engine: str = "fsdp",
    recipe: str = "bf16",
) -> dict[str, Any]:
    """Bytes of 16-bit tensors with a weight's shape that autograd holds in the second step; notes of the plan."""
    folder.mkdir()
    text = folder / "text.txt"
    text.write_bytes(bytes(range(97, 123)) * 400)
    config = RunConfig.model_validate(
        {
            "train": {"steps": 2, "global_batch": 4, "micro_batch": 2, "eval_every": 0},
            "data": {"path": str(text), "context": 16, "val_samples": 2},
            "model": {"target": target, "args": args},
            "engine": {"name": engine, "timeout_seconds": 60},
            "checkpoint": {"every": 0},
            "tracking": {"mlflow": False},
        }
    )
    policy = load_recipe(recipe)
    whole = build_model(config.model)
    shapes = {tuple(each.weight.shape) for each in whole.modules() if isinstance(each, nn.Linear)}
    shapes |= {shape[::-1] for shape in shapes}
    copies: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.element_size() == 2 and tuple(tensor.shape) in shapes:
            storage = tensor.untyped_storage()
            copies[storage.data_ptr()] = storage.nbytes()
        return tensor

    with ExitStack() as stack:
        run, plan, _ = start_run(stack, config, policy, folder, torch.device("cpu"), "torchrun")
        train_step(run, run.data.window(0))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            train_step(run, run.data.window(1))
    return {"bytes": sum(copies.values()), "notes": plan.notes, "printed": str(plan)}


def rank_main(folder: Path) -> None:
    rank = os.environ["RANK"]
    found = {name: kept(folder / f"{name}-{rank}", **case) for name, case in CASES.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("kept"), 2)


def advice(found: dict[str, Any]) -> list[str]:
    return [note for note in found["notes"] if "copies of all blocks' weights" in note]


def test_the_plan_names_the_copies_that_are_kept(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        found = result["fsdp"]
        assert found["bytes"] == 2 * (IN_BLOCKS + HEAD)
        [note] = advice(found)
        assert (
            f"every rank keeps bf16 copies of all blocks' weights ({size_text(2 * IN_BLOCKS)})"
            in note
        )
        assert "model.args.recompute=block frees them" in note
        assert "second forward" in note
        assert note in found["printed"]


def test_recomputed_blocks_keep_none_and_nothing_is_advised(
    two_ranks: list[dict[str, Any]],
) -> None:
    for result in two_ranks:
        assert result["recomputed"]["bytes"] == 2 * HEAD
        for case in ("recomputed", "ddp", "fp8", "fp32"):
            assert advice(result[case]) == []
        assert result["ddp"]["bytes"] == result["fsdp"]["bytes"], "nobody shards the weights there"
        assert result["fp8"]["bytes"] == 2 * HEAD
        assert result["fp32"]["bytes"] == 0


def test_of_ones_own_model_it_is_not_known_whether_it_recomputes(
    two_ranks: list[dict[str, Any]],
) -> None:
    for result in two_ranks:
        found = result["own"]
        assert found["bytes"] == 2 * (2 * 64 * 64 + HEAD)
        [note] = advice(found)
        assert f"({size_text(2 * 2 * 64 * 64)})" in note
        assert "unless the model recomputes its blocks" in note


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_weights_without_a_size_yet_are_left_out() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.LazyLinear(8), nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()])
    assert "(128 B)" in kept_copies("bf16", model)


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
