"""No dead links: in pages, and wherever code, errors, recipes or configs name a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
SOURCES = (
    "harness",
    "launch",
    "recipes",
    "configs",
    "examples",
    "benchmarks",
    "tests",
    "pyproject.toml",
)
TEXTS = (".py", ".sh", ".yaml", ".toml", ".sbatch", ".cpp", ".md")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings; a repeated heading gets a number."""
    found: set[str] = set()
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = 0
        while (numbered := f"{anchor}-{number}" if number else anchor) in found:
            number += 1
        found.add(numbered)
    return found


def links_of(page: Path) -> list[str]:
    """Links to files and headings of this project."""
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    return [link for link in links if "://" not in link]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = links_of(page)
    assert len(links) > 5 or page.name not in ("README.md", "benchmarks.md"), "links are found"
    dead = []
    for link in links:
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        ):
            dead.append(link)
    assert not dead


def test_pages_that_code_names_are_there() -> None:
    # benchmarks/results are records of what was run: they name pages as these were called then.
    files = [
        path
        for name in SOURCES
        for path in [ROOT / name, *(ROOT / name).rglob("*")]
        if path.suffix in TEXTS
    ]
    names: set[str] = set()
    for path in files:
        if "results" not in path.parts:
            names.update(
                re.findall(r"\bdocs/[\w/-]+\.md(?:#[a-z0-9_-]+)?", path.read_text(errors="ignore"))
            )
    assert len(names) > 10
    dead = []
    for name in sorted(names):
        path, _, anchor = name.partition("#")
        page = ROOT / path
        if not page.is_file() or (anchor and anchor not in anchors(page)):
            dead.append(name)
    assert not dead
