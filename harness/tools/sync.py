"""`harness sync`: what MLflow has not got of a run's journal; and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.core.config import TrackingConfig, load_config
from harness.core.errors import MachineError, Problem
from harness.core.screen import say
from harness.report import RunFolder
from harness.tracking.journal import JOURNAL, POSITION, Position, finished_size, read_rows, require_run
from harness.tracking.shipper import SET_ASIDE, portion, sync
from harness.tracking.store import Choice, choose_for_sync


def command(
    run: RunFolder,
    restore: Annotated[
        bool, typer.Option("--restore", help="also bring back what MLflow has and a damaged journal lacks")
    ] = False,
    elsewhere: Annotated[
        bool,
        typer.Option("--elsewhere", help="deliver to where MLFLOW_TRACKING_URI says, not to the store of the run"),
    ] = False,
) -> int:
    if restore and (run / POSITION).is_file() | (run / "config.yaml").is_file():
        (run / JOURNAL).touch()  # one that is gone is begun again
    config = require_run(run) / "config.yaml"
    choice = choose_for_sync(config.parent, elsewhere)
    # A loop of one's own has no config: the journal names its experiment.
    experiment = load_config(str(config)).tracking.experiment if config.exists() else _experiment(run)
    done = _restored(run, experiment, choice) if restore else sync(run, experiment, choice=choice, said=say)
    if (aside := run / SET_ASIDE).exists():
        say(f"! lines of the journal that are no rows were set aside in {aside}")
    if done:
        say(f"delivered to {choice.store.uri}")
    else:
        why = f"; {choice.unsent}" if choice.unsent else ""
        again = "" if elsewhere else "; to deliver to another store: --elsewhere"
        far = portion(Position.load(run).offset, finished_size(run / JOURNAL))
        say(f"not delivered to {choice.store.uri}: {far}; see {run / 'shipper.log'}{why}{again}")
    return 0 if done else 1


def _experiment(run: Path) -> str:
    """The experiment that the run's last start named, else the default."""
    experiment = TrackingConfig().experiment
    for row in read_rows(run / JOURNAL, metrics=False):
        if row["kind"] == "run":
            experiment = str(row.get("tags", {}).get("experiment", experiment))
    return experiment


def _restored(run: Path, experiment: str, choice: Choice) -> bool:
    """Both ways; no run may write there meanwhile. What the journal has is delivered first, so that a figure that comes
    back is not sent again as news.
    """
    from harness.run_folder import RunLock

    try:
        from harness.tracking.mlflow import find_run, restore
    except ImportError as error:
        fix = "pip install 'hopper-harness[mlflow]'"
        raise MachineError(Problem("MLflow cannot be asked", "--restore", str(error), fix)) from error

    with RunLock(run):
        found = find_run(require_run(run), experiment, choice.uri)
        if not sync(run, experiment, choice=choice):
            return False
        say(restore(require_run(run), found, choice.uri))
        return sync(run, experiment, choice=choice)
