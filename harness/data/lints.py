"""Lints of the data: samples that are empty, repeated, out of range, unreadable, or in both splits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.core.errors import some
from harness.core.facts import BAD_LABEL, NO_LABEL, NON_FINITE_INPUT, UNREADABLE
from harness.core.findings import Finding, Severity
from harness.core.health import LABELS, name_faults, one_sample
from harness.core.protocols import Batch, Batches

LOOKED_AT = 256
"""Training samples that are read, from the first windows on."""
_NAMED = 3
# Fewer values are all equal by chance, as two features of a table may be.
_FEWEST_VALUES = 16
# Fewer repetitions than this share say nothing: some texts do repeat themselves.
_REPEATED_SHARE = 0.01
# Code, severity, what, why and fix by the kind of fault.
_FAULTS: dict[int, tuple[str, Severity, str, str]] = {
    BAD_LABEL: (
        "data.out_of_range",
        "error",
        "out of range",
        "build the model for all ids and classes of the data, or repair the samples",
    ),
    UNREADABLE: ("data.unreadable", "warning", "unreadable", "repair them, or leave them out"),
    NON_FINITE_INPUT: ("data.nonfinite", "warning", "not finite", "repair them, or leave them out"),
}


@dataclass(slots=True)
class _Seen:
    """What was found in the samples looked at.

    faults: by kind, the number of each sample and what is wrong with it.
    empty: numbers of samples that hold one value throughout, or no label.
    numbers: by the hash of a sample, the numbers of samples that have it.
    """

    faults: dict[int, dict[int, str]] = field(default_factory=dict[int, dict[int, str]])
    empty: list[int] = field(default_factory=list[int])
    numbers: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    @property
    def count(self) -> int:
        """How many samples were looked at."""
        return sum(len(numbers) for numbers in self.numbers.values())


def lint_data(
    data: Batches, vocab_size: int | None, classes: int | None, bad: str = "auto"
) -> list[Finding]:
    """Findings on the first LOOKED_AT training samples, in the order of training, and on validation.

    vocab_size, classes: bounds of token ids and labels; None: unknown.
    bad: the config's data.bad; with "skip", samples out of range are a warning.

    Raises DataError as reading the data does.
    """
    seen = _look(data, vocab_size, classes)
    found = _fault_findings(data, seen, bad)
    if seen.empty:
        what = _counted(seen.empty, seen.count, "empty")
        why = (
            "they hold one value throughout, or no label that counts: nothing is learned from them"
        )
        found.append(_warning("data.empty", data, what, why, "leave them out of the data"))

    # A few repeats are normal in text.
    repeated = [numbers for numbers in seen.numbers.values() if len(numbers) > 1]
    extra = sum(len(numbers) - 1 for numbers in repeated)
    if extra and extra >= _REPEATED_SHARE * seen.count:
        first = " = ".join(map(str, repeated[0][:_NAMED]))
        what = f"{extra} of {seen.count} samples repeat another one, such as {first}"
        why = "they count more than once in every epoch, and the model learns them by heart"
        found.append(_warning("data.repeated", data, what, why, "remove duplicates from the data"))
    return [*found, *_leaked(data, seen)]


def _look(data: Batches, vocab_size: int | None, classes: int | None) -> _Seen:
    seen = _Seen()
    looked_at: set[int] = set()
    index = 0
    while len(looked_at) < LOOKED_AT:
        window = data.window(index)
        numbers = [int(number) for number in window.samples]
        # A data set of fewer samples begins again.
        if looked_at.issuperset(numbers):
            break
        place = 0
        for batch in data.micro_batches(window, 0, 1):
            for row in range(len(next(iter(batch.values())))):
                number = numbers[place]
                place += 1
                if number not in looked_at:
                    looked_at.add(number)
                    _take(seen, number, one_sample(batch, row), vocab_size, classes)
        index += 1
    return seen


def _take(
    seen: _Seen, number: int, sample: Batch, vocab_size: int | None, classes: int | None
) -> None:
    """Add one sample, a batch of one row, to what was seen."""
    faults = name_faults(sample, vocab_size, classes)
    for fault in faults:
        if fault.bit == NO_LABEL:
            seen.empty.append(number)
        else:
            seen.faults.setdefault(fault.bit, {})[number] = fault.text
    # A stand-in for an unreadable sample says nothing about the data.
    unreadable = any(fault.bit == UNREADABLE for fault in faults)
    key = f"unreadable {number}" if unreadable else _hash(sample)
    seen.numbers.setdefault(key, []).append(number)
    if not unreadable and number not in seen.empty and _is_empty(sample):
        seen.empty.append(number)


def _is_empty(sample: Batch) -> bool:
    """Whether every input of the sample holds one value throughout."""
    inputs = [
        values
        for name, values in sample.items()
        if name not in (*LABELS, "attention_mask", "segments")
    ]
    if any(not values.numel() for values in inputs):
        return True
    count = sum(values.numel() for values in inputs)
    sized = [values for values in inputs if values.numel() > 1]
    if count < _FEWEST_VALUES or not sized:
        return False
    return all(_is_constant(values) for values in sized)


def _is_constant(values: Tensor) -> bool:
    return bool((values == values.flatten()[0]).all())


def _hash(sample: Batch) -> str:
    digest = hashlib.sha256()
    for name, values in sorted(sample.items()):
        digest.update(f"{name} {values.dtype} {list(values.shape)} ".encode())
        as_bytes = values.contiguous().reshape(-1).view(torch.uint8)
        digest.update(as_bytes.numpy().tobytes())
    return digest.hexdigest()


def _fault_findings(data: Batches, seen: _Seen, bad: str) -> list[Finding]:
    found: list[Finding] = []
    for bit, samples in seen.faults.items():
        code, severity, word, fix = _FAULTS[bit]
        # What the config skips does not end the run.
        if bad == "skip":
            severity = "warning"
        elif bad == "fail":
            severity = "error"
        what = _counted(list(samples), seen.count, word)
        number, text = next(iter(samples.items()))
        why = f"sample {number}: {text}"
        found.append(Finding(code, severity, data.name, what, why, fix))
    return found


def _leaked(data: Batches, seen: _Seen) -> list[Finding]:
    """A warning if validation samples are among the training samples looked at."""
    validation = 0
    leaked: list[int] = []
    for batch in data.validation(0, 1):
        rows = len(next(iter(batch.values())))
        for row in range(rows):
            validation += 1
            key = _hash(one_sample(batch, row))
            same = seen.numbers.get(key, [])
            leaked += same[:1]
    if not leaked:
        return []
    what = f"{len(leaked)} of {validation} validation samples are training samples, such as {leaked[0]}"
    why = "the validation loss then says how well the model remembers, and not how well it has learned"
    return [_warning("data.leak", data, what, why, "remove duplicates before the data are split")]


def _counted(numbers: list[int], total: int, word: str) -> str:
    verb = "is" if len(numbers) == 1 else "are"
    return f"{len(numbers)} of {total} samples {verb} {word}: {some(numbers, _NAMED)}"


def _warning(code: str, data: Batches, what: str, why: str, fix: str) -> Finding:
    return Finding(code, "warning", data.name, what, why, fix)
