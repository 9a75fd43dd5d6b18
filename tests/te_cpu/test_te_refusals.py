"""What Transformer Engine cannot do under harness.Precision is refused by name, before it is done wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from te_cpu_support import Trainer, inputs, plain

from harness.core.errors import CheckpointError, MachineError, MisuseError
from harness.precision.backends import te_library


def test_a_loss_used_twice_is_refused_and_the_step_after_it_is_sound() -> None:
    trainer = Trainer("transformer_engine")
    with trainer.precision.context():
        x = inputs(0).requires_grad_()
        loss = trainer.model(x).float().square().mean()
        torch.autograd.grad(loss, x, retain_graph=True)
    with pytest.raises(MisuseError, match="one backward for each forward"):
        trainer.precision.backward(loss)
    plain(trainer, 1)
    trainer.step()
    assert trainer.log[0]["applied"]


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"fp8": {"amax_history_len": 8}}, "history length 8, this run has 4"),
        ({"fp8": {"format": "e4m3"}}, "a.grad_output in e4m3, this run has e5m2"),
        (
            {"layers": {"exclude": ["a"]}},
            "3 slots, this run has 6 (a.grad_output is in one of them only)",
        ),
    ],
)
def test_a_state_of_another_run_is_refused_with_what_differs(
    sections: dict[str, dict[str, object]], told: str
) -> None:
    other, trainer = Trainer("transformer_engine", sections=sections), Trainer("transformer_engine")
    plain(other, 0)
    other.step()
    with pytest.raises(CheckpointError) as caught:
        trainer.precision.load_state_dict(other.precision.state_dict())
    assert told in str(caught.value)


def test_some_other_transformer_engine_is_refused_by_what_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that rolls what it was told to leave alone, and one that drops an argument of its recipe."""
    library = te_library.load()

    def rolls(fp8_meta: dict[str, Any]) -> None:
        library.manager.quantization_state.global_amax_buffer.setdefault(
            "forward_other", []
        ).append(fp8_meta)

    with monkeypatch.context() as patch:
        patch.setattr(library.manager, "add_fp8_tensors_to_global_buffer", rolls)
        with pytest.raises(
            MachineError, match=f"{library.version} rolls amax histories of modules"
        ):
            Trainer("transformer_engine")
        del library.manager.quantization_state.global_amax_buffer["forward_other"]
    drops = dataclasses.make_dataclass("DelayedScaling", [("fp8_format", Any), ("margin", int, 0)])
    monkeypatch.setattr(
        library.recipes, "DelayedScaling", lambda **given: drops(given["fp8_format"])
    )
    with pytest.raises(
        MachineError,
        match="ignores amax_history_len, amax_compute_algo, reduce_amax of DelayedScaling",
    ):
        Trainer("transformer_engine")


@pytest.mark.every_version
def test_a_state_continues_bit_for_bit() -> None:
    def windows(trainer: Trainer, numbers: range) -> None:
        for number in numbers:
            if number == 2:
                trainer.precision.demote("a")
            plain(trainer, number)
            trainer.step()

    straight, first, second = (Trainer("transformer_engine") for _ in range(3))
    windows(straight, range(6))
    windows(first, range(3))
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.precision.load_state_dict(first.precision.state_dict())
    assert second.precision.demoted == ("a",)
    windows(second, range(3, 6))
    for name, value in straight.tensors().items():
        assert torch.equal(second.tensors()[name], value), name
