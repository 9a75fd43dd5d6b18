"""DeepSpeed at ZeRO 0, 1 and 2, one and two ranks: same training as plain torch, exact gate, exact restore.

Run as a script, this file is one rank and plays every scenario in one process, since DeepSpeed starts slowly.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.core.config import TrainConfig
from harness.core.errors import ConfigError
from harness.core.facts import Limits
from harness.core.protocols import Engine
from harness.engines.deepspeed import DeepSpeedEngine
from harness.optim.optimizers import build_optimizer
from tests.support.ranks import (
    CPU,
    SCHEDULE,
    bytes_of_the_guide,
    make_engine,
    own_collectives,
    run_ranks,
    train,
)

SCENARIOS = [
    (0, "adamw", "fp32"),
    (1, "adamw", "fp32"),
    (2, "adamw", "fp32"),
    (1, "sgd", "fp32"),
    (1, "adamw", "bf16"),
]
IDS = [f"zero{stage}-{optimizer}-{precision}" for stage, optimizer, precision in SCENARIOS]

# DeepSpeed compiles its collectives when it first needs them, and its ranks spin while they wait for each other.
pytestmark = [pytest.mark.dist, pytest.mark.slow]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(6, 17)
        self.two = nn.Linear(17, 17, bias=False)
        self.three = nn.Linear(17, 17, bias=False)
        self.three.weight = self.two.weight
        self.out = nn.Linear(17, 3)
        self.register_buffer("scale", torch.full((1,), 1.5))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.three(torch.tanh(self.two(torch.tanh(self.one(inputs)))))
        return (self.out(hidden).float() * self.scale - targets).square().mean()


def make(stage: int | None, optimizer: str, precision: str, decay: float = 0.1) -> Engine:
    """A fresh engine: DeepSpeed's at a ZeRO stage, or plain torch's for None."""
    dtype = torch.bfloat16 if precision == "bf16" else None
    return make_engine(Net(), stage, dtype, optimizer=optimizer, weight_decay=decay)


Saved = dict[str, tuple[dict[str, Tensor], dict[str, Any]]]


def save(engine: Engine) -> Saved:
    saved: Saved = {}
    for name, part in engine.parts().items():
        tensors, meta = part.state_dict()
        saved[name] = (
            {key: tensor.clone() for key, tensor in tensors.items()},
            json.loads(json.dumps(meta)),
        )
    return saved


def load(engine: Engine, saved: Saved) -> Engine:
    for name, part in engine.parts().items():
        part.load_state_dict(*saved[name])
    return engine


def equal(a: Saved, b: Saved) -> bool:
    return all(
        a[part][0].keys() == b[part][0].keys()
        and all(torch.equal(a[part][0][k], b[part][0][k]) for k in a[part][0])
        for part in a
    )


def listed(saved: Saved) -> dict[str, list[float]]:
    return {
        f"{part}/{key}": tensor.flatten().tolist()
        for part in saved
        for key, tensor in saved[part][0].items()
    }


def scenario(stage: int, optimizer: str, precision: str) -> dict[str, Any]:
    engine = make(stage, optimizer, precision)
    result: dict[str, Any] = {"steps": [train(engine, step) for step in range(3)]}
    middle = save(engine)
    result["faults"] = [
        train(engine, 3, poison=math.nan),
        train(engine, 3, poison=math.inf),
        train(engine, 3, flag=1.0),
    ]
    result["untouched"] = equal(middle, save(engine))
    with torch.no_grad():
        result["validation"] = math.isfinite(
            engine.module(torch.ones(2, 6), torch.ones(2, 3)).item()
        )
    result["steps"] += [train(engine, step) for step in range(3, 6)]
    end = save(engine)
    result["moved"] = not equal(middle, end)
    fresh = load(make(stage, optimizer, precision), middle)
    result["restored"] = equal(middle, save(fresh))
    result["continued"] = [train(fresh, step) for step in range(3, 6)] == result["steps"][
        3:
    ] and equal(end, save(fresh))
    load(engine, middle)
    result["rolled back"] = [train(engine, step) for step in range(3, 6)] == result["steps"][
        3:
    ] and equal(end, save(engine))
    result["final"] = listed(end)
    plain = load(make(None, optimizer, precision), middle)
    result["plain took it"] = equal(middle, save(plain))
    train(plain, 3)
    taken = save(plain)
    result["took plain's"] = equal(taken, save(load(make(stage, optimizer, precision), taken)))
    return result


def limited(stage: int, precision: str = "fp32") -> dict[str, Any]:
    """A spike on one rank under a limit, then a step that is clipped harder than usual, and one that is not."""
    engine = make(stage, "sgd", precision)
    usual = train(engine, 0)["norm"]
    before = save(engine)
    result: dict[str, Any] = {"usual": usual}
    result["spike"] = train(engine, 1, poison=1000.0, limits=Limits(norm=20 * usual))
    result["untouched"] = equal(before, save(engine))
    for name, clip in (("clipped", 0.03), ("unclipped", math.inf)):
        engine = make(stage, "sgd", precision, decay=0.0)
        start = save(engine)["model"][0]
        result[f"{name} step"] = train(engine, 0, limits=Limits(clip=clip))
        end = save(engine)["model"][0]
        result[name] = torch.cat([(end[key] - start[key]).flatten() for key in start]).norm().item()
    return result


def uneven_counters() -> str:
    """What ZeRO says to a checkpoint whose parameters have taken different numbers of steps."""
    engine = make(1, "adamw", "fp32")
    saved = save(engine)
    saved["optimizer"][0]["one.weight.step"] += 1
    try:
        load(engine, saved)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def bytes_held() -> list[float]:
    """Bytes of weights, gradients and moments on this rank at ZeRO 1, for each parameter of the whole model."""
    model = nn.Linear(64, 64)
    parameters = sum(param.numel() for param in model.parameters())
    engine: Any = make_engine(model, 1, optimizer="adamw")
    with engine.micro_batch(False):
        engine.backward(engine.module(torch.randn(2, 64)).square().mean())
    zero = engine._engine.optimizer
    weights = [*model.parameters(), *zero.single_partition_of_fp32_groups]
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    moments: list[Tensor] = []
    for state in zero.optimizer.state.values():
        moments += [value for value in state.values() if value.ndim > 0]
    return [
        sum(each.nbytes for each in some) / parameters for some in (weights, gradients, moments)
    ]


def rank_main(folder: Path) -> None:
    results: dict[str, Any] = {
        name: scenario(*case) for name, case in zip(IDS, SCENARIOS, strict=True)
    }
    results["uneven"] = uneven_counters()
    results["limited"] = [limited(stage) for stage in (0, 1, 2)]
    results["collectives"] = [own_collectives(make(stage, "adamw", "fp32")) for stage in (0, 1, 2)]
    results["bytes"] = bytes_held()
    engine = make(2, "adamw", "fp32")
    results["broadcast"] = engine.broadcast({"from": engine.rank})
    rank = engine.rank
    engine.close()
    engine.close()
    (folder / f"{rank}.json").write_text(json.dumps(results))


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="1rank", marks=pytest.mark.nightly), pytest.param(2, id="2ranks")],
)
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Mapping[str, Any]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("deepspeed"), request.param)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_limits_on_the_gradient_norm(ranks: list[Mapping[str, Any]], stage: int) -> None:
    for result in (rank["limited"][stage] for rank in ranks):
        assert result["spike"]["norm"] > 20 * result["usual"], (
            "the fault fired, and its norm is reported"
        )
        assert result["spike"]["skipped"] == 1.0
        assert result["untouched"]
        assert result["unclipped step"]["norm"] > 0.3, "over the engine's own limit"
        assert result["clipped"] == pytest.approx(0.1 * result["unclipped"], rel=1e-3)
        assert [result[f"{name} step"]["skipped"] for name in ("clipped", "unclipped")] == [
            0.0,
            0.0,
        ]


@pytest.mark.parametrize("name", IDS)
def test_a_fault_on_one_rank_is_skipped_on_all_and_changes_nothing(
    ranks: list[Mapping[str, Any]], name: str
) -> None:
    for result in (rank[name] for rank in ranks):
        assert [fault["skipped"] for fault in result["faults"]] == [1.0, 1.0, 1.0]
        slowest = len(ranks) - 1.0
        told = [[bad, 0.0, slowest, math.inf] for bad in (0.0, 0.0, 1.0)]
        assert [fault["agreed"] for fault in result["faults"]] == told
        assert [fault["applied"] for fault in result["faults"]] == [3.0, 3.0, 3.0]
        assert not any(math.isfinite(fault["norm"]) for fault in result["faults"][:2])
        assert result["untouched"]
        assert [step["skipped"] for step in result["steps"]] == [0.0] * 6
        assert [step["agreed"] for step in result["steps"]] == [[0.0, 0.0, slowest, math.inf]] * 6


@pytest.mark.parametrize("name", IDS)
def test_a_checkpoint_continues_bit_identically(ranks: list[Mapping[str, Any]], name: str) -> None:
    for result in (rank[name] for rank in ranks):
        assert result["moved"]
        assert result["restored"]
        assert result["continued"]
        assert result["rolled back"]
        assert result["validation"]


@pytest.mark.parametrize("name", IDS)
def test_checkpoints_travel_between_the_engines(ranks: list[Mapping[str, Any]], name: str) -> None:
    for result in (rank[name] for rank in ranks):
        assert result["plain took it"]
        assert result["took plain's"]


@pytest.mark.parametrize(
    ("case", "name"),
    [(case, name) for case, name in zip(SCENARIOS, IDS, strict=True) if "fp32" in case],
)
def test_training_is_that_of_plain_torch(
    ranks: list[Mapping[str, Any]], case: tuple[int, str, str], name: str
) -> None:
    alone = make(None, case[1], case[2])
    for step, theirs in enumerate(ranks[0][name]["steps"]):
        mine = train(alone, step)
        assert theirs["norm"] == pytest.approx(mine["norm"], rel=1e-5)
        assert (theirs["lr"], theirs["applied"]) == (mine["lr"], mine["applied"])
        assert mine["norm"] > 0.3
    for key, values in listed(save(alone)).items():
        assert ranks[0][name]["final"][key] == pytest.approx(values, rel=1e-5, abs=1e-5), key


def test_ranks_hold_the_same_bits(ranks: list[Mapping[str, Any]]) -> None:
    for name in IDS:
        assert all(rank[name]["final"] == ranks[0][name]["final"] for rank in ranks)
    assert all(rank["broadcast"] == {"from": 0} for rank in ranks)


def test_a_step_has_one_max_of_ours(ranks: list[Mapping[str, Any]]) -> None:
    # A model with buffers costs one broadcast more in each micro-batch.
    expected = {} if len(ranks) == 1 else {"all_reduce": 1, "broadcast": 2}
    for rank in ranks:
        assert rank["collectives"] == [expected] * 3


def test_bytes_of_a_parameter_are_those_of_the_guide(ranks: list[Mapping[str, Any]]) -> None:
    for rank in ranks:
        assert rank["bytes"] == bytes_of_the_guide("`deepspeed`, ZeRO 1", len(ranks))


def test_uneven_step_counters_are_refused(ranks: list[Mapping[str, Any]]) -> None:
    for rank in ranks:
        assert rank["uneven"].startswith("CheckpointError")
        assert "torchrun" in rank["uneven"]


def test_without_a_launcher_or_with_fp16_on_the_cpu_it_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    model = Net()
    optimizer = build_optimizer(model, TrainConfig.model_validate({}), CPU)
    for dtype, words in (
        (None, "not started by a launcher"),
        (torch.float16, "no fp16 on the CPU"),
    ):
        with pytest.raises(ConfigError, match=words):
            DeepSpeedEngine(
                model,
                optimizer,
                SCHEDULE,
                1.0,
                zero_stage=1,
                micro_batch=1,
                accumulation=1,
                autocast_dtype=dtype,
                device=CPU,
            )


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
