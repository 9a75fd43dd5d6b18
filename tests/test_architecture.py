"""The architecture is a test: import layers, no cycles, vendor homes, torch-free files.

The rooms are described in docs/architecture.md, which leaves the details of who may import whom to the tables below.
"""

from __future__ import annotations

import ast
import builtins
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from harness.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent

LEAVES = (
    "engines",
    "data",
    "models",
    "optim",
    "monitors",
    "tracking",
    "profiling",
    "checkpoint",
)
CORES = ("core", "capability", "precision", *LEAVES)
LOOP = ("stop", "run_folder", "report", "telemetry", "guard", "run")
# room -> rooms it may import from, itself always included
LAYERS: dict[str, tuple[str, ...]] = {
    "core": (),
    "capability": ("core",),
    "precision": ("core", "capability", "monitors"),
    **dict.fromkeys(LEAVES, ("core",)),
    "stop": ("core",),
    "run_folder": ("core",),
    "report": ("core", "checkpoint", "tracking", "profiling"),
    "telemetry": (
        "core",
        "capability",
        "monitors",
        "precision",
        "run_folder",
        "tracking",
        "profiling",
        "report",
    ),
    "guard": ("core", "checkpoint", "engines", "monitors", "precision", "telemetry"),
    "run": ("core", "checkpoint", "monitors", "precision", "stop", "telemetry", "guard"),
    "replay": ("core", "checkpoint", "monitors", "tracking", *LOOP),
    "rehearse": ("core", "checkpoint", "monitors", "precision", "tracking", *LOOP, "replay"),
    "build": (*CORES, *LOOP, "replay"),
    "estimate": (*CORES, *LOOP, "build"),
    "measure": (*CORES, *LOOP, "build", "estimate"),
    "drill": ("core", "capability", "checkpoint", "tracking", "run_folder", "report"),
    "tools": (*CORES, *LOOP, "build", "estimate", "replay", "rehearse", "drill", "measure"),
    "integrations": ("core", "precision", "guard", "telemetry"),
    "cli": ("core", "stop", "report", "tools"),
    "__init__": ("core", "guard", "precision", "telemetry"),
}
# vendor -> files that may import it
HOMES: dict[str, tuple[str, ...]] = {
    "deepspeed": ("harness/engines/deepspeed*.py",),
    "mlflow": ("harness/tracking/*.py",),
    # Two things of one library: FP8 layers, and optimizers with quantised moments.
    "torchao": ("harness/precision/backends/torchao*.py", "harness/optim/optimizers.py"),
    "transformer_engine": ("harness/precision/backends/te*.py",),
    "triton": ("harness/precision/backends/native_triton*.py",),
    "pyarrow": ("harness/data/*.py", "harness/tracking/*.py"),
    "datasets": ("harness/data/*.py",),
    "huggingface_hub": ("harness/data/hub.py",),
    "tokenizers": ("harness/data/*.py",),
    "sklearn": ("harness/data/digits.py",),
    "transformers": ("harness/models/huggingface*.py", "harness/integrations/transformers*.py"),
    "peft": ("harness/models/huggingface*.py",),
    "lightning": ("harness/integrations/lightning*.py",),
    "accelerate": ("harness/integrations/accelerate*.py",),
}
# torch's functions that make a tensor where torch.set_default_device says, unless they are told.
FACTORIES = {
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "ones",
    "rand", "randint", "randn", "randperm", "tensor", "zeros",
}  # fmt: skip
# What shows whether torch makes fakes now.
FAKES = "torch.empty(0)"
# Weights come on the default device, as those of torch's modules do; an estimate has a fake one.
DEFAULT_DEVICE = ("harness/models/vision.py", "harness/estimate/")
TORCH_FREE = (
    "harness",
    "harness.capability.cards",
    "harness.cli",
    "harness.core.config",
    "harness.core.errors",
    "harness.core.facts",
    "harness.core.protocols",
    "harness.core.files",
    "harness.core.schema",
    "harness.monitors.fallback",
    "harness.monitors.responder",
    "harness.precision.recipe",
    "harness.profiling.report",
    "harness.tracking.history",
    "harness.tracking.journal",
)


