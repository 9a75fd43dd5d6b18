"""Classifiers of transformers on a data set of one's own: bound by name, in FP8, their loss that of their logits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import metrics, train


@pytest.mark.parametrize(("model", "data", "slots"), [("vit", "images", 18), ("bert", "texts", 21)])
def test_a_classifier_trains_by_its_own_names(
    model: str, data: str, slots: int, tmp_path: Path
) -> None:
    module = "tests.extras.own_classifiers"
    done = train(
        tmp_path, "--name", "r", "data.path=null", f"data.target={module}:{data}", f"model.target={module}:{model}",
        "model.args={}", "train.steps=3",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert f"{slots} of {slots} FP8 slots saw a nonzero amax" in done.stdout
    assert "nats per label, accuracy" in done.stdout
    assert len(metrics(tmp_path / "runs" / "r", "val/accuracy")) == 1
