"""A custom loss that overflows in fp16, and how that is caught. Run: python examples/unsafe_loss.py [recipe]

The penalty squares the model's output, which is fp16 under this recipe. From 256 on the square is over 65504, fp16's
largest value, and becomes infinite. No loss scale helps, since this happens in the forward pass. Each such update is
skipped, so the weights stay finite. After three in a row the recipe's fallback moves the whole run to bf16, which has
float32's range. With `output.float()` the same penalty is safe, and the run stays in fp16.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from harness import Precision

STEPS = 60


def unsafe(output: Tensor) -> Tensor:
    return (output * output).mean()


def safe(output: Tensor) -> Tensor:
    return output.float().square().mean()


def train(recipe: str, penalty: Callable[[Tensor], Tensor], device: str) -> None:
    torch.manual_seed(0)
    precision = Precision.from_recipe(recipe)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))
    model = precision.prepare(net.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    # The targets ask for outputs of 400, so the outputs grow past 256 as the model learns.
    inputs = torch.rand(64, 64, device=device)
    targets = torch.ones(64, 16, device=device)
    skipped, loss = 0, torch.zeros(())
    for step in range(1, STEPS + 1):
        with precision.context():
            output = model(inputs)
            loss = nn.functional.mse_loss(output.float() / 400, targets) + 1e-7 * penalty(output)
        precision.backward(loss)
        outcome = precision.step(optimizer, max_grad_norm=1.0)
        optimizer.zero_grad()
        if not outcome.was_applied:
            skipped += 1
            largest = output.max().item()
            print(
                f"  step {step}: loss {loss.item():g}, largest output {largest:.0f}: update skipped"
            )
        # The recipe's fallback has moved the run to another precision.
        if outcome.switch is not None:
            print(f"  step {step}: {outcome.switch.reason}")

    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    counts = f"{skipped} updates skipped, loss {loss.item():.4g}"
    print(f"{penalty.__name__}: {counts}, weights finite: {finite}")


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "fp16_scaler"
    for kind in (unsafe, safe):
        train(chosen, kind, "cuda" if torch.cuda.is_available() else "cpu")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory {peak:.2f} GiB (of the process)")
