"""What one step of `harness.Precision` did: at once as device tensors, later as facts on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.core.facts import SlotStats, StepFacts, Switch

_SCALARS = 6


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of one step; the tensors are 0-d, on the model's device, and not yet read by the host.

    applied: bool; False when loss or gradients were not finite on some rank and nothing was changed. grad_norm:
    float32, of the unscaled gradients before clipping. loss_scale: float32, in use at this step (1 unless fp16).
    switch: what the recipe's fallback moved at the end of this step: layers between FP8 and BF16, or, for good, the
    whole run to another precision; else None.
    """

    applied: Tensor
    grad_norm: Tensor
    loss_scale: Tensor
    switch: Switch | None = None

    @property
    def was_applied(self) -> bool:
        """`applied` on the host; waits for the device."""
        return bool(self.applied.item())


class LaggedFacts:
    """One step's facts on their way to the host, in one packed copy that nobody waits for.

    packed: float32 [6 + 6 * slots] on the CPU: skipped, applied so far, gradient norm, loss scale, scrubbed, loss, then
    the rows of `PrecisionBackend.end_window`.
    """

    def __init__(
        self, step: int, demoted: Sequence[str], lowered: str, slot_names: Sequence[str], packed: Tensor
    ) -> None:
        self.step, self.demoted, self.lowered, self.slot_names = step, tuple(demoted), lowered, tuple(slot_names)
        self._arrived = None
        if packed.device.type == "cuda":
            stream = torch.cuda.current_stream(packed.device)
            packed = packed.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(stream)
        self._packed = packed

    def packed(self) -> Tensor:
        """The copy, once it has arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._packed

    def facts(self) -> StepFacts:
        """Learning rate, tokens and seconds belong to the caller's loop: NaN or 0 here."""
        packed = self.packed()
        skipped, applied, grad_norm, loss_scale, scrubbed, loss = packed[:_SCALARS].tolist()
        slots = None
        if self.slot_names:
            rows = packed[_SCALARS:].reshape(-1, len(self.slot_names)).numpy()
            slots = SlotStats(self.slot_names, *rows, scrubbed=int(scrubbed))
        return StepFacts(
            step=self.step,
            window=self.step - 1,
            loss=loss,
            grad_norm=grad_norm,
            lr=math.nan,
            loss_scale=loss_scale,
            applied=skipped == 0.0,
            applied_steps=int(applied),
            tokens=0,
            seconds=0.0,
            demoted=self.demoted,
            slots=slots,
            lowered=self.lowered,
        )

    def meta(self) -> dict[str, Any]:
        """JSON-able; with `packed` it restores these facts."""
        return {"step": self.step, "demoted": list(self.demoted), "lowered": self.lowered}

    @classmethod
    def restore(cls, meta: Mapping[str, Any], packed: Tensor, slot_names: Sequence[str]) -> LaggedFacts:
        """The facts that `meta` and `packed` were saved from."""
        return cls(meta["step"], meta["demoted"], meta["lowered"], slot_names, packed.detach().cpu().clone())
