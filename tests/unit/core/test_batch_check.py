from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.core import health
from harness.core.facts import BAD_LABEL, NO_LABEL, NON_FINITE_INPUT
from harness.core.health import Fault, harmless

TOKENS = torch.randint(0, 256, (2, 5), generator=torch.Generator().manual_seed(0))


def check_batch(inputs: Tensor, targets: Tensor, vocab: int | None = None) -> int:
    return health.check_batch({"inputs": inputs, "targets": targets}, vocab)


def name_faults(inputs: Tensor, targets: Tensor, vocab: int | None = None) -> list[Fault]:
    return health.name_faults({"inputs": inputs, "targets": targets}, vocab)


def with_value(values: Tensor, place: tuple[int, ...], value: float) -> Tensor:
    changed = values.clone()
    changed[place] = value
    return changed


@pytest.mark.parametrize("value", [256, -2, -1, -101, 2**40, -(2**63)])
def test_a_token_or_label_out_of_range_is_found(value: int) -> None:
    bad = with_value(TOKENS, (1, 3), value)
    assert check_batch(TOKENS, bad, 256) == check_batch(bad, TOKENS, 256) == BAD_LABEL
    (fault,) = name_faults(TOKENS, bad, 256)
    assert (fault.row, fault.bit) == (1, BAD_LABEL)
    assert fault.text == f"label {value} at position 3, not in [0, 256)"


def test_ignored_labels_are_no_fault_but_an_ignored_input_is() -> None:
    ignored = with_value(TOKENS, (0, 2), -100)
    assert check_batch(TOKENS, ignored, 256) == 0
    assert check_batch(ignored, TOKENS, 256) == BAD_LABEL
    assert check_batch(TOKENS, with_value(ignored, (0, 3), 256), 256) == BAD_LABEL
    assert check_batch(TOKENS, with_value(ignored, (0, 3), -2), 256) == BAD_LABEL
    assert check_batch(TOKENS, torch.full_like(TOKENS, -100), 256) == NO_LABEL


def test_without_a_vocabulary_only_negative_labels_are_bad() -> None:
    assert check_batch(TOKENS, TOKENS + 10**9) == 0
    assert check_batch(TOKENS, with_value(TOKENS, (0, 0), -1)) == BAD_LABEL


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
)
def test_an_input_that_is_not_finite_is_found(value: float, dtype: torch.dtype) -> None:
    images = torch.ones(2, 3, 4, 4, dtype=dtype)
    labels = torch.tensor([1, 0])
    assert check_batch(images, labels, 10) == 0
    bad = with_value(images, (1, 2, 0, 3), value)
    assert check_batch(bad, labels, 10) == NON_FINITE_INPUT
    assert check_batch(labels, bad, 10) == NON_FINITE_INPUT, "targets of a regression"
    (fault,) = name_faults(bad, labels, 10)
    assert (fault.row, fault.bit) == (1, NON_FINITE_INPUT)
    place = [2, 0, 3] + ([0] if dtype.is_complex else [])
    assert fault.text.startswith(f"input {value} at position {place}")


def test_the_largest_finite_values_are_finite() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        info = torch.finfo(dtype)
        assert (
            check_batch(torch.tensor([info.max, info.min], dtype=dtype), torch.tensor([0, 1])) == 0
        )


def test_a_byte_is_never_taken_for_an_ignored_label() -> None:
    byte = torch.tensor([[156, 3]], dtype=torch.uint8)  # -100 as a byte
    assert check_batch(byte, byte, 256) == 0
    assert check_batch(byte.long(), byte, 100) == BAD_LABEL
    assert {fault.text.split(",")[0] for fault in name_faults(byte, byte, 100)} == {
        "input 156 at position 0",
        "label 156 at position 0",
    }


def test_several_faults_are_told_together() -> None:
    inputs = with_value(torch.ones(3, 2), (0, 1), math.nan)
    assert check_batch(inputs, torch.tensor([1, 9, 8]), 5) == NON_FINITE_INPUT | BAD_LABEL
    assert [
        (fault.row, fault.text) for fault in name_faults(inputs, torch.tensor([1, 9, 8]), 5)
    ] == [
        (0, "input nan at position 1"),
        (1, "label 9, not in [0, 5)"),
        (2, "label 8, not in [0, 5)"),
    ]
    assert check_batch(inputs, torch.zeros(0, dtype=torch.int64)) == NON_FINITE_INPUT | NO_LABEL


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (4, 0)])
def test_shapes_without_values(shape: tuple[int, ...]) -> None:
    empty = torch.zeros(shape, dtype=torch.int64)
    assert check_batch(empty, empty, 8) == (0 if shape == () else NO_LABEL)
    assert len(name_faults(empty, empty, 8)) == (0 if shape == () else 1)


INTEGERS = [
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
]


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.integers(-128, 127), max_size=8),
    dtype=st.sampled_from(INTEGERS),
    vocab=st.none() | st.integers(2, 130),
)
def test_it_says_what_plain_python_says(
    values: list[int], dtype: torch.dtype, vocab: int | None
) -> None:
    targets = torch.tensor(values, dtype=torch.int64).to(dtype)
    seen = [int(value) for value in targets.tolist()]
    labels = [value for value in seen if value != -100]
    wrong = any(value < 0 or (vocab is not None and value >= vocab) for value in labels)
    expected = (BAD_LABEL if wrong else 0) if labels else NO_LABEL
    inputs = torch.zeros(len(values))
    assert check_batch(inputs, targets, vocab) == expected
    assert [fault.bit for fault in name_faults(inputs, targets, vocab)][:1] == (
        [expected] if expected else []
    )


def test_a_harmless_batch_has_the_same_shapes_and_no_fault() -> None:
    bad = {
        "inputs": torch.full((2, 3), math.nan, dtype=torch.bfloat16),
        "targets": torch.full((2,), 999),
    }
    inputs, targets = harmless(bad).values()
    assert (inputs.shape, inputs.dtype, targets.shape, targets.dtype) == (
        (2, 3),
        torch.bfloat16,
        (2,),
        torch.int64,
    )
    assert check_batch(inputs, targets, 2) == 0
