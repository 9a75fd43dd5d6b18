"""Does the fallback save a run that FP8 loses? Three faults, each trained in bf16, in plain FP8 and with the fallback.

    python -m benchmarks.fallback --seeds 0 1 2

A fault (`benchmarks.outliers`) sits in one Linear and leaves bf16 untouched. For every scenario and seed, five runs of
the real command line share initial weights, data order and validation split:

    bf16       fault on    what the model can reach
    untouched  fault off   bf16 again: its loss must be the same to the last bit, so that the fault concerns FP8 alone
    plain      fault on    FP8 with fallback and guard off (the guard would halt the run): what the fault costs in FP8
    fallback   fault on    fp8_hybrid as shipped: how much of that remains, and which layers ran in BF16
    control    fault off   fp8_hybrid as shipped: what FP8 costs without the fault; no layer may move

The model is one small block, so that no other layer can stand in for the broken one, and the text is made up, so that
training is smooth: FP8 without a fault ends within 0.1% of bf16 (on real text, runs this short fall so steeply that it
ends up to 6% above or below). Four in ten letters (`FOLLOW`) are the fixed successor of the one before, the others are
favourites of a topic that changes every 64 letters. Attention has to find the topic, the feed-forward to use it.
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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from harness.core.files import find, write_json
from harness.run_folder import read_outcome
from harness.tracking.journal import read_rows

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "fallback_cpu.json"
SIZES = {"dim": 64, "layers": 1, "heads": 2, "ffn": 176}
FIXED = (
    "tracking.mlflow=false",
    "tracking.fp8_every=1",
    "checkpoint.every=0",
    "train.steps=250",
    "train.global_batch=16",
    "train.micro_batch=16",
    "train.lr=3e-3",
    "train.min_lr_ratio=0.0",
    "train.warmup_steps=20",
    "train.eval_every=0",
    "data.val_samples=256",
)
TOPICS, LETTERS, SPAN, FOLLOW = 6, 24, 64, 0.4


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fault. target: its function in benchmarks.outliers. guilty: the slot that suffers. args: the function's own."""

    target: str
    guilty: str
    args: Mapping[str, Any]

    @property
    def layer(self) -> str:
        """The layer of the guilty slot, which alone may leave FP8."""
        return self.guilty.rpartition(".")[0]


SCENARIOS = (
    Scenario(
        "growing", "blocks.00.mlp.down.input", {"layer": "blocks.0.mlp.down", "per_window": 0.25}
    ),
    Scenario(
        "hot",
        "blocks.00.attn.qkv.input",
        {"layer": "blocks.0.attn.qkv", "channels": 4, "value": 2.0**24},
    ),
    Scenario(
        "storm", "blocks.00.attn.out.grad_output", {"layer": "blocks.0.attn.out", "factor": 2.0**40}
    ),
)
KINDS = {
    "bf16": ("bf16", True),
    "untouched": ("bf16", False),
    "plain": ("plain_fp8.yaml", True),
    "fallback": ("fp8_hybrid", True),
    "control": ("fp8_hybrid", False),
}
"""Recipe, and whether the fault is on."""


def made_up(files: int) -> list[bytes]:
    """So many texts of 20,480 letters, the same at every call; the module's docstring says how letters follow."""
    rng = np.random.default_rng(0)
    favourites = rng.dirichlet([0.15] * LETTERS, size=TOPICS)
    successor = rng.permutation(LETTERS)
    texts: list[bytes] = []
    for _ in range(files):
        text = bytearray()
        letter = 0
        for _ in range(320):
            drawn = rng.choice(LETTERS, size=SPAN, p=favourites[rng.integers(TOPICS)])
            for follows, favourite in zip(rng.random(SPAN) < FOLLOW, drawn, strict=True):
                letter = int(successor[letter] if follows else favourite)
                text.append(ord("a") + letter)
        texts.append(bytes(text))
    return texts


def prepare(work: Path) -> None:
    """Write the files that the runs need into `work`: the text (10 files in text/) and the recipe of the plain runs."""
    (work / "text").mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(made_up(10)):
        (work / "text" / f"{number}.txt").write_bytes(text)
    recipe = yaml.safe_load(find("recipes", "fp8_hybrid").read_text())
    recipe |= {"name": "plain_fp8", "fallback": {"enabled": False}}
    (work / "plain_fp8.yaml").write_text(yaml.safe_dump(recipe))


def settings(scenario: Scenario, kind: str, seed: int) -> list[str]:
    """The config overrides of one run, over the config `tiny`."""
    args = {**scenario.args, **SIZES, "on": KINDS[kind][1]}
    model = [
        f"model.target=benchmarks.outliers:{scenario.target}",
        f"model.args={json.dumps(args)}",
    ]
    alone = ["guard.enabled=false"] if kind == "plain" else []
    return [*FIXED, *model, *alone, "data.path=text", f"train.seed={seed}"]


