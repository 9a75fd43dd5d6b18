"""A stand-in for `transformer_engine_torch`, the compiled part of Transformer Engine, in plain PyTorch on the CPU.

It plays what te.Linear and te.LayerNormLinear (norms: te_norms.py) call under delayed, current and block scaling on a
card of compute capability 9.0; any other name of the extension may be looked up (TE's Python does so at import) but
raises NotImplementedError when it is used.
What each function does was read in TE's own tree: pytorch/csrc/quantizer.cpp, pytorch/csrc/extensions/{cast,bias,gemm,
transpose}.cpp, common/recipe/delayed_scaling.cu, common/recipe/recipe_common.cuh, common/gemm/cublaslt_gemm.cu.

What is exact: casts, amaxes, scales, layouts, which copies exist when. What is not TE's: the order in which a GEMM
adds. Raw FP8 values ride in bfloat16, which holds each of them, 1/scale goes into the GEMM's alpha, and an output is
rounded once; accumulators of FP8 units, streams, alignment and speed have no counterpart here.
"""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import sys
import types
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FLT_MAX = torch.finfo(torch.float32).max
BLOCK = 128


# Values as in transformer_engine.h; TE's Python compares them with its own at import.
class DType(enum.IntEnum):
    """Types of tensors."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


FP8FwdTensors = enum.IntEnum(
    "FP8FwdTensors",
    [f"GEMM{n}_{role}" for n in (1, 2, 3) for role in ("INPUT", "WEIGHT", "OUTPUT")],
    start=0,
)
FP8BwdTensors = enum.IntEnum(
    "FP8BwdTensors", [f"GRAD_{role}{n}" for n in (1, 2, 3) for role in ("OUTPUT", "INPUT")], start=0
)
NVTE_Fused_Attn_Backend = enum.IntEnum(
    "NVTE_Fused_Attn_Backend",
    {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
)

_TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}
_FP8_MAX = {DType.kFloat8E4M3: 448.0, DType.kFloat8E5M2: 57344.0}


# Casts ------------------------------------------------------------------------------------------------------------


def largest(x: Tensor) -> Tensor:
    """max|x| as fmaxf gives it: a NaN is passed over, an infinity counts; float32 0-d, 0 of an empty tensor."""
    if not x.numel():
        return torch.zeros(())
    return torch.nan_to_num(x.detach().abs().float(), nan=0.0, posinf=torch.inf).amax()


def to_bytes(x: Tensor, scale: Tensor, dtype: int) -> Tensor:
    """The FP8 bytes of float32(x) * scale, rounded to nearest even, saturating; NaN stays NaN. uint8, shape of x."""
    limit = _FP8_MAX[DType(dtype)]
    return (
        (x.detach().float() * scale).clamp(-limit, limit).to(_TORCH[DType(dtype)]).view(torch.uint8)
    )


def scale_from_amax(
    amax: Tensor, limit: float, pow_2: bool, epsilon: float, for_inf: float
) -> Tensor:
    """limit / amax; 1 for an amax of 0, infinity or NaN; `for_inf` if that is infinite; mantissa cut off if pow_2."""
    amax = torch.where(amax < epsilon, epsilon, amax)
    scale = torch.full_like(amax, limit) / amax
    scale = torch.where(torch.isinf(scale), for_inf, scale)
    if pow_2:
        scale = (scale.contiguous().view(torch.int32) & -(1 << 23)).view(torch.float32)
    return torch.where(torch.isfinite(amax) & (amax != 0), scale, 1.0)


def turned(data: Tensor) -> Tensor:
    """[..., n] seen as a matrix [m, n], transposed: [n, ...], contiguous."""
    return (
        data.reshape(-1, data.shape[-1]).t().contiguous().reshape(data.shape[-1], *data.shape[:-1])
    )


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """What a quantizer makes of `tensor`, into `output` if there is one. The quantizer's class picks the way."""
    return _quantize(tensor.contiguous(), quantizer, output, noop, tensor.dtype)


