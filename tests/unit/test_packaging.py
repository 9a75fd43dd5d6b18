"""What a wheel contains, and whether the pins cover what is asked for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DEFAULT_EXTRAS = ("deepspeed", "mlflow")


def pins() -> dict[str, str]:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    matches = [re.fullmatch(r"([A-Za-z0-9_.-]+)==([0-9][0-9a-z.]*)", line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches, strict=True) if not match]
    return {canonicalize_name(match[1]): match[2] for match in matches if match}


def requirements() -> list[Requirement]:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    names = (*DEFAULT_EXTRAS, "test", "hf", "peft", "lightning", "accelerate", "kernels")
    groups = [project["dependencies"], *(extras[name] for name in names)]
    return [
        Requirement(text)
        for group in (*groups, PROJECT["build-system"]["requires"])
        for text in group
    ]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_requirement_is_pinned_to_a_version_that_satisfies_it(
    requirement: Requirement,
) -> None:
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


@pytest.mark.parametrize(
    "name", ["setuptools", "wheel", "pathspec", "trove-classifiers", "pybind11"]
)
def test_build_time_needs_are_pinned(name: str) -> None:
    assert name in pins()


def test_deepspeed_and_mlflow_are_extras_that_set_up_installs() -> None:
    core = {
        canonicalize_name(Requirement(text).name) for text in PROJECT["project"]["dependencies"]
    }
    assert not core & set(DEFAULT_EXTRAS)
    installs = re.findall(
        r"pip_install -e '?\.(\S*?)'? *(?:;;)?$",
        (ROOT / "launch" / "setup.sh").read_text(),
        re.MULTILINE,
    )
    assert len(installs) == 3, "to run, to test, and the libraries that people bring"
    for extras in installs:
        assert set(DEFAULT_EXTRAS) <= set(extras.strip("[]").split(",")), extras


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("hopper_harness-*.whl"))


def test_the_wheel_holds_every_module_recipe_and_config(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "harness").rglob("*.py")}
    shipped = {
        f"harness/_shipped/{path.relative_to(ROOT).as_posix()}"
        for kind in ("recipes", "configs")
        for path in (ROOT / kind).rglob("*")
        if path.suffix in (".yaml", ".json")
    }
    assert "harness/_shipped/recipes/fp8_hybrid.yaml" in shipped
    assert modules | shipped <= names
    report = ROOT / "harness" / "report"
    parts = {
        path.relative_to(ROOT).as_posix()
        for path in report.rglob("*")
        if path.suffix not in (".py", ".pyc")
    }
    assert {"harness/report/page.js", "harness/report/vendor/uplot/LICENSE"} < parts
    assert {name for name in parts if (ROOT / name).is_file()} <= names
    # A regular package: an editable install also leaves a folder harness/_shipped in site-packages.
    assert "harness/__init__.py" in names
    assert not [name for name in names if name.startswith(("tests/", "launch/", "benchmarks/"))]


def test_the_wheel_installs_the_command_and_the_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    assert "harness = harness.cli:main" in archive.read(entry_points).decode()
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_recipes_and_configs_are_found_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    empty = tmp_path / "empty"
    empty.mkdir()
    code = (
        "from harness.core.files import find, shipped; from harness.core.config import load_config; "
        "print(find('recipes', 'fp8_hybrid')); print(load_config('quickstart').recipe); print(shipped('recipes'))"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=empty, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    path, _, names = done.stdout.splitlines()
    assert path == str(site / "harness/_shipped/recipes/fp8_hybrid.yaml")
    assert "'bf16'" in names


def test_the_runbook_is_explained_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()
    command = [sys.executable, "-m", "harness.cli", "explain", "loss.spike"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        command, cwd=empty, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "What to do" in done.stdout


@pytest.mark.slow
def test_training_runs_from_the_wheel_alone_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()
    arguments = [
        "train",
        "--recipe",
        "fp8_hybrid",
        "--config",
        "tiny",
        "train.steps=2",
        "tracking.mlflow=false",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", *arguments],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "24 of 24 FP8 slots" in done.stdout
    assert (empty / "runs" / "tiny-fp8_hybrid" / "outcome.json").exists()
