"""The native backend's casts and FP8 GEMMs on a GPU against its bfloat16 carriers on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from gpu_support import backend_on, clones, distance, window
from torch import nn

from harness.precision.backends import native_triton
from harness.precision.backends.autocast import AutocastBackend

pytestmark = pytest.mark.gpu

# Both round outputs to bfloat16 once, from sums in another order; fast accumulation keeps some 14 bits.
TOLERANCE = 5e-3


@pytest.mark.parametrize("tokens", [256, 200, 7])
@pytest.mark.parametrize("fmt", ["hybrid", "e4m3"])
def test_the_three_gemms_agree_with_the_cpu_and_the_state_is_bit_equal(
    fp8_gpu: torch.device, tokens: int, fmt: str
) -> None:
    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(256, 512))
    there = copy.deepcopy(here).to(fp8_gpu)
    ours, theirs = (
        backend_on(here, "native", torch.device("cpu"), format=fmt),
        backend_on(there, "native", fp8_gpu, format=fmt),
    )
    for number in range(3):
        x, grad = torch.randn(tokens, 256), 1e-3 * torch.randn(tokens, 512).bfloat16()
        on_cpu, on_gpu = x.clone().requires_grad_(), x.to(fp8_gpu).requires_grad_()
        here.zero_grad()
        there.zero_grad()
        expected, expected_stats = window(ours, here, on_cpu, grad, sample=True)
        actual, stats = window(theirs, there, on_gpu, grad.to(fp8_gpu), sample=True)
        assert on_cpu.grad is not None
        assert on_gpu.grad is not None
        assert distance(actual, expected) < TOLERANCE, f"forward of window {number}"
        assert distance(on_gpu.grad, on_cpu.grad) < TOLERANCE, f"input gradient of window {number}"
        for name, parameter in there.named_parameters():
            grad_here = here.get_parameter(name).grad
            assert parameter.grad is not None
            assert grad_here is not None
            assert distance(parameter.grad, grad_here) < TOLERANCE, f"{name} of window {number}"
        assert torch.equal(stats[:3].cpu(), expected_stats[:3]), "amax, scale in use, saturation"
        torch.testing.assert_close(
            stats[3:].cpu(), expected_stats[3:], rtol=1e-5, atol=1e-6, equal_nan=True
        )
    for name, tensor in clones(ours).items():
        assert torch.equal(clones(theirs)[name], tensor), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("how", ["eager", "compiled", "compiled and fused"])
def test_an_expert_without_tokens_has_gradients_of_zero(
    fp8_gpu: torch.device, how: str, sample: bool
) -> None:
    """No kernel is launched for no rows, and a product over no rows is zero, not what was in memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512)).to(fp8_gpu)
    backend = backend_on(model, "native", fp8_gpu, fuse=how == "compiled and fused")
    if how != "eager":
        model[0].compile(fullgraph=True)
    grad = torch.randn(200, 512, device=fp8_gpu, dtype=torch.bfloat16)
    window(backend, model, torch.randn(200, 256, device=fp8_gpu), grad)
    model.zero_grad()
    before = clones(backend)

    x = torch.zeros(0, 256, device=fp8_gpu, requires_grad=True)
    out, stats = window(backend, model, x, grad[:0], sample=sample)
    assert out.shape == (0, 512)
    assert x.grad is not None
    assert x.grad.shape == (0, 256)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
    assert stats[0].tolist() == [0.0, model.get_parameter("0.weight").abs().max().item(), 0.0]
    for name, tensor in clones(backend).items():
        assert torch.equal(tensor[..., ::2], before[name][..., ::2]), name


def test_the_fused_kernel_has_the_bits_of_torch_and_is_what_runs(fp8_gpu: torch.device) -> None:
    assert native_triton.check(fp8_gpu) == []
    assert native_triton.check_turn(fp8_gpu) == []
    backend = backend_on(nn.Sequential(nn.Linear(64, 64)).to(fp8_gpu), "native", fp8_gpu)
    assert backend.note.startswith("fused FP8 casts by triton")


def test_the_statistics_kernel_measures_as_torch_does_and_is_what_runs(
    fp8_gpu: torch.device,
) -> None:
    assert native_triton.check_stats(fp8_gpu) == []
    assert native_triton.load_stats(fp8_gpu) == (torch.ops.hopper_harness.fp8_cast_sums, "")


