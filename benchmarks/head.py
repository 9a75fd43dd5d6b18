"""What an FP8 head costs in loss, on a small GPT.

    python -m benchmarks.head [--seeds 4] [--steps 200]

Three runs a seed, from the same weights and on the same samples, bytes of Python's standard library:

  BF16 head               `fp8_hybrid` as shipped: the blocks in FP8, emulated on a CPU
  an ulp apart            the same, every weight one float32 ulp up: the effect of chance alone
  FP8 head                the same recipe with `layers.exclude_if_present: []`

The figure is the cross-entropy on held-out text after the last step, over that of the BF16 head of the same seed: the
mean over seeds with its 95% t interval. The record is written after every seed.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.intervals import t_interval
from benchmarks.results_file import write_results
from harness import Precision
from harness.data.text import standard_library
from harness.models.gpt import build
from harness.precision.recipe import Recipe, load_recipe

RESULTS = Path(__file__).resolve().parent / "results" / "head_cpu.json"
BF16, ULP, FP8 = "BF16 head", "an ulp apart", "FP8 head"
KINDS = (BF16, ULP, FP8)
CONTEXT, BATCH, HELD_OUT = 64, 8, 256
RATE, WARMUP = 3e-3, 20


def recipe_of(kind: str) -> Recipe:
    """`kind`: one of KINDS."""
    given = load_recipe("fp8_hybrid").model_dump()
    if kind == FP8:
        given["layers"]["exclude_if_present"] = []
    return Recipe.model_validate(given)


def texts() -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes that are held out, uint8."""
    documents = [each.content for each in standard_library().documents]
    split = len(documents) * 9 // 10
    train, held_out = b"".join(documents[:split]), b"".join(documents[split:])
    return (
        torch.frombuffer(bytearray(train), dtype=torch.uint8),
        torch.frombuffer(bytearray(held_out), dtype=torch.uint8),
    )


def windows(text: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 [count, CONTEXT], at random places of the text."""
    generator = torch.Generator().manual_seed(seed)
    begins = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    rows = text[begins + torch.arange(CONTEXT + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def train(
    kind: str, seed: int, steps: int, text: Tensor, held_out: Tensor
) -> tuple[float, list[str]]:
    """One run: its loss on the held-out text, and the layers that had left FP8 by then."""
    torch.manual_seed(seed)
    precision = Precision(recipe_of(kind))
    model = precision.prepare(build(vocab=256, dim=64, layers=2, heads=2, ffn=176))
    head = next(row for row in precision.plan.layers if row.module == "lm_head")
    assert (head.precision == "fp8") is (kind == FP8)
    if kind == ULP:
        with torch.no_grad():
            for each in model.parameters():
                each.copy_(torch.nextafter(each, torch.full_like(each, math.inf)))

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    for step in range(steps):
        warm = min(1.0, (step + 1) / WARMUP)
        optimizer.param_groups[0]["lr"] = RATE * warm * (1 - step / steps)
        with precision.context():
            loss = model(*windows(text, BATCH, 10_000 * seed + step))
        precision.backward(loss)
        precision.step(optimizer, max_grad_norm=1.0)
        optimizer.zero_grad()

    with torch.no_grad(), precision.context():
        found = model(*windows(held_out, HELD_OUT, 1))
    return found.item(), list(precision.demoted)


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows, and each kind's difference to the BF16 head as a share of its loss."""
    over: dict[str, Any] = {}
    for kind in (ULP, FP8):
        shares = [row["loss"][kind] / row["loss"][BF16] - 1 for row in rows]
        if len(shares) > 1:
            over[kind] = asdict(t_interval(shares))
    return {"over": over, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    text, held_out = texts()
    rows: list[dict[str, Any]] = []
    for seed in range(1, given.seeds + 1):
        row: dict[str, Any] = {"seed": seed, "steps": given.steps, "loss": {}, "left": {}}
        for kind in KINDS:
            loss, left = train(kind, seed, given.steps, text, held_out)
            row["loss"][kind], row["left"][kind] = loss, left
        rows.append(row)
        write_results(RESULTS, "benchmarks.head", None, 1, figures(rows))
        print(f"seed {seed}: {row['loss']} {row['left']}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
