"""The native backend's casts on a CPU: one fused C++ kernel that scales, rounds, finds the amax and counts in one pass.

The machine's C++ compiler builds it from native_kernel.cpp into a user cache, once per machine (under a second). The
built kernel is then compared with `scaling.quantize`. If there is no compiler, or if a single bit differs, PyTorch
casts instead, and the backend's note says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from harness.core.files import cached
from harness.core.processes import find_compiler
from harness.precision import scaling

_SOURCE = Path(__file__).with_name("native_kernel.cpp")
# No -ffast-math, as NaN must stay NaN. -ffp-contract=off, as a fused multiply-add would round once instead of twice.
_FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-std=c++17",
    "-fPIC",
)
_BUILD_SECONDS = 60
_FORMAT_CODES = {"e4m3": 0, "e5m2": 1}

Kernel = Callable[..., Tensor]


@cache
def load() -> tuple[Kernel | None, str]:
    """(kernel, a note that describes it), or (None, a note that says why there is none).

    kernel(x, scale, fmt, amax, stats, by_rows=False) returns the FP8 values of x, held in bfloat16.

    x: contiguous float32 or bfloat16 tensor on the CPU.
    amax: address of a float32, which is raised to max|x|.
    stats: address of eight float64 sums to add to (`scaling.quantization_stats`, `scaling.channel_stats`), or None.
    by_rows: sum up as `scaling.summed` does for a gradient.
    """
    compiler = find_compiler()
    if compiler is None:
        return None, "no C++ compiler: FP8 casts run in PyTorch (slower; install g++)"

    try:
        library = ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", b"") or str(error).encode()
        detail = output.decode(errors="replace").strip()[-200:]
        return None, f"the fused kernel did not build: {detail}"

    # A kernel that rounds differently would change losses from machine to machine.
    kernel = _bind(library)
    if not _agrees(kernel):
        note = "the fused kernel disagrees with the reference on this CPU"
        return None, f"{note}: FP8 casts run in PyTorch"
    return kernel, f"fused kernel built by {Path(compiler).name}"


def _bind(library: ctypes.CDLL) -> Kernel:
    """The library's function as a `Kernel` on tensors."""
    function = library.harness_quantize
    function.argtypes = [
        ctypes.c_void_p,  # x
        ctypes.c_int,  # whether x is bfloat16, else float32
        ctypes.c_int64,  # elements of x
        ctypes.c_int64,  # elements of a row
        ctypes.c_float,  # scale
        ctypes.c_int,  # format
        ctypes.c_void_p,  # output
        ctypes.c_void_p,  # amax
        ctypes.c_void_p,  # statistics, or null
        ctypes.c_int,  # by_rows
        ctypes.c_int,  # threads
    ]
    function.restype = None

    def quantize(
        x: Tensor, scale: float, fmt: str, amax: int, stats: int | None, by_rows: bool = False
    ) -> Tensor:
        out = torch.empty_like(x, dtype=torch.bfloat16)
        function(
            x.data_ptr(),
            int(x.dtype == torch.bfloat16),
            x.numel(),
            x.shape[-1],
            scale,
            _FORMAT_CODES[fmt],
            out.data_ptr(),
            amax,
            stats,
            int(by_rows),
            torch.get_num_threads(),
        )
        return out

    return quantize


def _build(compiler: str) -> Path:
    """The library in the user cache, built if it is not there. Its name holds a hash of all that it depends on."""
    depends_on = repr((_FLAGS, compiler, _cpu(), torch.__version__))
    key = hashlib.sha256(_SOURCE.read_bytes() + depends_on.encode())

    def build(library: Path) -> None:
        objects = library.with_name("kernel.o")
        # Link against the OpenMP that torch already loaded: a second runtime would compete with it for the cores.
        openmp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
        link = [str(openmp[0])] if openmp else ["-fopenmp"]
        _compile([compiler, *_FLAGS, "-fopenmp", "-c", str(_SOURCE), "-o", str(objects)])
        _compile([compiler, "-shared", str(objects), *link, "-o", str(library)])

    return cached(f"native_kernel-{key.hexdigest()[:16]}.so", build)


def _compile(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_SECONDS)


def _cpu() -> str:
    """The CPU's features, which -march=native depends on. A cache in a shared home may serve several CPUs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    for line in lines:
        if line.startswith("flags"):
            return line
    return platform.machine()


def _agrees(kernel: Kernel) -> bool:
    """Whether the kernel gives the bits of `scaling.quantize`, NaN for NaN.

    Tried with every bfloat16 value, float32 values between them, both formats and several scales.
    """
    bits = torch.arange(65536, dtype=torch.int32, device="cpu")
    values = bits.to(torch.int16).view(torch.bfloat16)
    amax = torch.zeros(1, device="cpu")
    for fmt in _FORMAT_CODES:
        for scale in (1.0, 0.37, 2.0**20, 2.0**-20):
            for x in (values, values.float() * 1.1):
                ours = kernel(x, scale, fmt, amax.data_ptr(), None)
                reference = scaling.quantize(x, scale, fmt)
                same_bits = ours.view(torch.int16) == reference.view(torch.int16)
                both_nan = ours.isnan() & reference.isnan()
                if not bool((same_bits | both_nan).all()):
                    return False
    # The values hold infinities and NaNs. The amax must be infinite, because NaN is ignored.
    return bool(torch.isinf(amax).all())
