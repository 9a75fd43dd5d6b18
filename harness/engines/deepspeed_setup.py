"""What DeepSpeed needs before it trains: refused combinations, installed tools, its config, and its kernel for CPUs.

All but the kernel work without importing DeepSpeed.

The kernel. On a CPU DeepSpeed compiles a communication kernel when it first starts. Two things go wrong there:

- torch guards the build with a lock file that only its maker deletes. A process that is killed while it compiles leaves
  the file, and all later ones wait for ever without a message. So a process first takes a lock of the system (flock),
  which ends with its owner. While it holds that lock, it deletes torch's file if the maker is gone. If the maker lives,
  it waits, says so, and gives up at some time.
- ninja and its compilers go on when the rank that started them is killed. So a rank compiles in another process, with a
  process group of its own, which ends with the rank.

`python -m harness.engines.deepspeed_setup` builds the kernel beforehand, as `make setup` does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from harness.core.config import flat, merge
from harness.core.errors import ConfigError, HarnessError, MachineError, Problem
from harness.core.files import read_json, resource_dir
from harness.core.processes import command_of, find_compiler

PrecisionName = Literal["fp8", "bf16", "fp16", "fp32"]
# Largest DeepSpeed JSON of the user that is read.
_MAX_BYTES = 256 * 1024
_OTHERS = "start it as `torchrun --nproc_per_node N launch/train.py ...` or `python launch/train.py ...` instead"

# Keys of a user's DeepSpeed JSON that would break what the harness guarantees: by reason, the keys and the fix.
_REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "it would change the precision behind the recipe's back": (
        (
            "fp16",
            "bf16",
            "bfloat16",
            "amp",
            "torch_autocast",
            "data_types",
            "communication_data_type",
            "zero_optimization.zero_quantized_weights",
            "zero_optimization.zero_quantized_nontrainable_weights",
            "zero_optimization.zero_quantized_gradients",
        ),
        "choose the precision with --recipe",
    ),
    "the optimizer and the schedule come from the run's config": (
        ("optimizer", "scheduler"),
        "set train.optimizer, train.lr and train.warmup_steps",
    ),
    "bad updates could not be gated, or checkpoints would not be exact": (
        (
            "zero_optimization.offload_optimizer",
            "zero_optimization.offload_param",
            "zero_optimization.zenflow",
            "zero_optimization.compute_grad_norm",
            "managed_gradient_accumulation",
            "zero_allow_untested_optimizer",
        ),
        "remove the key",
    ),
}
QUIET = 30.0
"""Seconds without a change in the build's folder, after which its maker counts as gone.

