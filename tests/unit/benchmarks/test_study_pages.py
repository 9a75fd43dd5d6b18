"""The pages of the studies have the figures of the results files, to the digit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.evidence import GRID
from benchmarks.held_out import HARMFUL
from benchmarks.held_out_pictures import summary
from benchmarks.intervals import binomial_upper
from harness.core.files import read_json

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"
FALLBACK = " ".join((ROOT / "docs" / "fallback.md").read_text().split())
COST = (ROOT / "docs" / "fp8_cost.md").read_text()


def percent(figures: dict[str, float]) -> str:
    """As the page has an interval."""
    mean, low, high = (f"{100 * figures[key]:+.2f}" for key in ("mean", "low", "high"))
    return re.sub(r"[+-]0\.00", "0.00", f"{mean} ({low} to {high})")


def test_held_out_faults() -> None:
    faults = read_json(RESULTS / "evidence_held_out_cpu.json")["faults"]
    lines = [line for line in summary(faults).splitlines() if line.startswith("| ") and "(" in line]
    assert len(lines) > 12
    assert [line for line in lines if line not in FALLBACK] == []
    harmful = [row for row in faults if row["harm"] >= HARMFUL]
    seen = sum(bool(row["left"]) for row in harmful)
    assert f"Of {len(harmful)} harmful faults {seen} were seen" in FALLBACK
    still = [row for row in harmful if row["duty"] == "every step" and row["family"] != "input, a drifting channel"]
    late = sorted(row["left"] for row in still if row["left"] > 8)
    missed = sum(not row["left"] for row in still)
    soon = len(still) - len(late) - missed
    told = f"Of {len(still)} harmful faults at every step that do not drift {soon} left within 8 steps"
    assert told in FALLBACK
    assert f"{len(late)} after {late[0]} to {late[-1]}, and {missed} not at all" in FALLBACK


def test_healthy_runs() -> None:
    record = read_json(RESULTS / "evidence_healthy_cpu.json")
    runs = record["runs"]
    healthy = [row for row in runs if row["healthy"]]
    assert [(row["dim"], row["lr"], row["warmup"]) for row in runs] == [each for each in GRID for _ in range(2)]
    assert (record["healthy"], record["with a demotion"]) == (len(healthy), 0)
    assert not any(row["demotions"] for row in runs)
    assert len(healthy) >= 24
    upper = binomial_upper(0, len(healthy))
    assert record["upper bound"] == pytest.approx(upper)
    assert f"no layer left FP8 in any of the {len(runs)} runs; in {len(healthy)} of them" in FALLBACK
    assert f"(95% upper bound of the chance of a demotion: {upper:.0%})" in FALLBACK


def test_cost_of_fp8() -> None:
    variants = read_json(RESULTS / "cost_screen.json")["variants"]
    cell = r"[-+]?\d\.\d\d \([-+]?\d\.\d\d to [-+]?\d\.\d\d\)"
    shown: dict[str, str] = {}
    for names, cells in re.findall(rf"\| \**([^|]*`)[^|`]*\| \**((?:{cell},? ?)+)", COST):
        shown |= dict(zip(re.findall(r"`(\w+)`", names), re.findall(cell, cells), strict=True))
    assert len(shown) > 20
    assert {name: percent(variants[name]["result"]["pooled"]) for name in shown} == shown
    for corpus, figures in variants["fp8"]["result"]["by_corpus"].items():
        low, high = (f"{100 * figures[key]:+.2f}%" for key in ("low", "high"))
        assert f"{low} to {high}" in COST, corpus
