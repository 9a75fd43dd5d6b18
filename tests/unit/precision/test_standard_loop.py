"""`precision.wrap(optimizer)`: torch's standard loop, bit for bit the one that calls everything by hand."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    scaled,
    snapshot,
    standard_step,
    train_step,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler, OneCycleLR, StepLR
from torch.utils.checkpoint import checkpoint

from harness import Precision
from harness.core.errors import MisuseError
from harness.precision.recipe import Recipe
from tests.support.matrix import rest_slow

pytestmark = pytest.mark.usefixtures("cpu_on_purpose")

RUNGS = ["fp8_hybrid", "fp8_dynamic", "bf16", "fp16_scaler", "fp32"]


def both_loops(
    policy: Recipe,
    make: Callable[[], nn.Module],
    then: Callable[[nn.Module], None] = lambda model: None,
    steps: int = 4,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the standard loop and the explicit one leave behind of the same model. then: done once it is prepared."""

    def left_behind(wrap: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        precision = Precision(policy)
        model = precision.prepare(make())
        optimizer = adamw(model)
        wrapped = precision.wrap(optimizer) if wrap else None
        then(model)
        for step in range(steps):
            if wrapped is None:
                train_step(precision, model, optimizer, step)
            else:
                standard_step(model, wrapped, step)
        return snapshot(precision, model, optimizer)

    return left_behind(True), left_behind(False)


@pytest.mark.parametrize("fused", rest_slow([True, False], True))
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("name", RUNGS)
def test_the_standard_loop_is_the_explicit_one(name: str, micro_batches: int, fused: bool) -> None:
    precision, model = prepared(recipe(name))
    optimizer = adamw(model, fused)
    explicit, ours = [], []
    for step in range(8):
        explicit.append(
            forward_backward(
                precision, model, step, micro_batches, poison=math.nan if step == 3 else 0.0
            )
        )
        precision.step(optimizer, max_grad_norm=0.1)
        optimizer.zero_grad()
    twin, other = prepared(recipe(name))
    inner = adamw(other, fused)
    wrapped = twin.wrap(inner, max_grad_norm=0.1)
    for step in range(8):
        poison = math.nan if step == 3 else 0.0
        ours.append(standard_step(other, wrapped, step, micro_batches, poison))
        assert wrapped.outcome is not None
        assert wrapped.outcome.was_applied == (step != 3)
        assert wrapped.outcome.grad_norm.item() > 0.1, "the clip was in use"
    assert str(explicit) == str(ours)
    assert differences(snapshot(precision, model, optimizer), snapshot(twin, other, inner)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_hybrid", "fp16_scaler"])
def test_150_steps_of_an_mlp_learn(name: str) -> None:
    """What `prepare` and a plain loop alone did: 2.330 in FP8 and 1.99 in fp16, in place of 0.21."""
    results = []
    for wrap in (True, False):
        torch.manual_seed(0)
        precision = Precision.from_recipe(name)
        model = precision.prepare(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)))
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        optimizer = precision.wrap(optimizer) if wrap else optimizer
        losses = []
        for step in range(150):
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
            if wrap:
                loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
                loss.backward()
                optimizer.step()
            else:
                with precision.context():
                    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
                precision.backward(loss)
                precision.step(optimizer)
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append(losses)
    assert results[0] == results[1]
    assert results[0][-1] < 0.3 * results[0][0]


@pytest.mark.parametrize("kind", ["StepLR", "OneCycleLR", "LinearLR"])
@pytest.mark.parametrize("inner", [True, False])
def test_schedulers_of_either_optimizer(kind: str, inner: bool) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> LRScheduler:
        made = {
            "StepLR": lambda: StepLR(optimizer, 2, 0.5),
            "OneCycleLR": lambda: OneCycleLR(optimizer, 1e-2, 20),
        }
        return made.get(kind, lambda: LinearLR(optimizer, 1.0, 0.1, 6))()

    rates = []
    for wrap in (False, True):
        precision, model = prepared(recipe())
        optimizer = adamw(model)
        scheduler = schedule(optimizer) if inner else None
        wrapped = precision.wrap(optimizer) if wrap else None
        scheduler = scheduler or schedule(wrapped or optimizer)
        rates.append([])
        for step in range(6):
            if wrapped is None:
                train_step(precision, model, optimizer, step)
            else:
                standard_step(model, wrapped, step)
            scheduler.step()
            rates[-1].append(
                (optimizer.param_groups[0]["lr"], model.get_parameter("0.weight").sum().item())
            )
    assert rates[0] == rates[1]


