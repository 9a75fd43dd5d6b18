"""Norm and shares of gradients against oracles in float64 and plain loops; nothing is read by the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from harness.core.config import TrainConfig
from harness.core.health import grad_health, grad_norm, l2_norm
from harness.engines.torch_engine import TorchEngine
from harness.optim.optimizers import build_optimizer
from harness.optim.schedule import Schedule
from harness.precision.loss_scale import LossScale
from harness.precision.recipe import LossScaleConfig
from tests.support.updates import finish


def params_of(*gradients: Tensor) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    return params


def exact_norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))


def share_by_hand(gradients: Sequence[Tensor]) -> float:
    """The definition, element by element."""
    zeros = inside = 0
    for gradient in gradients:
        rows = (
            gradient.reshape(len(gradient), -1).tolist()
            if gradient.ndim > 1
            else [gradient.tolist()]
        )
        live_rows = [row for row in rows if any(row)]
        live_columns = [
            column for column in range(len(rows[0])) if any(row[column] for row in rows)
        ]
        if live_rows:
            kept = [row[column] for row in live_rows for column in live_columns]
        else:
            kept = [value for row in rows for value in row]
        inside += len(kept)
        zeros += kept.count(0.0)
    return zeros / inside


def test_the_norm_of_a_very_large_tensor_is_exact() -> None:
    # All of one sign and nearly one size: a plain fp32 sum over 38M of these is 0.3% off.
    gradient = torch.full((38_000_001,), 0.01)
    gradient[::2] = 0.011
    exact = math.sqrt(19_000_000 * float(gradient[1]) ** 2 + 19_000_001 * float(gradient[0]) ** 2)
    health = grad_health(params_of(gradient), scaled=False)
    assert health.norm.dtype == torch.float32
    assert health.norm.ndim == 0
    assert abs(health.norm.item() / exact - 1) < 1e-6


def test_on_a_cpu_a_large_tensor_is_not_copied_whole_to_float64() -> None:
    """Such copies made the norm of 124M parameters four times slower, and took 309 MB."""
    gradient = torch.ones(3_000_001)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        assert l2_norm([gradient]).item() == pytest.approx(math.sqrt(3_000_001), rel=1e-7)
    events = profiler.events()
    assert events
    assert max(event.self_cpu_memory_usage for event in events) < gradient.nbytes / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shapes",
    [
        [(2_000_003,)],
        [(64,)] * 50,
        [(300, 1000), (), (0, 4), (16_384,), (16_385,)],
        [(1_048_576,), (3, 3)],
    ],
)
def test_the_norm_is_exact_in_every_precision(
    dtype: torch.dtype, shapes: list[tuple[int, ...]]
) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [
        (torch.rand(shape, generator=generator) * 1e-3 + 1e-2).to(dtype) for shape in shapes
    ]
    health = grad_health(params_of(*gradients), scaled=True)
    assert abs(health.norm.item() / exact_norm(gradients) - 1) < 1e-6
    assert torch.equal(health.norm, grad_norm(params_of(*gradients)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_tensors_in_half_precision_are_as_exact(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(16_384, generator=generator).to(dtype) for _ in range(20)]
    assert abs(l2_norm(gradients).item() / exact_norm(gradients) - 1) < 1e-6


def test_the_norm_does_not_depend_on_the_memory_layout() -> None:
    weight = torch.randn(64, 32, 3, 3, generator=torch.Generator().manual_seed(1))
    other = weight.to(memory_format=torch.channels_last)
    wide = torch.randn(400, 300, generator=torch.Generator().manual_seed(2))
    assert l2_norm([weight]).item() == pytest.approx(l2_norm([other]).item(), rel=1e-6)
    assert l2_norm([wide.t()]).item() == pytest.approx(exact_norm([wide]), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1_000, 70_000, 199_999])
def test_one_bad_element_shows_in_the_norm(bad: float, place: int) -> None:
    gradient = torch.ones(200_000)
    gradient[place] = bad
    health = grad_health(params_of(gradient), scaled=True)
    assert not torch.isfinite(health.norm)
    assert health.zeros.item() == 0.0


def test_zeros_are_counted_outside_empty_rows_and_columns() -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(40, 30, generator=generator)
    weight[torch.rand(40, 30, generator=generator) < 0.3] = 0.0
    weight[[3, 7]] = 0.0  # masked units
    weight[:, [2, 5, 9]] = 0.0  # units of the layer before that are never active
    embedding = torch.zeros(500, 8)
    embedding[[1, 44, 101]] = torch.randn(3, 8, generator=generator)
    embedding[44, 2] = 0.0
    filters = torch.randn(6, 4, 3, 3, generator=generator)
    filters[1, 2, 0, 0] = 0.0
    bias = torch.tensor([0.0, 1.0, 0.0])
    gradients = [weight, embedding, filters, bias]
    assert grad_health(params_of(*gradients), scaled=True).zeros.item() == pytest.approx(
        share_by_hand(gradients)
    )
    assert grad_health(params_of(embedding), scaled=True).zeros.item() == pytest.approx(1 / 24)
    assert grad_health(params_of(bias), scaled=True).zeros.item() == 0.0


def test_a_tensor_that_no_gradient_reaches_counts_in_full() -> None:
    gradients = [torch.zeros(10, 10), torch.ones(10, 30), torch.zeros(())]
    assert grad_health(params_of(*gradients), scaled=True).zeros.item() == pytest.approx(101 / 401)


def test_values_over_half_of_fp16s_largest_are_near_the_limit() -> None:
    gradient = torch.tensor([[32752.0, -32768.0], [1.0, 65504.0]])
    assert grad_health(
        params_of(gradient, torch.ones(4)), scaled=True
    ).near_limit.item() == pytest.approx(2 / 8)
    assert grad_health(params_of(gradient.half()), scaled=True).near_limit.item() == pytest.approx(
        2 / 4
    )


def test_large_tensors_are_sampled_and_weigh_as_much_as_they_hold() -> None:
    generator = torch.Generator().manual_seed(5)
    large = torch.ones(8192, 1024)
    large[torch.rand(8192, 1024, generator=generator) < 0.2] = 0.0
    small = torch.ones(1024, 512)
    zeros = grad_health(params_of(large, small), scaled=True).zeros.item()
    assert zeros == pytest.approx(0.2 * 16 / 17, rel=0.02)


def test_without_a_scale_or_a_gradient_the_shares_are_unknown() -> None:
    health = grad_health(params_of(torch.zeros(3, 3)), scaled=False)
    assert math.isnan(health.zeros.item())
    assert math.isnan(health.near_limit.item())
    nothing = grad_health([nn.Parameter(torch.zeros(3))], scaled=True)
    assert nothing.norm.item() == 0.0
    assert math.isnan(nothing.zeros.item())


@pytest.mark.parametrize("scaled", [False, True])
def test_nothing_is_read_by_the_host(scaled: bool) -> None:
    params = params_of(
        *(torch.randn(shape) for shape in ((300, 200), (200,), (40_000,), (8, 4, 3, 3), ()))
    )
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        grad_health(params, scaled=scaled)
    seen = {event.key: event.count for event in profiler.key_averages()}
    assert seen["aten::linalg_vector_norm"] > 0, "the profiler saw the pass"
    assert not seen.keys() & {
        "aten::_local_scalar_dense",
        "aten::item",
        "aten::nonzero",
        "aten::is_nonzero",
    }
    assert ("aten::ne" in seen) == scaled, "without a loss scale the shares cost nothing"


def fp16_gradients(loss_factor: float, loss_scale: float) -> list[nn.Parameter]:
    """Gradients of a small network under fp16 autocast; no activation is ever exactly 0."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)
    )
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(32, 64)).float().square().mean() * loss_factor
    (loss * loss_scale).backward()
    return list(model.parameters())


