"""Every mutation has one place in the code and its tests in the tree; to run them all is too long for every day."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from matrix import MATRIX
from mutation import Mutation, places, texts
from mutation_list import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = texts(ROOT)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.protection)
def test_a_mutation_can_be_made(mutation: Mutation) -> None:
    found = [str(path.relative_to(ROOT)) for path in places(SOURCES, mutation.old)]
    assert len(found) == 1, f"make `old` longer or shorter until it is in one place: {found}"
    assert mutation.old != mutation.new
    assert (ROOT / mutation.test.split()[0].partition("::")[0]).is_file()
    assert mutation.row in {row.number for row in MATRIX}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.protection)
def test_what_a_mutation_selects_is_there(mutation: Mutation) -> None:
    """By its words: a test that was renamed would be found missing only when all mutations are made."""
    file, _, expression = mutation.test.partition(" -k ")
    path, _, name = file.partition("::")
    own = ROOT / path
    # conftest.py collects the tests of cards; hostile.py is a table of cases.
    more = (
        (ROOT / "tests" / "gpu").glob("test_te*.py")
        if own.name == "conftest.py"
        else own.parent.glob("hostile.py")
    )
    text = "".join(each.read_text() for each in (own, *more))
    words = {*re.findall(r"[A-Za-z_]+", expression), name.partition("[")[0]} - {
        "and",
        "or",
        "not",
        "",
    }
    assert {word for word in words if word not in text} == set()


def test_no_two_protections_have_one_name() -> None:
    assert len({each.protection for each in MUTATIONS}) == len(MUTATIONS)
