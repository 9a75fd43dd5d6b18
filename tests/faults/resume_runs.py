"""Runs on numbered text, and what tells two of them apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from resume_models import CONTEXT, NAME
from safetensors.numpy import load_file

from harness.data.order import sample_numbers
from harness.data.text import Document, split_documents
from harness.tracking.journal import read_rows

BATCH = 4
OF_THE_PROCESS = ("train/tokens_per_second", "train/peak_memory_gib")
# What a resume adds to a journal.
_OF_PROCESSES = ("run.resumed", "checkpoint.quarantined")


def arguments(
    text: Path,
    recipe: str,
    steps: int,
    *more: str,
    bad: Sequence[int] = (),
    outlier: Sequence[int] = (),
    **model: Any,
) -> tuple[str, ...]:
    """The command line of a run named "r". bad: windows with a NaN loss. outlier, model: see `resume_models`."""
    trained = text_samples(text)
    nan = [int(sample_numbers(0, index, BATCH, trained)[0]) for index in bad]
    lines = (text / NAME).read_bytes().count(b"\n")
    built = {"samples": lines, "nan_samples": nan, "outlier": list(outlier)} | model
    return (
        *(
            "--name",
            "r",
            "--recipe",
            recipe,
            f"data.path={text}",
            f"data.context={CONTEXT}",
            "data.val_samples=4",
        ),
        *(f"train.steps={steps}", f"train.global_batch={BATCH}"),
        *("model.target=resume_models:numbered", f"model.args={built}", *more),
    )


def text_samples(text: Path) -> int:
    """Training samples of the text, as a run splits it."""
    train, _ = split_documents([Document(NAME, (text / NAME).read_bytes())], 0.1)
    return (len(train[0].content) - 1) // CONTEXT


def history(run: Path) -> list[str]:
    """Every metric and event of a journal, in order, to the last bit; without times and what is of processes."""
    told = []
    for row in read_rows(run / "journal.jsonl"):
        if row["kind"] == "metrics":
            metrics = {
                name: value for name, value in row["metrics"].items() if name not in OF_THE_PROCESS
            }
            told.append(repr((row["step"], row["attempt"], sorted(metrics.items()))))
        elif row["kind"] == "event" and row["code"] not in _OF_PROCESSES:
            told.append(repr(sorted((key, value) for key, value in row.items() if key != "time")))
    return told


def codes(run: Path) -> set[str]:
    """Of the events in the journal."""
    return {row["code"] for row in read_rows(run / "journal.jsonl") if row["kind"] == "event"}


def checkpoint(run: Path, step: int) -> Path:
    """The folder of `step`'s checkpoint."""
    return run / "checkpoints" / f"step-{step:08d}"


def consumed(run: Path, step: int) -> npt.NDArray[np.int64]:
    """How often the weights of a checkpoint were trained on each sample, as the model counted them."""
    return load_file(checkpoint(run, step) / "model.safetensors")["consumed"]


def difference(run: Path, undisturbed: Path, last: int) -> str:
    """What tells two runs of `last` steps apart, their last checkpoints included, byte by byte; empty if nothing."""
    ours, theirs = (
        {path.name: path.read_bytes() for path in checkpoint(each, last).iterdir()}
        for each in (run, undisturbed)
    )
    files = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    mine, reference = history(run), history(undisturbed)
    first = next(
        (f"{a[:600]} against {b[:600]}" for a, b in zip(mine, reference, strict=False) if a != b),
        "",
    )
    if not first and len(mine) != len(reference):
        first = f"{len(mine)} rows against {len(reference)}"
    return "; ".join([*files, first] if first else files)
