"""Transformer Engine's own Python on the CPU: `python -m pytest tests/te_cpu`, in a process of its own.

TE_VERSION (2.18.0 | 2.19.0 | 2.20.2, the default) chooses the unpacked wheel; the older ones run tests/gpu's tests and
what is marked `every_version` here. Without the wheel all is skipped and says how to get it; where CI is set it fails.
`pytest` without this folder among its arguments passes it over: TE on its stand-in changes the whole process.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
GPU = HERE.parent / "gpu"
sys.path[:0] = [str(HERE)]

import te_wheels  # noqa: E402

VERSION = os.environ.get("TE_VERSION", te_wheels.NEWEST)
MISSING = (
    ""
    if te_wheels.is_here(VERSION)
    else f"Transformer Engine {VERSION} is not unpacked here: {te_wheels.HOW}"
)
# Tests of the stand-in's surroundings, which run without it.
ALWAYS = ("test_te_wheels.py",)


def is_asked(config: pytest.Config) -> bool:
    """Whether this folder was named on the command line. Raises pytest.UsageError if others were too."""
    named = [Path(argument.split("::")[0]).resolve() for argument in config.invocation_params.args]
    named = [path for path in named if path.exists()]
    mine = [path for path in named if path.is_relative_to(HERE)]
    if mine and len(mine) < len(named):
        raise pytest.UsageError("tests/te_cpu changes the whole process: run it alone")
    return bool(mine)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "every_version: runs with older versions of Transformer Engine too"
    )
    if not is_asked(config):
        return
    sys.path[:0] = [str(GPU), str(HERE.parent / "unit" / "precision")]
    if MISSING and os.environ.get("CI"):
        raise pytest.UsageError(MISSING)
    if not MISSING:
        import te_install

        te_install.install(te_wheels.unpacked(VERSION))
        te_install.as_on_a_card()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if is_asked(config) or not collection_path.is_relative_to(HERE) else True


class OnACard(pytest.File):
    """tests/gpu's files about Transformer Engine as they are, with this folder's conftest in the place of theirs."""

    def collect(self) -> Iterable[pytest.Module]:
        return [
            pytest.Module.from_parent(self, path=path) for path in sorted(GPU.glob("test_te*.py"))
        ]


class Skipped(pytest.File):
    """A file that needs the wheel, which is missing."""

    def collect(self) -> Iterable[pytest.Item]:
        pytest.skip(MISSING, allow_module_level=True)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.File | None:
    return (
        OnACard.from_parent(parent, path=file_path)
        if file_path == HERE / "conftest.py" and not MISSING
        else None
    )


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.File | None:
    return (
        Skipped.from_parent(parent, path=module_path)
        if MISSING and module_path.name not in ALWAYS
        else None
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # pytest gives it the tests of all folders.
    if not is_asked(config):
        return
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        on_a_card = item.path.parent == GPU
        if on_a_card:
            from te_install import cpu_torch

            for module in (item.module, sys.modules.get("benchmarks.te_golden")):  # type: ignore[attr-defined]
                if module is not None:
                    module.torch = cpu_torch  # type: ignore[attr-defined]
        item.add_marker("te")
        is_kept = (
            MISSING
            or VERSION == te_wheels.NEWEST
            or on_a_card
            or item.get_closest_marker("every_version")
        )
        (kept if is_kept else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


@pytest.fixture
def fp8_gpu() -> torch.device:
    """Where tests/gpu's tests run here."""
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Recipes set torch's matmul precision for the whole process."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each SwiGLU that TE applied: that of a fused MLP."""
    extension = importlib.import_module("transformer_engine_torch")
    found: list[int] = []
    real = extension.swiglu
    monkeypatch.setattr(extension, "swiglu", lambda *args: (found.append(1), real(*args))[1])
    return found
