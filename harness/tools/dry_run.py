"""`harness train --dry-run`: everything that `harness train` checks before its first step, and no step.

It takes the same way as train.py up to the first file of the run: arguments, machine, data, plan, model, memory, disk,
and the loss of one sample. What it prints is what the run would begin with. Data are read as for a run: text that has
to be tokenized is tokenized, into a folder that is removed at the end.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path

from harness.build import Worker
from harness.checkpoint.recovery import fallback_folders
from harness.checkpoint.store import Store
from harness.core.deferred import computing
from harness.core.errors import CheckpointError, ExitCode, Problem
from harness.core.findings import Finding
from harness.core.memory import size_text
from harness.core.state import state_bytes
from harness.engines.process_group import lost_rank_named
from harness.optim.lints import epsilon_finding
from harness.optim.optimizers import optimizer_bytes
from harness.optim.schedule import too_high
from harness.run_folder import RunLock, place_of_runs
from harness.tools.examine import lint_run
from harness.tools.preflight import memory_text
from harness.tools.resume import (
    StartingPoint,
    agree_on_folder,
    choose_state,
    find_start,
    finished_text,
)
from harness.tools.start import Request
from harness.tools.train import Job, doubts, first_lines, headline, meet, prepare
from harness.tracking.console import Console, plan_table


@lost_rank_named()
def check(request: Request) -> int:
    """Check the job on this rank, and print what it would begin with; returns the exit code. Collective.

    Raises HarnessError for whatever `harness train` refuses before its first step. No run folder is made, and one that
    is there keeps its files.
    """
    config, source, worker = meet(request)
    folder = agree_on_folder(request, source, worker)
    goes_on = (folder / "config.yaml").exists()
    # A run that another process is writing is refused, as it would be in training.
    lock = RunLock(folder) if worker.is_lead and goes_on else nullcontext()
    with lock:
        start = find_start(request, config, folder, source)
        # Rank 0 alone prints: all ranks would say the same.
        stream = None if worker.is_lead else open(os.devnull, "w")  # noqa: SIM115
        console = Console(config.train.steps, stream=stream)
        if text := finished_text(folder, config.train.steps):
            console.say(text)
            return ExitCode.DONE

        with _data_place(start, worker) as place:
            job = prepare(request, place, worker)
            console.say(headline(request, worker, folder))
            console.say(plan_table(job.plan.as_dict()))
            for line in _report(request, place, job, worker):
                console.say(line)
            console.say(_beginning(start, worker))
            # The other ranks wait below: what rank 0 finds holds for them, too.
            if worker.is_lead:
                for finding in _findings(request, job):
                    console.say(f"{finding.severity} {finding}")
            # Other ranks may still read what rank 0 removes.
            worker.group.barrier()
    console.say(
        f"dry run: all checks passed, nothing was trained; without --dry-run it is {folder}"
    )
    return ExitCode.DONE


@contextmanager
def _data_place(start: StartingPoint, worker: Worker) -> Iterator[StartingPoint]:
    """`start`, with a folder for the data of a new run that is removed at the end. Collective.

    It lies on the disk of the runs, so that what is checked of the disk is true of theirs. A run that goes on has its
    data already.
    """
    if start.resuming:
        yield start
        return
    made: str | None = None
    try:
        if worker.is_lead:
            try:
                made = tempfile.mkdtemp(prefix=".dry-run-", dir=place_of_runs())
            except OSError as error:
                what = "no folder can be made here"
                fix = "start from a working folder that you may write to"
                why = error.strerror or str(error)
                raise CheckpointError(Problem(what, str(Path.cwd()), why, fix)) from error
        yield replace(start, folder=Path(worker.group.broadcast(made)))
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _report(request: Request, place: StartingPoint, job: Job, worker: Worker) -> list[str]:
    """Data, doubts and sizes, a line each. Collective."""
    facts = {**job.data.facts(), "unit": job.task.unit}
    lines = first_lines(request, job, worker, facts)
    for code, text in doubts(request, place, job, worker):
        lines.append(f"{code}: {text}")
    with computing(job.model):
        text = too_high(job.model, job.config.train)
    if text:
        lines.append(f"train.lr_high: {text}")

    lines.append(memory_text(job.model, job.config, worker))
    optimizer = optimizer_bytes(job.model, job.config.train)
    size = state_bytes(job.model, optimizer)
    lines.append(f"disk: each checkpoint takes about {size_text(size)}, and there is room for them")
    return lines


def _findings(request: Request, job: Job) -> list[Finding]:
    """What `harness doctor --config` says of model, optimizer and data. None of it keeps the run from starting."""
    config = job.config
    plan = job.plan
    scale = None
    if plan.rung.precision == "fp16":
        scale = request.recipe.loss_scale.init
    epsilon = epsilon_finding(config.train, scale)
    found = [] if epsilon is None else [epsilon]
    # What the model prints as it runs is not part of the answer.
    with redirect_stdout(sys.stderr):
        return found + lint_run(config, request.recipe, plan, job.model, job.task, job.data)


def _beginning(start: StartingPoint, worker: Worker) -> str:
    """What the first step would begin with. Collective. Raises CheckpointError as `choose_state`."""
    store = Store(start.folder / "checkpoints", readonly=True)
    initial = choose_state(start, worker, store)
    text = "begins with initial weights"
    if initial.source is not None:
        text = f"begins from {initial.source}"
    elif initial.step is not None:
        text = f"goes on after step {initial.step}"
    elsewhere = fallback_folders(start.folder, start.config.checkpoint.emergency_path)
    if start.resuming and elsewhere:
        text += ", or after a later save that is taken back from checkpoint.emergency_path"
    if start.resumed is not None and start.resumed.changes:
        changes = "; ".join(map(str, start.resumed.changes))
        text += f"; changed: {changes}"
    return f"start: {text}"
