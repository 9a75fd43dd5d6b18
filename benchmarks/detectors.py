"""Do the limits on loss and gradient norm skip what they should, and nothing else? Recorded runs, clean and injected.

    python launch/train.py --config quickstart --recipe fp8_hybrid --name s0 train.seed=0 guard.enabled=false  # s1, ...
    python -m benchmarks.detectors --runs runs/s0 runs/s1 --traces FILE --out FILE
    python -m benchmarks.detectors

The loop's gate and the guard's two monitors, with the default config, on loss and gradient norm of recorded runs:

1. *Clean*: what the monitors report of the recorded runs, and where they would clip harder than the run itself did.
2. *Recall*: at every step that has limits, in every run, the loss or the norm is multiplied by a factor. It counts as
   noticed if the gate skips that update and the monitor names it.
3. *After a NaN* at each of those steps: skips, reports and limits in the 20 steps after it that the run without the
   NaN does not have.
4. *Resume* at each of those steps, with the state saved as JSON: steps until there are limits again.
5. *False skips* in clean runs made from the recorded ones (`synthetic`), for several lengths of block.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.intervals import binomial_upper
from benchmarks.loss_traces import Trace, read_run, read_traces, synthetic, write_traces
from harness.core.config import GuardConfig, TrainConfig
from harness.core.facts import SWITCH_DELAY, Limits, StepFacts, Verdict
from harness.core.files import write_json
from harness.monitors.gradients import GradientMonitor
from harness.monitors.loss import LossMonitor

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
FACTORS = (3.0, 5.0, 10.0, 100.0)
BLOCKS = (5, 20, 60)
SYNTHETIC_STEPS = 2000
AFTER_NAN = 20
AFTER_RESUME = 5


class Gate:
    """The guard's two monitors and the loop's handling of limits, step by step, without a model."""

    def __init__(self, guard: GuardConfig) -> None:
        self.monitors = (
            GradientMonitor(
                guard.max_consecutive_skips,
                guard.skip_growth,
                guard.clip_growth,
                guard.spike_window,
            ),
            LossMonitor(guard.spike_window, guard.spike_sigma, guard.spike_steps),
        )
        self.limits: dict[int, Limits] = {}
        self.step = 0

    @property
    def next_limits(self) -> Limits:
        """The limits of the next step."""
        return self.limits.get(self.step + 1, Limits())

    def feed(self, loss: float, norm: float) -> tuple[StepFacts, list[Verdict]]:
        """One step through the gate, and the monitors' verdicts on it."""
        limits = self.next_limits
        self.limits.pop(self.step, None)
        self.step += 1
        facts = StepFacts(
            self.step, self.step - 1, loss, norm, 1e-3, 1.0, True, self.step, 1, 1.0, limits=limits
        )
        finite = math.isfinite(loss) and math.isfinite(norm)
        facts = replace(facts, applied=finite and not facts.over_limits)
        verdicts = [monitor.observe(facts) for monitor in self.monitors]
        self.limits[self.step + SWITCH_DELAY] = reduce(
            Limits.stricter, (verdict.limits for verdict in verdicts)
        )
        return facts, verdicts

    def state(self) -> str:
        """The state as JSON, as in a checkpoint."""
        return json.dumps([monitor.state_dict() for monitor in self.monitors], allow_nan=False)

    def resumed(self, guard: GuardConfig) -> Gate:
        """A gate as a new process has it, with this one's state."""
        gate = Gate(guard)
        gate.step, gate.limits = self.step, dict(self.limits)
        for monitor, meta in zip(gate.monitors, json.loads(self.state()), strict=True):
            monitor.load_state_dict(meta)
        return gate


def said(verdicts: Sequence[Verdict]) -> list[str]:
    """Codes of the verdicts that report something."""
    return [verdict.code for verdict in verdicts if not verdict.ok]


def armed(limits: Limits) -> bool:
    """Whether both loss and norm are limited."""
    return math.isfinite(limits.loss) and math.isfinite(limits.norm)


