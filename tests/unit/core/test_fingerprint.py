from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.core import collectives
from harness.core.collectives import Fingerprint, RankComparison, differing, rows_to_hash
from harness.core.shards import Rows

CPU = torch.device("cpu")
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
PRINT = Fingerprint(CPU)


def in_chunks(words: int) -> Fingerprint:
    """One that hashes so many words at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_CPU_CHUNK", words)
        return Fingerprint(CPU)


SMALL = in_chunks(8)


def of(*tensors: Tensor) -> list[int]:
    return PRINT.of(tensors).tolist()


def flipped(tensor: Tensor, bit: int) -> Tensor:
    """A copy with one bit of its memory turned over."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    data = copy.reshape(-1).view(torch.uint8)
    data[bit // 8] ^= 1 << (bit % 8)
    return copy


@settings(max_examples=300, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 5), max_size=3),
    seed=st.integers(0, 2**31),
    where=st.floats(0, 1, exclude_max=True),
)
def test_any_one_bit_changes_the_hash(
    dtype: torch.dtype, shape: list[int], seed: int, where: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    tensor = (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)
    bit = 0 if dtype == torch.bool else int(where * size * 8)
    assert of(tensor) == of(tensor.clone())
    assert of(tensor) != of(flipped(tensor, bit))


@pytest.mark.parametrize("words", [1, 7, 8, 9, 64, 1000])
def test_every_bit_counts_in_every_chunk(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_CPU_CHUNK", 8)
    small = Fingerprint(CPU)
    tensor = torch.randn(2 * words + 1, generator=torch.Generator().manual_seed(0))
    usual = small.of([tensor]).item()
    step = max(1, words // 50) * 31
    changed = [small.of([flipped(tensor, bit)]).item() for bit in range(0, 32 * len(tensor), step)]
    assert usual not in changed
    assert len(set(changed)) == len(changed)


def test_no_two_flips_cancel() -> None:
    tensor = torch.randn(24, generator=torch.Generator().manual_seed(0))
    bits = [32 * place + bit for place in range(24) for bit in (31, 30, 0)]  # signs above all
    hashes = [of(flipped(flipped(tensor, a), b))[0] for a in bits for b in bits if a < b]
    assert of(tensor)[0] not in hashes
    assert len(set(hashes)) == len(hashes)


def test_order_matters_within_and_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_CPU_CHUNK", 4)
    small = Fingerprint(CPU)
    values = torch.arange(16, dtype=torch.int64)
    hashes = {small.of([values]).item()}
    for first in range(16):
        for second in range(first + 1, 16):
            swapped = values.clone()
            swapped[[first, second]] = values[[second, first]]
            hashes.add(small.of([swapped]).item())
    assert len(hashes) == 1 + 16 * 15 // 2


@settings(max_examples=200, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 13), min_size=1, max_size=3),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_the_parts_of_ranks_add_up_to_the_hash(
    dtype: torch.dtype, shape: list[int], ranks: int, seed: int
) -> None:
    """Words that begin in a rank's rows and end in the next one's, chunks of a few words, ranks without rows."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=generator)
    raw = raw.to(torch.uint8)
    tensor = (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)
    for hashes in (PRINT, SMALL):
        total = torch.zeros((), dtype=torch.int64)
        for rank in range(ranks):
            rows = Rows.of_rank(tuple(shape), rank, ranks)
            total += hashes.of_rows(tensor[rows.begin : rows_to_hash(rows, dtype)], rows)
        assert total == hashes.of([tensor])[0]


def test_bits_count_not_values() -> None:
    assert of(torch.tensor(0.0)) != of(torch.tensor(-0.0))
    nan = torch.tensor(math.nan)
    assert of(nan) == of(nan.clone())
    assert of(nan) != of(flipped(nan, 3))


def test_strides_offsets_and_odd_sizes_do_not_matter() -> None:
    tensor = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
    assert of(tensor.T) == of(tensor.T.contiguous())
    assert of(tensor[:, ::3]) == of(tensor[:, ::3].contiguous())
    flat = tensor.flatten()
    assert of(flat[1:]) == of(flat[1:].clone())
    assert of(flat[3:].to(torch.bfloat16)[1:]) == of(flat[4:].to(torch.bfloat16).clone())


def test_empty_and_0d() -> None:
    assert of(torch.zeros(0, 3), torch.zeros(())) == [0, 0]
    assert of(torch.tensor(1.5)) != of(torch.tensor(-1.5))
    assert of() == []


def test_alone_nothing_differs() -> None:
    hashes = torch.tensor([0, -(2**63), 2**63 - 1, 5])
    assert differing(hashes).tolist() == [False] * 4


@pytest.mark.parametrize(
    ("mine", "theirs"), [(0, 1), (-1, 0), (-(2**63), 2**63 - 1), (7, -7), (2**63 - 1, 2**63 - 2)]
)
def test_two_hashes_that_differ_are_seen_on_both_sides(
    mine: int, theirs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = torch.tensor([mine, 3]), torch.tensor([theirs, 3])

    def reduce(values: Tensor) -> Tensor:
        """What MAX over the two ranks gives."""
        return torch.maximum(torch.cat([here, ~here]), torch.cat([there, ~there]))

    monkeypatch.setattr(collectives, "max_over_ranks", reduce)
    assert differing(here).tolist() == differing(there).tolist() == [True, False]


def test_it_compares_at_its_period_and_after_a_gap() -> None:
    comparison = RankComparison(10, {"weight": torch.ones(3)}, CPU)
    steps = [*range(1, 26), *range(16, 22)]  # a rollback to step 15
    compared = [step for step in steps if comparison.after(step)[0]]
    assert compared == [10, 20, 16, 20]
    resumed = RankComparison(10, {"weight": torch.ones(3)}, CPU)
    assert [step for step in range(43, 52) if resumed.after(step)[0]] == [43, 50]
    names, differs = resumed.after(60)
    assert (names, differs.tolist()) == (("weight",), [0.0])
