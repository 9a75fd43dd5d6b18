"""docs/reference/config.md has every key, with a unit, as the schema and the rules of a resume have it."""

from __future__ import annotations

import re
from pathlib import Path

from harness.core.config import FallbackConfig, RunConfig, flat
from harness.core.config_page import on_resume, page
from harness.core.key_table import keys
from harness.run_folder import RESUME_MAY_CHANGE, _why_never

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "config.md"
KEYS = dict(keys(RunConfig))
OF_RECIPES = dict(keys(FallbackConfig, "fallback."))
UNITS = re.compile(
    r"\b(steps?|windows|updates|samples|tokens?|threads|minutes|seconds|share|norm|factor|times|ratio|rate|sigmas|dB|"
    r"number|saves|observations|weight|rollback|stage|seed|amax|growth)\b"
)


def test_the_page_is_what_is_declared() -> None:
    assert PAGE.read_text() == page(), (
        "python -m harness.core.config_page > docs/reference/config.md"
    )


def test_it_has_every_key_of_a_resolved_config() -> None:
    resolved = flat(RunConfig().model_dump(mode="json"))
    assert resolved.keys() <= KEYS.keys()
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(KEYS)


def test_every_key_is_explained_in_a_line_and_a_number_has_a_unit() -> None:
    for key, field in (KEYS | OF_RECIPES).items():
        assert field.description, key
        assert "\n" not in field.description, key
        assert "|" not in field.description, f"{key}: it would end the table's cell"
        if field.annotation in (int, float):
            assert UNITS.search(field.description), f"{key}: a number names its unit"


def test_it_says_of_a_resume_what_a_resume_does() -> None:
    keys = [key for key in KEYS if "[]" not in key]
    assert len(keys) > 50
    for key in keys:
        expected = "never" if _why_never(key) else "if accepted"
        if key.startswith(RESUME_MAY_CHANGE):
            expected = "yes"
        assert on_resume(key) == expected, key


def test_limits_and_defaults_are_those_of_the_schema() -> None:
    shown = page()
    assert "| `checkpoint.keep` | integer >= 2 | `3` |" in shown
    assert "| `train.betas` | 2 of: number >= 0, < 1 | `[0.9, 0.95]` |" in shown
    assert "| `data.separator` | integer >= 0, or null | `null` |" in shown
    assert "| `data.mixture[].weight` | number > 0 | required |" in shown
    assert "| `engine.zero_stage` | `0`, `1`, `2`, `3` | `1` |" in shown
