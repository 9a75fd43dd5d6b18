"""The torchao rung, emulated on the CPU: conversion, training, amax against its definition, demotion, state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.capability.probe import probe
from harness.core.errors import CheckpointError
from harness.core.protocols import PrecisionBackend
from harness.precision.convert import build_backend
from harness.precision.plan import make_plan, resolve
from harness.precision.recipe import Recipe, load_recipe

CPU = torch.device("cpu")
APPLY = torch.zeros(())


def same(values: torch.Tensor) -> torch.Tensor:
    return values


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\n"
        "ladder: [{backend: torchao, precision: fp8, tiers: [CPU, ADA, HOPPER, BLACKWELL]}]\n"
        "layers: {min_features: 16, exclude: [head]}\n"
    )
    return load_recipe(str(path))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.head = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(F.silu(self.up(x))))


def backend_for(model: nn.Module, recipe: Recipe) -> PrecisionBackend:
    facts = probe()
    rung, verdicts = resolve(recipe, facts)
    assert rung is not None
    assert rung.backend == "torchao"
    return build_backend(make_plan(recipe, facts, rung, verdicts, model), recipe, model, CPU)


def step(
    backend: PrecisionBackend, model: nn.Module, x: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    backend.begin_window(sample=True)
    with backend.context():
        loss = F.mse_loss(model(x).float(), target)
    with backend.backward_context():
        loss.backward()
    return loss.detach()


def test_only_planned_layers_are_converted_parameters_keep_identity(recipe: Recipe) -> None:
    model = Mlp()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    backend = backend_for(model, recipe)
    assert backend.layers == ("up", "down")
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    kinds = {name: type(module).__name__ for name, module in model.named_children()}
    assert kinds == {"up": "WatchedLinear", "down": "WatchedLinear", "head": "Linear"}
    assert set(model.state_dict()) == set(Mlp().state_dict())


def test_hooks_names_and_attributes_of_a_layer_survive_conversion(recipe: Recipe) -> None:
    model = Mlp()
    hooked = model.up.register_forward_hook(lambda module, args, out: 2 * out)  # pyright: ignore[reportOperatorIssue]
    model.alias = model.up
    model.down.rate = torch.tensor(0.5)
    model.eval()
    backend = backend_for(model, recipe)
    assert model.alias is model.up
    assert model.down.rate == torch.tensor(0.5)
    assert not any(module.training for module in model.modules())

    x = torch.randn(16, 32)
    with torch.no_grad(), backend.context():
        doubled = model.alias(x)
        hooked.remove()
        assert torch.equal(doubled, 2 * model.up(x))
    assert type(model.alias).__name__ == "WatchedLinear"


@pytest.mark.parametrize("dynamic", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_it_trains(recipe: Recipe, dynamic: str) -> None:
    policy = Recipe.model_validate({**recipe.model_dump(), "fp8": {"dynamic": dynamic}})
    model = Mlp()
    backend = backend_for(model, policy)
    x, target = torch.randn(64, 32), torch.randn(64, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, stats = [], torch.zeros(6, 6)
    for _ in range(20):
        losses.append(step(backend, model, x, target))
        stats = backend.end_window(backend.amax(), APPLY, same)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]
    assert (stats[0] > 0).all(), "every slot saw values: FP8 really ran"
    least = 1.0 if dynamic == "tensorwise" else 0.5  # by rows, scales are powers of two
    assert ((stats[2] > least - 1e-6) & (stats[2] < 1 + 1e-6)).all()
    assert (stats[3:5] < 1e-2).all(), (
        "dynamic scales clip and lose next to nothing of healthy tensors"
    )
    assert (stats[5] > 20).all()


def test_what_the_casts_lose_is_what_torchaos_own_casts_lose(recipe: Recipe) -> None:
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    model = Mlp()
    backend = backend_for(model, recipe)
    x = torch.randn(64, 32)
    x[:, 3] = 2.0**20
    step(backend, model, x, torch.zeros(64, 32))
    clipped, underflow, decibels, *_ = backend.end_window(backend.amax(), APPLY, same)[
        3:, 0
    ].tolist()
    rounded = x.bfloat16()
    theirs = hp_tensor_to_float8_dynamic(
        rounded, torch.float8_e4m3fn, LinearMMConfig()
    ).to_original_precision()
    assert clipped == 0.0
    assert underflow == ((theirs == 0) & (rounded != 0)).float().mean().item() > 0.5
    noise = (theirs.double() - rounded.double()).square().sum()
    assert decibels == pytest.approx(
        10 * torch.log10(rounded.double().square().sum() / noise).item(), abs=0.1
    )


@pytest.mark.parametrize("dynamic", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("size", [1e-3, 1e-15, 1e-22])
def test_scale_and_losses_are_of_the_scales_that_torchao_casts_with(
    recipe: Recipe, dynamic: str, size: float
) -> None:
    """By rows they are powers of two, and an amax under 1e-12 counts as 1e-12: tiny gradients are flushed to zero."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, LinearMMConfig

    model = nn.Sequential(nn.Linear(32, 64))
    fp8 = recipe.fp8.model_copy(update={"dynamic": dynamic})
    layers = recipe.layers.model_copy(update={"exclude": []})
    backend = backend_for(model, recipe.model_copy(update={"fp8": fp8, "layers": layers}))
    torch.manual_seed(0)
    x = torch.randn(33, 32)
    x[:, 3] = 1e4
    grad = (size * torch.randn(33, 64)).bfloat16()
    backend.begin_window(sample=True)
    with backend.context():
        out = model(x)
    with backend.backward_context():
        out.backward(grad)
    stats = backend.end_window(backend.amax(), APPLY, same)

    by_rows = dynamic == "rowwise"
    granularity = ScalingGranularity.AXISWISE if by_rows else ScalingGranularity.TENSORWISE
    gradient = torch.float8_e4m3fn if by_rows else torch.float8_e5m2
    for slot, tensor, dtype in [(0, x.bfloat16(), torch.float8_e4m3fn), (2, grad, gradient)]:
        theirs = hp_tensor_to_float8_dynamic(
            tensor,
            dtype,
            LinearMMConfig(),
            scaling_granularity=granularity,
            axiswise_dim=-1 if by_rows else None,
            round_scales_to_power_of_2=by_rows,
        )
        assert isinstance(theirs, Float8TrainingTensor)
        amax, scale, saturation, clipped, underflow, decibels, *_ = stats[:, slot].tolist()
        assert amax == tensor.abs().max().item()
        assert scale == theirs._scale.min().item()
        assert saturation == pytest.approx(amax * scale / torch.finfo(dtype).max)
        assert clipped == 0
        raw = theirs._data.double()
        assert underflow == pytest.approx((raw == 0).double().mean().item())
        exact = tensor.double()
        noise = (exact - raw / theirs._scale.double()).square().sum()
        expected = 10 * torch.log10(exact.square().sum() / noise)
        assert decibels == pytest.approx(expected.item(), abs=1e-3)


