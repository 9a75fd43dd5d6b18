"""Do models with zero-initialised parts keep their layers in FP8?

    python -m benchmarks.zero_init

A GPT whose output projections begin at zero, the same GPT frozen with low-rank updates (LoRA, `b` from zero), and a
ConvNet whose residual branches begin at zero, under `fp8_hybrid` as shipped: 40 steps of AdamW at each rate, with a
warm-up of 20 steps and without. For each the layers that left FP8. One seed: what is tried is the start, not chance.
"""

from __future__ import annotations

import argparse
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness import Precision
from harness.core.files import write_json
from harness.models.gpt import build
from harness.precision.recipe import load_recipe

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "zero_init_cpu.json"
STEPS, RATES, WARMUPS = 40, (3e-4, 3e-3, 1e-2, 3e-2), (0, 20)
DIM, VOCAB, CONTEXT = 64, 64, 32
Loss = Callable[[nn.Module, int], Tensor]


class LowRank(nn.Module):
    """A frozen Linear and an update b(a(x)) of rank 16, `b` from zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 16, bias=False)
        self.b = nn.Linear(16, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return self.base(x) + self.b(self.a(x))


class Branch(nn.Module):
    """A block as ConvNeXt has it: x + down(gelu(up(conv(x)))) over channels, `down` from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, 7, padding=3, groups=DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, positions, DIM] to the same shape."""
        mixed = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(nn.functional.gelu(self.up(mixed)))


def gpt() -> nn.Module:
    """Two blocks, output projections from zero."""
    model = build(vocab=VOCAB, dim=DIM, layers=2, heads=2, ffn=176, tied=True)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(("attn.out", "mlp.down")):
            nn.init.zeros_(module.weight)
    return model


def lora() -> nn.Module:
    """The GPT, frozen, with a low-rank update of every Linear in its blocks."""
    model = build(vocab=VOCAB, dim=DIM, layers=2, heads=2, ffn=176, tied=True)
    model.requires_grad_(False)
    names = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and "blocks" in name]
    for name in names:
        parent, _, last = name.rpartition(".")
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear)
        setattr(model.get_submodule(parent), last, LowRank(base))
    return model


def convnet() -> nn.Module:
    """Three blocks between two Linears."""
    return nn.Sequential(nn.Linear(DIM, DIM), Branch(), Branch(), Branch(), nn.Linear(DIM, DIM))


def loss_of_tokens(model: nn.Module, step: int) -> Tensor:
    """Next tokens: each is the fixed successor of the one before, seven times in ten."""
    coin = torch.Generator().manual_seed(step)
    successor = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))
    tokens = torch.randint(VOCAB, (8, CONTEXT + 1), generator=coin)
    follows = torch.rand(tokens.shape, generator=coin) < 0.7
    for place in range(1, CONTEXT + 1):
        tokens[:, place] = torch.where(follows[:, place], successor[tokens[:, place - 1]], tokens[:, place])
    return model(tokens[:, :-1], tokens[:, 1:])


def loss_of_signals(model: nn.Module, step: int) -> Tensor:
    """A function of neighbours in a signal [batch, positions, DIM]."""
    x = torch.randn(8, CONTEXT, DIM, generator=torch.Generator().manual_seed(step))
    return nn.functional.mse_loss(model(x).float(), (x + x.roll(1, dims=1)).sin())


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "GPT, output projections from zero": (gpt, loss_of_tokens),
    "LoRA on a frozen GPT": (lora, loss_of_tokens),
    "ConvNet, residual branches from zero": (convnet, loss_of_signals),
}


def train(name: str, rate: float, warmup: int, steps: int = STEPS) -> dict[str, Any]:
    """One run: a row with its first and last loss and the layers that left FP8, each with the step before."""
    torch.manual_seed(1)
    build_model, loss_of = MODELS[name]
    precision = Precision(load_recipe("fp8_hybrid"))
    model = precision.prepare(build_model())
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=rate, fused=True)
    left: dict[str, int] = {}
    losses: list[float] = []
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, step / max(1, warmup))
        with precision.context():
            loss = loss_of(model, step)
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()
        losses.append(round(loss.item(), 4))
        for layer in precision.demoted:
            left.setdefault(layer, step)
    return {"model": name, "rate": rate, "warmup": warmup, "first": losses[0], "last": losses[-1], "left": left}


def main() -> None:
    """Run all, print a line each, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    rows: list[dict[str, Any]] = []
    for name in MODELS:
        for rate in RATES:
            for warmup in WARMUPS:
                row = train(name, rate, warmup)
                rows.append(row)
                said = f"loss {row['first']} to {row['last']}, left: {row['left'] or 'none'}"
                print(f"{name:<38} rate {rate:<7g} warm-up {warmup:<3}{said}", flush=True)
    print(f"{sum(bool(row['left']) for row in rows)} of {len(rows)} runs with a layer that left FP8")
    machine = f"{platform.machine()} CPU, one thread, torch {torch.__version__}"
    write_json(RESULTS, {"command": "python -m benchmarks.zero_init", "machine": machine, "steps": STEPS, "runs": rows})


if __name__ == "__main__":
    main()
