"""Which samples were unfit to train on, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.core.errors import some
from harness.core.facts import (
    BAD_LABEL,
    NO_LABEL,
    NON_FINITE_INPUT,
    UNREADABLE,
    Continue,
    Halt,
    StepFacts,
    Verdict,
)
from harness.core.health import name_faults
from harness.core.protocols import Batches
from harness.monitors.base import BadData, KeptWindow, MonitorContext

NAMED_IN_TEXT = 3
NAMED_IN_EVIDENCE = 32
# From the worst to the least: code and words.
_KINDS = {
    BAD_LABEL: ("data.label", "labels or tokens out of range"),
    UNREADABLE: ("data.unreadable", "samples that cannot be read"),
    NON_FINITE_INPUT: ("data.nonfinite", "values that are not finite"),
    NO_LABEL: ("data.empty", "micro-batches without a label"),
}


@dataclass(frozen=True, slots=True)
class _Found:
    """samples: bad ones, in reading order. texts: what is wrong with each, or with a whole micro-batch."""

    samples: list[int]
    texts: list[str]


class DataMonitor(KeptWindow):
    """Names the samples behind `facts.bad_data` by reading the window again: all of it, on every rank alike.

    policy: what bad samples lead to. skip: only their window's update is lost, as the step itself saw to. fail: the run
    halts. auto: labels and tokens out of range halt it, since they tell of a broken data set, the rest is skipped.
    vocab_size, classes: tokens are in [0, vocab_size), labels in [0, classes); None: unknown.

    Verdicts, all unhealthy: `data.label`, `data.unreadable`, `data.nonfinite`, `data.empty` (the worst of a step gives
    the code, the text has all of them), else `data.ok`. The monitor keeps nothing.
    """

    key = "data"

    def __init__(
        self, batches: Batches, vocab_size: int | None, policy: BadData, classes: int | None = None
    ) -> None:
        self.batches = batches
        self.vocab_size, self.classes = vocab_size, classes
        self.policy: BadData = policy

    @classmethod
    def build(cls, context: MonitorContext) -> DataMonitor | None:
        """For every run whose data is known."""
        if context.data is None:
            return None
        return cls(context.data, context.vocab_size, context.bad_data, context.classes)

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic, as the data source is."""
        if not facts.bad_data:
            return Verdict("data.ok", facts.step)
        kinds = [kind for bit, kind in _KINDS.items() if facts.bad_data & bit]
        code, _ = kinds[0]
        found = self._read_again(facts)
        what = "; ".join(found.texts[:NAMED_IN_TEXT])
        if len(found.texts) > NAMED_IN_TEXT:
            what += f"; and {len(found.texts) - NAMED_IN_TEXT} more"
        if not found.texts:
            told = ", ".join(words for _, words in kinds)
            what = f"{told}, but not when read again: the data source or a rank's memory gives other values each time"
        text = f"update skipped, weights unchanged: window {facts.window} of {self.batches.name}: {what}"
        evidence: dict[str, Any] = {
            "window": facts.window,
            "samples": found.samples[:NAMED_IN_EVIDENCE],
            "found": found.texts[:NAMED_IN_EVIDENCE],
            "count": len(found.texts),
        }
        fails = self.policy == "fail" or (self.policy == "auto" and facts.bad_data & BAD_LABEL)
        proposal = Halt(_reason(facts.window, what)) if fails else Continue()
        return Verdict(
            code, facts.step, text, healthy=False, proposal=proposal, evidence=evidence, skip=True
        )

    def _read_again(self, facts: StepFacts) -> _Found:
        window = self.batches.window(facts.window)
        numbers = [int(number) for number in window.samples]
        found = _Found([], [])
        first = 0
        for batch in self.batches.micro_batches(window, rank=0, world_size=1):
            rows = numbers[first : first + len(next(iter(batch.values())))]
            for fault in name_faults(batch, self.vocab_size, self.classes):
                bad = rows if fault.row is None else rows[fault.row : fault.row + 1]
                found.samples.extend(number for number in bad if number not in found.samples)
                found.texts.append(f"{_samples(bad)}: {fault.text}")
            first += len(rows)
        return found


def _samples(numbers: list[int]) -> str:
    return f"sample{'s' if len(numbers) > 1 else ''} {some(numbers, NAMED_IN_TEXT)}"


def _reason(window: int, what: str) -> str:
    return (
        f"window {window} is unfit to train on: {what}. Repair the data or leave these samples out, check that the "
        "tokeniser fits the model's vocab_size, or pass over such windows with data.bad=skip, in a new run: "
        "--name NEW --resume runs/<run>/checkpoints/step-<N>"
    )
