"""The plan: recipe + capabilities + model -> for every module its precision, backend and the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from harness.capability.supports import can_run
from harness.capability.tier import tier_of
from harness.core.errors import ConfigError, Problem, near_match
from harness.core.facts import LayerPlan, RungVerdict
from harness.precision.recipe import LayersConfig, Recipe, Rung

if TYPE_CHECKING:
    from torch import nn

    from harness.capability.probe import MachineFacts

FP8_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run, per module, and why. `requested` is the recipe, `resolved` the rung taken."""

    recipe: str
    recipe_sha256: str
    tier: str
    requested: str
    rung: Rung
    rungs: tuple[RungVerdict, ...]
    layers: tuple[LayerPlan, ...]
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def resolved(self) -> str:
        """The rung taken, `backend:precision`."""
        return self.rung.name

    def fp8_layers(self) -> tuple[str, ...]:
        """Module names (as in the model) of the layers that run in FP8."""
        return tuple(layer.module for layer in self.layers if layer.precision == "fp8")

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


def pad_numbers(name: str, width: int = 2) -> str:
    """Zero-pad the numeric parts of a dotted name, so that charts sort: blocks.3.mlp -> blocks.03.mlp."""
    return re.sub(r"(?<![^.])\d+(?![^.])", lambda match: match.group().zfill(width), name)


def resolve(recipe: Recipe, facts: MachineFacts) -> tuple[Rung | None, list[RungVerdict]]:
    """The first rung of the ladder that the machine supports (None if none), and a verdict on each."""
    tier, _ = tier_of(facts)
    taken: Rung | None = None
    verdicts: list[RungVerdict] = []
    for rung in recipe.ladder:
        if tier.name not in rung.tiers:
            verdicts.append(RungVerdict(rung.name, False, f"not for tier {tier.name} (for {', '.join(rung.tiers)})"))
            continue
        able, reason = can_run(rung.backend, rung.precision, facts, tier)
        if taken is not None:
            verdicts.append(RungVerdict(rung.name, False, f"not needed: {taken.name} runs"))
        elif able:
            taken = rung
            verdicts.append(RungVerdict(rung.name, True, reason))
        else:
            verdicts.append(RungVerdict(rung.name, False, reason))
    return taken, verdicts


def make_plan(recipe: Recipe, facts: MachineFacts, rung: Rung, rungs: Sequence[RungVerdict], model: nn.Module) -> Plan:
    """Decide for every parametrised leaf module of `model`.

    Raises ConfigError naming every pattern of the recipe that matches no Linear, with the near match.
    """
    from torch import nn

    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if rung.precision == "fp8":
        _check_patterns(recipe, list(linears))
    rest = "fp32" if rung.precision == "fp32" else "fp16" if rung.precision == "fp16" else "bf16"
    tied = _shared_parameters(model)
    rows: list[LayerPlan] = []
    for name, module in model.named_modules():
        if not name or next(module.parameters(recurse=False), None) is None:
            continue
        kind = type(module).__name__
        if name not in linears:
            rows.append(
                LayerPlan(name, kind, "fp32", "autocast", "not a Linear: fp32 weights, autocast decides per op")
            )
            continue
        linear = linears[name]
        shape = (linear.out_features, linear.in_features)
        if rung.precision != "fp8":
            rows.append(LayerPlan(name, kind, rung.precision, rung.backend, "rung of the recipe", shape))
            continue
        reason = _kept_out(name, linear, recipe.layers, tied)
        if reason:
            rows.append(LayerPlan(name, kind, rest, "autocast", reason, shape))
        else:
            rows.append(LayerPlan(name, kind, "fp8", rung.backend, "converted", shape))
    if rung.precision == "fp8" and not any(row.precision == "fp8" for row in rows):
        reasons = sorted({f"{row.module}: {row.reason}" for row in rows if row.module in linears})
        raise ConfigError(
            Problem(
                "no layer can run in FP8",
                f"recipe {recipe.name}",
                why="; ".join(reasons[:5]) or "the model has no Linear",
                fix="widen layers.include, lower layers.min_features, use multiples of 16, or --recipe bf16",
            )
        )
    tier, _ = tier_of(facts)
    return Plan(recipe.name, recipe.sha256(), tier.name, recipe.name, rung, tuple(rungs), tuple(rows))


def _kept_out(name: str, module: nn.Linear, layers: LayersConfig, tied: Mapping[int, str]) -> str:
    """Why a Linear stays out of FP8; empty if it does not."""
    from torch import nn

    patterns = [*layers.exclude, *layers.exclude_if_present]
    excluded = next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
    size = (module.out_features, module.in_features)
    if excluded:
        return f"excluded by name ({excluded})"
    if not any(fnmatchcase(name, pattern) for pattern in layers.include):
        return "not in layers.include"
    if type(module) is not nn.Linear:
        return f"{type(module).__name__} is a Linear of its own kind"
    if any(value % FP8_MULTIPLE for value in size):
        return f"sizes {size[0]}x{size[1]} are not multiples of {FP8_MULTIPLE}"
    if min(size) < layers.min_features:
        return f"too small to gain (min_features {layers.min_features})"
    owner = tied.get(id(module.weight))
    return f"weight shared with {owner}, which is no Linear" if owner else ""


def _shared_parameters(model: nn.Module) -> dict[int, str]:
    """id of each Parameter owned by a module that is not a Linear -> that module's name."""
    from torch import nn

    return {
        id(parameter): name
        for name, module in model.named_modules()
        if not isinstance(module, nn.Linear)
        for parameter in module.parameters(recurse=False)
    }


def _check_patterns(recipe: Recipe, names: Sequence[str]) -> None:
    problems = [
        Problem(
            f'pattern "{pattern}" matches no Linear',
            f"recipe {recipe.name}: layers.{key}",
            fix=near_match(pattern, names) if names else "the model has no Linear",
        )
        for key, patterns in (("include", recipe.layers.include), ("exclude", recipe.layers.exclude))
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if problems:
        raise ConfigError(problems)
