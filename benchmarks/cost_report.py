"""What the runs of `benchmarks.cost` say: a table, a results file and a picture for each stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cost import CONTROLS, RECIPES, SIZES, STAGES, VARIANTS, read_lines
from benchmarks.intervals import Interval, t_interval
from harness.core.errors import DataError, Problem
from harness.core.files import write_json

ROOT = Path(__file__).resolve().parents[1]
TARGET = 0.0025
RESAMPLES = 10_000
Losses = Mapping[tuple[str, str, int], float]
"""(variant, corpus, seed) -> nats per byte; infinite for a run that ended in no number."""


@dataclass(frozen=True, slots=True)
class Row:
    """Of one variant: relative differences (0.01 is 1%). by_corpus, pooled: to the control; the pool has the mean over
    corpora of every seed that has all. boot: the pooled mean's 95% bootstrap interval. to_bf16: pooled, to the one
    unperturbed bf16 run of the seed. in_bf16: pooled, to the control, final weights evaluated in bf16. to_fp8: pooled,
    to fp8's runs. lost: runs that ended in no number, which are in none of these."""

    by_corpus: dict[str, Interval | None]
    pooled: Interval | None
    boot: tuple[float, float] | None
    to_bf16: Interval | None
    in_bf16: Interval | None
    to_fp8: Interval | None
    lost: int


def losses_of(rows: Sequence[Mapping[str, Any]], key: str) -> dict[tuple[str, str, int], float]:
    """The `key` of every run that did not fail.

    Raises DataError for runs of several machines or torches, and for one that is there twice.
    """
    kept = [row for row in rows if "failed" not in row]
    if len(made := {f"{row['machine']}, torch {row['torch']}" for row in kept}) > 1:
        fix = "report each machine's folders alone"
        raise DataError(Problem("runs of several machines do not pair", "; ".join(sorted(made)), fix=fix))
    found: dict[tuple[str, str, int], float] = {}
    for row in kept:
        name = (row["variant"], row["corpus"], row["seed"])
        if name in found:
            what = f"the run {' '.join(map(str, name))} is there twice"
            raise DataError(Problem(what, "--report", fix="leave the folder out that has it again"))
        found[name] = math.inf if row[key] is None else float(row[key])
    return found


def control_of(losses: Losses, corpus: str, seed: int, but: str = "") -> float | None:
    """Mean loss of the seed's controls, but for the one that is compared; None unless all of them ran."""
    found = [losses.get((name, corpus, seed)) for name in CONTROLS if name != but]
    known = [each for each in found if each is not None and math.isfinite(each)]
    return sum(known) / len(known) if len(known) == len(found) else None


def differences(losses: Losses, variant: str, corpus: str, base: str = "") -> dict[int, float]:
    """Seed -> loss / base - 1, of the pairs that are complete and finite. base: a variant; "": the control."""
    found: dict[int, float] = {}
    for name, of, seed in losses:
        if (name, of) != (variant, corpus):
            continue
        other = losses.get((base, corpus, seed)) if base else control_of(losses, corpus, seed, but=variant)
        loss = losses[name, of, seed]
        if other is not None and math.isfinite(loss) and math.isfinite(other):
            found[seed] = loss / other - 1
    return found


def pool(by_corpus: Sequence[Mapping[int, float]]) -> list[float]:
    """The mean over corpora of every seed that has all of them."""
    seeds = sorted(set[int].intersection(*(set(each) for each in by_corpus))) if by_corpus else []
    return [sum(each[seed] for each in by_corpus) / len(by_corpus) for seed in seeds]


