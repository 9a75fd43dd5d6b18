"""Predicts what a config and a recipe take on a card: memory from the trace, time from the roofline.

`predict` picks the rung that the recipe would take on the card and traces a step on it (`trace.py`). It traces the same
run in bf16 too, as the baseline.

Memory: the trace's peak of live storages, plus what a process's CUDA context takes. Where blocks are compiled, less is
live (`fusion.py`). Fragmentation is not predicted.

Time: each operation of the traced step takes as long as the roofline says (`roofline.py`), one after the other. If the
host needs longer to launch the kernels, the host's time counts instead. Where the run would compile its blocks, their
operations are fused first (`fusion.py`). A run samples FP8 statistics on one of `stats_every` steps, so the mean step
is a weighted mean of a usual step and a sampled one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from harness.build import refusals
from harness.capability.cards import GIB, Card
from harness.checkpoint.overlapped import buffer_bytes
from harness.core.config import RunConfig
from harness.core.errors import ConfigError, Problem
from harness.core.facts import RungVerdict
from harness.data.batches import check_world
from harness.engines.process_group import read_launch
from harness.estimate.roofline import (
    Bottleneck,
    Calibration,
    Op,
    Rates,
    bottleneck,
    gap_seconds,
    is_host_bound,
    seconds_of,
    step_seconds,
)
from harness.estimate.trace import SAMPLED, USUAL, Policy, Trace, engine_of, facts_of, trace
from harness.precision.backends.registry import BACKENDS, PLAIN
from harness.precision.compiling import compiles
from harness.precision.plan import Plan, take_rung
from harness.precision.recipe import Fp8Config, Recipe, Rung

_BF16 = f"{PLAIN}:bf16"
_MOST_KINDS = 6
_ROUTED = "experts: each gets as many tokens as any other; how a trained router chooses is not known beforehand"


@dataclass(frozen=True, slots=True)
class Timing:
    """Predicted times, in seconds.

    usual: a step that measures nothing extra.
    sampled: a step that samples FP8 statistics.
    mean: the mean over `stats_every` steps.
    kernels: kernel launches of a usual step.
    host_bound: whether the host launches kernels more slowly than the card runs them.
    by_purpose: seconds of a usual step by purpose, longest first.
    bottleneck: what most of a usual step's time goes to.
    """

    usual: float
    sampled: float
    mean: float
    kernels: int
    host_bound: bool
    by_purpose: dict[str, float]
    bottleneck: Bottleneck


@dataclass(frozen=True, slots=True)
class Prediction:
    """Everything that `harness estimate` reports.

    card, recipe: what was asked for.
    plan: what `harness train` plans on the card; its rung is the one that the card takes.
    trace, timing: of that rung, or of the backend that stands in for it; compiled where the run would be.
    eager: timing of the same without compilation.
    bf16, bf16_timing: the same run on the rung autocast:bf16; None on a card without bf16.
    tokens: tokens or samples of a step, over all ranks.
    counted: what `tokens` counts: "tokens", or "samples" of a data set.
    steps: of the whole run.
    ranks: processes that share the global batch.
    calibration: the card's rates.
    snapshots: bytes on the card for copies of the state (`guard.snapshot_copy: overlapped`).
    notes: what the reader has to know of the estimate.
    """

    card: Card
    recipe: str
    plan: Plan
    trace: Trace
    timing: Timing
    eager: Timing
    bf16: Trace | None
    bf16_timing: Timing | None
    tokens: int
    counted: str
    steps: int
    ranks: int
    calibration: Calibration
    snapshots: int
    notes: tuple[str, ...]

    @property
    def needed(self) -> int:
        """Bytes on the card: the allocator's peak, plus what snapshots and CUDA itself take."""
        return self.trace.peak + self.snapshots + self.calibration.rates.context_bytes

    @property
    def fits(self) -> bool:
        """Whether `needed` is within the card's memory. Fragmentation is not predicted."""
        return self.needed <= self.card.memory

    @property
    def flops(self) -> int:
        """FLOPs of the GEMMs, convolutions and attention of a usual step of one rank.

        Of a mixture of experts, the experts that run count.
        """
        return round(sum(op.flops for op in self.trace.steps[USUAL]))

    @property
    def hours(self) -> float:
        """Hours of all steps of the run, without its start, validation and saves."""
        return self.hours_of(self.timing)

    def hours_of(self, timing: Timing) -> float:
        """Hours of as many steps of another time."""
        return self.steps * timing.mean / 3600

    @property
    def layers(self) -> dict[str, int]:
        """Layers with matrix products by the precision that they run in, the most frequent first.

        Norms, embeddings and the like, which are in fp32 on every rung, are left out.
        """
        products = (row for row in self.plan.layers if row.shape or row.precision != "fp32")
        return dict(Counter(row.precision for row in products).most_common())

    def as_dict(self) -> dict[str, Any]:
        """The output of `--json`: sizes in GiB (2^30 bytes), times in ms, tokens over all ranks, FLOPs of one rank."""
        timing = self.timing
        baseline = self.bf16_timing
        not_taken = [each for each in self.plan.rungs if not each.taken]
        skipped = [{"rung": each.rung, "reason": each.reason} for each in not_taken]

        # A card without bf16 has no baseline.
        ratio = usual_ratio = bf16_ms = None
        if baseline is not None:
            ratio = round(timing.mean / baseline.mean, 4)
            usual_ratio = round(timing.usual / baseline.usual, 4)
            bf16_ms = _ms(baseline.mean)

        return {
            "card": self.card.name,
            "recipe": self.recipe,
            "rung": self.plan.resolved,
            "estimated": self.trace.rung.name,
            "passed_over": skipped,
            "peak_gib": _gib(self.trace.peak),
            "bf16_peak_gib": None if self.bf16 is None else _gib(self.bf16.peak),
            "snapshots_gib": _gib(self.snapshots),
            "context_gib": _gib(self.calibration.rates.context_bytes),
            "card_gib": _gib(self.card.memory),
            "fits": self.fits,
            "at_peak_gib": {kind: _gib(size) for kind, size in largest(self.trace)},
            "ratio_vs_bf16": ratio,
            "ratio_vs_bf16_usual_step": usual_ratio,
            "calibrated": self.calibration.calibrated,
            "step_ms": _ms(timing.mean),
            "compiled": self.trace.compiled,
            "eager_step_ms": _ms(self.eager.mean),
            "usual_step_ms": _ms(timing.usual),
            "sampled_step_ms": _ms(timing.sampled),
            "bf16_step_ms": bf16_ms,
            "bf16_compiled": None if self.bf16 is None else self.bf16.compiled,
            f"{self.counted}_per_second": round(self.tokens / timing.mean),
            "ranks": self.ranks,
            "collectives": [
                {"what": what, "phase": phase, "count": count, "bytes": size}
                for (what, phase), (count, size) in exchanged(self.trace).items()
            ],
            "flops": self.flops,
            "kernels": timing.kernels,
            "host_bound": timing.host_bound,
            "by_purpose_ms": {name: _ms(seconds) for name, seconds in timing.by_purpose.items()},
            "waits": [{"what": wait.what, "where": list(wait.where)} for wait in self.trace.waits],
            # Of the three traced steps together, as the waits.
            "pageable_copies": len(pageable(self.trace)),
            "parameters": self.trace.parameters,
            "fp8_layers": sum(layer.precision == "fp8" for layer in self.plan.layers),
            "linear_layers": sum(bool(layer.shape) for layer in self.plan.layers),
            "notes": list(self.notes),
        }


