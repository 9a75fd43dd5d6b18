"""The order in which reports list slots: what is further beyond its limit comes first."""

from __future__ import annotations

import math

from harness.core.config import FallbackConfig
from harness.report.trouble import SlotFigures, order


def test_the_order_of_trouble() -> None:
    slots = [
        SlotFigures("a.input"),
        SlotFigures("b.input", saturation=1.0, sqnr_db=30.0),
        SlotFigures("c.input", saturation=3.0),  # twice the limit of 1.5
        SlotFigures("d.grad_output", saturation=3.0),  # within the limit of 8
        SlotFigures("e.weight", even_db=22.0 - 2 * 6.0206),  # four times, in amplitude
        SlotFigures("f.weight", demoted=True),
        SlotFigures("g.input", nonfinite=2),
        SlotFigures("h.input", clipped=0.05 * 16),
        SlotFigures("i.grad_output", underflow=0.9),
    ]
    ordered = order(slots)
    names = [each.slot.name[0] for each in ordered]
    assert names == ["g", "f", "h", "e", "c", "i", "b", "d", "a"]
    assert [each.why for each in ordered] == [
        "amax not finite in 2 steps", "layer in BF16", "clipped 0.8 (limit 0.05)", "even_db 9.96 (limit 22)",
        "saturation 3 (limit 1.5)", "underflow 0.9 (limit 0.85)", "", "", "",
    ]  # fmt: skip
    assert ordered[-1].score == -math.inf


def test_a_recipe_s_own_limits_count() -> None:
    slots = [SlotFigures("a.input", saturation=1.6), SlotFigures("b.input", underflow=0.26)]
    assert [each.slot.name for each in order(slots)] == ["a.input", "b.input"]
    limits = FallbackConfig(saturation_input=4.0)
    assert [each.slot.name for each in order(slots, limits)] == ["b.input", "a.input"]


def test_a_slot_of_a_foreign_file_is_judged_too() -> None:
    (only,) = order([SlotFigures("odd", saturation=6.0)])
    assert only.score == 2.0
