"""Lightning's Trainer and Fabric, the real ones: the plain loop's losses, guard and telemetry, resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from loop_support import (
    EAGER,
    ROWS,
    Rolled,
    adamw,
    codes,
    loader,
    mlp,
    plain,
    recipe,
    rows,
    same_weights,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from harness import Precision
from harness.core.errors import HaltedError, MisuseError
from harness.integrations.lightning import FabricPrecision, HarnessCallback, TrainerPrecision

RUNGS = ["fp8_hybrid", "bf16", "fp16_scaler", "fp32"]
GUARD = {"max_consecutive_skips": 2, "snapshot_every": 4, "healthy_steps": 2}


class Module(LightningModule):
    """What somebody brings: nothing in it is of the harness."""

    def __init__(self, manual: bool = False, skip: int | None = None) -> None:
        super().__init__()
        self.net = mlp()
        self.losses: list[float] = []
        self.automatic_optimization, self.skip = not manual, skip

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor | None:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).float(), y)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()  # pyright: ignore
        return None if number == self.skip else loss

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]).float(), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self)
        return [optimizer], [{"scheduler": StepLR(optimizer, 3, 0.5), "interval": "step"}]


def trainer(folder: Path, *plugins: Any, callbacks: Any = (), **more: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return Trainer(
        accelerator="cpu", default_root_dir=folder, plugins=list(plugins), callbacks=list(callbacks),
        **{"enable_checkpointing": False, "max_epochs": 1, **quiet, **more},
    )  # fmt: skip


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, 0.1)])
@pytest.mark.parametrize("name", RUNGS)
def test_the_trainer_gives_the_plain_loops_losses(
    name: str, accumulate: int, clip: float | None, tmp_path: Path
) -> None:
    expected, model = plain(recipe(name), 12, accumulate, clip)
    module = Module()
    precision = Precision(recipe(name))
    plugin = TrainerPrecision(precision)
    fit = trainer(tmp_path, plugin, gradient_clip_val=clip, accumulate_grad_batches=accumulate)
    fit.fit(module, loader(12), loader(2))
    assert module.losses == expected
    assert same_weights(module.net, model)
    assert precision.prepared.state.step == fit.global_step == 12 // accumulate
    assert math.isfinite(fit.callback_metrics["val_loss"].item())


def test_manual_optimization_is_the_plain_loop_too(tmp_path: Path) -> None:
    expected, model = plain(recipe(), 8)
    module = Module(manual=True)
    trainer(tmp_path, TrainerPrecision(Precision(recipe()))).fit(module, loader(8))
    assert module.losses == expected
    assert same_weights(module.net, model)


class Adversaries(LightningModule):
    """Two networks in turns: two steps in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = mlp(), mlp()
        self.automatic_optimization = False
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        x, y = batch
        made: Any = None
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            self.toggle_optimizer(optimizer)
            if made is None:
                made = self.maker(x)
                loss = -self.judge(made).mean()
            else:
                loss = (self.judge(made.detach()) - self.judge(y)).mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        return [adamw(self.maker), adamw(self.judge)], []


def test_a_guard_judges_every_step_of_a_batch(tmp_path: Path) -> None:
    losses: list[list[float]] = []
    for callbacks in ([], [HarnessCallback(tmp_path / "run", GUARD, mlflow=False, report=False)]):
        module, precision = Adversaries(), Precision(recipe())
        trainer(tmp_path, TrainerPrecision(precision), callbacks=callbacks).fit(module, loader(6))
        assert precision.prepared.state.step == 12
        losses.append(module.losses)
    assert losses[0] == losses[1]
    steps = [row["step"] for row in rows(tmp_path / "run") if row["kind"] == "metrics"]
    assert sorted(set(steps)) == list(range(1, 13))


def test_a_guard_rolls_back_within_a_batch(tmp_path: Path) -> None:
    """Inputs of one batch are NaN: both of its steps are bad, and the second one leads back."""
    callback = HarnessCallback(None, GUARD)
    runner = trainer(tmp_path, TrainerPrecision(Precision(recipe())), callbacks=[callback])
    module = Adversaries()
    data = Rolled(12)
    data.inputs[7 * ROWS] = torch.nan
    runner.fit(module, DataLoader(data, batch_size=ROWS))
    assert callback.watch.guard is not None
    assert callback.watch.guard.step < 24
    assert math.isfinite(module.losses[-1])


