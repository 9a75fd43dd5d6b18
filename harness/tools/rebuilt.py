"""A whole run, built again in one process, for commands that train some of its steps and leave its folder as it is."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.build import (
    Worker,
    build_data,
    build_plan,
    build_quiet_run,
    build_task,
    environment_of,
)
from harness.core.config import RunConfig
from harness.core.errors import DataError, Problem
from harness.core.state import RunLedger
from harness.precision.recipe import Recipe
from harness.replay.investigate import Rerun


def require_data(folder: Path, config: RunConfig) -> None:
    """Raises DataError if the run has lost its own copy of its data: what is at data.path may be other text today."""
    record = "corpus.json" if config.data.target is None else "target.json"
    if not (folder / "data" / record).is_file():
        fix = "restore the data folder from another copy of this run"
        what = "the run's copy of its text is missing"
        raise DataError(Problem(what, str(folder / "data"), fix=fix))


def assemble(
    config: RunConfig,
    recipe: Recipe,
    worker: Worker,
    folder: Path,
    scratch: Path,
    ledger: RunLedger,
    ranks: int,
    earlier: Mapping[str, Any] | None = None,
) -> Rerun:
    """A run in its initial state. It writes into a new folder in `scratch` alone.

    folder: its `data` describe the data; nothing is written there.
    ranks: of the original run.
    earlier: plan.json of the original run, which says which kernels its layers had.

    Raises HarnessError for what does not fit together, as a start does.
    """
    scratch = Path(tempfile.mkdtemp(dir=scratch))
    plan, model = build_plan(config, recipe, worker, earlier)
    data = build_data(config, folder, worker, read_only=True)

    task, _ = build_task(config, plan, model, data)
    run = build_quiet_run(config, recipe, scratch, worker, plan, model, data, ledger, task)
    return Rerun(run, model, ranks, plan.resolved, environment_of(run.config, worker, run.engine))
