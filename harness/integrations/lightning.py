"""Lightning: a `Precision` plugin for the Trainer and one for Fabric, and a callback for guard and telemetry.

    precision = harness.Precision.from_recipe("fp8_hybrid")
    trainer = Trainer(plugins=[TrainerPrecision(precision)], callbacks=[HarnessCallback("runs/mine")])
    trainer.fit(module, batches)

For lightning 2.6: one process, or DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from harness.core.errors import MisuseError, Problem
from harness.core.schema import import_extra
from harness.integrations.watch import NO_SETTINGS, Watch
from harness.precision.api import Precision
from harness.precision.standard import WrappedOptimizer

_HERE = "harness.integrations.lightning"

if TYPE_CHECKING:
    from lightning.fabric.plugins.precision import Precision as FabricBase
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.precision import Precision as TrainerBase
else:
    FabricBase = import_extra("lightning.fabric.plugins.precision", "lightning", _HERE).Precision
    TrainerBase = import_extra("lightning.pytorch.plugins.precision", "lightning", _HERE).Precision
    Callback = import_extra("lightning.pytorch", "lightning", _HERE).Callback


class TrainerPrecision(TrainerBase):
    """`Trainer(plugins=[TrainerPrecision(precision)])`; in checkpoints of the Trainer goes `precision.state_dict()`.

    The LightningModule is prepared once it is on its device, and its optimizers are wrapped. `gradient_clip_val` by
    norm becomes the update's own, so that nothing is clipped twice. Under automatic optimization a whole
    `training_step` runs in the precision's context, under manual optimization each call of the model. harness: the
    Precision.
    """

    precision = "32-true"

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self.harness = precision
        self._module: nn.Module | None = None
        self._redirected = False

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> Any:
        """Lightning calls it with the model on its device, and wrapped if it trains under DDP."""
        bare = model.module if isinstance(model, DistributedDataParallel) else model
        if not hasattr(bare, "automatic_optimization"):
            what = f"the strategy made {type(bare).__name__} of the model"
            raise MisuseError(Problem(what, "TrainerPrecision", fix='strategy="auto" or "ddp"'))
        _prepare(self.harness, bare)
        self._module, self._redirected = bare, bare is not model
        wrapped = [
            each if isinstance(each, WrappedOptimizer) else self.harness.wrap(each)
            for each in optimizers
        ]
        return model, wrapped, lr_schedulers

    def forward_context(self) -> AbstractContextManager[Any]:
        """Of training, validation, test and prediction steps."""
        if getattr(self._module, "automatic_optimization", False):
            return self.harness.context()
        # Under DDP the step is called through the module's own forward.
        return (
            self.harness.passing_over(self._module)
            if self._module and self._redirected
            else nullcontext()
        )

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """The closure first. A `training_step` that returns None skips its batch, as in Lightning."""
        result = self._wrap_closure(model, optimizer, closure)
        if model.automatic_optimization and not self.harness.prepared.window.backwards:
            self.harness.drop_window()
        else:
            optimizer.step(**kwargs)
        return result

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Left to the update."""
        getattr(optimizer, "_optimizer", optimizer).max_grad_norm = clip_val

    def state_dict(self) -> dict[str, Any]:
        """Of the precision, with guard's budgets and windows."""
        return dict(self.harness.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        self.harness.load_state_dict(state_dict)


class FabricPrecision(FabricBase):
    """`Fabric(plugins=[FabricPrecision(precision)])`, for `fabric.setup(model, optimizer)` and `fabric.backward`.

    The model has to be on its device before `fabric.setup`. Clip by `max_grad_norm`, or with `fabric.clip_gradients`;
    put `precision.state_dict()` into what you `fabric.save`. harness: the Precision.
    """

    precision = "32-true"

    def __init__(self, precision: Precision, max_grad_norm: float | None = None) -> None:
        self.harness, self._max_grad_norm = precision, max_grad_norm

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Prepare it, unless that was done."""
        _prepare(self.harness, module)
        self.harness.standard_loop()
        return module

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """`Precision.step`, of one optimizer or of several that were wrapped as one."""
        closure = kwargs.pop("closure", None)
        result = None if closure is None else closure()
        if isinstance(optimizer, WrappedOptimizer):
            optimizer.step()
        else:
            self.harness.step(optimizer, self._max_grad_norm)
        return result


class HarnessCallback(Callback):
    """Guard and telemetry in a Trainer that has a TrainerPrecision; arguments as of `Watch`, settings of telemetry by
    name. validation: the logged metric that is the validation's loss.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        guard: Mapping[str, Any] | None = NO_SETTINGS,
        validation: str = "val_loss",
        **telemetry: Any,
    ) -> None:
        self.watch = Watch(folder, guard, **telemetry)
        self._validation = validation

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After the plugin has prepared the model, before anything is loaded."""
        plugin = trainer.precision_plugin
        if not isinstance(plugin, TrainerPrecision):
            fix = "Trainer(plugins=[TrainerPrecision(precision)])"
            raise MisuseError(
                Problem("the Trainer has no TrainerPrecision", "HarnessCallback", fix=fix)
            )
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        clip = trainer.gradient_clip_val if trainer.gradient_clip_algorithm != "value" else None
        steps = trainer.estimated_stepping_batches
        planned = int(steps) if steps != float("inf") and steps > 0 else None
        self.watch.begin(plugin.harness, trainer.optimizers, schedulers, clip or None, planned)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Lightning has stepped its schedulers by now, and saves after this."""
        self.watch.step_ended()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sanity checks are no validation."""
        if not trainer.sanity_checking:
            self.watch.validated(trainer.callback_metrics.get(self._validation))

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """The run failed, or the guard halted it."""
        self.watch.end(exception)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The run is over."""
        self.watch.end()


def _prepare(precision: Precision, model: nn.Module) -> None:
    """Prepare `model`, unless it or a part of it was."""
    if not precision.is_prepared:
        precision.prepare(model)
    elif not any(part is precision.prepared.model for part in model.modules()):
        fix = "make one Precision for each model"
        raise MisuseError(
            Problem("the Precision was prepared for another model", "harness.integrations", fix=fix)
        )
