"""Your own loop with guard and telemetry: bad batches are rolled back. Run: python examples/guarded_loop.py [recipe]"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from harness import Guard, Precision, Telemetry
from harness.core.errors import HaltedError
from harness.core.facts import Rollback

STEPS = 120
BAD = range(70, 75)  # windows with infinite targets


def batch(window: int, teacher: nn.Module, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Depends on the window's number alone, so that windows that a rollback skips are never seen again."""
    inputs = torch.randn(256, 64, generator=torch.Generator().manual_seed(window)).to(device)
    return inputs, teacher(inputs) * (float("inf") if window in BAD else 1.0)


def main(recipe: str) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = nn.Linear(64, 64).to(device).requires_grad_(False)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)

    precision = Precision.from_recipe(recipe)
    model = precision.prepare(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scheduler = LinearLR(optimizer, 1.0, 0.1, STEPS)

    with Telemetry.for_precision("runs/guarded", precision, steps=STEPS, mlflow=False) as telemetry:
        # A rollback restores model, optimizer and FP8 state by itself, and everything in `keep`.
        guard = Guard.for_precision(precision, optimizer, keep=[scheduler], telemetry=telemetry)
        # No `for step in range(...)`: a rollback sets guard.step back, and guard.window skips what broke the run.
        while guard.step < STEPS:
            inputs, targets = batch(guard.window, teacher, device)
            with precision.context():
                loss = nn.functional.mse_loss(model(inputs), targets)
            precision.backward(loss)
            precision.step(optimizer, max_grad_norm=1.0, tokens=len(inputs))
            optimizer.zero_grad()
            scheduler.step()

            # Judges the step before this one, whose figures have arrived by now.
            if isinstance(guard.end_step(), Rollback):
                print(f"back at step {guard.step}, next comes window {guard.window}")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "fp8_hybrid")
    except HaltedError as error:  # going on would make it worse; the error says why, and what to do
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
