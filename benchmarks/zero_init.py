"""Do models with zero-initialised parts keep their layers in FP8?

    python -m benchmarks.zero_init [--seeds 6]

*starts*: a GPT whose output projections begin at zero; one whose queries and head do, too, as under muP; the first one
frozen with low-rank updates (LoRA, `b` from zero, alpha / r of 1 or 16); a ConvNet whose residual branches begin at
zero, and the same with torch's own initialisation as a control. Each trains under `fp8_hybrid` as shipped, 40 steps of
AdamW at each rate, with a warm-up of 20 steps and without. The record has the layers that left FP8. There is one seed:
the study tries starts, not chance.

*harm*: each start in which a layer left, again with so many seeds, for 100 steps: in bf16, in bf16 from weights one
float32 ulp apart (the effect of chance alone), in FP8 without the fallback, and with it. Mean loss
of steps 21 to 40 and of the last 20 over that of bf16 of the same seed: geometric mean and 95% t interval.
"""

from __future__ import annotations

import argparse
import logging
import math
import platform
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.intervals import t_interval
from harness import Precision
from harness.core.files import write_json
from harness.models.gpt import build
from harness.precision.recipe import Recipe, load_recipe

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "zero_init_cpu.json"
STEPS, LONG, RATES, WARMUPS = 40, 100, (3e-4, 3e-3, 1e-2, 3e-2), (0, 20)
DIM, VOCAB, CONTEXT = 64, 64, 32
Loss = Callable[[nn.Module, int], Tensor]
Row = dict[str, Any]


class LowRank(nn.Module):
    """A frozen Linear and an update factor * b(a(x)) of rank 16, `b` from zero. factor: LoRA's alpha / r."""

    def __init__(self, base: nn.Linear, factor: float) -> None:
        super().__init__()
        self.base, self.factor = base, factor
        self.a = nn.Linear(base.in_features, 16, bias=False)
        self.b = nn.Linear(16, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return self.base(x) + self.factor * self.b(self.a(x))


class Branch(nn.Module):
    """A block as ConvNeXt has it: x + down(gelu(up(conv(x)))) over channels. zero: `down` begins at zero."""

    def __init__(self, zero: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, 7, padding=3, groups=DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        if zero:
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


def mup_gpt() -> nn.Module:
    """As `gpt`, with queries and a head of its own from zero."""
    model = build(vocab=VOCAB, dim=DIM, layers=2, heads=2, ffn=176, tied=False)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(("attn.out", "mlp.down", "lm_head")):
            nn.init.zeros_(module.weight)
        elif isinstance(module, nn.Linear) and name.endswith("attn.qkv"):
            nn.init.zeros_(module.weight[:DIM])  # the rows of the queries
    return model


def lora(factor: float = 1.0) -> nn.Module:
    """The GPT, frozen, with a low-rank update of every Linear in its blocks."""
    model = build(vocab=VOCAB, dim=DIM, layers=2, heads=2, ffn=176, tied=True)
    model.requires_grad_(False)

    # Collected before any is replaced: the walk must not meet the new Linears.
    names: list[str] = []
    for name, each in model.named_modules():
        if isinstance(each, nn.Linear) and "blocks" in name:
            names.append(name)
    for name in names:
        parent, _, last = name.rpartition(".")
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear)
        setattr(model.get_submodule(parent), last, LowRank(base, factor))
    return model


def convnet(zero: bool = True) -> nn.Module:
    """Three blocks between two Linears."""
    return nn.Sequential(
        nn.Linear(DIM, DIM), *(Branch(zero) for _ in range(3)), nn.Linear(DIM, DIM)
    )


def loss_of_tokens(model: nn.Module, step: int) -> Tensor:
    """Next tokens: each is the fixed successor of the one before, seven times in ten."""
    coin = torch.Generator().manual_seed(step)
    successor = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))
    tokens = torch.randint(VOCAB, (8, CONTEXT + 1), generator=coin)
    follows = torch.rand(tokens.shape, generator=coin) < 0.7
    for place in range(1, CONTEXT + 1):
        expected = successor[tokens[:, place - 1]]
        tokens[:, place] = torch.where(follows[:, place], expected, tokens[:, place])
    return model(tokens[:, :-1], tokens[:, 1:])


def loss_of_signals(model: nn.Module, step: int) -> Tensor:
    """A function of neighbours in a signal [batch, positions, DIM]."""
    x = torch.randn(8, CONTEXT, DIM, generator=torch.Generator().manual_seed(step))
    return nn.functional.mse_loss(model(x).float(), (x + x.roll(1, dims=1)).sin())


