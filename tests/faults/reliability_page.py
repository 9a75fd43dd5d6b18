"""Writes docs/studies/reliability.md from the records of the fault tests: `make test-faults`.

    python tests/faults/reliability_page.py FIGURES.jsonl docs/studies/reliability.md
    python tests/faults/reliability_page.py docs/studies/reliability.md         only the sums of the attack's ledger

Exit code 1, and the page untouched, if a test failed or a row of the matrix has none.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attack_plans import FAMILIES
from matrix import MATRIX

ROOT = Path(__file__).resolve().parents[2]
LEDGER = Path(__file__).with_name("attack_ledger.jsonl")
ATTACK = "## Random sequences of faults\n"
ABOUT = """\
`make attack` does faults to small runs, in sequences drawn from a seed. A sequence ends well if the run finished with
the bytes and whole history of an undisturbed one. It also does if it refused to start, named the damaged file, and
finished so once that file was restored. Every exit code must be true, without a traceback, and no secret may reach the
run's files, the screen or MLflow. Rows of the journal that the attack itself changed may differ: nothing checks for
such edits.

Most runs are forked from a warm process; a sixth ("new python", torchrun, deepspeed) start as a user's do.
`tests/faults/attack_ledger.jsonl` has each sequence.
"""
UNPROTECTED = ("a journal cut, deleted or doubled is not noticed",)
"""Findings about edits of a run's own journal, which are no faults any more; `ABOUT` says so."""
SHOWN = 120
"""Characters of a finding."""
OBVIOUS = ("", "all", "0", "bit for bit")
"""Targets that a figure's own words show to be reached."""
sys.path.insert(0, str(ROOT))

from benchmarks.intervals import binomial_upper  # noqa: E402

HEAD = """# Reliability

What happens to a run that is killed, whose disk fills up, whose files are damaged, or whose data, ranks or server fail,
for whoever has to rely on it. All on CPUs, with one or two ranks.

- [The fault matrix](#the-fault-matrix): every fault that has tests here ended as it must.
- [Figures](#figures): in how many trials, and how many could still fail.
- [Random sequences of faults](#random-sequences-of-faults): ends that no test foresees. This lists the wrong ones:

```python
import json
from pathlib import Path

import benchmarks

root = Path(benchmarks.__file__).parents[1]
lines = (root / "tests" / "faults" / "attack_ledger.jsonl").read_text().splitlines()
for end in map(json.loads, lines):
    if end["result"] == "finding":
        print(end["commit"], end["again"], end["finding"][:80])
```

`make test-faults` writes this page if all tests pass. Every test asserts that its fault happened. `make mutations`
checks that one fails without each protection.
"""
FIGURES = """## Figures
`pytest tests/faults/TEST` measures again. In brackets: the share that could still fail, at 95% confidence.

| row | what | measured | TEST |
|---|---|---|---|
"""


