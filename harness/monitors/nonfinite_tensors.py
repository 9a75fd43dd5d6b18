# pyright: standard
# Strict typing would be wasted here: what a module takes and returns can be anything.
"""Finding tensors in what a module takes and returns, and what is not finite in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

MAX_ROWS = 16
"""Rows of a tensor that a finding lists at most."""


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Floating-point tensors in nested tuples, lists, mappings and dataclasses, each with its path."""
    if isinstance(value, Tensor):
        if (value.is_floating_point() or value.is_complex()) and value.layout == torch.strided:
            yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        alone = len(value) == 1
        for number, item in enumerate(value):
            yield from tensors(item, path if alone else f"{path}.{number}")
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors(getattr(value, each.name), f"{path}.{each.name}")


def count_bad(tensor: Tensor) -> tuple[int, int]:
    """Elements that are NaN, and that are infinite."""
    values = _plain(tensor)
    if bool(torch.isfinite(values).all()):
        return 0, 0
    return int(torch.isnan(values).sum()), int(torch.isinf(values).sum())


def badness(tensor: Tensor) -> int:
    """0: finite. 1: nothing worse than -inf, which may be a mask. 2: NaN or inf."""
    nan, inf = count_bad(tensor)
    return 2 if nan or (inf and bool((_plain(tensor) == math.inf).any())) else min(inf, 1)


def bad_rows(tensor: Tensor) -> tuple[int, ...]:
    """Indices along the first dimension with a non-finite element, at most MAX_ROWS; none for a 0-d tensor."""
    values = _plain(tensor)
    if values.ndim == 0 or values.numel() == 0:
        return ()
    bad = ~torch.isfinite(values).reshape(values.shape[0], -1).all(dim=1)
    return tuple(bad.nonzero()[:MAX_ROWS, 0].tolist())


def _plain(tensor: Tensor) -> Tensor:
    """FP8 types have no isfinite."""
    return tensor.detach().float() if tensor.dtype.itemsize == 1 else tensor.detach()
