"""The `harness` command. It starts without torch, so --help and every complaint about the input come at once.

A command is a line in COMMANDS and a file with a function `command`. The file is in tools/, or in report/ if the
command reads run folders. The function's parameters are the command's arguments, as Typer reads them, and its result is
the exit code. The file is imported when the command is called. It loads no torch until its arguments are known to be
right.
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

# Seconds that other ranks wait before they print an error that rank 0 prints, too. On a busy machine ranks start some
# seconds apart.
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
"""The error that ended the command, kept alive until the process ends. Its traceback holds every frame, and so the
process groups. Their destructor waits for threads that may wait for Python's lock: a rank that lost another would never
end."""


def _guarded(action: Callable[[], int], trains: bool = False) -> None:
    """Run a command; errors meant for the user end it with their text and exit code.

    trains: this process trains, and ends as `_end` says.
    """
    trains = trains or "RANK" in os.environ
    try:
        code = action()
    except HarnessError as error:
        code = int(error.exit_code)
        end_at_a_signal(code)  # a launcher may end this rank while another prints
        _report(error)
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


def _report(error: HarnessError) -> None:
    """Print an error. Rank 0 prints it for all: a launcher ends the other ranks as soon as rank 0 is gone."""
    rank = os.environ.get("RANK", "0")
    if rank != "0" and not isinstance(error, LostRankError):
        time.sleep(_LEAD_SPEAKS_SECONDS)
    _say(f"error: {error}" if rank == "0" else f"error on rank {rank}: {error}")


def _say(text: str) -> None:
    """Print on stderr. If that fails, as on a full disk, the exit code is the same."""
    # Libraries quote addresses as they were given, passwords included.
    text = scrubbed(text)
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _end(code: int) -> NoReturn:
    """End a process that trains with `code`, without the interpreter's finalisation.

    The finalisation could change the exit code of a run that has ended well, in three ways:

    - Signals have their default handlers again there: a second request to stop would kill a run that has saved.
    - DeepSpeed keeps its process groups in globals, so their threads still run. One that asks for Python's lock aborts
      the process, or waits for ever.
    - If stdout cannot be flushed, as in a log on a full disk, any code becomes 120.
    """
    end_at_a_signal(code)
    tell_wrapper(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _single(name: str) -> typer.Typer:
    """A program of that command alone, with its arguments."""
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
    """Loads a command's file only when it is called; until then its line in COMMANDS is enough."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        command = None if name is None else typer.main.get_command(_single(name))
        return name, command, rest


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
