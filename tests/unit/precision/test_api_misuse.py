"""harness.Precision in the wrong order or on the wrong thing, and moving layers between FP8 and BF16."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from api_support import EAGER, adamw, batch, forward_backward, mlp, prepared, recipe, train_step
from torch import nn

import harness
from harness import Precision
from harness.capability.probe import probe
from harness.core.errors import ConfigError, MachineError, MisuseError
from harness.precision.backends.native import NativeLinear
from harness.precision.prepared import _device_problems
from harness.precision.recipe import Recipe

pytestmark = pytest.mark.usefixtures("cpu_on_purpose")


def test_prepare_keeps_parameters_ties_and_optimizers() -> None:
    model = mlp()
    model.append(model[0])
    before = dict(model.named_parameters())
    optimizer = adamw(model)
    prepared_model = Precision(recipe()).prepare(model)
    assert prepared_model is model
    assert isinstance(model[0], NativeLinear)
    assert model[0] is model[3]
    assert {name: id(value) for name, value in model.named_parameters()} == {
        n: id(p) for n, p in before.items()
    }
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in before.values()}


def test_a_recipe_comes_by_name_or_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nladder: [{backend: autocast, precision: fp32, tiers: [CPU]}]\n")
    assert Precision.from_recipe(str(path)).recipe.name == "mine"
    with pytest.raises(ConfigError, match='did you mean "fp8_hybrid"'):
        Precision.from_recipe("fp8_hybrd")
    with pytest.raises(AttributeError, match="Precisions"):
        harness.Precisions  # noqa: B018


@pytest.mark.parametrize(
    "call",
    [
        lambda p: p.context().__enter__(),
        lambda p: p.backward(torch.zeros(())),
        lambda p: p.step(torch.optim.SGD(mlp().parameters())),
        lambda p: p.stats(),
        lambda p: p.plan,
        lambda p: p.demoted,
        lambda p: p.demote("*"),
        lambda p: p.state_dict(),
        lambda p: p.load_state_dict({}),
    ],
)
def test_nothing_works_before_prepare(call: Callable[[Precision], object]) -> None:
    with pytest.raises(
        MisuseError, match=r"no model was prepared[\s\S]*fix: model = precision.prepare"
    ):
        call(Precision.from_recipe("fp32"))


def half(model: nn.Sequential) -> nn.Module:
    return model.half()


def on_meta(model: nn.Sequential) -> nn.Module:
    return model.to("meta")


def lazy(model: nn.Sequential) -> nn.Module:
    return nn.Sequential(nn.LazyLinear(16), *model)


def frozen(model: nn.Sequential) -> nn.Module:
    return model.requires_grad_(False)


def wrapped(model: nn.Sequential) -> nn.Module:
    return nn.DataParallel(model)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (half, "4 trainable parameters are not float32, such as 0.weight"),
        (on_meta, "the parameters are on meta"),
        (lazy, r"2 parameters have no size yet, such as 0.weight[\s\S]*call the model once"),
        (frozen, "no trainable parameter"),
        (wrapped, "wrapped in DataParallel"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_a_model_that_cannot_be_prepared(
    spoil: Callable[[nn.Sequential], nn.Module], expected: str
) -> None:
    precision = Precision(recipe())
    with pytest.raises(MisuseError, match=expected):
        precision.prepare(spoil(mlp()))
    precision.prepare(mlp())
    with pytest.raises(MisuseError, match="called before"):
        precision.prepare(mlp())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's tracer looks at every tensor's
def test_a_layer_that_was_compiled_alone_is_refused() -> None:
    """Its compiled call would run without FP8; where a block is compiled, the layers in it run in FP8."""
    model = mlp()
    model[0].compile(backend="eager")
    with pytest.raises(MisuseError, match="compiled before it was prepared"):
        Precision(recipe()).prepare(model)
    plain = Precision(recipe("bf16"))
    plain.prepare(model)
    block, precision = mlp(), Precision(recipe())
    block.compile(backend="eager")
    precision.prepare(block)
    with precision.context():
        loss = block(torch.randn(16, next(block.parameters()).shape[1])).float().square().mean()
    precision.backward(loss)
    precision.step(adamw(block))
    stats = precision.stats()
    assert stats is not None
    assert (stats.amax > 0).all()


def test_patterns_that_match_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match='pattern "3" matches no Linear'):
        prepared(recipe(layers={"exclude": ["3"]}))


def test_a_model_without_fp8_layers_goes_down_the_ladder(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="harness.precision"):
        precision, _ = prepared(recipe(layers={"min_features": 64}))
    taken = [verdict.rung for verdict in precision.plan.rungs if verdict.taken]
    assert taken == ["autocast:bf16"] == [precision.plan.resolved]
    refused = next(verdict for verdict in precision.plan.rungs if verdict.rung == "native:fp8")
    assert refused.reason.startswith("no layer of this model can run in FP8: 0")
    assert "native:fp8 is not taken: no layer of this model can run in FP8 (0" in caplog.text


def test_without_a_rung_below_a_model_with_nothing_for_fp8_is_refused() -> None:
    policy = recipe(layers={"min_features": 64}).model_dump()
    policy["ladder"] = [rung for rung in policy["ladder"] if rung["precision"] == "fp8"]
    with pytest.raises(ConfigError, match="no layer of this model can run in FP8"):
        prepared(Recipe.model_validate(policy))


def test_a_recipe_without_a_rung_for_this_machine_is_refused() -> None:
    policy = recipe().model_dump()
    policy["ladder"] = [{"backend": "autocast", "precision": "bf16", "tiers": ["HOPPER"]}]
    with pytest.raises(
        MachineError, match=r"no rung of recipe fp8_hybrid runs on tier CPU[\s\S]*not for tier CPU"
    ):
        prepared(Recipe.model_validate(policy))


@pytest.mark.parametrize("name", ["fp8_hybrid", "fp16_scaler", "fp32"])
def test_calls_in_the_wrong_order(name: str) -> None:
    precision, model = prepared(recipe(name))
    optimizer = adamw(model)
    x, y = batch(0)
    with pytest.raises(MisuseError, match=r"no backward\(\) since the last step"):
        precision.step(optimizer)
    with pytest.raises(MisuseError, match=r"no forward in context\(\)"):
        precision.backward(nn.functional.mse_loss(model(x), y))
    with torch.no_grad(), precision.context():
        model(x)
    with pytest.raises(MisuseError, match=r"no forward in context\(\)"):
        precision.backward(nn.functional.mse_loss(model(x), y))
    with precision.context():
        loss = nn.functional.mse_loss(model(x).float(), y)
        for call in (
            lambda: precision.context().__enter__(),
            lambda: precision.backward(loss),
            lambda: precision.step(optimizer),
            precision.state_dict,
            lambda: precision.load_state_dict({}),
            lambda: precision.demote("*"),
        ):
            with pytest.raises(MisuseError, match=r"called inside context\(\)"):
                call()
    for bad, expected in ((loss.detach(), "does not require grad"), (loss.repeat(2), "has shape")):
        with pytest.raises(MisuseError, match=expected):
            precision.backward(bad)
    precision.backward(loss)
    for call in (
        precision.state_dict,
        lambda: precision.demote("*"),
        lambda: precision.promote("*"),
    ):
        with pytest.raises(MisuseError, match=r"between backward\(\) and step\(\)"):
            call()
    assert precision.step(optimizer).was_applied, "refused calls did no harm"
    with pytest.raises(MisuseError, match=r"with several optimizers: step\(\[first, second\]\)"):
        precision.step(optimizer)


def test_every_problem_of_a_step_is_named_at_once() -> None:
    precision, model = prepared(recipe())
    forward_backward(precision, model, 0)
    with pytest.raises(MisuseError) as caught:
        precision.step([adamw(mlp()), "adamw"], max_grad_norm=-1.0)  # pyright: ignore[reportArgumentType]
    text = str(caught.value)
    for expected in (
        "holds no parameter of the prepared model",
        "str is no torch.optim",
        "max_grad_norm is -1.0",
    ):
        assert expected in text
    with pytest.raises(MisuseError, match="no optimizer"):
        precision.step([])
    model.zero_grad()
    with pytest.raises(
        MisuseError, match=r"no parameter has a gradient[\s\S]*zero_grad\(\) after step"
    ):
        precision.step(adamw(model))


@pytest.mark.parametrize("name", ["fp8_hybrid", "fp16_scaler"])
def test_what_the_plain_loop_did_by_itself_is_refused(name: str) -> None:
    precision, model = prepared(recipe(name))
    optimizer = adamw(model)
    x, y = batch(0)
    with precision.context():
        loss = nn.functional.mse_loss(model(x).float(), y)
    loss.backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(MisuseError, match=r"no backward\(\) since the last step"):
        precision.step(optimizer)
    with pytest.raises(MisuseError, match=r"GradScaler is no torch\.optim\.Optimizer"):
        precision.step(torch.amp.GradScaler("cpu"))  # pyright: ignore[reportArgumentType]
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_a_model_that_moved_is_noticed() -> None:
    precision, model = prepared(recipe())
    model.to("meta")
    with (
        pytest.raises(MisuseError, match="prepared on cpu and is on meta now"),
        precision.context(),
    ):
        pass


@pytest.mark.parametrize("name", ["fp8_hybrid", "bf16"])
def test_a_model_that_was_cast_is_noticed(name: str) -> None:
    precision, model = prepared(recipe(name))
    model.bfloat16()
    refused = pytest.raises(
        MisuseError, match=r"prepared in torch\.float32 and is in torch\.bfloat16 now"
    )
    with refused, precision.context():
        pass


def half_of_it(model: nn.Sequential) -> None:
    model[2].half()


def one_bias(model: nn.Sequential) -> None:
    bias = model.get_parameter("2.bias")
    bias.data = bias.data.bfloat16()


def on_another_device(model: nn.Sequential) -> None:
    model[2].to("meta")


def replaced(model: nn.Sequential) -> None:
    model[2] = nn.Linear(32, 16)


def replaced_under_a_block(model: nn.Sequential) -> None:
    model[0] = nn.Sequential(nn.Linear(16, 32))


def another_forward(model: nn.Sequential) -> None:
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (another_forward, "its forward was replaced"),
        (half_of_it, r"is in torch\.float16 now \(2\.weight\)"),
        (one_bias, r"is in torch\.bfloat16 now \(2\.bias\)"),
        (on_another_device, r"is on meta now \(2\.weight\)"),
        (replaced, r"another module for 2, which was to run in"),
        (replaced_under_a_block, r"another module for 0, which was to run in"),
    ],
)
@pytest.mark.parametrize("name", ["fp8_hybrid", "fp16_scaler"])
@pytest.mark.parametrize("wrap", [True, False])
def test_a_part_that_changed_is_noticed(
    name: str, change: Callable[[nn.Sequential], None], told: str, wrap: bool
) -> None:
    precision, model = prepared(recipe(name))
    optimizer = adamw(model)
    train_step(precision, model, optimizer, 0)
    if wrap:
        precision.wrap(optimizer)
    change(model)
    forward = (
        (lambda: model(batch(1)[0])) if wrap else (lambda: forward_backward(precision, model, 1))
    )
    with pytest.raises(MisuseError, match=told):
        forward()


def test_adapters_around_a_layer_are_no_change() -> None:
    """As peft puts them: the layer that was prepared is still there, a level below."""

    class Adapter(nn.Module):
        def __init__(self, base_layer: nn.Module) -> None:
            super().__init__()
            self.base_layer, self.down = base_layer, nn.Linear(16, 4, bias=False)
            self.up = nn.Linear(4, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base_layer(x) + self.up(self.down(x))

    precision, model = prepared(recipe())
    model[0] = Adapter(model[0])
    optimizer = adamw(model)
    assert train_step(precision, model, optimizer, 0).was_applied
    model[0].base_layer = nn.Linear(16, 32)
    with pytest.raises(MisuseError, match="another module for 0"):
        forward_backward(precision, model, 1)


def test_two_models_have_two_precisions() -> None:
    first, generator = prepared(recipe(), seed=1)
    second, critic = prepared(recipe("fp16_scaler"), seed=2)
    optimizers = adamw(generator), adamw(critic)
    for step in range(3):
        x, y = batch(step)
        with first.context(), second.context():
            loss = nn.functional.mse_loss(critic(generator(x)).float(), y)
        first.backward(loss)
        assert first.step(optimizers[0]).was_applied
        critic.zero_grad()
        assert train_step(second, critic, optimizers[1], step).was_applied
        generator.zero_grad()
    assert first.plan.resolved != second.plan.resolved


def runs_in_fp8(precision: Precision, model: nn.Sequential, layer: int) -> bool:
    """Whether the layer's outputs differ from those of its bf16 twin."""
    linear = model[layer]
    assert isinstance(linear, nn.Linear)
    x = torch.randn(8, linear.in_features)
    with torch.no_grad(), precision.context():
        return not torch.equal(linear(x), nn.functional.linear(x, linear.weight, linear.bias))


