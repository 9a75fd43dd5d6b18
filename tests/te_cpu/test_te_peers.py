"""The benchmark's loops with Transformer Engine train what plain PyTorch does, on TE's own Python."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from torch import nn

from benchmarks.peers.agreement import disagreement
from benchmarks.peers.loops import LOOPS, PLAIN
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.turn import take_turn


@pytest.mark.parametrize("shape", ["tiny", "tiny_vit"])
@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("Transformer Engine", "torch"),
        ("accelerate with TE", "accelerate"),
        ("Lightning Fabric with TE", "lightning"),
    ],
)
# accelerate and Fabric still call these.
@pytest.mark.filterwarnings("ignore:fp8_autocast is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Using deprecated internal API:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:CUDA is not available or torch_xla is imported")
@pytest.mark.filterwarnings("ignore:Support for FP8 in the linear layers with this plugin")
def test_loops_with_te_train_what_plain_pytorch_does(
    name: str, library: str, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: make test-extras installs it")
    monkeypatch.setattr(nn.Module, "compile", lambda self: None)
    turns = {}
    for each in (PLAIN, name):
        folder = tmp_path / each.replace(" ", "-")
        folder.mkdir()
        turns[each] = take_turn(LOOPS[each], SHAPES[shape], 4, 1, folder)
    assert turns[name]["losses"] != turns[PLAIN]["losses"], "FP8 rounds otherwise"
    assert not disagreement("fp8", turns[name], turns[PLAIN])
