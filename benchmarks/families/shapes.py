"""The shapes of courses. Each function takes numbers and gives a formula: (updates applied, window) to (loss, norm)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

Numbers = tuple[float, float]
Formula = Callable[[int, int], Numbers]
FOREVER = 10**9


def drawn(window: int, kind: int) -> np.random.Generator:
    """Randomness that is the window's own."""
    return np.random.default_rng([11, window, kind])


def learns(applied: int, window: int, noise: float = 0.03, scatter: float = 0.15) -> Numbers:
    """A run that learns: from 5.5 down to 1.5, with norms that scatter by 15%."""
    loss = 1.5 + 4.0 * math.exp(-applied / 60) + noise * float(drawn(window, 0).standard_normal())
    return loss, 0.6 * math.exp(scatter * float(drawn(window, 1).standard_normal()))


def _changed(
    which: Callable[[int], bool], add: float, times: float, norm: float, value: float | None
) -> Formula:
    """`learns`, with the windows that `which` names changed."""

    def formula(applied: int, window: int) -> Numbers:
        loss, size = learns(applied, window)
        if not which(window):
            return loss, size
        return (loss * times + add if value is None else value), size * norm

    return formula


def usual(noise: float = 0.03, scatter: float = 0.15) -> Formula:
    """A run that learns."""
    return lambda applied, window: learns(applied, window, noise, scatter)


def sometimes(
    share: float,
    add: float = 0,
    times: float = 1,
    norm: float = 1,
    value: float | None = None,
    start: int = 0,
) -> Formula:
    """A share of the windows from `start` on is changed, by chance."""
    return _changed(
        lambda window: window >= start and drawn(window, 2).random() < share,
        add,
        times,
        norm,
        value,
    )


def not_finite(share: float, start: int = 0) -> Formula:
    """The loss of a share of the windows from `start` on is NaN."""
    return sometimes(share, value=math.nan, start=start)


def regular(
    of: int,
    bad: int,
    add: float = 0,
    times: float = 1,
    norm: float = 1,
    first: int = 0,
    last: int = FOREVER,
) -> Formula:
    """Of `of` windows the last `bad` ones are changed, from `first` to before `last`."""
    return _changed(
        lambda window: first <= window < last and window % of >= of - bad, add, times, norm, None
    )


def restarts(every: int, rise: float, norm: float, lasts: float) -> Formula:
    """Warm restarts: loss and norm are higher by a share that decays within `lasts` updates."""

    def formula(applied: int, window: int) -> Numbers:
        loss, size = learns(applied, window)
        left = math.exp(-(applied % every) / lasts) if applied >= every else 0.0
        return loss * (1 + rise * left), size * (1 + (norm - 1) * left)

    return formula


def quiet_step(factor: float, fallen: int) -> Formula:
    """A loss with little noise steps up for good at window 500. fallen: whether it had learned something before."""

    def formula(applied: int, window: int) -> Numbers:
        loss, size = learns(applied, window, noise=0.002)
        if not fallen:
            loss = 2.0 + 0.004 * float(drawn(window, 0).standard_normal())
        return (loss * factor, size) if window > 500 else (loss, size)

    return formula


def steps_up(factor: float, at: list[int]) -> Formula:
    """A quiet loss that never falls, and steps up for good at each of these windows."""

    def formula(applied: int, window: int) -> Numbers:
        loss = 2.0 + 0.004 * float(drawn(window, 0).standard_normal())
        return loss * factor ** sum(window > each for each in at), learns(applied, window)[1]

    return formula


def _of_its_own(
    loss: Callable[[int, int], float], noise: float, norm: Callable[[int], float] | None = None
) -> Formula:
    """A loss of updates and window with normal noise, and the usual norms times a factor of the updates."""

    def formula(applied: int, window: int) -> Numbers:
        scatter = noise * float(drawn(window, 0).standard_normal())
        size = learns(applied, window)[1]
        return loss(applied, window) + scatter, size if norm is None else size * norm(applied)

    return formula


def decays(
    high: float,
    low: float,
    over: float,
    noise: float,
    rise: float = 0,
    start: int = 400,
    within: int = 300,
) -> Formula:
    """A loss from `high` to `low`, as likelihoods and cosines go; from `start` on it rises again, `within` windows."""

    def loss(applied: int, window: int) -> float:
        risen = rise * min(1.0, max(0, window - start) / within)
        return low + (high - low) * math.exp(-applied / over) + risen

    return _of_its_own(loss, noise)


def cosine(over: float, norms_over: float) -> Formula:
    """A loss that comes close to -1, with norms that decay."""
    return _of_its_own(
        lambda applied, _: -1 + 0.9 * math.exp(-applied / over),
        2e-4,
        lambda applied: math.exp(-applied / norms_over),
    )


