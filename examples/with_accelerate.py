"""examples/standard_loop.py with accelerate: the same losses. Run: python examples/with_accelerate.py [recipe]"""

from __future__ import annotations

import resource
import sys
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, Dataset

from harness import Precision
from harness.integrations.accelerate import prepare
from harness.integrations.watch import Watch

try:
    from accelerate import Accelerator
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: in the project's folder: pip install -e '.[accelerate]'")

STEPS, NAN, RUINED, LARGE = 120, 40, range(70, 75), range(90, 120)


class Batches(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(256, 64, generator=torch.Generator().manual_seed(step))
        targets = inputs.roll(1, dims=1) * (float("nan") if step == NAN or step in RUINED else 1.0)
        inputs[0] *= 2.0**15 if step in LARGE else 1.0
        return inputs, targets


def main(recipe: str) -> None:
    torch.manual_seed(0)
    accelerator, precision = Accelerator(), Precision.from_recipe(recipe)
    net = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 64))
    adamw = torch.optim.AdamW(net.parameters(), lr=3e-3, fused=True)

    # In place of accelerator.prepare(...): the model is prepared for the recipe before accelerate wraps it.
    model, optimizer, batches, scheduler = prepare(
        accelerator, precision, net, adamw, DataLoader(Batches(), batch_size=None),
        LinearLR(adamw, 1.0, 0.1, STEPS), max_grad_norm=1.0,
    )  # fmt: skip

    # Guard and telemetry for a loop of accelerate's.
    with Watch("runs/accelerate", mlflow=find_spec("mlflow") is not None) as watch:
        watch.begin(
            precision, [optimizer.optimizer], [scheduler.scheduler], max_grad_norm=1.0, steps=STEPS
        )
        for inputs, targets in batches:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            watch.step_ended()
    print(f"last loss {loss.item()!r}, demoted: {', '.join(precision.demoted) or 'none'}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "fp8_hybrid")
