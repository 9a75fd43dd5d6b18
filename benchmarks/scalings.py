"""What other ways of scaling would lose on a small GPT, as it is and with one hot input channel.

    python -m benchmarks.scalings

The model has the sizes of configs/tiny.yaml, and trains on bytes of the guides in docs/. In the second run the first
input channel of one Linear is 2^14 from the first step on, and its weights stay zero (`benchmarks.outliers.hot`). Both
run with the fallback off, so that every layer stays in FP8. docs/guide/scaling.md names the figures that matter.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import outliers
from benchmarks.results_file import write_results
from harness import Precision
from harness.core.screen import say
from harness.models.gpt import GPT, build
from harness.precision.counterfactual import Comparison, Counterfactual, lines
from harness.precision.recipe import Recipe, load_recipe

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "scalings_cpu.json"
SIZES: dict[str, Any] = {
    "dim": 64,
    "layers": 2,
    "heads": 2,
    "kv_heads": 2,
    "ffn": 176,
    "tied": True,
}
HOT = "blocks.1.mlp.down"
CONTEXT = 64
BATCH = 4


def compare(model: GPT, text: Tensor, steps: int) -> Comparison:
    """Train for `steps` steps and measure each. text: uint8 [bytes]."""
    policy = load_recipe("fp8_hybrid").model_dump()
    policy["fallback"]["enabled"] = False
    precision = Precision(Recipe.model_validate(policy))
    model = precision.prepare(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    optimizer = precision.wrap(adamw)
    places = torch.Generator().manual_seed(0)
    with Counterfactual(model, every=1) as watch:
        for _ in range(steps):
            starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=places)
            tokens = text[starts + torch.arange(CONTEXT + 1)].long()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return watch.report()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    torch.set_num_threads(1)

    pages = sorted((ROOT / "docs" / "guide").glob("*.md"))
    written = b"".join(page.read_bytes() for page in pages)
    text = torch.frombuffer(bytearray(written), dtype=torch.uint8)
    results: dict[str, Any] = {}
    for name in ("as it is", "one hot channel"):
        torch.manual_seed(0)
        model = build(**SIZES) if name == "as it is" else outliers.hot(HOT, 1, 2.0**14, **SIZES)
        comparison = compare(model, text, given.steps)
        results[name] = comparison.as_json()
        say(f"\n{name}")
        for line in lines(comparison, most=8):
            say(line)
    write_results(given.out, "benchmarks.scalings", None, 1, results)


if __name__ == "__main__":
    main()
