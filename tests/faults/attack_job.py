"""One start of the attacked run, in whatever kind of processes; what is done to it meanwhile, and how it ended.

Processes of the kinds "python" and "... ranks" are forked from one that has imported torch and the harness: a start
then costs a second of processor time and not five. What begins before, or is found by a process's own start, needs
a real one: kinds "new python", "torchrun" and "deepspeed", a sixth of all sequences (attack_plans.SHARES).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attack_plans import ALONE, Episode
from launch_support import Launch

from tests.support import warm
from tests.support.runs import LOADED, ROOT, environment, rank_logs, start_ranks

HERE = Path(__file__).resolve().parent
DRIVER = HERE / "attack_driver.py"
PATIENCE = {"python": 120.0, "new python": 180.0, "torchrun ranks": 180.0, "deepspeed ranks": 240.0,
            "torchrun": 300.0, "deepspeed": 400.0}  # fmt: skip
"""Seconds within which a start ends on a busy machine, whatever happens to it."""


@dataclass
class Ended:
    """codes: of each process, or the one that the launcher's wrapper returned; negative for a signal. undone: reactions
    whose moment did not come.
    """

    codes: list[int]
    output: str
    seconds: float
    hung: bool = False
    orphans: str = ""
    fired: list[str] = field(default_factory=list)
    others: list[Ended] = field(default_factory=list)
    undone: int = 0


class Job:
    """arguments: those of launch/train.py. events: the driver's. name: of a second one beside it, in one process."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        arguments: Sequence[str],
        events: Sequence[Mapping[str, Any]],
        name: str = "",
        **extra: str,
    ) -> None:
        self.folder, self.kind = folder, kind
        self.told = folder / f"told{name}"
        self.told.unlink(missing_ok=True)
        self._logs = [folder / f"rank-0{name}.log"] if kind in ALONE else rank_logs(folder, 2)
        variables = {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}", "ATTACK": json.dumps(list(events)),
            "ATTACK_TOLD": str(self.told), "DISK": str(folder / "runs"), "DISK_SIZE": str(folder / "size"), **extra,
        }  # fmt: skip
        if "LD_PRELOAD" in os.environ:
            variables["LD_PRELOAD"] = os.environ["LD_PRELOAD"]
        self._began = time.monotonic()
        self._launch: Launch | None = None
        self._processes: list[warm.Process | subprocess.Popen[bytes]] = []
        line = [str(DRIVER), *arguments]
        if kind == "python":
            with self._logs[0].open("wb") as log:
                told, known = log.fileno(), environment(**variables)
                self._processes = [warm.start(line, folder, known, told, told, modules=LOADED)]
        elif kind == "new python":
            self._launch = Launch.start(folder, [sys.executable, *line], environment(**variables))
        elif kind.endswith(" ranks"):
            engine = kind.removesuffix(" ranks")
            modules = (*LOADED, *(["deepspeed"] if engine == "deepspeed" else []))
            self._processes = start_ranks(folder, 2, line, engine, modules, False, **variables)
        else:
            _own_launchers(folder)
            variables |= {"RANKS": "2", "OUTCOME_WAIT": "30"}
            if kind == "deepspeed":  # which takes one and the same port for all of a machine's jobs
                variables["LAUNCHER_ARGS"] = f"--master_port {_free_port()}"
            self._launch = Launch.start(
                folder, ["bash", f"launch/{kind}.sh", *arguments], environment(**variables)
            )

    def running(self) -> bool:
        if self._launch is not None:
            return self._launch.process.poll() is None
        return any(each.poll() is None for each in self._processes)

    def output(self) -> str:
        if self._launch is not None:
            return self._launch.output()
        return "".join(log.read_text(errors="replace") for log in self._logs if log.exists())

    def fired(self) -> list[str]:
        return self.told.read_text().splitlines() if self.told.exists() else []

    def signal_all(self, number: int) -> None:
        """To every process of it, helpers included."""
        if self._launch is not None:
            pids = list(self._launch.processes())
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            return
        for each in self._processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(each.pid, number)

    def ask(self, number: int) -> None:
        """What a user does: the signal goes to rank 0, or to the launcher's wrapper."""
        if self._launch is not None:
            self._launch.process.send_signal(number)
        else:
            self._processes[0].send_signal(number)

    def kill_launcher(self) -> None:
        assert self._launch is not None
        for pid, variables in self._launch.processes().items():
            if "RANK" not in variables and pid != self._launch.process.pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def end(self, hung: bool) -> Ended:
        """Take away what is left, and say how it ended."""
        orphans = ""
        if hung:
            self.signal_all(signal.SIGCONT)
            self.signal_all(signal.SIGUSR2)  # the driver's log says where every thread is
            time.sleep(1.0)
            self.signal_all(signal.SIGKILL)
        if self._launch is not None:
            if self.kind in ALONE:
                self._launch.process.wait()
                self.signal_all(signal.SIGKILL)  # a shipper, which may go on after it
            try:
                self._launch.ended(60)
            except AssertionError as error:
                orphans = str(error)[:1000]
            code = self._launch.process.wait()
            # DeepSpeed's launcher ends with the signal that killed a rank, negative, of which a shell keeps 8 bits.
            codes = [-9 if self.kind == "deepspeed" and code == 256 - 9 else code]
        else:
            codes = [each.wait(30) for each in self._processes]
            self.signal_all(signal.SIGKILL)  # shippers, which may go on after a rank
        return Ended(
            codes, self.output(), time.monotonic() - self._began, hung, orphans, self.fired()
        )

    def age(self) -> float:
        return time.monotonic() - self._began


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _own_launchers(folder: Path) -> None:
    """launch/ with the driver in the place of train.py."""
    if (folder / "launch").exists():
        return
    (folder / "launch").mkdir()
    for path in (ROOT / "launch").iterdir():
        (folder / "launch" / path.name).symlink_to(DRIVER if path.name == "train.py" else path)


