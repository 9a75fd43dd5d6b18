"""Run in a process of its own, before torch is imported there: measures scenes and prints one line of JSON.

    python tests/cuda_on_paper/paper_driver.py SCENE [ARGUMENT]

The tests cannot measure in their own process: a fake device must be loaded before torch, which may be loaded there.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
logging.disable(logging.ERROR)

from harness.estimate import device  # noqa: E402

if __name__ == "__main__" and sys.argv[1] != "memory":
    device.load()

import torch  # noqa: E402

from harness.checkpoint.copy_stream import CudaCopyStream  # noqa: E402
from harness.checkpoint.overlapped import Copier, copy_bytes  # noqa: E402
from harness.checkpoint.snapshots import Snapshots  # noqa: E402
from harness.core.config import RunConfig, load_config, merge  # noqa: E402
from harness.estimate.fusion import Fusion  # noqa: E402
from harness.estimate.memory import Change, as_compiled  # noqa: E402
from harness.estimate.recorder import Recorder  # noqa: E402
from harness.estimate.roofline import Op, find_card, step_seconds, usual_rates  # noqa: E402
from harness.estimate.trace import FakeEvent, FakeRun, built, facts_of, on_card, trace  # noqa: E402
from harness.precision.plan import resolve  # noqa: E402
from harness.precision.recipe import Recipe, Rung, load_recipe  # noqa: E402

SMALL = {"vocab": 256, "dim": 256, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 704}
LLAMA = "llama3_8b_8layers"
# Kinds of `planted_models.Attends`.
OPERANDS = (
    "broadcast key heads",
    "broadcast samples",
    "three dimensions",
    "twelve features",
    "groups of one",
    "narrow values",
)


def config_of(
    args: dict[str, Any] | None = None, target: str = "harness.models.gpt:build", **sections: Any
) -> RunConfig:
    """A small run of two micro-batches a step; sections override."""
    base: dict[str, Any] = {
        "recipe": "auto",
        "train": {"global_batch": 4, "micro_batch": 2},
        "data": {"context": 256},
        "model": {"target": target, "args": SMALL if args is None else args},
    }
    return RunConfig.model_validate(merge(base, sections))


def rung_of(name: str) -> Rung:
    """A rung, whether or not a recipe's ladder has it."""
    backend, _, precision = name.partition(":")
    return Rung.model_validate({"backend": backend, "precision": precision, "tiers": ["HOPPER"]})


def changed(recipe: str, **fp8: Any) -> Recipe:
    """A shipped recipe with other keys in its `fp8` section."""
    loaded = load_recipe(recipe)
    return loaded.model_copy(update={"fp8": loaded.fp8.model_copy(update=fp8)})


def seen(made: FakeRun) -> dict[str, Any]:
    """What the recorder saw, for a test: waits with their places, copies to the card, kernels by step."""
    recorder = made.recorder
    kernels = Counter[str]()
    for op in recorder.ops:
        kernels[op.step] += op.kernels
    return {
        "rung": made.plan.rung.name,
        "fp8_layers": len(made.plan.fp8_layers()),
        "waits": [[wait.what, *wait.where[:2]] for wait in recorder.waits],
        "pageable": sorted(
            {t.where[0] for t in recorder.transfers if t.direction == "cpu->cuda" and not t.pinned}
        ),
        "pinned": sum(t.pinned for t in recorder.transfers),
        "kernels": dict(kernels),
        "attention": sorted({op.name for op in recorder.ops if op.attention}),
        "fp8_gemms": sum(op.unit == "fp8" for op in recorder.ops),
        "peak": recorder.peak().bytes,
        "ideal": dict(made.run.ideal),
    }


def scene_ideal(_: str) -> dict[str, Any]:
    """What a sample takes at the peak of a card, by recipe."""
    tf32 = load_recipe("fp32").model_copy(update={"float32_matmul": "high"})
    found: dict[str, Any] = {}
    for name, recipe, card, rung in (
        ("tf32", tf32, "A100", "autocast:fp32"),
        ("fp32", load_recipe("fp32"), "A100", "autocast:fp32"),
        ("fp8", load_recipe("fp8_hybrid"), "H100", "native:fp8"),
        ("fp16", load_recipe("fp16_scaler"), "T4", "autocast:fp16"),
    ):
        with on_card(config_of(), recipe, find_card(card), rung_of(rung), 2) as made:
            found[name] = dict(made.run.ideal)
    return found


