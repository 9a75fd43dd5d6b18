"""docs/studies/reliability.md from what the fault tests wrote down: `make test-faults`.

    python tests/faults/reliability_page.py FIGURES.jsonl docs/studies/reliability.md
    python tests/faults/reliability_page.py docs/studies/reliability.md         only the sums of the attack's ledger

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
LEDGER = Path(__file__).with_name("attack_ledger.jsonl")
ENEMY = "## The standing enemy\n"
NEXT = "## The fault matrix\n"
ABOUT = f"""`make attack` draws sequences of faults from a seed and carries them out against small runs. A sequence ends
well if the run went through with an undisturbed run's bytes and its whole history; where it refused, by a message that
names what was touched and, once that was put back, in the same way. Every end before that has a true exit code and no
traceback. Where rows of the journal were altered, nothing else may differ. `{LEDGER.relative_to(ROOT)}` has a line for
each. Most runs are forked from a process that has imported everything; a sixth ("new python", torchrun, deepspeed)
start as a user's do. Two other models may train in two threads beside the run; each must end as it ends alone. A run
that is tracked has a secret in its address or its variables, and a server that may fail three in ten requests: the
secret may stand in no file of the run, on no screen nor in MLflow.
"""
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
    lines = [
        HEAD,
        f"{passed} of {len(tests)} tests passed, {minutes:.0f} minutes of them in all. {machine}",
        "",
    ]
    lines += [
        "## Figures",
        "| row | what | measured | n | to be reached | command |",
        "|---|---|---|---|---|---|",
    ]
    for figure in merged(figures):
        measured, n = _measured(figure["value"], figure["n"])
        cells = (
            figure["row"],
            figure["what"],
            measured,
            n or "",
            figure["target"],
            f"`pytest {_plain(figure)}`",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", enemy(read_lines(LEDGER))]
    lines += [NEXT.rstrip()]
    lines += [
        "| row | fault | what must happen | tests | protections taken away |",
        "|---|---|---|---|---|",
    ]
    for row in MATRIX:
        found = "<br>".join(_files([test for test in tests if row.number in test["rows"]]))
        taken = "<br>".join(each.protection for each in MUTATIONS if each.row == row.number)
        lines.append(f"| {row.number} | {row.fault} | {row.must} | {found} | {taken} |")
    return "\n".join(lines) + "\n"


def merged(figures: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Trials of one kind in one row, with the sum of their n: those of one test, of which a word before a colon tells
    what they were tried on, or nothing does. Ordered by row of the matrix.
    """
    kinds: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, figure in enumerate(sorted(figures, key=lambda each: (each["row"], each["what"]))):
        head, _, tail = figure["what"].partition(": ")
        trials = not isinstance(figure["value"], str)
        what, of = (tail, head) if trials and tail and " " not in head else (figure["what"], "")
        kind = kinds.setdefault(
            (figure["row"], _plain(figure), what, None if trials else number), {**figure, "of": []}
        )
        if trials:
            good, n = kind["value"] if kind["of"] or kind.get("sum") else (0, 0)
            kind |= {"value": [good + figure["value"][0], n + figure["value"][1]], "sum": True}
            kind["of"] += [of] if of else []
            kind["what"] = what
    for kind in kinds.values():
        if len(kind["of"]) > 1:
            kind["what"] += f" ({', '.join(dict.fromkeys(kind['of']))})"
        elif kind["of"]:
            kind["what"] = f"{kind['of'][0]}: {kind['what']}"
    return list(kinds.values())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines; none where there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def enemy(lines: Sequence[Mapping[str, Any]]) -> str:
    """What `make attack` has found so far, by family. lines: of its ledger, oldest first."""
    told = [ENEMY, ABOUT]
    everything, lines = lines, [line for line in lines if line["result"] != "void"]
    kinds: dict[str, int] = defaultdict(int)
    for line in lines:
        kinds[line["kind"]] += 1
    faults, commits = sum(line["faults"] for line in lines), len({line["commit"] for line in lines})
    shares = ", ".join(
        f"{kind} {count:,}" for kind, count in sorted(kinds.items(), key=lambda each: -each[1])
    )
    told += [
        f"{len(lines):,} sequences of {faults:,} faults, at {commits} commits: {shares}; not counted: "
        f"{len(everything) - len(lines)} in which the attack itself was wrong.\n"
    ]
    told += [
        "| family | sequences | as undisturbed | refused, then so | known gap | found | since the last |"
    ]
    told += ["|---|---|---|---|---|---|---|"]
    families = sorted({family for line in lines for family in line["families"]} - {"start"})
    for name in (*families, "all"):
        own = [line for line in lines if name == "all" or name in line["families"]]
        by = [
            sum(line["result"] == result for line in own)
            for result in ("same", "refused", "known", "finding")
        ]
        since = next(
            (number for number, line in enumerate(reversed(own)) if line["result"] == "finding"),
            len(own),
        )
        bound = f"{since:,} (at most {binomial_upper(0, since):.1%} fail, 95%)" if since else "0"
        told.append(
            f"| {name} | {len(own):,} | {by[0]:,} | {by[1]:,} | {by[2]:,} | {by[3]:,} | {bound} |"
        )
    return "\n".join([*told, "", *_found(lines)]) + "\n"


