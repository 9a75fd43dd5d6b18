"""A run's model as a checkpoint left it, for commands that use it and leave the run as it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.errors import CheckpointError, ConfigError, Problem, some
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
    """model: in evaluation, its weights and FP8 state those of `step`. planned: the rung that the run itself took."""

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
        """What the model computes in here, as the run does: its rung, and what became of it."""
        fell = self.precision.fell_back_to
        demoted = len(self.precision.demoted)
        told = f"{self.plan.resolved}, fell to {fell}" if fell else self.plan.resolved
        return f"{told}, {demoted} layers in BF16" if demoted and not fell else told

    @property
    def vocab_size(self) -> int | None:
        """As the model says it; None if it does not."""
        from harness.models import Task

        return Task(self.model, self.config.model.target).vocab_size

    @contextmanager
    def computing(self, fp32: bool) -> Iterator[None]:
        """Forwards in here leave no trace. fp32: in float32 throughout, without TF32; else as in the run."""
        import torch

        before = torch.get_float32_matmul_precision()
        with torch.no_grad():
            if not fp32:
                with self.precision.context():
                    yield
                return
            torch.set_float32_matmul_precision("highest")
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(before)

    def logits(self, inputs: Tensor, segments: Tensor | None = None) -> Tensor:
        """[batch, time, vocab] of token ids, int64 [batch, time] on the device; inside of `computing`.

        Raises ConfigError if the model gives none.
        """
        from harness.models.huggingface import causal_lm

        called = causal_lm(self.model)
        if called is not None:
            return called.outputs(self.model, inputs, segments).logits
        more = {} if segments is None else {"segments": segments}
        found = self._called(inputs, **more)
        if found.shape[1] == 1 < inputs.shape[1]:  # nanoGPT gives all of them beside a loss alone
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
        found = found[0] if isinstance(found, tuple) and found else getattr(found, "logits", found)
        if not isinstance(found, torch.Tensor) or found.ndim != 3 or len(found) != len(inputs[0]):
            raise self._no_logits("forward(inputs) returns something else")
        return found

    def _no_logits(self, why: str) -> ConfigError:
        what, fix = (
            "the model gives no logits [batch, time, vocab]",
            "have forward(inputs) return them",
        )
        return ConfigError(Problem(what, f"model.target {self.config.model.target!r}", why, fix))


def restore(run: Path, step: int | None = None) -> Restored:
    """The model of `run` as its checkpoint of `step` left it, by default the newest that verifies.

    Every byte of the checkpoint is read against its hash first. Raises ConfigError if `run` is no run that the harness
    can build again, CheckpointError if there is no such checkpoint, or it does not fit.
    """
    folder, config = _read(run)
    from harness.build import build_plan, join_worker
    from harness.checkpoint.store import Store
    from harness.engines.torch_engine import ModelPart
    from harness.precision.convert import build_backend
    from harness.precision.loss_scale import build_loss_scale
    from harness.precision.recipe import load_recipe
    from harness.run_folder import read_plan

    store = Store(folder / "checkpoints", readonly=True)
    found = choose(store, step)
    check_recipe(folder, config.recipe)
    recipe, planned = load_recipe(config.recipe), read_plan(folder)
    worker = join_worker(config, "python")
    plan, model = build_plan(config, recipe, worker, planned)
    precision = build_backend(
        plan, recipe, model, worker.device, build_loss_scale(plan, recipe, worker.device)
    )
    tensors, meta = store.load(found, parts=("model", "fp8"))
    try:
        ModelPart(model).load_state_dict(tensors["model"], meta["parts"]["model"])
        precision.load_state_dict(tensors.get("fp8", {}), meta["parts"]["fp8"])
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        what, where = "does not fit the run's model", str(store.path(found))
        raise CheckpointError(Problem(what, where, f"{type(error).__name__}: {error}")) from error
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


def _read(run: Path) -> tuple[Path, RunConfig]:
    """The run's folder and its config, for one process. Raises ConfigError."""
    from harness.core.config import load_config
    from harness.tracking.journal import require_run

    folder = require_run(run)
    if not (folder / "config.yaml").is_file():
        why = "a loop of your own trained it, and only that loop knows its model"
        raise ConfigError(
            Problem("the run has no config.yaml", str(folder), why, "use the model in that loop")
        )
    # One process stands for all ranks, whatever engine the run was told to take, and what is eager needs no compiler.
    return folder, load_config(
        str(folder / "config.yaml"), ["engine.name=auto", "engine.compile=none"]
    )


def choose(store: Store, step: int | None) -> int:
    """The checkpoint of `step`, or the newest that verifies. Newer ones that do not are named on stderr.

    Raises CheckpointError if there is none.
    """
    if step is None:
        if (newest := store.newest_valid()) is None:
            fix = "train longer, or save earlier with checkpoint.every"
            raise CheckpointError(Problem("the run has no checkpoint", str(store.root), fix=fix))
        if store.damaged:
            damaged = some(sorted(store.damaged), _SHOWN)
            say(
                f"passed over, for they do not verify: steps {damaged}; this is step {newest}",
                sys.stderr,
            )
        return newest
    if step not in (steps := store.steps()):
        fix = f"there are steps {some(steps, _SHOWN)}" if steps else "the run has no checkpoint"
        raise CheckpointError(
            Problem(f"there is no checkpoint of step {step}", str(store.root), fix=fix)
        )
    return step


def check_recipe(folder: Path, recipe: str) -> None:
    """Raise ConfigError if the recipe is not what it was when the run began."""
    from harness.precision.recipe import load_recipe
    from harness.run_folder import read_plan

    sha256 = load_recipe(recipe).sha256()
    if sha256 != read_plan(folder).get("recipe_sha256", sha256):
        raise ConfigError(
            Problem(
                "the recipe's contents changed since the run",
                f"recipe {recipe}",
                fix="put the recipe back as it was when the run was started, and call this from the same folder",
            )
        )
