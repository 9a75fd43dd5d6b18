"""`harness drill`: the deployment checklist as a command, on the user's own config.

It starts short runs of the config, does to them what the world does to runs, and judges what became of each. All of it
happens in a folder of its own. drill/ has the exercises, the judgements and the page.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from harness.core.errors import (
    ConfigError,
    ExitCode,
    HarnessError,
    Problem,
    clock,
    near_match,
    number_of,
)
from harness.core.screen import say
from harness.report import short
from harness.run_folder import base_name
from harness.stop import StoppedEarly, stop_while_starting
from harness.tools.start import ConfigName, Overrides, RecipeName, read_policies

if TYPE_CHECKING:
    from harness.core.config import RunConfig
    from harness.drill.bench import Bench
    from harness.drill.page import Result

DRILLS = Path("drills")
_FEWEST = 8
_FOLDER_HELP = "new or empty folder for everything that is made [default: drills/<config>-<recipe>]"


def command(
    overrides: Overrides = None,
    config: ConfigName = "quickstart",
    recipe: RecipeName = None,
    only: Annotated[
        str, typer.Option(metavar="NAME,...", help="exercises to do [default: all]")
    ] = "",
    steps: Annotated[int, typer.Option(help="steps of each run, at least 8")] = 12,
    folder: Annotated[Path | None, typer.Option(help=_FOLDER_HELP)] = None,
    patience: Annotated[float, typer.Option(help="minutes to wait for any one event")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> int:
    """Do the exercises; the exit code is 0 if all passed or do not apply, else 1.

    Raises ConfigError before anything is started. Stopped by a signal it ends its runs, writes the page, and exits
    with 75.
    """
    from harness.drill.bench import Bench

    stop_while_starting()
    run_config, _ = read_policies(config, overrides, recipe)
    names = _named(only)
    _check(run_config, steps, patience)

    # The runs of a drill have a folder of their own, so that none of the user's can be harmed.
    place = folder or _free_folder(config, run_config.recipe)
    bench = Bench.open(place, run_config, steps, 60 * patience)
    screen = sys.stderr if as_json else sys.stdout
    say(f"drill of {config} in {short(bench.folder)}: {number_of(len(names), 'exercise')}", screen)

    from harness.drill.page import HTML, Drill, facts_of, write

    began = time.time()
    with bench.kept():
        results, stopped = _do(bench, names, screen)
    # The page is written for a drill that was stopped, too: it has the exercises that were done.
    drill = Drill(config, results, facts_of(bench, began, overrides or ()))
    write(bench.folder, drill)
    if as_json:
        print(json.dumps(drill.as_json(), indent=1, allow_nan=False))
    say(f"{drill.summary}; page: {short(bench.folder / HTML)}", screen)
    return int(ExitCode.STOPPED if stopped else drill.exit_code)


def _named(only: str) -> list[str]:
    """The exercises that --only names, in their order. Raises ConfigError for a name that is none."""
    from harness.drill.exercises import EXERCISES

    given: list[str] = []
    for part in only.split(","):
        name = part.strip().lower()
        if name:
            given.append(name)
    problems: list[Problem] = []
    for name in given:
        if name not in EXERCISES:
            fix = near_match(name, list(EXERCISES))
            problems.append(Problem(f"no exercise {name!r}", "--only", fix=fix))
    if problems:
        raise ConfigError(problems)
    # In the order of the drill, whatever the order in which they were named.
    return [name for name in EXERCISES if not given or name in given]


def _check(config: RunConfig, steps: int, patience: float) -> None:
    """Raises ConfigError for a drill that could show nothing."""
    problems: list[Problem] = []
    if steps < _FEWEST:
        why = "a run needs several saves, and steps between them"
        what = f"{steps} are too few"
        problems.append(Problem(what, "--steps", why, fix=f"at least {_FEWEST}"))
    if not patience > 0:
        problems.append(Problem("must be over 0", "--patience", fix="minutes, such as 30"))
    if config.engine.name == "deepspeed":
        why = "a drill starts the runs as one process, which DeepSpeed's launcher does not do"
        fix = "engine.name=auto drills the same config without DeepSpeed"
        problems.append(Problem("deepspeed cannot be drilled", "engine.name", why, fix))
    if "RANK" in os.environ:
        fix = "call harness drill alone: it starts the ranks that it needs"
        problems.append(Problem("started as a rank of a launcher", "harness drill", fix=fix))
    if problems:
        raise ConfigError(problems)


def _free_folder(config_name: str, recipe_name: str) -> Path:
    """drills/<config>-<recipe>, or with -2, -3, ... at its end if it is taken."""
    base = base_name(config_name, recipe_name)
    number = 1
    while True:
        folder = DRILLS / (base if number == 1 else f"{base}-{number}")
        if not os.path.lexists(folder):
            return folder
        number += 1


def _do(bench: Bench, names: Sequence[str], screen: TextIO) -> tuple[list[Result], bool]:
    """Do the exercises one after the other. Returns their results, and whether a signal stopped the drill."""
    from harness.drill.child import Missed
    from harness.drill.exercises import EXERCISES
    from harness.drill.judge import Account, Verdict
    from harness.drill.page import Result

    results: list[Result] = []
    stopped = ""
    for name in names:
        exercise, about = EXERCISES[name]
        began = time.monotonic()
        account = Account("nothing", reason=stopped)
        if not stopped:
            say(f"{name}: {about} ...", screen)
            try:
                account = exercise(bench)
            except StoppedEarly as signal:
                stopped = f"the drill was stopped by {signal}"
                account = Account("interrupted", reason=stopped)
            except (Missed, HarnessError, OSError) as error:
                reason = str(error) or type(error).__name__
                account = Account("begun, and not ended", reason=reason)
            finally:
                # Servers and shippers that outlive their run, and whatever an exception left behind.
                bench.sweep()
        # What has passed is not looked at again, and its checkpoints take room.
        if account.verdict is Verdict.PASSED:
            bench.discard_checkpoints(name)
        results.append(Result(name, about, account, time.monotonic() - began))
        _show(results[-1], screen)
    return results, bool(stopped)


def _show(result: Result, screen: TextIO) -> None:
    """One line of verdict and evidence; below it whatever did not hold."""
    account = result.account
    line = f"{result.name}: {account.verdict} ({clock(result.seconds)})"
    if account.reason or account.fault:
        line += f": {account.reason or account.fault}"
    say(line, screen)
    for check in account.checks:
        if not check.holds:
            say(f"    expected: {check.expected}", screen)
            say(f"    seen:     {check.seen}", screen)
