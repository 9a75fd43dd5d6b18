"""The estimate of memory: storages counted on fake tensors, against PyTorch's own CPU allocator in real runs."""

from __future__ import annotations

import pytest
from conftest import Scene

# Real runs of nine models: six minutes where the CPU has no bf16 instructions.
pytestmark = pytest.mark.nightly
RUNS = (
    "bf16, weights",
    "bf16, activations",
    "fp32, activations",
    "fp16, deep",
    "native, weights",
    "native, activations",
    "bf16, recomputed",
    "native, in chunks",
    "torchao, activations",
)


@pytest.mark.parametrize("name", RUNS)
def test_the_estimate_is_within_a_tenth_of_the_allocators_peak(scene: Scene, name: str) -> None:
    estimate, allocator = (
        scene("memory", "fake")[name]["recorded"],
        scene("memory", "real")[name]["allocator"],
    )
    assert estimate == pytest.approx(allocator, rel=0.10)


@pytest.mark.parametrize("name", RUNS)
def test_what_lives_between_steps_is_the_same_on_paper(scene: Scene, name: str) -> None:
    """But for a scalar or two that Python has not let go of yet."""
    fake, real = scene("memory", "fake")[name]["static"], scene("memory", "real")[name]["static"]
    assert fake == pytest.approx(real, rel=1e-4)


def test_the_runs_differ_in_what_they_are_made_of(scene: Scene) -> None:
    """Else the comparison would only weigh parameters, which anybody can count."""
    shares = {
        name: found["static"] / found["recorded"] for name, found in scene("memory", "fake").items()
    }
    assert shares.keys() == set(RUNS)
    assert min(shares.values()) < 0.35
    assert max(shares.values()) > 0.7
