"""How fast tensors grow, and how far over its scale a growing tensor may be. Torch-free.

A delayed scale is made from the amaxes of earlier steps. A tensor that grows by a factor g a step is therefore at a
saturation of g although nothing is wrong with it. This module measures g from the scales themselves, and gives the
headroom that it explains.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from harness.monitors.base import Bools, Floats

_MOST = 2.0
"""How far over its limit a growing tensor's saturation may be. Faster growth counts as a fault, not as a fast start."""


class Growth:
    """The scales of the last `window` + 1 steps in which each tensor was used, and how often it has been used.

    Arrays are [..., layers, roles]. A step in which a tensor is all zero, or its layer gets no samples, moves no scale
    and counts for nothing here.

    *Young* tensors: a weight that is initialised with zeros (an output projection, LoRA's B) has no level from which a
    factor could be counted. Under a constant learning rate its amaxes are 1, 2, 3, 4 of a unit, in a warm-up 1, 3, 6,
    10. Each is over the scale of the one before by 2, 1.5, 1.33, or by 3, 2, 1.67. So a tensor that was zero when it
    was first seen is young for its first `warmup` + 2 `window` uses. After those even the third power of the step grows
    by less than 20% a step.

    In its first `warmup` uses a young tensor has no scale of its own, like every tensor in a run's first steps, and is
    no evidence. After them its headroom follows from its growth alone, without an upper limit. Every figure is a ratio
    of scales: the unit does not matter.
    """

    def __init__(self, window: int, warmup: int, layers: int) -> None:
        self._warmup = warmup
        self._grown_up = float(warmup + 2 * window)
        self._scale: Floats = np.full((window + 1, layers, 3), np.nan, dtype=np.float32)
        # Steps in which the tensor was not zero. NaN: not seen yet. A tensor that was not zero at first is grown up.
        self._uses: Floats = np.full((layers, 3), np.nan, dtype=np.float32)

    def meet(self, amax: Floats) -> None:
        """Note which tensors are zero when first seen. amax: NaN where unknown.

        For a run's first step: its scales are initial values, made from no tensor.
        """
        first = np.isnan(self._uses) & ~np.isnan(amax)
        uses_then = np.where(amax > 0, self._grown_up, 0)
        self._uses = np.where(first, uses_then, self._uses).astype(np.float32)

    def note(self, scale: Floats, amax: Floats) -> None:
        """Append one step. A scale from before a tensor's first value that is not zero describes nothing: left out."""
        self.meet(amax)
        used = amax > 0
        appended = np.concatenate([self._scale[1:], scale[None]])
        self._scale = np.where(used & (self._uses > 0), appended, self._scale)
        self._uses = np.where(used, np.minimum(self._uses + 1, self._grown_up), self._uses)

    def young(self) -> Bools:
        """Which tensors were zero when first seen and have not been used often since."""
        return self._uses < self._grown_up

    def unset(self) -> Bools:
        """Which tensors have no scale of their own yet: nothing that they show is evidence."""
        return (self._uses > 0) & (self._uses <= self._warmup)

    def headroom(self) -> Floats:
        """How far over its limit a saturation may be while its tensor grows: 1 to _MOST, unlimited for a young one.

        The headroom is g^2, where g is the factor a step by which the scale fell within the window. g itself would be
        the saturation of steady growth, but in a fast start g swings. The scale follows the largest amax of its
        history, so noise about a level does not look like growth.
        """
        # The oldest and the newest valid scale of the window.
        valid = np.isfinite(self._scale) & (self._scale > 0)
        first = valid.argmax(axis=0)
        last = len(valid) - 1 - valid[::-1].argmax(axis=0)
        oldest = np.take_along_axis(self._scale, first[None], axis=0)[0]
        newest = np.take_along_axis(self._scale, last[None], axis=0)[0]

        # log2 of g; a scale that rises means a tensor that shrinks.
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            octaves = np.log2(oldest / newest) / (last - first)
        grows = valid.any(axis=0) & (last > first)
        octaves = np.where(grows, octaves, 0.0)
        most = np.where(self.young(), np.inf, np.log2(_MOST))
        return np.exp2(np.clip(2 * octaves, 0.0, most)).astype(np.float32)

    def arrays(self) -> dict[str, Floats]:
        """The state, by name."""
        return {"scale": self._scale, "uses": self._uses}

    def restore(self, arrays: Mapping[str, Floats]) -> None:
        """Load what `arrays` gave."""
        self._scale = arrays["scale"].reshape(self._scale.shape)
        self._uses = arrays["uses"].reshape(self._uses.shape)
