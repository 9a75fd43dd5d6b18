"""Time Linear layers of given sizes in bf16 and in FP8, in a process of its own.

    python -m harness.precision.shape_timing FOLDER

reads FOLDER/request.json and writes FOLDER/times.json. A process of its own, because a timed layer leaves traces in
global state (Transformer Engine's buffers, random numbers, memory) that a training run must not inherit, and because a
kernel that fails takes its process's GPU context with it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.capability.probe import probe
from harness.core.files import write_json
from harness.core.protocols import PrecisionBackend
from harness.precision.backends.autocast import AutocastBackend
from harness.precision.engine import build_backend
from harness.precision.plan import make_plan
from harness.precision.recipe import LayersConfig, Recipe, Rung

Shape = tuple[int, int]

WARM_UPS, ROUNDS = 5, 20
# What a window costs once, however many layers it has, is shared by this many; fewer where they would fill the memory.
_COPIES = 4
_MOST_WEIGHTS = 2**27


class Times(NamedTuple):
    """Seconds of one layer's forward and backward, the weight's cast to FP8 included."""

    bf16: float
    fp8: float


class Bench:
    """Some Linears of one size under one backend, and a window of training through them.

    shape: (out, in) features. tokens: rows of the input. rung: None is bf16 under autocast.
    """

    def __init__(self, shape: Shape, tokens: int, recipe: Recipe, rung: Rung | None, device: torch.device) -> None:
        out, into = shape
        copies = max(1, min(_COPIES, _MOST_WEIGHTS // (out * into)))
        self.model = nn.ModuleList(nn.Linear(into, out, bias=False, device=device) for _ in range(copies))
        self.backend: PrecisionBackend = AutocastBackend("bf16", device)
        if rung is not None:
            plan = make_plan(recipe, probe(), rung, [], self.model)
            self.backend = build_backend(plan, recipe, self.model, device)
        self.device = device
        self._inputs = [
            torch.randn(tokens, into, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in self.model
        ]
        self._grads = [torch.randn(tokens, out, device=device, dtype=torch.bfloat16) for _ in self.model]

    def window(self) -> tuple[Any, Any]:
        """Train one window; marks before its forward and after its backward, for `seconds`."""
        for parameter in (*self.model.parameters(), *self._inputs):
            parameter.grad = None
        self.backend.begin_window(sample=False)
        start = _mark(self.device)
        with self.backend.context():
            outputs = [layer(x) for layer, x in zip(self.model, self._inputs, strict=True)]
        with self.backend.backward_context():
            torch.autograd.backward(outputs, self._grads)
        stop = _mark(self.device)
        self.backend.end_micro_batch(_same)
        self.backend.end_window(self.backend.amax(), torch.zeros((), device=self.device), _same)
        return start, stop

    def seconds(self, marks: Sequence[tuple[Any, Any]]) -> float:
        """Median time of one layer in the windows that left `marks`."""
        if self.device.type == "cuda":
            return statistics.median(start.elapsed_time(stop) / 1e3 for start, stop in marks) / len(self.model)
        return statistics.median(stop - start for start, stop in marks) / len(self.model)


def contestants(shape: Shape, tokens: int, recipe: Recipe, rung: Rung, device: torch.device) -> tuple[Bench, Bench]:
    """Layers of that size in bf16 and on the FP8 `rung`. The recipe's `fp8` section counts, its `layers` do not."""
    everything = recipe.model_copy(update={"layers": LayersConfig(exclude_if_present=[], min_features=1)})
    return Bench(shape, tokens, everything, None, device), Bench(shape, tokens, everything, rung, device)


def measure(shape: Shape, tokens: int, recipe: Recipe, rung: Rung, device: torch.device) -> Times:
    """The contestants in turns, so that whatever slows the machine slows both.

    On a GPU nothing waits between the windows, so that launches overlap with computing as far as they do in training.
    """
    benches = contestants(shape, tokens, recipe, rung, device)
    for bench in benches * WARM_UPS:
        bench.window()
    marks = [[bench.window() for bench in benches] for _ in range(ROUNDS)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    bf16, fp8 = (bench.seconds(rounds) for bench, rounds in zip(benches, zip(*marks, strict=True), strict=True))
    return Times(bf16, fp8)


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _same(values: Tensor) -> Tensor:
    return values


def main(folder: Path) -> None:
    """request.json: recipe, rung, shapes, tokens, device; times.json: [bf16, fp8] seconds for each shape."""
    request = json.loads((folder / "request.json").read_text())
    recipe, rung = Recipe.model_validate(request["recipe"]), Rung.model_validate(request["rung"])
    device = torch.device(request["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    times = [measure((out, into), request["tokens"], recipe, rung, device) for out, into in request["shapes"]]
    write_json(folder / "times.json", times)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
