"""Hugging Face's Trainer: a mixin that trains its model under a Precision, with guard and telemetry.

    class MyTrainer(PrecisionMixin, transformers.Trainer): ...

    trainer = MyTrainer(model, args, train_dataset=data, precision="fp8_hybrid", watch=Watch("runs/mine"))
    trainer.train()

For transformers 5.23: one process, or DDP. Nothing of transformers is imported here: the Trainer is yours.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from harness.core.errors import MisuseError, Problem
from harness.integrations.watch import Watch
from harness.precision.api import Precision
from harness.precision.standard import WrappedOptimizer

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

STATE = "harness_precision.pt"
"""The file of a Trainer's checkpoint that holds `precision.state_dict()`."""
# TrainingArguments that are refused, each with the reason.
_CONFLICTS = {
    "bf16": "its autocast would go against the plan",
    "fp16": "its autocast and GradScaler would go against the plan; the recipe fp16_scaler has a loss scale",
    "bf16_full_eval": "the evaluation after training would cast the model; without it it runs in the plan's precision",
    "fp16_full_eval": "the evaluation after training would cast the model; without it it runs in the plan's precision",
    "torch_compile": "the Trainer would compile the model by itself, before it is prepared; compile block by block",
    "deepspeed": "its engine owns gradients and the step",
    "fsdp": "it shards the model by itself, which was never tried with a prepared one",
}


class PrecisionMixin(Trainer):
    """Put it before `transformers.Trainer` in the bases of your class.

    precision: a Precision, or a recipe's name or path.
    watch: guard and telemetry.

    The trainer has the Precision as its attribute `harness`.

    - `max_grad_norm` of the arguments is done in the update, so that nothing is clipped twice. The `grad_norm` of the
      logs is from before clipping.
    - Checkpoints include the FP8 state, and `resume_from_checkpoint` restores it.
    - Evaluation runs in the plan's precision, and leaves no trace in the FP8 state.

    Raises MisuseError for TrainingArguments that would also change the precision, or take over the step.
    """

    def __init__(
        self, *args: Any, precision: Precision | str, watch: Watch | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)

        # Settings by which the Trainer would do something that is done here, or take the step away.
        problems: list[Problem] = []
        for name, why in _CONFLICTS.items():
            if getattr(self.args, name, None):
                fix = f"leave out {name}"
                problems.append(Problem(f"{name} is set", "TrainingArguments", why, fix))
        if self.model_init is not None:
            why = "train() would build another model than the one that is prepared here"
            fix = "give the model itself, and each trial a trainer and a Precision of its own"
            problems.append(Problem("model_init is given", "Trainer", why, fix))
        if self.args.n_gpu > 1:
            what = f"{self.args.n_gpu} cards in one process"
            why = "DataParallel copies the model in every step"
            fix = "torchrun, for DDP, or one card"
            problems.append(Problem(what, "TrainingArguments", why, fix))
        if problems:
            raise MisuseError(problems)

        # The Trainer has moved the model to its device, and has not made the optimizer yet.
        if isinstance(precision, str):
            precision = Precision.from_recipe(precision)
        self.harness = precision
        self.watch = watch
        if not self.harness.is_prepared:
            model: Any = self.model
            self.harness.prepare(model)
        # From here each model call opens the precision's context by itself, also in an evaluation before training.
        self.harness.standard_loop()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, and end the telemetry afterwards, also after an error."""
        try:
            result = super().train(*args, **kwargs)
        except BaseException as error:
            if self.watch is not None:
                self.watch.end(error)
            raise
        if self.watch is not None:
            self.watch.end()
        return result

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        # It begins by zeroing all gradients: after auto_find_batch_size, or an interrupted train(), those of a window.
        self.harness.drop_window()
        return super()._inner_training_loop(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the Trainer does, and write the loss to the telemetry."""
        metrics = super().evaluate(*args, **kwargs)
        if self.watch is not None:
            self.watch.validated(metrics.get("eval_loss"))
        return metrics

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Wrap the optimizer that the Trainer makes, or that was given to it."""
        super().create_optimizer(*args, **kwargs)
        inner = _inner(self.optimizer)
        if not isinstance(inner, WrappedOptimizer):
            self.optimizer = self.harness.wrap(inner, self.args.max_grad_norm or None)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Make the scheduler and begin the watch.

        This is the place for it: all that a guard restores exists now, and no checkpoint has been loaded yet.
        """
        scheduler = super().create_scheduler(num_training_steps, *args, **kwargs)
        if self.watch is not None and not self.watch.begun:
            clip = self.args.max_grad_norm or None
            optimizers = [_inner(self.optimizer)]
            self.watch.begin(self.harness, optimizers, [scheduler], clip, num_training_steps)
        return scheduler

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # The Trainer calls this after every step, before it saves, and once more at the end of an epoch. `step_ended`
        # does nothing where no optimizer has stepped since.
        if self.watch is not None:
            self.watch.step_ended()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        # A callback may save at the end of a step, before the call above. Only a judged step is saved.
        if self.watch is not None:
            self.watch.step_ended()
        super()._save_checkpoint(*args, **kwargs)

    def _clip_grad_norm(self, model: Any) -> None:
        """Does nothing: the update clips."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Tensor:
        """The norm for the Trainer's logs, before clipping. The gradients are unscaled by now."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return get_total_norm(gradients)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        # After a SIGTERM, the Trainer's enable_jit_checkpoint saves before the optimizer's step.
        state = self.harness.state_dict(within_window=True)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, STATE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = os.path.join(checkpoint, STATE)
        if not os.path.exists(path):
            why = "it was saved without the precision: scales would start from nothing"
            fix = (
                "resume from a checkpoint that this trainer saved without save_only_model, or start anew from its"
                " weights"
            )
            raise MisuseError(Problem(f"{STATE} is missing", checkpoint, why, fix))
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.harness.load_state_dict(state)


def _inner(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
