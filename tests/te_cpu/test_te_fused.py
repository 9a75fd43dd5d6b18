"""`layers.fuse` on TE's own Python: a norm and its Linear as one te.LayerNormLinear, against both apart.

They round differently, by what docs/guide/scaling.md names: the norm's input and weight are rounded to bf16 before
it, its output is not rounded before the cast, and its gradients are rounded to bf16.
"""

from __future__ import annotations

import copy
import io
import math
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from te_cpu_support import WIDTH, Trainer, disagreements, equal, inputs, moved
from te_fused_support import (
    BF16,
    NORMED,
    TIME,
    VOCAB,
    Pair,
    blocks,
    gradients,
    plain,
    te,
    tiny,
    trained,
    training,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.models.gpt import GPT
from harness.replay.origin import watch


def test_a_fused_gpt_trains_as_the_same_apart() -> None:
    fused, apart = trained(), trained(fuse=False)
    assert blocks(fused.model) == NORMED
    assert blocks(apart.model) == set()
    assert (
        list(fused.model.state_dict())
        == list(apart.model.state_dict())
        == list(tiny().state_dict())
    )
    assert [name for name, _ in fused.model.named_parameters()] == [
        name for name, _ in tiny().named_parameters()
    ]
    ours, theirs = fused.precision.stats(), apart.precision.stats()
    assert ours is not None
    assert theirs is not None
    assert ours.names == theirs.names
    assert all(moved(fused.log))
    for one, other in zip(fused.log, apart.log, strict=True):
        assert abs(one["norm"] / other["norm"] - 1) < 0.01
        assert ((one["sqnr_db"] - other["sqnr_db"]).abs().nan_to_num() < 4).all()
    # Before the first update the weights are the same: one bf16 ulp lies between the amaxes of the norms' outputs.
    names = list(ours.names)
    for layer in sorted(NORMED):
        slot = names.index(layer.replace("blocks.", "blocks.0") + ".input")
        amaxes = [trainer.log[0]["amax"][slot].item() for trainer in (fused, apart)]
        assert amaxes[0] == pytest.approx(amaxes[1], rel=2 * BF16)
        assert amaxes[0] != amaxes[1]
    for number in range(6):
        losses = [trainer.loss(100 + number).item() for trainer in (fused, apart)]
        assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    once = [trained(fuse, steps=1) for fuse in (True, False)]
    for (name, one), other in zip(
        once[0].model.named_parameters(), once[1].model.parameters(), strict=True
    ):
        grads = [
            trainer.optimizer.state[p]["exp_avg"]
            for trainer, p in zip(once, (one, other), strict=True)
        ]
        assert (grads[0] - grads[1]).norm() <= 0.1 * grads[1].norm() > 0, name


@pytest.mark.parametrize(
    "shape",
    [pytest.param(two, marks=pytest.mark.every_version) for two in ((32, WIDTH), (5, WIDTH))]
    + [(2, 24, WIDTH)],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
def test_outputs_and_all_gradients_are_those_of_both_apart(
    kind: type[Any], bias: bool, shape: tuple[int, ...]
) -> None:
    x = inputs(1, math.prod(shape[:-1])).reshape(shape)
    trainer, fused = gradients(lambda: Pair(kind, bias), True, x)
    # A LayerNorm of a number of tokens that TE does not take runs apart: its bias would be in the rows filled up.
    assert blocks(trainer.model) == (
        set() if kind is nn.LayerNorm and shape[0] == 5 else {"linear"}
    )
    _, apart = gradients(lambda: Pair(kind, bias), False, x)
    assert len(fused) == len(apart) == 4 + bias + (kind is nn.LayerNorm)
    for ours, theirs in zip(fused, apart, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= 0.03 * theirs.norm()


def demoted(trainer: Trainer, number: int) -> None:
    """One layer is in BF16 in steps 2 and 3."""
    if number == 2:
        trainer.precision.demote("blocks.0.attn.qkv")
    if number == 4:
        trainer.precision.promote("blocks.0.attn.qkv")
    plain(trainer, number)


def test_a_demoted_layer_runs_apart_and_returns_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    real = te.LayerNormLinear.forward
    monkeypatch.setattr(
        te.LayerNormLinear,
        "forward",
        lambda block, *args: (ran.append(block), real(block, *args))[1],
    )
    made = training()
    model: Any = made.model
    layer = model.blocks[0].attn.qkv
    counts: list[int] = []
    for number in range(6):
        demoted(made, number)
        made.step()
        counts.append(ran.count(layer.fused))
        ran.clear()
    assert counts == [2, 2, 0, 0, 2, 2]
    assert [bool(entry["demoted"]) for entry in made.log] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    assert all(entry["applied"] for entry in made.log)
    slot = 0
    amax = torch.stack([entry["amax"][slot] for entry in made.log])
    assert (amax > 0).all(), "it goes on being measured in BF16"


def test_a_demoted_layer_computes_bit_for_bit_as_without_fuse() -> None:
    out: list[Tensor] = []
    for fuse in (True, False):
        trainer = Trainer("transformer_engine", lambda: Both(), {"layers": {"fuse": fuse}})
        trainer.precision.demote("first.linear")
        trainer.precision.demote("second.linear")
        trainer.precision.backward(trainer.loss(inputs(0)))
        out += [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
        trainer.step()
        out += [trainer.log[0][name] for name in ("amax", "fp8.history", "fp8.scale")]
    half = len(out) // 2
    assert half == 8
    assert all(map(equal, out[:half], out[half:]))


class Both(nn.Module):
    """Two pairs, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Pair(nn.LayerNorm), Pair()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)).float())
        return out


def poisoned(trainer: Trainer, number: int) -> None:
    for half in range(2):
        loss = trainer.loss(2 * number + half, 0.5)  # type: ignore[arg-type]
        trainer.precision.backward(loss + math.nan if number == 3 and half else loss)


def test_a_skipped_step_leaves_every_bit() -> None:
    log = trained(window=poisoned).log
    assert [entry["applied"] for entry in log] == [True, True, True, False, True, True]
    kept = [
        name
        for name in log[2]
        if name.startswith(("fp8.", "blocks.", "norm.", "embed.", "lm_head"))
    ]
    assert len(kept) > 12
    assert all(equal(log[2][name], log[3][name]) for name in kept)


def evaluated(trainer: Trainer, number: int) -> None:
    """Evaluations before, between and inside."""
    model: Any = trainer.model
    tokens = torch.randint(0, VOCAB, (3, TIME))
    for half in range(2):
        with torch.no_grad(), trainer.precision.context():
            model(tokens)
        loss = trainer.loss(2 * number + half, 0.5)  # type: ignore[arg-type]
        with trainer.precision.context(), torch.no_grad():
            model(tokens)
        trainer.precision.backward(loss)


def test_evaluation_leaves_no_trace_and_computes_in_fp8_fused() -> None:
    assert disagreements(trained().log, trained(window=evaluated).log) == []


class Again(GPT):
    """Each block is computed again in backward."""

    again: Any = staticmethod(checkpoint)

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        for block in self.blocks:
            if "own" not in vars(block):
                block.own = block.forward  # type: ignore[assignment]
                block.forward = partial(self.again, block.own, use_reentrant=False)
        return super().forward(inputs, targets)


class AgainWithTe(Again):
    """By te.checkpoint."""

    again: Any = staticmethod(import_module("transformer_engine.pytorch").checkpoint)


@pytest.mark.parametrize("kind", [Again, AgainWithTe])
def test_activation_checkpointing_changes_nothing(kind: type[GPT]) -> None:
    def make() -> GPT:
        made = tiny()
        made.__class__ = kind
        return made

    again = trained(make=make)
    assert blocks(again.model) == NORMED
    assert disagreements(trained().log, again.log) == []


def test_fp8_state_and_checkpoints_go_between_fused_and_apart() -> None:
    for fuse in (True, False):
        saved = trained(fuse)
        buffer = io.BytesIO()
        torch.save({"model": saved.model.state_dict(), "fp8": saved.precision.state_dict()}, buffer)
        for other in (fuse, not fuse):
            buffer.seek(0)
            state = torch.load(buffer, weights_only=True)
            loaded = training(other)
            loaded.model.load_state_dict(state["model"])
            loaded.precision.load_state_dict(state["fp8"])
            mine, theirs = loaded.precision.state_dict()["tensors"], state["fp8"]["tensors"]
            assert [name for name in theirs if not equal(mine[name], theirs[name])] == []
            losses = [trainer.loss(77).item() for trainer in (loaded, saved)]
            assert losses[0] == (losses[1] if other == fuse else pytest.approx(losses[1], rel=2e-3))
            plain(loaded, 9)
            loaded.step()
            assert loaded.log[-1]["applied"]


def test_a_deep_copy_computes_the_same_and_a_pickle_is_plain() -> None:
    trainer = trained()
    x = torch.randint(0, VOCAB, (2, TIME))
    other = copy.deepcopy(trainer.model)
    before = trainer.precision.state_dict()["tensors"]
    with torch.no_grad(), trainer.precision.context():
        assert torch.equal(trainer.model(x), other(x))
    with trainer.precision.context():
        other(100 * x % VOCAB).sum().backward()
    assert blocks(other) == NORMED
    assert other.get_parameter("blocks.0.attn_norm.weight").grad is not None
    assert trainer.model.get_parameter("blocks.0.attn_norm.weight").grad is None
    after = trainer.precision.state_dict()["tensors"]
    assert all(equal(before[name], after[name]) for name in before)
    buffer = io.BytesIO()
    torch.save(trainer.model, buffer)
    buffer.seek(0)
    read = torch.load(buffer, weights_only=False)
    assert {type(module) for module in read.modules() if "Norm" in type(module).__name__} == {
        nn.RMSNorm
    }
    plain_again = trainer.model(x)
    assert type(plain_again) is Tensor
    torch.testing.assert_close(read(x), plain_again)


def test_the_search_for_non_finite_values_sees_what_the_norms_give() -> None:
    trainer = training()
    with watch(trainer.model) as origin:
        plain(trainer, 0)
    trainer.step()
    assert origin.usual == set()
    assert [(found.forward, found.backward) for found in origin.micro_batches] == [(None, None)] * 2
    assert blocks(trainer.model) == set(), "it has a hold on what the norms give"
    assert disagreements(trainer.log, trained(fuse=False, steps=1).log) == []
