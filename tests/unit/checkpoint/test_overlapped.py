"""Snapshots that training does not wait for: exact, complete or refused, on streams that copy as late as they may."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from harness.checkpoint.overlapped import Copier, CopyError, OverlappedStaging, buffer_bytes
from harness.checkpoint.snapshots import Snapshots
from harness.core.protocols import Tensors
from tests.support.copy_streams import Events, LaterStreams

SLICE = 256
ROOM = [pytest.param(1 << 40, id="room"), pytest.param(3 * SLICE, id="no room")]


def odd_state(seed: int) -> Tensors:
    """Tensors of odd sizes, dtypes and layouts; several are larger than a slice."""
    torch.manual_seed(seed)
    shared = torch.randn(40, 11)
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
    return {
        "model": {
            "large": torch.randn(31, 77),
            "one row": torch.randn(1, 999),
            "deep": torch.randn(3, 5, 7, 11).transpose(1, 3),
            "transposed": torch.randn(45, 17).t(),
            "strided": torch.randn(60, 9)[::3, 1::2],
            "expanded": torch.randn(1, 5).expand(70, 5),
            "shared": shared,
            "part of shared": shared[7:, 3],
            **{str(dtype): torch.randn(131).to(dtype) for dtype in dtypes},
        },
        "empty": {},
        "optimizer": {
            "step": torch.tensor(float(seed)),
            "none": torch.zeros(0, 4),
            "none after": torch.zeros(4, 0),
            "byte": torch.randint(0, 255, (333,), dtype=torch.uint8),
            "flag": torch.randn(77) > 0,
            "long": torch.randint(0, 1 << 60, (3, 67)),
            "complex": torch.randn(19, dtype=torch.complex128),
            "last": torch.randn(1),
        },
    }


def bits(tensors: Tensors) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    for part, named in tensors.items():
        for name, tensor in named.items():
            raw = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
            found[f"{part}/{name}"] = (tensor.dtype, tensor.shape, raw)
    return found


def overwrite(tensors: Tensors) -> None:
    for named in tensors.values():
        for tensor in named.values():
            # One element at a time for what shares its memory.
            tensor[...] = torch.ones((), dtype=tensor.dtype) if 0 not in tensor.stride() else tensor
            if 0 in tensor.stride():
                tensor[0].fill_(1)


def made(streams: LaterStreams, healthy: int = 1) -> tuple[Snapshots, Events]:
    events = Events()
    copier = Copier(streams, events.event, SLICE)
    return Snapshots(healthy, copier=copier), events


@pytest.mark.parametrize("free", ROOM)
def test_what_training_changes_after_take_is_not_in_the_snapshot(free: int) -> None:
    streams = LaterStreams(free=free)
    snapshots, _ = made(streams)
    live = odd_state(1)
    expected = bits(live)
    snapshots.take(20, live, {"step": 20})
    overwrite(live)
    assert bits(live) != expected
    snapshots.observe(21, True)
    assert snapshots.newest_good() == 20
    tensors, meta = snapshots.load()
    assert bits(tensors) == expected
    assert meta == {"step": 20}


def test_with_room_nothing_waits_until_the_snapshot_is_used() -> None:
    streams = LaterStreams()
    snapshots, events = made(streams)
    snapshots.take(20, odd_state(1), {})
    snapshots.observe(21, True)
    assert (streams.host_waits, streams.held) == (0, 0)
    snapshots.take(40, odd_state(2), {})
    assert streams.host_waits == 1, "the copy before must be complete"
    assert len(streams.sizes) == 1, "both copies share one buffer"
    snapshots.observe(41, True)
    assert snapshots.newest_good() == 40
    assert bits(snapshots.load()[0]) == bits(odd_state(2))
    assert [(step, code) for step, code, _ in events.seen] == [(20, "snapshot.buffer")]


def test_without_room_the_compute_stream_waits_and_the_host_does_not() -> None:
    streams = LaterStreams(free=3 * SLICE)
    snapshots, events = made(streams)
    snapshots.take(20, odd_state(1), {})
    assert streams.host_waits == 0
    assert streams.held == len(streams.queued) - 2
    assert streams.sizes == [2 * SLICE]
    assert "no room on the card" in events.seen[0][2]


def test_every_step_queues_a_part_so_that_its_figures_come_through() -> None:
    """A card serves copies to the host in order: behind a whole copy a step's figures came 206 ms late (H100)."""
    streams = LaterStreams()
    snapshots, _ = made(streams, healthy=100)
    whole = slices_of(odd_state(1))
    most = math.ceil(whole / 16)
    snapshots.take(20, odd_state(1), {})
    counts = [len(streams.queued)]
    for step in range(21, 36):
        snapshots.observe(step, True)
        counts.append(len(streams.queued))
    assert whole > 16, "there is something to spread"
    assert counts[0] == most
    assert all(0 <= after - before <= most for before, after in pairwise(counts))
    assert counts[-1] == whole, "all of it within 16 steps"
    assert streams.host_waits == 0