# Optimizers whose update runs on fake tensors: torch's own.
_RUN_ON_FAKES = ("adamw", "sgd", "muon")


class Traces:
    """The traces made so far. Cards of one kind share them: those that differ in memory and speed alone."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Trace] = {}

    def get(
        self,
        config: RunConfig,
        recipe: Recipe,
        card: Card,
        rung: Rung,
        ranks: int,
        intended: Policy | None = None,
    ) -> Trace:
        """As `trace`. Raises ConfigError also for a model that cannot run on fake tensors."""
        # Of the card, a run asks its capability and the number of its processors (`trace.fake_card`).
        kind = (card.capability, card.processors)
        policies = [(recipe, rung), *([intended] if intended else [])]
        names = tuple((policy.sha256(), taken.name) for policy, taken in policies)
        key = (config.model_dump_json(), names, kind, ranks)
        if key not in self._made:
            self._made[key] = _trace(config, recipe, card, rung, ranks, intended)
        return self._made[key]


def trace_rung(
    config: RunConfig, recipe: Recipe, card: Card, rung: Rung, ranks: int, traces: Traces
) -> tuple[Trace, list[str]]:
    """The trace of `rung`, or of what stands in for it, compiled where the run would be, and notes that say so.

    Raises ConfigError as training would, and for a model that cannot run on fake tensors.
    """
    if problems := refusals(engine_of(config), config, recipe, rung, "cuda"):
        raise ConfigError(problems)
    estimated, stand_in, notes = _stand_in(rung, recipe)
    made = traces.get(config, stand_in, card, estimated, ranks, (recipe, rung))
    return _as_run(made, config, recipe, rung), notes


def _as_run(made: Trace, config: RunConfig, recipe: Recipe, rung: Rung) -> Trace:
    """The trace with compiled blocks if the run on `rung` would compile them."""
    asked = config.engine.compile == "blocks" or not BACKENDS[rung.backend].not_by_default
    compiled = (
        config.engine.may_compile(on_gpu=True)
        and asked
        and compiles(rung, recipe.layers.fuse)
        and any(op.block is not None for op in made.eager[USUAL])
    )
    return replace(made, compiled=compiled)


def predict(
    config: RunConfig,
    recipe: Recipe,
    card: Card,
    calibration: Calibration,
    ranks: int = 1,
    traces: Traces | None = None,
) -> Prediction:
    """Trace the run on `card` and, if the card has bf16, the same run in bf16.

    ranks: processes that share the global batch. One of them is estimated, without the time of communication.
    traces: those that other cards left; None: there are none.
    Raises MachineError if no rung of the recipe runs on the card. Raises ConfigError as training would, and if the
    config asks for DeepSpeed, or the model or optimizer cannot run on fake tensors.
    """
    _check_estimable(config, ranks)
    notes = _notes(config, recipe, ranks)
    shared = traces or Traces()

    # `take_rung` calls this with each rung that the card supports, until one has something to run in this model.
    def trace_on(rung: Rung, rungs: list[RungVerdict]) -> tuple[Trace, Plan, list[str]]:
        made, replaced = trace_rung(config, recipe, card, rung, ranks, shared)
        return made, replace(made.plan, rungs=tuple(rungs)), replaced

    # The device is for what ranks exchange to agree on a rung. An estimate is one process, without a GPU.
    made, plan, replaced = take_rung(recipe, facts_of(card), torch.device("cpu"), trace_on)
    timing = time_steps(made.steps, calibration.rates, recipe.fp8.stats_every)
    eager = time_steps(made.eager, calibration.rates, recipe.fp8.stats_every)

    # The baseline: the same run in bf16, unless it is in bf16 already.
    bf16: Trace | None = None
    bf16_timing: Timing | None = None
    if made.rung.name == _BF16:
        bf16 = made
    elif card.capability >= (8, 0):
        baseline = Rung(backend=PLAIN, precision="bf16", tiers=list(plan.rung.tiers))
        plain = shared.get(config, recipe, card, baseline, ranks)
        bf16 = _as_run(plain, config, recipe, baseline)
    else:
        notes.append(f"a {card.name} has no bf16 to compare with")
    if bf16 is not None:
        bf16_timing = time_steps(bf16.steps, calibration.rates, recipe.fp8.stats_every)

    # A step of text has tokens. A data set of the user's own has samples.
    of_text = config.data.target is None
    tokens = config.train.global_batch * (config.data.context if of_text else 1)
    advice = [made.advice] if made.advice else []
    if bf16 is not None and bf16.compiled and not made.compiled:
        advice.append(_eager_beside_compiled(plan.rung, recipe))
    routed = [_ROUTED] if made.routed else []
    return Prediction(
        card=card,
        recipe=recipe.name,
        plan=plan,
        trace=made,
        timing=timing,
        eager=eager,
        bf16=bf16,
        bf16_timing=bf16_timing,
        tokens=tokens,
        counted="tokens" if of_text else "samples",
        steps=config.train.steps,
        ranks=ranks,
        calibration=calibration,
        snapshots=snapshot_bytes(config, made, card, calibration.rates),
        notes=(*replaced, *_assumed(plan.rung), *advice, *routed, *notes, *calibration.notes),
    )


def snapshot_bytes(config: RunConfig, made: Trace, card: Card, rates: Rates) -> int:
    """Bytes of `card` that overlapped snapshots take: a copy of the state, or less where there is no room for it."""
    guard, first = config.guard, config.guard.snapshot_every
    taken = guard.enabled and 0 < first <= config.train.steps
    if not taken or guard.snapshot_copy == "blocking":
        return 0
    free = card.memory - rates.context_bytes - made.peak
    return buffer_bytes(made.state, free, card.memory)


def _check_estimable(config: RunConfig, ranks: int) -> None:
    """Raise ConfigError for what an estimate does not cover."""
    if read_launch().launched:
        what = "this is one process of a launcher's"
        fix = "start it alone, with --ranks for the number of processes"
        raise ConfigError(Problem(what, "harness estimate", fix=fix))

    # What a run would refuse, an estimate refuses, too.
    check_world(config.train.global_batch, config.train.micro_batch, ranks)

    # Engines and optimizers that do not run on fake tensors.
    engine, key = "", "engine.name"
    if config.engine.deepspeed is not None:
        engine, key = "DeepSpeed", "engine.deepspeed"
    elif config.engine.name == "deepspeed":
        engine = "DeepSpeed"
    if engine:
        what = f"the engine {engine} is not estimated"
        why = "it moves memory and gradients in ways of its own"
        fix = "leave it out to estimate the engine for torch; docs/guide/engines.md says what others hold"
        raise ConfigError(Problem(what, key, why, fix))

    if config.train.optimizer not in _RUN_ON_FAKES:
        what = "its update is not estimated"
        why = "it does not run on fake tensors"
        fix = f"one of {', '.join(_RUN_ON_FAKES)}; docs/guide/training.md has what each keeps for a parameter"
        raise ConfigError(Problem(what, f"train.optimizer {config.train.optimizer!r}", why, fix))


def exchanged(made: Trace) -> dict[tuple[str, str], tuple[int, int]]:
    """What ranks exchange in a usual step: (kind, phase) -> how often, and bytes of the whole tensors."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for each in made.collectives:
        count, size = found.get((each.name, each.phase), (0, 0))
        found[each.name, each.phase] = (count + 1, size + each.bytes)
    return found


