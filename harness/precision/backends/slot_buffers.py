"""The buffers of all FP8 slots of a model, packed: history [L, slots], scale [slots], statistics [slots, 8].

One update, one all-reduce, one snapshot, one telemetry read for the whole model, whatever its number of layers.

On a CPU its casts are one fused kernel, which scales, rounds, finds amax and counts in one pass. It is built once per
machine with the C++ compiler (under a second) into a user cache; without a compiler, or if the built kernel disagrees
with `scaling.quantize` in a single bit, the PyTorch version is used and the reason is told.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.core.errors import CheckpointError, Problem
from harness.core.files import cached
from harness.core.protocols import Meta, TensorDict
from harness.precision import scaling
from harness.precision.backends.native_gemm import Carrier, Operand
from harness.precision.recipe import Fp8Config

_SOURCE = Path(__file__).with_name("native_kernel.cpp")
# No -ffast-math: NaN must stay NaN. No contraction: see the source's head.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-fPIC")
_BUILD_SECONDS = 60
_FORMAT_CODES = {"e4m3": 0, "e5m2": 1}

# The largest block, in bytes, that glibc still takes from its heap once it has seen one freed.
_LARGEST_IN_HEAP = 32 * 2**20 - 2**13

Kernel = Callable[..., Tensor]


@cache
def load() -> tuple[Kernel | None, str]:
    """(kernel, what it is), or (None, why there is none).

    kernel(x, scale, fmt, amax_pointer, stats_pointer, by_rows=False): x a contiguous float32 or bfloat16 CPU tensor;
    returns its raw FP8 values in bfloat16, raises *amax_pointer (float32) to max|x| and, unless None, adds to eight
    doubles at stats_pointer (see `scaling.quantization_stats` and `channel_stats`; by_rows: as `scaling.summed` has a
    gradient).
    """
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        return None, "no C++ compiler: FP8 casts run in PyTorch (slower; install g++)"
    try:
        library = ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", b"") or str(error).encode()
        return None, f"the fused kernel did not build: {detail.decode(errors='replace').strip()[-200:]}"
    kernel = _bind(library)
    if not _agrees(kernel):
        return None, "the fused kernel disagrees with the reference on this CPU: FP8 casts run in PyTorch"
    return kernel, f"fused kernel built by {Path(compiler).name}"


def keep_freed_memory() -> None:
    """Let freed tensors of a step serve the next one, for the whole process; harmless without glibc.

    glibc returns freed memory to the system, and every page costs a fault when it is taken again: 5% of a step here.
    How much it keeps grows with the largest block that was ever freed, see mallopt(3) on M_MMAP_THRESHOLD.
    """
    torch.empty(_LARGEST_IN_HEAP, dtype=torch.uint8, device="cpu")


def _bind(library: ctypes.CDLL) -> Kernel:
    function = library.harness_quantize
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    count = ctypes.c_int64
    function.argtypes = [pointer, integer, count, count, ctypes.c_float, integer] + [pointer] * 3 + [integer] * 2
    function.restype = None

    def quantize(x: Tensor, scale: float, fmt: str, amax: int, stats: int | None, by_rows: bool = False) -> Tensor:
        out = torch.empty_like(x, dtype=torch.bfloat16)
        is_bf16 = int(x.dtype == torch.bfloat16)
        code = _FORMAT_CODES[fmt]
        row, threads = x.shape[-1], torch.get_num_threads()
        pointers = out.data_ptr(), amax, stats
        function(x.data_ptr(), is_bf16, x.numel(), row, scale, code, *pointers, int(by_rows), threads)
        return out

    return quantize


def _build(compiler: str) -> Path:
    key = hashlib.sha256(_SOURCE.read_bytes() + repr((_FLAGS, compiler, _cpu(), torch.__version__)).encode())

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
    """What -march=native depends on: a cache in a shared home must not serve another CPU's instructions."""
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
                ours, reference = kernel(x, scale, fmt, amax.data_ptr(), None), scaling.quantize(x, scale, fmt)
                same = (ours.view(torch.int16) == reference.view(torch.int16)) | (ours.isnan() & reference.isnan())
                if not bool(same.all()):
                    return False
    return bool(torch.isinf(amax).all())