def test_a_part_that_the_device_refuses_ends_no_step_and_is_never_restored() -> None:
    streams = LaterStreams()
    snapshots, _ = made(streams)
    snapshots.take(20, odd_state(1), {})
    streams.refuses = True
    snapshots.observe(21, True)
    with pytest.raises(CopyError, match="illegal memory access"):
        snapshots.newest_good()
    streams.refuses = False
    with pytest.raises(CopyError, match="illegal memory access"):
        snapshots.load()


@pytest.mark.parametrize("free", ROOM)
def test_slices_are_bounded_and_cover_every_byte_once(free: int) -> None:
    streams = LaterStreams(free=free)
    staging = OverlappedStaging(Copier(streams, Events().event, SLICE))
    staging._copier.decide(0, odd_state(1))
    copies = staging.copy(odd_state(1))
    staging.wait()
    places = sorted(streams.queued)
    assert all(0 < size <= SLICE for _, size in places)
    assert all(begin + size <= following for (begin, size), (following, _) in pairwise(places))
    covered: set[int] = set()
    for begin, size in places:
        covered.update(range(begin, begin + size))
    for named in copies.values():
        for tensor in named.values():
            assert covered.issuperset(range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))


def copied(streams: LaterStreams, live: Tensors, slice_bytes: int) -> Tensors:
    """The copies of `live`, which is overwritten once they are queued."""
    copier = Copier(streams, Events().event, slice_bytes)
    copier.decide(0, live)
    staging = OverlappedStaging(copier)
    copies = staging.copy(live)
    overwrite(live)
    staging.wait()
    return copies


@pytest.mark.parametrize("free", [1 << 40, 0])
@pytest.mark.parametrize("slice_bytes", [SLICE, 1 << 12, 1 << 20])
def test_tensors_of_the_host_are_copied_at_once(free: int, slice_bytes: int) -> None:
    live = odd_state(1)
    on_host = [live["model"]["transposed"], live["optimizer"]["step"], live["optimizer"]["flag"]]
    expected = bits(live)
    streams = LaterStreams(free=free, on_host=on_host)
    assert bits(copied(streams, live, slice_bytes)) == expected


@pytest.mark.parametrize("free", [1 << 40, 0])
def test_any_sizes_and_dtypes_are_copied_exactly(free: int) -> None:
    chance = random.Random(0)
    dtypes = (torch.uint8, torch.bfloat16, torch.float32, torch.complex128)
    for _ in range(200):
        named: dict[str, torch.Tensor] = {}
        for number in range(chance.randrange(1, 12)):
            shape = [chance.randrange(1, 40) for _ in range(chance.randrange(3))]
            values = torch.randint(0, 255, shape).to(chance.choice(dtypes))
            named[str(number)] = (
                values.t() if chance.random() < 0.3 and values.ndim == 2 else values
            )
        on_host = [tensor for tensor in named.values() if chance.random() < 0.2]
        expected = bits({"all": named})
        streams = LaterStreams(free=free, on_host=on_host)
        assert bits(copied(streams, {"all": named}, chance.choice((128, 192, 1024)))) == expected


