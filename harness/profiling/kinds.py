"""What an operation or a kernel is for, from its name: the rows of a profile's table. Pure and torch-free.

On a CPU the operations themselves are timed, and on a GPU the kernels that they launch. A kernel is of the kind of the
operation that launched it. Its own name decides only where there is no operation, as for NCCL, or where the operation's
name says nothing, as for compiled blocks. `harness estimate` sorts its operations by `kind_of_op` too.

Operations have ATen's names, such as `aten::mm`. Kernels have the names of cuBLAS, CUTLASS, cuDNN, FlashAttention,
NCCL, Transformer Engine and PyTorch's own templates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

PRODUCTS: Final = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm"}
)
"""Operations of ATen that multiply matrices, as training calls them."""
_GEMMS = PRODUCTS | {
    "addbmm", "mv", "addmv", "dot", "_scaled_grouped_mm", "_int_mm", "mkldnn_linear", "_linear_pointwise",
}  # fmt: skip
CONVOLUTIONS: Final = frozenset({"convolution", "convolution_backward"})

CONVOLUTION, ATTENTION, NORMS, CASTS = "convolutions", "attention", "norms", "casts"
OPTIMIZER, COMMUNICATION, COPIES = "optimizer", "communication", "copies to and from the host"
OTHER, WAITS, BETWEEN, GAPS = "other operations", "host waits", "between steps", "gaps"
_PRECISIONS = ("fp8", "bf16", "fp16", "tf32", "fp32", "fp64", "other types")

KINDS: Final = (
    *(f"GEMMs {precision}" for precision in _PRECISIONS),
    CONVOLUTION, ATTENTION, NORMS, CASTS, OPTIMIZER, COMMUNICATION, COPIES, OTHER, WAITS, BETWEEN, GAPS,
)  # fmt: skip
"""Every kind, in the order of the table.

other operations: what fits nowhere else.
host waits: the host waits for a value from the device, and the device is idle; on a CPU, reads of a value.
between steps: judging, validation and saves between the profiled steps.
gaps: nothing runs, because Python and the launches take time.
"""


def gemms(precision: str) -> str:
    """The kind of GEMMs in a precision, such as "bf16"; `GEMMs other types` for one without a row of its own."""
    kind = f"GEMMs {precision}"
    return kind if kind in KINDS else "GEMMs other types"


# Types as torch's profiler names them. Any FP8 format is "c10::Float8_...".
_TYPES = {
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "float": "fp32",
    "double": "fp64",
}
_NORM = re.compile(r"(layer|rms|batch|group|instance)_?norm")
_ATTENTION = re.compile(r"scaled_dot_product|flash_attention|efficient_attention|_fmha")
_COMMUNICATION = re.compile(r"^(c10d|_c10d_functional|nccl|gloo|mpi|fsdp)::?|record_param_comms")
_CONVOLUTION = re.compile(r"conv(olution|\dd|_transpose)")
_QUANTIZE = re.compile(r"quantize|cast")
# The native backend's autograd functions. Their own time is the cast of operands to FP8; the GEMMs that they call are
# operations of their own.
_FP8_FUNCTIONS = frozenset({"_Matmul", "_MatmulBackward"})
# Operations that read a value of a tensor, for which the host waits.
_VALUES = frozenset({"item", "_local_scalar_dense", "is_nonzero"})
# Synchronising calls of the CUDA runtime. cudaMemcpyAsync is not among them, although it may wait for pageable memory.
_WAITING = frozenset(
    {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
)


def precision_of(types: Sequence[str]) -> str:
    """The precision of a GEMM from the types of its inputs, as torch's profiler names them."""
    for each in types:
        if each.startswith("c10::Float8"):
            return "fp8"
        if each in _TYPES:
            return _TYPES[each]
    return "other types"


