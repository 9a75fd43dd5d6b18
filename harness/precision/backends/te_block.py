"""TE's fused modules on the Parameters and the FP8 state of the layers that they compute together.

te.LayerNormLinear is a norm and a Linear. te.LayerNormMLP is a norm, two Linears and the SwiGLU between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.precision.backends.te_library import RECOMPUTED


def is_rms(norm: nn.Module) -> bool:
    """Whether it is an RMSNorm; else it is a LayerNorm."""
    return isinstance(norm, nn.RMSNorm)


def block(te: Any, linear: Any, norm: Any, first: Any = None) -> Any:
    """A te.LayerNormLinear of `norm` and `linear`, or a te.LayerNormMLP of `norm`, `first`, SwiGLU and `linear`.

    It has no Parameters, and shares the FP8 state of the te.Linears. In that state a column belongs to one tensor that
    is cast. The columns keep their order; those of `first` come before those of `linear`. `apply` runs it.
    """
    common: dict[str, Any] = {
        "eps": norm.eps,
        "bias": linear.use_bias,
        "normalization": "RMSNorm" if is_rms(norm) else "LayerNorm",
        "params_dtype": linear.weight.dtype,
        "device": "meta",
    }
    if first is None:
        made = te.LayerNormLinear(linear.in_features, linear.out_features, **common)
        meta = linear.fp8_meta
    else:
        sizes = (first.in_features, linear.in_features)
        made = te.LayerNormMLP(*sizes, **common, activation="swiglu")
        meta = _both_metas(first.fp8_meta, linear.fp8_meta)
    # Its own Parameters are on the meta device: the Linears' and the norm's are given at each call.
    made._parameters.clear()
    # With these flags TE does not make an FP8 state of its own.
    made.__dict__.update(fp8_meta=meta, fp8_initialized=True, fp8_meta_tensors_initialized=True)
    return made


def apply(
    block: Any,
    linear: Any,
    norm: Any,
    first: Any = None,
) -> Callable[[Tensor], Tensor]:
    """The function that runs `block` on BF16 [..., in_features].

    Parameters are looked up at every call, because FSDP replaces them.
    """
    own = {"layer_norm_weight": norm.weight, "layer_norm_bias": getattr(norm, "bias", None)}
    layers = {"": linear} if first is None else {"fc1_": first, "fc2_": linear}
    for name, layer in layers.items():
        own[f"{name}weight"] = layer.weight
        if layer.use_bias:
            own[f"{name}bias"] = layer.bias

    # Quantizers too: those of an evaluation differ from those of training.
    casts: dict[str, list[Any]] = {key: [] for key in linear.quantizers}
    for layer in layers.values():
        for key in casts:
            casts[key] += layer.quantizers[key]
    block.__dict__.update(own, quantizers=casts, training=linear.training)
    return block.forward


def _both_metas(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """TE's FP8 state of two layers as that of one module.

    te.checkpoint keeps one queue of states for a module: it copies the state in forward, and restores it to recompute.
    """
    made = {key: value for key, value in first.items() if key != RECOMPUTED}
    made["num_gemms"] = 2
    for key in ("scaling_fwd", "scaling_bwd"):
        history = _Joined([first[key].amax_history, second[key].amax_history])
        scale = _Joined([first[key].scale, second[key].scale])
        made[key] = SimpleNamespace(amax_history=history, scale=scale)
    return made


class _Joined:
    """Several tensors that te.checkpoint copies and restores as if they were one."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def clone(self) -> list[Tensor]:
        return [each.clone() for each in self._tensors]

    def copy_(self, saved: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._tensors, saved, strict=True):
            tensor.copy_(value)


@torch.no_grad()
def quantised(norm: Any, x: Tensor) -> Tensor:
    """The tensor that a fused block casts, float32: the norm of BF16 rows by a BF16 weight, not rounded to BF16.

    For sampled statistics.
    """
    weight = norm.weight.to(x.dtype).float()
    if is_rms(norm):
        return F.rms_norm(x.float(), norm.normalized_shape, weight, norm.eps)
    bias = norm.bias.to(x.dtype).float()
    return F.layer_norm(x.float(), norm.normalized_shape, weight, bias, norm.eps)
