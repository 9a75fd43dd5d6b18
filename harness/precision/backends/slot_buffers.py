"""The FP8 state of all slots of a model, packed: amax history [L, slots], scale [slots], statistics [slots, 8].

A slot is one quantised tensor of one layer. The state of all of them is in a few tensors. One update, one all-reduce,
one snapshot and one telemetry read therefore serve the whole model, however many layers it has.

An amax takes this way in each window (the samples of one optimizer step):

1. A cast raises its slot's entry in row 0 of the history, the staging row, to max|x| (`SlotBuffers.quantize`).
2. At the end of the window the staging row is reduced over ranks by maximum (`staged` is what goes out).
3. `end_window` rolls the reduced row into the history. The history gives the scale of the next window
   (`scaling.roll`). A skipped step leaves history and scale bit for bit as they were before it.
4. `stats` gives the window's largest amax, `peak`, to telemetry.
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


class ScalingState:
    """Amax history and scale of all slots of one backend, from one optimizer step to the next.

    history: float32 [L, slots]. Row 0 is staging: casts raise it to their amax. Written in place only, as casts
        hold views of it.
    scale: float32 [slots]. Written in place only, as the history.
    fp8_max: float32 [slots], the largest finite value of each slot's format.
    peak: float32 [slots], the largest amax of the window.
    saturation: float32 [slots], the largest amax * scale / fp8_max of the window, under the scale in use.
    scrubbed: float32 0-d, how many infinite amaxes were dropped in the window.
    """

    def __init__(self, config: Fp8Config, fp8_max: Tensor) -> None:
        self.config, self.fp8_max = config, fp8_max
        self.history = fp8_max.new_zeros(config.amax_history_len, len(fp8_max))
        self.scale = torch.ones_like(fp8_max)
        self.peak = torch.zeros_like(fp8_max)
        self.saturation = torch.zeros_like(fp8_max)
        self.scrubbed = fp8_max.new_zeros(())
        # History and scale as they were when the window began.
        self._entry = (self.history, self.scale)
        # Which slots have an amax in the history, as last read from the device, and whether that is still so.
        self._measured = [False] * len(fp8_max)
        self._read = True

    def begin_window(self) -> None:
        """Drop amaxes staged since the last window, and copy the state that a skipped step must restore."""
        for tensor in (self.peak, self.saturation, self.scrubbed):
            tensor.zero_()
        self.history[0].zero_()
        self._entry = (self.history.clone(), self.scale.clone())

    def staged(self) -> Tensor:
        """The amaxes since the last roll, float32 [slots]; a copy."""
        return self.history[0].clone()

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Under `roll: micro_batch` a micro-batch's amaxes set the scales of the next. reduce: MAX over ranks."""
        if self.config.roll == "micro_batch":
            self._roll(reduce(self.history[0].clone()))

    def end_window(self, amax: Tensor, skip: Tensor) -> None:
        """Roll the window's amaxes into the history, unless micro-batches did so already.

        amax: `staged`, reduced over ranks.
        skip: 0-d, positive for a skipped step: history and scale become bit-equal to what they were before the window.
        """
        if self.config.roll == "step":
            self._roll(amax)
        # A choice on the device: the host does not wait to learn whether the step was skipped.
        skipped = skip > 0
        history, scale = self._entry
        self.history.copy_(torch.where(skipped, history, self.history))
        self.scale.copy_(torch.where(skipped, scale, self.scale))
        self.history[0].zero_()
        self._read = False

    def unmeasured(self, slot: int, training: bool) -> bool:
        """Whether a forward that records nothing must do without this slot's scale, as no training step has set it.

        So it is before the first step, and for good where a layer is only called without gradients (a frozen teacher).
        The host waits for the device, at most once a window until the slot is measured.

        training: whether the layer is in train mode.
        """
        if self._measured[slot]:
            return False
        if not self._read:
            self._measured = (self.history[1:] != 0).any(dim=0).cpu().tolist()
            self._read = True
        # In the first step nothing has a scale. In train mode this may then be a reentrant checkpoint's forward, which
        # backward runs again with gradients, in FP8.
        if training and not any(self._measured):
            return False
        return not self._measured[slot]

    def state_loaded(self) -> None:
        """History and scale are those of another moment."""
        self._measured = [False] * len(self._measured)
        self._read = False

    def window_stats(self) -> Tensor:
        """float32 [3, slots] of the window that ended: peak amax, the scale in use when it began, saturation."""
        return torch.stack([self.peak, self._entry[1], self.saturation])

    def _roll(self, amax: Tensor) -> None:
        """Take in `amax`: the window's figures under the old scale, then history and scale by the delayed rule."""
        # The casts of this window were under the scale that the roll is about to replace.
        torch.maximum(self.peak, amax, out=self.peak)
        saturation = amax * self.scale / self.fp8_max
        torch.maximum(self.saturation, saturation, out=self.saturation)

        self.history[0] = amax
        config = self.config
        history, scale, dropped = scaling.roll(
            self.history,
            self.scale,
            self.fp8_max,
            config.margin,
            config.amax_compute_algo,
            config.scrub_inf,
        )
        # In place: casts hold views of both.
        self.history.copy_(history)
        self.scale.copy_(scale)
        self._read = False
        self.scrubbed += dropped


