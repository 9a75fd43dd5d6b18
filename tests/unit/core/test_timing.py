"""`in_turns`: an action that raises, at whichever call, is left out with its reason."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from harness.core.timing import in_turns

CPU = torch.device("cpu")


def failing_at(number: int) -> Callable[[], None]:
    """Raises at its call of this number, from 1."""
    calls: list[int] = []

    def action() -> None:
        calls.append(1)
        if len(calls) == number:
            raise RuntimeError("out of luck")

    return action


@pytest.mark.parametrize("number", [1, 4, 7, 8])
def test_an_action_that_raises_is_left_out_with_its_reason(number: int) -> None:
    """Call 1 warms up, 4 sets the number of repeats, 7 is the first that counts."""
    actions = {"odd": failing_at(number), "sound": failing_at(0)}
    times, reasons = in_turns(actions, CPU, 0.0, 2, time.monotonic() + 60)
    assert reasons == {"odd": "RuntimeError: out of luck"}
    assert times.keys() == {"sound"}
    assert len(times["sound"]) == 2
