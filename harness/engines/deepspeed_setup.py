"""DeepSpeed before it trains: which combinations are refused, what must be installed, the config we build, all of that
without importing it; and the kernel that it compiles for itself on a CPU, built by one process at a time.

torch's own lock of a build is a file that only its maker takes away: who is killed while it compiles leaves it, and
whoever comes after waits for ever without a word. Ours is the kernel's, which goes with its owner; holding it, we take
away a file whose maker is gone, and wait for one that lives, in plain words and not for ever.

A rank compiles in a process of its own with a process group of its own, which ends with the rank however that ends:
ninja and its compilers would go on without it.

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
from harness.core.processes import command_of

Precision = Literal["fp8", "bf16", "fp16", "fp32"]
_MAX_BYTES = 256 * 1024
_OTHERS = "start it as `torchrun --nproc_per_node N launch/train.py ...` or `python launch/train.py ...` instead"

# Keys of a user's DeepSpeed JSON that would undo what the harness guarantees, and what to use instead.
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
"""Seconds in which nothing changes in a build that no process of this machine is at: one of another machine, with a
folder that both see, would have written something by then."""
_LOOK = 0.2
# Seconds of waiting that are not worth a word: what is compiled already is loaded sooner.
_SILENT = 3.0
_SHOWN = 200
_APART = "--for-a-rank"


def check(zero_stage: int, precision: Precision, device: str) -> list[Problem]:
    """Combinations that DeepSpeed gets wrong, each with what works instead; empty if this one is fine.

    precision: of the rung that was taken. device: "cpu" or "cuda".
    """
    problems: list[Problem] = []
    where = f"engine.zero_stage={zero_stage}, {precision} on {device}, under deepspeed"
    if zero_stage == 3:
        problems.append(
            Problem(
                "ZeRO-3 is not supported yet",
                where,
                why="its partitioned weights are not restored bit for bit",
                fix="set engine.zero_stage to 0, 1 or 2",
            )
        )
    if precision != "fp16":
        return problems
    if device == "cpu":
        problems.append(
            Problem(
                "DeepSpeed has no fp16 on the CPU",
                where,
                why="its accelerator refuses fp16",
                fix=_OTHERS,
            )
        )
    elif zero_stage == 0:
        problems.append(
            Problem(
                "fp16 does not train at ZeRO-0",
                where,
                why="DeepSpeed divides the gradients by a loss scale that it never multiplied the loss with",
                fix="set engine.zero_stage=1, or start with torchrun",
            )
        )
    elif zero_stage == 2:
        problems.append(
            Problem(
                "fp16 is supported at ZeRO-1 only",
                where,
                why="other stages clip scaled gradients or hide skipped steps",
                fix="set engine.zero_stage=1, or start with torchrun",
            )
        )
    return problems


def preflight(device: str = "cpu") -> list[Problem]:
    """What DeepSpeed needs on this machine and does not find, before it dies of it. device: "cpu" or "cuda"."""
    if find_spec("deepspeed") is None:
        return [
            Problem(
                "deepspeed is not installed", "machine", fix=f"pip install deepspeed, or {_OTHERS}"
            )
        ]
    if device != "cpu":
        return []
    why = "on a CPU DeepSpeed compiles its communication kernel when it starts"
    problems: list[Problem] = []
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++")):
        problems.append(
            Problem(
                "no C++ compiler on PATH",
                "machine",
                why,
                f"install one (apt-get install g++), or {_OTHERS}",
            )
        )
    if shutil.which("ninja", path=_search_path()) is None:
        problems.append(
            Problem("no ninja on PATH", "machine", why, f"pip install ninja, or {_OTHERS}")
        )
    return problems


def _search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


def find_tools_of_this_python() -> None:
    """Put the folder of this interpreter on PATH, so that a venv's ninja is found without activating it."""
    os.environ["PATH"] = _search_path()


