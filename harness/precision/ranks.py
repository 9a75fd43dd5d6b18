"""What ranks must agree on when `harness.Precision` runs under somebody else's process group."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from harness.capability.probe import MachineFacts
from harness.capability.tier import tier_of
from harness.core.errors import MachineError, Problem
from harness.core.facts import RungVerdict
from harness.precision.plan import resolve
from harness.precision.recipe import Recipe, Rung


def world_size() -> int:
    """Ranks of the default process group; 1 where none is initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def world_rank() -> int:
    """This process's rank in the default process group; 0 where none is initialised."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def max_over_ranks(values: Tensor) -> Tensor:
    """Maximum over ranks, in place and in one collective; `values` itself is returned."""
    if world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def mean_over_ranks(values: Tensor) -> Tensor:
    """Mean over ranks, summed in rank order: the same bits on every rank."""
    ranks = world_size()
    if ranks == 1:
        return values
    gathered = [torch.empty_like(values) for _ in range(ranks)]
    dist.all_gather(gathered, values.contiguous())
    return torch.stack(gathered).mean(dim=0)


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
