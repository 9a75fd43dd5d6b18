"""Delayed scaling: how an FP8 tensor gets its scale. Pure functions, bit for bit Transformer Engine's rule.

Why there is a scale. FP8 covers a narrow range: E4M3 goes from 2**-9 to 448, E5M2 from 2**-16 to 57344. Gradients of
1e-6 would all become zero, activations of 1000 would be clipped. So every tensor is multiplied by a scale of its own
before the cast, and the scale is divided out again after the matrix product:

    q = round_to_fp8(clamp(x * scale, -fp8_max, fp8_max))        x is approximately q / scale

Which scale. The best one maps the tensor's largest magnitude, its amax, onto the format's largest value:
scale = fp8_max / amax. The amax of a tensor is known only after reading all of it, and with several GPUs only after a
reduction over them. To wait for that before every cast is slow ("current scaling"). Delayed scaling does not wait:

  1. The cast of step t uses a scale that earlier steps decided, so reading and casting are one pass.
  2. The same pass measures the amax of step t.
  3. After the step, the amaxes of all tensors are reduced over ranks in one operation. They enter the amax history,
     and the history decides the scale of step t + 1.

The price is one step of lag: a tensor that just grew is clipped once. Two settings limit that. The scale comes from the
largest amax of the last L steps, so one quiet step does not raise it. A `margin` m divides the scale by 2**m, which
leaves room for growth by that factor.

What rounds. The cast is the only step that loses precision: to 3 (E4M3) or 2 (E5M2) bits of mantissa, to nearest
even. Values beyond the range saturate; values below half the smallest step become zero ("underflow"). The amax is of
the unscaled tensor, so `amax * scale / fp8_max` over 1 means that the step was clipped.

The state. A slot is one quantised tensor of one layer (`<layer>.<role>`). All slots of a model are updated at once:

    history  float32 [L, slots]   row 0: staging, the running amax of the current window
                                  row 1: the oldest finished amax; row L-1: the newest
    scale    float32 [slots]      starts at 1

One roll of one E4M3 slot with L = 4 and margin 0:

    before   history [8, 4, 2, 1]   scale 112   (448 / 4; this step's amax of 8 was clipped: 8 * 112 = 896 > 448)
    after    history [0, 2, 1, 8]   scale 56    (448 / 8)

Source of the rule: Transformer Engine 2.20, `transformer_engine/common/recipe/delayed_scaling.cu` (`update`) and
`transformer_engine/pytorch/quantization.py`. `roll` adds two protections that Transformer Engine lacks: it drops an
infinite amax (`scrub`), and it keeps 1 / scale finite (`SMALLEST_SCALE`).

The second half of the file measures what casts lose: clipped share, underflow, SQNR. Libraries such as Transformer
Engine do not hand out their FP8 tensors, so these figures come from casts made here, of a sample of the same tensor.

`backends.slot_buffers.ScalingState` holds this state for a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.core.facts import ROLES


@dataclass(frozen=True, slots=True)
class Format:
    """An 8-bit float.

    mantissa_bits: explicit ones.
    min_exponent: of the smallest normal number.
    max: the largest finite value.
    dtype: torch's name of it.
    """

    name: str
    mantissa_bits: int
    min_exponent: int
    max: float
    dtype: torch.dtype


# E4M3 has the finer steps, for inputs and weights. E5M2 has the wider range, for gradients.
E4M3 = Format("e4m3", mantissa_bits=3, min_exponent=-6, max=448.0, dtype=torch.float8_e4m3fn)
E5M2 = Format("e5m2", mantissa_bits=2, min_exponent=-14, max=57344.0, dtype=torch.float8_e5m2)
FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}

_EXPONENT_MASK = 0x7F800000
_FP32_MANTISSA_BITS = 23
_FLT_MAX = torch.finfo(torch.float32).max
SMALLEST_SCALE = 2.0**-128 + 2.0**-149
"""The smallest float32 whose inverse is finite."""


# ---- The rule: history and scale


def update(
    history: Tensor, scale: Tensor, fp8_max: float | Tensor, margin: int = 0, algo: str = "max"
) -> tuple[Tensor, Tensor]:
    """Roll the amax history once and derive the next scale, for all slots at once: Transformer Engine's rule, bare.

    Backends call `roll`, which adds two protections.

    history: float32 [L, slots], L >= 2, row 0 staging.
    scale: float32 [slots].
    fp8_max: largest finite value of the slot's format, a float or float32 [slots].
    margin: powers of two of headroom.
    algo: "max" over the history, or "most_recent".

    Returns a new history and a new scale of the same shapes. The inputs are left alone.

    The rule, exactly as in Transformer Engine:
    - A slot whose staging amax is 0 was not used. It keeps history and scale.
    - Otherwise the staging amax moves to the last row and the oldest row leaves.
    - m is the maximum of the history before the roll, or the newest amax. scale = (fp8_max * 2**-margin) / m.
    - If m is not finite and positive, the scale stays. An Inf amax therefore freezes it until that row leaves.
    - An infinite scale becomes FLT_MAX.

    Raises ValueError on a wrong shape or algo.
    """
    if history.ndim != 2 or history.shape[0] < 2 or scale.shape != history.shape[1:]:
        given = f"{list(history.shape)}, {list(scale.shape)}"
        raise ValueError(f"history must be [L >= 2, slots] and scale [slots], got {given}")

    # The amax that the scale is made for. CUDA's fmax ignores NaN, so a NaN counts as no amax.
    newest = history[0]
    if algo == "max":
        reference = history.nan_to_num(nan=0.0, posinf=torch.inf).amax(dim=0)
    elif algo == "most_recent":
        reference = newest
    else:
        raise ValueError(f'algo must be "max" or "most_recent", got {algo!r}')

    used = newest != 0
    rolled = torch.cat([torch.zeros_like(history[:1]), history[2:], history[:1]])

    # Divide tensor by tensor: `float / tensor` multiplies by a reciprocal and is one ulp off.
    largest = torch.as_tensor(fp8_max, dtype=torch.float32, device=scale.device)
    target = largest * 2.0**-margin
    fresh = (target / reference).clamp_max(_FLT_MAX)
    valid = used & torch.isfinite(reference) & (reference > 0)
    return torch.where(used, rolled, history), torch.where(valid, fresh, scale)


def scrub(history: Tensor) -> tuple[Tensor, Tensor]:
    """Replace every infinite amax by 0. Returns the history and how many there were (int64, 0-d).

    Transformer Engine keeps an Inf amax for up to L-1 updates, and the scale is frozen meanwhile. Without the Inf, the
    scale recovers at the next update. A staging amax of 0 means that this step says nothing about the slot.
    """
    bad = torch.isinf(history)
    return history.masked_fill(bad, 0.0), bad.sum()


def roll(
    history: Tensor, scale: Tensor, fp8_max: Tensor, margin: int, algo: str, scrub_inf: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`update` with two protections: against infinite amaxes, and against a scale that is too small.

    Arguments as `update`'s; scrub_inf: drop infinite amaxes first. Returns history, scale and how many infinite amaxes
    were dropped (0-d).

    A huge amax or margin makes the scale so small that 1 / scale is infinite, and every product with it. The scale
    stays at SMALLEST_SCALE there.
    """
    dropped = torch.zeros((), dtype=torch.int64, device=history.device)
    if scrub_inf:
        history, dropped = scrub(history)
    history, scale = update(history, scale, fp8_max, margin, algo)
    return history, scale.clamp_min(SMALLEST_SCALE), dropped


