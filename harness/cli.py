"""The `harness` command. It starts without torch, so --help and every complaint about the input come at once.

A command is a line in COMMANDS and a file with a function `command`. The file is in tools/, or in report/ if the
command reads run folders. The function's parameters are the command's arguments, as Typer reads them, and its result is
the exit code. The file is imported when the command is called. It loads no torch until its arguments are known to be
right.
"""

from __future__ import annotations

import atexit
import errno
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from harness.core.errors import (
    ConfigError,
    ExitCode,
    HarnessError,
    LostRankError,
    Problem,
    tell_wrapper,
)
from harness.core.secrets import scrubbed
from harness.stop import NOTHING_YET, StoppedEarly, end_at_a_signal, end_while_importing

# Seconds that other ranks wait before they print an error that rank 0 prints, too. On a busy machine ranks start some
# seconds apart.
_LEAD_SPEAKS_SECONDS = 5.0

# Errors of the system that nobody needs a traceback for, and what to do about them.
_PERMISSIONS = "check the permissions of it and of the folders above it"
_SPACE = "free space on its disk"
_FIXES = {
    errno.EACCES: _PERMISSIONS,
    errno.EPERM: _PERMISSIONS,
    errno.EROFS: "work on a copy, on a disk that can be written",
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
}

# name: its file, and what it does. `harness --help` lists the first sentence of each.
COMMANDS = {
    "train": (
        "tools.start",
        "Train a model. In one process; under torchrun with DDP; under deepspeed with DeepSpeed.",
    ),
    "runs": (
        "tools.runs",
        "List the runs of a folder, one line each.",
    ),
    "compare": (
        "tools.compare",
        "Compare runs: what differs, the gap in loss, and where they diverge.",
    ),
    "inspect": (
        "tools.inspect",
        "Show a run's FP8 tensors and a summary, once or live.",
    ),
    "explain": (
        "report.explain",
        "Explain an event code, a symptom, or a run.",
    ),
    "replay": (
        "tools.replay",
        "Run one step of a run again to find where it broke.",
    ),
    "rehearse": (
        "tools.rehearse",
        "Try a run in every precision, and find the cause of a bad run.",
    ),
    "sample": ("tools.sample", "Generate text from a prompt with a run's model."),
    "eval": (
        "tools.eval",
        "Compute a run's loss, perplexity and accuracy. In the run's precision, and in fp32 for comparison.",
    ),
    "doctor": (
        "tools.doctor",
        "Report what this machine can run, and what in a config is unsafe.",
    ),
    "drill": (
        "tools.drill",
        "Rehearse kills, damage and outages on short runs of a config.",
    ),
    "profile": (
        "tools.profile",
        "Show where the time of profiled steps went, and what estimate predicts.",
    ),
    "estimate": (
        "tools.estimate",
        "Predict a run's memory and speed on another card. Nothing runs on a GPU.",
    ),
    "data": (
        "tools.data",
        "Tokenize text into files, once for many runs. The command is harness data prepare.",
    ),
    "export": (
        "tools.export",
        "Export a run's weights with a model card. For Hugging Face, or as safetensors.",
    ),
    "report": (
        "report.page",
        "Write a run's report.html and plots again, also while it trains. Or one page of two runs.",
    ),
    "sync": ("tools.sync", "Send MLflow the rows of a run that it does not have yet."),
    "verify": ("tools.verify", "Compare a run's checkpoints with their hashes."),
}


_kept: list[BaseException] = []
"""The error that ended the command, kept alive until the process exits.

Its traceback holds every frame, and so the process groups. If they were freed, their destructor would wait for threads
that may themselves wait for the GIL. A rank that lost another would then hang.
"""


