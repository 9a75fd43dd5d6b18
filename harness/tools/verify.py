"""`harness verify`: every byte of a run's checkpoints against their manifests."""

from __future__ import annotations

from pathlib import Path

from harness.core.errors import ExitCode
from harness.core.screen import say
from harness.report import RunFolder
from harness.tracking.journal import JOURNAL, require_run, runs_in


def command(run: RunFolder) -> int:
    """Print what each checkpoint is worth; the exit code is 1 if one is damaged or there is none. A folder of runs is
    taken for all of them.

    Nothing is changed: the next start of the run moves damaged ones aside. Raises ConfigError if `run` is neither.
    """
    if (run / JOURNAL).is_file() or not (runs := runs_in(run)):
        return int(_verify(require_run(run)))
    failed = [folder for folder in runs if _verify(folder) is not ExitCode.DONE]
    say(f"{len(runs) - len(failed)} of {len(runs)} runs are whole")
    return int(ExitCode.FAILED if failed else ExitCode.DONE)


def _verify(folder: Path) -> ExitCode:
    from harness.checkpoint.manifest import read_marks
    from harness.checkpoint.policy import best
    from harness.checkpoint.store import Store

    store = Store(folder / "checkpoints", readonly=True)
    steps, good = store.steps(), set(read_marks(store.root))
    lowest = {metric: best(store, metric) for metric in ("val_loss", "train_loss")}
    damaged = 0
    for step in steps:
        if not store.path(step).exists():
            continue  # a run that goes on has deleted it by now
        problems = store.verify(step)
        damaged += bool(problems)
        if problems:
            say(f"{store.path(step)}: {'; '.join(map(str, problems))}")
            continue
        known = [f"{name} {value:.4f}" for name, value in sorted(store.metrics(step).items())]
        titles = ["good"] * (step in good) + [
            f"lowest {metric}" for metric, at in lowest.items() if at == step
        ]
        say(f"{store.path(step)}: ok{', '.join(['', *titles, *known])}")
    say(f"{folder}: {len(steps) - damaged} of {len(steps)} checkpoints verify")
    for aside in sorted(store.root.glob("quarantine-*")):
        say(f"{aside}: was found damaged and set aside")
    return ExitCode.FAILED if damaged or not steps else ExitCode.DONE
