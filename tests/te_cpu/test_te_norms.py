"""The stand-in's norms and SwiGLU against torch's own in float64, forward and backward."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import te_extension as tex
import te_norms
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.precision import scaling

te: Any = import_module("transformer_engine.pytorch")

pytestmark = pytest.mark.every_version
KINDS = ("RMSNorm", "LayerNorm")


def parts(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [24, 48] with rows of very different size, weight and bias [48], gradient [24, 48]."""
    torch.manual_seed(0)
    x = (torch.randn(24, 48) + torch.randn(24, 1)) * 10 ** torch.empty(24, 1).uniform_(-4, 3)
    made = (x, 1 + torch.randn(48) / 3, torch.randn(48), torch.randn(24, 48))
    return made[0].to(dtype), made[1].to(dtype), made[2].to(dtype), made[3].to(dtype)


def exact(kind: str, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    if kind == "RMSNorm":
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def forward(
    kind: str, x: Tensor, weight: Tensor, bias: Tensor, eps: float, quantizer: Any
) -> tuple[Any, Any, Any]:
    """Through the names that TE's Python calls."""
    extension: Any = import_module("transformer_engine_torch")
    given = (x, weight) if kind == "RMSNorm" else (x, weight, bias)
    dtype = {torch.float32: tex.DType.kFloat32, torch.bfloat16: tex.DType.kBFloat16}[x.dtype]
    made: tuple[Any, Any, Any] = getattr(extension, f"{kind.lower()}_fwd")(
        *given, eps, None, quantizer, dtype, 0, False
    )
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_norms_and_their_gradients_are_torchs(kind: str, eps: float) -> None:
    x, weight, bias, grad = parts(torch.float32)
    wide = [each.double().requires_grad_() for each in (x, weight, bias)]
    expected = exact(kind, wide[0], wide[1], wide[2], eps)
    out, mu, rsigma = forward(kind, x, weight, bias, eps, None)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    expected.backward(grad.double())
    if kind == "RMSNorm":
        assert mu is None
        found = te_norms.rmsnorm_bwd(grad, x, rsigma, weight, 0, False)
    else:
        found = te_norms.layernorm_bwd(grad, x, mu, rsigma, weight, 0, False)
    for ours, theirs in zip(found, wide, strict=False):
        assert theirs.grad is not None
        largest = theirs.grad.abs().amax(dim=-1, keepdim=True)
        assert ((ours.double() - theirs.grad).abs() <= 2e-5 * largest).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_norm_casts_values_that_were_not_rounded_before(kind: str) -> None:
    x, weight, bias, _ = parts(torch.bfloat16)
    made = te.Float8Quantizer(torch.full((1,), 37.0), torch.zeros(1), tex.DType.kFloat8E4M3)
    made.set_usage(rowwise=True, columnwise=True)
    out, _, _ = forward(kind, x, weight, bias, 1e-5, made)
    whole, _, _ = forward(kind, x.float(), weight.float(), bias.float(), 1e-5, None)
    assert out.dtype == torch.bfloat16
    assert torch.equal(
        out._data.view(torch.float8_e4m3fn).float(), scaling.quantize(whole, 37.0, "e4m3")
    )
    assert torch.equal(out._transpose, out._data.t())
    assert made.amax.item() == whole.abs().max().item()
    assert made.amax.item() != whole.abs().max().bfloat16().item()
    rounded, _, _ = forward(kind, x, weight, bias, 1e-5, None)
    assert torch.equal(rounded, whole.bfloat16())


def test_swiglu_and_its_gradient_are_torchs_and_are_rounded_once() -> None:
    extension: Any = import_module("transformer_engine_torch")
    x, _, _, grad = parts(torch.bfloat16)
    wide = x.double().requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    expected.backward(grad[:, :24].double())
    assert wide.grad is not None
    found = extension.swiglu(x.float(), None)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(extension.swiglu(x, None), found.bfloat16())
    backward = extension.dswiglu(grad[:, :24].float(), x.float(), None)
    torch.testing.assert_close(backward.double(), wide.grad, rtol=1e-5, atol=1e-5)
    assert extension.dswiglu(grad[:, :24], x, None).dtype == torch.bfloat16
    made = te.Float8Quantizer(torch.full((1,), 0.37), torch.zeros(1), tex.DType.kFloat8E4M3)
    made.set_usage(rowwise=True, columnwise=False)
    cast = extension.swiglu(x, made)
    assert torch.equal(
        cast._data.view(torch.float8_e4m3fn).float(), scaling.quantize(found, 0.37, "e4m3")
    )
    assert made.amax.item() == found.abs().max().item() != found.bfloat16().abs().max().item()
    with pytest.raises(NotImplementedError):
        extension.dswiglu(grad[:, :24], x, made)
