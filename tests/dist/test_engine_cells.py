"""Every cell of docs/reference/engines.md that works on a CPU, as a run: the losses of DDP on that rung.

`single` has one rank, the others two.

Run as a script, this file is one rank of one kind of engine; it plays all rungs in one process.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

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
from harness.precision.recipe import Recipe, Rung
from harness.run import train
from harness.tools.engine_page import Variant, rungs, variants, works
from harness.tracking.console import Console
from harness.tracking.history import read_rows
from tests.support.ranks import run_ranks

STEPS = 3
# DeepSpeed and an exchange in every micro-batch add and round in another order.
RELATIVE = 2e-2
# Each group is played in one go. DeepSpeed compiles its kernel first, and its ranks spin while they wait.
GROUPS = {"single": ("single",), "torch": ("ddp", "fsdp"), "deepspeed": ("deepspeed",)}

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def cells(group: str) -> list[tuple[Variant, Rung]]:
    """What the declarations let run on a CPU."""
    found: list[tuple[Variant, Rung]] = []
    for variant in variants():
        if variant.engine in GROUPS[group]:
            found += [(variant, rung) for rung in rungs("cpu") if works(variant, rung, "cpu")]
    return found


def name_of(variant: Variant, rung: Rung) -> str:
    return f"{rung.name}, {variant.name}"


def ran(folder: Path, variant: Variant, rung: Rung) -> dict[str, Any]:
    """The losses of a short run, its norms, and the rung that it took."""
    text = folder / f"text-{os.getpid()}.txt"
    text.write_bytes(bytes(range(97, 123)) * 400)
    config = RunConfig.model_validate(
        {
            "train": {
                "steps": STEPS,
                "global_batch": 8,
                "micro_batch": 2,
                "eval_every": 0,
                "warmup_steps": 1,
            },
            "data": {"path": str(text), "context": 16, "val_samples": 2},
            "model": {
                "target": "harness.models.gpt:build",
                "args": {"dim": 32, "layers": 2, "heads": 2, "ffn": 64, "loss_chunk": 10},
            },
            "engine": {"name": variant.engine, "timeout_seconds": 60, **variant.settings},
            "checkpoint": {"every": 0},
            "tracking": {"mlflow": False},
        }
    )
    recipe = Recipe.model_validate(
        {
            "name": "cell",
            "ladder": [rung.model_dump()],
            "layers": {"min_features": 16},
            "loss_scale": {"init": 1024.0},
        }
    )
    # Every rank has a folder of its own for what it writes.
    run_dir = folder / f"{rung.name}-{variant.name}".replace(":", "-")
    run_dir.mkdir(exist_ok=True)
    worker = join_worker(config, "torchrun")
    plan, model = build_plan(config, recipe, worker)
    data = build_data(config, run_dir, worker)
    store = open_store(run_dir, worker)
    ledger = read_ledger(run_dir, worker, store)
    with open_telemetry(config, run_dir, worker, Console(STEPS, stream=io.StringIO())) as telemetry:
        run = build_run(
            config, recipe, run_dir, worker, plan, model, data, telemetry, ledger, store
        )
        trained: list[Any] = []
        observe = run.guard.observe
        run.guard.observe = lambda facts: (trained.append(list(facts.trained)), observe(facts))[1]  # type: ignore[method-assign]
        status = train(run).status
        run.stop.uninstall()
    figures: dict[str, list[float]] = {"train/loss": [], "train/grad_norm": []}
    if worker.is_lead:
        for row in read_rows(run_dir / "journal.jsonl"):
            for name, found in figures.items():
                if row["kind"] == "metrics" and name in row["metrics"]:
                    found.append(row["metrics"][name])
    ran_as = {"status": status, "rung": plan.resolved, "engine": run.engine.name}
    return {**ran_as, "trained": trained[0], **figures}


def rank_main(folder: Path) -> None:
    group = (folder / "group").read_text()
    found = {name_of(*each): ran(folder, *each) for each in cells(group)}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def played(group: str, folder: Path) -> dict[str, Any]:
    """What rank 0 saw of every run of the group."""
    (folder / "group").write_text(group)
    return run_ranks(__file__, folder, 1 if group == "single" else 2)[0]


@pytest.fixture(scope="module")
def single_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return played("single", tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def torch_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return played("torch", tmp_path_factory.mktemp("torch"))


@pytest.fixture(scope="module")
def deepspeed_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return played("deepspeed", tmp_path_factory.mktemp("deepspeed"))


CASES = [
    *(pytest.param("single", *each, id=name_of(*each)) for each in cells("single")),
    *(pytest.param("torch", *each, id=name_of(*each)) for each in cells("torch")),
    *(pytest.param("deepspeed", *each, id=name_of(*each)) for each in cells("deepspeed")),
]


@pytest.mark.parametrize(("group", "variant", "rung"), CASES)
def test_a_cell_that_works_trains_as_ddp_does(
    request: pytest.FixtureRequest,
    torch_runs: dict[str, Any],
    group: str,
    variant: Variant,
    rung: Rung,
) -> None:
    found = request.getfixturevalue(f"{group}_runs")[name_of(variant, rung)]
    ddp = torch_runs[name_of(Variant("ddp"), rung)]
    assert (found["status"], found["rung"], found["engine"]) == ("done", rung.name, variant.engine)
    assert len(found["train/loss"]) == STEPS
    assert all(math.isfinite(value) for value in found["train/grad_norm"])
    assert found["train/loss"][-1] < found["train/loss"][0], "it learns"
    for name in ("train/loss", "train/grad_norm"):
        assert found[name] == pytest.approx(ddp[name], rel=RELATIVE)
    # The FP8 layers whose weights got a gradient in the first step; a layer without one is reported.
    assert found["trained"] == ddp["trained"]
    assert bool(found["trained"]) is (rung.precision == "fp8")
    bits = variant.settings.get("gradient_sync") == "window"
    if bits:
        assert found == {**ddp, "engine": "fsdp"}


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
