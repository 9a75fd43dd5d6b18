"""Which forwards are read as a SwiGLU MLP. tests/te_cpu has what is computed then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.models.gpt import build
from harness.precision.swiglu import difference, snapshot

WIDTH = 16


def halves(h: Tensor) -> tuple[Tensor, Tensor]:
    first, second = torch.split(h, 2 * WIDTH, dim=-1)
    return first, second


SWIGLU = {
    "split": lambda h: F.silu(halves(h)[0]) * halves(h)[1],
    "chunk": lambda h: torch.mul(torch.chunk(h, 2, -1)[1], nn.SiLU()(h.chunk(2, h.ndim - 1)[0])),
    "shape": lambda h: F.silu(h.split(h.shape[-1] // 2, dim=-1)[0]).mul(h.split(2 * WIDTH, -1)[1]),
}
OTHERS = {
    "gelu": lambda h: F.gelu(halves(h)[0]) * halves(h)[1],
    "second half first": lambda h: F.silu(halves(h)[1]) * halves(h)[0],
    "gate twice": lambda h: F.silu(halves(h)[0]) * halves(h)[0],
    "silu twice": lambda h: F.silu(halves(h)[0]) * F.silu(halves(h)[0]),
    "clamped": lambda h: F.silu(halves(h)[0].clamp(max=0.5)) * halves(h)[1],
    "scaled": lambda h: F.silu(halves(h)[0]) * halves(h)[1] * 0.5,
    "in fp32": lambda h: F.silu(halves(h)[0].float()) * halves(h)[1],
    "of all": lambda h: halves(F.silu(h))[0] * halves(h)[1],
    "without silu": lambda h: halves(h)[0] * halves(h)[1],
    "in place": lambda h: F.silu(halves(h)[0]).mul_(halves(h)[1]),
    "by a number": lambda h: F.silu(halves(h)[0]) * 2.0,
    "another dimension": lambda h: (
        F.silu(h.chunk(2, 0)[0]).repeat(2, 1)[:, : 2 * WIDTH] * halves(h)[1]
    ),
    "a dimension that is the last one of a matrix": lambda h: (
        F.silu(h.chunk(2, 1)[0]) * h.chunk(2, 1)[1]
    ),
    "sigmoid": lambda h: F.sigmoid(halves(h)[0]) * halves(h)[0] * halves(h)[1],
}


class Mlp(nn.Module):
    """A norm, and an MLP with something between its layers."""

    between: ClassVar[Callable[[Tensor], Tensor]] = SWIGLU["split"]

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(type(self).between(self.first(self.norm(x))))
        return out


def read(model: Any) -> str:
    return difference(model, model.norm, model.first, model.second)


def between(name: str) -> Mlp:
    own = {"between": staticmethod((SWIGLU | OTHERS)[name])}
    made: Mlp = type("Named", (Mlp,), own)()
    return made


@pytest.mark.parametrize("name", SWIGLU)
def test_swiglu_is_known_however_it_is_written(name: str) -> None:
    assert read(between(name)) == ""


@pytest.mark.parametrize("name", OTHERS)
def test_another_function_is_named(name: str) -> None:
    assert "forward calls torch" in read(between(name))


def test_the_shipped_model_is_read() -> None:
    block: Any = build(vocab=64, dim=32, layers=1, heads=2, ffn=64).blocks[0]
    mlp = block.mlp
    assert difference(mlp, block.mlp_norm, mlp.gate_up, mlp.down) == ""
    whole = difference(block, block.mlp_norm, mlp.gate_up, mlp.down)
    assert whole == "its forward may depend on attn_norm, a RMSNorm"


class Unseen(torch.autograd.Function):
    """Hands on what it gets, past PyTorch's Python functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


KEPT: list[Tensor] = []


def kept_in_a_list(model: Any, x: Tensor) -> Tensor:
    h = model.first(model.norm(x))
    KEPT.append(h)
    return model.second(SWIGLU["split"](h))


def kept_on_the_module(model: Any, x: Tensor) -> Tensor:
    model.last = model.first(model.norm(x))
    return model.second(SWIGLU["split"](model.last))


def counted(model: Any, x: Tensor) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return Mlp.forward(model, x)


def residual(model: Any, x: Tensor) -> Tensor:
    return x + Mlp.forward(model, x)


def norm_twice(model: Any, x: Tensor) -> Tensor:
    model.norm(x)
    return Mlp.forward(model, x)


def without_norm(model: Any, x: Tensor) -> Tensor:
    return model.second(SWIGLU["split"](model.first(x)))


def two_results(model: Any, x: Tensor) -> Any:
    h = model.first(model.norm(x))
    return model.second(SWIGLU["split"](h)), h


def not_the_result(model: Any, x: Tensor) -> Tensor:
    return model.first(model.norm(x))


def in_evaluation_another(model: Any, x: Tensor) -> Tensor:
    return Mlp.forward(model, x) if model.training else without_norm(model, x)


def without_gradients_another(model: Any, x: Tensor) -> Tensor:
    return Mlp.forward(model, x) if torch.is_grad_enabled() else without_norm(model, x)


