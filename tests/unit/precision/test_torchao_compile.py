"""The torchao rung under torch.compile: three graphs for all blocks, however many switches, and the bits of eager.

Most tests compile with aot_eager, which traces, partitions and guards as the default compiler does, but runs the same
kernels as eager: every difference is ours.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch
from compile_support import (
    Odd,
    Recomputing,
    Residual,
    State,
    assert_same_bits,
    small_gpt,
    state_after,
    step,
    switched_gpt,
    switched_linear,
    windows,
)
from native_support import APPLY, CPU, same
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from harness import Precision
from harness.capability.probe import probe
from harness.core.blocks import blocks_of
from harness.precision.backends.torchao import TorchaoBackend, WatchedLinear
from harness.precision.compiling import compile_blocks
from harness.precision.plan import make_plan, resolve
from harness.precision.recipe import Recipe, load_recipe

# torch says these to itself while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def recipe(dynamic: str = "tensorwise") -> Recipe:
    base = load_recipe("fp8_dynamic").model_dump()
    return Recipe.model_validate(
        {**base, "fp8": {"dynamic": dynamic}, "layers": {"min_features": 16}}
    )


def backend_for(model: nn.Module, dynamic: str = "tensorwise") -> TorchaoBackend:
    policy, facts = recipe(dynamic), probe()
    rung, verdicts = resolve(policy, facts)
    assert rung is not None
    return TorchaoBackend(make_plan(policy, facts, rung, verdicts, model), policy, model, CPU)


@pytest.mark.parametrize("dynamic", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.nightly
def test_twelve_blocks_share_three_graphs_whatever_is_switched(dynamic: str) -> None:
    """One that shows casts and amaxes, one that measures statistics too, and one for blocks with a demoted layer."""
    counter = CompileCounterWithBackend("aot_eager")

    def draw() -> Sequence[Tensor]:
        return torch.randint(0, 32, (2, 2, 16)).unbind()

    made = partial(backend_for, dynamic=dynamic)
    compiled, eager = (switched_gpt(made, each, draw, 9) for each in (counter, None))
    assert counter.frame_count == 3
    for mine, theirs in zip(compiled, eager, strict=True):
        assert (mine["stats"][0] > 0).all(), "every slot has an amax"
        assert_same_bits(mine, theirs)
    assert eager[2]["stats"][3:5].isfinite().all()
    assert eager[1]["stats"][3:].isnan().all(), "not sampled"


@pytest.mark.slow
def test_a_linear_has_the_amaxes_of_eager_under_the_default_compiler() -> None:
    """All the bits while demoted; else but the weight's gradient, which the compiler leaves in float32."""

    compiled, eager = (
        switched_linear(backend_for, each, False, torch.bfloat16) for each in (True, False)
    )
    for number, (mine, theirs) in enumerate(zip(compiled, eager, strict=True)):
        if number != 1:
            torch.testing.assert_close(
                mine.pop("0.weight"), theirs.pop("0.weight"), rtol=2**-8, atol=0
            )
        assert_same_bits(mine, theirs)


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
        states = windows(
            backend, model, lambda: [torch.randn(16, 32, requires_grad=True)], 3, sampled=(1,)
        )
        return {
            f"{number} {name}": t
            for number, state in enumerate(states)
            for name, t in state.items()
        }

    assert_same_bits(run(True), run(False))


@pytest.mark.slow
def test_activations_recomputed_in_a_compiled_block_and_changed_in_place() -> None:
    def run(compiled: bool) -> State:
        torch.manual_seed(0)
        model = Residual()
        backend = backend_for(model)
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        return windows(backend, model, lambda: [torch.randn(20, 32)], 3, sampled=(1,))[-1]

    assert_same_bits(run(True), run(False))


@pytest.mark.slow
def test_shared_tied_and_frozen_layers_over_micro_batches() -> None:
    def run(compiled: bool) -> State:
        torch.manual_seed(0)
        model = Odd()
        backend = backend_for(model)
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        return windows(
            backend, model, lambda: [torch.randn(16, 32), 3 * torch.randn(16, 32)], 3, sampled=(1,)
        )[-1]

    assert_same_bits(run(True), run(False))


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("demoted", [True, False])
def test_an_output_may_be_changed_in_place(demoted: bool, bias: bool) -> None:
    def run(compiled: bool) -> State:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32, bias=bias), nn.ReLU(inplace=True))
        backend = backend_for(model)
        backend.switch(["00"] if demoted else [], [])
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        out = step(backend, model, torch.randn(2, 16, 32))
        return {"out": out.detach(), **state_after(backend, model)}

    assert_same_bits(run(True), run(False))


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_a_gradients_amax_is_noted_whatever_is_trained(trained: str) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(trained))
    backend = backend_for(model)
    model[0].compile(backend="inductor", fullgraph=True)
    x, seed = torch.randn(16, 32), torch.randn(16, 32, dtype=torch.bfloat16)
    backend.begin_window(sample=False)
    with backend.context():
        out = model(x)
    with backend.backward_context():
        out.backward(seed)
    expected = [
        t.abs().max().float()
        for t in (x.bfloat16(), model.get_parameter("0.weight").detach(), seed)
    ]
    # The compiler may keep a bfloat16 value in float32: one rounding.
    torch.testing.assert_close(backend.amax(), torch.stack(expected), rtol=2**-8, atol=0)


