"""Delayed scaling: Transformer Engine's rule for amax history, scale and the FP8 cast, as pure functions.

The state of a whole model under it is `backends.slot_buffers.ScalingState`.

A slot is one quantised tensor. Its state is a column of `history` [L, slots] (row 0 is staging: the running amax of
the current window; the newest finished amax is row L-1) and an entry of `scale` [slots], both float32. A tensor x is
stored as q = round_to_fp8(clamp(x * scale)), and x is approximately q / scale.

Source of the rule: Transformer Engine 2.20, `transformer_engine/common/recipe/delayed_scaling.cu` and
`transformer_engine/pytorch/quantization.py`.

Where a library makes the casts and hands out no FP8 tensor, clipped share, underflow and SQNRs come from casts of our
own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.core.facts import ROLES


@dataclass(frozen=True, slots=True)
class Format:
    """An 8-bit float: explicit mantissa bits, smallest normal exponent, largest finite value, torch dtype."""

    name: str
    mantissa_bits: int
    min_exponent: int
    max: float
    dtype: torch.dtype


E4M3 = Format("e4m3", mantissa_bits=3, min_exponent=-6, max=448.0, dtype=torch.float8_e4m3fn)
E5M2 = Format("e5m2", mantissa_bits=2, min_exponent=-14, max=57344.0, dtype=torch.float8_e5m2)
FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}

_EXPONENT_MASK = 0x7F800000
_FP32_MANTISSA_BITS = 23
_FLT_MAX = torch.finfo(torch.float32).max
SMALLEST_SCALE = 2.0**-128 + 2.0**-149
"""The smallest float32 whose inverse is finite."""


def update(
    history: Tensor, scale: Tensor, fp8_max: float | Tensor, margin: int = 0, algo: str = "max"
) -> tuple[Tensor, Tensor]:
    """One roll of the amax history and the scale it yields, for all slots at once.

    history: float32 [L, slots], L >= 2, row 0 staging. scale: float32 [slots]. fp8_max: largest finite value of the
    slot's format, a float or float32 [slots]. margin: powers of two of headroom. algo: "max" over the history or
    "most_recent". Returns new tensors of the same shapes; the inputs are left alone.

    A slot whose staging amax is 0 (unused) keeps history and scale. Otherwise the staging amax moves to the last row
    and scale = (fp8_max * 2**-margin) / m, m being the max of the history or the newest amax, if m is finite and
    positive, else unchanged; an infinite scale becomes FLT_MAX. Exactly as TE: an Inf amax therefore freezes the
    scale until it leaves the window (see `scrub`).

    Raises ValueError on a wrong shape or algo.
    """
    if history.ndim != 2 or history.shape[0] < 2 or scale.shape != history.shape[1:]:
        raise ValueError(
            f"history must be [L >= 2, slots] and scale [slots], got {list(history.shape)}, {list(scale.shape)}"
        )
    newest = history[0]
    if algo == "max":
        reference = history.nan_to_num(nan=0.0, posinf=torch.inf).amax(
            dim=0
        )  # fmax: a NaN is no amax
    elif algo == "most_recent":
        reference = newest
    else:
        raise ValueError(f'algo must be "max" or "most_recent", got {algo!r}')
    used = newest != 0
    rolled = torch.cat([torch.zeros_like(history[:1]), history[2:], history[:1]])
    # Divide tensor by tensor: `float / tensor` multiplies by a reciprocal and is one ulp off.
    target = torch.as_tensor(fp8_max, dtype=torch.float32, device=scale.device) * 2.0**-margin
    fresh = (target / reference).clamp_max(_FLT_MAX)
    valid = used & torch.isfinite(reference) & (reference > 0)
    return torch.where(used, rolled, history), torch.where(valid, fresh, scale)


def scrub(history: Tensor) -> tuple[Tensor, Tensor]:
    """`history` with every infinite amax replaced by 0, and how many there were (int64, 0-d).

    TE keeps an Inf amax for up to L-1 updates, with the scale frozen meanwhile; scrubbed, the scale recovers at the
    next update. Only the amax is touched: a scrubbed staging value means "no evidence this step".
    """
    bad = torch.isinf(history)
    return history.masked_fill(bad, 0.0), bad.sum()


def roll(
    history: Tensor, scale: Tensor, fp8_max: Tensor, margin: int, algo: str, scrub_inf: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`update` as a run does it: (history, scale, how many infinite amaxes were dropped first, 0-d).

    Arguments as `update`'s. A margin that leaves less than the inverse of FLT_MAX would make 1 / scale, and with it
    every product, infinite: the scale stays at SMALLEST_SCALE there.
    """
    dropped = torch.zeros((), dtype=torch.int64, device=history.device)
    if scrub_inf:
        history, dropped = scrub(history)
    history, scale = update(history, scale, fp8_max, margin, algo)
    return history, scale.clamp_min(SMALLEST_SCALE), dropped


