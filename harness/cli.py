"""The `harness` command. Starts without torch: --help and every complaint about the input come at once.

A command is a line in COMMANDS and a file (in tools/, or in report/ if it reads run folders) with a function
`command`: its parameters are the command's arguments, as Typer reads them, its result is the exit code. The file is
imported when the command is called, and loads no torch until its arguments are known to be right.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from harness.core.errors import ExitCode, HarnessError, LostRankError, tell_wrapper
from harness.core.secrets import scrubbed
from harness.stop import NOTHING_YET, StoppedEarly, end_at_a_signal, end_while_importing

# Ranks start some seconds apart on a busy machine.
_LEAD_SPEAKS_SECONDS = 5.0

# name: its file, and what it does.
COMMANDS = {
    "train": (
        "tools.start",
        "Train. Alone: one process; under torchrun: DDP; under deepspeed: DeepSpeed.",
    ),
    "inspect": (
        "report.inspect",
        "Show a run's FP8 slots: amax, scale, saturation, underflow, history, switches.",
    ),
    "explain": (
        "report.explain",
        "Say what a code of the guard means and what to do, or what happened in a run.",
    ),
    "replay": (
        "tools.replay",
        "Run one step of a run again and say where it went bad: module, tensor, sample, and whether in fp32 too.",
    ),
    "sample": ("tools.sample", "Write text on from a prompt, with a run's model."),
    "eval": (
        "tools.eval",
        "Score a run's model: loss, perplexity, accuracy, in the run's precision and in fp32 beside it.",
    ),
    "doctor": ("tools.doctor", "Say what this machine can do, and why not more."),
    "estimate": (
        "tools.estimate",
        "Predict memory and speed of a run on a card that need not be there. Nothing runs on a GPU.",
    ),
    "data": (
        "tools.data",
        "Make files of token ids of text, once for many runs: harness data prepare.",
    ),
    "export": (
        "tools.export",
        "Write a run's weights for others (Hugging Face, safetensors), with a model card.",
    ),
    "report": ("report.page", "Draw a run's plots and report.html again from its journal."),
    "sync": ("tools.sync", "Deliver what MLflow has not got of a run's journal."),
    "verify": ("tools.verify", "Check every byte of a run's checkpoints against their manifests."),
}


_kept: list[BaseException] = []
"""What ended the command. Its traceback has every frame, and with them process groups, whose end waits for threads of
theirs that may wait for Python's lock: a rank that lost another would never end."""


def _guarded(action: Callable[[], int], trains: bool = False) -> None:
    """Run a command; errors meant for the user end it with their text and exit code. trains: see `_end`."""
    trains = trains or "RANK" in os.environ
    try:
        code = action()
    except HarnessError as error:
        code = int(error.exit_code)
        end_at_a_signal(code)  # a launcher may end this rank while another speaks
        _tell(error)
        _kept.append(error)
    except StoppedEarly as signal:
        end_at_a_signal(ExitCode.STOPPED)
        tell_wrapper(ExitCode.STOPPED, starting=True)
        _say(f"{signal}: {NOTHING_YET}")
        _kept.append(signal)
        code = int(ExitCode.STOPPED)
    except (Exception, KeyboardInterrupt) as error:
        if not trains and isinstance(error, KeyboardInterrupt | BrokenPipeError):
            raise
        _say(traceback.format_exc().rstrip())
        _kept.append(error)
        code = 1
    if trains:
        _end(code)
    raise typer.Exit(code)


def _tell(error: HarnessError) -> None:
    """Print it. What all ranks found, rank 0 says; a launcher ends the others as soon as it is gone."""
    rank = os.environ.get("RANK", "0")
    if rank != "0" and not isinstance(error, LostRankError):
        time.sleep(_LEAD_SPEAKS_SECONDS)
    _say(f"error: {error}" if rank == "0" else f"error on rank {rank}: {error}")


def _say(text: str) -> None:
    """On stderr, if it takes a word: the exit code does not hang on that. Libraries quote addresses as they were given,
    passwords included."""
    text = scrubbed(text)
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _end(code: int) -> NoReturn:
    """End a process that trains with `code`, past the interpreter's finalisation.

    There signals mean again what they meant, and a second request to stop would kill a run that has saved. DeepSpeed
    keeps its process groups in its globals, so their threads still run by then, and one that asks for Python's lock
    aborts the process (or waits for ever): a rank whose work is done would count as failed. And a log on a full disk
    would make any code 120.
    """
    end_at_a_signal(code)
    tell_wrapper(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _single(name: str) -> typer.Typer:
    """The command alone, with its arguments."""
    file, text = COMMANDS[name]
    command: Callable[..., int] = import_module(f"harness.{file}").command

    @wraps(command)
    def run(**arguments: Any) -> None:
        _guarded(lambda: command(**arguments), trains=name == "train")

    single = typer.Typer(
        rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False
    )
    single.command(name, help=text)(run)
    return single


class _OnCall(TyperGroup):
    """Knows of a command what COMMANDS says of it until it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else typer.main.get_command(_single(name)), rest


app = typer.Typer(
    name="harness",
    cls=_OnCall,
    help="FP8 training that degrades by capability, watches its scales and survives.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for _name, (_, _text) in COMMANDS.items():
    app.command(_name, help=_text)(lambda: None)


def main() -> None:
    """Entry point of the `harness` command."""
    if sys.argv[1:2] == ["train"]:
        end_while_importing()
    app()


def train_main() -> None:
    """Entry point of launch/train.py: the same as `harness train`."""
    _single("train")()


if __name__ == "__main__":
    main()
