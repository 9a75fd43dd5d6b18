"""Finds unsafe numerics: operations that overflow, or give 0 / 0 or an infinite gradient, where a safe form exists.

Each rule looks at one operation and at the operations that made its inputs. It reports a fault only where some input of
the model brings the values to the dangerous point: any square can be 0, and the output of a Linear can be 1000. Values
of which nothing is known count as safe.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import torch

from harness.precision.lints.graph import PRODUCTS, Fault, Node

FP16_LARGEST = 65504.0
FP16_SMALLEST_NORMAL = 2.0**-14
FP16_SMALLEST = 2.0**-24
_OVERFLOWS = "exp(x) is infinite for x > 88.7 in fp32 and bf16, and for x > 11 in fp16"


class Range(Enum):
    """The values that a tensor may have, as far as they are known. The texts are part of a fault's `why`."""

    UNKNOWN = "unknown"
    FROM_ZERO = "may be 0"
    ANY = "may be 0 or negative"


# The outputs of these operations have either sign and no bound.
_UNBOUNDED = PRODUCTS | {"native_layer_norm", "native_group_norm", "native_batch_norm", "embedding"}
# The outputs of these are 0 or more, and 0 for some input.
_FROM_ZERO = frozenset(
    {"relu", "abs", "square", "linalg_vector_norm", "norm", "std", "var", "threshold"}
)
# The outputs of these are 0 if all of their inputs are 0.
_REDUCTIONS = frozenset({"sum", "mean", "amax", "max", "sqrt", "cumsum", "native_dropout"})
# How many operations `range_of` goes back. A sum has two parts, so the work may double with each operation.
_DEPTH = 8
_SCALED = frozenset({"mul", "div"})
_LIMITS = frozenset({"clamp", "clamp_min"})
_SHIFTS = frozenset({"add", "sub", "rsub", *_LIMITS})


def number(value: Any) -> float | None:
    """The value of a constant among an operation's arguments; None for anything else."""
    if isinstance(value, Node) and value.op == "scalar_tensor":
        value = value.args[0]
    # bool is a kind of int in Python, and no number here.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def second(node: Node) -> Any:
    """The second argument of an operation; None if it has none."""
    return node.args[1] if len(node.args) > 1 else None


def without_constants(node: Node, operations: frozenset[str]) -> Node:
    """The node from which `node` was made by views, casts, and `operations` with a constant."""
    node = node.behind()
    while node.op in operations and isinstance(node.args[0], Node):
        other = second(node)
        # A tensor of no dimensions, such as sqrt(torch.tensor(64)), is a constant as well.
        if isinstance(other, Node) and other.shape:
            break
        node = node.args[0].behind()
    return node


def range_of(node: Node, depth: int = _DEPTH) -> Range:
    """The values that `node` may have, judged by the last `depth` operations that made it."""
    node = node.behind()
    # A fault that names a node already must not be followed by another one for what was made of it.
    if node.blamed or not depth:
        return Range.UNKNOWN
    if node.op in _UNBOUNDED:
        return Range.ANY
    if node.op in _FROM_ZERO:
        return Range.FROM_ZERO
    if node.op == "pow":
        power = number(second(node))
        even = power is not None and power > 0 and power % 2 == 0
        return Range.FROM_ZERO if even else Range.UNKNOWN
    if node.op in _REDUCTIONS:
        inside = range_of(node.args[0], depth - 1)
        return inside if inside is Range.FROM_ZERO else Range.UNKNOWN
    if node.op in _SCALED:
        return _range_of_product(node, depth - 1)
    if node.op == "add":
        return _range_of_sum(node, depth - 1)
    if node.op in _LIMITS and number(second(node)) == 0:
        return Range.FROM_ZERO
    return Range.UNKNOWN


def _range_of_product(node: Node, depth: int) -> Range:
    first, other = node.args[0], second(node)
    factor = number(other)
    if factor is not None:
        # A factor under 0 turns the range around, and a factor of 0 makes a constant.
        if factor > 0:
            return range_of(first, depth)
        return Range.UNKNOWN
    # A tensor times itself is a square.
    if node.op != "mul" or not isinstance(first, Node) or not isinstance(other, Node):
        return Range.UNKNOWN
    if first.behind() is other.behind():
        return Range.FROM_ZERO
    return Range.UNKNOWN


def _range_of_sum(node: Node, depth: int) -> Range:
    # A constant that is added is an epsilon, which makes the sum safe; or it moves the values in a way not known here.
    first, other = node.args[0], second(node)
    if not isinstance(first, Node) or not isinstance(other, Node):
        return Range.UNKNOWN
    both = {range_of(first, depth), range_of(other, depth)}
    if both == {Range.FROM_ZERO}:
        return Range.FROM_ZERO
    return Range.UNKNOWN


