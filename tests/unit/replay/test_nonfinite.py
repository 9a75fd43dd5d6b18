"""The origin of a NaN on small modules: who is named, by which tensor, and who is not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.replay.origin import LOSS, Finding, Origin, locate, watch

X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


class Apply(nn.Module):
    """Any function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def named(origin: Origin) -> Finding:
    assert origin.first is not None
    return origin.first


def run(model: nn.Module, x: Tensor = X, known: set[str] | None = None) -> Origin:
    """One forward and backward; every gradient starts from the sum."""
    with watch(model, known) as origin:
        model(x.clone().requires_grad_()).sum().backward()
    model.zero_grad()
    return origin


class Parent(nn.Module):
    """Takes a logarithm between its two children."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).log())


def test_a_parent_is_named_for_what_it_computes_its_child_as_receiver() -> None:
    found = named(run(nn.Sequential(nn.Linear(4, 4), Parent())))
    assert (found.module, found.kind, found.direction, found.tensor) == (
        "1",
        "Parent",
        "forward",
        "output",
    )
    assert found.into == "1.second"
    model = nn.Sequential(nn.Identity(), Apply(torch.log))
    found = named(run(model))
    assert (found.module, found.into) == ("1", ""), "not the Sequential around it"
    assert (found.nan, found.inf, found.elements, found.rows) == (6, 0, 12, (0, 1))


def test_the_operation_and_the_line_are_found_in_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Parent(), Apply(lambda x: x))
    finding = named(run(model))
    with locate(model, finding) as first:
        model(X)
    assert first.operation == "torch.Tensor.log"
    assert re.search(
        r"test_nonfinite\.py:\d+, in forward: return self\.second\(self\.first\(x\)\.log\(\)\)",
        first.where,
    )
    guilty = nn.Sequential(nn.Linear(4, 4), Siblings())
    with watch(guilty, lines=True) as origin:
        guilty(X).sum().backward()
    assert "(x - x).sqrt()" in named(origin).where
    assert named(run(guilty)).where == "", "only if asked for"


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (
            lambda x: (
                (torch.full_like(x, math.inf) > 0)
                * x.masked_fill(x < 0, -math.inf).softmax(-1)
                / 0.0
            ),
            "div",
        ),
        (lambda x: (x * 0.0).log() - 1.0, "log"),
        (lambda x: x.sub_(math.inf).neg_().exp_(), "sub_"),
    ],
)
def test_masks_and_constants_are_not_taken_for_the_operation(
    function: Callable[..., Any], operation: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Apply(function))
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    with torch.no_grad():
        model.get_parameter("0.weight").copy_(torch.eye(4))
        model.get_parameter("0.bias").zero_()
    with watch(model) as origin, torch.no_grad():
        model(x)
    with locate(model, named(origin)) as first, torch.no_grad():
        model(x)
    assert first.operation.rpartition(".")[2] in (operation, f"__true{operation}__")


def test_in_backward_too_a_parent_is_named_for_what_it_computes_itself() -> None:
    class Between(Parent):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.second((y - y).sqrt())

    found = named(run(nn.Sequential(nn.Linear(4, 4), Between())))
    assert (found.module, found.direction, found.operation) == ("1", "backward", "SqrtBackward0")


def test_a_model_that_is_well_has_no_origin_and_the_same_bits_with_hooks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 2)
    )
    loss = model(X).square().sum()
    loss.backward()
    plain = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]
    model.zero_grad()
    with watch(model) as origin:
        watched = model(X).square().sum()
        watched.backward()
    assert origin.first is None
    assert origin.usual == set()
    assert torch.equal(watched, loss)
    assert all(torch.equal(a, b.grad) for a, b in zip(plain, model.parameters(), strict=True))  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        norm, largest, bad = origin.gradients[name]
        assert norm == pytest.approx(float(parameter.grad.norm()), rel=1e-6)  # type: ignore[union-attr]
        assert largest == float(parameter.grad.abs().max())  # type: ignore[union-attr]
        assert bad == 0
    hooks = [
        each
        for module in model.modules()
        for each in (module._forward_hooks, module._forward_pre_hooks)
    ]
    assert not any(hooks), "none is left behind"
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())  # type: ignore[attr-defined]


def test_a_bad_weight_is_named_as_the_cause() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model.get_parameter("1.weight")[2, 1] = math.nan
    found = named(run(model))
    assert (found.module, found.parameters, found.nan) == ("1", ("1.weight",), 3)


class Masked(nn.Module):
    """A mask of -inf that a softmax takes away again, before something else breaks."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mask = Apply(lambda x: x.masked_fill(x < 0, -math.inf))
        self.softmax = Apply(lambda scores, bias: (scores + bias).softmax(-1))
        self.last = Apply(last)

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.tensor([0.0, 0.0, 0.0, -math.inf])
        return self.last(self.softmax(self.mask(x + 2.0), bias=bias) + x)


