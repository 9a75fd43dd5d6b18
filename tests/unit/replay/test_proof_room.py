"""The proof of a deterministic run copies its state only where all ranks of a machine have room for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.replay import proof


@pytest.mark.parametrize(("ranks", "fits"), [(1, True), (4, True), (8, False)])
def test_copies_of_all_ranks_of_a_machine_count(
    monkeypatch: pytest.MonkeyPatch, ranks: int, fits: bool
) -> None:
    tensors = {"model": {"weight": torch.zeros(16, device="cpu")}}
    run: Any = SimpleNamespace(state=SimpleNamespace(state_dict=lambda: (tensors, {})))
    monkeypatch.setattr(proof, "ranks_here", lambda: ranks)
    monkeypatch.setattr(proof, "free_memory", lambda: 2 * 4 * 64)
    text = proof._no_room(run)
    assert (text == "") is fits
    if not fits:
        assert "with those of the 8 ranks here" in text
