"""No file of the harness uses what runs code from data. Row 24 of the fault matrix.

`model.target` imports the user's code on purpose (harness/models/__init__.py); nothing else that is read is executed.
"""

from __future__ import annotations

import ast

import pytest

from tests.support.runs import ROOT

pytestmark = pytest.mark.faults(24)

FORBIDDEN = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    ("torch", "load"), ("torch", "package"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("yaml", "load_all"),
    ("np", "load"), ("numpy", "load"), ("os", "system"), ("os", "popen"), ("yaml", "safe_load"), ("yaml", "load"),
    ("json", "load"), ("json", "loads"),
}  # fmt: skip
# What reads text of its own process, of a launcher's sibling, of a bounded line or of a header that safetensors read,
# and where YAML has its home; arrays without pickles (NumPy's default), and the state that transformers' Trainer keeps,
# as weights only.
ALLOWED = {
    ("harness/core/schema.py", "yaml.load"), ("harness/core/files.py", "json.loads"),
    ("harness/tracking/journal.py", "json.loads"), ("harness/engines/process_group.py", "json.loads"),
    ("harness/precision/shape_probe.py", "json.loads"),
    ("harness/engines/hang.py", "json.loads"), ("harness/tools/agreement.py", "json.loads"),
    ("harness/tools/preflight.py", "json.loads"), ("harness/replay/proof.py", "json.loads"),
    ("harness/engines/initial_weights.py", "json.loads"), ("harness/models/stored.py", "json.loads"),
    ("harness/run_folder.py", "json.loads"), ("harness/checkpoint/snapshots.py", "json.loads"),
    ("harness/data/prepare.py", "json.loads"), ("harness/data/prepare.py", "np.load"),
    ("harness/data/detect.py", "json.loads"), ("harness/precision/prepared.py", "json.loads"),
    ("harness/integrations/transformers.py", "torch.load"),
}  # fmt: skip


def dangers(source: str, file: str) -> list[str]:
    """Uses of what runs, or may run, code from data."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found += [
                f"{file}:{node.lineno}: import {name}"
                for name in names
                if name.split(".")[0] in FORBIDDEN
            ]
        elif isinstance(node, ast.ImportFrom) and node.module:
            pairs = [(node.module, alias.name) for alias in node.names]
            found += [
                f"{file}:{node.lineno}: from {module} import {name}"
                for module, name in pairs
                if module.split(".")[0] in FORBIDDEN or (module, name) in ATTRIBUTES
            ]
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS
        ):
            found.append(f"{file}:{node.lineno}: {node.func.id}()")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            named = (node.value.id, node.attr)
            if named in ATTRIBUTES and (file, ".".join(named)) not in ALLOWED:
                found.append(f"{file}:{node.lineno}: {'.'.join(named)}")
    return found


def test_nothing_in_the_harness_runs_what_it_reads() -> None:
    sample = (
        "import pickle",
        "from torch import load",
        "torch.load(x)",
        "yaml.unsafe_load(x)",
        "eval(x)",
    )
    assert len(dangers("\n".join(sample), "x.py")) == len(sample), "each of them is seen"
    files = sorted((ROOT / "harness").rglob("*.py"))
    found = [
        line
        for path in files
        for line in dangers(path.read_text(), path.relative_to(ROOT).as_posix())
    ]
    assert found == []
