"""`harness inspect`: a run's slots and account, once, or live while it trains (`--follow`). Starts without torch."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live

from harness.core.errors import ExitCode
from harness.core.screen import Screen
from harness.report import RunFolder
from harness.report.follow import Follower, as_json, header, view
from harness.report.inspect import bars_of, inspect
from harness.run_folder import is_locked
from harness.tracking.console import PLAIN_WIDTH
from harness.tracking.journal import JOURNAL, require_run, runs_in

PLAIN_SLOTS = 10
"""Slots that are printed at each change where stdout is no terminal."""
# Lines of a terminal that are not slots: a blank one, the headings, "and N more", and the prompt.
_AROUND = 4


def command(
    run: RunFolder,
    follow: Annotated[
        bool, typer.Option("--follow", help="live, slots sorted by trouble, until the run ends")
    ] = False,
    every: Annotated[
        float, typer.Option(help="with --follow: seconds between two looks", min=0.1)
    ] = 2.0,
    slots: Annotated[
        int | None,
        typer.Option(
            help="slots at most, with --follow or --json [default: as fit the terminal, else 10; all with --json]",
            min=1,
        ),
    ] = None,
    as_objects: Annotated[
        bool,
        typer.Option(
            "--json", help="print one JSON object; with --follow one a line at each change"
        ),
    ] = False,
) -> int:
    """The exit code is 0 however the run ended. Raises ConfigError if the folder is no run's."""
    if follow:
        return _follow(_expected(run), every, slots, as_objects)
    if as_objects:
        run = require_run(run)
        found = Follower(run)
        found.look(is_locked(run))
        print(json.dumps(as_json(found, slots), indent=1, allow_nan=False))
        return int(ExitCode.DONE)
    return inspect(run, _screen())


def _screen() -> Screen:
    """Where stdout is no terminal nobody sees how wide it is: names are cut late."""
    console = Screen()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def _expected(folder: Path) -> Path:
    """`folder`, resolved. With --follow it need not have a journal yet: a run may be about to begin in it.

    Raises ConfigError if there is no such folder, or if it has runs in it and is none itself.
    """
    # `require_run` raises in the last two of these cases.
    if (folder / JOURNAL).exists() or not folder.is_dir() or runs_in(folder):
        return require_run(folder)
    return folder.resolve()


def _follow(folder: Path, every: float, slots: int | None, as_objects: bool) -> int:
    """Show the run at each change, until it has ended."""
    run = Follower(folder)
    console = _screen()
    bars = bars_of(console)

    # On a terminal one view is redrawn in place. Elsewhere views, or JSON objects, follow each other.
    live: Live | None = None
    if console.is_terminal and not as_objects:
        live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    with live or nullcontext():
        while True:
            # Ask for the lock before reading. A run that no longer holds it has written all of its rows, so none is
            # missed when the run counts as ended.
            locked = is_locked(folder)
            if run.look(locked):
                if as_objects:
                    print(json.dumps(as_json(run, slots), allow_nan=False), flush=True)
                elif live is not None:
                    live.update(_fitting(run, console, slots, bars), refresh=True)
                else:
                    console.print(view(run, slots or PLAIN_SLOTS, bars))
                    console.print()
            if run.ended:
                return int(ExitCode.DONE)
            time.sleep(every)


def _fitting(run: Follower, console: Screen, slots: int | None, bars: str) -> RenderableType:
    """A view with as many slots as the terminal has lines for, at most `slots`."""
    room = max(1, console.size.height - len(header(run)) - _AROUND)
    return view(run, min(room, slots or room), bars)
