"""Several models, several ranks: TE's own state is one for the whole process, the harness' is not."""

from __future__ import annotations

import copy
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    # Run as a script, this file is one rank.
    sys.path.insert(0, str(HERE))
    import os

    import te_install
    import te_wheels

    te_install.install(te_wheels.unpacked(os.environ.get("TE_VERSION", te_wheels.NEWEST)))
    te_install.as_on_a_card()

from te_cpu_support import BACKENDS, MLP, WIDTH, Trainer, disagreements, equal, inputs, moved, plain  # noqa: E402

from tests.support.ranks import run_ranks  # noqa: E402


def alone(backend: str, steps: int = 6) -> list[dict[str, Any]]:
    trainer = Trainer(backend)
    for number in range(steps):
        plain(trainer, number)
        trainer.step()
    return trainer.log


@pytest.mark.every_version
def test_models_that_train_in_turns_know_nothing_of_each_other() -> None:
    """One has a window of other data between the forward and the backward of the other."""
    one, other = (Trainer("transformer_engine") for _ in range(2))
    for number in range(6):
        losses = [one.loss(inputs(2 * number), 0.5)]
        other.precision.backward(other.loss(1000 * inputs(50 + number)))
        one.precision.backward(losses[0])
        other.step()
        one.precision.backward(one.loss(inputs(2 * number + 1), 0.5))
        one.step()
    assert disagreements(one.log, alone("transformer_engine")) == []
    assert disagreements(one.log, alone("native")) == []
    assert all(moved(other.log))


def adversaries(backend: str) -> list[list[dict[str, Any]]]:
    """A generator is trained through a critic, which has a step of its own: the backward of one goes through both."""
    maker, critic = (Trainer(backend) for _ in range(2))
    for number in range(6):
        with maker.precision.context(), critic.precision.context():
            loss = critic.model(maker.model(inputs(number))).float().square().mean()
        maker.precision.backward(loss)
        maker.step()
        critic.model.zero_grad()
        with torch.no_grad(), maker.precision.context():
            made = maker.model(inputs(number)).float()
        critic.precision.backward(critic.loss(made + inputs(100 + number)))
        critic.step()
    return [maker.log, critic.log]


def test_a_backward_through_two_models_gives_each_its_own() -> None:
    for native, ours in zip(adversaries("native"), adversaries("transformer_engine"), strict=True):
        assert disagreements(native, ours) == []
        assert all(moved(ours))


def test_a_deep_copy_teaches_without_a_trace() -> None:
    def taught(backend: str) -> list[dict[str, Any]]:
        trainer = Trainer(backend)
        teacher = copy.deepcopy(trainer.model)
        for number in range(6):
            x = inputs(number)
            with trainer.precision.context():
                with torch.no_grad():
                    target = teacher(10 * x).float()
                loss = nn.functional.mse_loss(trainer.model(x).float(), target)
            trainer.precision.backward(loss)
            trainer.step()
        return trainer.log

    assert disagreements(taught("native"), taught("transformer_engine")) == []


def teacher_of_its_own(backend: str) -> list[list[dict[str, Any]]]:
    """Two models with other recipes: called in each other's contexts, and with their own inside."""
    student = Trainer(backend)
    teacher = Trainer(
        backend, sections={"fp8": {"format": "e4m3", "amax_history_len": 8, "margin": 1}}
    )
    for number in range(6):
        x = inputs(number)
        with student.precision.context():
            bf16 = teacher.model(10 * x).float()  # its own context is not entered: plain
            with torch.no_grad(), teacher.precision.context():
                fp8 = teacher.model(x).float()
            with teacher.precision.context():
                made = student.model(x).float()  # the inner context is of another recipe
            loss = nn.functional.mse_loss(made, bf16.detach() + fp8)
        student.precision.backward(loss)
        student.step()
        plain(teacher, number)
        teacher.step()
    return [student.log, teacher.log]


def test_a_layer_goes_by_the_context_of_its_own_model_alone() -> None:
    for native, ours in zip(
        teacher_of_its_own("native"), teacher_of_its_own("transformer_engine"), strict=True
    ):
        assert disagreements(native, ours) == []


class Experts(nn.Module):
    """Two layers, each used in every step; ranks use them in another order if told so."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.order = (1, 0) if turned else (0, 1)

    def forward(self, x: Tensor) -> Tensor:
        mixed = {expert: self.experts[expert]((1, 50)[expert] * x) for expert in self.order}
        return self.out(torch.tanh(mixed[0] + mixed[1]))


def on_ranks(backend: str, rank: int, turned: bool, exchange_once: bool) -> list[dict[str, Any]]:
    """Four windows of two micro-batches under DDP; in the third the last rank's loss is NaN. exchange_once: ranks
    exchange gradients in the last micro-batch only."""
    trainer = Trainer(backend, lambda: Experts(turned and rank == 1))
    own = trainer.model
    wrapped = DistributedDataParallel(own)
    for number in range(4):
        for half in range(2):
            with wrapped.no_sync() if exchange_once and half == 0 else nullcontext():
                trainer.model = wrapped
                loss = trainer.loss((1 + rank) * inputs(100 * rank + 2 * number + half), 0.5)
                trainer.model = own
                trainer.precision.backward(loss + torch.nan if number == 2 and rank == 1 else loss)
        trainer.step()
    return trainer.log


CASES = {
    "same order": (False, False),
    "another order": (True, False),
    "gradients exchanged once": (False, True),
}


def rank_main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, told = dist.get_rank(), {}
    for name, (turned, once) in CASES.items():
        native, ours = (on_ranks(backend, rank, turned, once) for backend in BACKENDS)
        state = torch.cat([ours[-1]["fp8.history"].flatten(), ours[-1]["fp8.scale"]])
        everywhere = [torch.zeros_like(state) for _ in range(2)]
        dist.all_gather(everywhere, state)
        told[name] = {
            "disagreements": disagreements(native, ours),
            "alike": equal(*everywhere),
            "applied": [entry["applied"] for entry in ours],
            "moved": all(moved(ours)),
        }
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(told))


@pytest.mark.dist
@pytest.mark.every_version
def test_ranks_agree_with_native_in_whatever_order_they_use_layers(tmp_path: Path) -> None:
    for told in run_ranks(__file__, tmp_path, 2):
        for name, found in told.items():
            assert found == {
                "disagreements": [],
                "alike": True,
                "applied": [True, True, False, True],
                "moved": True,
            }, name


def test_models_with_biases_differ_in_bias_gradients_by_bf16_rounding() -> None:
    """TE adds them up in FP32 and returns them in the gradient's dtype, BF16; native keeps FP32."""
    gradients: list[dict[str, Tensor]] = []
    for backend in BACKENDS:
        trainer = Trainer(backend, lambda: MLP(bias=True))
        plain(trainer, 0)
        trainer.precision.backward(trainer.loss(inputs(7), 0.5))
        trainer.model.zero_grad()
        trainer.precision.drop_window()
        trainer.precision.backward(trainer.loss(inputs(8), 0.5))
        gradients.append(
            {
                name: p.grad.clone()
                for name, p in trainer.model.named_parameters()
                if p.grad is not None
            }
        )
    native, ours = gradients
    for name, gradient in native.items():
        if name.endswith("bias"):
            assert not torch.equal(gradient, ours[name]), (
                "this difference is gone: take it out of the docs"
            )
            assert torch.equal(gradient.bfloat16().float(), ours[name]), name
        else:
            assert torch.equal(gradient, ours[name]), name


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