CONTROL = "ConvNet, nothing from zero"
MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "GPT, output projections from zero": (gpt, loss_of_tokens),
    "GPT, queries and head from zero, too": (mup_gpt, loss_of_tokens),
    "LoRA on a frozen GPT": (lora, loss_of_tokens),
    "LoRA on a frozen GPT, alpha / r of 16": (lambda: lora(16.0), loss_of_tokens),
    "ConvNet, residual branches from zero": (convnet, loss_of_signals),
    CONTROL: (lambda: convnet(zero=False), loss_of_signals),
}


KINDS = ("bf16", "bf16, an ulp apart", "FP8 without the fallback", "fallback")


def recipe_of(kind: str) -> Recipe:
    """`kind`: one of KINDS."""
    if kind.startswith("bf16"):
        return load_recipe("bf16")
    given = load_recipe("fp8_hybrid").model_dump()
    given["fallback"]["enabled"] = kind == "fallback"
    return Recipe.model_validate(given)


def train(
    name: str, rate: float, warmup: int, steps: int = STEPS, kind: str = "fallback", seed: int = 1
) -> tuple[list[float], dict[str, int]]:
    """One run: the loss of every step, and the layers that left FP8, each with the step before."""
    torch.manual_seed(seed)
    build_model, loss_of = MODELS[name]
    precision = Precision(recipe_of(kind))
    model = precision.prepare(build_model())
    if kind == "bf16, an ulp apart":
        # Every weight one float32 ulp up: what differs then is chance alone.
        with torch.no_grad():
            for each in model.parameters():
                each.copy_(torch.nextafter(each, torch.full_like(each, math.inf)))
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=rate, fused=True
    )
    left: dict[str, int] = {}
    losses: list[float] = []
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, step / max(1, warmup))
        with precision.context():
            loss = loss_of(model, 1000 * (seed - 1) + step)
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
        for layer in precision.demoted:
            left.setdefault(layer, step)
    return losses, left


def starts() -> list[Row]:
    """Every model, rate and warm-up with the fallback: first and last loss, and the layers that left."""
    rows: list[Row] = []
    for name in MODELS:
        for rate in RATES:
            for warmup in WARMUPS:
                losses, left = train(name, rate, warmup)
                first, last = round(losses[0], 4), round(losses[-1], 4)
                row = {"model": name, "rate": rate, "warmup": warmup}
                rows.append(row | {"first": first, "last": last, "left": left})
                said = f"loss {first} to {last}, left: {left or 'none'}"
                print(f"{name:<38} rate {rate:<7g} warm-up {warmup:<3}{said}", flush=True)
    return rows


def harm(name: str, rate: float, warmup: int, seeds: int) -> Row:
    """One start in all KINDS: the losses of each seed, and their ratios to bf16's."""
    # Train every kind with every seed.
    losses: dict[str, list[Row]] = {kind: [] for kind in KINDS}
    for seed in range(1, seeds + 1):
        for kind in KINDS:
            course, left = train(name, rate, warmup, LONG, kind, seed)
            early = round(mean(course[20:40]), 4)
            late = round(mean(course[LONG - 20 : LONG]), 4)
            found = {"early": early, "late": late, "largest": round(max(course), 4), "left": left}
            losses[kind].append(found)
            print(f"{name}, rate {rate:g}, seed {seed}, {kind}: {found}", flush=True)

    # Ratios to bf16 of the same seed. Their logarithms have the mean: a geometric mean treats 2 and 1/2 alike.
    over: Row = {}
    for kind in KINDS[1:]:
        for moment in ("early", "late"):
            pairs = zip(losses[kind], losses["bf16"], strict=True)
            found = t_interval([math.log(a[moment] / b[moment]) for a, b in pairs])
            ratios = [round(math.exp(x), 3) for x in (found.mean, found.low, found.high)]
            over.setdefault(kind, {})[moment] = ratios
    print(f"{name}, rate {rate:g}: over bf16 {over}", flush=True)
    return {"model": name, "rate": rate, "warmup": warmup, "over bf16": over, "losses": losses}


def main() -> None:
    """Run all, print a line each, write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=6, help="of each start that is run again")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    rows = starts()
    lost = [row for row in rows if row["left"]]
    print(f"{len(lost)} of {len(rows)} runs with a layer that left FP8")
    found = [harm(row["model"], row["rate"], row["warmup"], given.seeds) for row in lost]
    machine = f"{platform.machine()} CPU, one thread, torch {torch.__version__}"
    record = {
        "command": f"python -m benchmarks.zero_init --seeds {given.seeds}",
        "machine": machine,
        "steps": STEPS,
    }
    write_json(RESULTS, record | {"runs": rows, "harm": found})


if __name__ == "__main__":
    main()
