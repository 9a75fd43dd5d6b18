"""Times contenders in turns, so that whatever slows the machine down for a while slows down all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from harness.core.errors import one_line

LEAST_ROUNDS = 3
"""Rounds that are taken however long they take: fewer have no spread."""
_LEAST_TURN = 0.25
_MOST_STEPS = 50


class Taker(Protocol):
    """What takes turns."""

    def steps(self, count: int) -> float:
        """Seconds of `count` steps. Raises whatever a step raises."""
        ...


@dataclass(slots=True)
class Turns:
    """What was timed.

    seconds: of one step, one entry for each turn, by contender.
    order: the contenders in the order in which they took their turns.
    failures: contender -> the error that ended its turns. It has no further ones.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    order: list[str] = field(default_factory=list[str])
    failures: dict[str, str] = field(default_factory=dict[str, str])


def steps_of_a_turn(once: float) -> int:
    """Steps that make up a turn, for a step of `once` seconds: short turns measure the clock and the scheduler."""
    steps = round(_LEAST_TURN / max(once, 1e-6))
    return max(1, min(_MOST_STEPS, steps))


def take_turns(
    takers: Mapping[str, Taker],
    counts: Mapping[str, int],
    seconds: float,
    least: int = LEAST_ROUNDS,
) -> Turns:
    """Time all `takers` round by round, until `seconds` are used up.

    In every round each contender has one turn, of `counts` steps. Another one begins each round, as whoever comes later
    finds a warmer machine. Only whole rounds are begun, and at least `least` of them.
    """
    turns = Turns({name: [] for name in takers})
    began = time.monotonic()
    rounds = 0
    longest = 0.0
    while True:
        round_began = time.monotonic()
        left = seconds - (round_began - began)
        running = [name for name in takers if name not in turns.failures]
        # A round begins only if one as long as the longest so far still fits.
        if not running or (rounds >= least and left < longest):
            return turns
        first = rounds % len(running)
        for name in running[first:] + running[:first]:
            turns.order.append(name)
            try:
                taken = takers[name].steps(counts[name])
            except Exception as error:
                # Whatever a step raises is an answer about this contender, and the others go on.
                turns.failures[name] = one_line(error)
                continue
            turns.seconds[name].append(taken / counts[name])
        longest = max(longest, time.monotonic() - round_began)
        rounds += 1
