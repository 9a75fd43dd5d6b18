"""Finding, reading and writing files. Torch-free.

- **Reading.** Small files that somebody else may have written are read only here. They must be regular files, and are
  bounded in size, depth and numbers.
- **Writing.** After any crash a file is either the old one or the new one, whole, on disk. The new content is written
  beside the old one, synced, and renamed over it.
- **Finding.** Recipes and configs are in the source tree during development, and inside the package once installed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

from harness.core.errors import ConfigError, Problem, near_match

RUNS = Path("runs")
"""Where runs are made. It may be a link to another disk."""
MAX_DEPTH = 64
"""How deep lists and mappings may be nested. Much deeper ones hit Python's recursion limit, wherever they are used."""
MAX_JSON = 1 << 20
"""Bytes of a JSON file, where its reader names no other limit."""
MAX_LARGE = 256 << 20
"""Bytes of a JSON file with a line for every layer, every parameter or every file of the text."""

# Most bits of a whole number in JSON. The state of some random generators is one of 128 bits; this leaves room.
_STATE_BITS = 256


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a regular file, links followed. Raises OSError, and ValueError for anything else or a larger file.

    Opening a pipe would wait for a writer for ever, and a device may never end.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is not a regular file")
    data = b""
    if status.st_size <= limit:
        with path.open("rb") as stream:
            # One more than allowed: files that the kernel makes up, as in /proc, report a size of 0.
            data = stream.read(limit + 1)
    if max(len(data), status.st_size) > limit:
        raise ValueError(f"is larger than {limit} bytes")
    return data


def read_json(path: Path, limit: int = MAX_JSON) -> Any:
    """What a JSON file holds. Raises OSError, and ValueError as `read_bounded` and `parse_json` do."""
    return parse_json(read_bounded(path, limit))


def read_mapping(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """The mapping in a JSON file that the run can do without; empty if it is missing or cannot be read."""
    try:
        content = read_json(path, limit)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def parse_json(data: bytes) -> Any:
    """JSON without duplicate keys, NaN and infinities, and within the bounds of `check_plain`. Raises ValueError."""
    try:
        value = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError(f"is nested more than {MAX_DEPTH} deep") from error
    check_plain(value, _STATE_BITS, finite=True)
    return value


def check_plain(value: Any, bits: int = 64, finite: bool = False) -> None:
    """Raises ValueError if lists and mappings are nested too deeply, or a whole number has more than `bits` bits.

    Whole numbers are bounded because converting a very long one to text takes quadratic time, and Python refuses to.

    finite: also refuse NaN and infinite floats.
    """
    # A list of what is left to visit, as a recursive function would hit the limit that this guards.
    pending: list[tuple[Any, int]] = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, dict | list):
            if depth == MAX_DEPTH:
                raise ValueError(f"is nested more than {MAX_DEPTH} deep")
            # Of a mapping the keys too: YAML's may be numbers.
            children: list[Any] = list(item)
            if isinstance(item, dict):
                children += item.values()
            pending += [(child, depth + 1) for child in children]
        elif isinstance(item, int) and item.bit_length() > bits:
            raise ValueError(f"has a whole number of {item.bit_length()} bits, more than {bits}")
        elif finite and isinstance(item, float) and not math.isfinite(item):
            raise ValueError("has a number that is too large")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping of `pairs`. Raises ValueError naming a key that comes twice; json.loads would keep the last."""
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"has the key {key!r} twice"[:200])
        mapping[key] = value
    return mapping


def _no_number(name: str) -> float:
    raise ValueError(f"has {name}, which is no JSON number")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, hex; read in chunks. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A binary stream that becomes `path` when the block ends well, and leaves nothing behind when it does not.

    It is written through to the disk: otherwise a power cut could leave neither the old file nor the new one.

    Raises OSError. Only one writer at a time: the temporary name `.<name>.tmp` is fixed, so that the next writer
    replaces what a killed one left.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with _new(temporary) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The new name is in the folder, which has pages of its own to write.
    sync_folder(path.parent)


def _new(path: Path) -> BinaryIO:
    """Open a new file at `path`. What is there is removed first and never written through.

    If somebody else made the folder, it may be a link or a pipe.
    """
    try:
        return path.open("xb")
    except FileExistsError:
        path.unlink()
        return path.open("xb")


def dump_json(value: Any) -> bytes:
    """Strict JSON, without NaN or Infinity, keys in the order given. Raises ValueError, TypeError."""
    return (json.dumps(value, allow_nan=False, indent=1) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as strict JSON, see `atomic_file`. Raises OSError, and what `dump_json` raises."""
    data = dump_json(value)
    with atomic_file(path) as stream:
        stream.write(data)


