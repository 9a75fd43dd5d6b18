"""Amax and scale of every slot under Transformer Engine: read from TE where it keeps them, measured where it does not.

Slots are ordered layer by layer, each input, weight, grad_output, in the layout of `scaling.update`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.core.protocols import TensorDict
from harness.precision import scaling
from harness.precision.backends.te_library import unexpected
from harness.precision.recipe import Fp8Config

# te.Linear's columns: scaling_fwd has input, weight, output; scaling_bwd has grad_output, grad_input. The last one of
# each is never quantised here and stays at history 0, scale 1.
_COLUMNS = {"scaling_fwd": slice(0, 2), "scaling_bwd": slice(2, 3)}


class Scales(Protocol):
    """What the backend asks of a way of scaling. amax and scale: float32 [slots]."""

    scrubbed: Tensor
    """Infinite amaxes dropped in the last window, float32 0-d."""

    def begin(self) -> None:
        """A window begins."""
        ...

    def after_backward(self, demoted: Tensor) -> None:
        """A micro-batch ended; demoted: bool [slots], which slots were in BF16."""
        ...

    def finish(self, amax: Tensor, skip: Tensor) -> Tensor:
        """End of a window; float32 [3, slots]: amax, scale in use, saturation. amax: measured, reduced over ranks."""
        ...

    def held(self) -> Callable[[], None]:
        """What puts the state back as it is now."""
        ...

    def tensors(self) -> TensorDict:
        """history float32 [L, slots], scale float32 [slots]."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `tensors` in place."""
        ...


class DelayedScales:
    """TE rolls the histories of FP8 layers itself, once per micro-batch; layers in BF16 roll here, once per window.

    Each layer's tensors are read and written in place: TE's quantizers and global buffers hold the very same ones.
    Those buffers are lists of them, in the order of first use and empty before, so they would save no kernel over
    stacking the layers' own: four stacks for any number of layers. A window costs one read, another for each
    micro-batch, and one write.

    Raises MachineError if TE does not keep its state as this was written for.
    """

    def __init__(self, modules: Sequence[Any], config: Fp8Config, fp8_max: Tensor, version: str) -> None:
        self.modules, self.config, self._fp8_max = list(modules), config, fp8_max
        self._check_layout(version)
        self._peak, self._saturation = torch.zeros(2, len(fp8_max), device=fp8_max.device)
        self.scrubbed = torch.zeros((), device=fp8_max.device)
        self._entry = self._latest = self._read()

    def begin(self) -> None:
        """Remember what a skipped step must restore."""
        self._peak.zero_()
        self._saturation.zero_()
        self._entry = self._latest = self._read()

    def after_backward(self, demoted: Tensor) -> None:
        """TE has rolled: note the amaxes that it saw, and their saturation under the scale that was in use.

        A slot that TE did not roll (its tensor was all zero) shows the amax of its last roll.
        """
        scale_in_use = self._latest[1]
        self._latest = self._read()
        self._note(torch.where(demoted, 0.0, self._latest[0][-1]), scale_in_use)

    def finish(self, amax: Tensor, skip: Tensor) -> Tensor:
        """Roll layers in BF16 by the shared rule, scrub, or restore everything after a skipped step."""
        old_history, old_scale = self._entry
        self._note(amax, old_scale)
        history, scale = self._latest[0].clone(), self._latest[1]
        history[0] = amax  # 0 where TE rolled, and `update` leaves such slots alone
        if self.config.scrub_inf:
            history, dropped = scaling.scrub(history)
            self.scrubbed = dropped.float()
        history, scale = scaling.update(
            history, scale, self._fp8_max, self.config.margin, self.config.amax_compute_algo
        )
        skipped = skip > 0
        self._write(torch.where(skipped, old_history, history), torch.where(skipped, old_scale, scale))
        return torch.stack([self._peak, old_scale, self._saturation])

    def _note(self, amax: Tensor, scale: Tensor) -> None:
        torch.maximum(self._peak, amax, out=self._peak)
        torch.maximum(self._saturation, amax * scale / self._fp8_max, out=self._saturation)

    def held(self) -> Callable[[], None]:
        """With gradients off TE rolls nothing, but notes amaxes in row 0, which the next roll would take up."""
        kept = self._read()
        return lambda: self._write(*kept)

    def tensors(self) -> TensorDict:
        """Copies; the same layout as the native backend's."""
        history, scale = self._read()
        return {"history": history, "scale": scale}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Any device; shapes as `tensors` gives them."""
        device = self._fp8_max.device
        self._write(tensors["history"].to(device), tensors["scale"].to(device))

    def _buffers(self, key: str, attribute: str) -> list[Tensor]:
        return [getattr(module.fp8_meta[key], attribute) for module in self.modules]

    @torch.no_grad()
    def _read(self) -> tuple[Tensor, Tensor]:
        """Copies: history [L, slots], scale [slots]."""
        histories = [torch.stack(self._buffers(key, "amax_history")) for key in _COLUMNS]
        scales = [torch.stack(self._buffers(key, "scale")) for key in _COLUMNS]
        history = torch.cat([histories[0][..., :2], histories[1][..., :1]], dim=-1)  # [layers, L, 3]
        scale = torch.cat([scales[0][..., :2], scales[1][..., :1]], dim=-1)  # [layers, 3]
        return history.transpose(0, 1).flatten(1), scale.flatten()

    @torch.no_grad()
    def _write(self, history: Tensor, scale: Tensor) -> None:
        """Into TE's own tensors, in place; the inverse of `_read`. Between steps: everything is on one stream."""
        layers = len(self.modules)
        histories, scales = history.reshape(-1, layers, 3).transpose(0, 1), scale.reshape(layers, 3)
        for key, roles in _COLUMNS.items():
            torch._foreach_copy_(self._buffers(key, "amax_history"), list(F.pad(histories[..., roles], (0, 1))))
            torch._foreach_copy_(self._buffers(key, "scale"), list(F.pad(scales[..., roles], (0, 1), value=1.0)))

    def _check_layout(self, version: str) -> None:
        for key, columns in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            wanted = {"amax_history": (self.config.amax_history_len, columns), "scale": (columns,)}
            for attribute, shape in wanted.items():
                for module in self.modules:
                    found = getattr(module.fp8_meta.get(key), attribute, None)
                    if not isinstance(found, Tensor) or found.shape != shape or found.dtype != torch.float32:
                        what = f"{tuple(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else repr(found)
                        raise unexpected(version, f"keeps {key}.{attribute} as {what}, not as {shape} of float32")


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

    def begin(self) -> None:
        """Nothing is kept from window to window."""

    def after_backward(self, demoted: Tensor) -> None:
        """Nothing rolls."""

    def finish(self, amax: Tensor, skip: Tensor) -> Tensor:
        """`skip` changes nothing."""
        usable = (amax > 0) & torch.isfinite(amax)
        limit = torch.finfo(torch.float32).max
        scale = torch.where(usable, (self._fp8_max / amax).clamp_max(limit), 1.0)
        saturation = amax * scale / self._fp8_max
        return torch.stack([amax, torch.full_like(scale, torch.nan) if self._blocks else scale, saturation])

    def held(self) -> Callable[[], None]:
        """Nothing to put back."""
        return lambda: None

    def tensors(self) -> TensorDict:
        """The last amaxes as a history of one row."""
        return {"history": self._amax[None].clone(), "scale": torch.ones_like(self._amax)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The last amaxes."""
        self._amax.copy_(tensors["history"][0])
