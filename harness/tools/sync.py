"""`harness sync`: what MLflow has not got of a run's journal; and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.core.config import TrackingConfig, load_config
from harness.core.errors import ConfigError, MachineError, Problem
from harness.core.screen import say
from harness.report import RunFolder
from harness.tracking.history import RunHistory
from harness.tracking.journal import JOURNAL, POSITION, misplaced, require_run, tracking_uri
from harness.tracking.shipper import SET_ASIDE, sync


def command(
    run: RunFolder,
    restore: Annotated[
        bool, typer.Option("--restore", help="also bring back what MLflow has and a damaged journal lacks")
    ] = False,
) -> int:
    if restore and (run / POSITION).is_file() | (run / "config.yaml").is_file():
        (run / JOURNAL).touch()  # one that is gone is begun again
    config = require_run(run) / "config.yaml"
    if why := misplaced():
        fix = "call it from another folder, or set MLFLOW_TRACKING_URI"
        raise ConfigError(Problem("MLflow's database would not be in this folder", str(Path.cwd()), why, fix))
    if config.exists():
        experiment = load_config(str(config)).tracking.experiment
    else:  # of a loop that is not ours, which says it in its journal
        experiment = str(RunHistory.read(run).run["tags"].get("experiment", TrackingConfig().experiment))
    done = _restored(run, experiment) if restore else sync(run, experiment)
    if (aside := run / SET_ASIDE).exists():
        say(f"! lines of the journal that are no rows were set aside in {aside}")
    say("delivered" if done else f"not delivered; see {run / 'shipper.log'}")
    return 0 if done else 1


def _restored(run: Path, experiment: str) -> bool:
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
        found = find_run(require_run(run), experiment, tracking_uri())
        if not sync(run, experiment):
            return False
        say(restore(require_run(run), found, tracking_uri()))
        return sync(run, experiment)