# ---- The cast


def amax(x: Tensor) -> Tensor:
    """max|x| as float32 0-d. NaN is ignored, Inf is kept; 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    inf = float("inf")
    if x.is_cuda:
        # One pass and one reduction. On a CPU this norm is ten times slower than the lines below.
        numbers = torch.nan_to_num(x.detach(), nan=0.0, posinf=inf, neginf=-inf)
        return torch.linalg.vector_norm(numbers, ord=inf, dtype=torch.float32)
    magnitude = x.detach().abs()
    return torch.nan_to_num(magnitude, nan=0.0, posinf=inf).amax().float()


def quantize(x: Tensor, scale: Tensor | float, fmt: str) -> Tensor:
    """Raw FP8 values of x * scale, carried in bfloat16, which holds every E4M3 and E5M2 value exactly.

    x: any shape, float32, bfloat16 or float16.
    scale: float32 0-d, or broadcastable to x.
    fmt: "e4m3" or "e5m2".

    Rounds once, to nearest even. Saturates: Inf becomes the largest finite value. Keeps NaN and the sign of zero.
    The bits are the same on every torch version; torch's own casts to float8 saturate in some and give NaN in others.

    Raises KeyError on an unknown fmt.
    """
    spec = FORMATS[fmt]
    value = (x.detach().float() * scale).clamp_(-spec.max, spec.max)

    # The power of two under each value. Subnormals are spaced as the smallest normal numbers are.
    power = (value.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)
    power = power.clamp_min_(2.0**spec.min_exponent)

    # A float32 of this size has the spacing of FP8 at `value`. Adding it makes the FPU round the value to that spacing,
    # and subtracting it leaves the rounded value. The factor 1.5 keeps the sum in one binade for both signs.
    magic = power.mul_(1.5 * 2.0 ** (_FP32_MANTISSA_BITS - spec.mantissa_bits))
    rounded = (value + magic).sub_(magic)

    # The sum gives +0 for a negative value that rounds to zero.
    return torch.copysign(rounded, value).to(torch.bfloat16)


def cast(x: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """The values of `quantize` as an FP8 tensor, cast by torch.

    x: any shape, float32, bfloat16 or float16.
    scale: float32 [1] on the device of x.

    The clamp comes first, so torch's cast only rounds, which it does alike in every version. Raises KeyError on an
    unknown fmt.
    """
    spec = FORMATS[fmt]
    # With a dimension the scale takes part in type promotion: one kernel computes the product in float32.
    scaled = x.detach() * scale.reshape(1)
    return scaled.clamp_(-spec.max, spec.max).to(spec.dtype)


# ---- What a cast loses


ROW_SUMS = 6
CHANNEL_SUMS = 2
SUMS = ROW_SUMS + CHANNEL_SUMS
"""How many sums a slot has: those of `summed`, then those of `channel_stats`."""

CENTRED_ROWS = 192
ROWS_TOGETHER = 32

IN_BF16 = 2.0**-16
"""Smallest variation, as a share of a channel's energy, that BF16 can represent. Below it, BF16 loses it as well."""

