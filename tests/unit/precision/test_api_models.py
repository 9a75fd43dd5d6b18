"""harness.Precision on every rung with what people do to models: recompute, copy, pickle, freeze, nest autocast."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from api_support import (
    adamw,
    batch,
    differences,
    forward_backward,
    mlp,
    prepared,
    recipe,
    snapshot,
    train_step,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness import Precision

pytestmark = pytest.mark.usefixtures("cpu_on_purpose")

RUNGS = ("fp8_hybrid", "fp8_dynamic", "bf16", "fp16_scaler", "fp32")
every_rung = pytest.mark.parametrize("rung", RUNGS)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        body = [
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        ]
        self.body, self.head = (
            nn.Sequential(*body),
            nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        images = nn.functional.one_hot(tokens[:, :4], 16).float().reshape(-1, 1, 8, 8)
        return self.head(self.body(images))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(16, 32), nn.Linear(64, 32), nn.Linear(32, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        state = torch.zeros(len(tokens), 32)
        for inputs in self.embed(tokens).unbind(1):
            state = torch.tanh(self.cell(torch.cat([inputs, state.to(inputs.dtype)], 1)))
        return self.out(state)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(16, 32), nn.Linear(32, 16)
        self.body = nn.Transformer(32, 2, 1, 1, 64, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.body(self.embed(tokens), self.embed(tokens[:, -1:])))[:, 0]


@pytest.mark.slow
@every_rung
@pytest.mark.parametrize("make", [ConvNet, Recurrent, EncoderDecoder])
def test_odd_models_learn(make: Callable[[], nn.Module], rung: str) -> None:
    torch.manual_seed(0)
    precision = Precision(recipe(rung))
    model = precision.prepare(make())
    optimizer = adamw(model, lr=5e-3)
    losses = []
    for step in range(40):
        tokens = torch.randint(
            0, 16, (32, 1), generator=torch.Generator().manual_seed(step)
        ) + torch.arange(5)
        inputs, targets = tokens[:, :-1] % 16, tokens[:, -1] % 16
        with precision.context():
            loss = nn.functional.cross_entropy(model(inputs).float(), targets)
        precision.backward(loss)
        assert precision.step(optimizer, max_grad_norm=1.0).was_applied
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    stats = precision.stats()
    if stats is not None:
        assert (stats.amax > 0).all(), "every layer that the plan has in FP8 ran in FP8"


def run_of(rung: str, change: Callable[[Precision, nn.Sequential, int], Any]) -> dict[str, Any]:
    """Everything after three steps, with `change` called before each."""
    precision, model = prepared(recipe(rung))
    optimizer = adamw(model)
    for step in range(3):
        change(precision, model, step)
        assert train_step(precision, model, optimizer, step).was_applied
    return snapshot(precision, model, optimizer)


@every_rung
def test_the_training_flag_changes_no_precision(rung: str) -> None:
    plain = run_of(rung, lambda *_: None)
    assert differences(plain, run_of(rung, lambda _, model, step: model.train(step == 1))) == []


@every_rung
def test_copies_of_a_model_have_weights_of_their_own_and_leave_no_trace(rung: str) -> None:
    def use_a_copy(precision: Precision, model: nn.Sequential, step: int) -> None:
        twin = copy.deepcopy(model)
        x = batch(step)[0]
        with torch.no_grad(), precision.context():
            assert torch.equal(twin(x), model(x)), "as the original computes"
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert not twin(x).any()
        with torch.no_grad(), precision.context():
            assert not twin(x).any()
        with precision.context():
            distillation = twin(100 * x).float().sum()
        distillation.backward()
        assert all(parameter.grad is None for parameter in model.parameters())

    assert differences(run_of(rung, lambda *_: None), run_of(rung, use_a_copy)) == []


@every_rung
def test_models_are_saved_whole_and_by_state_dict(rung: str) -> None:
    precision, model = prepared(recipe(rung))
    train_step(precision, model, adamw(model), 0)
    x = batch(1)[0]
    plain = mlp(seed=5)
    assert plain.load_state_dict(model.state_dict(), strict=True).missing_keys == []
    assert torch.equal(plain(x), model(x)), "outside of a context the model is plain"
    again, other = prepared(recipe(rung), seed=6)
    assert other.load_state_dict(plain.state_dict(), strict=True).unexpected_keys == []
    again.load_state_dict(precision.state_dict())
    with torch.no_grad(), precision.context():
        expected = model(x)
    with torch.no_grad(), again.context():
        assert torch.equal(other(x), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert [type(layer) for layer in loaded] == [nn.Linear, nn.Tanh, nn.Linear]
    assert torch.equal(loaded(x), plain(x))


@every_rung
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_free_of_effects(rung: str, reentrant: bool) -> None:
    results = []
    for recompute in (False, True):
        precision, model = prepared(recipe(rung, fp8={"roll": "micro_batch", "stats_every": 1}))
        optimizer = adamw(model)
        for step in range(3):
            for half in range(2):
                x, y = batch(2 * step + half)
                x.requires_grad_()
                with precision.context():
                    out = checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x)
                    loss = nn.functional.mse_loss(out.float(), y) / 2
                precision.backward(loss)
            precision.step(optimizer)
            optimizer.zero_grad()
        taken = snapshot(precision, model, optimizer)
        taken["tensors"].pop(
            "last", None
        )  # sampled counts see a recomputed tensor twice, but no share or maximum does
        results.append((taken, precision.stats()))
    assert differences(results[0][0], results[1][0]) == []
    if results[0][1] is not None:
        for row in ("amax", "scale", "saturation", "clipped", "underflow", "sqnr_db"):
            mine, theirs = (torch.tensor(getattr(stats, row)) for _, stats in results)
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


@every_rung
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_a_loop_changes_nothing(
    rung: str, dtype: torch.dtype, enabled: bool
) -> None:
    """Neither on the backward inside of it nor through its cache, which would serve weights from before the update."""
    results = []
    for around in (False, True):
        precision, model = prepared(recipe(rung))
        optimizer = adamw(model)
        with torch.autocast("cpu", dtype=dtype, enabled=enabled) if around else nullcontext():
            for step in range(3):
                train_step(precision, model, optimizer, step)
        results.append(snapshot(precision, model, optimizer))
    assert differences(*results) == []


@every_rung
def test_micro_batches_may_be_of_unequal_size(rung: str) -> None:
    """Weighted by their rows, 4 + 12 rows are 16 rows: the same evidence, the same gradients but for rounding."""
    results = []
    for sizes in ([16], [4, 12]):
        precision, model = prepared(recipe(rung))
        x, y = batch(0)
        for inputs, targets in zip(x.split(sizes), y.split(sizes), strict=True):
            with precision.context():
                loss = (model(inputs).float() - targets).square().sum() / 256
            precision.backward(loss)
        scale = precision.step(torch.optim.SGD(model.parameters(), lr=0.0, fused=True)).loss_scale
        gradients = (
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]) / scale
        )
        results.append(
            (gradients, precision.state_dict()["tensors"].get("fp8.history", torch.zeros(0)))
        )
    (whole, history), (split, split_history) = results
    assert torch.linalg.vector_norm(split - whole) < 0.1 * torch.linalg.vector_norm(whole)
    if rung == "fp8_hybrid":
        assert torch.equal(history, split_history)


@every_rung
def test_a_backward_that_raised_does_no_harm(rung: str) -> None:
    """As after an out-of-memory error that the loop catches: zero the gradients, take the next batch."""

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    precision, model = prepared(recipe(rung))
    optimizer = adamw(model)
    assert train_step(precision, model, optimizer, 0).was_applied
    handle = model[2].register_full_backward_hook(out_of_memory)
    with pytest.raises(MemoryError):
        forward_backward(precision, model, 1)
    handle.remove()
    optimizer.zero_grad()
    assert train_step(precision, model, optimizer, 2).was_applied
    with torch.no_grad(), precision.context():
        assert model(batch(3)[0]).isfinite().all()