@pytest.mark.parametrize("free", ROOM)
def test_two_copies_on_their_way_share_the_buffer_and_do_not_mix(free: int) -> None:
    copier = Copier(LaterStreams(free=free), Events().event, SLICE)
    copier.decide(0, odd_state(1))
    first, second = OverlappedStaging(copier), OverlappedStaging(copier)
    copies = first.copy(odd_state(1)), second.copy(odd_state(2))
    second.wait()
    assert bits(copies[0]) == bits(odd_state(1))
    assert bits(copies[1]) == bits(odd_state(2))


@pytest.mark.parametrize("free", ROOM)
def test_a_rollback_before_the_next_copy_is_done_is_exact(free: int) -> None:
    """The buffer still has the newer state, which is dropped; the next copy must not mix with it."""
    streams = LaterStreams(free=free)
    snapshots, _ = made(streams)
    snapshots.take(20, odd_state(1), {})
    snapshots.observe(21, True)
    snapshots.take(40, odd_state(2), {})
    assert bits(snapshots.load()[0]) == bits(odd_state(1))
    snapshots.take(40, odd_state(3), {})
    snapshots.observe(41, True)
    assert snapshots.newest_good() == 40
    assert bits(snapshots.load()[0]) == bits(odd_state(3))


@pytest.mark.parametrize("free", ROOM)
def test_a_state_that_grows_and_shrinks_is_copied_exactly(free: int) -> None:
    streams = LaterStreams(free=free)
    snapshots, _ = made(streams)
    small: Tensors = {"model": {"weight": torch.randn(50)}}
    states = [odd_state(1), small, odd_state(2), {}, odd_state(3)]
    # The room was measured for the first state: only with room to spare may it grow.
    if free > SLICE * SLICE:
        states.insert(0, small)
    for step, live in enumerate(states, 1):
        expected = bits(live)
        snapshots.take(step, live, {})
        snapshots.observe(step, True)
        assert snapshots.newest_good() == step
        assert bits(snapshots._good.tensors) == expected


def slices_of(state: Tensors) -> int:
    streams = LaterStreams()
    snapshots, _ = made(streams)
    snapshots.take(1, state, {})
    snapshots.observe(1, True)
    snapshots.newest_good()
    return len(streams.queued)


@pytest.mark.parametrize("free", ROOM)
@pytest.mark.parametrize("which", ["first", "middle", "last"])
def test_a_copy_that_fails_on_its_way_is_never_restored(free: int, which: str) -> None:
    last = slices_of(odd_state(1)) - 1
    streams = LaterStreams(
        free=free, fails_at={"first": 0, "middle": last // 2, "last": last}[which]
    )
    snapshots, _ = made(streams)
    snapshots.take(20, odd_state(1), {})
    snapshots.observe(21, True)
    with pytest.raises(CopyError, match="illegal memory access"):
        snapshots.newest_good()
    with pytest.raises(CopyError, match="illegal memory access"):
        snapshots.load()
    with pytest.raises(CopyError, match="illegal memory access"):
        snapshots.take(40, odd_state(2), {})


def test_no_memory_on_the_card_leaves_no_half_snapshot() -> None:
    streams = LaterStreams()
    snapshots, _ = made(streams, healthy=2)
    small: Tensors = {"model": {"weight": torch.randn(50)}}
    snapshots.take(20, small, {})
    snapshots.observe(20, False)
    streams.most = 0
    with pytest.raises(CopyError, match="out of memory"):
        snapshots.take(40, odd_state(1), {})
    for step in (41, 42, 43):
        snapshots.observe(step, True)
    assert snapshots.newest_good() is None


@pytest.mark.parametrize(
    ("state", "free", "total", "expected"),
    [
        (1000, 1100, 1000, 1000),
        (1000, 1099, 1000, 512),
        (300, 0, 1000, 300),
        (0, 0, 1000, 0),
    ],
)
def test_the_room_is_measured_with_a_margin(
    state: int, free: int, total: int, expected: int
) -> None:
    assert buffer_bytes(state, free, total, SLICE) == expected
