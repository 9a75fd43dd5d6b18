"""What `layers.probe` times and `layers.keep_fp32` protects on a real card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harness import Precision
from harness.capability.probe import probe
from harness.precision.recipe import TIERS, Recipe
from harness.precision.shape_probe import measure, times_of

pytestmark = pytest.mark.gpu

TOKENS = 2048


def recipe(backend: str, precision: str, **layers: object) -> Recipe:
    rung = {"backend": backend, "precision": precision, "tiers": list(TIERS)}
    return Recipe.model_validate(
        {"name": "gpu", "ladder": [rung], "layers": {"min_features": 16, **layers}}
    )


def test_a_layer_is_timed_in_seconds_on_the_card(fp8_gpu: torch.device) -> None:
    """`make proof` measures how fast it is. Here a slow card or a busy machine fails no test; milliseconds would."""
    policy = recipe("native", "fp8")
    times = measure((8192, 8192), TOKENS, policy, policy.ladder[0], fp8_gpu)
    # No card does 10^17 operations a second, and each with FP8 units over 2 * 10^12.
    least = 3 * 2 * TOKENS * 8192**2 / 1e17
    assert least < times.bf16 < 0.5
    assert least < times.fp8 < 0.5


def test_times_from_another_process_are_remembered(
    fp8_gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    policy, facts = recipe("native", "fp8"), probe()
    shapes = [(512, 512), (4096, 4096)]
    before = torch.cuda.memory_allocated(fp8_gpu)
    first, note = times_of(shapes, TOKENS, policy, policy.ladder[0], facts, fp8_gpu)
    assert set(first) == set(shapes), note
    assert torch.cuda.memory_allocated(fp8_gpu) == before
    again, note = times_of(shapes, TOKENS, policy, policy.ladder[0], facts, fp8_gpu)
    assert again == first
    assert "0 sizes timed" in note


class Product(nn.Module):
    """Largest entry of x x^T."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.T).amax()


def test_a_product_that_overflows_fp16_is_finite_in_fp32() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    largest: list[float] = []
    for keep in ([], ["product"]):
        model = nn.ModuleDict({"product": Product(), "linear": nn.Linear(16, 16)}).to(device)
        precision = Precision(recipe("autocast", "fp16", keep_fp32=keep))
        precision.prepare(model)
        with precision.context():
            largest.append(model["product"](torch.full((4, 16), 300.0, device=device)).item())
    assert largest == [float("inf"), 16 * 300.0**2]
