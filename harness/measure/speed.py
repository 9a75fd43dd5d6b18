"""`harness doctor --speed`: the run's own step in every precision and compile mode of this machine, timed in turns.

A candidate is a rung of a recipe, with blocks compiled or not. Each is built once as `harness train` builds a run, and
makes its own training steps (contender.py) on the run's model, data and micro-batch. The first steps, which compile and
allocate, are timed apart. Then all take turns (turns.py), and speed_verdict.py says which one to take and why.

What is timed is the step: forward, backward, gate, update and judgement. Reading data, saves, snapshots and validations
are not part of it.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from harness.build import (
    Worker,
    build_data,
    build_plan,
    build_quiet_run,
    build_task,
    join_worker,
)
from harness.capability.probe import MachineFacts
from harness.core.config import RunConfig
from harness.core.errors import (
    ConfigError,
    HarnessError,
    Problem,
    is_out_of_memory,
    number_of,
    one_line,
)
from harness.core.files import read_json, shipped
from harness.core.memory import size_text
from harness.core.screen import say
from harness.core.state import RunLedger
from harness.engines.process_group import read_launch
from harness.estimate.recorder import Recorder
from harness.estimate.roofline import Op, Rates, device_seconds, seconds_by_cause
from harness.measure.card_device import devices_here, free_unused, memory_on
from harness.measure.contender import Contender
from harness.measure.held_data import HeldBatches
from harness.measure.machine_rates import measure_machine, roofline_rates
from harness.measure.speed_verdict import (
    COMPILED,
    Choice,
    Figures,
    Machine,
    Reason,
    Row,
    choose,
    reason,
)
from harness.measure.turns import LEAST_ROUNDS, steps_of_a_turn, take_turns
from harness.precision.backends.registry import BACKENDS
from harness.precision.plan import Plan, first_taken, judge
from harness.precision.recipe import Recipe, Rung, load_recipe
from harness.run_folder import fit_vocab

_NEVER = 10**6
# A step of the run may have hundreds of micro-batches. All but the first, which quantises the weights, are alike.
_MOST_MICRO_BATCHES = 4
_WINDOWS = 8
# Fewer turns say little about a spread.
_FEW_TURNS = 5
# A candidate gets turns only if LEAST_ROUNDS of them take at most this share of all the time.
_MOST_OF_TIME = 0.5
# Bytes of the profiler's record of one step.
_MOST_TRACE = 2**30
# Share of the free memory that all candidates together may hold.
_MOST_OF_MEMORY = 0.8
# Bytes that a cast to FP8 moves for each element of an operand: a read of 16 or 32 bits, and a write of 8.
_CAST_BYTES = 4.0


class Candidate(NamedTuple):
    """What may be taken.

    recipe: with `rung` as its only one.
    compile: of engine.compile.
    of_config: whether the recipe is the config's own.
    shadowed: whether the whole recipe takes another rung on this machine.
    """

    name: str
    recipe: Recipe
    rung: Rung
    compile: str
    of_config: bool
    shadowed: bool


def candidates(own: Recipe, facts: MachineFacts) -> list[Candidate]:
    """Every rung that this machine takes by some recipe, eager and compiled; the ladder of `own` comes first.

    Of recipes whose rungs compute the same, one stands for all: `own` if it takes this rung here, else one that takes
    it, so that naming the recipe asks for the rung. Of several, the rung comes first in its ladder: `bf16` says more
    than `auto`.
    """
    # A preset is for a fault of one model: the plain loss scale comes before it.
    every = map(load_recipe, shipped("recipes"))
    others = sorted(every, key=lambda each: each.loss_scale.preset != "default")
    found: dict[str, Candidate] = {}
    ranks: dict[str, tuple[bool, int]] = {}
    for place, recipe in enumerate([own, *others]):
        judged = judge(recipe, facts)
        taken = first_taken(judged)
        for number, (rung, each) in enumerate(zip(recipe.ladder, judged, strict=True)):
            if not each.takes:
                continue
            only = recipe.model_copy(update={"ladder": [rung]})
            shadowed = number != taken
            computation = _computation(recipe, rung)
            place_in_ladder = 0 if place == 0 else number
            rank = (shadowed, place_in_ladder)
            if computation not in found or rank < ranks[computation]:
                ranks[computation] = rank
                # One that replaces another has its place in the order.
                found[computation] = Candidate(rung.name, only, rung, "none", place == 0, shadowed)

    # Recipes may give a rung of one name other settings: then the recipe's name tells the candidates apart.
    rungs = [each.name for each in found.values()]
    made: list[Candidate] = []
    for each in found.values():
        name = each.name
        if rungs.count(name) > 1:
            name = f"{name} ({each.recipe.name})"
        made.append(each._replace(name=name))
        made.append(each._replace(name=f"{name}{COMPILED}", compile="blocks"))
    return made


def _computation(recipe: Recipe, rung: Rung) -> str:
    """What a rung computes, as far as the recipe changes it: two recipes with the same text compute the same."""
    what: dict[str, Any] = {"rung": rung.name, "float32": recipe.float32_matmul}
    what["keep_fp32"] = list(recipe.layers.keep_fp32)
    if rung.precision == "fp8":
        # A backend without scalings has a rule of its own, `dynamic`, which the others do not read.
        ignored = {"dynamic"} if BACKENDS[rung.backend].scalings else {"scaling"}
        what["fp8"] = recipe.fp8.model_dump(mode="json", exclude=ignored)
        what["layers"] = recipe.layers.model_dump(mode="json")
    return json.dumps(what, sort_keys=True)


@dataclass(slots=True)
class SpeedReport:
    """What --speed measured.

    device: where.
    threads: of the processor.
    step: what one step was, for people.
    minutes: asked for.
    machine: the rates that reasons are based on.
    rows: every candidate, in the order of the ladder.
    order: candidates in the order of their turns.
    together: whether all were in memory at once; else one after another, so that they took no turns.
    choice: what to take; None if nothing could be measured.
    reasons: why each of the others is slower, by its name.
    """

    device: str
    threads: int
    step: str
    minutes: float
    machine: Machine
    rows: list[Row] = field(default_factory=list[Row])
    order: list[str] = field(default_factory=list[str])
    together: bool = True
    choice: Choice | None = None
    reasons: dict[str, Reason] = field(default_factory=dict[str, Reason])

    def as_dict(self) -> dict[str, Any]:
        """For --json. Times in seconds, memory in bytes."""
        taken = tied = None
        if self.choice is not None:
            row = self.choice.taken
            compile = "blocks" if row.compiled else "none"
            taken = {
                "name": row.name,
                "recipe": row.recipe,
                "shadowed": row.shadowed,
                "engine.compile": compile,
            }
            tied = [row.name for row in self.choice.tied]
        return {
            "device": self.device,
            "threads": self.threads,
            "step": self.step,
            "minutes": self.minutes,
            "machine": {
                "flops_per_second": dict(self.machine.products),
                "bytes_per_second": self.machine.bandwidth,
                "launch_seconds": self.machine.launch_seconds,
            },
            "together": self.together,
            "take": taken,
            "tied": tied,
            "candidates": [
                {**row.as_dict(), "reason": self._reason(row.name)} for row in self.rows
            ],
        }

    def _reason(self, name: str) -> dict[str, str] | None:
        if name not in self.reasons:
            return None
        return self.reasons[name]._asdict()


def measure_speed(
    config: RunConfig, recipe: Recipe, facts: MachineFacts, minutes: float
) -> SpeedReport:
    """Time the step of `config` in every candidate. No file outlives this, and no run is made.

    minutes: of turns; building, compiling and what is counted come on top.

    Raises ConfigError under a launcher, and HarnessError for a config that `harness train` refuses.
    """
    if read_launch().launched:
        what = "this is one process of a launcher's"
        fix = "start it alone: harness doctor --speed"
        raise ConfigError(Problem(what, "harness doctor --speed", fix=fix))
    worker = join_worker(_alone(config), "python")
    device = devices_here(facts)[0]
    machine = measure_machine(device)
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        rates = roofline_rates(machine, device.is_card)
        bench = _Bench(config, worker, Path(folder), rates)
        threads = torch.get_num_threads()
        report = SpeedReport(device.name, threads, bench.step_text, minutes, machine)
        _measure(bench, candidates(recipe, facts), report)

    # Every candidate that was not taken gets the reason.
    report.choice = choose(report.rows)
    if report.choice is not None:
        for row in report.rows:
            if row.status == "measured" and row not in report.choice.tied:
                report.reasons[row.name] = reason(row, report.choice.taken, machine)
    return report


def _alone(config: RunConfig) -> RunConfig:
    """`config` for one process that trains without saving, validating or reporting anything.

    Its step has at most `_MOST_MICRO_BATCHES` micro-batches.
    """
    train = config.train
    count = min(train.global_batch // train.micro_batch, _MOST_MICRO_BATCHES)
    changed = {
        "train": {"steps": _NEVER, "global_batch": count * train.micro_batch, "eval_every": 0},
        "engine": {"name": "auto"},
        "checkpoint": {"every": 0},
        "tracking": {"mlflow": False, "report": False},
    }
    sections: dict[str, Any] = {}
    for name, values in changed.items():
        sections[name] = getattr(config, name).model_copy(update=values)
    return config.model_copy(update=sections)


class _Bench:
    """Builds candidates of one config, and measures single steps of them."""

    def __init__(self, config: RunConfig, worker: Worker, folder: Path, rates: Rates) -> None:
        asked = config.train.global_batch // config.train.micro_batch
        config = _alone(config)
        data = build_data(config, folder, worker)
        self.config = fit_vocab(config, data.ids, data.vocab)
        self.worker = worker
        self.data = HeldBatches(data, _WINDOWS)
        self.is_card = worker.device.type == "cuda"
        self._folder = folder
        self._rates = rates

        train = self.config.train
        count = train.global_batch // train.micro_batch
        batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
        self.step_text = f"{batches} of {number_of(train.micro_batch, 'sample')}"
        if self.data.tokens_per_sample > 1:
            self.step_text += f" of {self.data.tokens_per_sample} tokens"
        if count < asked:
            self.step_text += f"; they stand for {asked}, so the update weighs more than in the run"

    def build(self, candidate: Candidate, stack: ExitStack) -> tuple[Contender, Plan]:
        """The run of `candidate`, as `harness train` builds it; `stack` closes it. Raises HarnessError."""
        engine = self.config.engine.model_copy(update={"compile": candidate.compile})
        config = self.config.model_copy(update={"engine": engine})
        plan, model = build_plan(config, candidate.recipe, self.worker)
        task, _ = build_task(config, plan, model, self.data)

        folder = Path(tempfile.mkdtemp(dir=self._folder))
        run = build_quiet_run(
            config,
            candidate.recipe,
            folder,
            self.worker,
            plan,
            model,
            self.data,
            RunLedger(),
            task,
        )
        stack.enter_context(run.telemetry)
        stack.callback(run.stop.uninstall)
        return Contender(run, plan.resolved), plan

    def allocated(self) -> int:
        """Bytes of tensors on the card; 0 on a processor."""
        if not self.is_card:
            return 0
        return torch.cuda.memory_allocated(self.worker.device)

    def peak(self, contender: Contender, held: int) -> int:
        """The most bytes of tensors in one step. held: bytes that stay between its steps."""
        if self.is_card:
            before = self.allocated()
            torch.cuda.reset_peak_memory_stats(self.worker.device)
            contender.steps(1)
            return torch.cuda.max_memory_allocated(self.worker.device) - before + held
        # Without this the profiler's library writes a line to the terminal at its start and its end.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as profiler:
            contender.steps(1)
        return held + _most_allocated(profiler, self._folder)

    def figures(self, contender: Contender, plan: Plan) -> Figures:
        """Count the work of one eager step."""
        recorder = Recorder("cuda" if self.is_card else "cpu")
        with recorder:
            contender.steps(1)
        # Sizes matter to FP8 alone.
        if plan.rung.precision != "fp8":
            return figures_of(recorder.ops, self._rates)
        linears = [layer for layer in plan.layers if layer.shape]
        misaligned = [layer for layer in linears if "not multiples of" in layer.reason]
        return figures_of(recorder.ops, self._rates, len(linears), len(misaligned))


def _most_allocated(profiler: profile, folder: Path) -> int:
    """The most bytes that torch's allocator for the processor had given out since the profiler began."""
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = read_json(path, _MOST_TRACE)["traceEvents"]
    path.unlink()
    memory = [event for event in events if event.get("name") == "[memory]"]
    sizes = [(event["ts"], event["args"]["Bytes"]) for event in memory]
    # A release has a negative size, so the sum so far is what is given out.
    live = most = 0
    for _, size in sorted(sizes, key=lambda each: each[0]):
        live += size
        most = max(most, live)
    return most


