"""Block-wise torch.compile: what is compiled, what is refused, and that a fall back to eager is noticed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor, nn

from harness.core.blocks import blocks_of
from harness.core.errors import ConfigError
from harness.models.gpt import build
from harness.precision.backends.registry import BACKENDS
from harness.precision.compiling import (
    Compiling,
    EagerWatch,
    check_compile,
    choose_compiling,
    compile_blocks,
    try_compile,
)
from harness.precision.recipe import Rung

CPU = torch.device("cpu")
WITHOUT_COMPILER = torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",)})
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


def rung(backend: str, precision: str) -> Rung:
    return Rung.model_validate({"backend": backend, "precision": precision, "tiers": ["CPU"]})


@pytest.fixture
def watch() -> Iterator[EagerWatch]:
    """Nothing is left behind on torch's logger."""
    logger = logging.getLogger("torch._dynamo")
    before = list(logger.handlers)
    torch._dynamo.reset()
    yield compile_blocks(nn.Module())
    logger.handlers = before
    torch._dynamo.reset()


class Towers(nn.Module):
    """Two outer lists, a shared block, a list of lists, a dict of lists, and lists inside of blocks."""

    def __init__(self) -> None:
        super().__init__()
        a, b, c, d = self.expected = tuple(nn.Sequential(nn.Linear(2, 2)) for _ in range(4))
        a.append(nn.ModuleList([nn.Linear(2, 2)]))
        self.encoder = nn.ModuleList([a, b])
        self.decoder = nn.Sequential(nn.ModuleList([b, nn.ModuleList([c])]))
        self.experts = nn.ModuleDict({"x": nn.ModuleList([d])})


def test_blocks_are_the_elements_of_the_outermost_lists() -> None:
    gpt = build(vocab=16, dim=16, layers=3, heads=1)
    assert blocks_of(gpt) == list(gpt.blocks)
    towers = Towers()
    assert blocks_of(towers) == list(towers.expected)
    assert blocks_of(nn.Sequential(nn.Linear(2, 2))) == []


@pytest.mark.parametrize(
    ("backend", "precision"),
    [
        ("transformer_engine", "fp8"),
        ("native", "fp8"),
        ("torchao", "fp8"),
        ("autocast", "bf16"),
        ("autocast", "fp16"),
    ],
)
def test_every_rung_compiles(backend: str, precision: str) -> None:
    assert (
        check_compile(rung(backend, precision), build(vocab=16, dim=16, layers=1, heads=1), CPU)
        == []
    )


def test_every_reason_is_told_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    made_up = replace(BACKENDS["transformer_engine"], not_compiled="it is made up")
    monkeypatch.setitem(BACKENDS, "transformer_engine", made_up)
    model = nn.Sequential(nn.Linear(2, 2))
    problems = check_compile(rung("transformer_engine", "fp8"), model, CPU, fuse=True)
    assert [problem.what for problem in problems] == [
        "layers.fuse does not go with torch.compile on transformer_engine:fp8",
        "the transformer_engine backend does not compile",
        "Sequential has no nn.ModuleList with blocks in it",
        "no C++ compiler",
    ]
    assert all("engine.compile=none" in problem.fix for problem in problems)


def test_a_list_of_dicts_is_told_why_its_elements_are_no_blocks() -> None:
    """Its fix alone would send a user in a circle: the parts are in an nn.ModuleList."""
    layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(2, 2)})])
    (problem,) = check_compile(rung("native", "fp8"), nn.ModuleDict({"layers": layers}), CPU)
    assert "ModuleDict in it is no block" in problem.why
    assert check_compile(rung("native", "fp8"), nn.Sequential(), CPU)[0].why == ""


def test_state_dict_keys_stay_and_blocks_stay_callable(watch: EagerWatch) -> None:
    model = build(vocab=16, dim=16, layers=2, heads=1)
    keys, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    compile_blocks(model)
    assert list(model.state_dict()) == keys
    assert [type(module) for module in model.modules()] == kinds


