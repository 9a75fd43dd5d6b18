"""The gauntlet's table and picture, made from its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from harness.core.files import atomic_file

OURS = "ours"
CLOSE, WORSE = 0.01, 0.05
"""Shares over the clean run's loss, up to which a run counts as near it and as worse."""
KINDS = {
    "near": ("#74c476", f"within {CLOSE:.0%} of the clean run"),
    "worse": ("#fed976", f"{CLOSE:.0%} to {WORSE:.0%} above it"),
    "bad": ("#fd8d3c", f"more than {WORSE:.0%} above it"),
    "halted": ("#9ecae1", "halted, with the reason"),
    "broken": ("#cb181d", "NaN or crashed"),
}
"""Kinds of ends: colour and name."""
Row = Mapping[str, Any]
Ran = Mapping[str, Any]


def over(run: Ran, clean: float) -> float:
    """The loss over that of the clean run, as a share."""
    return run["loss"] / clean - 1


def kind(run: Ran, clean: float) -> str:
    """A key of KINDS."""
    if run["status"] == "halted":
        return "halted"
    if run["loss"] is None:
        return "broken"
    if abs(over(run, clean)) <= CLOSE:
        return "near"
    return "worse" if over(run, clean) <= WORSE else "bad"


def cell(run: Ran, clean: float) -> str:
    """What a run came to: its loss over the clean run's, or how it ended, and the steps lost."""
    text = str(run["status"])
    if run["loss"] is not None:
        text = f"{over(run, clean):+.1%}"
    return f"{text}, {run['lost']} lost" if run["lost"] else text


def false_alarms(row: Row) -> int:
    """Events of ours before the fault, without one, or about another layer than the one at fault."""
    count = 0
    for event in row["runs"].get(OURS, {}).get("events", ()):
        early = not row["at"] or event["step"] < row["at"] - 1
        # Its step is that of the state that a restart begins with, which is older than the kill.
        early = early and not event["code"].startswith("checkpoint.")
        elsewhere = (
            row["place"]
            and event["code"] == "precision.demote"
            and row["place"] not in event["text"]
        )
        # A warning before the first step is about the settings.
        at_start = event["step"] == 0 and event["code"] in row["codes"]
        count += bool((early or elsewhere) and not at_start)
    return count


def named(row: Row) -> str:
    """Whether an event of ours has the right code and place: yes or no; "-" where there is nothing to name."""
    if not row["codes"]:
        return "-"
    for event in row["runs"].get(OURS, {}).get("events", ()):
        if event["code"] in row["codes"] and row["place"] in event["text"]:
            return "yes"
    return "no"


def blamed(row: Row) -> str:
    """The codes of ours, each with its first step, and the cause that `harness replay` gives."""
    run = row["runs"].get(OURS)
    if run is None:
        return ""
    first: dict[str, int] = {}
    for event in run["events"]:
        first.setdefault(event["code"], event["step"])
    parts = [f"`{code}` {step}" for code, step in first.items()]
    if run["cause"]:
        parts.append(f"replay: {run['cause']}")
    return "; ".join(parts) or "nothing"


def table(record: Mapping[str, Any]) -> str:
    """Markdown: what every loop came to."""
    loops = record["loops"]
    lines = [
        f"| scenario | {' | '.join(loops)} |",
        f"|---|{'---|' * len(loops)}",
    ]
    for row in record["rows"]:
        cells = [cell(row["runs"][loop], row["clean"]) for loop in loops]
        lines.append(f"| {row['scenario']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def answers(record: Mapping[str, Any]) -> str:
    """Markdown: what was planted, and what ours said of it."""
    lines = [
        "| scenario | planted | a right answer | ours reported, first at step | named |",
        "|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        judged = named(row)
        alarms = false_alarms(row)
        if alarms:
            text = f"{alarms} false alarms"
            judged = text if judged == "-" else f"{judged}, {text}"
        cells = [row["scenario"], row["planted"], row["right"], blamed(row), judged]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def counts(record: Mapping[str, Any]) -> str:
    """Markdown: in how many scenarios a loop came to which end."""
    loops = record["loops"]
    lines = [f"| | {' | '.join(loops)} |", f"|---|{'---|' * len(loops)}"]
    for key, (_, name) in KINDS.items():
        numbers = [
            str(sum(kind(row["runs"][loop], row["clean"]) == key for row in record["rows"]))
            for loop in loops
        ]
        lines.append(f"| {name} | {' | '.join(numbers)} |")
    lost = [str(sum(row["runs"][loop]["lost"] for row in record["rows"])) for loop in loops]
    lines.append(
        f"| steps lost, of {record['steps'] * len(record['rows']):,} | {' | '.join(lost)} |"
    )
    return "\n".join(lines)


def near(record: Mapping[str, Any]) -> str:
    """A sentence: in how many scenarios each loop ends near the clean run."""
    rows = record["rows"]
    found: list[str] = []
    for loop in record["loops"]:
        count = sum(kind(row["runs"][loop], row["clean"]) == "near" for row in rows)
        found.append(f"{loop} {count}")
    return f"Of {len(rows)} scenarios these end within {CLOSE:.0%} of the clean run: {', '.join(found)}."


def draw(record: Mapping[str, Any], path: Path) -> None:
    """A field for each run, coloured by its end."""
    rows: Sequence[Row] = record["rows"]
    loops: Sequence[str] = record["loops"]
    figure = Figure(figsize=(9.0, 0.29 * len(rows) + 1.6), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for y, row in enumerate(rows):
        for x, loop in enumerate(loops):
            run = row["runs"][loop]
            key = kind(run, row["clean"])
            axes.barh(y, 0.96, left=x + 0.02, height=0.9, color=KINDS[key][0])
            axes.text(
                x + 0.5,
                y,
                cell(run, row["clean"]),
                ha="center",
                va="center",
                fontsize=8,
                color="white" if key == "broken" else "#222222",
            )
    axes.set_yticks(range(len(rows)), [row["scenario"] for row in rows], fontsize=9)
    axes.set_xticks([x + 0.5 for x in range(len(loops))], loops)
    axes.xaxis.tick_top()
    axes.set_xlim(0, len(loops))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for colour, name in KINDS.values():
        axes.barh(0, 0, color=colour, label=name)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    with atomic_file(path) as stream:
        figure.savefig(stream, format="png", facecolor="white")
