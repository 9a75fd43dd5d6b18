"""`harness explain`: what a code or a symptom means and what to do, or what happened in a run.

The texts are in `codes.toml`. An entry is a code (`loss.spike`), several codes with one explanation (`run.resumed,
run.started_from`), or a symptom, named by its slug (`loss-that-plateaus`). `python -m harness.report.explain` prints
docs/reference/runbook.md, the same texts as a page.

What happened in a run comes from its folder: the journal's events, outcome.json, checkpoints/good.json, flight/. A run
that the guard halted ends with the same account, its post-mortem. Starts without torch.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.checkpoint.manifest import read_marks
from harness.core.errors import ConfigError, ExitCode, Problem, clipped, near_match, some
from harness.core.files import step_name
from harness.core.screen import Screen
from harness.report import short, tool, typed
from harness.report.symptoms import found

if TYPE_CHECKING:
    from harness.tracking.history import RunHistory

_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_CODE = re.compile(r"`([^`]+)`")
_SENTENCE = re.compile(r"[.:](?:\s|$)")
LAST_ALERTS = 8
MOST_CODES = 500
MAX_EVENT = 4000
MOST_WINDOWS = 12
HALTED = "halted"
_PLATEAU = "loss-that-plateaus"
# A validation loss over this share of the unigram entropy is poor, after so many updates. The quickstart is at 0.8 or
# less after 50.
_LITTLE, _SOME_LENGTH = 0.95, 50
_HALT, _ROLLBACK = "guard.halt", "guard.rollback"
_OF_HARNESS_TRAIN = (
    "This run is a loop of your own. Below, keys of train, data, engine and checkpoint (such as train.lr) stand for "
    "what your loop sets itself; those of guard and tracking are arguments of Guard.for_precision and "
    "Telemetry.for_precision; in place of --resume, load a state that you saved."
)
# Codes whose cause another learning rate would not cure.
_KEEP_LR = ("data.", "ranks.", "checkpoint.", "journal.")


@dataclass(frozen=True, slots=True)
class Entry:
    """One explanation.

    title: its codes, or a symptom in words.
    kind: "codes" (of the guard), "events" (of the run itself) or "symptoms".
    fields: label -> Markdown text.
    """

    title: str
    kind: str
    fields: Mapping[str, str]

    @property
    def is_symptom(self) -> bool:
        """Whether it is what a person sees, and not a code."""
        return self.kind == "symptoms"

    @property
    def names(self) -> tuple[str, ...]:
        """Its codes, or a symptom's slug."""
        if self.is_symptom:
            return (slug(self.title),)
        return tuple(self.title.split(", "))

    @property
    def line(self) -> str:
        """The first sentence of its first field, on one line."""
        first = next(iter(self.fields.values()))
        text = without_marks(" ".join(first.split()))
        sentence = _SENTENCE.split(text, maxsplit=1)[0]
        return sentence[:1].upper() + sentence[1:]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All explanations.

    entries: in the order of the page.
    ranking: (code, whether its step counts as healthy, what happens), from the worst to the least.
    page: texts of the page around the entries.
    said: code or slug -> phrases by which people ask for it.
    """

    entries: tuple[Entry, ...]
    ranking: tuple[tuple[str, str, str], ...]
    page: Mapping[str, str]
    said: Mapping[str, Sequence[str]]

    @classmethod
    def parse(cls, text: str) -> Catalogue:
        """TOML as a catalogue. Raises ValueError or LookupError if it is none."""
        raw = tomllib.loads(text)
        entries: list[Entry] = []
        for kind in ("codes", "events", "symptoms"):
            for title, fields in raw[kind].items():
                entries.append(Entry(title, kind, fields))
        ranking = tuple(tuple(row) for row in raw["ranking"])
        return cls(tuple(entries), ranking, raw["page"], raw["said"])

    def find(self, name: str) -> Entry:
        """The entry of a code or a symptom. Raises ConfigError with the near match."""
        for entry in self.entries:
            if name in entry.names:
                return entry
        names: list[str] = []
        for entry in self.entries:
            names += entry.names
        fix = near_match(name, names)
        if not fix.startswith("did"):
            fix = "`harness explain` lists them; for a run, give its folder, runs/<run>"
        raise ConfigError(Problem(f'no code or symptom "{name}"', "harness explain", fix=fix))

    def search(self, question: str) -> list[Entry]:
        """The entries that a question in free words may mean, the likeliest first."""
        by_title: dict[str, Entry] = {}
        words: dict[str, list[str]] = {}
        for entry in self.entries:
            by_title[entry.title] = entry
            words[entry.title] = [entry.title, *self._phrases(entry)]
        return [by_title[title] for title in found(question, words)]

    def _phrases(self, entry: Entry) -> list[str]:
        """What people may type for an entry: its names, and the phrases of `said`."""
        phrases = [*entry.names]
        for name in entry.names:
            phrases += self.said.get(name, ())
        return phrases

    def ranked(self, codes: Iterable[str]) -> list[str]:
        """Those of `codes` that are alerts, each once, from the one that matters most to the least."""
        given = set(codes)
        return [code for code, *_ in self.ranking if code in given]


@cache
def catalogue() -> Catalogue:
    """The catalogue that is shipped."""
    path = Path(__file__).with_name("codes.toml")
    return Catalogue.parse(path.read_text(encoding="utf-8"))


def slug(title: str) -> str:
    """`NaN after hours` -> `nan-after-hours`."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def without_marks(markdown: str) -> str:
    """Prose without Markdown's marks: `[text](address)` becomes its text."""
    return _LINK.sub(r"\1", markdown).replace("`", "").replace("**", "")


