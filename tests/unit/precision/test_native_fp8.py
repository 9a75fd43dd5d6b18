"""The native backend as on a GPU with FP8 units, on the CPU's `torch._scaled_mm`: FP8 bytes instead of carriers."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from native_support import APPLY, SKIP, backend_for, same
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from harness.precision import scaling
from harness.precision.backends import native_fp8, native_triton
from harness.precision.backends.native import NativeBackend
from harness.precision.backends.native_fp8 import Fp8SlotBuffers

FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize(
    "scale",
    [1.0, 0.37, 3.3e-5, 448.0 / 7.1, 2.0**20, 2.0**-20, 1e-38, 3e38, scaling.SMALLEST_SCALE],
)
def test_a_straight_cast_has_the_bits_of_the_carriers(fmt: str, scale: float) -> None:
    for x in (
        ALL_BF16,
        ALL_BF16.float() * 1.1,
        ALL_BF16.float() * 0.9371,
        ALL_BF16.view(torch.float16),
    ):
        carried = scaling.quantize(x, torch.tensor(scale), fmt)
        straight = scaling.cast(x, torch.tensor([scale]), fmt)
        assert straight.dtype == scaling.FORMATS[fmt].dtype
        equal = carried.to(straight.dtype).view(torch.uint8) == straight.view(torch.uint8)
        assert bool((equal | (carried.isnan() & straight.float().isnan())).all())


# Sums in another order round some outputs to the next bfloat16.
TOLERANCE = 2e-3


def distance(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius distance."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def model_of(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48, bias=bias), nn.GELU(), nn.Linear(48, 32, bias=bias))


def train(
    backend: NativeBackend,
    model: nn.Module,
    batches: list[Tensor],
    skip: Tensor = APPLY,
    factor: Tensor | float = 1.0,
) -> dict[str, Tensor]:
    """One window, loss sum(factor * outputs): the last output and input gradient, the others, statistics, state."""
    model.zero_grad()
    backend.begin_window(sample=True)
    out, x = torch.empty(0), torch.empty(0)
    for batch in batches:
        x = batch.clone().requires_grad_()
        with backend.context():
            out = model(x)
            loss = (out * factor).float().sum()
        with backend.backward_context():
            loss.backward()
        backend.end_micro_batch(same)
    assert x.grad is not None
    stats = backend.end_window(backend.amax(), skip, same)
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    state = {name: tensor.clone() for name, tensor in backend.state_dict()[0].items()}
    return {"out": out.detach(), "x": x.grad, **grads, "stats": stats, **state}


@pytest.mark.parametrize("tokens", [32, 20, 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_windows_are_those_of_the_carriers(tokens: int, bias: bool, dtype: torch.dtype) -> None:
    """One layer and a given gradient: all operands are the same, and so is every bit of the state."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(64, 48, bias=bias))
    theirs = copy.deepcopy(ours)
    units, carriers = backend_for(ours, fp8_units=True), backend_for(theirs)
    assert isinstance(units.slot_buffers, Fp8SlotBuffers)
    for number in range(4):
        inputs = [(10.0**number * torch.randn(tokens, 64)).to(dtype) for _ in range(2)]
        factor = torch.randn(tokens, 48).bfloat16()
        mine, expected = (
            train(backend, model, inputs, SKIP if number == 2 else APPLY, factor=factor)
            for backend, model in ((units, ours), (carriers, theirs))
        )
        for name, tensor in mine.items():
            if name == "stats":
                torch.testing.assert_close(tensor[:3], expected[name][:3], rtol=0, atol=0)
                torch.testing.assert_close(
                    tensor[3:], expected[name][3:], rtol=1e-5, atol=0, equal_nan=True
                )
            elif name in ("history", "scale"):
                assert torch.equal(tensor, expected[name]), (number, name)
            else:
                assert distance(tensor, expected[name]) < TOLERANCE, (number, name)


def test_a_gradient_is_of_e5m2() -> None:
    """Values that E4M3 would keep and E5M2 does not, multiplied by ones and zeros: the products tell which it was."""
    linear = nn.Linear(32, 16, bias=False)
    model = nn.Sequential(linear)
    backend = backend_for(model, fp8_units=True)
    x, grad = torch.eye(32)[:16], 1.0 + torch.arange(256.0).view(16, 16).bfloat16() / 256
    with backend.context():
        out = model(x)
    out.backward(grad.bfloat16())
    rounded = scaling.quantize(grad.bfloat16(), 1.0, "e5m2")
    assert not torch.equal(rounded, scaling.quantize(grad.bfloat16(), 1.0, "e4m3"))
    assert linear.weight.grad is not None
    assert torch.equal(linear.weight.grad[:, :16].bfloat16(), rounded.t())


