"""examples/standard_loop.py under Lightning: the same losses. Run: python examples/with_lightning.py [recipe]"""

from __future__ import annotations

import resource
import sys
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, Dataset

from harness import Precision

try:
    from lightning.pytorch import LightningModule, Trainer

    from harness.integrations.lightning import HarnessCallback, TrainerPrecision
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: in the project's folder: pip install -e '.[lightning]'")

STEPS, NAN, RUINED, LARGE = 120, 40, range(70, 75), range(90, 120)


class Batches(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(256, 64, generator=torch.Generator().manual_seed(step))
        targets = inputs.roll(1, dims=1) * (float("nan") if step == NAN or step in RUINED else 1.0)
        inputs[0] *= 2.0**15 if step in LARGE else 1.0
        return inputs, targets


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 64)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        self.last = loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        return loss

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[dict[str, object]]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)
        return [optimizer], [
            {"scheduler": LinearLR(optimizer, 1.0, 0.1, STEPS), "interval": "step"}
        ]


if __name__ == "__main__":
    torch.manual_seed(0)
    precision = Precision.from_recipe(sys.argv[1] if len(sys.argv) > 1 else "fp8_hybrid")
    # Guard and telemetry. The plugin does the rest: Lightning's own `precision` argument is left out.
    watch = HarnessCallback("runs/lightning", mlflow=find_spec("mlflow") is not None)
    trainer = Trainer(
        max_epochs=1, devices=1, gradient_clip_val=1.0, plugins=[TrainerPrecision(precision)], callbacks=[watch],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(model := Net(), DataLoader(Batches(), batch_size=None))
    print(f"last loss {model.last.item()!r}, demoted: {', '.join(precision.demoted) or 'none'}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
