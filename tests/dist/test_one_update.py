"""The trainer and a loop of ten lines on the public API: the same weights, moments, FP8 state, loss scale and facts.

40 steps, two micro-batches each, clipping and guard on; a loss is NaN, gradients are infinite, a loss is 50 times as
large, and three losses in a row are NaN, for which both roll back to a snapshot in memory, at a lower learning rate.
Under one recipe layers leave FP8 and return, and scales roll with every micro-batch.
Run as a script, this file is one rank.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness import Guard, Precision
from harness.build import (
    build_data,
    build_plan,
    build_run,
    join_worker,
    open_store,
    open_telemetry,
    read_ledger,
)
from harness.core.config import RunConfig
from harness.core.facts import StepFacts
from harness.core.state import seed_everything
from harness.engines.parts import ModelPart, OptimizerPart
from harness.models import Task, build_model
from harness.models.gpt import GPT, build
from harness.optim.optimizers import build_optimizer
from harness.optim.schedule import Schedule
from harness.precision.recipe import Recipe, load_recipe
from harness.run import seed_step, train
from harness.tracking.console import Console
from tests.support.ranks import run_ranks

STEPS, MICRO = 40, 2
NAN_LOSS, INF_GRADIENT, SPIKE, STREAK = 7, 13, 26, (32, 33, 34)
RECIPES = {
    "fp32": {},
    "bf16": {},
    "fp16_scaler": {"loss_scale": {"init": 1024.0, "growth_interval": 5}},
    "fp8_hybrid": {},
    "fp8_hybrid, switching": {
        "fp8": {"roll": "micro_batch", "stats_every": 4},
        "fallback": {
            "saturation_weight": 1.0,
            "hits": 2,
            "window": 4,
            "dwell_steps": 5,
            "max_demoted_share": 1.0,
        },
    },
}
GUARD = {
    "max_consecutive_skips": 3,
    "snapshot_every": 5,
    "rollback_lr_factor": 0.5,
    "compare_ranks_every": 10,
}
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
        if micro == 1 and step in (NAN_LOSS, *STREAK):
            return loss + math.nan  # no gradient feels it
        if micro == 1 and step == INF_GRADIENT:
            return loss * math.inf
        return loss * 50 if micro == 1 and step == SPIKE else loss


def restless() -> Restless:
    return Restless()


def settings(folder: Path, ranks: int) -> RunConfig:
    text = folder / "text.txt"
    if not text.exists():
        text.write_bytes(
            bytes(
                torch.randint(
                    97, 123, (20_000,), generator=torch.Generator().manual_seed(0)
                ).tolist()
            )
        )
    return RunConfig.model_validate(
        {
            "train": {
                "steps": STEPS,
                "global_batch": 4 * MICRO,
                "micro_batch": 4 // ranks,
                "max_grad_norm": 0.5,
            },
            "data": {"path": str(text), "context": 32, "val_samples": 1},
            "model": {"target": "test_one_update:restless"},
            "checkpoint": {"every": 0, "healthy_steps": 3},
            "guard": GUARD,
            "tracking": {"mlflow": False},
        }
    )


def policy(name: str) -> Recipe:
    """Small layers are converted."""
    base = load_recipe(name.partition(",")[0]).model_dump()
    for section, keys in {"layers": {"min_features": 16}, **RECIPES[name]}.items():
        base[section].update(keys)
    return Recipe.model_validate(base)


def told(facts: StepFacts) -> list[Any]:
    """What both loops measure; repr keeps every bit, and NaN equal to itself."""
    slots = (
        []
        if facts.slots is None
        else [getattr(facts.slots, row).tolist() for row in ("amax", "scale", "sqnr_db")]
    )
    figures = (
        facts.loss,
        facts.grad_norm,
        facts.lr,
        facts.loss_scale,
        facts.applied,
        facts.applied_steps,
        facts.demoted,
    )
    return [repr(figures), repr(slots)]


def state(parts: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{part}/{name}": tensor.tolist()
        for part, each in parts.items()
        for name, tensor in each.state_dict()[0].items()
    }


def judged_by(guard: Guard) -> list[Any]:
    """What the guard will have judged, step by step."""
    facts: list[Any] = []
    observe = guard.observe
    guard.observe = lambda each: (facts.append(told(each)), observe(each))[1]  # type: ignore[method-assign]
    return facts


class Applied:
    """Updates applied so far, which the schedule goes by."""

    def __init__(self) -> None:
        self.count = torch.zeros(())

    def state_dict(self) -> dict[str, Tensor]:
        return {"count": self.count}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        self.count.copy_(saved["count"])


def trainer(folder: Path, name: str, ranks: int) -> dict[str, Any]:
    config, recipe = settings(folder, ranks), policy(name)
    run_dir = folder / f"trainer-{name}"
    run_dir.mkdir(exist_ok=True)
    worker = join_worker(config, "python" if ranks == 1 else "torchrun")
    plan, model = build_plan(config, recipe, worker)
    data = build_data(config, run_dir, worker)
    store = open_store(run_dir, worker)
    ledger = read_ledger(run_dir, worker, store)
    with open_telemetry(config, run_dir, worker, Console(STEPS, stream=io.StringIO())) as telemetry:
        run = build_run(
            config, recipe, run_dir, worker, plan, model, data, telemetry, ledger, store
        )
        facts = judged_by(run.guard)
        assert train(run).status == "done"
        run.stop.uninstall()
    parts = {
        each: part
        for each, part in run.state.parts.items()
        if each in ("model", "optimizer", "fp8", "loss_scale")
    }
    ledger = asdict(run.state.ledger)
    return {"facts": facts, "state": state(parts), "incidents": ledger, "run": run, "data": data}


def ten_lines(folder: Path, name: str, ranks: int, other: dict[str, Any]) -> dict[str, Any]:
    """The trainer's data order and seeds, and nothing else of it."""
    config, data, rank = settings(folder, ranks), other["data"], other["run"].engine.rank
    seed_everything(config.train.seed)
    precision = Precision(policy(name))
    model = precision.prepare(build_model(config.model))
    optimizer = build_optimizer(model, config.train, CPU)
    schedule = Schedule(
        config.train.lr, config.train.warmup_steps, STEPS, config.train.min_lr_ratio
    )
    task = Task(model, config.model.target)
    wrapped = DistributedDataParallel(model) if ranks > 1 else None
    lr, applied = torch.zeros(()), Applied()
    for group in optimizer.param_groups:
        group["lr"] = lr
    clip = config.train.max_grad_norm
    guard = Guard.for_precision(
        precision, optimizer, keep=[applied], max_grad_norm=clip, healthy_steps=3, **GUARD
    )
    facts = judged_by(guard)
    while guard.step < STEPS:
        window = data.window(guard.window)
        seed_step(other["run"], window, rank)
        for number, batch in enumerate(data.micro_batches(window, rank, ranks), start=1):
            with wrapped.no_sync() if wrapped is not None and number < MICRO else nullcontext():
                with precision.context():
                    loss = task.loss(wrapped or model, batch)
                precision.backward(loss / MICRO)
        lr.copy_(schedule(applied.count))
        outcome = precision.step(optimizer, max_grad_norm=clip)
        applied.count += outcome.applied
        optimizer.zero_grad()
        guard.end_step()
    own = precision.state_dict()["tensors"]
    parts = state(
        {
            "model": ModelPart(model),
            "optimizer": OptimizerPart(dict(model.named_parameters()), optimizer, applied.count),
        }
    )
    parts |= {
        each.replace(".", "/", 1): tensor.tolist()
        for each, tensor in own.items()
        if each.startswith(("fp8.", "loss_"))
    }
    return {"facts": facts, "state": parts, "incidents": asdict(guard.state.ledger)}


