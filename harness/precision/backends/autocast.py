"""The rungs without FP8: bf16 and fp16 by torch.autocast, and fp32 without it. Parameters are fp32, as on every rung.

No layer is converted and no tensor has a scale, so everything about slots is empty here. fp16 has a loss scale, which
lives in `precision.loss_scale`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from harness.core.protocols import Meta, TensorDict
from harness.precision.products import planned_autocast

if TYPE_CHECKING:
    from harness.precision.loss_scale import LossScale
    from harness.precision.plan import Plan
    from harness.precision.recipe import Recipe

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


class AutocastBackend:
    """A rung without FP8.

    loss_scale: that of an fp16 rung; it is retired when the run is downgraded to another precision.
    """

    layers: tuple[str, ...] = ()
    slot_names: tuple[str, ...] = ()
    demoted: tuple[str, ...] = ()

    def __init__(
        self, precision: str, device: torch.device, loss_scale: LossScale | None = None
    ) -> None:
        self.dtype = DTYPES[precision]
        self.device = device
        self._loss_scale = loss_scale
        self._planned = precision
        self.fell_back_to = ""
        self.note = "torch.autocast" if self.dtype else "no autocast"
        self._nothing = torch.zeros(0, device=device)

    @contextmanager
    def context(self) -> Iterator[None]:
        """torch.autocast in the rung's dtype; fp32 runs with autocast off."""
        with planned_autocast(self.device, self.dtype):
            yield

    def backward_context(self, last: bool | None = None) -> AbstractContextManager[None]:
        """Nothing to hold: autograd runs each backward op in the dtype of its forward."""
        return nullcontext()

    def gather_weights(self) -> None:
        """Nothing to change. Autograd keeps autocast's casts of weights until backward; recomputed blocks free them."""

    def begin_window(self, sample: bool) -> None:
        """Nothing to collect."""

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Nothing to roll."""

    def amax(self) -> Tensor:
        """float32 [0]."""
        return self._nothing

    def end_window(
        self,
        amax: Tensor,
        skip: Tensor,
        mean: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """float32 [8, 0]: no slots, so no statistics."""
        return self._nothing.reshape(8, 0)

    def scrubbed(self) -> Tensor:
        """Always 0."""
        return torch.zeros((), device=self.device)

    def switch(self, demote: Sequence[str], promote: Sequence[str]) -> None:
        """No layer can be named here, so there is nothing to switch."""

    def fall_back(self, precision: str) -> None:
        """Downgrade from fp16 to "bf16" or "fp32". Neither needs a loss scale."""
        self.fell_back_to, self.dtype = precision, DTYPES[precision]
        if self._loss_scale is not None:
            self._loss_scale.retire()

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """No tensors. meta has the keys of every backend's state, and the precision that the run was downgraded to."""
        return {}, {"slots": [], "demoted": [], "lowered": self.fell_back_to}

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore the precision that the run is in. The loss scale restores itself.

        Only an fp16 rung can be downgraded. A downgrade saved by another rung, such as FP8, does not apply here.
        """
        # A state of an FP8 rung has slots, and one of this rung has none.
        saved_by_autocast = not meta["slots"]
        if self._planned == "fp16" and saved_by_autocast:
            self.fell_back_to = meta["lowered"]
        else:
            self.fell_back_to = ""
        self.dtype = DTYPES[self.fell_back_to or self._planned]


def of_plan(
    plan: Plan,
    recipe: Recipe,
    model: nn.Module,
    device: torch.device,
    loss_scale: LossScale | None = None,
) -> AutocastBackend:
    """The backend of the plan's rung; nothing in `model` is converted."""
    return AutocastBackend(plan.rung.precision, device, loss_scale)
