"""The loss in chunks (`loss_chunk`) against float64, and what it holds in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness import Precision
from harness.core.facts import IGNORED
from harness.models.gpt import GPT, build
from harness.models.token_loss import loss_of_head, sum_of_losses
from harness.precision.recipe import Recipe, load_recipe
from tests.support.matrix import rest_nightly
from tests.support.wide import Wide

VOCAB, DIM, TOKENS = 1000, 64, 96


def drawn(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Head's input [tokens, dim], weight [vocab, dim] and targets, of which a third have no loss."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, DIM, generator=generator)
    weight = torch.randn(VOCAB, DIM, generator=generator) / 4
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets[::3] = IGNORED
    return x, weight, targets


def exact(x: Tensor, weight: Tensor, targets: Tensor, z_loss: float) -> list[Tensor]:
    """Loss, gradient of x and gradient of the weight, in float64."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    logits = x @ weight.t()
    loss = F.cross_entropy(logits, targets)
    kept = targets != IGNORED
    penalty = z_loss * logits.logsumexp(-1)[kept].square().mean()
    return [loss.detach(), *torch.autograd.grad(loss + penalty, (x, weight))]


def modules(x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The same by a Linear under autocast and torch's cross-entropy of its float32 logits."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        loss = F.cross_entropy(F.linear(x, weight).float(), targets)
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight))]


def of_head(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int, z_loss: float, dtype: torch.dtype
) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = loss_of_head(x, weight, targets, chunk, z_loss, dtype)
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight))]


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("chunk", [1, 40, TOKENS, 1000])
def test_float32_is_exact_to_its_rounding(chunk: int, z_loss: float) -> None:
    given = drawn()
    found = of_head(*given, chunk, z_loss, torch.float32)
    for mine, expected in zip(found, exact(*given, z_loss), strict=True):
        assert mine.dtype == torch.float32
        assert error(mine, expected) < 1e-6


@pytest.mark.parametrize("chunk", [40, TOKENS])
def test_bfloat16_errs_no_more_than_the_modules(chunk: int) -> None:
    """Rounded at the same places, though not of the same numbers: the mean is taken after the GEMMs."""
    for seed in range(3):
        given = drawn(seed)
        expected = exact(*given, 0.0)
        found = of_head(*given, chunk, 0.0, torch.bfloat16)
        usual = modules(*given, torch.bfloat16)
        for mine, theirs, right in zip(found, usual, expected, strict=True):
            assert error(mine, right) < 1.1 * error(theirs, right)


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_fp16_logits_keep_small_gradients_under_a_loss_scale(z_loss: float) -> None:
    """Divided by 96 tokens and without a scale, most of these gradients are under fp16's smallest number."""
    x, weight, targets = drawn()
    logits = (x @ weight.t()).half().requires_grad_()
    counted = (targets != IGNORED).sum()
    scale = 2.0**14
    loss = sum_of_losses(logits, targets, z_loss) / counted
    (found,) = torch.autograd.grad(loss * scale, logits)

    wide = logits.detach().double().requires_grad_()
    kept = targets != IGNORED
    penalty = z_loss * wide.logsumexp(-1)[kept].square().mean()
    expected_loss = F.cross_entropy(wide, targets)
    (expected,) = torch.autograd.grad((expected_loss + penalty) * scale, wide)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(found, expected.half(), rtol=2**-10, atol=2.0**-24)


