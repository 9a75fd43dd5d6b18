"""accelerate, the real one: a loop with its prepare, backward, accumulate and clip_grad_norm_."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator
from loop_support import (
    EAGER,
    adamw,
    codes,
    forget_accelerator,
    loader,
    mlp,
    plain,
    recipe,
    rows,
    same_weights,
)
from torch import nn
from torch.optim.lr_scheduler import StepLR

from harness import Precision
from harness.core.errors import MisuseError
from harness.integrations.accelerate import prepare
from harness.integrations.watch import Watch
from harness.precision.recipe import Recipe

RUNGS = ["fp8_hybrid", "bf16", "fp16_scaler", "fp32"]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    forget_accelerator()


class Run:
    """A loop as accelerate's own documentation has it."""

    def __init__(
        self,
        policy: Recipe,
        batches: int,
        accumulate: int = 1,
        clip: float | None = None,
        by_hand: float | None = None,
    ) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        self.precision = Precision(policy)
        self.bare = mlp()
        optimizer = adamw(self.bare)
        scheduler = StepLR(optimizer, 3, 0.5)
        self.model, self.optimizer, self.batches, self.scheduler = prepare(
            self.accelerator,
            self.precision,
            self.bare,
            optimizer,
            loader(batches),
            scheduler,
            max_grad_norm=clip,
        )
        self.by_hand = by_hand
        self.losses: list[float] = []
        self.norms: list[float] = []

    def train(
        self, skip: int = 0, poison: tuple[int, ...] = (), watch: Watch | None = None
    ) -> None:
        for number, (x, y) in enumerate(self.batches):
            if number < skip:
                continue
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.mse_loss(self.model(x), y) + (
                    math.nan if number in poison else 0.0
                )
                self.accelerator.backward(loss)
                if self.by_hand and self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.by_hand)
                    assert norm is not None
                    self.norms.append(norm.item())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            if watch is not None:
                watch.step_ended()


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, 0.1)])
@pytest.mark.parametrize("name", RUNGS)
def test_the_loop_gives_the_plain_loops_losses(
    name: str, accumulate: int, clip: float | None
) -> None:
    expected, reference = plain(recipe(name), 12, accumulate, clip)
    run = Run(recipe(name), 12, accumulate, clip)
    run.train()
    assert run.losses == expected
    assert same_weights(run.bare, reference)


@pytest.mark.parametrize("name", RUNGS)
def test_its_own_clipping_is_of_true_gradients(name: str) -> None:
    run = Run(recipe(name), 6, by_hand=0.05)
    run.train()
    assert all(0.05 < norm < 10 for norm in run.norms)
    facts = run.precision.facts()
    assert facts is not None
    assert facts.grad_norm == pytest.approx(0.05, rel=1e-3)
    single = Run(recipe("fp32"), 6, by_hand=0.05)
    single.train()
    assert run.norms == pytest.approx(single.norms, rel=0.1)


def test_its_saved_state_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = Run(recipe(), 10)
    whole.train()
    first = Run(recipe(), 10)
    first.batches = list(first.batches)[:4]
    first.train()
    first.accelerator.save_state(str(tmp_path / "saved"))
    again = Run(recipe(), 10)
    again.accelerator.load_state(str(tmp_path / "saved"))
    again.train(skip=4)
    assert again.losses == whole.losses[4:]
    assert same_weights(again.bare, whole.bare)


def test_a_state_saved_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    """accelerate's own examples count batches for this, not steps; gradients are not saved."""
    first = Run(recipe(), 7, accumulate=2)
    assert len(first.batches) == 7
    first.batches = list(first.batches)[:5]
    first.train()
    first.accelerator.save_state(str(tmp_path / "saved"))
    again = Run(recipe(), 7, accumulate=2)
    again.accelerator.load_state(str(tmp_path / "saved"))
    assert again.precision.prepared.state.step == 2
    again.train(skip=4)
    assert again.precision.prepared.state.step == 4
    assert all(map(math.isfinite, again.losses))


def test_guard_and_telemetry_in_its_loop(tmp_path: Path) -> None:
    run = Run(recipe(fallback=EAGER), 24)
    folder = tmp_path / "run"
    settings = {"max_consecutive_skips": 2, "snapshot_every": 4, "healthy_steps": 2}
    watch = Watch(folder, settings, mlflow=False, fp8_every=1)
    watch.begin(run.precision, [run.optimizer.optimizer], [run.scheduler.scheduler])
    run.train(poison=(9, 14, 15, 16), watch=watch)
    watch.end()
    told = codes(folder)
    assert told.count("nonfinite.skip") == 4
    assert told.count("guard.rollback") == 1
    assert "precision.demote" in told
    assert any(
        key.startswith("fp8_amax/") for row in rows(folder) for key in row.get("metrics", {})
    )
    assert math.isfinite(run.losses[-1])


def mixed() -> Accelerator:
    return Accelerator(cpu=True, mixed_precision="bf16")


def compiled() -> Accelerator:
    return Accelerator(cpu=True, dynamo_backend="eager")


@pytest.mark.parametrize(
    ("make", "told"), [(mixed, "mixed_precision is bf16"), (compiled, "dynamo_backend is set")]
)
def test_what_would_change_the_precision_besides_is_refused(make: Any, told: str) -> None:
    model = mlp()
    with pytest.raises(MisuseError, match=told):
        prepare(make(), Precision(recipe()), model, adamw(model))


def test_without_our_prepare_its_autocast_is_noticed() -> None:
    """`accelerator.prepare` of a prepared model, or the other way round: its autocast inside of ours."""
    precision, model = Precision(recipe("fp32")), mlp()
    precision.prepare(model)
    wrapped = precision.wrap(adamw(model))
    model, _ = mixed().prepare(model, wrapped)
    with pytest.raises(MisuseError, match="forward was replaced"):
        model(torch.zeros(2, 16))
    late = mixed().prepare(mlp())
    with pytest.raises(MisuseError, match="forward was replaced"):
        Precision(recipe("fp32")).prepare(late)


def test_one_model_and_its_optimizer() -> None:
    accelerator, model = Accelerator(cpu=True), mlp()
    with pytest.raises(MisuseError, match="2 optimizers"):
        prepare(accelerator, Precision(recipe()), model, adamw(model), adamw(model))
    with pytest.raises(MisuseError, match="0 models"):
        prepare(accelerator, Precision(recipe()), adamw(model))


def test_the_version_that_this_was_written_for() -> None:
    assert accelerate.__version__.startswith("1.15.")
