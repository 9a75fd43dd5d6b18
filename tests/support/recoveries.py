"""What tests of saves and snapshots share: a Recovery over a small model, and a machine that pins no memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from harness.checkpoint.policy import RollbackTargets
from harness.checkpoint.recovery import Recovery
from harness.checkpoint.saver import Saver
from harness.checkpoint.store import Store
from harness.core.config import TrainConfig
from harness.core.state import TrainState
from harness.engines.torch_engine import TorchEngine
from harness.optim.optimizers import build_optimizer
from harness.optim.schedule import Schedule
from harness.tracking.journal import Journal

CPU = torch.device("cpu")


def small_recovery(store: Store, saver: Saver, journal: Journal) -> Recovery:
    """Of a model with one Linear, on the CPU and in one process."""
    model = nn.Linear(3, 3)
    optimizer = build_optimizer(model, TrainConfig.model_validate({}), CPU)
    schedule = Schedule(0.02, 2, 20, 0.1)
    engine = TorchEngine(model, optimizer, schedule, 0.3, device=CPU, timeout_seconds=60)
    return Recovery(
        state=TrainState(engine.parts()),
        engine=engine,
        tracker=journal,
        store=store,
        good=RollbackTargets(store, 1),
        saver=saver,
        keep_ledger=lambda ledger: None,
    )


def pin_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on page-locked memory is refused, as where the system has no more."""
    real = torch.empty

    def empty(*size: Any, **options: Any) -> Any:
        if options.pop("pin_memory", False):
            raise RuntimeError("CUDA error: out of memory")
        return real(*size, **options)

    monkeypatch.setattr(torch, "empty", empty)
