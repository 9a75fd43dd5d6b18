"""A model's layers: which may run in FP8, which stay in float32, which are computed in one; and how one is replaced.

Every layer that may not run in FP8 (by name, block, kind or size) gets one reason.

`layers.keep_fp32` is for what overflows or loses too much in 16 bits: attention scores, a router, the head, the loss.
Autocast is off in such a module's forward, half-precision inputs are cast up. The module's class is replaced by a
subclass of its own class, so Parameters, hooks, names and state_dict keys stay as they are, activation checkpointing
recomputes the same, and equal modules still share their compiled code.

`layers.fuse`: a norm with the Linear that it feeds, an MLP. A module declares it of its own parts, by their names as
seen from the module: `fusible_norms`, from a Linear to the norm whose output is the Linear's input; `fusible_swiglu`,
from a Linear to the one that takes silu(first half of its output) * second half. Nothing is guessed.

A Linear that is replaced by one of another class gives it its own Parameters: ties, optimizers and hooks survive.
transformers' Conv1D (GPT-2) is a Linear here, whose weight is [in, out]; not every backend computes from that.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, wraps
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from harness.core.errors import ConfigError, Problem, near_match
from harness.core.facts import LayerPlan
from harness.precision.backends.registry import BACKENDS
from harness.precision.recipe import LayersConfig, Recipe, Rung


class LayerFilter:
    """A recipe's `layers` section on one model.

    multiple: what sizes must be multiples of. where: the section, for messages. refuses: backend that does not take
    weights [in, out]; empty if it does. problems: patterns that match no Linear and blocks that are not there; with
    any of them the answers of `kept_out` mean nothing.
    """

    def __init__(
        self, model: nn.Module, layers: LayersConfig, multiple: int, where: str, refuses: str = ""
    ) -> None:
        self._layers, self._multiple, self._refuses = layers, multiple, refuses
        self._names = names_of(model)
        self._owners = _owners_of_parameters(model)
        self._linears = [
            name for module, names in self._names.items() if is_linear(module) for name in names
        ]
        self.problems = self._unmatched(where)
        self._skipped = self._skipped_blocks(model, where)

    def kept_out(self, linear: nn.Linear) -> str:
        """Why `linear`, a Linear of the model, stays out of FP8; empty if it does not."""
        layers, names = self._layers, self._names[linear]
        if excluded := _first_match([*layers.exclude, *layers.exclude_if_present], names):
            return f"excluded by name ({excluded})"
        if not _first_match(layers.include, names):
            return "not in layers.include"
        for block, reason in self._skipped.items():
            if any(name == block or name.startswith(f"{block}.") for name in names):
                return reason
        if linear._parameters.get("weight") is None:
            return "its weight is computed, not a Parameter (weight_norm)"
        if is_lazy(linear.weight):
            return "has no size before its first forward"
        if is_conv1d(linear) and self._refuses:
            return (
                f"{type(linear).__name__}: {self._refuses} does not compute from a weight [in, out]"
            )
        if isinstance(linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
            return "nn.MultiheadAttention reads its weight and does not call it"
        if type(linear) is not nn.Linear and not _is_conv1d_itself(type(linear)):
            return f"{type(linear).__name__} is a Linear of its own kind"
        if any(part in _ADAPTERS for name in names for part in name.split(".")):
            return "a low-rank adapter (LoRA): too small to gain, and all that is trained"
        size = features(linear)
        if any(value % self._multiple for value in size):
            return f"sizes {size[0]}x{size[1]} are not multiples of {self._multiple}"
        if min(size) < layers.min_features:
            return f"too small to gain (min_features {layers.min_features})"
        owner = self._owners.get(linear.weight)
        return f"weight shared with {owner}, which is no Linear" if owner else ""

    def _unmatched(self, where: str) -> list[Problem]:
        return [
            Problem(
                f'pattern "{pattern}" matches no Linear',
                f"{where}.{key}",
                fix=near_match(pattern, self._linears)
                if self._linears
                else "the model has no Linear",
            )
            for key, patterns in (
                ("include", self._layers.include),
                ("exclude", self._layers.exclude),
            )
            for pattern in patterns
            if not any(fnmatchcase(name, pattern) for name in self._linears)
        ]

    def _skipped_blocks(self, model: nn.Module, where: str) -> dict[str, str]:
        """Name of each block that stays out -> why. Adds to `problems`."""
        first, last = self._layers.skip_first_blocks, self._layers.skip_last_blocks
        if not first + last:
            return {}
        blocks = repeated_blocks(model)
        keys = " and ".join(
            f"{where}.skip_{end}_blocks"
            for end, count in (("first", first), ("last", last))
            if count
        )
        if not blocks:
            why = "no nn.ModuleList or nn.Sequential in it has two or more children of one class"
            fix = "name the layers in layers.exclude instead"
            self.problems.append(
                Problem(f"{type(model).__name__} has no repeated blocks", keys, why, fix)
            )
        elif first + last >= len(blocks):
            what = f"skips {first + last} blocks of a model that has {len(blocks)} ({blocks[0]} to {blocks[-1]})"
            self.problems.append(
                Problem(what, keys, fix=f"skip {len(blocks) - 1} at most, or take the recipe bf16")
            )
        total = len(blocks)
        skipped = dict.fromkeys(
            blocks[:first], f"in the first {first} of {total} blocks (skip_first_blocks)"
        )
        for block in blocks[max(0, total - last) :]:
            skipped[block] = f"in the last {last} of {total} blocks (skip_last_blocks)"
        return skipped


# Attributes of peft's layers that hold the two factors of an adapter.
_ADAPTERS = ("lora_A", "lora_B")


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a Linear, or a Conv1D."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, y = x W + b with W [in, out], or of a class derived from it."""
    return any(_is_conv1d_itself(kind) for kind in type(module).__mro__)


