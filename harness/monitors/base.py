"""What monitors share: what they may ask of a run before it begins, how they keep their windows, and what is usual in a
noisy, drifting series. Torch-free.
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

BadData = Literal["auto", "skip", "fail"]


@dataclass(frozen=True, slots=True)
class MonitorContext:
    """The run, as its monitors are built for it.

    guard: its thresholds. fallback: the recipe's. max_grad_norm: what gradients are clipped to. warmup_steps: of the
    learning rate. data: what the run reads, None in a loop that is not ours. bad_data: what bad samples lead to.
    vocab_size, classes: tokens are in [0, vocab_size), labels in [0, classes); None: unknown. layers: FP8 layers,
    padded names, in the plan's order. amax_history: updates that delayed scales look back on, None if scales are not
    delayed; margin: their powers of two of headroom. scales_loss: there is an fp16 loss scale. fallback_precision: what
    a run with a loss scale of ours may fall back to ("bf16" | "fp32"; collective), None if there is nothing.
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
    """A monitor whose window in checkpoints is made of its attributes `_<name>` for each name in `kept`.

    Those are numbers, None, sequences and dicts of them, or one-dimensional arrays; a NaN in an array is stored as
    None, since strict JSON has no word for it.
    """

    kept: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> Meta:
        """JSON-able; restores every later decision exactly."""
        return {name: _stored(getattr(self, f"_{name}")) for name in self.kept}

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises LookupError, TypeError or ValueError if it is something else."""
        found = {name: _restored(getattr(self, f"_{name}"), meta[name]) for name in self.kept}
        for name, value in found.items():
            setattr(self, f"_{name}", value)


def _stored(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [None if each != each else each for each in cast(npt.NDArray[Any], value).tolist()]
    if isinstance(value, dict):
        return dict(cast("dict[str, Any]", value))
    return list(cast("list[Any]", value)) if isinstance(value, deque | list | tuple) else value


def _restored(old: Any, value: Any) -> Any:
    """`value` in the form of `old`: with its length limit, its dtype, its keys, its type."""
    if isinstance(old, np.ndarray):
        given = [np.nan if each is None else each for each in value]
        return np.array(given, dtype=cast(npt.NDArray[Any], old).dtype)
    if isinstance(old, deque):
        return deque(value, cast("deque[Any]", old).maxlen)
    if isinstance(old, dict):
        return {
            key: _restored(each, value[key]) for key, each in cast("dict[str, Any]", old).items()
        }
    return value if old is None or value is None else type(old)(value)


ARMED_AFTER = 32
"""Applied steps before a limit is given. Earlier, loss and norm move too fast for their own past to say anything."""
AHEAD = SWITCH_DELAY
"""Steps between the last value known and the step that its limit is for."""
MAD_TO_SIGMA = 1.4826
"""1 / Phi^-1(3/4): makes the median absolute deviation of a normal sample an estimate of its standard deviation."""
RECENT = 8
"""Newest values that say whether a fall has ended."""
_LOG_MAX = 80.0


ROUNDING = 2.0**-20
"""Of the largest loss: spread that float32 may have rounded away."""


@dataclass(frozen=True, slots=True)
class Level:
    """The usual value of a series of logarithms, and the standard deviation about it."""

    centre: float
    sigma: float


def level(logs: Sequence[float], ahead: int) -> Level:
    """The level to expect `ahead` steps after the last of `logs` (one or more numbers), deaf to a minority of outliers.

    The trend is the line through the medians of the two halves (the first step of Tukey's resistant line, Exploratory
    Data Analysis, 1977, with halves for thirds), and sigma is the MAD about it. The centre follows a fall, since a
    plain median lags behind one so far that tenfold spikes stay under it; but only down to the second lowest of the
    last 8, so that a fall that ends is not continued. A rise is not followed and counts as spread: it is no sign of
    health that should make a detector keener, and a slow one must not be cut off either.
    """
    size, half = len(logs), len(logs) // 2
    usual = median(logs)
    slope = min(0.0, (median(logs[half:]) - median(logs[:half])) / (size / 2)) if half else 0.0
    flat = [value - slope * place for place, value in enumerate(logs)]
    middle = median(flat)
    sigma = MAD_TO_SIGMA * median(abs(value - middle) for value in flat)
    second_lowest = sorted(logs[-RECENT:])[min(1, size - 1)]
    return Level(max(middle + slope * (size - 1 + ahead), min(second_lowest, usual)), sigma)


RECURRING = 5
RECURRING_SPAN = 500
_MOST = 4
_USUAL_BETWEEN = 2
_MARGIN = 1.25


def mark(deviation: float, room: float) -> list[float]:
    """What `recurring` keeps of a window: its deviation from the usual where that is over `room`, 0 where it is usual.

    Over half of the room it is neither, and nothing is kept: a fault that grows passes through there.
    """
    if deviation > room:
        return [deviation]
    return [0.0] if deviation <= room / 2 else []


def recurring(marks: Sequence[float]) -> float | None:
    """The deviation to let through where values over their limit come again and again; None where they do not.

    marks: of the last RECURRING_SPAN windows. Five or more were over their limit, and of every five since the first at
    least about one was usual. Usual values between them show that the weights are sound: some of the data are
    different, and would be to the end of the run. A quarter more than the largest of them is let through.
    """
    over = [value for value in marks if value > 0]
    if len(over) < RECURRING:
        return None
    first = next(place for place, value in enumerate(marks) if value > 0)
    usual = len(marks) - first - len(over)
    if usual < _USUAL_BETWEEN or len(over) > _MOST * (usual + 1):
        return None
    return _MARGIN * max(over)


def from_log(value: float) -> float:
    """exp, infinite where float32 could not hold it."""
    return math.exp(value) if value < _LOG_MAX else math.inf


def why_skipped(facts: StepFacts) -> Literal["", "data", "nonfinite", "loss", "norm"]:
    """The one cause to name, so that an update that was skipped for several is told once. Empty if it was applied.

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
"""Below this a falling loss scale is no longer a scaler finding its range: it has halved six times from the usual
65536, so the gradients themselves are at fault."""


def is_calibration(loss: float, loss_scale: float, last_skipped_at: float | None) -> bool:
    """Whether a skipped step is a loss scaler lowering its scale.

    loss: of the step, nats. loss_scale: in use at it. last_skipped_at: the scale of the skipped step right before it,
    None if that one was applied. Lowering the scale cannot cure a loss that is itself not finite: forward never sees
    the scale.
    """
    falling = last_skipped_at is None or loss_scale < last_skipped_at
    return loss_scale >= CALIBRATION_FLOOR and falling and math.isfinite(loss)
