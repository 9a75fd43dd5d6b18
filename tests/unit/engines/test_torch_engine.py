"""One process: the step against an fp64 oracle, the gate, the loss scale, and no host read in between."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.core.config import TrainConfig
from harness.core.facts import Limits
from harness.core.protocols import NO_LIMITS
from harness.engines.torch_engine import TorchEngine
from harness.optim.optimizers import build_optimizer
from harness.optim.schedule import Schedule
from tests.support.updates import finish
from tests.support.waits import HostReads

CPU = torch.device("cpu")
SCHEDULE = Schedule(lr=0.02, warmup_steps=2, total_steps=10, min_lr_ratio=0.1)
MAX_NORM = 0.3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(6, 8)
        self.two = nn.Linear(8, 3)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.two(torch.tanh(self.one(inputs))) - targets).square().mean()


class HalvingScale:
    """A loss scale that halves on a skip and doubles otherwise."""

    def __init__(self, value: float) -> None:
        self.value = torch.tensor(value)

    def update(self, overflow: Tensor, skip: Tensor) -> None:
        self.value.mul_(torch.where(skip > 0, 0.5, 2.0))

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"value": self.value}, {}


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 4, 6, generator=generator), torch.randn(2, 4, 3, generator=generator) * 3


def make(optimizer: str | None = "adamw", loss_scale: HalvingScale | None = None) -> TorchEngine:
    model = Net()
    if optimizer is None:
        built: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), betas=(0.9, 0.95), weight_decay=0.0
        )
    else:
        config = TrainConfig.model_validate({"optimizer": optimizer, "weight_decay": 0.0})
        built = build_optimizer(model, config, CPU)
    return TorchEngine(model, built, SCHEDULE, MAX_NORM, loss_scale=loss_scale, device=CPU)


def train(
    engine: TorchEngine, step: int, poison: float = 1.0, loss: float = 1.0, **own: float
) -> dict[str, Tensor]:
    inputs, targets = batch(step)
    for index in range(2):
        with engine.micro_batch(index == 1):
            engine.backward(engine.module(inputs[index], targets[index]) / 2 * poison)
    return finish(engine, NO_LIMITS, False, loss, **own)


def snapshot(engine: TorchEngine) -> dict[str, Tensor]:
    tensors = {}
    for name, part in engine.parts().items():
        tensors.update(
            {f"{name}/{key}": value.clone() for key, value in part.state_dict()[0].items()}
        )
    return tensors


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("optimizer", ["adamw", None])
def test_training_agrees_with_an_fp64_loop_of_plain_torch(optimizer: str | None) -> None:
    engine = make(optimizer)
    oracle = Net().double()
    plain = torch.optim.AdamW(
        oracle.parameters(), betas=(0.9, 0.95), weight_decay=0.0, foreach=False
    )
    norms = []
    for step in range(6):
        figures = train(engine, step)
        inputs, targets = batch(step)
        plain.zero_grad()
        oracle(inputs.double().flatten(0, 1), targets.double().flatten(0, 1)).backward()
        norm = nn.utils.clip_grad_norm_(oracle.parameters(), MAX_NORM)
        for group in plain.param_groups:
            group["lr"] = SCHEDULE(step)
        plain.step()
        norms.append(norm.item())
        assert figures["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-5)
        assert figures["lr"].item() == SCHEDULE(step)
        assert (
            1.0 - figures["applied"].item(),
            figures["applied_steps"].item(),
            figures["loss_scale"].item(),
        ) == (
            0.0,
            step + 1.0,
            1.0,
        )
    assert max(norms) > MAX_NORM
    for mine, theirs in zip(engine.module.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().double(), theirs.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", None])
@pytest.mark.parametrize(
    "fault", [{"poison": math.nan}, {"poison": math.inf}, {"bad_data": 4}, {"loss": math.nan}]
)
def test_a_bad_step_changes_nothing_and_costs_no_learning_rate_step(
    optimizer: str | None, fault: dict[str, float]
) -> None:
    engine = make(optimizer)
    train(engine, 0)
    before = snapshot(engine)
    figures = train(engine, 1, **fault)
    assert (1.0 - figures["applied"].item(), figures["applied_steps"].item()) == (1.0, 1.0)
    assert math.isfinite(figures["grad_norm"].item()) == ("poison" not in fault)
    assert equal(before, snapshot(engine))
    after = train(engine, 2)
    assert (1.0 - after["applied"].item(), after["lr"].item()) == (0.0, SCHEDULE(1))
    assert not equal(before, snapshot(engine))


def test_what_ranks_agree_on_arrives_and_what_nobody_measured_does_not() -> None:
    engine = make()
    figures = train(engine, 0, param_norm=math.inf, forward_fastest=-3.0, bad_data=0)
    told = {name: figures[name].item() for name in ("param_norm", "forward_fastest", "bad_data")}
    assert told == {"param_norm": math.inf, "forward_fastest": -3.0, "bad_data": 0.0}
    assert math.isnan(figures["forward_slowest"].item())
    assert train(engine, 1, bad_data=5)["bad_data"].item() == 5.0


def test_the_loss_scale_is_divided_out_and_moves_once_a_step() -> None:
    scale = HalvingScale(1024.0)
    scaled, plain = make(loss_scale=scale), make()
    for step in range(3):
        a, b = train(scaled, step), train(plain, step)
        assert a["loss_scale"].item() == 1024.0 * 2**step
        assert a["grad_norm"].item() == pytest.approx(b["grad_norm"].item(), rel=1e-6)
    for mine, theirs in zip(scaled.module.parameters(), plain.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    figures = train(scaled, 3, poison=math.nan)
    assert (figures["loss_scale"].item(), scale.value.item()) == (8192.0, 4096.0)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_reads_nothing_on_the_host(optimizer: str) -> None:
    engine = make(optimizer, HalvingScale(8.0))
    for fault in (1.0, math.nan):
        inputs, targets = batch(0)
        engine.backward(engine.module(inputs[0], targets[0]) * fault)
        with HostReads() as reads:
            finish(engine)
        assert reads.count == 0


def test_the_counter_of_host_reads_counts() -> None:
    engine = make(None)
    inputs, targets = batch(0)
    engine.backward(engine.module(inputs[0], targets[0]))
    with HostReads() as reads:
        finish(engine)
    assert reads.count >= 2


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", None])
def test_a_norm_over_the_limit_is_not_applied(optimizer: str | None) -> None:
    engine = make(optimizer)
    usual = train(engine, 0)["grad_norm"].item()
    before = snapshot(engine)
    inputs, targets = batch(1)
    for times, limit, skipped in (
        (1.0, math.inf, False),
        (1000.0, 20 * usual, True),
        (1.0, 20 * usual, False),
    ):
        engine.backward(engine.module(inputs[0], targets[0]) * times)
        figures = finish(engine, limits=Limits(norm=limit))
        assert 1.0 - figures["applied"].item() == float(skipped)
        assert equal(before, snapshot(engine)) == skipped
        before = snapshot(engine)


def test_the_stricter_of_two_clipping_limits_holds() -> None:
    moved: dict[float, float] = {}
    for clip in (MAX_NORM / 10, MAX_NORM, math.inf):
        torch.manual_seed(0)
        engine = make("sgd")
        before = torch.cat(
            [parameter.detach().flatten() for parameter in engine.module.parameters()]
        )
        inputs, targets = batch(0)
        engine.backward(engine.module(inputs[0], targets[0]) * 100)
        assert finish(engine, limits=Limits(clip=clip))["grad_norm"].item() > MAX_NORM
        after = torch.cat(
            [parameter.detach().flatten() for parameter in engine.module.parameters()]
        )
        moved[clip] = (after - before).norm().item()
    assert moved[MAX_NORM] == moved[math.inf]
    assert moved[MAX_NORM / 10] == pytest.approx(moved[math.inf] / 10, rel=1e-3)


def test_the_learning_rate_follows_its_factor() -> None:
    engine = make()
    train(engine, 0)
    engine.lr_factor = 0.25
    assert train(engine, 1)["lr"].item() == pytest.approx(0.25 * SCHEDULE(1), rel=1e-6)


def test_a_skipped_step_leaves_the_buffers_alone() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    engine = TorchEngine(
        net, torch.optim.SGD(net.parameters(), lr=0.1), lambda _: torch.tensor(0.1), 1.0, device=CPU
    )
    for bad in (False, True, False):
        before = {name: buffer.clone() for name, buffer in net.named_buffers()}
        for micro in range(2):
            with engine.micro_batch(last=micro == 1):
                inputs = torch.randn(4, 6) * (math.nan if bad and micro == 0 else 1.0)
                engine.backward(engine.module(inputs).square().mean())
        assert finish(engine)["applied"].item() == float(not bad)
        same = [torch.equal(before[name], buffer) for name, buffer in net.named_buffers()]
        assert same == [bad] * 3