def _is_conv1d_itself(kind: type) -> bool:
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def features(linear: nn.Linear) -> tuple[int, int]:
    """(out, in) of what `is_linear` is true of."""
    if is_conv1d(linear):
        into, out = linear.weight.shape
        return out, into
    return linear.out_features, linear.in_features


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every module of `model` but itself, with all names that lead to it."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            names.setdefault(module, []).append(name)
    return names


def repeated_blocks(model: nn.Module) -> list[str]:
    """Names of the model's repeated blocks, first to last; empty if it has none.

    They are the elements of that nn.ModuleList or nn.Sequential which holds most parameters, of those with two or more
    children, all of one class. Counting parameters, not children, finds the layers of a mixture of experts and not the
    experts of one layer.
    """
    best: list[str] = []
    most = 0
    for name, module in model.named_modules():
        children = dict(module.named_children())
        kinds = {type(child) for child in children.values()}
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(children) < 2:
            continue
        if len(kinds) > 1 or kinds == {nn.ModuleList}:
            continue
        size = sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))
        if size > most:
            most, best = size, [f"{name}.{child}" if name else child for child in children]
    return best


def _first_match(patterns: list[str], names: list[str]) -> str:
    return next(
        (pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)), ""
    )


def _owners_of_parameters(model: nn.Module) -> dict[Tensor, str]:
    """Each Parameter owned by a module that is not a Linear -> that module's name."""
    return {
        parameter: name
        for name, module in model.named_modules()
        if not is_linear(module)
        for parameter in module.parameters(recurse=False)
    }


_HALF = (torch.float16, torch.bfloat16)