def session(folder: Path, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in RECIPES:
        ours = trainer(folder, name, ranks)
        theirs = ten_lines(folder, name, ranks, ours)
        ours = {key: ours[key] for key in ("facts", "state", "incidents")}
        differ = [key for key in ours["state"].keys() | theirs["state"].keys()
                  if repr(ours["state"].get(key)) != repr(theirs["state"].get(key))]  # fmt: skip
        pairs = zip(ours["facts"], theirs["facts"], strict=True)
        steps = [step for step, (mine, other) in enumerate(pairs) if mine != other]
        found[name] = {
            "state": sorted(differ),
            "steps": steps,
            "tensors": len(ours["state"]),
            "facts": ours["facts"],
        }
        found[name]["incidents"] = [ours["incidents"], theirs["incidents"]]
    return found


def check(found: dict[str, Any]) -> None:
    for name, each in found.items():
        assert (each["state"], each["steps"]) == ([], []), name
        assert each["tensors"] > 40
        scales = [float(figures.split(",")[3]) for figures, _ in each["facts"]]
        skipped = [step for step, (figures, _) in enumerate(each["facts"]) if "False" in figures]
        assert skipped == [NAN_LOSS, INF_GRADIENT, *STREAK], (
            "the faults fired, and nothing else was skipped"
        )
        ledger = each["incidents"]
        assert ledger[0] == ledger[1]
        assert ledger[0]["returned_to"] == [25], "both rolled back, to a snapshot"
        rates = [float(figures.split(",")[2]) for figures, _ in each["facts"]]
        assert rates[-1] < 0.6 * rates[SPIKE], "and went on at half the learning rate"
        demoted = [len(figures.split("(")[-1].split("'")) // 2 for figures, _ in each["facts"]]
        pairs = list(itertools.pairwise(demoted))
        assert any(a < b for a, b in pairs) == any(a > b for a, b in pairs) == ("switching" in name)
        if name == "fp16_scaler":
            assert scales[NAN_LOSS + 1] == scales[NAN_LOSS], (
                "a loss that alone is NaN is not the scale's fault"
            )
            assert scales[INF_GRADIENT + 1] == scales[INF_GRADIENT] / 2
            assert max(scales) > scales[0], "and it grows"


@pytest.mark.nightly
def test_one_rank(tmp_path: Path) -> None:
    check(session(tmp_path, 1))


@pytest.mark.nightly
def test_two_ranks(tmp_path: Path) -> None:
    settings(tmp_path, 2)
    first, second = run_ranks(__file__, tmp_path, 2)
    check(first)
    assert {name: each["facts"] for name, each in first.items()} == {
        name: each["facts"] for name, each in second.items()
    }


if __name__ == "__main__":
    target = Path(sys.argv[1])
    result = session(target, 2)
    (target / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(result))
