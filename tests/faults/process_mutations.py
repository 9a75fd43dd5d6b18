"""The protections at signals, starts and lost ranks: rows 1, 6, 7 and 20."""

from __future__ import annotations

from mutation import Mutation

PROCESS: tuple[Mutation, ...] = (
    Mutation(
        20,
        "memory that ranks share goes with them",
        "        release_shared_memory(self.rank)\n",
        "",
        "tests/e2e/test_ranks.py::test_every_launcher_gives_the_same_fp32_losses[deepspeed-2]",
    ),
    Mutation(
        6,
        "a rank notices that its launcher is gone",
        "if self._parent and os.getppid() != self._parent:",
        "if False:",
        "tests/unit/test_stop.py -k dies_while",
    ),
    Mutation(
        6,
        "a rank knows its launcher from before the imports",
        "self._parent, self._grandparent = (_PARENT, _GRANDPARENT) if launched else (0, 0)",
        "self._parent, self._grandparent = _launchers() if launched else (0, 0)",
        "tests/unit/test_stop.py -k dies_while",
    ),
    Mutation(
        6,
        "a signal while the run starts ends it with 75",
        "    stop_while_starting()\n",
        "",
        "tests/faults/test_signals.py -k imports",
    ),
    Mutation(
        6,
        "a signal that an import swallows is remembered",
        "self.reason = self.reason or _start_up.reason",
        'self.reason = self.reason or ""',
        "tests/unit/test_stop.py -k swallows",
    ),
    Mutation(
        6,
        "a second signal while it ends changes nothing",
        "        end_at_a_signal(ExitCode.STOPPED)\n",
        "",
        "tests/unit/test_stop.py -k second_signal",
    ),
    Mutation(
        6,
        "a signal during the farewell leaves the exit code",
        "run.stop.uninstall(outcome.exit_code)",
        "run.stop.uninstall()",
        "tests/faults/test_signals.py -k farewell",
    ),
    Mutation(
        6,
        "a hang-up is a request to stop",
        "signal.SIGUSR1, signal.SIGHUP)",
        "signal.SIGUSR1)",
        "tests/unit/test_stop.py -k first_signal",
    ),
    Mutation(
        6,
        "the wrapper waits for ranks that outlive their launcher",
        'while rank_runs "$1" && [',
        "while false && [",
        "tests/unit/test_launch_scripts.py -k outlive",
    ),
    Mutation(
        6,
        "torchrun waits for ranks that save",
        "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=",
        "export UNUSED=",
        "tests/faults/test_signals.py -k patience",
    ),
    Mutation(
        6,
        "the reason of a rank that was asked alone is known to all",
        "        reason = _reason(run)\n",
        "        reason = run.stop.reason\n",
        "tests/faults/test_signals.py::test_signals_to_the_launcher_or_one_rank_stop_all[torchrun-2]",
    ),
    Mutation(
        7,
        "one writer of a run",
        "            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "",
        "tests/faults/test_two_runs.py -k same_moment",
    ),
    Mutation(
        7,
        "who loses the race leaves the owner's name in the lock",
        "os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW",
        "os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_TRUNC",
        "tests/faults/test_two_runs.py -k same_moment",
    ),
    Mutation(
        20,
        "a rank names the one that it lost",
        "        meet()\n",
        "",
        "tests/faults/test_lost_ranks.py -k killed_rank",
    ),
    Mutation(
        20,
        "a rank that lost another speaks at once",
        " and not isinstance(error, LostRankError)",
        "",
        "tests/faults/test_lost_ranks.py -k torchrun-SIGKILL",
    ),
    Mutation(
        20,
        "the groups that DeepSpeed makes for itself time out",
        "        limit_every_group(timeout_seconds)\n",
        "",
        "tests/faults/test_lost_ranks.py -k deepspeed-SIGSTOP",
    ),
    Mutation(
        1,
        "a run that starts from another's checkpoint remembers it",
        "                write_source(folder, source)\n",
        "                pass\n",
        "tests/e2e/test_hostile.py -k first_save",
    ),
)