def amax(x: Tensor) -> Tensor:
    """max|x| as float32 0-d, NaN ignored, Inf kept; 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    inf = float("inf")
    if (
        x.is_cuda
    ):  # one pass and one reduction; on a CPU the norm is ten times slower than what follows
        numbers = torch.nan_to_num(x.detach(), nan=0.0, posinf=inf, neginf=-inf)
        return torch.linalg.vector_norm(numbers, ord=inf, dtype=torch.float32)
    magnitude = x.detach().abs()
    return torch.nan_to_num(magnitude, nan=0.0, posinf=inf).amax().float()


def quantize(x: Tensor, scale: Tensor | float, fmt: str) -> Tensor:
    """Raw FP8 values of x * scale, carried in bfloat16 (which holds every E4M3 and E5M2 value exactly).

    x: any shape, float32, bfloat16 or float16. scale: float32 0-d (or broadcastable). fmt: "e4m3" | "e5m2". Rounds
    once, to nearest even; saturates (Inf becomes the largest finite value), keeps NaN and the sign of zero.
    The same bits on every torch version: raw casts to float8 saturate in some and give NaN in others.

    Method: adding and subtracting 1.5 * 2**(e + 23 - mantissa_bits), e the exponent of the value (at least the
    smallest normal one), leaves mantissa_bits of mantissa, rounded by the FPU. Raises KeyError on an unknown fmt.
    """
    spec = FORMATS[fmt]
    value = (x.detach().float() * scale).clamp_(-spec.max, spec.max)
    exponent = (
        (value.view(torch.int32) & _EXPONENT_MASK)
        .view(torch.float32)
        .clamp_min_(2.0**spec.min_exponent)
    )
    magic = exponent.mul_(1.5 * 2.0 ** (_FP32_MANTISSA_BITS - spec.mantissa_bits))
    return torch.copysign((value + magic).sub_(magic), value).to(torch.bfloat16)


def cast(x: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """What `quantize` carries, as FP8: the same value of every element, cast straight by torch.

    x: any shape, float32, bfloat16 or float16. scale: float32 [1] on the device of x. Clamped before the cast, which
    therefore rounds and nothing else, on every torch version. Raises KeyError on an unknown fmt.
    """
    spec = FORMATS[fmt]
    # With a dimension the scale takes part in type promotion: one kernel for the product in float32.
    return (x.detach() * scale.reshape(1)).clamp_(-spec.max, spec.max).to(spec.dtype)


ROW_SUMS, CHANNEL_SUMS = 6, 2
SUMS = ROW_SUMS + CHANNEL_SUMS
"""How many sums a slot has: those of `summed`, then those of `channel_stats`."""
CENTRED_ROWS, ROWS_TOGETHER = 192, 32
IN_BF16 = 2.0**-16
"""The share of a channel's energy that BF16 still tells from the rest: it keeps no more of what varies by less."""
_GRADIENT = ROLES.index("grad_output")


