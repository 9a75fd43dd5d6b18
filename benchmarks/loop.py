"""What a training loop costs beside the model: processor time of a step over that of a bare loop in torch.

    python -m benchmarks.loop [--sizes tiny 12M] [--precisions bf16 fp8] [--pairs 30] [--threads 1]

Every loop trains a shipped GPT of the same weights with the same fused AdamW, clipping at 1.0 and a learning rate that
changes at every step, on samples of one text:

  bare              autocast, backward, clip, step: nothing else. In FP8 the same Linears of the native backend, rolled
                    by its four calls, and no gate, judgement or record of anything
  accelerate        Accelerator(mixed_precision="bf16"): prepare, backward, clip_grad_norm_
  Lightning Fabric  Fabric(precision="bf16-mixed"): setup, backward, clip_gradients
  Precision         `harness.Precision` in a plain loop: context, backward, step
  own loop          `harness train`: monitors, journal, snapshots in memory, gate, seeds of each step

All take a turn of some steps in each round, and the order rotates by one from round to round.

  over bare  the median over rounds of a loop's processor time divided by that of the bare loop in the same round, with
             the smallest and the largest
  of all     the sums divided, so that what happens now and then (a snapshot, a sample of statistics) has its share
  ms more    the median of the differences, per step

The FP8 loops of others need a GPU. Nothing is written that outlives the command.
"""

from __future__ import annotations

import argparse
import gc
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.linear import backend_on
from benchmarks.monitors import machine, start, step
from harness import Precision
from harness.models.gpt import build

# Sizes of the shipped GPT, tokens of a step, and steps of a turn.
SIZES: dict[str, tuple[dict[str, Any], int, int]] = {
    "tiny": ({"dim": 64, "layers": 2, "heads": 2, "tied": False}, 256, 10),
    "12M": ({"dim": 384, "layers": 7, "heads": 6, "tied": False}, 512, 2),
}
RECIPES = {"bf16": "bf16", "fp8": "fp8_hybrid"}
LOOPS = ("bare", "accelerate", "Lightning Fabric", "Precision", "own loop")
LR, MAX_NORM = 1e-4, 1.0
NEEDED = {"accelerate": "accelerate", "Lightning Fabric": "lightning_fabric"}

Step = Callable[[], None]


