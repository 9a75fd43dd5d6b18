"""What monitors share: what they may ask of a run before it begins, and how they keep their windows. Torch-free."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt

from harness.core.config import GuardConfig
from harness.core.protocols import Batches, Meta
from harness.monitors.evidence import FallbackConfig

BadData = Literal["auto", "skip", "fail"]


@dataclass(frozen=True, slots=True)
class MonitorContext:
    """The run, as its monitors are built for it.

    guard: its thresholds. fallback: the recipe's. max_grad_norm: what gradients are clipped to. warmup_steps: of the
    learning rate. data: what the run reads, None in a loop that is not ours. bad_data: what bad samples lead to.
    vocab_size: tokens are in [0, vocab_size); None: unknown. layers: FP8 layers, padded names, in the plan's order.
    amax_history: updates that delayed scales look back on, None if scales are not delayed; margin: their powers of two
    of headroom. scales_loss: there is an fp16 loss scale. refuge: what a run with a loss scale of ours may fall to
    ("bf16" | "fp32"; collective), None if there is nothing.
    """

    guard: GuardConfig
    fallback: FallbackConfig
    max_grad_norm: float = math.inf
    warmup_steps: int = 0
    data: Batches | None = None
    bad_data: BadData = "auto"
    vocab_size: int | None = None
    layers: tuple[str, ...] = ()
    amax_history: int | None = None
    margin: int = 0
    scales_loss: bool = False
    refuge: Callable[[], str] | None = None


class Kept:
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
        return {key: _restored(each, value[key]) for key, each in cast("dict[str, Any]", old).items()}
    return value if old is None or value is None else type(old)(value)
