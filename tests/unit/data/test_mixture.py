"""Mixtures: the shares that were asked for, every sample of an epoch once, the same whatever the ranks; and resumes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.config import DataConfig
from harness.core.errors import ConfigError, DataError
from harness.core.schema import validate
from harness.data.batches import TokenBatches
from harness.data.mixture import CYCLE, Mixture, prepare_mixture, shares
from tests.unit.data.token_files import headed, headerless, some_ids

SIZES = (3000, 900, 500)


def wanted(folder: Path, weights: tuple[float, ...] = (5.0, 3.0, 2.0)) -> DataConfig:
    """Sources whose ids tell which they are: 0 to 99, 100 to 199, 200 to 299."""
    for number, size in enumerate(SIZES[: len(weights)]):
        write = headed if number % 2 else headerless
        write(folder / f"source{number}.bin", some_ids(size, 100, number) + 100 * number)
    mixture = [
        {"path": str(folder / f"source{n}.bin"), "weight": weight}
        for n, weight in enumerate(weights)
    ]
    return DataConfig.model_validate({"mixture": mixture, "context": 10, "val_samples": 20})


def mixed(folder: Path, seed: int = 0, weights: tuple[float, ...] = (5.0, 3.0, 2.0)) -> Mixture:
    config = wanted(folder, weights)
    data = prepare_mixture(config, folder / "run", True, lambda path: None)
    parts = [TokenBatches(each, seed, 10, 16, 4, 20) for each in data]
    return Mixture(parts, [part.weight for part in config.mixture], seed, 16, 4, 20)


def kinds(batches: list[dict[str, torch.Tensor]]) -> Counter[int]:
    """How many samples of each source; none has tokens of two."""
    found: Counter[int] = Counter()
    for batch in batches:
        of = batch["inputs"] // 100
        assert torch.equal(of, of[:, :1].expand_as(of))
        assert torch.equal(batch["targets"] // 100, of)
        found.update(of[:, 0].tolist())
    return found


def test_a_cycle_has_the_shares_that_were_asked_for(tmp_path: Path) -> None:
    source = mixed(tmp_path)
    found: Counter[int] = Counter()
    for index in range(CYCLE // 16):
        found += kinds(source.micro_batches(source.window(index), 0, 1))
    assert [found[number] for number in range(3)] == [512, 307, 205]
    first = Counter(np.searchsorted([269, 349], source.window(0).samples, side="right").tolist())
    assert len(first) == 3, "they are mixed within windows"


def test_an_epoch_of_a_source_reads_every_sample_once(tmp_path: Path) -> None:
    source = mixed(tmp_path)
    order = np.concatenate([source.window(index).samples for index in range(300)])
    begin = 0
    for size in (269, 80, 44):
        own = order[(order >= begin) & (order < begin + size)] - begin
        epochs = len(own) // size
        assert epochs >= 2
        for epoch in range(epochs):
            assert sorted(own[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))
        assert own[:size].tolist() != own[size : 2 * size].tolist()
        begin += size


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_a_window_that_does_not_depend_on_them(tmp_path: Path, world_size: int) -> None:
    source = mixed(tmp_path)
    window = source.window(77)
    assert window.samples.tolist() == mixed(tmp_path).window(77).samples.tolist()
    assert window.samples.tolist() != mixed(tmp_path, seed=1).window(77).samples.tolist()
    alone = source.micro_batches(window, 0, 1)
    for rank in range(world_size):
        mine = source.micro_batches(window, rank, world_size)
        for one, other in zip(mine, alone[rank::world_size], strict=True):
            assert torch.equal(one["inputs"], other["inputs"])


def test_validation_has_every_source_and_does_not_change(tmp_path: Path) -> None:
    source = mixed(tmp_path)
    batches = source.validation(0, 1)
    assert [kinds(batches)[number] for number in range(3)] == [10, 6, 4]
    again = source.validation(0, 1)
    assert all(
        torch.equal(one["inputs"], other["inputs"])
        for one, other in zip(batches, again, strict=True)
    )


def test_facts_and_the_vocabulary_are_of_all(tmp_path: Path) -> None:
    source = mixed(tmp_path)
    facts = source.facts()
    assert (source.ids, source.vocab, facts["files"]) == (300, 304, 3)
    assert (
        facts["train_tokens"]
        == sum(part["train_tokens"] for part in facts["mixture"])
        == 2700 + 810 + 450
    )
    assert [part["share"] for part in facts["mixture"]] == [0.5, 307 / 1024, 205 / 1024]


def test_a_leftover_of_other_settings_is_not_taken(tmp_path: Path) -> None:
    mixed(tmp_path)
    config = wanted(tmp_path).model_copy(update={"val_fraction": 0.2})
    begun = prepare_mixture(config, tmp_path / "run", True, lambda path: None)
    assert len(begun[0].train) == 2700, "what a run began with counts"
    (tmp_path / "run" / "data" / "corpus.json").unlink()
    assert len(prepare_mixture(config, tmp_path / "run", True, lambda path: None)[0].train) == 2400


def test_all_bad_sources_are_named_at_once(tmp_path: Path) -> None:
    config = wanted(tmp_path)
    (tmp_path / "source0.bin").write_bytes(b"\0\1\2")
    (tmp_path / "source2.bin").unlink()
    with pytest.raises(DataError) as caught:
        prepare_mixture(config, tmp_path / "run", True, lambda path: None)
    assert [Path(problem.where).name for problem in caught.value.problems] == [
        "source0.bin",
        "source2.bin",
    ]


def test_a_source_within_another_is_refused(tmp_path: Path) -> None:
    """Each is split by itself: what one validates on, the other would train on."""
    (tmp_path / "all" / "code").mkdir(parents=True)
    for place in ("all", "all/code"):
        (tmp_path / place / "a.txt").write_text("some text to train on\n" * 200)
    parts = [{"path": str(tmp_path / place), "weight": 1.0} for place in ("all", "all/code")]
    config = validate(DataConfig, {"mixture": parts, "context": 8}, "here")
    with pytest.raises(DataError, match="lies within another source") as caught:
        prepare_mixture(config, tmp_path / "run", True, lambda path: None)
    assert str(tmp_path / "all" / "code") in caught.value.problems[0].where


def test_a_source_that_another_validates_on_is_refused(tmp_path: Path) -> None:
    for name in ("train.txt", "valid.txt", "other.txt"):
        (tmp_path / name).write_text("some text to train on\n" * 200)

    def prepared(*names: str) -> None:
        parts = [{"path": str(tmp_path / name), "weight": 1.0} for name in names]
        config = validate(DataConfig, {"mixture": parts, "context": 8}, "here")
        prepare_mixture(config, tmp_path / "-".join(names), True, lambda path: None)

    with pytest.raises(DataError, match="is what another source of the mixture validates on"):
        prepared("train.txt", "valid.txt")
    prepared("other.txt", "valid.txt")


@pytest.mark.parametrize(("first", "refused"), [(99, False), (199, True)])
def test_ids_that_are_no_bytes_are_not_mixed_with_bytes(
    tmp_path: Path, first: int, refused: bool
) -> None:
    """Nobody knows what made a file of token ids, but ids over 255 are no bytes."""
    headerless(tmp_path / "ids.bin", some_ids(3000, 100, 0) + first)
    (tmp_path / "a.txt").write_text("some text to train on\n" * 200)
    parts = [{"path": str(tmp_path / name), "weight": 1.0} for name in ("ids.bin", "a.txt")]
    data = prepare_mixture(
        DataConfig.model_validate({"mixture": parts, "context": 10}), tmp_path / "run", True, print
    )
    batches = [TokenBatches(each, 0, 10, 16, 4, 20) for each in data]
    if not refused:
        assert Mixture(batches, (1.0, 1.0), 0, 16, 4, 20).ids == 256
        return
    with pytest.raises(
        DataError, match=r"sources of different tokenizers[\s\S]*ids up to 298[\s\S]*256"
    ):
        Mixture(batches, (1.0, 1.0), 0, 16, 4, 20)


def test_path_and_mixture_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.path and data\.mixture are both given"):
        validate(DataConfig, {"path": "a", "mixture": [{"path": "b", "weight": 1}]}, "here")


@settings(max_examples=200, deadline=None)
@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), total=st.integers(12, 2000))
def test_shares_are_those_of_the_weights(weights: list[float], total: int) -> None:
    found = shares(weights, total)
    assert sum(found) == total
    assert min(found) >= 1
    exact = np.array(weights) / sum(weights) * total
    assert all(
        abs(count - want) <= max(1, len(weights)) for count, want in zip(found, exact, strict=True)
    )
