"""Run one checkpoint operation over and over, each time in a forked process that fails at the next file call.

`python checkpoint_driver.py <injector.so> <scratch> <scenario>:<mode> ...` prints JSON: for each scenario and every n,
how the process ended and what another finds in the folder afterwards. Run with the injector in LD_PRELOAD. Forking
costs milliseconds where a new process would import torch. `random:<kills>` and `limit:` need no injector.

In the scenarios `rank0` and `rank1` two processes save one checkpoint together, and the calls of that one fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from harness.checkpoint.meeting import Meeting, Writers
from harness.checkpoint.policy import Retention, RollbackTargets, load_ledger, save_ledger
from harness.checkpoint.recovery import finish_rollback
from harness.checkpoint.store import Store
from harness.core.errors import CheckpointError
from harness.core.shards import Rows

MODES = {"kill": 1, "full": 2, "once": 3}
REFUSED = 3
STEPS = (10, 20, 30, 40, 50)


def state(step: int, elements: int = 1000) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "model": {"weight": torch.full((elements,), float(step)), "bias": torch.arange(8) * step},
        "optimizer": {"moment": torch.full((elements,), float(-step))},
    }


def save(root: Path, step: int) -> None:
    Store(root).save(step, state(step), {"step": step})


def damage(root: Path, step: int) -> None:
    (Store(root).path(step) / "model.safetensors").write_bytes(b"damaged")


def base(root: Path, scenario: str) -> None:
    for step in STEPS:
        save(root, step)
    if scenario == "prune":
        targets = RollbackTargets(Store(root), 0)
        targets.saved(20)
    if scenario in ("resave", "quarantine"):
        damage(root, 50)


def set_aside(root: Path) -> None:
    """As a resume does, which goes on from the newest that verifies."""
    store = Store(root)
    store.newest_valid()
    store.set_aside()


def roll_back(root: Path, step: int) -> None:
    """As `Recovery.commit`: the ledger first, then what follows from it. The ledger lies beside the checkpoints."""
    ledger = load_ledger(root)
    ledger.return_to = step
    save_ledger(root, ledger)
    finish_rollback(ledger, Store(root), lambda current: save_ledger(root, current))


SCENARIOS: dict[str, Callable[[Path], object]] = {
    "save": lambda root: save(root, 60),
    "resave": lambda root: save(root, 50),
    "quarantine": set_aside,
    "prune": lambda root: Retention(Store(root), 2).prune(),
    "discard": lambda root: roll_back(root, 20),
}


def in_fork(work: Callable[[], object]) -> int:
    """How a forked process that does `work` ends, by waitpid's status: REFUSED if by CheckpointError."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except CheckpointError:
            os._exit(REFUSED)
        except BaseException as error:
            traceback.print_exception(error)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def look(root: Path) -> dict[str, Any]:
    """What a new process finds that starts as a resume does: it opens the store, finishes a rollback and sets aside
    what is damaged. Every load is compared to what was saved."""
    before = sorted(path.name for path in root.iterdir())
    store = Store(root)
    finish_rollback(load_ledger(root), store, lambda current: save_ledger(root, current))
    newest = store.newest_valid()
    store.set_aside()
    valid = [step for step in store.steps() if not store.verify(step)]
    wrong = []
    for step in valid:
        tensors, meta = store.load(step)
        expected = state(step, len(tensors["model"]["weight"]))
        same = all(
            torch.equal(tensors[part][name], expected[part][name])
            for part in expected
            for name in expected[part]
        )
        if not same or meta != {"step": step} or tensors.keys() != expected.keys():
            wrong.append(step)
    names = sorted(path.name for path in root.iterdir())
    return {"before": before, "newest": newest, "valid": valid, "wrong": wrong, "names": names}


def ended(status: int, fired: Path) -> dict[str, Any]:
    """How a process ended that `waitpid` gave `status` of, and how often its fault fired, as it wrote to `fired`."""
    return {
        "killed": was_killed(status),
        "exit": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "fired": int(fired.read_text()) if fired.exists() else 0,
    }


def was_killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def sweep(library: ctypes.CDLL, scratch: Path, scenario: str, mode: str) -> list[dict[str, Any]]:
    """Results for n = 1, 2, ... until the operation makes fewer than n calls; that last one is included."""
    original, operate = scratch / "base", SCENARIOS[scenario]
    base(original, scenario)
    operate(Path(shutil.copytree(original, scratch / "warm")))
    results = []
    for n in range(1, 1000):
        root = Path(shutil.copytree(original, scratch / f"{n}"))

        def work(n: int = n, root: Path = root) -> None:
            library.inject_arm(n, MODES[mode])
            try:
                operate(root)
            finally:
                fired = library.inject_disarm()
                (scratch / f"{n}.fired").write_text(str(fired))

        status = in_fork(work)
        result = {"n": n, **ended(status, scratch / f"{n}.fired"), **look(root)}
        operate(root)
        result["again"] = look(root)
        results.append(result)
        shutil.rmtree(root)
        if not result["killed"] and not result["fired"]:
            break
    return results


TOGETHER = {"rank0": 0, "rank1": 1}


