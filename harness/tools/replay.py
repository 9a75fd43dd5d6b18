"""`harness replay`: run one step of a run again, observe it, and find where it broke and why."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.core.errors import ConfigError, Problem
from harness.core.screen import say
from harness.report import RunFolder
from harness.tools.restored import check_recipe, read_run

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

    A run folder that cannot be written, such as an archive, gets no file.

    Raises ConfigError for a step that the run has not done, CheckpointError if no state before it is left.
    """
    from harness.build import join_worker
    from harness.core.files import write_json
    from harness.replay.answer import lines, plain
    from harness.replay.flight import Branches, record_folder
    from harness.replay.investigate import Investigation

    branches = Branches(run_dir)
    # Raises an error for a step that the run does not have.
    branches.attempt_of(step)
    # One process plays all ranks, whatever engine the run had.
    _, config = read_run(branches.folder, ["engine.name=auto"])
    check_recipe(branches.folder, config.recipe)
    refuse_foreign_scale(branches, step)
    with tempfile.TemporaryDirectory(prefix="harness-replay-") as scratch:
        build = partial(rebuild, branches.folder, Path(scratch), join_worker(config, "python"))
        answer = Investigation(branches, step, config, build, say).answer(anomaly)

    for line in lines(answer):
        say(line)
    report = record_folder(branches.folder, step) / REPORT
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        write_json(report, plain(answer))
    except OSError as error:
        say(f"no report: {report}: {error.strerror or error}")
    else:
        say(f"report: {report}")
    return 0


def refuse_foreign_scale(branches: Branches, step: int) -> None:
    """Refuse fp16 under an engine with a loss scale of its own: no other engine can go on from its state."""
    if has_foreign_scale(branches, step):
        what = "DeepSpeed's fp16 cannot be replayed"
        fix = "start the run with torchrun, or with a bf16 or FP8 recipe"
        raise ConfigError(Problem(what, f"step {step}", "its loss scale is its own", fix))


def has_foreign_scale(branches: Branches, step: int) -> bool:
    """Whether `step` ran in fp16 under an engine with a loss scale of its own. Raises ConfigError as `attempt_of`."""
    from harness.build import ENGINES
    from harness.run_folder import read_plan

    _, engine = branches.ranks_of(step)
    own = engine in ENGINES and ENGINES[engine].owns_loss_scale
    resolved = str(read_plan(branches.folder).get("resolved", ""))
    return own and resolved.endswith(":fp16")


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
    from harness.precision.recipe import load_recipe
    from harness.run_folder import read_plan
    from harness.tools.rebuilt import assemble, require_data

    require_data(folder, config)
    recipe = load_recipe(recipe_name)
    return assemble(config, recipe, worker, folder, scratch, ledger, ranks, read_plan(folder))