def test_layers_move_by_name_and_stay() -> None:
    # Without the hold, this policy would promote a clean layer after a step.
    precision, model = prepared(
        recipe(fallback={"hits": 1, "window": 1, "dwell_steps": 1, "warmup_steps": 1})
    )
    optimizer = adamw(model)
    train_step(precision, model, optimizer, 0)
    assert runs_in_fp8(precision, model, 0)
    assert precision.demote("0*") == ("00",)
    assert precision.demote(["00", "0"]) == ()
    assert not runs_in_fp8(precision, model, 0)
    saved = precision.state_dict()
    for rehearsal in (True, False):
        for step in range(1, 6):
            assert train_step(precision, model, optimizer, step).switch is None
            assert precision.demoted == ("00",)
        if rehearsal:
            assert precision.promote("0") == ("00",)
            precision.load_state_dict(saved)
    stats = precision.stats()
    assert stats is not None
    assert stats.amax[0] == batch(5)[0].to(torch.bfloat16).abs().max().item(), (
        "the amax is kept warm"
    )
    assert precision.promote("*") == ("00",)
    assert precision.demoted == ()
    assert runs_in_fp8(precision, model, 0)
    with pytest.raises(MisuseError, match=r'pattern "blocks" matches no Linear[\s\S]*known: 0, 2'):
        precision.demote(["0", "blocks"])
    assert precision.demoted == ()


