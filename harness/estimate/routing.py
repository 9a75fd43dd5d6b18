"""Which tokens go to which expert, on paper: to each expert as many as to any other.

A mixture of experts chooses by computed values: how many rows reach an expert is unknown to fake tensors. Here every
top-k (argmax, sort) gives indices that take all places in turn, and what a model makes of such indices, in integers and
booleans, is computed for real beside the fakes. So masks have a number of rows, counts are counted, and each expert
multiplies its share of the tokens: with E experts and k of them for a token, k / E of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

# Which argument is the dimension, and which result the indices.
_CHOICES = {
    "topk": (2, 1),
    "sort": (1, 1),
    "max": (1, 1),
    "min": (1, 1),
    "argmax": (1, 0),
    "argmin": (1, 0),
}
_MADE = (
    "zeros",
    "ones",
    "full",
    "arange",
    "scalar_tensor",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_zeros",
)
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
# Elements whose values are kept: over that a mask is no router's.
_MOST = 2**26


class Routing:
    """Integers and booleans that are known although the tensors are fakes.

    asked: something's shape depended on them: the model chooses what computes which rows.
    """

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()
        self.asked = False

    def value(self, tensor: Tensor) -> Tensor | None:
        """The values of a fake, as a CPU tensor; None where they are not known."""
        return self._known.get(tensor)

    def call(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """func(*args, **kwargs) on fakes; where the result's shape depends on values, by what is known of them.

        Raises as fake tensors do where that is not known.
        """
        if name in _INDEXING:
            args = [args[0], self._without_masks(args[1]), *args[2:]]
        try:
            out = func(*args, **kwargs)
        except DynamicOutputShapeException:
            found = self._computed(func, name, args, kwargs)
            if found is None:
                raise
            self.asked = True
            device = next(
                leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
            )
            out = tree_map(
                lambda real: torch.empty(real.shape, dtype=real.dtype, device=device), found
            )
            self._keep(out, found)
            return out
        if (name in _CHOICES and not isinstance(out, Tensor)) or (
            name.startswith("arg") and name in _CHOICES
        ):
            self._choose(name, args, out)
        elif func._schema.is_mutable or _is_of_integers(out):
            found = self._computed(func, name, args, kwargs)
            if found is not None:
                self._keep(out, found)
            elif func._schema.is_mutable:
                self._forget(func, args)
        return out

    def _choose(self, name: str, args: Sequence[Any], out: Any) -> None:
        """Indices along one dimension, all places in turn."""
        where, which = _CHOICES[name]
        dim = args[where] if len(args) > where else -1
        chosen = out if isinstance(out, Tensor) else out[which]
        source = args[0]
        if (
            not isinstance(dim, int)
            or isinstance(dim, bool)
            or not source.ndim
            or chosen.numel() > _MOST
        ):
            return
        places = source.shape[dim]
        each = chosen.shape[dim] if chosen.ndim == source.ndim else 1
        step = 1 if name == "sort" else each
        with _disable_current_modes():
            rows = chosen.numel() // max(each, 1)
            turns = (torch.arange(rows)[:, None] * step + torch.arange(each)) % places
            if chosen.ndim == source.ndim:
                others = [
                    size for place, size in enumerate(chosen.shape) if place != dim % source.ndim
                ]
                turns = turns.reshape(*others, each).movedim(-1, dim)
            self._known[chosen] = turns.reshape(chosen.shape)

    def _computed(
        self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What `func` gives for the values of its tensors; None unless all are known, and where a CPU does not compute
        it (a histogram of integers). What it writes is written."""
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = [self._known.get(leaf) for leaf in leaves]
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random or any(value is None for value in known) or not (known or name in _MADE):
            return None

        def real(leaf: Any) -> Any:
            return self._known[leaf] if isinstance(leaf, Tensor) else leaf

        options = {
            key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")
        }
        with _disable_current_modes():
            try:
                return func(*tree_map(real, list(args)), **tree_map(real, options))
            except RuntimeError:
                return None

    def _keep(self, out: Any, found: Any) -> None:
        for fake, value in zip(tree_leaves(out), tree_leaves(found), strict=True):
            if (
                isinstance(fake, FakeTensor)
                and not value.dtype.is_floating_point
                and value.numel() <= _MOST
            ):
                self._known[fake] = value

    def _forget(self, func: Any, args: Sequence[Any]) -> None:
        """What was written with values that are not known, and all that shares its memory."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            known = self._known.get(value) if written and isinstance(value, Tensor) else None
            if known is None:
                continue
            storage = known.untyped_storage().data_ptr()
            for other in list(self._known.keys()):
                if self._known[other].untyped_storage().data_ptr() == storage:
                    del self._known[other]

    def _without_masks(self, indices: Sequence[Any]) -> list[Any]:
        """Indices with known masks as the numbers of the rows that they choose."""
        numbers: list[Any] = []
        for index in indices or ():
            mask = (
                self._known.get(index)
                if isinstance(index, Tensor) and index.dtype == torch.bool
                else None
            )
            if mask is None:
                numbers.append(index)
                continue
            self.asked = True
            with _disable_current_modes():
                found = mask.nonzero(as_tuple=True)
            for row in found:
                fake = torch.empty(row.shape, dtype=row.dtype, device=index.device)
                self._known[fake] = row
                numbers.append(fake)
        return numbers


def _is_of_integers(out: Any) -> bool:
    """Whether every result is of integers or booleans, and none too large."""
    leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    return bool(leaves) and all(
        not leaf.dtype.is_floating_point and leaf.numel() <= _MOST for leaf in leaves
    )
