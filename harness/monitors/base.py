"""The base of all monitors: their context, their state in checkpoints, and robust statistics of noisy series.

A monitor compares a step with what is usual. Losses and norms are noisy, drift and have outliers, so means and standard
deviations mislead: a spike would widen the limit that should stop the next one. `level` uses medians instead. It
follows a fall, since a run that learns has a falling loss, and treats a rise as spread. `recurring` finds values that
are large again and again between usual ones: they belong to the data, and skipping them for ever would not help.

Torch-free.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt

from harness.core.config import FallbackConfig, GuardConfig
from harness.core.facts import SWITCH_DELAY, StepFacts
from harness.core.protocols import Batches, Meta

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

BadData = Literal["auto", "skip", "fail"]


@dataclass(frozen=True, slots=True)
class MonitorContext:
    """What monitors may know of a run before it begins.

    guard: the guard's thresholds.
    fallback: the recipe's rules for leaving FP8.
    max_grad_norm: the norm to which gradients are clipped.
    warmup_steps: of the learning rate.
    data: what the run reads; None in other people's loops.
    bad_data: what bad samples lead to.
    vocab_size: tokens are in [0, vocab_size); None: unknown.
    classes: labels are in [0, classes); None: unknown.
    layers: FP8 layers, padded names, in the plan's order.
    amax_history: updates that a delayed scale looks back on; None if scales are not delayed.
    margin: powers of two of headroom in delayed scales.
    scales_loss: there is an fp16 loss scale.
    fallback_precision: what a run with a loss scale of its own may fall back to, "bf16" or "fp32". A collective call.
        None if there is nothing.
    """

    guard: GuardConfig
    fallback: FallbackConfig
    max_grad_norm: float = math.inf
    warmup_steps: int = 0
    data: Batches | None = None
    bad_data: BadData = "auto"
    vocab_size: int | None = None
    classes: int | None = None
    layers: tuple[str, ...] = ()
    amax_history: int | None = None
    margin: int = 0
    scales_loss: bool = False
    fallback_precision: Callable[[], str] | None = None


class KeptWindow:
    """A monitor whose state in checkpoints is its attributes `_<name>`, one for each name in `kept`.

    They may be numbers, None, sequences and dicts of those, or one-dimensional arrays. A NaN in an array is stored as
    None, since strict JSON has no NaN.
    """

    kept: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> Meta:
        """JSON-able; restores every later decision exactly."""
        return {name: _stored(getattr(self, f"_{name}")) for name in self.kept}

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave. Raises LookupError, TypeError or ValueError if it is something else."""
        # Read everything before changing anything: a bad state must not be half loaded.
        found: dict[str, Any] = {}
        for name in self.kept:
            found[name] = _restored(getattr(self, f"_{name}"), meta[name])
        for name, value in found.items():
            setattr(self, f"_{name}", value)


def _stored(value: Any) -> Any:
    """`value` as JSON has it."""
    if isinstance(value, np.ndarray):
        values = cast(npt.NDArray[Any], value).tolist()
        # NaN alone differs from itself.
        return [None if each != each else each for each in values]
    if isinstance(value, dict):
        return dict(cast("dict[str, Any]", value))
    if isinstance(value, deque | list | tuple):
        return list(cast("list[Any]", value))
    return value


def _restored(old: Any, value: Any) -> Any:
    """`value` in the form of `old`: with its length limit, its dtype, its keys, its type."""
    if isinstance(old, np.ndarray):
        given = [np.nan if each is None else each for each in value]
        return np.array(given, dtype=cast(npt.NDArray[Any], old).dtype)
    if isinstance(old, deque):
        return deque(value, cast("deque[Any]", old).maxlen)
    if isinstance(old, dict):
        items = cast("dict[str, Any]", old).items()
        return {key: _restored(each, value[key]) for key, each in items}
    if old is None or value is None:
        return value
    return type(old)(value)


ARMED_AFTER = 32
"""Applied steps before a limit is given. Earlier, loss and norm move too fast for their past to say what is usual."""

AHEAD = SWITCH_DELAY
"""Steps between the last value known and the step that its limit is for."""

MAD_TO_SIGMA = 1.4826
"""1 / Phi^-1(3/4): turns the median absolute deviation of a normal sample into its standard deviation."""

RECENT = 8
"""The newest values; they say whether a fall has ended."""

ROUNDING = 2.0**-20
"""Share of the largest loss that rounding to float32 may hide: the smallest spread to assume."""

_LOG_MAX = 80.0
"""Larger logarithms stand for infinity: float32 ends at e^88."""


