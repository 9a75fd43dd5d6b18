"""The report of a run: two pictures and one HTML file that needs nothing else, all from the journal."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from harness.core.files import atomic_file
from harness.tools import RunFolder
from harness.tools.plots import loss_plot, saturation_plot
from harness.tools.summary import account
from harness.tracking.history import RunHistory
from harness.tracking.plan_table import fold, rung_lines

MAX_EVENTS = 500
HEAD = ("kind", "step", "attempt", "time", "code")
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; max-width: 70rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } .wide { overflow-x: auto; }
td, th { text-align: left; vertical-align: top; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #e5e5e5; }
code, td { font-variant-numeric: tabular-nums; } pre { white-space: pre-wrap; } img { max-width: 100%; }
"""


def command(run: RunFolder) -> int:
    for path in write(run):
        print(path)
    return 0


def write(run_dir: Path) -> list[Path]:
    """Draw `plots/loss.png`, `plots/fp8_saturation.png` and write `report.html`; the paths of those made.

    A picture with nothing to show is left out. Raises ConfigError if `run_dir` is no run folder.
    """
    history = RunHistory.read(run_dir)
    pictures = [
        path
        for path, draw in (
            (run_dir / "plots" / "loss.png", loss_plot),
            (run_dir / "plots" / "fp8_saturation.png", saturation_plot),
        )
        if draw(history, path)
    ]
    report = run_dir / "report.html"
    with atomic_file(report) as stream:
        stream.write(_page(history, pictures).encode())
    return [*pictures, report]


def _page(history: RunHistory, pictures: Sequence[Path]) -> str:
    name = escape(history.run_dir.name)
    images = [f'<p><img alt="{escape(path.stem)}" src="{_embedded(path)}"></p>' for path in pictures]
    sections = [
        f"<h1>Run {name}</h1>",
        _table((), account(history)),
        *(["<h2>Pictures</h2>", *images] if images else []),
        *_plan(history.plan),
        *_events(history.events),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Run {name}</title><style>{STYLE}</style></head>\n<body>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _plan(plan: Mapping[str, Any]) -> list[str]:
    if not plan:
        return []
    rows = [
        (row.name, row.count, row.precision, row.backend, "x".join(map(str, row.shape)), row.reason)
        for row in fold(plan["layers"])
    ]
    lines = escape("\n".join(rung_lines(plan)))
    headings = ("layers", "count", "precision", "backend", "shape", "why")
    return ["<h2>Precision plan</h2>", f"<pre>{lines}</pre>", _table(headings, rows)]


def _events(events: Sequence[Mapping[str, Any]]) -> list[str]:
    if not events:
        return ["<h2>Events</h2>", "<p>None.</p>"]
    rows = [
        (event["step"], event["attempt"], _moment(event["time"]), event["code"], _details(event)) for event in events
    ]
    more = f"<p>The first {MAX_EVENTS} of {len(rows)}; all are in journal.jsonl.</p>" if len(rows) > MAX_EVENTS else ""
    return ["<h2>Events</h2>", more, _table(("step", "attempt", "time", "code", "details"), rows[:MAX_EVENTS])]


def _details(event: Mapping[str, Any]) -> str:
    fields = {name: value for name, value in event.items() if name not in HEAD}
    return ", ".join(
        f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in fields.items()
    )


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")


def _table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table>{f"<tr>{head}</tr>" if head else ""}\n{body}\n</table></div>'


def _embedded(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