def figures_of(ops: Sequence[Op], rates: Rates, linears: int = 0, misaligned: int = 0) -> Figures:
    """The work of a step's operations, on a device with these rates. linears, misaligned: as of `Figures`."""
    causes = seconds_by_cause(ops, rates)
    total = device_seconds(ops, rates)
    arithmetic = sum(causes.get(name, 0.0) for name in ("gemms", "fp8-gemms", "attention"))
    memory = sum(causes.get(name, 0.0) for name in ("memory-bandwidth", "optimizer"))
    products = [op for op in ops if op.flops]
    flops = sum(op.flops for op in products)
    # Where FP8 is no faster, no product is too small for it.
    small = math.nan
    if rates.gemm_fp8 > rates.gemm_half and flops:
        small = sum(op.flops for op in products if _too_small(op, rates)) / flops
    return Figures(
        operations=sum(op.kernels for op in ops),
        products=len(products),
        flops=flops,
        bytes=sum(op.reads + op.writes for op in ops),
        product_share=arithmetic / total if total else 0.0,
        memory_share=memory / total if total else 0.0,
        small_share=small,
        linears=linears,
        misaligned=misaligned,
    )


def _too_small(op: Op, rates: Rates) -> bool:
    """Whether a cast of the operands of a product in 16 bits to FP8 takes longer than FP8 could save."""
    saved = op.flops / rates.gemm_half - op.flops / rates.gemm_fp8
    # In 16 bits an element has two bytes. Both operands are cast, each by a kernel of its own.
    elements = op.reads / 2
    moving = elements * _CAST_BYTES / rates.bandwidth
    cast = max(moving, 2 * rates.shortest_seconds)
    return saved < cast