def test_one_backward_of_several_optimizers(tmp_path: Path) -> None:
    """As docs/guide/integrations.md says: prepared in configure_model, and wrapped as one."""

    class Parts(Module):
        def configure_model(self) -> None:
            if not precision.is_prepared:
                precision.prepare(self.net)

        def configure_optimizers(self) -> Any:
            optimizers = [adamw(self.net[0]), adamw(self.net[2])]
            wrapped = precision.wrap(optimizers)
            return [wrapped], [StepLR(wrapped, 3, 0.5)]

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
            optimizer: Any = self.optimizers()
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()  # pyright: ignore
            self.losses.append(loss.item())

    expected, model = plain(recipe(), 8)
    precision = Precision(recipe())
    module = Parts(manual=True)
    trainer(tmp_path, TrainerPrecision(precision)).fit(module, loader(8))
    assert module.losses == expected
    assert same_weights(module.net, model)


def test_a_second_fit_with_a_guard_is_refused(tmp_path: Path) -> None:
    module, plugin = Module(), TrainerPrecision(Precision(recipe()))
    callback = HarnessCallback(tmp_path / "run", GUARD, mlflow=False, report=False)
    runner = trainer(tmp_path, plugin, callbacks=[callback])
    runner.fit(module, loader(4))
    with pytest.raises(MisuseError, match="training begins a second time"):
        runner.fit(module, loader(4))


def test_a_batch_that_is_skipped_by_the_module(tmp_path: Path) -> None:
    module = Module(skip=3)
    precision = Precision(recipe())
    trainer(tmp_path, TrainerPrecision(precision)).fit(module, loader(8))
    assert precision.prepared.state.step == 7


def test_clipping_by_value_is_of_true_gradients(tmp_path: Path) -> None:
    module = Module()
    precision = Precision(recipe("fp16_scaler"))
    fit = trainer(
        tmp_path,
        TrainerPrecision(precision),
        gradient_clip_val=1e-3,
        gradient_clip_algorithm="value",
        max_steps=3,
    )
    fit.fit(module, loader(8))
    facts = precision.facts()
    assert facts is not None
    assert (
        0 < facts.grad_norm <= 1e-3 * math.sqrt(sum(p.numel() for p in module.parameters())) * 1.001
    )


@pytest.mark.parametrize("manual", [True, False])
def test_a_module_that_clips_in_some_steps_alone(manual: bool, tmp_path: Path) -> None:
    class Warm(Module):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            if len(self.losses) <= 3:
                self.clip_gradients(optimizer, 0.05, "norm")

        def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            super().manual_backward(loss, *args, **kwargs)
            self.configure_gradient_clipping(self.optimizers())

    precision = Precision(recipe())
    model = precision.prepare(mlp())
    optimizer = adamw(model)
    scheduler = StepLR(optimizer, 3, 0.5)
    losses: list[float] = []
    for x, y in loader(8):
        with precision.context():
            loss = nn.functional.mse_loss(model(x).float(), y)
        precision.backward(loss)
        losses.append(loss.item())
        precision.step(optimizer, 0.05 if len(losses) <= 3 else None)
        optimizer.zero_grad()
        scheduler.step()

    module = Warm(manual)
    trainer(tmp_path, TrainerPrecision(Precision(recipe()))).fit(module, loader(8))
    assert module.losses == losses
    assert same_weights(module.net, model)


def test_a_checkpoint_of_the_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def fit(path: str | None, epochs: int) -> tuple[Module, Precision]:
        module, precision = Module(), Precision(recipe())
        saver = ModelCheckpoint(
            tmp_path / "saved", every_n_epochs=1, save_top_k=-1, filename="{step}"
        )
        callbacks = [saver, HarnessCallback(guard=GUARD)]
        plugin = TrainerPrecision(precision)
        runner = trainer(
            tmp_path, plugin, callbacks=callbacks, enable_checkpointing=True, max_epochs=epochs
        )
        runner.fit(module, loader(6), ckpt_path=path)
        return module, precision

    whole, first = fit(None, 2)
    (tmp_path / "saved").rename(tmp_path / "of the first")
    fit(None, 1)
    again, second = fit(str(tmp_path / "saved" / "step=6.ckpt"), 2)
    assert again.losses == whole.losses[6:]
    assert same_weights(again, whole)
    states = first.state_dict()["tensors"], second.state_dict()["tensors"]
    assert all(
        torch.equal(states[0][key], states[1][key]) for key in states[0] if key.startswith("fp8")
    )


