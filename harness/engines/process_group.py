"""Ranks: what the launcher says, joining and leaving the process group, small collectives, and which rank was lost.

The ranks know each other's processes before they join, and those of one machine look after them: while they meet, and
when a collective fails.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.core.collectives import max_over_ranks, mean_over_ranks, world_rank, world_size
from harness.core.errors import ConfigError, LostRankError, MachineError, Problem, clipped, some
from harness.core.processes import state_of

# The kernel closes a dying process's connections before it shows the process as gone.
_SHOWS_WITHIN = 1.0
_STATES = {
    "T": "stopped by a signal",
    "t": "held by a debugger",
    "": "gone",
    "Z": "gone",
    "X": "gone",
}
_GONE = {letter: state for letter, state in _STATES.items() if state == "gone"}
_NAMED, _SHOWN = 5, 40

_LOOK = 0.1
# Seconds between two looks at the store, for each rank: one process answers all of them.
_LOOK_EACH = 0.01
_ELSEWHERE = ""


@dataclass(frozen=True, slots=True)
class _Peer:
    """A rank's process. machine: tells its kernel and its process numbers from others; _ELSEWHERE if not known."""

    host: str
    machine: str
    pid: int


@dataclass(slots=True)
class _Meeting:
    """Which ranks have come so far. rank: this one's. host: of the rendezvous, in words. peers: in rank order, None for
    a rank that has not come; empty where ranks did not meet.
    """

    rank: int = 0
    host: str = ""
    peers: list[_Peer | None] = field(default_factory=list)


_meeting = _Meeting()


def _this_process() -> _Peer:
    try:
        # Containers may share a host name, and number their processes apart.
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink(
            "/proc/self/ns/pid"
        )
    except OSError:
        machine = _ELSEWHERE
    return _Peer(socket.gethostname(), machine, os.getpid())


@contextmanager
def lost_rank_named() -> Iterator[None]:
    """Around collectives: one that fails because a rank is gone or frozen raises LostRankError, naming the rank."""
    try:
        yield
    except LostRankError:
        raise
    except RuntimeError as error:
        if max(world_size(), len(_meeting.peers)) == 1 or not _of_ranks(error):
            raise
        raise LostRankError(_problem(str(error).partition("\n")[0])) from error


def _of_ranks(error: RuntimeError) -> bool:
    return (
        isinstance(error, dist.DistError) or "gloo" in str(error).lower()
    )  # gloo's errors have no class of their own


def _problem(why: str) -> Problem:
    deadline = time.monotonic() + _SHOWS_WITHIN
    while not (lost := _lost()) and time.monotonic() < deadline:
        time.sleep(0.05)
    where = f"rank {_meeting.rank}" if _meeting.peers else f"rank {world_rank()}"
    fix = "start the same command again: it resumes at the newest checkpoint; what ended the rank is told above this"
    if lost:
        return Problem(f"lost {some(lost, _NAMED)}", where, why=why, fix=fix)
    come = [f"rank {rank}" for rank, peer in enumerate(_meeting.peers) if peer is not None]
    absent = [f"rank {rank}" for rank, peer in enumerate(_meeting.peers) if peer is None]
    if absent:
        what = f"waited in vain for {some(absent, _NAMED)} of {len(_meeting.peers)} ranks; there: {some(come, _NAMED)}"
        if not come:
            what = f"{_meeting.host} does not answer"
        fix = f"{fix}; where it is only slow to start: a higher engine.timeout_seconds"
        return Problem(what, where, why, fix)
    here = _this_process().machine
    elsewhere = sum(peer is not None and peer.machine != here for peer in _meeting.peers)
    told = f"; {elsewhere} ranks are on other machines" if elsewhere else ""
    return Problem(
        f"another rank does not answer; none of this machine is gone or stopped{told}",
        where,
        why,
        fix,
    )


def _lost(states: Mapping[str, str] = _STATES) -> list[str]:
    """Every rank of this machine that is in one of `states`, such as `rank 1 (process 123, gone)`."""
    here = _this_process().machine
    found: list[str] = []
    for rank, peer in enumerate(_meeting.peers):
        if (
            peer is not None
            and peer.machine == here != _ELSEWHERE
            and (state := states.get(state_of(peer.pid)))
        ):
            found.append(f"rank {rank} (process {peer.pid}, {state})")
    return found


