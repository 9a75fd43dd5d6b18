"""Keep layers in bf16 whose size FP8 slows down on the card at hand (`layers.probe` in a recipe).

FP8 pays a cast for each operand and gains on the multiplication, so there is a size under which it loses; where that
is depends on card, libraries and tokens. Each size is timed once, by rank 0, and remembered in the user's cache folder.

    python -m harness.precision.shape_probe FOLDER

reads FOLDER/request.json, times the Linear layers that it asks for in bf16 and in FP8, and writes FOLDER/times.json. A
process of its own, because a timed layer leaves traces in global state (Transformer Engine's buffers, random numbers,
memory) that a training run must not inherit, and because a kernel that fails takes its process's GPU context with it.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.capability.cards import Tier, tier_of
from harness.capability.probe import MachineFacts, probe
from harness.core.collectives import max_over_ranks, world_rank
from harness.core.errors import Problem
from harness.core.files import cache_dir, harness_version, read_json, with_this_package, write_json
from harness.core.protocols import PrecisionBackend
from harness.precision.backends.autocast import AutocastBackend
from harness.precision.backends.registry import BACKENDS, PLAIN
from harness.precision.convert import build_backend
from harness.precision.plan import NoFp8LayerError, Plan, make_plan
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

    def __init__(
        self, shape: Shape, tokens: int, recipe: Recipe, rung: Rung | None, device: torch.device
    ) -> None:
        out, into = shape
        copies = max(1, min(_COPIES, _MOST_WEIGHTS // (out * into)))
        self.model = nn.ModuleList(
            nn.Linear(into, out, bias=False, device=device) for _ in range(copies)
        )
        self.backend: PrecisionBackend = AutocastBackend("bf16", device)
        if rung is not None:
            plan = make_plan(recipe, probe(), rung, [], self.model)
            self.backend = build_backend(plan, recipe, self.model, device)
        self.device = device
        self._inputs = [
            torch.randn(tokens, into, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in self.model
        ]
        self._grads = [
            torch.randn(tokens, out, device=device, dtype=torch.bfloat16) for _ in self.model
        ]

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
            return statistics.median(start.elapsed_time(stop) / 1e3 for start, stop in marks) / len(
                self.model
            )
        return statistics.median(stop - start for start, stop in marks) / len(self.model)


def contestants(
    shape: Shape, tokens: int, recipe: Recipe, rung: Rung, device: torch.device
) -> tuple[Bench, Bench]:
    """Layers of that size in bf16 and on the FP8 `rung`. The recipe's `fp8` section counts, its `layers` do not."""
    everything = recipe.model_copy(
        update={"layers": LayersConfig(exclude_if_present=[], min_features=1)}
    )
    return Bench(shape, tokens, everything, None, device), Bench(
        shape, tokens, everything, rung, device
    )


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
    bf16, fp8 = (
        bench.seconds(rounds)
        for bench, rounds in zip(benches, zip(*marks, strict=True), strict=True)
    )
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
    times = [
        measure((out, into), request["tokens"], recipe, rung, device)
        for out, into in request["shapes"]
    ]
    write_json(folder / "times.json", times)


Seconds = tuple[float, float]

_TOKENS = 2048
_MULTIPLE = 128  # of tokens that every backend takes
_LIMIT_SECONDS = 300
_SLOWER = "slower in FP8 on"


def probe_layers(
    plan: Plan,
    recipe: Recipe,
    facts: MachineFacts,
    device: torch.device,
    tokens: int | None = None,
    earlier: Mapping[str, Any] | None = None,
) -> Plan:
    """`plan`, with the layers that FP8 slows down moved to bf16 and named with the measured ratio.

    Does nothing unless the recipe asks for it, and no more than a note where there is no GPU or no FP8. tokens: of one
    micro-batch, used unless the recipe has `layers.probe_tokens`. earlier: plan.json of the run that is resumed: under
    the same rung its choice is taken over, since FP8 state belongs to layers. Collective: rank 0 measures for all.

    Raises NoFp8LayerError if FP8 would slow down every layer.
    """
    if not recipe.layers.probe:
        return plan
    shapes = sorted({(row.shape[0], row.shape[1]) for row in plan.layers if row.precision == "fp8"})
    if tier_of(facts)[0] is Tier.CPU or not shapes:
        why = (
            "this rung has no FP8"
            if not shapes
            else "it times GPU kernels, and this is an emulation on a CPU"
        )
        return replace(plan, notes=(*plan.notes, f"layers.probe does nothing here: {why}"))
    if earlier and earlier.get("resolved") == plan.resolved:
        note = "layers.probe: not timed again, as chosen when this run began"
        return keep_out(plan, recipe, _reasons_in(earlier), note)
    tokens = math.ceil((recipe.layers.probe_tokens or tokens or _TOKENS) / _MULTIPLE) * _MULTIPLE
    ratios, note = [0.0] * len(shapes), "layers.probe: timed by rank 0"
    if world_rank() == 0:
        times, note = times_of(shapes, tokens, recipe, plan.rung, facts, device)
        ratios = [times[shape][1] / times[shape][0] if shape in times else 0.0 for shape in shapes]
    agreed = max_over_ranks(torch.tensor(ratios, dtype=torch.float32, device=device)).tolist()
    card = facts.card(device.index)
    return keep_out(
        plan, recipe, slower(dict(zip(shapes, agreed, strict=True)), card, tokens), note
    )