# Characters of a path that a message shows.
_SHOWN = 300
_PACKAGE = Path(__file__).resolve().parent.parent


def resource_dir(kind: str) -> Path:
    """Where recipes or configs are: <repo>/<kind> in a checkout, harness/_shipped/<kind> in a wheel."""
    checkout = _PACKAGE.parent / kind
    if (_PACKAGE.parent / "pyproject.toml").is_file() and checkout.is_dir():
        return checkout
    return _PACKAGE / "_shipped" / kind


def with_this_package() -> dict[str, str]:
    """The environment for a child process that must import this very package, wherever it is started."""
    folders = filter(None, [str(_PACKAGE.parent), os.environ.get("PYTHONPATH")])
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)}


def shipped(kind: str) -> list[str]:
    """Names of the shipped recipes or configs."""
    return sorted(path.stem for path in resource_dir(kind).glob("*.yaml"))


def find(kind: str, name_or_path: str) -> Path:
    """The YAML file meant by a name or path.

    A value with a slash, or that ends in .yaml or .yml, is a path; anything else a shipped name.

    Raises ConfigError with the near match if there is no such file.
    """
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        path = home(name_or_path)
        if _is_file(path):
            return path
        fix = f"check the path, or use a shipped name: {', '.join(shipped(kind))}"
        raise ConfigError(Problem("no such file", str(path)[:_SHOWN], fix=fix))
    path = resource_dir(kind) / f"{name_or_path}.yaml"
    if _is_file(path):
        return path
    singular = kind.removesuffix("s")
    names = shipped(kind)
    hint = near_match(name_or_path, names)
    # The hint names one near match, or already lists them all.
    if hint.startswith("did"):
        hint += f" (known: {', '.join(names)})"
    what = f'no {singular} "{name_or_path[:_SHOWN]}"'
    fix = f"{hint}; or give a path to a .yaml file"
    raise ConfigError(Problem(what, f"--{singular}", fix=fix))


def home(path: str) -> Path:
    """`path` with ~ replaced by the home folder; unchanged where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # ~ of a user who does not exist
        return Path(path)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, a loop of links, a folder that may not be entered
        return False


def cache_dir() -> Path:
    """~/.cache/hopper-harness (or under XDG_CACHE_HOME, if that is an absolute path), made if need be.

    It is a new temporary folder instead if the user has no home, or if that folder cannot be written, or belongs to
    somebody else whose files must not be trusted.
    """
    try:
        parent = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not parent.is_absolute():  # not set, or to be ignored by the XDG specification
            parent = Path.home() / ".cache"
        base = parent / "hopper-harness"
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(base, os.W_OK) and base.stat().st_uid == os.getuid():
            return base
    except (OSError, RuntimeError):  # RuntimeError: no home
        pass
    return Path(tempfile.mkdtemp(prefix="hopper-harness-"))


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """The file `name` in `cache_dir()`, built if it is not there.

    build: makes the file at the path that it is given. The folder of that path is deleted afterwards. The file becomes
    `name` in one step, so several processes may build at the same time.
    """
    folder = cache_dir()
    target = folder / name
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made = Path(work) / name
            build(made)
            made.replace(target)
    return target


def step_name(step: int) -> str:
    """`step-00000123`, the folder of a checkpoint or a repro bundle. Such names sort as the steps do."""
    return f"step-{step:08d}"


def harness_version() -> str:
    """The installed package's version; "source tree" where it is not installed."""
    try:
        return version("hopper-harness")
    except PackageNotFoundError:
        return "source tree"
