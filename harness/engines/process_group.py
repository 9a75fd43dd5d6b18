"""Ranks: what the launcher says, joining and leaving the process group, small collectives, and which rank was lost.

The ranks of one machine know each other's processes, and look when a collective fails.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.core.collectives import gather_texts, max_over_ranks, mean_over_ranks, world_rank, world_size
from harness.core.errors import ConfigError, LostRankError, MachineError, Problem, some

# The kernel closes a dying process's connections before it shows the process as gone.
_SHOWS_WITHIN = 1.0
_STATES = {"T": "stopped by a signal", "t": "held by a debugger", "": "gone", "Z": "gone", "X": "gone"}
_NAMED = 5

_peers: list[tuple[str, int]] = []
"""Host and process of every rank, in rank order; empty until the ranks have met."""


def meet() -> None:
    """Let the ranks of the default process group know each other's processes. Collective."""
    _peers[:] = [tuple(json.loads(text)) for text in gather_texts(json.dumps([socket.gethostname(), os.getpid()]))]


@contextmanager
def lost_rank_named() -> Iterator[None]:
    """Around collectives: one that fails because a rank is gone or frozen raises LostRankError, naming the rank."""
    try:
        yield
    except LostRankError:
        raise
    except RuntimeError as error:  # gloo's errors have no class of their own
        if world_size() == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise LostRankError(_problem(str(error).partition("\n")[0])) from error


def _problem(why: str) -> Problem:
    deadline = time.monotonic() + _SHOWS_WITHIN
    while not (lost := _lost()) and time.monotonic() < deadline:
        time.sleep(0.05)
    where = f"rank {world_rank()}"
    fix = "start the same command again: it resumes at the newest checkpoint; what ended the rank is told above this"
    if lost:
        return Problem(f"lost {some(lost, _NAMED)}", where, why=why, fix=fix)
    elsewhere = sum(host != socket.gethostname() for host, _ in _peers)
    told = f"; {elsewhere} ranks are on other machines" if elsewhere else ""
    return Problem(f"another rank does not answer; none of this machine is gone or stopped{told}", where, why, fix)


def _lost() -> list[str]:
    """Every rank of this machine that is not running, such as `rank 1 (process 123, gone)`."""
    here = socket.gethostname()
    states = [(rank, pid, _STATES.get(_state(pid))) for rank, (host, pid) in enumerate(_peers) if host == here]
    return [f"rank {rank} (process {pid}, {state})" for rank, pid, state in states if state]


def _state(pid: int) -> str:
    """The letter that the kernel has for a process, empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


_LOOPBACK = "127.0.0.1"
_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


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
    for name in _NUMBERS:
        text = environ.get(name)
        if name == "LOCAL_WORLD_SIZE":
            text = text or environ.get("LOCAL_SIZE")  # the deepspeed launcher's name for it
            if text is None:
                continue
        if text is None or not text.isdecimal():
            what = "is missing" if text is None else f"is {text!r}, not a number"
            problems.append(
                Problem(f"{name} {what}", "environment", fix="start with torchrun, deepspeed or plain python")
            )
        else:
            numbers[name] = int(text)
    problems += [
        Problem(f"{name} is missing", "environment", fix="start with torchrun, deepspeed or plain python")
        for name in ("MASTER_ADDR", "MASTER_PORT")
        if not environ.get(name)
    ]
    if not problems and numbers["RANK"] >= numbers["WORLD_SIZE"]:
        problems.append(
            Problem(
                f"RANK {numbers['RANK']} is not below WORLD_SIZE {numbers['WORLD_SIZE']}",
                "environment",
                fix="unset both, or let a launcher set them",
            )
        )
    if problems:
        raise ConfigError(problems)
    world_size = numbers["WORLD_SIZE"]
    local = numbers.get("LOCAL_WORLD_SIZE")
    return Launch(
        numbers["RANK"],
        world_size,
        numbers["LOCAL_RANK"],
        local or world_size,
        launched=True,
        one_machine=local == world_size,
    )


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

    Where all ranks are on this machine, gloo and the rendezvous that rank 0 hosts listen on loopback alone.
    """
    if launch.launched and not dist.is_initialized():
        store = None
        if launch.one_machine:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            store = _local_store(launch, timedelta(seconds=timeout_seconds))
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            timeout=timedelta(seconds=timeout_seconds),
            rank=launch.rank,
            world_size=launch.world_size,
            device_id=device if device.type == "cuda" else None,
        )
        meet()


def _local_store(launch: Launch, timeout: timedelta) -> dist.Store | None:
    """The rendezvous of ranks on one machine, at MASTER_PORT of loopback; None where the launcher's agent hosts it.

    torch's own would listen on every interface, and has no say in who connects.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    port = int(os.environ["MASTER_PORT"])
    listening = None
    if launch.rank == 0:
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
        listening = server.detach()
    # torch takes the socket over; its name stays bound while it lives.
    return dist.TCPStore(
        _LOOPBACK, port, launch.world_size, launch.rank == 0, timeout, multi_tenant=True, master_listen_fd=listening
    )


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
