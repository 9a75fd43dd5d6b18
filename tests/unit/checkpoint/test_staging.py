"""Copies in memory that is allocated once: any dtype and layout, the same bytes, no aliasing."""

from __future__ import annotations

import mmap
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness import build
from harness.checkpoint.staging import Staging
from harness.core.config import load_config
from harness.core.memory import free_memory
from harness.core.protocols import Tensors
from tests.support.copy_streams import Events

FP8 = torch.float8_e4m3fn


def odd_state(seed: int) -> Tensors:
    torch.manual_seed(seed)
    weight = torch.randn(7, 5)
    return {
        "model": {
            "weight": weight,
            "view": weight.t(),
            "tied": weight,
            "bf16": torch.randn(3).bfloat16(),
        },
        "empty": {},
        "optimizer": {"step": torch.tensor(float(seed)), "none": torch.zeros(0, 4)},
        "fp8": {
            "bytes": torch.randn(9).to(FP8),
            "flag": torch.tensor([True, False, True]),
            "long": torch.arange(3),
        },
    }


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(
        a[part].keys() == b[part].keys()
        and all(
            x.dtype == y.dtype and x.shape == y.shape and x.tolist() == y.tolist()
            for x, y in zip(a[part].values(), b[part].values(), strict=True)
        )
        for part in a
    )


def test_everything_is_copied_and_nothing_is_shared() -> None:
    staging, live = Staging(), odd_state(1)
    copies = staging.copy(live)
    assert same(live, copies)
    for named in live.values():
        for tensor in named.values():
            tensor.zero_()
    assert same(copies, odd_state(1))
    places = sorted(
        (t.data_ptr(), t.numel() * t.element_size())
        for named in copies.values()
        for t in named.values()
        if t.numel()
    )
    assert all(place % 64 == 0 for place, _ in places)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(places))


def test_the_memory_is_used_again_and_grows_when_it_must() -> None:
    staging = Staging()
    staging.reserve(1 << 20)
    first = staging.copy(odd_state(1))
    again = staging.copy(odd_state(2))
    assert first["model"]["weight"].data_ptr() == again["model"]["weight"].data_ptr()
    assert same(again, odd_state(2))
    larger = {"model": {"weight": torch.ones(1 << 20)}}
    assert same(staging.copy(larger), larger)
    assert same(staging.copy(odd_state(3)), odd_state(3))


def test_a_part_that_comes_or_goes_is_noticed() -> None:
    staging = Staging()
    assert staging.copy({"a": {}}) == {"a": {}}
    assert staging.copy({"b": {}}) == {"b": {}}
    assert staging.copy({}) == {}


def test_free_memory_is_that_of_the_machine_or_less() -> None:
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert mmap.PAGESIZE < free_memory() <= total


def test_the_block_is_in_host_memory_whatever_the_default_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under `torch.set_default_device("cuda")` torch refuses to pin: "only dense CPU tensors can be pinned"."""
    real, devices = torch.empty, list[Any]()

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        devices.append(options.get("device"))
        return real(*size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    staging, live = Staging(pinned=True), odd_state(1)
    assert same(staging.copy(live), live)
    assert devices == ["cpu", "cpu"], "the first block is empty, and the second takes the state"


@pytest.mark.parametrize(
    ("sharded", "ranks", "waits"), [(True, 8, True), (True, 2, False), (False, 8, False)]
)
def test_copies_of_all_ranks_that_share_a_state_count(
    monkeypatch: pytest.MonkeyPatch, sharded: bool, ranks: int, waits: bool
) -> None:
    """Of a model that every rank holds whole, rank 0 alone makes a copy."""
    model, events = torch.nn.Linear(8, 8), Events()
    monkeypatch.setattr(build, "ranks_here", lambda: ranks)
    monkeypatch.setattr(build, "_state_size", lambda *_: 64)
    monkeypatch.setattr(build, "free_memory", lambda: 4 * 64 * 4)
    engine: Any = SimpleNamespace(rank=0, sharded=sharded, device=torch.device("cpu"))
    telemetry: Any = events
    staging = build._staging(load_config("tiny"), engine, model, telemetry)
    assert (staging is None) is waits
    assert [code for _, code, _ in events.seen] == ["checkpoint.waits"] * waits
