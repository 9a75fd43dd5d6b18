"""Batches: shifted by one, the same samples whatever the number of ranks, nothing read twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.config import DataConfig
from harness.core.errors import ConfigError, DataError
from harness.core.protocols import Batches
from harness.data.batches import TokenBatches, check_world
from harness.data.tokens import TokenData, prepare

GOLDEN = Path(__file__).parents[2] / "golden" / "text"


class Counting:
    """A split whose tokens show where they stand: 0, 1, 2, ... modulo 256."""

    starts = np.zeros(1, dtype=np.int64)

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def read(self, places: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], dict[int, str]]:
        assert places.min() >= 0
        assert places.max() < self.size
        return places % 256, {}


def counting(train: int, val: int) -> TokenData:
    info = {"source": "counting", "files": [], "skipped": []}
    return TokenData(Counting(train), Counting(val), info)


def batches(train: int = 1001, val: int = 501, **changes: int) -> TokenBatches:
    sizes: dict[str, Any] = {
        "seed": 0,
        "context": 10,
        "global_batch": 12,
        "micro_batch": 3,
        "val_samples": 16,
        **changes,
    }
    return TokenBatches(counting(train, val), **sizes)


def test_it_is_a_data_source() -> None:
    source: Batches = batches()
    assert source.tokens_per_sample == 10
    assert "counting" in source.name


def test_samples_lie_side_by_side_and_targets_are_the_next_tokens() -> None:
    source = batches()
    assert source.n_samples == 100
    window = source.window(9)
    assert (window.index, window.samples.dtype, window.samples.shape) == (9, np.int64, (12,))
    inputs = torch.cat([batch["inputs"] for batch in source.micro_batches(window, 0, 1)])
    targets = torch.cat([batch["targets"] for batch in source.micro_batches(window, 0, 1)])
    assert inputs.dtype == targets.dtype == torch.int64
    expected = torch.from_numpy(window.samples)[:, None] * 10 + torch.arange(10)
    assert torch.equal(inputs, expected % 256)
    assert torch.equal(targets, (expected + 1) % 256)


def test_an_epoch_trains_on_every_target_once() -> None:
    source = batches(train=121, global_batch=4, micro_batch=4)
    seen = torch.cat(
        [
            source.micro_batches(source.window(step), 0, 1)[0]["targets"].flatten()
            for step in range(3)
        ]
    )
    assert sorted(seen.tolist()) == list(range(1, 121))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_a_window_that_does_not_depend_on_them(world_size: int) -> None:
    source = batches()
    window = source.window(3)
    alone = source.micro_batches(window, 0, 1)
    dealt = [source.micro_batches(window, rank, world_size) for rank in range(world_size)]
    assert {len(mine) for mine in dealt} == {len(alone) // world_size}
    for number, batch in enumerate(alone):
        mine = dealt[number % world_size][number // world_size]
        assert torch.equal(mine["inputs"], batch["inputs"])
        assert torch.equal(mine["targets"], batch["targets"])


def test_a_window_is_a_function_of_seed_and_index() -> None:
    samples = batches().window(5).samples.tolist()
    assert batches().window(5).samples.tolist() == samples
    assert batches(seed=1).window(5).samples.tolist() != samples
    assert batches().window(6).samples.tolist() != samples


@settings(max_examples=200, deadline=None)
@given(
    global_batch=st.integers(1, 96), micro_batch=st.integers(1, 96), world_size=st.integers(1, 9)
)
def test_a_batch_that_does_not_divide_is_refused_with_a_value_that_works(
    global_batch: int, micro_batch: int, world_size: int
) -> None:
    if global_batch % (micro_batch * world_size) == 0:
        check_world(global_batch, micro_batch, world_size)
        return
    with pytest.raises(ConfigError) as caught:
        check_world(global_batch, micro_batch, world_size)
    (problem,) = caught.value.problems
    key, _, value = problem.fix.removeprefix("set train.").partition("=")
    check_world(
        **{"global_batch": global_batch, "micro_batch": micro_batch, key: int(value)},
        world_size=world_size,
    )


def test_micro_batches_refuse_ranks_that_do_not_divide() -> None:
    source = batches()
    with pytest.raises(ConfigError, match=r"train\.global_batch"):
        source.micro_batches(source.window(0), 0, 3)


@settings(max_examples=200, deadline=None)
@given(
    val=st.integers(11, 2000),
    val_samples=st.integers(1, 80),
    micro_batch=st.integers(1, 20),
    world_size=st.integers(1, 6),
)
def test_validation_has_every_sample_once_and_as_many_batches_on_every_rank(
    val: int, val_samples: int, micro_batch: int, world_size: int
) -> None:
    source = batches(val=val, val_samples=val_samples, micro_batch=micro_batch)
    ranks = [source.validation(rank, world_size) for rank in range(world_size)]
    assert len({len(mine) for mine in ranks}) == 1
    sizes = {len(batch["inputs"]) for mine in ranks for batch in mine}
    assert max(sizes) <= micro_batch
    assert max(sizes) - min(sizes) <= 1
    wanted = min(val_samples, (val - 1) // 10)
    if wanted < world_size:
        assert all(torch.equal(mine[0]["inputs"], ranks[0][0]["inputs"]) for mine in ranks)
        ranks = ranks[:1]
    rest = wanted % len(ranks) if micro_batch == 1 else 0
    found = torch.cat([batch["inputs"] for mine in ranks for batch in mine])
    spread = [number * ((val - 1) // 10) // (wanted - rest) for number in range(wanted - rest)]
    expected = [source.batch("val", np.array([sample]))["inputs"][0] for sample in spread]
    assert sorted(found.tolist()) == sorted(each.tolist() for each in expected)


def test_validation_is_spread_over_the_split_and_fixed() -> None:
    source = batches(val=2001, val_samples=10, micro_batch=4)
    first = torch.cat([batch["inputs"] for batch in source.validation(0, 1)])
    again = torch.cat([batch["inputs"] for batch in source.validation(0, 1)])
    assert torch.equal(first, again)
    assert (first[:, 0]).tolist() == [(number * 20 * 10) % 256 for number in range(10)]


def test_one_and_two_ranks_validate_on_the_same_samples_where_they_divide() -> None:
    source = batches(val=2001, val_samples=16, micro_batch=4)
    alone = torch.cat([batch["inputs"] for batch in source.validation(0, 1)])
    both = torch.cat([batch["inputs"] for rank in range(2) for batch in source.validation(rank, 2)])
    assert sorted(alone.tolist()) == sorted(both.tolist())


def test_too_short_a_split_is_refused() -> None:
    with pytest.raises(DataError, match="too short"):
        batches(val=10)


def test_facts_are_json_and_true(tmp_path: Path) -> None:
    config = DataConfig.model_validate({"path": str(GOLDEN), "context": 64, "val_samples": 8})
    data = prepare(config, tmp_path, global_batch=4)
    source = TokenBatches(data, 0, config.context, 4, 2, config.val_samples)
    facts = json.loads(json.dumps(source.facts(), allow_nan=False))
    assert facts["files"] == len(list(GOLDEN.iterdir()))
    assert (
        facts["train_bytes"] + facts["val_bytes"]
        == sum(p.stat().st_size for p in GOLDEN.iterdir()) + 3
    )
    assert facts["sha256"] == data.sha256
    assert facts["skipped"] == []
    assert facts["val_samples"] == 8