def by_value(model: Any, x: Tensor) -> Tensor:
    h = model.first(model.norm(x))
    return model.second(SWIGLU["split"](h) if h.max() > 0 else h)


def by_size(model: Any, x: Tensor) -> Tensor:
    return Mlp.forward(model, x) if x.shape[0] < 1000 else without_norm(model, x)


def part_without_gradients(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate, up = model.first(model.norm(x)).chunk(2, -1)
    return model.second(F.silu(gate) * up)


def part_without_autocast(model: Any, x: Tensor) -> Tensor:
    h = SWIGLU["split"](model.first(model.norm(x)))
    with torch.autocast("cpu", enabled=False):
        return model.second(h)


def recomputed(model: Any, x: Tensor) -> Any:
    return checkpoint(lambda x: Mlp.forward(model, x), x, use_reentrant=False)


def reentrant(model: Any, x: Tensor) -> Any:
    h = SWIGLU["split"](model.first(model.norm(x)))
    return checkpoint(model.second, h, use_reentrant=True)


def past_python(model: Any, x: Tensor) -> Tensor:
    return model.second(SWIGLU["split"](Unseen.apply(model.first(model.norm(x)))))


def hooked(model: Any, x: Tensor) -> Tensor:
    h = model.first(model.norm(x))
    h.register_hook(lambda grad: 3 * grad)
    return model.second(SWIGLU["split"](h))


def written(model: Any, x: Tensor) -> Tensor:
    h = model.first(model.norm(x))
    h.data.mul_(2)
    return model.second(SWIGLU["split"](h))


def hiding_errors(model: Any, x: Tensor) -> Tensor:
    h = model.first(model.norm(x))
    try:
        h = h.clamp(max=7)
    except Exception:
        h = h * 1
    return model.second(SWIGLU["split"](h))


FORWARDS = {
    kept_in_a_list: "keeps what it has computed",
    kept_on_the_module: "keeps what it has computed",
    counted: "keeps what it has computed",
    residual: "calls torch.Tensor.add",
    norm_twice: "calls norm on something else",
    without_norm: "calls first on something else",
    two_results: "does not return what the second layer gives",
    not_the_result: "does not return what the second layer gives",
    in_evaluation_another: "calls first on something else",
    without_gradients_another: "calls first on something else",
    by_value: "calls torch.Tensor.max",
    by_size: "calls torch.Tensor.shape",
    part_without_gradients: "calls _set_grad_enabled",
    part_without_autocast: "switches gradients or autocast",
    recomputed: "calls torch.Tensor.device",
    reentrant: "calls torch.Tensor.requires_grad",
    past_python: "calls torch.Tensor.view_as",
    hooked: "calls torch.Tensor.register_hook",
    written: "calls torch.Tensor.data",
    hiding_errors: "calls torch.Tensor.clamp",
}


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_a_forward_that_does_anything_else_is_named(forward: Any) -> None:
    model = type("Other", (Mlp,), {"forward": forward})()
    before = dict(vars(model))
    what = read(model)
    assert what.startswith("its forward ")
    assert FORWARDS[forward] in what
    assert vars(model) == before


def test_a_forward_on_the_instance_and_one_of_more_arguments_are_named() -> None:
    model = Mlp()
    model.forward = model.forward  # type: ignore[method-assign]
    assert "fails on a tensor without values" in read(model)
    model = type("Two", (Mlp,), {"forward": lambda self, x, y: x})()
    assert "fails on a tensor without values" in read(model)


def test_another_part_with_settings_is_named_and_one_without_is_not() -> None:
    model: Any = Mlp()
    model.act = nn.SiLU()
    assert read(model) == ""
    model.drop = nn.Dropout(0.0)
    assert read(model) == "its forward may depend on drop, a Dropout"


def test_reading_calls_no_hook_and_leaves_the_module_alone() -> None:
    model: Any = nn.Sequential(Mlp())
    seen: list[Any] = []
    for module in model.modules():
        module.register_forward_hook(lambda *args: seen.append(args))
    weight = model[0].first.weight
    inner = model[0]
    assert difference(model, inner.norm, inner.first, inner.second) == ""
    assert seen == []
    assert model[0].first.weight is weight
    assert model[0].training


def test_a_snapshot_differs_once_the_module_does() -> None:
    model: Any = Mlp()
    before = snapshot(model)
    assert snapshot(model.eval()) == before
    model.limit = 7.0
    assert snapshot(model) != before
    del model.limit
    assert snapshot(model) == before
    model.first = nn.Linear(WIDTH, 4 * WIDTH)
    assert snapshot(model) != before


class Switched(nn.Module):
    """A container with a setting of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4 * WIDTH)
        self.bypass = False

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, 4) if self.bypass else self.inner(x)


def test_settings_of_a_container_of_the_parts_are_named() -> None:
    """They could be changed later, and the fused MLP would go on as it was."""
    made: Any = Mlp()
    made.first = Switched()
    found = difference(made, made.norm, made.first.inner, made.second)
    assert found == "its forward may depend on first, a Switched"