def release_shared_memory(rank: int) -> None:
    """Take away the name of the memory that a rank on a CPU shares with the others of its machine: 66 MB.

    DeepSpeed never does, and without a name the memory goes with the last rank, killed or not. Nothing to do on a GPU.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}").unlink(
        missing_ok=True
    )


def build_config(
    *,
    zero_stage: int,
    micro_batch: int,
    accumulation: int,
    max_grad_norm: float,
    precision: Precision,
    tested_optimizer: bool,
    user: str | None = None,
) -> dict[str, Any]:
    """The DeepSpeed config: our keys over the user's JSON over our bucket sizes.

    micro_batch: samples per forward on one rank. accumulation: micro-batches per step. user: path of a JSON file, or
    the name of a shipped one (`configs/deepspeed`). Raises ConfigError naming every key of it that conflicts.
    """
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": max_grad_norm,
        "zero_optimization": {"stage": zero_stage},
    }
    if precision in ("fp8", "bf16"):
        # No "lower precision safe" modules: DeepSpeed would reduce the gradients of theirs in bf16.
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
    defaults = {
        "zero_optimization": {"reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000}
    }
    theirs = {} if user is None else _read_json(user)
    if problems := _conflicts(theirs, ours, user or ""):
        raise ConfigError(problems)
    return merge(merge(defaults, theirs), ours)


def _read_json(name_or_path: str) -> dict[str, Any]:
    bare = "/" not in name_or_path and not name_or_path.endswith(".json")
    shipped = resource_dir("configs") / "deepspeed"
    try:
        path = shipped / f"{name_or_path}.json" if bare else Path(name_or_path).expanduser()
        data = read_json(path, _MAX_BYTES)
        if not isinstance(data, dict):
            raise TypeError(f"holds a {type(data).__name__}, not an object")
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        known = ", ".join(sorted(file.stem for file in shipped.glob("*.json")))
        raise ConfigError(
            Problem(
                f"not a readable DeepSpeed JSON: {error}",
                f"engine.deepspeed={name_or_path}",
                fix=f"give the path of a JSON object, or a shipped name: {known}",
            )
        ) from error
    return data


def _conflicts(theirs: Mapping[str, Any], ours: Mapping[str, Any], source: str) -> list[Problem]:
    problems: list[Problem] = []
    for key in _paths(theirs):
        for why, (refused, fix) in _REFUSED.items():
            if key in refused:
                problems.append(Problem(f'key "{key}" is refused', source, why, fix))
    given = flat(theirs)
    for key, value in flat(ours).items():
        other = given.get(key, value)
        if other != value:
            problems.append(
                Problem(
                    f'key "{key}" is {other!r}, but the run sets it to {value!r}',
                    source,
                    fix="remove it; use the run's config",
                )
            )
    if "train_batch_size" in given:
        problems.append(
            Problem(
                'key "train_batch_size" conflicts',
                source,
                fix="remove it; set train.global_batch in the run's config",
            )
        )
    if "zero_optimization" in theirs and not isinstance(theirs["zero_optimization"], Mapping):
        problems.append(
            Problem('key "zero_optimization" must be an object', source, fix="write { ... }")
        )
    return problems


def _paths(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


def build_kernel(say: Callable[[str], None], seconds: float = 900.0) -> bool:
    """Compile the kernel if it is not there, while no other process does; False where DeepSpeed has no use for one.

    say: takes a line of text. Raises MachineError naming who is still waited for after `seconds`.
    """
    find_tools_of_this_python()
    with redirect_stdout(sys.stderr):  # its banners and its log do not belong into our lines
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from torch.utils.cpp_extension import _get_build_directory

        accelerator: Any = get_accelerator()
        builder = accelerator.create_op_builder("ShareMemCommBuilder")
        if builder is None or not deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
            return False
        folder = Path(_get_build_directory(builder.NAME, False))  # torch has no public name for it
        with _alone(folder, seconds, say):
            if not (folder / f"{builder.NAME}.so").exists():
                _compile_apart(folder)
            builder.load()
    return True


def _compile_apart(folder: Path) -> None:
    """Compile the kernel in another process, which holds no lock of ours. Raises MachineError if that fails; whatever
    else is raised here ends its compilers.
    """
    command = [sys.executable, "-m", "harness.engines.deepspeed_setup", _APART]
    # Nothing is written to its input: it ends when the last writer, this process, does.
    build = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, process_group=0)
    try:
        code = build.wait()
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(build.pid, signal.SIGKILL)
        build.wait()
        (folder / "lock").unlink(
            missing_ok=True
        )  # torch's, which its maker did not live to take away
        raise
    finally:
        if build.stdin is not None:
            build.stdin.close()
    if code:
        why = f"the process that compiles it ended with {code}; its words are above this"
        raise MachineError(
            Problem("DeepSpeed's kernel cannot be compiled", str(folder), why, _OTHERS)
        )


def _compile() -> None:
    """In that process: compile, and end the whole process group when the rank is gone."""

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
    """While no other process builds in `folder`, nor will one wait for what a dead one has left there."""
    began = time.monotonic()
    with (folder / ".building").open("a+") as ours:
        told = ""
        while True:
            try:
                fcntl.flock(ours, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                ours.seek(0)
                told = _waits(
                    f"process {ours.read(20) or '(not known)'}", folder, began, seconds, told, say
                )
        ours.truncate(0)
        ours.write(str(os.getpid()))
        ours.flush()
        free_build_lock(folder / "lock", seconds, say)
        yield


def free_build_lock(lock: Path, seconds: float, say: Callable[[str], None]) -> None:
    """Until torch's lock of a build is gone: a dead maker's is taken away, a live one's is waited for. Raises
    MachineError naming who has it after `seconds`.
    """
    told, began = "", time.monotonic()
    while (found := _identity(lock)) is not None:
        owner = _at_work(lock)
        if not owner and _unchanged(lock.parent) >= QUIET:
            if found == _identity(lock):
                say(f"{lock} was left behind by a process that is gone, and is taken away")
                lock.unlink(missing_ok=True)
            continue
        who = (
            owner
            or f"no process of this machine, perhaps one of another: {QUIET:.0f} s without a change will tell"
        )
        told = _waits(who, lock.parent, began, seconds, told, say)


def _waits(
    who: str, folder: Path, began: float, seconds: float, told: str, say: Callable[[str], None]
) -> str:
    """Wait a moment for `who`, saying so once; what was said. Raises MachineError `seconds` after `began`."""
    waited = time.monotonic() - began
    what = f"DeepSpeed's kernel is being compiled by {who}"
    if waited > seconds:
        fix = f"end that process, or if there is none, delete {folder / 'lock'}; or start with torchrun"
        raise MachineError(
            Problem(what, str(folder), why=f"it was waited for for {seconds:.0f} s", fix=fix)
        )
    if what != told and waited > _SILENT:
        say(f"waiting for at most {seconds - waited:.0f} s: {what} (in {folder})")
        told = what
    time.sleep(_LOOK)
    return told


def _identity(path: Path) -> tuple[int, int] | None:
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


def _at_work(lock: Path) -> str:
    """A process of this machine that has the lock open, else one that works in its folder, as compilers do; or none."""
    places = {str(lock.resolve()): 0, str(lock.parent.resolve()): 1}
    found: list[tuple[int, str]] = []
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        links = [process / "cwd"]
        with suppress(OSError):
            links += (process / "fd").iterdir()
        for link in links:
            with suppress(OSError):  # gone, or another user's
                if (rank := places.get(os.readlink(link))) is not None:
                    words = command_of(int(process.name))
                    found.append((rank, f"process {process.name} ({words[:_SHOWN].strip()})"))
    return min(found, default=(0, ""))[1]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Build the kernel where DeepSpeed would when it first trains; what hinders it then is no error here."""
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
