"""The study of zero-initialised models: its models keep their layers, and its record has every run."""

from __future__ import annotations

import pytest

from benchmarks.zero_init import MODELS, RATES, RESULTS, WARMUPS, train
from harness.core.files import read_json
from tests.support.matrix import rest_slow


@pytest.mark.parametrize("name", rest_slow(MODELS, "LoRA on a frozen GPT"))
def test_a_model_that_begins_at_zero_keeps_its_layers(name: str) -> None:
    assert train(name, rate=3e-3, warmup=0, steps=12)[1] == {}


def test_the_record_has_every_model_rate_and_warm_up() -> None:
    runs = read_json(RESULTS)["runs"]
    found = {(run["model"], run["rate"], run["warmup"]) for run in runs}
    assert found == {
        (name, rate, warmup) for name in MODELS for rate in RATES for warmup in WARMUPS
    }
