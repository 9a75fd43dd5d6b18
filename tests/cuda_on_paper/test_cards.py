"""What a card takes is decided by that card, not by this machine; attention kernels are the card's own."""

from __future__ import annotations

import pytest
from conftest import Scene


@pytest.mark.parametrize(
    ("card", "recipe", "rung"),
    [
        ("H100", "fp8_hybrid", "native:fp8"),
        ("L4", "auto", "native:fp8"),
        ("A100", "fp8_hybrid", "autocast:bf16"),
        ("A100", "bf16", "autocast:bf16"),
        ("T4", "auto", "autocast:fp16"),
        ("T4", "fp8_hybrid", "autocast:fp16"),
        ("V100", "bf16", "autocast:fp16"),
    ],
)
def test_the_rung_is_the_cards(scene: Scene, card: str, recipe: str, rung: str) -> None:
    assert scene("cards")[f"{card} {recipe}"] == rung


@pytest.mark.parametrize(
    ("run", "kernel"),
    [
        ("T4 autocast:fp16", "_scaled_dot_product_efficient_attention"),
        ("H100 autocast:bf16", "_scaled_dot_product_flash_attention"),
        ("H100 autocast:fp32", "_scaled_dot_product_efficient_attention"),
        # Documents are kept apart by a mask, which FlashAttention does not take.
        ("H100 packed", "_scaled_dot_product_efficient_attention"),
    ],
)
def test_grouped_queries_never_fall_to_plain_mathematics(
    scene: Scene, run: str, kernel: str
) -> None:
    """The model has twice as many query heads as key heads. No fused kernel: the scores of all pairs are kept."""
    assert scene("cards")[run]["attention"] == [kernel, f"{kernel}_backward"]


@pytest.mark.parametrize(
    "operands", ["broadcast key heads", "broadcast samples", "three dimensions", "twelve features"]
)
def test_what_no_fused_kernel_takes_is_plain_mathematics(scene: Scene, operands: str) -> None:
    """PyTorch's kernels want four dimensions and heads of a multiple of 8 features. They broadcast nothing."""
    assert scene("cards")[operands]["attention"] == []


@pytest.mark.parametrize("operands", ["groups of one", "narrow values"])
def test_the_kernel_that_takes_these_operands(scene: Scene, operands: str) -> None:
    """`enable_gqa` without groups changes nothing. FlashAttention wants values as wide as keys."""
    kernel = "_scaled_dot_product_efficient_attention"
    assert scene("cards")[operands]["attention"] == [kernel, f"{kernel}_backward"]


def test_micro_batches_that_are_not_traced_are_counted(scene: Scene) -> None:
    found = scene("cards")
    assert found["five micro-batches, three traced"] == found["five micro-batches"] > 0
