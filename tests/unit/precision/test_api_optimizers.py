"""harness.Precision with any optimizer: the plain loop's updates, a gate that keeps every bit, clear refusals."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from api_support import (
    adamw,
    batch,
    differences,
    forward_backward,
    mlp,
    prepared,
    recipe,
    snapshot,
    train_step,
)
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from harness import Precision
from harness.core.errors import MisuseError

pytestmark = pytest.mark.usefixtures("cpu_on_purpose")

Params = Iterable[Tensor]
MAKERS: dict[str, Callable[[Params], Optimizer]] = {
    "Adam": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True),
    "Adam fused": lambda p: optim.Adam(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW tensor lr": lambda p: optim.AdamW(p, lr=torch.tensor(1e-2), fused=True),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "SGD fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "SGD maximize": lambda p: optim.SGD(p, lr=0.01, maximize=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "Adagrad fused": lambda p: optim.Adagrad(p, lr=0.1, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.9),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-2),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-2),
    "ASGD": lambda p: optim.ASGD(p, lr=1e-2),
}
NAMES = [*MAKERS, "Muon + AdamW"]


def optimizers(name: str, model: nn.Module) -> list[Optimizer]:
    if name != "Muon + AdamW":
        return [MAKERS[name](model.parameters())]
    matrices, vectors = (
        [p for p in model.parameters() if (p.ndim == 2) is flat] for flat in (True, False)
    )
    return [optim.Muon(matrices, lr=1e-2), optim.AdamW(vectors, lr=1e-2, fused=True)]


# Muon rounds gradients to bf16: a clip that differs in the last bit of fp32 shows.
@pytest.mark.parametrize(
    ("name", "clip"), [*((name, None) for name in NAMES), *((name, 0.1) for name in MAKERS)]
)
def test_updates_are_those_of_the_plain_loop(name: str, clip: float | None) -> None:
    precision, model = prepared(recipe("fp32"))
    chosen = optimizers(name, model)
    plain = mlp()
    oracles = optimizers(name, plain)
    for step in range(4):
        train_step(precision, model, chosen, step, max_grad_norm=clip)
        x, y = batch(step)
        nn.functional.mse_loss(plain(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        for oracle in oracles:
            oracle.step()
        plain.zero_grad()
    start = mlp()
    for mine, theirs, before in zip(
        model.parameters(), plain.parameters(), start.parameters(), strict=True
    ):
        rtol, atol = (0.0, 0.0) if clip is None else (1e-4, 1e-5)
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
        assert not torch.equal(mine, before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rung", ["fp8_hybrid", "fp16_scaler"])
def test_a_bad_step_leaves_every_bit(name: str, rung: str) -> None:
    precision, model = prepared(recipe(rung))
    chosen = optimizers(name, model)
    assert train_step(precision, model, chosen, 0).was_applied

    def states() -> list[Any]:
        return [snapshot(precision, model, optimizer) for optimizer in chosen]

    before = states()
    assert not train_step(
        precision, model, chosen, 1, max_grad_norm=1.0, poison=math.nan
    ).was_applied
    for old, new in zip(before, states(), strict=True):
        for part in ("model", "optimizer"):
            assert differences(old[part], new[part]) == []
        for key in old["tensors"].keys() & {"fp8.history", "fp8.scale"}:
            assert torch.equal(old["tensors"][key], new["tensors"][key])
    assert train_step(precision, model, chosen, 1).was_applied
    assert differences(before[0]["model"], model.state_dict())


def test_an_optimizer_that_wants_a_closure_is_refused() -> None:
    precision, model = prepared(recipe())
    forward_backward(precision, model, 0)
    with pytest.raises(MisuseError, match=r"LBFGS cannot be gated[\s\S]*no closure"):
        precision.step(optim.LBFGS(model.parameters()))
    with pytest.raises(MisuseError, match=r"LineSearch cannot be gated[\s\S]*no closure"):
        precision.step(LineSearch(model.parameters(), lr=0.1))
    with pytest.raises(MisuseError, match="LineSearch cannot be gated"):
        precision.wrap(LineSearch(model.parameters(), lr=0.1))
    assert precision.step(adamw(model)).was_applied, "the refusal did no harm"


class LineSearch(optim.SGD):
    """Its step is written like that of LBFGS."""

    def step(self, closure: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = closure()
        super().step()
        return loss


class WeightedLoss(nn.Module):
    """A loss with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(16))

    def forward(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return ((found - wanted).square() * self.weights.exp()).mean() - self.weights.mean()


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("name", ["fp8_hybrid", "fp16_scaler"])
def test_weights_of_a_loss_are_trained_by_an_optimizer_of_their_own(name: str, wrap: bool) -> None:
    """As docs/guide/api.md says: `step` or `wrap` is given both optimizers."""
    trained: list[torch.Tensor] = []
    for policy in (recipe(name), recipe("fp32")):
        precision, model = prepared(policy)
        loss_function = WeightedLoss()
        both = [adamw(model), optim.SGD(loss_function.parameters(), lr=0.1)]
        wrapped = precision.wrap(both) if wrap else None
        for step in range(3):
            x, y = batch(step)
            if wrapped is not None:
                loss_function(model(x), y).backward()
                wrapped.step()
            else:
                with precision.context():
                    loss = loss_function(model(x).float(), y)
                precision.backward(loss)
                precision.step(both)
            for optimizer in both:
                optimizer.zero_grad()
        trained.append(loss_function.weights.detach())
    torch.testing.assert_close(*trained, rtol=1e-2, atol=1e-3)
    assert (trained[0] != 1).all()


@pytest.mark.parametrize("late", [True, False])
def test_scaled_gradients_of_a_loss_are_not_applied_by_another_optimizer(late: bool) -> None:
    """Without `wrap` they carry the loss scale, whichever of the two steps comes first."""
    precision, model = prepared(recipe("fp16_scaler"))
    loss_function = WeightedLoss()
    optimizer = adamw(model)
    other = optim.SGD(loss_function.parameters(), lr=0.1)
    x, y = batch(0)
    with precision.context():
        loss = loss_function(model(x).float(), y)
    precision.backward(loss)
    if late:
        precision.step(optimizer)
    with pytest.raises(
        MisuseError, match=r"1 parameters beside[\s\S]*the loss scale[\s\S]*step\(\["
    ):
        other.step()
    assert (loss_function.weights == 1).all()
    # Gradients that are not of that backward are the user's own.
    other.zero_grad()
    loss_function(x, y).backward()
    other.step()
    assert (loss_function.weights != 1).all()


@pytest.mark.parametrize("wrapped", [True, False])
def test_an_overflow_does_not_reach_a_module_before_the_model(wrapped: bool) -> None:
    """Wrapped together, both updates are skipped. Alone, the module's optimizer is refused before it writes NaN."""
    precision, model = prepared(recipe("fp16_scaler"))
    before = nn.Linear(16, 16)
    own = optim.SGD(before.parameters(), lr=0.1)
    others = [own] if wrapped else []
    optimizer = precision.wrap([adamw(model), *others])
    for size in (1.0, 1e30, 1.0):
        x, y = batch(0)
        loss = nn.functional.mse_loss(model(before(x) * size).float(), y)
        loss.backward()
        optimizer.step()
        assert optimizer.outcome is not None
        assert optimizer.outcome.was_applied == (size == 1)
        if not wrapped and size > 1:
            with pytest.raises(MisuseError, match=r"beside the model[\s\S]*wrap\(\["):
                own.step()
        elif not wrapped:
            own.step()
        assert before.weight.isfinite().all()
        optimizer.zero_grad()
        own.zero_grad()


@pytest.mark.parametrize("name", ["fp8_hybrid", "fp32"])
def test_sparse_gradients_are_refused(name: str) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 16, sparse=True), nn.Linear(16, 16)

    precision = Precision(recipe(name))
    model = precision.prepare(Sparse())
    with precision.context():
        loss = model.head(model.embed(torch.arange(8))).float().square().mean()
    precision.backward(loss)
    before = copy.deepcopy(model.state_dict())
    sparse, dense = optim.SparseAdam(list(model.embed.parameters())), adamw(model.head)
    with pytest.raises(MisuseError, match=r"a gradient is sparse[\s\S]*sparse=False"):
        precision.step([sparse, dense])
    assert differences(before, model.state_dict()) == []


