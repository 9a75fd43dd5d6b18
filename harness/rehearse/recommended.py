"""The recipe that a rehearsal recommends: FP8 without the layers that would be demoted, with margin and history to fit.

Torch-free.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from harness.core.errors import ConfigError, Problem, shown, some
from harness.precision.recipe import Recipe
from harness.rehearse.slots import Floats, SlotRecord

FILE = "rehearsed.yaml"

_CLIPPED = 1e-3
"""A larger share of clipped values, in a layer that stays in FP8, asks for headroom."""
_OFTEN = 3
"""Samples with such a share that are needed."""
_MOST_MARGIN = 3
"""Powers of two that are added at most: each one costs as much at the small end."""
_FORGOTTEN = 2.0
"""Saturation over which a tensor came as a surprise to its history: amaxes that vary by chance stay under it."""
_MOST_HISTORY = 1024
_ROUND = 16
_SHOWN = 3
_TWICE = 2
"""How often a tensor must come back after the history has forgotten it, to ask for a longer history."""


@dataclass(frozen=True)
class Recommended:
    """A recipe, and why.

    exclude: patterns that were added. reasons: one for each change; empty if nothing was changed.
    """

    recipe: Recipe
    exclude: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def changed(self) -> bool:
        """Whether it is another policy than the one that was rehearsed."""
        return bool(self.reasons)

    def as_json(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "exclude": list(self.exclude),
            "margin": self.recipe.fp8.margin,
            "amax_history_len": self.recipe.fp8.amax_history_len,
            "reasons": list(self.reasons),
        }


def recommend(
    base: Recipe, predicted: Sequence[str], names: Mapping[str, str], record: SlotRecord
) -> Recommended:
    """The recipe for `base` after what was seen.

    predicted: FP8 layers that would leave FP8, padded names.
    names: padded name -> name in the model.
    record: figures of all slots.
    """
    reasons: list[str] = []

    # A layer's own name as a pattern: brackets and stars in it stand for themselves.
    exclude = tuple(glob.escape(names.get(layer, layer)) for layer in predicted)
    if exclude:
        reasons.append(f"layers.exclude: the fallback would move {some(exclude, _SHOWN)} to BF16")
    layers = base.layers.model_copy(update={"exclude": [*base.layers.exclude, *exclude]})

    # Margin and history mean something under delayed scaling alone, and only layers that stay in FP8 count.
    fp8: dict[str, int] = {}
    if base.fp8.scaling == "delayed" and record.names:
        staying = [name.rpartition(".")[0] not in predicted for name in record.names]
        margin = _margin(record, staying)
        if margin:
            fp8["margin"] = min(15, base.fp8.margin + margin)
            reasons.append(
                f"fp8.margin {base.fp8.margin} -> {fp8['margin']}: layers that stay in FP8 clip over {_CLIPPED:.1%} "
                "of a tensor"
            )
        history = _history(record, staying, base.fp8.amax_history_len)
        if history:
            fp8["amax_history_len"] = history
            reasons.append(
                f"fp8.amax_history_len {base.fp8.amax_history_len} -> {history}: large tensors come back after the "
                "history has forgotten them"
            )
    changes = {
        "name": f"{base.name}-rehearsed",
        "layers": layers,
        "fp8": base.fp8.model_copy(update=fp8),
    }
    return Recommended(base.model_copy(update=changes), exclude, tuple(reasons))


def _margin(record: SlotRecord, staying: Sequence[bool]) -> int:
    """Powers of two to add so that the slots that stay would not have clipped; 0 if they hardly did.

    Only the second half of the steps counts: tensors that grow at a run's start clip until their scales have followed.
    """
    half = len(record.clipped) // 2
    clipped: Floats = np.stack(record.clipped[half:])
    saturation: Floats = np.stack(record.saturations[half:])
    with np.errstate(invalid="ignore"):
        often = (clipped > _CLIPPED).sum(axis=0) >= _OFTEN
    places = np.flatnonzero(often & np.array(staying))
    if not places.size:
        return 0
    most = float(saturation[:, places].max())
    if not 1 < most < math.inf:
        return 0
    return min(_MOST_MARGIN, math.ceil(math.log2(most)))


def _history(record: SlotRecord, staying: Sequence[bool], length: int) -> int:
    """A length that remembers tensors which come back larger than a history of `length` knows; 0: it is long enough."""
    series: Floats = np.stack(record.saturations)
    longest = 0
    for place, stays in enumerate(staying):
        surprises = np.flatnonzero(series[:, place] > _FORGOTTEN)
        gaps = np.diff(surprises)
        forgotten = gaps[(gaps > length) & (gaps < _MOST_HISTORY)]
        if stays and len(forgotten) >= _TWICE:
            longest = max(longest, int(forgotten.max()))
    if not longest:
        return 0
    return min(_MOST_HISTORY, (longest // _ROUND + 1) * _ROUND)


def require_free(path: Path) -> None:
    """Raises ConfigError if something is at `path`, or its folder cannot take it: nothing is overwritten."""
    if path.exists() or path.is_symlink():
        fix = "name another folder with --out, or move the file away"
        raise ConfigError(Problem("is there already, and is not overwritten", str(path), fix=fix))
    if path.parent.exists() and not path.parent.is_dir():
        fix = "name a folder with --out"
        raise ConfigError(Problem("is no folder", str(path.parent), fix=fix))


def write(path: Path, made: Recommended, about: str) -> None:
    """Write the recipe. about: what was rehearsed, for a comment. Raises ConfigError if it cannot be written."""
    lines = [f"made by harness rehearse: {about}", *made.reasons]
    comments = "".join(f"# {_one_line(line)}\n" for line in lines)
    text = yaml.safe_dump(
        made.recipe.model_dump(mode="json", exclude_defaults=True), sort_keys=False
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # "x": a file that appeared meanwhile is not overwritten either.
        with path.open("x", encoding="utf-8") as stream:
            stream.write(comments + text)
    except OSError as error:
        fix = "name another folder with --out"
        why = error.strerror or str(error)
        raise ConfigError(Problem("cannot be written", str(path), why, fix)) from error


def _one_line(text: str) -> str:
    return " ".join(shown(text).split())
