"""What the fallback sees of a fault, and how soon; and whether healthy runs keep their layers.

    python -m benchmarks.evidence faults
    python -m benchmarks.evidence held-out    # and missed
    python -m benchmarks.evidence healthy --work /tmp/healthy --other /usr/share/common-licenses

*faults*: a family of faults in one layer of a small network, at several strengths (powers of two) and duty cycles,
under `fp8_hybrid` as shipped. It measures after how many steps of the fault the layer first ran in BF16, and which
other layers did. There is one network and one seed: the study is about what a fault does to a tensor, not about chance.

*held-out*: families that no limit was chosen on, and the harm that each fault does. *missed*: the same for the families
of *faults* that are not seen. Both are in `benchmarks.held_out`.

*healthy*: short runs of the config `tiny` over learning rates, warm-ups and sizes, on the standard library's source and
on a folder of other text. Each has the same run in bf16 beside it: moves of the one, and the guard's events of the
other. If an update of the bf16 run was skipped, it had a spike, and the FP8 run does not count as healthy.

Then the false alarms as a curve. The records of the healthy runs are fed to the controller under limits that are
tighter by some octaves (6 dB), one statistic at a time. A real run under such limits would sample more often than was
recorded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.intervals import binomial_upper
from harness import Precision
from harness.core.config import FallbackConfig
from harness.core.errors import DataError, Problem
from harness.core.facts import SlotStats, StepFacts
from harness.core.files import atomic_file, read_json, write_json
from harness.monitors.fallback import FallbackController
from harness.precision.recipe import Recipe, load_recipe
from harness.tracking.journal import read_rows
from harness.tracking.slot_file import FIGURES, SlotSteps

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DIM, ROWS, AT, STEPS = 64, 128, 24, 74
FAULTY = "2"
PERIODS = (1, 2, 4, 10)
"""A fault comes in the first of so many steps."""
Change = Callable[[Tensor, float], Tensor]


def _rows(count: int) -> Change:
    return lambda x, factor: torch.cat([x[:count] * factor, x[count:]])


def _columns(count: int) -> Change:
    return lambda x, factor: torch.cat([x[:, :count] * factor, x[:, count:]], dim=1)


def _one(x: Tensor, factor: float) -> Tensor:
    changed = x.clone()
    changed[3, 5] = 3 * factor
    return changed


def _scattered(x: Tensor, factor: float) -> Tensor:
    chosen = torch.rand(x.shape, generator=torch.Generator().manual_seed(7)) < 0.1
    return torch.where(chosen, x * factor, x)


def _all(x: Tensor, factor: float) -> Tensor:
    return x * factor


UP = (1, 2, 4, 8, 12, 14, 15, 16, 18, 24)
GRADIENT = (4, 8, 16, 24, 28, 30, 32, 36, 40)
DOWN = tuple(-bits for bits in UP)
FAMILIES: dict[str, tuple[str, Change, tuple[int, ...]]] = {
    "input, all larger": ("input", _all, UP),
    "input, all smaller": ("input", _all, DOWN),
    "input, a row": ("input", _rows(1), UP),
    "input, a channel": ("input", _columns(1), UP),
    "input, a quarter of the channels": ("input", _columns(DIM // 4), UP),
    "input, half of the rows": ("input", _rows(ROWS // 2), UP),
    "input, one value": ("input", _one, UP),
    "input, a tenth of the values": ("input", _scattered, UP),
    "weight, a row": ("weight", _rows(1), UP),
    "weight, half of the rows": ("weight", _rows(DIM // 2), UP),
    "gradient, all larger": ("grad_output", _all, GRADIENT),
    "gradient, all smaller": ("grad_output", _all, tuple(-bits for bits in GRADIENT)),
    "gradient, a row": ("grad_output", _rows(1), GRADIENT),
    "gradient, half of the channels": ("grad_output", _columns(DIM // 2), GRADIENT),
}
"""Slot, function that makes the fault of its tensor, and the strengths."""


class ChangedGradient(torch.autograd.Function):
    """The identity, whose gradient is changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.change(gradient), None


def policy() -> Recipe:
    """`fp8_hybrid`, with room for every layer to leave."""
    base = load_recipe("fp8_hybrid").model_dump()
    base["fallback"]["max_demoted_share"] = 1.0
    return Recipe.model_validate(base)


