"""harness.Precision: other people's loops train under every recipe, gate like GradScaler, and resume bit for bit."""

from __future__ import annotations

import math

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
from torch import nn

from harness import Precision
from harness.core.files import shipped
from harness.models.gpt import build as build_gpt
from tests.support.waits import HostReads

ON_CPU = {"fp8_hybrid": "native:fp8", "auto": "autocast:bf16", "bf16": "autocast:bf16"}
ON_CPU |= {"fp16_scaler": "autocast:fp16", "fp32": "autocast:fp32", "fp8_dynamic": "torchao:fp8"}
ON_CPU |= {"fp16_overflow": "autocast:fp16", "fp16_underflow": "autocast:fp16"}
ON_CPU |= {"fp8_block": "torchao:fp8", "fp8_current": "torchao:fp8", "fp8_native": "native:fp8"}

pytestmark = pytest.mark.usefixtures("cpu_on_purpose")


@pytest.mark.parametrize("name", shipped("recipes"))
def test_every_shipped_recipe_trains(name: str) -> None:
    precision = Precision.from_recipe(name)
    torch.manual_seed(0)
    model = precision.prepare(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)))
    optimizer = adamw(model)
    losses, norms = [], []
    for step in range(30):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        with precision.context():
            loss = nn.functional.mse_loss(model(x).float(), x.roll(1, dims=1))
        precision.backward(loss)
        outcome = precision.step(optimizer, max_grad_norm=1.0)
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(outcome.grad_norm.item())
        assert outcome.was_applied
    assert precision.plan.resolved == ON_CPU[name]
    assert precision.plan.fp8_layers() == (("0", "2") if "fp8" in ON_CPU[name] else ())
    assert losses[-1] < 0.5 * losses[0]
    assert all(0 < norm < 10 for norm in norms), "gradient norms are of unscaled gradients"


def test_a_gpt_trains_in_fp8_close_to_fp32() -> None:
    def final_loss(name: str) -> float:
        torch.manual_seed(0)
        precision = Precision(recipe(name))
        model = precision.prepare(build_gpt(vocab=32, dim=32, layers=1, heads=2, ffn=64, tied=True))
        assert model.lm_head.weight is model.embed.weight
        optimizer = adamw(model)
        loss = torch.zeros(())
        for step in range(30):
            tokens = torch.randint(
                0, 32, (4, 1), generator=torch.Generator().manual_seed(step)
            ) + torch.arange(17)
            with precision.context():
                loss = model(tokens[:, :-1] % 32, tokens[:, 1:] % 32)
            precision.backward(loss)
            precision.step(optimizer, max_grad_norm=1.0)
            optimizer.zero_grad()
        return loss.item()

    fp8, fp32 = final_loss("fp8_hybrid"), final_loss("fp32")
    assert fp32 < 0.5 * math.log(32)
    assert fp8 == pytest.approx(fp32, rel=0.1)
    assert fp8 != fp32


@pytest.mark.parametrize("fused", [True, False])
def test_fp32_is_the_plain_loop(fused: bool) -> None:
    precision, model = prepared(recipe("fp32"))
    optimizer = adamw(model, fused)
    plain = mlp()
    oracle = adamw(plain, fused)
    for step in range(5):
        outcome = train_step(precision, model, optimizer, step, max_grad_norm=0.1)
        x, y = batch(step)
        nn.functional.mse_loss(plain(x), y).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        oracle.step()
        oracle.zero_grad()
        assert norm > 0.1, "the clip was in use"
        torch.testing.assert_close(outcome.grad_norm, norm, rtol=1e-6, atol=0)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_fp16_scales_skips_and_trains_as_grad_scaler(fused: bool, clip: float | None) -> None:
    rule = {"init": 1024.0, "growth_interval": 3}
    precision, model = prepared(recipe("fp16_scaler", loss_scale=rule))
    optimizer = adamw(model, fused)
    plain = mlp()
    oracle = adamw(plain, fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    mine, theirs = [], []
    pattern = [step not in (2, 7, 8) for step in range(16)]
    for step, good in enumerate(pattern):
        factor = 1.0 if good else math.inf
        x, y = batch(step)
        with precision.context():
            loss = nn.functional.mse_loss(model(x).float(), y)
        precision.backward(loss * factor)
        outcome = precision.step(optimizer, max_grad_norm=clip)
        optimizer.zero_grad()
        mine.append((outcome.loss_scale.item(), outcome.was_applied))

        before = [p.detach().clone() for p in plain.parameters()]
        theirs_scale = scaler.get_scale()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(plain(x).float(), y)
        scaler.scale(loss * factor).backward()
        if clip is not None:
            scaler.unscale_(oracle)
            norm = nn.utils.clip_grad_norm_(plain.parameters(), clip)
            assert not good or clip < norm == pytest.approx(outcome.grad_norm.item(), rel=1e-3), (
                "unscaled, and clipped"
            )
        scaler.step(oracle)
        scaler.update()
        oracle.zero_grad()
        changed = any(
            not torch.equal(old, new) for old, new in zip(before, plain.parameters(), strict=True)
        )
        theirs.append((theirs_scale, changed))
    assert mine == theirs
    assert {scale for scale, _ in mine} == {256.0, 512.0, 1024.0}, "the scale moved both ways"
    assert [applied for _, applied in mine] == pattern
    rtol, atol = (0.0, 0.0) if clip is None else (1e-4, 1e-5)
    for ours, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, reference, rtol=rtol, atol=atol)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["fp8_hybrid", "fp16_scaler", "fp32"])
