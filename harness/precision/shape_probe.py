"""Keep layers in bf16 whose size FP8 slows down on the card at hand (`layers.probe` in a recipe).

FP8 pays for casting each operand and gains on the multiplication, so small layers lose. Below which size depends on
card, libraries and tokens. Rank 0 times each size once, and the times are kept in the user's cache folder.

    python -m harness.precision.shape_probe FOLDER

reads FOLDER/request.json, times the Linear layers that it asks for in bf16 and in FP8, and writes FOLDER/times.json.
This is a process of its own for two reasons. A timed layer leaves traces in global state (Transformer Engine's buffers,
random numbers, memory) that a training run must not inherit. And a kernel that fails takes the GPU context of its
process with it.

The file has two halves: the measuring, which runs in that process, and the decision (`probe_layers`), which runs in the
training process.
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
from harness.core.facts import LayerPlan
from harness.core.files import cache_dir, harness_version, read_json, with_this_package, write_json
from harness.core.protocols import PrecisionBackend
from harness.precision.backends.autocast import AutocastBackend
from harness.precision.backends.registry import BACKENDS, PLAIN
from harness.precision.convert import build_backend
from harness.precision.plan import NoFp8LayerError, Plan, make_plan
from harness.precision.recipe import LayersConfig, Recipe, Rung

Shape = tuple[int, int]

# ---- Measuring, in a process of its own

WARM_UPS, ROUNDS = 5, 20
# A window has costs that do not depend on the number of layers. This many layers share them, as in a model. Fewer if
# their weights would fill the memory.
_COPIES = 4
_MOST_WEIGHTS = 2**27


class Times(NamedTuple):
    """Seconds of one layer's forward and backward, the weight's cast to FP8 included."""

    bf16: float
    fp8: float


class Bench:
    """Some Linears of one size under one backend, and a window of training through them.

    shape: (out, in) features.
    tokens: rows of the input.
    rung: None is bf16 under autocast.
    """

    def __init__(
        self, shape: Shape, tokens: int, recipe: Recipe, rung: Rung | None, device: torch.device
    ) -> None:
        out, into = shape
        # As many as fit the limit on weights, but one at least.
        fitting = _MOST_WEIGHTS // (out * into)
        copies = max(1, min(_COPIES, fitting))
        self.model = nn.ModuleList()
        for _ in range(copies):
            self.model.append(nn.Linear(into, out, bias=False, device=device))
        self.backend: PrecisionBackend = AutocastBackend("bf16", device)
        if rung is not None:
            plan = make_plan(recipe, probe(), rung, [], self.model)
            self.backend = build_backend(plan, recipe, self.model, device)
        self.device = device
        # Inputs want gradients, as in a model: else backward would leave out the product for them.
        self._inputs: list[Tensor] = []
        self._grads: list[Tensor] = []
        for _ in self.model:
            x = torch.randn(tokens, into, device=device, dtype=torch.bfloat16)
            self._inputs.append(x.requires_grad_())
            self._grads.append(torch.randn(tokens, out, device=device, dtype=torch.bfloat16))

    def window(self) -> tuple[Any, Any]:
        """Train one window. Returns marks of its start and end, for `seconds`."""
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
        not_skipped = torch.zeros((), device=self.device)
        self.backend.end_window(self.backend.amax(), not_skipped, _same)
        return start, stop

    def seconds(self, marks: Sequence[tuple[Any, Any]]) -> float:
        """Median time of one layer in the windows that returned `marks`."""
        if self.device.type == "cuda":
            windows = [start.elapsed_time(stop) / 1e3 for start, stop in marks]
        else:
            windows = [stop - start for start, stop in marks]
        return statistics.median(windows) / len(self.model)


def contestants(
    shape: Shape, tokens: int, recipe: Recipe, rung: Rung, device: torch.device
) -> tuple[Bench, Bench]:
    """Layers of one size in bf16 and on the FP8 `rung`. The recipe's `fp8` section counts, its `layers` do not."""
    every_layer = LayersConfig(exclude_if_present=[], min_features=1)
    recipe = recipe.model_copy(update={"layers": every_layer})
    bf16 = Bench(shape, tokens, recipe, None, device)
    fp8 = Bench(shape, tokens, recipe, rung, device)
    return bf16, fp8


def measure(
    shape: Shape,
    tokens: int,
    recipe: Recipe,
    rung: Rung,
    device: torch.device,
) -> Times:
    """Time both contestants in turns, so that whatever slows the machine slows both.

    On a GPU nothing waits between the windows, so launches overlap with computing as they do in training.
    """
    benches = contestants(shape, tokens, recipe, rung, device)
    for bench in benches * WARM_UPS:
        bench.window()

    bf16, fp8 = benches
    in_bf16: list[tuple[Any, Any]] = []
    in_fp8: list[tuple[Any, Any]] = []
    for _ in range(ROUNDS):
        in_bf16.append(bf16.window())
        in_fp8.append(fp8.window())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Times(bf16.seconds(in_bf16), fp8.seconds(in_fp8))