def test_rows_are_right_across_blocks() -> None:
    """Rows of 2^20 logits: a block holds four of nine."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 2**20, generator=generator).requires_grad_()
    targets = torch.randint(0, 2**20, (9,), generator=generator)
    targets[4] = IGNORED
    loss = sum_of_losses(logits, targets)
    (found,) = torch.autograd.grad(loss, logits)
    expected = F.cross_entropy(logits, targets, reduction="sum")
    (right,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-12)


def test_unlikely_targets_keep_their_loss() -> None:
    """A probability that float32 cannot hold."""
    logits = torch.zeros(2, 3)
    logits[:, 0] = 300.0
    assert sum_of_losses(logits, torch.tensor([1, 2])).item() == pytest.approx(600.0)


def test_without_a_target_the_loss_is_nan_and_its_gradient_0_as_torchs() -> None:
    x, weight, targets = drawn()
    logits = torch.zeros(2, 3, requires_grad=True)
    loss = sum_of_losses(logits, torch.full((2,), IGNORED)) / torch.tensor(0)
    loss.backward()
    assert loss.isnan()
    assert logits.grad is not None
    assert not logits.grad.any()
    targets[:] = IGNORED
    for found in (
        of_head(x, weight, targets, 40, 0.0, torch.float32),
        modules(x, weight, targets, torch.float32),
    ):
        assert found[0].isnan()
        assert not found[1].any()
        assert not found[2].any()


@pytest.mark.parametrize("label", [-1, VOCAB])
def test_labels_out_of_range_are_errors(label: int) -> None:
    x, weight, targets = drawn()
    targets[5] = label
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        loss_of_head(x, weight, targets, 40, 0.0, torch.float32)


def test_a_second_backward_is_refused() -> None:
    """The first one has scaled the gradient of the weight in place."""
    x, weight, targets = drawn()
    weight.requires_grad_()
    loss = loss_of_head(x, weight, targets, 40, 0.0, torch.float32)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def small(**args: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab": 96, "dim": 64, "layers": 1, "heads": 2, "ffn": 96}
    return build(**{**sizes, **args})


def tokens() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 96, (2, 25), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def gradients(model: GPT, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    with torch.autocast("cpu", dtype=dtype):
        loss = model(*tokens())
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_a_tied_weight_gets_both_gradients() -> None:
    wanted = gradients(small(tied=True))
    found = gradients(small(tied=True, loss_chunk=10))
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert error(found[name], gradient.double()) < 0.01, name


@pytest.mark.parametrize("frozen", ["lm_head", "blocks", "everything"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    model = small(loss_chunk=10)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) and frozen != "everything")
    if frozen == "everything":
        assert not model(*tokens()).requires_grad
        return
    wanted = gradients(small())
    found = gradients(model)
    assert found.keys() == {name for name in wanted if not name.startswith(frozen)}
    for name, gradient in found.items():
        assert error(gradient, wanted[name].double()) < 0.02, name


def test_bfloat16_weights_get_bfloat16_gradients() -> None:
    model = small(loss_chunk=10).bfloat16()
    model(*tokens()).backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}  # type: ignore[union-attr]


class Doubled(nn.Linear):
    """A head of somebody's own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_of_its_own_kind_is_called(dtype: torch.dtype) -> None:
    found: list[dict[str, Tensor]] = []
    for chunk in (0, 10):
        model = small(loss_chunk=chunk)
        model.lm_head.__class__ = Doubled
        found.append(gradients(model, dtype))
    plain, chunked = found
    for name, gradient in plain.items():
        assert error(chunked[name], gradient.double()) < 0.01, name


def test_an_fp8_head_stays_in_fp8() -> None:
    """Chunks go through the converted layer. Its scales are 1 in the first step, with and without them."""
    given = load_recipe("fp8_hybrid").model_dump()
    given["layers"]["exclude_if_present"] = []
    found: list[Tensor] = []
    for chunk in (0, 16):
        precision = Precision(Recipe.model_validate(given))
        model = precision.prepare(small(loss_chunk=chunk))
        with precision.context():
            loss = model(*tokens())
        precision.backward(loss)
        assert "lm_head" in precision.plan.fp8_layers()
        weight = model.get_parameter("lm_head.weight")
        assert weight.grad is not None
        found.append(weight.grad)
    assert error(found[1], found[0].double()) < 0.02


@pytest.mark.parametrize("chunk", [10, 1000])
def test_evaluation_has_the_loss_of_training(chunk: int) -> None:
    model = small(loss_chunk=chunk)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trained = model(*tokens())
        with torch.no_grad():
            evaluated = model(*tokens())
    assert torch.equal(trained, evaluated)


# torch's own compiler does that while it traces a checkpoint.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("chunk", rest_nightly([10, 1000], 10))
def test_a_compiled_model_has_its_loss(chunk: int) -> None:
    plain, compiled = small(), torch.compile(small(loss_chunk=chunk), backend="aot_eager")
    loss = compiled(*tokens())
    loss.backward()
    torch.testing.assert_close(loss, plain(*tokens()), rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("head", rest_nightly([nn.Linear, Doubled], nn.Linear))
def test_no_float32_tensor_holds_a_chunk(head: type[nn.Linear]) -> None:
    """Of 256 tokens at a time, 64 are in float32."""
    vocab = 2**16
    model = small(vocab=vocab, dim=16, loss_chunk=256)
    model.lm_head.__class__ = head
    ids = torch.zeros(1, 512, dtype=torch.int64)
    with Wide(vocab) as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        model(ids, ids).backward()
    assert 0 < seen.largest <= 2**22


def test_an_evaluation_computes_no_gradient() -> None:
    """Autograd asks for the gradients of what is trained, whether or not they are wanted now."""
    x, weight, targets = drawn()
    products: list[str] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func.overloadpacket.__name__
            if name in ("mm", "addmm", "matmul", "linear"):
                products.append(name)
            return func(*args, **(kwargs or {}))

    trained = nn.Parameter(weight)
    with torch.no_grad(), Count():
        loss = loss_of_head(x, trained, targets, TOKENS, 0.0, torch.float32)
    assert len(products) == 1, "the logits, and no gradient"
    assert torch.equal(loss, of_head(x, weight, targets, TOKENS, 0.0, torch.float32)[0])
