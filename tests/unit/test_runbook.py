"""docs/runbook.md explains every code that a run can say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"[a-z0-9]+\.[a-z]+(_[a-z]+)*")


def said(source: str) -> set[str]:
    """Codes given to `Verdict(...)` or `<tracker>.event(...)`, whichever branch of an expression gives them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("Verdict", "event"):
                constants = (
                    part.value
                    for argument in node.args[:2]
                    for part in ast.walk(argument)
                    if isinstance(part, ast.Constant)
                )
                found |= {value for value in constants if isinstance(value, str) and CODE.fullmatch(value)}
    return {code for code in found if not code.endswith(".ok")}


CODES = sorted({code for path in (ROOT / "harness").rglob("*.py") for code in said(path.read_text())})


def test_the_codes_are_found() -> None:
    assert {"nonfinite.skip", "precision.demote", "precision.lowered", "guard.rollback", "run.failed"} <= set(CODES)


@pytest.mark.parametrize("code", CODES)
def test_the_runbook_has_a_heading_for(code: str) -> None:
    headings = [line for line in (ROOT / "docs" / "runbook.md").read_text().splitlines() if line.startswith("#")]
    assert any(code in re.split(r"[ ,]+", heading) for heading in headings), f"add {code} to docs/runbook.md"