def largest(made: Trace) -> list[tuple[str, int]]:
    """The kinds of bytes at the peak, largest first. Kinds under 1% of the peak are left out."""
    kinds: list[tuple[str, int]] = []
    for kind, size in made.peak_kinds.most_common(_MOST_KINDS):
        if size > made.peak / 100:
            kinds.append((kind, size))
    return kinds


def pageable(made: Trace) -> list[str]:
    """Code that copies to the card from memory that is not page-locked. The host waits for such a copy."""
    found: list[str] = []
    for copy in made.transfers:
        if copy.direction == "cpu->cuda" and not copy.pinned:
            innermost = copy.where[0] if copy.where else "?"
            found.append(innermost)
    return found


def _stand_in(rung: Rung, recipe: Recipe) -> tuple[Rung, Recipe, list[str]]:
    """The rung that is traced for `rung`, its recipe, and notes that say so if they differ.

    A library whose kernels cannot run on fake tensors names a backend that stands in for it.
    """
    backend = BACKENDS[rung.backend]
    if not backend.stand_in:
        return rung, recipe, []
    other = rung.model_copy(update={"backend": backend.stand_in})
    note = f"{rung.name} is estimated as {other.name}: {rung.backend}'s kernels do not run on fake tensors"
    if recipe.fp8.scaling in BACKENDS[backend.stand_in].scalings:
        return other, recipe, [note]

    # The stand-in has no such scaling either: take its default one.
    fp8 = Fp8Config(format=recipe.fp8.format, stats_every=recipe.fp8.stats_every)
    note += f", and {recipe.fp8.scaling} scaling as {fp8.scaling} scaling"
    return other, recipe.model_copy(update={"fp8": fp8}), [note]