def first_out(role: str, change: Change, bits: int, period: int) -> dict[str, int]:
    """{layer: steps from the first faulty one to its first in BF16} of a network with one fault."""
    torch.manual_seed(0)
    precision = Precision(policy())
    layers = [nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM)]
    model = precision.prepare(nn.Sequential(*layers))
    faulty = model.get_submodule(FAULTY)
    step, found = 0, dict[str, int]()

    def apply(x: Tensor) -> Tensor:
        bad = step >= AT and (step - AT) % period == 0
        return change(x, 2.0**bits) if bad else x

    healthy = model.get_parameter(f"{FAULTY}.weight").detach().clone()
    bias = model.get_parameter(f"{FAULTY}.bias").detach()
    clean: list[Tensor] = []

    def enter(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        clean[:] = given
        return ((apply(given[0]) if role == "input" else given[0]).detach(),)

    def leave(_: nn.Module, __: tuple[Tensor, ...], out: Tensor) -> Tensor:
        # The fault is in the layer's own tensors only: its output and the gradient that it passes on do not have it.
        changed = ChangedGradient.apply(out, apply) if role == "grad_output" else out
        return nn.functional.linear(clean[0], healthy, bias) + (changed - out.detach())

    faulty.register_forward_pre_hook(enter)
    faulty.register_forward_hook(leave)
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    for step in range(1, STEPS + 1):
        for name in precision.demoted:
            found.setdefault(str(int(name)), step - AT)
        if role == "weight":
            with torch.no_grad():
                model.get_parameter(f"{FAULTY}.weight").copy_(apply(healthy))
        x = torch.randn(ROWS, DIM, generator=generator)
        with precision.context():
            loss = nn.functional.mse_loss(model(x).float(), x.roll(1, dims=1))
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()
    return found


def faults() -> dict[str, Any]:
    """Every family, printed on the way: steps to the demotion of the faulty layer, 0 if it stayed."""
    found: dict[str, Any] = {}
    for name, (role, change, strengths) in FAMILIES.items():
        found[name] = {"strengths": strengths, "steps": {}, "others": {}}
        for period in PERIODS:
            left = [first_out(role, change, bits, period) for bits in strengths]
            steps = [each.get(FAULTY, 0) for each in left]
            others = [sorted(each.keys() - {FAULTY}) for each in left]
            found[name]["steps"][period] = steps
            found[name]["others"][period] = others
            shown = " ".join(f"{count or '-':>3}" for count in steps)
            count_others = sum(map(bool, others))
            print(f"{name:<34} every {period:>2}  {shown}  others {count_others}")
        print(f"{'':<34} 2^        {' '.join(f'{bits:>3}' for bits in strengths)}", flush=True)
    return found


SIZES = {
    64: (2, 2, 176),
    96: (3, 3, 256),
    128: (3, 2, 344),
    192: (3, 3, 512),
    256: (2, 4, 688),
    384: (2, 6, 1024),
}
"""Layers, heads and ffn by width."""
GRID = (
    *(
        (64, 3e-3, 4),
        (64, 1e-2, 4),
        (64, 1e-2, 20),
        (96, 3e-3, 4),
        (96, 1e-2, 20),
        (128, 3e-3, 4),
        (128, 1e-2, 4),
    ),
    *((192, 3e-3, 4), (192, 1e-2, 20), (256, 3e-3, 20), (256, 1e-2, 20), (384, 3e-3, 4)),
    *((96, 3e-3, 4), (96, 1e-2, 4), (128, 1e-2, 4), (128, 1e-2, 20)),
)
"""Width, learning rate, warm-up steps. The last four came later, as only 21 of the first 24 runs were healthy."""
_GRADIENTS = "fp8/grad_output/even_db_min"
SPIKES = ("gradient.skip", "loss.spike", "loss.skip", "nonfinite.skip")


def healthy(work: Path, other: Path, first_seed: int) -> list[dict[str, Any]]:
    """One row a run: its settings, its moves, and the codes of the events of the same run in bf16."""
    rows: list[dict[str, Any]] = []
    for number, (dim, lr, warmup) in enumerate(GRID):
        for place, corpus in enumerate(("standard library", "other")):
            seed = first_seed + 2 * number + place
            layers, heads, ffn = SIZES[dim]
            sizes = {"dim": dim, "layers": layers, "heads": heads, "kv_heads": heads}
            args = {**sizes, "ffn": ffn, "tied": True}
            steps = 100 if dim < 256 else 60
            given = [f"train.lr={lr}", f"train.warmup_steps={warmup}", f"train.seed={seed}"]
            given += [f"train.steps={steps}", f"model.args={json.dumps(args)}"]
            given += ["tracking.mlflow=false", "tracking.report=false", "tracking.fp8_every=1"]
            given += ["checkpoint.every=0"]
            if corpus == "other":
                given.append(f"data.path={other}")

            # What the FP8 run reports: its moves, and the worst sample of a gradient.
            demotions: list[str] = []
            lowest = math.inf
            for row in _journal(work, "fp8_hybrid", seed, given):
                if row["kind"] == "event" and row["code"] == "precision.demote":
                    demotions.append(row["text"])
                if row["kind"] == "metrics" and _GRADIENTS in row["metrics"]:
                    # A NaN, which no comparison finds smaller, is left out.
                    lowest = min(lowest, row["metrics"][_GRADIENTS])

            # The same run in bf16 says whether the run is healthy in itself.
            journal = _journal(work, "bf16", seed, given)
            codes = sorted({row["code"] for row in journal if row["kind"] == "event"})
            found: dict[str, Any] = {"dim": dim, "lr": lr, "warmup": warmup, "corpus": corpus}
            found |= {"seed": seed, "twin": codes, "healthy": not set(codes) & set(SPIKES)}
            found |= {"demotions": demotions, "lowest even_db of a gradient": round(lowest, 2)}
            rows.append(found)
            print(json.dumps(found), flush=True)
    return rows


TIGHTER = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Octaves by which limits are tightened."""
TIGHTENED = ("saturation", "clipped", "underflow", "sqnr_db", "even_db")


def tightened(shipped: FallbackConfig, statistic: str, octaves: float) -> FallbackConfig:
    """The policy with the limits of one statistic, of all roles, so many octaves tighter."""
    changed: dict[str, float] = {}
    for key, value in shipped.model_dump().items():
        if not key.startswith(statistic):
            continue
        if "_db" in key:
            changed[key] = value + 20 * math.log10(2) * octaves
        else:
            changed[key] = value * 2.0**-octaves
    return shipped.model_copy(update=changed)


def recorded(run: Path) -> list[StepFacts]:
    """Every step of a recorded run, as the fallback's controller sees a run without faults.

    Raises DataError unless the run has the statistics of each of its steps once, of the same slots.
    """
    stored = SlotSteps.of(run)
    rows = [] if stored is None else list(stored.read())
    names = rows[0][1] if rows else ()
    complete = [step for step, _, _ in rows] == list(range(1, len(rows) + 1))
    if not rows or not complete or any(each != names for _, each, _ in rows):
        why = f"it has {len(rows)} steps with FP8 statistics"
        fix = "train it in one piece with tracking.fp8_every=1"
        raise DataError(
            Problem("the run does not hold the statistics of every step once", str(run), why, fix)
        )
    return [
        StepFacts(
            step=step,
            window=step - 1,
            loss=1.0,
            grad_norm=1.0,
            lr=1e-3,
            loss_scale=1.0,
            applied=True,
            applied_steps=step,
            tokens=1,
            seconds=1.0,
            slots=SlotStats(names, **dict(zip(FIGURES, values, strict=True))),
        )
        for step, _, values in rows
    ]


def loses_a_layer(limits: FallbackConfig, run: Sequence[StepFacts]) -> bool:
    """Whether a fresh controller with these limits says anything but `precision.ok` of a recorded run."""
    assert run[0].slots is not None
    layers = tuple(dict.fromkeys(slot.rpartition(".")[0] for slot in run[0].slots.names))
    controller = FallbackController(limits, layers)
    return any(not controller.observe(step).ok for step in run)


def alarms(folders: Sequence[Path]) -> dict[str, list[int]]:
    """How many of the recorded healthy runs lose a layer: by statistic, at each of TIGHTER."""
    runs = [recorded(folder) for folder in folders]
    found: dict[str, list[int]] = {}
    for statistic in TIGHTENED:
        limits = [tightened(policy().fallback, statistic, octaves) for octaves in TIGHTER]
        found[statistic] = [sum(loses_a_layer(each, run) for run in runs) for each in limits]
    return found


def draw_alarms(found: Mapping[str, Sequence[int]], runs: int, path: Path) -> None:
    """The curves, as a picture."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for statistic, counts in found.items():
        shares = [100 * count / runs for count in counts]
        axes.plot(TIGHTER, shares, marker="o", markersize=4, label=statistic)
    axes.set_xlabel(
        "octaves (6 dB) by which the limits of one statistic are tightened; 0: as shipped"
    )
    axes.set_ylabel(f"of {runs} healthy runs lose a layer, %")
    axes.set_ylim(-3, 103)
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.legend(frameon=False, fontsize=9, loc="center right")
    with atomic_file(path) as stream:
        figure.savefig(stream, format="png", facecolor="white", dpi=120)


def _journal(work: Path, recipe: str, seed: int, given: list[str]) -> list[dict[str, Any]]:
    folder = work / "runs" / f"{recipe}-{seed}"
    if not (folder / "outcome.json").exists():
        command = [
            sys.executable,
            str(ROOT / "launch" / "train.py"),
            "--config",
            "tiny",
            "--recipe",
            recipe,
        ]
        command += ["--name", folder.name, *given]
        subprocess.run(
            command,
            cwd=work,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
        )
    return list(read_rows(folder / "journal.jsonl"))


def main() -> None:
    """Run one part and write its results file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["faults", "held-out", "missed", "healthy"])
    parser.add_argument("--work", type=Path, help="where healthy runs are, or will be")
    parser.add_argument("--other", type=Path, help="a folder of text")
    parser.add_argument(
        "--draw", action="store_true", help="of held-out and missed: what was measured before"
    )
    parser.add_argument("--first-seed", type=int, default=300)
    given = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "command": f"python -m benchmarks.evidence {given.part}",
        "machine": f"{platform.machine()} CPU, one thread, torch {torch.__version__}",
        "policy": policy().fallback.model_dump(),
    }
    if given.part == "faults":
        record |= {"fault at step": AT, "steps": STEPS, "families": faults()}
    elif given.part in ("held-out", "missed"):
        record = _held_out(given.part, record, given.draw)
    else:
        given.work.mkdir(parents=True, exist_ok=True)
        rows = healthy(given.work, given.other.resolve(), given.first_seed)
        well = [row for row in rows if row["healthy"]]
        loud = sum(bool(row["demotions"]) for row in well)
        upper = binomial_upper(loud, len(well))
        print(
            f"{loud} of {len(well)} healthy runs with a demotion (95% upper bound {upper:.0%}); {len(rows)} runs"
        )
        record |= {
            "runs": rows,
            "healthy": len(well),
            "with a demotion": loud,
            "upper bound": upper,
        }
        found = alarms([given.work / "runs" / f"fp8_hybrid-{row['seed']}" for row in well])
        record |= {"octaves tighter": list(TIGHTER), "healthy runs that lose a layer": found}
        draw_alarms(found, len(well), ROOT / "docs" / "images" / "evidence_alarms.png")
    write_json(_results(given.part), record)


def _results(part: str) -> Path:
    return RESULTS / f"evidence_{part.replace('-', '_')}_cpu.json"


def _held_out(part: str, record: dict[str, Any], draw: bool) -> dict[str, Any]:
    """Measure, unless `draw`; print the table and draw."""
    from benchmarks import held_out, held_out_pictures

    if draw:
        record = read_json(_results(part))
    else:
        record |= {"fault at step": held_out.AT, "steps": [held_out.STEPS, held_out.GPT_STEPS]}
        record["faults"] = held_out.measure() if part == "held-out" else held_out.measure_missed()
    print(
        held_out_pictures.table(record["faults"]),
        held_out_pictures.summary(record["faults"]),
        sep="\n\n",
    )
    held_out_pictures.draw(record["faults"], ROOT / "docs" / "images", part)
    return record


if __name__ == "__main__":
    main()
