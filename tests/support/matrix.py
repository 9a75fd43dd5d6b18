"""Parameters of a test of which CI runs some, and `make test-nightly` the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_nightly(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """`cases` as parameters, all but `kept` marked nightly. A case of several values is a tuple.

    Raises ValueError for a kept case that is none of `cases`.
    """
    all_cases = list(cases)
    if missing := [case for case in kept if case not in all_cases]:
        raise ValueError(f"no such cases: {missing}")
    found: list[Any] = []
    for case in all_cases:
        values = case if isinstance(case, tuple) else (case,)
        marks = [] if case in kept else [pytest.mark.nightly]
        found.append(pytest.param(*values, marks=marks))
    return found
