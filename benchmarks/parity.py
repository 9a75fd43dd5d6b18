"""Does FP8 cost accuracy? Final validation loss of fp8_hybrid against bf16, beside control pairs.

    python -m benchmarks.parity --work /tmp/parity --seeds 0 1 2 3 4 5 6 7

Every seed trains the quickstart four times through the real command line: `fp8`, `bf16`, and two controls, which are
bf16 from initial weights that were moved by one ulp. All share initial weights (but for that ulp), data order and the
validation split, all of which is evaluated, with the final weights. A control shows what a difference between two runs
of equal quality looks like, since training amplifies every rounding difference.

Each weight goes one ulp up or down at random. `fp32_ulp`: the ulp of the weights as they are stored, the smallest
change there is; the matrix products, whose operands are rounded to bf16, hardly notice it at first. `bf16_ulp`: the ulp
that bf16's own rounding is made of, which is as far as two correct bf16 implementations differ in each product. FP8
rounds 16 to 32 times as coarsely, in every step.

The claim, judged against either control: the upper end of the 95% interval of FP8's mean relative difference is at most
0.25% above the control's. The study says how many seeds would bring FP8's interval to +- 0.25%.

Interrupt it at any time: runs that finished are kept in --work, and the same command goes on from them. FP8 runs record
the statistics of every slot at every step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.intervals import Interval, samples_needed, t_interval
from harness.core.config import load_config
from harness.core.files import write_json
from harness.models import gpt
from harness.run_folder import read_outcome
from harness.tracking.journal import read_rows

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "parity_cpu.json"
RECIPE = {"fp8": "fp8_hybrid", "bf16": "bf16", "fp32_ulp": "bf16", "bf16_ulp": "bf16"}
PERTURBED = "benchmarks.parity:perturbed_gpt"
ULP: dict[str, dict[str, Any]] = {"fp32_ulp": {}, "bf16_ulp": {"ulp_bits": 16}}
MARGIN = 0.0025
"""How far the upper end of FP8's interval may be above a control's, relative."""
FIXED = (
    "tracking.mlflow=false",
    "tracking.fp8_every=1",
    "train.eval_every=0",
    "checkpoint.every=0",
    "data.val_samples=1000000",  # more than there are: all of them
)


def perturbed_gpt(coin: int, ulp_bits: int = 0, **args: Any) -> nn.Module:
    """The shipped GPT with every weight moved by one ulp, up or down by seeded coins; zeros stay.

    ulp_bits: low bits of an fp32 number that the ulp's format does not have, 0 for fp32 and 16 for bf16.
    """
    model = gpt.build(**args)
    generator = torch.Generator().manual_seed(coin)
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.randint(0, 2, parameter.shape, generator=generator).bool()
            # As integers, floats of one sign are in order of magnitude.
            away = torch.where(up == (parameter > 0), 1, -1) * (1 << ulp_bits)
            moved = (parameter.view(torch.int32) + away.int()).view(torch.float32)
            parameter.copy_(torch.where(parameter == 0, parameter, moved))
    return model


def run_folder(work: Path, kind: str, seed: int) -> Path:
    """The folder of the run of one kind (a key of RECIPE) and seed."""
    return work / "runs" / f"{kind}-{seed}"


def settings(kind: str, seed: int, overrides: Sequence[str]) -> list[str]:
    """The config overrides of one run."""
    given = [*FIXED, f"train.seed={seed}", *overrides]
    if kind not in ULP:
        return given
    model = load_config("quickstart", given).model
    args = json.dumps(model.args | {"coin": seed} | ULP[kind])
    return [*given, f"model.target={PERTURBED}", f"model.args={args}"]


def train(work: Path, kind: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Train one run, unless `work` has it: val_loss (nats per byte, final weights), switches, and what it ran on."""
    folder, asked = run_folder(work, kind, seed), settings(kind, seed, overrides)

    # A finished run of the same settings is kept.
    kept = folder / "study.json"
    if kept.exists():
        found = json.loads(kept.read_text())
        if found["settings"] == asked:
            return found["result"]

    # Anything else in the folder is of an interrupted run, or of other settings.
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        sys.executable,
        str(ROOT / "launch" / "train.py"),
        "--config",
        "quickstart",
        "--recipe",
        RECIPE[kind],
    ]
    done = subprocess.run(
        [*command, "--name", folder.name, *asked],
        cwd=work,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    # What the run says of itself.
    outcome = read_outcome(folder)
    if done.returncode or outcome.get("status") != "done":
        raise SystemExit(
            f"{folder.name} failed with exit code {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
    rows = list(read_rows(folder / "journal.jsonl"))
    result = {
        "val_loss": float(outcome["val_loss"]),
        "switches": sum(row.get("code") == "precision.switched" for row in rows),
        "data": next(row["data"] for row in rows if row["kind"] == "run" and row["data"]),
    }
    write_json(kept, {"settings": asked, "result": result})
    print(f"{folder.name}: {result['val_loss']:.4f}", file=sys.stderr, flush=True)
    return result


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of all pairs.

    fp8: 95% interval of the relative difference to bf16.
    controls: the same of each control.
    margin: how far FP8's upper end may be above a control's.
    seeds_needed: for an interval of FP8 of +- margin.
    holds: for each control, whether FP8's upper end is within the margin.
    """

    fp8: Interval
    controls: dict[str, Interval]
    margin: float
    seeds_needed: int
    holds: dict[str, bool]

    def __str__(self) -> str:
        lines: list[str] = []
        for kind, control in self.controls.items():
            claim = "holds" if self.holds[kind] else "DOES NOT HOLD"
            lines.append(
                f"claim {claim} beside {kind}: upper end of FP8 "
                f"{self.fp8.high:+.3%} <= {control.high:+.3%} + {self.margin:.2%} = {control.high + self.margin:+.3%}"
            )
        enough = "enough" if self.fp8.n >= self.seeds_needed else "TOO FEW"
        lines.append(
            f"seeds: {self.fp8.n} are {enough}: a standard deviation of {self.fp8.sd:.3%} asks for {self.seeds_needed} "
            f"to know FP8's mean to +- {self.margin:.2%}"
        )
        return "\n".join(lines)


def judge(
    fp8: Sequence[float], controls: Mapping[str, Sequence[float]], margin: float = MARGIN
) -> Verdict:
    """Relative differences to bf16, one a seed, as the claim's verdict."""
    ours = t_interval(fp8)
    theirs: dict[str, Interval] = {}
    holds: dict[str, bool] = {}
    for kind, values in controls.items():
        theirs[kind] = t_interval(values)
        holds[kind] = ours.high <= theirs[kind].high + margin
    return Verdict(ours, theirs, margin, samples_needed(ours.sd, margin), holds)


def pair_up(
    results: Mapping[tuple[str, int], Mapping[str, Any]], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """One row a seed: the losses, their relative differences to bf16's, FP8's switches."""
    rows: list[dict[str, Any]] = []
    kinds = [kind for kind in RECIPE if (kind, seeds[0]) in results]
    for seed in seeds:
        losses = {kind: results[kind, seed]["val_loss"] for kind in kinds}
        differences: dict[str, float] = {}
        for kind, loss in losses.items():
            if kind != "bf16":
                differences[kind] = loss / losses["bf16"] - 1
        rows.append(
            {
                "seed": seed,
                "val_loss": losses,
                "relative_difference": differences,
                "switches": results["fp8", seed]["switches"],
            }
        )
    return rows


def show(pairs: Sequence[Mapping[str, Any]], verdict: Verdict) -> None:
    """Print the pairs and what follows from them."""
    print("validation loss in nats per byte, and relative difference to bf16 of the same seed")
    compared = "   ".join(f"{kind:^15}" for kind in pairs[0]["relative_difference"])
    print(f"seed     bf16   {compared}   FP8's switches")
    for pair in pairs:
        losses = pair["val_loss"]
        columns: list[str] = []
        for kind, difference in pair["relative_difference"].items():
            columns.append(f"{losses[kind]:.4f} {difference:+8.3%}")
        row = "   ".join(columns)
        print(f"{pair['seed']:>4}   {losses['bf16']:.4f}   {row}   {pair['switches']:>3}")
    for name, found in {"fp8": verdict.fp8, **verdict.controls}.items():
        print(
            f"{name:<8} mean {found.mean:+.3%}, standard deviation {found.sd:.3%}, "
            f"95% interval {found.low:+.3%} to {found.high:+.3%}, n = {found.n}"
        )
    print(verdict)


def main() -> None:
    """Run what is missing, print the table, write the results file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work",
        type=Path,
        required=True,
        help="folder of the runs; kept, so that a study can go on",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    parser.add_argument(
        "--controls", nargs="+", choices=list(ULP), default=list(ULP), help="default: both"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one thread")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="config overrides for every run"
    )
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)

    # Train every kind with every seed. A failure, or Ctrl-C, cancels the runs that have not begun.
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = {
            (kind, seed): pool.submit(train, options.work, kind, seed, options.set)
            for kind in ("fp8", "bf16", *options.controls)
            for seed in options.seeds
        }
        try:
            results = {key: job.result() for key, job in jobs.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise

    # Compare each seed's runs with its bf16, and judge.
    pairs = pair_up(results, options.seeds)
    differences: dict[str, list[float]] = {}
    for kind in ("fp8", *options.controls):
        differences[kind] = [pair["relative_difference"][kind] for pair in pairs]
    verdict = judge(differences.pop("fp8"), differences)
    show(pairs, verdict)
    record = {
        "command": shlex.join(["python", "-m", "benchmarks.parity", *sys.argv[1:]]),
        "machine": f"{platform.machine()} CPU, Python {platform.python_version()}, torch {torch.__version__}, "
        "one thread per run",
        "data": results["fp8", options.seeds[0]]["data"],
        "pairs": pairs,
        "verdict": asdict(verdict),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, record)


if __name__ == "__main__":
    main()
