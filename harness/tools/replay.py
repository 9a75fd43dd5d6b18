"""`harness replay`: run one step of a run again, observe it, and find where it broke and why."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.core.errors import ConfigError, DataError, Problem
from harness.core.screen import say
from harness.report import RunFolder
from harness.tools.restored import check_recipe

if TYPE_CHECKING:
    from harness.build import Worker
    from harness.core.config import RunConfig
    from harness.core.state import RunLedger
    from harness.replay.flight import Branches
    from harness.replay.investigate import Rerun

REPORT = "replay.json"


def command(
    run: RunFolder,
    step: Annotated[int, typer.Option(min=1, help="the step to run again")],
    anomaly: Annotated[
        bool, typer.Option("--anomaly", help="also use autograd's anomaly detection")
    ] = False,
) -> int:
    return replay(run, step, anomaly)


def replay(
    run_dir: Path,
    step: int,
    anomaly: bool,
    say: Callable[[str], None] = say,
) -> int:
    """Print the answer, and write it into `<run>/flight/step-<step>/replay.json`; returns 0.

    Raises ConfigError for a step that the run has not done, CheckpointError if no state before it is left.
    """
    from harness.build import join_worker
    from harness.core.config import load_config
    from harness.core.files import write_json
    from harness.replay.answer import lines, plain
    from harness.replay.flight import Branches, record_folder
    from harness.replay.investigate import Investigation

    branches = Branches(run_dir)
    # Raises an error for a step that the run does not have.
    branches.attempt_of(step)
    # One process plays all ranks, whatever engine the run had.
    config = load_config(str(branches.folder / "config.yaml"), ["engine.name=auto"])
    check_recipe(branches.folder, config.recipe)
    refuse_foreign_scale(branches, step)
    with tempfile.TemporaryDirectory(prefix="harness-replay-") as scratch:
        build = partial(rebuild, branches.folder, Path(scratch), join_worker(config, "python"))
        answer = Investigation(branches, step, config, build, say).answer(anomaly)

    for line in lines(answer):
        say(line)
    report = record_folder(branches.folder, step) / REPORT
    report.parent.mkdir(parents=True, exist_ok=True)
    write_json(report, plain(answer))
    say(f"report: {report}")
    return 0


def refuse_foreign_scale(branches: Branches, step: int) -> None:
    """Refuse fp16 under an engine with a loss scale of its own: no other engine can go on from its state."""
    from harness.build import ENGINES
    from harness.run_folder import read_plan

    _, engine = branches.ranks_of(step)
    own = engine in ENGINES and ENGINES[engine].owns_loss_scale
    resolved = str(read_plan(branches.folder).get("resolved", ""))
    if own and resolved.endswith(":fp16"):
        what = "DeepSpeed's fp16 cannot be replayed"
        fix = "start the run with torchrun, or with a bf16 or FP8 recipe"
        raise ConfigError(Problem(what, f"step {step}", "its loss scale is its own", fix))


def require_data(folder: Path, config: RunConfig) -> None:
    """Raise DataError if the run in `folder` has no copy of its data."""
    record = "corpus.json" if config.data.target is None else "target.json"
    if not (folder / "data" / record).is_file():
        fix = "restore the data folder from another copy of this run"
        what = "the run's copy of its text is missing"
        raise DataError(Problem(what, str(folder / "data"), fix=fix))


def rebuild(
    folder: Path,
    scratch: Path,
    worker: Worker,
    config: RunConfig,
    recipe_name: str,
    ledger: RunLedger,
    ranks: int,
) -> Rerun:
    """The run of `folder` in its initial state. It writes into a new folder in `scratch`, and not into the run."""
    from harness.build import (
        build_data,
        build_plan,
        build_run,
        build_task,
        environment_of,
        open_store,
        open_telemetry,
    )
    from harness.precision.recipe import load_recipe
    from harness.replay.investigate import Rerun
    from harness.run_folder import read_plan
    from harness.tracking.console import Console

    scratch = Path(tempfile.mkdtemp(dir=scratch))
    recipe = load_recipe(recipe_name)
    plan, model = build_plan(config, recipe, worker, read_plan(folder))

    # The data are the run's own copy, not what is at data.path today.
    require_data(folder, config)
    data = build_data(config, folder, worker)

    # No screen, no saves and no snapshots, and so no memory for copies of the state.
    quiet = Console(config.train.steps, stream=io.StringIO())
    telemetry = open_telemetry(config, scratch, worker, quiet, ledger.attempt)
    without_copies = {
        "checkpoint": config.checkpoint.model_copy(update={"background": False}),
        "guard": config.guard.model_copy(update={"snapshot_every": 0}),
    }
    config = config.model_copy(update=without_copies)
    store = open_store(scratch, worker)
    task, _ = build_task(config, plan, model, data)
    run = build_run(
        config, recipe, scratch, worker, plan, model, data, telemetry, ledger, store, task
    )
    run.keep_flight = None
    return Rerun(run, model, ranks, plan.resolved, environment_of(config, worker, run.engine))