def test_where_nothing_is_fp8_there_is_nothing_to_move() -> None:
    precision, _ = prepared(recipe("bf16"))
    assert precision.demote("*") == ()
    with pytest.raises(MisuseError, match="matches no Linear"):
        precision.demote("blocks.*")


def test_a_name_in_the_place_of_a_recipe_is_refused_with_the_way() -> None:
    with pytest.raises(MisuseError, match=r"'fp8_hybrid' is no Recipe.*\n?.*from_recipe"):
        Precision(cast(Any, "fp8_hybrid"))


@pytest.mark.parametrize("frozen", [False, True])
def test_an_fp8_layer_that_is_read_and_never_called_is_named(
    caplog: pytest.LogCaptureFixture, frozen: bool
) -> None:
    """After the first step where its weight is trained: its figures are judged as the next one ends."""

    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.nn.functional.linear(x, self.up.weight, self.up.bias).relu())

    precision = Precision(recipe())
    model = Reads()
    model.up.weight.requires_grad_(not frozen)
    model = precision.prepare(model)
    optimizer = precision.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    with caplog.at_level(logging.WARNING, "harness.precision"):
        for step in range(52):
            assert ("fp8.dead" in caplog.text) == (step >= (51 if frozen else 2))
            model(torch.randn(16, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    told = "fp8.dead: 1 FP8 layers were not called, though their weights got gradients"
    if frozen:
        told = "fp8.dead: 3 FP8 tensors were all zero for 50 steps: up.input, up.weight, up.grad_output"
    assert caplog.text.count("fp8.dead") == 1
    assert told in caplog.text
    assert "down" not in caplog.text


def test_layers_that_are_idle_zero_or_tied_are_not_taken_for_ones_that_are_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Experts(torch.nn.Module):
        """One expert is not called in the first steps, one starts at zero behind zeros, two share their weight."""

        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
            self.zero, self.behind = (
                torch.nn.Linear(16, 16, bias=False),
                torch.nn.Linear(16, 16, bias=False),
            )
            self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
            self.second.weight = self.first.weight
            for layer in (self.zero, self.behind):
                torch.nn.init.zeros_(layer.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(self.used(x) + self.behind(self.zero(x)))

    precision = Precision(recipe())
    model = precision.prepare(Experts())
    optimizer = precision.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    with caplog.at_level(logging.WARNING, "harness.precision"):
        for _ in range(4):
            model(torch.randn(16, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "fp8.dead" not in caplog.text


@pytest.mark.parametrize(("policy", "moves"), [(recipe(fallback=EAGER), 1), (recipe(), 0)])
def test_the_fallback_acts_one_step_late_and_says_so(
    policy: Recipe, moves: int, caplog: pytest.LogCaptureFixture
) -> None:
    precision, model = prepared(policy)
    optimizer = adamw(model)
    with caplog.at_level(logging.WARNING, "harness.precision"):
        switches = [train_step(precision, model, optimizer, step).switch for step in range(4)]
    assert [switch is not None for switch in switches] == [False, False, moves == 1, False]
    assert len(precision.demoted) == moves
    assert ("precision.demote" in caplog.text) == (moves == 1)
    off, model = prepared(recipe(fallback={**EAGER, "enabled": False}))
    optimizer = adamw(model)
    assert [train_step(off, model, optimizer, step).switch for step in range(4)] == [None] * 4
    assert off.demoted == ()


def test_a_model_on_another_gpu_than_the_current_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Events and kernels go to the current GPU: a step's figures would be read before they are there."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    facts = probe()
    assert _device_problems([torch.device("cuda", 0)], facts) == []
    [problem] = _device_problems([torch.device("cuda", 1)], facts)
    assert problem.what == "the model is on cuda:1, and this process's current GPU is cuda:0"
    assert "torch.cuda.set_device(1)" in problem.fix
