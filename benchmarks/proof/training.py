"""Rows that train on the trainer's own path: step times, the cost of monitoring, and that no step waits for the card.

The model is a slice of Llama-3-8B on bytes: 8 of its layers at its width. On a card that cannot hold two copies of the
state, the width is a half or a quarter. The contenders of a row take turns in one process. So whatever slows down the
machine slows down both, and a ratio compares times of the same round.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.proof.registry import Answer, NotHere, Task
from benchmarks.started import start_run
from harness.core.config import GuardConfig, RunConfig
from harness.core.errors import ConfigError, MachineError, is_out_of_memory, one_line
from harness.core.timing import spread, wait
from harness.measure.contender import Contender
from harness.precision.backends.registry import BACKENDS
from harness.precision.recipe import TIERS, Recipe, load_recipe
from harness.run import next_step
from harness.tracking.journal import JOURNAL, read_rows

GIB = 2**30
NEVER = 10**6
# Bytes a parameter, with AdamW on fp32 weights: weight, gradient and two moments of 4 bytes each.
STATE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Size:
    """One model and the tokens of a step.

    context: tokens of a sample.
    args: `model.args` of the config.
    samples: of a step.
    micro_batch: samples of a forward.
    """

    name: str
    context: int
    args: Mapping[str, int]
    samples: int = 1
    micro_batch: int = 1

    @property
    def parameters(self) -> int:
        """Number of the model's parameters, with embedding and head."""
        dim, ffn, vocab = self.args["dim"], self.args["ffn"], self.args["vocab"]
        width = dim // self.args["heads"] * (self.args["heads"] + 2 * self.args["kv_heads"])
        blocks = self.args["layers"] * (dim * (width + dim + 3 * ffn) + 2 * dim)
        matrices = 1 if self.args.get("tied") else 2
        return blocks + matrices * vocab * dim + dim


def llama(dim: int, context: int, layers: int = 8) -> Size:
    """Llama-3-8B's proportions (heads of 128, a quarter as many for k and v, ffn 3.5 dim) at another width."""
    heads = dim // 128
    args = {
        "vocab": 256,
        "dim": dim,
        "layers": layers,
        "heads": heads,
        "kv_heads": heads // 4,
        "ffn": dim * 7 // 2,
    }
    return Size(f"{layers} layers of width {dim}, {context} tokens", context, args)


SIZES = (llama(4096, 4096), llama(2048, 4096), llama(1024, 2048))
_TOY_ARGS = {"vocab": 256, "dim": 64, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 176}
TOY = Size("2 layers of width 64, 32 tokens", 32, _TOY_ARGS)
SMALL = llama(512, 256, layers=2)


def long(size: Size, micro_batch: int) -> Size:
    """Four samples a step of `size`."""
    name = f"{size.name} x 4 in micro-batches of {micro_batch}"
    return replace(size, name=name, samples=4, micro_batch=micro_batch)


def wide(size: Size, vocab: int, loss_chunk: int) -> Size:
    """A larger vocabulary for `size`, with one matrix for embedding and head."""
    args = {**size.args, "vocab": vocab, "tied": True, "loss_chunk": loss_chunk}
    return replace(size, name=f"{size.name}, vocabulary {vocab} (tied)", args=args)


# By `harness estimate`, 45.8 GiB in FP8 and 48.8 in bf16 where a forward has all four samples; the other contender's
# weights and moments are 19.5 GiB. So two fit an H100 of 80 GB without recompute.
LONG = (long(SIZES[0], 4), long(SIZES[0], 1), long(SIZES[1], 4), long(SIZES[2], 4))
# With one matrix 39.2 GiB in FP8 and 40.0 in bf16, and 25.4 GiB of the other contender. With two, as Llama has,
# 45.9 and 31.2 GiB would leave no reserve.
VOCABULARY = tuple(wide(size, 128_256, 512) for size in SIZES)


def sizes(
    task: Task, copies: float, candidates: Sequence[Size] = SIZES, toy: Size = TOY
) -> Sequence[Size]:
    """The sizes of which `copies` states fit into the card's free memory, largest first; at least the smallest size.

    toy: the only size of a rehearsal.
    """
    if task.rehearsal:
        return (toy,)
    free = torch.cuda.mem_get_info(task.device)[0]
    fitting = [size for size in candidates if copies * STATE_BYTES * size.parameters <= free]
    return fitting or candidates[-1:]


