"""The `harness` command. Starts without torch: --help and every complaint about the input come at once."""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from harness.core.errors import ConfigError, ExitCode, HarnessError, LostRankError, Problem
from harness.core.wrapper import tell_wrapper
from harness.stop import StoppedEarly, end_at_a_signal, stop_while_starting

# Ranks start some seconds apart on a busy machine.
_LEAD_SPEAKS_SECONDS = 5.0

app = typer.Typer(
    name="harness",
    help="FP8 training that degrades by capability, watches its scales and survives.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)

RunFolder = Annotated[Path, typer.Argument(help="a run folder, runs/<run>")]


def _guarded(action: Callable[[], int]) -> None:
    """Run a command; errors meant for the user end it with their text and exit code."""
    try:
        code = action()
    except HarnessError as error:
        code = int(error.exit_code)
        end_at_a_signal(code)  # a launcher may end this rank while another speaks
        _tell(error)
    except StoppedEarly as signal:
        end_at_a_signal(ExitCode.STOPPED)
        print(f"{signal}: stopped before training began; the same command starts it again", file=sys.stderr)
        code = int(ExitCode.STOPPED)
    except (Exception, KeyboardInterrupt):
        if "RANK" not in os.environ:
            raise
        traceback.print_exc()
        code = 1
    if "RANK" in os.environ:
        _end_rank(code)
    raise typer.Exit(code)


def _tell(error: HarnessError) -> None:
    """Print it. What all ranks found, rank 0 says; a launcher ends the others as soon as it is gone."""
    rank = os.environ.get("RANK", "0")
    if rank != "0" and not isinstance(error, LostRankError):
        time.sleep(_LEAD_SPEAKS_SECONDS)
    print(f"error: {error}" if rank == "0" else f"error on rank {rank}: {error}", file=sys.stderr)


def _end_rank(code: int) -> NoReturn:
    """End one process of a launcher's with `code`, past the interpreter's finalisation.

    DeepSpeed keeps its process groups in its globals, so their threads still run by then, and one that asks for
    Python's lock aborts the process (or waits for ever): a rank whose work is done would count as failed.
    """
    tell_wrapper(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@app.command()
def train(
    overrides: Annotated[list[str] | None, typer.Argument(help="config overrides, key.path=value")] = None,
    recipe: Annotated[str | None, typer.Option(help="precision recipe, name or path [default: the config's]")] = None,
    config: Annotated[str, typer.Option(help="run config, name or path")] = "quickstart",
    name: Annotated[str | None, typer.Option(help="run name [default: <config>-<recipe>]")] = None,
    resume: Annotated[str, typer.Option(help="auto, never, or the path of a checkpoint to start from")] = "auto",
    strict: Annotated[bool, typer.Option("--strict", help="fail unless the recipe's first rung can run")] = False,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    """Train. Alone: one process; under torchrun: DDP; under deepspeed: DeepSpeed."""

    def action() -> int:
        stop_while_starting()
        from harness.core.config import load_config
        from harness.precision.recipe import load_recipe

        resolved, policy = _both(lambda: load_config(config, overrides or [], recipe), load_recipe, recipe)
        from harness.tools.start import Request
        from harness.tools.train import train

        launcher = _launcher(local_rank is not None)
        return train(Request(resolved, policy, config, name, resume, strict, launcher))

    _guarded(action)


def _both(load_config: Callable, load_recipe: Callable, recipe: str | None) -> tuple:
    """Config and recipe, every problem of both in one error."""
    problems = []
    config = policy = None
    try:
        config = load_config()
    except ConfigError as error:
        problems += error.problems
    try:
        name = recipe or (config.recipe if config else None)
        policy = load_recipe(name) if name else None
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return config, policy


def _collected(problems: list[Problem], action: Callable[[], tuple]) -> tuple:
    """The pair that `action` returns; its problems go to the others, so that all are told together."""
    try:
        return action()
    except ConfigError as error:
        problems += error.problems
        return None, None


def _launcher(has_local_rank: bool) -> str:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    return "deepspeed" if has_local_rank or "CROSS_RANK" in os.environ else "python"


@app.command()
def inspect(run: RunFolder) -> None:
    """Show a run's FP8 slots: amax, scale, saturation, underflow, history, switches."""

    def action() -> int:
        from rich.console import Console

        from harness.tools.inspect import inspect

        return inspect(run, Console())

    _guarded(action)


@app.command()
def explain(
    subject: Annotated[
        str | None, typer.Argument(help="a code (loss.spike), a symptom, or a run folder [default: list all]")
    ] = None,
) -> None:
    """Say what a code of the guard means and what to do, or what happened in a run."""

    def action() -> int:
        from rich.console import Console

        from harness.tools.explain import explain

        return explain(subject, Console())

    _guarded(action)


@app.command()
def replay(
    run: RunFolder,
    step: Annotated[int, typer.Option(min=1, help="the step to run again")],
    anomaly: Annotated[bool, typer.Option("--anomaly", help="add autograd's own search for NaN")] = False,
) -> None:
    """Run one step of a run again and say where it went bad: module, tensor, sample, and whether in fp32 too."""

    def action() -> int:
        from harness.tools.replay import replay

        return replay(run, step, anomaly)

    _guarded(action)


@app.command()
def doctor() -> None:
    """Say what this machine can do, and why not more."""

    def action() -> int:
        from rich.console import Console

        from harness.tools.doctor import doctor

        return doctor(Console())

    _guarded(action)


@app.command()
def estimate(
    overrides: Annotated[list[str] | None, typer.Argument(help="config overrides, key.path=value")] = None,
    card: Annotated[str, typer.Option(help="card to estimate for, such as H100")] = "H100",
    recipe: Annotated[str | None, typer.Option(help="precision recipe, name or path [default: the config's]")] = None,
    config: Annotated[str, typer.Option(help="run config, name or path")] = "quickstart",
    ranks: Annotated[int, typer.Option(min=1, help="processes that share the global batch")] = 1,
    calibration: Annotated[
        Path | None, typer.Option(help="measurements of a card that `make proof` wrote [default: datasheet peaks]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Predict memory and speed of a run on a card that need not be there. Nothing runs on a GPU."""

    def action() -> int:
        from harness.core.config import load_config
        from harness.estimate.calibration import read_calibration, uncalibrated
        from harness.estimate.roofline import find_card
        from harness.precision.recipe import load_recipe

        def asked() -> tuple:
            return _both(lambda: load_config(config, overrides or [], recipe), load_recipe, recipe)

        def measured() -> tuple:
            found = find_card(card)
            return found, read_calibration(calibration, found) if calibration else uncalibrated(found)

        problems: list[Problem] = []
        (resolved, policy), (found, rates) = _collected(problems, asked), _collected(problems, measured)
        if problems:
            raise ConfigError(problems)
        from harness.estimate import device

        device.load()  # before anything imports torch
        from rich.console import Console

        from harness.tools.estimate import estimate

        return estimate(resolved, policy, found, rates, ranks, as_json, Console())

    _guarded(action)


@app.command()
def report(run: RunFolder) -> None:
    """Draw a run's plots and report.html again from its journal."""

    def action() -> int:
        from harness.tools.report import write

        for path in write(run):
            print(path)
        return 0

    _guarded(action)


@app.command()
def sync(run: RunFolder) -> None:
    """Deliver what MLflow has not got of a run's journal."""

    def action() -> int:
        from harness.core.config import load_config
        from harness.tracking.folder import require_run
        from harness.tracking.shipper import sync

        config = load_config(str(require_run(run) / "config.yaml"))
        done = sync(run, config.tracking.experiment)
        print("delivered" if done else f"not delivered; see {run / 'shipper.log'}")
        return 0 if done else 1

    _guarded(action)


@app.command()
def verify(run: RunFolder) -> None:
    """Check every byte of a run's checkpoints against their manifests."""

    def action() -> int:
        from harness.tools.verify import verify

        return verify(run)

    _guarded(action)


def main() -> None:
    """Entry point of the `harness` command."""
    app()


def train_main() -> None:
    """Entry point of launch/train.py: the same as `harness train`."""
    single = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    single.command()(train)
    single()


if __name__ == "__main__":
    main()