def walk(trace: Trace, guard: GuardConfig) -> Iterator[tuple[int, Gate]]:
    """(place, gate before that step) for every step of the clean run that has limits. Do not feed the gate."""
    gate = Gate(guard)
    for place, (loss, norm) in enumerate(
        zip(trace.loss.tolist(), trace.norm.tolist(), strict=True)
    ):
        if armed(gate.next_limits):
            yield place, gate
        gate.feed(loss, norm)


def clean(trace: Trace, guard: GuardConfig, max_grad_norm: float) -> dict[str, Any]:
    """What the monitors report of the recorded run itself, and how near it came to its limits."""
    gate, codes, clipped, first = Gate(guard), [], 0, 0
    nearest = {"loss": 0.0, "norm": 0.0}
    for loss, norm in zip(trace.loss.tolist(), trace.norm.tolist(), strict=True):
        facts, verdicts = gate.feed(loss, norm)
        codes += said(verdicts)
        clipped += facts.limits.clip < min(norm, max_grad_norm)
        if armed(facts.limits):
            first = first or facts.step
            nearest["loss"] = max(nearest["loss"], loss / facts.limits.loss)
            nearest["norm"] = max(nearest["norm"], norm / facts.limits.norm)
    return {
        "seed": trace.seed,
        "said": codes,
        "clipped_harder": clipped,
        "first_limited_step": first,
        **nearest,
    }


def recall(
    traces: Sequence[Trace], guard: GuardConfig, kind: str, factor: float
) -> tuple[int, int]:
    """(noticed, injected): the update is skipped in that very step and the verdict says why."""
    noticed = injected = 0
    for trace in traces:
        for place, gate in walk(trace, guard):
            loss, norm = float(trace.loss[place]), float(trace.norm[place])
            spiked = (loss * factor, norm) if kind == "loss" else (loss, norm * factor)
            facts, verdicts = gate.resumed(guard).feed(*spiked)
            injected += 1
            noticed += not facts.applied and said(verdicts) == [
                {"loss": "loss.skip", "norm": "gradient.skip"}[kind]
            ]
    return noticed, injected


def after_nan(traces: Sequence[Trace], guard: GuardConfig) -> dict[str, int]:
    """A NaN before each limited step: did it do what it should, and what happened in the steps after it."""
    told = extra = moved = count = 0
    for trace in traces:
        for place, gate in walk(trace, guard):
            plain, hit = gate.resumed(guard), gate.resumed(guard)
            facts, verdicts = hit.feed(math.nan, math.nan)
            told += not facts.applied and said(verdicts) == ["nonfinite.skip"]
            count += 1
            for loss, norm in zip(
                trace.loss[place : place + AFTER_NAN].tolist(), trace.norm[place : place + AFTER_NAN].tolist(),
                strict=True,
            ):  # fmt: skip
                expected, found = plain.feed(loss, norm), hit.feed(loss, norm)
                extra += (found[0].applied, said(found[1])) != (
                    expected[0].applied,
                    said(expected[1]),
                )
                moved += [verdict.limits for verdict in found[1]] != [
                    verdict.limits for verdict in expected[1]
                ]
    return {
        "injected": count,
        "told": told,
        "extra_skips_or_words": extra,
        "differing_limits": moved,
    }


def resume(traces: Sequence[Trace], guard: GuardConfig) -> dict[str, int]:
    """The most steps without limits, and steps or verdicts that differ from those of the run that was not stopped."""
    worst = differ = count = 0
    for trace in traces:
        for place, gate in walk(trace, guard):
            going_on, again = copy.deepcopy(gate), gate.resumed(guard)
            count += 1
            unarmed = 0
            for later in range(place, min(place + AFTER_RESUME, len(trace.loss))):
                unarmed += not armed(again.next_limits)
                pair = float(trace.loss[later]), float(trace.norm[later])
                differ += again.feed(*pair) != going_on.feed(*pair)
            worst = max(worst, unarmed)
    return {"resumed": count, "steps_without_limits": worst, "differing_verdicts": differ}