def recipe_of(backend: str, *, fuse: bool = False, **fp8: Any) -> Recipe:
    """The shipped recipe whose first rung has `backend` ("16 bit", or one with FP8), with only that rung.

    fuse: value of `layers.fuse`.
    """
    if backend == "16 bit":
        return load_recipe("bf16")
    base = load_recipe("fp8_dynamic" if backend == "torchao" else "fp8_hybrid").model_dump()
    base["ladder"] = [{"backend": backend, "precision": "fp8", "tiers": list(TIERS)}]
    layers = {**base["layers"], "fuse": fuse}
    return Recipe.model_validate({**base, "fp8": {**base["fp8"], **fp8}, "layers": layers})


def best(task: Task) -> str:
    """The backend of rows that do not compare backends: FP8 if the card has it."""
    return "native" if task.rehearsal or task.capability >= (8, 9) else "16 bit"


def config_of(
    size: Size, recipe: Recipe, text: Path, over: Mapping[str, Any] | None = None
) -> RunConfig:
    """The config that is timed. text: a file of bytes to train on. over: sections of the config."""
    sections: dict[str, Any] = {
        "recipe": recipe.name,
        "train": {
            "steps": NEVER,
            "global_batch": size.samples,
            "micro_batch": size.micro_batch,
            "eval_every": 0,
            "lr": 1e-4,
        },
        "data": {"path": str(text), "context": size.context, "val_samples": 1},
        "model": {"args": dict(size.args)},
        "checkpoint": {"every": 0, "background": False},
        "tracking": {"mlflow": False, "report": False},
        "guard": {"snapshot_every": 0},
        "engine": {"compile": "none"},
    }
    for section, values in (over or {}).items():
        sections[section] = {**sections.get(section, {}), **values}
    return RunConfig.model_validate(sections)


def start(
    stack: ExitStack,
    task: Task,
    name: str,
    size: Size,
    recipe: Recipe,
    over: Mapping[str, Any] | None = None,
) -> Contender:
    """A run of `recipe`, built as `harness train` builds one; `stack` closes it. over: sections of the config.

    Weights are initialised on the device. Snapshots and saves take as much host memory as the state, so they are off
    unless `over` switches them on; blocks run eager, unless it says otherwise. Raises NotHere if the plan refuses the
    combination, or if a library does not load.
    """
    folder = task.folder / name
    folder.mkdir(exist_ok=True)
    text = task.folder / "text.txt"
    if not text.exists():
        text.write_bytes(
            bytes(
                32 + byte % 95 for byte in random.Random(0).randbytes(64 * max(4096, size.context))
            )
        )
    config = config_of(size, recipe, text, over)
    try:
        run, plan, _ = start_run(stack, config, recipe, folder, task.device)
    except (ConfigError, MachineError) as error:
        raise NotHere(
            "; ".join(f"{each.what}: {each.why or each.fix}" for each in error.problems)
        ) from error
    fused = len(plan.fused_norms()) + len(plan.fused_mlps())
    return Contender(run, plan.resolved, fused, plan.notes)


def at_the_largest(
    task: Task, candidates: Sequence[Size], measure: Callable[[ExitStack, Size], Answer]
) -> Answer:
    """`measure` at the first size that does not run out of memory; `figures.too_large` names the others."""
    too_large: list[str] = []
    for size in candidates:
        try:
            with ExitStack() as stack:
                answer = measure(stack, size)
            return Answer(answer.summary, {**answer.figures, "too_large": too_large}, answer.failed)
        except Exception as error:
            if size is candidates[-1] or not is_out_of_memory(error):
                raise
            too_large.append(size.name)
        for folder in [path for path in task.folder.iterdir() if path.is_dir()]:
            folder.rename(folder.with_name(f"{folder.name}.{len(too_large)}"))
        gc.collect()
        torch.cuda.empty_cache()
    raise AssertionError("there is always a size")


