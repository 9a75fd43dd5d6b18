"""What the engines share whose optimizers are torch's own, and which update the weights themselves.

The loss scale, the learning rate as a tensor on the device, the count of applied updates, and a model's buffers around
a skipped update. For DeepSpeed `engines/deepspeed.py` does them in other ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from harness.core.config import EngineConfig
from harness.core.errors import Problem, number_of
from harness.core.update import DynamicLossScale, TorchGradients, WindowBuffers, takes_found_inf
from harness.engines.parts import settings_of
from harness.engines.process_group import ProcessGroup


def without_gradient(names: Sequence[str], why: str) -> Problem:
    """The refusal of trainable parameters that got no gradient in the first step. why: it cannot go on so."""
    what = f"{number_of(len(names), 'parameter')} took no part in the loss, such as {names[0]}"
    fix = (
        "freeze them (requires_grad_(False); those of an hf:FOLDER in a function of your own that loads it, "
        "model.target=package.module:function), use them, or train on one process"
    )
    return Problem(what, "model", why, fix)


class OwnUpdate(ProcessGroup):
    """The update of an engine for torch's optimizers (see `core.protocols.Engine`).

    A step reads nothing on the host if the optimizer takes `found_inf`. The learning rate is then one 0-d tensor that
    all parameter groups share.

    model: for its buffers.
    optimizer: stepped by `gradients`.
    gradients: measured and applied; of this rank.
    schedule: learning rate by the count of applied updates, both 0-d tensors.
    loss_scale: of fp16; None: no loss scale.
    """

    owns_loss_scale: ClassVar = False
    snapshots: ClassVar = True

    @classmethod
    def lacking(cls, device: str) -> list[Problem]:
        """What this engine needs and this machine lacks: nothing. device: "cpu" or "cuda"."""
        return []

    @classmethod
    def refusals(cls, config: EngineConfig, precision: str, device: str) -> list[Problem]:
        """Why this engine cannot train in `precision` ("fp32" | "bf16" | "fp16" | "fp8"): it always can."""
        return []

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        gradients: TorchGradients,
        schedule: Callable[[Tensor], Tensor],
        loss_scale: DynamicLossScale | None,
        device: torch.device,
    ) -> None:
        super().__init__(device)
        self.optimizer = optimizer
        self.lr_factor = 1.0
        self._model = model
        self._gradients = gradients
        self._buffers = WindowBuffers(model)
        self._schedule = schedule
        self._loss_scale = loss_scale
        self._applied = torch.zeros((), dtype=torch.float32, device=device)

        # A tensor as learning rate is read by kernels on the device. torchao's optimizers accept nothing else.
        self._lr = torch.zeros((), dtype=torch.float32, device=device)
        rates = [group.get("lr") for group in optimizer.param_groups]
        has_tensors = all(isinstance(rate, Tensor) for rate in rates)
        self._lr_on_device = has_tensors or takes_found_inf(optimizer)
        # Before the first step: what differs from these settings later was counted by the optimizer.
        self._initial = settings_of(optimizer)
        if self._lr_on_device:
            for group in optimizer.param_groups:
                group["lr"] = self._lr

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of `loss`, times the loss scale if there is one."""
        if self._loss_scale is not None:
            loss = loss * self._loss_scale.value
        loss.backward()

    @property
    def layers(self) -> tuple[str, ...]:
        """As `core.protocols.Gradients.layers`."""
        return self._gradients.layers

    def with_gradient(self, weights: Mapping[str, Tensor]) -> tuple[str, ...]:
        """As `core.protocols.Gradients.with_gradient`."""
        return self._gradients.with_gradient(weights)

    def apply(
        self,
        skip: Tensor,
        overflow: Tensor,
        norm: Tensor,
        clip: float,
    ) -> dict[str, Tensor]:
        """As `core.protocols.Gradients.apply`; then the gradients are zeroed."""
        # By updates that were applied: a skipped one does not move the schedule on.
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
