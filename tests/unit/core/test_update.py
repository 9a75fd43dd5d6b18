"""The gated update against fp64 oracles: what a skip leaves alone, what a divisor does, how exact the norm is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.core.facts import StepFacts
from harness.core.health import grad_norm, to_device
from harness.core.metrics import REDUCED
from harness.core.update import (
    InFlight,
    StepClock,
    TorchGradients,
    _not_reduced,
    clip_divisor,
    gated_step,
    init_optimizer_state,
    takes_found_inf,
    update,
)
from harness.precision.backends.autocast import AutocastBackend

SKIP, APPLY = torch.ones(()), torch.zeros(())
Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Build] = {
    "fused adamw": lambda ps: torch.optim.AdamW(
        ps, lr=torch.tensor(0.01), weight_decay=0.1, fused=True
    ),
    "fused adam amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True, fused=True),
    "fused sgd": lambda ps: torch.optim.SGD(ps, lr=torch.tensor(0.01), momentum=0.9, fused=True),
    "fused sgd dampened": lambda ps: torch.optim.SGD(
        ps, lr=0.01, momentum=0.9, dampening=0.5, fused=True
    ),
    "fused adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
}


def make(build: Build) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(3)
    params = [
        nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (7,), (2, 2, 2))
    ]
    return params, build(params)


def give_gradients(params: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator) * scale


def snapshot(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors = [param.detach().clone() for param in params]
    for param in params:
        tensors += [
            v.clone() for _, v in sorted(optimizer.state[param].items()) if isinstance(v, Tensor)
        ]
    return tensors


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_leaves_weights_moments_and_counters_bit_equal(name: str) -> None:
    params, optimizer = make(OPTIMIZERS[name])
    give_gradients(params, 1)
    gated_step(optimizer, APPLY, torch.tensor(1.0))
    before = snapshot(params, optimizer)
    for param in params:
        param.grad = torch.full_like(param, float("nan"))
    gated_step(optimizer, SKIP, torch.tensor(float("nan")))
    after = snapshot(params, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    give_gradients(params, 2)
    gated_step(optimizer, APPLY, torch.tensor(1.0))
    assert not torch.equal(params[0], before[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_first_step_does_not_change_what_follows(name: str) -> None:
    results = []
    for skip_first in (False, True):
        params, optimizer = make(OPTIMIZERS[name])
        if skip_first:
            for param in params:
                param.grad = torch.full_like(param, float("inf"))
            gated_step(optimizer, SKIP, torch.tensor(1.0))
        for seed in (1, 2):
            give_gradients(params, seed)
            gated_step(optimizer, APPLY, torch.tensor(1.0))
        results.append(snapshot(params, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["fused sgd", "adamw"])
def test_the_divisor_divides_the_gradients(name: str) -> None:
    params, optimizer = make(OPTIMIZERS[name])
    oracle = [param.detach().double() for param in params]
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in oracle]
    for step, seed in enumerate((1, 2, 3), start=1):
        give_gradients(params, seed, scale=4096.0)
        gradients = [param.grad.double() / 1000.0 for param in params if param.grad is not None]
        for w, g, (m, v) in zip(oracle, gradients, moments, strict=True):
            if name == "fused sgd":
                m.mul_(0.9).add_(g)
                w.sub_(0.01 * m)
            else:
                w.mul_(1 - 0.01 * 0.1)
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g * g)
                w.sub_(0.01 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))
        gated_step(optimizer, APPLY, torch.tensor(1000.0))
    for param, w in zip(params, oracle, strict=True):
        torch.testing.assert_close(param.detach().double(), w, rtol=2e-6, atol=2e-6)


def test_fused_and_plain_adamw_take_the_same_divisor() -> None:
    results = []
    for name in ("fused adamw", "adamw"):
        params, optimizer = make(OPTIMIZERS[name])
        for seed in (1, 2):
            give_gradients(params, seed, scale=100.0)
            gated_step(optimizer, APPLY, torch.tensor(37.0))
        results.append(params)
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-6)


def test_which_optimizers_cost_a_host_read() -> None:
    assert {name: takes_found_inf(make(build)[1]) for name, build in OPTIMIZERS.items()} == {
        name: name.startswith("fused") for name in OPTIMIZERS
    }


def test_materialised_state_trains_bit_equal_to_lazy_state() -> None:
    for name in ("fused adamw", "fused adam amsgrad", "fused sgd", "adamw"):
        results = []
        for eager in (False, True):
            params, optimizer = make(OPTIMIZERS[name])
            if eager:
                init_optimizer_state(optimizer)
                assert all(optimizer.state[param] for param in params)
            for seed in (1, 2):
                give_gradients(params, seed)
                optimizer.step()
            results.append(snapshot(params, optimizer))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [[3_000_001], [64] * 50, [300_000, 1, 65_537]])
def test_the_norm_agrees_with_fp64(dtype: torch.dtype, sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    for param in params:
        # All of one sign and nearly one size: the case in which a plain fp32 sum drifts.
        param.grad = (torch.rand(param.shape, generator=generator) * 1e-3 + 1e-2).to(dtype)
    exact = (
        sum(param.grad.double().square().sum() for param in params if param.grad is not None) ** 0.5
    )
    norm = grad_norm(params)
    assert norm.dtype == torch.float32
    assert norm.ndim == 0
    assert abs(norm.double() / exact - 1).item() < 1e-6


def test_the_norm_spans_dtypes_and_ignores_parameters_without_gradient() -> None:
    params = [
        nn.Parameter(torch.zeros(1, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float32)
    ]
    params[0].grad, params[1].grad = torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.bfloat16)
    assert grad_norm(params).item() == 5.0
    assert grad_norm([params[2]]).item() == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 70_000, 199_999])
def test_one_bad_element_makes_the_norm_non_finite(bad: float, place: int) -> None:
    param = nn.Parameter(torch.zeros(200_000))
    param.grad = torch.ones(200_000)
    assert torch.isfinite(grad_norm([param]))
    param.grad[place] = bad
    assert not torch.isfinite(grad_norm([param]))


@pytest.mark.parametrize(
    ("norm", "scale", "expected"), [(0.5, 1.0, 1.0), (3.0, 1.0, 2.0), (3.0, 8.0, 16.0)]
)
def test_clip_divisor(norm: float, scale: float, expected: float) -> None:
    assert clip_divisor(torch.tensor(norm), 1.5, torch.tensor(scale)).item() == expected


def test_a_number_that_was_not_measured_does_not_enter_the_max_over_ranks() -> None:
    """`peak_memory` of a GPU that allocated nothing is NaN, and what a MAX makes of NaN is not defined."""

    class Reduced(TorchGradients):
        """Keeps what is reduced, and lets another rank have measured 2 GiB."""

        def max_(self, values: Tensor) -> Tensor:
            assert not values.isnan().any()
            other = torch.full_like(values, -math.inf)
            other[2 + [name for name, _ in REDUCED].index("peak_memory")] = 2.0
            return torch.maximum(values, other)

    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    cpu = torch.device("cpu")
    gradients = Reduced([torch.optim.SGD([weight])], [weight], math.inf, None, cpu)
    own = {"loss": 1.0, "peak_memory": math.nan}
    figures, _ = update(gradients, AutocastBackend("fp32", cpu), own)
    assert figures["peak_memory"] == 2.0


@pytest.mark.parametrize("loss", [1.5, math.nan])
def test_numbers_of_the_host_give_the_same_facts_as_tensors(loss: float) -> None:
    """`loss` and `applied_steps` are figures that ranks agree on; `peak_memory` is reduced over ranks."""

    def facts_of(own: dict[str, float | Tensor]) -> StepFacts:
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        optimizer = torch.optim.SGD([weight], lr=0.5)
        cpu = torch.device("cpu")
        gradients = TorchGradients([optimizer], [weight], math.inf, None, cpu)
        figures, slots = update(gradients, AutocastBackend("fp32", cpu), own)
        clock = StepClock(cpu)
        sent = InFlight.send(figures, slots, clock, step=1, window=0, slot_names=())
        assert weight.tolist() == ([0.5, 0.5] if math.isfinite(loss) else [1.0, 1.0])
        return replace(sent.facts(), seconds=0.0)

    own = {"loss": loss, "applied_steps": 3.0, "peak_memory": 2.5}
    numbers = facts_of({**own})
    tensors = facts_of({name: torch.tensor(value) for name, value in own.items()})
    assert repr(numbers) == repr(tensors)
    assert (numbers.applied_steps, numbers.peak_memory) == (3, 2.5)
    assert numbers.applied == math.isfinite(loss)


def test_a_number_of_the_host_reaches_the_device_whatever_the_default_device() -> None:
    with torch.device("meta"):
        figures = _not_reduced({"loss": 1.5}, torch.device("cpu"))
    assert figures["loss"].item() == 1.5


@pytest.mark.parametrize("rate", ["tensor", "number"])
def test_a_learning_rate_goes_to_a_gpu_from_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, rate: str
) -> None:
    """A tensor on the host is a usual learning rate of fused optimizers. From pageable memory the host would wait."""
    sent: list[Tensor] = []

    def to_device(tensor: Tensor, device: torch.device) -> Tensor:
        sent.append(tensor)
        return tensor.to(device)

    monkeypatch.setattr("harness.core.update.to_device", to_device)
    lr = torch.tensor(0.25) if rate == "tensor" else 0.25
    params, optimizer = make(lambda ps: torch.optim.AdamW(ps, lr=lr, fused=True))
    gradients = TorchGradients([optimizer], params, math.inf, None, torch.device("cpu"))
    found = gradients._learning_rate(SKIP)
    assert found.item() == 0.25
    if rate == "tensor":
        (given,) = sent
        assert given is not lr, "the schedule writes into it before the copy is made"


def test_what_is_on_a_gpu_already_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to pin a tensor of a GPU."""

    class OnGpu:
        device = torch.device("cuda", 0)

        def pin_memory(self) -> Tensor:
            raise RuntimeError("only dense CPU tensors can be pinned")

        def to(self, device: torch.device, **_: object) -> str:
            return f"on {device}"

    there: Any = OnGpu()
    assert to_device(there, torch.device("cuda", 1)) == "on cuda:1"
