"""Final validation loss of fp8_hybrid against bf16 on the quickstart, paired by seed.

    python benchmarks/parity.py --seeds 0 1 2

Runs the real command line, two jobs at a time with one thread each, and prints and writes each pair's relative
difference. The pair shares initial weights, data order and validation samples; only the precision differs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

import torch

from harness.tracking.rows import read_rows

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("fp8_hybrid", "bf16")


def final_loss(folder: Path, recipe: str, seed: int, overrides: list[str]) -> dict[str, float]:
    """Train one run; its validation loss (nats per byte) and how many layer switches it made."""
    name = f"{recipe}-{seed}"
    fixed = ["tracking.mlflow=false", "train.eval_every=0", "checkpoint.every=0", f"train.seed={seed}"]
    command = [sys.executable, str(ROOT / "launch" / "train.py"), "--recipe", recipe, "--name", name]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *fixed, *overrides], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout}\n{done.stderr}")
    rows = list(read_rows(folder / "runs" / name / "journal.jsonl"))
    losses = [row["metrics"]["val/loss"] for row in rows if "val/loss" in row.get("metrics", {})]
    switches = sum(row.get("code") == "precision.switched" for row in rows)
    unigram = next(row["data"]["unigram_bits_per_byte"] for row in rows if row["kind"] == "run" and row["data"])
    return {"val_loss": losses[-1], "switches": switches, "unigram_bits_per_byte": unigram}


def main() -> None:
    """Run all pairs, print a table, write benchmarks/results/parity_cpu.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "parity_cpu.json")
    parser.add_argument("overrides", nargs="*", help="config overrides for every run, key.path=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(options.jobs) as pool:
        jobs = {
            (recipe, seed): pool.submit(final_loss, Path(work), recipe, seed, options.overrides)
            for seed in options.seeds
            for recipe in RECIPES
        }
        results = {key: job.result() for key, job in jobs.items()}
    pairs = []
    print("seed   fp8_hybrid   bf16     difference   switches   (validation, nats per byte)")
    for seed in options.seeds:
        fp8, bf16 = results["fp8_hybrid", seed], results["bf16", seed]
        difference = fp8["val_loss"] / bf16["val_loss"] - 1
        pairs.append({"seed": seed, "fp8_hybrid": fp8, "bf16": bf16, "relative_difference": difference})
        print(
            f"{seed:>4}   {fp8['val_loss']:.4f}       {bf16['val_loss']:.4f}   {difference:+.3%}      {fp8['switches']}"
        )
    differences = [pair["relative_difference"] for pair in pairs]
    spread = stdev(differences) if len(differences) > 1 else float("nan")
    print(f"mean {mean(differences):+.3%}, standard deviation {spread:.3%}, n = {len(differences)}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "command": shlex.join(
            ["python", "benchmarks/parity.py", "--seeds", *map(str, options.seeds), *options.overrides]
        ),
        "machine": f"{platform.machine()} CPU, torch {torch.__version__}, one thread per run",
        "pairs": pairs,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
