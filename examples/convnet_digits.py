"""A ConvNet on scikit-learn's digits, in your own loop under fp16. Run: python examples/convnet_digits.py [recipe]"""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch
from torch import nn

from harness import Precision

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: pip install scikit-learn")

STEPS, BATCH, HELD_OUT = 150, 64, 297


def main(recipe: str) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits: Any = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32, device=device)
    labels = torch.tensor(digits.target, device=device)

    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    precision = Precision.from_recipe(recipe)
    # No FP8 layer in here: an FP8 recipe takes its next rung.
    model = precision.prepare(net.to(device))
    print(f"{recipe} runs as {precision.plan.resolved}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

    # Under fp16 `backward` scales the loss and `step` unscales the gradients. The first steps may overflow and be
    # skipped, until the loss scale has found its range.
    for step in range(1, STEPS + 1):
        chosen = torch.randint(HELD_OUT, len(labels), (BATCH,), device=device)
        with precision.context():
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        precision.backward(loss)
        outcome = precision.step(optimizer, max_grad_norm=5.0)
        optimizer.zero_grad()
        if step % 30 == 0:
            scale = outcome.loss_scale.item()
            applied = outcome.was_applied
            print(f"step {step} loss {loss.item():.4f} applied {applied} loss scale {scale:g}")

    # The first digits were never drawn above.
    model.eval()
    with torch.no_grad(), precision.context():
        predicted = model(images[:HELD_OUT]).argmax(1)
    accuracy = (predicted == labels[:HELD_OUT]).float().mean().item()
    print(f"accuracy {accuracy:.1%} of {HELD_OUT} digits held out")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory {peak:.2f} GiB (of the process)")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "fp16_scaler")
