"""A fake CUDA device: builds and loads the small C++ library that makes PyTorch's autograd accept one. Torch-free.

Fake tensors can claim to be on CUDA without any GPU. Autograd cannot: it asks C++ hooks whether there is CUDA, and a
C++ guard for the device and its streams. `paper_device.cpp` has both. It is compiled once against the installed torch
and kept in the user's cache.

The library must be loaded before torch, which asks once whether there is CUDA and keeps the answer. From then on the
process has exactly one CUDA device, which computes nothing. A real GPU is neither used nor touched.
"""

from __future__ import annotations

import ctypes
import hashlib
import runpy
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from harness.core.errors import MachineError, MisuseError, Problem
from harness.core.files import cached
from harness.core.processes import find_compiler

_SOURCE = Path(__file__).with_name("paper_device.cpp")
_FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-w")
# Some compilers link the C++ standard library statically. Its symbols must stay hidden, or torch would use them.
_EXPORTS = "{ global: paper_use_guard; local: *; };"
# On a busy machine it has taken more than two minutes.
_BUILD_SECONDS = 1200
_WHERE = "harness estimate"


@cache
def load() -> None:
    """Put the fake device into this process. A second call does nothing.

    Raises MisuseError if torch is loaded already. Raises MachineError without torch or a C++ compiler, and if the build
    fails.
    """
    if "torch" in sys.modules:
        what = "torch is loaded already"
        why = "it has asked for CUDA once, and keeps the answer"
        fix = "call harness.estimate.device.load() first, in its own process"
        raise MisuseError(Problem(what, _WHERE, why, fix))
    library = ctypes.CDLL(str(_build()))
    import torch  # noqa: F401  # registers its own guard as it loads; ours then replaces it

    library.paper_use_guard()


def _build() -> Path:
    """The shared library, built into the user's cache unless it is there for this torch, compiler and source."""
    root = _torch_folder()
    compiler = _compiler()

    # Whatever changes the library is in its name: source, flags, compiler and torch.
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
            output = getattr(error, "stderr", b"") or str(error).encode()
            why = output.decode(errors="replace").strip()[-400:]
            what = "the fake CUDA device did not build"
            fix = f"g++ with C++20 is needed (11 or newer); torch is {version['__version__']}"
            if isinstance(error, subprocess.TimeoutExpired):
                fix = "the machine is too busy: run it again when less else runs"
            raise MachineError(Problem(what, _WHERE, why, fix)) from error

    return cached(f"paper_device-{key[:16]}.so", build)


def _compiler() -> str:
    """Path of a C++ compiler. Raises MachineError."""
    found = find_compiler()
    if found:
        return found
    what = "there is no C++ compiler"
    why = "a fake CUDA device is built against the installed torch, once"
    raise MachineError(Problem(what, _WHERE, why, "install g++ (apt install g++)"))


def _torch_folder() -> Path:
    """The folder of the installed torch, found without importing it. Raises MachineError."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise MachineError(Problem("PyTorch is not installed", _WHERE, fix="make setup"))
    return Path(spec.origin).parent