def test_a_mask_is_no_origin() -> None:
    well = run(Masked(torch.sin), X - 1.2)
    assert {"mask:output:inf", "softmax:input.1.bias:inf"} <= well.usual
    backward = Masked(lambda x: torch.where(x > 9, x.sqrt(), x))
    found = named(run(backward, X - 0.0))
    assert (found.module, found.direction) == ("last", "backward"), (
        "a mask that did no harm gives way"
    )
    found = named(run(Masked(lambda x: x * math.nan), X - 1.2, known=well.usual))
    assert (found.module, found.direction, found.nan) == ("last", "forward", 12)


def test_a_logarithm_of_zero_counts_when_it_reaches_the_output() -> None:
    model = nn.Sequential(Apply(lambda x: (x * 0.0).log()), Apply(lambda x: x - x))
    found = named(run(model))
    assert (found.module, found.direction, found.inf) == ("0", "forward", 12)


class Siblings(nn.Module):
    """Three branches from one tensor; the middle one cannot be differentiated at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.middle = Apply(lambda x: (x - x).sqrt())

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.middle(x) + self.right(x)


def test_of_siblings_with_one_input_the_guilty_one_is_named_in_backward() -> None:
    found = named(run(nn.Sequential(nn.Linear(4, 4), Siblings())))
    assert (found.module, found.direction, found.operation) == (
        "1.middle",
        "backward",
        "SqrtBackward0",
    )
    assert found.tensor == "gradient of its input"
    assert found.inf + found.nan == 12


def test_a_parameters_gradient_is_named() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale.sqrt()

    model = nn.Sequential(nn.Linear(4, 4), Scaled())
    found = named(run(model, X.abs() + 1))
    assert (found.module, found.direction, found.tensor) == (
        "1",
        "backward",
        "gradient of a parameter",
    )
    assert found.parameters == ("1.scale",)
    hook = model.get_parameter("0.weight").register_hook(lambda gradient: gradient * math.inf)
    with torch.no_grad():
        model.get_parameter("1.scale").fill_(1.0)
    found = named(run(model))
    hook.remove()
    assert (found.module, found.parameters) == ("0", ("0.weight",))
    assert found.tensor == "gradient of a parameter, as it arrived"


def test_a_parameter_is_named_through_autocasts_copy_of_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Apply(lambda x: x.float() * 3000.0))
    with watch(model) as origin, torch.autocast("cpu", torch.float16):
        model(torch.full((2, 4), 3000.0)).sum().backward()
    found = named(origin)
    assert (found.module, found.direction, found.dtype) == ("0", "backward", "float16")
    assert (found.tensor, found.parameters) == ("gradient of a parameter", ("0.weight",))


def test_what_follows_the_model_is_named_as_the_loss() -> None:
    model = nn.Linear(4, 4)
    with watch(model) as origin:
        (model(X) - model(X)).sqrt().sum().backward()
    found = named(origin)
    assert (found.module, found.direction, found.micro_batch) == (LOSS, "backward", 2)


def test_a_sum_over_uses_that_overflows_is_told_as_arriving() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1.0
            return y * 40000.0 + y * 40000.0

    model = nn.Sequential(nn.Identity(), Twice())
    found = named(run(model, torch.zeros(2, 2, dtype=torch.float16)))
    assert (found.module, found.direction, found.inf) == ("1", "backward", 4)
    assert found.tensor == "gradient of its output, as it arrived"


def test_the_call_of_a_shared_module_is_counted() -> None:
    shared = Apply(lambda x: x / (x - 1.0))
    model = nn.Sequential(shared, Apply(lambda x: x * 0.0 + 1.0), shared)
    found = named(run(model, X - 5.0))
    assert (found.module, found.call) == ("0", 2)


@dataclass
class Output:
    logits: Tensor
    extra: dict[str, list[Tensor]]


def test_nested_outputs_are_looked_into() -> None:
    inner = Apply(lambda x: Output(x, {"hidden": [x, x.log()]}))
    model = nn.Sequential(inner, Apply(lambda out: out.logits + out.extra["hidden"][1]))
    found = named(run(model))
    assert (found.module, found.tensor) == ("0", "output.extra.hidden.1")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_recomputed_blocks_are_looked_into(reentrant: bool, direction: str) -> None:
    guilty = (lambda x: x / 0.0) if direction == "forward" else (lambda x: x + (x - x).sqrt())
    block = nn.Sequential(nn.Linear(4, 4), Apply(guilty), nn.Linear(4, 4))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block, self.head = nn.Linear(4, 4), block, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, self.stem(x), use_reentrant=reentrant))

    found = named(run(Model()))
    assert (found.module, found.direction) == ("block.1", direction)


def test_in_place_modules_after_the_guilty_one_hide_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: x / 0.0), nn.Hardtanh(inplace=True))
    found = named(run(model))
    assert (found.module, found.direction) == ("1", "forward"), (
        "clamped afterwards, so the output is finite"
    )


def test_fp8_tensors_and_integers_are_no_trouble() -> None:
    model = nn.Sequential(
        Apply(lambda x: (x.to(torch.float8_e4m3fn), torch.arange(3), x)),
        Apply(lambda parts: F.relu(parts[2]) / 0.0),
    )
    assert named(run(model)).module == "1"
