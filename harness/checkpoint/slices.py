"""Reads a checkpoint's tensors, whole or some of their rows, from whichever files have them.

Any number of ranks reads a checkpoint of any number of ranks: each names the rows that it holds, and gets those. What
is not asked for is not read, so that the memory needed is that of the result. Files are opened one after the other: a
process may have 1,024 open, and a checkpoint of 1,024 ranks has more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from harness.checkpoint.pieces import TENSORS, Shards, is_piece, piece_file
from harness.core.protocols import TensorDict, Tensors
from harness.core.shards import Rows, ShardedRows


def read_tensors(
    folder: Path,
    files: Iterable[str],
    shards: Shards | None,
    parts: Container[str] | None,
    rows: ShardedRows,
) -> Tensors:
    """Tensors by part and name, on the CPU, of the verified checkpoint in `folder`.

    files: of its manifest.
    shards: what its pieces are of; None if it has none.
    parts: the parts that are read; None: all.
    rows: of these tensors only these rows are read; of others all.

    Raises ValueError if a tensor has another shape than `rows` says. Raises OSError and SafetensorError.
    """
    tensors: Tensors = {}
    for name in files:
        part = name.removesuffix(TENSORS)
        if name.endswith(TENSORS) and not is_piece(name) and (parts is None or part in parts):
            tensors[part] = _from_one_file(folder / name, part, rows.get(part, {}))

    for part in shards.tensors if shards is not None else ():
        if shards is not None and (parts is None or part in parts):
            found = _from_pieces(folder, part, shards, rows.get(part, {}))
            tensors.setdefault(part, {}).update(found)
    return tensors


def _from_one_file(path: Path, part: str, wanted: Mapping[str, Rows]) -> TensorDict:
    """The tensors in a file of whole ones, of `wanted` only those rows."""
    if not wanted:
        return load_file(path)
    tensors: TensorDict = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            if name not in wanted:
                tensors[name] = file.get_tensor(name)
                continue
            rows, piece = wanted[name], file.get_slice(name)
            _check_shape(part, name, tuple(piece.get_shape()), rows)
            # A copy: the slice alone would hold on to the whole file.
            tensors[name] = piece[rows.begin : rows.end].clone()
    return tensors


@dataclass(frozen=True, slots=True)
class _Copy:
    """Rows of one tensor that come from one piece.

    name: of the tensor.
    source: the rows within the piece.
    target: the rows within the result.
    """

    name: str
    source: slice
    target: slice


def _from_pieces(folder: Path, part: str, shards: Shards, wanted: Mapping[str, Rows]) -> TensorDict:
    """The sharded tensors of `part`, of `wanted` only those rows."""
    # What comes from which piece. Tensors of which no row is wanted come, empty, from the first.
    plan: dict[int, list[_Copy]] = defaultdict(list)
    results: dict[str, Rows] = {}
    for name, shape in shards.tensors[part].items():
        rows = results[name] = wanted.get(name, Rows(shape, 0, shape[0]))
        _check_shape(part, name, shape, rows)
        for rank in rows.holders(shards.ranks):
            held = Rows.of_rank(shape, rank, shards.ranks)
            begin, end = max(rows.begin, held.begin), min(rows.end, held.end)
            source = slice(begin - held.begin, end - held.begin)
            target = slice(begin - rows.begin, end - rows.begin)
            plan[rank].append(_Copy(name, source, target))
        if rows.begin == rows.end:
            plan[0].append(_Copy(name, slice(0, 0), slice(0, 0)))

    tensors: TensorDict = {}
    for rank in sorted(plan):
        with safe_open(folder / piece_file(part, rank, shards.ranks), framework="pt") as file:
            for copy in plan[rank]:
                rows = _rows_of(file, copy)
                if copy.name not in tensors:
                    tensors[copy.name] = torch.empty(
                        results[copy.name].local_shape, dtype=rows.dtype, device="cpu"
                    )
                tensors[copy.name][copy.target] = rows
    return tensors


def _rows_of(file: Any, copy: _Copy) -> Tensor:
    return file.get_slice(copy.name)[copy.source.start : copy.source.stop]


def _check_shape(part: str, name: str, shape: tuple[int, ...], rows: Rows) -> None:
    if tuple(rows.shape) != shape:
        text = f"{part} {name!r} has the shape {list(shape)} in the checkpoint"
        raise ValueError(f"{text}, and {list(rows.shape)} in this run")