def start(
    work: Path, name: str, recipe: str, overrides: list[str]
) -> subprocess.CompletedProcess[str]:
    """Train the config `tiny` from the command line in `work`, on one thread, to its end; the run is runs/`name`."""
    command = [
        sys.executable,
        str(ROOT / "launch" / "train.py"),
        "--config",
        "tiny",
        "--recipe",
        recipe,
    ]
    return subprocess.run(
        [*command, "--name", name, *overrides],
        cwd=work,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def train(work: Path, scenario: Scenario, kind: str, seed: int) -> Path:
    """Train one run in `work` and return its folder. Ends the program if it fails."""
    name = f"{scenario.target}-{kind}-{seed}"
    done = start(work, name, KINDS[kind][0], settings(scenario, kind, seed))
    if done.returncode:
        raise SystemExit(
            f"{name} failed with exit code {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
    run = work / "runs" / name
    print(f"{name}: {read_outcome(run)['val_loss']:.4f}", file=sys.stderr, flush=True)
    return run


def read(run: Path) -> dict[str, Any]:
    """What a run recorded: val_loss (nats per byte), moves and the verdicts behind them (journal events, in order)."""
    rows = [row for row in read_rows(run / "journal.jsonl") if row["kind"] == "event"]
    return {
        "val_loss": float(read_outcome(run)["val_loss"]),
        "switches": [
            {name: row[name] for name in ("step", "demote", "promote")}
            for row in rows
            if row["code"] == "precision.switched"
        ],
        "verdicts": [
            row for row in rows if row["code"] in ("precision.demote", "precision.promote")
        ],
    }


def compare(scenario: Scenario, seed: int, runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One row of the table. Differences are relative to bf16's loss. Ends the program if bf16 noticed the fault."""
    losses = {kind: run["val_loss"] for kind, run in runs.items()}
    if losses["untouched"] != losses["bf16"]:
        raise SystemExit(f"{scenario.target}, seed {seed}: bf16 noticed the fault: {losses}")
    switches = runs["fallback"]["switches"]
    return {
        "scenario": scenario.target,
        "seed": seed,
        "val_loss": losses,
        "difference": {
            kind: losses[kind] / losses["bf16"] - 1 for kind in ("plain", "fallback", "control")
        },
        "demoted": sorted({layer for switch in switches for layer in switch["demote"]}),
        "promoted": sorted({layer for switch in switches for layer in switch["promote"]}),
        "first_demotion": min((switch["step"] for switch in switches), default=None),
        "evidence": [row["text"] for row in runs["fallback"]["verdicts"]],
        "control_switches": len(runs["control"]["switches"]),
    }


def show(row: Mapping[str, Any]) -> str:
    """A row as a line under `HEADER`."""
    loss, difference = row["val_loss"], row["difference"]
    return (
        f"{row['scenario']:<8} {row['seed']:>4}  {loss['bf16']:.4f}  "
        f"{loss['plain']:.4f} {difference['plain']:+8.2%}   {loss['fallback']:.4f} {difference['fallback']:+7.2%}   "
        f"{loss['control']:.4f} {difference['control']:+7.2%} {row['control_switches']:>3}   "
        f"{row['first_demotion'] or '-':>5}  {', '.join(row['demoted']) or '-'}"
    )


HEADER = (
    "scenario seed  bf16    plain FP8         with fallback     control FP8, switches  first  demoted\n"
    "               (validation, nats per byte; differences to bf16 of the same seed; first: step of a demotion)"
)


def main() -> None:
    """Run everything, print the table, write the results file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    targets = [scenario.target for scenario in SCENARIOS]
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--scenarios", nargs="+", choices=targets, default=targets)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    chosen = [scenario for scenario in SCENARIOS if scenario.target in options.scenarios]
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        rows = [
            compare(
                scenario,
                seed,
                {kind: read(train(Path(folder), scenario, kind, seed)) for kind in KINDS},
            )
            for scenario in chosen
            for seed in options.seeds
        ]
    print(HEADER, *map(show, rows), sep="\n")
    asked = ["--seeds", *map(str, options.seeds), "--scenarios", *options.scenarios]
    record = {
        "command": shlex.join(["python", "-m", "benchmarks.fallback", *asked]),
        "machine": f"{platform.machine()} CPU, Python {platform.python_version()}, torch {torch.__version__}, "
        "one thread per run",
        "seeds": options.seeds,
        "settings": [*FIXED, f"model.args={json.dumps(SIZES)}"],
        "scenarios": {
            scenario.target: {"guilty": scenario.guilty, **scenario.args} for scenario in chosen
        },
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, record)


if __name__ == "__main__":
    main()
