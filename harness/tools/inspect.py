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
"""Slots of a block where stdout is no terminal."""
# Lines of a terminal around the slots: the blank one above, headings, "and N more", and the prompt.
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
    return inspect(run, Screen())


def _expected(folder: Path) -> Path:
    """`folder`, in which a run may be about to begin. Raises ConfigError if there is none, or it has runs in it."""
    if (folder / JOURNAL).exists() or not folder.is_dir() or runs_in(folder):
        return require_run(folder)
    return folder.resolve()


def _follow(folder: Path, every: float, slots: int | None, as_objects: bool) -> int:
    """Show the run at each change, until it has ended."""
    run = Follower(folder)
    console = Screen()
    bars = bars_of(console)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    live: Live | None = None
    if console.is_terminal and not as_objects:
        live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
    with live or nullcontext():
        while True:
            # The lock first: what its owner has written by then is there.
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
    """As many slots as the terminal has lines for, or `slots` if these are fewer."""
    room = max(1, console.size.height - len(header(run)) - _AROUND)
    return view(run, min(room, slots or room), bars)
