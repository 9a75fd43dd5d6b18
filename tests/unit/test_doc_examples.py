"""Every page of docs/start, docs/guide, docs/reference and docs/studies begins with an example, and the example runs.

A page's example is its first block of code that is marked `python` or `bash`; further blocks with such a mark run too.
- `python` runs as it stands, in an empty folder. What a reader brings himself (a model, batches) comes from a comment
  before the block, which no reader sees: `<!-- setup`, lines of Python, `-->`.
- `bash` runs line by line in a folder with a small finished run, `runs/quickstart-fp8_hybrid`, a folder of text,
  `texts/`, and the same lines as rows of `docs.jsonl`. Commands of `harness` run to the end and must succeed; of `make`
  and of the launchers it is checked that they exist, as what they do is tested elsewhere. A block marked `text`, `yaml`
  or without a mark is only shown.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import paper, runs

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("start", "guide", "reference", "studies")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / "docs" / folder).glob("*.md"))
BLOCK = re.compile(
    r"(?:<!-- setup\n(.*?)-->\n)?^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a user has it after the first run."""
    folder = tmp_path_factory.mktemp("docs")
    trained = runs.train(
        folder, "--recipe", "fp8_hybrid", "--name", "quickstart-fp8_hybrid", "train.steps=12"
    )
    assert trained.returncode == 0, trained.stdout[-2000:]
    shutil.copytree(runs.TEXT, folder / "texts")
    with (folder / "docs.jsonl").open("w") as rows:
        for path in sorted(runs.TEXT.iterdir()):
            for line in path.read_text().splitlines():
                rows.write(json.dumps({"text": line, "meta": {"title": path.stem}}) + "\n")
    return folder


def _named(page: Path) -> Any:
    """The page as a test's parameter. Those of the guide, and some others, train runs of their own for minutes."""
    expensive = page.parent.name == "guide" or page.stem in ("commands", "your-data", "your-loop")
    marks = [pytest.mark.slow] if expensive else []
    if page.stem in ("estimate", "deterministic", "drill"):
        # The dearest of them. CI does the same in test_estimate_command, test_deterministic_proof and test_drill.
        marks = [pytest.mark.nightly]
    return pytest.param(page, id=str(page.relative_to(ROOT / "docs")), marks=marks)


@pytest.mark.parametrize("page", [_named(page) for page in PAGES])
def test_the_examples_of_a_page_run(
    page: Path, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = BLOCK.findall(page.read_text())
    assert examples, "a page begins with an example that runs: mark its block python or bash"
    for setup, language, code in examples:
        folder = tmp_path / f"example-{len(list(tmp_path.iterdir()))}"
        if language == "bash":
            shutil.copytree(finished, folder)
            run_lines(code, folder)
        else:
            folder.mkdir()
            monkeypatch.chdir(folder)
            exec(compile(setup + code, str(page), "exec"), {"__name__": "example"})


def run_lines(code: str, folder: Path) -> None:
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        command = words[0].removeprefix(".venv/bin/")
        if command == "harness":
            done = (
                paper.estimate(*words[2:], folder=folder)
                if words[1] == "estimate"
                else runs.harness(folder, *words[1:])
            )
            assert done.returncode == 0, f"{line}\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
        elif command == "make":
            assert re.search(
                rf"^{re.escape(words[1])}:", (ROOT / "Makefile").read_text(), re.MULTILINE
            ), line
        elif command in ("deepspeed", "torchrun", "python"):
            program = next(word for word in words[1:] if word.endswith(".py"))
            assert (ROOT / program).is_file(), line
        elif command.startswith("launch/"):
            assert (ROOT / command).is_file(), line
        else:
            assert command in ("cd", "git", "pip", "mlflow", "export", "sbatch", "sky"), line