def _quantize(
    x: Tensor, quantizer: Any, output: Any, noop: Tensor | None, dtype: torch.dtype
) -> Any:
    """dtype: what the result says it is; x may have more bits, where a kernel casts straight from its fp32 values."""
    kind = _class_of(quantizer)
    if noop is not None and noop.item() == 1:
        return output
    if kind == "Float8BlockQuantizer":
        return _quantize_blocks(x, quantizer, output, dtype)
    limit = _FP8_MAX[DType(int(quantizer.dtype))]
    if kind == "Float8Quantizer":
        quantizer.amax.copy_(torch.maximum(quantizer.amax, largest(x)))
        scale = quantizer.scale.detach().reshape(())
    elif kind == "Float8CurrentScalingQuantizer":
        amax = largest(x)
        if quantizer.with_amax_reduction:
            raise NotImplementedError(
                "an amax reduced over a tensor-parallel group has no stand-in"
            )
        scale = scale_from_amax(
            amax, limit, quantizer.force_pow_2_scales, quantizer.amax_epsilon, FLT_MAX
        )
    else:
        raise NotImplementedError(f"{kind} has no stand-in")
    if quantizer.columnwise_usage and not quantizer.rowwise_usage:
        raise RuntimeError(
            "Quantizing in only the columnwise direction is not supported for per-tensor FP8"
        )
    data = to_bytes(x, scale, int(quantizer.dtype))
    transpose = turned(data) if quantizer.columnwise_usage else None
    inverse = torch.ones(1) / scale
    if output is None:
        module = _te("tensor.float8_tensor"), _te("tensor.storage.float8_tensor_storage")
        parts = {
            "data": data,
            "fp8_scale_inv": inverse,
            "fp8_dtype": quantizer.dtype,
            "data_transpose": transpose,
        }
        return _made(
            quantizer, x, dtype, parts, module[0].Float8Tensor, module[1].Float8TensorStorage
        )
    _put(output, _data=data, _transpose=transpose, _scale_inv=inverse)
    output._transpose_invalid = transpose is None
    output._fp8_dtype = quantizer.dtype
    return output


def _made(
    quantizer: Any, x: Tensor, dtype: torch.dtype, parts: dict[str, Any], full: Any, bare: Any
) -> Any:
    if quantizer.internal:
        return bare(**parts, quantizer=quantizer, fake_dtype=dtype)
    stride = torch.empty(x.shape, device="meta").stride()
    return full(
        shape=x.shape, stride=stride, dtype=dtype, device=x.device, quantizer=quantizer, **parts
    )


def _put(output: Any, **parts: Tensor | None) -> None:
    """In place where there is a buffer, as a kernel writes it."""
    for name, value in parts.items():
        kept = getattr(output, name)
        if kept is None or value is None:
            setattr(output, name, value)
        else:
            kept.copy_(value)


def _quantize_blocks(x: Tensor, quantizer: Any, output: Any, dtype: torch.dtype) -> Any:
    """1 x 128 blocks (block_scaling_dim 1) or 128 x 128; columnwise is a second cast, of the transposed matrix."""
    two = quantizer.block_scaling_dim == 2
    rows = x.reshape(-1, x.shape[-1])
    if not quantizer.is_quantizable(rows):
        raise RuntimeError(
            f"TE's own rule: {tuple(rows.shape)} has blocks that are not whole, {BLOCK} by {BLOCK}"
        )
    parts: dict[str, Any] = dict.fromkeys(
        ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    )
    if quantizer.rowwise_usage:
        raw, parts["rowwise_scale_inv"] = blocks(rows, quantizer, two)
        parts["rowwise_data"] = raw.reshape(x.shape)
    if quantizer.columnwise_usage:
        raw, parts["columnwise_scale_inv"] = blocks(rows.t().contiguous(), quantizer, two)
        parts["columnwise_data"] = raw.reshape(x.shape[-1], *x.shape[:-1])
    if output is not None:
        _put(output, **{f"_{name}": value for name, value in parts.items()})
        return output
    parts |= {"fp8_dtype": quantizer.dtype, "is_2D_scaled": two}
    full = _te("tensor.float8_blockwise_tensor").Float8BlockwiseQTensor
    bare = _te("tensor.storage.float8_blockwise_tensor_storage").Float8BlockwiseQTensorStorage
    return _made(quantizer, x, dtype, parts, full, bare)