@pytest.mark.parametrize("name", ["fp8_hybrid", "fp16_scaler"])
def test_several_optimizers_are_one(name: str) -> None:
    def parts(model: nn.Sequential) -> list[torch.optim.Optimizer]:
        sgd = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
        return [torch.optim.AdamW(model[0].parameters(), lr=1e-2, fused=True), sgd]

    precision, model = prepared(recipe(name))
    both = parts(model)
    for step in range(5):
        train_step(precision, model, both, step, max_grad_norm=0.1)
    twin, other = prepared(recipe(name))
    wrapped = twin.wrap(parts(other), max_grad_norm=0.1)
    for step in range(5):
        standard_step(other, wrapped, step)
    assert differences(model.state_dict(), other.state_dict()) == []
    assert [group["lr"] for group in wrapped.param_groups] == [1e-2, 0.1]
    assert set(wrapped.state) == set(other.parameters())
    saved = copy.deepcopy(wrapped.state_dict())
    standard_step(other, wrapped, 5)
    assert differences(saved, wrapped.state_dict())
    wrapped.load_state_dict(saved)
    assert differences(saved, wrapped.state_dict()) == []
    with pytest.raises(MisuseError, match="not of 2 optimizers"):
        wrapped.load_state_dict(both[0].state_dict())
    with pytest.raises(MisuseError, match="it stands for 2"):
        wrapped.add_param_group({"params": []})


def test_its_state_is_the_inner_ones() -> None:
    precision, model = prepared(recipe())
    optimizer = adamw(model)
    wrapped = precision.wrap(optimizer)
    assert isinstance(wrapped, torch.optim.Optimizer)
    standard_step(model, wrapped, 0)
    assert differences(wrapped.state_dict(), optimizer.state_dict()) == []
    assert wrapped.param_groups[0] is optimizer.param_groups[0]
    assert wrapped.defaults is optimizer.defaults
    wrapped.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 2
    plain = adamw(mlp())
    plain.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    plain.load_state_dict(wrapped.state_dict())
    wrapped.load_state_dict(plain.state_dict())
    called: list[str] = []
    wrapped.register_step_pre_hook(lambda *_: called.append("pre"))
    wrapped.register_step_post_hook(lambda *_: called.append("post"))
    standard_step(model, wrapped, 1)
    assert called == ["pre", "post"]
    assert "AdamW" in repr(wrapped)


def test_a_closure_is_called_once() -> None:
    precision, model = prepared(recipe())
    wrapped = precision.wrap(adamw(model))
    x, y = batch(0)

    def closure() -> Tensor:
        wrapped.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    with torch.no_grad():
        first = wrapped.step(closure)
    assert first.requires_grad
    assert wrapped.step(closure) < first


# What the user does between backward and step


