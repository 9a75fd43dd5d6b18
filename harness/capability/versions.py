"""Pairs of versions that are known not to work together, as data. Torch-free.

A pair that a version's own check refuses at once is not here. These import, and fail or compute wrongly later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from harness.core.findings import Finding


@dataclass(frozen=True, slots=True)
class Setup:
    """What a pair is judged by.

    versions: of installed distributions, by name; what is missing is not installed.
    torch_cuda: CUDA version that torch was built for; None for a CPU build.
    compiles: whether the run compiles its blocks (engine.compile).
    fp8: whether the run's rung is FP8.
    """

    versions: Mapping[str, str]
    torch_cuda: str | None = None
    compiles: bool = False
    fp8: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """One known-bad pair. packages: its distributions. applies: whether a setup has it."""

    packages: tuple[str, ...]
    applies: Callable[[Setup], bool]
    what: str
    why: str
    fix: str


def _compiled_float8_nightly(setup: Setup) -> bool:
    # Nightlies carry their day: 2.14.0.dev20260620+cu130.
    day = re.search(r"\.dev(\d{8})", setup.versions["torch"])
    return bool(day) and int(day[1]) >= 20260614 and setup.compiles and setup.fp8


def _te_parts_differ(setup: Setup) -> bool:
    return _public(setup.versions["transformer-engine"]) != _public(
        setup.versions["transformer-engine-torch"]
    )


def _te_core_for_other_cuda(setup: Setup) -> bool:
    return (setup.torch_cuda or "").startswith("13.")


def _streaming_with_new_numpy(setup: Setup) -> bool:
    old = _release(setup.versions["mosaicml-streaming"]) <= (0, 13)
    return old and _release(setup.versions["numpy"]) >= (2, 2)


def _streaming_with_new_transformers(setup: Setup) -> bool:
    old = _release(setup.versions["mosaicml-streaming"]) <= (0, 13)
    return old and _release(setup.versions["transformers"]) >= (5,)


def _transformers_before_5(setup: Setup) -> bool:
    return _release(setup.versions["transformers"]) < (5,)


_CONVERT = "convert its shards once and give them as files (docs/start/your-data.md), in an environment of their own"
PAIRS: tuple[Pair, ...] = (
    Pair(
        ("torch",),
        _compiled_float8_nightly,
        "this nightly of torch computes NaN in compiled FP8 layers",
        "reported for compiled float8 training on nightlies from 2026-06-14 (pytorch/ao#4652)",
        "take a release of torch, or engine.compile=none",
    ),
    Pair(
        ("transformer-engine", "transformer-engine-torch"),
        _te_parts_differ,
        "Transformer Engine's parts are of different versions",
        "its PyTorch extension is built against one version of the core library, and refuses another when imported",
        "install both in one command, of one version: make setup",
    ),
    Pair(
        ("torch", "transformer-engine-cu12"),
        _te_core_for_other_cuda,
        "Transformer Engine's core library is for CUDA 12, torch for CUDA 13",
        "the two load different cuBLAS and CUDA runtime libraries",
        "pip uninstall transformer-engine-cu12, then make setup",
    ),
    Pair(
        ("mosaicml-streaming", "numpy"),
        _streaming_with_new_numpy,
        "mosaicml-streaming does not take this NumPy",
        "up to version 0.13 it asks for NumPy before 2.2",
        _CONVERT,
    ),
    Pair(
        ("mosaicml-streaming", "transformers"),
        _streaming_with_new_transformers,
        "mosaicml-streaming does not take these transformers",
        "up to version 0.13 it asks for transformers before 5",
        _CONVERT,
    ),
    Pair(
        ("transformers",),
        _transformers_before_5,
        "transformers is older than 5",
        "models of hf:FOLDER are built by names that came with version 5; 5.23.0 is what is tested",
        "pip install -e '.[hf]'",
    ),
)


def installed_versions() -> dict[str, str]:
    """Versions of the distributions that any pair names."""
    found: dict[str, str] = {}
    for pair in PAIRS:
        for name in pair.packages:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
    return found


def bad_pairs(setup: Setup) -> list[Finding]:
    """A warning for each known-bad pair that `setup` has."""
    found: list[Finding] = []
    for pair in PAIRS:
        if not all(name in setup.versions for name in pair.packages) or not pair.applies(setup):
            continue
        where = ", ".join(f"{name} {setup.versions[name]}" for name in pair.packages)
        found.append(Finding("versions.pair", "warning", where, pair.what, pair.why, pair.fix))
    return found


def _public(text: str) -> str:
    """A version without its local tag, such as +cu130."""
    return text.partition("+")[0]


def _release(text: str) -> tuple[int, ...]:
    """(2, 4) of "2.4.6": enough to compare with a minimum."""
    parts = _public(text).split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())
