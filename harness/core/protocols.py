"""The interfaces between rooms: what the loop asks of an engine, a precision backend, a data source or a tracker.

`harness/build.py` chooses the concrete classes of a run. Those of monitors and of precision backends are listed in
`monitors/registry.py` and `precision/backends/registry.py`. Torch appears in annotations alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from harness.core.facts import Limits, StepFacts, Verdict, Window

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from harness.core.config import EngineConfig, RunConfig
    from harness.core.errors import Problem
    from harness.core.shards import Rows
    from harness.core.update import DynamicLossScale

    MakeOptimizer = Callable[[Mapping[str, torch.nn.Parameter]], torch.optim.Optimizer]

NO_LIMITS = Limits()
LAYER_NORMS = "layer_norms"
"""The name in StepFacts of the one figure of a step that is a vector."""
TensorDict = dict[str, "Tensor"]
Tensors = dict[str, TensorDict]
Batch = dict[str, "Tensor"]
"""A micro-batch on the CPU: tensors by name, whose first dimension counts samples.

Batches of tokens have, each int64 [micro_batch, context]:
inputs: token ids.
targets: the next input of each, or IGNORED where there is no loss.
segments: the number of the document within the sample; only if documents are packed.

Batches of other data have the names of their data set.
"""
Meta = dict[str, Any]


class Stateful(Protocol):
    """One part of `TrainState`: tensors go to safetensors, meta to JSON. Under an engine both calls are collective."""

    def state_dict(self) -> tuple[TensorDict, Meta]: ...

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None: ...


@runtime_checkable
class Sharded(Protocol):
    """A part of which each rank holds some rows; its `state_dict` gives those, and its load takes those."""

    def rows(self) -> Mapping[str, Rows]:
        """The rows that this rank holds, for each tensor of `state_dict` that is sharded."""
        ...


class Gradients(Protocol):
    """Who owns a window's gradients and their optimizer: torch's own (`core.update.TorchGradients`), or an engine."""

    device: torch.device

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that a hunt (`guard.hunt`) measures one by one; empty if the owner sees no whole gradients."""
        ...

    def measure(self, thorough: bool, hunts: bool) -> dict[str, Tensor]:
        """Figures of the window's gradients by their names in StepFacts: `grad_norm` and `loss_scale`.

        Each is fp32 0-d, and the same on every rank where ranks exchange gradients.

        thorough: also measure `param_norm`, of the weights that the gradients were computed with, and `grad_zeros` and
            `grad_near_limit`. They cost another pass over weights and gradients. An owner that cannot see scaled
            gradients leaves the last two out.
        hunts: also measure LAYER_NORMS, fp32 [layers]: of each of `layers` the L2 norm of the unscaled gradients of its
            own parameters. It costs another pass over the gradients, and no collective.
        """
        ...

    def with_gradient(self, weights: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Names of the weights that got a gradient in this window, a run's first. Called before `apply`."""
        ...

    def max_(self, values: Tensor) -> Tensor:
        """Maximum over ranks of a small fp32 tensor, in place and in one collective. Returns `values`."""
        ...

    def mean(self, values: Tensor) -> Tensor:
        """Mean over ranks of a small fp32 tensor, the same bits on each."""
        ...

    def apply(
        self,
        skip: Tensor,
        overflow: Tensor,
        norm: Tensor,
        clip: float,
    ) -> dict[str, Tensor]:
        """Unscale, clip and apply the update, unless `skip` is 1.0.

        skip: fp32 0-d, the same on every rank; 1.0: do not apply, 0.0: apply.
        overflow: fp32 0-d, the same on every rank; 1.0: the norm of some rank is not finite, 0.0: all are.
        norm: `grad_norm` as `measure` gave it.
        clip: the norm to clip to; the owner's own limit counts if it is lower.

        Returns figures by their names in StepFacts, each fp32 0-d: `applied` (1.0 or 0.0) and `lr`.
        """
        ...


class Engine(Gradients, Protocol):
    """Owns ranks, gradients and the optimizer step. One for a single process and DDP, one for DeepSpeed.

    `apply` also zeroes the gradients. Its figures include `applied_steps`.
    """

    name: str
    owns_loss_scale: ClassVar[bool]
    """Under fp16 it has its own loss scale and weights in half precision, so a run cannot leave fp16 there."""
    snapshots: ClassVar[bool]
    """A rank's own state, whole or its rows, can be copied in memory between two steps."""
    sharded: ClassVar[bool]
    """Each rank holds other rows of weights and moments (`Sharded`), and writes them into a checkpoint itself."""
    any_optimizer: ClassVar[bool]
    """It can step and save any optimizer; otherwise only fused AdamW and SGD."""
    rank: int
    world_size: int
    module: torch.nn.Module
    """What to call: the model, or its DDP / DeepSpeed wrapper."""
    lr_factor: float
    """The schedule's learning rate is multiplied by this; the loop may change it between steps."""

    @classmethod
    def lacking(cls, device: str) -> list[Problem]:
        """What this engine needs and this machine lacks. device: "cpu" or "cuda"."""
        ...

    @classmethod
    def refusals(cls, config: EngineConfig, precision: str, device: str) -> list[Problem]:
        """Why this engine cannot train in `precision` ("fp32" | "bf16" | "fp16" | "fp8"); empty if it can."""
        ...

    @classmethod
    def build(
        cls,
        config: RunConfig,
        model: torch.nn.Module,
        make_optimizer: MakeOptimizer,
        schedule: Any,
        loss_scale: DynamicLossScale | None,
        autocast_dtype: torch.dtype | None,
        device: torch.device,
    ) -> Engine:
        """The engine of a run.

        make_optimizer: called once, with the parameters by name as this rank holds them. An engine that shards the
            model calls it afterwards: the optimizer's state is then made for the rank's own rows alone.
        schedule: an `optim.schedule.Schedule`.
        loss_scale: None except in fp16.
        autocast_dtype: what the plan's rung casts to; None: nothing.
        """
        ...

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; only in the last one are gradients reduced across ranks."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of `loss`, which is divided by the number of micro-batches; applies the loss scale."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """As `max_`, but `values` stays as it is."""
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

    def gather_weights(self) -> None:
        """Called once if the engine gathers weights from all ranks for one layer at a time, and frees them after it.

        From then on no weight, and no cast of one, is kept from a layer's forward to its backward.
        """
        ...

    def begin_window(self, sample: bool) -> None:
        """An optimizer step begins. sample: measure the expensive statistics in it."""
        ...

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """After backward of one micro-batch.

        reduce: MAX over ranks; called only where scales roll at every micro-batch (the recipe's `fp8.roll`).
        """
        ...

    def amax(self) -> Tensor:
        """This rank's amaxes of the window, float32 [n], for the step's one MAX all-reduce; n = 0 if there are none."""
        ...

    def end_window(
        self,
        amax: Tensor,
        skip: Tensor,
        mean: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Update the scales unless `skip` is 1.0.

        amax: what `amax` gave, reduced over ranks.
        skip: as for `Gradients.apply`.
        mean: mean over ranks.

        Returns the figures of the window, float32 [8, slots]. The rows are those of `facts.SlotStats`, in its order.
        All but the first three (amax, scale, saturation) are NaN where they were not sampled.
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

    name: for messages and the run's record.
    tokens_per_sample: tokens of a sample; 1 for data without a fixed length, whose speed counts samples.
    masked: whether targets may be IGNORED. A micro-batch then weighs as many as it has targets with a loss.
    unit: unit of the loss, such as "nats per token"; "loss" if the data do not fix it.
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

    @classmethod
    def build(cls, context: Any) -> Monitor | None:
        """The monitor for a run; None if the run does not need it. context: a `monitors.base.MonitorContext`."""
        ...

    def observe(self, facts: StepFacts) -> Verdict: ...

    def state_dict(self) -> Meta: ...

    def load_state_dict(self, meta: Mapping[str, Any]) -> None: ...