_LOOPBACK = "127.0.0.1"
_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_MOST_RANKS, _MOST_PORT = 10**6, 65_535
_BY_A_LAUNCHER = "start with torchrun, deepspeed or plain python"


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among its peers, as torchrun or the deepspeed launcher put it into the environment.

    launched: False when there is no launcher (rank 0 of 1, alone). one_machine: the launcher says that all ranks are
    here; False where it does not say.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False
    one_machine: bool = False


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """The launcher's environment. Raises ConfigError naming every variable that cannot be right."""
    environ = os.environ if environ is None else environ
    if not ({"RANK", "WORLD_SIZE"} & environ.keys()):
        return Launch()
    problems: list[Problem] = []
    numbers: dict[str, int] = {}
    texts = {name: environ.get(name) for name in (*_NUMBERS, "MASTER_PORT")}
    if not texts["LOCAL_WORLD_SIZE"]:
        name = "LOCAL_SIZE"  # the deepspeed launcher's
        del texts["LOCAL_WORLD_SIZE"]
        if environ.get(name):
            texts[name] = environ[name]
    for name, text in texts.items():
        least = 0 if name in ("RANK", "LOCAL_RANK") else 1
        most = _MOST_PORT if name == "MASTER_PORT" else _MOST_RANKS
        if not text:
            problems.append(Problem(f"{name} is missing", "environment", fix=_BY_A_LAUNCHER))
        elif (number := _whole(text)) is None or not least <= number <= most:
            what = f"{name} is {clipped(repr(text), _SHOWN)}, not a number from {least} to {most}"
            problems.append(Problem(what, "environment", fix=_BY_A_LAUNCHER))
        else:
            numbers[name] = number
    if not environ.get("MASTER_ADDR"):
        problems.append(Problem("MASTER_ADDR is missing", "environment", fix=_BY_A_LAUNCHER))
    for low, high in (
        ("RANK", "WORLD_SIZE"),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("LOCAL_RANK", "LOCAL_SIZE"),
    ):
        if not problems and high in numbers and numbers[low] >= numbers[high]:
            what = f"{low} {numbers[low]} is not below {high} {numbers[high]}"
            problems.append(
                Problem(what, "environment", fix="unset both, or let a launcher set them")
            )
    if problems:
        raise ConfigError(problems)
    world_size = numbers["WORLD_SIZE"]
    local = numbers.get("LOCAL_WORLD_SIZE") or numbers.get("LOCAL_SIZE")
    return Launch(
        numbers["RANK"],
        world_size,
        numbers["LOCAL_RANK"],
        local or world_size,
        launched=True,
        one_machine=local == world_size,
    )


def _whole(text: str) -> int | None:
    """The number that `text` spells in plain digits, as every reader of it does; None if it is none, or a long one."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def choose_device(launch: Launch) -> torch.device:
    """cuda:<local rank> where torch sees GPUs (it is made current), else the CPU.

    Raises ConfigError if there are more local ranks than GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if launch.local_rank >= count:
        raise ConfigError(
            Problem(
                f"local rank {launch.local_rank} has no GPU: there are {count}",
                "launcher",
                fix=f"start at most {count} processes on this machine",
            )
        )
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device


def join(launch: Launch, device: torch.device, timeout_seconds: float) -> None:
    """Join the process group (nccl on CUDA, gloo on CPU) if there is a launcher. Joining twice is harmless.

    Where all ranks are on this machine, gloo and the rendezvous that rank 0 hosts listen on loopback alone. Raises
    LostRankError as soon as a rank of this machine that has come is gone, and for every other rank that is lost, frozen
    or not there within `timeout_seconds`.
    """
    if not launch.launched or dist.is_initialized():
        return
    if launch.one_machine:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=timeout_seconds)

    def meet_and_join() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # it is each thread's own
        store = _store(launch, timeout)
        _meet(store, launch)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            timeout=timeout,
            rank=launch.rank,
            world_size=launch.world_size,
            device_id=device if device.type == "cuda" else None,
        )

    _meeting.rank, _meeting.peers = launch.rank, [None] * launch.world_size
    with lost_rank_named():
        _watched(meet_and_join, timeout_seconds)


