"""torch.compile around a prepared model, or around more of the loop: the bits of eager, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import cycle, product
from typing import Any, cast

import pytest
import torch
from api_support import (
    adamw,
    batch,
    differences,
    mlp,
    prepared,
    recipe,
    scaled,
    snapshot,
    standard_step,
)
from torch import Tensor, nn

from harness import Precision
from harness.core.errors import MisuseError
from harness.precision.standard import WrappedOptimizer
from tests.support.matrix import rest_nightly

pytestmark = [
    pytest.mark.usefixtures("cpu_on_purpose"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:Dynamo"),
]

Step = Callable[[int], object]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A compiler's backend that runs what it is given as it is. products: matrix products in each of its graphs."""

    def __init__(self) -> None:
        self.products: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.products.append(sum("linear" in str(node.target) for node in graph.graph.nodes))
        return graph.forward


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def train(model: Any, wrapped: WrappedOptimizer, loss_of: Any = loss_of) -> Step:
    def step(number: int) -> None:
        loss_of(model, *batch(number)).backward()
        wrapped.step()
        wrapped.zero_grad()

    return step


def eager(model: nn.Sequential, wrapped: WrappedOptimizer, graphs: Graphs) -> Step:
    return train(model, wrapped)


def wrapper(model: nn.Sequential, wrapped: WrappedOptimizer, graphs: Graphs) -> Step:
    return train(torch.compile(model, backend=graphs), wrapped)


def in_place(model: nn.Sequential, wrapped: WrappedOptimizer, graphs: Graphs) -> Step:
    model.compile(backend=graphs)
    return train(model, wrapped)


def its_forward(model: nn.Sequential, wrapped: WrappedOptimizer, graphs: Graphs) -> Step:
    model.forward = torch.compile(model.forward, backend=graphs, fullgraph=True)
    return train(model, wrapped)


def the_loss(model: nn.Sequential, wrapped: WrappedOptimizer, graphs: Graphs) -> Step:
    return train(model, wrapped, torch.compile(loss_of, backend=graphs))


def the_step(model: nn.Sequential, wrapped: WrappedOptimizer, graphs: Graphs) -> Step:
    return torch.compile(train(model, wrapped), backend=graphs)


def wrapper_and_optimizer(model: nn.Sequential, wrapped: WrappedOptimizer, graphs: Graphs) -> Step:
    update = torch.compile(lambda: wrapped.step(), backend=graphs)
    compiled = torch.compile(model, backend=graphs)

    def step(number: int) -> None:
        loss_of(compiled, *batch(number)).backward()
        update()
        wrapped.zero_grad()

    return step


def made(name: str) -> tuple[Precision, nn.Sequential]:
    return scaled() if name == "fp16_scaler" else prepared(recipe(name))


WAYS = [wrapper, in_place, its_forward, the_loss, the_step, wrapper_and_optimizer]
NAMES = ["fp8_hybrid", "fp16_scaler", "bf16"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "name"), rest_nightly(product(WAYS, NAMES), *zip(WAYS, cycle(NAMES), strict=False))
)
def test_the_bits_of_eager(
    name: str, way: Callable[[nn.Sequential, WrappedOptimizer, Graphs], Step]
) -> None:
    """And the model's forward is one graph."""

    def run(
        way: Callable[[nn.Sequential, WrappedOptimizer, Graphs], Step],
    ) -> tuple[dict[str, Any], Graphs]:
        precision, model = made(name)
        wrapped, graphs = precision.wrap(adamw(model), max_grad_norm=1.0), Graphs()
        step = way(model, wrapped, graphs)
        for number in range(4):
            step(number)
            assert wrapped.outcome is not None
            assert wrapped.outcome.was_applied
        return snapshot(precision, model, wrapped), graphs

    compiled, graphs = run(way)
    assert differences(run(eager)[0], compiled) == []
    assert graphs.products.count(2) == 1
    assert set(graphs.products) <= {0, 2}