def _held(contender: Contender, bench: _Bench, before: int) -> int:
    """Bytes that a candidate holds between its steps. before: allocated when it was not there, on a card."""
    if bench.is_card:
        return bench.allocated() - before
    tensors = [*contender.run.engine.module.parameters(), *contender.run.engine.module.buffers()]
    optimizer: torch.optim.Optimizer = contender.run.engine.optimizer  # type: ignore[attr-defined]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    # Tensors that share memory, such as tied weights, count once.
    bytes_of: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        bytes_of[storage.data_ptr()] = storage.nbytes()
    return sum(bytes_of.values())


@dataclass(slots=True)
class _Ready:
    """A candidate that is built and has made its first steps. once: seconds of a step."""

    row: Row
    contender: Contender
    stack: ExitStack
    once: float
    held: int


def _measure(bench: _Bench, asked: Sequence[Candidate], report: SpeedReport) -> None:
    """Build all candidates and let them take turns; where memory is short, one after another."""
    free = memory_on(bench.worker.device)
    seconds = 60.0 * report.minutes
    ready: dict[str, _Ready] = {}
    counted: dict[str, Figures] = {}
    # All candidates run the code of the same classes, and torch counts compiled variants of code, not of objects.
    limit = torch._dynamo.config.recompile_limit * len(asked)
    with torch._dynamo.config.patch(recompile_limit=limit):
        for candidate in asked:
            recipe = bench.config.recipe if candidate.of_config else candidate.recipe.name
            row = Row(candidate.name, recipe, candidate.rung.precision)
            row.shadowed = candidate.shadowed
            row.compiled = candidate.compile == "blocks"
            report.rows.append(row)
            say(f"building {row.name} ...", file=sys.stderr)
            made = _prepare(bench, candidate, row, seconds)
            if made is None and ready and row.out_of_memory:
                # Not beside the others: they take their turns now, and make room.
                report.together = False
                _turns(ready, report, seconds * len(ready) / len(asked))
                made = _prepare(bench, candidate, row, seconds)

            # The compiled form does the work of the eager one, which comes before it.
            if row.figures is not None:
                counted[row.eager_name] = row.figures
            row.figures = counted.get(row.eager_name)
            if made is None:
                continue
            ready[row.name] = made
            # What a step takes beyond what stays is there once, as only one candidate computes at a time.
            needed = len(asked) * made.held + max((each.peak_bytes or 0) for each in report.rows)
            if needed > _MOST_OF_MEMORY * free:
                report.together = False
            if not report.together:
                _turns(ready, report, seconds * len(ready) / len(asked))
        if ready:
            _turns(ready, report, seconds)


