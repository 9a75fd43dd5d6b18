"""Validation under the training precision; FP8 scales, histories and random state are left untouched."""

from __future__ import annotations

import torch

from harness.run import Run


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Mean validation loss over all ranks, nats per token, identical on every rank."""
    engine = run.engine
    module = engine.module
    was_training = module.training
    module.eval()
    try:
        total = torch.zeros((), dtype=torch.float64, device=engine.device)
        batches = run.data.validation(engine.rank, engine.world_size)
        for inputs, targets in batches:
            with run.precision.context():
                total += run.task.loss(module, inputs.to(engine.device), targets.to(engine.device)).double()
        return float(engine.mean((total / len(batches)).float()))
    finally:
        module.train(was_training)
