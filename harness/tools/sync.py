"""`harness sync`: what MLflow has not got of a run's journal."""

from __future__ import annotations

from pathlib import Path

from harness.core.config import TrackingConfig, load_config
from harness.core.errors import ConfigError, Problem
from harness.core.screen import say
from harness.report import RunFolder
from harness.tracking.history import RunHistory
from harness.tracking.journal import misplaced, require_run
from harness.tracking.shipper import SET_ASIDE, sync


def command(run: RunFolder) -> int:
    config = require_run(run) / "config.yaml"
    if why := misplaced():
        fix = "call it from another folder, or set MLFLOW_TRACKING_URI"
        raise ConfigError(Problem("MLflow's database would not be in this folder", str(Path.cwd()), why, fix))
    if config.exists():
        experiment = load_config(str(config)).tracking.experiment
    else:  # of a loop that is not ours, which says it in its journal
        experiment = str(RunHistory.read(run).run["tags"].get("experiment", TrackingConfig().experiment))
    done = sync(run, experiment)
    if (aside := run / SET_ASIDE).exists():
        say(f"! lines of the journal that are no rows were set aside in {aside}")
    say("delivered" if done else f"not delivered; see {run / 'shipper.log'}")
    return 0 if done else 1
