"""What a config and a recipe would take on a card: memory from the trace, time from the roofline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from harness.capability.cards import GIB, Card
from harness.core.config import RunConfig
from harness.core.errors import ConfigError, Problem
from harness.core.facts import RungVerdict
from harness.data.batches import check_world
from harness.engines.process_group import read_launch
from harness.estimate.roofline import (
    Calibration,
    Op,
    Rates,
    device_seconds,
    seconds_of,
    step_seconds,
)
from harness.estimate.trace import SAMPLED, USUAL, Trace, facts_of, trace
from harness.precision.backends.registry import BACKENDS, PLAIN
from harness.precision.plan import take_rung
from harness.precision.recipe import Fp8Config, Recipe, Rung

_BF16 = f"{PLAIN}:bf16"
_MOST_KINDS = 6
_ROUTED = (
    "experts: each gets as many tokens as any other; how a trained router chooses is not known beforehand",
)


@dataclass(frozen=True, slots=True)
class Timing:
    """Predicted seconds. usual: of a step that measures nothing extra; sampled: of one that samples FP8 statistics;
    mean: over `stats_every` steps. host_bound: the host could not launch kernels as fast as the card runs them."""

    usual: float
    sampled: float
    mean: float
    kernels: int
    host_bound: bool
    by_purpose: dict[str, float]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Everything that `harness estimate` says. bf16, bf16_timing: of the same run on the rung autocast:bf16; None on
    a card that has none. tokens: of a step over all ranks, as `counted` says: "tokens", or "samples" of a data set."""

    card: Card
    recipe: str
    taken: str
    rungs: tuple[RungVerdict, ...]
    trace: Trace
    timing: Timing
    bf16: Trace | None
    bf16_timing: Timing | None
    tokens: int
    counted: str
    ranks: int
    calibration: Calibration
    notes: tuple[str, ...]

    @property
    def needed(self) -> int:
        """Bytes: the allocator's peak and what CUDA itself takes."""
        return self.trace.peak + self.calibration.rates.context_bytes

    @property
    def fits(self) -> bool:
        """Whether that is within the card's memory; fragmentation is not foreseen."""
        return self.needed <= self.card.memory

    @property
    def flops(self) -> int:
        """Of the matrix products (convolutions, attention) of a usual step of one rank; of experts, those that run."""
        return round(sum(op.flops for op in self.trace.steps[USUAL]))

    def as_dict(self) -> dict[str, Any]:
        """For `--json`: sizes in GiB (2^30 bytes), times in ms, tokens over all ranks, FLOPs of one."""
        timing, baseline = self.timing, self.bf16_timing
        return {
            "card": self.card.name,
            "recipe": self.recipe,
            "rung": self.taken,
            "estimated": self.trace.rung.name,
            "passed_over": [
                {"rung": rung.rung, "reason": rung.reason} for rung in self.rungs if not rung.taken
            ],
            "peak_gib": _gib(self.trace.peak),
            "bf16_peak_gib": None if self.bf16 is None else _gib(self.bf16.peak),
            "context_gib": _gib(self.calibration.rates.context_bytes),
            "card_gib": _gib(self.card.memory),
            "fits": self.fits,
            "at_peak_gib": {kind: _gib(size) for kind, size in largest(self.trace)},
            "ratio_vs_bf16": None if baseline is None else round(timing.mean / baseline.mean, 4),
            "ratio_vs_bf16_usual_step": None
            if baseline is None
            else round(timing.usual / baseline.usual, 4),
            "calibrated": self.calibration.calibrated,
            "step_ms": _ms(timing.mean),
            "usual_step_ms": _ms(timing.usual),
            "sampled_step_ms": _ms(timing.sampled),
            "bf16_step_ms": None if baseline is None else _ms(baseline.mean),
            f"{self.counted}_per_second": round(self.tokens / timing.mean),
            "ranks": self.ranks,
            "flops": self.flops,
            "kernels": timing.kernels,
            "host_bound": timing.host_bound,
            "by_purpose_ms": {name: _ms(seconds) for name, seconds in timing.by_purpose.items()},
            "waits": [{"what": wait.what, "where": list(wait.where)} for wait in self.trace.waits],
            "pageable_copies": sum(1 for copy in pageable(self.trace)),
            "parameters": self.trace.parameters,
            "fp8_layers": sum(layer.precision == "fp8" for layer in self.trace.layers),
            "linear_layers": sum(bool(layer.shape) for layer in self.trace.layers),
            "notes": list(self.notes),
        }


