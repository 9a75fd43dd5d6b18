"""The same training under the native backend and under TE's Python: every figure side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harness import Precision
from harness.precision.recipe import Recipe, load_recipe

BACKENDS = ("native", "transformer_engine")
WIDTH = 16
EVEN_STEPS = 25
"""A seed under which one of two steps is, for the first 16, the second."""


def recipe(backend: str, **sections: Mapping[str, Any]) -> Recipe:
    """fp8_hybrid on one rung, for small layers, with a short history; keys of some sections replaced."""
    base = load_recipe("fp8_hybrid").model_dump()
    base["ladder"] = [{"backend": backend, "precision": "fp8", "tiers": ["CPU"]}]
    base["layers"]["min_features"] = WIDTH
    base["fp8"] |= {"roll": "micro_batch", "amax_history_len": 4, "stats_every": 2}
    base["fallback"]["enabled"] = False
    for section, keys in sections.items():
        base[section].update(keys)
    return Recipe.model_validate(base)


def inputs(number: int, rows: int = 16) -> Tensor:
    """Float32 [rows, WIDTH], a function of the number."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1000 + number))


class MLP(nn.Module):
    """Two Linears, a and b, without biases unless asked for: TE rounds bias gradients to BF16."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Linear(WIDTH, 2 * WIDTH, bias=bias),
            nn.Linear(2 * WIDTH, WIDTH, bias=bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@dataclass
class Trainer:
    """One model under one backend, and what its steps gave."""

    backend: str
    make: Callable[[], nn.Module] = MLP
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lr: float = 1e-2

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = self.make()
        self.precision = Precision(recipe(self.backend, **self.sections), seed=EVEN_STEPS)
        self.precision.prepare(self.model)
        state = self.precision.state_dict()
        # Of every two steps the first one here is sampled, from which most tests begin.
        state["meta"]["state"]["step"] = 1
        self.precision.load_state_dict(state)
        parameters = [
            p
            for name, p in self.model.named_parameters()
            if p.requires_grad and not name.endswith("bias")
        ]
        self.optimizer = torch.optim.AdamW(parameters, lr=self.lr, fused=True)
        self.log: list[dict[str, Any]] = []

    def loss(self, x: Tensor, factor: float = 1.0, wrong: bool = False) -> Tensor:
        """`factor` times a mean squared error, float32 0-d, in a context of its own. wrong: fail after the forward."""
        with self.precision.context():
            out = self.model(x).float()
            if wrong:
                raise RuntimeError("a loss that wants tensors of the same size")
            return nn.functional.mse_loss(out, x.roll(1, -1)) * factor

    def step(self) -> None:
        """End of the window: the optimizer's step, and all figures of it."""
        outcome = self.precision.step(self.optimizer)
        stats = self.precision.stats()
        assert stats is not None
        rows = ("amax", "scale", "saturation", "clipped", "underflow", "sqnr_db")
        self.log.append(
            {
                "norm": outcome.grad_norm.clone(),
                "applied": outcome.was_applied,
                "scrubbed": stats.scrubbed,
                "demoted": self.precision.demoted,
                **{row: torch.tensor(getattr(stats, row)) for row in rows},
                **{name: tensor.clone() for name, tensor in self.tensors().items()},
            }
        )
        self.model.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """FP8 state and parameters."""
        fp8 = {
            name: t
            for name, t in self.precision.state_dict()["tensors"].items()
            if name.startswith("fp8.")
        }
        return {**fp8, **{name: p.detach() for name, p in self.model.named_parameters()}}


def plain(trainer: Trainer, number: int) -> None:
    """Two micro-batches."""
    for half in range(2):
        trainer.precision.backward(trainer.loss(inputs(2 * number + half), 0.5))


def trained(
    backend: str,
    window: Callable[[Trainer, int], None] = plain,
    make: Callable[[], nn.Module] = MLP,
    steps: int = 6,
    **sections: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """What `steps` windows gave, each made of what `window` does before the optimizer's step."""
    trainer = Trainer(backend, make, sections)
    for number in range(steps):
        window(trainer, number)
        trainer.step()
    return trainer.log


def disagreements(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> list[str]:
    """Which figures of which step differ in any bit (NaN equals NaN)."""
    assert len(left) == len(right)
    return [
        f"step {number}: {name}"
        for number, (one, other) in enumerate(zip(left, right, strict=True))
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not equal(one[name], other[name])
    ]


def equal(left: Any, right: Any) -> bool:
    """Bit for bit, a NaN equal to a NaN."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return left == right
    return left.shape == right.shape and torch.equal(
        left.double().nan_to_num(-7.5), right.double().nan_to_num(-7.5)
    )


def moved(log: list[dict[str, Any]]) -> list[bool]:
    """Which scales have left 1: what a comparison of two runs in which nothing rolled would not notice."""
    return (log[-1]["fp8.scale"] != 1).tolist()
