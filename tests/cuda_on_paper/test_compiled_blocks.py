"""`compile: blocks` of FP8 blocks, native and torchao, for a card that is not there: inductor's code, not run."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import Scene

from tests.support import paper

DRIVER = Path(__file__).with_name("compiled_driver.py")
OPERATORS = "torch.ops.hopper_harness."
TOKENS, DIM, FFN = 2048, 1024, 2816
# Bytes that the driver's block moves outside of GEMMs and attention.
MOVED = {"forward": 167_796_736, "backward": 358_400_000}

pytestmark = pytest.mark.slow


@cache
def compiled(*arguments: str) -> dict[str, Any]:
    return paper.measured([str(DRIVER), *arguments])


def together(launches: list[str], *parts: str) -> int:
    """Kernels that do all of these."""
    return sum(
        name.startswith("triton") and all(part in name for part in parts) for name in launches
    )


def operators(launches: list[str]) -> list[str]:
    return sorted(name.removeprefix(OPERATORS) for name in launches if name.startswith(OPERATORS))


def test_casts_are_our_kernels() -> None:
    """One a layer and phase: the compiler's own transposes are slower than what it saves by fusing them."""
    found = compiled("native:fp8")
    assert found["layers"] == 4
    for phase in ("forward", "backward"):
        called = (
            ["fp8_cast_slot.default"] * 4
            + [f"fp8_{phase}.default"] * 4
            + ["fp8_scales_apart.default"] * 4
        )
        assert operators(found[phase]) == sorted(called)
        assert together(found[phase], "clamp") == 0
        assert found[f"fp8 in {phase}"] == []


def test_a_tensor_to_cast_is_written_once() -> None:
    """As bfloat16, for the cast. Scales are read without it: a second copy would add 29 MB."""
    assert compiled("native:fp8")["moved"] == MOVED


@pytest.mark.parametrize(
    ("rung", "least", "kernels"),
    # Backward of the compiler's code reads some tensors in two kernels: RoPE's gradients, and those of norms.
    [("autocast:bf16", 0.92, (10, 9)), ("native:fp8", 0.94, (6, 9))],
)
def test_an_estimate_moves_what_the_compilers_code_moves(
    scene: Scene, rung: str, least: float, kernels: tuple[int, int]
) -> None:
    found, expected = scene("fusion", rung), compiled(rung)["moved"]
    assert found["forward"]["moved"] == pytest.approx(expected["forward"], rel=1e-3)
    assert least <= found["backward"]["moved"] / expected["backward"] <= 1
    assert (found["forward"]["kernels"], found["backward"]["kernels"]) == kernels
    generated = [name for name in compiled(rung)["forward"] if name.startswith("triton")]
    assert len(generated) == kernels[0]


@pytest.mark.parametrize("rung", ["autocast:bf16", "native:fp8"])
def test_an_estimate_keeps_for_backward_what_the_compilers_code_keeps(
    scene: Scene, rung: str
) -> None:
    kept = compiled(rung)["kept"]
    assert kept > 50e6
    assert scene("fusion", rung)["kept"] == pytest.approx(kept, rel=1e-3)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_the_operations_of_blocks_are_told_from_those_around_them(
    scene: Scene, recompute: str
) -> None:
    """Two equal blocks. What is computed again ends before the last product, whose result nobody needs."""
    found = scene("blocks", recompute)
    products = {"forward": 4, "backward": 8 + (3 if recompute == "block" else 0)}
    for phase in ("forward", "backward"):
        for micro in (1, 2):
            first, second = (found[f"{phase} {block} {micro}"] for block in (0, 1))
            assert sorted(first) == sorted(second)
            assert first.count("mm") == products[phase]
        # Embedding, head and loss.
        outside = found[f"{phase} None 1"]
        assert outside.count("mm") == (1 if phase == "forward" else 2)
        assert not any("attention" in name or "silu" in name for name in outside)
        assert any("embedding" in name for name in outside)
        assert any("nll_loss" in name for name in outside)


@pytest.mark.parametrize("casts", ["fused", "without"])
def test_norms_activations_and_their_gradients_leave_their_kernels_as_fp8(casts: str) -> None:
    """With layers.fuse, and without our kernels. A kernel finds the amax, too."""
    found = compiled("native:fp8", casts)
    forward, backward = found["forward"], found["backward"]
    assert found["layers"] == 4
    for phase in (forward, backward):
        assert together(phase, "amax", "clamp") == 4
        assert together(phase, "fused_amax") == 4, "one number of one a row"
    assert together(forward, "fused_rms_norm", "amax", "clamp") == 2
    assert together(forward, "silu", "amax", "clamp") == 1
    assert together(backward, "silu_backward", "amax", "clamp") == 1
    assert together(backward, "fused_rms_norm_backward", "amax", "clamp") == 1
    assert found["fp8 in forward"] == ["tl.float8e4nv"]
    assert found["fp8 in backward"] == ["tl.float8e5"]
    for phase in ("forward", "backward"):
        assert (
            operators(found[phase])
            == [f"fp8_{phase}.default"] * 4 + ["fp8_scales_apart.default"] * 4
        )


def test_a_fused_cast_saves_a_bfloat16_copy() -> None:
    """Written (2 bytes), read (2) and cast to FP8 twice (2) it moves 6 bytes an element.

    Fused, FP8 is written (1), read (1) and transposed (1). The transposes of inputs are made in backward.
    """
    inputs = TOKENS * (3 * DIM + FFN)
    gradients = TOKENS * (DIM + 2 * FFN + DIM + 3 * DIM)
    saved = {"forward": 5 * inputs, "backward": 3 * gradients - 2 * inputs}
    moved = compiled("native:fp8", "fused")["moved"]
    for phase, before in MOVED.items():
        assert moved[phase] == pytest.approx(before - saved[phase], rel=1e-3), phase


@pytest.mark.nightly
def test_torchaos_amaxes_are_noted_without_a_copy() -> None:
    found = compiled("torchao:fp8")
    assert found["layers"] == 4
    assert found["noted in place"] == 8
    for phase in ("forward", "backward"):
        called = [
            name.removeprefix(OPERATORS) for name in found[phase] if name.startswith(OPERATORS)
        ]
        assert called == ["torchao_note.default"] * 4
    # torchao's amax is abs and max, the one that is noted a vector norm.
    assert together(found["forward"], "fused_rms_norm", "abs", "max", "linalg_vector_norm") == 2, (
        "with the norm before"
    )
    assert together(found["forward"], "silu", "abs", "max", "linalg_vector_norm") == 1, (
        "with the activation before"
    )
    assert together(found["backward"], "silu_backward", "abs", "max", "linalg_vector_norm") == 1