# Optimizers whose update runs on fake tensors: torch's own.
_ON_PAPER = ("adamw", "sgd", "muon")


def predict(
    config: RunConfig, recipe: Recipe, card: Card, calibration: Calibration, ranks: int = 1
) -> Prediction:
    """Trace the run on `card` and, where the card has it, the same run in bf16.

    ranks: processes that share the global batch; each is estimated alone, without what they say to each other.
    Raises MachineError if no rung of the recipe runs on the card, ConfigError as training would, and if the model
    or optimizer cannot be put on paper or the config asks for DeepSpeed.
    """
    if read_launch().launched:
        what, fix = (
            "this is one process of a launcher's",
            "start it alone, with --ranks for the number of processes",
        )
        raise ConfigError(Problem(what, "harness estimate", fix=fix))
    check_world(config.train.global_batch, config.train.micro_batch, ranks)
    for key, asked in (
        ("deepspeed", config.engine.deepspeed is not None),
        ("name", config.engine.name == "deepspeed"),
    ):
        if asked:
            what, why = (
                "DeepSpeed is not estimated",
                "its engine moves memory and gradients in ways of its own",
            )
            raise ConfigError(
                Problem(what, f"engine.{key}", why, "leave it out to estimate the engine for torch")
            )
    if config.train.optimizer not in _ON_PAPER:
        what, why = "its update is not estimated", "it does not run on fake tensors"
        fix = f"one of {', '.join(_ON_PAPER)}; docs/guide/training.md has what each keeps for a parameter"
        raise ConfigError(Problem(what, f"train.optimizer {config.train.optimizer!r}", why, fix))
    notes = _notes(config, recipe, ranks)

    def on(
        rung: Rung, rungs: list[RungVerdict]
    ) -> tuple[Rung, list[RungVerdict], Rung, list[str], Trace]:
        estimated, stand_in, said = _in_place_of(rung, recipe)
        return rung, rungs, estimated, said, _trace(config, stand_in, card, estimated, ranks)

    rung, rungs, estimated, said, made = take_rung(recipe, facts_of(card), torch.device("cpu"), on)
    timing = _time(made, calibration.rates, recipe.fp8.stats_every)
    bf16: Trace | None = made if estimated.name == _BF16 else None
    if bf16 is None and card.capability >= (8, 0):
        baseline = Rung(backend=PLAIN, precision="bf16", tiers=list(rung.tiers))
        bf16 = _trace(config, recipe, card, baseline, ranks)
    elif bf16 is None:
        notes.append(f"a {card.name} has no bf16 to compare with")
    return Prediction(
        card=card,
        recipe=recipe.name,
        taken=rung.name,
        rungs=tuple(rungs),
        trace=made,
        timing=timing,
        bf16=bf16,
        bf16_timing=None
        if bf16 is None
        else _time(bf16, calibration.rates, recipe.fp8.stats_every),
        tokens=config.train.global_batch
        * (config.data.context if config.data.target is None else 1),
        counted="tokens" if config.data.target is None else "samples",
        ranks=ranks,
        calibration=calibration,
        notes=(
            *said,
            *_assumed(rung),
            *(_ROUTED if made.routed else ()),
            *notes,
            *calibration.notes,
        ),
    )