@contextmanager
def saved(kept: list[Tensor]) -> Iterator[None]:
    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def test_backward_keeps_fp8_bytes_and_little_else() -> None:
    linear = nn.Linear(64, 32)
    model = nn.Sequential(linear)
    backend = backend_for(model, fp8_units=True)
    kept: list[Tensor] = []
    backend.begin_window(sample=False)
    with backend.context(), saved(kept):
        model(torch.randn(48, 64))
    assert {tensor.dtype for tensor in kept if tensor.numel() > 1} <= FP8
    assert sum(tensor.numel() for tensor in kept if tensor.dtype in FP8) == 64 * 48, (
        "x; nobody wants a gradient of it"
    )
    kept.clear()
    with backend.context(), saved(kept):
        model(torch.randn(48, 64, requires_grad=True))
    assert sum(tensor.numel() for tensor in kept if tensor.dtype in FP8) == 64 * 48 + 64 * 32
    assert all(tensor.dtype in FP8 or tensor.numel() == 1 for tensor in kept)


def counted(backend: NativeBackend, casts: list[tuple[str, tuple[int, ...]]]) -> None:
    buffers = backend.slot_buffers
    assert isinstance(buffers, Fp8SlotBuffers)
    inner = buffers.cast

    def cast(
        x: Tensor, scale: Tensor, amax: Tensor | None, fmt: str, through_bf16: bool, transpose: bool
    ) -> object:
        casts.append((fmt, tuple(x.shape)))
        return inner(x, scale, amax, fmt, through_bf16, transpose)

    buffers.cast = cast  # type: ignore[assignment]


@pytest.mark.parametrize("told", [True, False])
def test_a_weight_is_cast_once_a_window_and_given_up_by_the_last_backward(told: bool) -> None:
    model = model_of()
    backend = backend_for(model, fp8_units=True)
    casts: list[tuple[str, tuple[int, ...]]] = []
    counted(backend, casts)
    weights = [(48, 64), (32, 48)]
    for window, micro_batches in enumerate((3, 3, 2, 2, 1)):
        casts.clear()
        model.zero_grad()
        backend.begin_window(sample=False)
        for number in range(micro_batches):
            last = number == micro_batches - 1
            with backend.context():
                loss = model(torch.randn(20, 64)).float().sum()
            with backend.backward_context(last if told else None):
                loss.backward()
            backend.end_micro_batch(same)
            if told or window in (1, 3):
                assert len(backend.slot_buffers.weights) == (0 if last else 2), (
                    "freed by the last backward, not before"
                )
        backend.end_window(backend.amax(), APPLY, same)
        assert not backend.slot_buffers.weights
        made = sum(shape in weights for _, shape in casts)
        assert made == (6 if window == 0 and not told else 2), (
            "nobody says how many backwards the first window has"
        )
        assert len(casts) - made == 2 * 2 * micro_batches, "input and grad_output, once each"


def test_a_layer_called_twice_and_recomputed_has_the_same_history() -> None:
    class Twice(nn.Module):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.cell, self.recompute = nn.Linear(32, 32), recompute

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = (
                    checkpoint(self.cell, x, use_reentrant=False)
                    if self.recompute
                    else self.cell(x)
                )  # type: ignore[assignment]
            return x

    found = []
    for recompute in (False, True):
        model = Twice(recompute)
        backend = backend_for(model, fp8_units=True)
        result: dict[str, Tensor] = {}
        for number in range(3):
            torch.manual_seed(number)
            result = train(backend, model, [torch.randn(16, 32) for _ in range(2)])
        found.append(result)
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("fp8_units", [False, True])
def test_a_demoted_layer_is_plain_bf16_and_goes_on_being_measured(
    sample: bool, fp8_units: bool
) -> None:
    linear = nn.Linear(32, 32, bias=False)
    model = nn.Sequential(linear)
    backend = backend_for(model, fp8_units=fp8_units)
    backend.switch(["00"], [])
    backend.begin_window(sample)
    x, grad = torch.randn(16, 32), torch.randn(16, 32).bfloat16()
    with backend.context():
        out = model(x)
    with backend.backward_context():
        out.backward(grad)
    assert torch.equal(out, x.bfloat16() @ linear.weight.detach().bfloat16().t())
    amaxes = [x.bfloat16().abs().max(), linear.weight.detach().abs().max(), grad.abs().max()]
    assert backend.amax().tolist() == [amax.item() for amax in amaxes], (
        "in every window, sampled or not"
    )
    stats = backend.end_window(backend.amax(), APPLY, same)
    assert bool(stats[5].isfinite().all()) is sample
    backend.switch([], ["00"])
    assert backend.slot_buffers.scale.tolist() != [1.0, 1.0, 1.0], "warm when it returns"


@pytest.mark.parametrize("fp8_units", [False, True])
def test_nan_is_no_amax_and_inf_is(fp8_units: bool) -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    backend = backend_for(model, fp8_units=fp8_units, scrub_inf=False)
    x = torch.ones(16, 32)
    x[0, 0], x[1, 1] = math.nan, -3.0
    for largest in (3.0, math.inf):
        x[2, 2] = largest
        backend.begin_window(sample=True)
        with backend.context():
            model(x)
        assert backend.amax()[0] == largest
        assert torch.isfinite(backend.slot_buffers.sums).all()


