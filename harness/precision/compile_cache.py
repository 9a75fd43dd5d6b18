"""Libraries in torch.compile's cache that were not finished, because the process that compiled them was killed.

The compiler writes a library straight to its place in the cache, and torch takes every library that it finds there for
a finished one. A run that loads half of one fails with "file too short", or with an error of the C++ compiler; or the
kernel ends it with SIGBUS, which nobody can catch. So such files are looked for before anything is compiled, and
removed: torch then compiles them again.

A library is an ELF file. Its header says where the table of its sections is, and the table says where each section is.
The linker writes both last. So a file that holds all that they name was finished. Precompiled headers need no such
look: g++ marks them as unfinished until the end, and reads the plain header instead.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout
from torch._inductor.runtime.cache_dir_utils import cache_dir

from harness.core.errors import MachineError, Problem, some

# A name is a hash, and the folder is named after two characters of it: c4/cc4abc....main.so.
_NAME = re.compile(r"(c[a-z2-7]{51})(\.[a-z_]+)*\.so")
# 64 bits, the lowest byte first: what x86-64 and aarch64 have.
_ELF = b"\x7fELF\x02\x01"
_HEADER_BYTES = 64
# Of the header: where the table of sections is, and the size and number of its entries.
_TABLE_AT, _ENTRY_AT = 40, 58
# Of an entry: a section's kind, place and size. A section without bytes in the file (.bss) is of kind 8.
_SECTION = struct.Struct("<4xI16xQQ")
_WITHOUT_BYTES = 8
_NAMED = 3


def remove_unfinished() -> str:
    """Remove unfinished libraries from torch.compile's cache on this machine; returns what was done, for people.

    Empty if all are whole. A library that another process is compiling now is left alone. Raises MachineError naming
    every file that cannot be removed.
    """
    root = Path(cache_dir())
    removed: list[str] = []
    problems: list[Problem] = []
    for path in _libraries(root):
        try:
            if not is_finished(path) and _remove(root, path):
                removed.append(str(path))
        except FileNotFoundError:  # another rank of this machine has removed it
            continue
        except OSError as error:
            what = "a library in torch.compile's cache was never finished, and cannot be removed"
            why = f"{error.strerror or error}; a run that loads it fails, or is killed"
            fix = f"rm {path}, or a folder of your own: TORCHINDUCTOR_CACHE_DIR=..."
            problems.append(Problem(what, str(path), why, fix))
    if problems:
        raise MachineError(problems)
    if not removed:
        return ""
    return f"removed what a compile that was killed had left half written: {some(removed, _NAMED)}"


def is_finished(path: Path) -> bool:
    """Whether the library at `path` holds everything that its tables name. Raises OSError.

    A file of another kind than 64-bit ELF is not judged: True, unless it is empty or the beginning is missing.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        header = file.read(_HEADER_BYTES)
        if not header.startswith(_ELF[:4]) or len(header) < _HEADER_BYTES:
            return False
        if not header.startswith(_ELF):
            return True
        return all(end <= size for end in _ends(file, header))


def _ends(file: BinaryIO, header: bytes) -> Iterator[int]:
    """Where the table of sections ends in the file, and then each section."""
    (table,) = struct.unpack_from("<Q", header, _TABLE_AT)
    entry_size, count = struct.unpack_from("<HH", header, _ENTRY_AT)
    yield table + entry_size * count

    file.seek(table)
    entries = file.read(entry_size * count)
    for number in range(count):
        kind, begin, size = _SECTION.unpack_from(entries, number * entry_size)
        if kind != _WITHOUT_BYTES:
            yield begin + size


def _libraries(root: Path) -> Iterator[Path]:
    """The libraries that torch has compiled into its cache."""
    for folder in sorted(root.glob("??")):
        with suppress(OSError):  # no folder, or gone meanwhile
            for path in sorted(folder.iterdir()):
                if _NAME.fullmatch(path.name) and path.name[1:3] == folder.name:
                    yield path


def _remove(root: Path, library: Path) -> bool:
    """Remove an unfinished library, unless some process is at work on it. Raises OSError."""
    name = _NAME.fullmatch(library.name)
    assert name is not None
    locks = root / "locks"
    locks.mkdir(exist_ok=True)
    # torch holds this lock while it compiles. That of a process that was killed is free.
    try:
        with FileLock(locks / f"{name[1]}.lock", timeout=0):
            # It may have been finished since the first look.
            if is_finished(library):
                return False
            library.unlink()
            return True
    except Timeout:
        return False