def test_fp8_really_ran(recipe: Recipe) -> None:
    """Inside a context outputs carry E4M3 rounding (a relative error of percents); outside of it they are plain."""
    model = Mlp()
    backend = backend_for(model, recipe)
    plain = Mlp().up
    x = torch.randn(64, 32)
    with torch.no_grad():
        assert torch.equal(model.up(x), plain(x))
        with backend.context():
            error = (model.up(x).float() - plain(x)).norm() / plain(x).norm()
    assert 0.01 < error < 0.06


def test_amax_is_the_largest_magnitude_of_each_operand_over_micro_batches(recipe: Recipe) -> None:
    model = Mlp()
    backend = backend_for(model, recipe)
    seen: list[torch.Tensor] = []
    backend.begin_window(sample=False)
    for scale in (3.0, 1.0):
        x = scale * torch.randn(16, 32)
        with backend.context():
            hidden = model.up(x)
        hidden.backward(grad := torch.randn(16, 64, dtype=torch.bfloat16))
        seen += [torch.stack([x.bfloat16().abs().max().float(), grad.abs().max().float()])]
    expected = torch.stack(seen).amax(dim=0)
    amax = dict(zip(backend.slot_names, backend.amax().tolist(), strict=True))
    assert amax["up.input"] == expected[0]
    assert amax["up.weight"] == model.up.weight.abs().max()
    assert amax["up.grad_output"] == expected[1]
    assert amax["down.input"] == 0.0, "down did not run"
    stats = backend.end_window(backend.amax(), APPLY, same)
    assert stats[1, 0].item() == pytest.approx(448 / expected[0].item())
    backend.begin_window(sample=False)
    assert not backend.amax().any()


