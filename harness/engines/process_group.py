"""The ranks of a run: what the launcher says, how they join and leave the process group, and which rank was lost.

torch reports a lost rank as "connection closed by peer", or waits until a timeout. This file finds out which rank it
was. Before the ranks join, each writes its host and process number into the rendezvous store, and reads those of the
others. A rank can then look in /proc whether another process of its machine is gone or stopped. It does so while the
ranks meet, and when a collective fails.
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
from harness.core.progress import training
from harness.engines.hang import HangWatch

# Seconds: the kernel closes a dying process's connections before /proc shows it as gone.
_SHOWS_WITHIN = 1.0
# Letters of /proc/PID/stat for processes that cannot answer.
_STATES = {
    "T": "stopped by a signal",
    "t": "held by a debugger",
    "": "gone",
    "Z": "gone",
    "X": "gone",
}
_GONE = {letter: state for letter, state in _STATES.items() if state == "gone"}
_HALTED = {letter: state for letter, state in _STATES.items() if state != "gone"}
# In a message: ranks that are named, and characters of a variable that are shown.
_NAMED = 5
_SHOWN = 40

# In torch's error where another process listens on the port already.
_PORT_TAKEN = "EADDRINUSE"
# Seconds between two looks at other ranks and the store.
_LOOK = 0.1
# The same for each rank in a large run: one process answers all of them.
_LOOK_EACH = 0.01
# The machine of a process that cannot say which one it is on.
_ELSEWHERE = ""


@dataclass(frozen=True, slots=True)
class _Peer:
    """The process of a rank.

    host: the name of its machine, for messages.
    machine: identifies its kernel and the numbering of its processes; _ELSEWHERE if not known.
    pid: its process number there.
    """

    host: str
    machine: str
    pid: int


@dataclass(slots=True)
class _Meeting:
    """Which ranks have come so far.

    rank: this one's number.
    host: who hosts the rendezvous, for messages.
    address: its address and port.
    peers: in rank order; None for a rank that has not come. Empty if no ranks are to meet.
    watch: finds out which rank hangs; None before the ranks have joined.
    """

    rank: int = 0
    host: str = ""
    address: tuple[str, int] = ("", 0)
    peers: list[_Peer | None] = field(default_factory=list)
    watch: HangWatch | None = None


_meeting = _Meeting()


def _this_process() -> _Peer:
    try:
        # Containers of one machine may share a host name, and each numbers its processes for itself.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = boot + os.readlink("/proc/self/ns/pid")
    except OSError:
        machine = _ELSEWHERE
    return _Peer(socket.gethostname(), machine, os.getpid())


@contextmanager
def lost_rank_named() -> Iterator[None]:
    """Context for collectives: if one fails because a rank is gone or frozen, LostRankError names that rank."""
    try:
        yield
    except LostRankError:
        raise
    except RuntimeError as error:
        alone = max(world_size(), len(_meeting.peers)) == 1
        if alone or not _of_ranks(error):
            raise
        raise LostRankError(_problem(str(error).partition("\n")[0])) from error


def _of_ranks(error: RuntimeError) -> bool:
    """Whether a collective raised `error`. gloo has no error class of its own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _problem(why: str) -> Problem:
    """Which rank was lost, as far as this rank can find out. why: what failed."""
    # A process that has just died may still look alive.
    deadline = time.monotonic() + _SHOWS_WITHIN
    while not (lost := _lost()) and time.monotonic() < deadline:
        time.sleep(0.05)

    # A rank of this machine is gone or stopped.
    where = f"rank {_meeting.rank}" if _meeting.peers else f"rank {world_rank()}"
    fix = "start the same command again: it resumes at the newest checkpoint; the lost rank's own message is above this"

    # A rank was found to hang. Others may be gone by now because of it. One that somebody halted hangs for that alone.
    hangs = _meeting.watch.report if _meeting.watch is not None else ""
    if hangs and not _lost(_HALTED):
        what, _, details = hangs.partition("\n")
        gone = f"; gone by now: {some(lost, _NAMED)}" if lost else ""
        fix = (
            "look at the code that is named, and start the same command again: it resumes at the newest checkpoint; "
            "if it is only slow: a higher engine.timeout_seconds"
        )
        return Problem(what, where, f"{why}{gone}\n{details}", fix)
    if lost:
        return Problem(f"lost {some(lost, _NAMED)}", where, why=why, fix=fix)

    # The ranks were still meeting, and some have not come.
    come: list[str] = []
    absent: list[str] = []
    for rank, peer in enumerate(_meeting.peers):
        group = absent if peer is None else come
        group.append(f"rank {rank}")
    if absent and _PORT_TAKEN in why:
        host, port = _meeting.address
        what = f"port {port} of {host} is taken, and the ranks were to meet there"
        fix = (
            "end what has it (ss -ltnp), perhaps another run; or give another: MASTER_PORT, torchrun "
            "--master-port, deepspeed --master_port"
        )
        return Problem(what, where, why, fix)
    if absent:
        ranks = len(_meeting.peers)
        what = f"waited in vain for {some(absent, _NAMED)} of {ranks} ranks"
        what += f"; there: {some(come, _NAMED)}"
        if not come:
            what = f"{_meeting.host} does not answer"
        fix = f"{fix}; if it is only slow to start: a higher engine.timeout_seconds"
        return Problem(what, where, why, fix)

    # All have come, and those of this machine are alive: the lost rank is on another machine, or one of them hangs.
    here = _this_process().machine
    peers = [peer for peer in _meeting.peers if peer is not None]
    elsewhere = sum(peer.machine != here for peer in peers)
    what = "another rank does not answer; none of this machine is gone or stopped"
    if elsewhere:
        what += f"; {elsewhere} ranks are on other machines"
    return Problem(what, where, why, fix)


