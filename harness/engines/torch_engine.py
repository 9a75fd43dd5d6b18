"""Plain torch, with one process or with several under DistributedDataParallel (DDP).

A step stays on the device: the gradient norm, the decision whether the update is applied, and the update itself never
wait for the host. The learning rate is a tensor for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness.core.config import RunConfig
from harness.core.errors import ConfigError
from harness.core.protocols import Stateful
from harness.core.update import DynamicLossScale, TorchGradients
from harness.engines.buffers import shares_buffers
from harness.engines.own_update import OwnUpdate, without_gradient
from harness.engines.parts import ModelPart, OptimizerPart
from harness.engines.process_group import join, leave, lost_rank_named, read_launch

if TYPE_CHECKING:
    from harness.core.protocols import MakeOptimizer

# torch renamed this argument of DDP, and warns about the old name.
_ARGUMENTS = signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "broadcast_buffers"
if "forward_sync_buffers" in _ARGUMENTS:
    _SYNC_BUFFERS = "forward_sync_buffers"


class TorchEngine(OwnUpdate):
    """Engine for plain torch (see `core.protocols.Engine` and `OwnUpdate`).

    model, optimizer: on `device`.
    schedule: learning rate by the count of applied updates, both 0-d tensors.
    max_grad_norm: clip to this norm.
    loss_scale: of fp16; None: no loss scale.
    timeout_seconds: after which a collective gives up on a rank.
    """

    sharded: ClassVar = False
    any_optimizer: ClassVar = True

    @classmethod
    def build(
        cls,
        config: RunConfig,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        schedule: Any,
        loss_scale: DynamicLossScale | None,
        autocast_dtype: torch.dtype | None,
        device: torch.device,
    ) -> TorchEngine:
        """The engine of a run. autocast_dtype: unused, as the precision backend casts here."""
        optimizer = make_optimizer(dict(model.named_parameters()))
        return cls(
            model,
            optimizer,
            schedule,
            config.train.max_grad_norm,
            loss_scale=loss_scale,
            device=device,
            timeout_seconds=config.engine.timeout_seconds,
        )

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[Tensor], Tensor],
        max_grad_norm: float,
        *,
        loss_scale: DynamicLossScale | None = None,
        device: torch.device,
        timeout_seconds: float = 600.0,
    ) -> None:
        join(read_launch(), device, timeout_seconds)
        params: list[nn.Parameter] = []
        for group in optimizer.param_groups:
            params += group["params"]
        gradients = TorchGradients(
            [optimizer],
            params,
            max_grad_norm,
            loss_scale,
            device,
            named=dict(model.named_parameters()),
        )
        super().__init__(model, optimizer, gradients, schedule, loss_scale, device)
        self.name = "ddp" if self.world_size > 1 else "single"

        # DDP averages the gradients of all ranks during backward.
        self._ddp: DistributedDataParallel | None = None
        self._checked = False
        if self.world_size > 1:
            device_ids = [device.index] if device.type == "cuda" else None
            buffers: dict[str, Any] = {_SYNC_BUFFERS: shares_buffers(model)}
            # Gradients as views of DDP's buckets: a second copy of them all would take as much memory.
            self._ddp = DistributedDataParallel(
                model,
                device_ids=device_ids,
                gradient_as_bucket_view=True,
                **buffers,
            )
        self.module: nn.Module = model if self._ddp is None else self._ddp

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Context for forward and backward of one micro-batch. Ranks exchange gradients in the last one only.

        Raises ConfigError for parameters without a gradient in the first step under DDP.
        """
        self._buffers.begin()
        exchange = nullcontext()
        if self._ddp is not None and not last:
            exchange = self._ddp.no_sync()
        with lost_rank_named(), exchange:
            yield
        # Before any other collective: if this rank alone lacks gradients, the others wait for it in theirs.
        if self._ddp is not None and last and not self._checked:
            self._checked = True
            _require_gradients(self._model, self.rank)

    def measure(self, thorough: bool, hunts: bool) -> dict[str, Tensor]:
        """As `core.protocols.Gradients.measure`."""
        return self._gradients.measure(thorough, hunts)

    def parts(self) -> dict[str, Stateful]:
        """`model` and `optimizer`; the loss scale is a part of its own."""
        weights = dict(self._model.named_parameters())
        optimizer = OptimizerPart(weights, self.optimizer, self._applied, self._initial)
        return {"model": ModelPart(self._model), "optimizer": optimizer}

    def close(self) -> None:
        """Leave the process group; safe to call twice.

        DDP's wrapper goes first. If it held the last reference to the group, the group would join its threads while
        this thread holds Python's lock. If one of them waits for that lock, the rank never exits (pytorch issue
        190489).
        """
        self._ddp = None
        self.module = self._model
        leave()


def _require_gradients(model: nn.Module, rank: int) -> None:
    """Raise ConfigError naming parameters without a gradient on this rank in the first step.

    DDP finishes the exchange of gradients only when every parameter has one. Its next forward would fail, with a
    message that gives numbers for names.
    """
    unused: list[str] = []
    for name, param in model.named_parameters():
        if param.requires_grad and param.grad is None:
            unused.append(name)
    if unused:
        why = "DistributedDataParallel waits for a gradient of every parameter from every rank"
        problem = without_gradient(unused, why)
        what = f"rank {rank}: {problem.what}"
        fix = f"{problem.fix}; engine.name=fsdp takes those that only some ranks use"
        raise ConfigError(replace(problem, what=what, fix=fix))
