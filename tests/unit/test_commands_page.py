"""docs/reference/commands.md is made from the commands: `python tests/unit/test_commands_page.py` writes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from harness.cli import COMMANDS, _single

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "commands.md"
BEGIN, END = "<!-- commands: made by tests/unit/test_commands_page.py -->\n", "<!-- /commands -->"
GUIDES = {
    "compare": ("compare.md", "compare_replay.md"),
    "inspect": ("follow.md",),
    "rehearse": ("rehearse.md",),
    "sample": ("huggingface.md",),
    "eval": ("huggingface.md",),
    "doctor": ("doctor.md", "machine.md"),
    "drill": ("drill.md",),
    "profile": ("profile.md",),
    "estimate": ("estimate.md",),
    "data": ("data.md",),
    "export": ("models.md",),
    "report": ("report.md",),
}
"""Pages of the guide on a command."""
SEVERAL = 3
"""Commands that have an argument in the same words, from which on it is listed once."""


def shown_default(argument: Any) -> str:
    """As the help has it in brackets where the default is found at run time."""
    if argument.required:
        return " [required]"
    if argument.default in (None, False, "") or "[default:" in (argument.help or ""):
        return ""
    return f" [default: `{argument.default}`]"


def written(argument: Any) -> str:
    """As it is typed: NAME for a positional argument, `--name VALUE` for an option, `--name` for a flag."""
    if argument.param_type_name == "argument":
        return argument.name.upper() + (" ..." if argument.nargs == -1 else "")
    if argument.is_flag:
        return " / ".join([*argument.opts, *argument.secondary_opts])
    return f"{argument.opts[0]} {argument.metavar or argument.name.upper()}"


def rows(name: str) -> list[tuple[str, str]]:
    """Each argument of a command, and what it means, with its default."""
    command: Any = typer.main.get_command(_single(name))
    found: list[tuple[str, str]] = []
    for argument in command.params:
        if not argument.hidden:
            what = (argument.help or "").replace("|", "\\|").replace("<", "\\<")
            found.append((f"`{written(argument)}`", what + shown_default(argument)))
    return found


def table(shown: Iterable[tuple[str, str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in shown]
    return ["| argument | what |", "|---|---|", *lines, ""] if lines else []


def common() -> list[tuple[str, str]]:
    """Arguments that several commands have, with the same meaning and default: they are listed once."""
    counted = Counter(row for name in COMMANDS for row in rows(name))
    return [row for row, commands in counted.items() if commands >= SEVERAL]


def section(name: str) -> str:
    command: Any = typer.main.get_command(_single(name))
    lines = [f"## harness {name}", command.help, ""]
    guides = [f"[{page}](../guide/{page})" for page in GUIDES.get(name, ())]
    if guides:
        lines += [f"More: {', '.join(guides)}.", ""]
    shared = common()
    also = [row[0] for row in rows(name) if row in shared]
    if also:
        lines += [f"Also: {', '.join(also)}.", ""]
    return "\n".join([*lines, *table(row for row in rows(name) if row not in shared)])


def sections() -> str:
    shared = [
        "## Common arguments",
        "Several commands have these; each names its own after *Also*.",
        "",
    ]
    shared += table(common())
    return "\n".join([*shared, *(section(name) for name in COMMANDS)])


def test_the_page_has_every_command_with_its_arguments() -> None:
    _, _, rest = PAGE.read_text().partition(BEGIN)
    made, _, _ = rest.partition(END)
    assert made == sections(), (
        f"write it again: python {Path(__file__).relative_to(PAGE.parents[2])}"
    )


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{sections()}{END}{after}")