def logarithm(node: Node) -> Fault | None:
    """log of a softmax, of a sigmoid, of a sum of exponentials, or of what can be 0."""
    if node.op not in ("log", "log2", "log10", "log1p") or not node.learns:
        return None
    inside = node.args[0]
    if node.op == "log1p":
        return _softplus(inside)

    # These are inexact even with an epsilon or a limit inside the log, so look behind both.
    kernel = without_constants(inside, _SHIFTS)
    if kernel.op == "_softmax":
        why = "a probability below the dtype's smallest value is 0, and its log -inf; an epsilon makes it wrong instead"
        return Fault(
            "numerics.log_softmax",
            "log of a softmax",
            why,
            "F.log_softmax(x, dim), or F.cross_entropy",
        )
    if kernel.op == "sigmoid":
        why = "sigmoid(x) is 0 from about x < -17 in fp16 and x < -103 in fp32, and its log -inf"
        fix = "F.logsigmoid(x), or F.binary_cross_entropy_with_logits"
        return Fault("numerics.log_sigmoid", "log of a sigmoid", why, fix)
    if kernel.op == "sum":
        exponential = kernel.args[0].behind()
        if exponential.op == "exp":
            return _logsumexp(exponential)
    if kernel.op == "exp":
        return _softplus(kernel)
    return _log_of_zero(inside)


def _logsumexp(exponential: Node) -> Fault | None:
    if is_bounded(exponential.args[0]):
        return None
    exponential.blamed = True
    return Fault(
        "numerics.logsumexp", "log of a sum of exponentials", _OVERFLOWS, "torch.logsumexp(x, dim)"
    )


def _softplus(inside: Node) -> Fault | None:
    """log(1 + exp(x)). inside: the node to which 1 is added."""
    exponential = inside.behind()
    if exponential.op != "exp" or is_bounded(exponential.args[0]):
        return None
    exponential.blamed = True
    return Fault("numerics.softplus", "log(1 + exp(x))", _OVERFLOWS, "F.softplus(x)")


def _log_of_zero(inside: Node) -> Fault | None:
    values = range_of(inside)
    if values is Range.UNKNOWN:
        return None
    why = f"what it is taken of ({inside.behind().op}) {values.value}: the log is -inf or NaN"
    return Fault(
        "numerics.log_zero",
        "log of values that can be 0",
        why,
        "add an epsilon, or clamp them to one",
    )


def is_bounded(node: Node) -> bool:
    """Whether exp of `node` stays finite as far as is known."""
    node = without_constants(node, _SCALED)
    # Attention scores with a bias or a mask are as unbounded as the scores.
    parts = [node]
    if node.op in ("add", "masked_fill", "where"):
        parts = node.inputs
    for part in parts:
        source = without_constants(part, _SCALED)
        if source.op in _UNBOUNDED:
            return False
    return True


def softmax_by_hand(node: Node) -> Fault | None:
    """exp(x) / exp(x).sum() without the subtraction of the maximum."""
    if node.op != "div" or not node.learns or len(node.inputs) < 2:
        return None
    above = node.inputs[0].behind()
    below = without_constants(node.inputs[1], _SHIFTS)
    if above.op != "exp" or below.op != "sum" or above.blamed:
        return None
    # The sum has to be of the same exponentials.
    if below.args[0].behind() is not above or is_bounded(above.args[0]):
        return None
    above.blamed = True
    why = f"{_OVERFLOWS}, and inf / inf is NaN"
    fix = "F.softmax(x, dim), which takes the maximum off first"
    return Fault("numerics.softmax", "softmax written as exp(x) / sum(exp(x))", why, fix)


def square_root(node: Node) -> Fault | None:
    """sqrt, rsqrt or a fractional power of values that can be 0: the gradient is infinite there."""
    power = number(second(node)) if node.op == "pow" else None
    fractional = power is not None and not power.is_integer()
    root = node.op in ("sqrt", "rsqrt")
    if not node.learns or not (root or fractional):
        return None
    if not isinstance(node.args[0], Node):
        return None
    values = range_of(node.args[0])
    if values is Range.UNKNOWN:
        return None
    inside = node.args[0].behind()
    why = f"what it is taken of ({inside.op}) {values.value}: the gradient of a root at 0 is infinite, then NaN"
    return Fault(
        "numerics.sqrt_zero",
        f"{node.op} of values that can be 0",
        why,
        "add an epsilon inside the root",
    )


# Operations that make a divisor from a whole row; it is 0 if the row is.
_MEASURES = frozenset(
    {"linalg_vector_norm", "norm", "std", "var", "sum", "mean", "amax", "max", "sqrt"}
)