def test_torch_operations_give_the_same_bits_as_the_kernel(fp8_gpu: torch.device) -> None:
    torch.manual_seed(0)
    fused = nn.Sequential(nn.Linear(256, 512)).to(fp8_gpu)
    plain = copy.deepcopy(fused)
    backends = [backend_on(model, "native", fp8_gpu) for model in (fused, plain)]
    buffers = backends[1].slot_buffers  # type: ignore[attr-defined]
    buffers.cast = native_triton.quantize_pair
    for number in range(3):
        x = 10.0**number * torch.randn(200, 256, device=fp8_gpu)
        grad = torch.randn(200, 512, device=fp8_gpu, dtype=torch.bfloat16)
        results = [
            window(backend, model, x, grad)
            for backend, model in zip(backends, (fused, plain), strict=True)
        ]
        for left, right in zip(*results, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
    for left, right in zip(fused.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fuse", [False, True])
def test_a_compiled_layer_has_the_state_of_an_eager_one(fp8_gpu: torch.device, fuse: bool) -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(256, 512)).to(fp8_gpu)
    compiled = copy.deepcopy(eager)
    backends = [backend_on(model, "native", fp8_gpu, fuse) for model in (eager, compiled)]
    compiled[0].compile(fullgraph=True)
    for number in range(4):
        for backend in backends:
            backend.switch(*([["00"], []] if number == 2 else [[], ["00"]]))
        x = 10.0**number * torch.randn(200, 256, device=fp8_gpu)
        grad = torch.randn(200, 512, device=fp8_gpu, dtype=torch.bfloat16)
        results = [
            window(backend, model, x, grad)
            for backend, model in zip(backends, (eager, compiled), strict=True)
        ]
        assert distance(results[1][0], results[0][0]) < TOLERANCE
        assert torch.equal(results[1][1][:3], results[0][1][:3]), "amax, scale in use, saturation"
        for left, right in zip(compiled.parameters(), eager.parameters(), strict=True):
            assert distance(left.grad, right.grad) < TOLERANCE  # type: ignore[arg-type]
    for name, tensor in clones(backends[0]).items():
        assert torch.equal(clones(backends[1])[name], tensor), name


def test_a_forward_keeps_less_than_bf16_does(fp8_gpu: torch.device) -> None:
    def kept(name: str) -> int:
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).to(fp8_gpu)
        backend = (
            backend_on(model, name, fp8_gpu)
            if name == "native"
            else AutocastBackend("bf16", fp8_gpu)
        )
        x = torch.randn(8192, 1024, device=fp8_gpu, requires_grad=True)
        backend.begin_window(sample=False)
        with backend.context():
            model(x)  # what cuBLAS allocates once is not the layers'
        backend.begin_window(sample=False)
        before = torch.cuda.memory_allocated(fp8_gpu)
        with backend.context():
            out = model(x)
        after = torch.cuda.memory_allocated(fp8_gpu) - out.nbytes
        return after - before

    assert kept("native") < 0.75 * kept("bf16")


def test_a_skipped_window_leaves_the_state_bit_equal(fp8_gpu: torch.device) -> None:
    model = nn.Sequential(nn.Linear(64, 64)).to(fp8_gpu)
    backend = backend_on(model, "native", fp8_gpu)
    x, grad = (
        torch.randn(32, 64, device=fp8_gpu),
        torch.randn(32, 64, device=fp8_gpu, dtype=torch.bfloat16),
    )
    window(backend, model, x, grad)
    before = clones(backend)
    window(backend, model, 100 * x, grad, skip=1.0)
    for name, tensor in clones(backend).items():
        assert torch.equal(tensor, before[name]), name
    window(backend, model, 100 * x, grad)
    assert not torch.equal(clones(backend)["scale"], before["scale"]), (
        "the same window, applied, does move the state"
    )


def test_a_demoted_layer_is_plain_bf16(fp8_gpu: torch.device) -> None:
    linear = nn.Linear(64, 64, bias=False).to(fp8_gpu)
    model = nn.Sequential(linear)
    backend = backend_on(model, "native", fp8_gpu)
    backend.switch(demote=["00"], promote=[])
    x, grad = (
        torch.randn(32, 64, device=fp8_gpu),
        torch.randn(32, 64, device=fp8_gpu, dtype=torch.bfloat16),
    )
    out, stats = window(backend, model, x, grad)
    expected = x.bfloat16() @ linear.weight.detach().bfloat16().t()
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    assert (stats[0] > 0).all(), "shadow amax of all three tensors"