# By name: card, recipe with what is changed of its `fp8` section, rung.
STEPPED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "native": ("H100", "fp8_hybrid", {}, "native:fp8"),
    "native, rolled in micro-batches": (
        "H100",
        "fp8_hybrid",
        {"roll": "micro_batch"},
        "native:fp8",
    ),
    "native, e4m3": ("L40S", "fp8_hybrid", {"format": "e4m3"}, "native:fp8"),
    "torchao, tensorwise": ("H100", "fp8_dynamic", {}, "torchao:fp8"),
    "torchao, rowwise": ("H100", "fp8_dynamic", {"dynamic": "rowwise"}, "torchao:fp8"),
    "bf16": ("A100", "bf16", {}, "autocast:bf16"),
    "fp16": ("T4", "fp16_scaler", {}, "autocast:fp16"),
    "fp32": ("A10", "fp32", {}, "autocast:fp32"),
}


def scene_waits(case: str) -> dict[str, Any]:
    """Steps of one rung, as "NAME, OPTIMIZER": first, usual, sampled, measured; after demotion and promotion."""
    name, _, optimizer = case.rpartition(", ")
    card, recipe, fp8, rung = STEPPED[name]
    policy = changed(recipe, **fp8) if fp8 else load_recipe(recipe)
    config = config_of(train={"optimizer": optimizer})
    with on_card(config, policy, find_card(card), rung_of(rung), 2) as made:
        for number, step in ((1, "first"), (2, "usual"), (10, "sampled"), (11, "measured")):
            made.step(number, step)
        if layers := made.run.precision.slot_names:
            first = layers[0].rpartition(".")[0]
            made.run.precision.switch([first], [])
            made.step(12, "demoted")
            made.step(20, "demoted and sampled")
            made.run.precision.switch([], [first])
            made.step(22, "promoted")
        return seen(made)


def scene_masked(_: str) -> dict[str, Any]:
    """A step on data with masked labels, whose micro-batches are weighed by their targets."""
    with on_card(
        config_of(), load_recipe("bf16"), find_card("A100"), rung_of("autocast:bf16"), 2
    ) as made:
        made.run.data.masked = True  # type: ignore[misc]
        made.step(2, "usual")
        return seen(made)


def scene_snapshots(_: str) -> dict[str, Any]:
    """A snapshot that training does not wait for, on a card with room for a copy of the state, and on one without."""
    found: dict[str, Any] = {}
    recipe, card, rung = load_recipe("fp8_hybrid"), find_card("H100"), rung_of("native:fp8")
    for name, free in (("room", card.memory), ("no room", 0)):
        with (
            on_card(config_of(), recipe, card, rung, 2) as made,
            mock.patch.object(torch.cuda, "mem_get_info", return_value=(free, card.memory)),
            mock.patch.object(FakeEvent, "synchronize") as synchronize,
        ):
            made.step(1, "first")
            stream = CudaCopyStream(torch.device("cuda", 0))
            copier = Copier(stream, lambda *_, **__: None, slice_bytes=1 << 20)
            snapshots = Snapshots(1, copier=copier)
            # Fakes have no random generators.
            parts = [part for part in made.run.state.parts if part != "rng"]
            tensors, meta = made.run.state.state_dict(parts)

            recorder = made.recorder
            recorder.forget()
            synchronize.reset_mock()
            before = recorder.live
            snapshots.take(1, tensors, meta)
            # Each step queues a part of the copies.
            for step in range(2, 18):
                snapshots.observe(step, True)
            found[name] = {
                **seen(made),
                "kept": recorder.live - before,
                "at_peak": recorder.peak().bytes - before,
                "state": copy_bytes(tensors, stream.has),
                "transfers": [asdict(each) for each in recorder.transfers],
                "synchronised": synchronize.call_count,
            }
            del tensors
    return found


def scene_planted(_: str) -> dict[str, Any]:
    """Models with a fault that the recorder must see, and the same model without."""
    found: dict[str, Any] = {}
    recipe = load_recipe("bf16")
    for name in ("clean", "item", "to_host", "pageable", "not_zero", "mask"):
        config = config_of({"fault": name}, "planted_models:build")
        with on_card(config, recipe, find_card("A100"), rung_of("autocast:bf16"), 1) as made:
            try:
                made.step(2, "usual")
                error = ""
            except Exception as caught:
                error = type(caught).__name__
            found[name] = {**seen(made), "error": error}
    return found


def place(tensor: torch.Tensor) -> int:
    """Bytes from the beginning of its allocation, which a card puts at a multiple of 512."""
    return int(tensor.storage_offset()) * tensor.element_size()


