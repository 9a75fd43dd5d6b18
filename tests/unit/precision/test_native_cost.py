"""What the native backend does around a window's layers costs the same for few layers as for many."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from native_support import APPLY, backend_for, same
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """How often each of torch's operations ran."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("fp8_units", [False, True])
@pytest.mark.parametrize("roll", ["step", "micro_batch"])
def test_a_window_of_slot_buffers_costs_as_much_for_4_layers_as_for_40(
    sample: bool, fp8_units: bool, roll: str
) -> None:
    counts: list[Counter[str]] = []
    for layers in (4, 40):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
        backend = backend_for(model, fp8_units, roll=roll)
        assert len(backend.slot_names) == 3 * layers
        with Operations() as operations:
            backend.begin_window(sample=sample)
            with backend.context():
                pass
            with backend.backward_context():
                pass
            backend.end_micro_batch(same)
            backend.end_window(backend.amax(), APPLY, same)
            backend.scrubbed()
        counts.append(operations.counts)
    assert sum(counts[0].values()) > 10
    assert counts[0] == counts[1]


def test_a_layer_takes_as_many_operations_in_a_model_of_40_as_in_one_of_4() -> None:
    def per_layer(layers: int) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
        backend = backend_for(model)
        x = torch.randn(16, 16, requires_grad=True)
        backend.begin_window(sample=False)
        with Operations() as operations:
            with backend.context():
                out = model(x)
            with backend.backward_context():
                out.backward(torch.ones_like(out))
        return sum(operations.counts.values()) / layers

    few, many = per_layer(4), per_layer(40)
    assert many <= few
