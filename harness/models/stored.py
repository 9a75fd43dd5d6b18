"""Tensors of safetensors files, which are read when their values are needed: whole, or some of their rows.

The files are read with plain reads. A slice by safetensors would read the whole tensor, or map the whole file, which
counts as memory wherever that is limited.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from harness.core.deferred import Source, later
from harness.core.errors import ConfigError, Problem
from harness.core.files import MAX_LARGE, read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Names of dtypes in a file's header.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def weight_files(folder: Path) -> list[str]:
    """Names of the files with a model's weights, as transformers finds them.

    The single file counts if it is there, else those that the index names. Empty if there is neither. Raises OSError,
    and ValueError for an index that has no such names.
    """
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    index = folder / INDEX
    if not index.is_file():
        return []
    content = read_json(index, MAX_LARGE)
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict):
        raise ValueError("it has no weight_map")
    return sorted({str(name) for name in listed.values()})


@dataclass(frozen=True, slots=True)
class StoredTensor(Source):
    """A tensor of a safetensors file.

    Reading raises ConfigError if the file is gone, or has changed since it was found.

    file: where it is.
    begin: the byte of the file at which the tensor begins.
    shape: at least one dimension.
    dtype: as it is stored.
    place: names the file's content, see `_place`.
    """

    file: Path
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: str

    def __call__(self) -> Tensor:
        """The whole tensor."""
        return self.rows(0, self.shape[0])

    def rows(self, begin: int, end: int) -> Tensor:
        """Its rows [begin, end). Nothing else is read."""
        width = math.prod(self.shape[1:])
        data = torch.empty(
            (end - begin) * width * self.dtype.itemsize, dtype=torch.uint8, device="cpu"
        )
        first = self.begin + begin * width * self.dtype.itemsize
        try:
            with self.file.open("rb", buffering=0) as stream:
                self._require_same(stream)
                stream.seek(first)
                _fill(data, stream)
                # A writer may have come in meanwhile.
                self._require_same(stream)
        except OSError as error:
            what = f"cannot be read any more: {error}"
            raise ConfigError(Problem(what, str(self.file), fix="copy it again")) from error
        return data.view(self.dtype).reshape(end - begin, *self.shape[1:])

    def _require_same(self, stream: FileIO) -> None:
        """Raise ConfigError if the file has changed since the tensor was found."""
        if _place(os.fstat(stream.fileno())) != self.place:
            what = "has changed since the start"
            why = "some weights would be the old ones, and some the new"
            fix = "start again when nothing writes into the folder"
            raise ConfigError(Problem(what, str(self.file), why, fix))


def read_later(files: Iterable[Path]) -> dict[str, Tensor]:
    """The tensors of safetensors files by name, as `core.deferred.later` gives them. Of one name the last one counts.

    Raises OSError and SafetensorError for a file that is missing or damaged, ValueError for a dtype of no such tensor.
    """
    found: dict[str, Tensor] = {}
    for file in files:
        # safetensors compares the header with the file's size. It gives no tensor's place.
        with safe_open(file, framework="np"):
            pass
        with file.open("rb") as stream:
            place = _place(os.fstat(stream.fileno()))
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _DTYPES:
                raise ValueError(f"{name} has the dtype {entry['dtype']}")
            begin = 8 + length + int(entry["data_offsets"][0])
            # A 0-d tensor has no rows: it is read as one row.
            shape, dtype = tuple(entry["shape"]), _DTYPES[entry["dtype"]]
            stored = StoredTensor(file, begin, shape or (1,), dtype, place)
            found[name] = later(stored, shape, dtype) if shape else stored()[0]
    return found


def _fill(data: Tensor, stream: FileIO) -> None:
    """Read the bytes of `data`, uint8, from `stream`. Raises OSError if the file ends before."""
    view: Any = data.numpy()
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])
        if not count:
            raise OSError("it ends before the tensor does")
        done += count


def _place(status: os.stat_result) -> str:
    """Names a file's content: the same for all processes of a machine, and another one after each change."""
    try:
        machine = _BOOT_ID.read_text().strip()
    except OSError:
        machine = platform.node()
    return f"{machine} {status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}"
