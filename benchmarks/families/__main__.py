"""What the guard does to families of courses: the healthy ones that it halts, the harmful ones that it lets through.

    python -m benchmarks.families

Every family of `families.yaml` goes through the guard's rules as shipped, and then with the LIMITS times each factor:
below 1 the guard is stricter. A healthy family that is halted is a false halt. A harmful one that is not halted is let
through. The rules, the budgets and the rollbacks are the harness's own (`course`); there is no model behind a course.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.families import Family, load_families
from benchmarks.families.course import drive
from harness.core.config import GuardConfig
from harness.core.files import atomic_file, write_json

ROOT = Path(__file__).resolve().parents[2]
LIMITS = ("spike_sigma", "skip_growth")
"""The settings that a factor scales: those that a course can reach."""
FACTORS = (0.5, 1.0, 2.0, 4.0)
RESULTS = ROOT / "benchmarks" / "results" / "families_cpu.json"


def scaled(factor: float) -> dict[str, Any]:
    """The guard's settings with its limits multiplied by `factor`."""
    shipped = GuardConfig()
    return {key: max(1.01, factor * getattr(shipped, key)) for key in LIMITS}


def judge(family: Family, factor: float) -> dict[str, Any]:
    """A row: how the course of a family ended, and what the guard did on the way."""
    course = drive(family.formula(), family.steps, **scaled(factor))
    codes: dict[str, int] = {}
    for code, _ in course.told:
        codes[code] = codes.get(code, 0) + 1
    return {
        "family": family.name,
        "kind": family.kind,
        "factor": factor,
        "outcome": course.status,
        "skipped": len(course.skipped),
        "rollbacks": len(course.rollbacks),
        "events": codes,
        "why": course.reason,
    }


def curve(rows: Sequence[dict[str, Any]], factors: Sequence[float]) -> list[dict[str, float]]:
    """For each factor: the healthy families that were halted, and the harmful ones that were not."""
    points: list[dict[str, float]] = []
    for factor in factors:
        here = [row for row in rows if row["factor"] == factor]
        halted = sum(row["kind"] == "healthy" and row["outcome"] == "halted" for row in here)
        through = sum(row["kind"] == "harmful" and row["outcome"] != "halted" for row in here)
        points.append({"factor": factor, "false halts": halted, "let through": through})
    return points


def draw(points: Sequence[dict[str, float]], families: Sequence[Family], path: Path) -> None:
    """False halts and harm let through over the factor."""
    count = {kind: sum(each.kind == kind for each in families) for kind in ("healthy", "harmful")}
    factors = [point["factor"] for point in points]
    figure = Figure(figsize=(6.5, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        factors,
        [point["false halts"] for point in points],
        marker="o",
        label=f"of {count['healthy']} healthy families, halted",
    )
    axes.plot(
        factors,
        [point["let through"] for point in points],
        marker="s",
        label=f"of {count['harmful']} harmful families, let through",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(factors, [f"{factor:g}" for factor in factors])
    axes.set_xlabel("limits of loss and norm, times those shipped")
    axes.set_ylabel("families")
    axes.set_ylim(bottom=-0.5)
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.legend(frameon=False, fontsize=9)
    with atomic_file(path) as stream:
        figure.savefig(stream, format="png", facecolor="white", dpi=120)


def main() -> None:
    """Judge all, print the table, write the record and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    families = load_families()
    rows: list[dict[str, Any]] = []
    for factor in FACTORS:
        for family in families:
            row = judge(family, factor)
            rows.append(row)
            done = f"{row['outcome']:<7} {row['skipped']:>4} skipped, {row['rollbacks']} rollbacks"
            print(f"x{factor:<5g}{family.kind:<8} {family.name:<56}{done}", flush=True)
    points = curve(rows, FACTORS)
    for point in points:
        print(
            f"limits x{point['factor']:g}: {point['false halts']} false halts, {point['let through']} let through"
        )
    record = {
        "command": "python -m benchmarks.families",
        "limits": list(LIMITS),
        "curve": points,
        "courses": rows,
    }
    write_json(RESULTS, record)
    draw(points, families, ROOT / "docs" / "images" / "families.png")


if __name__ == "__main__":
    main()