@dataclass(frozen=True, slots=True)
class Streak:
    """Events of one code.

    first, last: the lowest and the highest step.
    latest: step of the event that came last; after a rollback that may be a lower one.
    text, last_text: texts of the first event and of the last.
    attempt: the attempt of the first event.
    windows: the events' windows (places in the data order), in order.
    """

    code: str
    first: int
    last: int
    latest: int
    count: int
    text: str
    last_text: str
    attempt: int
    windows: tuple[int, ...] = ()

    @property
    def steps(self) -> str:
        """`step 23`, `steps 23-27`."""
        if self.first == self.last:
            return f"step {self.first}"
        return f"steps {self.first}-{self.last}"

    @property
    def times(self) -> str:
        """`loss.skip`, `nonfinite.skip x 3 (windows 4, 5, 9)`: the same windows in two attempts point to the data."""
        if self.count == 1:
            return self.code
        text = f"{self.code} x {self.count}"
        if self.windows:
            text += f" (windows {some(self.windows, MOST_WINDOWS)})"
        return text


def streaks(events: Sequence[Mapping[str, Any]]) -> list[Streak]:
    """Events in order, with neighbours of one code and attempt joined."""

    def code_and_attempt(event: Mapping[str, Any]) -> tuple[str, int]:
        return str(event["code"]), int(event["attempt"])

    # Events of one code in a row, within one attempt.
    joined: list[Streak] = []
    for (code, attempt), group in groupby(events, code_and_attempt):
        each = list(group)
        first = each[0]
        last = each[-1]
        streak = Streak(
            code=code,
            first=int(first["step"]),
            last=int(last["step"]),
            latest=int(last["step"]),
            count=len(each),
            text=described(first),
            last_text=described(last),
            attempt=attempt,
            windows=_windows(each),
        )
        joined.append(streak)
    return joined


def distinct(events: Sequence[Mapping[str, Any]]) -> list[Streak]:
    """Each code once, in the order of its first event."""
    found: dict[str, Streak] = {}
    for each in streaks(events):
        first = found.get(each.code)
        if first is None:
            found[each.code] = each
            continue
        found[each.code] = replace(
            first,
            first=min(first.first, each.first),
            last=max(first.last, each.last),
            latest=each.latest,
            count=first.count + each.count,
            last_text=each.last_text,
            windows=first.windows + each.windows,
        )
    return list(found.values())


def _windows(events: Iterable[Mapping[str, Any]]) -> tuple[int, ...]:
    windows = (event.get("window") for event in events)
    return tuple(window for window in windows if isinstance(window, int))


def described(event: Mapping[str, Any]) -> str:
    """An event as one line of text, whatever kind it is."""
    # A rollback's own fields say more than its text.
    if event["code"] == _ROLLBACK:
        windows = some(event.get("passed_over") or (), MOST_WINDOWS) or "none"
        back = f"back to step {event.get('to_step')}, windows skipped: {windows}"
        return f"{event.get('reason', '')}; {back}"

    moves: list[str] = []
    if demoted := event.get("demote"):
        moves.append(f"{', '.join(demoted)} to BF16")
    if promoted := event.get("promote"):
        moves.append(f"{', '.join(promoted)} back to FP8")
    whole_run = ""
    if event.get("lowered"):
        whole_run = f"the whole run to {event['lowered']}"

    # The first that says something: a text for readers, else what the fields say.
    text = event.get("text") or event.get("reason")
    text = text or "; ".join(moves) or whole_run or event.get("path") or ""
    return clipped(str(text), MAX_EVENT)


