"""Two DDP ranks over gloo: the same training as one process, one verdict for all ranks, agreeing collectives.

Run as a script, this file is one rank.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any
from weakref import finalize

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from harness.core.config import TrainConfig
from harness.engines.process_group import join, read_launch
from harness.engines.torch_engine import TorchEngine
from harness.estimate.ranks import buckets
from harness.optim.optimizers import build_optimizer
from harness.optim.schedule import Schedule
from tests.support.ranks import group_threads, own_collectives, run_ranks, train

CPU = torch.device("cpu")

pytestmark = pytest.mark.dist


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.layers(inputs) - targets).square().mean()


def make(seed: int) -> TorchEngine:
    torch.manual_seed(seed)
    model = Net()
    optimizer = build_optimizer(model, TrainConfig.model_validate({}), CPU)
    return TorchEngine(
        model, optimizer, Schedule(0.02, 2, 20, 0.1), 0.3, device=CPU, timeout_seconds=60
    )


def weights(engine: TorchEngine) -> dict[str, Tensor]:
    return {
        f"{part}/{name}": tensor.clone()
        for part, state in engine.parts().items()
        for name, tensor in state.state_dict()[0].items()
    }


def session(engine: TorchEngine) -> dict[str, Any]:
    """Three steps, three faults, three more steps."""
    steps = [train(engine, step) for step in range(3)]
    before = weights(engine)
    faults = [
        train(engine, 3, poison=math.nan),
        train(engine, 3, poison=math.inf),
        train(engine, 3, flag=1.0),
    ]
    after = weights(engine)
    untouched = all(torch.equal(before[name], after[name]) for name in before)
    steps += [train(engine, step) for step in range(3, 6)]
    final = {name: tensor.flatten().tolist() for name, tensor in weights(engine).items()}
    return {
        "name": engine.name,
        "steps": steps,
        "faults": faults,
        "untouched": untouched,
        "final": final,
    }


def bytes_exchanged() -> list[list[int]]:
    """Bytes of each all-reduce of DDP in a step after the first, and what the estimate says of them."""
    engine = make(seed=0)
    sizes: list[int] = []
    group: Any = dist.group.WORLD
    hook: Any = lambda _, bucket: (  # noqa: E731
        sizes.append(bucket.buffer().nbytes),
        allreduce_hook(group, bucket),
    )[1]
    engine.module.register_comm_hook(None, hook)  # type: ignore[operator]
    train(engine, 0)
    sizes.clear()
    train(engine, 1)
    return [sizes, buckets(Net())]


def rank_main(folder: Path) -> None:
    join(read_launch(), CPU, timeout_seconds=60)  # before there is a model, as a run does
    engine = make(
        seed=int(os.environ["RANK"])
    )  # different weights: DDP must start all ranks from rank 0's
    result = session(engine)
    result["mean"] = engine.mean(torch.tensor([1.0, 4.0 * engine.rank])).tolist()
    result["max"] = engine.max(torch.tensor([-1.0, float(engine.rank)])).tolist()
    result["broadcast"] = engine.broadcast({"from": engine.rank, "text": "grüße"})
    engine.barrier()
    result["exchanged"] = bytes_exchanged()
    result["collectives"] = own_collectives(engine)
    result["in a group when the wrapper goes"] = []
    finalize(
        engine.module,
        lambda: result["in a group when the wrapper goes"].append(dist.is_initialized()),
    )
    result["threads in the group"] = group_threads()
    engine.close()
    engine.close()
    result["threads after it"] = group_threads()
    (folder / f"{engine.rank}.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("ddp"), 2)


def test_two_ranks_train_as_one(two_ranks: list[dict[str, Any]]) -> None:
    alone = session(make(seed=0))
    assert (alone["name"], two_ranks[0]["name"]) == ("single", "ddp")
    for mine, theirs in zip(alone["steps"], two_ranks[0]["steps"], strict=True):
        assert theirs["norm"] == pytest.approx(mine["norm"], rel=1e-5)
        assert (theirs["lr"], theirs["applied"]) == (mine["lr"], mine["applied"])
    assert max(step["norm"] for step in alone["steps"]) > 0.3
    for name, values in alone["final"].items():
        assert two_ranks[0]["final"][name] == pytest.approx(values, rel=1e-5, abs=1e-5), name


def test_ranks_hold_the_same_bits(two_ranks: list[dict[str, Any]]) -> None:
    assert two_ranks[0]["final"] == two_ranks[1]["final"]
    assert two_ranks[0]["steps"] == two_ranks[1]["steps"]


def test_a_fault_on_one_rank_is_skipped_on_all(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert [fault["skipped"] for fault in result["faults"]] == [1.0, 1.0, 1.0]
        assert [math.isfinite(fault["norm"]) for fault in result["faults"]] == [False, False, True]
        assert [fault["applied"] for fault in result["faults"]] == [3.0, 3.0, 3.0]
        assert result["untouched"]
        assert [step["skipped"] for step in result["steps"]] == [0.0] * 6


def test_ranks_agree_on_the_worst_and_the_fastest(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert all(step["agreed"] == [0.0, 0.0, 1.0, math.inf] for step in result["steps"])
        assert [fault["agreed"] for fault in result["faults"]] == [
            [bad, 0.0, 1.0, math.inf] for bad in (0.0, 0.0, 1.0)
        ]


def test_the_wrapper_goes_before_the_group(two_ranks: list[dict[str, Any]]) -> None:
    assert [result["in a group when the wrapper goes"] for result in two_ranks] == [[True], [True]]


def test_nothing_holds_the_group_after_the_end(two_ranks: list[dict[str, Any]]) -> None:
    """Else its threads meet the interpreter's finalisation: the rank hangs or aborts after all its work is done."""
    for result in two_ranks:
        assert result["threads in the group"]
        assert not result["threads after it"]


def test_a_step_has_one_max_of_ours(two_ranks: list[dict[str, Any]]) -> None:
    """Norms need no sum: DDP's gradients are the same on every rank."""
    for result in two_ranks:
        assert result["collectives"] == {"all_reduce": 1}


def test_ddp_exchanges_what_the_estimate_says(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        real, estimated = result["exchanged"]
        assert real == estimated


def test_small_collectives(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert result["mean"] == [1.0, 2.0]
        assert result["max"] == [-1.0, 1.0]
        assert result["broadcast"] == {"from": 0, "text": "grüße"}


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