def kind_of_op(
    name: str, types: Sequence[str] = (), precision: str = "", retypes: bool = True
) -> str:
    """The kind of one operation; empty if its name does not say. The caller then takes the operation around it.

    name: with or without its namespace, such as "aten::mm", or the name of an annotation.
    types: of its inputs, as torch's profiler names them.
    precision: of a GEMM; replaces the one that follows from `types`. Empty: `types` decide.
    retypes: whether a conversion (`_to_copy`) changes the type; one that does not is a mere copy.
    """
    # These are recognised by their namespace or annotation, all others by the name without it.
    if name.startswith(("Optimizer.step#", "Optimizer.zero_grad#")):
        return OPTIMIZER
    if _COMMUNICATION.search(name):
        return COMMUNICATION
    namespace, colons, short = name.rpartition("::")
    short = short if colons else name

    if short in _GEMMS:
        if short.startswith("_scaled"):
            return gemms("fp8")
        return gemms(precision or precision_of(types))
    if short.startswith("_fused_ada") or short.startswith("_fused_sgd"):
        return OPTIMIZER
    if _ATTENTION.search(short):
        return ATTENTION
    if _NORM.search(short):
        return NORMS
    if _CONVOLUTION.search(short):
        return CONVOLUTION
    if short in _VALUES:
        return WAITS
    if short == "_to_copy":
        return CASTS if retypes else ""
    # A copy into a tensor of another floating type is a cast, such as of a gradient into DDP's bucket.
    floats = [each for each in types[:2] if each in _TYPES or each.startswith("c10::Float8")]
    if short == "copy_" and len(floats) == 2 and floats[0] != floats[1]:
        return CASTS
    if short in _FP8_FUNCTIONS:
        return CASTS
    if namespace == "hopper_harness" and _QUANTIZE.search(short):
        return CASTS
    return ""


def is_wait(call: str) -> bool:
    """Whether a call of the CUDA runtime waits for the device."""
    return call in _WAITING


# Patterns of kernels' names. The first one that matches decides: a fused attention kernel may have "gemm" in its name.
_KERNELS = (
    (re.compile(r"nccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter"), COMMUNICATION),
    (re.compile(r"flash|fmha|attention|sdpa|softmax_warp_.*mask"), ATTENTION),
    (re.compile(r"fusedadam|fused_adam|fusedsgd|fused_sgd|adagrad|adam_"), OPTIMIZER),
    (re.compile(r"(layer|rms|batch|group|instance)_?norm|\bln_(fwd|bwd)|bn_(fw|bw)"), NORMS),
    (re.compile(r"implicit_?gemm|conv(?!ert)|wgrad|dgrad|cudnn.*engine"), CONVOLUTION),
)
_GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|hgmma|cublas|gemv|splitk")
_CAST = re.compile(r"cast|quantize|(bfloat16|float16|float8|half)\w*_copy|convert_|_to_copy")
# Parts of a GEMM kernel's name that say its precision; the first match decides. "bf16" is before "f16", which is in it.
# cuBLAS names its kernels by the types of both operands, such as nvjet_sm90_qrtst: q is e4m3, r e5m2, t bf16, h fp16.
_TEXTS = (
    (re.compile(r"e4m3|e5m2|fp8|float8|nvjet_(sm\d+_)?[qr]"), "fp8"),
    (re.compile(r"bf16|bfloat16|nvjet_(sm\d+_)?t"), "bf16"),
    (re.compile(r"tf32|s1688"), "tf32"),
    (re.compile(r"fp16|f16|half|hgemm|h1688|h884|h16816|nvjet_(sm\d+_)?h"), "fp16"),
    (re.compile(r"f64|dgemm|double"), "fp64"),
    (re.compile(r"sgemm|fp32|f32|float|simt|nvjet_(sm\d+_)?s"), "fp32"),
)


def kind_of_kernel(name: str) -> str:
    """The kind of a CUDA kernel by its own name; empty if the name does not say."""
    low = name.lower()
    for pattern, kind in _KERNELS:
        if pattern.search(low):
            return kind
    if _GEMM.search(low):
        return gemms(kernel_precision(name))
    return CASTS if _CAST.search(low) else ""


def kernel_precision(name: str) -> str:
    """The precision of a GEMM from the name of its kernel."""
    low = name.lower()
    for pattern, precision in _TEXTS:
        if pattern.search(low):
            return precision
    return "other types"
