"""`harness estimate` of mixtures of experts, against counts by hand: a token meets its own experts, not all of them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from mixtures import PARAMETERS, active
from test_estimate_command import QUICK, run

from tests.support.runs import ROOT

TOKENS = 4 * 64
"""Of a step of the config tiny."""


def mixture(way: str, recipe: str = "bf16") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    target = ("model.target=mixtures:build", f"model.args={{way: {way}}}", "--recipe", recipe)
    return run("--card", "H100", *QUICK, *target, "--json", PYTHONPATH=path)


@pytest.mark.parametrize(
    ("way", "chosen"),
    [
        ("where", 2),
        pytest.param("one_hot", 2, marks=pytest.mark.nightly),
        pytest.param("mask", 2, marks=pytest.mark.nightly),
        pytest.param("sorted", 2, marks=pytest.mark.slow),
        pytest.param("switch", 1, marks=pytest.mark.nightly),
    ],
)
def test_a_token_costs_its_own_experts(way: str, chosen: int) -> None:
    """Two operations for each element of a matrix that a token meets forward, four backward."""
    done = mixture(way)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["parameters"] == PARAMETERS
    assert found["flops"] == 6 * TOKENS * active(chosen)
    assert any("experts: each gets as many tokens as any other" in note for note in found["notes"])


@pytest.mark.slow
def test_experts_in_fp8_are_counted_alike() -> None:
    found = json.loads(mixture("where", "fp8_hybrid").stdout)
    assert found["fp8_layers"] > 0
    assert found["flops"] == 6 * TOKENS * active()


@pytest.mark.slow
def test_a_choice_by_values_is_refused_with_what_would_do() -> None:
    done = mixture("by_values")
    assert done.returncode == 2
    assert "cannot run on fake tensors" in done.stderr
    assert "choose experts by the indices of topk or argmax" in done.stderr
