"""The table of commands: what `harness --help` says of them, and what a command loads before it is called."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli import COMMANDS, app
from harness.tracking.history import RunHistory

LOADED = """
import json, sys
from harness.cli import app
try:
    app(sys.argv[1:], prog_name="harness")
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted(name for name in sys.modules if name.startswith(("harness.", "torch", "pydantic")))))
"""


def loaded_by(*arguments: str) -> set[str]:
    """Modules of ours, torch and pydantic that are there when the command has ended."""
    line = [sys.executable, "-c", LOADED, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_help_lists_every_command_and_loads_none() -> None:
    shown = CliRunner().invoke(app, ["--help"], prog_name="harness")
    assert shown.exit_code == 0
    rows = [
        line.split() for line in shown.stdout.partition("Commands:")[2].splitlines() if line.strip()
    ]
    assert [row[0] for row in rows] == list(COMMANDS)
    for row, (_, text) in zip(rows, COMMANDS.values(), strict=True):
        assert text.startswith(" ".join(row[1:4]).removesuffix("..."))
    found = loaded_by("--help")
    assert {
        name for name in found if name.startswith(("harness.tools", "torch", "pydantic"))
    } == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_does_and_what_it_takes(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"], prog_name="harness", env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert shown.stdout.startswith(f"Usage: harness {name}")
    assert COMMANDS[name][1] in " ".join(shown.stdout.split())


def test_a_command_that_is_called_loads_no_other() -> None:
    found = {name for name in loaded_by("verify", "--help") if name.startswith("harness.tools.")}
    assert found == {"harness.tools.verify"}


def test_a_command_that_is_none_is_named() -> None:
    shown = CliRunner().invoke(app, ["trian"], prog_name="harness")
    assert shown.exit_code == 2
    assert "No such command 'trian'" in shown.output


def test_a_terminal_that_is_not_utf8_shows_question_marks(tmp_path: Path) -> None:
    name = "Lauf-\u00fc"
    (tmp_path / name).mkdir()
    line = [sys.executable, "-m", "harness.cli", "runs", str(tmp_path)]
    done = subprocess.run(
        line, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"Lauf-?" in done.stdout


def test_keys_of_the_recipe_on_the_command_line_say_where_they_go() -> None:
    given = ["fp8.margin=1", "layers={fuse: true}", "train.stpes=3"]
    done = CliRunner().invoke(app, ["estimate", "--config", "tiny", *given])
    assert done.exit_code == 2
    assert "fp8.margin=1: fp8 is a section of the recipe" in done.stderr
    assert "layers={fuse: true}: layers is a section of the recipe" in done.stderr
    assert done.stderr.count("in a copy of the recipe's file") == 2
    assert 'did you mean "steps"' in done.stderr, "all problems at once"


@pytest.mark.parametrize("command", ["train", "doctor", "estimate", "rehearse"])
@pytest.mark.parametrize("given", [["--train.steps=4"], ["--train.steps", "4"]])
def test_a_config_key_with_dashes_says_how_it_is_written(command: str, given: list[str]) -> None:
    done = CliRunner().invoke(app, [command, "--config", "tiny", *given])
    assert done.exit_code == 2
    value = "4" if "=" in given[0] else "VALUE"
    assert f"config keys are written without dashes: train.steps={value}" in done.stderr


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_file_that_the_system_refuses_is_named_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / "journal.jsonl").write_text("")

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number), "some/file")

    monkeypatch.setattr(RunHistory, "read", refuse)
    done = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: some/file: {os.strerror(number)}\n    fix: ")
