"""The record of a drill: drill.json for programs, and drill.html for people, one page that needs no network."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from harness.core.errors import ExitCode, clock, shown
from harness.core.files import atomic_file, file_sha256, harness_version, write_json
from harness.core.secrets import scrubbed
from harness.drill.bench import SHORT, USERS, Bench
from harness.drill.judge import Account, Verdict
from harness.tracking.history import RunHistory
from harness.tracking.journal import JOURNAL

JSON, HTML = "drill.json", "drill.html"
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; max-width: 70rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } .wide { overflow-x: auto; }
td, th { text-align: left; vertical-align: top; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #e5e5e5; }
code, td { font-variant-numeric: tabular-nums; } pre { white-space: pre-wrap; } img { max-width: 100%; }
"""


@dataclass(frozen=True, slots=True)
class Result:
    """One exercise that was done.

    about: the exercise in a few words.
    account: its verdict, with what was expected and seen.
    seconds: how long it took.
    """

    name: str
    about: str
    account: Account
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The exercise's entry in drill.json."""
        return {
            "name": self.name,
            "about": self.about,
            "verdict": self.account.verdict,
            "reason": self.account.reason,
            "done": self.account.done,
            "fault": self.account.fault,
            "checks": [asdict(check) for check in self.account.checks],
            "notes": list(self.account.notes),
            "seconds": round(self.seconds, 1),
        }


@dataclass(frozen=True)
class Drill:
    """A whole drill.

    config_name: as it was given.
    results: of the exercises, in the order in which they were done.
    facts: by name, as of `facts_of`.
    """

    config_name: str
    results: Sequence[Result]
    facts: Mapping[str, str]

    @property
    def exit_code(self) -> ExitCode:
        """FAILED (1) if an exercise failed or its fault was not shown, else DONE (0)."""
        good = (Verdict.PASSED, Verdict.NOT_APPLICABLE)
        if all(result.account.verdict in good for result in self.results):
            return ExitCode.DONE
        return ExitCode.FAILED

    @property
    def summary(self) -> str:
        """`7 passed, 1 failed`."""
        counts = Counter(result.account.verdict for result in self.results)
        return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])

    def as_json(self) -> dict[str, Any]:
        """The content of drill.json, which --json prints as well."""
        return {
            "exit_code": int(self.exit_code),
            "summary": self.summary,
            "config": self.config_name,
            "facts": dict(self.facts),
            "exercises": [result.as_json() for result in self.results],
        }


def facts_of(bench: Bench, began: float, overrides: Sequence[str]) -> dict[str, str]:
    """When and where the drill was done, with which config, on which machine and versions.

    began: seconds since 1970. overrides: of the command line; secrets in them are left out.
    """
    found = {
        "began": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(began)),
        "took": clock(time.time() - began),
        "folder": str(bench.folder),
        "overrides": scrubbed(" ".join(overrides)) or "none",
        "steps of a run": str(bench.steps),
        "config, SHA-256": file_sha256(bench.folder / USERS),
        "config of the runs, SHA-256": file_sha256(bench.folder / SHORT),
        "machine": f"{socket.gethostname()}, {os.cpu_count()} cores, {platform.platform()}",
        "harness": harness_version(),
    }

    # Versions, commit, card and precision, as recorded by the first run that has a journal.
    tags: Mapping[str, str] = {}
    folder_of_runs = bench.run("any").parent
    for run in sorted(folder_of_runs.glob("*")):
        if (run / JOURNAL).is_file() and not tags:
            tags = RunHistory.read(run).run["tags"]
    for name in sorted(tags):
        if name.startswith(("version.", "precision.")):
            found[name] = tags[name]
    for name in ("tier", "card", "engine", "recipe.sha256", "git.commit"):
        if name in tags:
            found[name] = tags[name]
    return found


def write(folder: Path, drill: Drill) -> None:
    """Write drill.json and drill.html into the drill's folder. Raises OSError."""
    write_json(folder / JSON, drill.as_json())
    with atomic_file(folder / HTML) as stream:
        stream.write(_html(drill).encode())


def _html(drill: Drill) -> str:
    name = escape(shown(drill.config_name))
    sections = [
        f"<h1>Drill of {name}: {escape(drill.summary)}</h1>",
        _verdicts(drill.results),
        "<h2>When, where and with what</h2>",
        _table((), list(drill.facts.items())),
    ]
    for result in drill.results:
        sections += _section(result)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Drill of {name}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _verdicts(results: Sequence[Result]) -> str:
    rows: list[Sequence[str]] = []
    for result in results:
        account = result.account
        cells = (
            result.name,
            result.about,
            account.verdict,
            clock(result.seconds),
            _evidence(account),
        )
        rows.append(cells)
    return _table(("exercise", "what is tried", "verdict", "took", "evidence"), rows)


def _section(result: Result) -> list[str]:
    account = result.account
    sections = [f"<h2>{escape(result.name)}: {escape(account.verdict)}</h2>"]
    rows = [("done", account.done), ("fault", account.fault or "none was shown")]
    if account.reason:
        rows.append(("reason", account.reason))
    rows += [("note", note) for note in account.notes]
    sections.append(_table((), rows))
    if account.checks:
        checks = [
            (each.expected, each.seen, "yes" if each.holds else "NO") for each in account.checks
        ]
        sections.append(_table(("expected", "seen", "holds"), checks))
    return sections


def _evidence(account: Account) -> str:
    """One line of evidence for the table of verdicts.

    Of a failed exercise it is the first check that does not hold; of one that was not judged, the reason; of one that
    passed, the fault.
    """
    wrong = [check for check in account.checks if not check.holds]
    if account.verdict is Verdict.FAILED:
        return f"expected: {wrong[0].expected}; seen: {wrong[0].seen}"
    return account.reason or account.fault


def _table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """HTML of a table; every cell is escaped. headings: empty for a table of labels and texts."""
    lines: list[str] = []
    for row in rows:
        cells = "".join(f"<td>{escape(shown(str(cell)))}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    if head:
        head = f"<tr>{head}</tr>"
    body = "\n".join(lines)
    return f'<div class="wide"><table>{head}\n{body}\n</table></div>'