class SlotBuffers(scaling.ScalingState):
    """Delayed-scaling state of every slot of one model, and the casts under it, here to bfloat16 carriers.

    names: `<layer>.<role>`. formats: "e4m3" or "e5m2" for each. `active` is on inside a precision context; `sampling`
    adds the statistics that need more than an amax. demoted: first slots of the layers in BF16. epoch counts changes
    of `scale`, window counts optimizer steps begun. gradient: format of every grad_output. weights: quantised ones by
    their layer's first slot, with what they were made from and when.
    """

    traced: tuple[Callable[..., Tensor], Callable[..., Tensor]] | None = None
    """`linear` and `switching` of native_fp8 where a compiler is shown the casts."""
    own_casts = True
    """Whether `linear` casts by a kernel of its own, which the compiler does not look into."""

    def __init__(self, names: Sequence[str], formats: Sequence[str], config: Fp8Config, device: torch.device) -> None:
        super().__init__(config, torch.tensor([scaling.FORMATS[fmt].max for fmt in formats], device=device))
        self.names, self.formats, self.device = tuple(names), tuple(formats), device
        self.sums = torch.zeros(len(names), scaling.SUMS, dtype=torch.float64, device=device)
        self.active = False
        self.sampling = False
        self.gradient = formats[-1] if formats else "e5m2"
        self.demoted: set[int] = set()
        self.weights: dict[int, tuple[tuple[int, ...], Operand, Tensor]] = {}
        self.epoch = 0
        self.window = 0
        self.kernel, self.kernel_note = load() if device.type == "cpu" else (None, "PyTorch casts")
        self._scratch = torch.zeros(1)
        self._scales_changed()

    def activation(self, rows: Tensor, slot: int, record: bool, rights: bool = True) -> Operand:
        """`rows` [m, n] of any float dtype, rounded to bfloat16 and then cast under the slot's scale.

        record: note amax and statistics. rights: it will be a right operand or a transposed left one, too.
        """
        return self.operand(rows.to(torch.bfloat16).contiguous(), slot, record, rights)

    def operand(self, x: Tensor, slot: int, record: bool, rights: bool = True) -> Operand:
        """As `activation`, from `x` [m, n] as it is."""
        return Carrier(self.quantize(x.contiguous(), slot, record), self.inverses[slot])

    def quantize(self, x: Tensor, slot: int, record: bool) -> Tensor:
        """Raw FP8 values of `x` (contiguous) in bfloat16 under the slot's scale; `record`: note amax and statistics."""
        fmt = self.formats[slot]
        if self.kernel is not None and x.dtype in (torch.bfloat16, torch.float32):
            amax = self.history.data_ptr() + 4 * slot if record else self._scratch.data_ptr()
            stats = self.sums[slot].data_ptr() if record and self.sampling else None
            return self.kernel(x, self.scales[slot], fmt, amax, stats, scaling.by_rows(slot))
        quantized = scaling.quantize(x, self.scale[slot], fmt)
        if record:
            self._stage(x, slot)
            if self.sampling:
                rows = scaling.quantization_stats(x, quantized, self.scale[slot], fmt)
                channels = scaling.channel_stats(x, quantized, self.scale[slot])
                self.sums[slot] += torch.cat([scaling.summed(rows, slot), channels])
        return quantized

    def observe(self, x: Tensor, slot: int) -> None:
        """Note max|x| of a tensor that is multiplied in BF16; when sampling, also what FP8 would make of it.

        A demoted layer must not come back while its tensors would still lose too much.
        """
        if self.sampling:
            self.quantize(x.detach().contiguous(), slot, record=True)
        else:
            self._stage(x, slot)

    def _stage(self, x: Tensor, slot: int) -> None:
        self.stage(slot, scaling.amax(x))

    def stage(self, slot: int, amax: Tensor) -> None:
        """Raise the slot's running amax to `amax`, float32 of one element."""
        staged = self.history[0, slot : slot + 1]
        torch.maximum(staged, amax.reshape(1), out=staged)

    def may_release(self) -> bool:
        """Whether a layer may give its quantised weight up once backward has used it: here it stays for the window."""
        return False

    def backward_begins(self, last: bool | None) -> None:
        """One more micro-batch of the window goes backward; last: as of `PrecisionBackend.backward_context`."""

    def before_update(self) -> None:
        """All of a window's backwards are done."""

    def begin_window(self, sample: bool = False) -> None:
        """As `ScalingState.begin_window`; `sample`: collect for underflow, clipped share and SQNRs, too."""
        super().begin_window()
        self.window += 1
        self.sampling = sample
        self.sums.zero_()

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """As `ScalingState.end_micro_batch`."""
        if self.config.roll == "micro_batch":
            super().end_micro_batch(reduce)
            self._scales_changed()

    def end_window(self, amax: Tensor, skip: Tensor) -> None:
        """As `ScalingState.end_window`."""
        super().end_window(amax, skip)
        self._scales_changed()

    def stats(self, sums: Tensor) -> Tensor:
        """float32 [8, slots], rows as in core.metrics.SLOT_ROWS, of the window that ended. sums: `sums`, rank-reduced.

        scale is the one in use when the window began. Rows from clipped on are NaN where nothing was sampled.
        """
        return torch.cat([self.known(), scaling.shares(sums)])

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """tensors: history float32 [L, slots] (staging empty), scale float32 [slots]; meta: slot names, formats."""
        return {"history": self.history, "scale": self.scale}, {
            "slots": list(self.names),
            "formats": list(self.formats),
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore in place; what a run without FP8 saved makes it new. Raises CheckpointError if slots, formats or
        history length differ.
        """
        if not meta["slots"]:
            self.history.zero_()
            self.scale.fill_(1.0)
            self._scales_changed()
            return
        mine = (list(self.names), list(self.formats), list(self.history.shape))
        saved = (meta["slots"], meta["formats"], list(tensors["history"].shape))
        if mine != saved:
            raise CheckpointError(
                Problem(
                    f"FP8 state is of {len(saved[0])} slots, history length {saved[2][0]}; this run has "
                    f"{len(mine[0])} slots, history length {mine[2][0]}",
                    "fp8 state",
                    fix="resume with the recipe and model that wrote the checkpoint",
                )
            )
        self.history.copy_(tensors["history"])
        self.scale.copy_(tensors["scale"])
        self._scales_changed()

    def _scales_changed(self) -> None:
        """Refresh what is derived from `scale` and drop cached FP8 weights.

        inverses: 1 / scale, correctly rounded to float32. A carrier's GEMM takes its scales as numbers of the host.
        """
        self.epoch += 1
        self.weights.clear()
        self.inverse = torch.ones_like(self.scale) / self.scale
        self._read_scales()

    def _read_scales(self) -> None:
        self.scales: list[float] = self.scale.tolist()
        self.inverses: list[float] = self.inverse.tolist()
