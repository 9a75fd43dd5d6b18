"""Does the guard stay quiet while nothing is wrong? Whole quickstart runs, all monitors on, one per seed.

    python -m benchmarks.quiet [--work DIR] [--seeds 0 1 2 3 4 5 6 7] [--out FILE]

Each run is `launch/train.py --config quickstart --recipe fp8_hybrid train.seed=N` in DIR; one that is finished there is
not run again. Told are the events in its journal: every alert is one, and so is every switch, rollback and failed save.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.intervals import binomial_upper
from harness.run_folder import read_outcome
from harness.tracking.journal import read_rows

ROOT = Path(__file__).resolve().parents[1]


def run(work: Path, seed: int) -> dict[str, Any]:
    """Train with `seed` unless it is done; the steps applied and the events."""
    name = f"s{seed}"
    folder = work / "runs" / name
    if read_outcome(folder).get("status") != "done":
        command = [sys.executable, str(ROOT / "launch" / "train.py"), "--config", "quickstart", "--name", name]
        command += ["--recipe", "fp8_hybrid", f"train.seed={seed}", "tracking.mlflow=false", "tracking.report=false"]
        subprocess.run(command, cwd=work, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    rows = list(read_rows(folder / "journal.jsonl"))
    applied = [row["metrics"]["train/step_applied"] for row in rows if "train/step_applied" in row.get("metrics", {})]
    return {
        "seed": seed,
        "steps": len(applied),
        "applied": int(sum(applied)),
        "events": dict(Counter(row["code"] for row in rows if row["kind"] == "event")),
        "bits per byte": read_outcome(folder)["val_loss"] / torch.log(torch.tensor(2.0)).item(),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "quiet")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    runs = [run(given.work, seed) for seed in given.seeds]
    for each in runs:
        told = ", ".join(f"{code} x {count}" for code, count in each["events"].items()) or "none"
        print(f"seed {each['seed']}: {each['applied']} of {each['steps']} updates applied, events: {told}")
    loud = sum(bool(each["events"]) or each["applied"] != each["steps"] for each in runs)
    bound = binomial_upper(loud, len(runs))
    print(f"{loud} of {len(runs)} runs with an event or a skip (95% upper bound {bound:.0%})")
    if given.out:
        record = {
            "command": "python -m benchmarks.quiet",
            "machine": f"{platform.machine()}, 1 thread",
            "torch": str(torch.__version__),
            "loud": loud,
            "upper bound": bound,
            "runs": runs,
        }
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if loud else 0


if __name__ == "__main__":
    raise SystemExit(main())
