"""In what layers that are no Linear compute, against what comes out of a real layer in the context of `Precision`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness import Precision
from harness.precision.products import _measured, products_in

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn_rnn_layer", "_trilinear")


class Operands(TorchDispatchMode):
    """What the kernels of matrix products got: an oracle that knows these operations by their full names."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            self.found |= {
                NAMES[leaf.dtype] for leaf in tree_leaves(args) if isinstance(leaf, Tensor)
            }
        return func(*args, **(kwargs or {}))


Made = tuple[Callable[[], nn.Module], tuple[int, ...]]
LAYERS: dict[str, Made] = {
    "Conv1d": (lambda: nn.Conv1d(32, 16, 3), (2, 32, 16)),
    "Conv2d": (lambda: nn.Conv2d(16, 16, 3), (2, 16, 8, 4)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(16, 16, 3), (2, 16, 8, 4)),
    "LSTM": (lambda: nn.LSTM(32, 24, num_layers=2, bidirectional=True), (8, 4, 32)),
    "GRU": (lambda: nn.GRU(32, 24, batch_first=True), (8, 4, 32)),
    "RNN": (lambda: nn.RNN(32, 24), (8, 4, 32)),
    "GRUCell": (lambda: nn.GRUCell(32, 24), (32, 32)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(32, 4, batch_first=True), (4, 8, 32)),
    "Bilinear": (lambda: nn.Bilinear(32, 32, 16), (32, 32)),
}
INPUTS = {"MultiheadAttention": 3, "Bilinear": 2}


@pytest.mark.parametrize("recipe", ["fp8_hybrid", "bf16", "fp32"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_plan_says_what_the_layers_products_ran_in(name: str, recipe: str) -> None:
    make, shape = LAYERS[name]
    model = nn.ModuleDict({"wide": nn.Linear(256, 256), "layer": make()})
    precision = Precision.from_recipe(recipe)
    precision.prepare(model)
    given = [torch.randn(shape)] * INPUTS.get(name, 1)
    with precision.context(), Operands() as ran:
        model["layer"](*given)
    row = next(row for row in precision.plan.layers if row.module == "layer")
    assert {row.precision} == ran.found
    assert f"products run in {row.precision}" in row.reason


class Own(nn.Conv1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.double())


@pytest.mark.parametrize(
    "layer", [nn.Embedding(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8), nn.PReLU(), Own(8, 8, 3)]
)
def test_a_layer_without_products_or_with_a_forward_of_its_own_is_not_measured(
    layer: nn.Module,
) -> None:
    assert products_in(layer, torch.bfloat16) == ""


class Experts(nn.Module):
    """As in transformers: the weights of all experts in one parameter, multiplied as `way` says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "einsum":
            return torch.einsum("bd,edh->bh", x, self.weight)
        if self.way == "bmm":
            return torch.bmm(x.expand(4, -1, -1), self.weight).sum(0)
        if self.way == "unknown to autocast":
            with torch.autocast("cpu", enabled=False):
                return x.float() @ self.weight[0]
        return torch.stack([nn.functional.linear(x, weight) for weight in self.weight]).sum(0)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class OwnAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x)[0]


@pytest.mark.parametrize("recipe", ["fp8_hybrid", "bf16", "fp32"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Experts("linear"),
        lambda: Experts("einsum"),
        lambda: Experts("bmm"),
        lambda: Experts("unknown to autocast"),
        Router,
        lambda: OwnAttention(16, 2),
    ],
)
def test_modules_of_ones_own_run_in_what_the_plan_says(
    make: Callable[[], nn.Module], recipe: str
) -> None:
    precision = Precision.from_recipe(recipe)
    model = precision.prepare(nn.ModuleDict({"wide": nn.Linear(256, 256), "own": make()}))
    ran = Operands()
    with torch.no_grad(), precision.context(), ran:
        model["own"](torch.randn(8, 16))
    row = next(row for row in precision.plan.layers if row.module == "own")
    assert ran.found
    assert ran.found <= set(row.precision.split(" or "))
    assert recipe == "fp32" or "run in bf16, but by kernels" in row.reason


@pytest.mark.parametrize("recipe", ["fp8_hybrid", "fp8_dynamic", "bf16"])
def test_an_encoder_layer_is_evaluated_as_it_is_trained(recipe: str) -> None:
    """In eval mode torch would read the weights of its Linears in one fused operation, past FP8 and past autocast."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    precision = Precision.from_recipe(recipe)
    precision.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(4, 16, 128)
    with precision.context():
        loss = model(x).float().square().mean()
    precision.backward(loss)
    precision.step(optimizer)
    with torch.no_grad(), precision.context():
        trained = model(x)
    with precision.evaluating():
        evaluated = model(x)
    assert torch.equal(trained.float(), evaluated.float())
    assert torch.backends.mha.get_fastpath_enabled(), "as it was"


def test_measuring_leaves_random_numbers_and_defaults_alone() -> None:
    _measured.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        layer = nn.Conv2d(8, 8, 3)
        torch.manual_seed(0)
        expected = torch.rand(4)
        torch.manual_seed(0)
        assert products_in(layer, torch.bfloat16) == "bf16"
        assert torch.equal(torch.rand(4), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_attentions_output_projection_is_named_by_what_it_is() -> None:
    model = nn.ModuleDict({"wide": nn.Linear(256, 256), "attention": nn.MultiheadAttention(256, 4)})
    precision = Precision.from_recipe("fp8_hybrid")
    precision.prepare(model)
    row = next(row for row in precision.plan.layers if row.module == "attention.out_proj")
    assert (row.kind, row.precision) == ("nn.MultiheadAttention's out_proj", "bf16")
    assert row.reason == "nn.MultiheadAttention reads its weight and does not call it"
