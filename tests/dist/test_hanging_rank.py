"""A rank that hangs is alive and says nothing: every rank's log names it, with its phase and the code it hangs in.

Run as a script, this file is one rank of `launch/train.py`; CASE says where rank 1 hangs.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.core.progress import Progress
from harness.engines.hang import Answer, hanging, report_of
from tests.support import warm
from tests.support.matrix import rest_nightly
from tests.support.runs import ROOT, rank_logs, start_ranks

pytestmark = [pytest.mark.dist, pytest.mark.faults(20)]

TIMEOUT = 20
# Where rank 1 hangs -> engine, and what both logs must say: who hangs in which phase, and the function.
_BEHIND = "rank 1 keeps the others waiting: "
CASES = {
    "data": ("ddp", f"{_BEHIND}data, step 3", "sleeps_in_data"),
    "forward": ("fsdp", f"{_BEHIND}forward, step 3", "sleeps_in_forward"),
    "save": ("fsdp", f"{_BEHIND}save, step 1", "sleeps_in_save"),
    # It calls fewer blocks than rank 0: both are in an exchange, and neither is of the other's.
    "blocks": ("fsdp", "the ranks wait for each other: they called other blocks", "reduce_scatter"),
}


def case() -> str:
    return os.environ["CASE"] if os.environ["RANK"] == "1" else ""


def sleeps_in_data() -> None:
    time.sleep(1e6)


def sleeps_in_forward() -> None:
    time.sleep(1e6)


def holds_the_lock() -> None:
    """Backtracks for ever in C, which keeps Python's lock: no other thread runs."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def sleeps_in_save(*_: object) -> None:
    time.sleep(1e6)


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """64 numbers; the data set is looked at before the first step, and hangs once it is trained on."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if case() == "data" and STEPS["forwards"] > 1:
            sleeps_in_data()
        x = torch.full((8,), number / 64)
        return {"x": x, "y": x}


STEPS = {"forwards": 0}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.training:
            STEPS["forwards"] += 1
        if case() == "forward" and STEPS["forwards"] > 2:
            sleeps_in_forward()
        if case() == "lock" and STEPS["forwards"] > 2:
            holds_the_lock()
        layers = list(self.layers)
        if case() == "blocks" and STEPS["forwards"] > 2:
            layers = layers[1:]
        for layer in layers:
            x = layer(x)
        return (x - y).square().mean()


def build(**_: object) -> nn.Module:
    return Regression()


def rank_main(engine: str) -> None:
    from harness.checkpoint.store import Store
    from harness.cli import train_main

    if case() == "save":
        Store._write_for_rank_0 = sleeps_in_save  # type: ignore[method-assign]
    sys.argv = ["train.py", "--config", "tiny", "--recipe", "fp32", "--name", "r"]
    sys.argv += [
        "model.target=tests.dist.test_hanging_rank:build",
        "data.target=tests.dist.test_hanging_rank:Numbers",
        "data.path=null",
        "tracking.mlflow=false",
        "tracking.report=false",
        "train.steps=8",
        "train.global_batch=4",
        "train.micro_batch=2",
        "checkpoint.every=1",
        f"engine.name={engine}",
        f"engine.timeout_seconds={TIMEOUT}",
    ]
    train_main()


@pytest.mark.slow
@pytest.mark.parametrize("where", rest_nightly(CASES, "blocks"))
def test_every_log_names_the_rank_and_the_code(tmp_path: Path, where: str) -> None:
    engine, headline, function = CASES[where]
    line = [__file__, engine]
    ranks = start_ranks(tmp_path, 2, line, PYTHONPATH=str(ROOT), CASE=where)
    try:
        # Rank 0 ends by itself. Rank 1 sleeps on, as nobody else ends it here.
        code = ranks[0].wait(warm.PATIENCE)
        if where == "save":
            assert ranks[1].wait(warm.PATIENCE) == 1, "its main thread learns it, too"
    finally:
        for each in ranks:
            each.kill()
    logs = [log.read_text() for log in rank_logs(tmp_path, 2)]
    assert code == 1, logs
    for log in logs:
        assert "no progress for " in log, log
        assert headline in log, log
        assert f" in {function}" in log, log
    error = logs[0].rpartition("error: ")[2]
    assert "rank 1" in error
    assert "fix: " in error
    if where != "save":
        assert f" in {function}" in error, error


@pytest.mark.nightly
def test_a_rank_that_cannot_run_python_shows_its_stack_in_its_own_log(tmp_path: Path) -> None:
    ranks = start_ranks(tmp_path, 2, [__file__, "ddp"], PYTHONPATH=str(ROOT), CASE="lock")
    try:
        assert ranks[0].wait(warm.PATIENCE) == 1
        # How long its own timer takes depends on when it was last set.
        own_log = rank_logs(tmp_path, 2)[1]
        deadline = time.monotonic() + warm.PATIENCE
        while "in holds_the_lock" not in own_log.read_text() and time.monotonic() < deadline:
            time.sleep(0.2)
    finally:
        for each in ranks:
            each.kill()
    first, second = (log.read_text() for log in rank_logs(tmp_path, 2))
    assert "rank 1: does not answer, no Python of it runs" in first, first
    assert "in holds_the_lock" in second, second


def answer(entered: int, waits: bool, seconds: float = 9.0) -> Answer:
    return Answer("forward", 3, entered, seconds, waits, ("  MainThread:", "    x.py:1 in f"))


def test_the_rank_that_waits_for_nobody_is_named() -> None:
    assert hanging({0: answer(7, True), 1: answer(7, False), 2: answer(7, True)}, 3) == [1]


def test_the_rank_behind_is_named_where_a_wait_does_not_show() -> None:
    """On a GPU the main thread waits for a figure, outside of any collective."""
    assert hanging({0: answer(9, False), 1: answer(7, False)}, 2) == [1]


def test_ranks_that_are_slow_together_are_not_reported() -> None:
    assert report_of({0: answer(7, False), 1: answer(7, False)}, 2) == ""


def test_a_rank_that_cannot_answer_is_named() -> None:
    assert "rank 1: does not answer" in report_of({0: answer(7, True)}, 2)


def test_ranks_in_different_collectives_are_all_shown() -> None:
    text = report_of({0: answer(8, True), 1: answer(7, True)}, 2)
    assert "wait for each other" in text
    assert text.count("x.py:1 in f") == 2


def test_a_phase_tells_its_step_and_age() -> None:
    work = Progress()
    work.enter("data", 5)
    assert Answer.of(work).place == "data, step 5, for 0 s"


if __name__ == "__main__":
    rank_main(sys.argv[1])
