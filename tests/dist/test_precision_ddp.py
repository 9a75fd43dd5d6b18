"""harness.Precision on two DDP ranks: one verdict, one amax, one reduction, the same bits.

Run as a script, this file is one rank.
"""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness import Guard, Precision
from harness.capability.probe import Device, MachineFacts
from harness.core.errors import HaltedError, MachineError, MisuseError
from harness.precision.plan import agree_on_rung
from harness.precision.recipe import Recipe, load_recipe
from tests.support.ranks import run_ranks

ROWS = 16

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def policy(name: str) -> Recipe:
    """Converts small layers; weights are over their limit at once, so that the fallback acts on all ranks."""
    base = load_recipe(name).model_dump()
    base["layers"]["min_features"] = 16
    base["fp8"]["stats_every"] = 4
    base["fallback"].update(saturation_weight=1e-6, hits=1, window=2, warmup_steps=2)
    return Recipe.model_validate(base)


def data(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, dims=1)


def session(
    rank: int, ranks: int, name: str, exchange_once: bool = False, standard: bool = False
) -> dict[str, Any]:
    """Five windows of two micro-batches; in the third the last rank's loss is NaN, its gradients are not.

    exchange_once: ranks exchange gradients in the last micro-batch only, under DDP's no_sync. standard: by torch's
    standard loop.
    """
    torch.manual_seed(0)
    precision = Precision(policy(name))
    model = precision.prepare(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    wrapped = DistributedDataParallel(model) if ranks > 1 else None
    ours = precision.wrap(optimizer, max_grad_norm=0.05) if standard else None
    result: dict[str, Any] = {
        "applied": [],
        "switched": [],
        "reductions": [],
        "history": [],
        "norms": [],
    }
    for step in range(5):
        x, y = data(step)
        for index, (inputs, targets) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            here = slice(rank, None, ranks)
            with (
                wrapped.no_sync()
                if wrapped is not None and exchange_once and index == 0
                else nullcontext()
            ):
                with nullcontext() if standard else precision.context():
                    outputs = (model if wrapped is None else wrapped)(inputs[here])
                    loss = nn.functional.mse_loss(outputs.float(), targets[here]) / 2
                loss = loss + math.nan if step == 2 and rank == ranks - 1 else loss
                if standard:
                    loss.backward()
                else:
                    precision.backward(loss)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            if ours is not None:
                ours.step()
            outcome = (
                precision.step(optimizer, max_grad_norm=0.05) if ours is None else ours.outcome
            )
        assert outcome is not None
        optimizer.zero_grad()
        result["reductions"].append(
            sum(event.count for event in seen.key_averages() if event.key == "c10d::allreduce_")
        )
        result["applied"].append(outcome.was_applied)
        result["norms"].append(outcome.grad_norm.item())
        result["switched"].append(outcome.switch is not None)
        result["history"].append(
            precision.state_dict()["tensors"].get("fp8.history", torch.zeros(0)).tolist()
        )
    result["weights"] = [parameter.tolist() for parameter in model.parameters()]
    result["demoted"] = precision.demoted
    return result


def unequal_machines(rank: int) -> dict[str, Any]:
    """What ranks agree on when the first has a Hopper card and the others have none."""
    hopper = MachineFacts(cuda_available=True, devices=(Device("H100", (9, 0), 80 << 30),))
    facts = hopper if rank == 0 else MachineFacts()
    recipe = load_recipe("auto")
    rung, verdicts = agree_on_rung(recipe, facts, torch.device("cpu"))
    only_hopper = recipe.model_copy(update={"ladder": recipe.ladder[:2]})
    try:
        agree_on_rung(only_hopper, facts, torch.device("cpu"))
        error = ""
    except MachineError as refused:
        error = str(refused)
    return {
        "rung": rung.name,
        "verdicts": [(v.rung, v.taken, v.reason) for v in verdicts],
        "error": error,
    }


def late(name: str) -> Precision:
    """Prepared before ranks meet."""
    torch.manual_seed(0)
    precision = Precision(policy(name))
    precision.prepare(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)))
    return precision