def test_a_function_given_up_for_eager_is_told_once(watch: EagerWatch) -> None:
    @torch.compile(backend="eager", dynamic=False)
    def restless(x: Tensor) -> Tensor:
        return x + 1

    with torch._dynamo.config.patch(recompile_limit=2):
        for size in (2, 3):
            restless(torch.zeros(size))
        assert watch.take() == "", "still compiled"
        for size in (4, 5):
            assert torch.equal(restless(torch.zeros(size)), torch.ones(size))
    told = watch.take()
    assert "restless" in told
    assert "recompile_limit (2)" in told
    assert "last reason" in told
    assert watch.take() == ""


class Doubling(nn.Module):
    """One block of its own code: torch does not compile the code of its own modules by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.linear(x)


class Aside(nn.Module):
    """Calls the first of its blocks as a module, the others by their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Doubling() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        return third.forward(second.forward(first(x)))


def test_blocks_that_are_not_called_as_modules_are_named_once(watch: EagerWatch) -> None:
    """torch never compiles them, and says nothing."""
    model, x = Aside(), torch.ones(1, 2)
    expected = model(x)
    with torch._dynamo.config.patch(disable=True):
        watch = compile_blocks(model)
        for _ in range(2):
            assert torch.equal(model(x), expected)
        told = watch.take_uncalled()
        assert told.startswith("blocks.1 and 1 more: not called as a module")
        assert watch.take_uncalled() == ""
        model.blocks[1](x)  # later is no error


def test_auto_is_eager_on_a_cpu_and_says_nothing() -> None:
    model = build(vocab=16, dim=16, layers=1, heads=1)
    assert choose_compiling("auto", rung("native", "fp8"), model, CPU) == Compiling(False)


def test_auto_says_why_blocks_run_eager_on_a_gpu() -> None:
    """Reasons that are known before anything is tried on the card."""
    gpu, model = torch.device("cuda"), build(vocab=16, dim=16, layers=1, heads=1)
    chosen = choose_compiling("auto", rung("transformer_engine", "fp8"), model, gpu)
    assert not chosen.compiled
    assert chosen.failed == ""  # by default, and no failure
    assert "between its modules would be compiled, and no card has run that" in chosen.note
    chosen = choose_compiling("auto", rung("autocast", "bf16"), nn.Linear(2, 2), gpu)
    assert "no nn.ModuleList" in chosen.failed
    assert chosen.note.endswith(chosen.failed)


def test_blocks_that_were_asked_for_and_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no nn\.ModuleList"):
        choose_compiling("blocks", rung("autocast", "bf16"), nn.Linear(2, 2), CPU)


@pytest.mark.slow
def test_a_machine_that_cannot_compile_is_found_by_trying() -> None:
    assert try_compile.__wrapped__(CPU) == ""
    torch._dynamo.reset()
    with WITHOUT_COMPILER:
        assert "/no/such/compiler" in try_compile.__wrapped__(CPU)
    torch._dynamo.reset()


@pytest.mark.slow
@WITHOUT_COMPILER
# What is tested sets it for the whole process; this brings it back.
@torch._dynamo.config.patch(suppress_errors=False)
def test_a_block_that_does_not_compile_runs_eager_if_it_may(watch: EagerWatch) -> None:
    block, x = Doubling(), torch.ones(1, 2)
    model = nn.Sequential(nn.ModuleList([block]))
    expected = 2 * block.linear(x)

    compile_blocks(model)
    with pytest.raises(Exception, match="/no/such/compiler"):
        block(x)

    torch._dynamo.reset()
    found = compile_blocks(model, may_fall_back=True)
    assert torch.equal(block(x), expected)
    text = found.take()
    assert "forward" in text
    assert "/no/such/compiler" in text
    assert len(text) < 1500
