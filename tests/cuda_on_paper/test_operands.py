"""What cuBLASLt would be handed, and how often weights are read."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Scene

pytestmark = pytest.mark.slow
E4M3, E5M2 = "torch.float8_e4m3fn", "torch.float8_e5m2"
BACKENDS = ("native", "torchao")
MICRO_BATCHES, STEPS, LAYERS = 3, 3, 8


@pytest.fixture(params=BACKENDS)
def gemms(request: pytest.FixtureRequest, scene: Scene) -> list[dict[str, Any]]:
    return scene("operands")[request.param]["gemms"]


def test_every_gemm_of_every_layer_was_seen(gemms: list[dict[str, Any]]) -> None:
    assert len(gemms) == STEPS * MICRO_BATCHES * LAYERS * 3
    assert sum(gemm["phase"] == "forward" for gemm in gemms) == STEPS * MICRO_BATCHES * LAYERS


def test_left_is_row_major_and_right_is_column_major(gemms: list[dict[str, Any]]) -> None:
    """The only layout that FP8 tensor cores of 8.9 and 9.0 multiply (cuBLAS documentation, "TN")."""
    for gemm in gemms:
        (rows, inner), (row, column), _ = gemm["left"]
        assert (column, row >= inner) == (1, True), gemm
        (inner, columns), (row, column), _ = gemm["right"]
        assert (row, column >= inner) == (1, True), gemm
        assert rows > 0
        assert columns > 0


def test_sizes_and_strides_are_multiples_of_16(gemms: list[dict[str, Any]]) -> None:
    """torch._scaled_mm wants it of the common dimension and of the columns, cuBLASLt of both leading dimensions."""
    for gemm in gemms:
        (_, inner), (leading, _), _ = gemm["left"]
        (_, columns), (_, right_leading), _ = gemm["right"]
        assert [size % 16 for size in (inner, columns, leading, right_leading)] == [0, 0, 0, 0], (
            gemm
        )


def test_scales_are_float32_on_the_card(gemms: list[dict[str, Any]]) -> None:
    for gemm in gemms:
        for shape, dtype, device, _ in gemm["scales"]:
            assert (dtype, device) == ("torch.float32", "cuda")
            assert shape in ([], [1]), gemm


def test_scales_lie_at_multiples_of_16_bytes(gemms: list[dict[str, Any]]) -> None:
    """At another address an H100's cuBLASLt (13.1) answers CUBLAS_STATUS_NOT_SUPPORTED."""
    for gemm in gemms:
        assert [scale[3] % 16 for scale in gemm["scales"]] == [0, 0], gemm


def test_formats_of_the_hybrid_recipe(gemms: list[dict[str, Any]]) -> None:
    """E4M3 forward; backward one operand is a gradient, in E5M2. cuBLASLt has no E5M2 x E5M2."""
    for gemm in gemms:
        formats = sorted([gemm["left"][2], gemm["right"][2]])
        assert formats == ([E4M3, E4M3] if gemm["phase"] == "forward" else [E4M3, E5M2]), gemm


def test_forward_alone_accumulates_fast(scene: Scene) -> None:
    for gemm in scene("operands")["native"]["gemms"]:
        assert gemm["fast"] == (gemm["phase"] == "forward")


def test_a_weight_is_quantised_once_in_an_optimizer_step(scene: Scene) -> None:
    """Later micro-batches of a step do not read the master weights at all; the next step does again. The first step of
    a process may: it does not know yet how many micro-batches there are, and lets each weight go after its backward."""
    reads = {
        when: count
        for when, count in scene("operands")["native"]["reads"].items()
        if "first" not in when
    }
    assert reads["usual 1"] >= LAYERS
    assert reads["next 1"] == reads["usual 1"]
    assert reads.keys() == {"usual 1", "next 1"}


def test_steps_after_the_first_cost_alike(scene: Scene) -> None:
    kernels = scene("operands")["native"]["kernels"]
    assert kernels["usual"] == kernels["next"] <= kernels["first"]