def met(precision: Precision) -> str:
    """What the first window of a model says that was prepared before ranks met."""
    model = DistributedDataParallel(precision.prepared.model)
    x, y = data(0)
    with precision.context():
        loss = nn.functional.mse_loss(model(x).float(), y)
    try:
        precision.backward(loss)
    except MisuseError as refused:
        return str(refused)
    precision.step(torch.optim.AdamW(model.parameters(), fused=True))
    return ""


def unlike(rank: int, what: str) -> str:
    """What the first backward says if rank 0 alone has something that every rank must have."""
    seed = 1 if what == "seed" and rank == 0 else 0
    precision = Precision(policy("fp8_hybrid"), seed)
    model = precision.prepare(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, y = data(0)
    try:
        if what == "state":
            earlier = late("fp8_hybrid")
            optimizer_of_it = torch.optim.SGD(earlier.prepared.model.parameters())
            for _ in range(3):
                with earlier.context():
                    loss = nn.functional.mse_loss(earlier.prepared.model(x).float(), y)
                earlier.backward(loss)
                earlier.step(optimizer_of_it)
                optimizer_of_it.zero_grad()
            if rank == 0:
                precision.load_state_dict(earlier.state_dict())
        if what.startswith("guard") and rank == 0:
            without = what == "guard without snapshots"
            settings: dict[str, Any] = {"snapshot_every": 0} if without else {}
            Guard.for_precision(precision, optimizer, **settings)
        with precision.context():
            loss = nn.functional.mse_loss(model(x).float(), y)
        precision.backward(loss)
    except MisuseError as refused:
        return str(refused)
    return ""


def without_ddp(rank: int) -> str:
    """How a guard ends a loop whose ranks exchange no gradients."""
    precision = late("fp32")
    model = precision.prepared.model
    optimizer = torch.optim.SGD(model.parameters())
    guard = Guard.for_precision(precision, optimizer, compare_ranks_every=1, snapshot_every=0)
    x, y = data(0)
    try:
        for _ in range(3):
            with precision.context():
                loss = nn.functional.mse_loss(model(x[rank::2]).float(), y[rank::2])
            precision.backward(loss)
            precision.step(optimizer)
            optimizer.zero_grad()
            guard.end_step()
    except HaltedError as halted:
        return str(halted)
    return ""


UNLIKE = {
    "seed": "different seeds (rank 0: 1, rank 1: 0)",
    "state": "different numbers of steps done (rank 0: 3, rank 1: 0)",
    "guard without snapshots": "different guards (rank 0: on, rank 1: none)",
}


def rank_main(folder: Path) -> None:
    alike = late("fp8_hybrid")
    unlike_plan = late("fp8_hybrid" if os.environ["RANK"] == "0" else "fp32")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results: dict[str, Any] = {
        name: session(rank, dist.get_world_size(), name) for name in ("fp8_hybrid", "fp32")
    }
    for standard in (False, True):
        results["standard exchange once" if standard else "exchange once"] = session(
            rank, dist.get_world_size(), "fp8_hybrid", exchange_once=True, standard=standard
        )
    for name in ("fp8_hybrid", "fp16_scaler"):
        results[f"standard {name}"] = session(rank, dist.get_world_size(), name, standard=True)
    results["fp16_scaler"] = session(rank, dist.get_world_size(), "fp16_scaler")
    results["machines"] = unequal_machines(rank)
    results["met"] = [met(alike), met(unlike_plan)]
    results["unlike"] = {what: unlike(rank, what) for what in UNLIKE}
    results["without DDP"] = without_ddp(rank)
    # The last: rank 0 waits for the others in Guard.for_precision, until they are gone.
    try:
        results["guard"] = unlike(rank, "guard")
    except RuntimeError as lost:
        results["guard"] = str(lost)
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("precision"), 2)


