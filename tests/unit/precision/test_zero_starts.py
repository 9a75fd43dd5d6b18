"""Models with zero-initialised parts train in FP8 from their first step on, and no layer leaves for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harness import Precision
from harness.precision.recipe import load_recipe
from tests.support.matrix import rest_nightly

DIM, STEPS = 64, 24


class Residual(nn.Module):
    """x + down(gelu(up(x))), `down` from zero; gated: down(gate * ...) instead, the gate from zero."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.gate = nn.Parameter(torch.zeros(())) if gated else None
        if not gated:
            nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(x))
        return x + self.down(hidden if self.gate is None else hidden * self.gate)


class Adapted(nn.Module):
    """A frozen Linear with a low-rank update b(a(x)), `b` from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.b.weight)
        nn.init.zeros_(self.b.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Modulated(nn.Module):
    """adaLN-zero: scale, shift and gate of a branch come from a Linear that is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(DIM, elementwise_affine=False), nn.Linear(DIM, DIM)
        self.modulation = nn.Linear(DIM, 3 * DIM)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift, gate = self.modulation(nn.functional.silu(x)).chunk(3, dim=-1)
        return x + gate * self.branch(self.norm(x) * (1 + scale) + shift)


class Projected(nn.Module):
    """A convolution, then a Linear over its channels that is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv1d(1, 16, 3, padding=1), nn.Linear(16 * DIM, DIM)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.conv(x[:, None]).relu().flatten(1))


def network(part: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), part(), part(), nn.Linear(DIM, DIM))


PARTS: dict[str, Callable[[], nn.Module]] = {
    "residual branches": Residual,
    "gates": lambda: Residual(gated=True),
    "low-rank updates": Adapted,
    "adaLN-zero": Modulated,
    "behind convolutions": Projected,
}


RATES = [(3e-4, 1), (3e-3, 20), (1e-2, 1), (3e-2, 20)]
# Each part and each rate at least once.
SPREAD = [(part, *RATES[at % len(RATES)]) for at, part in enumerate(PARTS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "rate", "warmup"),
    rest_nightly([(part, *rate) for part in PARTS for rate in RATES], *SPREAD),
)
def test_no_layer_leaves_for_beginning_at_zero(part: str, rate: float, warmup: int) -> None:
    torch.manual_seed(1)
    precision = Precision(load_recipe("fp8_hybrid"))
    model = precision.prepare(network(PARTS[part]))
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=rate, fused=True
    )
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, step / warmup)
        x = torch.randn(128, DIM, generator=torch.Generator().manual_seed(step))
        with precision.context():
            loss = nn.functional.mse_loss(model(x).float(), x.roll(1, dims=1).sin())
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()
        assert precision.demoted == ()
