"""What FP8 leaves of a signal beside something that all rows share, and which figure shows it: tables for docs.

    python -m benchmarks.common_mode

A signal N(0, 1) of 448 rows and 64 channels, cast under the scale that fits, in E4M3 (inputs) and E5M2 (gradients):

*offset*: the same constant in every value. *direction*: one pattern of signs over the channels, of a size and sign of
its own in each row. *groups*: some of the rows are smaller by a power of two. `left` is what is left of the signal by
definition, in float64: its energy over that of the error, both without the part that was put there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.precision import scaling
from harness.precision.scaling import FORMATS, SampledStats

ROWS, CHANNELS = 448, 64
SLOTS = {"input": 0, "gradient": 2}
FORMAT_OF = ("e4m3", "e4m3", "e5m2")
SIZES = (0, 4, 8, 16, 32, 64, 128)


def figures(x: Tensor, slot: int) -> tuple[float, float, float, float]:
    """Underflow, SQNR, even_db and centred_db of the cast of `x`."""
    stats = SampledStats(FORMAT_OF, torch.device("cpu"))
    stats.begin(sample=True)
    stats.add(slot, x, FORMATS[FORMAT_OF[slot]].max / x.abs().max())
    _, underflow, sqnr, even, centred = stats.rows(lambda sums: sums)[:, slot].tolist()
    return underflow, sqnr, even, centred


def left(x: Tensor, signal: Tensor, away: Tensor, fmt: str) -> float:
    """dB of `signal` over the error of x's cast, of both what is orthogonal to `away`, unit rows or columns."""
    scale = FORMATS[fmt].max / x.abs().max()
    error = x.double() - scaling.quantize(x, scale, fmt).double() / scale.double()
    kept = [each - each @ away @ away.T for each in (signal.double(), error)]
    return float(10 * torch.log10(kept[0].square().sum() / kept[1].square().sum()))


def main() -> None:
    """Print the three tables."""
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(ROWS, CHANNELS, generator=generator)
    signs = torch.randn(CHANNELS, generator=generator).sign()
    factors = torch.randn(ROWS, 1, generator=generator)
    for role, slot in SLOTS.items():
        fmt = FORMAT_OF[slot]
        for name, pattern, common in (
            ("offset", torch.ones(CHANNELS), torch.ones(ROWS, 1)),
            ("direction", signs, factors),
        ):
            away = (pattern / pattern.norm()).double()[:, None]
            for size in SIZES:
                x = signal + size * common * pattern
                _, sqnr, even, centred = figures(x, slot)
                told = f"left {left(x, signal, away, fmt):5.1f}  SQNR {sqnr:5.1f}  even {even:5.1f}"
                print(f"{role:<9}{name:<10}{size:>5}  {told}  centred {centred:5.1f}")
        for bits in (-16, -24, -34):
            for few in (7, 28, 64, 75):
                x = signal.clone()
                x[:few] *= 2.0**bits
                underflow, sqnr, even, centred = figures(x, slot)
                told = f"underflow {underflow:.3f}  SQNR {sqnr:5.1f}  even {even:5.1f}  centred {centred:5.1f}"
                print(f"{role:<9}groups  2^{bits}  {few / ROWS:.3f} of the rows  {told}")


if __name__ == "__main__":
    main()