@pytest.mark.parametrize("name", ["fp8_hybrid", "bf16"])
def test_a_model_that_was_compiled_in_place_and_called_before(name: str) -> None:
    def run(compiled: bool) -> dict[str, Any]:
        model = mlp()
        if compiled:
            model.compile(backend=Graphs())
            model(batch(0)[0])
        precision = Precision(recipe(name))
        wrapped = precision.wrap(adamw(precision.prepare(model)))
        for step in range(3):
            standard_step(model, wrapped, step)
        return snapshot(precision, model, wrapped)

    assert differences(run(False), run(True)) == []


@pytest.mark.parametrize("wrap", [True, False])
def test_an_evaluation_of_a_compiled_model_is_that_of_the_model(wrap: bool) -> None:
    precision, model = prepared(recipe())
    wrapped = precision.wrap(adamw(model)) if wrap else None
    compiled, x = torch.compile(model, backend=Graphs()), batch(5)[0]
    for step in range(3):
        if wrapped is not None:
            standard_step(cast(nn.Module, compiled), wrapped, step)
        before = precision.state_dict()
        with precision.evaluating():
            ours, theirs = model(x), compiled(x)
        assert torch.equal(ours, theirs)
        assert theirs.dtype == torch.float32
        assert differences(before, precision.state_dict()) == []


def test_an_error_in_a_compiled_forward_leaves_the_context() -> None:
    precision, model = prepared(recipe("bf16"))
    wrapped = precision.wrap(adamw(model))
    compiled = cast(nn.Module, torch.compile(model, backend=Graphs()))
    with pytest.raises(RuntimeError, match=r"reduction dim|shapes"):
        compiled(torch.randn(4, 5))
    assert not precision.busy
    standard_step(compiled, wrapped, 0)
    assert wrapped.outcome is not None
    assert wrapped.outcome.was_applied


# Refused by name


@pytest.mark.parametrize("copies", ["compiled", "of a compiled one"])
def test_a_compiled_copy_is_not_trained(copies: str) -> None:
    _, model = prepared(recipe("bf16"))
    if copies == "compiled":
        twin = cast(nn.Module, torch.compile(copy.deepcopy(model), backend=Graphs()))
    else:
        twin = copy.deepcopy(cast(nn.Module, torch.compile(model, backend=Graphs())))
    with pytest.raises(MisuseError, match=r"AdamW\.step\(\)[\s\S]*deep copy of the prepared model"):
        standard_step(twin, adamw(twin), 0)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", ["fp8_hybrid", "bf16"])
def test_a_model_wrapped_in_compile_before_is_refused(name: str, whole: bool) -> None:
    compiled = cast(nn.Module, torch.compile(mlp(), backend=Graphs()))
    model = compiled if whole else nn.Sequential(nn.Linear(16, 16), compiled)
    told = "the model" if whole else "1"
    with pytest.raises(
        MisuseError,
        match=rf"prepare\(\): {told} is wrapped in torch\.compile[\s\S]*bare model first",
    ):
        Precision(recipe(name)).prepare(model)


def test_one_graph_for_everything_is_refused() -> None:
    precision, model = prepared(recipe("bf16"))
    precision.wrap(adamw(model))
    compiled = torch.compile(model, backend=Graphs(), fullgraph=True)
    with pytest.raises(
        RuntimeError,
        match=r"enters its precision before its forward[\s\S]*leave out fullgraph=True",
    ):
        compiled(batch(0)[0])


def traced(model: nn.Module) -> Any:
    return torch.jit.trace(model, batch(0)[0])


def exported(model: nn.Module) -> Any:
    return torch.export.export(model, (batch(0)[0],)).module()


@pytest.mark.parametrize("name", ["fp16_scaler", "bf16"])
@pytest.mark.parametrize("graph_of", [traced, exported])
def test_a_graph_that_goes_past_the_hooks_is_refused(
    graph_of: Callable[[nn.Module], Any], name: str
) -> None:
    precision, model = prepared(recipe(name))
    precision.wrap(adamw(model))
    graph = graph_of(model)
    precision.drop_window()
    with pytest.raises(
        MisuseError, match=r"traced, scripted or exported[\s\S]*call the prepared model itself"
    ):
        graph(batch(0)[0]).mean().backward()
