"""The plan: recipe + capabilities + model -> for every module its precision, backend and the reason. Torch-free.

First the rung: what each machine can do with each rung of the recipe's ladder, and what all ranks can do together.
Then the modules; and as a run ends, what each of them really ran in.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from harness.capability.cards import Tier, tier_of
from harness.core.errors import ConfigError, MachineError, Problem
from harness.core.facts import ROLES, LayerPlan, RungVerdict, as_it_ran
from harness.core.plan_text import plan_text
from harness.precision.backends.registry import BACKENDS, PLAIN, can_run
from harness.precision.recipe import Recipe, Rung

if TYPE_CHECKING:
    import torch
    from torch import nn

    from harness.capability.probe import MachineFacts
    from harness.core.protocols import PrecisionBackend


Made = TypeVar("Made")


class NoFp8LayerError(ConfigError):
    """No layer of the model runs in FP8 on a rung: it cannot, or it is not to."""


class Judgement(NamedTuple):
    """One machine on one rung. able: hardware and libraries can. listed: the recipe names its tier. reason: of both."""

    able: bool
    listed: bool
    reason: str

    @property
    def takes(self) -> bool:
        """Alone this machine may take the rung."""
        return self.able and self.listed


def judge(recipe: Recipe, facts: MachineFacts) -> list[Judgement]:
    """This machine on every rung of `recipe`, in the ladder's order."""
    tier, _ = tier_of(facts)
    judged: list[Judgement] = []
    for rung in recipe.ladder:
        able, reason = can_run(rung.backend, rung.precision, facts, tier, recipe.fp8.scaling)
        listed = tier.name in rung.tiers
        if not listed:
            reason = f"not for tier {tier.name} (for {', '.join(rung.tiers)})"
        judged.append(Judgement(able, listed, reason))
    return judged


def first_taken(judged: Sequence[Judgement]) -> int | None:
    """Index of the rung that one machine takes alone, None if it can take none."""
    return next((index for index, judgement in enumerate(judged) if judgement.takes), None)


def common_rung(able: Sequence[Sequence[bool]], listed: Sequence[Sequence[bool]]) -> int | None:
    """Index of the rung that several machines take together; [rank][rung] each.

    The weakest decide: the ranks whose own first rung is furthest down the ladder. It is the first rung that they take
    by the recipe and that every other rank is able to run, whether or not the recipe lists its tier: on an H100 beside
    a T4 the T4's fp16 is right, though no recipe would give fp16 to an H100. None if there is none.
    """
    takes = [
        [a and b for a, b in zip(*rows, strict=True)] for rows in zip(able, listed, strict=True)
    ]
    if not all(map(any, takes)):
        return None
    firsts = [row.index(True) for row in takes]
    weakest = [row for row, first in zip(takes, firsts, strict=True) if first == max(firsts)]
    return next(
        (index for index in range(len(takes[0])) if all(row[index] for row in (*able, *weakest))),
        None,
    )


def verdicts(
    ladder: Sequence[Rung], judged: Sequence[Judgement], chosen: int | None
) -> list[RungVerdict]:
    """What this machine has to say to every rung, once rung `chosen` (None: none) is taken by all ranks."""
    own = first_taken(judged)
    told: list[RungVerdict] = []
    for index, (rung, judgement) in enumerate(zip(ladder, judged, strict=True)):
        reason = judgement.reason
        if index == chosen and index != own:
            reason = "the best that every rank can take"
        elif chosen is not None and index < chosen and judgement.takes:
            reason = "another rank cannot take it"
        elif chosen is not None and index > chosen and judgement.listed:
            reason = f"not needed: {ladder[chosen].name} runs"
        told.append(RungVerdict(rung.name, index == chosen, reason))
    return told


