"""The trainer and a loop of ten lines on the public API: the same weights, moments, FP8 state, loss scale and facts.

40 steps, two micro-batches each, clipping on; a loss is NaN, gradients are infinite, a loss is 50 times as large. Run
as a script, this file is one rank.
"""

from __future__ import annotations

import io
import json
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_support import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness import Precision
from harness.build import build_data, build_plan, build_run, find_place, open_journal, open_store, read_incidents
from harness.core.config import RunConfig
from harness.core.facts import StepFacts
from harness.core.state import seed_everything
from harness.engines.torch_engine import ModelPart, OptimizerPart
from harness.loop import next_step
from harness.models.gpt import GPT, build
from harness.models import Task, build_model
from harness.optim import build_optimizer
from harness.optim import WarmupCosine
from harness.precision.recipe import Recipe, load_recipe
from harness.step import seed_step
from harness.tracking.console import Console

STEPS, MICRO = 40, 2
NAN_LOSS, INF_GRADIENT, SPIKE = 7, 13, 20
RECIPES = {"fp32": {}, "bf16": {}, "fp16_scaler": {"loss_scale": {"init": 1024.0, "growth_interval": 5}}, "fp8_hybrid": {}}
CPU = torch.device("cpu")

pytestmark = pytest.mark.dist


class Restless(nn.Module):
    """A GPT with the three faults, counted in training forwards; each in the second micro-batch of its step."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt: GPT = build(dim=32, layers=2, heads=2, ffn=64, tied=False)
        self.vocab_size = self.gpt.vocab_size
        self.forwards = 0

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.gpt(inputs, targets)
        step, micro = divmod(self.forwards, MICRO)
        self.forwards += 1
        if micro == 1 and step == NAN_LOSS:
            return loss + math.nan  # no gradient feels it
        if micro == 1 and step == INF_GRADIENT:
            return loss * math.inf
        return loss * 50 if micro == 1 and step == SPIKE else loss


def restless() -> Restless:
    return Restless()


def settings(folder: Path, ranks: int) -> RunConfig:
    text = folder / "text.txt"
    if not text.exists():
        text.write_bytes(bytes(torch.randint(97, 123, (20_000,), generator=torch.Generator().manual_seed(0)).tolist()))
    return RunConfig.model_validate(
        {
            "train": {"steps": STEPS, "global_batch": 4 * MICRO, "micro_batch": 4 // ranks, "max_grad_norm": 0.5},
            "data": {"path": str(text), "context": 32, "val_samples": 1},
            "model": {"target": "test_one_update:restless"},
            "checkpoint": {"every": 0},
            "guard": {"enabled": False},
            "tracking": {"mlflow": False},
        }
    )


def policy(name: str) -> Recipe:
    """Small layers are converted; the fallback, which belongs to the guard in one and to the recipe in the other, is off."""
    base = load_recipe(name).model_dump()
    for section, keys in {"layers": {"min_features": 16}, "fallback": {"enabled": False}, **RECIPES[name]}.items():
        base[section].update(keys)
    return Recipe.model_validate(base)


def told(facts: StepFacts) -> list[Any]:
    """What both loops measure; repr keeps every bit, and NaN equal to itself."""
    slots = [] if facts.slots is None else [getattr(facts.slots, row).tolist() for row in ("amax", "scale", "sqnr_db")]
    figures = (facts.loss, facts.grad_norm, facts.lr, facts.loss_scale, facts.applied, facts.applied_steps, facts.demoted)
    return [repr(figures), repr(slots)]


def state(parts: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{part}/{name}": tensor.tolist()
        for part, each in parts.items()
        for name, tensor in each.state_dict()[0].items()
    }


def trainer(folder: Path, name: str, ranks: int) -> dict[str, Any]:
    config, recipe = settings(folder, ranks), policy(name)
    run_dir = folder / f"trainer-{name}"
    run_dir.mkdir(exist_ok=True)
    place = find_place(config, "python" if ranks == 1 else "torchrun")
    plan, model = build_plan(config, recipe, place)
    data = build_data(config, run_dir, place)
    store = open_store(run_dir, place)
    incidents = read_incidents(run_dir, place, store)
    with open_journal(run_dir, place, incidents.attempt, None) as journal:
        console = Console(STEPS, stream=io.StringIO())
        run = build_run(config, recipe, run_dir, place, plan, model, data, journal, incidents, store, console)
        facts = [told(next_step(run).facts()) for _ in range(STEPS)]
        run.stop.uninstall()
    parts = {each: part for each, part in run.state.parts.items() if each in ("model", "optimizer", "fp8", "loss_scale")}
    return {"facts": facts, "state": state(parts), "run": run, "data": data}


def ten_lines(folder: Path, name: str, ranks: int, other: dict[str, Any]) -> dict[str, Any]:
    """The trainer's data order and seeds, and nothing else of it."""
    config, data, rank = settings(folder, ranks), other["data"], other["run"].engine.rank
    seed_everything(config.train.seed)
    precision = Precision(policy(name))
    model = precision.prepare(build_model(config.model))
    optimizer = build_optimizer(model, config.train, CPU)
    schedule = WarmupCosine(config.train.lr, config.train.warmup_steps, STEPS, config.train.min_lr_ratio)
    task = Task(model, config.model.target)
    wrapped = DistributedDataParallel(model) if ranks > 1 else None
    lr, applied, facts = torch.zeros(()), torch.zeros(()), []
    for group in optimizer.param_groups:
        group["lr"] = lr
    for step in range(STEPS):
        window = data.window(step, step)
        seed_step(other["run"], window, rank)
        for number, (inputs, targets) in enumerate(data.micro_batches(window, rank, ranks), start=1):
            with wrapped.no_sync() if wrapped is not None and number < MICRO else nullcontext():
                with precision.context():
                    loss = task.loss(wrapped or model, inputs, targets)
                precision.backward(loss / MICRO)
        lr.copy_(schedule(applied))
        outcome = precision.step(optimizer, max_grad_norm=config.train.max_grad_norm)
        applied += outcome.applied
        optimizer.zero_grad()
        last = precision.facts()
        assert last is not None
        facts.append(told(last))
    own = precision.state_dict()["tensors"]
    parts = state({"model": ModelPart(model), "optimizer": OptimizerPart(model, optimizer, applied)})
    parts |= {each.replace(".", "/", 1): tensor.tolist() for each, tensor in own.items() if "." in each}
    return {"facts": facts, "state": parts}


