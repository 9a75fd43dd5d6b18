"""The native backend's casts on a CPU: one fused kernel that scales, rounds, finds amax and counts in one pass.

The C++ compiler builds it from native_kernel.cpp into a user cache, once per machine (under a second). Without a
compiler, or if the built kernel disagrees with `scaling.quantize` in a single bit, there is no kernel: the PyTorch
version casts instead, and the backend's note says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from harness.core.files import cached
from harness.precision import scaling

_SOURCE = Path(__file__).with_name("native_kernel.cpp")
# No -ffast-math: NaN must stay NaN. No contraction: see the source's head.
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

    kernel(x, scale, fmt, amax_pointer, stats_pointer, by_rows=False): x a contiguous float32 or bfloat16 CPU tensor;
    returns its raw FP8 values in bfloat16, raises *amax_pointer (float32) to max|x| and, unless None, adds to eight
    doubles at stats_pointer (see `scaling.quantization_stats` and `channel_stats`; by_rows: as `scaling.summed` has a
    gradient).
    """
    compiler = (
        shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++") or shutil.which("clang++")
    )
    if compiler is None:
        return None, "no C++ compiler: FP8 casts run in PyTorch (slower; install g++)"
    try:
        library = ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", b"") or str(error).encode()
        return (
            None,
            f"the fused kernel did not build: {detail.decode(errors='replace').strip()[-200:]}",
        )
    kernel = _bind(library)
    if not _agrees(kernel):
        return (
            None,
            "the fused kernel disagrees with the reference on this CPU: FP8 casts run in PyTorch",
        )
    return kernel, f"fused kernel built by {Path(compiler).name}"


def _bind(library: ctypes.CDLL) -> Kernel:
    function = library.harness_quantize
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    count = ctypes.c_int64
    function.argtypes = (
        [pointer, integer, count, count, ctypes.c_float, integer] + [pointer] * 3 + [integer] * 2
    )
    function.restype = None

    def quantize(
        x: Tensor, scale: float, fmt: str, amax: int, stats: int | None, by_rows: bool = False
    ) -> Tensor:
        out = torch.empty_like(x, dtype=torch.bfloat16)
        is_bf16 = int(x.dtype == torch.bfloat16)
        code = _FORMAT_CODES[fmt]
        row, threads = x.shape[-1], torch.get_num_threads()
        pointers = out.data_ptr(), amax, stats
        function(
            x.data_ptr(), is_bf16, x.numel(), row, scale, code, *pointers, int(by_rows), threads
        )
        return out

    return quantize


def _build(compiler: str) -> Path:
    key = hashlib.sha256(
        _SOURCE.read_bytes() + repr((_FLAGS, compiler, _cpu(), torch.__version__)).encode()
    )

    def build(library: Path) -> None:
        objects = library.with_name("kernel.o")
        # Link against the OpenMP that torch already loaded: a second runtime would fight it for the cores.
        openmp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
        link = [str(openmp[0])] if openmp else ["-fopenmp"]
        _compile([compiler, *_FLAGS, "-fopenmp", "-c", str(_SOURCE), "-o", str(objects)])
        _compile([compiler, "-shared", str(objects), *link, "-o", str(library)])

    return cached(f"native_kernel-{key.hexdigest()[:16]}.so", build)


def _compile(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_SECONDS)


def _cpu() -> str:
    """The CPU's features, which -march=native depends on: a cache in a shared home may serve several CPUs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), platform.machine())


def _agrees(kernel: Kernel) -> bool:
    """Every bfloat16 value, both formats, several scales: the same bits as the reference, NaN for NaN."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    amax = torch.zeros(1)
    for fmt in _FORMAT_CODES:
        for scale in (1.0, 0.37, 2.0**20, 2.0**-20):
            for x in (values, values.float() * 1.1):
                ours, reference = (
                    kernel(x, scale, fmt, amax.data_ptr(), None),
                    scaling.quantize(x, scale, fmt),
                )
                same = (ours.view(torch.int16) == reference.view(torch.int16)) | (
                    ours.isnan() & reference.isnan()
                )
                if not bool(same.all()):
                    return False
    return bool(torch.isinf(amax).all())
