"""What ranks must agree on when `harness.Precision` runs under somebody else's process group."""

from __future__ import annotations

from dataclasses import replace

import torch

from harness.capability.probe import MachineFacts
from harness.capability.supports import can_run
from harness.capability.tier import tier_of
from harness.core.collectives import max_over_ranks
from harness.core.errors import MachineError, Problem
from harness.core.facts import RungVerdict
from harness.precision.plan import resolve
from harness.precision.recipe import Recipe, Rung


def agree_on_rung(recipe: Recipe, facts: MachineFacts, device: torch.device) -> tuple[Rung, list[RungVerdict]]:
    """The rung that every rank can take (the weakest rank decides) and this rank's verdict on each.

    Raises MachineError, on every rank, if some rank can take none.
    """
    rung, verdicts = resolve(recipe, facts)
    mine = len(recipe.ladder) if rung is None else recipe.ladder.index(rung)
    chosen = int(max_over_ranks(torch.tensor([float(mine)], device=device)).item())
    if chosen >= len(recipe.ladder):
        tier, why = tier_of(facts)
        who = f"tier {tier.name} ({why})" if mine == chosen else "another rank's machine"
        raise MachineError(
            Problem(
                f"no rung of recipe {recipe.name} runs on {who}",
                f"recipe {recipe.name}: ladder",
                why="; ".join(f"{verdict.rung}: {verdict.reason}" for verdict in verdicts),
                fix='use the recipe "auto", or add a rung for this tier to the recipe',
            )
        )
    if chosen != mine:
        verdicts[mine] = replace(verdicts[mine], taken=False, reason="another rank cannot take it")
        verdicts[chosen] = replace(verdicts[chosen], taken=True, reason="the best that every rank can take")
    return recipe.ladder[chosen], verdicts


def agree_on_refuge(facts: MachineFacts, device: torch.device) -> str:
    """Where a run goes that must leave fp16: "bf16" if every rank's card has it, else "fp32"."""
    lacking = not can_run("autocast", "bf16", facts, tier_of(facts)[0])[0]
    return "fp32" if max_over_ranks(torch.tensor([float(lacking)], device=device)).item() else "bf16"
