"""Does the fallback save runs that plain FP8 loses to what the literature describes, and not to an injected scale?

    python -m benchmarks.rescue --explore              # which value of each mechanism's grid FP8 suffers from most
    python -m benchmarks.rescue --seeds 0 1 2          # the study, with the values that were explored
    python -m benchmarks.rescue --draw                 # table and docs/images/rescue.png of what was measured

**Plan**, committed before any of it was run. Five mechanisms, each with one knob and a grid of at most four values, in
a GPT of two blocks of width 64 (133,000 parameters), 300 steps of 1,024 letters of `benchmarks.fallback`'s text on one
CPU thread, on which FP8 without a mechanism ends within 0.1% of bf16:

    swiglu      gate and up of one hidden channel of each block point the same way, with norm VALUE, as weights do that
                align late in training (Fishman et al., arXiv 2409.12517): the channel is quadratic. No weight decay
    rate        learning rate VALUE, constant after 20 steps, no clipping, beta2 of 0.999: late spikes
                (Molybog et al., arXiv 2304.09871)
    logits      queries and keys learn VALUE times as fast, without qk-norm: attention logits grow
                (Dehghani et al., arXiv 2302.05442; Wortsman et al., arXiv 2309.14322)
    embedding   the embedding learns nothing and loses the share VALUE of its norm in every step: the gradients behind
                the first norm grow (Takase et al., arXiv 2312.16903)
    e4m3        gradients in E4M3 under scales of the largest amax of the last 1,024 steps; the head starts VALUE times
                as large, so the first gradients are: what comes later has to fit under them (Micikevicius et al.,
                arXiv 2209.05433, have E5M2 for gradients for that reason)

Of the first four none made FP8 end more than 0.6% above bf16 in the grid above. Written after that was seen, a second
round:

    growth      swiglu's two rows with norm 8 grow by the share VALUE in every step, and what `down` makes of their
                product falls as much, in its updates too: the function that is trained is nearly the same (SiLU becomes
                ReLU), the channel is what alignment makes of it over hundreds of billions of tokens. The rows grow by
                hand, not by training

*Exploring* has a budget of six minutes of processor time for each mechanism: seed 100, each value in bf16 and in plain
FP8, in the order of the grid. Of the values with which bf16 ends under 3.2 nats (of ln 24 = 3.18 for letters without
any order, 1.9 without a mechanism), the one is taken with which plain FP8 ends furthest above bf16; without any, the
first. A mechanism counts as reproduced if plain FP8 ends at least 1% above bf16 in the mean of three seeds of their
own, which the study then runs in any case.

Each seed has four runs from the same weights, on the same data in the same order: `bf16`, `plain` (FP8, fallback off),
`fallback` (the same recipe with the fallback as shipped) and `clean` (fp8_hybrid as shipped without the mechanism).
Validation loss every ten steps on 256 samples. Steps lost: 300 less the first at which bf16 was as good as the run
ended, none if that was as good as bf16's end. Guilty layers are those that the mechanism puts its outliers into; any
other that leaves FP8 is named innocent.
`rate`, `logits` and `embedding` have no guilty layer of their own: all that leave are only named.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.fallback import prepare
from harness import Precision
from harness.core.facts import jsonable
from harness.core.files import atomic_file, read_json, write_json
from harness.models.gpt import build
from harness.precision.recipe import Recipe, load_recipe

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "rescue_cpu.json"
LAYERS, DIM, FFN = 2, 64, 176
STEPS, WARMUP, CONTEXT, BATCH, EVERY = 300, 20, 64, 16, 10
RATE, SEED, BUDGET, STILL_LEARNS, LOST = 3e-3, 100, 360.0, 3.2, 0.01
ARMS = ("bf16", "plain", "fallback", "clean")


@dataclass(frozen=True, slots=True)
class Training:
    """What a mechanism changes of it. constant: the rate stays after the warm-up, instead of a cosine to zero."""

    lr: float = RATE
    clip: float | None = 1.0
    beta2: float = 0.95
    constant: bool = False
    decay: float = 0.1


def _nothing(*_: Any) -> None:
    """Leave the model as it is."""


@dataclass(frozen=True, slots=True)
class Mechanism:
    """grid: values of its knob. guilty: ends of the names of the layers that suffer, if it names any. start: what
    becomes of the fresh model; each: of the model after an update, given its parameters before it. fp8: changes of the
    recipe's section."""

    grid: tuple[float, ...]
    guilty: tuple[str, ...] = ()
    start: Callable[[nn.Module, float], None] = _nothing
    each: Callable[[nn.Module, float, Mapping[str, Tensor]], None] = _nothing
    training: Callable[[float], Training] = lambda _: Training()
    fp8: Mapping[str, Any] | None = None


