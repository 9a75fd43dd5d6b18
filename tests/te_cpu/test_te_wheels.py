"""How Transformer Engine's Python is brought, and what is said where it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import te_wheels

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(te_wheels, "FOLDER", tmp_path)
    return tmp_path


def played_pip(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """pip as a command of its own: `script` is run by sh with pip's arguments."""

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", script, "pip", *command], capture_output=True, text=True, check=False
        )

    monkeypatch.setattr(te_wheels, "subprocess", type("played", (), {"run": staticmethod(run)}))


def test_without_network_it_says_so(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_CACHE_DIR", str(empty / "cache"))
    with pytest.raises(
        te_wheels.Unavailable, match=r"transformer-engine 2\.20\.2 could not be downloaded: ERROR"
    ):
        te_wheels.fetch("2.20.2")
    assert not te_wheels.is_here("2.20.2")


def test_another_wheel_is_refused_by_its_hash(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'while [ "$1" != --dest ]; do shift; done; echo x > "$2/transformer_engine-2.20.2-py3-none-any.whl"'
    played_pip(monkeypatch, script)
    with pytest.raises(te_wheels.Unavailable, match=r"SHA-256 73cb3858.*pinned is 7dcfad94"):
        te_wheels.fetch("2.20.2")
    assert not te_wheels.is_here("2.20.2")
    assert list(empty.iterdir()) == []


def test_a_version_that_is_not_pinned_is_refused(empty: Path) -> None:
    with pytest.raises(te_wheels.Unavailable, match=r"2\.20\.2 are pinned"):
        te_wheels.fetch("1.0")


@pytest.mark.parametrize("ci", ["", "true"])
def test_without_the_wheel_tests_are_skipped_but_not_in_ci(ci: str) -> None:
    """As another version: the one in use stays where it is."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(HERE)]
    environment = {**os.environ, "TE_VERSION": "0.0.0", "CI": ci}
    command += ["-k", "not_pinned"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    told = "Transformer Engine 0.0.0 is not unpacked here: python tests/te_cpu/te_wheels.py brings them"
    assert told in done.stdout + done.stderr
    assert done.returncode == (4 if ci else 0), done.stdout
    assert ("skipped" in done.stdout) is not bool(ci)


def test_the_suite_is_passed_over_unless_it_is_asked_for_and_runs_alone() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only"]
    others = [f"--ignore={path}" for path in (ROOT / "tests").iterdir() if path != HERE]
    passed_over, mixed = (
        subprocess.run([*command, *paths], cwd=ROOT, capture_output=True, text=True, check=False)
        for paths in (["tests", *others], ["tests/te_cpu", "tests/gpu"])
    )
    assert passed_over.returncode == 5, "nothing is collected"
    assert "te_cpu" not in passed_over.stdout
    assert mixed.returncode == 4
    assert "run it alone" in mixed.stderr
