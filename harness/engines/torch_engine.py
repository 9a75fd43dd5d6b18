"""One process, or several under DistributedDataParallel: the step stays on the device from norm to zeroed gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness.core.config import EngineConfig, RunConfig
from harness.core.errors import ConfigError, Problem
from harness.core.protocols import Stateful
from harness.core.update import DynamicLossScale, TorchGradients, takes_found_inf
from harness.engines.parts import ModelPart, OptimizerPart
from harness.engines.peers import lost_rank_named
from harness.engines.process_group import Ranks, join, leave, read_launch

# torch renamed the argument, and warns of the old name.
_ARGUMENTS = signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers"


class TorchEngine(Ranks):
    """Engine for plain torch (see `core.protocols.Engine`).

    model and optimizer are on `device`; schedule maps applied updates (0-d tensor) to a learning rate (0-d tensor).
    With an optimizer that takes `found_inf` a step reads nothing on the host; the learning rate is then one 0-d tensor
    shared by all parameter groups.
    """

    owns_loss_scale: ClassVar = False
    snapshots: ClassVar = True

    @classmethod
    def lacking(cls, device: str) -> list[Problem]:
        """What it needs on this machine and does not find: nothing. device: "cpu" or "cuda"."""
        return []

    @classmethod
    def refusals(cls, config: EngineConfig, precision: str, device: str) -> list[Problem]:
        """Why it cannot train in `precision` ("fp32" | "bf16" | "fp16" | "fp8"): it always can."""
        return []

    @classmethod
    def build(
        cls,
        config: RunConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Any,
        loss_scale: DynamicLossScale | None,
        autocast_dtype: torch.dtype | None,
        device: torch.device,
    ) -> TorchEngine:
        """The engine of a run. autocast_dtype: what the backend casts to, which is not the engine's business."""
        limit, timeout = config.train.max_grad_norm, config.engine.timeout_seconds
        return cls(model, optimizer, schedule, limit, loss_scale=loss_scale, device=device, timeout_seconds=timeout)

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
        super().__init__(device)
        self.name = "ddp" if self.world_size > 1 else "single"
        self.optimizer = optimizer
        self.lr_factor = 1.0
        self._model = model
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._gradients = TorchGradients([optimizer], params, max_grad_norm, loss_scale, device)
        self._schedule = schedule
        self._loss_scale = loss_scale
        self._applied = torch.zeros((), dtype=torch.float32, device=device)
        self._lr = torch.zeros((), dtype=torch.float32, device=device)
        self._lr_on_device = takes_found_inf(optimizer)
        if self._lr_on_device:
            for group in optimizer.param_groups:
                group["lr"] = self._lr
        self._ddp: DistributedDataParallel | None = None
        self._checked = False
        if self.world_size > 1:
            self._ddp = DistributedDataParallel(
                model,
                device_ids=[device.index] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                **_buffers_argument(model),
            )
        self.module: nn.Module = model if self._ddp is None else self._ddp

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch; ranks exchange gradients in the last one only."""
        with lost_rank_named(), nullcontext() if last or self._ddp is None else self._ddp.no_sync():
            yield

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of `loss`, times the loss scale if there is one."""
        (loss if self._loss_scale is None else loss * self._loss_scale.value).backward()

    def measure(self, shares: bool) -> dict[str, Tensor]:
        """As `core.update.Gradients.measure`. Raises ConfigError for parameters that DDP would wait for in vain."""
        if self._ddp is not None and not self._checked:
            self._checked = True
            _require_gradients(self._model)
        return self._gradients.measure(shares)

    def apply(self, skip: Tensor, overflow: Tensor, norm: Tensor, clip: float) -> dict[str, Tensor]:
        """As `core.update.Gradients.apply`; then the gradients are zeroed."""
        self._set_lr()
        figures = self._gradients.apply(skip, overflow, norm, clip)
        self._applied += figures["applied"]
        self.optimizer.zero_grad(set_to_none=True)
        return {**figures, "applied_steps": self._applied.clone()}

    def _set_lr(self) -> None:
        self._lr.copy_(self._schedule(self._applied) * self.lr_factor)
        if not self._lr_on_device:
            for group in self.optimizer.param_groups:
                group["lr"] = self._lr.item()

    def parts(self) -> dict[str, Stateful]:
        """`model` and `optimizer`; the loss scale is a part of its own."""
        return {"model": ModelPart(self._model), "optimizer": OptimizerPart(self._model, self.optimizer, self._applied)}

    def close(self) -> None:
        """Leave the process group; safe to call twice.

        DDP's wrapper goes first: if it were the last to hold the group, the group would end its threads while this
        thread has Python's lock, which one of them may be waiting for (pytorch issue 190489: the rank never exits).
        """
        self._ddp, self.module = None, self._model
        leave()


def _buffers_argument(model: nn.Module) -> dict[str, Any]:
    """Forward takes rank 0's buffers only if it may write into some that a checkpoint holds, such as BatchNorm's.

    Each rank would go on from its own otherwise: a checkpoint has rank 0's alone, and a resume could not be exact.
    Other models are spared the exchange.
    """
    saved = model.state_dict().keys()
    kept = any(name in saved and buffer.is_floating_point() for name, buffer in model.named_buffers())
    return {_SYNC_BUFFERS: kept}


def _require_gradients(model: nn.Module) -> None:
    """Raise ConfigError naming parameters that the first step left without a gradient: DDP would stop at the next."""
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        raise ConfigError(
            Problem(
                f"{len(unused)} parameters took no part in the loss, such as {unused[0]}",
                "model",
                why="DistributedDataParallel waits for the gradient of every parameter",
                fix="freeze them (requires_grad_(False)), use them, or train on one process",
            )
        )
