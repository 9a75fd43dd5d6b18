"""A run's model, restored from a checkpoint, for commands that use it and change nothing in the run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.errors import CheckpointError, ConfigError, Problem, number_of, some
from harness.core.screen import say

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from harness.build import Worker
    from harness.checkpoint.store import Store
    from harness.core.config import RunConfig
    from harness.core.protocols import PrecisionBackend
    from harness.precision.plan import Plan

_SHOWN = 8


@dataclass(frozen=True)
class Restored:
    """A restored model and what it runs with.

    folder: the run's.
    plan: the plan on this machine.
    planned: the rung that the run itself took.
    model: in evaluation mode, with the weights and FP8 state of `step`.
    """

    folder: Path
    config: RunConfig
    worker: Worker
    plan: Plan
    planned: str
    model: nn.Module
    precision: PrecisionBackend
    step: int

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.worker.device

    @property
    def name(self) -> str:
        """The precision that the model computes in here: its rung, and what left it."""
        if self.precision.fell_back_to:
            return f"{self.plan.resolved}, downgraded to {self.precision.fell_back_to}"
        if self.precision.demoted:
            demoted = number_of(len(self.precision.demoted), "layer")
            return f"{self.plan.resolved}, {demoted} in BF16"
        return self.plan.resolved

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids, if the model says it; else None."""
        from harness.models import Task

        return Task(self.model, self.config.model.target).vocab_size

    @contextmanager
    def computing(self, fp32: bool) -> Iterator[None]:
        """Forwards in this context leave no trace in the FP8 state.

        fp32: compute in float32 throughout, without TF32; else as in the run.
        """
        import torch

        with torch.no_grad(), _without_tf32() if fp32 else self.precision.context():
            yield

    def logits(self, inputs: Tensor, segments: Tensor | None = None) -> Tensor:
        """Logits [batch, time, vocab] of token ids, int64 [batch, time] on the device. Call it inside `computing`.

        Raises ConfigError if the model gives none.
        """
        from harness.models.huggingface import causal_lm

        called = causal_lm(self.model)
        if called is not None:
            return called.outputs(self.model, inputs, segments).logits
        more = {} if segments is None else {"segments": segments}
        found = self._called(inputs, **more)
        # nanoGPT gives the last position alone, unless it has targets to compute a loss.
        if found.shape[1] == 1 < inputs.shape[1]:
            found = self._called(inputs, inputs, **more)
        if found.shape[1] != inputs.shape[1]:
            raise self._no_logits(
                f"forward(inputs) gives them for {found.shape[1]} of {inputs.shape[1]} places"
            )
        return found

    def _called(self, *inputs: Tensor, **more: Tensor) -> Tensor:
        import torch

        try:
            found = self.model(*inputs, **more)
        except TypeError as error:
            raise self._no_logits(f"its forward does not take the inputs alone: {error}") from error
        # Common forms of an output: a tuple that begins with the logits, or an object that has them.
        logits = getattr(found, "logits", found)
        if isinstance(found, tuple) and found:
            logits = found[0]
        samples = len(inputs[0])
        is_tensor = isinstance(logits, torch.Tensor)
        if not is_tensor or logits.ndim != 3 or len(logits) != samples:
            raise self._no_logits("forward(inputs) returns something else")
        return logits

    def _no_logits(self, why: str) -> ConfigError:
        what = "the model gives no logits [batch, time, vocab]"
        fix = "have forward(inputs) return them"
        return ConfigError(Problem(what, f"model.target {self.config.model.target!r}", why, fix))


@contextmanager
def _without_tf32() -> Iterator[None]:
    """In this context float32 products, convolutions and recurrent layers compute in float32 throughout."""
    import torch

    cudnn: Any = torch.backends.cudnn  # its stubs lack `conv` and `rnn`
    matmul = torch.get_float32_matmul_precision()
    conv, rnn = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    torch.set_float32_matmul_precision("highest")
    # Both of torch's interfaces: the old flag alone would leave a TF32 that torch.backends.fp32_precision asks for, and
    # torch refuses to read a flag that says something else than the new settings.
    cudnn.allow_tf32 = False
    cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        cudnn.allow_tf32 = "tf32" in (conv, rnn)
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = conv, rnn


