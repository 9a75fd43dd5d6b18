"""Spreads tokens evenly over the experts of a model that runs on fake tensors.

The router of a mixture of experts chooses experts by computed values. Fake tensors have no values, so they do not know
how many rows reach an expert. Two rules solve this:

1. Every top-k (argmax, sort) returns indices that take all experts in turn: token 0 goes to experts 0 and 1, token 1
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

# Operations that choose: the position of the argument `dim` (where it is not given by name), and the position of the
# indices among the results.
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

    asked: whether a shape depended on such values; then the model routes tokens to experts.
    """

    def __init__(self) -> None:
        self._values = WeakIdKeyDictionary()
        self.asked = False

    def value(self, tensor: Tensor) -> Tensor | None:
        """The values of a fake, as a CPU tensor; None where they are not known."""
        return self._values.get(tensor)

    def call(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """func(*args, **kwargs) on fakes. Where the result's shape depends on values, the known values decide it.

        The dispatch mode of estimate/recorder.py calls this for every operation.
        name: of the operation, without its overload, such as `sort`.
        Raises as fake tensors do where the values are not known.
        """
        # A mask selects an unknown number of rows; row numbers have a known one.
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
            device = _tensors(args, kwargs)[0].device

            def fake_like(real: Tensor) -> Tensor:
                return torch.empty(real.shape, dtype=real.dtype, device=device)

            out = tree_map(fake_like, found)
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
        """Give the indices of a choice along one dimension their values: all experts in turn."""
        position_of_dim, position_of_indices = _CHOICES[name]
        dim = kwargs.get("dim", -1)
        if len(args) > position_of_dim:
            dim = args[position_of_dim]
        indices = out if isinstance(out, Tensor) else out[position_of_indices]
        scores = args[0]

        # A second argument of `max` may be a tensor to compare with, or keepdim.
        if not isinstance(dim, int) or isinstance(dim, bool) or not scores.ndim:
            return
        if indices.numel() > _MOST:
            return

        # `scores` has one row for each token and one column for each expert. A token takes the next `chosen` experts.
        # Sorting takes all experts, so there the next token begins one expert later.
        experts = scores.shape[dim]
        keeps_dimension = indices.ndim == scores.ndim
        chosen = indices.shape[dim] if keeps_dimension else 1
        shift = 1 if name == "sort" else chosen
        with _disable_current_modes():
            tokens = indices.numel() // max(chosen, 1)
            first_expert = shift * torch.arange(tokens)[:, None]
            taken = (first_expert + torch.arange(chosen)) % experts
            if keeps_dimension:
                # The tokens were counted over all other dimensions; `dim` returns to its position.
                others = list(indices.shape)
                del others[dim % scores.ndim]
                taken = taken.reshape(*others, chosen).movedim(-1, dim)
            self._values[indices] = taken.reshape(indices.shape)

    def _computed(
        self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The result of `func` for the known values of its tensors. An in-place `func` changes these values.

        None if a value is not known, or if a CPU cannot compute `func`, such as a histogram of integers.
        """
        tensors = _tensors(args, kwargs)
        if not tensors and name not in _MADE:
            return None
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        values_count = name not in _MADE_LIKE
        if values_count and any(self._values.get(tensor) is None for tensor in tensors):
            return None

        def real(argument: Any) -> Any:
            """The argument, with the known values in a fake tensor's place."""
            if not isinstance(argument, Tensor):
                return argument
            if values_count:
                return self._values[argument]
            # Nobody reads its values, and untouched memory costs nothing. `new_` gets its size as an argument.
            if name.startswith("new_"):
                return torch.empty(0, dtype=argument.dtype)
            shape, stride = argument.shape, argument.stride()
            return torch.empty_strided(shape, stride, dtype=argument.dtype)

        # Known values are on the CPU.
        options = dict(kwargs)
        for key in ("device", "pin_memory"):
            options.pop(key, None)
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
            memory = value.untyped_storage().data_ptr()
            # A copy of the keys: entries go while they are looked through.
            for other in list(self._values.keys()):
                if self._values[other].untyped_storage().data_ptr() == memory:
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
    results = _tensors(out)
    return bool(results) and all(_is_kept(result) for result in results)


def _tensors(*trees: Any) -> list[Tensor]:
    """All tensors in these arguments or results, however nested."""
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]


def _is_kept(tensor: Tensor) -> bool:
    """Whether values like these are kept: integers or booleans, and not too many."""
    return not tensor.dtype.is_floating_point and tensor.numel() <= _MOST
