"""A model's layers: which may run in FP8, which stay in float32, which are computed together, and how one is replaced.

FP8 (`LayerFilter`). Every Linear that may not run in FP8 gets one reason: its name, block, kind or size.
transformers' Conv1D (GPT-2) counts as a Linear here; its weight is [in, out], which not every backend computes from.

`layers.keep_fp32` (`find_kept`, `keep_in_fp32`) is for what overflows or loses too much in 16 bits: attention scores, a
router, the head, the loss. In such a module's forward autocast is off, and half-precision inputs are cast up. The
module's class is replaced by a subclass of it. So Parameters, hooks, names and state_dict keys stay as they are,
activation checkpointing recomputes the same, and equal modules still share their compiled code.

`layers.fuse` (`plan_fusion`): a norm with the Linear that it feeds, or a whole MLP, is computed as one block. A module
declares this for its own parts, by their names as seen from the module. Nothing is guessed. The native backend has no
such blocks. It lets torch.compile fuse casts with what makes a tensor, for which no declaration is needed.
- `fusible_norms`: from a Linear to the norm whose output is the Linear's input.
- `fusible_swiglu`: from a Linear to the one that takes silu(first half of its output) * second half. The module's
  forward must be just that MLP, with or without the norm before it (`swiglu`).

Replacing (`swap_linears`). A Linear gives its own Parameters to the layer that replaces it, so tied weights, optimizers
and hooks survive.
"""

from __future__ import annotations

import copy
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, wraps
from typing import Any, NamedTuple, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from harness.core.errors import ConfigError, Problem, near_match
from harness.core.facts import LayerPlan
from harness.precision.backends.registry import BACKENDS
from harness.precision.recipe import LayersConfig, Recipe, Rung
from harness.precision.swiglu import difference


