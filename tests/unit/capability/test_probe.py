"""The probe on this machine, and its parsers on recorded text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pytest

from harness.capability.probe import cpu_bf16_isa, memory_limit, parse_nvidia_smi, probe


def test_this_machine(tmp_path: Path) -> None:
    facts = probe(tmp_path)
    assert json.loads(json.dumps(asdict(facts)))["torch_version"] == facts.torch_version
    assert facts.torch_version is not None
    assert facts.torch_version.startswith(version("torch").split("+")[0])
    assert facts.cpu_cores >= 1
    assert facts.memory_bytes > 2**28
    assert facts.disk_free_bytes > 0
    assert facts.libraries["mlflow"].ok
    assert facts.libraries["mlflow"].version == version("mlflow")


@pytest.mark.parametrize("name", ["g++", "c++", "clang++", "own"])
def test_every_compiler_that_a_build_takes_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if name == "own":
        monkeypatch.setenv("CXX", str(tmp_path / name))
    assert not probe(tmp_path).has_compiler
    (tmp_path / name).touch(mode=0o755)
    assert probe(tmp_path).has_compiler


def test_libraries_are_found_without_importing_them() -> None:
    code = (
        "import sys; from harness.capability.probe import library_facts; facts = library_facts(); "
        "print(facts['deepspeed'].ok, {'deepspeed', 'mlflow', 'torch', 'torchao'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True set()"


def fake_te(root: Path, *, extension: bool, release: str) -> str:
    """Lay out an installed Transformer Engine (its metadata and folders) and ask for its facts in a new process."""
    (root / "transformer_engine").mkdir()
    (root / "transformer_engine/__init__.py").write_text("raise SystemExit('imported')")
    dist = root / f"transformer_engine-{release}.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {release}\n"
    )
    if extension:
        (root / "transformer_engine_torch.py").write_text("")
    code = "from harness.capability.probe import library_facts; print(library_facts()['transformer_engine'])"
    path = os.pathsep.join([str(root), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return done.stdout


@pytest.mark.parametrize(
    ("extension", "release", "expected"),
    [
        (True, "2.20.2", "ok=True"),
        (False, "2.20.2", "its PyTorch extension (transformer_engine_torch) is not installed"),
        (True, "1.13.0", "older than 2.9"),
    ],
)
def test_transformer_engine_needs_its_extension(
    tmp_path: Path, extension: bool, release: str, expected: str
) -> None:
    assert expected in fake_te(tmp_path, extension=extension, release=release)


def test_bf16_instructions() -> None:
    assert cpu_bf16_isa("processor : 0\nflags\t\t: fpu avx512_bf16 amx_bf16 sse\n") == (
        "amx_bf16",
        "avx512_bf16",
    )
    assert cpu_bf16_isa("Features\t: fp asimd bf16\n") == ("bf16",)
    assert cpu_bf16_isa("flags : fpu sse2\n") == ()
    assert cpu_bf16_isa("") == ()


def test_memory_is_the_containers_where_that_is_less() -> None:
    meminfo = "MemTotal:       16384 kB\nMemFree: 1 kB\n"
    assert memory_limit(meminfo, "max\n") == 16384 * 1024
    assert memory_limit(meminfo, "1048576\n") == 1048576
    assert memory_limit(meminfo, "") == 16384 * 1024


def test_nvidia_smi_output() -> None:
    smi = parse_nvidia_smi("NVIDIA H100 80GB HBM3, 570.124.06\nNVIDIA H100 80GB HBM3, 570.124.06\n")
    assert smi.gpus == ("NVIDIA H100 80GB HBM3",) * 2
    assert smi.driver == "570.124.06"
    assert parse_nvidia_smi("No devices were found\n").gpus == ()