def _align(model: nn.Module, norm: float) -> None:
    for block in range(LAYERS):
        direction = torch.nn.functional.normalize(torch.randn(DIM), dim=0)
        weight = model.get_parameter(f"blocks.{block}.mlp.gate_up.weight")
        weight[0] = weight[FFN] = norm * direction
        model.get_parameter(f"blocks.{block}.mlp.down.weight")[:, 0] = 0.0


def _hurry(model: nn.Module, times: float, before: Mapping[str, Tensor]) -> None:
    for block in range(LAYERS):
        name = f"blocks.{block}.attn.qkv.weight"
        rows, old = model.get_parameter(name)[: 2 * DIM], before[name][: 2 * DIM]
        rows.copy_(old + times * (rows - old))


def _collapse(model: nn.Module, share: float, before: Mapping[str, Tensor]) -> None:
    model.get_parameter("embed.weight").copy_(before["embed.weight"] * (1 - share))


def _grow(model: nn.Module, share: float, before: Mapping[str, Tensor]) -> None:
    """Before and after an update the channel's size times its column in `down` is the same."""
    for block in range(LAYERS):
        rows = model.get_parameter(f"blocks.{block}.mlp.gate_up.weight")
        name = f"blocks.{block}.mlp.down.weight"
        column, old = model.get_parameter(name)[:, 0], before[name][:, 0]
        times = (8.0 / float(rows[0].norm())) ** 2
        column.copy_((old + times * (column - old)) / (1 + share) ** 2)
        rows[0] *= 1 + share
        rows[FFN] *= 1 + share


def _loud_head(model: nn.Module, times: float) -> None:
    model.get_parameter("lm_head.weight").mul_(times)


MECHANISMS = {
    "swiglu": Mechanism((8, 16, 32, 64), ("mlp.down",), start=_align, training=lambda _: Training(decay=0.0)),
    "growth": Mechanism(
        (0.01, 0.02, 0.03, 0.04),
        ("mlp.down", "mlp.gate_up"),
        start=lambda model, _: _align(model, 8.0),
        each=_grow,
        training=lambda _: Training(decay=0.0),
    ),
    "rate": Mechanism((1e-2, 2e-2, 4e-2, 8e-2), training=lambda lr: Training(lr, None, 0.999, constant=True)),
    "logits": Mechanism((3, 10, 30, 100), each=_hurry),
    "embedding": Mechanism((0.01, 0.03, 0.1, 0.3), each=_collapse),
    "e4m3": Mechanism((1, 8, 64, 512), start=_loud_head, fp8={"format": "e4m3", "amax_history_len": 1024}),
}


def recipe_of(arm: str, mechanism: Mechanism) -> Recipe:
    """bf16's, or fp8_hybrid with what the arm and the mechanism change."""
    if arm in ("bf16", "clean"):
        return load_recipe("bf16" if arm == "bf16" else "fp8_hybrid")
    given = load_recipe("fp8_hybrid").model_dump()
    given["fp8"] |= mechanism.fp8 or {}
    given["fallback"]["enabled"] = arm == "fallback"
    return Recipe.model_validate(given)


