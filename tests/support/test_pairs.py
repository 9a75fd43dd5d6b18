"""What two runs must have alike leaves out times, those of a card as well."""

from __future__ import annotations

from pathlib import Path

from harness.tracking.journal import Journal
from tests.support.pairs import figures


def test_figures_of_speed_are_left_out(tmp_path: Path) -> None:
    """A CPU's run has no MFU, as no peak is known: only on a card would it make equal runs differ."""
    times = {"train/tokens_per_second": 1e4, "train/mfu": 0.4, "train/peak_memory_gib": 2.0}
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.metrics(3, {"train/loss": 2.5, **times})
    assert figures(tmp_path) == {(3, "train/loss"): 2.5}