def true_gradients(**changes: Any) -> dict[str, Tensor]:
    """Of fp32: what those of fp16 should be, but for rounding."""
    precision, model = prepared(recipe("fp32"))
    forward_backward(precision, model, 0)
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def test_gradients_of_fp16_are_true_between_backward_and_step() -> None:
    precision, model = scaled()
    wrapped = precision.wrap(adamw(model))
    expected = true_gradients()
    seen: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.setdefault(name, []).append(grad))
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen[name].append(p.grad.clone())
        )
    x, y = batch(0)
    for inputs, targets in zip(x.chunk(2), y.chunk(2), strict=True):
        (nn.functional.mse_loss(model(inputs), targets) / 2).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0.02, atol=1e-4)
        assert len(seen[name]) == 4, "of two micro-batches"
        assert all(grad.abs().max() < 3 * expected[name].abs().max() for grad in seen[name])
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    wrapped.step()
    assert wrapped.outcome is not None
    assert wrapped.outcome.was_applied
    assert norm > 0.01
    assert wrapped.outcome.grad_norm.item() == pytest.approx(1e-3, rel=1e-2)
    assert wrapped.outcome.loss_scale.item() == 1024


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", ["fp16_scaler", "fp32"])
def test_hooks_of_the_users_own_come_after_ours(name: str, before: bool) -> None:
    precision, model = prepared(recipe(name))
    limit = 1e-3

    def clamp() -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad.clamp(-limit, limit))

    if before:
        clamp()
    wrapped = precision.wrap(adamw(model))
    if not before:
        standard_step(model, wrapped, 0)
        clamp()
    nn.functional.mse_loss(model(batch(1)[0]), batch(1)[1]).backward()
    largest = [
        parameter.grad.abs().max().item()
        for parameter in model.parameters()
        if parameter.grad is not None
    ]
    assert largest == [pytest.approx(limit)] * 4


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("hide", ["clip value", "hook"])
def test_clipping_does_not_hide_an_overflow(hide: str, create_graph: bool) -> None:
    precision, model = scaled()
    wrapped = precision.wrap(adamw(model))
    standard_step(model, wrapped, 0)
    before = snapshot(precision, model, wrapped.optimizers[0])
    if hide == "hook":
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad.nan_to_num(0.0, 1.0, -1.0))
    loss = nn.functional.mse_loss(model(batch(1)[0]), batch(1)[1]) * 1e4
    loss.backward(create_graph=create_graph)
    if hide == "clip value":
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.detach().nan_to_num_(0.0, 1.0, -1.0)
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in model.parameters()
    )
    wrapped.step()
    assert wrapped.outcome is not None
    assert not wrapped.outcome.was_applied
    after = snapshot(precision, model, wrapped.optimizers[0])
    assert (
        differences(before["model"], after["model"])
        == differences(before["optimizer"], after["optimizer"])
        == []
    )
    assert after["tensors"]["loss_scale.value"].item() == 512
    wrapped.zero_grad()
    standard_step(model, wrapped, 2)
    assert wrapped.outcome.was_applied, "the overflow was of the window before"


def test_what_else_the_loss_reaches_gets_true_gradients() -> None:
    """A penalty on weights, a temperature beside the model, an input, a model before it, and an own autograd.grad."""
    found = []
    for name in ("fp16_scaler", "fp32"):
        precision, model = prepared(recipe(name))
        temperature = nn.Parameter(torch.ones(()))
        torch.manual_seed(1)
        stem = nn.Linear(16, 16)
        wrapped = precision.wrap(torch.optim.SGD([*model.parameters(), temperature], lr=0.1))
        x, y = batch(0)
        x.requires_grad_()
        loss = nn.functional.mse_loss(model(stem(x)) * temperature, y)
        loss = loss + 0.5 * sum(parameter.square().sum() for parameter in model.parameters())
        plain = torch.autograd.grad(loss, [model.get_parameter("0.weight")], retain_graph=True)[0]
        loss.backward()
        wrapped.step()
        leaves = [x, temperature, stem.weight, *model.parameters()]
        found.append([plain, *(leaf.grad for leaf in leaves), temperature.detach()])
    for half, single in zip(*found, strict=True):
        torch.testing.assert_close(half, single, rtol=0.03, atol=3e-4)


# What the model is


class Outputs(NamedTuple):
    logits: Tensor
    note: str


@dataclass
class Result:
    logits: Tensor
    loss: Tensor | None = None


