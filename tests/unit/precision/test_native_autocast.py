"""An autocast of another dtype around an FP8 layer leaves its GEMMs alone, eager and compiled."""

from __future__ import annotations

import pytest
import torch
from native_support import APPLY, backend_for, same, window
from torch import Tensor, nn


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_fp16_autocast_changes_no_bit(compiled: bool) -> None:
    torch._dynamo.reset()

    def run(nested: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32))
        backend = backend_for(model)
        x = 1e4 * torch.randn(16, 32)
        window(backend, model, x)
        if compiled:
            model[0].compile(backend="aot_eager", fullgraph=True)
        model.zero_grad()
        backend.begin_window(sample=False)
        with backend.context(), torch.autocast("cpu", dtype=torch.float16, enabled=nested):
            out = model(x)
        with backend.backward_context(), torch.autocast("cpu", dtype=torch.float16, enabled=nested):
            out.backward(torch.ones_like(out))
        backend.end_window(backend.amax(), APPLY, same)
        grad = model.get_parameter("0.weight").grad
        assert grad is not None
        return out.detach(), grad

    (out, grad), (plain_out, plain_grad) = run(nested=True), run(nested=False)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, plain_out)
    assert torch.equal(grad, plain_grad)
