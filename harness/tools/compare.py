"""`harness compare`: in what two runs differ, how far they are apart, and where they diverge.

A comparison answers three questions from the run folders alone:

1. In which inputs do the runs differ: config, recipe, plan, data, libraries, machine?
2. How large are the gaps in loss, speed and memory?
3. At which step and in which tensor do the runs first differ, and what is the likely cause?
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.core.errors import ConfigError, ExitCode, HarnessError, Problem, clipped, some
from harness.core.files import RUNS
from harness.core.plan_text import aligned
from harness.core.screen import say
from harness.report import short
from harness.report.differences import (
    CONFIG,
    PLAN,
    PRECISIONS,
    SEEDS,
    Causes,
    Difference,
    differences,
    likely_causes,
)
from harness.report.divergence import Compared, Split, compare
from harness.report.sides import Gap, Ratio, Side, loss_gaps, memory, notes, pair, speed, two_sides
from harness.tools.compare_replay import Replay, replay_pair
from harness.tracking.existing import LOSS
from harness.tracking.history import RunHistory
from harness.tracking.journal import JOURNAL, require_run

# Limits of the text; --json has everything: names in a list, lines of differences, characters of a value.
_MOST_NAMED = 8
_MOST_KEYS = 60
_LONGEST_VALUE = 60


def command(
    runs: Annotated[
        list[str],
        typer.Argument(help="two runs, or several seeds of two configs: name in runs/, or folder"),
    ],
    no_picture: Annotated[
        bool, typer.Option("--no-picture", help="do not draw compare-A-B.png in the working folder")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    replay: Annotated[
        bool,
        typer.Option("--replay", help="run both again, to the first tensor that differs in a bit"),
    ] = False,
) -> int:
    """Print the comparison; the exit code is 0 whether the runs differ or not.

    Raises ConfigError for runs that cannot be compared; with --replay also what `replay_pair` raises.
    """
    made = compare_runs([RunHistory.read(path) for path in find_runs(runs)])
    # With --json as well: the object names the picture's path. Before a replay, which takes long: it may be refused.
    path = None if no_picture else _draw(made)
    if replay:
        made = replace(made, replay=replay_pair(made.pair, made.compared))
    if as_json:
        content = made.as_json() | {"picture": None if path is None else str(path)}
        print(json.dumps(content, indent=1, allow_nan=False))
        return int(ExitCode.DONE)
    for line in lines_of(made):
        say(line)
    if path is not None:
        say(f"\npicture  {short(path)}")
    return int(ExitCode.DONE)


def find_runs(given: Sequence[str]) -> list[Path]:
    """The run folders, each given by path or by its name in runs/. Raises ConfigError with everything that is wrong."""
    problems: list[Problem] = []
    if len(given) < 2:
        fix = f"name the run to compare it with: harness compare {given[0]} OTHER"
        raise ConfigError(Problem("one run is no comparison", "harness compare", fix=fix))

    found: dict[Path, str] = {}
    for text in given:
        # A name without a slash is one in runs/, unless a run's folder of that name is here.
        path = Path(text)
        if "/" not in text and not (path / JOURNAL).is_file():
            path = RUNS / text
        try:
            folder = require_run(path)
        except HarnessError as error:
            problems += error.problems
            continue
        if folder in found:
            what = "is given twice: a run equals itself"
            fix = "name another run to compare it with; harness runs lists them"
            problems.append(Problem(what, text, fix=fix))
        found[folder] = text
    if problems:
        raise ConfigError(problems)
    return list(found)


@dataclass(frozen=True)
class Comparison:
    """The whole comparison of two sides, each of one run or of several seeds.

    pair: one run of each side; only their steps are compared one by one.
    given: the inputs in which the two runs of `pair` differ.
    compared: their steps. causes: the likely causes of the first difference; None if there is none.
    gaps: between the losses of the sides. notes: what makes figures hard to compare.
    replay: the result of running both again; None if they were not.
    """

    a: Side
    b: Side
    given: Sequence[Difference]
    pair: tuple[RunHistory, RunHistory]
    compared: Compared
    causes: Causes | None
    gaps: Sequence[Gap]
    speed: Ratio | None
    memory: Ratio | None
    notes: Sequence[str]
    replay: Replay | None = None

    def as_json(self) -> dict[str, Any]:
        """What `harness compare --json` prints, without the picture."""
        first = self.compared.splits[0] if self.compared.splits else None
        # Runs that agree have no evidence and no causes, but the same keys.
        causes = self.causes or Causes("")
        found = self._without_replay(first, causes)
        if self.replay is not None:
            # A replay finds the first difference to the bit, if both runs can be reproduced. If not, the recorded one
            # stands.
            recorded = found["first_divergence"]
            found["first_divergence"] = self.replay.first_divergence or recorded
            found |= {"recorded_divergence": recorded, "replay": self.replay.as_json()}
        return found

    def _without_replay(self, first: Split | None, causes: Causes) -> dict[str, Any]:
        """The same from the run folders alone. first: the first difference; None if the runs agree."""
        return {
            "a": self.a.as_json(),
            "b": self.b.as_json(),
            "differences": [each.as_json() for each in self.given],
            "loss": {gap.what: gap.as_json() for gap in self.gaps},
            "speed": None if self.speed is None else self.speed.as_json(),
            "memory": None if self.memory is None else self.memory.as_json(),
            "compared": {
                "a": short(self.pair[0].run_dir),
                "b": short(self.pair[1].run_dir),
                "steps": self.compared.steps,
                "first_step": self.compared.first,
                "last_step": self.compared.last,
                "every_slot": self.compared.slots,
                "only_repeated_steps_differ": self.compared.again,
            },
            "first_divergence": None if first is None else first.as_json(),
            "differ_in_that_step": [each.as_json() for each in self.compared.splits],
            "evidence": causes.evidence,
            "likely_causes": [each.as_json() for each in causes.likely],
            "notes": list(self.notes),
        }


def compare_runs(runs: Sequence[RunHistory]) -> Comparison:
    """Compare the runs. Raises ConfigError for runs without figures, or without a step that both have."""
    problems: list[Problem] = []
    for run in runs:
        if not run.points(LOSS) and not run.rows.executed(LOSS):
            what = "has no step with a loss: it ended before its first step, or its journal lost its rows"
            fix = "name a run that trained; harness runs lists them with their steps"
            problems.append(Problem(what, short(run.run_dir), fix=fix))
    if problems:
        raise ConfigError(problems)

    # Runs make two sides; of each side one run is taken to compare step by step.
    a, b = two_sides(runs)
    one, other = pair(a, b)
    compared = compare(one, other)
    if not compared.steps:
        spans = [_span(run) for run in (one, other)]
        what = f"no step is in both runs: {one.run_dir.name} has {spans[0]}, {other.run_dir.name} {spans[1]}"
        fix = "compare runs that trained over the same steps"
        raise ConfigError(Problem(what, "harness compare", fix=fix))
    # Inputs that differ are possible causes; speed and memory are compared over all runs of a side.
    given = differences(one, other)
    throughput = speed(a, b)
    peak = memory(a, b)
    return Comparison(
        a=a,
        b=b,
        given=given,
        pair=(one, other),
        compared=compared,
        causes=likely_causes(compared, one, other),
        gaps=loss_gaps(a, b),
        speed=throughput,
        memory=peak,
        notes=notes(a, b, is_measured=throughput is not None or peak is not None),
    )


def _span(run: RunHistory) -> str:
    """The steps of a run that have a loss."""
    steps = run.rows.executed(LOSS).steps
    return f"steps {steps[0]}-{steps[-1]}"


def _draw(made: Comparison) -> Path:
    """Draw the picture into the working folder. Returns its path. Raises ConfigError if it cannot be written."""
    from harness.report.compare_picture import draw, picture_path

    first = made.compared.splits[0].step if made.compared.splits else None
    path = picture_path(made.a, made.b, Path.cwd())
    try:
        return draw(made.a, made.b, path, first)
    except OSError as error:
        what = f"the picture cannot be written: {error.strerror}"
        fix = "start in a folder that can be written, or leave it out: --no-picture"
        raise ConfigError(Problem(what, str(path), fix=fix)) from error


def lines_of(made: Comparison) -> list[str]:
    """The comparison as text."""
    lines: list[str] = []
    for side in (made.a, made.b):
        paths = some([short(run.run_dir) for run in side.runs], _MOST_NAMED)
        seeds = ", ".join(str(seed) for seed in side.seeds)
        lines.append(f"{side.letter}  {paths} (seed {seeds})")
    lines += ["", *_given_lines(made)]
    lines += ["", *_gap_lines(made)]
    lines += ["", *_divergence_lines(made)]
    if made.replay is not None:
        lines += ["", *made.replay.lines()]
    return lines


def _given_lines(made: Comparison) -> list[str]:
    """A line for each input that differs. Layers of the plan that differ in the same way share a line."""
    has_seeds = len(made.a.runs) > 1 or len(made.b.runs) > 1
    listed: list[Difference] = []
    # (precision in A, in B) -> the layers.
    layers: dict[tuple[Any, Any], list[str]] = {}
    for each in made.given:
        if each.kind == PLAN and each.key not in PRECISIONS:
            layers.setdefault((each.a, each.b), []).append(each.key)
        elif has_seeds and each.kind == CONFIG and each.key in SEEDS:
            # A side with several seeds differs in them by intent, and its heading names them.
            continue
        else:
            listed.append(each)

    rows = [("differs", "A", "B")]
    rows += [(_named(each), _value(each.a), _value(each.b)) for each in listed[:_MOST_KEYS]]
    for (a, b), names in layers.items():
        rows.append((f"plan: {some(names, 3)}", _value(a), _value(b)))
    if len(rows) == 1:
        # Causes may be from before a resume.
        when = " at the end" if made.causes is not None and made.causes.likely else ""
        kinds = "config, recipe, plan, data, libraries, machine"
        return [f"nothing that is recorded differs{when}: {kinds}"]
    lines = aligned(rows)
    if len(listed) > _MOST_KEYS:
        lines.append(f"and {len(listed) - _MOST_KEYS} more: --json lists them")
    return lines


def _named(each: Difference) -> str:
    """The key that differs; one that is not of the config has its kind before it."""
    if each.kind == CONFIG:
        return each.key
    return f"{each.kind}: {each.key}"


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return clipped(str(value), _LONGEST_VALUE)


def _gap_lines(made: Comparison) -> list[str]:
    """Two tables, of the losses and of speed and memory, and the notes on them."""
    rows = [("", "A", "B", "B - A", "95% interval")]
    for gap in made.gaps:
        interval = "-"
        if gap.interval is not None:
            interval = f"{gap.interval[0]:+.4f} to {gap.interval[1]:+.4f}"
        rows.append((gap.name, f"{gap.a:.4f}", f"{gap.b:.4f}", f"{gap.gap:+.4f}", interval))
    lines = aligned(rows)

    # Speed and memory are compared as ratios, and only where both sides have them.
    rows = [("", "A", "B", "B / A")]
    for name, ratio in (("speed, median", made.speed), ("peak memory", made.memory)):
        if ratio is None:
            continue
        b_of_a = f"{ratio.b / ratio.a:.3f}"
        rows.append((f"{name}, {ratio.unit}", f"{ratio.a:,.4g}", f"{ratio.b:,.4g}", b_of_a))
    if len(rows) > 1:
        lines += ["", *aligned(rows)]
    return [*lines, *(f"note: {text}" for text in made.notes)]


def _divergence_lines(made: Comparison) -> list[str]:
    """At which step and tensor the runs first differ, and the likely cause."""
    compared = made.compared
    names = [run.run_dir.name for run in made.pair]
    span = f"steps {compared.first}-{compared.last}"
    if compared.first == compared.last:
        span = f"step {compared.first}"
    span += f" of {names[0]} and {names[1]}"
    if not compared.splits:
        lines = [f"no divergence: all recorded figures of {span} agree, to the last bit"]
        if not compared.slots and any(map(_quantises, made.pair)):
            lines.append(f"  {_NOT_EVERY_SLOT}: where not, only the journal's series were compared")
        return lines

    # The first tensor in the order of computation. Others of that step may only follow from it.
    first = compared.splits[0]
    lines = [f"first divergence, of {span}: step {first.step}, {_split_text(first)}"]
    if compared.again:
        lines.append("  steps agree as they ran at first; they differ where they ran again")
    others = [f"{each.tensor} {each.kind}" for each in compared.splits[1:]]
    if others:
        lines.append(f"  also in that step: {some(others, _MOST_NAMED)}")
    if not compared.slots and any(map(_quantises, made.pair)):
        lines.append(f"  {_NOT_EVERY_SLOT}: an earlier tensor may differ")
    if made.causes is not None:
        lines.append(f"  {made.causes.evidence}")
        lines += map(_cause_text, made.causes.likely[:_MOST_NAMED])
    return lines


_NOT_EVERY_SLOT = "FP8 figures of every step are not in both runs"


def _quantises(run: RunHistory) -> bool:
    """Whether the run has FP8 figures, or should have them by its plan."""
    return bool(run.slots() or run.expected_slots())


def _cause_text(each: Difference) -> str:
    return f"  likely cause: {_named(each)}: A {_value(each.a)}, B {_value(each.b)}"


def _split_text(split: Split) -> str:
    return f"{split.tensor} {split.kind}: A {split.a!r}, B {split.b!r}"
