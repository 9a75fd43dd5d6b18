"""What every code means and what to do about it, from `codes.toml`, which docs/runbook.md is made from too. Torch-free.

An entry is a code (`loss.spike`), several with one explanation (`run.resumed, run.started_from`), or a symptom, known
by its slug (`loss-that-plateaus`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harness.core.errors import ConfigError, Problem, near_match

_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_SENTENCE = re.compile(r"[.:](?:\s|$)")


@dataclass(frozen=True, slots=True)
class Entry:
    """One explanation. kind: "codes" (of the guard), "events" (of the run itself) or "symptoms". fields: label ->
    Markdown text. about: a line under the title, for the page only."""

    title: str
    kind: str
    fields: Mapping[str, str]
    about: str = ""

    @property
    def is_symptom(self) -> bool:
        """Whether it is what a person sees, and not a code."""
        return self.kind == "symptoms"

    @property
    def names(self) -> tuple[str, ...]:
        """Its codes, or a symptom's slug."""
        return (slug(self.title),) if self.is_symptom else tuple(self.title.split(", "))

    @property
    def line(self) -> str:
        """The first sentence of its first field, on one line."""
        text = without_marks(" ".join(next(iter(self.fields.values())).split()))
        sentence = _SENTENCE.split(text, maxsplit=1)[0]
        return sentence[:1].upper() + sentence[1:]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """entries: in the order of the page. ranking: (code, whether its step counts as healthy, what happens) from the
    worst to the least. page: texts of the page around them."""

    entries: tuple[Entry, ...]
    ranking: tuple[tuple[str, str, str], ...]
    page: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> Catalogue:
        """TOML as a catalogue. Raises ValueError or LookupError if it is none."""
        raw = tomllib.loads(text)
        entries = [
            Entry(title, kind, about=fields.pop("about", ""), fields=fields)
            for kind in ("codes", "events", "symptoms")
            for title, fields in raw[kind].items()
        ]
        return cls(tuple(entries), tuple(tuple(row) for row in raw["ranking"]), raw["page"])

    def find(self, name: str) -> Entry:
        """The entry of a code or a symptom. Raises ConfigError with the near match."""
        for entry in self.entries:
            if name in entry.names:
                return entry
        known = [known for entry in self.entries for known in entry.names]
        hint = near_match(name, known)
        fix = hint if hint.startswith("did") else "`harness explain` lists them; for a run, give its folder, runs/<run>"
        raise ConfigError(Problem(f'no code or symptom "{name}"', "harness explain", fix=fix))

    def ranked(self, codes: Iterable[str]) -> list[str]:
        """Those of `codes` that are alerts, each once, from the one that matters most to the least."""
        given = set(codes)
        return [code for code, *_ in self.ranking if code in given]


@cache
def catalogue() -> Catalogue:
    """The shipped one."""
    return Catalogue.parse(Path(__file__).with_name("codes.toml").read_text(encoding="utf-8"))


def slug(title: str) -> str:
    """`NaN after hours` -> `nan-after-hours`."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def without_marks(markdown: str) -> str:
    """Prose without Markdown's marks: `[text](address)` becomes its text."""
    return _LINK.sub(r"\1", markdown).replace("`", "").replace("**", "")
