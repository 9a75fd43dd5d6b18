"""`harness estimate` of several cards, as a user calls it: one answer, with money and with what would make it fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_estimate_command import QUICK, answer, run

# Logits of 32,768 ids for 16 samples of 4,096 tokens are 4 GiB in 16 bits and 8 in fp32, and so are their gradients.
WIDE = "model.args={vocab: 32768, dim: 512, heads: 8, layers: 1, ffn: 1408}"
LARGE = (*QUICK, WIDE, "train.global_batch=16", "train.micro_batch=16", "data.context=4096")


def cards(*arguments: str) -> dict[str, dict[str, Any]]:
    found = answer(*arguments)["cards"]
    return {each["card"]: each for each in found}


THREE = ("--card", "H100", "--card", "A100-80GB", "--card", "T4")
PRICES = ("--price", "H100=2.20", "--price", "T4=0.35")


def test_three_cards_in_one_answer() -> None:
    found = cards(*THREE, *PRICES, *QUICK)
    assert list(found) == ["H100", "A100-80GB", "T4"]
    assert [each["resolved"] for each in found.values()] == [
        "transformer_engine:fp8",
        "autocast:bf16",
        "autocast:fp16",
    ]
    assert [each["layers"] for each in found.values()] == [
        {"fp8": 8, "bf16": 1},
        {"bf16": 9},
        {"fp16": 9},
    ]
    assert all(each["fits"] is True and each["would_fit"] == [] for each in found.values())

    # 20 steps of 4 samples of 64 tokens.
    for each in found.values():
        hours = 20 * each["step_ms"] / 3.6e6
        assert each["hours"] == pytest.approx(hours, rel=0.05)
        assert each["tokens_per_second"] == pytest.approx(256e3 / each["step_ms"], rel=0.01)
    assert found["A100-80GB"]["cost"] is None
    for name, price in (("H100", 2.2), ("T4", 0.35)):
        assert found[name]["cost"] == pytest.approx(price * found[name]["hours"], rel=0.1, abs=1e-6)
    assert {each["bottleneck"] for each in found.values()} == {"host/launches"}


def test_the_table_says_the_same_and_progress_is_not_in_it() -> None:
    done = run(*THREE, *PRICES, *QUICK, "--plan")
    assert done.returncode == 0, done.stderr
    heading = next(line for line in done.stdout.splitlines() if line.startswith("card"))
    for column in ("runs in", "memory, GiB", "speed", "hours", "cost", "limited by"):
        assert column in heading
    for name, rung in (("H100", "transformer_engine:fp8"), ("T4", "autocast:fp16")):
        assert any(
            line.startswith(name) and rung in line and "host/launches" in line
            for line in done.stdout.splitlines()
        )
    assert "Nothing ran on a GPU" in done.stdout
    assert done.stderr.count("a training step on fake tensors") == 3
    assert "estimate:" not in done.stdout

    # The plan of each card, with the backend that the card would use.
    _, _, plans = done.stdout.partition("H100: the plan")
    of_h100, _, of_t4 = plans.partition("T4: the plan")
    assert "resolved transformer_engine:fp8" in of_h100
    assert "blocks.0-1.mlp.down" in of_h100
    assert "resolved autocast:fp16" in of_t4


def test_cards_that_share_a_trace_are_estimated_as_alone() -> None:
    together = cards("--card", "H100", "--card", "H200", *QUICK)
    alone = answer("--card", "H200", *QUICK)
    assert together["H200"] == alone["cards"][0]

    # One card's answer is at the top level, too, under the name that torch has for the card.
    for key, value in alone.items():
        if key not in ("cards", "card"):
            assert alone["cards"][0][key] == value
    assert set(alone) == {*alone["cards"][0], "cards"}
    assert alone["card"] == alone["cards"][0]["device"] == "NVIDIA H200"


def test_what_would_make_it_fit_was_tried_and_fits() -> None:
    found = cards("--card", "T4", *LARGE, "--price", "T4=1")["T4"]
    assert found["fits"] is False
    ways = {" ".join(way["overrides"]): way for way in found["would_fit"]}
    # Neither fewer weights on each of several ranks nor another optimizer saves any of that.
    assert list(ways) == ["train.micro_batch=8", "model.args.loss_chunk=1024"]
    for way in ways.values():
        assert way["needed_gib"] <= found["card_gib"] < found["peak_gib"] + found["context_gib"]
        assert way["cost"] == pytest.approx(way["hours"] * way["ranks"], abs=2e-6)

    # The same again as a user would: the override added to the command.
    name, way = next(iter(ways.items()))
    again = answer("--card", "T4", *LARGE, "--ranks", str(way["ranks"]), *name.split())
    assert again["fits"] is True
    assert again["peak_gib"] == way["peak_gib"]
    assert again["tokens_per_second"] == way["tokens_per_second"]


@pytest.fixture
def only_bf16(tmp_path: Path) -> str:
    """A recipe without a rung for Volta and Turing."""
    path = tmp_path / "only_bf16.yaml"
    ladder = "{backend: autocast, precision: bf16, tiers: [AMPERE]}"
    path.write_text(f"name: only_bf16\ndescription: no rung below\nladder: [{ladder}]\n")
    return str(path)


def test_a_card_that_cannot_run_it_does_not_hide_the_others(only_bf16: str) -> None:
    found = cards("--card", "V100", "--card", "A100", *QUICK, "--recipe", only_bf16)
    assert found["A100"]["resolved"] == "autocast:bf16"
    refused = found["V100"]
    assert (refused["resolved"], refused["fits"], refused["cost"]) == (None, False, None)
    assert (refused["layers"], refused["would_fit"], refused["peak_gib"]) == ({}, [], None)
    assert list(refused) == list(found["A100"])
    assert "no rung of recipe only_bf16 runs on tier VOLTA" in refused["problems"][0]


def test_if_no_card_can_run_it_that_is_an_error(only_bf16: str) -> None:
    done = run("--card", "V100", "--card", "T4", *QUICK, "--recipe", only_bf16)
    assert done.returncode == 4
    assert "tier VOLTA" in done.stderr
    assert "tier TURING" in done.stderr


def test_samples_of_a_data_set_are_no_tokens() -> None:
    found = answer("--card", "A100", "--config", "digits", "--recipe", "bf16")
    (card,) = found["cards"]
    assert card["tokens_per_second"] is None
    assert card["samples_per_second"] == found["samples_per_second"] > 0