def cause(history: RunHistory) -> str | None:
    """The code to read first: the worst of the last attempt that has an alert. A rollback cured earlier attempts."""
    codes_by_attempt: dict[int, list[str]] = {}
    for event in history.events:
        codes_by_attempt.setdefault(int(event["attempt"]), []).append(event["code"])
    for attempt in sorted(codes_by_attempt, reverse=True):
        if alerts := catalogue().ranked(codes_by_attempt[attempt]):
            return alerts[0]
    return None


def learned_little(history: RunHistory) -> bool:
    """Whether a run of some length ended near the unigram entropy: it learned only how frequent bytes or tokens are."""
    nats = history.last("val/loss")
    unigram = history.unigram_nats
    if nats is None or not unigram:
        return False
    applied = history.points("train/step_applied").figures
    if (applied == 1).sum() < _SOME_LENGTH:
        return False
    # Not `>=`: a NaN is no good loss either.
    return not nats < _LITTLE * unigram


def flights(run_dir: Path) -> list[int]:
    """Steps that the flight recorder kept: `harness replay` can run them again."""
    records = run_dir.glob("flight/step-*/record.json")
    names = {path.parent.name.removeprefix("step-") for path in records}
    return sorted(int(name) for name in names if name.isdecimal())


def next_steps(history: RunHistory) -> list[tuple[str, str]]:
    """(label, command) of what to type next; empty for a run with nothing to explain."""
    harness = tool("harness")
    run = typed(history.run_dir)
    lines: list[tuple[str, str]] = []
    if code := cause(history):
        lines.append(("explain", f"{harness} explain {code}"))
        lines.append(("in order", f"{harness} explain {run}"))
    if learned_little(history):
        lines.append(("poor loss", f"{harness} explain {_PLATEAU}"))

    # The first bad step: later ones often follow from it.
    if kept := flights(history.run_dir):
        others = ", ".join(map(str, kept[1:]))
        also = f"  (kept too: {others})" if others else ""
        lines.append(("origin", f"{harness} replay {run} --step {kept[0]}{also}"))
    return lines


def post_mortem(history: RunHistory) -> RenderableType:
    """Why the run halted, what led to it, what is still good, and the commands to go on with."""
    # outcome.json has the last halt, also one that the guard did not decide. Where a full disk took that file, the
    # journal has the guard's.
    halt = next((event for event in reversed(history.events) if event["code"] == _HALT), {})
    last = {**halt, **history.outcome}
    lines = [("what happened", f"halted at step {last.get('step', '?')}: {last.get('reason', '')}")]

    before = [event for event in history.events if event["code"] != _HALT]
    for place, each in enumerate(streaks(before)[-LAST_ALERTS:]):
        label = "" if place else "last alerts"
        lines.append((label, f"{each.steps}: {each.times}: {each.text}"))

    # `harness train` can go on with its own runs only.
    commands = next_steps(history)
    if not history.of_own_loop:
        good = _good(history.run_dir)
        text = "none: no checkpoint has checkpoint.healthy_steps healthy steps behind it"
        how = "start again"
        if good:
            text = short(good)
            how = "go on"
        lines.append(("good checkpoint", text))
        commands = [(how, go_on(history)), *commands]

    table = Table.grid(padding=(0, 2))
    for label, text in lines:
        table.add_row(Text(label, style="bold"), Text(text))
    heading = Text("\nPost-mortem", style="bold")
    return Group(heading, table, *(command_line(*each) for each in commands))


def command_line(label: str, command: str) -> Text:
    """One line however narrow the terminal, so that the command can be copied. Print it with crop=False."""
    line = Text(no_wrap=True, overflow="ignore")
    return line.append(f"{label:<15}  ", style="bold").append(command)


def go_on(history: RunHistory) -> str:
    """The command for a new run from the good checkpoint, or from the start if there is none.

    The same settings would end the same way, so it halves the learning rate. It does not if the data or a machine is at
    fault. If no update was ever applied, a lower rate is no help: fp32 shows whether numerics are at fault. Windows
    that this run skipped stay skipped.
    """
    run_dir = history.run_dir
    good = _good(run_dir)
    config = f"{short(run_dir)}/config.yaml"
    words = [tool("harness"), "train", "--config", shlex.quote(config)]
    words += ["--name", shlex.quote(_free_name(run_dir))]
    if good:
        words += ["--resume", typed(good)]

    # What the new run does in another way.
    lr = history.run["params"].get("train.lr")
    if (cause(history) or "").startswith(_KEEP_LR):
        pass  # neither a lower rate nor fp32 would cure it
    elif not good and 1.0 not in history.points("train/step_applied").figures:
        words += ["--recipe", "fp32"]
    elif isinstance(lr, int | float):
        words.append(f"train.lr={lr / 2:g}")

    # torchrun and deepspeed give each rank this variable: the command alone would train on one card.
    line = " ".join(words)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        line += "  (under this run's launcher)"
    return line


