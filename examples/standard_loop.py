"""torch's standard loop, unchanged, under any recipe. Run: python examples/standard_loop.py [recipe]

Three faults show what guard and fallback do:
- One batch has NaN targets: its step is skipped.
- Five batches in a row have NaN targets: the run is rolled back.
- Late in the run one sample of each batch is 2^15 times as large. The others then underflow in FP8, and the layer is
  demoted to BF16.
"""

from __future__ import annotations

import resource
import sys
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from harness import Guard, Precision, Telemetry

STEPS, NAN, RUINED, LARGE = 120, 40, range(70, 75), range(90, 120)


def batch(step: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(256, 64, generator=torch.Generator().manual_seed(step))
    targets = inputs.roll(1, dims=1) * (float("nan") if step == NAN or step in RUINED else 1.0)
    inputs[0] *= 2.0**15 if step in LARGE else 1.0
    return inputs, targets


def main(recipe: str) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 64))

    # A wrapped optimizer makes `loss.backward()` and `optimizer.step()` do all that the recipe asks for.
    precision = Precision.from_recipe(recipe)
    model = precision.prepare(net.to(device))
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    optimizer = precision.wrap(adamw, max_grad_norm=1.0)
    scheduler = LinearLR(optimizer, 1.0, 0.1, STEPS)

    mlflow = find_spec("mlflow") is not None
    with Telemetry.for_precision(
        "runs/standard", precision, steps=STEPS, mlflow=mlflow
    ) as telemetry:
        # `streams`: the loop goes on with its next batch after a rollback, instead of going back in the data.
        guard = Guard.for_precision(
            precision, optimizer, keep=[scheduler], telemetry=telemetry, streams=True
        )
        last = torch.zeros(())
        for step in range(STEPS):
            inputs, targets = (each.to(device) for each in batch(step))
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            guard.end_step()
            last = loss.detach()

        # An evaluation leaves no trace in the FP8 state.
        inputs, targets = (each.to(device) for each in batch(STEPS))
        with precision.evaluating():
            validation = nn.functional.mse_loss(model(inputs), targets)
        telemetry.validation(guard.step, validation.item())

    demoted = ", ".join(precision.demoted) or "none"
    print(f"last loss {last.item()!r}, {guard.step} steps count, demoted: {demoted}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "fp8_hybrid")
