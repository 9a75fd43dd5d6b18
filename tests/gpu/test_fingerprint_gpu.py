"""Hashes that checkpoints keep do not depend on the device that computed them."""

from __future__ import annotations

import pytest
import torch

from harness.core.collectives import Fingerprint

pytestmark = pytest.mark.gpu


def test_kept_hashes_of_a_gpu_are_those_of_a_cpu() -> None:
    gpu = torch.device("cuda", torch.cuda.current_device())
    tensors = [torch.randn(300, 1000), torch.randn(7).to(torch.bfloat16), torch.zeros(0)]
    on_gpu = Fingerprint(gpu, portable=True).of([tensor.to(gpu) for tensor in tensors])
    on_cpu = Fingerprint(torch.device("cpu"), portable=True).of(tensors)
    assert on_gpu.tolist() == on_cpu.tolist()
