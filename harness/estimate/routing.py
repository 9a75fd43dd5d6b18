"""Which tokens go to which expert on fake tensors: every expert gets the same number.

The router of a mixture of experts chooses experts by computed values. Fake tensors have no values, so they do not know
how many rows reach an expert. Two rules solve this:

1. Every top-k (argmax, sort) returns indices that take all places in turn: token 0 goes to experts 0 and 1, token 1
   to experts 2 and 3, and so on.
2. Whatever the model computes from such indices, in integers and booleans, is computed for real beside the fakes.

So a mask has a known number of rows, counts are real counts, and each expert multiplies its share of the tokens. With E
experts and k of them for each token, the share is k / E.
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

# Operations that choose: the position of the argument `dim` (if not given by name), and of the indices among the
# results.
_CHOICES = {
    "topk": (2, 1),
    "sort": (1, 1),
    "max": (1, 1),
    "min": (1, 1),
    "argmax": (1, 0),
    "argmin": (1, 0),
}
# Operations that make a tensor from no other.
_MADE = ("zeros", "ones", "full", "arange", "scalar_tensor")
# Operations that take a tensor for its shape, dtype and device alone.
_MADE_LIKE = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
# The most elements of a tensor whose values are kept. A larger one is no router's.
_MOST = 2**26


class Routing:
    """The values of integer and boolean fakes, where they follow from evenly spread choices.

    asked: whether a shape depended on such values, so that the model routes rows to what computes them.
    """

    def __init__(self) -> None:
        self._values = WeakIdKeyDictionary()
        self.asked = False

    def value(self, tensor: Tensor) -> Tensor | None:
        """The values of a fake, as a CPU tensor; None where they are not known."""
        return self._values.get(tensor)

    def call(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """func(*args, **kwargs) on fakes. If the result's shape depends on values, the known values give the shape.

        The dispatch mode of estimate/recorder.py calls this for every operation.
        name: of the operation, without its overload, such as `sort`.
        Raises as fake tensors do where the values are not known.
        """
        if name in _INDEXING:
            args = [args[0], self._without_masks(args[1]), *args[2:]]

        try:
            out = func(*args, **kwargs)
        except DynamicOutputShapeException:
            found = self._computed(func, name, args, kwargs)
            if found is None:
                raise
            # The real result has the shape that the fake one needs.
            self.asked = True
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            device = leaves[0].device
            out = tree_map(
                lambda real: torch.empty(real.shape, dtype=real.dtype, device=device), found
            )
            self._keep(out, found)
            return out

        # `max` and `min` of a whole tensor return one tensor and choose nothing.
        returns_indices = name.startswith("arg") or not isinstance(out, Tensor)
        if name in _CHOICES and returns_indices:
            self._choose(name, args, kwargs, out)
        elif func._schema.is_mutable or _is_of_integers(out):
            found = self._computed(func, name, args, kwargs)
            if found is not None:
                self._keep(out, found)
            elif func._schema.is_mutable:
                self._forget(func, args)
        return out

    def _choose(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Keep the indices of a choice along one dimension: all places in turn."""
        where, which = _CHOICES[name]
        dim = args[where] if len(args) > where else kwargs.get("dim", -1)
        chosen = out if isinstance(out, Tensor) else out[which]
        source = args[0]
        no_dimension = not isinstance(dim, int) or isinstance(dim, bool) or not source.ndim
        if no_dimension or chosen.numel() > _MOST:
            return

        # Each row takes `each` places and the next row goes on after them. A sort takes all of them, rotated by one.
        places = source.shape[dim]
        keeps_dimension = chosen.ndim == source.ndim
        each = chosen.shape[dim] if keeps_dimension else 1
        step = 1 if name == "sort" else each
        with _disable_current_modes():
            rows = chosen.numel() // max(each, 1)
            turns = (torch.arange(rows)[:, None] * step + torch.arange(each)) % places
            if keeps_dimension:
                # The rows were counted over all other dimensions; `dim` returns to its position.
                others = list(chosen.shape)
                del others[dim % source.ndim]
                turns = turns.reshape(*others, each).movedim(-1, dim)
            self._values[chosen] = turns.reshape(chosen.shape)

    def _computed(
        self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The result of `func` for the real values of its tensors; it also writes to those that it changes.

        None unless all values are known, and where a CPU cannot compute it (such as a histogram of integers).
        """
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not leaves and name not in _MADE:
            return None
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        values_count = name not in _MADE_LIKE
        if values_count and any(self._values.get(leaf) is None for leaf in leaves):
            return None

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if values_count:
                return self._values[leaf]
            # Memory that is never written takes none. The size of `new_` is an argument of its own.
            if name.startswith("new_"):
                return torch.empty(0, dtype=leaf.dtype)
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)

        options = dict(kwargs)
        for name_of_device in ("device", "pin_memory"):
            options.pop(name_of_device, None)
        with _disable_current_modes():
            try:
                return func(*tree_map(real, list(args)), **tree_map(real, options))
            except RuntimeError:
                return None

    def _keep(self, out: Any, found: Any) -> None:
        """Keep the real results `found` as the values of the fake ones."""
        for fake, value in zip(tree_leaves(out), tree_leaves(found), strict=True):
            if isinstance(fake, FakeTensor) and _is_kept(value):
                self._values[fake] = value

    def _forget(self, func: Any, args: Sequence[Any]) -> None:
        """After a write of unknown values into a tensor: drop its values, and those of all that share its memory."""
        for argument, tensor in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if not written or not isinstance(tensor, Tensor):
                continue
            value = self._values.get(tensor)
            if value is None:
                continue
            storage = value.untyped_storage().data_ptr()
            for other in list(self._values.keys()):
                if self._values[other].untyped_storage().data_ptr() == storage:
                    del self._values[other]

    def _without_masks(self, indices: Sequence[Any]) -> list[Any]:
        """The indices, with the row numbers that a known mask selects in the mask's place."""
        numbers: list[Any] = []
        for index in indices or ():
            mask = None
            if isinstance(index, Tensor) and index.dtype == torch.bool:
                mask = self._values.get(index)
            if mask is None:
                numbers.append(index)
                continue
            self.asked = True
            with _disable_current_modes():
                found = mask.nonzero(as_tuple=True)
            for row in found:
                fake = torch.empty(row.shape, dtype=row.dtype, device=index.device)
                self._values[fake] = row
                numbers.append(fake)
        return numbers


def _is_of_integers(out: Any) -> bool:
    """Whether there are results, and the values of all of them may be kept."""
    leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    return bool(leaves) and all(_is_kept(leaf) for leaf in leaves)


def _is_kept(tensor: Tensor) -> bool:
    """Whether values like these are kept: integers or booleans, and not too many."""
    return not tensor.dtype.is_floating_point and tensor.numel() <= _MOST
