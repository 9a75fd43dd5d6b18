"""All FP8 slots of a model in one packed arena: history [L, slots], scale [slots], statistics [slots, 5].

One update, one all-reduce, one snapshot, one telemetry read for the whole model, whatever its number of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.core.errors import CheckpointError, Problem
from harness.core.protocols import Meta, TensorDict
from harness.precision import scaling
from harness.precision.backends import native_kernel
from harness.precision.backends.native_gemm import Carrier, Operand
from harness.precision.recipe import Fp8Config

STAT_ROWS = ("amax", "scale", "saturation", "clipped", "underflow", "sqnr_db")


class Arena(scaling.ScalingState):
    """Delayed-scaling state of every slot of one model, and the casts under it, here to bfloat16 carriers.

    names: `<layer>.<role>`. formats: "e4m3" or "e5m2" for each. `active` is on inside a precision context; `sampling`
    adds the statistics that need more than an amax. demoted: first slots of the layers in BF16. epoch counts changes
    of `scale`, window counts optimizer steps begun. gradient: format of every grad_output. weights: quantised ones by
    their layer's first slot, with what they were made from and when.
    """

    traced: tuple[Callable[..., Tensor], Callable[..., Tensor]] | None = None
    """`linear` and `switching` of native_traced where a compiler is shown the casts."""

    def __init__(self, names: Sequence[str], formats: Sequence[str], config: Fp8Config, device: torch.device) -> None:
        super().__init__(config, torch.tensor([scaling.FORMATS[fmt].max for fmt in formats], device=device))
        self.names, self.formats, self.device = tuple(names), tuple(formats), device
        self.sums = torch.zeros(len(names), 5, dtype=torch.float64, device=device)
        self.active = False
        self.sampling = False
        self.gradient = formats[-1] if formats else "e5m2"
        self.demoted: set[int] = set()
        self.weights: dict[int, tuple[tuple[int, ...], Operand, Tensor]] = {}
        self.epoch = 0
        self.window = 0
        self.kernel, self.kernel_note = native_kernel.load() if device.type == "cpu" else (None, "PyTorch casts")
        self._scratch = torch.zeros(1)
        self._scales_changed()

    def activation(self, rows: Tensor, slot: int, record: bool, rights: bool = True) -> Operand:
        """`rows` [m, n] of any float dtype, rounded to bfloat16 and then cast under the slot's scale.

        record: note amax and statistics. rights: it will be a right operand or a transposed left one, too.
        """
        return self.operand(rows.to(torch.bfloat16).contiguous(), slot, record, rights)

    def operand(self, x: Tensor, slot: int, record: bool, rights: bool = True) -> Operand:
        """As `activation`, from `x` [m, n] as it is."""
        return Carrier(self.quantize(x.contiguous(), slot, record), self.inverses[slot])

    def quantize(self, x: Tensor, slot: int, record: bool) -> Tensor:
        """Raw FP8 values of `x` (contiguous) in bfloat16 under the slot's scale; `record`: note amax and statistics."""
        fmt = self.formats[slot]
        if self.kernel is not None and x.dtype in (torch.bfloat16, torch.float32):
            amax = self.history.data_ptr() + 4 * slot if record else self._scratch.data_ptr()
            stats = self.sums.data_ptr() + 40 * slot if record and self.sampling else None
            return self.kernel(x, self.scales[slot], fmt, amax, stats)
        quantized = scaling.quantize(x, self.scale[slot], fmt)
        if record:
            self._stage(x, slot)
            if self.sampling:
                self.sums[slot] += scaling.quantization_stats(x, quantized, self.scale[slot], fmt)
        return quantized

    def observe(self, x: Tensor, slot: int) -> None:
        """Note max|x| of a tensor that is multiplied in BF16; when sampling, also what FP8 would make of it.

        A demoted layer must not come back while its tensors would still lose too much.
        """
        if self.sampling:
            self.quantize(x.detach().contiguous(), slot, record=True)
        else:
            self._stage(x, slot)

    def _stage(self, x: Tensor, slot: int) -> None:
        self.stage(slot, scaling.amax(x))

    def stage(self, slot: int, amax: Tensor) -> None:
        """Raise the slot's running amax to `amax`, float32 of one element."""
        staged = self.history[0, slot : slot + 1]
        torch.maximum(staged, amax.reshape(1), out=staged)

    def may_release(self) -> bool:
        """Whether a layer may give its quantised weight up once backward has used it: here it stays for the window."""
        return False

    def backward_begins(self, last: bool | None) -> None:
        """One more micro-batch of the window goes backward; last: as of `PrecisionBackend.backward_context`."""

    def before_update(self) -> None:
        """All of a window's backwards are done."""

    def begin_window(self, sample: bool = False) -> None:
        """As `ScalingState.begin_window`; `sample`: collect for underflow, clipped share and SQNR, too."""
        super().begin_window()
        self.window += 1
        self.sampling = sample
        self.sums.zero_()

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """As `ScalingState.end_micro_batch`."""
        if self.config.roll == "micro_batch":
            super().end_micro_batch(reduce)
            self._scales_changed()

    def end_window(self, amax: Tensor, skip: Tensor) -> None:
        """As `ScalingState.end_window`."""
        super().end_window(amax, skip)
        self._scales_changed()

    def stats(self, sums: Tensor) -> Tensor:
        """float32 [6, slots], rows as in STAT_ROWS, of the window that just ended. sums: `self.sums`, rank-reduced.

        scale is the one in use when the window began. Rows from clipped on are NaN where nothing was sampled.
        """
        return torch.cat([self.known(), scaling.shares(sums)])

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """tensors: history float32 [L, slots] (staging empty), scale float32 [slots]; meta: slot names, formats."""
        return {"history": self.history, "scale": self.scale}, {
            "slots": list(self.names),
            "formats": list(self.formats),
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore in place; what a run without FP8 saved makes it new. Raises CheckpointError if slots, formats or
        history length differ.
        """
        if not meta["slots"]:
            self.history.zero_()
            self.scale.fill_(1.0)
            self._scales_changed()
            return
        mine = (list(self.names), list(self.formats), list(self.history.shape))
        saved = (meta["slots"], meta["formats"], list(tensors["history"].shape))
        if mine != saved:
            raise CheckpointError(
                Problem(
                    f"FP8 state is of {len(saved[0])} slots, history length {saved[2][0]}; this run has "
                    f"{len(mine[0])} slots, history length {mine[2][0]}",
                    "fp8 state",
                    fix="resume with the recipe and model that wrote the checkpoint",
                )
            )
        self.history.copy_(tensors["history"])
        self.scale.copy_(tensors["scale"])
        self._scales_changed()

    def _scales_changed(self) -> None:
        """Refresh what is derived from `scale` and drop cached FP8 weights.

        inverses: 1 / scale, correctly rounded to float32. A carrier's GEMM takes its scales as numbers of the host.
        """
        self.epoch += 1
        self.weights.clear()
        self.inverse = torch.ones_like(self.scale) / self.scale
        self._read_scales()

    def _read_scales(self) -> None:
        self.scales: list[float] = self.scale.tolist()
        self.inverses: list[float] = self.inverse.tolist()
