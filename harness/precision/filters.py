"""Which Linear layers may run in FP8: by name, block, kind and size. Every layer that may not gets one reason."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from harness.core.errors import Problem, near_match
from harness.precision.recipe import LayersConfig


class LayerFilter:
    """A recipe's `layers` section on one model.

    multiple: what sizes must be multiples of. where: the section, for messages. problems: patterns that match no
    Linear and blocks that are not there; with any of them the answers of `kept_out` mean nothing.
    """

    def __init__(self, model: nn.Module, layers: LayersConfig, multiple: int, where: str) -> None:
        self._layers, self._multiple = layers, multiple
        self._names = names_of(model)
        self._owners = _owners_of_parameters(model)
        self._linears = [
            name for module, names in self._names.items() if isinstance(module, nn.Linear) for name in names
        ]
        self.problems = self._unmatched(where)
        self._skipped = self._skipped_blocks(model, where)

    def kept_out(self, linear: nn.Linear) -> str:
        """Why `linear`, a module of the model, stays out of FP8; empty if it does not."""
        layers, names = self._layers, self._names[linear]
        excluded = _first_match([*layers.exclude, *layers.exclude_if_present], names)
        if excluded:
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
        if type(linear) is not nn.Linear:
            return f"{type(linear).__name__} is a Linear of its own kind"
        size = (linear.out_features, linear.in_features)
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
                fix=near_match(pattern, self._linears) if self._linears else "the model has no Linear",
            )
            for key, patterns in (("include", self._layers.include), ("exclude", self._layers.exclude))
            for pattern in patterns
            if not any(fnmatchcase(name, pattern) for name in self._linears)
        ]

    def _skipped_blocks(self, model: nn.Module, where: str) -> dict[str, str]:
        """Name of each block that stays out -> why. Adds to `problems`."""
        first, last = self._layers.skip_first_blocks, self._layers.skip_last_blocks
        if not first + last:
            return {}
        blocks = repeated_blocks(model)
        keys = " and ".join(f"{where}.skip_{end}_blocks" for end, count in (("first", first), ("last", last)) if count)
        if not blocks:
            why = "no nn.ModuleList or nn.Sequential in it has two or more children of one class"
            fix = "name the layers in layers.exclude instead"
            self.problems.append(Problem(f"{type(model).__name__} has no repeated blocks", keys, why, fix))
        elif first + last >= len(blocks):
            what = f"skips {first + last} blocks of a model that has {len(blocks)} ({blocks[0]} to {blocks[-1]})"
            self.problems.append(Problem(what, keys, fix=f"skip {len(blocks) - 1} at most, or take --recipe bf16"))
        total = len(blocks)
        skipped = dict.fromkeys(blocks[:first], f"in the first {first} of {total} blocks (skip_first_blocks)")
        for block in blocks[max(0, total - last) :]:
            skipped[block] = f"in the last {last} of {total} blocks (skip_last_blocks)"
        return skipped


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
    return next((pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)), "")


def _owners_of_parameters(model: nn.Module) -> dict[Tensor, str]:
    """Each Parameter owned by a module that is not a Linear -> that module's name."""
    return {
        parameter: name
        for name, module in model.named_modules()
        if not isinstance(module, nn.Linear)
        for parameter in module.parameters(recurse=False)
    }
