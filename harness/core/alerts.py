"""What every code means and what to do about it, read from docs/runbook.md. Torch-free.

The runbook is the only source. A heading of codes (`## loss.spike`, `### run.stopped, run.resumed`) begins an entry,
and so does each heading under `## Symptoms`, known by its slug (`loss-that-plateaus`). An entry is made of fields,
paragraphs that begin with a bold label: `**What**: ...`. Rows of the table of codes go from the worst to the least.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from harness.core.errors import ConfigError, Problem, near_match
from harness.core.resources import resource_dir

CODE = re.compile(r"[a-z0-9]+\.[a-z]+(?:_[a-z]+)*")
SYMPTOMS = "Symptoms"

_HEADING = re.compile(r"(#+) (.+)")
_ROW = re.compile(rf"\| \[?`({CODE.pattern})`")
_FIELD = re.compile(r"^\*\*([A-Z][^*\n]*)\*\*: ?", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_SENTENCE = re.compile(r"[.:](?:\s|$)")


@dataclass(frozen=True, slots=True)
class Entry:
    """One section of the runbook. names: its codes, or a symptom's slug. fields: label -> Markdown text."""

    title: str
    names: tuple[str, ...]
    fields: Mapping[str, str]
    is_symptom: bool = False

    @property
    def line(self) -> str:
        """The first sentence of its first field, on one line."""
        text = " ".join(next(iter(self.fields.values()), "").split()).replace("`", "")
        sentence = _SENTENCE.split(text, maxsplit=1)[0]
        return sentence[:1].upper() + sentence[1:]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """entries: in the order of the runbook. ranking: codes from the worst to the least."""

    entries: tuple[Entry, ...]
    ranking: tuple[str, ...]

    def find(self, name: str) -> Entry:
        """The entry of a code or a symptom. Raises ConfigError with the near match."""
        for entry in self.entries:
            if name in entry.names:
                return entry
        known = [known for entry in self.entries for known in entry.names]
        hint = near_match(name, known)
        fix = hint if hint.startswith("did") else "`harness explain` lists them; for a run, give its folder, runs/<run>"
        raise ConfigError(Problem(f'no code or symptom "{name}"', "harness explain", fix=fix))

    def worst(self, codes: Iterable[str]) -> str | None:
        """The code that matters most; None if none of them is an alert."""
        given = set(codes)
        return next((code for code in self.ranking if code in given), None)


@cache
def catalogue() -> Catalogue:
    """The shipped runbook; empty where the file is missing, since no run may fail for want of it."""
    try:
        return parse((resource_dir("docs") / "runbook.md").read_text(encoding="utf-8"))
    except OSError:
        return Catalogue((), ())


def parse(text: str) -> Catalogue:
    """A runbook as a catalogue."""
    entries: list[Entry] = []
    part, title, body = "", "", list[str]()
    fenced = False
    for line in [*text.splitlines(), "# end"]:
        fenced ^= line.startswith("```")
        heading = None if fenced else _HEADING.fullmatch(line)
        if heading is None:
            body.append(line)
            continue
        entries += _entry(title, part == SYMPTOMS and title != SYMPTOMS, "\n".join(body))
        title, body = heading[2], []
        part = title if len(heading[1]) <= 2 else part
    return Catalogue(tuple(entries), tuple(dict.fromkeys(_ROW.findall(text))))


def slug(title: str) -> str:
    """`NaN after hours` -> `nan-after-hours`."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _entry(title: str, is_symptom: bool, body: str) -> list[Entry]:
    """A section as an entry; none if its heading names neither codes nor a symptom."""
    names = tuple(word for word in re.split(r"[ ,]+", title) if CODE.fullmatch(word))
    if is_symptom:
        names = (slug(title),)
    if not names:
        return []
    pieces = _FIELD.split(_LINK.sub(r"\1", body))
    fields = {label: text.strip() for label, text in zip(pieces[1::2], pieces[2::2], strict=True)}
    return [Entry(title, names, fields, is_symptom)]
