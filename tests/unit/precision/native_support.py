"""A native backend on a small model, and one training window through it."""

from __future__ import annotations

import torch
from torch import nn

from harness.capability.probe import probe
from harness.precision.backends.native import NativeBackend
from harness.precision.plan import make_plan, resolve
from harness.precision.recipe import Recipe, load_recipe

CPU = torch.device("cpu")
APPLY = torch.zeros(())
SKIP = torch.ones(())


def recipe(**fp8: object) -> Recipe:
    base = load_recipe("fp8_hybrid").model_dump()
    return Recipe.model_validate(
        {**base, "fp8": {**base["fp8"], **fp8}, "layers": {"min_features": 16}}
    )


FP8_UNITS = False
"""What `backend_for` takes unless it is told; tests that hold for both set it."""


def backend_for(model: nn.Module, fp8_units: bool | None = None, **fp8: object) -> NativeBackend:
    """On the CPU; `fp8_units`: as on a GPU that has them, with the CPU's `torch._scaled_mm`."""
    policy = recipe(**fp8)
    facts = probe()
    rung, verdicts = resolve(policy, facts)
    assert rung is not None
    units = FP8_UNITS if fp8_units is None else fp8_units
    return NativeBackend(make_plan(policy, facts, rung, verdicts, model), policy, model, CPU, units)


def same(values: torch.Tensor) -> torch.Tensor:
    return values


def window(
    backend: NativeBackend, model: nn.Module, x: torch.Tensor, skip: torch.Tensor = APPLY
) -> torch.Tensor:
    backend.begin_window(sample=True)
    with backend.context():
        loss = model(x).float().square().sum()
    with backend.backward_context():
        loss.backward()
    return backend.end_window(backend.amax(), skip, same)
