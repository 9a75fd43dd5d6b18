from __future__ import annotations

import math
from collections.abc import Callable

from harness.core.facts import Continue, Halt, Rollback, StepFacts
from harness.monitors.ranks import RanksMonitor

MakeFacts = Callable[..., StepFacts]


def forward(
    make_facts: MakeFacts, step: int, fastest: float, slowest: float, diverged: tuple[str, ...] = ()
) -> StepFacts:
    return make_facts(step, forward_fastest=fastest, forward_slowest=slowest, diverged=diverged)


def test_one_rank_and_equal_ranks_are_silent(make_facts: MakeFacts) -> None:
    monitor = RanksMonitor()
    for step in range(200):
        seconds = (0.0, 0.0) if step % 2 else (0.5, 0.5 * (1 + step % 3 / 5))
        assert monitor.observe(forward(make_facts, step, *seconds)).code == "ranks.ok"


def test_weights_that_differ_are_named_and_rolled_back_from_disk(make_facts: MakeFacts) -> None:
    names = tuple(f"blocks.{index}.weight" for index in range(5))
    verdict = RanksMonitor().observe(make_facts(7, diverged=names))
    assert (verdict.code, verdict.healthy) == ("ranks.diverged", False)
    assert isinstance(verdict.proposal, Rollback)
    assert verdict.proposal.from_disk
    assert verdict.proposal.bad == ()
    assert "blocks.0.weight, blocks.1.weight, blocks.2.weight and 2 more" in verdict.text
    assert verdict.evidence == {"parameters": list(names), "count": 5}


def test_ranks_that_called_other_blocks_halt_the_run_with_the_step(make_facts: MakeFacts) -> None:
    facts = make_facts(7, other_calls=True, applied=False, grad_norm=math.inf)
    verdict = RanksMonitor().observe(facts)
    assert (verdict.code, verdict.healthy, verdict.skip) == ("ranks.calls", False, False)
    assert "ranks called other blocks in step 7" in verdict.text
    assert isinstance(verdict.proposal, Halt)
    assert "train with DDP" in verdict.proposal.fix


def test_a_straggler_is_told_once_a_streak_and_again_after_a_recovery(
    make_facts: MakeFacts,
) -> None:
    monitor = RanksMonitor(window=50)
    slow, even = (1.0, 1.6), (1.0, 1.1)
    trace = [even] * 60 + [slow] * 100 + [even] * 50 + [slow] * 60
    verdicts = [
        monitor.observe(forward(make_facts, step, *each)) for step, each in enumerate(trace)
    ]
    told = [verdict for verdict in verdicts if verdict.text]
    assert [(verdict.code, verdict.step) for verdict in told] == [
        ("ranks.straggler", 99),
        ("ranks.straggler", 249),
    ]
    assert all(verdict.healthy and verdict.proposal == Continue() for verdict in told)
    assert told[0].evidence["slow_steps"] == 40


def test_a_few_slow_steps_are_no_straggler(make_facts: MakeFacts) -> None:
    monitor = RanksMonitor(window=50)
    for step in range(300):
        seconds = (1.0, 9.0) if step % 4 else (1.0, 1.0)  # three in four
        assert monitor.observe(forward(make_facts, step, *seconds)).code == "ranks.ok"


def test_divergence_is_told_beside_a_straggler(make_facts: MakeFacts) -> None:
    monitor = RanksMonitor(window=10)
    verdicts = [
        monitor.observe(forward(make_facts, step, 1.0, 2.0, ("w",) if step == 7 else ()))
        for step in range(20)
    ]
    assert [verdict.code for verdict in verdicts if verdict.text] == [
        "ranks.diverged",
        "ranks.straggler",
    ]