def _mark(device: torch.device) -> Any:
    """A point in time: a CUDA event, or seconds on a CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _same(values: Tensor) -> Tensor:
    """Stands for the reduction over ranks: there is one."""
    return values


def main(folder: Path) -> None:
    """Time what FOLDER/request.json asks for.

    request.json: recipe, rung, shapes, tokens, device. times.json: [bf16, fp8] seconds for each shape.
    """
    request = json.loads((folder / "request.json").read_text())
    recipe = Recipe.model_validate(request["recipe"])
    rung = Rung.model_validate(request["rung"])
    device = torch.device(request["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    times: list[Times] = []
    for out, into in request["shapes"]:
        times.append(measure((out, into), request["tokens"], recipe, rung, device))
    write_json(folder / "times.json", times)


# ---- Deciding, in the training process

_TOKENS = 2048
# Every backend takes a number of tokens that is a multiple of it.
_MULTIPLE = 128
# The timing ends after this many seconds, and after this share of the time that the other ranks wait for it.
_LIMIT_SECONDS = 300
_LIMIT_SHARE = 0.8
_SLOWER = "slower in FP8 on"


def probe_layers(
    plan: Plan,
    recipe: Recipe,
    facts: MachineFacts,
    device: torch.device,
    tokens: int | None = None,
    earlier: Mapping[str, Any] | None = None,
    collective_timeout: float = math.inf,
) -> Plan:
    """`plan` with the layers that FP8 slows down moved to bf16, each with the measured ratio as its reason.

    Does nothing unless the recipe asks for it. Without a GPU or without FP8 it only adds a note.

    tokens: of one micro-batch, used unless the recipe has `layers.probe_tokens`.
    earlier: plan.json of the run that is resumed. Under the same rung its choice is kept, since FP8 state belongs to
        layers.
    collective_timeout: seconds that the other ranks wait for rank 0. Sizes that are not timed by then stay in FP8.

    Collective: rank 0 measures for all. Raises NoFp8LayerError if FP8 would slow down every layer.
    """
    if not recipe.layers.probe:
        return plan
    # Layers of one size take the same time, so each size is timed once.
    fp8 = [row.shape for row in plan.layers if row.precision == "fp8"]
    shapes = sorted({(out, into) for out, into in fp8})
    if tier_of(facts)[0] is Tier.CPU or not shapes:
        why = "it times GPU kernels, and this is an emulation on a CPU"
        if not shapes:
            why = "this rung has no FP8"
        return replace(plan, notes=(*plan.notes, f"layers.probe does nothing here: {why}"))
    if earlier and earlier.get("resolved") == plan.resolved:
        note = "layers.probe: not timed again, as chosen when this run began"
        return keep_out(plan, recipe, _reasons_in(earlier), note)

    # FP8 time over bf16 time for each size; 0 (FP8 is kept) on the other ranks and for what could not be timed.
    wanted = recipe.layers.probe_tokens or tokens or _TOKENS
    tokens = math.ceil(wanted / _MULTIPLE) * _MULTIPLE
    ratios = [0.0] * len(shapes)
    note = "layers.probe: timed by rank 0"
    if world_rank() == 0:
        limit = min(_LIMIT_SECONDS, _LIMIT_SHARE * collective_timeout)
        times, note = times_of(shapes, tokens, recipe, plan.rung, facts, device, limit)
        for index, shape in enumerate(shapes):
            if shape in times:
                bf16, fp8 = times[shape]
                ratios[index] = fp8 / bf16

    # All ranks decide by the same numbers: FP8 state belongs to layers, so their plans must be equal.
    mine = torch.tensor(ratios, dtype=torch.float32, device=device)
    agreed = dict(zip(shapes, max_over_ranks(mine).tolist(), strict=True))
    reasons = slower(agreed, facts.card(device.index), tokens)
    return keep_out(plan, recipe, reasons, note)


def slower(ratios: Mapping[Shape, float], card: str, tokens: int) -> dict[Shape, str]:
    """The sizes that are not faster in FP8, each with the reason for the plan. ratios: FP8 time over bf16 time."""
    reasons: dict[Shape, str] = {}
    for shape, ratio in ratios.items():
        if ratio >= 1.0:
            reasons[shape] = f"{_SLOWER} {card}: {ratio:.2f}x of bf16 ({tokens} tokens)"
    return reasons


def keep_out(
    plan: Plan,
    recipe: Recipe,
    reasons: Mapping[Shape, str],
    note: str,
) -> Plan:
    """`plan` with the FP8 layers of those sizes in bf16. Raises NoFp8LayerError if none is left in FP8."""
    rows: list[LayerPlan] = []
    for row in plan.layers:
        if row.precision == "fp8" and row.shape in reasons:
            reason = reasons[row.shape[0], row.shape[1]]
            row = replace(row, precision="bf16", backend=PLAIN, reason=reason)
        rows.append(row)
    if not any(row.precision == "fp8" for row in rows):
        what = "FP8 makes no layer of this model faster"
        listed: list[str] = []
        for (out, into), reason in reasons.items():
            listed.append(f"{out}x{into}: {reason}")
        why = "; ".join(listed[:5])
        fix = "the recipe bf16 is faster here; with layers.probe: false the run trains in FP8 all the same"
        raise NoFp8LayerError(Problem(what, f"recipe {recipe.name}", why, fix))
    return replace(plan, layers=tuple(rows), notes=(*plan.notes, note))


def times_of(
    shapes: Sequence[Shape],
    tokens: int,
    recipe: Recipe,
    rung: Rung,
    facts: MachineFacts,
    device: torch.device,
    limit: float = _LIMIT_SECONDS,
) -> tuple[dict[Shape, Times], str]:
    """The times of each shape that could be timed, from the cache or timed now; and a note on both.

    limit: most seconds that the timing may take.
    """
    # Only sizes that no earlier run on such a card has timed.
    path = cache_file(recipe, rung, facts, device)
    times, damage = _read(path)
    missing = [shape for shape in shapes if _name(shape, tokens) not in times]
    failure = ""
    if missing:
        timed, failure = _time(missing, tokens, recipe, rung, device, limit)
        for shape, seconds in timed.items():
            times[_name(shape, tokens)] = seconds
        if timed:
            failure += _write(path, times)

    # The answer is for this model's sizes alone: the file may hold others, of earlier models.
    found: dict[Shape, Times] = {}
    for shape in shapes:
        name = _name(shape, tokens)
        if name in times:
            found[shape] = times[name]
    fresh = sum(shape in found for shape in missing)
    cached = len(found) - fresh
    card = facts.card(device.index)
    note = f"layers.probe on {card}: {fresh} sizes timed, {cached} from {path}"
    return found, note + damage + failure


def cache_file(
    recipe: Recipe,
    rung: Rung,
    facts: MachineFacts,
    device: torch.device,
) -> Path:
    """The file that times are kept in: one for each card, torch, backend version and `fp8` section."""
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
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    return cache_dir() / f"shape_times-{digest[:16]}.json"


def _name(shape: Shape, tokens: int) -> str:
    return f"{shape[0]}x{shape[1]}, {tokens} tokens"


def _reasons_in(plan: Mapping[str, Any]) -> dict[Shape, str]:
    """The sizes that an earlier plan.json kept out because FP8 was slower, with their reasons."""
    found: dict[Shape, str] = {}
    layers = plan.get("layers")
    for row in layers if isinstance(layers, list | tuple) else ():
        match row:
            case {"reason": str(reason), "shape": [int(out), int(into)]}:
                if reason.startswith(_SLOWER):
                    found[out, into] = reason
            case _:
                pass
    return found


def _read(path: Path) -> tuple[dict[str, Times], str]:
    """What the cache holds; nothing, and a remark, if it is damaged."""
    if not path.exists():
        return {}, ""
    times: dict[str, Times] = {}
    try:
        for name, (bf16, fp8) in read_json(path).items():
            times[name] = Times(float(bf16), float(fp8))
            if not min(times[name]) > 0:
                raise ValueError("times must be positive")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return {}, f"; ignored the damaged {path} ({error})"
    return times, ""


def _write(path: Path, times: Mapping[str, Times]) -> str:
    """Write the cache file whole. Returns a remark if that fails, else an empty text."""
    try:
        # A folder of its own: two runs may end their timing at once.
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            written = Path(work) / path.name
            write_json(written, times)
            written.replace(path)
    except OSError as error:
        return f"; not remembered: {error}"
    return ""


def _time(
    shapes: Sequence[Shape],
    tokens: int,
    recipe: Recipe,
    rung: Rung,
    device: torch.device,
    limit: float,
) -> tuple[dict[Shape, Times], str]:
    """Time `shapes` in another process, for at most `limit` seconds.

    If that fails, returns none of them and a remark: they stay in FP8.
    """
    request = {
        "recipe": recipe.model_dump(),
        "rung": rung.model_dump(),
        "shapes": shapes,
        "tokens": tokens,
        "device": str(device),
    }
    # A process of its own: one that crashes or hangs costs the timing, and not the run.
    with tempfile.TemporaryDirectory(prefix="shape-times-") as folder:
        write_json(Path(folder) / "request.json", request)
        command = [sys.executable, "-m", "harness.precision.shape_probe", folder]
        try:
            subprocess.run(
                command,
                check=True,
                capture_output=True,
                timeout=limit,
                env=with_this_package(),
            )
            times = json.loads((Path(folder) / "times.json").read_text())
        except (OSError, subprocess.SubprocessError) as error:
            return {}, f"; {len(shapes)} sizes could not be timed and stay in FP8: {_reason(error)}"
    both = [Times(bf16, fp8) for bf16, fp8 in times]
    return dict(zip(shapes, both, strict=True)), ""


def _reason(error: Exception) -> str:
    """What the process said last. Tracebacks and errors of this project indent all lines but the one with the error."""
    output = getattr(error, "stderr", None) or b""
    for line in reversed(output.decode(errors="replace").splitlines()):
        if line[:1].strip():
            return line[:300]
    return str(error)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