def bootstrap(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95% percentile interval of the mean over resampled seeds (Efron, 1979); None under two."""
    if len(values) < 2:
        return None
    coins = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(np.asarray(values)[coins].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def _interval(values: Sequence[float]) -> Interval | None:
    return t_interval(values) if len(values) > 1 else None


def row_of(variant: str, losses: Losses, plain: Losses, corpora: Sequence[str]) -> Row:
    """plain: losses of the same runs, evaluated in bf16."""
    own = [differences(losses, variant, corpus) for corpus in corpora]
    pooled = pool(own)
    to_bf16 = pool([differences(losses, variant, corpus, "bf16") for corpus in corpora]) if variant != "bf16" else []
    return Row(
        {corpus: _interval(list(each.values())) for corpus, each in zip(corpora, own, strict=True)},
        _interval(pooled),
        bootstrap(pooled),
        _interval(to_bf16),
        _interval(pool([differences(plain, variant, corpus) for corpus in corpora])),
        _interval(pool([differences(losses, variant, corpus, "fp8") for corpus in corpora]))
        if variant not in ("fp8", *CONTROLS)
        else None,
        sum(not math.isfinite(loss) for (name, _, _), loss in losses.items() if name == variant),
    )


def best_recipes(rows: Mapping[str, Row], count: int = 2) -> list[str]:
    """The recipes of the lowest pooled mean that lost no run: those that the stage `confirm` is for."""
    means = {name: row.pooled.mean for name, row in rows.items() if name in RECIPES and row.pooled and not row.lost}
    return sorted(means, key=lambda name: means[name])[:count]


def show(stage: str, rows: Mapping[str, Row]) -> None:
    """Print the table."""
    size = STAGES[stage].size
    print(f"\nstage {stage}, {size}: relative difference in validation loss to the control, in percent: mean (95%)")
    corpora = STAGES[stage].corpora
    titles = [*corpora, "pooled", "bootstrap", "to bf16 alone", "evaluated in bf16", "to fp8"]
    print(f"{'variant':<17}{'n':>4}  " + "".join(f"{title:<27}" for title in titles))
    for name, row in rows.items():
        cells = [_cell(row.by_corpus[corpus]) for corpus in corpora] + [_cell(row.pooled)]
        cells.append(f"({row.boot[0]:+.3%} to {row.boot[1]:+.3%})".replace("%", "") if row.boot else "-")
        cells += [_cell(row.to_bf16), _cell(row.in_bf16), _cell(row.to_fp8)]
        lost = f"  LOST {row.lost}" if row.lost else ""
        n = row.pooled.n if row.pooled else 0
        print(f"{name:<17}{n:>4}  " + "".join(f"{cell:<27}" for cell in cells) + lost)
    fp8 = rows.get("fp8")
    if fp8 is not None and fp8.pooled is not None:
        holds = "holds" if fp8.pooled.high <= TARGET and not fp8.lost else "DOES NOT HOLD"
        print(f"target for fp8 {holds}: upper end {fp8.pooled.high:+.3%}, at most {TARGET:.2%}")
    if stage == "screen" and (best := best_recipes(rows)):
        print(f"for stage confirm: --recipes {' '.join(best)}")


def _cell(found: Interval | None) -> str:
    if found is None:
        return "-"
    return f"{found.mean:+.3%} ({found.low:+.3%} to {found.high:+.3%})".replace("%", "")


def draw(stage: str, rows: Mapping[str, Row], path: Path) -> None:
    """The pooled means with their 95% intervals, and each corpus's mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [(name, row, row.pooled) for name, row in rows.items() if row.pooled is not None]
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.26 * len(shown)), constrained_layout=True)
    axes.axvline(0, color="0.4", linewidth=0.8)
    axes.axvline(100 * TARGET, color="0.4", linewidth=0.8, linestyle=":", label="0.25%")
    corpora = STAGES[stage].corpora
    for place, (name, row, pooled) in enumerate(shown):
        colour = "0.45" if name in CONTROLS else "tab:red" if name == "fp8" else "tab:blue"
        colour = "tab:green" if name in RECIPES else colour
        axes.plot([100 * pooled.low, 100 * pooled.high], [place, place], color=colour, linewidth=2)
        axes.plot(100 * pooled.mean, place, "o", color=colour, markersize=5)
        for corpus, marker in zip(corpora, "x+", strict=False):
            if (found := row.by_corpus[corpus]) is not None:
                label = f"{corpus}, mean" if place == 0 else None
                axes.plot(100 * found.mean, place, marker, color="0.2", markersize=5, label=label)
    axes.set_yticks(range(len(shown)), [name for name, _, _ in shown])
    axes.invert_yaxis()
    axes.set_xlabel("validation loss over the control's, % (mean of both corpora, 95% interval)")
    axes.set_title(f"{STAGES[stage].size} parameters: FP8 (red), one part of it (blue), another recipe (green)")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")  # inside it would cover intervals
    figure.savefig(path, dpi=130)
    plt.close(figure)


def report(folders: Sequence[Path], results: Path | None) -> None:
    """Tables on the screen; `cost_<stage>.json` in benchmarks/results and a picture in docs/images, or both in
    `results`. Raises DataError if there is nothing, or no plan that fits."""
    every = read_lines(folders)
    if not every:
        raise DataError(Problem("there are no runs", ", ".join(map(str, folders)), fix="name folders of --out"))
    where = results or ROOT / "benchmarks" / "results"
    images = results or ROOT / "docs" / "images"
    for stage in STAGES:
        found = [row for row in every if row["stage"] == stage]
        if not found:
            continue
        losses, plain = losses_of(found, "loss"), losses_of(found, "loss_bf16")
        present = {name for name, _, _ in losses}
        rows = {name: row_of(name, losses, plain, STAGES[stage].corpora) for name in VARIANTS if name in present}
        show(stage, rows)
        failed = sum("failed" in row for row in found)
        if failed:
            print(f"{failed} runs FAILED and are in no figure")
        done = [row for row in found if "failed" not in row]
        record = {
            "command": "python -m benchmarks.cost --report",
            "made_by": f"python -m benchmarks.cost --stage {stage}",
            "machine": done[0]["machine"],
            "torch": done[0]["torch"],
            "size": asdict(SIZES[STAGES[stage].size]),
            "runs": len(done),
            "failed": failed,
            "seconds_of_all_runs": round(sum(row["seconds"] for row in done)),
            "target": TARGET,
            "variants": {name: asdict(VARIANTS[name]) | {"result": asdict(row)} for name, row in rows.items()},
            "losses": [
                [row["variant"], row["corpus"], row["seed"], row["loss"], row["loss_bf16"], row["train_loss"]]
                for row in sorted(done, key=lambda row: (row["variant"], row["corpus"], row["seed"]))
            ],
        }
        where.mkdir(parents=True, exist_ok=True)
        write_json(where / f"cost_{stage}.json", record)
        images.mkdir(parents=True, exist_ok=True)
        draw(stage, rows, images / f"cost_{stage}.png")
        print(f"wrote {where / f'cost_{stage}.json'} and {images / f'cost_{stage}.png'}")