def restore(run: Path, step: int | None = None) -> Restored:
    """The model of `run` from its checkpoint of `step`; by default the newest that verifies.

    Every byte of the checkpoint is compared with its hash first. Raises ConfigError if `run` is no run that the harness
    can build again. Raises CheckpointError if there is no such checkpoint, or it does not fit.
    """
    # One process stands for all ranks, whatever engine the run had. Eager mode needs no compiler.
    folder, config = read_run(run, ["engine.name=auto", "engine.compile=none"])
    from harness.build import build_plan, join_worker
    from harness.checkpoint.store import Store
    from harness.engines.parts import ModelPart
    from harness.precision.convert import build_backend
    from harness.precision.loss_scale import build_loss_scale
    from harness.precision.recipe import load_recipe
    from harness.run_folder import read_plan

    # Which checkpoint, and whether it can be used with today's recipe.
    store = Store(folder / "checkpoints", readonly=True)
    found = choose(store, step)
    check_recipe(folder, config.recipe)
    recipe = load_recipe(config.recipe)
    planned = read_plan(folder)

    # Build the model, then load weights and FP8 state.
    worker = join_worker(config, "python")
    plan, model = build_plan(config, recipe, worker, planned)
    loss_scale = build_loss_scale(plan, recipe, worker.device)
    precision = build_backend(plan, recipe, model, worker.device, loss_scale)
    tensors, meta = store.load(found, parts=("model", "fp8"))
    try:
        ModelPart(model).load_state_dict(tensors["model"], meta["parts"]["model"])
        precision.load_state_dict(tensors.get("fp8", {}), meta["parts"]["fp8"])
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        what = "does not fit the run's model"
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(Problem(what, str(store.path(found)), why)) from error
    return Restored(
        folder,
        config,
        worker,
        plan,
        planned.get("resolved", plan.resolved),
        model.eval(),
        precision,
        found,
    )


def read_run(run: Path, overrides: Sequence[str]) -> tuple[Path, RunConfig]:
    """The run's folder and its config with `overrides`. Raises ConfigError, also for a loop of the user's own."""
    from harness.core.config import load_config
    from harness.tracking.journal import require_run

    folder = require_run(run)
    if not (folder / "config.yaml").is_file():
        why = (
            "it was deleted, or a loop of your own trained the run: only that loop knows its model"
        )
        fix = "put config.yaml back, or use the model in that loop"
        raise ConfigError(Problem("the run has no config.yaml", str(folder), why, fix))
    return folder, load_config(str(folder / "config.yaml"), overrides)


def choose(store: Store, step: int | None) -> int:
    """The checkpoint of `step`, or the newest that verifies. Prints on stderr which newer ones do not.

    Raises CheckpointError if there is none.
    """
    if step is None:
        newest = store.newest_valid()
        if newest is None:
            fix = "train longer, or save earlier with checkpoint.every"
            raise CheckpointError(Problem("the run has no checkpoint", str(store.root), fix=fix))
        # The answer is of an older step than the user expects: say so, beside the output that a script reads.
        if store.damaged:
            damaged = some(sorted(store.damaged), _SHOWN)
            text = f"skipped checkpoints that do not verify: steps {damaged}; this is step {newest}"
            say(text, sys.stderr)
        return newest

    steps = store.steps()
    if step not in steps:
        what = f"there is no checkpoint of step {step}"
        fix = "the run has no checkpoint"
        if steps:
            fix = f"there are steps {some(steps, _SHOWN)}"
        raise CheckpointError(Problem(what, str(store.root), fix=fix))
    return step


def check_recipe(folder: Path, recipe: str) -> None:
    """Raise ConfigError if the recipe is not what it was when the run began."""
    from harness.precision.recipe import load_recipe
    from harness.run_folder import read_plan

    sha256 = load_recipe(recipe).sha256()
    if sha256 != read_plan(folder).get("recipe_sha256", sha256):
        what = "the recipe's contents changed since the run"
        fix = "restore the recipe as it was when the run was started, and call this from the same folder"
        raise ConfigError(Problem(what, f"recipe {recipe}", fix=fix))