_TF32_TIERS = (Tier.BLACKWELL, Tier.HOPPER, Tier.ADA, Tier.AMPERE)


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """What will run, per module, and why; printed, it is the table of a run's start. `requested` is the recipe,
    `resolved` the rung taken.

    notes: what holds for the run as a whole. keep_fp32: names of modules that compute in float32 on this rung.
    """

    recipe: str
    recipe_sha256: str
    tier: str
    requested: str
    rung: Rung
    rungs: tuple[RungVerdict, ...]
    layers: tuple[LayerPlan, ...]
    notes: tuple[str, ...] = field(default_factory=tuple)
    keep_fp32: tuple[str, ...] = field(default_factory=tuple)

    def __repr__(self) -> str:
        counts = Counter(layer.precision for layer in self.layers)
        modules = ", ".join(f"{precision}: {count}" for precision, count in sorted(counts.items()))
        return f"Plan({self.recipe} on {self.tier}: {self.resolved}; modules in {modules})"

    def __str__(self) -> str:
        return plan_text(self.as_dict())

    @property
    def resolved(self) -> str:
        """The rung taken, `backend:precision`."""
        return self.rung.name

    def fp8_layers(self) -> tuple[str, ...]:
        """Module names (as in the model) of the layers that run in FP8."""
        return tuple(layer.module for layer in self.layers if layer.precision == "fp8")

    def fused_norms(self) -> dict[str, str]:
        """FP8 layer -> the norm that is computed in one with it; names as in the model."""
        return {
            layer.module: layer.norm
            for layer in self.layers
            if layer.precision == "fp8" and layer.norm
        }

    def fused_mlps(self) -> dict[str, str]:
        """Second Linear of an MLP -> the first, which is computed in one with it; names as in the model."""
        return {
            layer.module: layer.first
            for layer in self.layers
            if layer.precision == "fp8" and layer.first
        }

    def fp8_weights(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """FP8 layer, numbers padded -> its weight, of a `model` that is not yet converted. Those that are the weight of
        several layers are left out: what reaches them says nothing of one layer."""
        weights = {
            pad_numbers(name): model.get_parameter(f"{name}.weight") for name in self.fp8_layers()
        }
        owners = Counter(map(id, weights.values()))
        return {name: weight for name, weight in weights.items() if owners[id(weight)] == 1}

    def slot_names(self) -> tuple[str, ...]:
        """`<layer>.<role>` of every FP8 layer, numbers padded: the order of all FP8 state and statistics."""
        return tuple(
            f"{pad_numbers(layer)}.{role}" for layer in self.fp8_layers() for role in ROLES
        )

    def as_dict(self) -> dict[str, Any]:
        """What plan.json holds; `effective` is filled in after the run."""
        return {
            "recipe": self.recipe,
            "recipe_sha256": self.recipe_sha256,
            "tier": self.tier,
            "requested": self.requested,
            "resolved": self.resolved,
            "effective": None,
            "keeps_amax": BACKENDS[self.rung.backend].keeps_amax,
            "rungs": [asdict(rung) for rung in self.rungs],
            "layers": [asdict(layer) for layer in self.layers],
            "notes": list(self.notes),
        }

    def as_it_ran(self, backend: PrecisionBackend) -> dict[str, Any]:
        """`as_dict` with what every module really ran in, as a run ends: an FP8 layer counts only if its slots saw a
        nonzero amax.
        """
        used: set[str] = set()
        if backend.slot_names:
            tensors, _ = backend.state_dict()
            nonzero = (tensors["history"].amax(dim=0) > 0).tolist()
            slots = zip(backend.slot_names, nonzero, strict=True)
            used = {slot.rpartition(".")[0] for slot, saw_amax in slots if saw_amax}
        fell_to, demoted = backend.fell_back_to, backend.demoted
        layers = {
            layer.module: as_it_ran(layer.precision, fell_to, name in demoted, name not in used)
            for layer in self.layers
            for name in [pad_numbers(layer.module)]
        }
        counts = sorted(Counter(layers.values()).items())
        told = ", ".join(f"{precision}: {count} modules" for precision, count in counts)
        return {**self.as_dict(), "effective": told, "effective_layers": layers}


def pad_numbers(name: str) -> str:
    """Zero-pad the numeric parts of a dotted name, so that charts sort: blocks.3.mlp -> blocks.03.mlp."""
    return re.sub(r"(?<![^.])\d+(?![^.])", lambda match: match.group().zfill(2), name)


def resolve(recipe: Recipe, facts: MachineFacts) -> tuple[Rung | None, list[RungVerdict]]:
    """The first rung of the ladder that the machine supports (None if none), and a verdict on each."""
    judged = judge(recipe, facts)
    chosen = first_taken(judged)
    return None if chosen is None else recipe.ladder[chosen], verdicts(
        recipe.ladder, judged, chosen
    )


def make_plan(
    recipe: Recipe, facts: MachineFacts, rung: Rung, rungs: Sequence[RungVerdict], model: nn.Module
) -> Plan:
    """Decide for every parametrised leaf module of `model`, and for every module that is kept in fp32.

    A module with several names has one row, under its first. Raises ConfigError naming every pattern of the recipe
    that matches nothing, with the near match, and blocks to skip that are not there; NoFp8LayerError, which is one,
    if `rung` is one of FP8 and no layer can run in it.
    """
    from harness.precision.layers import (
        LayerFilter,
        enclosing,
        features,
        find_kept,
        is_linear,
        kind_of,
        names_of,
        plan_fusion,
    )

    section = f"recipe {recipe.name}: layers"
    fp8 = rung.precision == "fp8"
    refuses = "" if BACKENDS[rung.backend].transposed else rung.backend
    layers = (
        LayerFilter(model, recipe.layers, recipe.fp8_multiple(rung.backend), section, refuses)
        if fp8
        else None
    )
    kept, problems = find_kept(model, recipe.layers.keep_fp32, f"{section}.keep_fp32")
    problems += layers.problems if layers else []
    if problems:
        raise ConfigError(problems)
    rows: list[LayerPlan] = []
    names = names_of(model)
    for module, (name, *others) in names.items():
        kind = kind_of(module)
        shape = features(module) if is_linear(module) else ()
        around = enclosing(kept, names, module)
        if module in kept:
            rows.append(
                LayerPlan(name, kind, "fp32", PLAIN, f"kept in fp32 ({kept[module]})", shape)
            )
        elif next(module.parameters(recurse=False), None) is None:
            continue
        elif around:
            rows.append(
                LayerPlan(
                    name, kind, "fp32", PLAIN, f"inside {around}, which is kept in fp32", shape
                )
            )
        elif not is_linear(module):
            rows.append(_no_linear(name, module, rung))
        elif layers is None:
            rows.append(
                LayerPlan(name, kind, rung.precision, rung.backend, "rung of the recipe", shape)
            )
        elif reason := layers.kept_out(module):
            rows.append(LayerPlan(name, kind, "bf16", PLAIN, reason, shape))
        else:
            also = f", also known as {', '.join(others)}" if others else ""
            also += "" if module.weight.requires_grad else ", frozen: no weight gradient"
            rows.append(LayerPlan(name, kind, "fp8", rung.backend, f"converted{also}", shape))
    if fp8:
        require_fp8(rows, recipe)
    tier, _ = tier_of(facts)
    keep = tuple(names[module][0] for module in kept)
    notes = _notes(recipe, rung, tier)
    if recipe.layers.fuse:
        rows, note = plan_fusion(model, rows, recipe, rung, kept)
        notes = (*notes, note)
    return Plan(
        recipe.name,
        recipe.sha256(),
        tier.name,
        recipe.name,
        rung,
        tuple(rungs),
        tuple(rows),
        notes,
        keep,
    )


def _no_linear(name: str, module: nn.Module, rung: Rung) -> LayerPlan:
    """The row of a module with parameters that is no Linear: in what it computes, measured where it can be.

    A module of somebody else's may multiply with its matrices (experts, a router) or only add them (positions), by
    kernels that autocast knows or not.
    """
    from harness.precision.products import NAMES, half_of, is_embedding, products_in

    kind, parameters = type(module).__name__, list(module.parameters(recurse=False))
    if ran := products_in(module, half_of(rung.precision)):
        reason = f"not a Linear: fp32 weights, its matrix products run in {ran} (measured on a small one)"
        return LayerPlan(name, kind, ran, PLAIN, reason)
    experts = [
        parameter.shape[0]
        for parameter in parameters
        if parameter.ndim == 3 and parameter.shape[0] > 1
    ]
    what = "not a Linear"
    if experts and not hasattr(
        module, "kernel_size"
    ):  # a convolution over one dimension has three, too
        what = f"3-D weights (of {experts[0]} experts): no backend has FP8 layers for those"
    half = half_of(rung.precision)
    own = not type(module).__module__.startswith("torch.") and not is_embedding(module)
    if half is None or not own or all(parameter.ndim < 2 for parameter in parameters):
        return LayerPlan(
            name, kind, "fp32", PLAIN, f"{what}: fp32 weights, autocast decides per op"
        )
    ran = NAMES[half]
    reason = f"{what}: fp32 weights, their matrix products run in {ran}, but by kernels that autocast does not know"
    return LayerPlan(name, kind, f"{ran} or fp32", PLAIN, reason)


def require_fp8(rows: Sequence[LayerPlan], recipe: Recipe) -> None:
    """Raise NoFp8LayerError if no row of an FP8 rung's plan is in FP8, with the reasons of some layers."""
    if not any(row.precision == "fp8" for row in rows):
        reasons = sorted({f"{row.module}: {row.reason}" for row in rows if row.shape})
        raise NoFp8LayerError(
            Problem(
                "no layer of this model can run in FP8",
                f"recipe {recipe.name}",
                why="; ".join(reasons[:5]) or "the model has no Linear",
                fix="widen layers.include, lower layers.min_features, change the sizes, or take the recipe bf16",
            )
        )


def _notes(recipe: Recipe, rung: Rung, tier: Tier) -> tuple[str, ...]:
    """What holds for the whole run: float32 matrix multiplications, and the loss scale of fp16."""
    if recipe.float32_matmul == "highest":
        tf32 = "no TF32"
    else:
        tf32 = "TF32" if tier in _TF32_TIERS else "would allow TF32, which this tier has not"
    notes = [f"float32 matmul precision: {recipe.float32_matmul} ({tf32})"]
    if rung.precision == "fp16":
        scale = recipe.loss_scale
        notes.append(
            f"loss scale ({scale.preset}): starts at {scale.init:g}, x{scale.growth_factor:g} after "
            f"{scale.growth_interval} good steps, x{scale.backoff_factor:g} after a bad one, "
            f"within {scale.floor:g} and {scale.cap:g}"
        )
    return tuple(notes)


def take_rung(
    recipe: Recipe,
    facts: MachineFacts,
    device: torch.device,
    make: Callable[[Rung, list[RungVerdict]], Made],
) -> Made:
    """What `make` makes of the first rung that every rank can take and on which the model has something to run.

    A rung on which `make` raises NoFp8LayerError is passed over, with the reason in its verdict: a ConvNet has nothing
    for FP8, and trains on the rung below. Collective, as `agree_on_rung`, and raises as it does; NoFp8LayerError if the
    ladder has no rung below.
    """
    refused: dict[str, NoFp8LayerError] = {}
    while True:
        try:
            chosen, told = agree_on_rung(recipe, facts, device, refused)
        except MachineError:
            if refused:
                raise next(iter(refused.values())) from None
            raise
        try:
            return make(chosen, told)
        except NoFp8LayerError as error:
            refused[chosen.name] = error


def agree_on_rung(
    recipe: Recipe,
    facts: MachineFacts,
    device: torch.device,
    refused: Mapping[str, NoFp8LayerError] | None = None,
) -> tuple[Rung, list[RungVerdict]]:
    """The rung that every rank can take (the weakest ranks decide) and this rank's verdict on each.

    refused: rungs, by name, that the model cannot use. Collective. Raises the same MachineError on every rank if there
    is none, with what each kind of machine lacks.
    """
    import torch

    from harness.core.collectives import gather_over_ranks

    judged = [
        own
        if refused is None or rung.name not in refused
        else _refused(refused[rung.name].problems[0])
        for rung, own in zip(recipe.ladder, judge(recipe, facts), strict=True)
    ]
    mine = [[judgement.able for judgement in judged], [judgement.listed for judgement in judged]]
    everyone = gather_over_ranks(torch.tensor(mine, dtype=torch.float32, device=device)) > 0
    chosen = common_rung(everyone[:, 0].tolist(), everyone[:, 1].tolist())
    if chosen is None:
        raise _no_common_rung(recipe, facts, judged)
    return recipe.ladder[chosen], verdicts(recipe.ladder, judged, chosen)


def _refused(problem: Problem) -> Judgement:
    return Judgement(able=False, listed=True, reason=f"{problem.what}: {problem.why}")


def _no_common_rung(
    recipe: Recipe, facts: MachineFacts, judged: Sequence[Judgement]
) -> MachineError:
    from harness.core.collectives import gather_texts

    tier, why = tier_of(facts)
    lacks = "; ".join(
        f"{rung.name}: {own.reason}" for rung, own in zip(recipe.ladder, judged, strict=True)
    )
    ranks_of: dict[str, list[str]] = {}
    for rank, told in enumerate(gather_texts(f"tier {tier.name} ({why}): {lacks}")):
        ranks_of.setdefault(told, []).append(str(rank))
    where, what = f"recipe {recipe.name}: ladder", f"no rung of recipe {recipe.name} runs on"
    if len(ranks_of) == 1:
        fix = 'use the recipe "auto", or add a rung for this tier to the recipe'
        return MachineError(Problem(f"{what} tier {tier.name} ({why})", where, lacks, fix))
    each = "; ".join(f"rank {', '.join(ranks)} is {told}" for told, ranks in ranks_of.items())
    fix = "use ranks of one kind, or add a rung that all of them can run to the recipe"
    return MachineError(Problem(f"{what} every rank", where, each, fix))


def agree_on_fallback(facts: MachineFacts, device: torch.device) -> str:
    """Where a run goes that must leave fp16: "bf16" if every rank's card has it, else "fp32"."""
    import torch

    from harness.core.collectives import max_over_ranks

    lacking = not can_run(PLAIN, "bf16", facts, tier_of(facts)[0])[0]
    return (
        "fp32" if max_over_ranks(torch.tensor([float(lacking)], device=device)).item() else "bf16"
    )
