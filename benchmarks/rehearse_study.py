"""Does a rehearsal predict which layers leave FP8? Predicted against actual demotions on three models.

    python -m benchmarks.rehearse_study

Every case is rehearsed from its initial weights for `REHEARSED` steps, and then trained for `TRAINED` steps by the same
config and seed. A layer is predicted if the rehearsal would move it to BF16, and actual if the run did.

    gpt       the shipped GPT, two blocks of width 64, without a fault
    vit       the shipped Vision Transformer on scikit-learn's digits, without a fault
    growing, hot, storm    the GPT of `benchmarks.fallback`, one block, with a fault that FP8 cannot hold

For shorter rehearsals, those of `HORIZONS` steps, only predictions that were made by then count. Precision is the share
of predicted layers that left, recall the share of layers that left that were predicted. Ten minutes on an idle core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fallback import ROOT, SCENARIOS, prepare, read, settings
from benchmarks.results_file import write_results

OUT = ROOT / "benchmarks" / "results" / "rehearse_cpu.json"
REHEARSED, TRAINED = 100, 200
HORIZONS = (25, 50, 100)

_COMMON = (
    "tracking.mlflow=false",
    "tracking.report=false",
    "checkpoint.every=0",
    f"train.steps={TRAINED}",
)


def cases(seed: int) -> dict[str, list[str]]:
    """The arguments of every case: --config and overrides."""
    found = {
        "gpt": ["--config", "tiny", *_COMMON, "data.path=text", f"train.seed={seed}"],
        "vit": ["--config", "digits", *_COMMON, f"train.seed={seed}"],
    }
    for scenario in SCENARIOS:
        given = [each for each in settings(scenario, "fallback", seed) if "train.steps" not in each]
        found[scenario.target] = ["--config", "tiny", *given, f"train.steps={TRAINED}"]
    return found


def call(work: Path, *words: str) -> str:
    """Run a command in `work`, on one thread; returns its stdout. Ends the program if it fails."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=work,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def study(work: Path, name: str, words: Sequence[str], seed: int) -> dict[str, Any]:
    """One case: predicted layers with their steps, actual ones with theirs, and what the recipe did to the loss."""
    out = work / f"{name}-{seed}"
    options = ["--json", "--no-picture", "--precisions", "fp8", "--steps", str(REHEARSED)]
    text = call(work, "-m", "harness.cli", "rehearse", *words, *options, "--out", str(out))
    made = json.loads(text)
    call(
        work,
        str(ROOT / "launch" / "train.py"),
        "--name",
        out.name,
        "--recipe",
        "fp8_hybrid",
        *words,
    )

    actual: dict[str, int] = {}
    for switch in read(work / "runs" / out.name)["switches"]:
        for layer in switch["demote"]:
            actual.setdefault(layer, switch["step"])
    print(
        f"{name}, seed {seed}: predicted {made['predicted_steps']}, actual {actual}",
        file=sys.stderr,
    )
    return {
        "case": name,
        "seed": seed,
        "layers": len({row["layer"] for row in made["slots"]}),
        "verdict": made["verdict"],
        "predicted": made["predicted_steps"],
        "actual": actual,
        "gaps": {branch["name"]: branch["gap"] for branch in made["branches"]},
    }


def scores(rows: Sequence[dict[str, Any]], horizon: int) -> dict[str, Any]:
    """Counts over all cases, with what a rehearsal of `horizon` steps had predicted."""
    right = wrong = missed = 0
    for row in rows:
        predicted = {layer for layer, step in row["predicted"].items() if step <= horizon}
        actual = set(row["actual"])
        right += len(predicted & actual)
        wrong += len(predicted - actual)
        missed += len(actual - predicted)
    return {
        "steps": horizon,
        "right": right,
        "wrong": wrong,
        "missed": missed,
        "precision": right / (right + wrong) if right + wrong else None,
        "recall": right / (right + missed) if right + missed else None,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every case, print the scores, and write the results file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--cases", nargs="+", choices=[*cases(0)], default=[*cases(0)])
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work)
        for seed in options.seeds:
            given = cases(seed)
            for name in options.cases:
                rows.append(study(work, name, given[name], seed))
                # A study that is stopped leaves the cases that it has finished.
                results = {"scores": [scores(rows, horizon) for horizon in HORIZONS], "rows": rows}
                write_results(options.out, "benchmarks.rehearse_study", arguments, 1, results)
    for horizon in HORIZONS:
        print(scores(rows, horizon))


if __name__ == "__main__":
    main()
