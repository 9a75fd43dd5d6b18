"""Hugging Face's Trainer, the real one: the plain loop's losses, guard and telemetry, resume, evaluation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from loop_support import EAGER, codes, recipe, rows, same_weights
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainingArguments

from harness import Precision
from harness.core.errors import HaltedError, MisuseError
from harness.integrations.transformers import PrecisionMixin
from harness.integrations.watch import Watch
from harness.precision.recipe import Recipe

RUNGS = ["fp8_hybrid", "bf16", "fp16_scaler", "fp32"]
GUARD = {"max_consecutive_skips": 2, "snapshot_every": 4, "healthy_steps": 2}
CONTEXT, BATCH = 16, 4


class Tokens(Dataset[dict[str, Tensor]]):
    """Countable sequences. poisoned: samples with this attention mask of NaN, which spoil the loss."""

    def __init__(self, batches: int) -> None:
        generator = torch.Generator().manual_seed(3)
        starts = torch.randint(0, 64, (batches * BATCH, 1), generator=generator)
        self.ids = (starts + torch.arange(CONTEXT)) % 64

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class InOrder:
    """Keeps the losses, and the data in order. poison: forwards whose loss is NaN."""

    losses: list[float]
    poison: tuple[int, ...] = ()

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return SequentialSampler(getattr(self, "train_dataset"))  # noqa: B009

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found: Any = super().compute_loss(model, inputs, *args, **kwargs)  # pyright: ignore
        if torch.is_grad_enabled():
            found = found * math.nan if len(self.losses) in self.poison else found
            self.losses.append(found.item())
        return found


class Ours(InOrder, PrecisionMixin, Trainer):
    pass


class Plain(InOrder, Trainer):
    pass


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=BATCH, learning_rate=1e-2, report_to=[],
        disable_tqdm=True, **{"save_strategy": "no", "num_train_epochs": 1, "logging_steps": 1, **more},
    )  # fmt: skip


def ours(
    policy: Recipe, folder: Path, batches: int, watch: Watch | None = None, **more: Any
) -> Ours:
    given = {key: more.pop(key) for key in ("eval_dataset",) if key in more}
    trainer = Ours(
        llama(), arguments(folder, **more), train_dataset=Tokens(batches), precision=Precision(policy), watch=watch,
        **given,
    )  # fmt: skip
    trainer.losses = []
    return trainer


def explicit(
    policy: Recipe, folder: Path, batches: int, **more: Any
) -> tuple[list[float], list[float], nn.Module]:
    """The same run by hand: optimizer, scheduler and data are the plain Trainer's."""
    precision = Precision(policy)
    model = precision.prepare(llama())
    plain = Plain(model, arguments(folder, **more), train_dataset=Tokens(batches))
    optimizer = plain.create_optimizer()
    accumulate = plain.args.gradient_accumulation_steps
    scheduler = plain.create_scheduler(batches // accumulate)
    losses, norms = [], []
    window = list(plain.get_train_dataloader())
    model.train()
    for first in range(0, batches, accumulate):
        chosen = window[first : first + accumulate]
        items = sum((batch["labels"][..., 1:] != -100).sum() for batch in chosen)
        for batch in chosen:
            with precision.context():
                loss = model(**batch, num_items_in_batch=items).loss
            precision.backward(loss)
            losses.append(loss.item())
        norms.append(precision.step(optimizer, plain.args.max_grad_norm).grad_norm.item())
        optimizer.zero_grad()
        scheduler.step()
    return losses, norms, model


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", RUNGS)
def test_the_trainer_gives_the_plain_loops_losses(
    name: str, accumulate: int, tmp_path: Path
) -> None:
    more = {"gradient_accumulation_steps": accumulate, "max_grad_norm": 0.5}
    expected, norms, model = explicit(recipe(name), tmp_path, 8, **more)
    trainer = ours(recipe(name), tmp_path, 8, **more)
    trainer.train()
    assert trainer.losses == expected
    assert same_weights(trainer.model, model)
    assert max(norms) > 0.5, "the clip was in use"
    logged = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert logged == pytest.approx(norms, rel=1e-4)
    assert trainer.harness.prepared.state.step == 8 // accumulate


def test_a_checkpoint_of_the_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def run(folder: str, **more: Any) -> Ours:
        return ours(
            recipe(),
            tmp_path / folder,
            10,
            Watch(None, GUARD),
            save_strategy="steps",
            save_steps=4,
            **more,
        )

    whole = run("whole")
    whole.train()
    again = run("again")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert again.losses == whole.losses[4:]
    assert same_weights(again.model, whole.model)
    (tmp_path / "whole" / "checkpoint-4" / "harness_precision.pt").unlink()
    with pytest.raises(MisuseError, match="scales would start from nothing"):
        run("third").train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))