The maker may be on another machine that shares the folder. It would have written something by then.
"""
BUILD_SECONDS = 900.0
"""How long a process waits for another one that compiles the kernel."""
# Seconds between two looks at a lock.
_LOOK = 0.2
# Seconds of waiting before it is reported: a kernel that is compiled already loads sooner.
_SILENT = 3.0
# Characters of another process's command line in a message.
_SHOWN = 200
# The argument of the process that compiles for a rank.
_APART = "--for-a-rank"


def check(zero_stage: int, precision: PrecisionName, device: str) -> list[Problem]:
    """Why DeepSpeed cannot train this combination correctly, and what works instead; empty if it can.

    zero_stage: 0 to 3.
    precision: of the rung that was taken.
    device: "cpu" or "cuda".
    """
    problems: list[Problem] = []
    where = f"engine.zero_stage={zero_stage}, {precision} on {device}, under deepspeed"
    if zero_stage == 3:
        what = "ZeRO-3 is not supported yet"
        why = "its partitioned weights are not restored bit for bit"
        stages = "=1" if precision == "fp16" else " to 0, 1 or 2"
        problems.append(Problem(what, where, why, f"set engine.zero_stage{stages}"))
    if precision != "fp16":
        return problems

    # fp16 is the one precision in which DeepSpeed itself holds the weights and the loss scale.
    fix = "set engine.zero_stage=1, or start with torchrun"
    if device == "cpu":
        what = "DeepSpeed has no fp16 on the CPU"
        why = "its accelerator refuses fp16"
        problems.append(Problem(what, where, why, _OTHERS))
    elif zero_stage == 0:
        what = "fp16 does not train at ZeRO-0"
        why = (
            "DeepSpeed divides the gradients by a loss scale that it never multiplied the loss with"
        )
        problems.append(Problem(what, where, why, fix))
    elif zero_stage == 2:
        what = "fp16 is supported at ZeRO-1 only"
        why = "other stages clip scaled gradients or hide skipped steps"
        problems.append(Problem(what, where, why, fix))
    return problems


def preflight(device: str = "cpu") -> list[Problem]:
    """What DeepSpeed needs and this machine lacks. device: "cpu" or "cuda"."""
    if find_spec("deepspeed") is None:
        fix = f"pip install deepspeed, or {_OTHERS}"
        return [Problem("deepspeed is not installed", "machine", fix=fix)]
    if device != "cpu":
        return []
    why = "on a CPU DeepSpeed compiles its communication kernel when it starts"
    problems: list[Problem] = []
    if find_compiler() is None:
        fix = f"install one (apt-get install g++), or {_OTHERS}"
        problems.append(Problem("no C++ compiler on PATH", "machine", why, fix))
    if shutil.which("ninja", path=_search_path()) is None:
        fix = f"pip install ninja, or {_OTHERS}"
        problems.append(Problem("no ninja on PATH", "machine", why, fix))
    return problems


def _search_path() -> str:
    """PATH, followed by the folder of this interpreter."""
    folders = [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    return os.pathsep.join(folders)


def find_tools_of_this_python() -> None:
    """Put the folder of this interpreter on PATH, so that a venv's ninja is found without activating it."""
    os.environ["PATH"] = _search_path()


def release_shared_memory(rank: int) -> None:
    """Delete the name of the memory (66 MB) that a rank on a CPU shares with the others of its machine.

    DeepSpeed never deletes it. Memory without a name is freed when the last rank ends, killed or not. Call it once
    every rank has opened the memory. On a GPU there is none.
    """
    address = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "")
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}"
    Path("/dev/shm", name).unlink(missing_ok=True)