def quantization_stats(x: Tensor, quantized: Tensor, scale: Tensor | float, fmt: str) -> Tensor:
    """Sums behind the statistics of one cast, of each row of the last dimension: float64 [r, 6] = clipped, nonzero,
    flushed, sum x^2, sum error^2, and the sum of min(1, error^2 / x^2).

    x: the unscaled tensor. quantized: `quantize(x, scale, fmt)`. clipped: |x * scale| over the largest finite value.
    flushed: nonzero values that became zero. Non-finite values are left out of both sums of squares, as one of them
    would hide everything else. See `summed`.
    """
    wide = x.detach().float().reshape(-1, x.shape[-1])
    scaled, quantized = wide * scale, quantized.reshape(wide.shape)
    finite = torch.isfinite(wide)
    nonzero = (wide != 0) & finite
    exact = torch.where(finite, wide, 0.0).double()
    error = torch.where(finite, exact - quantized.double() / scale, 0.0)
    # Of each value beside itself: what is lost of the small ones does not drown in the large ones.
    own = torch.where(
        nonzero, (error / torch.where(nonzero, exact, 1.0)).square().clamp_max(1.0), 0.0
    )
    counts = ((scaled.abs() > FORMATS[fmt].max), nonzero, nonzero & (quantized == 0))
    sums = [count.sum(dim=-1).double() for count in counts]
    return torch.stack(
        [*sums, *(each.sum(dim=-1) for each in (exact.square(), error.square(), own))], dim=-1
    )


def channel_stats(x: Tensor, quantized: Tensor, scale: Tensor | float) -> Tensor:
    """What varies from row to row, and what the cast loses of that: float64 [2] = sum of (x - mean)^2 and sum of
    (error - mean error)^2, each mean being over the rows of one channel (a place in the last dimension).

    x, quantized, scale: as of `quantization_stats`. Non-finite values count as 0. An offset that every row has is in
    neither sum: without it, what is left of the rows' differences shows. A channel counts in neither where rows differ
    by no more than BF16 can tell (IN_BF16): constant ones, a single row; in BF16 they would be no better off. Of more
    than CENTRED_ROWS rows, stretches of ROWS_TOGETHER stand for all, evenly spread: rows one by one could all be, say,
    the first tokens of their samples, which are alike.
    """
    wide, quantized = x.detach().reshape(-1, x.shape[-1]), quantized.reshape(-1, x.shape[-1])
    rows, (count, gap) = len(wide), centred_rows(len(wide))
    if count < rows:
        place = torch.arange(count, device=x.device)
        place = place // ROWS_TOGETHER * gap + place % ROWS_TOGETHER
        wide, quantized = wide[place], quantized[place]
        scale = scale[place] if isinstance(scale, Tensor) and scale.numel() == rows else scale
    wide = wide.float()
    finite = torch.isfinite(wide)
    exact = torch.where(finite, wide, 0.0).double()
    error = torch.where(finite, exact - quantized.double() / scale, 0.0)
    varying, lost = _varying(exact), _varying(error)
    told = varying > IN_BF16 * exact.square().sum(dim=0)
    return torch.stack([torch.where(told, each, 0.0).sum() for each in (varying, lost)]) * (
        rows / count
    )


def centred_rows(rows: int) -> tuple[int, int]:
    """How many of so many rows `channel_stats` looks at, and how far apart its stretches of them begin."""
    if rows <= CENTRED_ROWS:
        return rows, ROWS_TOGETHER
    return CENTRED_ROWS, rows // (CENTRED_ROWS // ROWS_TOGETHER)


def _varying(values: Tensor) -> Tensor:
    """Sums of squares about each column's mean. Taken from the first row, so that what is constant gives 0."""
    about = values - values[:1]
    return (about.square().sum(dim=0) - about.sum(dim=0).square() / len(values)).clamp_min_(0.0)


def by_rows(slot: int) -> bool:
    """Whether what a slot loses is told by its rows: a gradient. Slots come in threes, in the order of ROLES."""
    return slot % len(ROLES) == _GRADIENT


def summed(rows: Tensor, slot: int) -> Tensor:
    """Of all rows of a cast, float64 [6]; sums of several calls may be added. rows: of `quantization_stats`.

    A gradient's last sum is of its rows instead, each beside itself: nonzero * min(1, sum error^2 / sum x^2). Single
    small values of a gradient are lost in healthy runs, too; where a whole row is, a token or a sample teaches nothing.
    """
    if by_rows(slot):
        lost = (rows[:, 4] / rows[:, 3]).clamp_max_(1.0).nan_to_num_(nan=0.0)
        rows = torch.cat([rows[:, :5], (rows[:, 1] * lost)[:, None]], dim=1)
    return rows.sum(dim=0)


