"""FSDP2 on two ranks over gloo: the bits of DDP, in each rank's own rows.

Run as a script, this file is one rank.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness import Precision
from harness.core.config import TrainConfig
from harness.core.errors import ConfigError, MisuseError
from harness.core.shards import Rows
from harness.engines.process_group import join, read_launch
from harness.engines.torch_engine import TorchEngine
from harness.optim.optimizers import build_optimizer
from harness.precision.loss_scale import LossScale
from harness.precision.recipe import LossScaleConfig
from tests.support.ranks import (
    SCHEDULE,
    backward_of_a_step,
    bytes_of_the_guide,
    make_fsdp,
    own_collectives,
    run_ranks,
    train,
)
from tests.support.updates import finish

CPU = torch.device("cpu")

pytestmark = pytest.mark.dist


class Block(nn.Module):
    """Rows that two ranks cannot share evenly, and a parameter of one row: the second rank holds none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 33, bias=False)
        self.back = nn.Linear(33, 32)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(torch.tanh(self.linear(x)) * self.gain)


class Net(nn.Module):
    """Blocks, tied parameters, a 0-d one, a frozen one, and BatchNorm, whose buffers forward writes.

    A rank's pieces fill vector registers: fused AdamW on a CPU rounds the rest of a tensor otherwise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.inward = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.outward = nn.Linear(32, 32)
        self.outward.weight = self.inward.weight
        second, third = self.blocks[1], self.blocks[2]
        assert isinstance(second, Block)
        assert isinstance(third, Block)
        third.back.weight = second.back.weight
        self.head = nn.Linear(32, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(self.inward(self.first(inputs)))
        for block in self.blocks:
            x = block(x)
        out = self.head(self.outward(x)) * self.scale + self.frozen[:3]
        return (out - targets).square().mean()


class Parted(nn.Module):
    """Each rank uses another of two Linears: of two blocks, or of one block that holds both."""

    def __init__(self, in_one_block: bool) -> None:
        super().__init__()
        both = [nn.Linear(6, 6), nn.Linear(6, 6)]
        self.blocks = nn.ModuleList([Either(*both)] if in_one_block else both)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        chosen = self.blocks[0] if len(self.blocks) == 1 else self.blocks[dist.get_rank()]
        return (self.head(chosen(inputs)) - targets).square().mean()


class Ways(nn.Module):
    """Two blocks of the same sizes, of which a rank may call the second one first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 3)
        self.turned = False

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        first, second = reversed(self.blocks) if self.turned else self.blocks
        return (self.head(second(torch.tanh(first(inputs)))) - targets).square().mean()


class Either(nn.Module):
    def __init__(self, first: nn.Linear, second: nn.Linear) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if dist.get_rank() == 0 else self.second(x)


def with_unused() -> Net:
    """A net with parameters that no rank uses: in a block, and outside of any."""
    model = net()
    model.blocks[0].idle = nn.Linear(4, 4)
    model.spare = nn.Linear(3, 3)
    return model


