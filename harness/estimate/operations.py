"""What one ATen operation costs on a card: launches, bytes and FLOPs, from its name and its tensors' shapes.

Kernel counts are those of PyTorch's CUDA implementations, read from its sources (aten/src/ATen/native/cuda).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness.estimate.roofline import Unit

GEMMS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm"})
CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
# And where `is_causal` stands among their arguments; PyTorch leaves out the last ones that are as by default: False.
_CAUSAL = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention_backward": 11,
}
ATTENTION = frozenset(_CAUSAL)
# The host waits for the device: the result, or its size, is a value that the device has computed.
WAITING = frozenset(
    {
        "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select",
        "_unique", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave",
    }
)  # fmt: skip
_VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "lift_fresh", "detach_", "reshape", "narrow"})
_FREE = frozenset(
    {
        "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "set_", "record_stream",
        "is_pinned", "is_same_size", "sym_size", "device", "_has_compatible_shallow_copy_type",
    }
)  # fmt: skip
_WRITE_ONLY = frozenset({"zero_", "fill_", "copy_"})
_FRESH = frozenset(
    {"zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_full", "arange"}
    | {"scalar_tensor", "normal_", "uniform_"}
)

# aten/src/ATen/native/cuda/MultiTensorApply.cuh: tensors and blocks that one launch takes, by number of lists.
_TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_BLOCKS_PER_LAUNCH = 320
_CHUNK = 65536
# Of the fused optimizers, which pass a step counter beside each list.
_TENSORS_PER_FUSED_LAUNCH = 36
# aten/src/ATen/native/cuda/Embedding.cu: up to here one kernel counts the indices, else they are sorted.
_EMBEDDING_SMALL = 3072
_CAT_PER_LAUNCH = 128


def touched(tensor: Tensor) -> int:
    """Bytes of the distinct elements: an expanded dimension counts once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count * tensor.element_size()


def kernels(func: Any, name: str, args: Sequence[Any], ins: Sequence[Tensor], outs: Sequence[Tensor]) -> int:
    """Launches of `func` on CUDA, 0 for views and allocations."""
    if name in _FREE or name in _VIEWS or (func.is_view and name != "_to_copy"):
        return 0
    if name == "_to_copy" and ins and outs and ins[0] is outs[0]:
        return 0
    if name.startswith(("_foreach", "_fused_")) and args and isinstance(args[0], (list, tuple)):
        return _multi_tensor(name, args)
    if name == "_scaled_dot_product_flash_attention_backward":
        return 3
    if name == "_scaled_dot_product_efficient_attention_backward":
        return 2
    if name == "embedding_dense_backward":
        return 2 if len(ins) > 1 and ins[1].numel() <= _EMBEDDING_SMALL else 9
    if name == "cat":
        return max(1, -(-len(args[0]) // _CAT_PER_LAUNCH))
    if name == "convolution_backward":
        return max(1, sum(args[10]))
    return 2 if name in ("_fused_rms_norm_backward", "native_layer_norm_backward") else 1


def _multi_tensor(name: str, args: Sequence[Any]) -> int:
    lists = sum(1 for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor))
    most = _TENSORS_PER_FUSED_LAUNCH if name.startswith("_fused") else _TENSORS_PER_LAUNCH.get(lists, 30)
    launches = blocks = tensors = 0
    for tensor in args[0]:
        if not isinstance(tensor, Tensor) or not tensor.numel():
            continue
        tensors += 1
        chunks = -(-tensor.numel() // _CHUNK)
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            if blocks == _BLOCKS_PER_LAUNCH or (tensors == most and last):
                launches += 1
                blocks, tensors = 0, 0 if last else 1
    return launches + bool(blocks) + (name == "_foreach_norm")


def traffic(name: str, args: Sequence[Any], ins: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[int, int]:
    """Bytes read and written, were nothing kept in a cache."""
    if name == "embedding":
        return touched(ins[1]) + touched(outs[0]), touched(outs[0])
    if name == "embedding_dense_backward":
        return touched(ins[0]) + touched(ins[1]), touched(outs[0])
    distinct = {id(tensor): touched(tensor) for tensor in ins}
    if name in _WRITE_ONLY and ins:
        distinct.pop(id(ins[0]), None)
    reads = 0 if name in _FRESH else sum(distinct.values())
    if name.startswith("_fused_") and args and isinstance(args[0], (list, tuple)):
        # Weights and moments are written back, gradients (the second list) are not.
        written = [args[0], *args[2:4]]
    elif name.startswith("_foreach") and name.endswith("_"):
        written = [args[0]]
    else:
        return reads, sum(touched(tensor) for tensor in outs)
    return reads, sum(touched(t) for group in written if isinstance(group, (list, tuple)) for t in group)


def flops(name: str, args: Sequence[Any], outs: Sequence[Tensor]) -> float:
    """Of GEMMs, convolutions and attention, 2 for a multiplication with its addition; causal attention has half."""
    if name in ("mm", "_scaled_mm", "_scaled_mm_v2"):
        left, right = args[0], args[1]
        return 2.0 * left.shape[0] * left.shape[1] * right.shape[1]
    if name == "addmm":
        left, right = args[1], args[2]
        return 2.0 * left.shape[0] * left.shape[1] * right.shape[1]
    if name in ("bmm", "baddbmm"):
        left, right = args[-2:] if name == "bmm" else args[1:3]
        return 2.0 * left.shape[0] * left.shape[1] * left.shape[2] * right.shape[2]
    if name == "_grouped_mm":
        left, right = args[0], args[1]
        groups = left.shape[0] if left.ndim == right.ndim == 3 else 1
        return 2.0 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1]
    if name in CONVOLUTIONS:
        return _of_convolution(name, args, outs)
    if name in ATTENTION:
        backward = name.endswith("_backward")
        query, key = args[1:3] if backward else args[:2]
        batch, heads, time, width = query.shape
        # Two GEMMs forward, five backward (one of them makes the scores again), half of each under a causal mask.
        whole = (10.0 if backward else 4.0) * batch * heads * time * key.shape[2] * width
        return whole / 2 if len(args) > _CAUSAL[name] and args[_CAUSAL[name]] else whole
    return 0.0


def _of_convolution(name: str, args: Sequence[Any], outs: Sequence[Tensor]) -> float:
    """Every weight meets every position of the output, of the input if transposed; backward does it again for each of
    the gradients of input and weight that are wanted."""
    backward = name.endswith("_backward")
    image, weight = args[1:3] if backward else args[:2]
    transposed, result = (args[7], args[0]) if backward else (args[6], outs[0])
    positions = (image if transposed else result).shape
    times = sum(args[10][:2]) if backward else 1
    return 2.0 * times * positions[0] * math.prod(positions[2:]) * weight.numel()


def unit(name: str, ins: Sequence[Tensor], tf32: bool) -> Unit:
    """What computes a GEMM, convolution or attention of these operands. tf32: the card has it."""
    if name not in GEMMS and name not in ATTENTION and name not in CONVOLUTIONS:
        return "none"
    if name.startswith("_scaled_mm"):
        return "fp8"
    if ins[0].dtype != torch.float32:
        return "half"
    if name in CONVOLUTIONS:
        return "tf32" if tf32 and torch.backends.cudnn.allow_tf32 else "fp32"
    return "tf32" if tf32 and torch.get_float32_matmul_precision() != "highest" else "fp32"