def attend(job: Job, episode: Episode, hands: Mapping[str, Any]) -> Ended:
    """See the start to its end, doing what the episode has the attacker do."""
    waiting = [dict(each) for each in episode.reactions]
    seconds: list[Job] = []
    limit = PATIENCE[job.kind] + sum(
        float(each["do"][-1]) for each in episode.events if each["do"][0] == "until"
    )
    while job.running() and job.age() < limit:
        now = time.monotonic()
        for each in waiting:
            if "due" not in each and _happened(each["when"], job):
                each["due"] = now + each["after"]
                if each.get("stop"):
                    job.signal_all(signal.SIGSTOP)
        for each in [each for each in waiting if each.get("due", now + 1) <= now]:
            waiting.remove(each)
            react(each["do"], job, hands, seconds)
            if each["do"].startswith("continue") and "again" not in each:
                # One that was stopped before it came to stop itself does so now.
                waiting += [
                    {**each, "again": True, "due": now + later} for later in (0.5, 2.0, 10.0)
                ]
        time.sleep(0.01)
    ended = job.end(hung=job.running())
    ended.undone = sum("again" not in each for each in waiting)
    for second in seconds:
        deadline = time.monotonic() + limit
        while second.running() and time.monotonic() < deadline:
            time.sleep(0.01)
        other = second.end(hung=second.running())
        ended.hung |= other.hung
        ended.others.append(other)
    if hands.get("proxy") is not None:
        hands["proxy"].switch("")
    return ended


def _happened(when: str, job: Job) -> bool:
    if when == "started":
        return True
    return bool(job.fired()) if when == "fired" else "checkpoint.paused" in job.output()


def react(do: str, job: Job, hands: Mapping[str, Any], seconds: list[Job]) -> None:
    """One thing that the attacker does from outside."""
    match do.split():
        case ["kill", "all"]:
            job.signal_all(signal.SIGKILL)
        case ["continue", *_]:
            job.signal_all(signal.SIGCONT)
        case ["room"]:
            (job.folder / "size").unlink(missing_ok=True)
        case ["stop", *_]:
            job.ask(signal.SIGTERM)
        case ["interrupt", *_]:
            job.ask(signal.SIGINT)
        case ["kill", "launcher"]:
            job.kill_launcher()
        case ["second"]:
            seconds.append(hands["again"]())
        case ["suspend", jump]:
            job.signal_all(signal.SIGSTOP)
            (job.folder / "offset").write_text(jump)
        case ["server", fault]:
            hands["proxy"].switch(fault)
        case ["restart", "server"]:
            hands["restart"](job.folder / "server-up")
        case _:
            raise ValueError(do)
