"""The small image classifiers: shapes, independence of samples, and sizes that cannot be."""

from __future__ import annotations

import pytest
import torch

from harness.capability.probe import probe
from harness.core.errors import ConfigError
from harness.models.vision import convnet, vit
from harness.precision.plan import make_plan, resolve
from harness.precision.recipe import load_recipe


@pytest.mark.parametrize("build", [convnet, vit])
def test_logits_of_a_sample_do_not_depend_on_the_others(build) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model, images = build(), torch.rand(6, 1, 8, 8)
    logits = model(images)
    assert logits.shape == (6, 10)
    torch.testing.assert_close(model(images[2:3]), logits[2:3])
    assert model.training


def test_the_places_of_patches_matter() -> None:
    torch.manual_seed(0)
    model, image = vit(), torch.rand(1, 1, 8, 8)
    assert not torch.allclose(model(image), model(image.roll(2, -1)), atol=1e-3)


def test_all_linears_of_a_block_run_in_fp8() -> None:
    recipe, facts = load_recipe("fp8_hybrid"), probe()
    rung, verdicts = resolve(recipe, facts)
    assert rung is not None
    plan = make_plan(recipe, facts, rung, verdicts, vit())
    assert plan.fp8_layers() == tuple(
        f"blocks.{n}.{name}" for n in (0, 1) for name in ("qkv", "out", "up", "down")
    )


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"patches of 3 do not tile 8 pixels[\s\S]*dim 62 is not a multiple of heads 4",
    ):
        vit(patch=3, dim=62)
    with pytest.raises(ConfigError, match=r"widths \[12\] are not multiples of 8"):
        convnet(widths=[12])
