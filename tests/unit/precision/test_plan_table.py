"""`print(precision.plan)` is the table of a run's start."""

from __future__ import annotations

import io

from api_support import recipe
from rich.console import Console as RichConsole
from torch import nn

from harness import Precision
from harness.tracking.console import plan_table


class Model(nn.Module):
    """FP8 layers in equal blocks, and one of each other kind of row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(3)
        )
        self.attention = nn.MultiheadAttention(32, 2)
        self.odd = nn.Linear(32, 7)


def _prepared() -> Precision:
    precision = Precision(recipe())
    precision.prepare(Model())
    return precision


def test_the_printed_plan_is_the_table_of_a_runs_start() -> None:
    plan = _prepared().plan
    output = io.StringIO()
    RichConsole(file=output, width=400).print(plan_table(plan.as_dict()))
    started, printed = (
        [" ".join(line.split()) for line in text.splitlines()]
        for text in (output.getvalue(), str(plan))
    )
    assert [line for line in printed if line] == [line for line in started if line]


def test_each_row_is_a_line_with_its_precision_and_the_reason() -> None:
    plan = _prepared().plan
    lines = [line.split() for line in str(plan).splitlines()]
    assert ["blocks.0-2.0", "fp8", "native", "[64,", "32]", "converted"] in lines
    assert [
        "odd",
        "bf16",
        "autocast",
        "[7,",
        "32]",
        "sizes",
        "7x32",
        "are",
        "not",
        "multiples",
        "of",
        "16",
    ] in lines
    shown = {words[0] for words in lines if words}
    assert {"embed", "blocks.0-2.2", "attention", "attention.out_proj"} <= shown
    assert any(
        line.startswith(f"recipe {plan.recipe} on CPU: requested")
        for line in str(plan).splitlines()
    )


def test_the_representation_stays_short() -> None:
    plan = _prepared().plan
    assert (
        repr(plan) == f"Plan({plan.recipe} on CPU: native:fp8; modules in bf16: 3, fp32: 1, fp8: 6)"
    )