class LayerFilter:
    """A recipe's `layers` section, applied to one model.

    multiple: sizes must be multiples of it.
    where: the section, for messages.
    refuses: a backend that does not take weights [in, out]; empty if it does.
    problems: patterns that match no Linear, and blocks that do not exist. With any of them the answers of `kept_out`
        mean nothing.
    """

    def __init__(
        self, model: nn.Module, layers: LayersConfig, multiple: int, where: str, refuses: str = ""
    ) -> None:
        self._layers = layers
        self._multiple = multiple
        self._refuses = refuses
        self._names = names_of(model)
        self._owners = _owners_of_parameters(model)
        self._linears: list[str] = []
        for module, names in self._names.items():
            if is_linear(module):
                # Patterns are written for the model as it is without adapters.
                names += _names_before_peft(names)
                self._linears += names
        self.problems = self._unmatched(where)
        self._skipped = self._skipped_blocks(model, where)

    def kept_out(self, linear: nn.Linear) -> str:
        """Why `linear`, a Linear of the model, stays out of FP8; empty if it does not."""
        names = self._names[linear]
        if reason := self._by_recipe(names):
            return reason

        # Kinds of Linear that a converted layer could not stand for.
        if linear._parameters.get("weight") is None:
            return "its weight is computed, not a Parameter (weight_norm)"
        if is_lazy(linear.weight):
            return "has no size before its first forward"
        if is_conv1d(linear) and self._refuses:
            kind = type(linear).__name__
            return f"{kind}: {self._refuses} does not compute from a weight [in, out]"
        if isinstance(linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
            return "nn.MultiheadAttention reads its weight and does not call it"
        # Such a forward is bound to the Linear that it was made for: it runs without FP8, or not at all.
        if "forward" in vars(linear):
            return "its forward was replaced on the object"
        if type(linear) is not nn.Linear and not _is_conv1d_itself(type(linear)):
            return f"{type(linear).__name__} is a Linear of its own kind"
        parts = ".".join(names).split(".")
        if not _ADAPTERS.isdisjoint(parts):
            return "a low-rank adapter (LoRA): too small to gain, and all that is trained"

        # Sizes that FP8 cannot compute, or gains nothing from.
        size = features(linear)
        if any(value % self._multiple for value in size):
            return f"sizes {size[0]}x{size[1]} are not multiples of {self._multiple}"
        smallest = self._layers.min_features
        if min(size) < smallest:
            return f"too small to gain (min_features {smallest})"
        owner = self._owners.get(linear.weight)
        if owner:
            return f"weight shared with {owner}, which is no Linear"
        return ""

    def unfit(self, linear: nn.Linear) -> str:
        """As `kept_out`, for what the Linear is; empty if the recipe keeps it out, or if it is too small to gain."""
        names = self._names[linear]
        parts = ".".join(names).split(".")
        if self._by_recipe(names) or not _ADAPTERS.isdisjoint(parts):
            return ""
        has_size = linear._parameters.get("weight") is not None and not is_lazy(linear.weight)
        smallest = self._layers.min_features
        if has_size and min(features(linear)) < smallest:
            return ""
        return self.kept_out(linear)

    def _by_recipe(self, names: list[str]) -> str:
        """Why the recipe keeps the Linear of these names out; empty if it does not."""
        layers = self._layers
        excluded = _first_match([*layers.exclude, *layers.exclude_if_present], names)
        if excluded:
            return f"excluded by name ({excluded})"
        if not _first_match(layers.include, names):
            return "not in layers.include"
        # A Linear may have several names, as a shared module has.
        for block, reason in self._skipped.items():
            if any(f"{name}.".startswith(f"{block}.") for name in names):
                return reason
        return ""

    def _unmatched(self, where: str) -> list[Problem]:
        """A problem for each pattern that must match something and matches no Linear."""
        problems: list[Problem] = []
        for key in ("include", "exclude"):
            for pattern in getattr(self._layers, key):
                if any(fnmatchcase(name, pattern) for name in self._linears):
                    continue
                fix = "the model has no Linear"
                if self._linears:
                    fix = near_match(pattern, self._linears)
                what = f'pattern "{pattern}" matches no Linear'
                problems.append(Problem(what, f"{where}.{key}", fix=fix))
        return problems

    def _skipped_blocks(self, model: nn.Module, where: str) -> dict[str, str]:
        """Name of each block that stays out -> why. Adds to `problems`."""
        first = self._layers.skip_first_blocks
        last = self._layers.skip_last_blocks
        if not first + last:
            return {}
        blocks = repeated_blocks(model)
        total = len(blocks)

        # For messages, the keys that are set.
        given: list[str] = []
        if first:
            given.append(f"{where}.skip_first_blocks")
        if last:
            given.append(f"{where}.skip_last_blocks")
        keys = " and ".join(given)
        if not blocks:
            what = f"{type(model).__name__} has no repeated blocks"
            why = "no nn.ModuleList or nn.Sequential in it has two or more children of one class"
            fix = "name the layers in layers.exclude instead"
            self.problems.append(Problem(what, keys, why, fix))
        elif first + last >= total:
            range_ = f"{blocks[0]} to {blocks[-1]}"
            what = f"skips {first + last} blocks of a model that has {total} ({range_})"
            fix = f"skip {total - 1} at most, or take the recipe bf16"
            self.problems.append(Problem(what, keys, fix=fix))

        skipped: dict[str, str] = {}
        for block in blocks[:first]:
            skipped[block] = f"in the first {first} of {total} blocks (skip_first_blocks)"
        for block in blocks[max(0, total - last) :]:
            skipped[block] = f"in the last {last} of {total} blocks (skip_last_blocks)"
        return skipped


# Attributes of peft's layers that hold the two factors of an adapter.
_ADAPTERS = frozenset({"lora_A", "lora_B"})
# What follows the name of a layer that peft wrapped or copied.
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)$")


def _names_before_peft(names: Sequence[str]) -> list[str]:
    """The names without what peft added: lm_head of lm_head.base_layer. Empty if it added nothing."""
    return [_WRAPPED.sub("", name) for name in names if _WRAPPED.search(name)]


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a Linear or a Conv1D."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, y = x W + b with W [in, out], or of a class derived from it."""
    return any(_is_conv1d_itself(kind) for kind in type(module).__mro__)


