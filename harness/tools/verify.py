"""`harness verify`: compare every byte of a run's checkpoints with their manifests."""

from __future__ import annotations

from pathlib import Path

from harness.core.errors import ExitCode
from harness.core.screen import say
from harness.report import RunFolder
from harness.tracking.journal import JOURNAL, require_run, runs_in


def command(run: RunFolder) -> int:
    """Print the state of each checkpoint; the exit code is 1 if one is damaged or there is none.

    `run` may be a folder of runs: then all of them are verified. Nothing is changed; the next start of a run moves its
    damaged checkpoints aside. Raises ConfigError if `run` is neither.
    """
    runs = [] if (run / JOURNAL).is_file() else runs_in(run)
    if not runs:
        return int(_verify(require_run(run)))
    failed = [folder for folder in runs if _verify(folder) is not ExitCode.DONE]
    say(f"{len(runs) - len(failed)} of {len(runs)} runs are whole")
    return int(ExitCode.FAILED if failed else ExitCode.DONE)


def _verify(folder: Path) -> ExitCode:
    from harness.checkpoint.manifest import read_marks, read_shards
    from harness.checkpoint.policy import best
    from harness.checkpoint.store import Store

    store = Store(folder / "checkpoints", readonly=True)
    steps = store.steps()
    good = set(read_marks(store.root))
    lowest = {metric: best(store, metric) for metric in ("val_loss", "train_loss")}

    damaged = 0
    for step in steps:
        path = store.path(step)
        # A run that still trains may have deleted it by now.
        if not path.exists():
            continue
        if problems := store.verify(step):
            damaged += 1
            what = "; ".join(map(str, problems))
            say(f"{path}: {what}")
            continue

        # "good": enough healthy steps followed it, so a rollback may go back to it.
        words = ["ok"]
        if shards := read_shards(path):
            words.append(f"written by {shards.ranks} ranks")
        if step in good:
            words.append("good")
        for metric, lowest_at in lowest.items():
            if lowest_at == step:
                words.append(f"lowest {metric}")
        for name, value in sorted(store.metrics(step).items()):
            words.append(f"{name} {value:.4f}")
        say(f"{path}: {', '.join(words)}")

    say(f"{folder}: {len(steps) - damaged} of {len(steps)} checkpoints verify")
    for aside in sorted(store.root.glob("quarantine-*")):
        say(f"{aside}: was found damaged and set aside")
    return ExitCode.FAILED if damaged or not steps else ExitCode.DONE
