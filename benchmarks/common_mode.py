"""What FP8 leaves of a signal beside something that its rows share, which figure shows it, and what it costs a run.

    python -m benchmarks.common_mode [--seeds 0 1 2]

*figures*: a signal N(0, 1) of 448 rows and 64 channels, cast under the scale that fits, in E4M3 (inputs) and E5M2
(gradients). *offset*: the same constant in every value. *direction*: one pattern of signs over the channels, with a
size and sign of its own in each row. `left` is the energy of the signal over that of the error, in float64, both
without the part that was added. *groups*: some of the rows are smaller by a power of two.

*training*: a network of three Linears in which the second one's input, or output gradient, gets such a part, in units
of its own spread. The effect of the part on the output and on the gradients is removed in float32: in exact numbers it
changes nothing. Mean loss of the last 40 of 500 steps in bf16, FP8 without the fallback, and `fp8_hybrid` as shipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.results_file import write_results
from harness import Precision
from harness.core.files import atomic_file
from harness.precision import scaling
from harness.precision.recipe import Recipe, load_recipe
from harness.precision.scaling import FORMATS, SampledStats

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "common_mode_cpu.json"
PICTURE = ROOT / "docs" / "images" / "common_mode.png"
ROWS, CHANNELS = 448, 64
SLOTS = {"input": 0, "gradient": 2}
FORMAT_OF = ("e4m3", "e4m3", "e5m2")
SIZES = (0, 2, 4, 8, 16, 32, 64, 128)
TRAINED = (0, 16, 64)
STEPS, BATCH, IN, OUT_FEATURES = 500, 128, 32, 8
Row = dict[str, Any]


def cast_figures(x: Tensor, slot: int) -> Row:
    """Underflow, SQNR, even_db and centred_db of the cast of `x`."""
    stats = SampledStats(FORMAT_OF, torch.device("cpu"))
    stats.begin(sample=True)
    stats.add(slot, x, FORMATS[FORMAT_OF[slot]].max / x.abs().max())
    _, underflow, sqnr, even, centred = stats.rows(lambda sums: sums)[:, slot].tolist()
    return {"underflow": round(underflow, 3)} | {
        name: round(value, 1)
        for name, value in (("sqnr_db", sqnr), ("even_db", even), ("centred_db", centred))
    }


def left(x: Tensor, signal: Tensor, away: Tensor, fmt: str) -> float:
    """dB of `signal` over the error of x's cast, of both what is orthogonal to `away`, unit rows or columns."""
    scale = FORMATS[fmt].max / x.abs().max()
    error = x.double() - scaling.quantize(x, scale, fmt).double() / scale.double()
    kept = [each - each @ away @ away.T for each in (signal.double(), error)]
    return float(10 * torch.log10(kept[0].square().sum() / kept[1].square().sum()))


def figures() -> tuple[list[Row], list[Row]]:
    """The figures of offsets and directions, and of small groups."""
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(ROWS, CHANNELS, generator=generator)
    signs = torch.randn(CHANNELS, generator=generator).sign()
    factors = torch.randn(ROWS, 1, generator=generator)
    parts: list[Row] = []
    groups: list[Row] = []
    for role, slot in SLOTS.items():
        fmt = FORMAT_OF[slot]
        for name, pattern, common in (
            ("offset", torch.ones(CHANNELS), torch.ones(ROWS, 1)),
            ("direction", signs, factors),
        ):
            away = (pattern / pattern.norm()).double()[:, None]
            for size in SIZES:
                x = signal + size * common * pattern
                kept = {"left_db": round(left(x, signal, away, fmt), 1)}
                parts.append(
                    {"role": role, "part": name, "size": size} | kept | cast_figures(x, slot)
                )
        for bits in (-16, -24, -34):
            for few in (7, 28, 64, 75):
                x = signal.clone()
                x[:few] *= 2.0**bits
                groups.append(
                    {"role": role, "bits": bits, "rows": round(few / ROWS, 3)}
                    | cast_figures(x, slot)
                )
    return parts, groups


