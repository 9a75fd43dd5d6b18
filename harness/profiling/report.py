"""The table of a profile as people read it, and its file, with what `harness estimate` predicts. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from harness.core.errors import shown
from harness.core.files import atomic_file, read_json
from harness.core.key_table import table as markdown
from harness.core.schema import Strict
from harness.profiling.kinds import KINDS
from harness.profiling.table import Table

NOT_YET = "harness profile RUN adds what estimate predicts for the card"

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0)]
_TAIL = ".table.json"


class _KindRow(Strict):
    kind: str
    seconds: _Seconds
    calls: _Count
    mostly: Annotated[str, Field(max_length=200)]


class _File(Strict):
    """The contents of a table's file; those of another program are refused."""

    steps: Annotated[tuple[_Count, ...], Field(min_length=1, max_length=1000, strict=False)]
    device: str
    rank: _Count
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    rows: Annotated[tuple[_KindRow, ...], Field(max_length=100, strict=False)]
    waits: _Count
    waited: _Seconds
    cut: str
    card: str
    predicted: dict[str, _Seconds]
    no_prediction: str


@dataclass(frozen=True, slots=True)
class Profile:
    """One profile.

    steps: their numbers.
    device: "cpu" or "cuda".
    rank: whose profile it is.
    seconds: of all its steps together, with what lies between them.
    rows: by kind, (kind, seconds of all steps, calls, the name that took most).
    waits, waited: how often the host waited for the device, and seconds, hidden or not.
    cut: what is missing of the trace; empty: nothing.
    card: that `predicted` is for.
    predicted: seconds of one step by kind; empty if nothing was predicted.
    no_prediction: why nothing was.
    """

    steps: tuple[int, ...]
    device: str
    rank: int
    seconds: float
    rows: tuple[tuple[str, float, int, str], ...]
    waits: int
    waited: float
    cut: str = ""
    card: str = ""
    predicted: Mapping[str, float] = field(default_factory=dict[str, float])
    no_prediction: str = ""

    @classmethod
    def of(cls, found: Table, rank: int, cut: str) -> Profile:
        """The profile with this table."""
        why = NOT_YET
        if found.device == "cpu":
            why = "no prediction: estimate knows cards, and these steps ran on a CPU"
        rows = tuple((row.kind, row.seconds, row.calls, row.mostly) for row in found.rows)
        return cls(
            found.steps,
            found.device,
            rank,
            found.seconds,
            rows,
            found.waits,
            found.waited,
            cut,
            no_prediction=why,
        )

    @classmethod
    def read(cls, path: Path) -> Profile | None:
        """The profile in a table's file; None if no run wrote it."""
        try:
            held = _File.model_validate(read_json(path))
        except (OSError, ValueError, ValidationError):
            return None
        if not all(row.kind in KINDS for row in held.rows):
            return None
        values = held.model_dump()
        values["rows"] = tuple((row.kind, row.seconds, row.calls, row.mostly) for row in held.rows)
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """The contents of the table's file."""
        values = asdict(self)
        names = ("kind", "seconds", "calls", "mostly")
        values["rows"] = [dict(zip(names, row, strict=True)) for row in self.rows]
        return values

    def with_prediction(self, card: str, predicted: Mapping[str, float]) -> Profile:
        """This profile beside what a step would take on `card`. predicted: seconds by kind."""
        return replace(self, card=card, predicted=dict(predicted), no_prediction="")

    def without_prediction(self, why: str) -> Profile:
        """This profile, with the reason why nothing is predicted."""
        return replace(self, card="", predicted={}, no_prediction=why)

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step."""
        return self.seconds / len(self.steps)

    def summary(self) -> str:
        """The length of a step, and the three kinds that take most of it."""
        largest = sorted(self.rows, key=lambda row: -row[1])[:3]
        parts = [f"{kind} {seconds / self.seconds:.0%}" for kind, seconds, _, _ in largest]
        return f"{_ms(self.step_seconds)} ms a step, {', '.join(parts)}"


def profiles(run_dir: Path) -> list[tuple[Path, Profile]]:
    """The tables in a run's folder that can be read, by name."""
    found: list[tuple[Path, Profile]] = []
    for path in sorted((run_dir / "profile").glob(f"steps-*{_TAIL}")):
        made = Profile.read(path)
        if made is not None:
            found.append((path, made))
    return found


def headings(made: Profile) -> list[str]:
    """The columns of the table."""
    names = ["what", "ms a step", "share", "calls a step", "mostly"]
    if made.predicted:
        names.insert(2, "predicted ms")
    return names


def rows(made: Profile) -> list[list[str]]:
    """The cells of the table, its last row the sum. A kind that is only predicted has a row, too."""
    steps = len(made.steps)
    measured = {kind: (seconds, calls, mostly) for kind, seconds, calls, mostly in made.rows}
    found: list[list[str]] = []
    for kind in KINDS:
        if kind not in measured and kind not in made.predicted:
            continue
        seconds, calls, mostly = measured.get(kind, (0.0, 0, ""))
        share = seconds / made.seconds
        cells = [kind, _ms(seconds / steps), f"{share:.1%}", _count(calls / steps), mostly]
        if made.predicted:
            expected = made.predicted.get(kind, math.nan)
            cells.insert(2, "-" if math.isnan(expected) else _ms(expected))
        found.append(cells)

    total = ["whole step", _ms(made.step_seconds), "100.0%", "", ""]
    if made.predicted:
        total.insert(2, _ms(sum(made.predicted.values())))
    found.append(total)
    return found


def notes(made: Profile) -> list[str]:
    """Lines under the table."""
    lines: list[str] = []
    if made.waits:
        each = made.waits / len(made.steps)
        text = f"The host waited for the device {_count(each)} times a step, "
        lines.append(
            f"{text}{_ms(made.waited / len(made.steps))} ms, most of it while the device worked."
        )
    if made.predicted:
        lines.append(
            f"Predicted: a usual step on a {made.card}, by harness estimate; a dash: not predicted."
        )
    if made.no_prediction:
        lines.append(made.no_prediction[:1].upper() + made.no_prediction[1:] + ".")
    if made.cut:
        lines.append(made.cut[:1].upper() + made.cut[1:] + ".")
    return lines


def named_steps(steps: Sequence[int]) -> str:
    """ "step 5", or "steps 5 to 8"."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"steps {steps[0]} to {steps[-1]}"


def title(made: Profile) -> str:
    """Which steps, where."""
    where = "a CPU" if made.device == "cpu" else "a GPU"
    return f"Profile of {named_steps(made.steps)}, rank {made.rank}, on {where}"


def write_text(made: Profile, path: Path) -> Path:
    """Write the table as Markdown beside its file `path`; returns where. Raises OSError."""
    target = path.with_name(path.name.removesuffix(_TAIL) + ".md")
    cells = [[shown(cell).replace("|", "/") for cell in row] for row in rows(made)]
    lines = [f"# {title(made)}", "", markdown(headings(made), cells), ""]
    lines += notes(made)
    text = shown("\n".join(lines))
    with atomic_file(target) as stream:
        stream.write(f"{text}\n".encode())
    return target


def _ms(seconds: float) -> str:
    """Milliseconds with three digits that count."""
    value = seconds * 1e3
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _count(number: float) -> str:
    if not number:
        return ""
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"