def blocks(rows: Tensor, quantizer: Any, two: bool) -> tuple[Tensor, Tensor]:
    """Bytes [m, k] and 1/scale: [ceil(m/128), ceil(k/128) filled to 4], or of rows [ceil(k/128), m filled to 4]."""
    m, k = rows.shape
    high = BLOCK if two else 1
    filled = F.pad(rows.detach().float(), (0, -k % BLOCK, 0, -m % high))
    tiles = filled.reshape(filled.shape[0] // high, high, filled.shape[1] // BLOCK, BLOCK)
    amax = torch.nan_to_num(tiles.abs(), nan=0.0, posinf=torch.inf).amax(dim=(1, 3))
    limit, for_inf = _FP8_MAX[DType(int(quantizer.dtype))], torch.finfo(rows.dtype).max
    scale = scale_from_amax(
        amax, limit, quantizer.force_pow_2_scales, quantizer.amax_epsilon, for_inf
    )
    spread = scale.repeat_interleave(high, 0).repeat_interleave(BLOCK, 1)[:m, :k]
    inverse = torch.ones_like(scale) / scale
    layout = inverse if two else inverse.t()
    return to_bytes(rows, spread, int(quantizer.dtype)), F.pad(
        layout, (0, -layout.shape[1] % 4)
    ).contiguous()


def dequantize(tensor: Any, dtype: int) -> Tensor:
    """Per-tensor scaled data back in `dtype`."""
    wide = tensor._data.view(_TORCH[DType(int(tensor._fp8_dtype))]).float() * tensor._scale_inv
    return wide.to(_TORCH[DType(int(dtype))])


def bgrad_quantize(grad_output: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """The bias gradient, of the unquantised gradient and in its dtype, and the gradient quantised."""
    grad = grad_output.contiguous()
    bias = grad.reshape(-1, grad.shape[-1]).sum(dim=0)
    return bias, grad if quantizer is None else quantize(grad, quantizer)


def fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    """Transposed bytes."""
    return turned(data) if out is None else out.copy_(turned(data))


# The roll, for what uses TE's own (the harness rolls by itself) ------------------------------------------------------


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: Sequence[Tensor],
    scales: Sequence[Tensor],
    amax_compute_algo: str,
    fp8_dtype: int,
    margin: float,
) -> None:
    """Roll every slot whose amax is not 0, as common/recipe/delayed_scaling.cu does, slot by slot."""
    if amax_compute_algo not in ("max", "most_recent"):
        raise RuntimeError(f"amax compute algorithm {amax_compute_algo} has no stand-in")
    limit = torch.tensor(_FP8_MAX[DType(int(fp8_dtype))]) * 2.0**-margin
    slots = [(history[:, i], scale[i]) for history, scale in zip(amax_histories, scales, strict=True)
             for i in range(history.shape[1])]  # fmt: skip
    for reduced, (history, scale) in zip(amax_reduction_buffer, slots, strict=True):
        last = reduced.clone() if reduced != 0 else history[0].clone()
        if last == 0:
            continue
        seen = torch.cat([history[1:], last[None]])
        amax = last if amax_compute_algo == "most_recent" else largest(seen)
        history.copy_(torch.cat([torch.zeros(1), seen[1:]]))
        if torch.isfinite(amax) and amax > 0:
            scale.copy_((limit / amax).clamp_max(FLT_MAX))


# GEMM -------------------------------------------------------------------------------------------------------------


def generic_gemm(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Tensor | None,
    quantizer: Any,
    out_dtype: int | None,
    bias: Tensor | None,
    bias_type: int,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    *,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """op(B) @ op(A), row-major: of a Linear's forward (TN) A is the weight and B the input."""
    if gelu or comm_overlap is not None or extra_output is not None or accumulate or D is not None:
        raise NotImplementedError(
            "GELU, accumulation into a buffer and overlapped communication have no stand-in"
        )
    if quantizer is not None:
        raise NotImplementedError("a GEMM with a quantised output has no stand-in")
    fp8 = [_class_of(x) != "Tensor" for x in (A, B)]
    if fp8[0] != fp8[1]:
        raise RuntimeError("a GEMM of an FP8 and a plain operand is not supported")
    left, left_inverse = _operand(B, not transb)
    right, right_inverse = _operand(A, transa)
    if not fp8[0]:
        left, right = left.t() if transb else left, right if transa else right.t()
    if left.shape[1] != right.shape[1]:
        raise RuntimeError(f"inner dimensions differ: {tuple(left.shape)} and {tuple(right.shape)}")
    dtype = _TORCH[DType(int(out_dtype))] if out_dtype is not None else left.dtype
    added = None if bias is None or grad else bias.detach()
    if fp8[0]:
        _check_fp8_shape(left, right)
    if isinstance(left_inverse, Tensor) and left_inverse.ndim == 2:
        wide = (left.float() * left_inverse).double() @ (right.float() * right_inverse).double().t()
        out = _rounded(wide, alpha, added, dtype)
    else:
        if fp8[
            0
        ]:  # a CPU's sums may depend on strides: those of the tensors themselves, as in the native backend
            left, right = _unturned(left, transb), _unturned(right, not transa)
        out = _product(
            left, right, float(left_inverse) * float(right_inverse) * alpha, added, dtype
        )
    leading = () if transb else _leading(B)
    out = out.reshape(*leading, right.shape[0]) if leading else out
    bias_grad = None
    if bias is not None and grad:  # the epilogue BGRADB: columns of B summed, in the output's dtype
        bias_grad = left.float().sum(dim=1).to(dtype)
    return [out, bias_grad, None, None]


def _unturned(x: Tensor, is_turned: bool) -> Tensor:
    """The same matrix, in the memory order of the tensor that a transposed copy was made of."""
    return x.t().contiguous().t() if is_turned else x


def _product(
    left: Tensor, right: Tensor, factor: float, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """left @ right^T * factor (+ bias), rounded once."""
    if left.dtype == right.dtype == dtype == torch.bfloat16 and abs(factor) <= FLT_MAX:
        added = torch.zeros(1, dtype=dtype) if bias is None else bias.to(dtype)
        return torch.addmm(added, left, right.t(), beta=0 if bias is None else 1, alpha=factor)
    return _rounded(left.double() @ right.double().t(), factor, bias, dtype)


def _rounded(wide: Tensor, factor: float, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    wide = wide * factor
    return (wide if bias is None else wide + bias.double()).to(dtype)


def _operand(x: Any, rowwise: bool) -> tuple[Tensor, Any]:
    """[rows, k] with k the common dimension, and 1/scale: a float, or of each value. FP8 GEMMs on this card are TN
    only, so what a GEMM wants transposed must be there as a transposed copy. Plain tensors come as they are.
    """
    kind = _class_of(x)
    if kind == "Tensor":
        return x.detach().reshape(-1, x.shape[-1]), 1.0
    fmt = _TORCH[DType(int(x._fp8_dtype))]
    if kind.startswith("Float8Blockwise"):
        data = x._rowwise_data if rowwise else x._columnwise_data
        inverse = x._rowwise_scale_inv if rowwise else x._columnwise_scale_inv
    else:
        data, inverse = (
            (x._data if rowwise else None if x._transpose_invalid else x._transpose),
            x._scale_inv,
        )
    if data is None:
        raise RuntimeError(
            f"the GEMM's operand has no {'rowwise' if rowwise else 'columnwise'} data"
        )
    matrix = data.reshape(-1, data.shape[-1]) if rowwise else data.reshape(data.shape[0], -1)
    raw = matrix.view(fmt).to(torch.bfloat16)
    if not kind.startswith("Float8Blockwise"):
        return raw, inverse.item()
    if not x._is_2D_scaled:
        inverse = inverse.t()[: raw.shape[0]]
    high = BLOCK if x._is_2D_scaled else 1
    spread = inverse.repeat_interleave(high, 0)[: raw.shape[0]].repeat_interleave(BLOCK, 1)[
        :, : raw.shape[1]
    ]
    return raw, spread


def _leading(x: Any) -> tuple[int, ...]:
    return tuple(x.size()[:-1])


def _check_fp8_shape(left: Tensor, right: Tensor) -> None:
    """cuBLASLt's FP8 GEMM: leading dimensions of operands and output in multiples of 16 bytes."""
    if left.shape[1] % 16 or right.shape[0] % 8:
        raise RuntimeError(
            f"cuBLASLt has no FP8 GEMM for {tuple(left.shape)} and {tuple(right.shape)} transposed"
        )


# The rest -----------------------------------------------------------------------------------------------------------

_KNOWN = {
    "Float8Quantizer",
    "Float8CurrentScalingQuantizer",
    "Float8BlockQuantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
}


def _class_of(x: Any) -> str:
    name = type(x).__name__
    if type(x) in (Tensor, torch.nn.Parameter):
        return "Tensor"
    if name not in _KNOWN:
        raise NotImplementedError(f"{name} has no stand-in")
    return name


def _te(name: str) -> Any:
    return importlib.import_module(f"transformer_engine.pytorch.{name}")


def get_cublasLt_version() -> int:
    """CUDA 13's."""
    return 130000


def get_cudnn_version() -> int:
    """The oldest that TE takes."""
    return 91200


class Missing:
    """A name of the extension that is not played: may be looked up and used as a type, not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self._name} has no stand-in")

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __int__(self) -> int:
        """Enumerations that nothing here uses are turned into numbers when TE is imported: each its own."""
        return zlib.crc32(self._name.encode())

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__


class _Extension(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"transformer_engine_torch.{name}")


def as_extension() -> types.ModuleType:
    """This file's public names under the extension's name, in sys.modules."""
    module = _Extension("transformer_engine_torch")
    module.__spec__ = importlib.machinery.ModuleSpec("transformer_engine_torch", None)
    module.__dict__.update(
        {name: value for name, value in globals().items() if not name.startswith("_")}
    )
    sys.modules["transformer_engine_torch"] = module
    return module
