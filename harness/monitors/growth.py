"""How fast tensors grow, and how far over its scale a growing one may be. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

_MOST = 2.0
"""How far over its limit a saturation may be while its tensor grows: what grows faster is no fast start."""


class Growth:
    """Scales of the last `window` + 1 steps in which a tensor was used, and since when it is not zero.

    Arrays are [..., layers, roles]. A step in which a tensor is all zero, or its layer gets no samples, moves no scale
    and counts for nothing here.

    A weight that is initialised with zeros (an output projection, LoRA's B) has no level from which a factor could be
    counted: under a constant learning rate its amaxes are 1, 2, 3, 4 of a unit, in a warm-up 1, 3, 6, 10, and each is
    over the scale of the one before by 2, 1.5, 1.33, or 3, 2, 1.67. So a tensor that was zero when it was first seen is
    *young* for its first `warmup` + 2 `window` uses, after which even the third power of the step grows by less than
    20% a step. In the first `warmup` uses it has no scale of its own, as every tensor in the first steps of a run, and
    says nothing. After these its headroom follows from its growth alone, without a limit. Every figure is a ratio of
    scales: the unit does not matter.
    """

    def __init__(self, window: int, warmup: int, layers: int) -> None:
        self._warmup, self._grown_up = warmup, float(warmup + 2 * window)
        self._scale: Floats = np.full((window + 1, layers, 3), np.nan, dtype=np.float32)
        # Steps in which the tensor was not zero. NaN: not seen yet. One that was not zero at first sight is grown up.
        self._uses: Floats = np.full((layers, 3), np.nan, dtype=np.float32)

    def meet(self, amax: Floats) -> None:
        """The first step of a run: its scales are of no tensor, but which tensors are zero shows. amax: NaN unknown."""
        first = np.isnan(self._uses) & ~np.isnan(amax)
        self._uses = np.where(first, np.where(amax > 0, self._grown_up, 0), self._uses).astype(
            np.float32
        )

    def note(self, scale: Floats, amax: Floats) -> None:
        """Append one step. A scale in use before the first value that is not zero is of no tensor, and left out."""
        self.meet(amax)
        used = amax > 0
        appended = np.concatenate([self._scale[1:], scale[None]])
        self._scale = np.where(used & (self._uses > 0), appended, self._scale)
        self._uses = np.where(used, np.minimum(self._uses + 1, self._grown_up), self._uses)

    def young(self) -> Bools:
        """Which tensors were zero at first and have not been used often since."""
        return self._uses < self._grown_up

    def unset(self) -> Bools:
        """Which tensors have no scale of their own yet: nothing they show is evidence."""
        return (self._uses > 0) & (self._uses <= self._warmup)

    def headroom(self) -> Floats:
        """What a saturation may be over its limit while its tensor grows: 1 to _MOST, of a young one without limit.

        A scale is of the steps before, so a tensor that grows by g a step is at a ratio of g although nothing is wrong
        with it, and in a fast start g itself swings: g^2, g being by how much a step the scale fell within the window.
        The scale goes by the largest amax of its history: noise about a level does not look like growth.
        """
        valid = np.isfinite(self._scale) & (self._scale > 0)
        first = valid.argmax(axis=0)
        last = len(valid) - 1 - valid[::-1].argmax(axis=0)
        oldest, newest = (
            np.take_along_axis(self._scale, place[None], axis=0)[0] for place in (first, last)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            octaves = np.log2(oldest / newest) / (last - first)
        grows = valid.any(axis=0) & (last > first)
        most = np.where(self.young(), np.inf, np.log2(_MOST))
        return np.exp2(np.clip(2 * np.where(grows, octaves, 0.0), 0.0, most)).astype(np.float32)

    def arrays(self) -> dict[str, Floats]:
        """The state, by name."""
        return {"scale": self._scale, "uses": self._uses}

    def restore(self, arrays: Mapping[str, Floats]) -> None:
        """Be what `arrays` gave."""
        self._scale = arrays["scale"].reshape(self._scale.shape)
        self._uses = arrays["uses"].reshape(self._uses.shape)
