"""Amax and scale of every slot under Transformer Engine: kept here, used and filled by TE's casts.

Slots are ordered layer by layer, each input, weight, grad_output, in the layout of `scaling.update`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from harness.core.protocols import TensorDict
from harness.precision import scaling
from harness.precision.backends.te_library import unexpected
from harness.precision.recipe import Fp8Config

# te.Linear's columns: scaling_fwd has input, weight, output; scaling_bwd has grad_output, grad_input. The last one of
# each is never quantised here and stays at history 0, scale 1.
_COLUMNS = {"scaling_fwd": 3, "scaling_bwd": 2}
_SLOTS = (0, 1, 3)


class Scales(Protocol):
    """What the backend asks of a way of scaling. amax and scale: float32 [slots]."""

    scrubbed: Tensor
    """Infinite amaxes dropped in the last window, float32 0-d."""

    def begin_window(self) -> None:
        """A window begins."""
        ...

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """A micro-batch ended. reduce: MAX over ranks."""
        ...

    def staged(self) -> Tensor:
        """What this rank saw since scales last moved, for the window's MAX over ranks; float32 [slots], a copy."""
        ...

    def finish(self, amax: Tensor, skip: Tensor) -> Tensor:
        """End of a window; float32 [3, slots]: amax, scale in use, saturation. amax: `staged`, reduced over ranks."""
        ...

    def tensors(self) -> TensorDict:
        """history float32 [L, slots], scale float32 [slots]."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `tensors` in place."""
        ...


class DelayedScales(scaling.ScalingState):
    """TE's casts stage their amaxes in row 0 of one history for the whole model; it rolls here, as the recipe says.

    Each layer's `amax_history` [L, 3 or 2] and `scale` [3 or 2] in `fp8_meta` become views of `history` and `scale`,
    and its quantizers are made anew from them: nothing is copied between TE and here, and a roll, a skip or a
    checkpoint is a handful of kernels for any number of layers. Rolling as TE does would go by the order in which the
    layers of all models in the process were first used, which ranks may not share, and at moments that depend on which
    layer came first and whether it is in the loss.

    Raises MachineError if TE does not keep its state as this was written for.
    """

    def __init__(self, modules: Sequence[Any], config: Fp8Config, fp8_max: Tensor, version: str) -> None:
        device, width = fp8_max.device, sum(_COLUMNS.values())
        _check_layout(modules, config.amax_history_len, version)
        self._columns = torch.tensor([width * i + slot for i in range(len(modules)) for slot in _SLOTS], device=device)
        super().__init__(config, torch.ones(width * len(modules), device=device).index_copy_(0, self._columns, fp8_max))
        first = 0
        for module in modules:
            for key, columns in _COLUMNS.items():
                state, own = module.fp8_meta[key], slice(first, first + columns)
                state.amax_history, state.scale = self.history[:, own], self.scale[own]
                module.quantizers[key] = state.make_quantizers()
                first += columns

    def staged(self) -> Tensor:
        """Amaxes since the last roll; all 0 under `roll: micro_batch`."""
        return self.history[0, self._columns]

    def finish(self, amax: Tensor, skip: Tensor) -> Tensor:
        """Roll unless micro-batches did; after a skipped step history and scale are as before the window."""
        self.end_window(torch.zeros_like(self.scale).index_copy_(0, self._columns, amax), skip)
        return self.known()[:, self._columns]

    def tensors(self) -> TensorDict:
        """Copies; the same layout as the native backend's."""
        return {"history": self.history[:, self._columns], "scale": self.scale[self._columns]}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Any device; shapes as `tensors` gives them."""
        device = self.scale.device
        self.history[:, self._columns] = tensors["history"].to(device)
        self.scale[self._columns] = tensors["scale"].to(device)


def _check_layout(modules: Sequence[Any], length: int, version: str) -> None:
    for key, columns in _COLUMNS.items():
        wanted = {"amax_history": (length, columns), "scale": (columns,)}
        for module in modules:
            state = module.fp8_meta.get(key)
            for attribute, shape in wanted.items():
                found = getattr(state, attribute, None)
                if not isinstance(found, Tensor) or found.shape != shape or found.dtype != torch.float32:
                    what = f"{tuple(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else repr(found)
                    raise unexpected(version, f"keeps {key}.{attribute} as {what}, not as {shape} of float32")
            if not hasattr(state, "make_quantizers"):
                raise unexpected(version, f"makes no quantizers from {key}")


class TensorScales:
    """Current and block scaling: each cast takes its scale from the tensor at hand, so there is no state to keep.

    amax is measured by hook (`Watch`). Current: scale is what the cast of the largest tensor used, fp8_max / amax, and
    saturation is 1 by construction. Block: every 128 values, of weights every 128 x 128, have a scale of their own, so
    scale is NaN (a tensor has no single one), and 1 for saturation says that no block can exceed its limit. As in TE's
    kernels (common/recipe/recipe_common.cuh) an amax of 0 or infinity gives a scale of 1, so a saturation of 0 or
    infinity.
    """

    def __init__(self, fp8_max: Tensor, amax: Tensor, blocks: bool) -> None:
        self._fp8_max, self._amax, self._blocks = fp8_max, amax, blocks
        self.scrubbed = torch.zeros((), device=fp8_max.device)

    def begin_window(self) -> None:
        """Nothing is kept from window to window."""

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Nothing rolls."""

    def staged(self) -> Tensor:
        """Measured by hook."""
        return self._amax.clone()

    def finish(self, amax: Tensor, skip: Tensor) -> Tensor:
        """`skip` changes nothing."""
        usable = (amax > 0) & torch.isfinite(amax)
        limit = torch.finfo(torch.float32).max
        scale = torch.where(usable, (self._fp8_max / amax).clamp_max(limit), 1.0)
        saturation = amax * scale / self._fp8_max
        return torch.stack([amax, torch.full_like(scale, torch.nan) if self._blocks else scale, saturation])

    def tensors(self) -> TensorDict:
        """The last amaxes as a history of one row."""
        return {"history": self._amax[None].clone(), "scale": torch.ones_like(self._amax)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The last amaxes."""
        self._amax.copy_(tensors["history"][0])