def allocated(device: torch.device) -> int:
    """Bytes of tensors on the card; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def warm(contender: Contender, steps: int) -> dict[str, Any]:
    """Run the first steps, which compile, allocate and load. Returns the first one's time, and the peak bytes.

    The peak includes what other runs hold on the card; it is None on a CPU.
    """
    device = contender.run.engine.device
    before = time.perf_counter()
    contender.steps(1)
    first = time.perf_counter() - before
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    contender.steps(steps)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"first_step_seconds": first, "peak": peak}


def in_rounds(
    task: Task,
    contenders: Mapping[str, Contender],
    so_far: dict[str, Any],
    turn: float,
    rounds: int,
    period: int = 1,
) -> dict[str, list[float]]:
    """Seconds of a step, one entry for each round. After each round, `so_far` and the times are noted.

    turn: about how many seconds a turn takes. period: the steps of a turn are a multiple of this.
    """
    once = max(contender.steps(2) / 2 for contender in contenders.values())
    count = max(1 if task.rehearsal else 3, min(50, round(turn / once)))
    count = period * max(1, round(count / period))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        if number and task.left() < 1.5 * count * sum(values[-1] for values in times.values()):
            break
        # Whoever runs second finds a warmer machine, so the order changes from round to round.
        for name in list(contenders) if number % 2 else list(reversed(list(contenders))):
            times[name].append(contenders[name].steps(count) / count)
        task.note({**so_far, "steps_per_turn": count, "seconds": times})
    return times


def compared(times: Mapping[str, Sequence[float]], base: str) -> dict[str, dict[str, Any]]:
    """Seconds and ratio to `base` of every contender, with their spread."""
    return {
        name: {
            "seconds": spread(values),
            "ratio": spread([a / b for a, b in zip(values, times[base], strict=True)]),
            "rounds": len(values),
        }
        for name, values in times.items()
    }


def race(task: Task, fp8: Recipe, compile: str, candidates: Sequence[Size] | None = None) -> Answer:
    """Compare the step of an FP8 recipe with that of bf16 (fp16 on cards without bf16).

    compile: `engine.compile` of both.
    candidates: the sizes for this card; None: those of which two states fit.
    """
    if candidates is None:
        candidates = sizes(task, 2.4)
    over = {"engine": {"compile": compile}}

    def measure(stack: ExitStack, size: Size) -> Answer:
        contenders: dict[str, Contender] = {}
        facts: dict[str, dict[str, Any]] = {}
        for name, recipe in (("fp8", fp8), ("16 bit", recipe_of("16 bit"))):
            others = allocated(task.device)
            contenders[name] = start(stack, task, name, size, recipe, over)
            # Include a step that samples statistics, because it takes the most memory.
            facts[name] = warm(contenders[name], 2 if task.rehearsal else recipe.fp8.stats_every)
            if facts[name]["peak"] is not None:
                facts[name]["peak"] -= others
        figures: dict[str, Any] = {
            "backend": contenders["fp8"].rung.partition(":")[0],
            "compiled": contenders["16 bit"].run.watch is not None,
            "fused": contenders["fp8"].fused,
            "plan_notes": list(contenders["fp8"].notes),
            "size": size.name,
            "model": {**size.args, "context": size.context, "parameters": size.parameters},
            "samples": size.samples,
            "micro_batch": size.micro_batch,
            "contenders": facts,
        }
        turn, rounds = (0.02, 3) if task.rehearsal else (1.0, 9)
        times = in_rounds(task, contenders, figures, turn, rounds)
        for name, row in compared(times, "16 bit").items():
            facts[name] |= row | contenders[name].last_step()
        ratio = facts["fp8"]["ratio"]
        milliseconds = {name: 1e3 * row["seconds"]["median"] for name, row in facts.items()}
        summary = (
            f"{ratio['median']:.3f} ({ratio['min']:.3f}-{ratio['max']:.3f}) of {facts['16 bit']['rung']}: "
            f"{milliseconds['fp8']:.4g} ms over {milliseconds['16 bit']:.4g} ms, {size.name}"
        )
        wrong = not_as_named(facts)
        # Native has no blocks to count: its note in the record says who casts.
        counts_blocks = fp8.layers.fuse and bool(BACKENDS[figures["backend"]].fuses)
        wrong += ["nothing was fused"] if counts_blocks and not contenders["fp8"].fused else []
        return Answer(summary, figures, "; ".join(wrong))

    return at_the_largest(task, candidates, measure)


def not_as_named(facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """In what contenders trained otherwise than they are called. facts: what each one told, by name."""
    fell: list[str] = []
    left: list[str] = []
    in_pytorch: list[str] = []
    for name, row in facts.items():
        # A CPU has no such kernels.
        if "in PyTorch: " in row["note"] and not row["note"].endswith(": no GPU"):
            in_pytorch.append(f"{name}: {row['note']}")
        if row["fell_back_to_eager"]:
            fell.append(f"{name}: {row['fell_back_to_eager']}")
        left += row["left_fp8"]
    wrong = [f"compiled code was given up for eager ({'; '.join(fell)})"] if fell else []
    wrong += [f"layers left FP8 while they were timed: {', '.join(left)}"] if left else []
    wrong += [f"kernels that do not work here ({'; '.join(in_pytorch)})"] if in_pytorch else []
    return wrong


def as_shipped(task: Task) -> Answer:
    """`--recipe fp8_hybrid` beside `--recipe bf16`, each with what it takes here without further keys."""
    return race(task, load_recipe("fp8_hybrid"), "auto")


def chosen(task: Task) -> Answer:
    """The same with the FP8 backend that is the fastest on a block of the model. `plan_notes` has the block's times."""
    shipped = load_recipe("fp8_hybrid")
    fp8 = shipped.fp8.model_copy(update={"backend": "auto"})
    return race(task, shipped.model_copy(update={"fp8": fp8}), "auto")


