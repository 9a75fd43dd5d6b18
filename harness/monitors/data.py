"""Names the samples that cannot be trained on, and what is wrong with them.

The step itself only flags bad data and skips the update. This monitor reads the window again to find the samples.
"""

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
# Code and words of each kind of fault, the worst first.
_KINDS = {
    BAD_LABEL: ("data.label", "labels or tokens out of range"),
    UNREADABLE: ("data.unreadable", "samples that cannot be read"),
    NON_FINITE_INPUT: ("data.nonfinite", "values that are not finite"),
    NO_LABEL: ("data.empty", "micro-batches without a label"),
}


@dataclass(frozen=True, slots=True)
class _Found:
    """Faults of one window.

    samples: the numbers of bad samples, in reading order.
    texts: what is wrong with each of them, or with a whole micro-batch.
    """

    samples: list[int]
    texts: list[str]


class DataMonitor(KeptWindow):
    """Names the samples behind `facts.bad_data` by reading the whole window again, on every rank alike.

    batches: the run's data.
    vocab_size: tokens are in [0, vocab_size); None: unknown.
    classes: labels are in [0, classes); None: unknown.
    policy: what bad samples lead to.
    - skip: only the update of their window is lost; the step itself has skipped it.
    - fail: the run halts.
    - auto: labels and tokens out of range halt the run, since they show a broken data set. Other faults skip.

    Verdicts, all unhealthy: `data.label`, `data.unreadable`, `data.nonfinite`, `data.empty`. The worst fault of a step
    gives the code, the text names all of them. Else `data.ok`. The monitor keeps no state.
    """

    key = "data"

    def __init__(
        self, batches: Batches, vocab_size: int | None, policy: BadData, classes: int | None = None
    ) -> None:
        self.batches = batches
        self.vocab_size = vocab_size
        self.classes = classes
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

        # The step knows the kinds of faults only. Reading the window again names the samples.
        found = self._read_again(facts)
        if found.texts:
            what = "; ".join(found.texts[:NAMED_IN_TEXT])
            if len(found.texts) > NAMED_IN_TEXT:
                what += f"; and {len(found.texts) - NAMED_IN_TEXT} more"
        else:
            faults = ", ".join(words for _, words in kinds)
            what = f"{faults}, but not when read again"
            what += ": the data source is not deterministic, or a rank's memory is faulty"

        text = f"update skipped, weights unchanged: window {facts.window} of {self.batches.name}: {what}"
        evidence: dict[str, Any] = {
            "window": facts.window,
            "samples": found.samples[:NAMED_IN_EVIDENCE],
            "found": found.texts[:NAMED_IN_EVIDENCE],
            "count": len(found.texts),
        }

        # Labels out of range come from a broken data set or the wrong tokenizer: skipping would not end.
        broken = bool(facts.bad_data & BAD_LABEL)
        proposal: Continue | Halt = Continue()
        if self.policy == "fail" or (self.policy == "auto" and broken):
            proposal = Halt(_reason(facts.window, what))
        return Verdict(
            code, facts.step, text, healthy=False, proposal=proposal, evidence=evidence, skip=True
        )

    def _read_again(self, facts: StepFacts) -> _Found:
        """Check every micro-batch of the window as the step did, and name what is wrong."""
        window = self.batches.window(facts.window)
        numbers = [int(number) for number in window.samples]
        found = _Found([], [])
        first = 0
        for batch in self.batches.micro_batches(window, rank=0, world_size=1):
            # The sample numbers of this micro-batch, in the order of its rows.
            size = len(next(iter(batch.values())))
            rows = numbers[first : first + size]
            for fault in name_faults(batch, self.vocab_size, self.classes):
                # A fault of no single row is one of the whole micro-batch.
                bad = rows
                if fault.row is not None:
                    bad = rows[fault.row : fault.row + 1]
                found.samples.extend(number for number in bad if number not in found.samples)
                found.texts.append(f"{_samples(bad)}: {fault.text}")
            first += len(rows)
        return found


def _samples(numbers: list[int]) -> str:
    word = "samples" if len(numbers) > 1 else "sample"
    return f"{word} {some(numbers, NAMED_IN_TEXT)}"


def _reason(window: int, what: str) -> str:
    return (
        f"window {window} is unfit to train on: {what}. Repair the data or leave these samples out, check that the "
        "tokeniser fits the model's vocab_size, or skip such windows with data.bad=skip, in a new run: "
        "--name NEW --resume runs/<run>/checkpoints/step-<N>"
    )