def batches(tokens: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """What gives the next inputs and targets, int64 [samples, context], at random places of a text of bytes."""
    context = min(256, tokens)
    text = np.random.default_rng(0).integers(32, 127, 300_000, dtype=np.uint8)
    places = np.random.default_rng(1)

    def draw() -> tuple[Tensor, Tensor]:
        begins = places.integers(0, len(text) - context - 1, tokens // context)
        rows = torch.from_numpy(
            np.stack([text[at : at + context + 1] for at in begins]).astype(np.int64)
        )
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    return draw


def model_and_optimizer(size: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = build(**size)
    return model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that is another at every step, as a warm-up or a cosine is."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 + math.cos(step / 1e6))


def bare(size: dict[str, Any], tokens: int, precision: str) -> Step:
    model, optimizer = model_and_optimizer(size)
    rates, draw, count = schedule(optimizer), batches(tokens), 0
    backend = backend_on(model, "native", "fp8") if precision == "fp8" else None
    skip = torch.zeros(())

    def plain() -> None:
        inputs, targets = draw()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(inputs, targets)
        loss.backward()
        finish()

    def finish() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()

    def converted() -> None:
        nonlocal count
        assert backend is not None
        inputs, targets = draw()
        backend.begin_window(sample=count % 10 == 0)
        with backend.context():
            loss = model(inputs, targets)
        with backend.backward_context():
            loss.backward()
        backend.end_window(backend.amax(), skip, lambda values: values)
        count += 1
        finish()

    return plain if backend is None else converted


def accelerate(size: dict[str, Any], tokens: int) -> Step:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    original, stock = model_and_optimizer(size)
    model, optimizer, rates = accelerator.prepare(original, stock, schedule(stock))
    draw = batches(tokens)

    def step() -> None:
        inputs, targets = draw()
        accelerator.backward(model(inputs, targets))
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()

    return step


def fabric(size: dict[str, Any], tokens: int) -> Step:
    from lightning_fabric import Fabric  # pyright: ignore[reportMissingImports]

    lightning = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    original, stock = model_and_optimizer(size)
    rates = schedule(stock)
    model, optimizer = lightning.setup(original, stock)
    draw = batches(tokens)

    def step() -> None:
        inputs, targets = draw()
        lightning.backward(model(inputs, targets))
        lightning.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()

    return step


def precision_loop(size: dict[str, Any], tokens: int, recipe: str) -> Step:
    original, optimizer = model_and_optimizer(size)
    precision = Precision.from_recipe(recipe)
    model = precision.prepare(original)
    rates, draw = schedule(optimizer), batches(tokens)

    def step() -> None:
        inputs, targets = draw()
        with precision.context():
            loss = model(inputs, targets)
        precision.backward(loss)
        precision.step(optimizer, max_grad_norm=MAX_NORM)
        rates.step()
        optimizer.zero_grad()

    return step


def contenders(
    stack: ExitStack, name: str, precision: str
) -> tuple[dict[str, Step], dict[str, str]]:
    """The loops that can run, and why the others cannot."""
    size, tokens, _ = SIZES[name]
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
    run = start(stack, folder, size, tokens, guard=True, recipe=RECIPES[precision])
    steps = {
        "bare": bare(size, tokens, precision),
        "Precision": precision_loop(size, tokens, RECIPES[precision]),
        "own loop": lambda: step(run),
    }
    absent = {}
    for loop, make in (("accelerate", accelerate), ("Lightning Fabric", fabric)):
        package = NEEDED[loop]
        if find_spec(package) is None:
            absent[loop] = f"not installed: pip install {package.replace('_', '-')}"
        elif precision == "fp8":
            absent[loop] = "its FP8 needs a GPU"
        else:
            steps[loop] = make(size, tokens)
    return {loop: steps[loop] for loop in LOOPS if loop in steps}, absent


def take_turns(steps: Mapping[str, Step], pairs: int, each: int) -> dict[str, list[float]]:
    """Seconds of processor time of a step, per loop and round."""
    for one in steps.values():
        for _ in range(3):
            one()
    gc.collect()
    seconds: dict[str, list[float]] = {loop: [] for loop in steps}
    order = list(steps)
    for number in range(pairs):
        first = number % len(order)
        for loop in order[first:] + order[:first]:
            began = time.process_time()
            for _ in range(each):
                steps[loop]()
            seconds[loop].append((time.process_time() - began) / each)
    return seconds


def rows(seconds: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """The figures of each loop as a line of text."""
    lines = {}
    for loop, mine in seconds.items():
        over = [a / b for a, b in zip(mine, seconds["bare"], strict=True)]
        more = 1e3 * median(a - b for a, b in zip(mine, seconds["bare"], strict=True))
        spread = f"({min(over):.2f} - {max(over):.2f})"
        of_all = sum(mine) / sum(seconds["bare"])
        lines[loop] = (
            f"{1e3 * median(mine):9.2f} {median(over):10.3f} {spread:>15} {of_all:8.3f} {more:9.2f}"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--precisions", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    lines = []
    for name in given.sizes:
        for precision in given.precisions:
            with ExitStack() as stack:
                steps, absent = contenders(stack, name, precision)
                told = {**rows(take_turns(steps, given.pairs, SIZES[name][2])), **absent}
            lines += [f"{name:<5} {precision:<4}  {loop:<17} {told[loop]}" for loop in LOOPS]
    about = machine()
    print(
        f"{about['processor']}, {given.threads} thread(s), torch {about['torch']}, load {about['load_average'][0]:.1f}"
    )
    print(
        f"size  prec. {'loop':<17} {'ms a step':>9} {'over bare':>10} {'(spread)':>15} {'of all':>8} {'ms more':>9}"
    )
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
