"""The interfaces between rooms: what the loop asks of an engine, a precision backend, a data source or a tracker.

Concrete classes are named only in `harness/build.py`. Torch appears in annotations alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from harness.core.facts import Limits, StepFacts, Verdict, Window

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NO_LIMITS = Limits()
TensorDict = dict[str, "Tensor"]
Tensors = dict[str, TensorDict]
Batch = dict[str, "Tensor"]
"""A micro-batch on the CPU: tensors by name, whose first dimension counts samples.

Batches of tokens have `inputs` and `targets`, int64 [micro_batch, context]. A target is the next input, or IGNORED
where there is no loss. Packed ones also have `segments`, int64 of that shape: the number of the document within the
sample. Batches of other data have the names of their data set.
"""
Meta = dict[str, Any]


class Stateful(Protocol):
    """One part of `TrainState`: tensors go to safetensors, meta to JSON. Under an engine both calls are collective."""

    def state_dict(self) -> tuple[TensorDict, Meta]: ...

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None: ...


class Gradients(Protocol):
    """Who owns a window's gradients and their optimizer: torch's own (`core.update.TorchGradients`), or an engine."""

    device: torch.device

    def measure(self, shares: bool) -> dict[str, Tensor]:
        """Figures by the names of StepFacts, fp32 0-d: `grad_norm` and `loss_scale`.

        They are the same on every rank where ranks exchange gradients. shares: `grad_zeros` and `grad_near_limit`, too.
        """
        ...

    def max_(self, values: Tensor) -> Tensor:
        """Maximum over ranks of a small fp32 tensor, in place and in one collective."""
        ...

    def mean(self, values: Tensor) -> Tensor:
        """Mean over ranks of a small fp32 tensor, the same bits on each."""
        ...

    def apply(self, skip: Tensor, overflow: Tensor, norm: Tensor, clip: float) -> dict[str, Tensor]:
        """Unscale, clip and apply unless `skip` is 1.0; figures as `measure` gives them, `applied` among them.

        skip: fp32 0-d, 0.0 or 1.0, the same on every rank.
        overflow: the same for whether some rank's norm is not finite.
        norm: what `measure` gave.
        clip: clip to this norm if it is under the owner's own limit.
        """
        ...


class Engine(Gradients, Protocol):
    """Owns ranks, gradients and the optimizer step. One for a single process and DDP, one for DeepSpeed.

    `apply` also zeroes the gradients. Its figures hold `lr` and `applied_steps`.
    """

    name: str
    owns_loss_scale: ClassVar[bool]
    """Under fp16 it has its own loss scale and weights in half precision, so a run cannot leave fp16 there."""
    snapshots: ClassVar[bool]
    """Its state is whole on every rank, and can be copied in memory between two steps."""
    any_optimizer: ClassVar[bool]
    """It can step and save any optimizer; otherwise only fused AdamW and SGD."""
    rank: int
    world_size: int
    module: torch.nn.Module
    """What to call: the model, or its DDP / DeepSpeed wrapper."""
    lr_factor: float
    """The schedule's learning rate is multiplied by this; the loop may change it between steps."""

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; only in the last one are gradients reduced across ranks."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of `loss`, which is divided by the number of micro-batches; applies the loss scale."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks of a small fp32 tensor."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Rank 0's JSON-able value on every rank."""
        ...

    def barrier(self) -> None: ...

    def parts(self) -> dict[str, Stateful]:
        """The engine's share of the TrainState: `model` and `optimizer`."""
        ...

    def close(self) -> None:
        """Leave the process group; safe to call twice."""
        ...


class PrecisionBackend(Stateful, Protocol):
    """How the plan's rung computes. Numbers in names of slots and layers are padded: blocks.03.mlp.down.input."""

    layers: tuple[str, ...]
    """Layers that may run in FP8, as named in the model; empty on rungs without FP8."""
    slot_names: tuple[str, ...]
    note: str

    @property
    def demoted(self) -> tuple[str, ...]: ...

    @property
    def fell_back_to(self) -> str:
        """What `fall_back` was called with, empty if it was not; part of the state."""
        ...

    def context(self) -> AbstractContextManager[None]:
        """Around forward. With gradients off it does not change the FP8 state."""
        ...

    def backward_context(self, last: bool | None = None) -> AbstractContextManager[None]:
        """Around backward, in which activation checkpointing recomputes forward.

        last: whether it is the window's last; None if the caller does not know. No result depends on it.
        """
        ...

    def begin_window(self, sample: bool) -> None:
        """An optimizer step begins. sample: measure the expensive statistics in it."""
        ...

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """After backward of one micro-batch; `reduce`: MAX over ranks."""
        ...

    def amax(self) -> Tensor:
        """float32 [n], what the step's one MAX all-reduce must carry; n = 0 if nothing."""
        ...

    def end_window(self, amax: Tensor, skip: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        """Update the scales unless `skip` is 1.0. Returns the figures of the window, float32 [SLOT_ROWS, slots].

        The rows are amax, scale in use, saturation, clipped share, underflow share, SQNR in dB, per-element SQNR, and
        the SQNR of what varies from row to row. The last five are NaN where they were not sampled.

        amax: what `amax` gave, reduced over ranks.
        mean: over ranks.
        """
        ...

    def scrubbed(self) -> Tensor:
        """Infinite amaxes dropped in this window, float32 0-d."""
        ...

    def switch(self, demote: Sequence[str], promote: Sequence[str]) -> None: ...

    def fall_back(self, precision: str) -> None:
        """Run everything in `precision` ("bf16" | "fp32") from the next step on, for good."""
        ...


class Batches(Protocol):
    """A data source: windows by number, batches by sample.

    tokens_per_sample: targets, as far as that is one number.
    masked: some targets may be IGNORED, so a micro-batch's weight is its number of targets.
    unit: what the loss is in, as far as the data fix it; "loss" if they do not.
    """

    name: str
    tokens_per_sample: int
    masked: bool
    unit: str

    def window(self, index: int) -> Window:
        """The window at place `index` of the data order: a pure function of (seed, index)."""
        ...

    def micro_batches(self, window: Window, rank: int, world_size: int) -> Sequence[Batch]:
        """This rank's micro-batches."""
        ...

    def validation(self, rank: int, world_size: int) -> Sequence[Batch]:
        """This rank's fixed validation batches, the same at every call."""
        ...


class Tracker(Protocol):
    """The record of a run. On ranks other than 0 it does nothing."""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def event(self, step: int, code: str, **fields: Any) -> None: ...

    def tell(self, step: int, code: str, text: str, **fields: Any) -> None:
        """An event that the user should see at once."""
        ...

    def note(self, kind: str, **fields: Any) -> None: ...

    def flush(self) -> None:
        """Everything logged so far is on disk (fsync)."""
        ...


class Monitor(Protocol):
    """Observes one step after the other, keeps a small checkpointed window, and returns its verdict on each."""

    key: str
    """Its name in checkpoints, which never changes."""

    def observe(self, facts: StepFacts) -> Verdict: ...

    def state_dict(self) -> Meta: ...

    def load_state_dict(self, meta: Mapping[str, Any]) -> None: ...
