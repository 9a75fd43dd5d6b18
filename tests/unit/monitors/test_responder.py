from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from harness.core.config import GuardConfig
from harness.core.facts import Action, Continue, Halt, Rollback, StepFacts, Switch, Verdict
from harness.core.state import RunLedger
from harness.monitors.responder import Responder

MakeFacts = Callable[..., StepFacts]


def guard(**changed: Any) -> GuardConfig:
    return GuardConfig.model_validate(changed)


def verdict(
    proposal: Action | None = None, code: str = "test.said", healthy: bool = True
) -> Verdict:
    return Verdict(code, 7, "what was seen", healthy=healthy, proposal=proposal or Continue())


def skip() -> Verdict:
    return Verdict("test.skip", 7, "what was skipped", healthy=False, skip=True)


HALT, ROLLBACK, SWITCH = Halt("no way on"), Rollback("broke", (4, 5)), Switch(("a",), (), "clipped")


@pytest.mark.parametrize(
    ("proposals", "expected"),
    [
        ([SWITCH, ROLLBACK, HALT], HALT),
        ([SWITCH, ROLLBACK], ROLLBACK),
        ([Continue(), SWITCH], SWITCH),
        ([Continue(), Continue()], Continue()),
        ([], Continue()),
    ],
)
def test_the_gravest_proposal_wins(proposals: list[Action], expected: Action) -> None:
    assert (
        Responder(guard(), RunLedger()).decide([verdict(proposal) for proposal in proposals])
        == expected
    )


def test_only_what_is_done_is_spent() -> None:
    ledger = RunLedger()
    responder = Responder(guard(), ledger)
    responder.decide([verdict(SWITCH), verdict(ROLLBACK), skip()])
    assert asdict(ledger) == asdict(
        RunLedger(rollbacks=1, skips=1, recent_skips=[0], recent_rollbacks=[0])
    )
    responder.decide([verdict(Switch(("a",), ("b",), ""))])
    assert ledger.switches == 2
    responder.decide([verdict(SWITCH), verdict(ROLLBACK), verdict(HALT)])
    assert (ledger.rollbacks, ledger.skips, ledger.switches) == (1, 1, 2)


def test_rollbacks_of_one_step_merge_without_windows_known_as_bad() -> None:
    responder = Responder(guard(), RunLedger(skipped_windows=[4]))
    action = responder.decide(
        [verdict(Rollback("spike", (9, 4))), verdict(Rollback("nan", (8, 9)))]
    )
    assert action == Rollback("spike; nan", (8, 9))


def test_rollbacks_beyond_the_budget_halt_with_the_reason_and_the_way_out() -> None:
    ledger = RunLedger()
    responder = Responder(guard(max_rollbacks=2), ledger)
    actions = [responder.decide([verdict(Rollback(f"spike {i}", (i,)))]) for i in range(3)]
    assert [type(action) for action in actions] == [Rollback, Rollback, Halt]
    assert isinstance(actions[2], Halt)
    for part in ("spike 2", "guard.max_rollbacks (2)", "train.lr"):
        assert part in actions[2].text
    assert ledger.rollbacks == 2


def test_budgets_are_those_of_the_ledger_not_of_this_process() -> None:
    responder = Responder(
        guard(max_rollbacks=3), RunLedger(rollbacks=3, recent_rollbacks=[1, 2, 3])
    )
    assert isinstance(responder.decide([verdict(ROLLBACK)]), Halt)


def test_too_many_skips_in_total_halt_at_the_next_one() -> None:
    responder = Responder(guard(max_skips=3), RunLedger())
    actions = [responder.decide([skip(), verdict(code="scaler.calibration")]) for _ in range(4)]
    assert [type(action) for action in actions] == [Continue, Continue, Continue, Halt]
    assert isinstance(actions[3], Halt)
    assert "guard.max_skips (3)" in actions[3].reason


def test_a_run_resumed_with_its_skips_spent_goes_on_while_steps_are_sound() -> None:
    responder = Responder(guard(max_skips=3), RunLedger(skips=9, recent_skips=[0] * 9))
    assert responder.decide([verdict()]) == Continue()


def test_calibration_skips_cost_nothing() -> None:
    ledger = RunLedger()
    responder = Responder(guard(max_skips=1), ledger)
    for _ in range(10):
        assert responder.decide([verdict(code="scaler.calibration", healthy=False)]) == Continue()
    assert ledger.skips == 0


def test_switches_merge_and_a_layer_asked_both_ways_is_demoted() -> None:
    responder = Responder(guard(), RunLedger())
    action = responder.decide(
        [verdict(Switch(("a",), ("b", "c"), "x")), verdict(Switch(("b", "a"), (), "y"))]
    )
    assert action == Switch(("a", "b"), ("c",), "x; y")


def test_switches_over_the_budget_are_refused_demotions_last_and_told_once() -> None:
    ledger = RunLedger()
    responder = Responder(guard(max_switches=3), ledger)
    assert responder.decide([verdict(Switch(("a", "b"), ("c", "d"), "x"))]) == Switch(
        ("a", "b"), ("c",), "x"
    )
    assert [note.code for note in responder.notes] == ["switch.refused"]
    assert responder.notes[0].evidence["refused"] == ["d"]
    assert responder.notes[0].step == 7
    assert responder.decide([verdict(Switch(("e",), (), "x"))]) == Continue()
    assert responder.notes == []
    assert ledger.switches == 3


def test_the_whole_run_falls_once_before_any_layer_and_costs_no_budget() -> None:
    ledger = RunLedger()
    responder = Responder(guard(max_switches=0), ledger)
    fall = Switch((), (), "too many", "bf16")
    assert responder.decide([verdict(SWITCH), verdict(fall)]) == fall
    assert (ledger.lowered, ledger.switches) == ("bf16", 0)
    assert responder.decide([verdict(fall)]) == Continue()


def test_the_halt_for_too_many_skips_names_the_keys_to_raise() -> None:
    ledger = RunLedger()
    responder = Responder(guard(max_skips=1), ledger)
    assert responder.decide([skip()]) == Continue()
    action = responder.decide([skip()])
    assert isinstance(action, Halt)
    assert ledger.skips == 2
    for key in ("guard.max_skips (1)", "guard.skip_growth", "guard.spike_sigma"):
        assert key in action.text


def test_switched_off_it_does_nothing() -> None:
    ledger = RunLedger()
    responder = Responder(guard(enabled=False), ledger)
    assert responder.decide([verdict(HALT), verdict(ROLLBACK), skip()]) == Continue()
    assert asdict(ledger) == asdict(RunLedger())


def test_one_unhealthy_verdict_makes_the_step_unhealthy() -> None:
    assert Responder.healthy([])
    assert Responder.healthy([verdict(), verdict(SWITCH)])
    assert not Responder.healthy([verdict(), skip()])


@pytest.mark.parametrize(
    ("applied", "said", "action", "expected"),
    [
        (True, [None, None], Continue(), False),
        (True, [None], SWITCH, False),
        (False, [None, None], Continue(), True),
        (False, [], Continue(), True),
        (False, [None, False], Continue(), False),
        (True, [None, True], Continue(), True),
        (True, [None], ROLLBACK, True),
        (False, [False], HALT, True),
    ],
)
def test_a_step_is_recorded_if_skipped_unusually_or_somebody_says_so(
    make_facts: MakeFacts, applied: bool, said: list[bool | None], action: Action, expected: bool
) -> None:
    verdicts = [Verdict("test.said", 7, suspect=each) for each in said]
    assert Responder.suspect(make_facts(7, applied=applied), verdicts, action) is expected