def _lost(states: Mapping[str, str] = _STATES) -> list[str]:
    """Every rank of this machine that is in one of `states`, such as `rank 1 (process 123, gone)`.

    states: words for each letter of /proc/PID/stat.
    """
    here = _this_process().machine
    found: list[str] = []
    for rank, peer in enumerate(_meeting.peers):
        if peer is None or here == _ELSEWHERE or peer.machine != here:
            continue
        if state := states.get(state_of(peer.pid)):
            found.append(f"rank {rank} (process {peer.pid}, {state})")
    return found


_LOOPBACK = "127.0.0.1"
_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_MOST_RANKS = 10**6
_MOST_PORT = 65_535
_BY_A_LAUNCHER = "start with torchrun, deepspeed or plain python"


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among its peers, from the environment that torchrun or the deepspeed launcher sets.

    rank: from 0 to `world_size` - 1.
    world_size: how many ranks there are.
    local_rank: from 0 to `local_world_size` - 1.
    local_world_size: how many ranks are on this machine.
    launched: whether there is a launcher. Without one this is rank 0 of 1.
    one_machine: whether the launcher says that all ranks are on this machine; False if it does not say.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False
    one_machine: bool = False


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """What the launcher says in `environ`, by default this process's environment.

    Raises ConfigError that names every variable which cannot be right.
    """
    environ = os.environ if environ is None else environ
    if not ({"RANK", "WORLD_SIZE"} & environ.keys()):
        return Launch()

    # torchrun sets LOCAL_WORLD_SIZE. The deepspeed launcher may set LOCAL_SIZE, or neither.
    texts = {name: environ.get(name) for name in (*_NUMBERS, "MASTER_PORT")}
    if not texts["LOCAL_WORLD_SIZE"]:
        del texts["LOCAL_WORLD_SIZE"]
        if environ.get("LOCAL_SIZE"):
            texts["LOCAL_SIZE"] = environ["LOCAL_SIZE"]

    # Each variable by itself.
    problems: list[Problem] = []
    numbers: dict[str, int] = {}
    for name, text in texts.items():
        least = 0 if name in ("RANK", "LOCAL_RANK") else 1
        most = _MOST_PORT if name == "MASTER_PORT" else _MOST_RANKS
        if not text:
            problems.append(Problem(f"{name} is missing", "environment", fix=_BY_A_LAUNCHER))
            continue
        number = _whole(text)
        if number is None or not least <= number <= most:
            what = f"{name} is {clipped(repr(text), _SHOWN)}, not a number from {least} to {most}"
            problems.append(Problem(what, "environment", fix=_BY_A_LAUNCHER))
        else:
            numbers[name] = number
    if not environ.get("MASTER_ADDR"):
        problems.append(Problem("MASTER_ADDR is missing", "environment", fix=_BY_A_LAUNCHER))

    # Ranks against their number. The first pair that does not fit is reported.
    pairs = (
        ("RANK", "WORLD_SIZE"),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("LOCAL_RANK", "LOCAL_SIZE"),
    )
    for low, high in pairs:
        if not problems and high in numbers and numbers[low] >= numbers[high]:
            what = f"{low} {numbers[low]} is not below {high} {numbers[high]}"
            fix = "unset both, or let a launcher set them"
            problems.append(Problem(what, "environment", fix=fix))
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
    """The number in `text`, if it is 1 to 9 plain digits; else None.

    Other spellings, such as " 1" or "1_0", are numbers to some readers of the variable and not to others.
    """
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def choose_device(launch: Launch) -> torch.device:
    """This rank's GPU, which becomes the current one; the CPU if torch sees no GPU.

    Raises ConfigError if there are more local ranks than GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if launch.local_rank >= count:
        what = f"local rank {launch.local_rank} has no GPU: there are {count}"
        fix = f"start at most {count} processes on this machine"
        raise ConfigError(Problem(what, "launcher", fix=fix))
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device


def join(launch: Launch, device: torch.device, timeout_seconds: float) -> None:
    """Join the process group (nccl on CUDA, gloo on a CPU) if there is a launcher. Joining twice is harmless.

    If all ranks are on this machine, gloo and the rendezvous of rank 0 listen on loopback only.

    Raises LostRankError. A rank of this machine that is gone is noticed at once. Any other rank that is lost, frozen or
    has not come is noticed after `timeout_seconds`.
    """
    if not launch.launched or dist.is_initialized():
        return
    if launch.one_machine:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=timeout_seconds)

    def meet_and_join() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has a current device of its own
        backend, device_id = "gloo", None
        if device.type == "cuda":
            backend, device_id = "nccl", device
        store = _store(launch, timeout)
        _meet(store, launch)
        dist.init_process_group(
            backend,
            store=store,
            timeout=timeout,
            rank=launch.rank,
            world_size=launch.world_size,
            device_id=device_id,
        )

    _meeting.rank = launch.rank
    _meeting.peers = [None] * launch.world_size
    with lost_rank_named():
        _watched(meet_and_join, timeout_seconds)
    # Progress is counted: of ranks that hang, the one that has counted least is named.
    training.again()

    # From here on a rank that hangs is found by its own thread, over a connection of its own.
    def connect() -> dist.Store:
        return _client(timeout)

    _meeting.watch = HangWatch(connect, launch.rank, launch.world_size, timeout_seconds)


def _watched(action: Callable[[], None], seconds: float) -> None:
    """Run `action` on a thread, and watch the ranks that have come.

    torch waits for ever for a store whose host is frozen, and no signal reaches it there. Raises what `action` raises,
    and LostRankError if a rank is gone, or after `seconds`.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    # A daemon: a thread that torch holds for ever must not keep the process alive.
    thread = threading.Thread(target=run, name="meeting", daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive():
        thread.join(_LOOK)
        if thread.is_alive() and _lost(_GONE):
            raise LostRankError(_problem("it ended while the ranks met"))
        if thread.is_alive() and time.monotonic() >= deadline:
            what = f"the ranks had not met after {seconds:.0f} s (engine.timeout_seconds)"
            raise LostRankError(_problem(what))
    if raised:
        raise raised[0]


def _meet(store: dist.Store, launch: Launch) -> None:
    """Write this process into `store`, and read the other ranks' processes as they come."""
    keys = [f"harness/{rank}" for rank in range(launch.world_size)]
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
    """The rendezvous at MASTER_PORT, which the launcher's agent hosts, or rank 0.

    If rank 0 hosts it and all ranks are on this machine, it listens on loopback only. torch's own socket would listen
    on every interface, and anybody could connect.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = launch.rank == 0 and not agent
    local = launch.one_machine and not agent
    address = _LOOPBACK if local else os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    _meeting.address = address, port
    host = "the launcher" if agent else "rank 0"
    _meeting.host = f"the rendezvous at {address}:{port}, which {host} hosts,"

    # torch takes over the listening socket. The port stays taken as long as the store lives.
    listening = None
    if hosts and local:
        listening = _listen(port)
    store = dist.TCPStore(
        address,
        port,
        launch.world_size,
        hosts,
        timeout,
        wait_for_workers=False,  # `_meet` waits, and knows for whom
        multi_tenant=not agent,
        master_listen_fd=listening,
    )
    return _of_this_start("start", store)


def _of_this_start(name: str, store: dist.Store) -> dist.Store:
    """`store`, with keys of this start alone.

    torchrun's store outlives a failed start. What its ranks left there must not be read by those of the next one: our
    own entries, and the addresses at which gloo and NCCL reach each other.
    """
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"{name}-{start}", store)


def _client(timeout: timedelta) -> dist.Store:
    """Another connection to the rendezvous, for the thread that looks for ranks that hang."""
    address, port = _meeting.address
    store = dist.TCPStore(address, port, None, False, timeout, wait_for_workers=False)
    return _of_this_start("hang", store)


def _listen(port: int) -> int:
    """The descriptor of a socket that listens at `port` of loopback. Raises MachineError if it cannot."""
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((_LOOPBACK, port))
        server.listen(socket.SOMAXCONN)
    except OSError as error:
        server.close()
        what = f"port {port} cannot be used for the rendezvous"
        why = error.strerror or str(error)
        fix = "choose another port: --master-port of torchrun, --master_port of deepspeed; "
        fix += f'with make train: LAUNCHER_ARGS="--master_port {port + 1}" make train'
        raise MachineError(Problem(what, "launcher", why, fix)) from error
    return server.detach()


def limit_every_group(timeout_seconds: float) -> None:
    """Give every process group our timeout, those that a library made for itself too. Theirs is torch's 30 minutes.

    torch has no public way to list its groups or to change a timeout.
    """
    c10d = dist.distributed_c10d
    timeout = timedelta(seconds=timeout_seconds)
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timeout, group)


def leave() -> None:
    """Leave the process group; harmless if this process is in none."""
    if _meeting.watch is not None:
        _meeting.watch.stop()
    if dist.is_initialized():
        dist.destroy_process_group()
        _meeting.peers = []


class ProcessGroup:
    """This rank in its group, and small collectives. Each gives the same answer on every rank.

    With a single process they return their argument.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank = world_rank()
        self.world_size = world_size()

    @lost_rank_named()
    def mean(self, values: Tensor) -> Tensor:
        """Mean over ranks of fp32 [n] or 0-d. It is summed in rank order, so that all ranks get the same bits."""
        training.again()
        return mean_over_ranks(values)

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks of fp32 [n] or 0-d; infinities are kept, NaN is not defined."""
        return values if self.world_size == 1 else self.max_(values.clone())

    @lost_rank_named()
    def max_(self, values: Tensor) -> Tensor:
        """`max` in place."""
        training.again()
        return max_over_ranks(values)

    @lost_rank_named()
    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value`, which is JSON-able. What other ranks pass is ignored."""
        if self.world_size == 1:
            return value
        training.again()

        # The size goes first: the others must allocate the tensor that they receive into.
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
        training.again()
        if self.world_size > 1:
            dist.barrier()
