"""examples/standard_loop.py under Hugging Face's Trainer: the same losses. Run: examples/with_trainer.py [recipe]"""

from __future__ import annotations

import resource
import sys
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import Dataset, SequentialSampler

from harness.integrations.transformers import PrecisionMixin
from harness.integrations.watch import Watch

try:
    import accelerate  # noqa: F401 (the Trainer does not train without it)
    from transformers import Trainer, TrainingArguments
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: in the project's folder: pip install -e '.[accelerate,hf]'")

STEPS, NAN, RUINED, LARGE = 120, 40, range(70, 75), range(90, 120)


class Batches(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        inputs = torch.randn(256, 64, generator=torch.Generator().manual_seed(step))
        targets = inputs.roll(1, dims=1) * (float("nan") if step == NAN or step in RUINED else 1.0)
        return {
            "x": torch.cat([inputs[:1] * 2.0 ** (15 * (step in LARGE)), inputs[1:]]),
            "labels": targets,
        }


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 64)
        )

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.last = nn.functional.mse_loss(self.net(x), labels)
        return {"loss": self.last}


class InOrder(PrecisionMixin, Trainer):
    # The Trainer shuffles, but the faults of standard_loop.py come at given steps: read in order.
    def _get_train_sampler(self, *_: object) -> SequentialSampler:
        return SequentialSampler(Batches())


if __name__ == "__main__":
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW((model := Net()).parameters(), lr=3e-3, fused=True)
    watch = Watch("runs/trainer", mlflow=find_spec("mlflow") is not None)
    trainer = InOrder(
        model, TrainingArguments("runs", max_steps=STEPS, per_device_train_batch_size=1, max_grad_norm=1.0,
                                 save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=40),
        data_collator=lambda items: items[0], train_dataset=Batches(), watch=watch,
        optimizers=(optimizer, LinearLR(optimizer, 1.0, 0.1, STEPS)),  # pyright: ignore
        precision=sys.argv[1] if len(sys.argv) > 1 else "fp8_hybrid",
    )  # fmt: skip
    trainer.train()
    demoted = ", ".join(trainer.harness.demoted) or "none"
    print(f"last loss {model.last.item()!r}, demoted: {demoted}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
