"""What a Linear may be given: any leading shape, layout and float dtype; no rows; no gradient; autocast turned off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from native_support import APPLY, backend_for, same, window
from torch import Tensor, nn

from harness.precision.backends.native import NativeBackend


def layer(bias: bool = True, seed: int = 0) -> tuple[NativeBackend, nn.Sequential]:
    """A 32 x 48 layer whose scales are set."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 48, bias=bias))
    backend = backend_for(model)
    window(backend, model, torch.randn(16, 32))
    model.zero_grad()
    return backend, model


def run(
    backend: NativeBackend, model: nn.Module, x: Tensor, grad: Tensor | None = None
) -> list[Tensor]:
    """Output, gradients of x (if it wants one), weight and bias, and the staged amax of one forward and backward."""
    model.zero_grad()
    backend.begin_window(sample=False)
    with backend.context():
        out = model(x)
    out.backward(torch.ones_like(out) if grad is None else grad)
    results = [out.detach(), *([] if x.grad is None else [x.grad])]
    return (
        results
        + [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        + [backend.amax()]
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "shape", [(32,), (1, 32), (12, 32), (3, 4, 32), (2, 2, 3, 32), (1, 1, 1, 1, 32)]
)
def test_leading_dimensions_are_rows(shape: tuple[int, ...], bias: bool) -> None:
    backend, model = layer(bias)
    values = torch.randn(shape)
    x, rows = values.clone().requires_grad_(), values.reshape(-1, 32).clone().requires_grad_()
    mine, expected = run(backend, model, x), run(backend, model, rows)
    assert mine[0].shape == (*shape[:-1], 48)
    assert mine[1].shape == shape
    for left, right in zip(mine, expected, strict=True):
        assert torch.equal(left.reshape(right.shape), right)


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
def test_no_rows_leave_no_evidence(shape: tuple[int, ...]) -> None:
    backend, model = layer()
    before = backend.slot_buffers.history.clone(), backend.slot_buffers.scale.clone()
    x = torch.zeros(shape, requires_grad=True)
    out, grad_x, grad_weight, grad_bias, amax = run(backend, model, x)
    assert (out.shape, grad_x.shape) == ((*shape[:-1], 48), shape)
    assert not grad_weight.any()
    assert not grad_bias.any()
    assert amax.tolist() == [0.0, model.get_parameter("0.weight").abs().max().item(), 0.0]
    backend.end_window(backend.amax(), APPLY, same)
    assert torch.equal(backend.slot_buffers.history[:, ::2], before[0][:, ::2])
    assert torch.equal(backend.slot_buffers.scale[::2], before[1][::2])


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(32, 12).t(),
    "strided": lambda: torch.randn(24, 64)[::2, ::2],
    "expanded rows": lambda: torch.randn(1, 32).expand(12, 32),
    "expanded columns": lambda: torch.randn(12, 1).expand(12, 32),
    "channels last": lambda: torch.randn(2, 32, 3, 2).permute(0, 2, 3, 1),
    "flipped batch": lambda: torch.randn(4, 3, 32).transpose(0, 1),
    "offset": lambda: torch.randn(13 * 32 + 5)[5 : 5 + 12 * 32].view(12, 32),
}


