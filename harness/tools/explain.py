"""`harness explain`: what a code or a symptom means and what to do, or what happened in a run. Starts without torch.

`python -m harness.tools.explain` prints docs/runbook.md, the same texts as a page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.core.codes import Entry, catalogue, without_marks
from harness.core.errors import ExitCode

_ITEM = re.compile(r"^(?:[-*]|\d{1,2}\.) ", re.MULTILINE)
_HEADINGS = {"codes": "", "events": "Events of the run itself", "symptoms": "Symptoms"}


def command(
    subject: Annotated[
        str | None, typer.Argument(help="a code (loss.spike), a symptom, or a run folder [default: list all]")
    ] = None,
) -> int:
    return explain(subject, Console())


def explain(subject: str | None, console: Console) -> int:
    """Explain a code, a symptom or a run folder; without one, list what can be explained. The exit code.

    Raises ConfigError, with the near match, if there is no such code, symptom or run.
    """
    if subject is None:
        _list(console)
    elif "/" in subject or Path(subject).is_dir():
        _explain_run(Path(subject), console)
    else:
        _explain_entry(catalogue().find(subject), console)
    return int(ExitCode.DONE)


def plain(markdown: str) -> list[str]:
    """Markdown as lines to print: paragraphs and list items joined to one line each, code kept as it is, marks gone."""
    lines: list[str] = []
    fenced, joining = False, False
    for line in markdown.splitlines():
        if line.startswith("```"):
            fenced, joining = not fenced, False
        elif fenced:
            lines.append(f"    {line}")
        elif not line.strip() or line.startswith("|"):
            lines.append(line)
            joining = False
        elif joining and not _ITEM.match(line):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
            joining = True
    if lines:
        lines[0] = lines[0][:1].upper() + lines[0][1:]
    return [line if line.startswith("    ") else without_marks(line) for line in lines]


def _list(console: Console) -> None:
    known = catalogue()
    for heading, symptoms in (("Codes", False), ("Symptoms", True)):
        table = Table.grid(padding=(0, 2))
        for entry in known.entries:
            if entry.is_symptom == symptoms:
                for name in entry.names:
                    table.add_row(Text(name, style="bold"), Text(entry.title if symptoms else entry.line))
        console.print(Text(f"{heading}, each explained by: harness explain NAME"))
        console.print(table)
        console.print()


def _explain_entry(entry: Entry, console: Console) -> None:
    console.print(Text(entry.title, style="bold"))
    for label, markdown in entry.fields.items():
        console.print()
        console.print(Text(label, style="bold"))
        for line in plain(markdown):
            console.print(Text(line), soft_wrap=line.startswith("    "))


def _explain_run(run_dir: Path, console: Console) -> None:
    """Every code once, in the order in which they came up; then what to do about each, the worst first."""
    from harness.tools.postmortem import HALTED, command_line, distinct, next_steps, post_mortem
    from harness.tracking.history import RunHistory

    history, known = RunHistory.read(run_dir), catalogue()
    found = distinct(history.events)
    console.print(
        Text("What happened, each code where it first came up", style="bold") if found else Text("No events.")
    )
    for each in found:
        console.print(Text(f"{each.steps}: {each.times}: {each.text}"))
        if each.last_text != each.text:
            console.print(Text(f"    the last, step {each.last}: {each.last_text}"))
    for code in known.ranked(each.code for each in found):
        console.print()
        console.print(Text(f"What to do about {code}", style="bold"))
        for line in plain(known.find(code).fields.get("What to do", "")):
            console.print(Text(line), soft_wrap=line.startswith("    "))
    if history.outcome.get("status") == HALTED:
        console.print(post_mortem(history), crop=False)
    else:
        for label, command in next_steps(history):
            if label != "in order":
                console.print(command_line(label, command), crop=False)


def runbook() -> str:
    """docs/runbook.md, in Markdown."""
    known = catalogue()
    table = ["| code | healthy | what happens |", "|---|---|---|"]
    table += [f"| [`{code}`](#{code.replace('.', '')}) | {healthy} | {what} |" for code, healthy, what in known.ranking]
    parts = ["# Runbook", known.page["introduction"], "\n".join(table), known.page["ranking"]]
    for kind, heading in _HEADINGS.items():
        if heading:
            parts.append(f"## {heading}\n{known.page.get(kind, '')}".rstrip())
        parts += [_section(entry, "###" if heading else "##") for entry in known.entries if entry.kind == kind]
    return "\n\n".join(parts) + "\n"


def _section(entry: Entry, mark: str) -> str:
    """One entry as a section of the page. A list ends where a blank line follows."""
    text = f"{mark} {entry.title}" + (f"\n{entry.about}\n" if entry.about else "")
    before = ""
    for label, markdown in entry.fields.items():
        text += "\n\n" if _ITEM.search(before) else "\n"
        text += f"**{label}**:" + ("\n" if _ITEM.match(markdown) else " ") + markdown
        before = markdown
    return text


if __name__ == "__main__":
    print(runbook(), end="")