def test_ranks_agree_in_one_reduction(two_ranks: list[dict[str, Any]]) -> None:
    first, second = two_ranks
    for name in ("fp8_hybrid", "fp32"):
        assert first[name] == second[name]
        assert first[name]["applied"] == [True, True, False, True, True]
        assert first[name]["reductions"] == [1] * 5
    fp8 = first["fp8_hybrid"]
    assert len(fp8["demoted"]) == 1
    assert fp8["switched"] == [False, False, False, False, True]
    assert fp8["history"][2] == fp8["history"][1] != fp8["history"][3]


@pytest.mark.parametrize("name", ["fp8_hybrid", "fp16_scaler"])
def test_the_standard_loop_is_the_explicit_one(two_ranks: list[dict[str, Any]], name: str) -> None:
    for result in two_ranks:
        assert result[f"standard {name}"] == result[name]
        assert result[name]["applied"].count(True) > 1


def test_gradients_may_be_exchanged_in_the_last_micro_batch_alone(
    two_ranks: list[dict[str, Any]],
) -> None:
    first, second = (result["exchange once"] for result in two_ranks)
    assert first == second
    assert all(result["standard exchange once"] == first for result in two_ranks)
    every_time = two_ranks[0]["fp8_hybrid"]
    assert first["history"][0] == every_time["history"][0], (
        "what is cast in the first window is the same"
    )
    assert first["norms"] == pytest.approx(every_time["norms"], rel=1e-2)
    assert first["reductions"] == [1] * 5


def test_the_weakest_rank_decides(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        machines = result["machines"]
        assert machines["rung"] == "autocast:bf16"
        assert [taken for _, taken, _ in machines["verdicts"]] == [False, False, True, False]
        assert "no rung of recipe auto runs on" in machines["error"]
    assert two_ranks[0]["machines"]["verdicts"][1] == [
        "native:fp8",
        False,
        "another rank cannot take it",
    ]


def test_ranks_that_meet_late_have_one_plan(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        alike, unlike = result["met"]
        assert alike == ""
        assert "rank 0: native:fp8, 2 FP8 layers, rank 1: autocast:fp32, 0 FP8 layers" in unlike
        assert "init_process_group()" in unlike


@pytest.mark.parametrize("what", UNLIKE)
def test_what_only_some_ranks_have_is_refused_by_all(
    two_ranks: list[dict[str, Any]], what: str
) -> None:
    assert all(UNLIKE[what] in result["unlike"][what] for result in two_ranks)


def test_a_guard_that_waits_for_the_other_ranks_is_named_by_them(
    two_ranks: list[dict[str, Any]],
) -> None:
    waiting, other = (result["guard"] for result in two_ranks)
    assert "rank 0 exchanged something else" in other
    assert "Guard.for_precision on every rank" in other
    assert waiting, "it does not wait for ever"


def test_a_loop_that_forgot_ddp_is_halted_with_the_way_out(
    two_ranks: list[dict[str, Any]],
) -> None:
    for result in two_ranks:
        assert "not the same on all ranks" in result["without DDP"]
        assert "through DistributedDataParallel" in result["without DDP"]


def test_two_ranks_train_as_one(
    two_ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = torch.get_float32_matmul_precision()
    alone = {name: session(0, 1, name) for name in ("fp8_hybrid", "fp32")}
    torch.set_float32_matmul_precision(before)
    first_amax = torch.tensor(alone["fp8_hybrid"]["history"][0])[-1]
    together = torch.tensor(two_ranks[0]["fp8_hybrid"]["history"][0])[-1]
    # A rank's own mean is over half the samples: its gradients, alone among the tensors, are twice as large.
    factors = torch.tensor([1.0, 1.0, 2.0] * 2)
    torch.testing.assert_close(together, first_amax * factors, rtol=0, atol=0)
    assert two_ranks[0]["fp32"]["norms"] == pytest.approx(alone["fp32"]["norms"], rel=1e-4)
    for mine, theirs in zip(alone["fp32"]["weights"], two_ranks[0]["fp32"]["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