def _good(run_dir: Path) -> Path | None:
    """The newest checkpoint that earned its mark and is still there; `--resume` verifies its hashes."""
    checkpoints = run_dir / "checkpoints"
    for step in reversed(read_marks(checkpoints)):
        folder = checkpoints / step_name(step)
        if folder.is_dir():
            return folder
    return None


def _free_name(run_dir: Path) -> str:
    """`r` -> `r-2`, or the next number that no folder has."""
    number = 2
    while (run_dir.parent / f"{run_dir.name}-{number}").exists():
        number += 1
    return f"{run_dir.name}-{number}"


_ITEM = re.compile(r"^(?:[-*]|\d{1,2}\.) ", re.MULTILINE)
_BLOCK = "    "
_INDENT = "  "
# Longer lines are hard to read, however wide the terminal is.
_WIDTH = 100
# Labels on the page, where every entry repeats them.
_LABELS = {"What to do": "Do", "What to change": "Change", "Where to look": "Look"}
_HEADINGS = {"codes": "", "events": "Events of the run itself", "symptoms": "Symptoms"}


def command(
    subject: Annotated[
        list[str] | None,
        typer.Argument(
            help="code (loss.spike), run folder, or what you see, in words [default: list all]"
        ),
    ] = None,
) -> int:
    return explain(" ".join(subject) if subject else None, Screen())


def explain(subject: str | None, console: Screen) -> int:
    """Explain a code, a symptom, a run folder or a question in free words; without a subject, list all codes.

    Returns the exit code. Raises ConfigError, with the near match, if there is no such code, symptom or run.
    """
    if subject is None:
        _list(console)
    elif Path(subject).is_dir() or ("/" in subject and " " not in subject):
        _explain_run(Path(subject), console)
    elif meant := _meant(subject):
        _suggest(subject, meant, console)
    else:
        _explain_entry(catalogue().find(subject), console)
    return int(ExitCode.DONE)


def _meant(subject: str) -> list[Entry]:
    """The entries that a question in words may mean; none for a name, or for a misspelt name."""
    names: list[str] = []
    for entry in catalogue().entries:
        names += entry.names
    if subject in names:
        return []
    looks_like_a_name = " " not in subject and re.search(r"[.-]", subject)
    if looks_like_a_name and near_match(subject, names).startswith("did"):
        return []
    return catalogue().search(subject)


def _suggest(subject: str, meant: Sequence[Entry], console: Screen) -> None:
    console.print(Text(f'"{subject}" may be:', style="bold"))
    for entry in meant:
        # The title of a symptom is a sentence; a code says nothing by itself.
        text = entry.title if entry.is_symptom else f"{entry.title}: {entry.line}"
        console.print()
        console.print(Text(text))
        console.print(Text(f"    {tool('harness')} explain {entry.names[0]}"), soft_wrap=True)


def plain(markdown: str) -> list[str]:
    """`unwrapped`, without Markdown's marks."""
    lines = unwrapped(markdown)
    return [line if line.startswith(_BLOCK) else without_marks(line) for line in lines]


def unwrapped(markdown: str) -> list[str]:
    """Paragraphs and list items joined to one line each; blocks of code as they are, indented by four spaces."""
    lines: list[str] = []
    fenced = False  # within a block of code
    joining = False  # the line before may go on
    for line in markdown.splitlines():
        if line.startswith("```"):
            fenced, joining = not fenced, False
        elif fenced:
            lines.append(_BLOCK + line)
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
    return lines


def _list(console: Screen) -> None:
    for heading, symptoms in (("Codes", False), ("Symptoms", True)):
        table = Table.grid(padding=(0, 2))
        for entry in catalogue().entries:
            if entry.is_symptom != symptoms:
                continue
            text = entry.title if symptoms else entry.line
            for name in entry.names:
                table.add_row(Text(name, style="bold"), Text(text))
        console.print(Text(f"{heading}, each explained by: harness explain NAME"))
        console.print(table)
        console.print()


