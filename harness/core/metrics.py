"""Everything about metrics that follows from their declarations, the fields of `StepFacts` and `SlotStats`.

- `SCALARS`, `REDUCED` and `read`: how the figures of the whole step are packed, reduced over ranks and unpacked.
- `row`: their row in the journal.
- `page`: the table in the docs.

Figures of slots are rows of an array (`facts.SLOT_ROWS`); `tracking.slot_series` puts them into the journal's row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from harness.core.facts import EVERY_STEP, SLOT_ROWS, Metric, SlotStats, StepFacts, declared_metrics

if TYPE_CHECKING:
    from harness.core.state import RunLedger


_DECLARED = declared_metrics(StepFacts) | declared_metrics(SlotStats)
# Figures of the whole step are plain numbers; those of slots are arrays.
_PLAIN = (float, int, bool)
_READ = {name: kind for name, (kind, _) in _DECLARED.items() if kind in _PLAIN}
_FIELDS = (*fields(StepFacts), *fields(SlotStats))
_DEFAULTS = {each.name: each.default for each in _FIELDS}

SCALARS: dict[str, Metric] = {name: _DECLARED[name][1] for name in _READ}
"""The figures of the whole step by their field, in the order in which they are packed."""

OF_LAYERS: Metric = _DECLARED["layer_norms"][1]
"""The figure of each layer in a hunt; `/<layer>` is appended to its key."""

# Bits of `StepFacts.bad_data`, the one figure whose ranks are joined bit by bit.
_BITS = 4


def _reduced() -> Iterator[tuple[str, int]]:
    for name, metric in SCALARS.items():
        if metric.over_ranks == "ranks agree":
            continue
        # MAX of whole masks would drop the bits of all ranks but one, so each bit has an element of its own.
        bits = _BITS if metric.over_ranks == "any bit" else 1
        for bit in range(bits):
            yield name, bit


REDUCED: list[tuple[str, int]] = list(_reduced())
"""(name, bit) of each element for a step's figures in the update's one MAX over ranks."""


def read(packed: Sequence[float]) -> dict[str, Any]:
    """Values by name, unpacked in the order of `SCALARS`. NaN becomes the field's default, if it has one."""
    values: dict[str, Any] = {}
    for name, value in zip(SCALARS, packed, strict=True):
        if math.isnan(value) and _DEFAULTS[name] is not MISSING:
            values[name] = _DEFAULTS[name]
        else:
            values[name] = _READ[name](value)
    return values


def _tokens_per_second(facts: StepFacts, _: RunLedger) -> float:
    if not facts.seconds > 0 or not facts.tokens:
        return math.nan
    return facts.tokens / facts.seconds


def _mfu(facts: StepFacts, _: RunLedger) -> float:
    if not facts.seconds > 0:
        return math.nan
    return facts.ideal_seconds / facts.seconds


MFU = "train/mfu"

# Metrics of the run as a whole: key, unit, what it is, and the function that computes it.
_OF_THE_RUN: tuple[tuple[str, str, str, Callable[[StepFacts, RunLedger], float]], ...] = (
    (
        "train/tokens_per_second",
        "tokens / s",
        "the step's tokens over its seconds",
        _tokens_per_second,
    ),
    (
        MFU,
        "",
        "model FLOPs utilisation, by the card's peak for its fastest precision, where that is known",
        _mfu,
    ),
    (
        "guard/skipped",
        "",
        "updates skipped so far, also before a rollback",
        lambda _, ledger: float(ledger.skips),
    ),
    (
        "guard/demoted_layers",
        "",
        "FP8 layers that run in BF16",
        lambda facts, _: float(len(facts.demoted)),
    ),
    (
        "guard/rollbacks",
        "",
        "rollbacks so far",
        lambda _, ledger: float(len(ledger.returned_to)),
    ),
    (
        "guard/attempt",
        "",
        "attempt; every rollback adds 1",
        lambda _, ledger: float(ledger.attempt),
    ),
    (
        "Loss/train",
        "nats per token",
        "`train/loss`, which MLflow shows first",
        lambda facts, _: facts.loss,
    ),
)


