"""Parameters of a test of which `make test` or CI runs some, and a longer target the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_nightly(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """`cases` as parameters, all but `kept` marked nightly. A case of several values is a tuple.

    Raises ValueError for a kept case that is none of `cases`.
    """
    return _rest(cases, kept, pytest.mark.nightly)


def rest_slow(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """As `rest_nightly`, all but `kept` marked slow: CI runs them all."""
    return _rest(cases, kept, pytest.mark.slow)


def _rest(cases: Iterable[Any], kept: tuple[Any, ...], mark: pytest.MarkDecorator) -> list[Any]:
    all_cases = list(cases)
    if missing := [case for case in kept if case not in all_cases]:
        raise ValueError(f"no such cases: {missing}")
    found: list[Any] = []
    for case in all_cases:
        values = case if isinstance(case, tuple) else (case,)
        marks = [] if case in kept else [mark]
        found.append(pytest.param(*values, marks=marks))
    return found
