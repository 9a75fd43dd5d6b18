"""`harness runs`: the runs of a folder, one line each."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.core.errors import ConfigError, ExitCode, Problem, number_of, shown
from harness.core.files import RUNS
from harness.core.memory import size_text
from harness.core.plan_text import aligned
from harness.core.screen import say
from harness.report import short
from harness.report.overview import Overview, Severity, State, overview
from harness.run_folder import is_locked
from harness.tracking.journal import JOURNAL

_NAMED_PRECISIONS = 3
_HEADINGS = (
    *("run", "state", "step", "train loss", "val loss"),
    *("recipe", "modules in", "events", "age", "size"),
)


class Sort(StrEnum):
    """What runs are sorted by; `newest` is by the time of the last row."""

    NEWEST = "newest"
    OLDEST = "oldest"
    NAME = "name"
    STATE = "state"
    STEP = "step"
    TRAIN_LOSS = "train_loss"
    VAL_LOSS = "val_loss"
    EVENTS = "events"
    SIZE = "size"


def command(
    folder: Annotated[Path, typer.Argument(help="folder of runs")] = RUNS,
    sort: Annotated[
        Sort,
        typer.Option(
            help="newest, oldest, name, state, step, train_loss, val_loss, events or size"
        ),
    ] = Sort.NEWEST,
    state: Annotated[
        State | None,
        typer.Option(
            help="list only: running, done, halted, stopped, crashed, broken, foreign or empty"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> int:
    """Print the runs; the exit code is 0 whatever their states are. Raises ConfigError if there is no such folder."""
    listed = in_order(list_runs(folder), sort)
    if state is not None:
        listed = [each for each in listed if each.state == state]
    if as_json:
        content = {"folder": str(folder), "runs": [each.as_json() for each in listed]}
        print(json.dumps(content, indent=1, allow_nan=False))
    else:
        _show(folder, listed)
    return int(ExitCode.DONE)


def list_runs(folder: Path) -> list[Overview]:
    """Every folder in `folder`, by name; hidden ones are left out. Raises ConfigError if `folder` cannot be listed."""
    if (folder / JOURNAL).is_file():
        fix = f"give the folder that it lies in: {short(folder.resolve().parent)}"
        raise ConfigError(Problem("is a run, not a folder of runs", str(folder), fix=fix))
    try:
        paths = [path for path in sorted(folder.iterdir()) if os.path.isdir(path)]
    except OSError as error:
        what = f"cannot be listed: {error.strerror}"
        fix = "give the folder that runs are in; harness train makes runs/ in the folder where it is started"
        raise ConfigError(Problem(what, str(folder), fix=fix)) from error
    return [overview(path, is_locked(path)) for path in paths if not path.name.startswith(".")]


def in_order(runs: Sequence[Overview], sort: Sort) -> list[Overview]:
    """`runs` sorted; runs without the figure come last."""
    keys: dict[Sort, Callable[[Overview], Any]] = {
        Sort.NEWEST: lambda run: -run.latest,
        Sort.OLDEST: lambda run: run.latest,
        Sort.NAME: lambda run: run.name,
        Sort.STATE: lambda run: list(State).index(run.state),
        Sort.STEP: lambda run: -1.0 * _known(run.step, -math.inf),
        Sort.TRAIN_LOSS: lambda run: _known(run.train_loss, math.inf),
        Sort.VAL_LOSS: lambda run: _known(run.val_loss, math.inf),
        Sort.EVENTS: lambda run: (
            -run.events.get(Severity.ERROR, 0),
            -run.events.get(Severity.WARNING, 0),
        ),
        Sort.SIZE: lambda run: -run.size,
    }
    return sorted(runs, key=keys[sort])


def _known(value: float | None, otherwise: float) -> float:
    """The value; `otherwise` if it is not known, or NaN, which has no place in an order."""
    if value is None or math.isnan(value):
        return otherwise
    return float(value)


def _show(folder: Path, runs: Sequence[Overview]) -> None:
    if not runs:
        say(f"no runs in {folder}")
        return
    rows: list[Sequence[str]] = [_HEADINGS]
    for run in runs:
        cells = (
            _name(run),
            run.state,
            _step(run),
            _loss(run.train_loss),
            _loss(run.val_loss),
            run.recipe or "-",
            _precisions(run),
            _events(run),
            age_text(run.age),
            size_text(run.size),
        )
        rows.append(tuple(shown(cell) for cell in cells))

    # One line a run, however narrow the terminal is.
    for line in aligned(rows):
        say(line)
    say("")

    # Why a run is not as it should be, below the table: the reasons are long.
    for run in runs:
        if run.reason and run.state not in (State.DONE, State.RUNNING):
            say(f"{_name(run)}: {run.state}: {run.reason}")
    counts = Counter(run.state for run in runs)
    say(", ".join(f"{counts[state]} {state}" for state in State if counts[state]))


def _name(run: Overview) -> str:
    """In one line: a folder's name may have line feeds."""
    return " ".join(run.name.split())


def _step(run: Overview) -> str:
    if run.step is None:
        return "-"
    return f"{run.step}/{run.steps}" if run.steps else str(run.step)


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _precisions(run: Overview) -> str:
    """`fp8 53%, fp32 40%`: shares of the modules."""
    shares = list(run.share.items())[:_NAMED_PRECISIONS]
    return ", ".join(f"{precision} {share:.0%}" for precision, share in shares) or "-"


def _events(run: Overview) -> str:
    """`2 errors (loss.spike)`: how many of each severity, and the worst code."""
    counted = [
        (run.events.get(severity, 0), severity) for severity in (Severity.ERROR, Severity.WARNING)
    ]
    texts = [number_of(count, severity) for count, severity in counted if count]
    return f"{', '.join(texts)} ({run.worst})" if texts else "-"


def age_text(seconds: float) -> str:
    """`12 s`, `3 min`, `5 h`, `8 d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
