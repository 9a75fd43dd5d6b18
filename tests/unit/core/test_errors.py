"""Texts that every room shares."""

from __future__ import annotations

import pytest
import torch

from harness.core.errors import is_out_of_memory, number_of


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (100_000, "100,000 steps")]
)
def test_a_count_has_its_noun(count: int, text: str) -> None:
    assert number_of(count, "step") == text


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("Allocation on device"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_memory_that_is_lacking_is_known_however_it_is_worded(
    error: Exception, is_memory: bool
) -> None:
    assert is_out_of_memory(error) is is_memory
