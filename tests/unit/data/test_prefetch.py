"""Reading ahead: the same batches as without, whatever is asked in whatever order; errors come where they belong."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from harness.core.errors import DataError, Problem
from harness.core.facts import Window
from harness.core.protocols import Batch
from harness.data.batches import TokenBatches
from harness.data.prefetch import Prefetched, Watch
from harness.data.tokens import prepare
from tests.unit.data.token_files import config, headerless, some_ids


class Noting(TokenBatches):
    """Notes which window was read by which thread; some cannot be."""

    windows: list[int]
    threads: set[int]
    lost: int | None = None

    def micro_batches(self, window: Window, rank: int, world_size: int) -> list[Batch]:
        self.windows.append(window.index)
        self.threads.add(threading.get_ident())
        if window.index == self.lost:
            raise DataError(Problem("lost", "window"))
        return super().micro_batches(window, rank, world_size)


@pytest.fixture
def plain(tmp_path: Path) -> Noting:
    data = prepare(config(headerless(tmp_path / "train.bin", some_ids(9000))), tmp_path / "run")
    made = Noting(data, 0, 16, 8, 4, 8)
    made.windows, made.threads = [], set()
    return made


def same(one: list[Batch], other: list[Batch]) -> bool:
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


def settle(source: Prefetched) -> None:
    """Until what is read ahead has been read."""
    assert source._ahead is not None
    assert source._ahead.done.wait(60)


def test_windows_in_a_row_are_read_ahead_by_another_thread(plain: Noting) -> None:
    source = Prefetched(plain, Watch())
    for index in range(5):
        assert same(
            source.micro_batches(source.window(index), 0, 1),
            plain.micro_batches(plain.window(index), 0, 1),
        )
        settle(source)
        assert index + 1 in plain.windows, "the next one is there"
    assert len(plain.threads) == 2


def test_looking_back_does_not_undo_what_is_read_ahead(plain: Noting) -> None:
    source = Prefetched(plain, Watch())
    for index in range(3):
        source.micro_batches(source.window(index), 0, 1)
    for index in (1, 0):
        assert same(
            source.micro_batches(source.window(index), 0, 1),
            plain.micro_batches(plain.window(index), 0, 1),
        )
    settle(source)
    before = plain.windows.count(3)
    source.micro_batches(source.window(3), 0, 1)
    assert plain.windows.count(3) == before == 1, "it was not read again"


def test_after_a_jump_it_reads_ahead_again(plain: Noting) -> None:
    source = Prefetched(plain, Watch())
    source.micro_batches(source.window(20), 0, 1)
    for index in (5, 6, 7):
        assert same(
            source.micro_batches(source.window(index), 0, 1),
            plain.micro_batches(plain.window(index), 0, 1),
        )
    settle(source)
    assert 8 in plain.windows


def test_an_error_comes_with_its_own_window_and_only_there(plain: Noting) -> None:
    source = Prefetched(plain, Watch())
    plain.lost = 2
    source.micro_batches(source.window(0), 0, 1)
    source.micro_batches(source.window(1), 0, 1)
    settle(source)
    with pytest.raises(DataError, match="lost"):
        source.micro_batches(source.window(2), 0, 1)
    plain.lost = None
    assert same(
        source.micro_batches(source.window(3), 0, 1), plain.micro_batches(plain.window(3), 0, 1)
    )
    assert same(
        source.micro_batches(source.window(2), 0, 1), plain.micro_batches(plain.window(2), 0, 1)
    )


def test_other_ranks_get_their_own(plain: Noting) -> None:
    source = Prefetched(plain, Watch())
    for index in range(3):
        for rank in range(2):
            mine = source.micro_batches(source.window(index), rank, 2)
            assert same(mine, plain.micro_batches(plain.window(index), rank, 2))


def test_it_says_what_the_source_says(plain: Noting) -> None:
    source = Prefetched(plain, Watch())
    assert (source.name, source.tokens_per_sample, source.masked) == (plain.name, 16, False)
    assert (source.ids, source.vocab, source.unit) == (plain.ids, plain.vocab, plain.unit)
    assert source.facts() == plain.facts()
    assert same(source.validation(0, 1), plain.validation(0, 1))
