"""FSDP2 on one card: the bits of the same run under one process or DDP, with a save and a resume on the way.

The same runs are played on a CPU in tests/dist/test_fsdp_runs.py. No card has run these tests.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from harness.build import ENGINES
from tests.support.fsdp_pairs import RUNGS, SHARED_DEVICE, assert_bits_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(ENGINES["fsdp"].lacking("cuda")), reason="engine fsdp needs torch 2.13 or later"
    ),
]

# Kernels that add up in any order would differ from run to run under one engine, too.
SAME_BITS = ("engine.deterministic=true", "engine.compile=none", "engine.timeout_seconds=120")


@pytest.fixture(params=RUNGS)
def rung(request: pytest.FixtureRequest) -> str:
    """A rung that this card can run."""
    backend, precision = request.param.split(":")
    capability = torch.cuda.get_device_capability()
    if precision == "fp8" and capability < (8, 9):
        pytest.skip("FP8 GEMMs need compute capability 8.9")
    if precision == "bf16" and capability < (8, 0):
        pytest.skip("bf16 needs compute capability 8.0")
    if backend == "transformer_engine" and find_spec(backend) is None:
        pytest.skip("Transformer Engine is not installed")
    return request.param


@pytest.mark.parametrize("other", ["single", "ddp"])
def test_one_rank_over_nccl_has_the_bits_of(other: str, tmp_path: Path, rung: str) -> None:
    assert_bits_of(other, tmp_path, rung, 1, *SAME_BITS, anew=True)


def test_two_ranks_over_gloo_that_share_the_card_have_the_bits_of_ddp(
    tmp_path: Path, rung: str
) -> None:
    assert_bits_of("ddp", tmp_path, rung, 2, *SAME_BITS, program=SHARED_DEVICE, anew=True)
