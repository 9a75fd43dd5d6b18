"""`harness sync`: deliver to MLflow the part of a run's journal that it lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.core.config import TrackingConfig, load_config
from harness.core.screen import say
from harness.report import RunFolder
from harness.tracking.journal import (
    JOURNAL,
    SET_ASIDE,
    Position,
    finished_size,
    read_rows,
    require_run,
)
from harness.tracking.shipper import portion, sync
from harness.tracking.store import choose_for_sync

PATIENCE = 60.0
"""Seconds without success after which a delivery is given up."""


def command(
    run: RunFolder,
    elsewhere: Annotated[
        bool,
        typer.Option(
            "--elsewhere",
            help="to the store in MLFLOW_TRACKING_URI, not the run's own",
        ),
    ] = False,
) -> int:
    config = require_run(run) / "config.yaml"
    choice = choose_for_sync(config.parent, elsewhere)

    # A loop of the user's own has no config: its journal names the experiment.
    experiment = _experiment(run)
    if config.exists():
        experiment = load_config(str(config)).tracking.experiment

    done = sync(run, experiment, PATIENCE, choice, say)
    if (aside := run / SET_ASIDE).exists():
        say(f"! lines of the journal that are no rows were set aside in {aside}")
    if done:
        say(f"delivered to {choice.destination.uri}")
        return 0

    # How far it came, where the errors are, and what else may be tried.
    far = portion(Position.load(run).offset, finished_size(run / JOURNAL))
    text = f"not delivered to {choice.destination.uri}: {far}; see {run / 'shipper.log'}"
    if choice.unsent:
        text += f"; {choice.unsent}"
    if not elsewhere:
        text += "; to deliver to another store: --elsewhere"
    say(text)
    return 1


def _experiment(run: Path) -> str:
    """The experiment of the run's last start, by its journal; else the default."""
    experiment = TrackingConfig().experiment
    for row in read_rows(run / JOURNAL, metrics=False):
        if row["kind"] == "run":
            experiment = str(row.get("tags", {}).get("experiment", experiment))
    return experiment
