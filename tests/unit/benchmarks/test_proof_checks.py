"""Rows of a proof that compare: what pytest found, and what was predicted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.proof import checks
from benchmarks.proof.registry import NotHere, Task
from benchmarks.proof.training import TOY
from harness.precision.backends import native_triton

CARD = {"name": "NVIDIA H100 80GB HBM3", "capability": [9, 0], "mig": False, "busy": ""}
MIXED = """
import warnings
import pytest

pytestmark = pytest.mark.gpu

def test_good(): pass
def test_bad(): assert 1 == 2, "one is not two"
def test_warns(): warnings.warn("of another version of torch", DeprecationWarning)
@pytest.mark.skip(reason="no such card")
def test_absent(): pass
@pytest.fixture
def broken(): raise ValueError("a fixture that breaks")
def test_broken(broken): pass
@pytest.mark.slow
def test_whole_run(): assert False, "takes minutes"
"""


def task(folder: Path, seconds: float = 600.0, **earlier: Any) -> Task:
    return Task(
        rehearsal=False,
        deadline=time.monotonic() + seconds,
        folder=folder,
        keep=folder,
        earlier=earlier,
    )


@pytest.fixture
def gpu_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a tests/gpu of its own, where warnings are errors as in ours."""
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\nmarkers = ["gpu: x", "slow: x"]\n'
        'filterwarnings = ["error"]\naddopts = ["--strict-markers"]\n'
    )
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    return folder / "test_some_gpu.py"


def test_tests_are_counted_and_failures_named(gpu_tests: Path, tmp_path: Path) -> None:
    gpu_tests.write_text(MIXED)
    answer = checks.tests(task(tmp_path))
    assert answer.figures["counts"] == {"passed": 2, "failed": 2, "skipped": 1}
    assert answer.figures["skipped_for"] == ["no such card"]
    why = {each["test"].rpartition("::")[2]: each["why"] for each in answer.figures["failures"]}
    assert "one is not two" in why["test_bad"]
    assert "a fixture that breaks" in why["test_broken"]
    assert "test_bad" in answer.failed
    assert "test_broken" in answer.failed
    assert "test_good" not in answer.failed


def test_tests_that_all_pass_pass(gpu_tests: Path, tmp_path: Path) -> None:
    gpu_tests.write_text("import pytest\npytestmark = pytest.mark.gpu\ndef test_good(): pass\n")
    answer = checks.tests(task(tmp_path))
    assert not answer.failed
    assert answer.figures["counts"] == {"passed": 1, "failed": 0, "skipped": 0}


def test_the_row_of_fsdp_asks_for_whole_runs_beside_one_process(
    gpu_tests: Path, tmp_path: Path
) -> None:
    """They are slow, so no other row asks for them."""
    gpu_tests.write_text(MIXED)
    gpu_tests.with_name("test_fsdp_gpu.py").write_text(
        "import pytest\npytestmark = [pytest.mark.gpu, pytest.mark.slow]\n"
        '@pytest.mark.parametrize("other", ["single", "ddp"])\n'
        "def test_bits_of(other): assert other == 'single'\n"
    )
    answer = checks.fsdp(task(tmp_path))
    assert not answer.failed
    assert answer.figures["counts"] == {"passed": 1, "failed": 0, "skipped": 0}


def test_the_tests_of_fsdp_are_those_that_its_row_asks_for() -> None:
    text = (checks.ROOT / "tests" / "gpu" / "test_fsdp_gpu.py").read_text()
    assert '@pytest.mark.parametrize("other", ["single", "ddp"])' in text


@pytest.mark.slow
@pytest.mark.parametrize("text", ["import pytest\n", "import no_such_module\n"])
def test_no_tests_and_tests_that_cannot_be_collected(
    gpu_tests: Path, tmp_path: Path, text: str
) -> None:
    gpu_tests.write_text(text)
    if "no_such" in text:
        answer = checks.tests(task(tmp_path))
        assert "test_some_gpu" in answer.failed
    else:
        with pytest.raises(NotHere, match="found no tests"):
            checks.tests(task(tmp_path))


@pytest.mark.slow
def test_a_test_that_hangs_is_a_failure(gpu_tests: Path, tmp_path: Path) -> None:
    gpu_tests.write_text(
        "import pytest, time\npytestmark = pytest.mark.gpu\ndef test_long(): time.sleep(600)\n"
    )
    try:
        failed = checks.tests(task(tmp_path, seconds=12.0)).failed
    except RuntimeError as error:
        failed = str(error)
    assert "pytest was stopped before its end" in failed or "did not come back" in failed


def row(peak: float) -> dict[str, Any]:
    contender = {"peak": peak, "seconds": {"median": 0.1}, "ratio": {"median": 1.1}}
    kinds = {
        "fp8": contender | {"rung": "native:fp8"},
        "16 bit": contender | {"rung": "autocast:bf16"},
    }
    return {"backend": "native", "model": {**TOY.args, "context": TOY.context}, "contenders": kinds}


@pytest.mark.nightly
def test_memory_is_held_against_the_estimate(tmp_path: Path) -> None:
    far = checks.estimated(task(tmp_path, machine={"card": CARD}, native=row(1.0)))
    assert "native:fp8" in far.failed
    assert "autocast:bf16" in far.failed
    predicted = {
        kind: far.figures["rows"]["native"][kind]["predicted_gib"] for kind in ("fp8", "16 bit")
    }
    near = row(1.0)
    for kind, gib in predicted.items():
        near["contenders"][kind] = near["contenders"][kind] | {"peak": 1.05 * gib * 2**30}
    measured: dict[str, Any] = {
        "gemm": {"flops": {"bf16": {"median": 7e14}, "fp8": {"median": 1.3e15}}},
        "bandwidth": {"rate": {"copy": {"median": 2.9e12}}},
    }
    answer = checks.estimated(task(tmp_path, machine={"card": CARD}, native=near, **measured))
    assert not answer.failed
    found = answer.figures["rows"]["native"]
    assert found["calibrated"] is True, "with the roofline of this very proof"
    assert found["fp8"]["gib_ratio"] == pytest.approx(1.05)
    assert found["ratio"]["predicted"] > 0


def test_cards_and_rows_that_the_estimate_has_not(tmp_path: Path) -> None:
    with pytest.raises(NotHere, match="no row before"):
        checks.estimated(task(tmp_path, machine={"card": CARD}))
    with pytest.raises(NotHere, match="knows no Some Other Card"):
        checks.estimated(
            task(tmp_path, machine={"card": {**CARD, "name": "Some Other Card"}}, native=row(1.0))
        )
    with pytest.raises(NotHere, match="harness estimate ended with"):
        checks.predict(["--card", "no such card"], 600)


def test_every_kernel_of_native_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one behind statistics had compiled on no card for days."""
    for name in ("check", "check_turn", "check_stats"):
        monkeypatch.setattr(native_triton, name, lambda _, name=name: [f"{name} differs"])
    monkeypatch.setattr(Task, "device", torch.device("cpu"))
    failed = checks.kernels(task(tmp_path)).failed
    assert failed == "check differs; check_turn differs; check_stats differs"


def test_a_version_without_the_fused_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(NotHere, match="no fused kernel"):
        checks.kernels(task(tmp_path))
