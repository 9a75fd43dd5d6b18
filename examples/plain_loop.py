"""Your own loop with harness.Precision. Run: python examples/plain_loop.py [recipe], from fp8_hybrid to fp32."""

from __future__ import annotations

import sys

import torch
from torch import nn

from harness import Precision


def main(recipe: str) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = nn.Linear(64, 64).to(device).requires_grad_(False)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)

    # The recipe is a ladder: the best of its rungs that this machine supports is taken.
    precision = Precision.from_recipe(recipe)
    model = precision.prepare(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    layers = ", ".join(precision.plan.fp8_layers()) or "none"
    print(f"{recipe} runs as {precision.plan.resolved}; FP8 layers: {layers}")

    for step in range(100):
        inputs = torch.randn(256, 64, device=device)
        with precision.context():
            loss = nn.functional.mse_loss(model(inputs), teacher(inputs))
        precision.backward(loss)
        # An update whose loss or gradients are not finite is skipped: then `was_applied` is False.
        outcome = precision.step(optimizer, max_grad_norm=1.0)
        optimizer.zero_grad()
        if step % 20 == 0 or step == 99:
            print(f"step {step:3d}  loss {loss.item():.4f}  applied {outcome.was_applied}")

    # What delayed scaling has come to: one line for each quantised tensor, none without FP8.
    if stats := precision.stats():
        for name, amax, scale in zip(stats.names, stats.amax, stats.scale, strict=True):
            print(f"{name:<14} amax {amax:9.3g}  scale {scale:9.3g}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "fp8_hybrid")