def _explain_entry(entry: Entry, console: Screen) -> None:
    console.print(Text(entry.title, style="bold"))
    for label, markdown in entry.fields.items():
        console.print()
        console.print(Text(label, style="bold"))
        _print_markdown(markdown, console)


def _print_markdown(markdown: str, console: Screen) -> None:
    """Indented and wrapped, items of a list under their first word; a block of code keeps its lines, to be copied."""
    for line in unwrapped(markdown):
        if line.startswith(_BLOCK):
            console.print(Text(_INDENT + line), soft_wrap=True)
            continue
        # The mark of a list's item stands before its first line; the others are indented by as much.
        mark = _ITEM.match(line)
        first = _INDENT
        if mark:
            first += mark[0]
            line = line[mark.end() :]
        indent = first
        width = min(console.width, _WIDTH) - len(first)
        for part in _with_code_shown(line).wrap(console, width):
            part.rstrip()
            console.print(Text(indent) + part if part else "")
            indent = " " * len(first)


def _with_code_shown(line: str) -> Text:
    """A line of Markdown with its code in another colour, where the terminal has colours."""
    text = Text()
    # Prose and code in turn, prose first.
    for place, part in enumerate(_CODE.split(line)):
        if place % 2:
            text.append(part, style="cyan")
        else:
            text.append(without_marks(part))
    return text


def _explain_run(run_dir: Path, console: Screen) -> None:
    """Every code once, in the order in which they came up; then what to do about each, the worst first."""
    from harness.tracking.history import RunHistory
    from harness.tracking.journal import JOURNAL

    history = RunHistory.read(run_dir)
    known = catalogue()

    # What happened.
    events = distinct(history.events)
    if events:
        console.print(Text("What happened, each code where it first came up", style="bold"))
    elif any(history.run.values()) or not (history.run_dir / JOURNAL).stat().st_size:
        console.print(Text("No events."))
    else:
        console.print(Text(f"No events: {JOURNAL} has no row that can be read."))
    for each in events[:MOST_CODES]:
        console.print(Text(f"{each.steps}: {each.times}: {each.text}"))
        if each.last_text != each.text:
            console.print(Text(f"    the last, step {each.latest}: {each.last_text}"))
    if len(events) > MOST_CODES:
        console.print(Text(f"and {len(events) - MOST_CODES} more codes"))

    # What to do about it. The texts name keys of `harness train`.
    codes = known.ranked(each.code for each in events)
    if codes and history.of_own_loop:
        console.print()
        console.print(Text(_OF_HARNESS_TRAIN))
    for code in codes:
        console.print()
        console.print(Text(f"What to do about {code}", style="bold"))
        _print_markdown(known.find(code).fields.get("What to do", ""), console)

    # Where to look next, without the command that was just given.
    if history.outcome.get("status") == HALTED:
        console.print(post_mortem(history), crop=False)
    else:
        for label, command in next_steps(history):
            if label != "in order":
                console.print(command_line(label, command), crop=False)


def runbook() -> str:
    """docs/reference/runbook.md, in Markdown."""
    known = catalogue()

    # The codes by what happens, each with a link to its entry.
    by_effect: dict[str, list[str]] = {}
    for code, healthy, what in known.ranking:
        # As GitHub makes it from the heading, which may have several codes.
        anchor = re.sub(r"[^a-z0-9_ -]", "", known.find(code).title).replace(" ", "-")
        unhealthy = r"\*" if healthy == "no" else ""
        by_effect.setdefault(what, []).append(f"[`{code}`](#{anchor}){unhealthy}")
    table = ["| what happens | codes |", "|---|---|"]
    for what, codes in by_effect.items():
        table.append(f"| {what} | {', '.join(codes)} |")
    parts = ["# Runbook", known.page["introduction"], "\n".join(table), known.page["ranking"]]

    # The entries. Codes of the guard come first, under no heading of their own.
    for kind, heading in _HEADINGS.items():
        if heading:
            parts.append(f"## {heading}\n{known.page.get(kind, '')}".rstrip())
        mark = "###" if heading else "##"
        parts += [_section(entry, mark) for entry in known.entries if entry.kind == kind]
    return "\n\n".join(parts) + "\n"


def _section(entry: Entry, mark: str) -> str:
    """One entry as a section of the page, a paragraph for each field. The first one needs no label there."""
    first, *others = entry.fields.items()
    parts = [f"{mark} {entry.title}", first[1]]
    for field, markdown in others:
        label = _LABELS.get(field, field)
        # A list begins on a line of its own.
        between = "\n" if _ITEM.match(markdown) else " "
        parts.append(f"**{label}**:{between}{markdown}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(runbook(), end="")
