"""The data order: a permutation per epoch, a function of (seed, index) and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.data import order
from harness.data.order import sample_numbers


def epoch(seed: int, number: int, n: int) -> list[int]:
    return sample_numbers(seed, number, n, n).tolist()


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**70), number=st.integers(0, 2**30), n=st.integers(1, 3000))
def test_every_epoch_reads_every_sample_once(seed: int, number: int, n: int) -> None:
    assert sorted(epoch(seed, number, n)) == list(range(n))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    first=st.integers(0, 10**6),
    batch=st.integers(1, 64),
    windows=st.integers(1, 8),
    n=st.integers(1, 200),
)
def test_windows_are_consecutive_cuts_of_one_order(
    seed: int, first: int, batch: int, windows: int, n: int
) -> None:
    """Also across epoch ends: one at a time, in windows, or in one piece, the samples are the same."""
    pieces = [sample_numbers(seed, index, batch, n) for index in range(first, first + windows)]
    singles = [
        sample_numbers(seed, p, 1, n) for p in range(first * batch, (first + windows) * batch)
    ]
    assert np.concatenate(pieces).tolist() == np.concatenate(singles).tolist()


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch(seed, number, 500)) for seed in range(8) for number in range(8)}
    assert len(orders) == 64


@pytest.mark.slow
def test_first_places_are_spread_evenly_over_the_samples() -> None:
    """Chi-squared over the first sample of 20,000 epochs of 20 samples: 19 degrees of freedom, 43.8 is p = 0.001."""
    n, epochs = 20, 20_000
    positions = sample_numbers(3, 0, n * epochs, n)[::n]
    counts = np.bincount(positions, minlength=n)
    chi_squared = float(((counts - epochs / n) ** 2 / (epochs / n)).sum())
    assert chi_squared < 43.8


def test_neighbours_are_not_kept_together() -> None:
    """In a random permutation about one pair of neighbours is (k, k + 1), whatever its length."""
    order = sample_numbers(0, 0, 100_000, 100_000)
    assert np.count_nonzero(np.diff(order) == 1) < 10
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.02


def test_the_order_is_pinned() -> None:
    """A resume with another version must read the same data: these numbers may never change."""
    assert sample_numbers(0, 0, 8, 1000).tolist() == [404, 729, 623, 343, 661, 703, 586, 465]
    assert sample_numbers(2**70 + 3, 10**12, 4, 10**9).tolist() == [
        6712276,
        828173255,
        532787123,
        189796881,
    ]


def test_the_order_does_not_depend_on_what_was_asked_for_before() -> None:
    """Windows are cut from blocks that are kept; a caller's changes to a window stay its own."""
    first = [sample_numbers(5, index, 300, 700) for index in range(20)]
    sample_numbers(5, 3, 300, 700)[:] = -1
    for index in (19, 3, 11, 3, 0):
        assert sample_numbers(5, index, 300, 700).tolist() == first[index].tolist()
        assert sample_numbers(6, index, 300, 700).tolist() != first[index].tolist()


def test_the_network_runs_once_for_many_small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    whole = order._permute
    counted = lambda places, *rest: (passes.append(len(places)), whole(places, *rest))[1]  # noqa: E731
    monkeypatch.setattr(order, "_permute", counted)
    for index in range(64):
        sample_numbers(991, index, 8, 5000)
    assert len(passes) == 1
