"""The benchmark of loops with accelerate, Lightning Fabric and transformers: they train what plain PyTorch does."""

from __future__ import annotations

from pathlib import Path

import pytest
from loop_support import forget_accelerator
from torch import nn

from benchmarks.peers.agreement import disagreement
from benchmarks.peers.loops import LOOPS, PLAIN
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.turn import take_turn


@pytest.mark.parametrize("shape", ["tiny", "tiny_llama", "tiny_vit"])
def test_libraries_train_what_plain_pytorch_does(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda self: None)
    forget_accelerator()
    turns = {}
    for name in (PLAIN, "accelerate", "Lightning Fabric", "harness.Precision"):
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        turns[name] = take_turn(LOOPS[name], SHAPES[shape], 4, 1, folder)
    assert turns[PLAIN]["flops"] > 0
    for name, turn in turns.items():
        assert not disagreement(LOOPS[name].precision, turn, turns[PLAIN]), name
    assert turns["accelerate"]["losses"] == turns["Lightning Fabric"]["losses"]