def find_kept(
    model: nn.Module, patterns: Sequence[str], where: str
) -> tuple[dict[nn.Module, str], list[Problem]]:
    """The modules that `patterns` mean, each with its pattern, and a Problem for each pattern that means none.

    A module that is never called cannot be kept: containers have no forward, and nn.MultiheadAttention reads the
    weights of its `out_proj` without calling it. where: the recipe key, for messages.
    """
    names = {module: found for module, found in names_of(model).items() if _is_called(module)}
    kept: dict[nn.Module, str] = {}
    problems: list[Problem] = []
    for pattern in patterns:
        matched = [
            module
            for module, found in names.items()
            if any(fnmatchcase(name, pattern) for name in found)
        ]
        if not matched:
            known = [name for found in names.values() for name in found]
            what = f'pattern "{pattern}" matches no module that is called'
            problems.append(Problem(what, where, fix=near_match(pattern, known)))
        for module in matched:
            kept.setdefault(module, pattern)
            if "forward" in vars(module):
                what = f"{names[module][0]} had its forward replaced on the object"
                why = "an fp32 forward of its class would never run"
                problems.append(
                    Problem(what, where, why, "prepare the model before other tools wrap it")
                )
    return kept, problems


def enclosing(
    kept: Mapping[nn.Module, str], names: Mapping[nn.Module, list[str]], module: nn.Module
) -> str:
    """Name of a kept module around `module`, under any of its names; empty if there is none."""
    own = names[module]
    outer = (name for other in kept for name in names[other])
    return next((name for name in outer if any(inner.startswith(f"{name}.") for inner in own)), "")


def keep_in_fp32(model: nn.Module, names: Sequence[str], device_type: str) -> None:
    """From now on the named modules of `model` compute in float32 and return what they then return.

    A deep copy does the same; a pickle is of the module's own class.
    """
    for module in dict.fromkeys(model.get_submodule(name) for name in names):
        module.__class__ = _fp32_class(type(module), device_type)


@cache
def _fp32_class(base: type[nn.Module], device_type: str) -> type[nn.Module]:
    """One class for each `base`: torch.compile would compile equal blocks of different classes again and again."""

    @wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return base.forward(self, *widened(args), **widened(kwargs))

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        made = memo[id(self)] = object.__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return object.__new__, (base,), self.__getstate__()

    methods = {
        "forward": forward,
        "__deepcopy__": deepcopy,
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
    }
    return type(base.__name__, (base,), methods)


def widened(value: Any) -> Any:
    """`value` with every float16 and bfloat16 tensor in it as float32; looks into tuples, lists, dicts, dataclasses."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALF else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(widened, value))
    if type(value) is tuple or type(value) is list:
        return type(value)(widened(item) for item in value)
    if not isinstance(value, type) and is_dataclass(
        value
    ):  # transformers' outputs are dicts as well
        found = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        wide = {name: widened(item) for name, item in found.items()}
        changed = any(wide[name] is not item for name, item in found.items())
        return replace(cast(Any, value), **wide) if changed else value
    if type(value) is OrderedDict:
        return OrderedDict((key, widened(item)) for key, item in value.items())
    if type(value) is dict:
        return {key: widened(item) for key, item in value.items()}
    return value


def kind_of(module: nn.Module) -> str:
    """What the plan calls a module's class."""
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention's out_proj"
    return type(module).__name__


def _is_called(module: nn.Module) -> bool:
    read_by_its_parent = nn.modules.linear.NonDynamicallyQuantizableLinear
    return type(module).forward is not nn.Module.forward and not isinstance(
        module, read_by_its_parent
    )


DECLARATION, SWIGLU = "fusible_norms", "fusible_swiglu"
_EXAMPLES = {DECLARATION: '{"attn.qkv": "attn_norm"}', SWIGLU: '{"gate_up": "down"}'}


