"""How far `harness estimate` is off: rates from one record of `make proof`, tested on steps of another.

    python -m benchmarks.estimated [--json]
    python -m benchmarks.estimated --fit RECORD > rates.json
    python -m benchmarks.estimated --memory RECORD

The first takes about two minutes on a CPU. The records are of one kind of card with two versions of torch. The rates of
each version predict every step that was timed with the other, so no step is predicted from its own record.

`--fit` writes a record's rates for `harness estimate --calibration`, with one more: `gap_seconds`, what a kernel of an
eager step adds to its roofline. It is the median over the record's eager bf16 steps of

    (measured seconds - roofline seconds) / kernel launches

`--memory` puts the bytes at the peak of each step of a record beside what is predicted; no rates are needed.

Only bf16 is fitted: every proof has such steps, and those in FP8 stay a test. This choice was made with both records in
sight: least squares over all eager steps, torchao's too, made bf16 of the other record worse than it is without a gap.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from harness.core.files import read_json

if TYPE_CHECKING:
    from benchmarks.proof.training import Size
    from harness.capability.cards import Card
    from harness.core.config import RunConfig
    from harness.estimate.prediction import Timing, Traces
    from harness.estimate.roofline import Rates
    from harness.estimate.trace import Trace
    from harness.precision.recipe import Recipe

RESULTS = Path(__file__).resolve().parent / "results"
# A record with rates, and the records that were measured with the other torch.
TESTED_ON = {
    "proof_h100": ("proof_h100_torch213", "proof_h100_torch213_after"),
    "proof_h100_torch213": (
        "proof_h100",
        "proof_h100_saves",
        "proof_h100_shipped",
        "proof_h100_profiles",
    ),
}
# Of this record bf16 alone: its FP8 steps sampled statistics with a kernel that did not compile, which was mended.
FP8_WAS_SLOW = "proof_h100_shipped"
BF16 = "autocast:bf16"
EAGER = "eager"
_VOCABULARY = 256
"""Of the usual model."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that a record timed.

    record: the record's name.
    rung: what ran.
    how: eager or compiled, whether blocks were fused, whether no step sampled statistics, and model and tokens where
        they are not the usual ones (8 layers of width 4096, a vocabulary of 256, 4,096 tokens).
    size: name of the model and of its tokens.
    config, recipe: what is estimated.
    seconds: the measured median.
    peak: measured bytes; None where the row has none.
    """

    record: str
    rung: str
    how: str
    size: str
    config: RunConfig
    recipe: Recipe
    seconds: float
    peak: int | None = None

    @property
    def name(self) -> str:
        """Steps of one name are the same measurement, made again."""
        return f"{self.rung}, {self.how}"


@dataclass(frozen=True, slots=True)
class Tested:
    """A step beside its prediction.

    calibration: the record that the rates are of.
    gap: its `gap_seconds`.
    seconds, without_gap: predicted with and without the gap.
    peak: predicted bytes.
    """

    calibration: str
    step: Step
    gap: float
    seconds: float
    without_gap: float
    peak: int

    def as_dict(self) -> dict[str, Any]:
        """Errors are predicted over measured, less one."""
        step = self.step
        return {
            "calibration": self.calibration,
            "gap_seconds": self.gap,
            "record": step.record,
            "step": step.name,
            "measured_ms": 1e3 * step.seconds,
            "predicted_ms": 1e3 * self.seconds,
            "error": self.seconds / step.seconds - 1,
            "error_without_gap": self.without_gap / step.seconds - 1,
            "memory_error": None if step.peak is None else self.peak / step.peak - 1,
        }


def steps_of(path: Path) -> Iterator[Step]:
    """The steps that a record timed; of those in the row `watching` only the one without any monitoring."""
    from benchmarks.proof import saves, training

    for row in read_json(path)["rows"]:
        figures = row["figures"]
        if row["status"] != "passed":
            continue
        if row["name"] == "profiles":
            yield from _profiled(path.stem, figures)
        elif "model" in figures:
            yield from _raced(path.stem, figures)
        elif row["name"] == "watching":
            fp8, over = training.BARE
            recipe = training.recipe_of("native", **fp8)
            seconds = figures["contenders"]["neither"]["seconds"]["median"]
            yield _small(path.stem, _named(figures["size"]), recipe, over, seconds)
        elif row["name"] == "saves":
            recipe = training.recipe_of("native")
            yield _small(path.stem, saves.SIZE, recipe, {}, figures["step_seconds"])


def _size(figures: Mapping[str, Any]) -> Size:
    """The model and batch of a row."""
    from benchmarks.proof.training import Size

    model = figures["model"]
    args = {key: value for key, value in model.items() if key not in ("context", "parameters")}
    # Records from before there were rows of several samples say nothing of them.
    samples, micro_batch = figures.get("samples", 1), figures.get("micro_batch", 1)
    return Size(figures["size"], model["context"], args, samples, micro_batch)


def _raced(record: str, figures: Mapping[str, Any]) -> Iterator[Step]:
    """Both contenders of `training.race`."""
    from benchmarks.proof.training import config_of, recipe_of

    model, size = figures["model"], _size(figures)
    fused = bool(figures.get("fused"))
    for name, timed in figures["contenders"].items():
        how = "compiled" if figures["compiled"] else EAGER
        if name == "16 bit":
            recipe = recipe_of(name)
        else:
            # "compiled" is of bf16. The FP8 recipe's plan says if its own blocks are not.
            if any("blocks run eager" in note for note in figures.get("plan_notes", ())):
                how = EAGER
            recipe = recipe_of(figures["backend"], fuse=fused)
            how += ", fused" if fused else ""
        if size.samples > 1:
            how += f", {size.samples * size.context:,} tokens"
        if model["vocab"] != _VOCABULARY:
            how += f", vocabulary {model['vocab']:,}"
        # No file is read: an estimate makes up its tokens.
        config = config_of(size, recipe, Path("text.txt"))
        seconds = timed["seconds"]["median"]
        yield Step(record, timed["rung"], how, size.name, config, recipe, seconds, timed["peak"])


def _profiled(record: str, figures: Mapping[str, Any]) -> Iterator[Step]:
    """The contenders of the row of profiles, as they ran before the profiler. None of their steps sampled."""
    from benchmarks.proof.profiles import SETUPS
    from benchmarks.proof.training import NEVER, config_of, recipe_of

    size = _size(figures)
    for name, timed in figures["contenders"].items():
        setup = SETUPS[name]
        recipe = recipe_of(setup.backend, fuse=setup.fuse, stats_every=NEVER)
        how = "compiled" if timed["compiled"] else EAGER
        how += ", fused" if setup.fuse else ""
        how += ", no statistics"
        config = config_of(size, recipe, Path("text.txt"))
        seconds = timed["step_ms"] / 1e3
        yield Step(record, timed["rung"], how, size.name, config, recipe, seconds, timed["peak"])


def _small(
    record: str, size: Size, recipe: Recipe, over: Mapping[str, Any], seconds: float
) -> Step:
    """A native step of a smaller model. over: sections of its config."""
    from benchmarks.proof.training import config_of

    how = f"{EAGER}, {size.args['layers']} layers of width {size.args['dim']}"
    config = config_of(size, recipe, Path("text.txt"), over)
    return Step(record, "native:fp8", how, size.name, config, recipe, seconds)


def _named(name: str) -> Size:
    from benchmarks.proof.training import SIZES, llama

    return next(size for size in (*SIZES, llama(4096, 4096, layers=4)) if size.name == name)


def card_of(path: Path) -> Card:
    """The card that a record is of."""
    from harness.capability.cards import CARDS

    name = read_json(path)["roofline"]["card"]
    for card in CARDS.values():
        if card.name == name:
            return card
    raise SystemExit(f"{path}: harness estimate has no datasheet of {name}")


def traced(step: Step, card: Card, traces: Traces) -> Trace:
    """The step on fake tensors, as `harness estimate` traces it."""
    from harness.estimate.prediction import trace_rung

    made = trace_rung(step.config, step.recipe, card, step.recipe.ladder[0], 1, traces)[0]
    # What a record's config says of compilation is older than the key's present meaning.
    return replace(made, compiled=not step.how.startswith(EAGER))


def timed(step: Step, made: Trace, rates: Rates) -> Timing:
    from harness.estimate.prediction import time_steps

    return time_steps(made.steps, rates, step.recipe.fp8.stats_every)


def fitted(path: Path, traces: Traces) -> Rates:
    """A record's rates, with the gap that its eager bf16 steps have. Without such a step the gap stays 0."""
    from harness.estimate.roofline import read_calibration

    card = card_of(path)
    rates = replace(read_calibration(path, card).rates, gap_seconds=0.0)
    gaps: list[float] = []
    for step in steps_of(path):
        if step.name == f"{BF16}, {EAGER}":
            timing = timed(step, traced(step, card, traces), rates)
            gaps.append((step.seconds - timing.mean) / timing.kernels)
    # A step that is faster than its roofline has no gaps.
    return replace(rates, gap_seconds=max(0.0, median(gaps)) if gaps else 0.0)