def _turns(ready: dict[str, _Ready], report: SpeedReport, seconds: float) -> None:
    """Let candidates take turns, write what came out into their rows, and free them: `ready` is empty then."""
    counts = {name: steps_of_a_turn(each.once) for name, each in ready.items()}
    contenders = {name: each.contender for name, each in ready.items()}
    turns = take_turns(contenders, counts, seconds)
    report.order += turns.order
    for name, each in ready.items():
        row, contender = each.row, each.contender
        row.steps, row.seconds = counts[name], turns.seconds[name]
        if name in turns.failures:
            row.status, row.why = "failed", turns.failures[name]
        _conclude(row, contender)
        each.stack.close()
    # All memory is freed before the next candidate is built.
    contenders.clear()
    ready.clear()


def _conclude(row: Row, contender: Contender) -> None:
    """What its steps were like: loss, skipped updates, layers that left FP8, code that ran eager after all."""
    facts, run = contender.last, contender.run
    row.skipped = contender.skipped
    if facts is not None and math.isfinite(facts.loss):
        row.loss = facts.loss
    # A time of steps that train on NaN is no time to choose by.
    if contender.nonfinite and row.status == "measured":
        row.status = "not finite"
        row.why = f"the loss was NaN or infinite in {contender.nonfinite} of {run.state.step} steps"
    if contender.skipped:
        row.notes.append(f"{contender.skipped} of {run.state.step} updates were skipped")
    if contender.demoted:
        layers = ", ".join(sorted(contender.demoted)[:3])
        row.notes.append(
            f"{number_of(len(contender.demoted), 'layer')} left FP8 while they were timed: {layers}"
        )
    if run.watch is not None and (text := run.watch.take()):
        row.notes.append(f"torch gave up compiled code for eager: {text}")