def long_step(task: Task) -> Answer:
    """The same with four samples a step: 16,384 tokens at the largest size."""
    candidates = sizes(task, 2.4, LONG, long(TOY, 4))
    return race(task, load_recipe("fp8_hybrid"), "auto", candidates)


def vocabulary(task: Task) -> Answer:
    """The same with Llama-3's vocabulary, whose head stays in bf16. Logits are made for 512 tokens at a time."""
    candidates = sizes(task, 2.2, VOCABULARY, wide(TOY, 1024, 16))
    return race(task, load_recipe("fp8_hybrid"), "auto", candidates)


def native(task: Task) -> Answer:
    return race(task, recipe_of("native"), "none")


def te(task: Task) -> Answer:
    return race(task, recipe_of("transformer_engine"), "none")


def te_fused(task: Task) -> Answer:
    return race(task, recipe_of("transformer_engine", fuse=True), "none")


def torchao(task: Task) -> Answer:
    return race(task, recipe_of("torchao"), "none")


def native_compiled(task: Task) -> Answer:
    return race(task, recipe_of("native"), "blocks")


def native_fused(task: Task) -> Answer:
    return race(task, recipe_of("native", fuse=True), "blocks")


def te_compiled(task: Task) -> Answer:
    return race(task, recipe_of("transformer_engine"), "blocks")


def torchao_compiled(task: Task) -> Answer:
    return race(task, recipe_of("torchao"), "blocks")


# A contender of a row about monitoring: sections of the recipe's `fp8`, and of the config.
Way = tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]
_NO_GUARD = {"guard": {"enabled": False}, "tracking": {"fp8_every": NEVER}}
BARE: Way = ({"stats_every": NEVER}, _NO_GUARD)


def watching(task: Task) -> Answer:
    """Compare steps with monitoring to steps without: what the journal, the guard and FP8 statistics cost.

    Three contenders have monitoring. The first has the journal and the FP8 statistics of every step. The second has the
    guard. The third is as shipped: the guard, statistics of one step in ten, and, as in the first 200 steps, a copy of
    the state at one step in twenty. MLflow is not part of this: it runs in a process of its own and reads the journal.
    """
    ways: dict[str, Way] = {
        "telemetry": ({"stats_every": 1}, {**_NO_GUARD, "tracking": {"fp8_every": 1}}),
        "guard": ({"stats_every": NEVER}, {**_NO_GUARD, "guard": {"enabled": True}}),
        "as shipped": ({}, {"guard": {"snapshot_every": _snapshot_gap(task)}}),
    }
    return over_bare(task, ways)


def snapshots(task: Task) -> Answer:
    """Compare steps as shipped to steps without monitoring, by the way in which snapshots are copied.

    As in the first 200 steps, a snapshot is taken at one step in twenty. A CPU has one way of copying alone.
    """
    every = _snapshot_gap(task)
    ways: dict[str, Way] = {}
    for copy in ("blocking", "overlapped"):
        ways[copy] = ({}, {"guard": {"snapshot_every": every, "snapshot_copy": copy}})
    return over_bare(task, ways)


