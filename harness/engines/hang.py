"""Which rank hangs, where in its code, and since when: found by a thread of each rank, and logged by all of them.

A rank that hangs is alive: it waits for a disk that is gone, for a lock, or for ever in a user's code. The other ranks
wait for it in a collective. torch ends that wait after engine.timeout_seconds, and does not say for whom it was.

Each rank has a thread that looks at `core.progress`. In a healthy run it looks at a clock and does nothing else: it
sends nothing, and training waits for nothing. Once the main thread has been in one phase for half of the timeout, or a
save has taken a quarter of it:

1. The rank writes its phase and the stacks of its threads into the rendezvous store.
2. Rank 0 collects them for a fifth of the timeout, finds the rank that is behind, and writes a report.
3. Every rank logs the report. `lost_rank_named` puts it into the error that follows.

Who is behind: a rank that waits in a collective waits for somebody else. Of the others, those that have entered the
fewest phases. A rank that has written nothing cannot run Python. `faulthandler` needs no Python: it then writes the
stack of that rank into its own log.

With gloo a collective returns when it is done, so a rank that waits is found inside torch.distributed. NCCL works
behind the program, whose main thread goes on until it reads a figure. There the count of phases decides. NCCL's own
watchdog ends the process at its timeout, without a Python error; the report comes before that. None of this has run
on a GPU.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from harness.core.errors import some
from harness.core.progress import Progress, saving, stacks, training
from harness.core.screen import say

# Parts of the ranks' timeout: until a phase is looked into, and until the report is made.
# In a save rank 0 gives up on the others after half of it (`Recovery.wait_seconds`): a report comes sooner.
_PATIENCE, _SAVE_PATIENCE, _COLLECTED = 0.5, 0.25, 0.2
# Seconds between two looks at the clock: at most, and of the timeout.
_LONGEST_TICK, _TICK = 1.0, 0.02
# Ranks that a message names, and ranks whose stacks it shows.
_NAMED, _SHOWN = 8, 3
# The main thread is in C++ below these: it waits for an exchange.
_EXCHANGES = ("/torch/distributed/", " in _engine_run_backward")
_MEETS = "/checkpoint/meeting.py"
SAVER = "checkpoint"
"""The name of the thread that writes a checkpoint."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank says of itself.

    phase, step, entered: as in `Progress`.
    seconds: for how long it has been in that phase.
    waits: whether it waits for other ranks.
    stacks: lines of text.
    """

    phase: str
    step: int
    entered: int
    seconds: float
    waits: bool
    stacks: tuple[str, ...]

    @classmethod
    def of(cls, work: Progress) -> Answer:
        """Of this rank. work: what it is asked about."""
        found = stacks()
        waits = work.waits
        if work is training:
            waits = waits or any(part in found[0].innermost for part in _EXCHANGES)
            found = [found[0], *(stack for stack in found[1:] if not stack.idle)]
        else:
            found = [stack for stack in found if stack.thread == SAVER]
            # The innermost calls say what is waited for.
            innermost = [call for stack in found for call in stack.calls[-3:]]
            waits = waits or any(_MEETS in call for call in innermost)
        lines: list[str] = []
        for stack in found:
            lines.append(f"  {stack.thread}:")
            lines += [f"    {call}" for call in stack.calls]
        seconds = time.monotonic() - work.since
        return cls(work.phase, work.step, work.entered, seconds, waits, tuple(lines))

    @property
    def place(self) -> str:
        """In words."""
        where = f"{self.phase}, step {self.step}, for {self.seconds:.0f} s"
        return f"{where}, waits for other ranks" if self.waits else where


def hanging(answers: Mapping[int, Answer], ranks: int) -> list[int]:
    """The ranks that the others wait for; empty if nobody waits, or if all wait for each other."""
    silent = [rank for rank in range(ranks) if rank not in answers]
    if silent:
        return silent
    at_work = {rank: each.entered for rank, each in answers.items() if not each.waits}
    alike = len({each.entered for each in answers.values()}) == 1
    if not at_work or (len(at_work) == ranks and alike):
        return []
    fewest = min(at_work.values())
    return sorted(rank for rank, entered in at_work.items() if entered == fewest)


def report_of(answers: Mapping[int, Answer], ranks: int) -> str:
    """Who hangs where, in lines; the first names the rank. Empty if nobody waits for anybody."""
    found = hanging(answers, ranks)
    if not found and not all(each.waits for each in answers.values()):
        return ""

    # Without a rank that the others wait for, all wait for each other.
    headline = "the ranks wait for each other: they called other blocks or collectives, or the network fails"
    shown = sorted(answers)
    if found:
        named = some([f"rank {rank}" for rank in found], _NAMED)
        first = answers.get(found[0])
        headline = f"{named}: does not answer, no Python of it runs"
        if first is not None:
            headline = f"{named} keeps the others waiting: {first.place}"
        shown = found

    # Where those are that hang; of the others, in what they wait.
    lines = [headline]
    for rank in shown[:_SHOWN]:
        if rank in answers:
            lines += [f"rank {rank}: {answers[rank].place}", *answers[rank].stacks]
    rest = [rank for rank in sorted(answers) if rank not in shown]
    for rank in rest[:_SHOWN]:
        lines.append(f"rank {rank}: {answers[rank].place}")
    return "\n".join(lines)


class HangWatch:
    """The thread of one rank.

    connect: opens the ranks' store, for this thread alone.
    timeout_seconds: after which the ranks' collectives give up.
    """

    def __init__(
        self, connect: Callable[[], dist.Store], rank: int, ranks: int, timeout_seconds: float
    ) -> None:
        self._connect = connect
        self._rank, self._ranks = rank, ranks
        self._patience = {
            "train": _PATIENCE * timeout_seconds,
            "save": _SAVE_PATIENCE * timeout_seconds,
        }
        self._collected = _COLLECTED * timeout_seconds
        self._tick = min(_LONGEST_TICK, _TICK * timeout_seconds)
        self._store: dist.Store | None = None
        # The phase, by its beginning, that was looked into last. The incident that was answered and has no report yet.
        self._looked_into: dict[str, float] = {}
        self._answered: dict[str, int] = {}
        self._report = ""
        self._report_since = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread; safe to call twice."""
        self._over.set()
        faulthandler.cancel_dump_traceback_later()
        self._thread.join(self._tick + 1.0)
        atexit.unregister(self.stop)

    @property
    def report(self) -> str:
        """Who hangs, if the main thread has been stuck since that was found; else empty."""
        return self._report if self._report_since == training.since else ""

    def _run(self) -> None:
        armed = 0.0
        patience = self._patience["train"]
        while not self._over.is_set():
            now = time.monotonic()
            # If this thread cannot run for so long, some thread holds Python's lock in C.
            if now - armed > patience / 4:
                armed = now
                with suppress(Exception):  # such as a stderr that is no file
                    faulthandler.dump_traceback_later(patience + self._collected)
            if self._over.wait(self._tick):
                return
            now = time.monotonic()
            for name, work in (("train", training), ("save", saving)):
                if now - work.since < self._patience[name]:
                    continue
                # If the store's host is gone, the collectives of the main thread report that.
                try:
                    self._look(name, work)
                except Exception:
                    return

    def _look(self, name: str, work: Progress) -> None:
        """Say where this rank is, and log who hangs. Rank 0 begins and ends an incident, so that all mean the same."""
        since = work.since
        if self._rank == 0 and self._looked_into.get(name) == since:
            return
        if self._store is None:
            self._store = self._connect()
        store = self._store

        # Another incident may begin while this rank is in the same phase.
        number = store.add(f"{name}/incident", 0)
        report = ""
        if self._answered.get(name) != number:
            self._answered[name] = number
            answer = asdict(Answer.of(work))
            store.set(f"{name}/{number}/{self._rank}", json.dumps(answer))
        # Rank 0 collects the answers and publishes the report, which the other ranks wait for.
        if self._rank == 0:
            report = self._collect(f"{name}/{number}", lambda: work.since == since)
            store.set(f"{name}/{number}/report", report)
            store.add(f"{name}/incident", 1)
        else:
            report = self._await_report(f"{name}/{number}/report", lambda: work.since == since)
        first_look = self._looked_into.get(name) != since
        self._looked_into[name] = since

        if report and work is training:
            self._report, self._report_since = report, since
        if not report and self._rank and first_look and work.since == since:
            report = "rank 0 makes no report: it does not answer, or is still at work"
        if report:
            age = time.monotonic() - since
            say(f"rank {self._rank}: no progress for {age:.0f} s: {report}", sys.stderr)

    def _collect(self, key: str, stuck: Callable[[], bool]) -> str:
        """The report, from what the ranks write; empty if this rank goes on meanwhile. For rank 0."""
        assert self._store is not None
        keys = [f"{key}/{rank}" for rank in range(self._ranks)]
        deadline = time.monotonic() + self._collected
        while not self._store.check(keys) and time.monotonic() < deadline:
            if not stuck() or self._over.wait(self._tick):
                return ""
        answers: dict[int, Answer] = {}
        for rank, each in enumerate(keys):
            if self._store.check([each]):
                fields: dict[str, Any] = json.loads(self._store.get(each))
                answers[rank] = Answer(**{**fields, "stacks": tuple(fields["stacks"])})
        return report_of(answers, self._ranks) if stuck() else ""

    def _await_report(self, key: str, stuck: Callable[[], bool]) -> str:
        """Rank 0's report; empty if this rank goes on meanwhile, or none comes."""
        assert self._store is not None
        deadline = time.monotonic() + 2 * self._collected
        while not self._store.check([key]):
            late = time.monotonic() > deadline
            if late or not stuck() or self._over.wait(self._tick):
                return ""
        return self._store.get(key).decode()
