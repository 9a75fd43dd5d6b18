"""The page of metrics is what is declared."""

from __future__ import annotations

from pathlib import Path

from harness.core.metrics import page


def test_the_page_is_what_is_declared() -> None:
    path = Path(__file__).resolve().parents[3] / "docs" / "reference" / "metrics.md"
    assert path.read_text() == page(), "python -m harness.core.metrics > docs/reference/metrics.md"
