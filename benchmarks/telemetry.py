"""What the telemetry of a large model takes: synthetic steps through the real journal, shipper and MLflow store.

    python -m benchmarks.telemetry --work /tmp/telemetry                          # 10,000 steps, 32 layers, 384 slots
    python -m benchmarks.telemetry --work /tmp/wide --steps 500 --linears 1344    # 4,032 slots

The figures are made up and the machinery is real: `harness.Telemetry` records every step, its shipper delivers to an
SQLite store in the working folder, the end draws the report. amax wanders without a pattern, so that nothing compresses
better than in a real run (where inputs and gradients are bf16, and their amax with them). In some steps between two
rows a slot's amax is an extreme, and some layers leave FP8. All of it must be in the store afterwards, or the last line
says what is missing and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from harness.core.config import FallbackConfig, TrackingConfig
from harness.core.facts import ROLES, Outcome, SlotStats, StepFacts
from harness.telemetry import Telemetry
from harness.tracking.console import Console
from harness.tracking.journal import JOURNAL, Journal, read_rows
from harness.tracking.slot_file import PARQUET, SLOT_FILE

LINEARS = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
# Largest values of E4M3, and of E5M2 for gradients.
FP8_MAX = {"input": 448.0, "weight": 448.0, "grad_output": 57344.0}
# An amax that no other slot reaches. The step is added, so that each extreme is told from the others.
EXTREME = 12345.0
SAMPLED_EVERY = 10
LARGEST_STORE_MB = 100.0


class Model:
    """Steps of a model with `linears` FP8 layers, four to a block."""

    def __init__(self, linears: int, steps: int) -> None:
        self.layers = [
            f"blocks.{number // 4:02d}.{LINEARS[number % 4]}" for number in range(linears)
        ]
        self.names = tuple(f"{layer}.{role}" for layer in self.layers for role in ROLES)
        self._random = np.random.default_rng(0)
        self._largest = np.array([FP8_MAX[role] for _ in self.layers for role in ROLES], np.float32)
        self._usual = np.exp2(self._random.normal(0, 3, len(self.names)))
        self._scale = np.ones(len(self.names), np.float32)

        # Extremes: the step of each, and the slot. They lie between the steps that get a row of their own.
        rows = self._random.choice(
            np.arange(1, steps // 10), size=min(20, steps // 20), replace=False
        )
        steps_between = [10 * int(row) + int(self._random.integers(1, 10)) for row in rows]
        self.extremes: dict[int, int] = {}
        for step in steps_between:
            self.extremes[step] = int(self._random.integers(len(self.names)))

        # The layers that are out of FP8 from a step on.
        self.leaves = {steps // 3: tuple(self.layers[:4]), steps // 2: tuple(self.layers[:8])}
        self._in_bf16 = np.array([role != "weight" for _ in self.layers for role in ROLES])
        self._demoted: tuple[str, ...] = ()

    def step(self, number: int) -> StepFacts:
        """The facts of step `number`. Call it for each step in turn."""
        slots = len(self.names)

        # amax wanders around each slot's usual one. Of bf16 tensors it has bf16's bits: the low 16 are zero.
        amax = (self._usual * np.exp(self._random.normal(0, 0.2, slots))).astype(np.float32)
        bits = amax.view(np.uint32)
        bits[self._in_bf16] &= np.uint32(0xFFFF0000)
        if number in self.extremes:
            amax[self.extremes[number]] = EXTREME + number

        # Delayed scaling renews the scales from time to time.
        if number % 16 == 2:
            self._scale = np.exp2(np.floor(np.log2(self._largest / (1.5 * amax)))).astype(
                np.float32
            )

        # Shares clipped and lost, and the SQNR: known in sampled steps only.
        sampled = number % SAMPLED_EVERY == 0
        unknown = np.full(slots, np.nan, np.float32)
        shares = self._random.random((2, slots), dtype=np.float32) * np.float32(1e-3)
        noise = (25 + 5 * self._random.standard_normal(slots)).astype(np.float32)

        self._demoted = self.leaves.get(number, self._demoted)
        loss = (
            2.0 + 9.0 * float(np.exp(-number / 2000)) + 0.05 * float(self._random.standard_normal())
        )
        norm = float(np.exp(self._random.normal(0, 0.2)))
        return StepFacts(
            number, number - 1, loss, norm, 3e-4, 1.0, True, number, 1 << 19, 1.0 + 0.02 * float(self._random.random()),
            demoted=self._demoted,
            slots=SlotStats(
                self.names, amax, self._scale.copy(), amax * self._scale / self._largest,
                shares[0] if sampled else unknown, shares[1] if sampled else unknown, noise if sampled else unknown,
            ),
        )  # fmt: skip


def plan(model: Model) -> dict[str, Any]:
    """The content of the run's plan.json."""
    layers = [
        {"module": name, "kind": "Linear", "precision": "fp8", "backend": "native", "reason": "converted",
         "shape": [4096, 4096]}
        for name in model.layers
    ]  # fmt: skip
    return {
        "recipe": "fp8_hybrid", "tier": "CPU", "requested": "fp8_hybrid", "resolved": "native:fp8", "keeps_amax": True,
        "effective": f"fp8: {len(layers)} modules", "rungs": [], "layers": layers,
    }  # fmt: skip


