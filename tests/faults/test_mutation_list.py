"""Every mutation has one place in the code and its tests in the tree; to run them all is too long for every day."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from matrix import MATRIX
from mutation import Mutation, places, texts
from mutation_list import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = texts(ROOT)


# All mutations in one test: a test for each took six seconds in every `make test`.
def test_every_mutation_can_be_made() -> None:
    rows = {row.number for row in MATRIX}
    faults: list[str] = []
    for each in MUTATIONS:
        found = [str(path.relative_to(ROOT)) for path in places(SOURCES, each.old)]
        if len(found) != 1:
            way = "make `old` longer or shorter until it is in one place"
            faults.append(f"{each.protection}: {way}: {found}")
        if each.old == each.new:
            faults.append(f"{each.protection}: changes nothing")
        if not (ROOT / each.test.split()[0].partition("::")[0]).is_file():
            faults.append(f"{each.protection}: no file {each.test}")
        if each.row not in rows:
            faults.append(f"{each.protection}: no row {each.row}")
    assert faults == []


def test_what_every_mutation_selects_is_there() -> None:
    """By its words: a test that was renamed would be found missing only when all mutations are made."""
    missing = {each.protection: lacking for each in MUTATIONS if (lacking := words_missing(each))}
    assert missing == {}


def words_missing(mutation: Mutation) -> set[str]:
    """Words by which a mutation selects its test, and which the test's file does not have."""
    file, _, expression = mutation.test.partition(" -k ")
    path, _, name = file.partition("::")
    own = ROOT / path
    # conftest.py collects the tests of cards; hostile.py is a table of cases.
    more = (
        (ROOT / "tests" / "gpu").glob("test_te*.py")
        if own.name == "conftest.py"
        else own.parent.glob("hostile.py")
    )
    text = "".join(text_of(each) for each in (own, *more))
    words = {*re.findall(r"[A-Za-z_]+", expression), name.partition("[")[0]} - {
        "and",
        "or",
        "not",
        "",
    }
    return {word for word in words if word not in text}


text_of = cache(Path.read_text)


def test_no_two_protections_have_one_name() -> None:
    assert len({each.protection for each in MUTATIONS}) == len(MUTATIONS)
