"""Training on a CPU that cannot fit its memory is refused before the first step; what fits is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from harness.build import Worker
from harness.tools import preflight

GIB = 2**30


def worker(device: str = "cpu", engine: str = "single", ranks: int = 1) -> Worker:
    made: Any = SimpleNamespace(
        device=torch.device(device), engine=engine, launch=SimpleNamespace(local_world_size=ranks)
    )
    return cast(Worker, made)


@pytest.mark.parametrize(
    ("memory", "ranks", "refused"), [(16, 1, False), (15, 1, True), (31, 2, True), (32, 2, False)]
)
def test_weights_gradients_and_moments_of_all_ranks_count(
    memory: int, ranks: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2^30 parameters: 4 GiB each of weights and gradients, 8 GiB of moments."""
    monkeypatch.setattr(preflight, "all_memory", lambda: memory * GIB)
    model = nn.Linear(2**15, 2**15, bias=False, device="meta")
    problem = preflight.lacks_memory(model, 8 * GIB, worker(ranks=ranks))
    assert (problem is not None) == refused
    if problem is not None:
        assert (
            f"needs at least {16 * ranks:.1f} GiB to be trained, and this machine has {memory:.1f}"
            in problem.what
        )
        assert "weights 4.0, gradients 4.0, optimizer 8.0 GiB" in problem.why


def test_frozen_weights_have_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "all_memory", lambda: 4 * GIB)
    model = nn.Linear(2**15, 2**15, bias=False, device="meta").requires_grad_(False)
    assert preflight.lacks_memory(model, 0, worker()) is None


@pytest.mark.parametrize("where", [worker("cuda"), worker(engine="deepspeed")])
def test_a_gpu_and_engines_that_shard_the_state_are_not_judged(
    where: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "all_memory", lambda: 1)
    assert preflight.lacks_memory(nn.Linear(8, 8), 8, where) is None


def test_memory_that_is_not_known_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "all_memory", lambda: 0)
    assert preflight.lacks_memory(nn.Linear(8, 8), 8, worker()) is None