_GRADIENT = ROLES.index("grad_output")


def quantization_stats(
    x: Tensor,
    quantized: Tensor,
    scale: Tensor | float,
    fmt: str,
) -> Tensor:
    """Sums behind the statistics of one cast, for each row of the last dimension: float64 [rows, 6].

    x: the unscaled tensor.
    quantized: `quantize(x, scale, fmt)`.

    The six sums of a row:
    - clipped: values with |x * scale| over the format's maximum.
    - nonzero: finite values other than zero.
    - flushed: nonzero values that became zero.
    - signal: sum of x^2.
    - noise: sum of error^2.
    - own: sum of min(1, error^2 / x^2), where every value weighs alike.

    Signal and noise leave out values that are not finite: one of them would hide everything else. `summed` adds up the
    rows.
    """
    wide = x.detach().float().reshape(-1, x.shape[-1])
    scaled = wide * scale
    quantized = quantized.reshape(wide.shape)
    finite = torch.isfinite(wide)
    nonzero = (wide != 0) & finite

    exact = torch.where(finite, wide, 0.0).double()
    error = torch.where(finite, exact - quantized.double() / scale, 0.0)

    # Each error relative to its own value: what small values lose does not vanish beside the large ones.
    relative = (error / torch.where(nonzero, exact, 1.0)).square().clamp_max(1.0)
    own = torch.where(nonzero, relative, 0.0)

    # Clipped values are found before the cast: after it they look like values that are the format's maximum.
    clipped = scaled.abs() > FORMATS[fmt].max
    flushed = nonzero & (quantized == 0)
    counts = [each.sum(dim=-1).double() for each in (clipped, nonzero, flushed)]
    energies = [each.sum(dim=-1) for each in (exact.square(), error.square(), own)]
    return torch.stack([*counts, *energies], dim=-1)


