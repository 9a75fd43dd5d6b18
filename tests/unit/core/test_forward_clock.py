from __future__ import annotations

import time

import torch

from harness.core.collectives import ForwardClock


def test_a_step_has_the_sum_of_its_forward_passes_and_nothing_else() -> None:
    clock = ForwardClock(torch.device("cpu"))
    began = time.perf_counter()
    for _ in range(3):
        with clock.forward():
            time.sleep(0.02)
    most = time.perf_counter() - began
    time.sleep(0.05)
    assert 0.06 <= clock.step() <= most
    with clock.forward():
        pass
    assert clock.step() < 0.02, "the last step's passes are not counted again"
    assert clock.step() == 0.0
