"""Pathologies of training, each run by several loops on the CPU with a tiny model.

    python -m benchmarks.gauntlet --list
    python -m benchmarks.gauntlet --only "one bad batch" "gradient storm" --loops "bare bf16" ours
    python -m benchmarks.gauntlet --json benchmarks/results/gauntlet.json --picture docs/images/gauntlet.png

Every run is a process of its own, with the same weights, samples and seed. The clean run is the healthy model in fp32.
With --only, rows of other scenarios that the record already has are kept, if they have the same loops and steps.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import harness.tools.train  # noqa: F401  every child needs it
from benchmarks.gauntlet import report, runner
from benchmarks.gauntlet.loops import LOOPS, NEEDED
from benchmarks.gauntlet.scenarios import BY_NAME, SCENARIOS, STEPS, Scenario
from benchmarks.results_file import write_results
from harness.core.files import read_json

CLEAN = "fp32"
WHOLE = ["--json", "benchmarks/results/gauntlet.json", "--picture", "docs/images/gauntlet.png"]
"""The arguments that make the whole record, which may also be made in parts."""
CHOICES = [*(loop for loop in LOOPS if loop != CLEAN), report.OURS]


def study(
    scenarios: Sequence[Scenario], loops: Sequence[str], steps: int, jobs: int, work: Path
) -> list[dict[str, Any]]:
    """Run all loops on all scenarios. Returns a row for each scenario, and prints each run when it ends.

    jobs: scenarios that run at a time. work: the folder for the runs.
    """
    # One clean run serves all scenarios whose healthy model has the same weights.
    clean: dict[str, float] = {}
    for scenario in scenarios:
        key = clean_name(scenario)
        if key not in clean:
            clean[key] = clean_loss(scenario, steps, work)

    def row(scenario: Scenario) -> dict[str, Any]:
        expected = clean[clean_name(scenario)]
        runs: dict[str, Any] = {}
        for loop in loops:
            folder = work / scenario.name / loop
            result = runner.run(loop, scenario, on=True, steps=steps, folder=folder)
            runner.measure(result, loop, scenario, folder)
            # Only ours has a command that names the cause of a bad step.
            if loop == report.OURS:
                runner.ask_replay(result, folder)
            runs[loop] = result.as_json()
            outcome = report.cell(runs[loop], expected)
            print(f"{scenario.name:<32}{loop:<12}{outcome:<20}{result.why[:80]}", flush=True)
        return {**scenario.as_json(), "clean": expected, "runs": runs}

    # Threads are enough: each only waits for the processes of its scenario.
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(row, scenarios))


def clean_name(scenario: Scenario) -> str:
    """The clean run that a scenario is compared with: one of its own, or the common one."""
    return scenario.name if scenario.own_clean else CLEAN


def clean_loss(scenario: Scenario, steps: int, work: Path) -> float:
    """The loss of the healthy model after `steps` steps in fp32. Ends the program if that run fails."""
    place = work / scenario.name / CLEAN
    result = runner.run(CLEAN, scenario, on=False, steps=steps, folder=place)
    runner.measure(result, CLEAN, scenario, place)
    if result.loss is None:
        raise SystemExit(f"{scenario.name}: the clean run failed: {result.why}; see {place}")
    return result.loss


def merged(
    rows: list[dict[str, Any]], earlier: dict[str, Any], loops: list[str], steps: int
) -> list[dict[str, Any]]:
    """`rows` with those of an earlier record for the other scenarios, in the order of the scenarios.

    An earlier record with other loops or steps cannot be compared, and none of its rows is kept.
    """
    if earlier["loops"] != loops or earlier["steps"] != steps:
        return rows
    by_name = {row["scenario"]: row for row in [*earlier["rows"], *rows]}
    return [by_name[name] for name in BY_NAME if name in by_name]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="list the scenarios and end")
    parser.add_argument("--only", nargs="+", choices=list(BY_NAME), metavar="NAME")
    parser.add_argument("--loops", nargs="+", choices=CHOICES, default=CHOICES, metavar="LOOP")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=1, help="scenarios at a time")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--picture", type=Path, help="draw the picture here")
    given = parser.parse_args(arguments)

    if given.list:
        for scenario in SCENARIOS:
            print(f"{scenario.name:<32}{scenario.family:<11}{scenario.planted}")
        return 0

    # A run must be long enough for every fault to happen in it.
    scenarios = [BY_NAME[name] for name in given.only or BY_NAME]
    latest = max(scenario.at for scenario in scenarios)
    if given.steps <= latest:
        parser.error(f"--steps {given.steps}: one of the scenarios begins in step {latest}")

    # Leave out loops whose library is missing. The others are imported here, once: every run is a fork of this process.
    loops: list[str] = []
    for loop in given.loops:
        package = NEEDED.get(loop)
        if package is not None and find_spec(package) is None:
            print(f"{loop} is left out: {package} is not installed", file=sys.stderr)
            continue
        if package is not None:
            import_module(package)
        loops.append(loop)

    # Not a TemporaryDirectory: a forked child that runs its exit handlers would remove the folder of all.
    work = Path(tempfile.mkdtemp(prefix="gauntlet-"))
    try:
        rows = study(scenarios, loops, given.steps, given.jobs, work)
    finally:
        shutil.rmtree(work)
    versions = {loop: version(NEEDED[loop].partition("_")[0]) for loop in loops if loop in NEEDED}
    if given.json and given.json.exists():
        rows = merged(rows, read_json(given.json)["results"], loops, given.steps)
    record = {"steps": given.steps, "loops": loops, "versions": versions, "rows": rows}
    print("", report.table(record), report.answers(record), report.counts(record), sep="\n\n")
    if given.json:
        write_results(given.json, "benchmarks.gauntlet", WHOLE, 1, record)
    if given.picture:
        report.draw(record, given.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
