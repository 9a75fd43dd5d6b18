"""What the README and the pages to start with promise is there: links, commands, config keys, the loop, the figures."""

from __future__ import annotations

import io
import json
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.held_out import HARMFUL
from harness import Precision
from harness.cli import COMMANDS
from harness.core.config import load_config
from harness.core.errors import ExitCode
from tests.support import runs

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
COMPARISON = DOCS / "start" / "comparison.md"
PAGES = (README, DOCS / "studies" / "benchmarks.md")
by_page = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
WITH_COMMANDS = (*PAGES, *sorted((DOCS / "start").glob("*.md")), DOCS / "reference" / "commands.md")
RESULTS = ROOT / "benchmarks" / "results"


def blocks(language: str, page: Path = README) -> list[str]:
    """Fenced blocks of a page, by language; plain ones have none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [code for marked, code in found if marked == language]


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_every_source_of_the_comparison_is_pinned_to_a_commit_and_used() -> None:
    text = COMPARISON.read_text()
    sources = dict(re.findall(r"^\[([a-z0-9-]+)\]: (\S+)$", text, re.MULTILINE))
    assert len(sources) == 29
    assert set(sources) == set(re.findall(r"\]\[([a-z0-9-]+)\]", text))
    assert all(
        re.search(r"^https://github\.com/[^/]+/[^/]+/(blob|tree)/[0-9a-f]{40}/", url)
        for url in sources.values()
    )


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=[page.name for page in WITH_COMMANDS])
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


def test_the_two_commands_are_shown_and_there() -> None:
    shown = re.findall(r"^make (\w+)", "".join(blocks("")), re.MULTILINE)
    assert shown == ["train", "test"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(shown) <= set(targets)


def test_the_keys_of_the_example_run_are_taken() -> None:
    (command,) = [
        block for block in blocks("", DOCS / "start" / "your-model.md") if "model.target=" in block
    ]
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
    with redirect_stdout(io.StringIO()) as printed:
        exec(loop, names)
    assert names["precision"].plan.fp8_layers() == ("0", "2")
    assert names["optimizer"].outcome.was_applied
    assert not torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)
    if not torch.cuda.is_available():
        assert printed.getvalue() in blocks("")


def test_a_model_of_your_own_trains_as_its_page_says(tmp_path: Path) -> None:
    """The model of the page's example, in the file that the page names, in a run of a few steps."""
    code = blocks("python", DOCS / "start" / "your-model.md")[0]
    (tmp_path / "my_models.py").write_text(code.partition("\n\nprecision = ")[0] + "\n")
    changes = ("model.target=my_models:build", "model.args={width: 64}", "train.steps=2")
    done = runs.train(tmp_path, "--recipe", "fp8_hybrid", "--name", "mine", *changes)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "9 of 9 FP8 slots" in done.stdout


def test_samples_of_your_own_train_as_their_page_says(tmp_path: Path) -> None:
    code = blocks("python", DOCS / "start" / "your-data.md")[0]
    (tmp_path / "my_data.py").write_text(code.partition("\n\nprint(")[0] + "\n")
    (tmp_path / "my_models.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Linear(64, 2)\n"
    )
    data = ("data.path=null", "data.target=my_data:load", "data.args={samples: 64}")
    done = runs.train(
        tmp_path,
        "--recipe",
        "bf16",
        "model.target=my_models:build",
        "model.args={}",
        *data,
        "train.steps=2",
    )
    assert done.returncode == 0, done.stdout[-2000:]


def proven() -> dict[str, tuple[str, str]]:
    """Of the README's table of what is proven: number and hardware, by the row's first words."""
    _, _, section = README.read_text().partition("## What is proven")
    rows = [
        line.strip("| ").split(" | ")
        for line in section.partition("\n## ")[0].splitlines()
        if "| [" in line
    ]
    return {row[0]: (row[1], row[2]) for row in rows}


def test_what_is_proven_is_what_the_records_say() -> None:
    rows = iter(proven().values())
    steps = {row["name"]: row["figures"] for row in result("proof_h100_torch213")["rows"]}
    for name in ("te", "te_fused"):
        assert next(rows) == (
            f"{steps[name]['contenders']['fp8']['ratio']['median']:.2f}",
            "one H100",
        )
    ends = result("demotion_h100")["results"][0]["runs"]
    assert next(rows) == (
        f"{ends['fallback']['val_loss'] / ends['bf16']['val_loss'] - 1:+.2%}",
        "one H100",
    )
    assert next(rows) == ("114 of 114", "one H100")
    assert "every tensor of the last checkpoint equal to an undisturbed run's, 114 of 114" in (
        DOCS / "studies" / "hopper.md"
    ).read_text().replace("\n", " ")
    fp8 = result("parity_cpu")["verdict"]["fp8"]
    assert next(rows) == (f"{fp8['mean']:+.2%}", "CPU")
    interval = f"The {fp8['mean']:+.2%}'s 95% interval: {fp8['low']:+.2%} to {fp8['high']:+.2%}"
    assert interval in " ".join(README.read_text().split())
    harmful = [row for row in result("evidence_held_out_cpu")["faults"] if row["harm"] >= HARMFUL]
    assert next(rows) == (f"{sum(bool(row['left']) for row in harmful)} of {len(harmful)}", "CPU")
    skips = {f"{each['skips']} of {each['n']:,}" for each in result("detectors_cpu")["false_skips"]}
    assert {next(rows)} == {(each, "CPU") for each in skips}
    kills, hardware = next(rows)
    assert hardware == "CPU"
    assert (
        f"at least two checkpoints load | {kills} ("
        in (DOCS / "studies" / "reliability.md").read_text()
    )
    assert next(rows, None) is None


def test_the_picture_is_told_as_its_runs_went() -> None:
    results = result("demotion_cpu")["results"]
    worst = max(
        abs(each["runs"]["fallback"]["val_loss"] / each["runs"]["bf16"]["val_loss"] - 1)
        for each in results
    )
    steps = sorted(
        {switch["step"] for each in results for switch in each["runs"]["fallback"]["switches"]}
    )
    text = " ".join(README.read_text().split())
    assert f"At step {steps[0]} or {steps[1]}, by seed, the [fallback]" in text
    assert f"moves that layer to BF16, and the loss ends within {worst:.2%} of bf16's" in text
    assert len(steps) == 2


def test_exit_codes_are_those_of_the_code() -> None:
    text = (DOCS / "reference" / "exit-codes.md").read_text()
    assert re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE) == [
        (str(int(code)), code.name) for code in ExitCode
    ]
