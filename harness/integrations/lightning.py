"""Lightning: a `Precision` plugin for the Trainer and one for Fabric, and a callback for guard and telemetry.

    precision = harness.Precision.from_recipe("fp8_hybrid")
    trainer = Trainer(plugins=[TrainerPrecision(precision)], callbacks=[HarnessCallback("runs/mine")])
    trainer.fit(module, batches)

For lightning 2.6: one process, DDP, or FSDP2 by ModelParallelStrategy.
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
    """A plugin for the Trainer: `Trainer(plugins=[TrainerPrecision(precision)])`.

    - The LightningModule is prepared once it is on its device, and its optimizers are wrapped.
    - `gradient_clip_val` by norm is done in the update, so that nothing is clipped twice.
    - Under automatic optimization, a whole `training_step` runs in the precision's context. Under manual optimization,
      each call of the model does.
    - The Trainer's checkpoints include `precision.state_dict()`.

    harness: the Precision.
    watch: guard and telemetry, where a HarnessCallback has begun them.
    """

    precision = "32-true"  # Lightning itself must not cast

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self.harness = precision
        self.watch: Watch | None = None
        self._module: nn.Module | None = None
        self._redirected = False
        # What an optimizer clips to without Lightning, while it clips to something else.
        self._own_norms: dict[Optimizer, float | None] = {}

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> Any:
        """Lightning calls it with the model on its device, and wrapped if it trains under DDP."""
        # Only DDP is looked into: any other wrapper may own the step.
        bare = model.module if isinstance(model, DistributedDataParallel) else model
        if not hasattr(bare, "automatic_optimization"):
            what = f"the strategy made {type(bare).__name__} of the model"
            fix = 'strategy="auto" or "ddp", or ModelParallelStrategy with fully_shard'
            raise MisuseError(Problem(what, "TrainerPrecision", fix=fix))
        _prepare(self.harness, bare)
        self._module = bare
        self._redirected = bare is not model

        # A user may have wrapped them in configure_optimizers.
        wrapped: list[Optimizer] = []
        for each in optimizers:
            is_wrapped = isinstance(each, WrappedOptimizer)
            wrapped.append(each if is_wrapped else self.harness.wrap(each))
        return model, wrapped, lr_schedulers

    def forward_context(self) -> AbstractContextManager[Any]:
        """The context of training, validation, test and prediction steps."""
        if getattr(self._module, "automatic_optimization", False):
            return self.harness.context()
        # DDP calls `training_step` through the module's forward. Without this that whole step would count as one model
        # call and open a context.
        if self._module and self._redirected:
            return self.harness.passing_over(self._module)
        return nullcontext()

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run forward and backward, which are the closure, and then the update."""
        result = self._wrap_closure(model, optimizer, closure)
        # No backward ran: `training_step` returned None. Lightning skips such a batch, and so must the update.
        no_backward = not self.harness.prepared.window.backwards
        if model.automatic_optimization and no_backward:
            self.harness.drop_window()
        else:
            optimizer.step(**kwargs)
        if optimizer in self._own_norms:
            optimizer.max_grad_norm = self._own_norms.pop(optimizer)
        # Under manual optimization a batch may have several steps, each of which has to be judged before the next.
        if self.watch is not None and not model.automatic_optimization:
            self.watch.step_ended()
        return result

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Left to the update: the next one of this optimizer alone, as a module may clip in some steps only."""
        # LightningOptimizer keeps the wrapped one there.
        wrapped: WrappedOptimizer = getattr(optimizer, "_optimizer", optimizer)
        self._own_norms.setdefault(wrapped, wrapped.max_grad_norm)
        wrapped.max_grad_norm = clip_val

    def state_dict(self) -> dict[str, Any]:
        """Of the precision, with guard's budgets and windows.

        Lightning may save in the middle of an accumulation, as after a validation there, and saves no gradients.
        """
        return dict(self.harness.state_dict(within_window=True))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        self.harness.load_state_dict(state_dict)


class FabricPrecision(FabricBase):
    """`Fabric(plugins=[FabricPrecision(precision)])`, for `fabric.setup(model, optimizer)` and `fabric.backward`.

    The model has to be on its device before `fabric.setup`. Clip by `max_grad_norm`, or with `fabric.clip_gradients`;
    put `precision.state_dict()` into what you `fabric.save`. harness: the Precision.
    """

    precision = "32-true"  # Lightning itself must not cast

    def __init__(self, precision: Precision, max_grad_norm: float | None = None) -> None:
        self.harness, self._max_grad_norm = precision, max_grad_norm

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Prepare the module, unless it is prepared."""
        _prepare(self.harness, module)
        # From here each model call opens the precision's context by itself, also in an evaluation before training.
        self.harness.standard_loop()
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        """Before each call of the model: look whether the strategy has sharded it since."""
        self.harness.prepared.find_shards("fabric.setup_module()")
        return nullcontext()

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """`Precision.step` for one optimizer, or for several that were wrapped as one."""
        closure = kwargs.pop("closure", None)
        result = None if closure is None else closure()
        if isinstance(optimizer, WrappedOptimizer):
            optimizer.step()
        else:
            self.harness.step(optimizer, self._max_grad_norm)
        return result


class HarnessCallback(Callback):
    """Guard and telemetry in a Trainer that has a TrainerPrecision.

    folder, guard: as for `Watch`.
    validation: name of the logged metric that is the validation's loss.
    telemetry: settings of telemetry, by name.
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
        """Begin: the plugin has prepared the model, and nothing is loaded yet."""
        plugin = trainer.precision_plugin
        if not isinstance(plugin, TrainerPrecision):
            what = "the Trainer has no TrainerPrecision"
            fix = "Trainer(plugins=[TrainerPrecision(precision)])"
            raise MisuseError(Problem(what, "HarnessCallback", fix=fix))
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]

        # Clipping by value has no norm that could be a limit. Lightning says 0, too, for no clipping.
        clip = None
        if trainer.gradient_clip_algorithm != "value":
            clip = trainer.gradient_clip_val or None

        # Infinite for a Trainer that trains without an end. With several optimizers a batch has several steps.
        planned = None
        steps = trainer.estimated_stepping_batches
        if 0 < steps < float("inf") and len(trainer.optimizers) == 1:
            planned = int(steps)
        self.watch.begin(plugin.harness, trainer.optimizers, schedulers, clip, planned)
        plugin.watch = self.watch

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Judge the step, if this micro-batch ended one: schedulers have stepped, and Lightning saves after this."""
        self.watch.step_ended()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a validation; a sanity check is none."""
        if trainer.sanity_checking:
            return
        loss = trainer.callback_metrics.get(self._validation)
        self.watch.validated(loss)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """The run failed, or the guard halted it."""
        self.watch.end(exception)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The run is over."""
        self.watch.end()


def _prepare(precision: Precision, model: nn.Module) -> None:
    """Prepare `model`, unless it or a part of it is prepared."""
    if not precision.is_prepared:
        precision.prepare(model)
    elif not any(part is precision.prepared.model for part in model.modules()):
        what = "the Precision was prepared for another model"
        fix = "make one Precision for each model"
        raise MisuseError(Problem(what, "harness.integrations", fix=fix))
