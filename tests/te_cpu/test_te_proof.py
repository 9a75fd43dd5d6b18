"""The proof's rows about Transformer Engine, with its own Python: what a card's first run of them goes through."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from te_install import cpu_torch

from benchmarks import te_golden
from benchmarks.proof import checks, profiles, training
from benchmarks.proof.registry import Task


def task(folder: Path) -> Task:
    return Task(rehearsal=True, deadline=time.monotonic(), folder=folder, keep=folder)


def test_steps_are_compared_with_bf16(tmp_path: Path) -> None:
    found = training.te(task(tmp_path)).figures["contenders"]
    assert (found["fp8"]["rung"], found["16 bit"]["rung"]) == (
        "transformer_engine:fp8",
        "autocast:bf16",
    )
    assert found["fp8"]["ratio"]["median"] > 0
    assert found["fp8"]["loss"] == pytest.approx(found["16 bit"]["loss"], rel=0.05)


def test_fused_steps_are_fused_and_apart_where_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "fused").mkdir()
    (tmp_path / "apart").mkdir()
    fused = training.te_fused(task(tmp_path / "fused"))
    assert not fused.failed
    assert fused.figures["fused"] == 2 * 3, "two norms and the MLP of each of two layers"
    assert training.te(task(tmp_path / "apart")).figures["fused"] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_steps_compile_what_lies_between_the_layers(tmp_path: Path) -> None:
    found = training.te_compiled(task(tmp_path))
    assert not found.failed
    assert found.figures["compiled"]
    assert found.figures["contenders"]["fp8"]["rung"] == "transformer_engine:fp8"
    assert not found.figures["contenders"]["fp8"]["fell_back_to_eager"]


def test_the_record_is_kept_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_golden, "torch", cpu_torch)
    monkeypatch.setattr(
        cpu_torch.cuda, "get_device_name", lambda: "a card on the CPU", raising=False
    )
    answer = checks.golden(task(tmp_path))
    assert not answer.failed
    kept = json.loads((tmp_path / "te_golden.json").read_text())
    assert len(kept["sequences"]) == len(te_golden.CASES)
    assert te_golden.disagreements(kept) == []
    kept["casts"][0]["runs"][1][1] ^= 1
    assert te_golden.disagreements(kept) != []


def test_a_fused_step_is_profiled(tmp_path: Path) -> None:
    setup = profiles.SETUPS["te fused"]
    found = profiles.profiled(task(tmp_path), "te fused", training.TOY, setup)
    assert found["rung"] == "transformer_engine:fp8"
    assert found["fused"] == 2 * 3
    assert sum(row["ms"] for row in found["kinds"].values()) == pytest.approx(found["profiled_ms"])
