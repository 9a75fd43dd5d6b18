"""The rows of a proof: the question of each one, what it needs, how long it may take, and its function.

Nothing here imports torch. So the process that starts the rows cannot crash or hang with it.

A card may be taken away before the last row. So the rows that tell most come first:

1. where a step's time goes (`profiles`), as no saving can be proved without it;
2. the shipped default over compiled bf16, then over a bare loop;
3. step times in each precision and compile mode, first those whose code has changed since a card ran it;
4. calibration, and then `estimated`, the only row that reads other rows: calibration, `native`, `te` and `torchao`;
5. bits, host waits, tests, saves and whole runs.

A row that reads the figures of others (`Task.earlier`) comes after them. All read those of `machine`, the first one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class NotHere(Exception):
    """A row cannot run on this machine or with these versions. The argument says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a row found.

    summary: one line.
    figures: JSON-able.
    failed: what is wrong, if a check of the row failed; else empty.
    """

    summary: str
    figures: dict[str, Any]
    failed: str = ""


@dataclass(frozen=True)
class Task:
    """What a row's function is given, in a process of its own.

    deadline: on the clock of time.monotonic(), a little before the process is killed.
    folder: for scratch files; it is removed afterwards.
    keep: a folder for files that are stored beside the results.
    earlier: the figures of earlier rows, by name.
    note: records the figures so far, which stay if the row does not finish.
    """

    rehearsal: bool
    deadline: float
    folder: Path
    keep: Path
    earlier: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    note: Callable[[dict[str, Any]], None] = lambda figures: None

    @property
    def device(self) -> torch.device:
        """The card; in a rehearsal, the CPU."""
        import torch

        return torch.device("cpu") if self.rehearsal else torch.device("cuda", 0)

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of the card; (0, 0) for a CPU."""
        import torch

        return (0, 0) if self.rehearsal else torch.cuda.get_device_capability(0)

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    needs: names in NEEDS.
    budget: seconds; a part of BUDGET, which is for all rows.
    target: its function, as "module:function".
    """

    name: str
    question: str
    needs: tuple[str, ...]
    budget: float
    target: str


def _card(machine: Mapping[str, Any]) -> str:
    return "" if machine["card"] else "needs a card: there is nothing to see of it on a CPU"


def _fp8(machine: Mapping[str, Any]) -> str:
    card = machine["card"]
    if card is None or tuple(card["capability"]) >= (8, 9):
        return ""
    return "FP8 GEMMs need compute capability 8.9, this card has {}.{}".format(*card["capability"])


def _library(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda machine: machine["libraries"][name]


def _packages(names: Sequence[str], what: str) -> Callable[[Mapping[str, Any]], str]:
    def lacking(machine: Mapping[str, Any]) -> str:
        missing = [name for name in names if name not in machine["packages"]]
        return f"{what} needs {', '.join(missing)}: make setup installs it" if missing else ""

    return lacking


def _fsdp(machine: Mapping[str, Any]) -> str:
    version = machine["versions"]["torch"]
    # Such as 2.13.0+cu130.
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) >= (2, 13):
        return ""
    return f"engine fsdp needs torch 2.13 or later, this is {version}"


# What a row may need, by name. Each function takes the figures of the row `machine`, and returns why the machine lacks
# it; empty if it does not.
NEEDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "card": _card,
    "fp8": _fp8,
    "transformer_engine": _library("transformer_engine"),
    "torchao": _library("torchao"),
    "trainer": _packages(("numpy", "pydantic", "rich", "safetensors", "yaml"), "the trainer"),
    "compiling": lambda machine: machine["no_compiling"],
    "pytest": _packages(("pytest",), "this row"),
    "fsdp": _fsdp,
}

ROWS: tuple[Row, ...] = (
    Row(
        "machine",
        "Which card, driver, versions and commit?",
        (),
        60,
        "benchmarks.proof.card:machine",
    ),
    Row(
        "profiles",
        "What kind of work does a step's time go to, in each precision and compile mode?",
        ("trainer",),
        220,
        "benchmarks.proof.profiles:profiles",
    ),
    Row(
        "as_shipped",
        "Step time, fp8_hybrid over bf16, each as it is without further keys (engine.compile=auto)",
        ("fp8", "trainer"),
        70,
        "benchmarks.proof.training:as_shipped",
    ),
    Row(
        "chosen",
        "The same with fp8.backend=auto: which backend is chosen by time, and is it the faster one?",
        ("fp8", "transformer_engine", "trainer"),
        70,
        "benchmarks.proof.training:chosen",
    ),
    Row(
        "long_step",
        "Step time at 16,384 tokens a step, fp8_hybrid over bf16, each as it is",
        ("fp8", "trainer"),
        90,
        "benchmarks.proof.training:long_step",
    ),
    Row(
        "vocabulary",
        "Step time with a vocabulary of 128,256, fp8_hybrid over bf16, each as it is",
        ("fp8", "trainer"),
        85,
        "benchmarks.proof.training:vocabulary",
    ),
    Row(
        "snapshots",
        "Step time as shipped over a bare step, with snapshots that training waits for and with overlapped ones",
        ("trainer",),
        70,
        "benchmarks.proof.training:snapshots",
    ),
    Row(
        "copies",
        "How long do a step's figures wait behind a snapshot that is on its way to the host?",
        ("card",),
        20,
        "benchmarks.proof.saves:copies",
    ),
    Row(
        "watching",
        "What do telemetry and the guard cost a step?",
        ("trainer",),
        85,
        "benchmarks.proof.training:watching",
    ),
    Row(
        "native_compiled",
        "Step time, native FP8 over bf16, both compiled by blocks",
        ("fp8", "compiling", "trainer"),
        70,
        "benchmarks.proof.training:native_compiled",
    ),
    Row(
        "native_fused",
        "The same with layers.fuse: casts in the kernels that make the tensors",
        ("fp8", "compiling", "trainer"),
        70,
        "benchmarks.proof.training:native_fused",
    ),
    Row(
        "te",
        "Step time, Transformer Engine FP8 over bf16, eager",
        ("fp8", "transformer_engine", "trainer"),
        45,
        "benchmarks.proof.training:te",
    ),
    Row(
        "te_fused",
        "Step time, Transformer Engine FP8 with norms and MLPs fused over bf16, eager",
        ("fp8", "transformer_engine", "trainer"),
        45,
        "benchmarks.proof.training:te_fused",
    ),
    Row(
        "native",
        "Step time, native FP8 over bf16, eager",
        ("fp8", "trainer"),
        45,
        "benchmarks.proof.training:native",
    ),
    Row(
        "torchao_compiled",
        "Step time, torchao FP8 over bf16, both compiled by blocks",
        ("fp8", "torchao", "compiling", "trainer"),
        75,
        "benchmarks.proof.training:torchao_compiled",
    ),
    Row(
        "torchao",
        "Step time, torchao FP8 over bf16, eager",
        ("fp8", "torchao", "trainer"),
        45,
        "benchmarks.proof.training:torchao",
    ),
    Row(
        "te_compiled",
        "Step time, Transformer Engine FP8 over bf16, both compiled by blocks",
        ("fp8", "transformer_engine", "trainer"),
        15,
        "benchmarks.proof.training:te_compiled",
    ),
    Row("gemm", "How fast are large GEMMs?", (), 25, "benchmarks.proof.card:gemm"),
    Row("bandwidth", "How fast is the memory?", (), 15, "benchmarks.proof.card:bandwidth"),
    Row(
        "attention",
        "How fast is attention, forward and backward?",
        (),
        20,
        "benchmarks.proof.card:attention",
    ),
    Row(
        "launch",
        "What does an eager kernel launch cost, and a context?",
        (),
        15,
        "benchmarks.proof.card:launch",
    ),
    Row(
        "estimated",
        "Are memory (within 10%) and time what `harness estimate` predicts?",
        ("card", "fp8", "trainer"),
        50,
        "benchmarks.proof.checks:estimated",
    ),
    Row(
        "kernels",
        "Do the fused FP8 kernels (casts, transposes, statistics) give the reference's results?",
        ("card", "fp8", "compiling"),
        35,
        "benchmarks.proof.checks:kernels",
    ),
    Row(
        "golden",
        "Does the native backend give Transformer Engine's bits?",
        ("card", "fp8", "transformer_engine", "trainer"),
        25,
        "benchmarks.proof.checks:golden",
    ),
    Row(
        "syncs",
        "Does a training step wait for the card?",
        ("card", "trainer"),
        35,
        "benchmarks.proof.training:syncs",
    ),
    Row(
        "tests",
        "Do the tests in tests/gpu pass, but for whole runs?",
        ("pytest", "trainer"),
        100,
        "benchmarks.proof.checks:tests",
    ),
    Row(
        "saves",
        "How long does a background save hold up training?",
        ("trainer",),
        50,
        "benchmarks.proof.saves:saves",
    ),
    Row(
        "recovery",
        "How long do a save, a rollback from memory and a resume take?",
        ("trainer",),
        40,
        "benchmarks.proof.saves:recovery",
    ),
    Row(
        "fsdp",
        "Does FSDP2 on one rank train to the bits of a single process, with a save and a resume on the way?",
        ("card", "fsdp", "pytest", "trainer"),
        150,
        "benchmarks.proof.checks:fsdp",
    ),
)
BUDGET = sum(row.budget for row in ROWS)
"""Seconds of all rows. A row may use what the rows before it left over."""


def lacks(row: Row, machine: Mapping[str, Any]) -> str:
    """Why `row` cannot run on this machine; empty if it can."""
    return lacking(row.needs, machine)


def lacking(needs: Sequence[str], machine: Mapping[str, Any]) -> str:
    """The first of `needs` that this machine lacks, and why; empty if it has all of them."""
    return next((reason for need in needs if (reason := NEEDS[need](machine))), "")


def task_for(request: Mapping[str, Any], note: Callable[[dict[str, Any]], None]) -> Task:
    """The task that a request.json describes."""
    return Task(
        rehearsal=request["rehearsal"],
        deadline=time.monotonic() + request["seconds"],
        folder=Path(request["folder"]),
        keep=Path(request["keep"]),
        earlier=request["earlier"],
        note=note,
    )