class SlotBuffers(ScalingState):
    """The state of every slot of one model, and the casts that use it. Here casts give bfloat16 carriers.

    names: `<layer>.<role>` of each slot.
    formats: "e4m3" or "e5m2" of each slot.
    sums: float64 [slots, 8], sums behind the window's statistics (`scaling.shares`).
    active: whether a precision context is entered.
    sampling: whether this window measures the statistics that cost more than an amax.
    gradient: format of every grad_output.
    wide: whether weight gradients of float32 Parameters are float32 (fp8.weight_gradients).
    demoted: first slots of the layers in BF16.
    weights: quantised weights by their layer's first slot. An entry is a key, the operand and the plain weight. The key
        says which weight and which scale the operand is of.
    gathered: weights are gathered from all ranks for one layer at a time (FSDP2). No cast of one outlives the layer's
        forward, and backward casts again.
    recorded: epoch and window in which the amax of a gathered weight was last recorded, by its layer's first slot.
    epoch: counts changes of `scale`.
    window: counts optimizer steps begun.
    kernel: the fused cast on a CPU; None where PyTorch casts.
    kernel_note: which casts run, and why.
    """

    traced: tuple[Callable[..., Tensor], Callable[..., Tensor]] | None = None
    """`linear` and `switching` of native_fp8, where the compiler sees the casts; None: it sees one operator."""
    own_casts = True
    """Whether `linear` casts by our own kernel, which the compiler cannot look into and fuses with nothing."""

    def __init__(
        self, names: Sequence[str], formats: Sequence[str], config: Fp8Config, device: torch.device
    ) -> None:
        largest = [scaling.FORMATS[fmt].max for fmt in formats]
        super().__init__(config, torch.tensor(largest, device=device))
        self.names = tuple(names)
        self.formats = tuple(formats)
        self.device = device
        self.sums = torch.zeros(len(names), scaling.SUMS, dtype=torch.float64, device=device)
        self.active = False
        self.sampling = False
        self.gradient = formats[-1] if formats else "e5m2"
        self.wide = config.weight_gradients == "float32"
        self.demoted: set[int] = set()
        self.weights: dict[int, tuple[tuple[int, ...], Operand, Tensor]] = {}
        self.gathered = False
        self.recorded: dict[int, tuple[int, int]] = {}
        self.epoch = 0
        self.window = 0
        if device.type == "cpu":
            self.kernel, self.kernel_note = native_kernel.load()
        else:
            self.kernel, self.kernel_note = None, "PyTorch casts"
        # The kernel always writes an amax. One that is not recorded goes here.
        self._scratch = torch.zeros(1, device="cpu")
        self._scales_changed()

    def activation(
        self,
        rows: Tensor,
        slot: int,
        record: bool,
        rights: bool = True,
    ) -> Operand:
        """`rows` [m, n] of any float dtype, rounded to bfloat16 and then cast under the slot's scale.

        record: measure amax and statistics.
        rights: it will also be a right operand or a transposed left one, which on FP8 units needs another layout.
        """
        return self.operand(rows.to(torch.bfloat16).contiguous(), slot, record, rights)

    def operand(self, x: Tensor, slot: int, record: bool, rights: bool = True) -> Operand:
        """As `activation`, but `x` [m, n] is cast without rounding it to bfloat16 first. For weights."""
        return Carrier(self.quantize(x.contiguous(), slot, record), self.inverses[slot])

    def quantize(self, x: Tensor, slot: int, record: bool) -> Tensor:
        """FP8 values of `x` (contiguous) held in bfloat16, cast under the slot's scale.

        record: raise the slot's amax in the staging row to max|x|, and measure statistics in a sampled window.
        """
        fmt = self.formats[slot]
        # On a CPU one pass of the fused kernel casts, finds the amax and sums up the statistics.
        if self.kernel is not None and x.dtype in (torch.bfloat16, torch.float32):
            # The kernel raises the float32 at this address, which is history[0, slot]: row 0 comes first in memory.
            amax = self._scratch.data_ptr()
            stats: int | None = None
            if record:
                amax = self.history.data_ptr() + 4 * slot
                if self.sampling:
                    stats = self.sums[slot].data_ptr()
            return self.kernel(x, self.scales[slot], fmt, amax, stats, scaling.by_rows(slot))

        quantized = scaling.quantize(x, self.scale[slot], fmt)
        if record:
            self.stage(slot, scaling.amax(x))
            if self.sampling:
                by_row = scaling.by_rows(slot)
                sums = scaling.sums_of(x, quantized, self.scale[slot], fmt, by_row)
                self.sums[slot].add_(sums)
        return quantized

    def record_demoted(self, x: Tensor, slot: int) -> None:
        """Record max|x| of a demoted layer's tensor, which is multiplied in BF16.

        In a sampled window also measure what a cast to FP8 would lose. The layer must not return to FP8 while its
        tensors would still lose too much.
        """
        if self.sampling:
            self.quantize(x.detach().contiguous(), slot, record=True)
        else:
            self.stage(slot, scaling.amax(x))

    def stage(self, slot: int, amax: Tensor) -> None:
        """Raise the slot's amax in the staging row to `amax`, float32 of one element."""
        staged = self.history[0, slot : slot + 1]
        torch.maximum(staged, amax.reshape(1), out=staged)

    def fuse_casts(self) -> None:
        """`layers.fuse`: compiled blocks are to cast where a tensor is made. Emulated casts stay where they are."""

    def may_release(self) -> bool:
        """Whether a layer may drop its quantised weight after backward has used it. Here it stays for the window."""
        return False

    def backward_begins(self, last: bool | None) -> None:
        """Backward of one more micro-batch begins. last: as in `PrecisionBackend.backward_context`."""

    def before_update(self) -> None:
        """All of a window's backwards are done."""

    def begin_window(self, sample: bool = False) -> None:
        """As `ScalingState.begin_window`. sample: also collect the sums for underflow, clipped share and SQNRs."""
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
        """float32 [8, slots] of the window that ended; rows in the order of the figures of `facts.SlotStats`.

        The first row is the peak amax. Rows from clipped on are NaN where nothing was sampled.

        sums: `self.sums`, reduced over ranks.
        """
        return torch.cat([self.window_stats(), scaling.shares(sums)])

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """tensors: history float32 [L, slots] (staging empty), scale float32 [slots]; meta: slot names, formats."""
        tensors = {"history": self.history, "scale": self.scale}
        meta = {"slots": list(self.names), "formats": list(self.formats)}
        return tensors, meta

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore in place. A state that a run without FP8 saved resets everything.

        Raises CheckpointError if slots, formats or history length differ.
        """
        self.state_loaded()
        if not meta["slots"]:
            self.history.zero_()
            self.scale.fill_(1.0)
            self._scales_changed()
            return
        history = tensors["history"]
        same_slots = meta["slots"] == list(self.names) and meta["formats"] == list(self.formats)
        if not same_slots or history.shape != self.history.shape:
            what = (
                f"the saved FP8 state has {len(meta['slots'])} slots, history length {len(history)}; this run has "
                f"{len(self.names)} slots, history length {len(self.history)}"
            )
            fix = "resume with the recipe and model that wrote the checkpoint"
            raise CheckpointError(Problem(what, "fp8 state", fix=fix))
        self.history.copy_(tensors["history"])
        self.scale.copy_(tensors["scale"])
        self._scales_changed()

    def _scales_changed(self) -> None:
        """Refresh what is derived from `scale`, and drop quantised weights, which are of the old scales."""
        self.epoch += 1
        self.weights.clear()
        # Tensor by tensor: correctly rounded to float32.
        self.inverse = torch.ones_like(self.scale) / self.scale
        self._read_scales()

    def _read_scales(self) -> None:
        """Read all scales from the device at once: a carrier's GEMM takes them as Python floats."""
        self.scales: list[float] = self.scale.tolist()
        self.inverses: list[float] = self.inverse.tolist()
