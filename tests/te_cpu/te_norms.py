"""The norms and SwiGLU of the stand-in for TE's compiled part, read in TE's tree.

pytorch/csrc/extensions/{normalization,activation}.cpp, common/util/{vectorized_pointwise,math}.h.

As with the GEMMs what is not TE's is the order in which sums are added up.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import te_extension as tex
import torch
from torch import Tensor


def add_to(extension: ModuleType) -> None:
    """Put these functions into the stand-in."""
    for function in (rmsnorm_fwd, rmsnorm_bwd, layernorm_fwd, layernorm_bwd, swiglu, dswiglu):
        setattr(extension, function.__name__, function)


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: int,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Any, None, Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight along the last dimension of [m, n], in FP32; 1 / that root, float32 [m]."""
    wide = x.detach().float()
    rsigma = torch.rsqrt(wide.square().mean(dim=-1) + eps)
    made = wide * rsigma[:, None] * _gamma(weight, zero_centered)
    return _normed(made, quantizer, out, dtype), None, rsigma


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: int,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Any, Tensor, Tensor]:
    """(x - mean) / sqrt(var + eps) * weight + bias, as `rmsnorm_fwd`; mean and 1 / root, float32 [m]."""
    wide = x.detach().float()
    mu = wide.mean(dim=-1)
    rsigma = torch.rsqrt((wide - mu[:, None]).square().mean(dim=-1) + eps)
    made = (wide - mu[:, None]) * rsigma[:, None] * _gamma(
        weight, zero_centered
    ) + bias.detach().float()
    return _normed(made, quantizer, out, dtype), mu, rsigma


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight, in their dtypes, computed in FP32."""
    wide, grad = x.float() * rsigma[:, None], dz.float()
    scaled = grad * _gamma(weight, zero_centered)
    dx = rsigma[:, None] * (scaled - wide * (scaled * wide).mean(dim=-1, keepdim=True))
    return dx.to(x.dtype), (grad * wide).sum(dim=0).to(weight.dtype)


def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    weight: Tensor,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias, in their dtypes, computed in FP32."""
    wide, grad = (x.float() - mu[:, None]) * rsigma[:, None], dz.float()
    scaled = grad * _gamma(weight, zero_centered)
    centred = (
        scaled
        - scaled.mean(dim=-1, keepdim=True)
        - wide * (scaled * wide).mean(dim=-1, keepdim=True)
    )
    dgamma, dbeta = (grad * wide).sum(dim=0), grad.sum(dim=0)
    return (rsigma[:, None] * centred).to(x.dtype), dgamma.to(weight.dtype), dbeta.to(weight.dtype)


def swiglu(x: Tensor, quantizer: Any) -> Any:
    """silu(first half of the last dimension) * second half, in FP32; a quantizer of delayed scaling casts that."""
    gate, up = x.detach().float().chunk(2, dim=-1)
    made = gate * (1 / (1 + torch.exp(-gate))) * up
    if quantizer is None:
        return made.to(x.dtype)
    if tex._class_of(quantizer) != "Float8Quantizer":
        raise NotImplementedError("SwiGLU with a cast by another scaling has no stand-in")
    return tex._quantize(made, quantizer, None, None, x.dtype)


def dswiglu(grad: Tensor, x: Tensor, quantizer: Any) -> Tensor:
    """The gradient of `swiglu`'s input, computed in FP32, in the input's dtype."""
    if quantizer is not None:
        raise NotImplementedError("a quantised gradient of SwiGLU has no stand-in")
    (gate, up), wide = x.detach().float().chunk(2, dim=-1), grad.float()
    sigmoid = 1 / (1 + torch.exp(-gate))
    halves = (gate * sigmoid * (1 - sigmoid) + sigmoid) * wide * up, wide * gate * sigmoid
    return torch.cat(halves, dim=-1).to(x.dtype)


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.detach().float() + (1 if zero_centered else 0)


def _normed(made: Tensor, quantizer: Any, out: Any, dtype: int) -> Any:
    """Under delayed scaling the norm's kernel casts its FP32 values; else a cast of its rounded output follows."""
    rounded = tex._TORCH[tex.DType(int(dtype))]
    if quantizer is None:
        return made.to(rounded)
    if tex._class_of(quantizer) == "Float8Quantizer":
        return tex._quantize(made, quantizer, out, None, rounded)
    return tex.quantize(made.to(rounded), quantizer, out)