def slower(ratios: Mapping[Shape, float], card: str, tokens: int) -> dict[Shape, str]:
    """The sizes that are not faster in FP8, each with the reason for the plan. ratios: FP8 time over bf16 time."""
    return {
        shape: f"{_SLOWER} {card}: {ratio:.2f}x of bf16 ({tokens} tokens)"
        for shape, ratio in ratios.items()
        if ratio >= 1.0
    }


def keep_out(plan: Plan, recipe: Recipe, reasons: Mapping[Shape, str], note: str) -> Plan:
    """`plan` with the FP8 layers of those sizes in bf16. Raises NoFp8LayerError if none is left."""
    rows = tuple(
        replace(row, precision="bf16", backend=PLAIN, reason=reasons[row.shape[0], row.shape[1]])
        if row.precision == "fp8" and row.shape in reasons
        else row
        for row in plan.layers
    )
    if not any(row.precision == "fp8" for row in rows):
        fix = "the recipe bf16 is faster here; with layers.probe: false the run trains in FP8 all the same"
        why = "; ".join(
            f"{out}x{into}: {reason}" for (out, into), reason in list(reasons.items())[:5]
        )
        raise NoFp8LayerError(
            Problem("FP8 makes no layer of this model faster", f"recipe {recipe.name}", why, fix)
        )
    return replace(plan, layers=rows, notes=(*plan.notes, note))


def times_of(
    shapes: Sequence[Shape],
    tokens: int,
    recipe: Recipe,
    rung: Rung,
    facts: MachineFacts,
    device: torch.device,
) -> tuple[dict[Shape, Seconds], str]:
    """(bf16, FP8) seconds of each shape, as far as they can be had, from the cache or timed now; a note on both."""
    path = cache_file(recipe, rung, facts, device)
    known, damage = _read(path)
    missing = [shape for shape in shapes if _name(shape, tokens) not in known]
    failure = ""
    if missing:
        timed, failure = _time(missing, tokens, recipe, rung, device)
        known |= {_name(shape, tokens): times for shape, times in timed.items()}
        if timed:
            failure += _write(path, known)
    found = {shape: known[name] for shape in shapes if (name := _name(shape, tokens)) in known}
    fresh = sum(shape in found for shape in missing)
    note = f"layers.probe on {facts.card(device.index)}: {fresh} sizes timed, {len(found) - fresh} from {path}"
    return found, note + damage + failure


def cache_file(recipe: Recipe, rung: Rung, facts: MachineFacts, device: torch.device) -> Path:
    """Where times are remembered: a file for each card, torch, backend version and `fp8` section."""
    library = facts.libraries.get(BACKENDS[rung.backend].library)
    own = library.version if library else harness_version()
    key = (
        facts.card(device.index),
        facts.torch_version,
        facts.torch_cuda,
        rung.name,
        own,
        recipe.fp8.model_dump_json(),
    )
    return cache_dir() / f"shape_times-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.json"


def _name(shape: Shape, tokens: int) -> str:
    return f"{shape[0]}x{shape[1]}, {tokens} tokens"


def _reasons_in(plan: Mapping[str, Any]) -> dict[Shape, str]:
    """Sizes that a written plan kept out for their time."""
    found: dict[Shape, str] = {}
    layers = plan.get("layers")
    for row in layers if isinstance(layers, list | tuple) else ():
        match row:
            case {"reason": str(reason), "shape": [int(out), int(into)]} if reason.startswith(
                _SLOWER
            ):
                found[out, into] = reason
    return found


def _read(path: Path) -> tuple[dict[str, Seconds], str]:
    """What the cache holds; nothing, and a remark, if it is damaged."""
    if not path.exists():
        return {}, ""
    try:
        known = {name: (float(bf16), float(fp8)) for name, (bf16, fp8) in read_json(path).items()}
        if not all(seconds > 0 for times in known.values() for seconds in times):
            raise ValueError("times must be positive")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return {}, f"; ignored the damaged {path} ({error})"
    return known, ""


def _write(path: Path, known: Mapping[str, Seconds]) -> str:
    try:
        with tempfile.TemporaryDirectory(
            dir=path.parent
        ) as work:  # of its own: two runs may end their timing together
            write_json(Path(work) / path.name, known)
            (Path(work) / path.name).replace(path)
    except OSError as error:
        return f"; not remembered: {error}"
    return ""


def _time(
    shapes: Sequence[Shape], tokens: int, recipe: Recipe, rung: Rung, device: torch.device
) -> tuple[dict[Shape, Seconds], str]:
    """Time `shapes` in another process; without them and with a remark if that fails: they stay in FP8."""
    request = {
        "recipe": recipe.model_dump(),
        "rung": rung.model_dump(),
        "shapes": shapes,
        "tokens": tokens,
        "device": str(device),
    }
    with tempfile.TemporaryDirectory(prefix="shape-times-") as folder:
        write_json(Path(folder) / "request.json", request)
        command = [sys.executable, "-m", "harness.precision.shape_probe", folder]
        try:
            subprocess.run(
                command,
                check=True,
                capture_output=True,
                timeout=_LIMIT_SECONDS,
                env=with_this_package(),
            )
            times = json.loads((Path(folder) / "times.json").read_text())
        except (OSError, subprocess.SubprocessError) as error:
            detail = (getattr(error, "stderr", None) or b"").decode(errors="replace").splitlines()
            # The lines of a traceback and of our own errors are indented, but for the one that says what it was.
            why = next((line[:300] for line in reversed(detail) if line[:1].strip()), str(error))
            return {}, f"; {len(shapes)} sizes could not be timed and stay in FP8: {why}"
    return {shape: (bf16, fp8) for shape, (bf16, fp8) in zip(shapes, times, strict=True)}, ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
