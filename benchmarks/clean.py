"""Does a clean run ever leave FP8? The fallback controller on recorded runs, and on long runs made from them.

    python -m benchmarks.parity --work /tmp/parity    # records the runs
    python -m benchmarks.clean --work /tmp/parity

1. *Real runs*: how many switches the recorded runs made when they ran, and how many verdicts other than
   `precision.ok` the present controller gives when it is fed their traces again.
2. *Synthetic runs* of 2,000 steps: the start of one recorded run, then blocks of it in random order. All slots and
   statistics of a step stay together, so what occurs in a row or in several layers at once in reality does so here.
   Each run is made from one recorded run, since no training jumps from one seed's tensors to another's. Three lengths
   of block, because a join breaks a row of bad steps: the longest equals the window of a statistic that is sampled.
3. *Storms*: the recorded runs with one slot 1% over its saturation limit for just as many successive steps as the rule
   asks for, which must all be noticed by the last of them; else the zeros above would say nothing.
4. *Margins*: for each statistic and role, the worst healthy value, and the limit from which on the recorded runs would
   have kept all their layers (as far as the score of evidence goes for single values), against the recipe's limit.

What the bound on synthetic runs means: the chance that a run made of these traces switches. A value that no recorded
run had does not occur in it; for that look at the margins, and at the bound from the real runs alone.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.intervals import binomial_upper
from benchmarks.parity import RECIPE, ROOT, run_folder
from benchmarks.traces import FIELDS, Trace, read_trace, resample
from harness.core.facts import ROLES, StepFacts, Verdict
from harness.core.files import write_json
from harness.monitors.evidence import STATISTICS, FallbackConfig, Score, Statistic, limits_of, octaves_beyond
from harness.monitors.fallback import FallbackController
from harness.precision.recipe import load_recipe

OUT = ROOT / "benchmarks" / "results" / "clean_cpu.json"
START = 20
BLOCKS = (20, 40, 80)
_TRIED, _REFINED = 33, 5
"""Limits tried at once, and how often the gap between two of them is looked into."""


def first_finding(policy: FallbackConfig, layers: Sequence[str], facts: Iterator[StepFacts]) -> Verdict | None:
    """The first verdict of a fresh controller that is not `precision.ok`."""
    controller = FallbackController(policy, layers)
    return next((verdict for one in facts if not (verdict := controller.observe(one)).ok), None)


@dataclass(frozen=True, slots=True)
class Count:
    """How many of `runs` had a finding, and the 95% upper bound of the chance of one; example: the first, in words."""

    runs: int
    found: int
    upper: float
    example: str


def count(findings: Sequence[Verdict | None]) -> Count:
    """One finding or None a run."""
    told = [f"step {finding.step}: {finding.text}" for finding in findings if finding is not None]
    return Count(len(findings), len(told), binomial_upper(len(told), len(findings)), told[0] if told else "")


def synthetic(
    traces: Sequence[Trace], policy: FallbackConfig, runs: int, steps: int, block: int, cadence: int, seed: int
) -> Count:
    """`runs` synthetic runs, the recorded ones taking turns."""
    findings: list[Verdict | None] = []
    for number in range(runs):
        trace = traces[number % len(traces)]
        order = resample(trace.steps, steps, START, block, cadence, np.random.default_rng([seed, block, number]))
        findings.append(first_finding(policy, trace.layers, trace.facts(order.tolist())))
    return count(findings)


def storms(traces: Sequence[Trace], policy: FallbackConfig, runs: int, seed: int) -> Count:
    """Recorded runs, in each a random slot 1% over its limit at `hits` successive steps; findings within them."""
    findings: list[Verdict | None] = []
    for number in range(runs):
        rng = np.random.default_rng([seed, number])
        trace = traces[number % len(traces)]
        slot = trace.slots[rng.integers(len(trace.slots))]
        role = slot.rpartition(".")[2]
        at = int(rng.integers(START, trace.steps - policy.hits))
        stormy = trace.with_storm(slot, range(at, at + policy.hits), 1.01 * getattr(policy, f"saturation_{role}"))
        finding = first_finding(policy, trace.layers, stormy.facts())
        noticed = finding is not None and at < finding.step <= at + policy.hits
        findings.append(finding if noticed else None)
    return count(findings)


@dataclass(frozen=True, slots=True)
class Margin:
    """Healthy values of one statistic and role against the limit (None: not looked at).

    worst: of any step. sustained: a limit beyond it would never have demoted a layer, one within it would have. slot:
    where that was.
    """

    statistic: str
    role: str
    limit: float | None
    worst: float
    sustained: float
    slot: str


def margins(traces: Sequence[Trace], policy: FallbackConfig) -> list[Margin]:
    """One row for each statistic and role that has values."""
    rows: list[Margin] = []
    limits = limits_of(policy)
    for number, kind in enumerate(STATISTICS):
        sign = -1.0 if kind.below else 1.0
        for place, role in enumerate(ROLES):
            found: list[tuple[float, float, str]] = []
            for trace in traces:
                values = observed(trace, kind, role, policy)
                slots = [trace.slots[slot] for slot in trace.of_role(role)]
                for slot, series in zip(slots, values.T, strict=True):
                    series = series[~np.isnan(series)]
                    if series.size >= policy.hits:
                        found.append((sign * sustained(series, policy, kind.below), float((sign * series).max()), slot))
            if found:
                limit = float(limits[number, 0, place])
                lasting, _, slot = max(found)
                worst = max(value for _, value, _ in found)
                known = None if np.isnan(limit) else round(limit, 6)
                rows.append(Margin(kind.name, role, known, sign * worst, sign * lasting, slot))
    return rows


def observed(trace: Trace, kind: Statistic, role: str, policy: FallbackConfig) -> npt.NDArray[np.float32]:
    """A statistic of the policy over the steps that are evidence: float32 [steps, slots of the role]."""
    if kind.name in FIELDS:
        return trace.field(kind.name, role)[policy.warmup_steps :]
    amax = trace.field("amax", role)[policy.warmup_steps :]
    if kind.name == "amax_growth":
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(amax[: -policy.window] > 0, amax[policy.window :] / amax[: -policy.window], np.nan)
    return np.isinf(amax).astype(np.float32) if kind.name == "nonfinite" else amax


def sustained(series: npt.NDArray[np.float32], policy: FallbackConfig, below: bool) -> float:
    """The limit that a series just keeps to: one within it would demote. below: values under the limit are bad."""
    limits = np.linspace(float(series.min()), float(series.max()), _TRIED)
    for _ in range(_REFINED):
        score = Score(policy, limits.shape)
        acts = np.zeros(limits.shape, dtype=np.bool_)
        for value in series:
            values = np.full(limits.shape, value)
            bad = values < limits if below else values > limits
            score.add(np.ones_like(bad), bad, octaves_beyond(values, limits, below))
            acts |= score.over()
        places = np.flatnonzero(acts)
        if not places.size:  # not even the strictest
            return float(limits[-1] if below else limits[0])
        edge = (places.min() - 1, places.min()) if below else (places.max(), places.max() + 1)
        inner, outer = (limits[min(max(place, 0), _TRIED - 1)] for place in edge)
        limits = np.linspace(inner, outer, _TRIED)
    return float(limits[0] if below else limits[-1])


def show_margins(rows: Sequence[Margin]) -> None:
    """Print them; the share of the limit is in factors, for decibels in dB above it."""
    print("statistic    role         limit     worst     sustained  room      slot")
    for row in rows:
        limit = "off" if row.limit is None else f"{row.limit:g}"
        if row.limit is None:
            room = ""
        elif row.statistic == "sqnr_db":
            room = f"{row.sustained - row.limit:+.1f} dB"
        else:
            room = f"{row.limit / row.sustained:.3g}x" if row.sustained > 0 else "inf"
        figures = f"{limit:<9} {row.worst:<9.3g} {row.sustained:<10.3g} {room:<9}"
        print(f"{row.statistic:<12} {row.role:<12} {figures} {row.slot}")


def show_count(what: str, found: Count) -> None:
    """Print one line."""
    print(f"{what}: {found.found} of {found.runs} with a switch, 95% upper bound {found.upper:.2%} {found.example}")


def study(traces: Sequence[Trace], runs: int, storm_runs: int, steps: int, seed: int) -> dict[str, Any]:
    """Everything that the module's docstring lists, printed on the way; JSON-able."""
    recipe = load_recipe(RECIPE["fp8"])
    policy = recipe.fallback
    made = sum(trace.switches > 0 for trace in traces)
    real = Count(len(traces), made, binomial_upper(made, len(traces)), "")
    show_count("real runs, as they ran", real)
    replayed = count([first_finding(policy, trace.layers, trace.facts()) for trace in traces])
    show_count("real runs, present controller", replayed)
    made_up: dict[int, Count] = {}
    for block in BLOCKS:
        began = time.perf_counter()
        made_up[block] = synthetic(traces, policy, runs, steps, block, recipe.fp8.stats_every, seed)
        seconds = time.perf_counter() - began
        show_count(f"synthetic runs of {steps} steps, blocks of {block} ({seconds:.0f} s)", made_up[block])
    injected = storms(traces, policy, storm_runs, seed)
    print(f"storms: {injected.found} of {injected.runs} noticed by their last step")
    rows = margins(traces, policy)
    show_margins(rows)
    return {
        "policy": policy.model_dump(),
        "recipe_sha256": recipe.sha256(),
        "recorded": {"runs": len(traces), "steps": traces[0].steps, "slots": len(traces[0].slots)},
        "real": asdict(real),
        "replayed": asdict(replayed),
        "synthetic": {str(block): {"steps": steps, **asdict(found)} for block, found in made_up.items()},
        "storms": {"runs": injected.runs, "noticed": injected.found},
        "margins": [asdict(row) for row in rows],
    }


def main() -> None:
    """Run the study and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="the folder that benchmarks.parity was given")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)), help="of the recorded runs")
    parser.add_argument("--runs", type=int, default=1000, help="synthetic runs for each length of block")
    parser.add_argument("--storms", type=int, default=200)
    parser.add_argument("--steps", type=int, default=2000, help="of a synthetic run")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    traces = [read_trace(run_folder(options.work, "fp8", seed) / "journal.jsonl") for seed in options.seeds]
    record = {
        "command": shlex.join(["python", "-m", "benchmarks.clean", *sys.argv[1:]]),
        "versions": f"Python {platform.python_version()}, numpy {np.__version__}",
        "recorded_seeds": options.seeds,
        "seed": options.seed,
        **study(traces, options.runs, options.storms, options.steps, options.seed),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, record)


if __name__ == "__main__":
    main()
