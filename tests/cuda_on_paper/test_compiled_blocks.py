"""`compile: blocks` of FP8 blocks, native and torchao, for a card that is not there: inductor's code, not run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("compiled_driver.py")
OPERATORS = "torch.ops.hopper_harness."
# Bytes that the driver's block moves outside of GEMMs.
MOVED = {"forward": 486_711_296, "backward": 652_148_736}

pytestmark = pytest.mark.slow


@cache
def compiled(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(DRIVER), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


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
            ["fp8_cast.default"] * 4
            + [f"fp8_{phase}.default"] * 4
            + ["fp8_scales_apart.default"] * 4
        )
        assert operators(found[phase]) == sorted(called)
        assert together(found[phase], "clamp") == 0
        assert found[f"fp8 in {phase}"] == []


def test_a_tensor_to_cast_is_written_once() -> None:
    """As bfloat16, for the cast. Scales are read without it: a second copy would add 29 MB."""
    assert compiled("native:fp8")["moved"] == MOVED


def test_without_the_kernel_casts_are_fused_with_what_is_before_them() -> None:
    found = compiled("native:fp8", "without")
    forward, backward = found["forward"], found["backward"]
    assert found["layers"] == 4
    assert together(forward, "fused_rms_norm", "amax", "clamp", "fp8_forward") == 2, (
        "norm, amax and cast of two inputs"
    )
    assert together(forward, "silu", "clamp", "fp8_forward") == 1, (
        "the activation and the cast of what comes out"
    )
    assert together(backward, "silu_backward", "amax") == 1, (
        "an activation's backward and its gradient's amax"
    )
    assert found["fp8 in forward"] == ["tl.float8e4nv"]
    assert found["fp8 in backward"] == ["tl.float8e5"]
    for phase in ("forward", "backward"):
        assert (
            operators(found[phase])
            == [f"fp8_{phase}.default"] * 4 + ["fp8_scales_apart.default"] * 4
        )


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
