"""Plain torch, with one process or with several under DistributedDataParallel (DDP).

A step stays on the device: the gradient norm, the decision whether the update is applied, and the update itself never
wait for the host. The learning rate is a tensor for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness.core.config import EngineConfig, RunConfig
from harness.core.errors import ConfigError, Problem
from harness.core.protocols import Stateful
from harness.core.update import DynamicLossScale, TorchGradients, WindowBuffers, takes_found_inf
from harness.engines.buffers import shares_buffers
from harness.engines.parts import ModelPart, OptimizerPart, settings_of
from harness.engines.process_group import ProcessGroup, join, leave, lost_rank_named, read_launch

if TYPE_CHECKING:
    from harness.core.protocols import MakeOptimizer

# torch renamed this argument of DDP, and warns about the old name.
_ARGUMENTS = signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers"
)


class TorchEngine(ProcessGroup):
    """Engine for plain torch (see `core.protocols.Engine`).

    A step reads nothing on the host if the optimizer takes `found_inf`. The learning rate is then one 0-d tensor that
    all parameter groups share.

    model, optimizer: on `device`.
    schedule: learning rate by the count of applied updates, both 0-d tensors.
    max_grad_norm: clip to this norm.
    loss_scale: of fp16; None: no loss scale.
    timeout_seconds: after which a collective gives up on a rank.
    """

    owns_loss_scale: ClassVar = False
    snapshots: ClassVar = True
    sharded: ClassVar = False
    any_optimizer: ClassVar = True

    @classmethod
    def lacking(cls, device: str) -> list[Problem]:
        """What this engine needs and this machine lacks: nothing. device: "cpu" or "cuda"."""
        return []

    @classmethod
    def refusals(cls, config: EngineConfig, precision: str, device: str) -> list[Problem]:
        """Why this engine cannot train in `precision` ("fp32" | "bf16" | "fp16" | "fp8"): it always can."""
        return []

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
        return cls(
            model,
            make_optimizer(dict(model.named_parameters())),
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
        super().__init__(device)
        self.name = "ddp" if self.world_size > 1 else "single"
        self.optimizer = optimizer
        self.lr_factor = 1.0
        self._model = model
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._gradients = TorchGradients([optimizer], params, max_grad_norm, loss_scale, device)
        self._buffers = WindowBuffers(model)
        self._schedule = schedule
        self._loss_scale = loss_scale
        self._applied = torch.zeros((), dtype=torch.float32, device=device)

        # A tensor as learning rate is read by kernels on the device. torchao's optimizers accept nothing else.
        self._lr = torch.zeros((), dtype=torch.float32, device=device)
        rates = [group.get("lr") for group in optimizer.param_groups]
        has_tensors = all(isinstance(rate, Tensor) for rate in rates)
        self._lr_on_device = has_tensors or takes_found_inf(optimizer)
        self._initial = settings_of(optimizer)
        if self._lr_on_device:
            for group in optimizer.param_groups:
                group["lr"] = self._lr

        # DDP averages the gradients of all ranks during backward.
        self._ddp: DistributedDataParallel | None = None
        self._checked = False
        if self.world_size > 1:
            buffers: dict[str, Any] = {_SYNC_BUFFERS: shares_buffers(model)}
            self._ddp = DistributedDataParallel(
                model,
                device_ids=[device.index] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                **buffers,
            )
        self.module: nn.Module = model if self._ddp is None else self._ddp

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Context for forward and backward of one micro-batch. Ranks exchange gradients in the last one only."""
        self._buffers.begin()
        exchange = nullcontext() if last or self._ddp is None else self._ddp.no_sync()
        with lost_rank_named(), exchange:
            yield

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of `loss`, times the loss scale if there is one."""
        if self._loss_scale is not None:
            loss = loss * self._loss_scale.value
        loss.backward()

    def measure(self, thorough: bool) -> dict[str, Tensor]:
        """As `core.protocols.Gradients.measure`. Raises ConfigError for parameters without a gradient under DDP."""
        if self._ddp is not None and not self._checked:
            self._checked = True
            _require_gradients(self._model)
        return self._gradients.measure(thorough)

    def apply(self, skip: Tensor, overflow: Tensor, norm: Tensor, clip: float) -> dict[str, Tensor]:
        """As `core.protocols.Gradients.apply`; then the gradients are zeroed."""
        self._set_lr()
        figures = self._gradients.apply(skip, overflow, norm, clip)
        self._buffers.settle(figures["applied"])
        self._applied += figures["applied"]
        self.optimizer.zero_grad(set_to_none=True)
        return {**figures, "applied_steps": self._applied.clone()}

    def _set_lr(self) -> None:
        """Set the learning rate of the next update."""
        self._lr.copy_(self._schedule(self._applied) * self.lr_factor)
        if not self._lr_on_device:
            for group in self.optimizer.param_groups:
                group["lr"] = self._lr.item()

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


def _require_gradients(model: nn.Module) -> None:
    """Raise ConfigError naming parameters without a gradient in the first step.

    DDP finishes the exchange of gradients only when every parameter has one. Its next forward would fail, with a
    message that gives numbers for names.
    """
    unused: list[str] = []
    for name, param in model.named_parameters():
        if param.requires_grad and param.grad is None:
            unused.append(name)
    if unused:
        what = f"{len(unused)} parameters took no part in the loss, such as {unused[0]}"
        why = "DistributedDataParallel needs a gradient of every parameter, and would fail at the next forward"
        fix = "freeze them (requires_grad_(False)), use them, or train on one process"
        raise ConfigError(Problem(what, "model", why, fix))
