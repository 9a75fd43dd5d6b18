"""Which norms are computed in one with the Linear that they feed (`layers.fuse`): what modules declare, and what fits.

A module declares it of its own parts: `fusible_norms`, a mapping from the name of a Linear to that of the norm whose
output is the Linear's input, both as seen from the module. Nothing is guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from harness.core.errors import ConfigError, Problem
from harness.core.facts import LayerPlan
from harness.precision.filters import names_of
from harness.precision.keep_fp32 import enclosing
from harness.precision.recipe import Recipe, Rung

DECLARATION = "fusible_norms"


def plan_fusion(
    model: nn.Module, rows: Sequence[LayerPlan], recipe: Recipe, rung: Rung, kept: Mapping[nn.Module, str]
) -> tuple[list[LayerPlan], str]:
    """`rows` with the norm of each Linear that is fused, or why it is not, and a note for the whole run.

    kept: modules that compute in fp32. Raises ConfigError naming every declaration that means nothing.
    """
    if rung.precision != "fp8" or rung.backend != "transformer_engine":
        return list(rows), f"layers.fuse: nothing is fused, {rung.name} has no fused blocks (transformer_engine has)"
    if recipe.fp8.scaling != "delayed":
        why = f"fp8.scaling {recipe.fp8.scaling} measures the norm's output, which a fused block does not give out"
        return list(rows), f"layers.fuse: nothing is fused, {why}"
    declared = _declared(model)
    if not declared:
        return list(rows), f"layers.fuse: nothing is fused, no module of the model declares {DECLARATION}"
    names = names_of(model)
    feeds = Counter(norm for _, norm in declared)
    norms: dict[nn.Module, list[nn.Module]] = {}
    for linear, norm in declared:
        norms.setdefault(linear, []).append(norm)
    fused: dict[str, LayerPlan] = {}
    into: dict[str, str] = {}
    for row in rows:
        linear = model.get_submodule(row.module)
        if row.precision != "fp8" or linear not in norms:
            continue
        norm = norms[linear][0]
        _, name = declared[linear, norm]
        around = enclosing(kept, names, norm)
        if len(norms[linear]) > 1:
            why = f"{len(norms[linear])} norms are declared to feed it"
        elif feeds[norm] > 1:
            why = f"it feeds {feeds[norm]} Linears"
        elif norm in kept or around:
            why = "it is kept in fp32"
        else:
            why = _unfit(norm, linear)
        if why:
            fused[row.module] = replace(row, reason=f"{row.reason}, not fused with {name}: {why}")
        else:
            fused[row.module] = replace(row, reason=f"{row.reason}, fused with {name}", norm=names[norm][0])
            into[names[norm][0]] = declared[linear, norm][0]
    made = [fused.get(row.module, row) for row in rows]
    for index, row in enumerate(made):
        if row.module in into:
            why = f"computed in one with {into[row.module]}, by bf16 weights, where that runs in FP8"
            made[index] = replace(row, reason=why)
    return made, f"layers.fuse: {len(into)} of {len(declared)} declared pairs are fused, see their rows"


def _declared(model: nn.Module) -> dict[tuple[nn.Module, nn.Module], tuple[str, str]]:
    """(Linear, norm) of every declaration, each pair once, with the names that it gives them."""
    pairs: dict[tuple[nn.Module, nn.Module], tuple[str, str]] = {}
    problems: list[Problem] = []
    for name, module in model.named_modules():
        declaration = getattr(module, DECLARATION, {})
        where = f"{name or type(model).__name__}.{DECLARATION}"
        if not isinstance(declaration, Mapping):
            fix = 'give a mapping such as {"attn.qkv": "attn_norm"}'
            problems.append(Problem(f"is a {type(declaration).__name__}, not a mapping", where, fix=fix))
            continue
        parts = dict(module.named_modules(remove_duplicate=False))
        for linear, norm in declaration.items():
            missing = [each for each in (linear, norm) if parts.get(each) is None or not each]
            if missing:
                fix = "name parts of the module itself, as in its named_modules()"
                problems.append(Problem(f"has no part {', '.join(map(repr, missing))}", where, fix=fix))
            else:
                pairs[parts[linear], parts[norm]] = (linear, norm)
    if problems:
        raise ConfigError(problems)
    return pairs


def _unfit(norm: nn.Module, linear: nn.Module) -> str:
    """Why no block of Transformer Engine computes this norm as it is; empty if one does."""
    if not (type(norm) is nn.RMSNorm or type(norm) is nn.LayerNorm):
        return f"{type(norm).__name__} is neither RMSNorm nor LayerNorm"
    if "forward" in vars(norm):
        return "its forward was replaced on the instance"
    if norm.eps is None:
        return "eps None depends on the dtype"
    if tuple(norm.normalized_shape) != (linear.in_features,):
        return f"it normalises {tuple(norm.normalized_shape)}, the layer takes {linear.in_features}"
    if any(norm._parameters.get(name) is None for name in norm._parameters.keys() | {"weight"}):
        return "it has no weight or no bias of its own"
    return ""
