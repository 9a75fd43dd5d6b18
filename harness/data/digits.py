"""scikit-learn's handwritten digits as a data set: `data.target: harness.data.digits:load`. Nothing is downloaded.

1,797 grey images of 8 x 8 pixels, ten classes: the test part of the "Optical Recognition of Handwritten Digits" of the
UCI machine learning repository (Alpaydin and Kaynak, 1998), which scikit-learn ships.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.errors import ConfigError, Problem
from harness.data.arrays import Ints


class Digits:
    """Pairs of an image, float32 [1, 8, 8] in [0, 1], and its digit, int64 0-d."""

    def __init__(self, images: npt.NDArray[np.float32], digits: Ints) -> None:
        self.images, self.digits = images, digits

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.float32], np.int64]:
        return self.images[index], self.digits[index]


def load() -> Digits:
    """All 1,797 digits; the harness holds a part of them out. Raises ConfigError where scikit-learn is missing."""
    try:
        found: Any = importlib.import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        what = f"scikit-learn, which has the digits, cannot be imported: {error}"
        where = "data.target harness.data.digits:load"
        raise ConfigError(Problem(what, where, fix="pip install scikit-learn")) from error

    # Grey levels are 0 to 16. The added dimension is the channel that convolutions expect.
    images = np.asarray(found.images[:, None] / 16, dtype=np.float32)
    digits = np.asarray(found.target, dtype=np.int64)
    return Digits(images, digits)
