"""One small model and its data, trained by a plain loop: what every trainer must give, bit for bit."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

from harness import Precision
from harness.precision.recipe import Recipe, load_recipe

ROWS = 16
ROOT = Path(__file__).resolve().parents[2]
# Limits that every healthy tensor is over: a layer leaves FP8 as soon as the fallback may act.
EAGER = {"saturation_weight": 1e-6, "hits": 1, "window": 2, "dwell_steps": 1, "warmup_steps": 1}


def forget_accelerator() -> None:
    """An Accelerator keeps its settings in the process: one of this test must not be that of the test before."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


def recipe(name: str = "fp8_hybrid", **sections: Any) -> Recipe:
    """A shipped recipe that converts small layers too, with some keys of some sections replaced."""
    base = load_recipe(name).model_dump()
    base["layers"]["min_features"] = 16
    for section, keys in {"loss_scale": {"init": 1024.0, "growth_interval": 3}, **sections}.items():
        base[section].update(keys)
    return Recipe.model_validate(base)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


class Rolled(Dataset[tuple[Tensor, Tensor]]):
    """Batches in a row, `ROWS` samples each. bad: batches whose targets are NaN."""

    def __init__(self, batches: int, bad: tuple[int, ...] = ()) -> None:
        self.inputs = torch.randn(batches * ROWS, 16, generator=torch.Generator().manual_seed(7))
        self.targets = self.inputs.roll(1, dims=1)
        for number in bad:
            self.targets[number * ROWS] = torch.nan

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def loader(batches: int, bad: tuple[int, ...] = ()) -> DataLoader[tuple[Tensor, Tensor]]:
    return DataLoader(Rolled(batches, bad), batch_size=ROWS)


def plain(
    policy: Recipe, batches: int, accumulate: int = 1, clip: float | None = None
) -> tuple[list[float], nn.Module]:
    """Losses of micro-batches and the model, by the explicit loop."""
    precision = Precision(policy)
    model = precision.prepare(mlp())
    optimizer = adamw(model)
    scheduler = StepLR(optimizer, 3, 0.5)
    losses: list[float] = []
    for number, (x, y) in enumerate(loader(batches)):
        with precision.context():
            loss = nn.functional.mse_loss(model(x).float(), y)
        precision.backward(loss / accumulate)
        losses.append(loss.item())
        if (number + 1) % accumulate == 0:
            precision.step(optimizer, max_grad_norm=clip)
            optimizer.zero_grad()
            scheduler.step()
    return losses, model


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def codes(folder: Path) -> list[str]:
    return [row["code"] for row in rows(folder) if row["kind"] == "event"]


def amaxes(store: Path) -> list[float]:
    """The history of one slot's amax in an MLflow store that holds one run."""
    with closing(sqlite3.connect(store)) as database:
        found = database.execute(
            "SELECT key, value FROM metrics WHERE key LIKE 'fp8_amax/%' ORDER BY step"
        ).fetchall()
    first = min((key for key, _ in found), default="")
    return [value for key, value in found if key == first]