@dataclass(frozen=True, slots=True)
class Text:
    """Letters, uint8 [n] each."""

    train: Tensor
    val: Tensor

    @classmethod
    def made(cls) -> Text:
        """What `benchmarks.fallback` trains on; a tenth of it is for validation."""
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder))
            files = [torch.tensor(list(path.read_bytes())) for path in sorted(Path(folder, "text").iterdir())]
        return cls(torch.cat(files[:-1]), files[-1])

    def batch(self, seed: int, step: int) -> Tensor:
        """int64 [BATCH, CONTEXT + 1]."""
        coin = torch.Generator().manual_seed(100_003 * seed + step)
        first = torch.randint(len(self.train) - CONTEXT - 1, (BATCH, 1), generator=coin)
        return self.train[first + torch.arange(CONTEXT + 1)]

    def validation(self) -> Tensor:
        """int64 [256, CONTEXT + 1]."""
        first = torch.arange(256)[:, None] * ((len(self.val) - CONTEXT - 1) // 256)
        return self.val[first + torch.arange(CONTEXT + 1)]


def train(text: Text, mechanism: Mechanism, value: float, arm: str, seed: int) -> dict[str, Any]:
    """One run: {"val": loss every EVERY steps, "train": of every step, "left": {layer: first step in BF16}}.

    A loss that is no number is None.
    """
    torch.manual_seed(seed)
    model = build(dim=DIM, layers=LAYERS, heads=2, ffn=FFN)
    on, training = arm != "clean", Training() if arm == "clean" else mechanism.training(value)
    if on:
        with torch.no_grad():
            mechanism.start(model, value)
    precision = Precision(recipe_of(arm, mechanism), seed)
    model = precision.prepare(model)
    betas = (0.9, training.beta2)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.lr, betas=betas, weight_decay=training.decay, fused=True
    )

    def factor(step: int) -> float:
        after = (step - WARMUP) / (STEPS - WARMUP)
        late = 1.0 if training.constant else 0.5 * (1 + math.cos(math.pi * max(0.0, after)))
        return min(1.0, (step + 1) / WARMUP) * late

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    losses, val, left = list[float | None](), list[float | None](), dict[str, int]()
    held_out = text.validation()
    for step in range(1, STEPS + 1):
        for name in precision.demoted:
            left.setdefault(name, step)
        tokens = text.batch(seed, step)
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        with precision.context():
            loss = model(tokens[:, :-1], tokens[:, 1:])
        precision.backward(loss)
        precision.step(optimizer, max_grad_norm=training.clip)
        optimizer.zero_grad()
        schedule.step()
        if on:
            with torch.no_grad():
                mechanism.each(model, value, before)
        losses.append(_kept(loss))
        if step % EVERY == 0:
            with precision.evaluating():
                val.append(_kept(model(held_out[:, :-1], held_out[:, 1:])))
    return {"val": val, "train": losses, "left": left}


def _kept(loss: Tensor) -> float | None:
    value = float(loss.detach())
    return round(value, 5) if math.isfinite(value) else None


def end_of(run: Mapping[str, Any]) -> float:
    """The final validation loss; infinite if it is no number."""
    return math.inf if run["val"][-1] is None else run["val"][-1]


def explore(text: Text, name: str) -> dict[str, Any]:
    """Final losses of bf16 and plain FP8 for the values of a grid, as far as the budget goes; the one that is taken."""
    mechanism, begun = MECHANISMS[name], time.process_time()
    found: dict[str, Any] = {}
    for value in mechanism.grid:
        if time.process_time() - begun > BUDGET:
            break
        ends = {arm: end_of(train(text, mechanism, value, arm, SEED)) for arm in ("bf16", "plain")}
        found[f"{value:g}"] = ends
        print(f"{name:<10} {value:<6g} bf16 {ends['bf16']:.4f}  plain FP8 {ends['plain']:.4f}", flush=True)
    able = {value: ends for value, ends in found.items() if ends["bf16"] < STILL_LEARNS}
    worst = max(able, key=lambda value: able[value]["plain"] / able[value]["bf16"], default=next(iter(found)))
    told = {value: {arm: jsonable(end) for arm, end in ends.items()} for value, ends in found.items()}
    return {"seed": SEED, "explored": told, "value": float(worst), "seconds": round(time.process_time() - begun)}