def make_ddp(model: nn.Module, **settings: Any) -> TorchEngine:
    optimizer = build_optimizer(model, TrainConfig.model_validate({}), CPU)
    return TorchEngine(model, optimizer, SCHEDULE, 0.3, device=CPU, timeout_seconds=60, **settings)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def state(engine: Any) -> dict[str, Tensor]:
    """The whole state, whoever holds it: rows are gathered from all ranks. Collective."""
    whole: dict[str, Tensor] = {}
    for part, each in engine.parts().items():
        rows: dict[str, Rows] = each.rows()
        for name, tensor in each.state_dict()[0].items():
            found = tensor.detach().clone()
            if name in rows:
                pieces: list[Any] = [None] * engine.world_size
                dist.all_gather_object(pieces, found)
                found = torch.cat(pieces)
                assert tuple(found.shape) == rows[name].shape
            whole[f"{part}/{name}"] = found
    return whole


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def beside_ddp(**settings: Any) -> dict[str, Any]:
    """The same steps under both engines, faults among them; what differs."""
    scales: list[LossScale | None] = [None, None]
    if settings.pop("fp16", False):
        config = LossScaleConfig(init=1024.0, growth_interval=2)
        scales = [LossScale(config, CPU), LossScale(config, CPU)]
    engines = [
        make_ddp(net(), loss_scale=scales[0]),
        make_fsdp(net(), loss_scale=scales[1], **settings),
    ]
    steps: list[list[Any]] = [[], []]
    for found, engine in zip(steps, engines, strict=True):
        found += [train(engine, step) for step in range(3)]
        found += [train(engine, 3, poison=math.nan), train(engine, 3, flag=1.0)]
        found += [train(engine, step) for step in range(3, 6)]
    states = [state(engine) for engine in engines]
    return {
        "figures": json.dumps(steps[0]) == json.dumps(steps[1]),
        "skipped": [step["skipped"] for step in steps[1]],
        "clipped": max(step["norm"] for step in steps[1][:3]) > 0.3,
        "differ": differing(*states),
        "norms": [[step["norm"] for step in found] for found in steps],
    }


def stale_after_validation() -> dict[str, Any]:
    """A load after a validation: the next forward must see the loaded weights."""
    engine = make_fsdp(net())
    train(engine, 0)
    part = engine.parts()["model"]
    tensors, meta = part.state_dict()
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    batch = torch.randn(4, 6), torch.randn(4, 3)

    def validated() -> float:
        engine.module.eval()
        with torch.no_grad():
            loss = engine.module(*batch).item()
        engine.module.train()
        return loss

    before = validated()
    for step in range(1, 4):
        train(engine, step)
    between = validated()
    part.load_state_dict(saved, meta)
    after = validated()
    return {"before": before, "between": between, "after": after}


def bytes_held(engine: Any, gradients: Callable[[], list[Tensor]]) -> list[float]:
    """Bytes of weights, gradients and moments on this rank, for each trained parameter of the whole model."""
    parameters = sum(each.numel() for each in nn.Linear(64, 64).parameters())
    inputs = torch.randn(4, 64)
    held = 0
    # Two micro-batches. The gradients are looked at before the last exchange, where most of them are there.
    for last in (False, True):
        with engine.micro_batch(last):
            engine.backward(engine.module(inputs).square().mean())
            if not last:
                held = sum(each.nbytes for each in gradients())
    state = {name: part.state_dict()[0] for name, part in engine.parts().items()}
    moments = [tensor for name, tensor in state["optimizer"].items() if ".exp_avg" in name]
    weights = list(state["model"].values())
    sums = [sum(each.nbytes for each in weights), held, sum(each.nbytes for each in moments)]
    return [each / parameters for each in sums]


def bytes_of_engines() -> dict[str, list[float]]:
    """`bytes_held` of one Linear under each engine."""

    def of_fsdp(every_micro_batch: bool) -> list[float]:
        model = nn.Linear(64, 64)
        engine = make_fsdp(model, every_micro_batch=every_micro_batch)
        groups = model._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]

        def gradients() -> list[Tensor]:
            found: list[Any] = []
            for param in model.parameters():
                grad: Any = param.grad
                found.append(None if grad is None else grad.to_local())
            for each in groups[0].fsdp_params:
                found.append(each.unsharded_accumulated_grad)
                if hasattr(each, "_unsharded_param"):
                    found.append(each._unsharded_param.grad)
            return [grad for grad in found if grad is not None]

        return bytes_held(engine, gradients)

    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    ddp = make_ddp(model)
    return {
        "ddp": bytes_held(ddp, lambda: [p.grad for p in model.parameters() if p.grad is not None]),
        "window": of_fsdp(every_micro_batch=False),
        "micro_batch": of_fsdp(every_micro_batch=True),
    }


def refused(build: Callable[[], object]) -> str:
    try:
        build()
    except ConfigError as error:
        return str(error)
    return ""


def in_a_loop_of_ones_own() -> str:
    """What `harness.Precision` says of a model that our engine has sharded."""
    sharded = net()
    make_fsdp(sharded)
    return said_of(lambda: Precision.from_recipe("fp32").prepare(sharded))


