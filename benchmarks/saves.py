"""What a checkpoint costs the training, against a plain copy of the state in memory.

    python -m benchmarks.saves [--sizes 25 125] [--rounds 5] [--steps 4] [--threads 1] [--busy 0] [--out FILE]

A model of so many million parameters trains (AdamW, fp32, one linear stack; the loop is the step alone), first some
steps without a save, then as many with one save at their beginning, in turn; each round has one of both.

  stall       (wall time with the save - without) / saves over `memcpy`, torch's copy of one block as large as the state
              into memory that is already allocated
  begin       the call alone, for which the next step waits. The first save is shown apart, as its memory was reserved
              while the run started
  background  how long the thread took from there to the committed, verified checkpoint while training went on
  waited for  how long a save takes that training waits for

With `--busy N`, N other processes use a core all the time. Figures are medians over rounds, with the smallest and the
largest. `--folder` decides which disk is measured.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.results_file import write_results
from benchmarks.rollback import build_state, seconds
from harness.checkpoint.policy import Retention
from harness.checkpoint.saver import Saver
from harness.checkpoint.staging import Staging
from harness.checkpoint.store import Store
from harness.core.config import TrainConfig
from harness.core.state import TrainState, state_bytes
from harness.engines.parts import ModelPart, OptimizerPart
from harness.optim.optimizers import optimizer_bytes


class Training:
    """A step of forward, backward and AdamW on a stack of Linears of the state."""

    def __init__(self, state: TrainState, tokens: int) -> None:
        self.state = state
        part, optimizer = state.parts["model"], state.parts["optimizer"]
        assert isinstance(part, ModelPart)
        assert isinstance(optimizer, OptimizerPart)
        self.layers = [module for module in part.model.modules() if isinstance(module, nn.Linear)]
        self.optimizer = optimizer.optimizer
        self.inputs = {
            layer.in_features: torch.randn(tokens, layer.in_features) for layer in self.layers
        }

    def steps(self, count: int) -> None:
        for _ in range(count):
            for layer in self.layers:  # each on its own: no activations to hold
                layer(self.inputs[layer.in_features]).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)


def measure(millions: int, rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    state = build_state(millions)
    model = state.parts["model"]
    assert isinstance(model, ModelPart)
    tensors, _ = state.state_dict()
    size = sum(
        tensor.numel() * tensor.element_size()
        for part in tensors.values()
        for tensor in part.values()
    )
    staging = Staging()
    staging.reserve(state_bytes(model.model, optimizer_bytes(model.model, TrainConfig())))
    store = Store(folder)
    saver = Saver(store, Retention(store, 2).prune, staging)
    training = Training(state, tokens=256)
    training.steps(2)
    block, other = torch.zeros(size // 4), torch.zeros(size // 4)
    other.copy_(block)
    waited = Saver(store, Retention(store, 2).prune)
    without = 0.0
    begins, stalls, copies, written, synchronous = [], [], [], [], []

    def save_then_train(step: int) -> None:
        begins.append(seconds(lambda: saver.begin(step, *state.state_dict(), {})))
        training.steps(steps)

    for number in range(1, rounds + 1):
        copies.append(seconds(lambda: other.copy_(block)))
        without = seconds(lambda: training.steps(steps))
        stalls.append(seconds(lambda number=number: save_then_train(2 * number)) - without)
        while not (done := saver.finished()):
            training.steps(1)
        written += [saved.seconds for saved in done]
        waited.begin(2 * number + 1, *state.state_dict(), {})
        synchronous += [saved.seconds for saved in waited.finished()]
    plain = median(copies)
    return {
        "million parameters": millions,
        "bytes": size,
        "memcpy seconds": plain,
        "first begin": begins[0] / plain,
        "first stall": stalls[0] / plain,
        "begin": spread(begins[1:], plain),
        "stall": spread(stalls[1:], plain),
        "background seconds": median(written),
        "seconds waited for": median(synchronous),
        "background over waited for": spread(
            [a / b for a, b in zip(written, synchronous, strict=True)], 1.0
        ),
        "step seconds": without / steps,
        "steps": steps,
        "rounds": rounds,
    }


@contextmanager
def others(count: int) -> Iterator[None]:
    """Processes that use a core all the time."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def spread(values: list[float], unit: float) -> list[float]:
    """Median, smallest and largest, in `unit`."""
    return [median(values) / unit, min(values) / unit, max(values) / unit]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[25, 125])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--busy", type=int, default=0, help="other processes that want a core")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the checkpoints go for the time [default: a temporary one]",
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    results = []
    for size in given.sizes:
        folder = Path(tempfile.mkdtemp(prefix="saves-", dir=given.folder))
        try:
            with others(given.busy):
                results.append(measure(size, given.rounds, given.steps, folder))
        finally:
            shutil.rmtree(folder)
    for row in results:
        size = f"{row['million parameters']}M parameters, {row['bytes'] / 1e6:.0f} MB"
        print(f"{size}, memcpy {row['memcpy seconds']:.3f} s")
        print(f"  first save: begin {row['first begin']:.2f} of it, stall {row['first stall']:.2f}")
        for name in ("begin", "stall"):
            print(
                f"  {name} {row[name][0]:.2f} of it (from {row[name][1]:.2f} to {row[name][2]:.2f})"
            )
        ratio, low, high = row["background over waited for"]
        print(
            f"  in the background {row['background seconds']:.1f} s; a step {row['step seconds']:.2f} s"
        )
        print(
            f"  waited for {row['seconds waited for']:.1f} s; background over it {ratio:.2f} ({low:.2f} to {high:.2f})"
        )
    if given.out:
        write_results(given.out, "benchmarks.saves", arguments, given.threads, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