@pytest.mark.nightly
def test_evaluation_in_the_middle_of_a_window_leaves_no_trace() -> None:
    def run(evaluate: bool) -> State:
        model = small_gpt(layers=2)
        backend = backend_for(model)
        for block in blocks_of(model):
            block.compile(backend="aot_eager", fullgraph=True)
        states = []
        for number in range(2):
            step(backend, model, torch.full((2, 16), number), sample=number == 1)
            if evaluate:
                model.eval()
                with torch.no_grad(), backend.context():
                    first, second = (model(torch.arange(32).view(2, 16)) for _ in range(2))
                assert torch.equal(first, second)
                model.train()
            states.append(state_after(backend, model))
        return {
            f"{number} {name}": t
            for number, state in enumerate(states)
            for name, t in state.items()
        }

    assert_same_bits(run(True), run(False))


def test_in_bf16_outside_of_a_context_and_back_in_fp8() -> None:
    linear = nn.Linear(32, 32, bias=False)
    model = nn.Sequential(linear)
    backend = backend_for(model)
    model[0].compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(16, 32)
    fp8 = step(backend, model, x)
    backend.switch(["00"], [])
    plain = x.bfloat16() @ linear.weight.detach().bfloat16().t()
    assert torch.equal(step(backend, model, x), plain)
    assert not torch.equal(fp8, plain)
    assert torch.equal(model(x), nn.functional.linear(x, linear.weight))
    backend.switch([], ["00"])
    assert torch.equal(step(backend, model, x), fp8)


def test_a_sampled_window_keeps_its_casts_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """They once ran eager in every tenth step, which on an H100 took three times as long and more."""
    model = nn.Sequential(nn.Linear(32, 32))
    backend = backend_for(model)
    model[0].compile(backend="aot_eager", fullgraph=True)
    eager: list[str] = []
    for name in ("multiply", "gradients"):
        monkeypatch.setattr(WatchedLinear, name, lambda *_, name=name, **__: eager.append(name))
    step(backend, model, torch.randn(16, 32), sample=True)
    assert eager == []
    found = backend.end_window(backend.amax(), APPLY, same)
    assert found[3:5].isfinite().all(), "all three slots are measured"


@pytest.mark.slow
def test_an_evaluation_is_compiled_once_whether_or_not_the_last_step_was_sampled() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    model = nn.Sequential(nn.Linear(32, 32))
    backend = backend_for(model)
    model[0].compile(backend=counter, fullgraph=True)
    x = torch.randn(16, 32)
    for sample in (False, True):
        step(backend, model, x, sample=sample)
        with torch.no_grad(), backend.context():
            model(x)
    assert counter.frame_count == 3, "two of training, one of evaluation"


def test_a_deep_copy_computes_alike_and_records_nothing() -> None:
    model = nn.ModuleList([nn.Linear(32, 32)])
    backend = backend_for(model)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each[0].compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(16, 32)
    mine = step(backend, model[0], x)
    before = backend.amax()
    with backend.context():
        theirs = twin[0](x)
        twin[0](100 * x).sum().backward()
    assert torch.equal(theirs, mine)
    assert torch.equal(backend.amax(), before)
    with torch.no_grad():
        twin.get_parameter("0.weight").mul_(2)
    with backend.context():
        assert not torch.equal(twin[0](x), mine), "its own weights"


@pytest.mark.slow
def test_a_foreign_loop_skips_falls_back_and_resumes_as_eager_does() -> None:
    """`harness.Precision`: gradients that are not finite, a demotion by hand, and the losses of the steps after."""

    def run(compiled: bool) -> list[float]:
        precision = Precision(recipe())
        model = precision.prepare(small_gpt(layers=2))
        if compiled:
            for block in blocks_of(model):
                block.compile(backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        losses = []
        for number in range(6):
            torch.manual_seed(number)
            for tokens in torch.randint(0, 32, (2, 2, 17)).unbind():
                with precision.context():
                    loss = model(tokens[:, :-1], tokens[:, 1:]) / 2
                precision.backward(loss * torch.inf if number == 2 else loss)
                losses.append(loss.item())
            outcome = precision.step(optimizer, max_grad_norm=1.0)
            assert bool(outcome.applied) is (number != 2)
            optimizer.zero_grad()
            if number == 3:
                assert precision.demote("blocks.1.*")
        return losses

    assert run(True) == run(False)


@pytest.mark.nightly
def test_a_gpt_trains_alike_under_the_default_compiler() -> None:
    """Fused norms and activations round differently, so that losses agree within bf16's precision, not in bits."""

    def run(compiled: bool) -> tuple[Tensor, Tensor]:
        model = small_gpt(layers=3)
        backend = backend_for(model)
        if compiled:
            compile_blocks(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        losses, amaxes = [], []
        for number in range(8):
            torch.manual_seed(number)
            tokens = torch.randint(0, 32, (2, 17))
            model.zero_grad()
            backend.begin_window(sample=number % 4 == 0)
            with backend.context():
                loss = model(tokens[:, :-1], tokens[:, 1:])
            with backend.backward_context():
                loss.backward()
            amaxes.append(backend.end_window(backend.amax(), APPLY, same)[0])
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses), torch.stack(amaxes)

    compiled, eager = run(True), run(False)
    torch.testing.assert_close(compiled[0], eager[0], rtol=2e-3, atol=0)
    torch.testing.assert_close(compiled[1], eager[1], rtol=0.1, atol=1e-4)
