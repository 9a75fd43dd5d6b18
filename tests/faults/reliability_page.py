"""docs/reliability.md from what the fault tests wrote down: `make test-faults`.

    python tests/faults/reliability_page.py FIGURES.jsonl docs/reliability.md

Exit code 1, and the page untouched, if a test failed or a row of the matrix has none.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matrix import MATRIX
from mutation_list import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.intervals import binomial_upper  # noqa: E402

HEAD = """# Reliability

Written by `make test-faults` from what its tests measured; do not edit. Every test asserts that its fault fired.
`make mutations` takes the protections in the last column away, one by one, and sees that the tests notice.
"""


def page(records: Sequence[Mapping[str, Any]], machine: str) -> str:
    """The page as Markdown. records: lines of the figures file."""
    tests = [record for record in records if record["kind"] == "test"]
    figures = [record for record in records if record["kind"] == "figure"]
    minutes = sum(test["seconds"] for test in tests) / 60
    passed = sum(test["outcome"] == "passed" for test in tests)
    lines = [HEAD, f"{passed} of {len(tests)} tests passed, {minutes:.0f} minutes of them in all. {machine}", ""]
    lines += ["## Figures", "| row | what | measured | n | to be reached | command |", "|---|---|---|---|---|---|"]
    for figure in sorted(figures, key=lambda each: (each["row"], each["what"])):
        measured, n = _measured(figure["value"], figure["n"])
        cells = (figure["row"], figure["what"], measured, n or "", figure["target"], f"`pytest {_plain(figure)}`")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "## The fault matrix"]
    lines += ["| row | fault | what must happen | tests | protections taken away |", "|---|---|---|---|---|"]
    for row in MATRIX:
        found = "<br>".join(_files([test for test in tests if row.number in test["rows"]]))
        taken = "<br>".join(each.protection for each in MUTATIONS if each.row == row.number)
        lines.append(f"| {row.number} | {row.fault} | {row.must} | {found} | {taken} |")
    return "\n".join(lines) + "\n"


def problems(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tests that did not pass, and rows without any."""
    tests = [record for record in records if record["kind"] == "test"]
    shown = {row for test in tests for row in test["rows"]}
    return [f"{test['test']}: {test['outcome']}" for test in tests if test["outcome"] != "passed"] + [
        f"row {row.number} has no test: {row.fault}" for row in MATRIX if row.number not in shown
    ]


def _measured(value: str | list[int], n: int) -> tuple[str, int]:
    """Trials with what n of them can tell: the share that may still fail, at 95%."""
    if isinstance(value, str):
        return value, n
    good, trials = value
    return f"{good:,} of {trials:,} (95% upper bound of failure {binomial_upper(trials - good, trials):.2%})", trials


def _files(tests: Sequence[Mapping[str, Any]]) -> list[str]:
    """`tests/faults/test_x.py`: 3 of 3, by file."""
    outcomes: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        outcomes[test["test"].partition("::")[0]].append(test["outcome"])
    return [f"`{file}` {ended.count('passed')} of {len(ended)}" for file, ended in sorted(outcomes.items())]


def _plain(figure: Mapping[str, Any]) -> str:
    """The node without its parameters, whose brackets a shell would take for a pattern."""
    return figure["test"].partition("[")[0]


def _machine() -> str:
    import torch

    return f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, torch {torch.__version__}."


def main() -> int:
    source, target = map(Path, sys.argv[1:])
    records = [json.loads(line) for line in source.read_text().splitlines()]
    if found := problems(records):
        print("\n".join(found), f"{target} is as it was", sep="\n")
        return 1
    target.write_text(page(records, _machine()))
    print(f"{target}: {sum(record['kind'] == 'test' for record in records)} tests, all passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