@pytest.mark.parametrize("name", ["fp8_hybrid", "fp16_scaler"])
def test_gradients_may_be_zeroed_in_place(name: str) -> None:
    """`set_to_none=False` trains as the default does, a skipped step included."""
    results = []
    for to_none in (True, False):
        precision, model = prepared(recipe(name))
        optimizer = adamw(model)
        for step, poison in enumerate((0.0, 0.0, math.inf, 0.0)):
            forward_backward(precision, model, step, micro_batches=2, poison=poison)
            assert precision.step(optimizer).was_applied is (poison == 0.0)
            optimizer.zero_grad(set_to_none=to_none)
        results.append(snapshot(precision, model, optimizer))
        assert all((parameter.grad is None) is to_none for parameter in model.parameters())
    assert differences(*results) == []


@pytest.mark.parametrize("name", ["fp8_hybrid", "bf16"])
def test_parameters_may_be_frozen_and_freed_mid_run(name: str) -> None:
    precision, model = prepared(recipe(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    moved = []
    for step in range(5):
        frozen = step in (1, 2)
        model[0].requires_grad_(not frozen)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        assert train_step(precision, model, optimizer, step).was_applied
        moved.append(
            [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        )
        history = precision.state_dict()["tensors"].get("fp8.history")
        if history is not None and frozen:
            assert (history[-1, :2] > 0).all(), (
                "operands of a frozen layer are still cast, and measured"
            )
    assert moved == [
        [True] * 4,
        [False, False, True, True],
        [False, False, True, True],
        [True] * 4,
        [True] * 4,
    ]


def test_parameter_groups_may_join_mid_run() -> None:
    precision, model = prepared(recipe())
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-2, fused=True)
    head = copy.deepcopy(model[2].state_dict())
    outcome = train_step(precision, model, optimizer, 0)
    assert differences(head, model[2].state_dict()) == []
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 1e-3})
    joined = train_step(precision, model, optimizer, 0)
    assert differences(head, model[2].state_dict())
    assert joined.grad_norm > outcome.grad_norm, "the norm is over what the optimizer holds"


def test_adapters_that_come_after_prepare_can_be_trained_alone() -> None:
    precision, model = prepared(recipe())
    assert train_step(precision, model, adamw(model), 0).was_applied
    model.requires_grad_(False)
    model.append(nn.Linear(16, 16))
    assert train_step(precision, model, adamw(model[3]), 0).was_applied
    with pytest.raises(MisuseError, match="AdamW holds no parameter of the prepared model"):
        train_step(precision, model, adamw(mlp()), 1)


def test_schedulers_that_read_the_loss_or_cycle_momentum() -> None:
    precision, model = prepared(recipe("bf16"))
    optimizer = adamw(model)
    cycle = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=6)
    rates, betas = [], []
    for step in range(5):
        assert train_step(precision, model, optimizer, step).was_applied
        cycle.step()
        rates.append(optimizer.param_groups[0]["lr"])
        betas.append(optimizer.param_groups[0]["betas"][0])
    assert max(rates) == pytest.approx(1e-2, rel=0.01)
    assert rates[-1] < 1e-5
    assert min(betas) == pytest.approx(0.85, rel=0.01)
    plateau = optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for loss in (1.0, 1.0):
        plateau.step(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rates[-1] / 2)
