"""`layers.fuse` on TE's own Python: norm, two Linears and the SwiGLU between as one te.LayerNormMLP.

Against an oracle in float64 that rounds where the block says it rounds, against norm and first layer fused alone, and
against all apart. What differs is what docs/guide/scaling.md names: SwiGLU's output is not rounded before its cast,
and its gradient is rounded once.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from te_cpu_support import WIDTH, Trainer, disagreements, equal, inputs
from te_fused_support import (
    BF16,
    CLOSE,
    TIME,
    VOCAB,
    FeedForward,
    Training,
    Window,
    after_a_window,
    gradients,
    plain,
    te,
    tiny,
    trained,
    training,
    window,
    without_mlp,
)
from torch import Tensor, nn

from harness.models.gpt import GPT
from harness.precision import scaling

ROLES = ("input", "weight", "grad_output")


def slots(trainer: Trainer, row: str) -> dict[str, float]:
    stats = trainer.precision.stats()
    assert stats is not None
    return dict(zip(stats.names, trainer.log[-1][row].tolist(), strict=True))


@pytest.mark.every_version
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
def test_every_output_gradient_and_amax_is_the_oracles(
    kind: type[Any], bias: bool, calls: list[int]
) -> None:
    trainer = after_a_window(lambda: FeedForward(kind, bias))
    assert not calls, "the first step's casts are sampled"
    names = [f"{layer}.{role}" for layer in ("gate_up", "down") for role in ROLES]
    scale = dict(zip(names, trainer.precision.state_dict()["tensors"]["fp8.scale"], strict=True))
    found = window(trainer, inputs(1, 32))
    assert len(calls) == 1
    trainer.step()
    amax: dict[str, float] = {}

    def cast(x: Tensor, slot: str) -> Tensor:
        amax[slot] = x.abs().max().item()
        fmt = "e5m2" if slot.endswith("grad_output") else "e4m3"
        return (
            scaling.quantize(x.detach().float(), scale[slot], fmt).double() / scale[slot].double()
        )

    def rounded(x: Tensor) -> Tensor:
        return x.detach().bfloat16().double().requires_grad_()

    model: Any = trainer.model
    x, weight = rounded(inputs(1, 32)), rounded(model.norm.weight)
    biases = [
        rounded(layer.bias) if bias else torch.zeros(()) for layer in (model.gate_up, model.down)
    ]
    shift = rounded(model.norm.bias) if kind is nn.LayerNorm else None
    if shift is None:
        normed = F.rms_norm(x, (WIDTH,), weight, 1e-3)
    else:
        normed = F.layer_norm(x, (WIDTH,), weight, shift, 1e-3)
    normed_8 = cast(normed, "gate_up.input")
    first_8, second_8 = (
        cast(model.gate_up.weight, "gate_up.weight"),
        cast(model.down.weight, "down.weight"),
    )
    hidden = rounded(normed_8 @ first_8.t() + biases[0])
    gate, up = hidden.chunk(2, dim=-1)
    gated = F.silu(gate) * up
    gated_8 = cast(gated, "down.input")
    out = gated_8 @ second_8.t() + biases[1]
    grad = rounded(inputs(3, 32))
    grad_8 = cast(grad, "down.grad_output")
    gated.backward(rounded(grad_8 @ second_8))
    assert hidden.grad is not None
    inner = rounded(hidden.grad)
    inner_8 = cast(inner, "gate_up.grad_output")
    normed.backward(rounded(inner_8 @ first_8))
    expected = [out, x.grad, weight.grad, *([] if shift is None else [shift.grad])]
    for weight_grad, ends in ((inner_8.t() @ normed_8, inner), (grad_8.t() @ gated_8, grad)):
        expected += [weight_grad, *([ends.sum(0)] if bias else [])]
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs is not None
        assert (ours.double() - theirs).norm() <= BF16 * theirs.norm() > 0
    assert slots(trainer, "amax") == {name: pytest.approx(amax[name], rel=BF16) for name in names}
    assert slots(trainer, "amax")["down.input"] == pytest.approx(amax["down.input"], rel=1e-5)


def test_it_differs_from_norm_and_first_layer_by_the_named_roundings(calls: list[int]) -> None:
    amaxes, outs = [], []
    for make in (FeedForward, without_mlp(FeedForward)):
        trainer = after_a_window(make)
        outs.append(window(trainer, inputs(1, 32)))
        trainer.step()
        amaxes.append(slots(trainer, "amax"))
    assert len(calls) == 1
    one, other = amaxes
    for slot in ("gate_up.input", "gate_up.weight", "down.weight", "down.grad_output"):
        assert one[slot] == other[slot]
    # Two roundings to bf16 less: of silu and of the product; of the gradient, of silu's and of the product's.
    for slot in ("down.input", "gate_up.grad_output"):
        assert one[slot] == pytest.approx(other[slot], rel=1.1 * BF16)
    assert one["down.input"] != other["down.input"]
    for ours, theirs in zip(*outs, strict=True):
        assert (ours - theirs).norm() <= CLOSE * theirs.norm()


@pytest.mark.parametrize("shape", [(32, WIDTH), (5, WIDTH), (2, 24, WIDTH)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
def test_outputs_and_all_gradients_are_those_of_all_apart(
    kind: type[Any], bias: bool, shape: tuple[int, ...], calls: list[int]
) -> None:
    x = inputs(1, math.prod(shape[:-1])).reshape(shape)
    _, fused = gradients(lambda: FeedForward(kind, bias), True, x)
    # Rows that are filled up would have a bias in them.
    assert len(calls) == (0 if shape[0] == 5 and (bias or kind is nn.LayerNorm) else 1)
    _, apart = gradients(lambda: FeedForward(kind, bias), False, x)
    assert len(fused) == len(apart) == 5 + 2 * bias + (kind is nn.LayerNorm)
    for ours, theirs in zip(fused, apart, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= CLOSE * theirs.norm() > 0


def test_a_sampled_step_has_the_bits_of_the_unfused_mlp_the_next_has_not(calls: list[int]) -> None:
    logs = [trained(make=make, steps=2).log for make in (tiny, without_mlp(tiny))]
    assert not logs[0][0]["sqnr_db"].isnan().any()
    assert disagreements(logs[0][:1], logs[1][:1]) == []
    assert disagreements(logs[0], logs[1]) != []
    assert len(calls) == 2 * 2, "two blocks, in the two micro-batches of the second step"


@pytest.mark.parametrize("layer", ["gate_up", "down"])
def test_a_demoted_layer_takes_the_mlp_apart_and_returns(layer: str, calls: list[int]) -> None:
    counts, logs = [], []
    for make in (FeedForward, without_mlp(FeedForward)):
        trainer = after_a_window(make)
        for number in range(5):
            if number == 1:
                trainer.precision.demote(layer)
            if number == 3:
                trainer.precision.promote(layer)
            del calls[:]
            window(trainer, inputs(number, 32))
            counts.append(len(calls))
            trainer.step()
        logs.append(trainer.log)
    # Every other step is sampled.
    assert counts == [1, 0, 0, 0, 1] + 5 * [0]
    assert [bool(entry["demoted"]) for entry in logs[0]] == [False, False, True, True, False, False]
    assert (logs[0][2]["amax"] > 0).all(), "it goes on being measured in BF16"


def test_both_layers_demoted_compute_bit_for_bit_as_without_fuse() -> None:
    found = []
    for fuse in (True, False):
        trainer = Trainer("transformer_engine", FeedForward, {"layers": {"fuse": fuse}}, lr=0.0)
        trainer.precision.demote("gate_up")
        trainer.precision.demote("down")
        found.append([*window(trainer, inputs(1, 32))])
        trainer.step()
        found[-1] += [trainer.log[0][name] for name in ("amax", "fp8.history", "fp8.scale")]
    assert all(map(equal, *found))


def test_parameters_that_were_replaced_are_used(calls: list[int]) -> None:
    """As FSDP replaces them."""
    trainer = after_a_window()
    model: Any = trainer.model
    first = window(trainer, inputs(1, 32))[0]
    for module in (model.norm, model.gate_up, model.down):
        module.weight = nn.Parameter(module.weight.detach() / 2)
    trainer.precision.drop_window()  # its gradients are gone with the parameters
    second = window(trainer, inputs(1, 32))
    assert len(calls) == 2
    assert not torch.equal(first, second[0])
    assert len(second) == 5


def test_frozen_parts_get_no_gradient_and_a_frozen_input_fuses_nothing(calls: list[int]) -> None:
    for frozen in ("norm", "gate_up", "down"):
        del calls[:]

        def make(name: str = frozen) -> FeedForward:
            made = FeedForward()
            made.get_submodule(name).requires_grad_(False)
            return made

        _, found = gradients(make, True, inputs(1, 32))
        assert len(calls) == 1
        _, apart = gradients(make, False, inputs(1, 32))
        assert len(found) == len(apart) == 4
        for ours, theirs in zip(found, apart, strict=True):
            assert (ours - theirs).norm() <= CLOSE * theirs.norm()
    del calls[:]
    trainer = after_a_window()
    trainer.model.get_parameter("norm.weight").requires_grad_(False)
    with trainer.precision.context():
        loss = trainer.model(inputs(1, 32)).square().mean()
    trainer.precision.backward(loss)
    assert not calls
    assert trainer.model.get_parameter("gate_up.weight").grad is not None


class AgainWithTe(GPT):
    """Each block is computed again in backward, by te.checkpoint."""

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        for block in self.blocks:
            if "own" not in vars(block):
                block.own = block.forward  # type: ignore[assignment]
                block.forward = partial(te.checkpoint, block.own, use_reentrant=False)
        return super().forward(inputs, targets)


def dropped_first(trainer: Trainer, number: int) -> None:
    """A loss that no backward follows comes before the others."""
    trainer.loss(200 + number)  # type: ignore[arg-type]
    plain(trainer, number)


def dropped_last(trainer: Trainer, number: int) -> None:
    plain(trainer, number)
    trainer.loss(200 + number)  # type: ignore[arg-type]


@pytest.mark.every_version
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("dropped", [dropped_first, dropped_last])
def test_what_te_checkpoint_keeps_for_a_dropped_loss_is_not_used_again(
    dropped: Window, fuse: bool, calls: list[int]
) -> None:
    def make() -> nn.Module:
        made = tiny()
        made.__class__ = AgainWithTe
        return made

    again = trained(fuse, dropped, make)
    assert len(calls) > 6 or not fuse
    assert disagreements(trained(fuse, dropped).log, again.log) == []


def test_a_deep_copy_is_fused_by_itself_and_leaves_no_trace(calls: list[int]) -> None:
    trainer: Training = trained(steps=1)
    x = torch.randint(0, VOCAB, (2, TIME))
    other = copy.deepcopy(trainer.model)
    before = trainer.precision.state_dict()["tensors"]
    with torch.no_grad(), trainer.precision.context():
        assert torch.equal(trainer.model(x), other(x))
    assert len(calls) == 4
    down: list[Any] = [model.get_submodule("blocks.0.mlp.down") for model in (trainer.model, other)]
    mine, theirs = down
    assert mine.fused is not theirs.fused
    assert theirs.fused.fc1_weight is other.get_parameter("blocks.0.mlp.gate_up.weight")
    after = trainer.precision.state_dict()["tensors"]
    assert all(equal(before[name], after[name]) for name in before)


def test_a_checkpoint_resumes_fused_bit_for_bit_and_unfused_nearly(calls: list[int]) -> None:
    saved = trained(steps=3)
    state = copy.deepcopy(
        (saved.model.state_dict(), saved.precision.state_dict(), saved.optimizer.state_dict())
    )
    losses: list[float] = []
    for fuse in (True, False):
        loaded = training(fuse)
        loaded.model.load_state_dict(state[0])
        loaded.precision.load_state_dict(state[1])
        loaded.optimizer.load_state_dict(state[2])
        del calls[:]
        losses.append(loaded.loss(77).item())  # type: ignore[arg-type]
        assert len(calls) == (2 if fuse else 0)
    assert losses[0] == saved.loss(77).item()  # type: ignore[arg-type]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
