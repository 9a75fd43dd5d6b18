"""Any backend on any device, and one training window through it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.capability.probe import probe
from harness.core.protocols import PrecisionBackend
from harness.precision.convert import build_backend
from harness.precision.plan import make_plan
from harness.precision.recipe import TIERS, Recipe, Rung


def backend_on(
    model: nn.Module, name: str, device: torch.device, fuse: bool = False, **fp8: object
) -> PrecisionBackend:
    """Convert `model` (already on `device`) to FP8 by the named backend, whatever the machine's tier."""
    rung = Rung.model_validate({"backend": name, "precision": "fp8", "tiers": list(TIERS)})
    sections = {"fp8": fp8, "layers": {"fuse": fuse}}
    recipe = Recipe.model_validate({"name": "gpu", "ladder": [rung.model_dump()], **sections})
    return build_backend(make_plan(recipe, probe(), rung, [], model), recipe, model, device)


def same(values: Tensor) -> Tensor:
    """One rank: nothing to reduce."""
    return values


def window(
    backend: PrecisionBackend,
    model: nn.Module,
    x: Tensor,
    grad: Tensor,
    skip: float = 0.0,
    sample: bool = False,
) -> tuple[Tensor, Tensor]:
    """Forward, backward from `grad`, end of the window; (output, float32 [6, slots] statistics)."""
    backend.begin_window(sample)
    with backend.context():
        out = model(x)
    with backend.backward_context():
        out.backward(grad)
    backend.end_micro_batch(same)
    return out.detach(), backend.end_window(
        backend.amax(), torch.tensor(skip, device=x.device), same
    )


def distance(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius distance, in float64 on the CPU."""
    a, b = actual.detach().cpu().double(), expected.detach().cpu().double()
    return float((a - b).norm() / b.norm())


def clones(backend: PrecisionBackend) -> dict[str, Tensor]:
    """The backend's tensors as they are now, on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in backend.state_dict()[0].items()}