def reward(rate: float, power: int, noise: float, norms: float = 0) -> Formula:
    """A negative reward that falls for ever, with norms that grow by a share with every update."""
    return _of_its_own(
        lambda applied, _: -rate * applied**power, noise, lambda applied: 1 + norms * applied
    )


def collapses(rate: float, at: int, noise: float) -> Formula:
    """A reward that is won up to window `at`, and lost as fast from there on."""

    def loss(applied: int, window: int) -> float:
        return -rate * min(applied, at) + rate * max(0, window - at)

    return _of_its_own(loss, noise)


def climbs(level: float, rate: float, start: int, noise: float) -> Formula:
    """A loss at `level`, which rises evenly from `start` on."""
    return _of_its_own(lambda _, window: level + rate * max(0, window - start), noise)


def never_learns(rate: float) -> Formula:
    """A loss that never falls and grows by a share with every window."""
    return _of_its_own(lambda _, window: 2 * math.exp(min(600.0, rate * window)), 0.05)


def falls_at_once(at: int, high: float, low: float) -> Formula:
    """A loss that falls in one step."""
    return _of_its_own(lambda applied, _: high if applied < at else low, 0.02)


def learned_anew(block: int) -> Formula:
    """Tasks in blocks: at a border the loss is where it began, and norms are fourfold."""
    began: dict[int, int] = {}

    def formula(applied: int, window: int) -> Numbers:
        number = window // block
        if applied < began.setdefault(number, applied):
            began[number] = applied  # a rollback
        new = math.exp(-(applied - began[number]) / 30)
        loss, norm = learns(10**6, window)
        return loss + 4 * new, norm * (1 + 3 * new if number else 1)

    return formula


def zero_start(rate: float) -> Formula:
    """Weights that begin at zero: nothing is learned at first, and the norm grows from a hundredth."""

    def formula(applied: int, window: int) -> Numbers:
        begun = 1 - math.exp(-rate * applied)
        loss, size = learns(max(0, applied - int(2 / rate)), window)
        return loss, size * (0.01 + 0.99 * begun)

    return formula


def shifted(by: float, noise: float = 0.03) -> Formula:
    """The loss has a constant added: below zero, or through it."""

    def formula(applied: int, window: int) -> Numbers:
        loss, size = learns(applied, window, noise)
        return loss + by, size

    return formula


def unit(factor: float) -> Formula:
    """Loss and norm in another unit."""

    def formula(applied: int, window: int) -> Numbers:
        loss, size = learns(applied, window)
        return loss * factor, size * factor

    return formula


def seasons(share: float, period: int) -> Formula:
    """The loss goes up and down."""

    def formula(applied: int, window: int) -> Numbers:
        loss, size = learns(applied, window)
        return loss * (1 + share * math.sin(2 * math.pi * window / period)), size

    return formula


def norms_grow(times: float, over: int) -> Formula:
    """The norm grows to so many times itself over so many updates, as late in training."""

    def formula(applied: int, window: int) -> Numbers:
        loss, size = learns(applied, window)
        return loss, size * times ** min(1.0, applied / over)

    return formula


def batches_grow(times: float) -> Formula:
    """Batches are so many times as large from window 300 on: less noise, smaller norms."""

    def formula(applied: int, window: int) -> Numbers:
        large = window >= 300
        loss, size = learns(applied, window, noise=0.03 / (times**0.5 if large else 1))
        return loss, size / (times**0.5 if large else 1)

    return formula


def grows(rate: float, start: int = 0, by: float = 0) -> Formula:
    """Loss and norm grow by a share with every window; by: the loss has this constant added."""

    def formula(applied: int, window: int) -> Numbers:
        loss, size = learns(applied, window)
        scale = math.exp(rate * max(0, window - start))
        return loss * scale + by, size * scale

    return formula


def norm_runs_away(rate: float, start: int) -> Formula:
    """The norm alone grows by a share with every window."""

    def formula(applied: int, window: int) -> Numbers:
        loss, size = learns(applied, window)
        return loss, size * math.exp(min(600.0, rate * max(0, window - start)))

    return formula


def ramps(start: int, rise: float, over: int, by: float = 0) -> Formula:
    """From `start` on the loss rises evenly over so many windows, and stays there; by: a constant added."""

    def formula(applied: int, window: int) -> Numbers:
        loss, size = learns(applied, window)
        return loss + rise * min(1.0, max(0, window - start) / over) + by, size

    return formula


def swings(start: int, rate: float, period: int) -> Formula:
    """The loss swings wider with every window, and the norm with it."""

    def formula(applied: int, window: int) -> Numbers:
        loss, size = learns(applied, window)
        wide = math.exp(min(600.0, rate * max(0, window - start))) - 1
        up = (1 + math.sin(2 * math.pi * window / period)) / 2
        return loss * (1 + wide * up), size * (1 + wide * up)

    return formula