def save_piece(root: Path, step: int, rank: int, meeting: Meeting) -> None:
    """One of two ranks saves its half of the tensors of 1,000 elements."""
    tensors = state(step)
    rows: dict[str, dict[str, Rows]] = {}
    for part, name in (("model", "weight"), ("optimizer", "moment")):
        each = Rows.of_rank((1000,), rank, 2)
        rows[part] = {name: each}
        tensors[part][name] = tensors[part][name][each.begin : each.end]
    Store(root, readonly=rank > 0).save_piece(step, tensors, rows, meeting, {"step": step})


def save_together(
    root: Path, step: int, arm: Callable[[int], None], disarm: Callable[[int], None]
) -> list[int]:
    """Two processes save the checkpoint of `step`; returns how each ended.

    A rank is told when rank 0 has ended, or the other one has failed: in training ranks learn it in a collective.
    """
    children: list[int] = []
    # Held back until a rank can hear it: rank 0 may have ended before rank 1 has come so far.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    for rank in (0, 1):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            meeting = Writers(rank, 2, "start", 60.0).next_try()

            def told(*ignored: object, meeting: Meeting = meeting) -> None:
                # On a thread, as in training: this one may hold the lock of the very event that is set.
                threading.Thread(target=meeting.give_up, args=("is told",)).start()

            signal.signal(signal.SIGUSR1, told)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
            arm(rank)
            save_piece(root, step, rank, meeting)
            code = 0
        except CheckpointError:
            code = REFUSED
        except BaseException as error:
            traceback.print_exception(error)
        finally:
            disarm(rank)
        os._exit(code)

    statuses = [0, 0]
    for _ in children:
        child, status = os.wait()
        rank = children.index(child)
        statuses[rank] = status
        if rank == 0 or status:
            with contextlib.suppress(ProcessLookupError):
                os.kill(children[1 - rank], signal.SIGUSR1)
    return statuses


def sweep_together(
    library: ctypes.CDLL, scratch: Path, failing: int, mode: str
) -> list[dict[str, Any]]:
    """As `sweep`, for a save by two ranks of which one fails."""
    original = scratch / "base"
    for step in STEPS[-2:]:
        save(original, step)

    def unharmed(root: Path) -> None:
        lead, other = save_together(root, 60, lambda rank: None, lambda rank: None)
        # Where the checkpoint is there already, rank 0 keeps it and needs nothing of the other rank.
        assert lead == 0
        assert os.WIFEXITED(other)
        assert os.WEXITSTATUS(other) in (0, REFUSED)

    unharmed(Path(shutil.copytree(original, scratch / "warm")))
    results = []
    for n in range(1, 1000):
        root = Path(shutil.copytree(original, scratch / f"{n}"))

        def arm(rank: int, n: int = n) -> None:
            if rank == failing:
                library.inject_arm(n, MODES[mode])

        def disarm(rank: int, n: int = n) -> None:
            if rank == failing:
                (scratch / f"{n}.fired").write_text(str(library.inject_disarm()))

        statuses = save_together(root, 60, arm, disarm)
        fired = scratch / f"{n}.fired"
        result = {"n": n, **ended(statuses[failing], fired), **look(root)}
        lead = statuses[0]
        result["lead"] = os.WEXITSTATUS(lead) if os.WIFEXITED(lead) else None
        unharmed(root)
        result["again"] = look(root)
        results.append(result)
        shutil.rmtree(root)
        if not result["killed"] and not result["fired"]:
            break
    return results


def random_kills(scratch: Path, kills: int, elements: int) -> list[dict[str, Any]]:
    """SIGKILL a process that saves and prunes in a loop, at random moments, going on from what is left each time."""
    root, chance = scratch / "random", random.Random(0)

    def work() -> None:
        store = Store(root)
        retention = Retention(store, 2)
        step = (store.newest_valid() or 0) + 10
        while True:
            store.save(step, state(step, elements), {"step": step})
            retention.prune()
            step += 10

    results = []
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            work()
        time.sleep(chance.uniform(0.01, 0.12))
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        results.append({"killed": was_killed(status), **look(root)})
    return results


def file_size_limit(scratch: Path) -> dict[str, Any]:
    """A save whose largest file is over the process's file size limit: the kernel refuses the bytes (EFBIG)."""
    root = scratch / "limited"
    save(root, 10)

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        Store(root).save(20, state(20, 50_000), {"step": 20})

    status = in_fork(work)
    return {"exit": os.WEXITSTATUS(status), **look(root)}


def main() -> None:
    injector, scratch = sys.argv[1], Path(sys.argv[2])
    results = {}
    for task in sys.argv[3:]:
        scenario, mode = task.split(":")
        folder = scratch / f"{scenario}-{mode}"
        folder.mkdir(parents=True)
        if scenario == "random":
            results[task] = random_kills(folder, int(mode), 200_000)
        elif scenario == "limit":
            results[task] = file_size_limit(folder)
        elif scenario in TOGETHER:
            library = ctypes.CDLL(injector)
            results[task] = sweep_together(library, folder, TOGETHER[scenario], mode)
        else:
            results[task] = sweep(ctypes.CDLL(injector), folder, scenario, mode)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