@dataclass(frozen=True)
class Import:
    """One imported name. lazy: not executed when the module is imported (function body or TYPE_CHECKING)."""

    file: str
    line: int
    target: str
    lazy: bool


def _imports(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return "import_module" in name or "import_extra" in name


def imports_of(path: Path, root: Path) -> tuple[Import, ...]:
    """Every import of a file, relative ones made absolute; `from a import b` counts as a.b."""
    return _imports_in(path.read_text(encoding="utf-8"), path.relative_to(root))


@cache
def _imports_in(text: str, relative: Path) -> tuple[Import, ...]:
    package = relative.parent.parts
    found: list[Import] = []

    def visit(node: ast.AST, lazy: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            targets: list[str] = []
            if isinstance(child, ast.Import):
                targets = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = list(package[: len(package) - child.level + 1]) if child.level else []
                base += child.module.split(".") if child.module else []
                targets = [".".join([*base, alias.name]) for alias in child.names]
            elif isinstance(child, ast.Call) and child.args and _imports(child):
                name = child.args[0]
                targets = (
                    [name.value]
                    if isinstance(name, ast.Constant) and isinstance(name.value, str)
                    else []
                )
            line: int = getattr(child, "lineno", 0)
            found.extend(Import(relative.as_posix(), line, target, lazy) for target in targets)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for part in child.body:
                    visit(ast.Module([part], []), True)
                for part in child.orelse:
                    visit(ast.Module([part], []), lazy)
            else:
                visit(child, inside)

    visit(ast.parse(text), False)
    return tuple(found)


def sources(root: Path) -> Iterator[Path]:
    return (
        path for path in sorted((root / "harness").rglob("*.py")) if "_shipped" not in path.parts
    )


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def layer_faults(root: Path, layers: Mapping[str, tuple[str, ...]] = LAYERS) -> list[str]:
    """Imports that go against the layers, and rooms that the table does not know."""
    rooms = {
        path.relative_to(root / "harness").parts[0].removesuffix(".py") for path in sources(root)
    }
    faults = [f"harness/{room}: not in the table of layers" for room in sorted(rooms - set(layers))]
    for path in sources(root):
        room = path.relative_to(root / "harness").parts[0].removesuffix(".py")
        for item in imports_of(path, root):
            if item.target.split(".")[0] != "harness" or item.target == "harness":
                continue
            target = room_of(item.target)
            target = target if target in rooms else "__init__"
            if target not in (room, *layers.get(room, ())):
                faults.append(f"{item.file}:{item.line}: {room} may not import {item.target}")
    return faults


def vendor_faults(root: Path, homes: Mapping[str, tuple[str, ...]] = HOMES) -> list[str]:
    """Imports of a vendor library outside its home, lazy ones included."""
    return [
        f"{item.file}:{item.line}: {item.target.split('.')[0]} is imported only in {', '.join(allowed)}"
        for path in sources(root)
        for item in imports_of(path, root)
        if (allowed := homes.get(item.target.split(".")[0])) is not None
        and not any(fnmatch(item.file, pattern) for pattern in allowed)
    ]


def default_device_faults(root: Path) -> list[str]:
    """Tensors that are made wherever torch.set_default_device says: a user's script may say "cuda"."""
    faults: list[str] = []
    for path in sources(root):
        file = path.relative_to(root).as_posix()
        if file.startswith(DEFAULT_DEVICE):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            name = node.func.attr
            named = {keyword.arg for keyword in node.keywords}
            if name not in FACTORIES or named & {"device", None}:
                continue
            if ast.unparse(node.func.value) == "torch" and ast.unparse(node) != FAKES:
                faults.append(f"{file}:{node.lineno}: {name} names no device")
    return faults


def cycles(root: Path) -> list[str]:
    """Import cycles between modules, counting only what runs when a module is imported."""
    modules: dict[str, Path] = {}
    for path in sources(root):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    edges: dict[str, list[str]] = {}
    for name, path in modules.items():
        targets = {
            item.target if item.target in modules else item.target.rpartition(".")[0]
            for item in imports_of(path, root)
            if not item.lazy
        }
        edges[name] = sorted((targets & modules.keys()) - {name})
    found: list[str] = []
    done: set[str] = set()

    def walk(name: str, trail: list[str]) -> None:
        if name in trail:
            found.append(" -> ".join([*trail[trail.index(name) :], name]))
        elif name not in done:
            for target in edges[name]:
                walk(target, [*trail, name])
            done.add(name)

    for name in edges:
        walk(name, [])
    return found


def torch_loaded_by(root: Path, *modules: str) -> str:
    """The first of `modules` that loads torch, imported in this order in a fresh interpreter; empty if none does.

    An import that fails raises.
    """
    code = (
        "import importlib, sys\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module(module)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(print(module))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise ImportError(done.stderr.strip()[-500:])
    return done.stdout.strip()


def test_layers() -> None:
    assert layer_faults(ROOT) == []


def test_vendors_stay_at_home() -> None:
    assert vendor_faults(ROOT) == []


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    assert default_device_faults(ROOT) == []


def test_no_import_cycles() -> None:
    assert cycles(ROOT) == []


def test_torch_free() -> None:
    assert (
        torch_loaded_by(ROOT, *TORCH_FREE, *(f"harness.{file}" for file, _ in COMMANDS.values()))
        == ""
    )


def test_the_functions_from_a_tensor_to_its_chart_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("## From a tensor to its chart\n")[1].split("\n## ")[0]
    assert [line[:2] for line in section.splitlines() if line[:1].isdigit()] == [
        f"{number}." for number in range(1, 8)
    ]
    files: dict[str, Path] = {}  # a file is named with its folder first, and then by its name alone
    missing: list[str] = []
    for path, name in re.findall(r"`([\w/]+\.py):([\w.]+)`", section):
        file = files.setdefault(Path(path).name, ROOT / "harness" / path)
        body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
        for part in name.split("."):
            found = [
                node
                for node in body
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part
            ]
            if not found:
                missing.append(f"{path}:{name}")
                break
            body = found[0].body
    assert missing == []
    assert len(files) == 11


def tree(root: Path, files: Mapping[str, str]) -> Path:
    """A synthetic source tree, to see the checks fail."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("harness/data/a.py", "from harness.optim import b"),
        ("harness/data/a.py", "from harness import optim"),
        ("harness/data/a.py", "from ..optim.b import thing"),
        ("harness/data/a.py", "def f():\n    import harness.optim.b"),
        ("harness/core/a.py", "from harness.optim.b import thing"),
        ("harness/run.py", "from harness.optim.b import thing"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path: Path, name: str, text: str) -> None:
    root = tree(tmp_path, {"harness/optim/b.py": "thing = 1", name: text})
    assert len(layer_faults(root)) == 1
    assert name in layer_faults(root)[0]


def test_allowed_imports_pass(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "harness/core/c.py": "thing = 1",
            "harness/optim/b.py": "from harness.core.c import thing\nfrom . import d",
            "harness/optim/d.py": "import torch",
            "harness/build.py": "from harness.optim.b import thing\nfrom harness.core import c",
        },
    )
    assert layer_faults(root) == []
    assert cycles(root) == []


def test_an_unknown_room_is_found(tmp_path: Path) -> None:
    assert layer_faults(tree(tmp_path, {"harness/attic/a.py": ""})) == [
        "harness/attic: not in the table of layers"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "import mlflow",
        "def f():\n    from mlflow.tracking import x",
        "import_module('mlflow')",
        "import_extra('mlflow', 'mlflow', 'here')",
    ],
)
def test_a_vendor_away_from_home_is_found(tmp_path: Path, text: str) -> None:
    root = tree(tmp_path, {"harness/tracking/m.py": text, "harness/tools/m.py": text})
    assert [fault.split(":")[0] for fault in vendor_faults(root)] == ["harness/tools/m.py"]


def test_a_tensor_on_the_default_device_is_found(tmp_path: Path) -> None:
    named = (
        'torch.zeros(1, device="cpu"), torch.ones(1, **how), torch.empty(0), torch.zeros_like(x)\n'
    )
    tree(
        tmp_path,
        {"harness/core/a.py": named, "harness/core/b.py": "\ntorch.randperm(3, generator=g)\n"},
    )
    assert default_device_faults(tmp_path) == ["harness/core/b.py:2: randperm names no device"]


def test_a_cycle_is_found_and_a_lazy_one_is_none(tmp_path: Path) -> None:
    lazy = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from harness.core import a\n"
    root = tree(
        tmp_path, {"harness/core/a.py": "from harness.core import b", "harness/core/b.py": lazy}
    )
    assert cycles(root) == []
    tree(tmp_path, {"harness/core/b.py": "from harness.core.a import x"})
    assert cycles(root) == ["harness.core.a -> harness.core.b -> harness.core.a"]


def test_an_indirect_torch_import_is_found(tmp_path: Path) -> None:
    files = {
        "harness/__init__.py": "",
        "harness/a.py": "import harness.b",
        "harness/b.py": "import torch",
    }
    root = tree(tmp_path, {**files, "torch.py": "", "harness/c.py": "import json"})
    assert torch_loaded_by(root, "harness.c", "harness.a", "harness.b") == "harness.a"
    assert torch_loaded_by(root, "harness.c") == ""
    with pytest.raises(ImportError, match="no_such_module"):
        torch_loaded_by(root, "harness.no_such_module")


# Of other libraries: docstrings and comments name them, and no code does.
FOREIGN = (
    *(
        "_extra_state",
        "clip_grad_norm_",
        "clip_gradients",
        "custom_op",
        "is_bf16_supported",
        "is_first_microbatch",
    ),
    *(
        "load_state",
        "resume_from_checkpoint",
        "save_state",
        "training_step",
        "Fabric",
        "WORLD",
        "zstandard",
    ),
)


def words_of(path: Path) -> tuple[set[str], list[tuple[int, str]]]:
    """The words of a file's code, and its docstrings and comments, each with its line."""
    source = path.read_text(encoding="utf-8")
    told = [
        (node.lineno, node.value.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    docstrings = {line for line, _ in told}
    words = set(path.with_suffix("").parts)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            told.append((token.start[0], token.string))
        elif token.type == tokenize.NAME:
            words.add(token.string)
        elif token.type != tokenize.STRING or token.start[0] not in docstrings:
            words |= set(re.findall(r"\w+", token.string))
    return words, told


def dead_references(root: Path) -> list[str]:
    """Names `in backticks` in docstrings and comments that no code of the package has any more."""
    words = {*dir(builtins), *FOREIGN}
    told: list[tuple[str, int, str]] = []
    for path in sources(root):
        known, texts = words_of(path)
        words |= known
        told += [(path.relative_to(root).as_posix(), line, text) for line, text in texts]
    for table in (root / "harness").rglob("*.toml"):  # codes of events
        words |= set(re.findall(r"\w+", table.read_text(encoding="utf-8")))
    faults: list[str] = []
    for file, line, text in told:
        for found in re.finditer(r"`([A-Za-z_][\w.]*)(?:\(\))?`", text):
            if found[1].endswith((".bin", ".jsonl")):  # the name of a user's file
                continue
            names = {name for name in found[1].split(".") if not name.isdecimal()}
            at = line + text.count("\n", 0, found.start())
            faults += [
                f"{file}:{at}: {found[0]}: no code has {name}" for name in sorted(names - words)
            ]
    return faults


def test_what_docstrings_and_comments_name_is_there() -> None:
    assert dead_references(ROOT) == []


def test_a_name_that_is_gone_is_found(tmp_path: Path) -> None:
    room = tmp_path / "harness" / "core"
    room.mkdir(parents=True)
    lines = [
        "def kept() -> None:",
        '    """As `kept`, `len`.',
        "",
        '    Not `a.gone()`."""',
        "    # `lost`",
    ]
    (room / "a.py").write_text("\n".join(lines) + "\n")
    faults = dead_references(tmp_path)
    assert faults == [
        "harness/core/a.py:4: `a.gone()`: no code has gone",
        "harness/core/a.py:5: `lost`: no code has lost",
    ]