class Operands(Recorder):
    """Notes the operands of every FP8 GEMM, and which operations read a master weight of an FP8 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gemms: list[dict[str, Any]] = []
        self.reads: Counter[str] = Counter()
        self.masters: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.ops)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.name == "aten::_scaled_mm":
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            left, right, *scales = (given[name] for name in ("self", "mat2", "scale_a", "scale_b"))
            self.gemms.append(
                {
                    "phase": self.phase,
                    "left": [list(left.shape), list(left.stride()), str(left.dtype)],
                    "right": [list(right.shape), list(right.stride()), str(right.dtype)],
                    "scales": [
                        [list(scale.shape), str(scale.dtype), scale.device.type, place(scale)]
                        for scale in scales
                    ],
                    "fast": bool(given.get("use_fast_accum", False)),
                }
            )
        if self.phase in ("forward", "backward") and len(self.ops) > before:
            given = [*args, *(kwargs or {}).values()]
            if any(
                isinstance(t, torch.Tensor) and id(t.untyped_storage()) in self.masters
                for t in given
            ):
                self.reads[f"{self.step} {self.micro}"] += 1
        return out


@contextmanager
def watched(
    config: RunConfig, recipe: Recipe, card: str, rung: str, batches: int
) -> Iterator[FakeRun]:
    """As `on_card`, with `Operands` for a recorder."""
    from harness.estimate.trace import fake_card

    place, recorder = find_card(card), Operands()
    cuda = torch.device("cuda", 0)
    run = built(config, recipe, facts_of(place), cuda, rung_of(rung), batches, recorder)
    with fake_card(place), recorder, run as made:
        layers = set(made.plan.fp8_layers())
        weights = [module.weight for name, module in made.model.named_modules() if name in layers]
        recorder.masters = {id(weight.untyped_storage()) for weight in weights}  # type: ignore[union-attr]
        recorder.forget()
        yield made


def scene_operands(_: str) -> dict[str, Any]:
    """FP8 GEMMs of a step of three micro-batches with an odd number of tokens; who reads the weights."""
    found: dict[str, Any] = {}
    for name, recipe, rung in (
        ("native", load_recipe("fp8_hybrid"), "native:fp8"),
        ("torchao", load_recipe("fp8_dynamic"), "torchao:fp8"),
    ):
        context = 250 if name == "native" else 256
        config = config_of(train={"global_batch": 3, "micro_batch": 1}, data={"context": context})
        with watched(config, recipe, "H100", rung, 3) as made:
            made.step(1, "first")
            made.step(2, "usual")
            made.step(3, "next")
            recorder = made.recorder
            assert isinstance(recorder, Operands)
            found[name] = {"gemms": recorder.gemms, "reads": dict(recorder.reads), **seen(made)}
    return found


def scene_cards(_: str) -> dict[str, Any]:
    """The rung that each recipe takes on each card, and what attention that card computes with."""
    found: dict[str, Any] = {}
    for card in ("H100", "L4", "A100", "T4", "V100"):
        for name in ("fp8_hybrid", "auto", "bf16"):
            taken = resolve(load_recipe(name), facts_of(find_card(card), replaced=False))[0]
            found[f"{card} {name}"] = taken.name if taken else None

    usual = config_of()
    runs = {
        "T4 autocast:fp16": (usual, "T4", "autocast:fp16"),
        "H100 autocast:bf16": (usual, "H100", "autocast:bf16"),
        "H100 autocast:fp32": (usual, "H100", "autocast:fp32"),
        "H100 packed": (config_of(data={"packing": "documents"}), "H100", "autocast:bf16"),
    }
    for kind in OPERANDS:
        config = config_of({"kind": kind}, "planted_models:attends")
        runs[kind] = (config, "H100", "autocast:bf16")
    for name, (config, card, rung) in runs.items():
        with on_card(config, load_recipe("auto"), find_card(card), rung_of(rung), 1) as made:
            made.step(2, "usual")
            found[name] = seen(made)

    config, recipe, rung = (
        config_of(train={"global_batch": 10}),
        load_recipe("fp8_hybrid"),
        rung_of("native:fp8"),
    )
    made_up = trace(config, recipe, find_card("H100"), rung)
    found["five micro-batches, three traced"] = sum(op.kernels for op in made_up.steps["usual"])
    with on_card(config, recipe, find_card("H100"), rung, 5) as made:
        made.step(1, "first")
        made.step(2, "usual")
        found["five micro-batches"] = seen(made)["kernels"]["usual"]
    return found


def per_linear(recipe: Recipe, rung: str, tokens: int, width: int) -> dict[str, int]:
    """Kernels of one FP8 Linear, forward and backward, without what the model around it does."""
    counts: dict[str, list[Op]] = {}
    for layers in (1, 2):
        config = config_of(
            {"width": width, "layers": layers}, "planted_models:linears", data={"context": tokens}
        )
        with on_card(config, recipe, find_card("H100"), rung_of(rung), 1) as made:
            made.step(2, "warm")
            made.step(3, "usual")
            counts[str(layers)] = [op for op in made.recorder.ops if op.step == "usual"]
    return {
        phase: sum(
            sign * op.kernels
            for key, sign in (("2", 1), ("1", -1))
            for op in counts[key]
            if op.phase == phase
        )
        for phase in ("forward", "backward", "update", "step")
    }


def scene_budget(_: str) -> dict[str, Any]:
    """What the native backend may cost: kernels for each Linear, memory and time of the Llama against bf16."""
    recipe, card, config = load_recipe("fp8_hybrid"), find_card("H100"), load_config(LLAMA)
    rates = usual_rates(card)
    found: dict[str, Any] = {
        "native": per_linear(recipe, "native:fp8", 256, 512),
        "bf16": per_linear(recipe, "autocast:bf16", 256, 512),
    }
    wide = changed("fp8_hybrid", weight_gradients="float32")
    for name, policy, rung in (
        ("native:fp8", recipe, "native:fp8"),
        ("autocast:bf16", recipe, "autocast:bf16"),
        ("native:fp8, float32 gradients", wide, "native:fp8"),
    ):
        made = trace(config, policy, card, rung_of(rung))
        found[f"llama {name}"] = {
            "usual_ms": step_seconds(made.steps["usual"], rates) * 1e3,
            "sampled_ms": step_seconds(made.steps["sampled"], rates) * 1e3,
            "kernels": sum(op.kernels for op in made.steps["usual"]),
            "sampled_kernels": sum(op.kernels for op in made.steps["sampled"]),
            "bytes": sum(op.reads + op.writes for op in made.steps["usual"]),
            "peak": made.peak,
            "static": made.static,
            "waits": [asdict(wait) for wait in made.waits],
        }
    return found


def kept_for_backward(fusion: Fusion, changes: list[Change]) -> int:
    """Bytes that forward of block 0 has made, but for casts of weights, and that live when it has ended."""
    places = [at for at, op in enumerate(fusion.ops) if (op.block, op.phase) == (0, "forward")]
    here = {piece.storage for at in places for piece in fusion.ops[at].outputs}
    for at in places:
        op = fusion.ops[at]
        if op.own and op.inputs[0].storage not in here:
            here -= {piece.storage for piece in op.outputs}
    made = as_compiled(changes, [fusion.kept()])
    end = places[-1] + 1
    return sum(each.bytes for each in made if each.storage in here and each.place <= end)


def scene_fusion(rung: str) -> dict[str, Any]:
    """The block of compiled_driver.py as `harness.estimate.fusion` has it: kernels, bytes outside of products, memory.

    Casts of weights are left out: they are no part of that block's compiled code.
    """
    args = {"vocab": 256, "dim": 1024, "layers": 1, "heads": 8, "ffn": 2816}
    train, data = {"global_batch": 1, "micro_batch": 1}, {"context": 2048}
    recipe = load_recipe("fp8_hybrid")
    with on_card(
        config_of(args, train=train, data=data), recipe, find_card("H100"), rung_of(rung), 1
    ) as made:
        made.step(1, "first")
        made.recorder.forget()
        made.step(2, "usual")
        ops, changes = made.recorder.ops, list(made.recorder.changes)
    fusion = Fusion(ops)
    found: dict[str, Any] = {"kept": kept_for_backward(fusion, changes)}
    for phase in ("forward", "backward"):
        made_here = {
            piece.storage
            for op in ops
            if (op.block, op.phase) == (0, phase)
            for piece in op.outputs
        }
        kernels = moved = 0
        for op in fusion.fused():
            if (op.block, op.phase) != (0, phase) or op.flops:
                continue
            of_weight = op.own and op.inputs[0].storage not in made_here
            kernels += not op.own
            moved += 0 if of_weight else op.reads + op.writes
        found[phase] = {"kernels": kernels, "moved": moved}
    return found


def scene_blocks(recompute: str) -> dict[str, Any]:
    """Names of the operations of each block in forward and backward, and of what lies outside of blocks."""
    args = SMALL | {"recompute": recompute}
    found: dict[str, Any] = {}
    config, recipe = config_of(args), load_recipe("bf16")
    with on_card(config, recipe, find_card("H100"), rung_of("autocast:bf16"), 2) as made:
        made.step(1, "first")
        made.recorder.forget()
        made.step(2, "usual")
        for op in made.recorder.ops:
            if op.phase in ("forward", "backward"):
                found.setdefault(f"{op.phase} {op.block} {op.micro}", []).append(op.name)
    return found


def scene_memory(argument: str) -> dict[str, Any]:
    """Peaks of one small run on CPU tensors: "fake" ones, or "real" ones and what the allocator itself says."""
    from memory_runs import measure

    return measure(argument)


def main() -> None:
    """The scene that the command line names."""
    scene = globals()[f"scene_{sys.argv[1]}"]
    stdout = os.dup(1)
    os.dup2(2, 1)  # libraries print
    result = json.dumps(scene(sys.argv[2] if len(sys.argv) > 2 else ""))
    os.write(stdout, (result + "\n").encode())


if __name__ == "__main__":
    main()
