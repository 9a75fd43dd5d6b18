"""Files of token ids as other programs write them, made here byte by byte from what their formats say."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.config import DataConfig

Ids = npt.NDArray[np.int64]


def some_ids(count: int, ids: int = 57, seed: int = 0) -> Ids:
    """Random token ids in [0, ids), the largest among them."""
    made = np.random.default_rng(seed).integers(0, ids, count)
    made[count // 2] = ids - 1
    return made


def headerless(path: Path, ids: Ids, dtype: str = "uint16") -> Path:
    path.write_bytes(
        b"".join(int(each).to_bytes(np.dtype(dtype).itemsize, "little") for each in ids)
    )
    return path


def headed(path: Path, ids: Ids, magic: int = 20240520, count: int | None = None) -> Path:
    version, width = {20240520: (1, 2), 20240801: (7, 4)}[magic]
    head = struct.pack("<256i", magic, version, len(ids) if count is None else count, *[0] * 253)
    path.write_bytes(head + b"".join(int(each).to_bytes(width, "little") for each in ids))
    return path


def megatron(
    prefix: Path, documents: Sequence[Ids], code: int = 8, width: int = 2, shift: int = 0
) -> Path:
    """`prefix`.bin and .idx with a sequence for each document. shift: bytes by which the index is wrong."""
    data = b"".join(int(each).to_bytes(width, "little") for ids in documents for each in ids)
    places = np.cumsum([0, *[len(ids) for ids in documents]])[:-1] * width + shift
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
    index += struct.pack(f"<{len(documents)}i", *[len(ids) for ids in documents])
    index += struct.pack(f"<{len(documents)}q", *places) + struct.pack(
        f"<{len(documents) + 1}q", *range(len(documents) + 1)
    )
    prefix.with_suffix(".bin").write_bytes(data)
    prefix.with_suffix(".idx").write_bytes(index)
    return prefix.with_suffix(".bin")


def config(path: Path | str, **more: Any) -> DataConfig:
    return DataConfig.model_validate({"path": str(path), "context": 16, "val_samples": 8, **more})
