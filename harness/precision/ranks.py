"""What ranks must agree on when `harness.Precision` runs under somebody else's process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.capability.probe import MachineFacts
from harness.capability.tier import can_run, tier_of
from harness.core.collectives import gather_over_ranks, gather_texts, max_over_ranks
from harness.core.errors import MachineError, Problem
from harness.core.facts import RungVerdict
from harness.precision.ladder import Judgement, common_rung, judge, verdicts
from harness.precision.recipe import Recipe, Rung


def agree_on_rung(recipe: Recipe, facts: MachineFacts, device: torch.device) -> tuple[Rung, list[RungVerdict]]:
    """The rung that every rank can take (the weakest ranks decide) and this rank's verdict on each.

    Collective. Raises the same MachineError on every rank if there is none, with what each kind of machine lacks.
    """
    judged = judge(recipe, facts)
    mine = [[judgement.able for judgement in judged], [judgement.listed for judgement in judged]]
    everyone = gather_over_ranks(torch.tensor(mine, dtype=torch.float32, device=device)) > 0
    chosen = common_rung(everyone[:, 0].tolist(), everyone[:, 1].tolist())
    if chosen is None:
        raise _no_common_rung(recipe, facts, judged)
    return recipe.ladder[chosen], verdicts(recipe.ladder, judged, chosen)


def _no_common_rung(recipe: Recipe, facts: MachineFacts, judged: Sequence[Judgement]) -> MachineError:
    tier, why = tier_of(facts)
    lacks = "; ".join(f"{rung.name}: {own.reason}" for rung, own in zip(recipe.ladder, judged, strict=True))
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


def agree_on_refuge(facts: MachineFacts, device: torch.device) -> str:
    """Where a run goes that must leave fp16: "bf16" if every rank's card has it, else "fp32"."""
    lacking = not can_run("autocast", "bf16", facts, tier_of(facts)[0])[0]
    return "fp32" if max_over_ranks(torch.tensor([float(lacking)], device=device)).item() else "bf16"