@dataclass(frozen=True, slots=True)
class Level:
    """The usual value of a series, and the standard deviation about it."""

    centre: float
    sigma: float


def level(logs: Sequence[float], ahead: int) -> Level:
    """The level to expect `ahead` steps after the last of `logs` (one or more numbers). A minority of outliers is
    ignored.

    The trend is the line through the medians of the two halves (the first step of Tukey's resistant line, Exploratory
    Data Analysis, 1977, with halves for thirds). sigma is the MAD about that line.

    The centre follows a fall. A plain median lags behind one so far that tenfold spikes stay under it. But the centre
    goes no lower than the second lowest of the last 8 values, so a fall that ends is not continued.

    A rise is not followed and counts as spread. It is no sign of health that should make a detector more sensitive, and
    a slow one must not be cut off either.
    """
    size = len(logs)
    half = size // 2
    usual = median(logs)

    slope = 0.0
    if half:
        change = median(logs[half:]) - median(logs[:half])
        slope = min(0.0, change / (size / 2))

    # The spread about the trend, not about one value: a fall is no noise.
    flat = [value - slope * place for place, value in enumerate(logs)]
    middle = median(flat)
    sigma = MAD_TO_SIGMA * median(abs(value - middle) for value in flat)

    # A fall that has ended is not continued. One low outlier is no new level, so the second lowest value decides.
    expected = middle + slope * (size - 1 + ahead)
    second_lowest = sorted(logs[-RECENT:])[min(1, size - 1)]
    lowest = min(second_lowest, usual)
    return Level(max(expected, lowest), sigma)


RECURRING = 5
"""Values over their limit that are needed to call them recurring."""
RECURRING_SPAN = 500
"""Newest windows in which they are looked for."""
_MOST = 4
"""Large values for each usual one, at most."""
_USUAL_BETWEEN = 2
"""Usual values that are needed since the first large one."""
_MARGIN = 1.25
"""Deviations up to this many times the largest are let through."""


def mark(deviation: float, room: float) -> list[float]:
    """The entries of a window for `recurring`: its deviation if that is over `room`, 0 if it is usual.

    Between half of `room` and `room` a value is neither, and there is no entry: a fault that grows passes there, and
    must not count as a usual value between large ones.
    """
    if deviation > room:
        return [deviation]
    if deviation <= room / 2:
        return [0.0]
    return []


def recurring(marks: Sequence[float]) -> float | None:
    """The deviation to let through where values over their limit recur; None where they do not.

    marks: entries of `mark` for the last RECURRING_SPAN windows.

    Values recur if five or more were over their limit and, since the first of those, about one in five was usual. Usual
    values between them show that the weights are sound: some of the data is different, and will be to the end of the
    run. Deviations up to a quarter over the largest are let through.
    """
    over = [value for value in marks if value > 0]
    if len(over) < RECURRING:
        return None

    # Without usual values between the large ones the weights may be at fault.
    first = next(place for place, value in enumerate(marks) if value > 0)
    usual = len(marks) - first - len(over)
    if usual < _USUAL_BETWEEN or len(over) > _MOST * (usual + 1):
        return None
    return _MARGIN * max(over)


def from_log(value: float) -> float:
    """exp, or infinity where float32 could not hold the result."""
    return math.exp(value) if value < _LOG_MAX else math.inf


def why_skipped(facts: StepFacts) -> Literal["", "data", "nonfinite", "loss", "norm"]:
    """The cause of a skipped update; empty if it was applied. Only one, so that one monitor alone reports it.

    An update that was skipped although loss and norm are finite and within their limits counts as not finite: some
    engines look at single gradients and report a finite norm.
    """
    if facts.bad_data:
        return "data"
    if facts.applied:
        return ""
    if facts.over_limits:
        return "loss" if facts.loss > facts.limits.loss else "norm"
    return "nonfinite"


CALIBRATION_FLOOR = 1024.0
"""A scaler finding its range does not fall below this: that takes six halvings from the usual 65536. A scale that does
shows that the gradients themselves are at fault."""


def is_calibration(
    loss: float,
    loss_scale: float,
    last_skipped_at: float | None,
) -> bool:
    """Whether a step was skipped because a loss scaler is lowering its scale.

    loss: of the step, nats.
    loss_scale: in use at the step.
    last_skipped_at: the scale of the skipped step right before it; None if that one was applied.

    A loss that is itself not finite is no calibration: forward never sees the scale, so lowering it cannot help.
    """
    falling = last_skipped_at is None or loss_scale < last_skipped_at
    return loss_scale >= CALIBRATION_FLOOR and falling and math.isfinite(loss)