@pytest.mark.parametrize("dynamic", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
def test_no_rows_change_nothing(recipe: Recipe, dynamic: str, shape: tuple[int, ...]) -> None:
    """As of an expert that gets no token."""
    policy = Recipe.model_validate({**recipe.model_dump(), "fp8": {"dynamic": dynamic}})
    x, target = torch.randn(16, 32), torch.randn(16, 32)

    class Also(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nothing = super().forward(torch.zeros(shape, requires_grad=True))
            assert nothing.shape == shape
            return super().forward(x) + nothing.sum()

    found: list[list[torch.Tensor | None]] = []
    for model in (Mlp(), Also()):
        backend = backend_for(model, policy)
        step(backend, model, x, target)
        stats = backend.end_window(backend.amax(), APPLY, same)
        found.append([stats, *(parameter.grad for parameter in model.parameters())])
    for alone, beside in zip(*found, strict=True):
        assert alone is not None
        assert beside is not None
        assert torch.equal(alone, beside)


def test_evaluation_leaves_no_trace(recipe: Recipe) -> None:
    model = Mlp()
    backend = backend_for(model, recipe)
    step(backend, model, torch.randn(16, 32), torch.randn(16, 32))
    before = backend.amax()
    with torch.no_grad(), backend.context():
        model(torch.full((16, 32), 1e6))
    assert torch.equal(backend.amax(), before)


def test_a_demoted_layer_is_plain_bf16_and_still_watched(recipe: Recipe) -> None:
    model = Mlp()
    backend = backend_for(model, recipe)
    backend.switch(demote=["up"], promote=[])
    assert backend.demoted == ("up",)
    x = torch.randn(16, 32)
    with backend.context():
        out = model.up(x)
    expected = F.linear(x.bfloat16(), model.up.weight.bfloat16(), model.up.bias.bfloat16())
    assert torch.equal(out, expected)
    step(backend, model, x, torch.randn(16, 32))
    assert (backend.amax() > 0).all()
    backend.switch(demote=[], promote=["up"])
    assert backend.demoted == ()
    with backend.context():
        assert not torch.equal(model.up(x), expected), "back in FP8"


def test_state_round_trip_and_refusal_of_another_models_state(recipe: Recipe) -> None:
    model = Mlp()
    backend = backend_for(model, recipe)
    step(backend, model, torch.randn(16, 32), torch.randn(16, 32))
    backend.switch(demote=["down"], promote=[])
    tensors, meta = backend.state_dict()
    fresh = backend_for(Mlp(), recipe)
    fresh.load_state_dict(tensors, meta)
    assert fresh.demoted == ("down",)
    assert torch.equal(fresh.amax(), backend.amax())
    with pytest.raises(CheckpointError, match="other slots"):
        fresh.load_state_dict(tensors, {**meta, "slots": ["x.input"]})
    with pytest.raises(CheckpointError, match="delayed scaling"):
        fresh.load_state_dict({**tensors, "history": torch.zeros(16, 6)}, meta)


@pytest.mark.slow
def test_torchao_is_imported_only_when_its_rung_is_taken() -> None:
    code = "import sys; import harness.precision.convert, harness.build; sys.exit('torchao' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("dynamic", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_frozen_weights_leave_other_gradients_their_bits(dynamic: str, recipe: Recipe) -> None:
    recipe = recipe.model_copy(update={"fp8": recipe.fp8.model_copy(update={"dynamic": dynamic})})
    found = []
    for frozen in (False, True):
        model = Mlp()
        model.down.weight.requires_grad_(not frozen)
        torch.manual_seed(1)
        x = torch.randn(64, 32).requires_grad_()
        backend = backend_for(model, recipe)
        step(backend, model, x, torch.randn(64, 32))
        assert (model.down.weight.grad is None) is frozen
        found.append((x.grad, model.up.weight.grad, model.up.bias.grad, backend.amax()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
