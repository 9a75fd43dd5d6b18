"""Which optional libraries are installed, found without importing them (an import may take seconds, or crash)."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple


class LibraryFacts(NamedTuple):
    """version: of the installed distribution. ok: it can be imported, by all that is visible. reason: why not."""

    version: str | None
    ok: bool
    reason: str


# module -> distribution
_LIBRARIES = {
    "transformer_engine": "transformer-engine",
    "torchao": "torchao",
    "deepspeed": "deepspeed",
    "mlflow": "mlflow",
}
# `te.autocast`, which this project builds on, came with this version.
_TE_MINIMUM = (2, 9)


def library_facts() -> dict[str, LibraryFacts]:
    """Facts on every optional library, by module name."""
    return {module: _library(module, distribution) for module, distribution in _LIBRARIES.items()}


def _library(module: str, distribution: str) -> LibraryFacts:
    found = _version(distribution)
    if find_spec(module) is None:
        reason = f"{distribution} {found} is installed, but holds no module {module}" if found else "not installed"
        return LibraryFacts(found, False, reason)
    if module == "transformer_engine":
        return _transformer_engine(found)
    return LibraryFacts(found, True, "installed")


def _transformer_engine(found: str | None) -> LibraryFacts:
    # The meta package and the core library install without the part that is built against torch.
    if find_spec("transformer_engine_torch") is None and _version("transformer-engine-torch") is None:
        return LibraryFacts(found, False, "its PyTorch extension (transformer_engine_torch) is not installed")
    if found is not None and _release(found) < _TE_MINIMUM:
        needed = ".".join(map(str, _TE_MINIMUM))
        return LibraryFacts(found, False, f"version {found} is older than {needed}, which brought te.autocast")
    return LibraryFacts(found, True, "installed")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    """(2, 20) of "2.20.2+abc": enough to compare with a minimum."""
    parts = text.split("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())
