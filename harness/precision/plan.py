"""The plan: recipe + capabilities + model -> for every module its precision, backend and the reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from harness.capability.tier import Tier, tier_of
from harness.core.errors import ConfigError, Problem
from harness.core.facts import ROLES, LayerPlan, RungVerdict
from harness.precision.ladder import first_taken, judge, verdicts
from harness.precision.recipe import Recipe, Rung

if TYPE_CHECKING:
    from torch import nn

    from harness.capability.probe import MachineFacts
    from harness.core.protocols import PrecisionBackend

_TF32_TIERS = (Tier.BLACKWELL, Tier.HOPPER, Tier.ADA, Tier.AMPERE)


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run, per module, and why. `requested` is the recipe, `resolved` the rung taken.

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

    @property
    def resolved(self) -> str:
        """The rung taken, `backend:precision`."""
        return self.rung.name

    def fp8_layers(self) -> tuple[str, ...]:
        """Module names (as in the model) of the layers that run in FP8."""
        return tuple(layer.module for layer in self.layers if layer.precision == "fp8")

    def fused_norms(self) -> dict[str, str]:
        """FP8 layer -> the norm that is computed in one with it; names as in the model."""
        return {layer.module: layer.norm for layer in self.layers if layer.precision == "fp8" and layer.norm}

    def fused_mlps(self) -> dict[str, str]:
        """Second Linear of an MLP -> the first, which is computed in one with it; names as in the model."""
        return {layer.module: layer.first for layer in self.layers if layer.precision == "fp8" and layer.first}

    def slot_names(self) -> tuple[str, ...]:
        """`<layer>.<role>` of every FP8 layer, numbers padded: the order of all FP8 state and statistics."""
        return tuple(f"{pad_numbers(layer)}.{role}" for layer in self.fp8_layers() for role in ROLES)

    def as_dict(self) -> dict[str, Any]:
        """What plan.json holds; `effective` is filled in after the run."""
        return {
            "recipe": self.recipe,
            "recipe_sha256": self.recipe_sha256,
            "tier": self.tier,
            "requested": self.requested,
            "resolved": self.resolved,
            "effective": None,
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
        layers: dict[str, str] = {}
        for layer in self.layers:
            name, precision = pad_numbers(layer.module), layer.precision
            if backend.lowered and precision in ("fp8", "fp16"):
                precision = backend.lowered
            elif precision == "fp8" and name in backend.demoted:
                precision = "bf16"
            elif precision == "fp8" and name not in used:
                precision = "unused"
            layers[layer.module] = precision
        counts = sorted(Counter(layers.values()).items())
        told = ", ".join(f"{precision}: {count} modules" for precision, count in counts)
        return {**self.as_dict(), "effective": told, "effective_layers": layers}


def pad_numbers(name: str, width: int = 2) -> str:
    """Zero-pad the numeric parts of a dotted name, so that charts sort: blocks.3.mlp -> blocks.03.mlp."""
    return re.sub(r"(?<![^.])\d+(?![^.])", lambda match: match.group().zfill(width), name)


def resolve(recipe: Recipe, facts: MachineFacts) -> tuple[Rung | None, list[RungVerdict]]:
    """The first rung of the ladder that the machine supports (None if none), and a verdict on each."""
    judged = judge(recipe, facts)
    chosen = first_taken(judged)
    return None if chosen is None else recipe.ladder[chosen], verdicts(recipe.ladder, judged, chosen)


def make_plan(recipe: Recipe, facts: MachineFacts, rung: Rung, rungs: Sequence[RungVerdict], model: nn.Module) -> Plan:
    """Decide for every parametrised leaf module of `model`, and for every module that is kept in fp32.

    A module with several names has one row, under its first. Raises ConfigError naming every pattern of the recipe
    that matches nothing, with the near match, and blocks to skip that are not there.
    """
    from torch import nn

    from harness.precision.filters import LayerFilter, names_of
    from harness.precision.fuse import plan_fusion
    from harness.precision.keep_fp32 import enclosing, find_kept

    section = f"recipe {recipe.name}: layers"
    fp8 = rung.precision == "fp8"
    layers = LayerFilter(model, recipe.layers, recipe.fp8_multiple(rung.backend), section) if fp8 else None
    kept, problems = find_kept(model, recipe.layers.keep_fp32, f"{section}.keep_fp32")
    problems += layers.problems if layers else []
    if problems:
        raise ConfigError(problems)
    rows: list[LayerPlan] = []
    names = names_of(model)
    for module, (name, *others) in names.items():
        kind = type(module).__name__
        shape = (module.out_features, module.in_features) if isinstance(module, nn.Linear) else ()
        around = enclosing(kept, names, module)
        if module in kept:
            rows.append(LayerPlan(name, kind, "fp32", "autocast", f"kept in fp32 ({kept[module]})", shape))
        elif next(module.parameters(recurse=False), None) is None:
            continue
        elif around:
            rows.append(LayerPlan(name, kind, "fp32", "autocast", f"inside {around}, which is kept in fp32", shape))
        elif not isinstance(module, nn.Linear):
            why = "not a Linear: fp32 weights, autocast decides per op"
            rows.append(LayerPlan(name, kind, "fp32", "autocast", why))
        elif layers is None:
            rows.append(LayerPlan(name, kind, rung.precision, rung.backend, "rung of the recipe", shape))
        elif reason := layers.kept_out(module):
            rows.append(LayerPlan(name, kind, "bf16", "autocast", reason, shape))
        else:
            also = f", also known as {', '.join(others)}" if others else ""
            rows.append(LayerPlan(name, kind, "fp8", rung.backend, f"converted{also}", shape))
    if fp8:
        require_fp8(rows, recipe)
    tier, _ = tier_of(facts)
    keep = tuple(names[module][0] for module in kept)
    notes = _notes(recipe, rung, tier)
    if recipe.layers.fuse:
        rows, note = plan_fusion(model, rows, recipe, rung, kept)
        notes = (*notes, note)
    return Plan(recipe.name, recipe.sha256(), tier.name, recipe.name, rung, tuple(rungs), tuple(rows), notes, keep)


def require_fp8(rows: Sequence[LayerPlan], recipe: Recipe) -> None:
    """Raise ConfigError if no row of an FP8 rung's plan is in FP8, with the reasons of some layers."""
    if not any(row.precision == "fp8" for row in rows):
        reasons = sorted({f"{row.module}: {row.reason}" for row in rows if row.shape})
        raise ConfigError(
            Problem(
                "no layer can run in FP8",
                f"recipe {recipe.name}",
                why="; ".join(reasons[:5]) or "the model has no Linear",
                fix="widen layers.include, lower layers.min_features, change the sizes, or --recipe bf16",
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