def test_what_fp16_rounds_away_are_zeros_in_fp32_and_a_scale_saves_it() -> None:
    params = fp16_gradients(1e-5, 1.0)
    assert all(param.grad is not None and param.grad.dtype == torch.float32 for param in params)
    lost = grad_health(params, scaled=True).zeros.item()
    assert lost > 0.2
    saved = grad_health(fp16_gradients(1e-5, 65536.0), scaled=True).zeros.item()
    assert saved < 0.005 < lost


@pytest.mark.parametrize(("scale", "measure"), [(65536.0, True), (65536.0, False), (None, True)])
def test_the_engine_measures_what_it_is_asked_of_scaled_gradients(
    scale: float | None, measure: bool
) -> None:
    model = nn.Linear(3, 2, bias=False)
    device = torch.device("cpu")
    engine = TorchEngine(
        model,
        build_optimizer(model, TrainConfig(), device),
        Schedule(lr=0.01, warmup_steps=0, total_steps=10, min_lr_ratio=0.1),
        1.0,
        loss_scale=None if scale is None else LossScale(LossScaleConfig(init=scale), device),
        device=device,
    )
    engine.backward((model.weight * torch.tensor([[0.0, 0.6, 0.3], [0.1, 0.2, 0.0]])).sum())
    figures = finish(engine, measure=measure)
    assert figures["grad_norm"].item() == pytest.approx(math.sqrt(0.5), rel=1e-6)
    if scale is None or not measure:
        assert math.isnan(figures["grad_zeros"].item())
        assert math.isnan(figures["grad_near_limit"].item())
    else:
        # No row or column is empty; only 0.6 * 65536 is over 32752.
        assert figures["grad_zeros"].item() == pytest.approx(2 / 6)
        assert figures["grad_near_limit"].item() == pytest.approx(1 / 6)