def _prepare(bench: _Bench, candidate: Candidate, row: Row, seconds: float) -> _Ready | None:
    """Build `candidate` and let it make its first steps. None, with the reason in `row`, if it gets no turns."""
    # What is left of a candidate before, which may have failed half-way, would be taken for this one's.
    free_unused()
    before = bench.allocated()
    # It may be the second try: what the first one left in the row is forgotten.
    row.status = "measured"
    row.why = ""
    row.out_of_memory = False
    with ExitStack() as stack:
        try:
            # What cannot be built gets a reason, and costs the other candidates nothing.
            contender, plan = bench.build(candidate, stack)
        except HarnessError as error:
            row.status = "cannot be built"
            texts: list[str] = []
            for each in error.problems:
                text = f"{each.what}: {each.why or each.fix}"
                texts.append(" ".join(text.split()))
            row.why = "; ".join(texts)
            return None
        except Exception as error:
            row.status, row.why = "cannot be built", one_line(error)
            row.out_of_memory = is_out_of_memory(error)
            return None
        try:
            # The first step compiles and allocates. The second one is like all later ones.
            row.first_seconds = contender.steps(1)
            held = _held(contender, bench, before)
            row.peak_bytes = bench.peak(contender, held)
            once = contender.steps(1)
            # A candidate that would take the time of the others is not timed.
            if LEAST_ROUNDS * once > _MOST_OF_TIME * seconds:
                row.status = "too slow"
                limit = f"{seconds / 60:g} minutes"
                row.why = f"one step takes {once:.1f} s: too few fit into {limit}"
                _conclude(row, contender)
                return None
            # Operations are counted in eager mode, where each of them is seen.
            if not row.compiled:
                row.figures = bench.figures(contender, plan)
        except Exception as error:
            row.status, row.why = "failed", one_line(error)
            row.out_of_memory = is_out_of_memory(error)
            return None
        return _Ready(row, contender, stack.pop_all(), once, held)