def division(node: Node) -> Fault | None:
    """Division by a norm, a deviation or a sum that can be 0."""
    divisor = None
    if node.op == "div":
        divisor = second(node)
    elif node.op == "reciprocal":
        divisor = node.args[0]
    if not isinstance(divisor, Node) or not divisor.learns:
        return None
    measure = divisor.behind()
    if measure.op not in _MEASURES or range_of(divisor) is not Range.FROM_ZERO:
        return None
    why = "it is 0 for a row of zeros (padding, a ReLU that is off), a deviation for a constant row: 0 / 0 is NaN"
    fix = "add an epsilon that the dtype can hold, or use F.normalize, F.layer_norm or F.rms_norm"
    return Fault(
        "numerics.division",
        f"division by a {_NAMES.get(measure.op, measure.op)} that can be 0",
        why,
        fix,
    )


_NAMES = {
    "linalg_vector_norm": "norm",
    "std": "standard deviation",
    "var": "variance",
    "sqrt": "root",
}


def epsilon(node: Node) -> Fault | None:
    """An epsilon that fp16 cannot hold, added in fp16; or a norm whose epsilon lets fp16 overflow."""
    if node.op in ("native_layer_norm", "native_group_norm", "native_batch_norm"):
        return _norm_epsilon(node)
    if node.dtype != torch.float16 or not node.half:
        return None
    if node.op not in ("add", "clamp_min", "clamp"):
        return None
    value = number(second(node))
    if value is None or not 0 < value < FP16_SMALLEST_NORMAL:
        return None
    if value < FP16_SMALLEST:
        why = f"fp16's smallest value is {FP16_SMALLEST:.2g}: {value:g} is 0"
    else:
        smallest = f"fp16's smallest normal value is {FP16_SMALLEST_NORMAL:.2g}"
        why = f"{smallest}: {value:g} loses most of its digits, or is 0"
    fix = f"compute it in float32 (x.float()), or take an epsilon of {FP16_SMALLEST_NORMAL:.1g} or more"
    return Fault("numerics.eps", f"an epsilon of {value:g} in fp16", why, fix)


def _norm_epsilon(node: Node) -> Fault | None:
    """A norm's epsilon of 0, or one that is too small under fp16.

    The kernel adds the epsilon in float32, so fp16 need not hold it. But 1 / sqrt(eps) multiplies the gradient of a row
    without variance, and that product is fp16 again.
    """
    value = number(node.args[-1])
    if value is None or node.blamed:
        return None
    if value == 0:
        why = "a row without variance is divided by 0"
        return Fault(
            "numerics.norm_eps", "a norm without epsilon", why, "give it one, such as 1e-5"
        )
    in_fp16 = torch.float16 in (node.dtype, node.args[0].behind().dtype)
    if not in_fp16:
        return None
    return _overflowing(value)


def _overflowing(value: float) -> Fault | None:
    """A fault if 1 / sqrt(value) is more than fp16 can hold."""
    if value >= FP16_LARGEST**-2:
        return None
    factor = 1 / math.sqrt(value)
    limit = f"over fp16's {FP16_LARGEST:g}"
    why = f"a row without variance multiplies its gradient by 1 / sqrt(eps) = {factor:.2g}, {limit}"
    return Fault(
        "numerics.norm_eps",
        f"a norm's epsilon of {value:g} under fp16",
        why,
        "take 1e-6 or more, such as 1e-5",
    )


def constant(node: Node) -> Fault | None:
    """A constant that fp16 cannot hold, such as a mask of -1e9."""
    if node.dtype != torch.float16 or not node.half:
        return None
    if node.op not in ("masked_fill", "fill", "full", "full_like", "where", "add"):
        return None
    for value in node.args[1:]:
        given = number(value)
        if given is None or not math.isfinite(given):
            continue
        if abs(given) > FP16_LARGEST:
            why = f"fp16's largest value is {FP16_LARGEST:g}: torch raises an error, or the value is infinite"
            fix = "torch.finfo(x.dtype).min, -inf, or F.scaled_dot_product_attention with a mask"
            return Fault("numerics.constant", f"the constant {given:g} in fp16", why, fix)
    return None


def exponentials(nodes: list[Node]) -> list[Fault]:
    """exp of the raw output of a product, where no other rule has named that exp. Called after the forward."""
    found: list[Fault] = []
    for node in nodes:
        if node.op != "exp" or node.blamed or not node.learns:
            continue
        argument = without_constants(node.args[0], _SCALED)
        if argument.op in PRODUCTS:
            why = f"{_OVERFLOWS}, and nothing bounds x"
            fix = "clamp x first, or use F.softplus where a positive number is meant"
            found.append(Fault("numerics.exp", "exp of a layer's output", why, fix, at=node))
    return found


RULES = (logarithm, softmax_by_hand, square_root, division, epsilon, constant)
"""The rules for single operations. `exponentials` looks at all operations after the forward."""
