"""Reads what a report's page holds, as its script would."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_CONTENT = re.compile(
    r'<script type="application/json" id="content">(.*?)</script>', re.DOTALL | re.IGNORECASE
)


def content_of(page: Path) -> dict[str, Any]:
    """The data in a page. It must be one element, as a browser ends it."""
    found = _CONTENT.findall(page.read_text())
    assert len(found) == 1
    return json.loads(found[0])