def _found(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each thing that was found or is known, once, with the seed that shows it and whether that seed is well by now."""
    last = {(line["again"], line["plans"]): line for line in lines}
    shown: dict[str, Mapping[str, Any]] = {}
    for line in lines:
        if line["finding"] and line["result"] != "void":  # where the attack itself was wrong
            shown.setdefault(
                line["finding"][:60] if line["result"] == "finding" else line["finding"], line
            )
    if not shown:
        return []
    told = [
        "| what was found | `make attack ARGS=` | at | that sequence now |",
        "|---|---|---|---|",
    ]
    for line in shown.values():
        now = last[line["again"], line["plans"]]
        ended = {"known": "known gap", "finding": "open"}.get(
            now["result"], f"well at {now['commit']}"
        )
        text = " ".join(line["finding"].split())[:160].replace("|", "/").replace("`", "'")
        told.append(f"| {text} | `{line['again']}` | {line['commit']} | {ended} |")
    return told


def renewed(text: str, lines: Sequence[Mapping[str, Any]]) -> str:
    """A page with the attack's sums as they are now."""
    head, _, rest = text.partition(ENEMY) if ENEMY in text else text.partition(NEXT)
    matrix = rest.partition(NEXT)[2] if ENEMY in text else rest
    return f"{head}{enemy(lines)}\n{NEXT}{matrix}"


def problems(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tests that did not pass, and rows without any."""
    tests = [record for record in records if record["kind"] == "test"]
    shown = {row for test in tests for row in test["rows"]}
    return [
        f"{test['test']}: {test['outcome']}" for test in tests if test["outcome"] != "passed"
    ] + [f"row {row.number} has no test: {row.fault}" for row in MATRIX if row.number not in shown]


def _measured(value: str | list[int], n: int) -> tuple[str, int]:
    """Trials with what n of them can tell: the share that may still fail, at 95%."""
    if isinstance(value, str):
        return value, n
    good, trials = value
    return (
        f"{good:,} of {trials:,} (95% upper bound of failure {binomial_upper(trials - good, trials):.2%})",
        trials,
    )


def _files(tests: Sequence[Mapping[str, Any]]) -> list[str]:
    """`tests/faults/test_x.py`: 3 of 3, by file."""
    outcomes: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        outcomes[test["test"].partition("::")[0]].append(test["outcome"])
    return [
        f"`{file}` {ended.count('passed')} of {len(ended)}"
        for file, ended in sorted(outcomes.items())
    ]


def _plain(figure: Mapping[str, Any]) -> str:
    """The node without its parameters, whose brackets a shell would take for a pattern."""
    return figure["test"].partition("[")[0]


def _machine() -> str:
    import torch

    return f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, torch {torch.__version__}."


def main() -> int:
    if len(sys.argv) == 2:
        page_file = Path(sys.argv[1])
        page_file.write_text(renewed(page_file.read_text(), read_lines(LEDGER)))
        return 0
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
