"""A layer in BF16 goes on being measured as if it were in FP8: otherwise it would come back to what drove it out."""

from __future__ import annotations

import pytest
import torch
from native_support import backend_for, window
from torch import nn

from harness.core.facts import SLOT_ROWS

STAT_ROWS = tuple(SLOT_ROWS)
SAMPLED = [STAT_ROWS.index(name) for name in ("clipped", "underflow", "sqnr_db")]


def hot_input() -> torch.Tensor:
    """One channel so large that, once the scale follows it, the others underflow."""
    torch.manual_seed(1)
    x = torch.randn(32, 32)
    x[:, 3] = 2.0**20
    return x


@pytest.mark.parametrize("kernel", [True, False])
def test_a_demoted_layer_shows_what_fp8_would_do_to_its_tensors(kernel: bool) -> None:
    rows = {}
    for demoted in (False, True):
        torch.manual_seed(0)
        linear = nn.Linear(32, 32)
        with torch.no_grad():
            linear.weight[:, 3] = 0.0  # the function does not see the hot channel
        model = nn.Sequential(linear)
        backend = backend_for(model)
        if not kernel:
            backend.slot_buffers.kernel = None
        backend.switch(["00"] if demoted else [], ())
        window(backend, model, hot_input())
        assert backend.demoted == (("00",) if demoted else ())
        rows[demoted] = window(backend, model, hot_input())[SAMPLED]
    underflow = rows[True][SAMPLED.index(STAT_ROWS.index("underflow"))]
    assert underflow[0] > 0.5, "the hot channel must hurt for the comparison to mean anything"
    # Input and weight are the same tensors in both precisions; the gradient follows from another output.
    assert torch.equal(rows[True][:, :2].nan_to_num(-1.0), rows[False][:, :2].nan_to_num(-1.0))
    assert torch.isfinite(rows[True][:, 2]).all()


def test_unsampled_windows_keep_the_amax_only() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    backend = backend_for(model)
    backend.switch(["00"], ())
    x = hot_input()
    backend.begin_window(sample=False)
    with backend.context():
        loss = model(x).sum()
    with backend.backward_context():
        loss.backward()
    stats = backend.end_window(backend.amax(), torch.zeros(()), lambda values: values)
    assert stats[STAT_ROWS.index("amax"), 0] == 2.0**20
    assert torch.isnan(stats[SAMPLED]).all()