@pytest.mark.parametrize(
    ("give", "take"),
    [
        (lambda x: (x, 1), lambda out: out[0]),
        (lambda x: Outputs(x, "as it is"), lambda out: out.logits),
        (lambda x: {"logits": [x]}, lambda out: out["logits"][0]),
        (lambda x: Result(x), lambda out: out.logits),
    ],
)
def test_outputs_come_in_float32_whatever_holds_them(give: Any, take: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Any:
            out = self.body(x)
            assert out.dtype == torch.bfloat16
            return give(out)

    precision = Precision(recipe("bf16"))
    model = precision.prepare(Model())
    wrapped = precision.wrap(adamw(model))
    out = model(batch(0)[0])
    assert type(out) is type(give(torch.zeros(())))
    assert take(out).dtype == torch.float32
    take(out).sum().backward()
    wrapped.step()


class Coder(nn.Module):
    """Parts are called, the whole never is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(16, 32), nn.Linear(32, 16)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.decoder(self.encoder(x).tanh()), y)


def test_parts_that_are_called_from_outside_run_as_planned() -> None:
    precision = Precision(recipe())
    model = precision.prepare(Coder())
    wrapped = precision.wrap(adamw(model))
    for step in range(6):
        model.loss(*batch(step)).backward()
        wrapped.step()
        wrapped.zero_grad()
    stats = precision.stats()
    assert stats is not None
    assert (stats.amax > 0).all()
    assert (stats.scale != 1).all()


def test_a_forward_that_fails_leaves_the_context() -> None:
    precision, model = prepared(recipe())
    wrapped = precision.wrap(adamw(model))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(4, 7))
    standard_step(model, wrapped, 0)
    assert wrapped.outcome is not None
    assert wrapped.outcome.was_applied


class Twice(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        x = self.body(x).tanh()
        return self(x, False) if again else x


def test_a_module_that_calls_itself() -> None:
    assert differences(*both_loops(recipe(), Twice)) == []


class Interrupted(nn.Module):
    """Ends its `at`-th call by `error`."""

    def __init__(self, error: type[BaseException], at: int) -> None:
        super().__init__()
        self.body, self.error, self.left = mlp(), error, at

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        self.left -= 1
        if self.left == 0:
            raise self.error
        return x


@pytest.mark.parametrize("name", ["fp8_hybrid", "fp16_scaler"])
@pytest.mark.parametrize("then", ["train", "evaluate", "by hand"])
def test_a_loop_goes_on_after_a_ctrl_c_as_after_an_error(name: str, then: str) -> None:
    """In a notebook. torch runs no hooks after a KeyboardInterrupt, and the context stayed open for good."""
    outcomes: list[list[Tensor]] = []
    for error in (RuntimeError, KeyboardInterrupt):
        precision = Precision(recipe(name))
        model = precision.prepare(Interrupted(error, at=2))
        optimizer = precision.wrap(adamw(model))
        seen: list[Tensor] = []
        for step in range(4):
            x, y = batch(step)
            try:
                out = model(x)
            except error:
                if then == "evaluate":
                    with precision.evaluating():
                        seen.append(model(x))
                if then == "by hand":
                    with precision.context():
                        model(x)
                continue
            nn.functional.mse_loss(out, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [out.detach(), *(p.detach().clone() for p in model.parameters())]
        assert not torch.is_autocast_enabled("cpu")
        outcomes.append(seen)
    for after_error, after_interrupt in zip(*outcomes, strict=True):
        assert after_interrupt.dtype == torch.float32
        assert torch.equal(after_interrupt, after_error)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.body, self.reentrant = nn.Linear(16, 16), mlp(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(self.body, self.first(x), use_reentrant=self.reentrant)
        assert isinstance(out, Tensor)
        return out


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["fp8_hybrid", "fp16_scaler"])
def test_checkpointed_forwards_run_again_the_same(name: str, reentrant: bool) -> None:
    assert differences(*both_loops(recipe(name), lambda: Checkpointed(reentrant))) == []


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", RUNGS)
def test_a_checkpoint_that_the_loop_makes_runs_the_same_again(name: str, reentrant: bool) -> None:
    """It remembers the autocast around it, which is none: the context is entered inside of it."""
    results = []
    for use in (True, False):
        precision, model = prepared(recipe(name))
        optimizer = adamw(model)
        wrapped = precision.wrap(optimizer)
        for step in range(4):
            x, y = batch(step)
            first = model[0](x)
            hidden = (
                checkpoint(model[2], first, use_reentrant=reentrant) if use else model[2](first)
            )
            assert isinstance(hidden, Tensor)
            nn.functional.mse_loss(hidden, y).backward()
            wrapped.step()
            wrapped.zero_grad()
        results.append(snapshot(precision, model, optimizer))
    assert differences(*results) == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_blocks_may_be_compiled() -> None:
    def compiled(model: nn.Module) -> None:
        assert isinstance(model, nn.Sequential)
        for block in (model[0], model[2]):
            block.compile(backend="aot_eager", fullgraph=True)

    assert differences(*both_loops(recipe(), mlp, compiled, steps=3)) == []


def test_a_copy_and_a_pickle() -> None:
    precision, model = prepared(recipe())
    wrapped = precision.wrap(adamw(model))
    standard_step(model, wrapped, 0)
    teacher = copy.deepcopy(model).requires_grad_(False)
    before = precision.state_dict()
    with torch.no_grad():
        assert torch.equal(teacher(batch(1)[0]), model(batch(1)[0]))
    assert differences(before, precision.state_dict()) == []
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    x, y = batch(0)
    nn.functional.mse_loss(loaded(x), y).backward()
    torch.optim.SGD(loaded.parameters(), lr=0.1).step()