def megabytes(path: Path) -> float:
    """Size of a file, or of all files in a folder; 0 if there is none."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files if each.is_file()) / 1e6


def run(work: Path, steps: int, linears: int) -> dict[str, Any]:
    """Record all steps in the empty folder `work`, deliver them, and measure times and sizes."""
    work.mkdir(parents=True, exist_ok=True)
    os.chdir(work)
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    folder = work / "runs" / "large"
    if folder.exists() or (work / "mlflow.db").exists():
        raise SystemExit(f"{work} has a run already; give an empty folder")

    # Telemetry as a run has it: journal, a screen that nobody reads, shipper.
    model = Model(linears, steps)
    journal = Journal(folder / JOURNAL)
    screen = Console(steps, stream=open(os.devnull, "w"))  # noqa: SIM115
    telemetry = Telemetry(folder, journal, screen, TrackingConfig(drain_seconds=3600.0), linears)
    telemetry.watch(FallbackConfig())
    tags = {
        "precision.requested": "fp8_hybrid",
        "precision.resolved": "native:fp8",
        "tier": "CPU",
        "ranks": "1",
    }
    telemetry.begin(
        tags, {"train.steps": steps, "model.layers": linears // 4}, {"source": "made up"}
    )
    telemetry.ship()

    # CPU time of recording each step.
    spent = np.zeros(steps)
    for number in range(1, steps + 1):
        facts = model.step(number)
        begun = time.process_time()
        telemetry.record(facts)
        spent[number - 1] = time.process_time() - begun
        if number % 500 == 0:
            telemetry.validation(number, facts.loss + 0.1)

    # The end draws the report. Then the shipper delivers what the store lacks.
    begun = time.perf_counter()
    telemetry.end(Outcome("done", 0, f"{steps} steps", steps), plan(model))
    ended = time.perf_counter() - begun
    begun = time.perf_counter()
    assert telemetry._ship is not None
    delivered = telemetry._ship.drain(3600.0)
    waited = time.perf_counter() - begun
    telemetry.close()

    found = measure(work, folder, model, steps)
    return {
        "steps": steps, "slots": len(model.names), "series_of_all_slots": 6 * len(model.names),
        "record_cpu_ms_median": round(float(np.median(spent)) * 1e3, 3),
        "record_cpu_ms_p99": round(float(np.quantile(spent, 0.99)) * 1e3, 3),
        "every_tenth_cpu_ms_median": round(float(np.median(spent[9::10])) * 1e3, 3),
        "end_seconds": round(ended, 1), "delivery_seconds_after_the_end": round(waited, 1), "delivered": delivered,
        **found,
    }  # fmt: skip


def measure(work: Path, folder: Path, model: Model, steps: int) -> dict[str, Any]:
    """Sizes, and what is missing in the store."""
    missing: list[str] = []
    table = pandas.read_parquet(folder / PARQUET, columns=["step", "amax"])
    if len(table) != steps * len(model.names):
        missing.append(f"the table has {len(table)} rows")

    # Every extreme must be in the store, in one of the next rows of its role, and once in the table.
    with sqlite3.connect(f"file:{work / 'mlflow.db'}?mode=ro", uri=True) as store:
        series = [key for (key,) in store.execute("select distinct key from latest_metrics")]
        rows = store.execute("select count(*) from metrics").fetchone()[0]
        counted = dict(store.execute("select key, value from tags where key = 'events.count'")).get(
            "events.count", "{}"
        )
        for step, place in model.extremes.items():
            role = model.names[place].rpartition(".")[2]
            told = store.execute(
                "select max(value) from metrics where key = ? and step between ? and ?",
                (f"fp8/{role}/amax_max", step, step + 10),
            ).fetchone()[0]
            in_table = (table[table.step == step].amax == EXTREME + step).sum()
            if told != EXTREME + step or in_table != 1:
                missing.append(f"the extreme of step {step}: {told}")

    # Store and journal must agree on the number of events of each code.
    told = Counter(
        row["code"] for row in read_rows(folder / JOURNAL, metrics=False) if row["kind"] == "event"
    )
    if json.loads(counted) != dict(told):
        missing.append(f"events: {counted} in the store, {dict(told)} in the journal")
    return {
        "journal_mb": round(megabytes(folder / JOURNAL), 1), "slot_file_mb": round(megabytes(folder / SLOT_FILE), 1),
        "store_db_mb": round(megabytes(work / "mlflow.db"), 1),
        "store_artifacts_mb": round(megabytes(work / "mlruns"), 1),
        "table_mb": round(megabytes(folder / PARQUET), 1),
        "series": len(series), "role_series": sum(key.startswith("fp8/") for key in series), "metric_rows": rows,
        "extremes": len(model.extremes), "events": dict(told), "missing": missing,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="an empty folder")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--linears", type=int, default=128, help="FP8 layers; four make a block")
    options = parser.parse_args()
    found = run(options.work.resolve(), options.steps, options.linears)
    print(json.dumps(found, indent=1))
    store = found["store_db_mb"] + found["store_artifacts_mb"]
    print(
        f"store: {store:.0f} MB with its artifacts; {LARGEST_STORE_MB:.0f} MB is the bound for 384 slots, 10,000 steps"
    )
    return 1 if found["missing"] or not found["delivered"] else 0


if __name__ == "__main__":
    sys.exit(main())
