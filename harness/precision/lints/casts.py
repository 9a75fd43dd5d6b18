"""Finds casts that work against autocast: products and activations in a type that the recipe did not ask for, and casts
that the next layer undoes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from harness.precision.lints.graph import HALF, PRODUCTS, VIEWS, Fault, Node

# Operations on single values that are exact enough in 16 bits: they are no reason for a cast to float32.
_PLAIN = VIEWS | {
    "detach", "elu", "gelu", "hardswish", "leaky_relu", "native_dropout", "relu", "sigmoid", "silu", "tanh",
}  # fmt: skip


class Casts:
    """The rule for a run whose autocast casts to `half`, one of float16 and bfloat16.

    kept: names of modules that the recipe keeps in float32; float32 products in them are intended.
    """

    def __init__(self, half: torch.dtype, kept: Collection[str] = ()) -> None:
        self._half = half
        self._kept = tuple(f"{name}." for name in kept)

    def __call__(self, node: Node) -> Fault | None:
        if node.dtype == torch.float64:
            return _double(node)
        if node.op == "_to_copy":
            return self._other_half(node)
        if node.op in PRODUCTS:
            return self._wide_product(node)
        return None

    def _other_half(self, node: Node) -> Fault | None:
        """A cast to the other of the two 16-bit dtypes."""
        before = node.inputs[0]
        if not before.learns or before.dtype == node.dtype:
            return None
        if node.dtype in HALF and node.dtype != self._half:
            why = f"the run computes in {_name(self._half)}, which has another range and another precision"
            fix = "drop the cast: autocast chooses the dtype; or torch.get_autocast_dtype gives it"
            return Fault("casts.other_half", f"a cast to {_name(node.dtype)}", why, fix)
        return None

    def _wide_product(self, node: Node) -> Fault | None:
        """A product with a weight in float32, although the run's autocast would make it `half`."""
        weights = matrices_of(node)
        if not weights or node.dtype in HALF:
            return None
        if self._kept and all(weight.weight.startswith(self._kept) for weight in weights):
            return None
        what = f"{weights[0].weight} multiplies in {_name(node.dtype)}"
        why = f"autocast is off there, so the layer misses {_name(self._half)}'s tensor cores, and FP8"
        fix = "leave autocast on; what must be float32 is named in the recipe: layers.keep_fp32"
        return Fault("casts.autocast_off", what, why, fix)


def _double(node: Node) -> Fault | None:
    """The first float64 tensor in a chain: one that was made of tensors of other types."""
    before = [each for each in node.inputs if each.learns]
    if not before or any(each.dtype == torch.float64 for each in before):
        return None
    why = "GPUs compute float64 at 1/2 to 1/64 of float32's rate, and layers of 16 bits not at all"
    fix = "drop the cast, or make the NumPy array that brings it float32"
    return Fault("casts.float64", "activations become float64", why, fix)


def useless(nodes: Sequence[Node]) -> list[Fault]:
    """Casts to float32 whose results are all cast back to 16 bits for products. Called after the forward.

    nodes: of the whole forward.
    """
    # id of a node -> the nodes that were made of it.
    users: dict[int, list[Node]] = {}
    for node in nodes:
        # Autograd detaches what it keeps for backward. That is no use by the model.
        if node.op == "detach":
            continue
        for each in node.inputs:
            users.setdefault(id(each), []).append(node)

    found: list[Fault] = []
    for node in nodes:
        if node.op != "_to_copy" or node.dtype != torch.float32 or not node.learns:
            continue
        before = node.inputs[0].dtype
        if before not in HALF or not _is_undone(node, users):
            continue
        why = f"the layer that it feeds casts back to {_name(before)}: two more passes over memory, kept for backward"
        fix = "drop the cast; what must be float32 is named in the recipe: layers.keep_fp32"
        what = "a cast to float32 that the next layer undoes"
        found.append(Fault("casts.useless", what, why, fix, at=node))
    return found


def _is_undone(node: Node, users: Mapping[int, list[Node]]) -> bool:
    """Whether every tensor made of `node` is cast to 16 bits for a product, with only _PLAIN operations before that."""
    made = [each for each in users.get(id(node), []) if each.dtype.is_floating_point]
    for each in made:
        if each.op == "_to_copy":
            if each.dtype not in HALF or not _feeds_products(each, users):
                return False
        elif each.op not in _PLAIN or not _is_undone(each, users):
            return False
    return bool(made)


def _feeds_products(node: Node, users: Mapping[int, list[Node]]) -> bool:
    """Whether every tensor made of `node` is the result of a product, perhaps behind views."""
    made = users.get(id(node), [])
    for each in made:
        if each.op in VIEWS and _feeds_products(each, users):
            continue
        if each.op not in PRODUCTS:
            return False
    return bool(made)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def matrices_of(node: Node) -> list[Node]:
    """The parameters of two and more dimensions among an operation's inputs, found behind casts and views."""
    found: list[Node] = []
    for each in node.inputs:
        source = each.behind()
        if source.weight and len(source.shape) > 1:
            found.append(source)
    return found
