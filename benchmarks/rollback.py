"""A snapshot in memory and the way back from it, against a plain copy of the same bytes, interleaved.

    python -m benchmarks.rollback [--sizes 25 125] [--rounds 7] [--threads N] [--out FILE]

State: float32 parameters and AdamW's two moments of a model of that many million parameters. `take` copies the state
into a snapshot (buffers reused), `load` copies it back through TrainState; `memcpy` is torch's copy of one block as
large as the state. Ratios are medians over rounds, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.results_file import write_results
from harness.checkpoint.snapshots import Snapshots
from harness.core.state import TrainState
from harness.core.update import init_optimizer_state
from harness.engines.parts import ModelPart, OptimizerPart


def build_state(millions: int) -> TrainState:
    """A transformer-like model of about `millions` million parameters with AdamW's state, as a TrainState."""
    width = 512
    layers = max(1, round(millions * 1e6 / (12 * width * width)))
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
    model = nn.ModuleList(nn.Linear(into, out) for out, into in shapes)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    init_optimizer_state(optimizer)
    applied = torch.zeros(())
    return TrainState(
        {
            "model": ModelPart(model),
            "optimizer": OptimizerPart(dict(model.named_parameters()), optimizer, applied),
        }
    )


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(millions: int, rounds: int) -> dict[str, Any]:
    state = build_state(millions)
    tensors, _ = state.state_dict()
    size = sum(
        tensor.numel() * tensor.element_size()
        for part in tensors.values()
        for tensor in part.values()
    )
    block, other = torch.zeros(size // 4), torch.zeros(size // 4)
    snapshots = Snapshots(healthy_steps=1)
    first = seconds(lambda: snapshots.take(1, *state.state_dict()))
    snapshots.observe(1, True)
    snapshots.take(2, *state.state_dict())  # both buffers are there now
    takes, loads, copies = [], [], []
    for step in range(3, 3 + rounds):
        copies.append(seconds(lambda: other.copy_(block)))
        takes.append(seconds(lambda step=step: snapshots.take(step, *state.state_dict())))
        snapshots.observe(step, True)
        copies.append(seconds(lambda: other.copy_(block)))
        loads.append(seconds(lambda: state.load_state_dict(*snapshots.load())))
    plain = median(copies)
    return {
        "million parameters": millions,
        "bytes": size,
        "memcpy seconds": plain,
        "first take": first / plain,
        "take": [median(takes) / plain, min(takes) / plain, max(takes) / plain],
        "load": [median(loads) / plain, min(loads) / plain, max(loads) / plain],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[25, 125])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    results = [measure(size, given.rounds) for size in given.sizes]
    for row in results:
        name = f"{row['million parameters']}M parameters, {row['bytes'] / 1e6:.0f} MB"
        print(f"{name}, memcpy {row['memcpy seconds']:.3f} s")
        print(f"  first take {row['first take']:.2f} of it (its buffers are allocated then)")
        for name in ("take", "load"):
            print(
                f"  {name} {row[name][0]:.2f} of it (from {row[name][1]:.2f} to {row[name][2]:.2f})"
            )
    if given.out:
        write_results(given.out, "benchmarks.rollback", arguments, given.threads, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
