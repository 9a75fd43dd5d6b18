"""`harness sync`: what MLflow has not got of a run's journal."""

from __future__ import annotations

from harness.core.config import load_config
from harness.report import RunFolder
from harness.tracking.rows import require_run
from harness.tracking.shipper import sync


def command(run: RunFolder) -> int:
    config = load_config(str(require_run(run) / "config.yaml"))
    done = sync(run, config.tracking.experiment)
    print("delivered" if done else f"not delivered; see {run / 'shipper.log'}")
    return 0 if done else 1