def plan_fusion(
    model: nn.Module,
    rows: Sequence[LayerPlan],
    recipe: Recipe,
    rung: Rung,
    kept: Mapping[nn.Module, str],
) -> tuple[list[LayerPlan], str]:
    """`rows` with what is fused with each Linear, or why it is not, and a note for the whole run.

    kept: modules that compute in fp32. Raises ConfigError naming every declaration that means nothing.
    """
    fuses = BACKENDS[rung.backend].fuses
    if rung.precision != "fp8" or not fuses:
        have = ", ".join(name for name, backend in BACKENDS.items() if backend.fuses)
        return list(
            rows
        ), f"layers.fuse: nothing is fused, {rung.name} has no fused blocks ({have} has)"
    if recipe.fp8.scaling not in fuses:
        why = f"fp8.scaling {recipe.fp8.scaling} measures the norm's output, which a fused block does not give out"
        return list(rows), f"layers.fuse: nothing is fused, {why}"
    (declared, problems), (mlps, more) = _declared(model, DECLARATION), _declared(model, SWIGLU)
    if problems + more:
        raise ConfigError(problems + more)
    if not declared:
        return list(
            rows
        ), f"layers.fuse: nothing is fused, no module of the model declares {DECLARATION}"
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
            fused[row.module] = replace(
                row, reason=f"{row.reason}, fused with {name}", norm=names[norm][0]
            )
            into[names[norm][0]] = declared[linear, norm][0]
    made = [fused.get(row.module, row) for row in rows]
    for index, row in enumerate(made):
        if row.module in into:
            why = (
                f"computed in one with {into[row.module]}, by bf16 weights, where that runs in FP8"
            )
            made[index] = replace(row, reason=why)
    note = f"layers.fuse: {len(into)} of {len(declared)} declared pairs are fused, see their rows"
    if not mlps:
        return made, note
    made = _with_mlps(model, made, mlps)
    return (
        made,
        f"{note}; {sum(bool(row.first) for row in made)} of {len(mlps)} declared SwiGLU MLPs are one block",
    )


def _with_mlps(
    model: nn.Module,
    rows: Sequence[LayerPlan],
    mlps: Mapping[tuple[nn.Module, nn.Module], tuple[str, str]],
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
            made[row.module] = replace(
                row, reason=f"{row.reason}, one MLP with {name}", first=before.module
            )
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
            problems.append(
                Problem(f"is a {type(declaration).__name__}, not a mapping", where, fix=fix)
            )
            continue
        parts = dict(module.named_modules(remove_duplicate=False))
        for one, other in declaration.items():
            if missing := [each for each in (one, other) if parts.get(each) is None or not each]:
                fix = "name parts of the module itself, as in its named_modules()"
                problems.append(
                    Problem(f"has no part {', '.join(map(repr, missing))}", where, fix=fix)
                )
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


L = TypeVar("L", bound=nn.Module)
M = TypeVar("M", bound=nn.Module)


def swap_linears(
    model: nn.Module, names: Sequence[str], make: Callable[[nn.Linear], M]
) -> dict[str, M]:
    """Replace each named Linear of `model` by `make(linear)`, which must share its Parameters; returns them by name.

    A module reachable under several names is replaced once and put back under all of them.
    """
    wanted = set(names)
    swapped: dict[str, M] = {}
    replacements: dict[nn.Module, M] = {}
    for parent_name, parent in list(model.named_modules()):
        for child_name, child in list(parent.named_children()):
            name = f"{parent_name}.{child_name}" if parent_name else child_name
            if name in wanted and is_linear(child):
                replacements[child] = swapped[name] = make(child)
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):
            if child is not None and child in replacements:
                setattr(parent, child_name, replacements[child])
    return {name: swapped[name] for name in names}


def twin(linear: nn.Linear, to: type[L]) -> L:
    """A `to` with the same state as `linear`: Parameters by identity, hooks and training flag included."""
    made = to.__new__(to)
    made.__dict__.update(linear.__dict__)
    return made


def pickled_as_linear(
    module: nn.Module, own: Collection[str], plain: type[nn.Module] = nn.Linear
) -> tuple[Any, ...]:
    """`__reduce_ex__` of a converted layer: a `plain` one without its `own` attributes: FP8 state belongs to a run."""
    state = {name: value for name, value in module.__dict__.items() if name not in own}
    return object.__new__, (plain,), state