def channel_stats(x: Tensor, quantized: Tensor, scale: Tensor | float) -> Tensor:
    """How much x varies from row to row, and how much of that the cast loses: float64 [2].

    The two are sum of (x - mean)^2 and sum of (error - mean error)^2. A mean is over the rows of one channel, which is
    one index of the last dimension. x, quantized, scale: as of `quantization_stats`.

    A constant offset of a channel is in neither sum, so it cannot hide that the differences between rows are lost.

    A channel counts in neither sum if its rows differ by less than BF16 can represent (IN_BF16). Constant channels and
    single rows are such cases: BF16 would not help there. Values that are not finite count as 0.

    Of more than CENTRED_ROWS rows, evenly spread groups of ROWS_TOGETHER neighbours stand for all. Single rows at a
    fixed distance could all be alike, as the first tokens of samples are.
    """
    wide = x.detach().reshape(-1, x.shape[-1])
    quantized = quantized.reshape(-1, x.shape[-1])

    # Pick the rows, and with them their scales where each row has its own.
    rows = len(wide)
    count, gap = centred_rows(rows)
    if count < rows:
        place = torch.arange(count, device=x.device)
        place = place // ROWS_TOGETHER * gap + place % ROWS_TOGETHER
        wide, quantized = wide[place], quantized[place]
        if isinstance(scale, Tensor) and scale.numel() == rows:
            scale = scale[place]

    wide = wide.float()
    finite = torch.isfinite(wide)
    exact = torch.where(finite, wide, 0.0).double()
    error = torch.where(finite, exact - quantized.double() / scale, 0.0)

    varying, lost = _varying(exact), _varying(error)
    counts = varying > IN_BF16 * exact.square().sum(dim=0)
    sums = [torch.where(counts, each, 0.0).sum() for each in (varying, lost)]
    return torch.stack(sums) * (rows / count)


def centred_rows(rows: int) -> tuple[int, int]:
    """How many of `rows` rows `channel_stats` looks at, and the distance between the starts of two groups."""
    if rows <= CENTRED_ROWS:
        return rows, ROWS_TOGETHER
    groups = CENTRED_ROWS // ROWS_TOGETHER
    return CENTRED_ROWS, rows // groups


def _varying(values: Tensor) -> Tensor:
    """Sum of squares about each column's mean. Relative to the first row, so that a constant column gives exactly 0."""
    about = values - values[:1]
    squares = about.square().sum(dim=0)
    of_mean = about.sum(dim=0).square() / len(values)
    return (squares - of_mean).clamp_min_(0.0)


def by_rows(slot: int) -> bool:
    """Whether a slot is judged row by row, as gradients are. Slots come in threes, in the order of ROLES."""
    return slot % len(ROLES) == _GRADIENT


def summed(rows: Tensor, by_row: bool) -> Tensor:
    """The sums of one cast over all its rows, float64 [6]. Sums of several calls may be added.

    rows: of `quantization_stats`.
    by_row: `by_rows` of the slot.

    The last sum of a gradient is by row: nonzero * min(1, sum error^2 / sum x^2). Healthy runs lose single small values
    of a gradient, too. Only where a whole row is lost does a token or a sample teach nothing.
    """
    if by_row:
        signal, noise = rows[:, 3], rows[:, 4]
        lost = (noise / signal).clamp_max_(1.0).nan_to_num_(nan=0.0)
        weighted = rows[:, 1] * lost
        rows = torch.cat([rows[:, :5], weighted[:, None]], dim=1)
    return rows.sum(dim=0)


def sums_of(x: Tensor, quantized: Tensor, scale: Tensor, fmt: str, by_row: bool) -> Tensor:
    """What the cast of x lost: `summed`, then `channel_stats`, float64 [SUMS]. Sums of several calls may be added.

    x, quantized, scale: as of `quantization_stats`.
    by_row: as for `summed`.
    """
    of_rows = summed(quantization_stats(x, quantized, scale, fmt), by_row)
    return torch.cat([of_rows, channel_stats(x, quantized, scale)])


def cast_stats(x: Tensor, scale: Tensor, fmt: str, by_row: bool) -> Tensor:
    """The sums behind the statistics of the cast of x [r, c], float64 [parts, SUMS]. The parts are to be added up.

    scale: float32, 0-d or [r, 1].
    by_row: as for `summed`.

    Here there is one part. Kernels give one for each of their programs.
    """
    return sums_of(x, quantize(x, scale, fmt), scale, fmt, by_row)[None]