def session(folder: Path, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in RECIPES:
        ours = trainer(folder, name, ranks)
        theirs = ten_lines(folder, name, ranks, ours)
        ours = {key: ours[key] for key in ("facts", "state")}
        differ = [key for key in ours["state"].keys() | theirs["state"].keys()
                  if repr(ours["state"].get(key)) != repr(theirs["state"].get(key))]  # fmt: skip
        steps = [step for step in range(STEPS) if ours["facts"][step] != theirs["facts"][step]]
        found[name] = {"state": sorted(differ), "steps": steps, "tensors": len(ours["state"]), "facts": ours["facts"]}
    return found


def check(found: dict[str, Any]) -> None:
    for name, each in found.items():
        assert (each["state"], each["steps"]) == ([], []), name
        assert each["tensors"] > 40
        scales = [float(figures.split(",")[3]) for figures, _ in each["facts"]]
        skipped = [step for step, (figures, _) in enumerate(each["facts"]) if "False" in figures]
        assert skipped == [NAN_LOSS, INF_GRADIENT], "both faults fired, and nothing else was skipped"
        if name == "fp16_scaler":
            assert scales[NAN_LOSS + 1] == scales[NAN_LOSS], "a loss that alone is NaN is not the scale's fault"
            assert scales[INF_GRADIENT + 1] == scales[INF_GRADIENT] / 2
            assert max(scales) > scales[0], "and it grows"


def test_one_rank(tmp_path: Path) -> None:
    check(session(tmp_path, 1))


def test_two_ranks(tmp_path: Path) -> None:
    settings(tmp_path, 2)
    first, second = run_ranks(__file__, tmp_path, 2)
    check(first)
    assert {name: each["facts"] for name, each in first.items()} == {name: each["facts"] for name, each in second.items()}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    result = session(target, 2)
    (target / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(result))
