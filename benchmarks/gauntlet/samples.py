"""The data of the gauntlet: a made-up text, cut into samples, with faults in the samples of chosen windows.

Every loop reads the samples of window i that `harness train` reads, in the same order.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.fallback import made_up
from harness.data.order import sample_numbers

# CONTEXT: bytes in a sample. TRAIN, VALIDATION: numbers of samples.
SEED, BATCH, CONTEXT = 0, 4, 32
TRAIN, VALIDATION = 1200, 128
Sample = dict[str, Tensor]
Change = Callable[[int, Sample], Sample]
"""(number of a sample, sample) -> the sample with a fault."""


@dataclass
class Text:
    """Samples of CONTEXT bytes, and for each byte the next one as its target.

    rows: int64 [samples, CONTEXT + 1].
    changes: number of a sample -> its fault, made whenever the sample is read.
    """

    rows: Tensor
    changes: dict[int, Change] = field(default_factory=dict[int, Change])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Sample:
        row = self.rows[number]
        sample = {"inputs": row[:-1].clone(), "targets": row[1:].clone()}
        change = self.changes.get(int(number))
        return sample if change is None else change(int(number), sample)


def text() -> tuple[Text, Text]:
    """(training, validation), without faults."""
    letters = np.frombuffer(b"".join(made_up(5)), dtype=np.uint8)
    rows = letters[: (TRAIN + VALIDATION) * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)
    samples = torch.from_numpy(rows.astype(np.int64))
    return Text(samples[:TRAIN]), Text(samples[TRAIN:])


def window(index: int) -> list[int]:
    """The samples of window `index`, counted from 0."""
    return sample_numbers(SEED, index, BATCH, TRAIN).tolist()


def one_of(index: int) -> int:
    """A sample of window `index` that is not read before its window comes.

    `harness train` reads eight evenly spread samples before it trains (harness/data/dataset.py). A fault in one of
    these would be found there, and not in training.
    """
    read_at_start = np.linspace(0, TRAIN - 1, 8).astype(int).tolist()
    return next(number for number in window(index) if number not in read_at_start)


def in_windows(windows: Sequence[int], change: Change) -> dict[int, Change]:
    """`change` for all samples of `windows`."""
    return {number: change for index in windows for number in window(index)}


def in_one_sample(windows: Sequence[int], change: Change) -> dict[int, Change]:
    """`change` for one sample of each of `windows`."""
    return {one_of(index): change for index in windows}


def garbage(number: int, sample: Sample) -> Sample:
    """Random bytes."""
    generator = torch.Generator().manual_seed(number)
    row = torch.randint(0, 256, (CONTEXT + 1,), generator=generator)
    return {"inputs": row[:-1], "targets": row[1:]}


def other_text(number: int, sample: Sample) -> Sample:
    """Text of another kind: capitals, each of them three times."""
    generator = torch.Generator().manual_seed(number)
    row = torch.randint(65, 91, (CONTEXT // 3 + 1,), generator=generator).repeat_interleave(3)
    return {"inputs": row[:CONTEXT], "targets": row[1 : CONTEXT + 1]}


def one_letter(number: int, sample: Sample) -> Sample:
    """The same letter all along."""
    row = torch.full((CONTEXT,), 97 + number % 24)
    return {"inputs": row, "targets": row.clone()}


def bad_label(number: int, sample: Sample) -> Sample:
    """One label beyond the vocabulary."""
    targets = sample["targets"].clone()
    targets[10] = 300
    return {**sample, "targets": targets}


def unreadable(number: int, sample: Sample) -> Sample:
    """Raises, as a damaged file does."""
    raise OSError(f"sample {number}: the file is damaged")


def rare_byte(number: int, sample: Sample) -> Sample:
    """One input is a byte that the text does not have."""
    inputs = sample["inputs"].clone()
    inputs[20] = ord("~")
    return {**sample, "inputs": inputs}


def kill(number: int, sample: Sample) -> Sample:
    """Kills the process that reads the sample, the first time that it is read."""
    # The run is started again in the same folder. The file says that it was killed before.
    mark = Path.cwd() / f"killed-{number}"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def none(*_: Any) -> dict[int, Change]:
    """No fault."""
    return {}