def _eager_beside_compiled(rung: Rung, recipe: Recipe) -> str:
    """What to know of a rung whose blocks run eager, where those of bf16 would be compiled."""
    note = f"{rung.name} runs in eager mode, and bf16 in compiled blocks"
    other = BACKENDS[rung.backend].stand_in
    if other and recipe.fp8.scaling in BACKENDS[other].scalings:
        note += f"; {other}:{rung.precision} computes by the same rule and is compiled (--recipe fp8_native)"
    return note


def _assumed(rung: Rung) -> list[str]:
    """Notes on software that the card's machine is assumed to have, whether or not this one has it."""
    if rung.precision != "fp8":
        return []
    needed = f"{BACKENDS[rung.backend].library} and " if BACKENDS[rung.backend].stand_in else ""
    return [f"assumed on the card's machine: {needed}triton, which comes with torch's CUDA builds"]


def _notes(config: RunConfig, recipe: Recipe, ranks: int) -> list[str]:
    """Notes on parts of the run that the estimate leaves out."""
    notes: list[str] = []
    if ranks > 1:
        notes.append(
            f"one of {ranks} processes: the time of communication between them is left out"
        )
    if recipe.layers.probe:
        notes.append(
            "layers.probe times layers on the card: here every layer that it asks for stays in FP8"
        )
    if recipe.fp8.backend == "auto":
        notes.append("fp8.backend=auto times backends on the card: this is the ladder's first")
    return notes


