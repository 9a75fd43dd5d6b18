"""A state that ranks share, and saves of it by ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.checkpoint.meeting import Meeting, Writers
from harness.checkpoint.store import Store
from harness.core.protocols import Tensors
from harness.core.shards import Rows, ShardedRows

SHARDED = {"model": ("embed", "bias", "norm", "half"), "optimizer": ("moment",)}
META: dict[str, Any] = {"step": 3, "parts": {"model": {}, "optimizer": {}, "fp8": {}}}
PATIENCE = 60.0


def whole_state(seed: int = 0) -> Tensors:
    """Sharded tensors whose rows no number of ranks divides, and whole ones; `bias` has fewer rows than some worlds."""
    random = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "embed": torch.randn(11, 4, generator=random),
            "bias": torch.randn(2, generator=random),
            "norm": torch.randn(7, 1, 3, generator=random).bfloat16(),
            "half": torch.randn(5, 3, generator=random).to(torch.float8_e4m3fn),
            "buffer": torch.arange(3),
        },
        "optimizer": {
            "step": torch.tensor(7.0),
            "moment": torch.randn(11, 4, generator=random).double(),
        },
        "fp8": {"scale": torch.rand(6, generator=random)},
        "none": {},
    }


def held_by(state: Tensors, rank: int, ranks: int) -> tuple[Tensors, ShardedRows]:
    """What a rank holds of `state`, and which rows of it."""
    tensors: Tensors = {}
    rows: dict[str, dict[str, Rows]] = {}
    for part, named in state.items():
        tensors[part] = dict(named)
        for name in SHARDED.get(part, ()):
            each = Rows.of_rank(tuple(named[name].shape), rank, ranks)
            rows.setdefault(part, {})[name] = each
            tensors[part][name] = named[name][each.begin : each.end]
    return tensors, rows


def in_threads(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` gave on each of `ranks` threads, or the exception that it raised there."""
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a rank waits for ever"
    return results


def writers(ranks: int, seconds: float = PATIENCE / 3, start: str = "start") -> list[Writers]:
    return [Writers(rank, ranks, start, seconds) for rank in range(ranks)]


def stores(root: Path, ranks: int) -> list[Store]:
    return [Store(root, {"torch": "2"}, readonly=rank > 0) for rank in range(ranks)]


def save(
    root: Path,
    ranks: int,
    step: int = 3,
    state: Tensors | None = None,
    seconds: float = PATIENCE / 3,
    before: Callable[[int, Meeting], None] = lambda rank, meeting: None,
) -> list[Any]:
    """The result of a save on each rank. before: called on each rank before its part; may raise, and change things."""
    state = whole_state(step) if state is None else state
    everyone, disks = writers(ranks, seconds), stores(root, ranks)

    def work(rank: int) -> Any:
        meeting = everyone[rank].next_try()
        before(rank, meeting)
        tensors, rows = held_by(state, rank, ranks)
        return disks[rank].save_piece(
            step, tensors, rows, meeting, {**META, "step": step}, {"val_loss": 2.0}
        )

    return in_threads(ranks, work)


def bits(tensor: Tensor) -> list[int]:
    return tensor.reshape(-1).contiguous().view(torch.uint8).tolist() if tensor.numel() else []


def assert_same(found: Tensors, expected: Tensors) -> None:
    expected = {part: named for part, named in expected.items() if named}
    assert found.keys() == expected.keys()
    for part, named in expected.items():
        assert found[part].keys() == named.keys()
        for name, tensor in named.items():
            assert found[part][name].dtype == tensor.dtype, name
            assert found[part][name].shape == tensor.shape, name
            assert bits(found[part][name]) == bits(tensor), name
