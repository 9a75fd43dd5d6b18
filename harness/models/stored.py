"""Tensors of safetensors files, which are read when their values are needed: whole, or some of their rows."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from harness.core.deferred import Source, later
from harness.core.errors import ConfigError, Problem

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class StoredTensor(Source):
    """A tensor of a safetensors file.

    Reading raises ConfigError if the file is gone, or is another one than when it was found.

    file: where it is.
    name: its name in the file.
    shape: at least one dimension, and none of 0.
    dtype: as it is stored.
    place: names the file's content, see `_place`.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: str

    def __call__(self) -> Tensor:
        """The whole tensor."""
        return self.rows(0, self.shape[0])

    def rows(self, begin: int, end: int) -> Tensor:
        """Its rows [begin, end), with memory for these alone."""
        if begin >= end:
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        try:
            # Not mapped: a mapping counts as memory of the whole file wherever that is limited.
            with safe_open(self.file, framework="pt", backend="pread") as stream:
                self._require_unchanged()
                return stream.get_slice(self.name)[begin:end]
        except (OSError, SafetensorError) as error:
            what = f"cannot be read any more: {error}"
            raise ConfigError(Problem(what, str(self.file), fix="copy it again")) from error

    def _require_unchanged(self) -> None:
        if _place(self.file) != self.place:
            why = "some weights would be the old ones, and some the new"
            fix = "start again when nothing writes into the folder"
            raise ConfigError(Problem("has changed since the start", str(self.file), why, fix))


def read_later(files: Iterable[Path]) -> dict[str, Tensor]:
    """The tensors of safetensors files by name, as `core.deferred.later` gives them. Raises OSError, SafetensorError.

    Of several tensors of one name the last one counts.
    """
    found: dict[str, Tensor] = {}
    for file in files:
        place = _place(file)
        with safe_open(file, framework="pt", backend="pread") as stream:
            for name in stream.keys():  # noqa: SIM118
                piece = stream.get_slice(name)
                shape = tuple(piece.get_shape())
                if not shape or 0 in shape:
                    found[name] = stream.get_tensor(name)
                    continue
                # An empty slice tells the dtype, which safetensors names otherwise than torch.
                dtype = piece[:0].dtype
                found[name] = later(StoredTensor(file, name, shape, dtype, place), shape, dtype)
    return found


def _place(file: Path) -> str:
    """Names a file's content: the same for all processes of a machine, and another one after each change."""
    try:
        machine = _BOOT_ID.read_text().strip()
    except OSError:
        machine = platform.node()
    status = file.stat()
    return f"{machine} {status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}"