def _snapshot_gap(task: Task) -> int:
    return 2 if task.rehearsal else GuardConfig().snapshot_every


def over_bare(task: Task, ways: Mapping[str, Way]) -> Answer:
    """Steps of each of `ways`, over those of a run without journal, guard and FP8 statistics."""

    def measure(stack: ExitStack, size: Size) -> Answer:
        contenders: dict[str, Contender] = {}
        for name, (fp8, over) in {"neither": BARE, **ways}.items():
            contenders[name] = start(stack, task, name, size, recipe_of(best(task), **fp8), over)
            warm(contenders[name], 2)
        begun = _with_snapshots(contenders)
        figures: dict[str, Any] = {"size": size.name, "rung": contenders["neither"].rung}
        turn, rounds = (0.02, 3) if task.rehearsal else (1.0, 9)
        period = _snapshot_gap(task)
        times = in_rounds(task, contenders, figures, turn, rounds, period=period)
        for contender in contenders.values():
            contender.last_step()

        # Snapshots that ended while they were timed make a run look fast.
        left = _with_snapshots(contenders)
        events = {name: _snapshot_events(contender) for name, contender in contenders.items()}
        figures["snapshots"] = bool(left)
        figures["snapshot_events"] = {name: found for name, found in events.items() if found}
        figures["contenders"] = compared(times, "neither")
        told = ", ".join(
            f"{name} {row['ratio']['median']:.4f} ({row['ratio']['min']:.4f}-{row['ratio']['max']:.4f})"
            for name, row in figures["contenders"].items()
            if name != "neither"
        )
        without = "" if figures["snapshots"] else "; without snapshots, for want of memory"
        ended = "; ".join(f"{name}: {events[name][-1]}" for name in begun if name not in left)
        failed = f"snapshots ended while they were timed: {ended}" if ended else ""
        return Answer(f"of a step without: {told}; {size.name}{without}", figures, failed)

    # At this width a step is not bound by Python, and four states fit a card of 80 GB.
    return at_the_largest(
        task, sizes(task, 4.6, (llama(4096, 4096, layers=4), *SIZES[1:])), measure
    )


def _with_snapshots(contenders: Mapping[str, Contender]) -> list[str]:
    return [name for name, each in contenders.items() if each.run.guard.memory is not None]


def _snapshot_events(contender: Contender) -> list[str]:
    """What the run's journal says of its snapshots."""
    contender.run.telemetry.flush()
    rows = read_rows(contender.run.folder / JOURNAL, metrics=False)
    events = [row for row in rows if row["kind"] == "event" and row["code"].startswith("snapshot.")]
    return [f"{event['code']}: {event['text']}" for event in events]


def syncs(task: Task) -> Answer:
    """Run steps of every rung under torch's own detector, which raises wherever the host waits for the card."""
    rungs = ["16 bit"] + [
        name for name in ("native", "transformer_engine", "torchao") if task.capability >= (8, 9)
    ]
    found: dict[str, str] = {}
    for rung in rungs:
        for every in (1, NEVER):
            name = f"{rung}, statistics {'at every step' if every == 1 else 'off'}"
            try:
                with ExitStack() as stack:
                    fp8: dict[str, Any] = {} if rung == "16 bit" else {"stats_every": every}
                    waits(start(stack, task, f"{rung} {every}", SMALL, recipe_of(rung, **fp8)))
                found[name] = ""
            except NotHere as error:
                found[name] = f"not run: {error}"
            except Exception as error:
                found[name] = one_line(error)
            task.note({"rungs": found})
            if rung == "16 bit":
                break
    wrong = {name: why for name, why in found.items() if why and not why.startswith("not run")}
    ran = [name for name, why in found.items() if not why]
    return Answer(
        f"none in: {'; '.join(ran) or 'nothing'}",
        {"rungs": found},
        "; ".join(f"{a}: {b}" for a, b in wrong.items()),
    )


def waits(contender: Contender) -> None:
    """Raise RuntimeError if the host waits in one of ten steps. The first steps, which allocate, do not count.

    One of ten steps measures the parameters (`guard.measure_every`), so it is among them.
    """
    run = contender.run
    contender.steps(2)
    wait(run.engine.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [next_step(run) for _ in range(10)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    contender.last = [each.facts() for each in pending][-1]
    contender.last_step()