def memory_text(report: SpeedReport) -> str:
    """What the column of memory counts."""
    if report.device == "processor":
        return "memory: bytes of tensors at the peak of a step, as torch's allocator counts them"
    return "memory: torch.cuda.max_memory_allocated of a step, without other candidates"


def lines(report: SpeedReport) -> list[str]:
    """The report as lines of text."""
    threads = ""
    if report.device == "processor":
        threads = f", {number_of(report.threads, 'thread')}"
    found = [f"{report.device}{threads}; a step: {report.step}"]
    if not report.together:
        found.append("Memory is short: each candidate was built and timed after the other.")
    timed = [row for row in report.rows if row.seconds]
    width = max((len(row.name) for row in timed), default=0)
    head = f"  {'':<{width}}  {'ms a step':>10}  {'middle half':>19}  {'turns':>9}"
    found.append(f"{head}  {'memory':>10}  {'first step':>10}")
    for row in timed:
        mark = ">" if report.choice is not None and row is report.choice.taken else " "
        low, median, high = (1e3 * each for each in row.spread)
        turns = f"{len(row.seconds)} x {row.steps}"
        memory = size_text(row.peak_bytes) if row.peak_bytes is not None else "?"
        line = f"{mark} {row.name:<{width}}  {median:>10.2f}  {low:>8.2f} - {high:>8.2f}"
        found.append(f"{line}  {turns:>9}  {memory:>10}  {row.first_seconds or 0.0:>8.2f} s")
        if row.status != "measured":
            found.append(f"    {row.status}: {row.why}")
        found += [f"    {note}" for note in row.notes]
    found.append(f"({memory_text(report)})")
    return [*found, *_not_timed(report), "", *_verdict(report)]


def _not_timed(report: SpeedReport) -> list[str]:
    """A line for each reason why candidates have no times, with all candidates that it holds for."""
    names: dict[str, list[str]] = {}
    for row in report.rows:
        if not row.seconds:
            names.setdefault(f"{row.status}: {row.why}", []).append(row.name)
    found: list[str] = []
    for why, those in names.items():
        found.append(f"{'; '.join(those)}: {why}")
    return found


def _verdict(report: SpeedReport) -> list[str]:
    if report.choice is None:
        return ["Nothing could be measured: the lines above say why."]
    taken = report.choice.taken
    compile = "blocks" if taken.compiled else "none"
    found = [f"Take {taken.name}: --recipe {taken.recipe} engine.compile={compile}"]
    if taken.shadowed:
        found = [
            f"Take {taken.name}: a copy of recipe {taken.recipe} without the rungs before this one, "
            f"engine.compile={compile}"
        ]
    others = [row.name for row in report.choice.tied if row is not taken]
    if others:
        names = ", ".join(others)
        text = f"As fast, within the middle half of their turns: {names}. The first one wins."
        found.append(text)
    fewest = min(len(row.seconds) for row in report.rows if row.status == "measured")
    if fewest < _FEW_TURNS:
        say = "says" if fewest == 1 else "say"
        turns = number_of(fewest, "turn")
        found.append(f"{turns} each {say} little: give more --minutes to be sure.")
    # Candidates with the same reason share a line.
    slower: dict[Reason, list[str]] = {}
    for name, why in report.reasons.items():
        slower.setdefault(why, []).append(name)
    for why, those in slower.items():
        found.append(f"Slower, {why.word}: {'; '.join(those)}: {why.text}")
    return found