def _trace(
    config: RunConfig,
    recipe: Recipe,
    card: Card,
    rung: Rung,
    ranks: int,
    intended: Policy | None,
) -> Trace:
    """`trace`. Raises ConfigError also for a model that cannot run on fake tensors."""
    where = f"model.target {config.model.target}"
    try:
        return trace(config, recipe, card, rung, ranks, intended)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        what = "the model cannot run on fake tensors: the size of one of its tensors depends on computed values"
        fix = "choose experts by the indices of topk or argmax, or estimate a model without such an operation"
        raise ConfigError(Problem(what, where, str(error), fix)) from error
    except (NotImplementedError, UnsupportedOperatorException) as error:
        what = "the model cannot run on fake tensors: PyTorch cannot infer the shapes of one of its operations"
        # The first error names the operation.
        why = str(error.__context__ or error).partition("\n")[0][:300]
        fix = "estimate a model without such an operation"
        raise ConfigError(Problem(what, where, why, fix)) from error


def time_steps(steps: Mapping[str, Sequence[Op]], rates: Rates, stats_every: int) -> Timing:
    """Times of traced steps, by their names; one of `stats_every` steps is a sampled one."""
    usual, sampled = steps[USUAL], steps[SAMPLED]
    usual_seconds = step_seconds(usual, rates)
    sampled_seconds = step_seconds(sampled, rates)
    mean_seconds = (usual_seconds * (stats_every - 1) + sampled_seconds) / stats_every
    return Timing(
        usual=usual_seconds,
        sampled=sampled_seconds,
        mean=mean_seconds,
        kernels=sum(op.kernels for op in usual),
        host_bound=is_host_bound(usual, rates),
        by_purpose=_by_purpose(usual, rates),
        bottleneck=bottleneck(usual, rates),
    )


def _by_purpose(ops: Sequence[Op], rates: Rates) -> dict[str, float]:
    """Seconds on the device by purpose, longest first; gaps are one if the rates have them."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for op in ops:
        seconds[op.purpose] += seconds_of(op, rates)
    if gaps := gap_seconds(ops, rates):
        seconds["gaps"] = gaps
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _gib(size: int) -> float:
    return round(size / GIB, 3)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
