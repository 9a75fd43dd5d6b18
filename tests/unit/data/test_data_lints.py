"""The lints of the data: one planted defect each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness.core.config import DataConfig
from harness.data.dataset import DatasetBatches
from harness.data.digits import load as digits
from harness.data.lints import lint_data

IMAGES = torch.arange(64 * 16, dtype=torch.float32).reshape(64, 16)
LABELS = torch.arange(64) % 4
Pairs = torch.utils.data.TensorDataset


def changed(
    images: Callable[[torch.Tensor], object] | None = None, label: int | None = None
) -> Pairs:
    """64 pairs of an image and a label of 4 classes, of which some are changed."""
    pixels, labels = IMAGES.clone(), LABELS.clone()
    if images is not None:
        images(pixels)
    if label is not None:
        labels[5] = label
    return Pairs(pixels, labels)


def empty(pixels: torch.Tensor) -> None:
    pixels[5] = 0.0


def repeated(pixels: torch.Tensor) -> None:
    # Samples of one class, so that the pairs are the same.
    pixels[8] = pixels[4]


def not_finite(pixels: torch.Tensor) -> None:
    pixels[5, 3] = float("nan")


given: dict[str, object] = {}


def target() -> object:
    return given["data"]


def lints(data: object, bad: str = "skip") -> dict[str, str]:
    """Code -> severity."""
    given["data"] = data
    config = DataConfig(target=f"{__name__}:target", bad=bad)  # type: ignore[arg-type]
    batches = DatasetBatches(config, seed=0, global_batch=16, micro_batch=8)
    return {each.code: each.severity for each in lint_data(batches, None, 4, bad)}


VALID = Pairs(IMAGES + 0.5, LABELS)
PLANTED = {
    "empty": ((changed(empty), VALID), "data.empty"),
    "repeated": ((changed(repeated), VALID), "data.repeated"),
    "label out of range": ((changed(label=4), VALID), "data.out_of_range"),
    "not finite": ((changed(not_finite), VALID), "data.nonfinite"),
    "leak": ((changed(), changed()), "data.leak"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_found_and_nothing_else(name: str) -> None:
    data, code = PLANTED[name]
    assert lints(data) == {code: "warning"}


def test_what_would_end_the_run_is_an_error() -> None:
    assert lints((changed(label=4), VALID), bad="auto") == {"data.out_of_range": "error"}


def test_clean_data_have_no_finding() -> None:
    assert lints((changed(), VALID)) == {}


def test_two_features_that_are_equal_are_no_empty_sample() -> None:
    features = torch.tensor([[place, 64 - place] for place in range(64)], dtype=torch.float32)
    assert features[32, 0] == features[32, 1]
    assert lints((Pairs(features, LABELS), Pairs(features + 0.5, LABELS))) == {}


def test_the_shipped_digits_have_no_finding() -> None:
    pytest.importorskip("sklearn")
    given["data"] = digits()
    config = DataConfig(target=f"{__name__}:target")
    batches = DatasetBatches(config, seed=0, global_batch=64, micro_batch=32)
    assert lint_data(batches, None, 10) == []