def false_skips(
    traces: Sequence[Trace], guard: GuardConfig, steps: int, block: int, seed: int
) -> dict[str, Any]:
    """Skips and other words in at least `steps` limited steps of synthetic runs, the recorded ones taking turns."""
    limited = skips = alarms = number = 0
    while limited < steps:
        trace = traces[number % len(traces)]
        rng = np.random.default_rng([seed, block, number])
        gate = Gate(guard)
        for loss, norm in zip(*synthetic(trace, SYNTHETIC_STEPS, block, rng), strict=True):
            facts, verdicts = gate.feed(loss, norm)
            limited += armed(facts.limits)
            skips += not facts.applied
            alarms += len(said(verdicts))
        number += 1
    upper = binomial_upper(skips, limited)
    return {"block": block, "runs": number, "n": limited, "skips": skips, "alarms": alarms,
            "per_100000": 1e5 * skips / limited, "upper_95_per_100000": 1e5 * upper}  # fmt: skip


def study(traces: Sequence[Trace], guard: GuardConfig, steps: int, seed: int) -> dict[str, Any]:
    """Runs all parts of the module's docstring and prints them; JSON-able. steps: for each length of block."""
    cleans = [clean(trace, guard, TrainConfig().max_grad_norm) for trace in traces]
    for row in cleans:
        print(f"clean, seed {row['seed']}: {row['said'] or 'nothing said'}, limits from step "
              f"{row['first_limited_step']} on, at most {row['loss']:.2f} of the limit on the loss and "
              f"{row['norm']:.2f} on the norm, clipped harder on {row['clipped_harder']} steps")  # fmt: skip
    rows: list[dict[str, Any]] = []
    for kind in ("loss", "norm"):
        for factor in FACTORS:
            noticed, injected = recall(traces, guard, kind, factor)
            rows.append({"kind": kind, "factor": factor, "noticed": noticed, "injected": injected})
            print(f"recall, {kind} x {factor:g}: {noticed} of {injected}, {noticed / injected:.2%}")
    nan, resumed = after_nan(traces, guard), resume(traces, guard)
    print(f"after a NaN: {nan}\nresume: {resumed}")
    made_up: list[dict[str, Any]] = []
    for block in BLOCKS:
        began = time.perf_counter()
        made_up.append(found := false_skips(traces, guard, steps, block, seed))
        print(f"clean steps by block bootstrap, blocks of {block}: {found['skips']} skips and {found['alarms']} alarms "
              f"in n = {found['n']} steps, {found['per_100000']:.3f} per 100,000, 95% upper bound "
              f"{found['upper_95_per_100000']:.3f} ({time.perf_counter() - began:.0f} s)", flush=True)  # fmt: skip
    return {"guard": guard_keys(guard), "clean": cleans, "recall": rows, "after_nan": nan, "resume": resumed,
            "false_skips": made_up}  # fmt: skip


def guard_keys(guard: GuardConfig) -> dict[str, Any]:
    """The keys that the study depends on."""
    return guard.model_dump(
        include={"skip_growth", "clip_growth", "spike_window", "spike_sigma", "spike_steps"}
    )


def main() -> None:
    """Run the study and write the results file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=Path, nargs="+", help="run folders to make the traces file from"
    )
    parser.add_argument("--traces", type=Path, default=RESULTS / "traces_quickstart_cpu.json")
    parser.add_argument("--out", type=Path, default=RESULTS / "detectors_cpu.json")
    parser.add_argument(
        "--steps", type=int, default=400_000, help="clean steps for each length of block"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    options = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.detectors", *sys.argv[1:]])
    if options.runs:
        write_traces(options.traces, [read_run(folder) for folder in options.runs], command)
    record = {
        "command": command,
        "versions": f"Python {platform.python_version()}, numpy {np.__version__}",
        "seed": options.seed,
        **study(read_traces(options.traces), GuardConfig(), options.steps, options.seed),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, record)


if __name__ == "__main__":
    main()
