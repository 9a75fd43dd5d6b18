"""What the pages say of the H100's steps is what its records say, and what `harness estimate` said beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.proof.registry import ROWS
from harness.capability.cards import CARDS
from harness.core.files import read_json
from harness.models.gpt import build
from harness.models.task import Task, training_flops

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"


def page(name: str) -> str:
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())


def figures(record: str, row: str) -> dict[str, Any]:
    return next(
        each["figures"]
        for each in read_json(RESULTS / f"{record}.json")["rows"]
        if each["name"] == row
    )


STEPS = [
    ("proof_h100_torch213", "te"),
    ("proof_h100_torch213", "te_fused"),
    ("proof_h100_torch213", "native"),
    ("proof_h100_torch213", "native_compiled"),
    ("proof_h100_torch213_after", "native_compiled"),
]


@pytest.mark.parametrize(("record", "row"), STEPS)
def test_a_step_over_bf16s_is_the_records(record: str, row: str) -> None:
    timed = figures(record, row)["contenders"]
    ratio, seconds, plain = (
        timed["fp8"]["ratio"],
        timed["fp8"]["seconds"],
        timed["16 bit"]["seconds"],
    )
    spread = f"{ratio['median']:.3f}", f"({ratio['min']:.3f} to {ratio['max']:.3f})"
    times = f"{1e3 * seconds['median']:.1f} ms over {1e3 * plain['median']:.1f} ms"
    text = page("studies/hopper.md").replace("**", "")
    assert f"{spread[0]} {spread[1]}, {times}" in text


def test_steps_with_the_older_torch_are_the_records() -> None:
    rows = ("te", "native", "native_compiled")
    ratios = [figures("proof_h100", row)["contenders"]["fp8"]["ratio"]["median"] for row in rows]
    told = f"Steps were {min(ratios):.2f} to {max(ratios):.2f} of bf16's"
    assert told in page("studies/hopper.md")


def test_torchaos_eager_step_is_the_records_where_a_recipe_is_chosen() -> None:
    ratio = figures("proof_h100_torch213", "torchao")["contenders"]["fp8"]["ratio"]["median"]
    for place in ("guide/recipes.md", "reference/runbook.md"):
        assert f"{ratio:.1f} times bf16's" in page(place)


def test_where_a_step_goes_is_the_records() -> None:
    """Milliseconds of a step by kind, for each contender that was profiled."""
    profiled = figures("proof_h100_profiles", "profiles")["contenders"]
    text = page("studies/hopper.md")
    for name, found in profiled.items():
        kinds = {kind: each["ms"] for kind, each in found["kinds"].items()}
        gemms = sum(ms for kind, ms in kinds.items() if kind.startswith("GEMMs"))
        named = ("attention", "norms", "casts", "optimizer", "other operations")
        cells = [found["step_ms"], gemms, *(kinds[kind] for kind in named)]
        numbers = " | ".join(f"{each:.1f}" for each in cells)
        over = found["step_ms"] / profiled["bf16 compiled"]["step_ms"]
        assert f"| {name} | {numbers} | {found['kernels']:.0f} | {over:.2f} |" in text


@pytest.mark.parametrize("row", ["as_shipped", "long_step", "vocabulary"])
def test_the_default_over_compiled_bf16_is_the_records(row: str) -> None:
    ratio = figures("proof_h100_shipped", row)["contenders"]["fp8"]["ratio"]
    told = f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
    assert told in page("studies/hopper.md")


def test_the_page_names_the_rows_that_no_record_has() -> None:
    ran: set[str] = set()
    for path in RESULTS.glob("proof_h100*.json"):
        ran |= {row["name"] for row in read_json(path)["rows"] if row["status"] != "not run"}
    missing = [f"`{row.name}`" for row in ROWS if row.name not in ran]
    text = page("studies/hopper.md")
    named = f"{', '.join(missing[:-1])} and {missing[-1]}"
    assert f"On the H100 these have not run: {named}." in text
    assert f"`make proof` asks {len(ROWS)} questions" in text
    told = f"One H100 has run {len(ROWS) - len(missing)} of the {len(ROWS)} rows"
    assert told in page("../CHANGELOG.md")


def test_a_step_of_the_readme_names_its_vocabulary() -> None:
    sizes = figures("proof_h100_torch213", "te")["model"]
    text = page("../README.md")
    assert f"{sizes['layers']} layers of Llama-3-8B's sizes, vocabulary {sizes['vocab']}" in text
    assert f"vocabulary {sizes['vocab']} (larger vocabularies gain less)" in text
    assert f"Their vocabulary is {sizes['vocab']}" in page("studies/hopper.md")


def test_what_the_estimate_said_beside_a_card_is_the_records() -> None:
    found = figures("proof_h100_saves", "estimated")["rows"]["native"]
    fp8, plain, ratio = found["fp8"], found["16 bit"], found["ratio"]
    guide = page("guide/estimate.md")
    for row in ("predicted", "measured"):
        times = f"{fp8[f'{row}_ms']:.1f} ms | {plain[f'{row}_ms']:.1f} ms"
        assert f"| {row} | {times} | {ratio[row]:.2f} |" in guide
    for place in ("studies/hopper.md", "guide/estimate.md"):
        assert f"{fp8['measured_ms']:.1f}" in page(place)
        assert f"{fp8['predicted_ms']:.1f}" in page(place)
        assert "86.8" not in page(place)
        assert "no card has confirmed" not in page(place)


def test_the_mfu_of_the_steps_is_by_the_harnesss_own_count() -> None:
    """Attention counts, as it does in `train/mfu`; the page once had weights alone."""
    sizes = figures("proof_h100_torch213", "native")["model"]
    args = {name: value for name, value in sizes.items() if name not in ("context", "parameters")}
    with torch.device("meta"):
        model = build(**args)
    tokens = torch.zeros(1, sizes["context"], dtype=torch.int64)
    flops = training_flops(
        model, Task(model, "harness.models.gpt:build"), {"inputs": tokens, "targets": tokens}
    )
    card = CARDS["H100"]

    def shares(record: str, row: str) -> str:
        timed = figures(record, row)["contenders"]
        plain = flops / timed["16 bit"]["seconds"]["median"] / card.half
        fp8 = flops / timed["fp8"]["seconds"]["median"] / card.fp8
        return f"{plain:.0%} of the bf16 peak in bf16 and {fp8:.0%} of the FP8 peak in FP8"

    text = page("studies/hopper.md")
    assert shares("proof_h100_torch213", "native") in text
    assert shares("proof_h100_torch213_after", "native_compiled") in text
    assert "torch 2.13" in text