def shares(sums: Tensor) -> Tensor:
    """The statistics that the sums stand for, float32 [5, slots].

    sums: of `summed` and `channel_stats`, float64 [slots, SUMS].

    The five rows:
    - clipped share, of the non-zero finite values.
    - underflow: share of them that became zero.
    - SQNR in dB.
    - per-element SQNR in dB: every value, or row of a gradient, weighs alike.
    - SQNR in dB of what varies from row to row.

    NaN where nothing was sampled. Both SQNRs over values are NaN for a cast without error; the last is NaN as well for
    rows that are all alike.
    """
    clipped, nonzero, flushed, signal, noise, own, varying, lost = sums.unbind(dim=1)
    decibels = torch.where(noise > 0, 10 * torch.log10(signal / noise), torch.nan)
    even = torch.where(own > 0, -10 * torch.log10(own / nonzero), torch.nan)
    centred = torch.where(lost > 0, 10 * torch.log10(varying / lost), torch.nan)
    # 0 / 0, where nothing was sampled, is the NaN that is wanted.
    over = clipped / nonzero
    under = flushed / nonzero
    return torch.stack([over, under, decibels, even, centred]).float()


LARGEST = 1 << 20
"""Most elements measured of one tensor. Enough for a share, and about 20 MB of temporaries for a tensor of any size."""


def exact_scale(amax: Tensor, fmt: str) -> Tensor:
    """The scale that puts `amax` on the largest value of the format."""
    return FORMATS[fmt].max / amax


class SampledStats:
    """Adds up, for every slot, the sums over the casts of a sampled window. Nothing here waits for the device.

    formats: "e4m3" or "e5m2" for each slot.
    by_row: dynamic scales are one for each row of the last dimension, not one for the tensor.
    measure: `cast_stats`, or a faster equivalent on the device.
    scale_of: the dynamic scale of an amax in a format.
    sampling: whether the current window is measured.
    sums: float64 [slots, SUMS].
    """

    def __init__(
        self,
        formats: Sequence[str],
        device: torch.device,
        by_row: bool = False,
        measure: Callable[[Tensor, Tensor, str, bool], Tensor] = cast_stats,
        scale_of: Callable[[Tensor, str], Tensor] = exact_scale,
    ) -> None:
        self.formats = tuple(formats)
        self.by_row = by_row
        self.measure = measure
        self.scale_of = scale_of
        self.sampling = False
        self.sums = torch.zeros(len(self.formats), SUMS, dtype=torch.float64, device=device)

    def begin(self, sample: bool) -> None:
        """Start a window. sample: whether it is measured."""
        self.sampling = sample
        self.sums.zero_()

    @torch.no_grad()
    def add(
        self, slot: int, x: Tensor, scale: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Measure the cast of `x`. Does nothing in a window that is not sampled.

        scale: float32 0-d; None: dynamic, from `x` itself.
        dtype: `x` is rounded to it before the cast; None: it is not.
        """
        if not self.sampling or not x.numel():
            return
        fmt = self.formats[slot]
        whole = x.detach().reshape(-1, x.shape[-1])

        # Whole rows, evenly spread, so that every channel is in the sample.
        stride = -(-whole.numel() // LARGEST)
        rows = whole[::stride].to(dtype or whole.dtype)

        # Each operation is a launch for every slot, so a given scale, which is finite, is taken as it is.
        if scale is None:
            # One dynamic scale for the tensor comes from all of it, not from the sample.
            largest = rows.abs().amax(dim=-1, keepdim=True).float() if self.by_row else amax(whole)
            scale = self.scale_of(largest, fmt)
            # A tensor or row of zeros has an infinite scale. Under any other scale its values are zeros as well.
            scale = scale.nan_to_num(nan=1.0, posinf=1.0)
        parts = self.measure(rows, scale, fmt, by_rows(slot))
        self.sums[slot].add_(parts.sum(dim=0))

    def rows(self, mean: Callable[[Tensor], Tensor]) -> Tensor:
        """The statistics of `shares`, float32 [5, slots]; NaN where nothing was sampled. mean: over ranks."""
        return shares(mean(self.sums) if self.sampling else self.sums)