def tested() -> list[Tested]:
    """Every step of every record, predicted with the rates of the other torch.

    Call `device.load` first, before torch is imported.
    """
    from harness.estimate.prediction import Traces

    traces = Traces()
    found: list[Tested] = []
    for calibration, records in TESTED_ON.items():
        path = RESULTS / f"{calibration}.json"
        card, rates = card_of(path), fitted(path, traces)
        without = replace(rates, gap_seconds=0.0)
        for record in records:
            for step in steps_of(RESULTS / f"{record}.json"):
                if record == FP8_WAS_SLOW and step.rung != BF16:
                    continue
                made = traced(step, card, traces)
                seconds = timed(step, made, rates).mean
                bare = timed(step, made, without).mean
                gap = rates.gap_seconds
                found.append(Tested(calibration, step, gap, seconds, bare, made.peak))
    return found


def peaks(path: Path) -> Iterator[tuple[Step, int]]:
    """The steps of a record whose peak was measured, each with the predicted bytes. Call `device.load` first."""
    from harness.estimate.prediction import Traces

    card, traces = card_of(path), Traces()
    for step in steps_of(path):
        if step.peak is not None:
            yield step, traced(step, card, traces).peak


def table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown: errors of each step, without and with gaps, by the record that the rates are of.

    found: from `Tested.as_dict`.
    """
    lines: list[str] = []
    for name in dict.fromkeys(each["step"] for each in found):
        cells = [name]
        for calibration in TESTED_ON:
            here = [
                each for each in found if (each["step"], each["calibration"]) == (name, calibration)
            ]
            cells.append(_span([each["error_without_gap"] for each in here]))
            cells.append(_span([each["error"] for each in here]))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _span(errors: Sequence[float]) -> str:
    """One percentage, or the smallest and the largest."""
    if not errors:
        return ""
    # What rounds to nothing has no sign of its own.
    ends = (round(end, 2) + 0.0 for end in (min(errors), max(errors)))
    return " to ".join(dict.fromkeys(f"{end:+.0%}" for end in ends))


def main() -> None:
    parser = argparse.ArgumentParser(description="how far harness estimate is off on records")
    parser.add_argument("--json", action="store_true", help="every step, as JSON")
    parser.add_argument("--fit", type=Path, metavar="RECORD", help="print this record's rates")
    parser.add_argument("--memory", type=Path, metavar="RECORD", help="peaks of a record's steps")
    arguments = parser.parse_args()

    from harness.estimate import device

    device.load()  # before anything imports torch
    if arguments.fit:
        from harness.estimate.prediction import Traces

        section = dict(read_json(arguments.fit)["roofline"])
        section["gap_seconds"] = fitted(arguments.fit, Traces()).gap_seconds or None
        command = f"python -m benchmarks.estimated --fit {arguments.fit}"
        print(json.dumps({"command": command, "roofline": section}, indent=1))
        return

    if arguments.memory:
        for step, predicted in peaks(arguments.memory):
            assert step.peak is not None
            measured, error = step.peak / 2**30, predicted / step.peak - 1
            told = f"{measured:5.2f} GiB, predicted {predicted / 2**30:5.2f} ({error:+.1%})"
            print(f"{step.name:36} {step.size}: {told}")
        return

    found = [each.as_dict() for each in tested()]
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    for each in found:
        memory = each["memory_error"]
        told = "" if memory is None else f", memory {memory:+.1%}"
        print(
            f"{each['calibration']:19} -> {each['record']:25} {each['step']:42} "
            f"{each['measured_ms']:5.1f} ms, predicted {each['predicted_ms']:5.1f}{told}"
        )
    print(*table(found), sep="\n")


if __name__ == "__main__":
    main()
