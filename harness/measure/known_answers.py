"""Products of matrices whose exact result is known, in every precision: what a sound unit must give bit for bit.

All entries are integers. Each output is a sum of terms, and every partial sum of them is an integer that the precision
holds exactly. So no addition rounds, the order in which a kernel adds does not matter, and the result is the same on
every device. It is computed here by integer additions on the host, without any product of matrices.

Three kinds of operands look for different faults:

digits  every bit of the significand: the left side has integers of all bits, and each output is one of them times 1, 2,
        4 or 8
wide    the adders: 16 terms for each output, of several bits each
many    long sums: terms of -1 and 1, as many as the precision can count
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Exact(NamedTuple):
    """What a precision holds exactly.

    bits: of the left operand's significand, the hidden bit included: integers up to 2^bits are exact.
    right_bits: the same of the right operand.
    total: integers up to this are exact in the result, and in the accumulator of a kernel.
    """

    bits: int
    right_bits: int
    total: int


# FP8 products are returned as bfloat16, whose 8 bits set `total`. Hopper's FP8 units accumulate in about 14 bits.
PRECISIONS: dict[str, Exact] = {
    "fp32": Exact(24, 24, 2**24),
    "tf32": Exact(11, 11, 2**24),
    "bf16": Exact(8, 8, 2**8),
    "fp16": Exact(11, 11, 2**11),
    "fp8_e4m3": Exact(4, 4, 2**8),
    "fp8_e5m2": Exact(3, 4, 2**8),
}
KINDS = ("digits", "wide", "many")
# Terms of each output of kind "wide".
_WIDE_TERMS = 16
# The factors of kind "digits" are 2^0 to 2^3.
_POWERS = 4
Shape = tuple[int, int, int]
"""(m, k, n) of a product [m, k] x [k, n]."""


@dataclass(frozen=True, slots=True)
class KnownProduct:
    """Operands and their exact product, int64 on the host.

    left, right, product: [m, k], [k, n] and [m, n].
    """

    precision: str
    kind: str
    left: Tensor
    right: Tensor
    product: Tensor

    @property
    def text(self) -> str:
        """Precision, shapes and kind, for people."""
        (m, k), n = self.left.shape, self.right.shape[1]
        return f"{self.precision}, [{m}, {k}] x [{k}, {n}], {self.kind}"


def known_product(precision: str, kind: str, shape: Shape, seed: int = 0) -> KnownProduct:
    """A product of `kind` in `precision`; the same for the same arguments on every machine."""
    m, k, n = shape
    exact = PRECISIONS[precision]
    generator = torch.Generator().manual_seed(seed)
    if kind == "digits":
        return _digits(precision, exact, shape, generator)

    # Each row of the left side has `terms` entries that are not 0, so each output is a sum of as many terms.
    wanted = _WIDE_TERMS if kind == "wide" else exact.total
    terms = min(k, wanted)
    # A term is at most largest^2, so terms * largest^2 must not exceed `total`.
    largest = min(math.isqrt(exact.total // terms), 2**exact.bits, 2**exact.right_bits)
    if kind == "many":
        largest = 1
    sizes = torch.randint(1, largest + 1, (m, terms), generator=generator, device="cpu")
    values = _signed(sizes, generator)
    sizes = torch.randint(1, largest + 1, (k, n), generator=generator, device="cpu")
    right = _signed(sizes, generator)

    # Columns of those entries: evenly spaced from a random start, so that no two in a row are the same.
    starts = torch.randint(0, k, (m, 1), generator=generator, device="cpu")
    steps = torch.arange(terms, device="cpu") * (k // terms)
    places = (starts + steps) % k
    left = torch.zeros(m, k, dtype=torch.int64, device="cpu").scatter_(1, places, values)

    # The exact product, one term of every output at a time.
    product = torch.zeros(m, n, dtype=torch.int64, device="cpu")
    for term in range(terms):
        product += values[:, term, None] * right[places[:, term]]
    return KnownProduct(precision, kind, left, right, product)


def _digits(precision: str, exact: Exact, shape: Shape, generator: torch.Generator) -> KnownProduct:
    """Left: integers of all bits. Right: one signed power of two in each column, so each output is a single term."""
    m, k, n = shape
    sizes = torch.randint(0, 2**exact.bits, (m, k), generator=generator, device="cpu")
    left = _signed(sizes, generator)
    powers = 2 ** torch.randint(0, _POWERS, (n,), generator=generator, device="cpu")
    factors = _signed(powers, generator)
    places = torch.randint(0, k, (n,), generator=generator, device="cpu")
    right = torch.zeros(k, n, dtype=torch.int64, device="cpu")
    right[places, torch.arange(n, device="cpu")] = factors
    return KnownProduct(precision, "digits", left, right, left[:, places] * factors)


def _signed(values: Tensor, generator: torch.Generator) -> Tensor:
    """`values` with random signs."""
    signs = torch.randint(0, 2, values.shape, generator=generator, device="cpu") * 2 - 1
    return values * signs