def unused_on_some_ranks() -> list[float]:
    """The norm of a step whose ranks use different parameters of one block; and what it is with whole models."""
    torch.manual_seed(0)
    engine = make_fsdp(Parted(in_one_block=True))
    torch.manual_seed(0)
    model = Parted(in_one_block=True)
    alone = SimpleNamespace(
        rank=dist.get_rank(),
        world_size=2,
        module=model,
        micro_batch=lambda last: nullcontext(),
        backward=lambda loss: loss.backward(),
    )
    backward_of_a_step(alone, 0)
    squares = 0.0
    for param in model.parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        dist.all_reduce(grad)
        squares += (grad / 2).square().sum().item()
    return [train(engine, 0)["norm"], math.sqrt(squares)]


def other_ways() -> list[tuple[bool, bool]]:
    """Whether each step was found to have other calls on some rank, and whether it was applied."""
    torch.manual_seed(0)
    model = Ways()
    engine = make_fsdp(model)
    rank = dist.get_rank()
    found: list[tuple[bool, bool]] = []
    # Alike, another order on one rank, alike in another order; then calls without gradients: alike, and another block.
    ways = [(False, None), (rank == 1, None), (True, None), (False, 1), (False, rank)]
    for step, (model.turned, looked_at) in enumerate(ways):
        backward_of_a_step(engine, step)
        if looked_at is not None:
            with torch.no_grad():
                model.blocks[looked_at](torch.randn(4, 6))
        figures = finish(engine)
        found.append((bool(figures["other_calls"]), bool(figures["applied"])))
    return found


def moved_memory() -> str:
    """A weight whose memory is replaced after the engine was built, before the first step."""
    engine = make_fsdp(net())
    head = engine.module.get_submodule("head")
    local: Any = head.weight
    local._local_tensor = local._local_tensor.clone()
    return refused(lambda: train(engine, 0))


def other_buffers(rank: int) -> nn.Module:
    model = net()
    model.register_buffer("order", torch.arange(4).roll(rank), persistent=False)
    return model


def said_of(call: Callable[[], object]) -> str:
    try:
        call()
    except MisuseError as error:
        return str(error)
    return ""


def mixed() -> nn.Module:
    model = net()
    model.blocks[0].linear.to(torch.float64)
    return model


def rank_main(folder: Path) -> None:
    join(read_launch(), CPU, timeout_seconds=60)
    rank = int(os.environ["RANK"])
    result: dict[str, Any] = {
        "fp32": beside_ddp(),
        "fp16": beside_ddp(fp16=True),
        "every": beside_ddp(every_micro_batch=True),
        "stale": stale_after_validation(),
        "collectives": own_collectives(make_fsdp(net())),
        "different": refused(lambda: make_fsdp(net(seed=rank))),
        "loops": in_a_loop_of_ones_own(),
        "memory": moved_memory(),
        "buffers": refused(lambda: make_fsdp(other_buffers(rank))),
        "dtypes": refused(lambda: make_fsdp(mixed())),
    }
    result["bytes"] = bytes_of_engines()
    result["unused"] = unused_on_some_ranks()
    result["blocks"] = refused(lambda: train(make_fsdp(Parted(in_one_block=False)), 0))
    result["ways"] = other_ways()
    result["idle"] = [
        refused(lambda: train(make_fsdp(with_unused()), 0)),
        refused(lambda: train(make_ddp(with_unused()), 0)),
    ]
    engine = make_fsdp(net())
    held = {name: list(t.shape) for name, t in engine.parts()["model"].state_dict()[0].items()}
    result["held"] = held
    result["moments"] = sum(t.numel() for t in engine.parts()["optimizer"].state_dict()[0].values())
    engine.close()
    (folder / f"{rank}.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("fsdp"), 2)


@pytest.mark.parametrize("case", ["fp32", "fp16"])
def test_every_bit_is_that_of_ddp(two_ranks: list[dict[str, Any]], case: str) -> None:
    for result in two_ranks:
        found = result[case]
        assert found["differ"] == []
        assert found["figures"]
        assert found["skipped"] == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0], "both faults fired"
    assert two_ranks[0]["fp32"]["clipped"]