def _is_conv1d_itself(kind: type) -> bool:
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def features(linear: nn.Linear) -> tuple[int, int]:
    """(out, in) of a module for which `is_linear` is true."""
    if is_conv1d(linear):
        into, out = linear.weight.shape
        return out, into
    return linear.out_features, linear.in_features


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every module of `model` except itself, with all names that lead to it."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            names.setdefault(module, []).append(name)
    return names


def repeated_blocks(model: nn.Module) -> list[str]:
    """Names of the model's repeated blocks, first to last; empty if it has none.

    Candidates are the nn.ModuleLists and nn.Sequentials with two or more children, all of one class. The blocks are the
    children of the one that holds most parameters. Counting parameters, not children, finds the layers of a mixture of
    experts and not the experts of one layer.
    """
    best: list[str] = []
    most = 0
    for name, module in model.named_modules():
        children = dict(module.named_children())
        kinds = {type(child) for child in children.values()}
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(children) < 2:
            continue
        # Children of several kinds are no repetition. Of a list of lists each inner list is looked at by itself.
        if len(kinds) > 1 or kinds == {nn.ModuleList}:
            continue
        # A lazy parameter has no size before the first forward.
        sized = [each for each in module.parameters() if not is_lazy(each)]
        size = sum(parameter.numel() for parameter in sized)
        if size > most:
            most = size
            prefix = f"{name}." if name else ""
            best = [prefix + child for child in children]
    return best


def _first_match(patterns: list[str], names: list[str]) -> str:
    """The first pattern that matches one of the names; empty if none does."""
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in names):
            return pattern
    return ""


def _owners_of_parameters(model: nn.Module) -> dict[Tensor, str]:
    """Each Parameter owned by a module that is not a Linear -> that module's name."""
    owners: dict[Tensor, str] = {}
    for name, module in model.named_modules():
        if not is_linear(module):
            for parameter in module.parameters(recurse=False):
                owners[parameter] = name
    return owners


_HALF = (torch.float16, torch.bfloat16)


def find_kept(
    model: nn.Module, patterns: Sequence[str], where: str
) -> tuple[dict[nn.Module, str], list[Problem]]:
    """The modules that `patterns` match, each with its pattern, and a Problem for each pattern without effect.

    A module that is never called cannot be kept in fp32. Containers have no forward, and nn.MultiheadAttention reads
    the weights of its `out_proj` without calling it.

    where: the recipe key, for messages.
    """
    # Patterns are matched with modules that are called.
    names: dict[nn.Module, list[str]] = {}
    every_name: list[str] = []
    for module, found in names_of(model).items():
        if _is_called(module):
            names[module] = found
            every_name += found

    kept: dict[nn.Module, str] = {}
    problems: list[Problem] = []
    for pattern in patterns:
        only = [pattern]
        matched = [module for module, found in names.items() if _first_match(only, found)]
        if not matched:
            what = f'pattern "{pattern}" matches no module that is called'
            problems.append(Problem(what, where, fix=near_match(pattern, every_name)))
        for module in matched:
            # Of several patterns that match a module the first is kept, for the plan.
            kept.setdefault(module, pattern)
            if "forward" in vars(module):
                what = f"{names[module][0]} had its forward replaced on the object"
                why = "an fp32 forward of its class would never run"
                fix = "prepare the model before other tools wrap it"
                problems.append(Problem(what, where, why, fix))
    return kept, problems


def enclosing(
    kept: Mapping[nn.Module, str], names: Mapping[nn.Module, list[str]], module: nn.Module
) -> str:
    """Name of a kept module around `module`, under any of its names; empty if there is none."""
    for other in kept:
        for name in names[other]:
            if any(inner.startswith(f"{name}.") for inner in names[module]):
                return name
    return ""


