# pyright: reportInvalidTypeForm=false
"""FP8 casts and their statistics on a GPU: four Triton kernels, and torch operations that give the same results.

kernel             operator          one pass over a tensor gives
_kernel            fp8_quantize      FP8 bytes, their transpose, and the amax
_turn_kernel       (none)            the transpose of FP8 bytes
_stats_kernel      fp8_cast_sums     sums of each row behind the statistics of a cast
_channel_kernel    fp8_cast_sums     sums of each channel behind them

Kernels are worth it because torch operations are many small launches. With statistics by torch operations a sampled
step made 5,300 launches and took 1.7 times the time of another step (96 slots, on an H100).

Triton comes with torch's CUDA builds. Before its first use each kernel is compared with the torch operations. If
Triton is missing, does not compile, or gives another result, torch operations run instead, and a warning says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from harness.precision import scaling
from harness.precision.backends.native_gemm import padded
from harness.precision.operators import define

try:
    import triton as _triton
    import triton.language as _tl
except ImportError:
    _triton = _tl = None
# Triton's kernels are a language of their own, not typed Python.
triton: Any = _triton
tl: Any = _tl

_log = logging.getLogger("harness.precision")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Cast(Protocol):
    """`quantize_pair`, or the kernel with its arguments."""

    def __call__(
        self,
        x: Tensor,
        scale: Tensor,
        amax: Tensor | None,
        fmt: str,
        through_bf16: bool,
        transpose: bool,
    ) -> tuple[Tensor, Tensor]: ...


Stats = Callable[[Tensor, Tensor, str, bool], Tensor]
Turn = Callable[[Tensor], Tensor]

# `_kernel`: a program takes a tile of ROWS x COLS elements with WARPS x 32 threads.
ROWS, COLS, WARPS = 64, 64, 8
# `_stats_kernel`: a program takes one row, in stretches of this many elements.
STRETCH = 1024
# `_channel_kernel`: a program takes this many channels, in stretches of DEPTH rows.
CHANNELS, DEPTH = 32, 64


def quantize_pair(
    x: Tensor, scale: Tensor, amax: Tensor | None, fmt: str, through_bf16: bool, transpose: bool
) -> tuple[Tensor, Tensor]:
    """FP8 bytes of x * scale, [r, c], and their transpose [c, r], where zeros pad r to a multiple of 16.

    x: contiguous float32, bfloat16 or float16 [r, c].
    scale: float32 [1].
    amax: float32 [1], raised in place to max|x| (NaN is ignored, Inf counts), or None.
    fmt: "e4m3" | "e5m2".
    through_bf16: round x to bfloat16 first, as the input of a bfloat16 layer is.
    transpose: without it the second result has shape [0].

    Rounds to nearest even, saturates (Inf too), keeps NaN.
    """
    if through_bf16:
        x = x.to(torch.bfloat16)
    if amax is not None:
        torch.maximum(amax, scaling.amax(x), out=amax)
    rows = scaling.cast(x, scale, fmt)
    return rows, turned(rows) if transpose else rows.new_empty(0)


def turned(rows: Tensor) -> Tensor:
    """The transpose of FP8 `rows` [r, c], contiguous [c, r], where zeros pad r to a multiple of 16."""
    columns = rows.view(torch.uint8).t()
    missing = padded(len(rows)) - len(rows)
    if missing:
        columns = F.pad(columns, (0, missing))
    return columns.contiguous().view(rows.dtype)


def _turned(rows: Tensor) -> Tensor:
    """`turned`, in one launch."""
    m, n = rows.shape
    columns = rows.new_empty(n, padded(m))
    tiles = -(-columns.shape[1] // ROWS) * -(-n // COLS)
    if tiles:
        launch: Any = _turn_kernel[(tiles,)]
        launch(
            rows.view(torch.uint8),
            columns.view(torch.uint8),
            m,
            n,
            columns.shape[1],
            ROWS=ROWS,
            COLS=COLS,
            num_warps=WARPS,
        )
    return columns


def _fp8_quantize(
    x: Tensor, scale: Tensor, amax: Tensor | None, fmt: str, through_bf16: bool, transpose: bool
) -> tuple[Tensor, Tensor]:
    """`quantize_pair`, in one launch."""
    rows, columns = _fake_quantize(x, scale, amax, fmt, through_bf16, transpose)
    m, n = x.shape
    # Tiles cover the padded rows too, as the kernel writes the transpose's zeros.
    m_padded = columns.shape[1] if transpose else m
    tiles = -(-m_padded // ROWS) * -(-n // COLS)
    if tiles:
        launch: Any = _kernel[(tiles,)]
        launch(
            x,
            scale,
            scale if amax is None else amax,  # with RECORD off nothing is written there
            rows,
            columns,
            m,
            n,
            m_padded,
            **constants(fmt),
            THROUGH_BF16=through_bf16 and x.dtype != torch.bfloat16,
            RECORD=amax is not None,
            TRANSPOSE=transpose,
            num_warps=WARPS,
        )
    return rows, columns


def constants(fmt: str) -> dict[str, float]:
    """The constants that the kernel is compiled for: tile and format.

    NAN sets no mantissa bit below those that FP8 keeps. Triton's interpreter would round such bits into the exponent,
    and the value would no longer be a NaN.
    """
    spec = scaling.FORMATS[fmt]
    return {
        "LIMIT": spec.max,
        "SMALLEST": 2.0**spec.min_exponent,
        "MAGIC": 1.5 * 2.0 ** (23 - spec.mantissa_bits),
        "NAN": 0x7F800000 | ((1 << spec.mantissa_bits) - 1) << (23 - spec.mantissa_bits),
        "ROWS": ROWS,
        "COLS": COLS,
    }


def _fake_quantize(
    x: Tensor, scale: Tensor, amax: Tensor | None, fmt: str, through_bf16: bool, transpose: bool
) -> tuple[Tensor, Tensor]:
    dtype = scaling.FORMATS[fmt].dtype
    shape = (x.shape[1], padded(x.shape[0])) if transpose else (0,)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(shape, dtype=dtype)


def _fp8_cast_sums(x: Tensor, scale: Tensor, fmt: str, by_row: bool) -> Tensor:
    """`scaling.cast_stats` by kernels, which add up in another order: a part for each row, then one for each group of
    CHANNELS channels.

    x: [r, c] of a dtype in DTYPES, in any layout.
    """
    spec = scaling.FORMATS[fmt]
    rows, columns = x.shape
    parts = _fake_sums(x, scale, fmt, by_row)
    if not x.numel():
        return parts.zero_()

    # The kernels step from one element of a row to the next. A Conv1D's weight is a transposed view, and the gradient
    # of a sum is one number, expanded: those are copied.
    if x.stride(1) != 1:
        x = x.contiguous()
    scale_step = 1 if scale.numel() == rows and scale.dim() else 0
    numbers = spec.max, 2.0**spec.min_exponent, 1.5 * 2.0 ** (23 - spec.mantissa_bits)

    over_rows: Any = _stats_kernel[(rows,)]
    over_rows(
        x,
        scale,
        parts,
        columns,
        x.stride(0),
        scale_step,
        *numbers,
        SUMS=scaling.SUMS,
        BY_ROW=by_row,
        STRETCH=STRETCH,
    )
    over_channels: Any = _channel_kernel[(len(parts) - rows,)]
    count, gap = scaling.centred_rows(rows)
    over_channels(
        x,
        scale,
        parts,
        rows,
        count,
        gap,
        columns,
        x.stride(0),
        scale_step,
        *numbers,
        SUMS=scaling.SUMS,
        CHANNELS=CHANNELS,
        DEPTH=DEPTH,
        TOGETHER=scaling.ROWS_TOGETHER,
        IN_BF16=scaling.IN_BF16,
    )
    return parts


def _fake_sums(x: Tensor, scale: Tensor, fmt: str, by_row: bool) -> Tensor:
    rows, columns = x.shape
    parts = rows + -(-columns // CHANNELS)
    return x.new_empty(parts, scaling.SUMS, dtype=torch.float64)


# Compiled code is cached on disk by an operator's name: an operator that gives another result needs another name.
define("fp8_quantize", _fp8_quantize, _fake_quantize, mutates=("amax",))
define("fp8_cast_sums", _fp8_cast_sums, _fake_sums)
_ops: Any = torch.ops.hopper_harness

if triton is not None:

    @triton.jit
    def _kernel(
        x,
        scale,
        amax,
        rows,
        columns,
        m,
        n,
        m_padded,
        LIMIT: tl.constexpr,
        SMALLEST: tl.constexpr,
        MAGIC: tl.constexpr,
        NAN: tl.constexpr,
        THROUGH_BF16: tl.constexpr,
        RECORD: tl.constexpr,
        TRANSPOSE: tl.constexpr,
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
    ):
        # Which tile this program takes. There is one axis of programs, as the other axes end at 65,535. Offsets are
        # 64 bits wide, as tensors may have 2^31 elements.
        tiles = tl.cdiv(n, COLS)
        i = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        j = (tl.program_id(0) % tiles).to(tl.int64) * COLS + tl.arange(0, COLS)
        inside = (i[:, None] < m) & (j[None, :] < n)
        value = tl.load(x + i[:, None] * n + j[None, :], mask=inside, other=0.0).to(tl.float32)

        # Round to bfloat16 by integer arithmetic, to nearest even. NaN stays as it is.
        if THROUGH_BF16:
            bits = value.to(tl.int32, bitcast=True)
            even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            value = tl.where(value == value, even.to(tl.float32, bitcast=True), value)

        # Raise the amax. The bits of non-negative floats order as their values do, so an integer maximum is exact.
        # The stored amax only grows: a stale reading of it costs a needless atomic and never loses a maximum.
        if RECORD:
            bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            largest = tl.max(tl.max(tl.where(bits <= 0x7F800000, bits, 0), 1), 0)
            staged = amax.to(tl.pointer_type(tl.int32), bitcast=True)
            tl.atomic_max(staged, largest, mask=largest > tl.load(staged), sem="relaxed")

        # Scale and saturate. NaN, the only value that differs from itself, is kept.
        scaled = value * tl.load(scale)
        scaled = tl.where(scaled == scaled, tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT), scaled)

        # Round as scaling.quantize does, so that the conversion to FP8 below has nothing left to round. On Ada that
        # conversion goes through float16, which would round twice, and Triton's interpreter loses carries.
        exponent = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        magic = tl.maximum(exponent, SMALLEST) * MAGIC
        bits = ((scaled + magic) - magic).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        bits = bits | (scaled.to(tl.int32, bitcast=True) & -2147483648)
        bits = tl.where(scaled == scaled, bits, NAN)
        rounded = bits.to(tl.float32, bitcast=True)
        tl.store(rows + i[:, None] * n + j[None, :], rounded.to(rows.dtype.element_ty), mask=inside)

        # Transpose in bfloat16, which holds every FP8 value: Triton 3.6.0 misplaces 8-bit elements of transposed
        # float32 tiles (seen on an H100). Rows past the last were read as zeros, and pad the transpose.
        if TRANSPOSE:
            turned = tl.trans(rounded.to(tl.bfloat16)).to(columns.dtype.element_ty)
            filled = (j[:, None] < n) & (i[None, :] < m_padded)
            tl.store(columns + j[:, None] * m_padded + i[None, :], turned, mask=filled)

    @triton.jit
    def _turn_kernel(x, columns, m, n, m_padded, ROWS: tl.constexpr, COLS: tl.constexpr):
        # Tiles, offsets and padding are those of `_kernel`. As there, a byte is 16 bits wide while it is transposed.
        tiles = tl.cdiv(n, COLS)
        i = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        j = (tl.program_id(0) % tiles).to(tl.int64) * COLS + tl.arange(0, COLS)
        inside = (i[:, None] < m) & (j[None, :] < n)
        value = tl.load(x + i[:, None] * n + j[None, :], mask=inside, other=0).to(tl.int16)
        filled = (j[:, None] < n) & (i[None, :] < m_padded)
        turned = tl.trans(value).to(tl.uint8)
        tl.store(columns + j[:, None] * m_padded + i[None, :], turned, mask=filled)

    @triton.jit
    def _stats_kernel(
        x,
        scale,
        sums,
        columns,
        step,
        scale_step,
        LIMIT,
        SMALLEST,
        MAGIC,
        SUMS: tl.constexpr,
        BY_ROW: tl.constexpr,
        STRETCH: tl.constexpr,
    ):
        # One program sums up one row, by the rules of scaling.quantization_stats and scaling.summed.
        row = tl.program_id(0).to(tl.int64)
        factor = tl.load(scale + row * scale_step)
        clipped = tl.zeros([STRETCH], tl.int32)
        nonzero = tl.zeros([STRETCH], tl.int32)
        flushed = tl.zeros([STRETCH], tl.int32)
        signal = tl.zeros([STRETCH], tl.float64)
        noise = tl.zeros([STRETCH], tl.float64)
        own = tl.zeros([STRETCH], tl.float64)
        for start in range(0, columns, STRETCH):
            # Non-finite values count as 0, but an infinity counts as clipped.
            j = start + tl.arange(0, STRETCH)
            value = tl.load(x + row * step + j, mask=j < columns, other=0.0).to(tl.float32)
            finite = (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
            value_or_none = tl.where(finite, value, 0.0)
            scaled = value * factor
            clipped += (tl.abs(scaled) > LIMIT).to(tl.int32)

            # The cast, rounded as in `_kernel`.
            scaled = tl.minimum(tl.maximum(value_or_none * factor, -LIMIT), LIMIT)
            exponent = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            magic = tl.maximum(exponent, SMALLEST) * MAGIC
            quantized = (scaled + magic) - magic
            some = value_or_none != 0.0
            nonzero += some.to(tl.int32)
            flushed += (some & (quantized == 0.0)).to(tl.int32)

            # Errors in float64: of the value, and relative to it.
            exact = value_or_none.to(tl.float64)
            error = exact - quantized.to(tl.float64) / factor.to(tl.float64)
            signal += exact * exact
            noise += error * error
            share = error / tl.where(some, exact, 1.0)
            own += tl.minimum(share * share, 1.0)
        some_values = tl.sum(nonzero, 0).to(tl.float64)
        energy = tl.sum(signal, 0)
        lost = tl.sum(noise, 0)
        own_sum = tl.sum(own, 0)
        if BY_ROW:
            # A row of zeros has lost nothing, nor has one whose loss is NaN, under the scale 0 of an infinite amax.
            share_lost = tl.minimum(lost / tl.where(energy > 0.0, energy, 1.0), 1.0)
            own_sum = some_values * tl.where(lost == lost, share_lost, 0.0)

        # The last two are the channels' sums, in parts of their own.
        sums += row * SUMS
        tl.store(sums, tl.sum(clipped, 0).to(tl.float64))
        tl.store(sums + 1, some_values)
        tl.store(sums + 2, tl.sum(flushed, 0).to(tl.float64))
        tl.store(sums + 3, energy)
        tl.store(sums + 4, lost)
        tl.store(sums + 5, own_sum)
        tl.store(sums + 6 + tl.arange(0, 2), tl.zeros([2], tl.float64))

    @triton.jit
    def _value_and_error(x, scale, i, j, inside, step, scale_step, LIMIT, SMALLEST, MAGIC):
        value = tl.load(x + i[:, None] * step + j[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.where((value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000, value, 0.0)
        factor = tl.load(scale + i[:, None] * scale_step, mask=inside, other=1.0)
        scaled = tl.minimum(tl.maximum(value * factor, -LIMIT), LIMIT)
        exponent = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        magic = tl.maximum(exponent, SMALLEST) * MAGIC
        quantized = (scaled + magic) - magic
        exact = value.to(tl.float64)
        return exact, exact - quantized.to(tl.float64) / factor.to(tl.float64)

    @triton.jit
    def _channel_kernel(
        x,
        scale,
        sums,
        rows,
        count,
        gap,
        columns,
        step,
        scale_step,
        LIMIT,
        SMALLEST,
        MAGIC,
        SUMS: tl.constexpr,
        IN_BF16: tl.constexpr,
        TOGETHER: tl.constexpr,
        CHANNELS: tl.constexpr,
        DEPTH: tl.constexpr,
    ):
        block = tl.program_id(0).to(tl.int64)
        j = block * CHANNELS + tl.arange(0, CHANNELS)
        # Values and errors are taken relative to the first row: a channel that is equal in all rows counts exactly 0.
        top = tl.arange(0, 1).to(tl.int64)
        # A name has one shape in a kernel, so this mask is not called as the one in the loop.
        inside_top = (top[:, None] < rows) & (j[None, :] < columns)
        first, offset = _value_and_error(
            x, scale, top, j, inside_top, step, scale_step, LIMIT, SMALLEST, MAGIC
        )
        value_sum = tl.zeros([CHANNELS], tl.float64)
        value_squares = tl.zeros([CHANNELS], tl.float64)
        error_sum = tl.zeros([CHANNELS], tl.float64)
        error_squares = tl.zeros([CHANNELS], tl.float64)

        # Rows are sampled in stretches of TOGETHER, which begin `gap` rows apart (scaling.centred_rows).
        for start in range(0, count, DEPTH):
            number = (start + tl.arange(0, DEPTH)).to(tl.int64)
            i = number // TOGETHER * gap + number % TOGETHER
            inside = (number[:, None] < count) & (j[None, :] < columns)
            value, error = _value_and_error(
                x, scale, i, j, inside, step, scale_step, LIMIT, SMALLEST, MAGIC
            )
            value = tl.where(inside, value - first, 0.0)
            error = tl.where(inside, error - offset, 0.0)
            value_sum += tl.sum(value, 0)
            value_squares += tl.sum(value * value, 0)
            error_sum += tl.sum(error, 0)
            error_squares += tl.sum(error * error, 0)

        # Sums of squares about the mean, from those about the first row. Channels that bfloat16 cannot tell from
        # constant ones are left out. The sampled rows stand for all.
        top_row = tl.sum(first, 0)
        whole = value_squares + 2 * value_sum * top_row + top_row * top_row * count
        varying = value_squares - value_sum * value_sum / count
        lost = tl.maximum(error_squares - error_sum * error_sum / count, 0.0)
        visible = varying > IN_BF16 * whole

        # These parts stand behind those of the rows, whose six sums are 0 here.
        sums += (rows + block) * SUMS
        place = tl.arange(0, SUMS)
        tl.store(sums + place, tl.zeros([SUMS], tl.float64), mask=place < 6)
        tl.store(sums + 6, tl.sum(tl.where(visible, varying, 0.0), 0) * rows / count)
        tl.store(sums + 7, tl.sum(tl.where(visible, lost, 0.0), 0) * rows / count)


def load(device: torch.device) -> tuple[Cast, str]:
    """The function that casts on `device`, and a note: the kernel if it works, else `quantize_pair` and why.

    On a GPU the reason is also logged as a warning (logger harness.precision), as every cast is slower then.
    """
    if device.type != "cuda":
        return quantize_pair, "FP8 casts in PyTorch: no GPU"
    reason = _unusable(device, lambda: check(device, thorough=False))
    if not reason:
        version = getattr(triton, "__version__", "(assumed)")
        return _ops.fp8_quantize, f"fused FP8 casts by triton {version}"
    _log.warning("FP8 casts run in PyTorch, slower: %s", reason)
    return quantize_pair, f"FP8 casts in PyTorch: {reason}"


def load_stats(device: torch.device) -> tuple[Stats, str]:
    """The function that measures casts on `device`: the kernels if they work, else `scaling.cast_stats`.

    On a GPU the reason is logged as `load` does, and is the second result, to end a backend's note with. Else that is
    empty.
    """
    if device.type != "cuda":
        return scaling.cast_stats, ""
    reason = _unusable(device, lambda: check_stats(device))
    if not reason:
        return _ops.fp8_cast_sums, ""
    _log.warning("FP8 statistics run in PyTorch, slower: %s", reason)
    return scaling.cast_stats, f"; FP8 statistics in PyTorch: {reason}"


def load_turn(device: torch.device) -> Turn:
    """The function that transposes FP8 bytes on `device`: the kernel if it works, else `turned`.

    On a GPU the reason is logged as `load` does.
    """
    if device.type != "cuda":
        return turned
    reason = _unusable(device, lambda: check_turn(device))
    if not reason:
        return _turned
    _log.warning("layers.fuse: casts are not fused: %s", reason)
    return turned


def _unusable(device: torch.device, check_kernel: Callable[[], list[str]]) -> str:
    """Why a kernel cannot be used on `device`; empty if it can. check_kernel: the differences that it found."""
    # An estimate on fake tensors launches nothing, and the machine with the card has Triton.
    if isinstance(torch.empty(0, device=device), FakeTensor):
        return ""
    if triton is None:
        return "triton is not installed"
    try:
        # The reference is computed on the CPU, also where the user's tensors are made on the GPU by default.
        with torch.device("cpu"):
            differences = check_kernel()
    except Exception as error:  # whatever the compiler, its driver or the launch raises
        lines = str(error).strip().splitlines()
        last = lines[-1] if lines else ""
        return f"the fused kernel failed: {type(error).__name__}: {last[-200:]}"
    return f"the fused kernel differs: {differences[0]}" if differences else ""


def _every_bf16() -> Tensor:
    """Every bfloat16 value once, bfloat16 [65536]."""
    bits = torch.arange(65536, dtype=torch.int32, device="cpu")
    return bits.to(torch.int16).view(torch.bfloat16)


def check(device: torch.device, thorough: bool = True) -> list[str]:
    """Each difference in a bit between the kernel on `device` and `quantize_pair` on the CPU. NaN equals NaN.

    Tried with every bfloat16 value, float32 and float16 values between them, both formats, several scales, odd shapes,
    and amaxes from 0 and from a running maximum.

    thorough: else only bfloat16 and float32 in one shape, which compiles little that training does not need anyway.

    Raises what Triton raises if the kernel does not compile or launch.
    """
    found: list[str] = []
    every = _every_bf16()
    odd = torch.cat([every[:5123], every[-5120:]]).float() * 1.1
    inputs = (
        every.view(256, 256),
        (every.float() * 1.1).view(256, 256),
        every.view(torch.float16).view(64, 1024),
        odd[: 97 * 71].view(97, 71),
        odd[-1:].view(1, 1),
        odd[:0].view(0, 16),
    )
    for x in inputs if thorough else inputs[:2]:
        for fmt in scaling.FORMATS:
            for scale in (1.0, 0.37, 2.0**20, 2.0**-20, scaling.SMALLEST_SCALE):
                for running, through_bf16 in ((None, False), (0.0, True), (3.0, False)):
                    found += _differences(x, scale, running, fmt, through_bf16, device)
    return found


def check_turn(device: torch.device) -> list[str]:
    """Each difference in a byte between the kernel on `device` and `turned` on the CPU. Raises as `check`."""
    found: list[str] = []
    random = torch.Generator().manual_seed(0)
    for m, n in ((256, 192), (97, 71), (1, 1), (0, 16)):
        bytes_ = torch.randint(256, (m, n), generator=random, dtype=torch.uint8, device="cpu")
        rows = bytes_.view(torch.float8_e4m3fn)
        actual = _turned(rows.to(device)).cpu()
        if not torch.equal(actual.view(torch.uint8), turned(rows).view(torch.uint8)):
            found.append(f"transpose of {[m, n]} bytes")
    return found


def check_stats(device: torch.device) -> list[str]:
    """Each difference between the kernels' sums on `device` and those of `scaling.cast_stats` on the CPU.

    Counts must be equal. Sums of squares must agree within float64's rounding, as they are added up in another order.
    Tried with every bfloat16 value (but subnormal ones, of which Triton's interpreter loses some), float32 values
    between them, both formats, and scales of the tensor and of each row. Raises as `check`.
    """
    every = _every_bf16()
    subnormal = every.float().abs() < torch.finfo(torch.bfloat16).tiny
    every = torch.where(subnormal, 0.0, every)
    wide = (every.float() * 1.1)[: 40 * 1600].view(40, 1600)
    found: list[str] = []
    for x in (every.view(256, 256), wide, wide[::3]):
        for fmt in scaling.FORMATS:
            for scale in (
                torch.tensor(0.37, device="cpu"),
                torch.tensor(2.0**20, device="cpu"),
                torch.linspace(1e-3, 1e3, len(x), device="cpu")[:, None],
            ):
                quantized = scaling.quantize(x, scale, fmt)
                expected = scaling.quantization_stats(x, quantized, scale, fmt)
                parts = _fp8_cast_sums(x.to(device), scale.to(device), fmt, False).cpu()
                actual = parts[: len(x), : scaling.ROW_SUMS]
                # What float64 itself rounds off. A row that FP8 holds exactly may have no other error.
                floor = 1e-20 * torch.stack([expected[:, 3], expected[:, 3], expected[:, 1]], dim=1)
                near = (actual[:, 3:] - expected[:, 3:]).abs() <= 1e-9 * expected[:, 3:] + floor
                what = f"{x.dtype} {list(x.shape)}, {scale.numel()} scale(s), {fmt}"
                if not torch.equal(actual[:, :3], expected[:, :3]) or not near.all():
                    found.append(
                        f"{actual.sum(0).tolist()} for {expected.sum(0).tolist()} of {what}"
                    )

                # As they are used: all parts together, and gradients judged row by row.
                whole = scaling.cast_stats(x, scale, fmt, True)[0]
                parts = _fp8_cast_sums(x.to(device), scale.to(device), fmt, True).cpu()
                if not torch.allclose(parts.sum(0), whole, rtol=1e-9, atol=1e-20):
                    found.append(f"{parts.sum(0).tolist()} for {whole.tolist()} of {what}, by row")
    return found + _channel_differences(device)


def _channel_differences(device: torch.device) -> list[str]:
    """As `check_stats`, for the sums by channels.

    Values lie about 3 and differ by up to 1. Some shapes have fewer rows than are sampled, some more.
    """
    found: list[str] = []
    for rows, columns in ((1, 7), (40, 100), (1100, 48)):
        places = torch.arange(rows * columns, dtype=torch.float32, device="cpu")
        x = 3 + torch.sin(places).view(rows, columns)
        x[:, 1], x[0, 2], x[-1, 3] = 1.7, torch.nan, torch.inf
        for fmt in scaling.FORMATS:
            for scale in (
                torch.tensor(100.0, device="cpu"),
                torch.linspace(10, 1000, rows, device="cpu")[:, None],
            ):
                expected = scaling.channel_stats(x, scaling.quantize(x, scale, fmt), scale)
                parts = _fp8_cast_sums(x.to(device), scale.to(device), fmt, False)
                actual = parts[:, scaling.ROW_SUMS :].sum(dim=0).cpu()
                if not torch.allclose(actual, expected, rtol=1e-9, atol=0.0):
                    what = f"{[rows, columns]}, {scale.numel()} scale(s), {fmt}"
                    found.append(
                        f"{actual.tolist()} for {expected.tolist()} of the channels of {what}"
                    )
    return found


def _differences(
    x: Tensor,
    scale: float,
    running: float | None,
    fmt: str,
    through_bf16: bool,
    device: torch.device,
) -> list[str]:
    """The kernel's cast of `x` on `device` against that of `quantize_pair` on the CPU. running: the amax before it."""
    factor = torch.tensor([scale], device="cpu")
    expected_amax = actual_amax = None
    if running is not None:
        expected_amax = torch.tensor([running], device="cpu")
        actual_amax = expected_amax.clone().to(device)
    expected = quantize_pair(x, factor, expected_amax, fmt, through_bf16, transpose=True)
    actual = _fp8_quantize(
        x.to(device), factor.to(device), actual_amax, fmt, through_bf16, transpose=True
    )

    # Bytes are compared, not numbers: the sign of a zero counts.
    what = f"{x.dtype} {list(x.shape)}, scale {scale:g}, {fmt}"
    if through_bf16:
        what += ", through bfloat16"
    found: list[str] = []
    if not _same(actual[0].cpu(), expected[0]):
        found.append(f"bytes of {what}")
    if not _same(actual[1].cpu(), expected[1]):
        found.append(f"transpose of {what}")
    if expected_amax is not None and actual_amax is not None:
        same_amax = torch.equal(actual_amax.cpu(), expected_amax)
        if not same_amax:
            found.append(f"amax {actual_amax.item()} for {expected_amax.item()} of {what}")
    return found


def _same(left: Tensor, right: Tensor) -> bool:
    """Whether two FP8 tensors have the same shape and bytes. NaN equals NaN."""
    same_bytes = left.view(torch.uint8) == right.view(torch.uint8)
    both_nan = left.float().isnan() & right.float().isnan()
    return left.shape == right.shape and bool((same_bytes | both_nan).all())