class _Onto(torch.autograd.Function):
    """`part` (unit size), times the gradient's own size, is added to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Tensor) -> Tensor:
        ctx.part = part
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient + ctx.part * gradient.square().mean().sqrt(), None


class Faulty(nn.Module):
    """Three Linears, of which the second has rows [BATCH, 1] times pattern [64] added to its input or gradient."""

    def __init__(self, role: str, rows: Tensor, pattern: Tensor) -> None:
        super().__init__()
        self.role, self.rows, self.pattern = role, rows, pattern
        self.first, self.second, self.third = (
            nn.Linear(IN, 64),
            nn.Linear(64, 64),
            nn.Linear(64, OUT_FEATURES),
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [BATCH, IN]."""
        hidden = functional.layer_norm(torch.relu(self.first(x)).float(), (64,))
        if self.role == "input":
            out = self.second(hidden + self.rows * self.pattern).float()
            out = out - self.rows * (self.second.weight.float() @ self.pattern)
        else:
            # Orthogonal to `rows`, the input gets no weight gradient from the part, and passes none of it on.
            unit = self.rows / self.rows.norm().clamp_min(1e-9)
            out = self.second(hidden - unit @ (unit.T @ hidden)).float()
            out = _Onto.apply(out, self.rows * self.pattern)
        return self.third(torch.relu(functional.layer_norm(out, (64,))))


def _recipe(name: str) -> Recipe:
    if name == "bf16":
        return load_recipe("bf16")
    given = load_recipe("fp8_hybrid").model_dump()
    given["fallback"]["enabled"] = name == "fallback"
    return Recipe.model_validate(given)


def train(name: str, role: str, part: str, size: float, seed: int) -> tuple[float, dict[str, int]]:
    """Mean loss of the last 40 steps, and the step at which each layer first ran in BF16."""
    torch.manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(IN, 64), nn.Tanh(), nn.Linear(64, OUT_FEATURES))
    ones = part == "offset"
    pattern = torch.ones(64) if ones else torch.randn(64).sign()
    rows = size * (torch.ones(BATCH, 1) if ones else torch.randn(BATCH, 1))
    precision = Precision(_recipe(name))
    model = precision.prepare(Faulty(role, rows, pattern))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(seed + 1)
    losses: list[float] = []
    out: dict[str, int] = {}
    for step in range(1, STEPS + 1):
        for layer in precision.demoted:
            out.setdefault(layer, step)
        x = torch.randn(BATCH, IN, generator=generator)
        with torch.no_grad():
            target = 3 * teacher(x)
        with precision.context():
            loss = functional.mse_loss(model(x).float(), target)
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return sum(losses[-40:]) / 40, out


def training(seeds: Sequence[int]) -> list[Row]:
    """Each size of each part in either role."""
    found: list[Row] = []
    for role in SLOTS:
        for part in ("offset", "direction"):
            for size in TRAINED:
                for seed in seeds:
                    runs = {
                        name: train(name, role, part, size, seed)
                        for name in ("bf16", "plain", "fallback")
                    }
                    row = {"role": role, "part": part, "size": size, "seed": seed}
                    row |= {name: round(loss, 5) for name, (loss, _) in runs.items()}
                    found.append(row | {"left": runs["fallback"][1]})
                    print(found[-1], flush=True)
    return found


def draw(parts: Sequence[Mapping[str, Any]], path: Path) -> None:
    """What is left of the signal, and what three figures say, over the size of the part."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    labels = {
        "left_db": "left of the signal",
        "sqnr_db": "SQNR",
        "even_db": "even_db",
        "centred_db": "centred_db",
    }
    for place, role in zip(axes, SLOTS, strict=True):
        for axis, part in zip(place, ("offset", "direction"), strict=True):
            rows = [
                row for row in parts if row["role"] == role and row["part"] == part and row["size"]
            ]
            for name, label in labels.items():
                style = {"left_db": "k-", "centred_db": "o--"}.get(name, "--")
                axis.plot(
                    [row["size"] for row in rows],
                    [row[name] for row in rows],
                    style,
                    label=label,
                    markersize=4,
                )
            axis.set_xscale("log", base=2)
            axis.set_title(f"{role}: {part}", fontsize=10)
            axis.grid(color="#e5e5e5", linewidth=0.6)
    axes[0][0].legend(frameon=False, fontsize=8)
    for axis in axes[1]:
        axis.set_xlabel("size of the part; the signal is N(0, 1)")
    for axis in axes[:, 0]:
        axis.set_ylabel("dB")
    with atomic_file(path) as stream:
        figure.savefig(stream, format="png", facecolor="white", dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print, draw and keep the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    parts, groups = figures()
    for row in (*parts, *groups):
        print(row)
    results = {"parts": parts, "groups": groups, "training": training(options.seeds)}
    draw(parts, PICTURE)
    write_results(options.out, "benchmarks.common_mode", arguments, 1, results)


if __name__ == "__main__":
    main()