def test_gradients_exchanged_in_every_micro_batch_are_rounded_otherwise(
    two_ranks: list[dict[str, Any]],
) -> None:
    for result in two_ranks:
        ddp, fsdp = result["every"]["norms"]
        assert ddp != fsdp == pytest.approx(ddp, rel=1e-3, nan_ok=True)


def test_a_rank_holds_its_rows_alone(two_ranks: list[dict[str, Any]]) -> None:
    first, second = (result["held"] for result in two_ranks)
    assert first["blocks.0.linear.weight"] == [17, 32]
    assert second["blocks.0.linear.weight"] == [16, 32]
    assert (first["blocks.0.gain"], second["blocks.0.gain"]) == ([1], [0])
    assert first["scale"] == second["scale"] == [], "0-d: whole on every rank"
    assert first["norm.running_mean"] == second["norm.running_mean"] == [32], "buffers are whole"
    assert "outward.weight" not in first, "tied: held once"
    trained = sum(each.numel() for each in net().parameters() if each.requires_grad)
    assert sum(result["moments"] for result in two_ranks) < 2 * trained + 300


def test_bytes_of_a_parameter_are_those_of_the_guide(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert result["bytes"]["ddp"] == bytes_of_the_guide("`ddp`", 2)
        for sync in ("micro_batch", "window"):
            row = f"`fsdp`, `engine.gradient_sync={sync}`"
            row += ", with accumulation" if sync == "window" else ""
            assert result["bytes"][sync] == bytes_of_the_guide(row, 2)


def test_a_load_after_a_validation_is_seen(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert result["stale"]["before"] == result["stale"]["after"] != result["stale"]["between"]


def test_a_step_has_one_max_and_one_sum_of_ours(two_ranks: list[dict[str, Any]]) -> None:
    # Of a model without 0-d parameters and buffers that are shared: these cost one each.
    for result in two_ranks:
        assert result["collectives"]["all_reduce"] == 1
        assert result["collectives"]["all_gather"] == 2, "the sum, and the mean of 0-d gradients"


def test_ranks_with_other_weights_are_refused(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert "the ranks built the model with different weights" in result["different"]
        assert "patchwork" in result["different"]


def test_ranks_with_other_buffers_are_refused(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert "different weights: order" in result["buffers"]


def test_an_optimizer_on_old_memory_is_refused(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert (
            "weights have new memory since the model was sharded: head.weight" in result["memory"]
        )


def test_a_block_of_two_dtypes_is_refused_by_name(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert "blocks.0.linear.weight is float64" in result["dtypes"]
        assert "engine ddp" in result["dtypes"]


def test_a_sharded_model_is_refused_in_a_loop_of_ones_own(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert "prepare(): the model is sharded by fully_shard (FSDP2) already" in result["loops"]


def test_parameters_that_only_some_ranks_use(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        found, expected = result["unused"]
        assert found == pytest.approx(expected, rel=1e-5)


def test_parameters_that_no_rank_uses_are_refused_as_under_ddp(
    two_ranks: list[dict[str, Any]],
) -> None:
    for result in two_ranks:
        for text in result["idle"]:
            assert "4 parameters took no part in the loss, such as spare.weight" in text or (
                "4 parameters took no part in the loss, such as blocks.0.idle.weight" in text
            )


def test_ranks_that_call_different_blocks_are_refused(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert "the ranks called different blocks of the model" in result["blocks"]


def test_ranks_that_call_other_blocks_later_are_found_in_that_step(
    two_ranks: list[dict[str, Any]],
) -> None:
    """In another order, and without gradients too; that update alone is skipped."""
    alike, other = [False, True], [True, False]
    for result in two_ranks:
        assert result["ways"] == [alike, other, alike, alike, other]


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