def bfloat16_as_laid_out(x: Tensor) -> Tensor:
    """The values of x with its very strides, gaps and overlaps included, which a cast would tidy up."""
    storage = torch.empty(x.untyped_storage().nbytes() // x.itemsize, dtype=torch.bfloat16)
    storage.copy_(x.as_strided(storage.shape, (1,), 0))
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_in_memory_changes_nothing(name: str, dtype: torch.dtype) -> None:
    backend, model = layer()
    value = LAYOUTS[name]() if dtype == torch.float32 else bfloat16_as_laid_out(LAYOUTS[name]())
    assert value.dtype == dtype
    x, plain = value.detach().requires_grad_(), value.contiguous().clone().requires_grad_()
    grad = torch.randn(48, *plain.shape[:-1]).bfloat16().movedim(0, -1)
    mine, expected = run(backend, model, x, grad), run(backend, model, plain, grad.contiguous())
    assert all(torch.equal(left, right) for left, right in zip(mine, expected, strict=True))
    wide = torch.zeros(48, 64)
    wide[:, ::2] = model.get_parameter("0.weight").detach()
    model.get_submodule("0").weight = nn.Parameter(wide[:, ::2])
    assert not model.get_parameter("0.weight").is_contiguous()
    again = run(backend, model, plain.detach().clone().requires_grad_(), grad)
    assert all(torch.equal(left, right) for left, right in zip(again, expected, strict=True))


def test_a_gradient_that_is_one_number_expanded() -> None:
    backend, model = layer()
    x = torch.randn(12, 32)
    expanded = torch.tensor(0.25, dtype=torch.bfloat16).expand(12, 48)
    mine, expected = run(backend, model, x, expanded), run(backend, model, x, expanded.contiguous())
    assert all(torch.equal(left, right) for left, right in zip(mine, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_any_float_is_cast_to_bfloat16_and_its_gradient_comes_back(dtype: torch.dtype) -> None:
    backend, model = layer()
    value = torch.randn(12, 32).to(torch.bfloat16)
    x = value.clone().to(dtype).requires_grad_()
    mine = run(backend, model, x)
    expected = run(backend, model, value.clone().requires_grad_())
    assert mine[0].dtype == torch.bfloat16
    assert mine[1].dtype == dtype
    for left, right in zip(mine, expected, strict=True):
        assert torch.equal(left.to(right.dtype), right)
    backend.switch(["00"], [])
    assert run(backend, model, x.detach())[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.ones(4, 32, dtype=torch.int64), "same dtype"),
        (torch.ones(4, 31), r"cannot be multiplied \(4x31"),
        (torch.ones(31), r"cannot be multiplied \(1x31"),
    ],
)
def test_what_no_linear_takes_is_refused_in_torchs_words(x: Tensor, words: str) -> None:
    backend, model = layer()
    with pytest.raises(RuntimeError, match=words), backend.context():
        model(x)
    assert not backend.slot_buffers.active


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_autocast_is_off_the_output_has_the_inputs_dtype(dtype: torch.dtype) -> None:
    backend, model = layer()
    x = torch.randn(12, 32).to(torch.bfloat16)
    expected = run(backend, model, x.clone().requires_grad_())
    mine = x.to(dtype).requires_grad_()
    model.zero_grad()
    backend.begin_window(sample=False)
    with backend.context(), torch.autocast("cpu", enabled=False):
        out = model(mine)
    out.backward(torch.ones_like(out))
    assert out.dtype == dtype
    assert torch.equal(out.to(torch.bfloat16), expected[0]), "the plan says FP8: that is what runs"
    assert mine.grad is not None
    assert torch.equal(mine.grad.to(torch.bfloat16), expected[1])


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias"), ()])
@pytest.mark.parametrize("input_wants_grad", [True, False])
def test_only_gradients_that_somebody_wants(
    frozen: tuple[str, ...], input_wants_grad: bool
) -> None:
    backend, model = layer()
    x = torch.randn(12, 32)
    everything = run(backend, model, x.clone().requires_grad_())
    model.zero_grad()
    for name in frozen:
        model.get_parameter(f"0.{name}").requires_grad_(False)
    mine = x.clone().requires_grad_(input_wants_grad)
    backend.begin_window(sample=False)
    with backend.context():
        out = model(mine)
    assert torch.equal(out, everything[0])
    if not input_wants_grad and len(frozen) == 2:
        assert not out.requires_grad
        return
    out.backward(torch.ones_like(out))
    found = [mine.grad, model.get_parameter("0.weight").grad, model.get_parameter("0.bias").grad]
    wanted = [input_wants_grad, "weight" not in frozen, "bias" not in frozen]
    for gradient, right, want in zip(found, everything[1:4], wanted, strict=True):
        assert (gradient is not None) is want
        assert gradient is None or torch.equal(gradient, right)
    assert torch.equal(backend.amax(), everything[-1])
