"""A step never waits for the card, on any rung, and the recorder would see it if it did."""

from __future__ import annotations

import pytest
from conftest import Scene

RUNGS = {
    "native, adamw": "native:fp8",
    "native, sgd": "native:fp8",
    "native, rolled in micro-batches, adamw": "native:fp8",
    "native, e4m3, adamw": "native:fp8",
    "torchao, tensorwise, adamw": "torchao:fp8",
    "torchao, rowwise, adamw": "torchao:fp8",
    "bf16, adamw": "autocast:bf16",
    "fp16, adamw": "autocast:fp16",
    "fp16, sgd": "autocast:fp16",
    "fp32, adamw": "autocast:fp32",
}
STEPS = {"first", "usual", "sampled", "measured"}
SWITCHED = {"demoted", "demoted and sampled", "promoted"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNGS)
def test_no_step_waits_for_the_card(scene: Scene, name: str) -> None:
    found = scene("waits", name)
    assert found["rung"] == RUNGS[name]
    in_fp8 = found["rung"].endswith("fp8")
    steps = STEPS | SWITCHED if in_fp8 else STEPS
    assert steps == found["kernels"].keys(), "every step ran on the card"
    assert found["waits"] == []

    # All that goes to the card comes from pinned memory: inputs and targets of two micro-batches, and what a rank
    # sends to the others.
    assert found["pageable"] == []
    assert found["pinned"] == 5 * len(steps)

    # Eight layers, two micro-batches, three GEMMs each, in seven steps; one layer is demoted in two of them.
    assert found["fp8_layers"] == (8 if in_fp8 else 0)
    assert found["fp8_gemms"] == (7 * 8 * 2 * 3 - 2 * 2 * 3 if in_fp8 else 0)


def test_no_step_waits_on_data_with_masked_labels(scene: Scene) -> None:
    found = scene("masked")
    assert (found["waits"], found["pageable"]) == ([], [])
    assert found["pinned"] == 6, (
        "inputs and targets of two micro-batches, their weights, and what a rank sends"
    )


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("item", "_local_scalar_dense"),
        ("to_host", "blocking copy cuda->cpu"),
        ("not_zero", "_local_scalar_dense"),
        ("mask", "aten.index"),
    ],
)
def test_a_planted_wait_is_seen_where_it_is(scene: Scene, fault: str, what: str) -> None:
    waits = scene("planted")[fault]["waits"]
    assert waits, "the planted fault was not seen"
    assert what in waits[0][0]
    assert "planted_models.py" in waits[0][1]


def test_a_planted_pageable_copy_is_seen_where_it_is(scene: Scene) -> None:
    places = scene("planted")["pageable"]["pageable"]
    assert len(places) == 1
    assert "planted_models.py" in places[0]


def test_the_model_without_a_fault_is_clean(scene: Scene) -> None:
    clean = scene("planted")["clean"]
    assert (clean["waits"], clean["pageable"], clean["error"]) == ([], [], "")


def test_a_size_that_only_the_card_knows_ends_the_trace(scene: Scene) -> None:
    assert scene("planted")["mask"]["error"] == "DynamicOutputShapeException"


@pytest.mark.parametrize("name", ["room", "no room"])
def test_an_overlapped_snapshot_lets_nobody_wait_and_takes_its_buffer_alone(
    scene: Scene, name: str
) -> None:
    found, slice_bytes = scene("snapshots")[name], 1 << 20
    assert (found["waits"], found["pageable"], found["synchronised"]) == ([], [], 0)
    # The allocator hands out multiples of 512 bytes.
    buffer = found["state"] if name == "room" else 2 * slice_bytes
    assert buffer <= found["kept"] < buffer + 512
    assert found["at_peak"] == found["kept"]

    copies = found["transfers"]
    assert {each["direction"] for each in copies} == {"cuda->cpu"}
    assert all(each["pinned"] and each["non_blocking"] for each in copies)
    assert all(each["bytes"] <= slice_bytes for each in copies)
    assert sum(each["bytes"] for each in copies) == pytest.approx(found["state"], rel=0.01)


def test_a_sample_at_a_cards_peak_is_palms_flops_over_its_datasheet(scene: Scene) -> None:
    """The driver's model: 256 tokens, 2 layers of width 256, 4 heads and 2 of keys, ffn 704, a vocabulary of 256."""
    layer = 256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 704
    flops = 256 * (6 * (2 * layer + 256 * 256) + 12 * 2 * 256 * 256)
    found = scene("ideal")
    for recipe, kind, peak in (
        ("fp8", "rung", 1979e12),
        ("fp8", "fp8", 1979e12),
        ("fp8", "bf16", 989e12),
        ("fp16", "rung", 65e12),
        ("fp32", "rung", 19.5e12),
        ("tf32", "rung", 156e12),
    ):
        assert found[recipe][kind] == pytest.approx(flops / peak), (recipe, kind)
    assert "bf16" not in found["fp16"], "a T4 has no such unit: nothing to hold a run against"