def build_config(
    *,
    zero_stage: int,
    micro_batch: int,
    accumulation: int,
    max_grad_norm: float,
    precision: PrecisionName,
    tested_optimizer: bool,
    user: str | None = None,
) -> dict[str, Any]:
    """The DeepSpeed config: our defaults, the user's JSON over them, and the keys of the run over both.

    Raises ConfigError that names every key of the user's JSON which conflicts.

    zero_stage: 0, 1 or 2.
    micro_batch: samples in one forward on one rank.
    accumulation: micro-batches in one step.
    max_grad_norm: clip to this norm.
    precision: of the rung that was taken.
    tested_optimizer: whether DeepSpeed knows the optimizer's class.
    user: path of a JSON file, or the name of a shipped one (`configs/deepspeed`); None: no file.
    """
    # What the run decides. A file of the user's that says something else is refused.
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": max_grad_norm,
        "zero_optimization": {"stage": zero_stage},
    }
    if precision in ("fp8", "bf16"):
        # DeepSpeed would reduce the gradients of "lower precision safe" modules in bf16: there are none.
        ours["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        }
    elif precision == "fp16":
        ours["fp16"] = {
            "enabled": True,
            "initial_scale_power": 16,
            "loss_scale_window": 2000,
            "hysteresis": 1,
            "min_loss_scale": 1,
        }
    if not tested_optimizer:
        ours["zero_allow_untested_optimizer"] = True

    # What the user's file may change.
    defaults = {
        "zero_optimization": {"reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000}
    }
    theirs = {} if user is None else _read_json(user)
    if problems := _conflicts(theirs, ours, user or ""):
        raise ConfigError(problems)
    return merge(merge(defaults, theirs), ours)


def _read_json(name_or_path: str) -> dict[str, Any]:
    """The user's DeepSpeed JSON. Raises ConfigError if there is no such file, or no object in it."""
    bare = "/" not in name_or_path and not name_or_path.endswith(".json")
    shipped = resource_dir("configs") / "deepspeed"
    path = shipped / f"{name_or_path}.json"
    try:
        if not bare:
            path = Path(name_or_path).expanduser()
        data = read_json(path, _MAX_BYTES)
        if not isinstance(data, dict):
            raise TypeError(f"holds a {type(data).__name__}, not an object")
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        names = ", ".join(sorted(file.stem for file in shipped.glob("*.json")))
        what = f"not a readable DeepSpeed JSON: {error}"
        fix = f"give the path of a JSON object, or a shipped name: {names}"
        raise ConfigError(Problem(what, f"engine.deepspeed={name_or_path}", fix=fix)) from error
    return data


def _conflicts(
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    source: str,
) -> list[Problem]:
    """Keys of the user's JSON that are refused, or differ from the run's.

    theirs: the user's JSON.
    ours: keys that the run sets.
    source: name of the user's JSON, for messages.
    """
    problems: list[Problem] = []
    for key in _paths(theirs):
        for why, (refused, fix) in _REFUSED.items():
            if key in refused:
                problems.append(Problem(f'key "{key}" is refused', source, why, fix))

    # A key that both set may stay if the values agree.
    given = flat(theirs)
    for key, value in flat(ours).items():
        other = given.get(key, value)
        if other != value:
            what = f'key "{key}" is {other!r}, but the run sets it to {value!r}'
            problems.append(Problem(what, source, fix="remove it; use the run's config"))

    # DeepSpeed would check it against micro-batches and ranks, and name neither of the run's own keys.
    if "train_batch_size" in given:
        fix = "remove it; set train.global_batch in the run's config"
        problems.append(Problem('key "train_batch_size" conflicts', source, fix=fix))
    zero = theirs.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        what = 'key "zero_optimization" must be an object'
        problems.append(Problem(what, source, fix="write { ... }"))
    return problems


def _paths(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every key of `data` and of the mappings in it, with dots between them."""
    for key, value in data.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


def build_kernel(say: Callable[[str], None]) -> bool:
    """Compile the kernel if it does not exist, while no other process does. False if DeepSpeed uses none here.

    Raises MachineError that names the process which is still compiling after `BUILD_SECONDS`.

    say: called with lines for people.
    """
    find_tools_of_this_python()
    # DeepSpeed prints banners and logs to stdout, where our lines are.
    with redirect_stdout(sys.stderr):
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from torch.utils.cpp_extension import _get_build_directory

        accelerator: Any = get_accelerator()
        builder = accelerator.create_op_builder("ShareMemCommBuilder")
        if builder is None or not deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
            return False
        folder = Path(_get_build_directory(builder.NAME, False))  # torch has no public name for it
        with _alone(folder, BUILD_SECONDS, say):
            if not (folder / f"{builder.NAME}.so").exists():
                _compile_apart(folder)
            builder.load()
    return True


def _compile_apart(folder: Path) -> None:
    """Compile the kernel in another process, which holds none of our locks. Raises MachineError if that fails.

    Any other exception here, such as a request to stop, ends the compilers.
    """
    command = [sys.executable, "-m", "harness.engines.deepspeed_setup", _APART]

    # Nothing is ever written into the pipe. Its reader sees the end of it when this process is gone.
    build = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=sys.stderr,
        process_group=0,
    )
    try:
        code = build.wait()
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(build.pid, signal.SIGKILL)
        build.wait()
        # torch's lock file: its maker was just killed.
        (folder / "lock").unlink(missing_ok=True)
        raise
    finally:
        if build.stdin is not None:
            build.stdin.close()
    if code:
        what = "DeepSpeed's kernel cannot be compiled"
        why = f"the process that compiles it ended with {code}; its output is above this"
        raise MachineError(Problem(what, str(folder), why, _OTHERS))


def _compile() -> None:
    """In the other process: compile, and kill the whole process group when the rank is gone."""

    def end_with_the_rank() -> None:
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_the_rank, daemon=True).start()
    with redirect_stdout(sys.stderr):
        from deepspeed.accelerator import get_accelerator

        accelerator: Any = get_accelerator()
        accelerator.create_op_builder("ShareMemCommBuilder").load()


@contextmanager
def _alone(folder: Path, seconds: float, say: Callable[[str], None]) -> Iterator[None]:
    """Context in which no other process builds in `folder`, and no lock file of a dead one is there.

    Raises MachineError that names the process which is still building after `seconds`.
    """
    began = time.monotonic()
    with (folder / ".building").open("a+") as ours:
        # The operating system releases this lock when its owner ends, killed or not. The file names the owner.
        reported = ""
        while True:
            try:
                fcntl.flock(ours, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                ours.seek(0)
                who = f"process {ours.read(20) or '(not known)'}"
                reported = _wait_for(who, folder, began, seconds, reported, say)
        ours.truncate(0)
        ours.write(str(os.getpid()))
        ours.flush()
        free_build_lock(folder / "lock", seconds, say)
        yield


def free_build_lock(lock: Path, seconds: float, say: Callable[[str], None]) -> None:
    """Wait until torch's `lock` file of a build is gone, and delete it if its maker is.

    Raises MachineError that names the maker if it still exists after `seconds`.
    """
    began = time.monotonic()
    reported = ""
    while (found := _identity(lock)) is not None:
        # Nobody works at it, and nothing changes any more. It must still be the same file.
        owner = _owner_of(lock)
        if not owner and _unchanged(lock.parent) >= QUIET:
            if found == _identity(lock):
                say(f"{lock} was left behind by a process that is gone, and is deleted")
                lock.unlink(missing_ok=True)
            continue

        elsewhere = f"no process of this machine, perhaps one of another: {QUIET:.0f} s without a change will tell"
        reported = _wait_for(owner or elsewhere, lock.parent, began, seconds, reported, say)


def _wait_for(
    who: str, folder: Path, began: float, seconds: float, reported: str, say: Callable[[str], None]
) -> str:
    """Wait a moment for a build in `folder`, and report it once. Raises MachineError `seconds` after `began`.

    who: is building, for messages.
    reported: what this function returned last; empty at first. Returns the message that has been reported.
    """
    waited = time.monotonic() - began
    what = f"DeepSpeed's kernel is being compiled by {who}"
    if waited > seconds:
        fix = f"end that process, or if there is none, delete {folder / 'lock'}; or start with torchrun"
        raise MachineError(Problem(what, str(folder), f"it took longer than {seconds:.0f} s", fix))
    if what != reported and waited > _SILENT:
        say(f"waiting for at most {seconds - waited:.0f} s: {what} (in {folder})")
        reported = what
    time.sleep(_LOOK)
    return reported


def _identity(path: Path) -> tuple[int, int] | None:
    """Inode and modification time of a file, by which it is told from a later one; None if there is none."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _unchanged(folder: Path) -> float:
    """Seconds since anything changed in `folder`."""
    times = [folder.stat().st_mtime]
    for each in os.scandir(folder):
        with suppress(FileNotFoundError):
            if each.name != ".building":
                times.append(each.stat(follow_symlinks=False).st_mtime)
    return time.time() - max(times)


def _owner_of(lock: Path) -> str:
    """The process of this machine that has the lock open, or else works in its folder, as compilers do; empty: none."""
    # The lower number is the better answer.
    places = {str(lock.resolve()): 0, str(lock.parent.resolve()): 1}
    found: list[tuple[int, str]] = []
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        links = [process / "cwd"]
        with suppress(OSError):
            links += (process / "fd").iterdir()
        for link in links:
            with suppress(OSError):  # gone meanwhile, or another user's
                rank = places.get(os.readlink(link))
                if rank is not None:
                    command = command_of(int(process.name))[:_SHOWN].strip()
                    found.append((rank, f"process {process.name} ({command})"))
    if not found:
        return ""
    _, owner = min(found)
    return owner


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Build the kernel beforehand. Returns 1 if that is not possible; `make setup` goes on without it."""
    if sys.argv[1:] == [_APART]:
        _compile()
        return 0
    if problems := preflight():
        _say("\n".join(map(str, problems)))
        return 1
    try:
        built = build_kernel(_say)
    except (HarnessError, RuntimeError, ImportError, OSError) as error:
        _say(str(error))
        return 1
    _say("DeepSpeed's kernel is there" if built else "DeepSpeed needs no kernel here")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