@pytest.mark.parametrize("moment", ["on_pre_optimizer_step", "on_step_end"])
def test_a_callback_may_save_before_the_step_and_at_its_end(moment: str, tmp_path: Path) -> None:
    """As transformers' own callback does for enable_jit_checkpoint, after a SIGTERM."""

    class Saves(transformers.TrainerCallback):
        trainer: Ours

        def save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                self.trainer._save_checkpoint(self.trainer.model, trial=None)
                control.should_training_stop = True

    setattr(Saves, moment, Saves.save)

    def run(folder: str, **more: Any) -> Ours:
        accumulate = {"gradient_accumulation_steps": 2, **more}
        return ours(recipe(), tmp_path / folder, 8, Watch(None, GUARD), **accumulate)

    whole = run("whole")
    whole.train()
    first = run("first")
    saves = Saves()
    saves.trainer = first
    first.add_callback(saves)
    first.train()
    again = run("again")
    again.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert again.losses == whole.losses[4:]
    assert same_weights(again.model, whole.model)


def test_guard_and_telemetry_under_the_trainer(tmp_path: Path) -> None:
    """A NaN is skipped, three in a row are rolled back, a layer leaves FP8, and the run folder records it."""
    folder = tmp_path / "run"
    watch = Watch(folder, GUARD, mlflow=False, fp8_every=1)
    more = {"eval_strategy": "steps", "eval_steps": 12, "eval_dataset": Tokens(2)}
    trainer = ours(recipe(fallback=EAGER), tmp_path, 24, watch, **more)
    trainer.poison = (9, 14, 15, 16)
    trainer.train()
    told = codes(folder)
    assert told.count("nonfinite.skip") == 4
    assert told.count("guard.rollback") == 1
    assert "precision.demote" in told
    found = [row["metrics"] for row in rows(folder) if row["kind"] == "metrics"]
    assert any(key.startswith("fp8_amax/model.layers.") for row in found for key in row)
    assert any("val/loss" in row for row in found)
    assert (folder / "report.html").exists()
    assert math.isfinite(trainer.losses[-1])
    assert trainer.state.global_step == 24
    assert watch.guard is not None
    assert watch.guard.step < 24


def test_the_run_ends_as_halted_where_nothing_helps(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    watch = Watch(folder, {"max_consecutive_skips": 2, "snapshot_every": 0}, mlflow=False)
    trainer = ours(recipe(), tmp_path, 12, watch)
    trainer.poison = (3, 4, 5, 6)
    with pytest.raises(HaltedError):
        trainer.train()
    assert '"halted"' in (folder / "outcome.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("before", [True, False])
def test_an_evaluation_runs_as_planned_and_leaves_no_trace(before: bool, tmp_path: Path) -> None:
    trainer = ours(recipe(), tmp_path, 4, eval_dataset=Tokens(2))
    if not before:
        trainer.train()
    state = trainer.harness.state_dict()
    found = trainer.evaluate()["eval_loss"]
    after = trainer.harness.state_dict()
    pairs = [
        (value.nan_to_num(-7.5), after["tensors"][key].nan_to_num(-7.5))
        for key, value in state["tensors"].items()
    ]
    assert all(torch.equal(old, new) for old, new in pairs)
    with trainer.harness.evaluating():
        batch = {"input_ids": Tokens(2).ids, "labels": Tokens(2).ids}
        assert trainer.model is not None
        assert found == pytest.approx(trainer.model(**batch).loss.item(), rel=0.02)
    trainer.train()


def test_training_goes_on_where_the_first_call_ended(tmp_path: Path) -> None:
    trainer = ours(recipe(), tmp_path, 4)
    trainer.train()
    trainer.train()
    assert trainer.harness.prepared.state.step == 8


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"bf16": True}, "bf16 is set"),
        ({"torch_compile": True}, "compile"),
        ({"bf16_full_eval": True}, "bf16_full_eval is set[\\s\\S]*after training"),
    ],
)
def test_what_would_change_the_precision_besides_is_refused(
    setting: dict[str, bool], told: str, tmp_path: Path
) -> None:
    with pytest.raises(MisuseError, match=told):
        ours(recipe(), tmp_path, 4, **setting)


def test_a_model_that_training_would_replace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="model_init is given"):
        Ours(model_init=llama, args=arguments(tmp_path), precision=Precision(recipe()))


def test_a_window_that_runs_out_of_memory_is_dropped_with_its_gradients(tmp_path: Path) -> None:
    class Large(Ours):
        calls = 0

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

    settings = arguments(tmp_path, auto_find_batch_size=True, gradient_accumulation_steps=2)
    trainer = Large(llama(), settings, train_dataset=Tokens(8), precision=Precision(recipe()))
    trainer.losses = []
    trainer.train()
    assert trainer.harness.prepared.state.step == trainer.state.global_step > 0


def test_the_version_that_this_was_written_for() -> None:
    assert transformers.__version__.startswith("5.")


def test_a_saved_model_is_read_by_transformers_alone(tmp_path: Path) -> None:
    """As docs/guide/integrations.md says: the tensors of the model, and nothing of the harness."""
    trainer = ours(recipe("fp8_hybrid"), tmp_path / "run", 2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32
    )
    assert trainer.model is not None
    trained = trainer.model.state_dict()
    assert trained.keys() == read.state_dict().keys()
    assert all(torch.equal(value, trained[name]) for name, value in read.state_dict().items())