def largest(made: Trace) -> list[tuple[str, int]]:
    """What the peak is made of, largest first; what is under 1% of it is left out."""
    return [
        (kind, size)
        for kind, size in made.peak_kinds.most_common(_MOST_KINDS)
        if size > made.peak / 100
    ]


def pageable(made: Trace) -> list[str]:
    """Where tensors go to the card from memory that is not page-locked: such a copy keeps the host busy."""
    return [
        copy.where[0] if copy.where else "?"
        for copy in made.transfers
        if copy.direction == "cpu->cuda" and not copy.pinned
    ]


def _in_place_of(rung: Rung, recipe: Recipe) -> tuple[Rung, Recipe, list[str]]:
    """What is traced for `rung`, with which recipe, and what to say of it."""
    backend = BACKENDS[rung.backend]
    if not backend.stand_in:
        return rung, recipe, []
    other = rung.model_copy(update={"backend": backend.stand_in})
    note = f"{rung.name} is estimated as {other.name}: {rung.backend}'s kernels do not run on fake tensors"
    if recipe.fp8.scaling in BACKENDS[backend.stand_in].scalings:
        return other, recipe, [note]
    fp8 = Fp8Config(format=recipe.fp8.format, stats_every=recipe.fp8.stats_every)
    note += f", and {recipe.fp8.scaling} scaling as {fp8.scaling} scaling"
    return other, recipe.model_copy(update={"fp8": fp8}), [note]


def _assumed(rung: Rung) -> list[str]:
    """Software that the card's machine is taken to have, whether or not this one has it."""
    if rung.precision != "fp8":
        return []
    needed = f"{BACKENDS[rung.backend].library} and " if BACKENDS[rung.backend].stand_in else ""
    return [f"assumed on the card's machine: {needed}triton, which comes with torch's CUDA builds"]


def _notes(config: RunConfig, recipe: Recipe, ranks: int) -> list[str]:
    notes: list[str] = []
    if ranks > 1:
        notes.append(
            f"one of {ranks} processes: what they say to each other takes time that is not in here"
        )
    if config.engine.compile != "none":
        notes.append(f"engine.compile={config.engine.compile} is left out: this is the eager step")
    if recipe.layers.probe:
        notes.append(
            "layers.probe times layers on the card: here every layer that it asks for stays in FP8"
        )
    return notes


def _trace(config: RunConfig, recipe: Recipe, card: Card, rung: Rung, ranks: int) -> Trace:
    try:
        return trace(config, recipe, card, rung, ranks)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        what = "the model cannot be put on paper: the size of one of its tensors depends on computed values"
        where = f"model.target {config.model.target}"
        fix = "choose experts by the indices of topk or argmax, or estimate a model without such an operation"
        raise ConfigError(Problem(what, where, str(error), fix)) from error
    except (NotImplementedError, UnsupportedOperatorException) as error:
        what = "the model cannot be put on paper: PyTorch does not know the shapes of one of its operations beforehand"
        where, why = (
            f"model.target {config.model.target}",
            str(error.__context__ or error).partition("\n")[0][:300],
        )
        raise ConfigError(
            Problem(what, where, why, "estimate a model without such an operation")
        ) from error


def _time(made: Trace, rates: Rates, stats_every: int) -> Timing:
    usual, sampled = made.steps[USUAL], made.steps[SAMPLED]
    usual_seconds, sampled_seconds = step_seconds(usual, rates), step_seconds(sampled, rates)
    return Timing(
        usual=usual_seconds,
        sampled=sampled_seconds,
        mean=(usual_seconds * (stats_every - 1) + sampled_seconds) / stats_every,
        kernels=sum(op.kernels for op in usual),
        host_bound=usual_seconds > device_seconds(usual, rates),
        by_purpose=_by_purpose(usual, rates),
    )


def _by_purpose(ops: Sequence[Op], rates: Rates) -> dict[str, float]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for op in ops:
        seconds[op.purpose] += seconds_of(op, rates)
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _gib(size: int) -> float:
    return round(size / GIB, 3)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