@pytest.mark.parametrize("good_steps", [0, 2])
def test_a_bad_loss_leaves_every_bit(name: str, good_steps: int, fused: bool) -> None:
    precision, model = prepared(recipe(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    for step in range(good_steps):
        assert train_step(precision, model, optimizer, step).was_applied
    before = snapshot(precision, model, optimizer)
    outcome = train_step(precision, model, optimizer, good_steps, poison=math.nan)
    assert not outcome.was_applied
    assert math.isfinite(outcome.grad_norm.item()), "the loss alone was bad"
    found = set(differences(before, snapshot(precision, model, optimizer)))
    scaler = (
        {"/tensors/loss_scale.value", "/tensors/loss_scale.tracker"}
        if name == "fp16_scaler"
        else set()
    )
    bookkeeping = {
        "/meta/state/step",
        "/meta/last",
        "/tensors/last",
        "/meta/last/step",
        "/meta/last/window",
    }
    bookkeeping |= {"/meta/state/closer_look"}  # the steps that are sampled next
    monitors = "/meta/state/parts/monitors"
    assert not {path for path in found - scaler - bookkeeping if not path.startswith(monitors)}
    assert train_step(precision, model, optimizer, good_steps).was_applied
    assert differences(before["model"], model.state_dict()), "training goes on"


def test_an_infinite_gradient_is_gated_too() -> None:
    precision, model = prepared(recipe())
    optimizer = adamw(model)
    train_step(precision, model, optimizer, 0)
    before = snapshot(precision, model, optimizer)
    handle = model[2].register_full_backward_hook(lambda _, grads, __: (grads[0] * math.inf,))
    outcome = train_step(precision, model, optimizer, 1)
    handle.remove()
    assert not outcome.was_applied
    assert not math.isfinite(outcome.grad_norm.item())
    after = snapshot(precision, model, optimizer)
    for part in ("model", "optimizer"):
        assert differences(before[part], after[part]) == []
    assert torch.equal(before["tensors"]["fp8.history"], after["tensors"]["fp8.history"])
    assert torch.equal(before["tensors"]["fp8.scale"], after["tensors"]["fp8.scale"])


def test_splitting_a_window_changes_nothing_but_rounding() -> None:
    results = []
    for micro_batches in (1, 4):
        precision, model = prepared(recipe())
        optimizer = adamw(model)
        forward_backward(precision, model, 0, micro_batches)
        outcome = precision.step(optimizer)
        results.append((precision.state_dict()["tensors"], outcome.grad_norm))
    (whole, norm), (split, split_norm) = results
    assert torch.equal(whole["fp8.history"], split["fp8.history"])
    assert torch.equal(whole["fp8.scale"], split["fp8.scale"])
    assert (whole["fp8.scale"] != 1).all()
    torch.testing.assert_close(split_norm, norm, rtol=5e-3, atol=0)


@pytest.mark.parametrize(("roll", "rolled"), [("step", 1), ("micro_batch", 4)])
def test_the_recipe_says_when_scales_roll(roll: str, rolled: int) -> None:
    precision, model = prepared(recipe(fp8={"roll": roll}))
    forward_backward(precision, model, 0, micro_batches=4)
    assert precision.step(adamw(model)).was_applied
    history = precision.state_dict()["tensors"]["fp8.history"]
    assert (history > 0).sum(dim=0).tolist() == [rolled] * 6


def test_several_optimizers_share_one_window() -> None:
    weights = []
    for split in (True, False):
        precision, model = prepared(recipe())
        groups = [list(model[0].parameters()), list(model[2].parameters())]
        optimizers = (
            [torch.optim.AdamW(group, lr=1e-2, fused=True) for group in groups]
            if split
            else [adamw(model)]
        )
        for step in range(3):
            outcome = train_step(precision, model, optimizers, step, max_grad_norm=0.05)
            assert outcome.grad_norm.item() > 0.05
        weights.append({**model.state_dict(), **precision.state_dict()["tensors"]})
    assert differences(*weights) == []


def test_schedulers_and_fused_sgd_work_as_usual() -> None:
    precision, model = prepared(recipe("bf16"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    rates = []
    for step in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        assert train_step(precision, model, optimizer, step, max_grad_norm=0.01).was_applied
        scheduler.step()
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize("name", ["bf16", "fp16_scaler"])
@pytest.mark.parametrize(("fused", "reads"), [(True, 0), (False, 1)])
def test_host_reads_of_a_step(name: str, fused: bool, reads: int) -> None:
    precision, model = prepared(recipe(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    with HostReads() as seen:
        x, y = batch(0)
        with precision.context():
            loss = nn.functional.mse_loss(model(x).float(), y)
        precision.backward(loss)
        outcome = precision.step(optimizer, max_grad_norm=1.0)
    assert seen.count == reads
    assert outcome.was_applied
