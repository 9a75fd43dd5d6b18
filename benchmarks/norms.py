"""What it costs that norms are summed in float64 (`core/health.py`): measured on a CPU, predicted for cards.

    python -m benchmarks.norms [--rounds 9] [--tokens 512] [--out FILE]

**Measured**, on one thread: the gradient norm of `gpt_125m` as it is taken, and the same in float32, in turns with the
rest of a training step in float32: forward and backward of `tokens` tokens, and fused AdamW.

**Predicted**, for each card with a datasheet. torch's CUDA kernel reads each element once, as it is stored, and makes a
float64 of it in a register: aten/src/ATen/native/cuda/ForeachReduceOp.cu, LpNormFunctor, where `_foreach_norm` with a
dtype accumulates in that dtype. No copy is made, so both norms read the same bytes. An element costs two operations of
float64, a conversion and a multiply-add, at the rates of "Throughput of Native Arithmetic Instructions" in NVIDIA's
CUDA C++ Programming Guide. Where they take longer than the read, they are the norm's time.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.monitors import spread
from benchmarks.rollback import seconds
from harness.capability.cards import CARDS, Card
from harness.core.config import load_config
from harness.core.files import write_json
from harness.core.health import grad_norm
from harness.models import build_model

# Compute capability -> float32 multiply-adds for each one in float64. Conversions to float64 are at least as fast.
FLOAT32_PER_FLOAT64 = {
    (7, 0): 2,
    (7, 5): 32,
    (8, 0): 2,
    (8, 6): 64,
    (8, 9): 64,
    (9, 0): 2,
    (10, 0): 2,
}
_OPERATIONS = 2


def predicted(card: Card, elements: int, element_bytes: int) -> dict[str, float]:
    """Milliseconds of both norms of `elements` elements at the datasheet's rates, and float64 over float32."""
    read = elements * element_bytes / card.bandwidth
    # A multiply-add is two FLOPs of the datasheet.
    rate = card.fp32 / 2 / FLOAT32_PER_FLOAT64[card.capability]
    arithmetic = _OPERATIONS * elements / rate
    slower = max(read, arithmetic)
    return {"float32 ms": 1e3 * read, "float64 ms": 1e3 * slower, "ratio": slower / read}


def norm_in_float32(params: Iterable[nn.Parameter]) -> Tensor:
    """The gradients' norm that a loop takes: `torch.nn.utils.get_total_norm`'s operations."""
    gradients = [param.grad for param in params if param.grad is not None]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2)))


def measured(tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of each part of a training step, and what float64 adds to the norm and to the step, round by round."""
    config = load_config("gpt_125m", [])
    torch.manual_seed(0)
    model = build_model(config.model)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-6, fused=True)
    inputs = torch.randint(config.model.args["vocab"], (1, tokens + 1))

    def forward_and_backward() -> None:
        model.zero_grad()
        model(inputs[:, :-1], inputs[:, 1:]).backward()

    # Backward first: the others need gradients.
    turns: dict[str, Callable[[], object]] = {
        "forward and backward": forward_and_backward,
        "norm in float64": lambda: grad_norm(params),
        "norm in float32": lambda: norm_in_float32(params),
        "AdamW": optimizer.step,
    }
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name, turn in turns.items():
            took = seconds(turn)
            # The first round allocates.
            if number:
                times[name].append(took)

    wide_norm = grad_norm(params).item()
    narrow = norm_in_float32(params).item()
    added: list[float] = []
    steps: list[float] = []
    updates: list[float] = []
    for backward, wide, usual, adamw in zip(*times.values(), strict=True):
        added.append(wide - usual)
        updates.append(usual + adamw)
        steps.append(backward + usual + adamw)
    return {
        "parameters": sum(param.numel() for param in params),
        "tensors": len(params),
        "tokens": tokens,
        "milliseconds": {name: 1e3 * median(each) for name, each in times.items()},
        "float64 over float32": spread(times["norm in float64"], times["norm in float32"]),
        "added, of norm and AdamW": spread(added, updates),
        "added, of a step": spread(added, steps),
        "error of float32": abs(narrow / wide_norm - 1),
    }


def text(found: Mapping[str, Any]) -> str:
    """The figures as lines."""
    row = found["measured"]
    lines = [
        f"{row['parameters'] / 1e6:.1f}M parameters in {row['tensors']} tensors, {row['tokens']} tokens a step"
    ]
    lines += [f"{name:24} {each:9.1f} ms" for name, each in row["milliseconds"].items()]
    for name in ("float64 over float32", "added, of norm and AdamW", "added, of a step"):
        each = row[name]
        lines.append(
            f"{name:24} {each['ratio']:9.4f} ({each['ratio_min']:.4f} to {each['ratio_max']:.4f})"
        )
    lines.append(f"the float32 norm is {row['error of float32']:.1e} off")
    lines.append("predicted, no card has run it; float32 values, then 16-bit ones:")
    for name, rows in found["predicted"].items():
        ratios = "  ".join(
            f"{each['float64 ms']:6.2f} ms over {each['float32 ms']:6.2f}: {each['ratio']:.2f}"
            for each in rows.values()
        )
        lines.append(f"{name:10} {ratios}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--out", type=Path, help="also write the figures there, as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    row = measured(options.tokens, options.rounds)
    found = {
        "measured": row,
        "predicted": {
            name: {
                each: predicted(card, row["parameters"], size)
                for each, size in (("float32", 4), ("16 bits", 2))
            }
            for name, card in CARDS.items()
        },
    }
    print(text(found))
    if options.out:
        about = {"processor": platform.machine(), "threads": 1, "torch": torch.__version__}
        command = f"python -m benchmarks.norms --rounds {options.rounds} --tokens {options.tokens}"
        write_json(options.out, {"command": command, "machine": about, **found})


if __name__ == "__main__":
    main()
