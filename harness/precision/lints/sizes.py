"""Finds sizes for which Tensor Cores are slow, with the size to pad to, and weights that FP8 does not convert."""

from __future__ import annotations

from torch import nn

from harness.precision.layers import is_linear
from harness.precision.lints.casts import matrices_of
from harness.precision.lints.graph import PRODUCTS, Fault, Node

MULTIPLE = 8
"""cuBLAS uses Tensor Cores best if all sizes are multiples of 16 bytes: 8 values of 16 bits (NVIDIA's deep learning
performance guide)."""
VOCABULARY = 64
"""A vocabulary is padded to a multiple of this: it is a model's largest size, and GEMM tiles are at least 64 wide."""


def padded(size: int, multiple: int) -> int:
    """`size`, rounded up to a multiple of `multiple`."""
    return -(-size // multiple) * multiple


class Sizes:
    """The rule for sizes of weights and of attention heads.

    smallest: weights with fewer rows or columns are skipped: their speed does not matter.
    """

    def __init__(self, smallest: int) -> None:
        self._smallest = smallest
        # Rows of the embeddings seen so far. A later product with as many rows is taken for the head.
        self._vocabularies: set[int] = set()
        # Names of weights that were looked at: each is reported once, however often it is used.
        self._seen: set[str] = set()

    def __call__(self, node: Node) -> Fault | None:
        if node.op == "embedding" and node.inputs:
            self._vocabularies.add(node.inputs[0].shape[0])
        if node.op.startswith("_scaled_dot_product"):
            return _head(node)
        if node.op not in PRODUCTS:
            return None
        for matrix in matrices_of(node):
            fault = self._matrix(matrix, node.op == "convolution")
            if fault is not None:
                return fault
        return None

    def _matrix(self, matrix: Node, convolution: bool) -> Fault | None:
        """The fault in the sizes of one weight."""
        # The first two sizes of a convolution's weight are its channels. A stack of matrices has its matrices in the
        # last two.
        rows, columns = matrix.shape[:2] if convolution else matrix.shape[-2:]
        if min(rows, columns) < self._smallest or matrix.weight in self._seen:
            return None
        self._seen.add(matrix.weight)

        # A vocabulary comes first: it is fixed in another way than a width.
        if rows % MULTIPLE and rows in self._vocabularies:
            why = f"Tensor Cores want multiples of {MULTIPLE}, and the head is the largest product of the model"
            fix = f"build the model with a vocabulary of {padded(rows, VOCABULARY)}; no text has the ids that this adds"
            what = f"a vocabulary of {rows:,}"
            return Fault("model.vocabulary", what, why, fix)

        odd = [size for size in (rows, columns) if size % MULTIPLE]
        if not odd:
            return None
        better = [f"{size} to {padded(size, MULTIPLE)}" for size in dict.fromkeys(odd)]
        what = f"{matrix.weight} is {rows}x{columns}"
        why = f"Tensor Cores want multiples of {MULTIPLE}: cuBLAS takes a slower kernel, or pads at each call"
        return Fault("model.size", what, why, f"change {', '.join(better)}")


def _head(node: Node) -> Fault | None:
    """The fault in the size of an attention head: the last size of the query."""
    size = node.inputs[0].shape[-1]
    if size % MULTIPLE == 0:
        return None
    why = f"fused attention takes heads of a multiple of {MULTIPLE}: others are padded at each call, or not fused"
    fix = f"heads of {padded(size, MULTIPLE)}: change the number of heads, or the width"
    return Fault("model.head_size", f"attention heads of {size} features", why, fix)


# Convolutions have no FP8 kernel, which the plan reports for each. `_grouped_mm` multiplies the stacks of experts.
_MATRIX_PRODUCTS = (PRODUCTS - {"convolution"}) | {"_grouped_mm"}


class OutsideLinears:
    """The rule for an FP8 rung: finds products with a weight that no Linear of the model owns.

    smallest: as of `Sizes`.
    """

    def __init__(self, model: nn.Module, smallest: int) -> None:
        # Names of the weights outside of Linears. An embedding counts as a Linear: tied to the head, it is the head's
        # weight.
        owned: set[int] = set()
        for module in model.modules():
            if is_linear(module) or isinstance(module, nn.Embedding):
                own = module.parameters(recurse=False)
                owned.update(id(parameter) for parameter in own)
        self._outside: set[str] = set()
        for name, parameter in model.named_parameters():
            if id(parameter) not in owned:
                self._outside.add(name)
        self._smallest = smallest

    def __call__(self, node: Node) -> Fault | None:
        if node.op not in _MATRIX_PRODUCTS:
            return None
        for matrix in matrices_of(node):
            if matrix.weight not in self._outside:
                continue
            if min(matrix.shape[-2:]) >= self._smallest:
                what = f"{matrix.weight} is multiplied outside a Linear"
                why = "only the forward of an nn.Linear is converted: this product stays in BF16"
                fix = "make it the weight of an nn.Linear, and call that"
                return Fault("model.fp8_outside", what, why, fix)
        return None
