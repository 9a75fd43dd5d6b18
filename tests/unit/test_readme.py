"""What the README and the page of benchmarks promise is there: files, headings, commands, config keys, the loop."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness import Precision
from harness.cli import COMMANDS
from harness.core.config import load_config

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = (README, ROOT / "docs" / "studies" / "benchmarks.md")
by_page = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def blocks(language: str) -> list[str]:
    """Fenced blocks of the README, by language; plain ones have none."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


@by_page
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]
    assert len(links) > 5
    for link in links:
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_source_of_the_comparison_is_pinned_to_a_commit_and_used() -> None:
    text = README.read_text()
    sources = dict(re.findall(r"^\[([a-z0-9-]+)\]: (\S+)$", text, re.MULTILINE))
    assert set(sources) == set(re.findall(r"\]\[([a-z0-9-]+)\]", text))
    assert all(
        re.search(r"^https://github\.com/[^/]+/[^/]+/(blob|tree)/[0-9a-f]{40}/", url)
        for url in sources.values()
    )


@by_page
def test_commands_exist_with_their_options(page: Path) -> None:
    text = page.read_text()
    for command in re.findall(r"(?:bin/|`)harness (\w+)", text):
        assert command in COMMANDS, command
    for module, options, commit in re.findall(
        r"`python -m benchmarks\.(\w+)([^`]*)`( at [0-9a-f]{7}\b)?", text
    ):
        scripts = [
            *(ROOT / "benchmarks").glob(f"{module}*.py"),
            *(ROOT / "benchmarks").glob(f"{module}/*.py"),
        ]
        source = "\n".join(path.read_text() for path in scripts)
        # The script of a finished study is in the history, not in the tree, and its page names the commit.
        assert bool(source) != bool(commit), module
        if commit:
            continue
        for option in re.findall(r"--[a-z]+", options):
            assert f'"{option}"' in source, f"{module} {option}"


def test_the_keys_of_the_example_run_are_taken() -> None:
    (command,) = [block for block in blocks("") if "model.target=" in block]
    overrides = [
        word for word in shlex.split(command.replace("\\\n", " ")) if re.match(r"\w+\.\w+=", word)
    ]
    config = load_config("quickstart", overrides, "fp8_hybrid")
    assert config.model.target == "my_models:build"
    assert config.train.steps == 2000


def test_the_loop_trains_in_fp8() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    batch = (torch.randn(32, 64), torch.randint(0, 64, (32,)))
    (loop,) = blocks("python")
    names: dict[str, Any] = {
        "Precision": Precision,
        "torch": torch,
        "model": model,
        "batches": [batch] * 3,
    }
    exec(loop, names)
    assert names["precision"].plan.fp8_layers() == ("0", "2")
    assert names["optimizer"].outcome.was_applied
    assert not torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)