def cast_stats(x: Tensor, scale: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """`quantization_stats` and `channel_stats` of the cast of x [r, c] under `scale`, float32 0-d or [r, 1].

    The second may come as parts of the sums, [parts, 2].
    """
    quantized = quantize(x, scale, fmt)
    return quantization_stats(x, quantized, scale, fmt), channel_stats(x, quantized, scale)[None]


def shares(sums: Tensor) -> Tensor:
    """Clipped share, underflow, SQNR in dB, that with every value (of gradients: row) weighing alike, and that of
    what varies from row to row, float32 [5, slots].

    sums: of `summed` and `channel_stats`, float64 [slots, SUMS]. The shares are of the non-zero finite values. NaN
    where nothing was sampled; a cast without any error has no SQNR either, nor one of rows that are alike
    the last.
    """
    clipped, nonzero, flushed, signal, noise, own, varying, lost = sums.unbind(dim=1)
    decibels = torch.where(noise > 0, 10 * torch.log10(signal / noise), torch.nan)
    even = torch.where(own > 0, -10 * torch.log10(own / nonzero), torch.nan)
    centred = torch.where(lost > 0, 10 * torch.log10(varying / lost), torch.nan)
    return torch.stack([clipped / nonzero, flushed / nonzero, decibels, even, centred]).float()


LARGEST = 1 << 20
"""Elements looked at in one tensor: enough for a share, and some 20 MB of temporaries, however large the tensor."""


class SampledStats:
    """Sums over the sampled casts of a window, for every slot.

    formats: "e4m3" or "e5m2" for each slot. sampling: on in windows that are measured. by_row: dynamic scales are one
    for each row of the last dimension, not one for the tensor. measure: `cast_stats`, or what is as good and faster on
    the device. Nothing here waits for the device.
    """

    def __init__(
        self,
        formats: Sequence[str],
        device: torch.device,
        by_row: bool = False,
        measure: Callable[[Tensor, Tensor, str], tuple[Tensor, Tensor]] = cast_stats,
    ) -> None:
        self.formats, self.by_row, self.measure, self.sampling = (
            tuple(formats),
            by_row,
            measure,
            False,
        )
        self.sums = torch.zeros(len(self.formats), SUMS, dtype=torch.float64, device=device)

    def begin(self, sample: bool) -> None:
        """A window begins."""
        self.sampling = sample
        self.sums.zero_()

    @torch.no_grad()
    def add(
        self, slot: int, x: Tensor, scale: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """What the cast of `x` does, in a sampled window only.

        scale: float32 0-d; None: dynamic, from `x` itself. dtype: what `x` is rounded to before the cast, if to any.
        """
        if not self.sampling or not x.numel():
            return
        fmt = self.formats[slot]
        rows = x.detach().reshape(-1, x.shape[-1])
        if scale is None and not self.by_row:
            scale = FORMATS[fmt].max / amax(rows)
        # Whole rows, evenly spread: every channel is in the sample.
        rows = rows[:: -(-rows.numel() // LARGEST)].to(dtype or rows.dtype)
        if scale is None:
            scale = FORMATS[fmt].max / rows.abs().amax(dim=-1, keepdim=True).float()
        # A tensor or row of zeros has an infinite scale; under any other it is zeros as well.
        scale = torch.where(torch.isfinite(scale), scale, 1.0)
        of_rows, of_channels = self.measure(rows, scale, fmt)
        self.sums[slot] += torch.cat([summed(of_rows, slot), of_channels.sum(dim=0)])

    def rows(self, mean: Callable[[Tensor], Tensor]) -> Tensor:
        """float32 [5, slots]: as of `shares`; NaN where not sampled. mean: over ranks."""
        return shares(mean(self.sums) if self.sampling else self.sums)
