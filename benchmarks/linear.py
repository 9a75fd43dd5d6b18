"""FP8 emulation on a CPU: forward and backward of one Linear, against bf16, fp32 and torchao's emulation.

    python benchmarks/linear.py [--rounds 9] [--threads N] [--depth 4] [--out benchmarks/results/linear_cpu.json]

Contenders take turns within each round, so that a busy machine slows all of them; a ratio is the median over rounds of
(contender / bf16 of the same mode, eager or compiled, in the same round), its spread the smallest and largest. A turn
is as many training windows as fit into some 0.1 s. A window goes through a chain of Linears and ends with the update of
scales, which costs the same for one layer as for many; times are per Linear. `bf16` is what the bf16 recipe runs: fp32
parameters under autocast. Compiled contenders compile the chain into one graph, as `engine.compile: blocks` does with a
block; torchao's is torchao alone, without the hooks by which our backend measures its amaxes: those do not compile.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.capability.probe import probe
from harness.core.files import write_json
from harness.core.protocols import PrecisionBackend
from harness.precision.backends import native_kernel
from harness.precision.convert import build_backend
from harness.precision.plan import make_plan
from harness.precision.recipe import TIERS, Recipe, Rung

CPU = torch.device("cpu")
APPLY = torch.zeros(())
TURN_SECONDS = 0.1
COMPILED = ", compiled"
# contender -> whose time it is divided by
CONTENDERS = {
    "bf16": "bf16",
    "native fp8": "bf16",
    "native fp8, no kernel": "bf16",
    "torchao fp8": "bf16",
    "fp32": "bf16",
    "bf16, compiled": "bf16, compiled",
    "native fp8, compiled": "bf16, compiled",
    "torchao fp8, compiled": "bf16, compiled",
}
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")

Turn = Callable[[], None]


class Chain(nn.Module):
    """`depth` Linears in a row, all of the same size."""

    def __init__(self, features: int, depth: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(
            nn.Linear(features, features, bias=False) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, features] -> the same shape."""
        for linear in self.linears:
            x = linear(x)
        return x


def backend_on(model: nn.Module, backend: str, precision: str) -> PrecisionBackend:
    """Convert `model` in place to one rung."""
    rung = Rung.model_validate({"backend": backend, "precision": precision, "tiers": list(TIERS)})
    recipe = Recipe.model_validate({"name": "benchmark", "ladder": [rung.model_dump()]})
    return build_backend(make_plan(recipe, probe(), rung, [], model), recipe, model, CPU)


def contestant(name: str, model: Chain) -> PrecisionBackend:
    """Convert `model` to what `name` says."""
    kind = name.removesuffix(COMPILED)
    if name == "torchao fp8, compiled":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
        backend = backend_on(nn.Sequential(nn.Linear(16, 16)), "autocast", "bf16")
    elif kind.startswith("native"):
        backend = backend_on(model, "native", "fp8")
        if kind.endswith("no kernel"):
            backend.slot_buffers.kernel = None  # type: ignore[attr-defined]
    elif kind.startswith("torchao"):
        backend = backend_on(model, "torchao", "fp8")
    else:
        backend = backend_on(model, "autocast", kind)
    if name.endswith(COMPILED):
        model.compile(fullgraph=True)
    return backend


def window(
    backend: PrecisionBackend, model: nn.Module, x: torch.Tensor, grad: torch.Tensor
) -> None:
    """One optimizer step's forward and backward, FP8 state included."""
    model.zero_grad()
    x.grad = None
    backend.begin_window(sample=False)
    with backend.context():
        out = model(x)
    with backend.backward_context():
        out.backward(grad.to(out.dtype))
    backend.end_window(backend.amax(), APPLY, lambda values: values)


def contenders(features: int, tokens: int, depth: int) -> dict[str, Turn]:
    """Name -> one window, all on the same values."""
    torch._dynamo.reset()  # another size is another benchmark, not a second variant that compiles for any size
    turns: dict[str, Turn] = {}
    for name in CONTENDERS:
        torch.manual_seed(0)
        model = Chain(features, depth)
        # In bf16, as the layer before would hand it over; autocast of fp32 inputs would be the same for everyone.
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        x = torch.randn(tokens, features).to(dtype).requires_grad_()
        grad = torch.randn(tokens, features).to(dtype)
        backend = contestant(name, model)
        turns[name] = lambda backend=backend, model=model, x=x, grad=grad: window(
            backend, model, x, grad
        )
    return turns


def timed(turn: Turn, repeats: int) -> float:
    """Seconds of one window, averaged over a turn."""
    start = time.perf_counter()
    for _ in range(repeats):
        turn()
    return (time.perf_counter() - start) / repeats


def measure(features: int, tokens: int, depth: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds and ratio to its baseline of every contender at one size."""
    turns = contenders(features, tokens, depth)
    repeats = {
        name: max(1, round(TURN_SECONDS / min(timed(turn, 1) for _ in range(4))))
        for name, turn in turns.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            seconds[name].append(timed(turn, repeats[name]))
    rows = {}
    for name, mine in seconds.items():
        ratios = [a / b for a, b in zip(mine, seconds[CONTENDERS[name]], strict=True)]
        rows[name] = {
            "milliseconds": 1e3 * statistics.median(mine) / depth,
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
    return rows


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    info = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = info.get("flags", "").split()
    return {
        "cpu": info.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "flags": {flag: flag in flags for flag in CPU_FLAGS},
        "load_average": list(os.getloadavg()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": native_kernel.load()[1],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="rounds per size, at least 5 (default 9)"
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=4, help="Linears in a row (default 4)")
    parser.add_argument("--features", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument(
        "--threads", type=int, default=0, help="torch threads (default: torch's own choice)"
    )
    parser.add_argument("--out", type=Path, help="also write the figures there, as JSON")
    options = parser.parse_args(arguments)
    if options.rounds < 5:
        parser.error("--rounds must be at least 5: a median of fewer says little")
    if options.threads:
        torch.set_num_threads(options.threads)
    about = machine()
    print(f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}, {about['kernel']}")
    print(
        f"milliseconds per Linear ({options.depth} in a row), forward + backward, {options.tokens} tokens"
    )
    print(
        f"ratio to bf16 of the same mode: median over {options.rounds} rounds (smallest - largest)"
    )
    results = {}
    for features in options.features:
        results[str(features)] = rows = measure(
            features, options.tokens, options.depth, options.rounds
        )
        for name, row in rows.items():
            spread = f"({row['ratio_min']:.3f} - {row['ratio_max']:.3f})"
            print(
                f"{features:6d}  {name:24s} {row['milliseconds']:9.2f} ms   {row['ratio']:6.3f}  {spread}"
            )
    if options.out:
        command = "python benchmarks/linear.py " + " ".join(
            sys.argv[1:] if arguments is None else arguments
        )
        about["load_average_after"] = list(os.getloadavg())
        write_json(
            options.out,
            {
                "command": command.strip(),
                "machine": about,
                "tokens": options.tokens,
                "depth": options.depth,
                "rounds": options.rounds,
                "features": results,
            },
        )


if __name__ == "__main__":
    main()
