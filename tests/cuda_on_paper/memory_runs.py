"""One small run on CPU tensors, fake or real ones, and how much memory it takes at most.

The estimate counts storages as they are made and freed. For a real run PyTorch's own CPU allocator says the same from
the other end: every allocation and release, temporaries inside of operations too (torch.profiler, profile_memory).
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from paper_driver import config_of, rung_of
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.capability.probe import MachineFacts
from harness.estimate.recorder import Recorder
from harness.estimate.trace import built
from harness.precision.recipe import load_recipe

_WIDE = {"vocab": 256, "dim": 512, "layers": 4, "heads": 8, "kv_heads": 8, "ffn": 1408}
_DEEP = {"vocab": 4096, "dim": 192, "layers": 8, "heads": 6, "kv_heads": 3, "ffn": 512}
# name -> (recipe, rung, model, samples in a micro-batch, micro-batches, tokens, optimizer)
RUNS: dict[str, tuple[str, str, dict[str, Any], int, int, int, str]] = {
    "bf16, weights": ("bf16", "autocast:bf16", _WIDE, 1, 1, 64, "adamw"),
    "bf16, activations": ("bf16", "autocast:bf16", _WIDE, 8, 2, 128, "adamw"),
    "fp32, activations": ("fp32", "autocast:fp32", _DEEP, 4, 2, 256, "sgd"),
    "fp16, deep": ("fp16_scaler", "autocast:fp16", _DEEP, 1, 2, 64, "adamw"),
    "native, weights": ("fp8_hybrid", "native:fp8", _WIDE, 1, 2, 64, "adamw"),
    "native, activations": ("fp8_hybrid", "native:fp8", _DEEP, 4, 1, 256, "adamw"),
    "bf16, recomputed": (
        "bf16",
        "autocast:bf16",
        _DEEP | {"recompute": "block"},
        4,
        2,
        256,
        "adamw",
    ),
    "native, in chunks": (
        "fp8_hybrid",
        "native:fp8",
        _DEEP | {"recompute": "mlp", "loss_chunk": 64},
        4,
        1,
        256,
        "sgd",
    ),
    "torchao, activations": ("fp8_dynamic", "torchao:fp8", _WIDE, 4, 1, 128, "sgd"),
}


def measure(argument: str) -> dict[str, Any]:
    """{run: bytes at the peak} for every run in RUNS. argument: "fake" or "real"."""
    torch.set_num_threads(1)
    os.environ["PATH"] = (
        ""  # no compiler: the fused CPU kernel reads addresses, which fakes have not
    )
    return {name: _peak(name, argument == "fake") for name in RUNS}


def _peak(name: str, fake: bool) -> dict[str, float]:
    recipe_name, rung, args, samples, batches, tokens, optimizer = RUNS[name]
    recipe = load_recipe(recipe_name)
    train = {"global_batch": samples * batches, "micro_batch": samples, "optimizer": optimizer}
    config = config_of(args, train=train, data={"context": tokens})
    recorder = Recorder("cpu")
    found: dict[str, float] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
        profiler = torch.profiler.profile(
            profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
        )
        with nullcontext() if fake else profiler:
            device, facts = torch.device("cpu"), MachineFacts()
            with (
                recorder,
                built(config, recipe, facts, device, rung_of(rung), batches, recorder) as made,
            ):
                for number in (1, 2, 3):
                    made.step(number, str(number))
                found["recorded"] = recorder.peak().bytes
                found["static"] = recorder.live
        if not fake:
            found["allocator"] = allocated(profiler)
    return found


def allocated(profiler: torch.profiler.profile) -> int:
    """The highest sum of what the CPU allocator gave and took back, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    sizes = [
        (event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"
    ]
    live = peak = 0
    for _, size in sorted(sizes, key=lambda item: item[0]):
        live += size
        peak = max(peak, live)
    return peak