def keep_in_fp32(model: nn.Module, names: Sequence[str], device_type: str) -> None:
    """From now on the named modules of `model` compute in float32, and their outputs are what float32 gives.

    A deep copy does the same. A pickle is of the module's own class.
    """
    # Each module once, though several names may lead to it: a class made of its own class would cast twice.
    modules = {model.get_submodule(name): None for name in names}
    for module in modules:
        module.__class__ = _fp32_class(type(module), device_type)


@cache
def _fp32_class(base: type[nn.Module], device_type: str) -> type[nn.Module]:
    """A subclass of `base` that computes in float32.

    There is one for each `base`: torch.compile compiles a block again for every new class of the modules in it.
    """

    @wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return base.forward(self, *widened(args), **widened(kwargs))

    # A deep copy computes in float32, too. Python would make it from `reduce`, of the module's own class.
    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        made = memo[id(self)] = object.__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    # This class cannot be imported where a pickle is loaded, so a pickle is of the module's own class.
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
    """`value` with every float16 and bfloat16 tensor in it as float32. Looks into tuples, lists, dicts, dataclasses."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALF else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(widened, value))
    if type(value) is tuple or type(value) is list:
        return type(value)(widened(item) for item in value)
    # Before dicts: transformers' outputs are dataclasses and dicts.
    if not isinstance(value, type) and is_dataclass(value):
        changed: dict[str, Any] = {}
        for each in fields(value):
            # `replace` takes the fields of __init__ alone.
            if not each.init:
                continue
            item = getattr(value, each.name)
            wide = widened(item)
            if wide is not item:
                changed[each.name] = wide
        if not changed:
            return value
        return replace(cast(Any, value), **changed)
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
    """Whether a forward of `module` ever runs. nn.MultiheadAttention reads its out_proj instead of calling it."""
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False
    return type(module).forward is not nn.Module.forward


DECLARATION, SWIGLU = "fusible_norms", "fusible_swiglu"
_EXAMPLES = {DECLARATION: '{"attn.qkv": "attn_norm"}', SWIGLU: '{"gate_up": "down"}'}
_Pair = tuple[nn.Module, nn.Module]


class _Names(NamedTuple):
    """How a declaration names a pair, and the module that it belongs to: the innermost one, if several declare it."""

    one: str
    other: str
    module: nn.Module


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
    # Whether this rung fuses at all.
    nothing = "layers.fuse: nothing is fused,"
    fuses = BACKENDS[rung.backend].fuses
    if rung.precision == "fp8" and BACKENDS[rung.backend].fuses_casts:
        where = "in blocks compiled for a GPU, by the kernel that makes a tensor"
        unless = "not in sampled steps, or beside a layer in BF16"
        return list(rows), f"layers.fuse: {rung.name} casts {where}; {unless}"
    if rung.precision != "fp8" or not fuses:
        able = ", ".join(name for name in BACKENDS if BACKENDS[name].fuses)
        return list(rows), f"{nothing} {rung.name} has no fused blocks ({able} has)"
    if recipe.fp8.scaling not in fuses:
        why = f"fp8.scaling {recipe.fp8.scaling} measures the norm's output, which a fused block does not give out"
        return list(rows), f"{nothing} {why}"

    # What the model declares.
    declared, problems = _declared(model, DECLARATION)
    mlps, more = _declared(model, SWIGLU)
    if problems + more:
        raise ConfigError(problems + more)
    if not declared:
        return list(rows), f"{nothing} no module of the model declares {DECLARATION}"

    made, count = _with_norms(model, rows, declared, kept)
    note = f"layers.fuse: {count} of {len(declared)} declared pairs are fused, see their rows"
    if mlps:
        made = _with_mlps(model, made, mlps)
        blocks = sum(bool(row.first) for row in made)
        note += f"; {blocks} of {len(mlps)} declared SwiGLU MLPs are one block"
    return made, note


def _with_norms(
    model: nn.Module,
    rows: Sequence[LayerPlan],
    declared: Mapping[_Pair, _Names],
    kept: Mapping[nn.Module, str],
) -> tuple[list[LayerPlan], int]:
    """`rows` with the norm that is fused with each Linear, or why it is not, and how many are fused.

    declared: the pairs (Linear, norm).
    """
    # A Linear may be declared with several norms, and a norm with several Linears. Neither can be fused.
    names = names_of(model)
    norms: dict[nn.Module, list[nn.Module]] = {}
    feeds: Counter[nn.Module] = Counter()
    for linear, norm in declared:
        norms.setdefault(linear, []).append(norm)
        feeds[norm] += 1

    # The row of each Linear; and for the row of each fused norm, the Linear that it is fused with.
    fused: dict[str, LayerPlan] = {}
    into: dict[str, str] = {}
    for row in rows:
        linear = model.get_submodule(row.module)
        if row.precision != "fp8" or linear not in norms:
            continue
        norm = norms[linear][0]
        linear_name, norm_name, _ = declared[linear, norm]

        # One norm and one Linear, and both as the library computes them.
        count = len(norms[linear])
        if count > 1:
            why = f"{count} norms are declared to feed it"
        elif feeds[norm] > 1:
            why = f"it feeds {feeds[norm]} Linears"
        elif norm in kept or enclosing(kept, names, norm):
            why = "it is kept in fp32"
        else:
            why = _unfit(norm, linear)
        if why:
            reason = f"{row.reason}, not fused with {norm_name}: {why}"
            fused[row.module] = replace(row, reason=reason)
        else:
            full_name = names[norm][0]
            reason = f"{row.reason}, fused with {norm_name}"
            fused[row.module] = replace(row, reason=reason, norm=full_name)
            into[full_name] = linear_name

    # The Linears' rows, and then the norms' own: those do not compute by themselves any more.
    made: list[LayerPlan] = []
    for row in rows:
        row = fused.get(row.module, row)
        if row.module in into:
            linear_name = into[row.module]
            why = f"computed in one with {linear_name}, by bf16 weights, where that runs in FP8"
            row = replace(row, reason=why)
        made.append(row)
    return made, len(into)


def _with_mlps(
    model: nn.Module,
    rows: Sequence[LayerPlan],
    mlps: Mapping[_Pair, _Names],
) -> list[LayerPlan]:
    """`rows` with the first Linear of each fused MLP in the row of its second, or why it is not fused.

    mlps: the pairs (first Linear, second Linear).
    """
    # A Linear of several declarations is part of no block.
    firsts = Counter(first for first, _ in mlps)
    seconds = Counter(second for _, second in mlps)
    fp8: dict[nn.Module, LayerPlan] = {}
    for row in rows:
        if row.precision == "fp8":
            module = model.get_submodule(row.module)
            fp8[module] = row

    made = {row.module: row for row in rows}
    for (first, second), (name, _, module) in mlps.items():
        row = fp8.get(second)
        before = fp8.get(first)
        if row is None:
            continue
        # Only a chain norm -> first -> second, with nobody else in it, is one block.
        if firsts[first] > 1 or seconds[second] > 1:
            why = "a Linear is declared in several"
        elif before is None:
            why = "that does not run in FP8"
        elif not before.norm:
            why = "no norm is fused with that"
        elif row.norm:
            why = f"{row.norm} is fused with this one"
        else:
            norm = model.get_submodule(before.norm)
            why = _unfit_mlp(first, second) or difference(module, norm, first, second)
        if why or before is None:
            reason = f"{row.reason}, not one MLP with {name}: {why}"
            made[row.module] = replace(row, reason=reason)
        else:
            reason = f"{row.reason}, one MLP with {name}"
            made[row.module] = replace(row, reason=reason, first=before.module)
    return list(made.values())


def _declared(model: nn.Module, attribute: str) -> tuple[dict[_Pair, _Names], list[Problem]]:
    """The pairs of every declaration, each once, and what is wrong with any."""
    pairs: dict[_Pair, _Names] = {}
    problems: list[Problem] = []
    for name, module in model.named_modules():
        declaration = getattr(module, attribute, {})
        where = f"{name or type(model).__name__}.{attribute}"
        if not isinstance(declaration, Mapping):
            what = f"is a {type(declaration).__name__}, not a mapping"
            fix = f"give a mapping such as {_EXAMPLES[attribute]}"
            problems.append(Problem(what, where, fix=fix))
            continue

        # The empty name is the module itself, which is none of its parts.
        parts = dict(module.named_modules(remove_duplicate=False))
        del parts[""]
        for one, other in declaration.items():
            missing = [each for each in (one, other) if each not in parts]
            if missing:
                listed = ", ".join(map(repr, missing))
                what = f"has no part {listed}"
                fix = "name parts of the module itself, as in its named_modules()"
                problems.append(Problem(what, where, fix=fix))
            else:
                pairs[parts[one], parts[other]] = _Names(one, other, module)
    return pairs, problems


def swiglu_module(model: nn.Module, first: nn.Module, second: nn.Module) -> nn.Module:
    """The module that declares these two Linears as an MLP, which the plan has fused."""
    declared, _ = _declared(model, SWIGLU)
    return declared[first, second].module


def _unfit(norm: nn.Module, linear: nn.Module) -> str:
    """Why no block of Transformer Engine computes this norm as it is; empty if one does."""
    if not (type(norm) is nn.RMSNorm or type(norm) is nn.LayerNorm):
        return f"{type(norm).__name__} is neither RMSNorm nor LayerNorm"
    if "forward" in vars(norm):
        return "its forward was replaced on the instance"
    if norm.eps is None:
        return "eps None depends on the dtype"
    shape = tuple(norm.normalized_shape)
    if shape != (linear.in_features,):
        return f"it normalises {shape}, the layer takes {linear.in_features}"
    # A LayerNorm without a bias has the name all the same, with None under it.
    wanted = {"weight", *norm._parameters}
    if any(norm._parameters.get(name) is None for name in wanted):
        return "it has no weight or no bias of its own"
    return ""


def _unfit_mlp(first: Any, second: Any) -> str:
    """Why no block of Transformer Engine computes these as an MLP; empty if one does."""
    width = first.in_features
    doubled = first.out_features
    hidden = second.in_features
    out = second.out_features
    # SwiGLU: one half of the first Linear's outputs gates the other.
    if doubled != 2 * hidden or out != width:
        return f"{width} to {doubled} and {hidden} to {out} features make no MLP with two halves"
    if (first.bias is None) != (second.bias is None):
        return "one of them has a bias, and the other has none"
    return ""


L = TypeVar("L", bound=nn.Module)
M = TypeVar("M", bound=nn.Module)


def swap_linears(
    model: nn.Module, names: Sequence[str], make: Callable[[nn.Linear], M]
) -> dict[str, M]:
    """Replace each named Linear of `model` by `make(linear)`, which must share its Parameters. Returns them by name.

    A module with several names is replaced once, under all of them.
    """
    wanted = set(names)
    swapped: dict[str, M] = {}
    replacements: dict[nn.Module, M] = {}

    # Make each replacement once. named_children() gives a module one name only.
    for parent_name, parent in list(model.named_modules()):
        for child_name, child in list(parent.named_children()):
            name = f"{parent_name}.{child_name}" if parent_name else child_name
            if name in wanted and is_linear(child):
                replacements[child] = swapped[name] = make(child)

    # Set it wherever the Linear was, under every name.
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):
            if child is not None and child in replacements:
                setattr(parent, child_name, replacements[child])
    return {name: swapped[name] for name in names}


def shallow_copy(linear: nn.Linear, to: type[L]) -> L:
    """A shallow copy of `linear`, of class `to`: the same Parameters, hooks and training flag."""
    made = to.__new__(to)
    made.__dict__.update(linear.__dict__)
    return made


def pickled_as_plain(
    module: nn.Module, own: Collection[str], plain: type[nn.Module] = nn.Linear
) -> tuple[Any, ...]:
    """`__reduce_ex__` of a converted layer: its pickle is a `plain` one, without its `own` attributes.

    FP8 state belongs to a run, not to a model.
    """
    state = {name: value for name, value in module.__dict__.items() if name not in own}
    return object.__new__, (plain,), state
