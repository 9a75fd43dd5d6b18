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
_ALONE = {
    "bf16": "its autocast would go against the plan",
    "fp16": "its autocast and GradScaler would go against the plan; the recipe fp16_scaler has a loss scale",
    "torch_compile": "the Trainer would compile the model by itself, before it is prepared; compile block by block",
    "deepspeed": "its engine owns gradients and the step",
    "fsdp": "its sharded parameters cannot be prepared",
}


class PrecisionMixin(Trainer):
    """In front of `transformers.Trainer` in the bases of a class of yours.

    precision: a Precision, or a recipe's name or path. watch: guard and telemetry. `max_grad_norm` of the arguments
    becomes the update's own, so that nothing is clipped twice; the `grad_norm` of the logs is from before clipping.
    Checkpoints hold the FP8 state, and `resume_from_checkpoint` puts it back. Evaluation runs in the plan's precision
    and leaves no trace.

    Raises MisuseError for arguments that would change the precision, or own the step, besides.
    """

    def __init__(
        self, *args: Any, precision: Precision | str, watch: Watch | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        wrong = [name for name in _ALONE if getattr(self.args, name, None)]
        problems = [
            Problem(f"{name} is set", "TrainingArguments", _ALONE[name], f"leave out {name}")
            for name in wrong
        ]
        if self.args.n_gpu > 1:
            why, fix = (
                "DataParallel copies the model in every step",
                "torchrun, for DDP, or one card",
            )
            problems.append(
                Problem(f"{self.args.n_gpu} cards in one process", "TrainingArguments", why, fix)
            )
        if problems:
            raise MisuseError(problems)
        self.harness = Precision.from_recipe(precision) if isinstance(precision, str) else precision
        self.watch = watch
        if not self.harness.is_prepared:
            model: Any = self.model
            self.harness.prepare(model)
        self.harness.standard_loop()  # an evaluation may come before the training

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; what ends it ends the telemetry, too."""
        try:
            result = super().train(*args, **kwargs)
        except BaseException as error:
            if self.watch is not None:
                self.watch.end(error)
            raise
        if self.watch is not None:
            self.watch.end()
        return result

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; its loss goes to the telemetry."""
        metrics = super().evaluate(*args, **kwargs)
        if self.watch is not None:
            self.watch.validated(metrics.get("eval_loss"))
        return metrics

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, or the one that was given to it, wrapped."""
        super().create_optimizer(*args, **kwargs)
        if not isinstance(_inner(self.optimizer), WrappedOptimizer):
            self.optimizer = self.harness.wrap(
                _inner(self.optimizer), self.args.max_grad_norm or None
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        """The last thing that a guard keeps is there now, and nothing has been loaded yet."""
        scheduler = super().create_scheduler(num_training_steps, *args, **kwargs)
        if self.watch is not None and not self.watch.begun:
            clip = self.args.max_grad_norm or None
            self.watch.begin(
                self.harness, [_inner(self.optimizer)], [scheduler], clip, num_training_steps
            )
        return scheduler

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # Comes once after every step, before anything is saved.
        if self.watch is not None:
            self.watch.step_ended()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _clip_grad_norm(self, model: Any) -> None:
        """Left to the update."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Tensor:
        """For the Trainer's logs: from before clipping, unscaled."""
        return get_total_norm([p.grad for p in model.parameters() if p.grad is not None])

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        state = self.harness.state_dict()
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, STATE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = os.path.join(checkpoint, STATE)
        if not os.path.exists(path):
            why = "it was saved without the precision: scales would start from nothing"
            fix = "resume from a checkpoint that this trainer saved, or start anew from its weights"
            raise MisuseError(Problem(f"{STATE} is missing", checkpoint, why, fix))
        self.harness.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


def _inner(optimizer: Any) -> Any:
    """What is within accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)
