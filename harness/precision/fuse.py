"""What is computed in one (`layers.fuse`): a norm with the Linear that it feeds, an MLP. What is declared, what fits.

A module declares it of its own parts, by their names as seen from the module: `fusible_norms`, from a Linear to the
norm whose output is the Linear's input; `fusible_swiglu`, from a Linear to the one that takes silu(first half of its
output) * second half. Nothing is guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from harness.core.errors import ConfigError, Problem
from harness.core.facts import LayerPlan
from harness.precision.filters import names_of
from harness.precision.keep_fp32 import enclosing
from harness.precision.recipe import Recipe, Rung

DECLARATION, SWIGLU = "fusible_norms", "fusible_swiglu"
_EXAMPLES = {DECLARATION: '{"attn.qkv": "attn_norm"}', SWIGLU: '{"gate_up": "down"}'}


def plan_fusion(
    model: nn.Module, rows: Sequence[LayerPlan], recipe: Recipe, rung: Rung, kept: Mapping[nn.Module, str]
) -> tuple[list[LayerPlan], str]:
    """`rows` with what is fused with each Linear, or why it is not, and a note for the whole run.

    kept: modules that compute in fp32. Raises ConfigError naming every declaration that means nothing.
    """
    if rung.precision != "fp8" or rung.backend != "transformer_engine":
        return list(rows), f"layers.fuse: nothing is fused, {rung.name} has no fused blocks (transformer_engine has)"
    if recipe.fp8.scaling != "delayed":
        why = f"fp8.scaling {recipe.fp8.scaling} measures the norm's output, which a fused block does not give out"
        return list(rows), f"layers.fuse: nothing is fused, {why}"
    (declared, problems), (mlps, more) = _declared(model, DECLARATION), _declared(model, SWIGLU)
    if problems + more:
        raise ConfigError(problems + more)
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
    note = f"layers.fuse: {len(into)} of {len(declared)} declared pairs are fused, see their rows"
    if not mlps:
        return made, note
    made = _with_mlps(model, made, mlps)
    return made, f"{note}; {sum(bool(row.first) for row in made)} of {len(mlps)} declared SwiGLU MLPs are one block"


def _with_mlps(
    model: nn.Module, rows: Sequence[LayerPlan], mlps: Mapping[tuple[nn.Module, nn.Module], tuple[str, str]]
) -> list[LayerPlan]:
    """`rows` with the first Linear of each MLP that is fused at the row of its second, or why it is not."""
    firsts, seconds = Counter(first for first, _ in mlps), Counter(second for _, second in mlps)
    fp8 = {model.get_submodule(row.module): row for row in rows if row.precision == "fp8"}
    made = {row.module: row for row in rows}
    for (first, second), (name, _) in mlps.items():
        row, before = fp8.get(second), fp8.get(first)
        if row is None:
            continue
        if firsts[first] > 1 or seconds[second] > 1:
            why = "a Linear is declared in several"
        elif before is None:
            why = "that does not run in FP8"
        elif not before.norm:
            why = "no norm is fused with that"
        elif row.norm:
            why = f"{row.norm} is fused with this one"
        else:
            why = _unfit_mlp(first, second)
        if why or before is None:
            made[row.module] = replace(row, reason=f"{row.reason}, not one MLP with {name}: {why}")
        else:
            made[row.module] = replace(row, reason=f"{row.reason}, one MLP with {name}", first=before.module)
    return list(made.values())


def _declared(
    model: nn.Module, attribute: str
) -> tuple[dict[tuple[nn.Module, nn.Module], tuple[str, str]], list[Problem]]:
    """The pairs of every declaration, each once, with the names that it gives them, and what means nothing."""
    pairs: dict[tuple[nn.Module, nn.Module], tuple[str, str]] = {}
    problems: list[Problem] = []
    for name, module in model.named_modules():
        declaration = getattr(module, attribute, {})
        where = f"{name or type(model).__name__}.{attribute}"
        if not isinstance(declaration, Mapping):
            fix = f"give a mapping such as {_EXAMPLES[attribute]}"
            problems.append(Problem(f"is a {type(declaration).__name__}, not a mapping", where, fix=fix))
            continue
        parts = dict(module.named_modules(remove_duplicate=False))
        for one, other in declaration.items():
            missing = [each for each in (one, other) if parts.get(each) is None or not each]
            if missing:
                fix = "name parts of the module itself, as in its named_modules()"
                problems.append(Problem(f"has no part {', '.join(map(repr, missing))}", where, fix=fix))
            else:
                pairs[parts[one], parts[other]] = (one, other)
    return pairs, problems


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


def _unfit_mlp(first: Any, second: Any) -> str:
    """Why no block of Transformer Engine computes these as an MLP; empty if one does."""
    sizes = [(each.in_features, each.out_features) for each in (first, second)]
    if sizes != [(sizes[0][0], 2 * sizes[1][0]), (sizes[1][0], sizes[0][0])]:
        return f"{sizes[0][0]} to {sizes[0][1]} and {sizes[1][0]} to {sizes[1][1]} features make no MLP with two halves"
    if (first.bias is None) != (second.bias is None):
        return "one of them has a bias, and the other has none"
    return ""
