"""The native backend under torch.compile: one graph for all blocks, no switch recompiles, the bits of eager.

Most tests compile with aot_eager, which traces, partitions and guards as the default compiler does, but runs the same
kernels as eager: every difference is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import native_support
import pytest
import torch
from compile_support import (
    Odd,
    Recomputing,
    Residual,
    State,
    Widening,
    assert_same_bits,
    small_gpt,
    state_after,
    step,
    switched_gpt,
    switched_linear,
    windows,
)
from native_support import APPLY, backend_for, same
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from harness.core.blocks import blocks_of
from harness.precision.backends import native_triton
from tests.support.matrix import rest_slow

# torch says these to itself while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


WAYS = [
    pytest.param("carriers", marks=pytest.mark.slow),
    "compiler's casts",
    pytest.param("own casts", marks=pytest.mark.nightly),
]


@pytest.fixture(autouse=True, params=WAYS)
def _fresh_compiler(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setattr(native_support, "FP8_UNITS", request.param != "carriers")
    if request.param == "own casts":
        kernel = partial(native_triton.quantize_pair)
        monkeypatch.setattr(
            native_triton, "load", lambda device: (kernel, "in the place of the kernel")
        )
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.slow
def test_a_linear_has_the_bits_of_eager_under_the_default_compiler(
    bias: bool, dtype: torch.dtype
) -> None:
    compiled, eager = (switched_linear(backend_for, each, bias, dtype) for each in (True, False))
    for mine, theirs in zip(compiled, eager, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.slow
def test_a_bias_gradient_is_of_rounded_values_under_the_default_compiler() -> None:
    """Which would keep them in float32 where it fuses their rounding with their sum."""

    def run(compiled: bool) -> State:
        torch.manual_seed(0)
        model = Widening()
        backend = backend_for(model)
        if compiled:
            model.compile(fullgraph=True)
        return windows(backend, model, lambda: [torch.randn(20, 32)], 2)[-1]

    # Their sum may be in another order.
    torch.testing.assert_close(
        run(True)["inner.bias"], run(False)["inner.bias"], rtol=1e-5, atol=1e-8
    )


@pytest.mark.slow
def test_twelve_blocks_share_graphs_and_their_switches_recompile_nothing() -> None:
    """On FP8 units a block has two: one that shows the casts, and one for windows with a demotion. Statistics take the
    first where our kernel casts, else the second.
    """
    counter = CompileCounterWithBackend("aot_eager")

    def draw() -> list[Tensor]:
        return [torch.randint(0, 32, (2, 16))]

    compiled, eager = (switched_gpt(backend_for, each, draw, 13) for each in (counter, None))
    assert counter.frame_count == (2 if native_support.FP8_UNITS else 1)
    for mine, theirs in zip(compiled, eager, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("_fresh_compiler", ["own casts"], indirect=True)
def test_a_sampled_window_recompiles_nothing_where_our_kernel_casts() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    model = nn.Sequential(nn.Linear(32, 32))
    backend = backend_for(model)
    model[0].compile(backend=counter, fullgraph=True)
    found = windows(backend, model, lambda: [torch.randn(16, 32)], 4, sampled=(1, 3))
    assert counter.frame_count == 1
    assert [state["stats"][3:5].isfinite().all().item() for state in found] == [False, True] * 2


def test_a_demoted_block_really_runs_bf16() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    backend = backend_for(model)
    model[0].compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(16, 32)
    fp8 = step(backend, model, x)
    state_after(backend, model)
    backend.switch(["00"], [])
    bf16 = step(backend, model, x)
    plain = x.bfloat16() @ model.get_parameter("0.weight").detach().bfloat16().t()
    assert torch.equal(bf16, plain)
    assert not torch.equal(fp8, plain)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations(reentrant: bool) -> None:
    def run(compiled: bool) -> State:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32))
        backend = backend_for(block)
        if compiled:
            block.compile(backend="aot_eager", fullgraph=True)

        model = Recomputing(block, reentrant)
        return windows(backend, model, lambda: [torch.randn(16, 32, requires_grad=True)], 2)[-1]

    assert_same_bits(run(True), run(False))


def test_activations_recomputed_in_a_compiled_block_and_changed_in_place() -> None:
    def run(compiled: bool) -> State:
        torch.manual_seed(0)
        model = Residual()
        backend = backend_for(model)
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        return windows(backend, model, lambda: [torch.randn(20, 32)], 3)[-1]

    assert_same_bits(run(True), run(False))


@pytest.mark.parametrize("roll", rest_slow(["step", "micro_batch"], "micro_batch"))
def test_shared_tied_and_frozen_layers_over_micro_batches(roll: str) -> None:
    def run(compiled: bool) -> State:
        torch.manual_seed(0)
        model = Odd()
        backend = backend_for(model, roll=roll)
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        return windows(backend, model, lambda: [torch.randn(16, 32), 3 * torch.randn(16, 32)], 3)[
            -1
        ]

    assert_same_bits(run(True), run(False))


def test_scales_that_roll_between_a_forward_and_its_backward() -> None:
    def run(compiled: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32))
        backend = backend_for(model, roll="micro_batch")
        if compiled:
            model[0].compile(backend="aot_eager", fullgraph=True)
        backend.begin_window(sample=False)
        with backend.context():
            losses = [(model(100 * torch.randn(16, 32))).float().mean() for _ in range(2)]
        for loss in losses:
            model.zero_grad()
            with backend.backward_context():
                loss.backward()
            backend.end_micro_batch(same)
        grad = model.get_parameter("0.weight").grad
        assert grad is not None
        return grad

    assert torch.equal(run(True), run(False)), (
        "x as forward had quantised it, under the scale of then"
    )


@pytest.mark.slow
def test_evaluation_in_the_middle_of_a_window_leaves_no_trace() -> None:
    def run(evaluate: bool) -> State:
        model = small_gpt(layers=2)
        backend = backend_for(model)
        for block in blocks_of(model):
            block.compile(backend="aot_eager", fullgraph=True)
        states = []
        for number in range(2):
            step(backend, model, torch.full((2, 16), number))
            if evaluate:
                model.eval()
                with torch.no_grad(), backend.context():
                    first, second = (model(torch.arange(32).view(2, 16)) for _ in range(2))
                assert torch.equal(first, second)
                model.train()
            states.append(state_after(backend, model))
        return states[-1]

    assert_same_bits(run(True), run(False))


def test_outside_of_a_context_a_compiled_layer_is_plain() -> None:
    linear = nn.Linear(32, 32)
    model = nn.Sequential(linear)
    backend = backend_for(model)
    model[0].compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(16, 32)
    step(backend, model, x)
    assert torch.equal(model(x), nn.functional.linear(x, linear.weight, linear.bias))


@pytest.mark.nightly
def test_a_gpt_trains_alike_under_the_default_compiler() -> None:
    """Fused norms and activations round differently, so that losses agree within bf16's precision, not in bits."""

    def run(compiled: bool) -> tuple[Tensor, Tensor]:
        model = small_gpt(layers=3)
        backend = backend_for(model)
        if compiled:
            for block in blocks_of(model):
                block.compile(fullgraph=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        losses = []
        for number in range(8):
            torch.manual_seed(number)
            tokens = torch.randint(0, 32, (2, 17))
            model.zero_grad()
            backend.begin_window(sample=True)
            with backend.context():
                loss = model(tokens[:, :-1], tokens[:, 1:])
            with backend.backward_context():
                loss.backward()
            backend.end_window(backend.amax(), APPLY, same)
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses), backend.slot_buffers.history

    compiled, eager = run(True), run(False)
    torch.testing.assert_close(compiled[0], eager[0], rtol=2e-3, atol=0)
    torch.testing.assert_close(compiled[1], eager[1], rtol=0.1, atol=1e-4)
