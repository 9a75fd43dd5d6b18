"""Where does FP8's cost in loss come from? An ablation that changes one thing at a time, on paired seeds.

    python -m benchmarks.cost --plan
    python -m benchmarks.cost --make-corpora /tmp/corpora
    python -m benchmarks.cost --stage screen --corpora /tmp/corpora --device cuda --workers 6 --seconds 480 --out OUT
    python -m benchmarks.cost --stage confirm --recipes A B --corpora ... (the two that the screen's report names)
    python -m benchmarks.cost --report OUT ...

Everything that is run stands in this file, which was committed before anything was looked at: variants, sizes, corpora,
seeds and their number of steps. A job is one variant on one corpus for a few seeds side by side. Jobs come in rounds of
seeds: controls first, then all variants in a random order that is fixed by a number, so that wherever the time ends,
all variants have about as many seeds. A run's result is one JSON line, written when its job ends. The same command goes
on from what --out has.

A pair is one seed: the same initial weights and data. What a variant costs is its relative difference in the loss of
the whole validation split to the *control* of that seed, the mean of four bf16 runs: one as it is, three with initial
weights moved by one fp32 ulp. A single bf16 run would bring as much chance into the difference as FP8's does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import platform
import random
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import cost_corpora
from benchmarks.cost_numerics import GEMMS, KINDS, ROLES, Variant
from benchmarks.cost_training import Corpus, OutOfTimeError, Size, train
from harness.core.errors import ConfigError, DataError, HarnessError, Problem, near_match

FP8 = Variant()
CONTROLS: dict[str, Variant] = {
    "bf16": replace(FP8, gemms=()),
    **{f"ulp_{coin}": replace(FP8, gemms=(), coin=coin) for coin in (1, 2, 3)},
}
SOURCES: dict[str, Variant] = {
    **{f"only_{gemm}": replace(FP8, gemms=(gemm,)) for gemm in GEMMS},
    **{f"only_{role}": replace(FP8, roles=(role,)) for role in ROLES},
    **{f"no_{role}": replace(FP8, roles=tuple(each for each in ROLES if each != role)) for role in ROLES},
    **{f"only_{kind}": replace(FP8, kinds=(kind,)) for kind in KINDS},
    **{f"no_{gemm}": replace(FP8, gemms=tuple(each for each in GEMMS if each != gemm)) for gemm in GEMMS[:2]},
}
RECIPES: dict[str, Variant] = {
    "no_wgrad": replace(FP8, gemms=("fprop", "dgrad")),
    "no_down": replace(FP8, kinds=("qkv", "out", "gate_up")),
    "edges_bf16": replace(FP8, edges=False),
    "history_1024": replace(FP8, history=1024),
    "most_recent": replace(FP8, algo="most_recent"),
    "margin_1": replace(FP8, margin=1),
    "grad_e4m3": replace(FP8, gradient="e4m3"),
    "current": replace(FP8, scaling="current"),
    "block": replace(FP8, scaling="block"),
    "block_e4m3": replace(FP8, scaling="block", gradient="e4m3"),
    "stochastic": replace(FP8, stochastic=True),
    "smooth_swiglu": replace(FP8, smooth=True),
    "weight_residual": replace(FP8, weight_residual=True),
    "bf16_first_step": replace(FP8, bf16_steps=1),
    "bf16_warmup": replace(FP8, bf16_steps=40),
}
VARIANTS: dict[str, Variant] = {**CONTROLS, "fp8": FP8, **SOURCES, **RECIPES}

QUICKSTART = Size(dim=256, layers=4, heads=4, context=256, batch=16, steps=200, warmup=40, lr=1e-3, validation=512)
SIZES: dict[str, Size] = {
    "1.4M": replace(QUICKSTART, dim=192, layers=3, heads=3, steps=150),
    "3M": QUICKSTART,
    "10M": replace(QUICKSTART, dim=384, layers=6, heads=6),
    "toy": Size(dim=32, layers=3, heads=2, context=32, batch=2, steps=4, warmup=2, lr=1e-3, validation=32),
}
ORDER = 20261122


@dataclass(frozen=True, slots=True)
class Stage:
    """seeds: as many at most, from 0. at_once: of them side by side in one job."""

    size: str
    variants: tuple[str, ...]
    seeds: int
    at_once: int
    corpora: tuple[str, ...] = ("python", "licences")


STAGES: dict[str, Stage] = {
    "screen": Stage("1.4M", tuple(VARIANTS), seeds=96, at_once=8),
    "quickstart": Stage("3M", (*CONTROLS, "fp8", *(f"only_{gemm}" for gemm in GEMMS)), seeds=48, at_once=8),
    "confirm": Stage("10M", (*CONTROLS, "fp8"), seeds=24, at_once=4),
    "rehearse": Stage("toy", tuple(VARIANTS), seeds=4, at_once=2),
}
"""confirm has the two recipes of the lowest pooled mean in the screen, too."""


@dataclass(frozen=True, slots=True)
class Job:
    """A variant on a corpus for some seeds side by side."""

    stage: str
    variant: str
    corpus: str
    seeds: tuple[int, ...]

    def identity(self) -> str:
        """A hash of all that decides its runs but their seeds: lines of another plan are not taken for these."""
        known: dict[str, Any] = {
            "variant": asdict(VARIANTS[self.variant]),
            "size": asdict(SIZES[STAGES[self.stage].size]),
        }
        known["corpus"] = cost_corpora.pinned()[self.corpus]["sha256"]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def jobs_of(stage: str, recipes: Sequence[str] = ()) -> list[Job]:
    """All jobs of a stage in their order: round by round of seeds, controls first, shuffled by ORDER.

    Raises ConfigError for recipes that are none, or are missing in confirm.
    """
    plan = STAGES[stage]
    odd = [name for name in recipes if name not in RECIPES]
    if odd:
        raise ConfigError(Problem(f"{odd[0]!r} is no recipe", "--recipes", fix=near_match(odd[0], list(RECIPES))))
    if bool(recipes) != (stage == "confirm"):
        fix = "name the two recipes that the report of the screen names" if stage == "confirm" else "leave it out"
        raise ConfigError(Problem(f"does not fit to stage {stage}", "--recipes", fix=fix))
    coin = random.Random(ORDER)
    jobs: list[Job] = []
    for first in range(0, plan.seeds, plan.at_once):
        seeds = tuple(range(first, min(first + plan.at_once, plan.seeds)))
        for names in (list(CONTROLS), [*(name for name in plan.variants if name not in CONTROLS), *recipes]):
            turn = [Job(stage, name, corpus, seeds) for name in names for corpus in plan.corpora]
            coin.shuffle(turn)
            jobs += turn
    return jobs


def plan_text() -> str:
    """The plan, for people."""
    lines: list[str] = []
    for name, stage in STAGES.items():
        recipes = 2 if name == "confirm" else 0
        runs = (len(stage.variants) + recipes) * len(stage.corpora) * stage.seeds
        lines.append(
            f"stage {name}: size {stage.size}, corpora {', '.join(stage.corpora)}, seeds 0 to {stage.seeds - 1}, "
            f"{stage.at_once} side by side, {len(stage.variants)} variants{' and two recipes' * bool(recipes)}: "
            f"{runs} runs at most"
        )
    lines += [f"size {name}: {_changed(size, SIZES['toy'], all_of_it=True)}" for name, size in SIZES.items()]
    lines += [
        f"corpus {name}: {corpus['bytes']} bytes, SHA-256 {corpus['sha256']}"
        for name, corpus in cost_corpora.pinned().items()
    ]
    for title, group in (("control", CONTROLS), ("baseline", {"fp8": FP8}), ("source", SOURCES), ("recipe", RECIPES)):
        lines += [f"{title} {name}: {_changed(variant, FP8)}" for name, variant in group.items()]
    return "\n".join(lines)


def _changed(value: Any, base: Any, all_of_it: bool = False) -> str:
    fields = {key: kept for key, kept in asdict(value).items() if all_of_it or kept != asdict(base)[key]}
    return ", ".join(f"{key} {kept}" for key, kept in fields.items()) or "the recipe fp8_hybrid as shipped"


def read_lines(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """All whole lines of all results files; a last line that was cut off in the middle is none.

    Raises DataError for lines that this plan did not make.
    """
    rows: list[dict[str, Any]] = []
    for path in sorted(path for folder in folders for path in folder.glob("*.jsonl")):
        for number, text in enumerate(path.read_text().split("\n")[:-1], start=1):
            row = json.loads(text)
            known = row.get("stage") in STAGES and row.get("variant") in VARIANTS
            if not known or Job(row["stage"], row["variant"], row["corpus"], ()).identity() != row["identity"]:
                why = "variant, size or corpus were others when it was written"
                raise DataError(Problem("not a run of this plan", f"{path}:{number}", why, "use another folder"))
            rows.append(row)
    return rows


def missing(jobs: Sequence[Job], rows: Sequence[dict[str, Any]]) -> list[Job]:
    """Jobs, in their order, with the seeds that no row has yet. A run that failed is missing."""
    done = {(row["stage"], row["variant"], row["corpus"], row["seed"]) for row in rows if "failed" not in row}
    left: list[Job] = []
    for job in jobs:
        seeds = tuple(seed for seed in job.seeds if (job.stage, job.variant, job.corpus, seed) not in done)
        if seeds:
            left.append(replace(job, seeds=seeds))
    return left


@dataclass(frozen=True, slots=True)
class Worker:
    """What a worker process needs to know. deadline: of `time.monotonic`, one clock for all processes of a machine."""

    number: int
    device: str
    corpora: Path
    out: Path
    deadline: float


def work(worker: Worker, jobs: Sequence[Job], turn: Any) -> None:
    """Take the next job until none is left or the time is over. turn: a shared counter with a lock."""
    torch.set_num_threads(1)
    device = torch.device(worker.device)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    start = sum(1 for _ in worker.out.glob(f"worker-{worker.number:02d}-*.jsonl"))
    corpora: dict[str, Corpus] = {}
    # A new file for each start: a line that an interruption cut in two stays the last of its file.
    with (worker.out / f"worker-{worker.number:02d}-{start:03d}.jsonl").open("x") as file:
        while time.monotonic() < worker.deadline:
            with turn.get_lock():
                number, turn.value = turn.value, turn.value + 1
            if number >= len(jobs):
                return
            job = jobs[number]
            size = SIZES[STAGES[job.stage].size]
            if job.corpus not in corpora:
                data = cost_corpora.read(worker.corpora, job.corpus)
                corpora[job.corpus] = Corpus.cut(data, size).to(device)
            head = {"stage": job.stage, "variant": job.variant, "corpus": job.corpus, "identity": job.identity()}
            begun = time.monotonic()
            try:
                found = train(VARIANTS[job.variant], size, corpora[job.corpus], job.seeds, device, worker.deadline)
            except OutOfTimeError:
                return
            except Exception as error:  # told, and the others go on
                told = f"{type(error).__name__}: {error}"
                print(f"{job} failed: {told}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                rows = [head | {"seed": seed, "failed": told[:500]} for seed in job.seeds]
            else:
                each = (time.monotonic() - begun) / len(job.seeds)
                rows = [
                    head
                    | {"seed": seed}
                    | {key: value if math.isfinite(value) else None for key, value in asdict(outcome).items()}
                    | {"seconds": round(each, 3), "machine": machine, "torch": str(torch.__version__)}
                    for seed, outcome in zip(job.seeds, found, strict=True)
                ]
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()


def run(
    stage: str, recipes: Sequence[str], corpora: Path, device: str, workers: int, seconds: float, out: Path
) -> None:
    """Run what is missing of a stage for at most `seconds`, in `workers` processes."""
    deadline = time.monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    for name in STAGES[stage].corpora:
        cost_corpora.read(corpora, name)
    jobs = jobs_of(stage, recipes)
    rows = read_lines([out])
    left = missing(jobs, rows)
    total, before = sum(len(job.seeds) for job in jobs), len(rows)
    context = multiprocessing.get_context("spawn")
    turn = context.Value("q", 0)
    crew = [
        context.Process(target=work, args=(Worker(number, device, corpora, out, deadline), left, turn), daemon=True)
        for number in range(workers)
    ]
    begun = told = time.monotonic()
    for process in crew:
        process.start()
    while any(process.is_alive() for process in crew):
        next(process for process in crew if process.is_alive()).join(1.0)
        if time.monotonic() - told > 20:
            told = time.monotonic()
            _tell(out, before, total, told - begun)
    _tell(out, before, total, time.monotonic() - begun)
    if broken := [process.exitcode for process in crew if process.exitcode]:
        raise SystemExit(f"{len(broken)} of {workers} workers ended with exit codes {broken}; what is written stays")


def _tell(out: Path, before: int, total: int, seconds: float) -> None:
    # Counted, not read: a line may be in the middle of being written.
    lines = sum(path.read_bytes().count(b"\n") for path in out.glob("*.jsonl"))
    rate = (lines - before) / seconds * 60
    print(f"{lines} of {total} runs, {seconds:.0f} s, {rate:.0f} runs a minute", file=sys.stderr, flush=True)


def prices(corpora: Path) -> None:
    """Print what a run of each size takes on one CPU thread: processor time of three steps and of 64 samples of
    validation, and the seconds that a whole run makes of them, which is a prediction."""
    torch.set_num_threads(1)
    data = cost_corpora.read(corpora, "python")

    def seconds(size: Size, variant: str) -> float:
        corpus = Corpus.cut(data, size)
        begun = time.process_time()
        train(VARIANTS[variant], size, corpus, [0], torch.device("cpu"))
        return time.process_time() - begun

    seconds(SIZES["toy"], "fp8")  # what is compiled is compiled
    for name in ("1.4M", "3M", "10M"):
        for variant in ("bf16", "fp8"):
            size = SIZES[name]
            short = replace(size, steps=2, warmup=1, validation=64)
            base = seconds(short, variant)
            step = (seconds(replace(short, steps=5), variant) - base) / 3
            sample = (seconds(replace(short, validation=128), variant) - base) / 64
            run_of_it = step * size.steps + sample * size.validation
            print(f"{name:<5} {variant:<5} {step:.3f} s a step, {sample:.4f} s a sample, {run_of_it:.0f} s a run")


def main() -> None:
    """Do what the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="print what is run")
    parser.add_argument("--make-corpora", type=Path, metavar="FOLDER", help="write both corpora, checked, and stop")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FOLDER", help="tables of what was run, and stop")
    parser.add_argument(
        "--prices", action="store_true", help="time a few steps of each size on one CPU thread, and stop"
    )
    parser.add_argument("--results", type=Path, help="folder for --report's JSON and pictures; default: the project's")
    parser.add_argument("--stage", choices=list(STAGES), default="screen")
    parser.add_argument("--recipes", nargs="+", default=[], help="for stage confirm, which the screen's report names")
    parser.add_argument("--corpora", type=Path, help="folder that --make-corpora wrote")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this many; what runs then is lost")
    parser.add_argument("--out", type=Path, help="folder of the results, kept, so that a study can go on")
    options = parser.parse_args()
    try:
        if options.plan:
            print(plan_text())
        elif options.make_corpora:
            cost_corpora.make(options.make_corpora)
        elif options.report:
            from benchmarks import cost_report  # matplotlib

            cost_report.report(options.report, options.results)
        elif options.prices and options.corpora:
            prices(options.corpora)
        elif options.corpora is None or options.out is None:
            parser.error("a run needs --corpora and --out")
        else:
            given = (options.stage, options.recipes, options.corpora, options.device)
            run(*given, options.workers, options.seconds, options.out)
    except HarnessError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