def commit() -> str:
    """Of the harness under test; a + where it has changes that are not committed."""
    head = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    changed = subprocess.run(
        ["git", "status", "--porcelain", "harness"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return (head.stdout.strip() or "unknown") + ("+" if changed.stdout.strip() else "")


def page(records: Sequence[Mapping[str, Any]], machine: str) -> str:
    """The page as Markdown. records: lines of the figures file. machine: where and of which commit they are."""
    tests = [record for record in records if record["kind"] == "test"]
    figures = [record for record in records if record["kind"] == "figure"]
    minutes = sum(test["seconds"] for test in tests) / 60
    passed = sum(test["outcome"] == "passed" for test in tests)
    summary = f"{passed} of {len(tests)} tests passed, in {minutes:.0f} minutes. {machine}"
    return "\n".join(
        [HEAD, summary, "", matrix(tests), figures_table(figures), attacks(read_lines(LEDGER))]
    )


def matrix(tests: Sequence[Mapping[str, Any]]) -> str:
    """What can go wrong, what must happen then, and the files of the tests that show it."""
    lines = [
        "## The fault matrix",
        "| row | fault | what must happen | tests |",
        "|---|---|---|---|",
    ]
    for row in MATRIX:
        found = "<br>".join(_files([test for test in tests if row.number in test["rows"]]))
        lines.append(f"| {row.number} | {row.fault} | {row.must} | {found} |")
    return "\n".join(lines) + "\n"


def figures_table(figures: Sequence[Mapping[str, Any]]) -> str:
    """A line for each kind of figure; what it was measured on stands before each value, and in the same order."""
    lines: list[str] = []
    for (kind, target), alike in kinds(merged(figures)).items():
        # Those with the same value stand in one line.
        names_of: dict[str, list[str]] = {}
        tests: list[str] = []
        rows = ", ".join(map(str, sorted({figure["row"] for _, figure in alike})))
        for name, figure in alike:
            names_of.setdefault(_measured(figure["value"]), []).append(name)
            test = f"`{_plain(figure).removeprefix('tests/faults/')}`"
            if test not in tests:
                tests.append(test)
        values: list[str] = []
        for measured, names in names_of.items():
            named = "; ".join(dict.fromkeys(filter(None, names)))
            values.append(f"{named}: {measured}" if named else measured)
        if target not in OBVIOUS:
            values.append(f"(wanted: {target})")
        cells = (rows, kind, "<br>".join(values), "<br>".join(tests))
        lines.append(f"| {' | '.join(cells)} |")
    return FIGURES + "\n".join(lines) + "\n"


def kinds(
    figures: Sequence[Mapping[str, Any]],
) -> dict[tuple[str, str], list[tuple[str, Mapping[str, Any]]]]:
    """(kind, target) -> its figures, each with the name of what it was measured on.

    A figure's text is "name: kind" or "kind: name". Several of one target that have the same words on one side of the
    colon are of that kind, with the side that more of them share. A text that shares neither side is a kind of its own,
    without a name.
    """
    sides: Counter[tuple[str, str]] = Counter()
    for figure in figures:
        head, _, tail = figure["what"].partition(": ")
        sides.update((side, figure["target"]) for side in {head, tail} if side)

    found: dict[tuple[str, str], list[tuple[str, Mapping[str, Any]]]] = {}
    for figure in figures:
        target = figure["target"]
        head, _, tail = figure["what"].partition(": ")
        before, after = sides[head, target], sides[tail, target]
        if not tail or max(before, after) == 1:
            kind, name = figure["what"], ""
        elif before >= after:
            kind, name = head, tail
        else:
            kind, name = tail, head
        found.setdefault((kind, target), []).append((name, figure))
    return found


def merged(figures: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Figures by row of the matrix, with trials of one kind in one line.

    A word before a colon says what trials were tried on ("bf16: runs that end"): those of all such words are summed.
    A test that repeats the same trials with a larger n counts once, with the largest n.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, figure in enumerate(sorted(figures, key=lambda each: (each["row"], each["what"]))):
        head, _, tail = figure["what"].partition(": ")
        trials = not isinstance(figure["value"], str)
        what, of = (tail, head) if trials and tail and " " not in head else (figure["what"], "")
        key = (figure["row"], _plain(figure), what, None if trials else number)
        kind = found.setdefault(key, {**figure, "what": what, "of": {}})
        if trials:
            largest = max(
                kind["of"].get(of, figure["value"]), figure["value"], key=lambda each: each[1]
            )
            kind["of"][of] = largest
    for kind in found.values():
        if not kind["of"]:
            continue
        kind["value"] = [sum(column) for column in zip(*kind["of"].values(), strict=True)]
        names = [name for name in kind["of"] if name]
        if len(names) > 1:
            counts = ", ".join(f"{name} {kind['of'][name][1]}" for name in names)
            kind["what"] += f" ({counts})"
        elif names:
            kind["what"] = f"{names[0]}: {kind['what']}"
    return list(found.values())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines; none where there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def attacks(ledger: Sequence[Mapping[str, Any]]) -> str:
    """What `make attack` has found so far, by family. ledger: its lines, oldest first."""
    lines = [line for line in ledger if line["result"] != "void"]
    by_kind = Counter(line["kind"] for line in lines).most_common()
    ends = Counter(line["result"] for line in lines)
    faults, commits = sum(line["faults"] for line in lines), len({line["commit"] for line in lines})
    text = [
        ATTACK,
        ABOUT,
        f"So far {len(lines):,} sequences of {faults:,} faults, at {commits} commits, the last of them "
        f"{lines[-1]['commit']}: {', '.join(f'{kind} {count:,}' for kind, count in by_kind)}. "
        f"Not counted: {len(ledger) - len(lines)} in which the attack itself was wrong.\n",
        "| as undisturbed | refused, then as undisturbed | known gap | wrong |",
        "|---|---|---|---|",
        f"| {ends['same']:,} | {ends['refused']:,} | {ends['known']:,} | {ends['finding']:,} |\n",
        *_found(lines),
        "",
        "| family | what it does | sequences | wrong | since the last wrong one |",
        "|---|---|---|---|---|",
    ]
    families = sorted({family for line in lines for family in line["families"]} - {"start"})
    for name in (*families, "all"):
        results = [line["result"] for line in lines if name == "all" or name in line["families"]]
        since = next(
            (number for number, end in enumerate(reversed(results)) if end == "finding"),
            len(results),
        )
        bound = f"{since:,} ({binomial_upper(0, since):.1%})" if since else "0"
        counts = f"{len(results):,} | {results.count('finding'):,}"
        text.append(f"| {name} | {_about(name)} | {counts} | {bound} |")
    return "\n".join(text) + "\n"


def _about(family: str) -> str:
    """The first sentence of the function that draws it."""
    documented = FAMILIES[family][1].__doc__ if family in FAMILIES else None
    return " ".join((documented or "").split()).partition(". ")[0].rstrip(".")


def _found(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many different wrong ends and gaps were found, and those whose sequence does not end well by now."""
    last = {(line["again"], line["plans"]): line for line in lines}
    shown: dict[str, Mapping[str, Any]] = {}
    for line in lines:
        if line["finding"] and line["finding"] not in UNPROTECTED:
            name = line["finding"][:60] if line["result"] == "finding" else line["finding"]
            shown.setdefault(name, line)
    if not shown:
        return []

    left: list[str] = []
    for line in shown.values():
        now = last[line["again"], line["plans"]]["result"]
        if now in ("known", "finding"):
            finding = " ".join(line["finding"].split())[:SHOWN].replace("|", "/").replace("`", "'")
            ended = {"known": "known gap", "finding": "open"}[now]
            left.append(f"| {finding} | `{line['again']}` | {line['commit']} | {ended} |")
    text = f"{len(shown)} different wrong ends and gaps were found. "
    if not left:
        return [text + "Each was fixed: its sequence, repeated, ends well."]
    return [
        f"{text}All but {len(left)} were fixed: their sequences, repeated, end well.\n",
        "| what is wrong | `make attack ARGS=` | at | now |",
        "|---|---|---|---|",
        *left,
    ]


def renewed(text: str, ledger: Sequence[Mapping[str, Any]]) -> str:
    """A page with the attack's sums as they are now."""
    return text.partition(ATTACK)[0] + attacks(ledger)


def problems(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tests that did not pass, and rows without any."""
    tests = [record for record in records if record["kind"] == "test"]
    shown = {row for test in tests for row in test["rows"]}
    return [
        f"{test['test']}: {test['outcome']}" for test in tests if test["outcome"] != "passed"
    ] + [f"row {row.number} has no test: {row.fault}" for row in MATRIX if row.number not in shown]


def _measured(value: str | list[int]) -> str:
    """A figure as text; trials with the share that may still fail, at 95%."""
    if isinstance(value, str):
        return value
    good, trials = value
    return f"{good:,} of {trials:,} ({binomial_upper(trials - good, trials):.2%})"


def _files(tests: Sequence[Mapping[str, Any]]) -> list[str]:
    """The files of some tests, as code."""
    return [f"`{file}`" for file in sorted({test["test"].partition("::")[0] for test in tests})]


def _plain(figure: Mapping[str, Any]) -> str:
    """The node without its parameters, whose brackets a shell would take for a pattern."""
    return figure["test"].partition("[")[0]


def _machine() -> str:
    import torch

    where = (
        f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, torch {torch.__version__}"
    )
    return f"{where}. Figures and tests are of commit {commit()}."


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
