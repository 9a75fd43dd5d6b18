"""Texts that every room shares."""

from __future__ import annotations

import pytest

from harness.core.errors import number_of


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (100_000, "100,000 steps")]
)
def test_a_count_has_its_noun(count: int, text: str) -> None:
    assert number_of(count, "step") == text