def test_evaluation_and_copies_leave_no_trace() -> None:
    model = model_of()
    backend = backend_for(model, fp8_units=True)
    train(backend, model, [torch.randn(32, 64)])
    twin = copy.deepcopy(model)
    backend.begin_window(sample=True)
    staged = backend.slot_buffers.history[0].clone(), backend.slot_buffers.sums.clone()
    x = (1e6 * torch.randn(16, 64)).requires_grad_()
    with torch.no_grad(), backend.context():
        out = model(x)
    with backend.context():
        copied = twin(x)
    with backend.backward_context():
        copied.float().sum().backward()
    assert torch.equal(out, copied)
    assert x.grad is not None
    assert x.grad.any()
    assert torch.equal(backend.slot_buffers.history[0], staged[0])
    assert torch.equal(backend.slot_buffers.sums, staged[1])
    assert not backend.slot_buffers.weights


def test_scales_that_roll_between_a_forward_and_its_backward() -> None:
    """x was cast under the scale of then: its inverse belongs to it."""
    grads = []
    for fp8_units in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32))
        backend = backend_for(model, fp8_units=fp8_units, roll="micro_batch")
        backend.begin_window(sample=False)
        with backend.context():
            losses = [model(100 * torch.randn(16, 32)).float().mean() for _ in range(2)]
        for loss in losses:
            model.zero_grad()
            with backend.backward_context():
                loss.backward()
            backend.end_micro_batch(same)
        grad = model.get_parameter("0.weight").grad
        assert grad is not None
        grads.append(grad)
    torch.testing.assert_close(*grads, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("fp8_units", [False, True])
@pytest.mark.parametrize("shape", [(32,), (16, 32), (2, 3, 32)])
@pytest.mark.parametrize("demoted", [False, True])
def test_an_output_may_be_changed_in_place(
    shape: tuple[int, ...], fp8_units: bool, demoted: bool
) -> None:
    def run(inplace: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(inplace=inplace), nn.Linear(48, 16))
        backend = backend_for(model, fp8_units=fp8_units)
        backend.switch(["00"] if demoted else [], [])
        x = torch.randn(shape, requires_grad=True)
        backend.begin_window(sample=False)
        with backend.context():
            out = model(x)
            scaled = out.mul_(2) if inplace else out * 2
        with backend.backward_context():
            scaled.float().sum().backward()
        assert x.grad is not None
        return [
            scaled.detach(),
            x.grad,
            *(p.grad for p in model.parameters() if p.grad is not None),
            backend.amax(),
        ]

    for left, right in zip(run(True), run(False), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("fp8_units", [False, True])
def test_a_margin_never_makes_an_inverse_scale_infinite(fp8_units: bool) -> None:
    """Transformer Engine's rule gives 448 * 2^-15 / 3e38, whose inverse is over the largest float32: NaN everywhere."""
    linear = nn.Linear(16, 16, bias=False)
    model = nn.Sequential(linear)
    backend = backend_for(model, fp8_units=fp8_units, margin=15, roll="micro_batch")
    x = torch.zeros(16, 16)
    x[0, 0] = 3e38
    with torch.no_grad():
        linear.weight.fill_(2.0**-20)
    result: dict[str, Tensor] = {}
    for _ in range(2):
        result = train(backend, model, [x])
    assert backend.slot_buffers.scale[0] == scaling.SMALLEST_SCALE
    assert torch.isfinite(backend.slot_buffers.inverse).all()
    assert torch.isfinite(result["out"]).all()
    torch.testing.assert_close(result["out"][0, 0].item(), 3e38 * 2.0**-20, rtol=0.1, atol=0)


def test_the_compilers_cast_lays_rows_out_for_the_gemm() -> None:
    """A micro-batch of one makes a transposed view of [tokens, features]; GEMM and transpose read row by row."""
    x = torch.randn(48, 32).t()
    assert not x.is_contiguous()
    scale = torch.ones(1)
    handle = torch.zeros((), dtype=torch.int64)
    _, amax, rows, _ = native_fp8._cast(x, scale, handle, 0, "e4m3", True)
    assert rows.is_contiguous()
    expected, _ = native_triton.quantize_pair(x.contiguous(), scale, None, "e4m3", True, False)
    assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8))
    assert amax == x.abs().max().bfloat16()


def test_compiled_code_reads_a_layers_scales_in_one_operation() -> None:
    """A step asks twice for each layer in every micro-batch: a fill, slices and a concatenation each, before."""
    model = model_of()
    backend = backend_for(model, fp8_units=True)
    buffers = backend.slot_buffers
    assert isinstance(buffers, Fp8SlotBuffers)
    for _ in range(2):
        train(backend, model, [100 * torch.randn(16, 64)])
    assert (buffers.scale != 1).all()
    for layer in backend.modules.values():
        with Operations() as ran:
            read = native_fp8._fp8_scales(layer.handle, layer.weight)
        scales, inverses = read[:4], read[4:].view(3, 4)
        slots = slice(layer.slot, layer.slot + 3)
        assert torch.equal(scales[:3], buffers.scale[slots])
        assert torch.equal(inverses[:, 0], buffers.inverse[slots])
        # The handle is on the CPU. Only the clone is a launch.
        assert ran.names == ["aten::_local_scalar_dense", "aten::select.int", "aten::clone"]


class Operations(TorchDispatchMode):
    """Keeps the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))