def study(text: Text, name: str, value: float, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each seed: every arm's `train`."""
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        runs = {arm: train(text, MECHANISMS[name], value, arm, seed) for arm in ARMS}
        rows.append({"seed": seed, "runs": runs})
        print(show(name, value, rows[-1]), flush=True)
    return rows


def steps_lost(bf16: Mapping[str, Any], run: Mapping[str, Any]) -> int:
    """How many steps before its end bf16 was as good as the run ended; 0 if the run ended as well as bf16."""
    values, end = bf16["val"], end_of(run)
    if end <= end_of(bf16):
        return 0
    first = next((place for place, loss in enumerate(values) if loss is not None and loss <= end), len(values) - 1)
    return (len(values) - 1 - first) * EVERY if end < math.inf else STEPS


def innocent(mechanism: Mechanism, left: Mapping[str, int]) -> list[str]:
    """Layers that left FP8 and are none of those that the mechanism names, if it names any."""
    return [layer for layer in left if mechanism.guilty and not layer.endswith(mechanism.guilty)]


def show(name: str, value: float, row: Mapping[str, Any]) -> str:
    """A row as a line."""
    runs = row["runs"]
    best = end_of(runs["bf16"])
    parts = [f"{name:<10} {value:<6g} seed {row['seed']}  bf16 {best:.4f}"]
    for arm in ARMS[1:]:
        end = end_of(runs[arm])
        parts.append(f"{arm} {end:.4f} ({end / best - 1:+.2%}, {steps_lost(runs['bf16'], runs[arm])} steps)")
    left = {arm: runs[arm]["left"] for arm in ("fallback", "clean")}
    return "  ".join(parts) + f"  left {left}  innocent {innocent(MECHANISMS[name], left['fallback'])}"


LOOKS = {
    "clean": ("#9a9a9a", "-", "FP8 without the mechanism"),
    "plain": ("#cb181d", "-", "FP8, no fallback"),
    "fallback": ("#2c7fb8", "-", "FP8 with the fallback"),
    "bf16": ("#222222", ":", "bf16"),
}


def picture(known: Mapping[str, Any]) -> Figure:
    """Validation loss over steps, a panel for each mechanism: seeds thin, their mean thick; demotions as ticks."""
    studied = {name: found for name, found in known.items() if found.get("rows")}
    columns = min(3, len(studied))
    lines = -(-len(studied) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.7 * lines + 0.4), dpi=150, layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, (name, found) in zip(panels, studied.items(), strict=False):
        for arm, (colour, line, label) in LOOKS.items():
            runs = [row["runs"][arm] for row in found["rows"]]
            steps = range(EVERY, STEPS + 1, EVERY)
            losses = [[math.nan if loss is None else loss for loss in run["val"]] for run in runs]
            for each in losses:
                axes.plot(steps, each, color=colour, linewidth=0.5, alpha=0.4)
            axes.plot(steps, [sum(at) / len(at) for at in zip(*losses, strict=True)], line, color=colour, label=label)
            for step in {first for run in runs for first in run["left"].values()} if arm == "fallback" else ():
                axes.axvline(step, ymax=0.06, color=colour, linewidth=1.0)
        ends = [end_of(row["runs"][arm]) for row in found["rows"] for arm in ARMS]
        lowest = min(ends)
        axes.set_ylim(lowest - 0.05, max(lowest + 0.6, min(max(ends) + 0.3, 5.6)))
        axes.set_title(f"{name}, {found['value']:g}", fontsize=9, loc="left")
        axes.grid(color="#e9e9e9", linewidth=0.5)
        axes.tick_params(labelsize=8)
    for axes in panels[len(studied) :]:
        axes.set_visible(False)
    for axes in panels[::columns]:
        axes.set_ylabel("validation loss, nats", fontsize=8)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
    return figure


def main() -> None:
    """Do what the options say; the results file is written after each mechanism."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--explore", action="store_true")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "images" / "rescue.png")
    parser.add_argument("--mechanisms", nargs="+", choices=list(MECHANISMS), default=list(MECHANISMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[str, Any] = read_json(options.out) if options.out.exists() else {"mechanisms": {}}
    known |= {"command": "python -m benchmarks.rescue", "steps": STEPS}
    known["machine"] = f"{platform.machine()} CPU, one thread, torch {torch.__version__}"
    if options.draw:
        for name, found in known["mechanisms"].items():
            print("".join(show(name, found["value"], row) + "\n" for row in found.get("rows", [])), end="")
        with atomic_file(options.picture) as stream:
            picture(known["mechanisms"]).savefig(stream, format="png", facecolor="white")
        return
    text = Text.made()
    for name in options.mechanisms:
        if options.explore:
            known["mechanisms"][name] = explore(text, name)
        elif name not in known["mechanisms"]:
            sys.exit(f"{name} was not explored: run --explore first")
        else:
            value = known["mechanisms"][name]["value"]
            known["mechanisms"][name]["rows"] = study(text, name, value, options.seeds)
        write_json(options.out, known)


if __name__ == "__main__":
    main()