def _guarded(action: Callable[[], int], trains: bool = False) -> None:
    """Run a command; errors meant for the user end it with their text and exit code.

    trains: end as `_end` says. Ranks under a launcher do so whatever their command is.
    """
    trains = trains or "RANK" in os.environ
    try:
        code = action()
    except HarnessError as error:
        code = int(error.exit_code)
        _report(error, code)
        _kept.append(error)
    except StoppedEarly as signal:
        code = int(ExitCode.STOPPED)
        end_at_a_signal(code)
        # A launcher replaces exit codes by its own, so launch/*.sh reads the code from a file.
        tell_wrapper(ExitCode.STOPPED, starting=True)
        _say_at_the_end(f"{signal}: {NOTHING_YET}", code)
        _kept.append(signal)
    except (Exception, KeyboardInterrupt) as error:
        if not trains and isinstance(error, KeyboardInterrupt | BrokenPipeError):
            raise
        refused = None if trains else _refused(error)
        if refused is None:
            code = 1
            _say_at_the_end(traceback.format_exc().rstrip(), code)
        else:
            code = int(refused.exit_code)
            _report(refused, code)
        _kept.append(error)
    if trains:
        _end(code)
    raise typer.Exit(code)


def _refused(error: BaseException) -> ConfigError | None:
    """What to say of a file that the system lets a command neither read nor write; None for any other error.

    A command that trains has its traceback: such a file may be one of the user's own code.
    """
    if not isinstance(error, OSError) or error.filename is None:
        return None
    fix = _FIXES.get(error.errno or 0)
    if fix is None:
        return None
    return ConfigError(Problem(error.strerror or str(error), str(error.filename), fix=fix))


def _report(error: HarnessError, code: int) -> None:
    """Print an error with which this process ends. If all ranks have it, only rank 0 prints it.

    The others wait before they print. The launcher ends them as soon as rank 0 has exited. A rank that lost another
    prints at once: the lost one may be rank 0.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0" and not isinstance(error, LostRankError):
        end_at_a_signal(code)
        time.sleep(_LEAD_SPEAKS_SECONDS)
    where = "" if rank == "0" else f" on rank {rank}"
    _say_at_the_end(f"error{where}: {error}", code)


def _say_at_the_end(text: str, code: int) -> None:
    """Print to stderr, without secrets, why this process ends with `code`.

    A stderr that is closed or full must not change the code. A signal must change neither the code nor the text, as
    from a launcher that has noticed the same lost rank.
    """
    # Libraries quote addresses with their passwords in their errors.
    text = f"{scrubbed(text)}\n"
    end_at_a_signal(code, unsaid=text)
    with suppress(OSError, ValueError):
        print(text, end="", file=sys.stderr, flush=True)
    end_at_a_signal(code)


def _end(code: int) -> NoReturn:
    """Exit a process that trains with `code` by os._exit, without the interpreter's shutdown.

    The shutdown could change the exit code of a run that has ended well, in three ways:

    - Signals have their default handlers again there: a second request to stop would kill a run that has saved.
    - DeepSpeed keeps its process groups in globals, so their threads still run. One that asks for the GIL aborts the
      process, or hangs it.
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
    single.command(name, cls=_Command, help=text)(run)
    return single


class _Command(TyperCommand):
    """A command whose overrides, `key.path=value`, were perhaps given as options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(each.name == "config" for each in self.params):
            for word in args:
                option, equals, value = word.partition("=")
                # No option has a dot in its name.
                if option.startswith("--") and "." in option:
                    key = option.removeprefix("--")
                    text = f"config keys are written without dashes: {key}={value if equals else 'VALUE'}"
                    raise typer.BadParameter(text, ctx, param_hint=option)
        return super().parse_args(ctx, args)


class _OnCall(TyperGroup):
    """A group that imports a command's file only when the command is called. Its help needs only COMMANDS."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        command = None if name is None else typer.main.get_command(_single(name))
        return name, command, rest


app = typer.Typer(
    name="harness",
    cls=_OnCall,
    help="Train in FP8, or in the best precision that this machine has. Watch scales, recover from bad steps.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for _name, (_, _text) in COMMANDS.items():
    # A placeholder without arguments: `_OnCall` replaces it by the real command.
    app.command(_name, help=_text)(lambda: None)


def main() -> None:
    """Entry point of the `harness` command."""
    _replace_unknown()
    if sys.argv[1:2] == ["train"]:
        end_while_importing()
    app()


def train_main() -> None:
    """Entry point of launch/train.py: the same as `harness train`."""
    _replace_unknown()
    _single("train")()


def _replace_unknown() -> None:
    """A terminal or log that is not UTF-8 shows question marks."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