def row(facts: StepFacts, ledger: RunLedger) -> dict[str, float]:
    """The journal's row of one step, without its FP8 figures. A figure that was not measured is left out."""
    found: dict[str, float] = {}
    for name, metric in SCALARS.items():
        if not metric.key:
            continue
        value = float(getattr(facts, name))
        # NaN in a figure of every step is a value: a loss that is not finite must show in its chart.
        if metric.often == EVERY_STEP or not math.isnan(value):
            found[metric.key] = value
    for layer, norm in facts.layer_norms.items():
        found[f"{OF_LAYERS.key}/{layer}"] = norm
    for key, _, _, compute in _OF_THE_RUN:
        found[key] = compute(facts, ledger)
    if math.isnan(found[MFU]):
        del found[MFU]
    return found


ROLE_QUANTILES: dict[str, tuple[str, ...]] = {
    "amax": ("min", "p10", "p50", "p90", "max"),
    "scale": ("min", "p50", "max"),
    "saturation": ("p10", "p50", "p90", "max"),
    "clipped": ("max",),
    "underflow": ("p50", "p90", "max"),
    "sqnr_db": ("min", "p50"),
    "even_db": ("min",),
    "centred_db": ("min",),
}
"""Quantiles over layers that each figure has as series for each role: 60 series, whatever the model's size."""


def page() -> str:
    """The page of every metric that a run writes: `python -m harness.core.metrics > docs/reference/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        *_BEGINNING,
        "| metric | what | measured |",
        "|---|---|---|",
    ]
    # Declared at the fields of facts.
    keyed = [(metric.key, metric) for metric in SCALARS.values() if metric.key]
    keyed.append((f"{OF_LAYERS.key}/<layer>", OF_LAYERS))
    keyed += [(f"{metric.key}/<slot>", metric) for metric in SLOT_ROWS.values()]
    for key, metric in keyed:
        lines.append(_page_row(key, metric.about, metric.unit, metric.over_ranks, metric.often))

    # Of the run as a whole, and of its validations.
    for key, unit, about, _ in _OF_THE_RUN:
        lines.append(_page_row(key, about, unit, "ranks agree", EVERY_STEP))
    validated = (
        ("val/loss", "mean loss over the validation samples", "as the data's"),
        ("Loss/val", "`val/loss` again", ""),
        ("val/accuracy", "share of labels predicted right, where labels are classes", ""),
    )
    for key, about, unit in validated:
        lines.append(_page_row(key, about, unit, "mean", "train.eval_every, the end"))

    # Over the layers of each role.
    for figure, quantiles in ROLE_QUANTILES.items():
        metric = SLOT_ROWS[figure]
        key = f"fp8/<role>/{figure}_<quantile>"
        about = f"{', '.join(quantiles)} of `fp8_{figure}` over the layers"
        lines.append(_page_row(key, about, metric.unit, metric.over_ranks, metric.often))
    return "\n".join(lines) + "\n"


def _page_row(key: str, about: str, unit: str, over_ranks: str, often: str) -> str:
    """A line of the page's table; how ranks are joined is said where their values differ."""
    notes = [unit] if unit else []
    if over_ranks != "ranks agree":
        notes.append(f"{over_ranks} over ranks")
    note = f" ({', '.join(notes)})" if notes else ""
    return f"| `{key}` | {about}{note} | {often} |"


_BEGINNING = (
    "<!-- Made from the declarations: python -m harness.core.metrics > docs/reference/metrics.md -->",
    "Every metric in a run's journal, and from there in MLflow.",
    "",
    "<!-- setup",
    "from pathlib import Path",
    "from harness.tracking.journal import Journal",
    'Path("runs/my-run").mkdir(parents=True)',
    'with Journal(Path("runs/my-run/journal.jsonl")) as journal:',
    '    journal.metrics(1, {"train/loss": 5.5})',
    "-->",
    "```python",
    "import json",
    "",
    'with open("runs/my-run/journal.jsonl") as journal:',
    "    for row in map(json.loads, journal):",
    '        if row["kind"] == "metrics":',
    '            print(row["step"], row["metrics"].get("train/loss"))',
    "```",
    "",
    "- Without `max over ranks` all ranks have the same value. A slot's shares and decibels are over all ranks.",
    "- **measured**: a key stands for one step in so many, and the last. `sampled`: the value of the last sampled step",
    "  (`fp8.stats_every`).",
    "- `<slot>` is `<layer>.<role>`; a role is input, weight or grad_output. Numbers in names are padded with zeros.",
    "  Models of over `tracking.fp8_series` slots have series of picked ones ([telemetry.md](../guide/telemetry.md)).",
    "- Over the layers: `p10`, `p50` and `p90` are of the step, `min` and `max` of every step since the row before.",
    "",
)


if __name__ == "__main__":
    print(page(), end="")