def _watched(action: Callable[[], None], seconds: float) -> None:
    """Run `action` on a thread, and look after the ranks that have come: torch waits for a store whose host is frozen
    without an end, and out of reach of signals. Raises what `action` does; LostRankError after `seconds`.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="meeting", daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive():
        thread.join(_LOOK)
        if thread.is_alive() and _lost(_GONE):
            raise LostRankError(_problem("it ended while the ranks met"))
        if thread.is_alive() and time.monotonic() >= deadline:
            raise LostRankError(
                _problem(f"the ranks had not met after {seconds:.0f} s (engine.timeout_seconds)")
            )
    if raised:
        raise raised[0]


def _meet(store: dist.Store, launch: Launch) -> None:
    """Leave word of this process in `store`, and read every other rank's, as it comes."""
    # torchrun's store outlives a start that failed: what ranks of that one left there must not be read again.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    keys = [f"harness/{start}/{rank}" for rank in range(launch.world_size)]
    mine = _this_process()
    store.set(keys[launch.rank], json.dumps(astuple(mine)))
    _meeting.peers[launch.rank] = mine
    while None in _meeting.peers:
        for rank, peer in enumerate(_meeting.peers):
            if peer is None and store.check([keys[rank]]):
                _meeting.peers[rank] = _Peer(*json.loads(store.get(keys[rank])))
        if None in _meeting.peers:
            time.sleep(max(_LOOK, _LOOK_EACH * launch.world_size))


def _store(launch: Launch, timeout: timedelta) -> dist.Store:
    """The rendezvous at MASTER_PORT: the launcher's agent hosts it, or rank 0. Where rank 0 does and all ranks are on
    this machine, it is on loopback alone: torch's own would listen on every interface, and has no say in who connects.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts, local = launch.rank == 0 and not agent, launch.one_machine and not agent
    address, port = (
        _LOOPBACK if local else os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
    )
    _meeting.host = (
        f"the rendezvous at {address}:{port}, which {'the launcher' if agent else 'rank 0'} hosts,"
    )
    # torch takes the socket over; its name stays bound while it lives.
    return dist.TCPStore(
        address,
        port,
        launch.world_size,
        hosts,
        timeout,
        wait_for_workers=False,  # `_meet` does, and knows for whom
        multi_tenant=not agent,
        master_listen_fd=_listen(port) if hosts and local else None,
    )


def _listen(port: int) -> int:
    """A socket that listens at `port` of loopback. Raises MachineError if it cannot."""
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((_LOOPBACK, port))
        server.listen(socket.SOMAXCONN)
    except OSError as error:
        server.close()
        why = error.strerror or str(error)
        fix = "choose another port: --master-port of torchrun, --master_port of deepspeed"
        raise MachineError(
            Problem(f"port {port} cannot be used for the rendezvous", "launcher", why, fix)
        ) from error
    return server.detach()


def limit_every_group(timeout_seconds: float) -> None:
    """Let the groups that a library made for itself give up when ours does: theirs would wait for torch's 30 minutes.

    Torch has no public way to ask for its groups or to change a timeout.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_seconds), group)


def leave() -> None:
    """Leave the process group; harmless outside of one."""
    if dist.is_initialized():
        dist.destroy_process_group()
        _meeting.peers = []


class ProcessGroup:
    """This rank of its group and small collectives, which give the same answer everywhere; alone, their argument."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.world_size = world_rank(), world_size()

    @lost_rank_named()
    def mean(self, values: Tensor) -> Tensor:
        """Mean over ranks of fp32 [n] or 0-d, summed in rank order, so that all ranks get the same bits."""
        return mean_over_ranks(values)

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks of fp32 [n] or 0-d; infinities are kept, NaN is not defined."""
        return values if self.world_size == 1 else self.max_(values.clone())

    @lost_rank_named()
    def max_(self, values: Tensor) -> Tensor:
        """`max` in place."""
        return max_over_ranks(values)

    @lost_rank_named()
    def broadcast(self, value: Any) -> Any:
        """Rank 0's JSON-able value; what other ranks pass is ignored."""
        if self.world_size == 1:
            return value
        data = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        dist.broadcast(size, src=0)
        payload = torch.zeros(int(size.item()), dtype=torch.uint8, device=self.device)
        if self.rank == 0:
            payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(payload, src=0)
        return json.loads(bytes(payload.cpu().tolist()))

    @lost_rank_named()
    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world_size > 1:
            dist.barrier()
