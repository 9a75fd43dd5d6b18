"""The lints of a model: every finding of one traced forward, and the Linears that FP8 does not take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from harness.capability.cards import Tier
from harness.core.findings import Finding, warning
from harness.core.protocols import Batch
from harness.precision.backends.registry import BACKENDS
from harness.precision.convert import autocast_dtype
from harness.precision.layers import LayerFilter, features, is_linear
from harness.precision.lints import numerics
from harness.precision.lints.casts import Casts, useless
from harness.precision.lints.graph import Fault, Graph, Place, Rule, record
from harness.precision.lints.sizes import OutsideLinears, Sizes, padded
from harness.precision.plan import Plan
from harness.precision.recipe import Recipe, Rung

Loss = Callable[[nn.Module, Batch], Tensor]


def lint_model(
    model: nn.Module, loss: Loss, batch: Batch, recipe: Recipe, rung: Rung, plan: Plan
) -> tuple[list[Finding], Graph]:
    """Findings on `model`, all warnings, in the order of the forward; and its graph.

    model: as it was built, not converted; its weights may be on the meta device.
    loss: loss(model, batch) -> 0-d loss, as `Task.loss`.
    batch: a micro-batch of the run, on the CPU.
    rung: the one that the machine takes. The plan's is another one if the model has nothing for FP8. The findings say
        why it has nothing.

    A forward that cannot be traced is a finding, `model.untraced`. Raises HarnessError as `loss` does.
    """
    half = autocast_dtype(plan)
    smallest = recipe.layers.min_features

    def new_rules() -> list[Rule]:
        made: list[Rule] = [*numerics.RULES, Sizes(smallest)]
        if half is not None:
            made.append(Casts(half, plan.keep_fp32))
        if rung.precision == "fp8":
            made.append(OutsideLinears(model, smallest))
        return made

    # Most rules judge an operation as it is made. Some need the whole forward, and come after it.
    graph = record(model, loss, batch, half, new_rules)
    late = numerics.exponentials(graph.nodes)
    if half is not None:
        late += useless(graph.nodes)
    for fault in late:
        place = Place("", "")
        if fault.at and fault.at.place:
            place = fault.at.place
        graph.faults.append((fault, place))

    found = [*_merged(graph), *_unfit(model, recipe, rung, plan.keep_fp32)]
    if graph.error:
        # The forward runs on the CPU here. Where the machine has a GPU, it may need a kernel that only that has.
        fails = graph.failed and plan.tier == Tier.CPU.name
        why = f"{graph.error}; sizes, casts and numerics were not looked at"
        fix = "let forward depend on shapes alone, as torch.compile wants it, too"
        what = "the forward cannot be traced"
        where = type(model).__name__
        untraced = warning("model.untraced", where, what, why, fix)
        if fails:
            fix = "make one forward on a batch of the data work"
            untraced = Finding("model.fails", "error", where, "the forward fails", why, fix)
        found.append(untraced)
    return found, graph


def _merged(graph: Graph) -> list[Finding]:
    """One finding for each fault of a line of code, with the first module and how many more there are."""
    modules: dict[tuple[str, str], dict[str, None]] = {}
    first: dict[tuple[str, str], tuple[Fault, Place]] = {}
    for fault, place in graph.faults:
        # Without a line, what is wrong tells faults apart.
        key = (fault.code, place.line or fault.what)
        first.setdefault(key, (fault, place))
        modules.setdefault(key, {})[place.module] = None

    found: list[Finding] = []
    for key, (fault, place) in first.items():
        where = place.module
        others = len(modules[key]) - 1
        if others:
            where += f" and {others} more"
        if place.line:
            where = f"{where} ({place.line})" if where else place.line
        found.append(warning(fault.code, where, fault.what, fault.why, fault.fix))
    return found


def _unfit(model: nn.Module, recipe: Recipe, rung: Rung, keep_fp32: Sequence[str]) -> list[Finding]:
    """Linears that the recipe wants in FP8 and that stay out for what they are. One finding for each reason."""
    if rung.precision != "fp8":
        return []
    backend = rung.backend
    refuses = "" if BACKENDS[backend].transposed else backend
    multiple = recipe.fp8_multiple(backend)
    layers = LayerFilter(model, recipe.layers, multiple, f"recipe {recipe.name}: layers", refuses)

    # A name with its dot, so that "block.1" is not taken for the beginning of "block.10".
    kept = tuple(f"{name}." for name in keep_fp32)
    names: dict[tuple[str, str], list[str]] = {}
    for name, module in model.named_modules():
        if not name or not is_linear(module) or f"{name}.".startswith(kept):
            continue
        reason = layers.unfit(module)
        if reason:
            fix = _fix(module, multiple)
            names.setdefault((reason, fix), []).append(name)

    found: list[Finding] = []
    for (reason, fix), linears in names.items():
        where = linears[0]
        if len(linears) > 1:
            where += f" and {len(linears) - 1} more"
        found.append(warning("model.fp8_kept_out", where, "stays out of FP8", reason, fix))
    return found


def _fix(linear: nn.Linear, multiple: int) -> str:
    """How `linear` could run in FP8, or how to say that it is not meant to."""
    fix = "replace it by a plain nn.Linear that is called, or name it in layers.exclude"
    if linear._parameters.get("weight") is None or torch.nn.parameter.is_lazy(linear.weight):
        return fix
    sizes = features(linear)
    if any(size % multiple for size in sizes):
        better = [padded(size, multiple) for size in sizes]
        return f"make it {better[0]}x{better[1]}, or name it in layers.exclude"
    return fix
