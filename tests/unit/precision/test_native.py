"""The native backend: three FP8 GEMMs against a float64 oracle, timing of scales, skips, demotion."""

from __future__ import annotations

import math

import pytest
import torch
from native_support import APPLY, SKIP, backend_for, same, window
from torch import nn

from harness.precision import scaling


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16)


@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_backward_match_a_float64_oracle(bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 32, bias=bias)
    model = nn.Sequential(linear)
    backend = backend_for(model)
    window(backend, model, torch.randn(48, 64))
    model.zero_grad()

    x = torch.randn(48, 64, requires_grad=True)
    scale_x, scale_w, scale_g = backend.slot_buffers.scale.tolist()
    assert (scale_x, scale_w) != (1.0, 1.0), "step 1 uses the scales that step 0 led to"
    grad = bf16(torch.randn(48, 32))
    with backend.context():
        out = model(x)
    out.backward(grad)

    xq = scaling.quantize(bf16(x), scale_x, "e4m3").double() / scale_x
    wq = scaling.quantize(linear.weight, scale_w, "e4m3").double() / scale_w
    gq = scaling.quantize(grad, scale_g, "e5m2").double() / scale_g
    expected = xq @ wq.t() + (bf16(linear.bias).double() if bias else 0.0)
    assert out.dtype == torch.bfloat16
    assert_rounded_once(out, expected)
    assert x.grad is not None
    assert linear.weight.grad is not None
    assert_rounded_once(bf16(x.grad), gq @ wq)
    assert_rounded_once(bf16(linear.weight.grad), gq.t() @ xq)
    if bias:
        torch.testing.assert_close(linear.bias.grad, grad.float().sum(0), rtol=1e-6, atol=1e-6)


def assert_rounded_once(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """At least 99.5% of outputs are the correctly rounded result (a second rounding would spoil a quarter of them)."""
    assert (actual.double() == bf16(exact).double()).double().mean() > 0.995
    torch.testing.assert_close(actual.double(), exact, rtol=2.0**-7, atol=1e-3)


def test_a_step_never_uses_its_own_amax() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    backend = backend_for(model)
    x = torch.full((16, 32), 1000.0)
    stats = window(backend, model, x)
    amax, scale, saturation, clipped = stats[:4, 0].tolist()
    assert scale == 1.0
    assert amax == 1000.0
    assert saturation == pytest.approx(1000 / 448)
    assert clipped == 1.0, "every value was over 448"
    assert backend.slot_buffers.scale[0].item() == pytest.approx(0.448)
    stats = window(backend, model, x)
    assert stats[2, 0].item() == pytest.approx(1.0)
    assert stats[3, 0].item() == 0.0


def test_evaluation_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    backend = backend_for(model)
    window(backend, model, torch.randn(16, 32))
    before = {name: tensor.clone() for name, tensor in backend.state_dict()[0].items()}
    with torch.no_grad(), backend.context():
        model(torch.full((16, 32), 1e6))
    for name, tensor in backend.state_dict()[0].items():
        assert torch.equal(tensor, before[name]), name
    twin = window(backend, model, torch.ones(16, 32))
    assert twin[0, 0].item() == 1.0, "the evaluation's amax of 1e6 does not reach the next window"


def test_a_skipped_window_leaves_the_state_bit_equal() -> None:
    for roll in ("step", "micro_batch"):
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        backend = backend_for(model, roll=roll)
        window(backend, model, torch.randn(16, 32))
        before = {name: tensor.clone() for name, tensor in backend.state_dict()[0].items()}
        backend.begin_window(sample=False)
        with backend.context():
            loss = model(torch.full((16, 32), 1e4)).sum()
        loss.backward()
        backend.end_micro_batch(same)
        moved = not torch.equal(backend.slot_buffers.history, before["history"])
        assert moved, "the bad window must have left something to undo"
        backend.end_window(backend.amax(), SKIP, same)
        for name, tensor in backend.state_dict()[0].items():
            assert torch.equal(tensor, before[name]), (roll, name)


def test_window_roll_does_not_depend_on_the_split_into_micro_batches() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 32)
    states = []
    for parts in (1, 4):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(32, 32))
        backend = backend_for(model)
        for _ in range(3):
            backend.begin_window(sample=False)
            for piece in x.chunk(parts):
                with backend.context():
                    loss = model(piece).float().sum()
                loss.backward()
                backend.end_micro_batch(same)
            backend.end_window(backend.amax(), APPLY, same)
        states.append(backend.state_dict()[0])
    assert torch.equal(states[0]["history"], states[1]["history"])
    assert torch.equal(states[0]["scale"], states[1]["scale"])


def test_micro_batch_roll_is_one_update_each() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    backend = backend_for(model, roll="micro_batch", amax_history_len=4)
    backend.begin_window(sample=False)
    for value in (1.0, 2.0, 3.0):
        with backend.context():
            loss = model(torch.full((16, 32), value)).float().sum()
        loss.backward()
        backend.end_micro_batch(same)
    backend.end_window(backend.amax(), APPLY, same)
    assert backend.slot_buffers.history[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_an_inf_amax_is_scrubbed_or_kept_as_the_recipe_says() -> None:
    x = torch.ones(16, 32)
    x[0, 0] = math.inf
    for scrub, history_has_inf in ((True, False), (False, True)):
        model = nn.Sequential(nn.Linear(32, 32))
        backend = backend_for(model, scrub_inf=scrub)
        backend.begin_window(sample=False)
        with backend.context():
            model(x).float().sum().backward()
        backend.end_window(backend.amax(), APPLY, same)
        assert bool(backend.slot_buffers.history.isinf().any()) is history_has_inf
        assert bool(backend.scrubbed() > 0) is scrub
        window(backend, model, torch.ones(16, 32))
        assert (backend.slot_buffers.scale[0].item() == 448.0) is scrub, (
            "scrubbed, the scale recovers at the next update"
        )


def test_a_demoted_layer_runs_bf16_with_a_warm_shadow_amax() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    backend = backend_for(model)
    x = torch.randn(16, 32)
    window(backend, model, x)
    backend.switch(demote=["00"], promote=[])
    assert backend.demoted == ("00",)
    window(backend, model, 3 * x)
    with torch.no_grad(), backend.context():
        first = model.get_submodule("0")
        hidden = first(x)
    expected = bf16(x) @ bf16(first.get_parameter("weight").detach()).t()
    assert torch.equal(hidden, expected), "plain bf16"
    newest = backend.slot_buffers.history[-1, :3]
    assert newest[0].item() == bf16(3 * x).abs().max().item()
    assert (newest > 0).all(), "shadow amax of input, weight and grad_output"
    backend.switch(demote=[], promote=["00"])
    assert backend.demoted == ()


def test_without_the_kernel_everything_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
        backend = backend_for(model)
        x = torch.randn(32, 64)
        window(backend, model, x)
        stats = window(backend, model, x)
        grad = model.get_parameter("0.weight").grad
        assert grad is not None
        return grad, stats

    fused = run()
    monkeypatch.setattr(
        "harness.precision.backends.native_kernel.load", lambda: (None, "switched off")
    )
    eager = run()
    assert torch.equal(fused[0], eager[0])
    torch.testing.assert_close(fused[1], eager[1], rtol=1e-5, atol=1e-6, equal_nan=True)