def test_a_checkpoint_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    """A validation there may save, without gradients: Lightning's loop goes on from the last step's weights."""

    def fit(path: str | None) -> tuple[Module, Precision]:
        module, precision = Module(), Precision(recipe())
        saver = ModelCheckpoint(
            tmp_path, monitor="val_loss", mode="max", save_top_k=-1, filename="{step}"
        )
        callbacks = [saver, HarnessCallback(guard=GUARD)]
        runner = trainer(
            tmp_path,
            TrainerPrecision(precision),
            callbacks=callbacks,
            enable_checkpointing=True,
            accumulate_grad_batches=4,
            val_check_interval=6,
        )
        runner.fit(module, loader(12), loader(2), ckpt_path=path)
        return module, precision

    _, precision = fit(None)
    assert precision.prepared.state.step == 3
    saved = tmp_path / "step=1.ckpt"
    assert saved.exists(), "six of eight micro-batches of two windows"
    module, precision = fit(str(saved))
    assert 1 < precision.prepared.state.step <= 3
    assert all(map(math.isfinite, module.losses))


def test_guard_and_telemetry_under_the_trainer(tmp_path: Path) -> None:
    """A NaN is skipped, three in a row are rolled back, a layer leaves FP8, and the run folder records it."""
    folder = tmp_path / "run"
    callback = HarnessCallback(folder, guard=GUARD, mlflow=False, fp8_every=1)
    module = Module()
    precision = Precision(recipe(fallback=EAGER))
    runner = trainer(tmp_path, TrainerPrecision(precision), callbacks=[callback])
    runner.fit(module, loader(24, bad=(9, 14, 15, 16)), loader(2))
    told = codes(folder)
    assert told.count("nonfinite.skip") == 4
    assert told.count("guard.rollback") == 1
    assert "precision.demote" in told
    assert callback.watch.guard is not None
    assert callback.watch.guard.step < 24
    found = [row["metrics"] for row in rows(folder) if row["kind"] == "metrics"]
    assert any(key.startswith("fp8_amax/net.") for row in found for key in row)
    assert any("val/loss" in row for row in found)
    assert (folder / "report.html").exists()
    assert math.isfinite(module.losses[-1])


def test_the_run_ends_as_halted_where_nothing_helps(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    callback = HarnessCallback(
        folder, guard={"max_consecutive_skips": 2, "snapshot_every": 0}, mlflow=False
    )
    runner = trainer(tmp_path, TrainerPrecision(Precision(recipe())), callbacks=[callback])
    with pytest.raises(HaltedError):
        runner.fit(Module(), loader(12, bad=(3, 4, 5, 6)))
    assert '"halted"' in (folder / "outcome.json").read_text(encoding="utf-8")


def test_what_is_wired_wrongly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="no TrainerPrecision"):
        trainer(tmp_path, callbacks=[HarnessCallback()]).fit(Module(), loader(2))
    precision = Precision(recipe())
    precision.prepare(mlp())
    with pytest.raises(MisuseError, match="prepared for another model"):
        trainer(tmp_path, TrainerPrecision(precision)).fit(Module(), loader(2))


@pytest.mark.parametrize("name", RUNGS)
def test_fabric_gives_the_plain_loops_losses(name: str) -> None:
    expected, reference = plain(recipe(name), 8, clip=0.1)
    precision = Precision(recipe(name))
    fabric = Fabric(
        accelerator="cpu", devices=1, plugins=[FabricPrecision(precision, max_grad_norm=0.1)]
    )
    bare = mlp()
    inner = adamw(bare)
    model, optimizer = fabric.setup(bare, inner)
    scheduler = StepLR(inner, 3, 0.5)
    losses = []
    for x, y in loader(8):
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    assert losses == expected
    assert same_weights(bare, reference)


def test_fabric_clips_true_gradients() -> None:
    precision = Precision(recipe("fp16_scaler"))
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[FabricPrecision(precision)])
    model, optimizer = fabric.setup(*(lambda net: (net, adamw(net)))(mlp()))
    for x, y in loader(3):
        fabric.backward(nn.functional.mse_loss(model(x), y))
        norm = fabric.clip_gradients(model, optimizer, max_norm=1e-3)
        optimizer.step()
        optimizer.zero_grad()
        facts = precision.facts()
        assert facts is not None
        assert norm is not None
        assert 1e-3 < norm.item() < 10
        assert facts.grad_norm == pytest.approx(1e-3, rel=1e-2)


def test_the_version_that_this_was_written_for() -> None:
    assert lightning.__version__.startswith("2.6.")
