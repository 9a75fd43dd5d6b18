"""A CUDA device on paper: build and load what makes PyTorch's autograd believe in one. Torch-free.

It must be loaded before torch, which asks once whether there is CUDA and keeps the answer. From then on the process
has one CUDA device that computes nothing, and no other: a GPU that is there is neither used nor touched.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import runpy
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from harness.core.errors import MachineError, MisuseError, Problem
from harness.core.files import cached

_SOURCE = Path(__file__).with_name("paper_device.cpp")
_FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-w")
# Some compilers link the C++ library in: it stays inside, or torch takes its symbols for those of its own.
_EXPORTS = "{ global: paper_use_guard; local: *; };"
_BUILD_SECONDS = 120
_WHERE = "harness estimate"


@cache
def load() -> None:
    """Put the device on paper into this process; a second call does nothing.

    Raises MisuseError if torch is loaded already; MachineError without torch or a C++ compiler, or if the build fails.
    """
    if "torch" in sys.modules:
        what, why = "torch is loaded already", "it has asked for CUDA once, and keeps the answer"
        raise MisuseError(
            Problem(
                what, _WHERE, why, "call harness.estimate.device.load() first, in its own process"
            )
        )
    library = ctypes.CDLL(str(_build()))
    import torch  # noqa: F401  # its own guard registers itself while it is loaded

    library.paper_use_guard()


def _build() -> Path:
    """The shared library, built into the user's cache unless it is there for this torch, compiler and source."""
    root = _torch_folder()
    compiler = (
        shutil.which(os.environ.get("CXX", "g++")) or shutil.which("g++") or shutil.which("clang++")
    )
    if compiler is None:
        what, why = (
            "there is no C++ compiler",
            "a CUDA device on paper is built against the installed torch, once",
        )
        raise MachineError(Problem(what, _WHERE, why, "install g++ (apt install g++)"))
    version = runpy.run_path(str(root / "version.py"))
    facts = (_FLAGS, _EXPORTS, compiler, str(root), version["__version__"], version["git_version"])
    key = hashlib.sha256(_SOURCE.read_bytes() + repr(facts).encode()).hexdigest()

    def build(made: Path) -> None:
        exports = made.with_name("exports")
        exports.write_text(_EXPORTS, encoding="ascii")
        link = [
            f"-L{root}/lib",
            f"-Wl,-rpath,{root}/lib",
            f"-Wl,--version-script={exports}",
            "-lc10",
            "-ltorch_cpu",
        ]
        command = [compiler, *_FLAGS, f"-I{root}/include", str(_SOURCE), "-o", str(made), *link]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            said = (
                (getattr(error, "stderr", b"") or str(error).encode())
                .decode(errors="replace")
                .strip()
            )
            what = "the CUDA device on paper did not build"
            fix = f"g++ with C++20 is needed (11 or newer); torch is {version['__version__']}"
            raise MachineError(Problem(what, _WHERE, said[-400:], fix)) from error

    return cached(f"paper_device-{key[:16]}.so", build)


def _torch_folder() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise MachineError(Problem("PyTorch is not installed", _WHERE, fix="make setup"))
    return Path(spec.origin).parent
