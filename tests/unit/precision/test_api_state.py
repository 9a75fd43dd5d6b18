"""harness.Precision's state: saved and continued bit for bit, read as statistics, untouched by evaluation."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from api_support import (
    EAGER,
    adamw,
    batch,
    differences,
    forward_backward,
    prepared,
    recipe,
    snapshot,
    train_step,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from harness.core.errors import CheckpointError
from harness.core.facts import is_sampled
from harness.precision import scaling
from harness.precision.backends.native import NativeLinear

pytestmark = pytest.mark.usefixtures("cpu_on_purpose")


@pytest.mark.parametrize("saved_at", [1, 2, 3, 4, 5])
def test_a_saved_state_continues_bit_for_bit(saved_at: int, tmp_path: Path) -> None:
    policy = recipe(fallback=EAGER, fp8={"stats_every": 2})
    precision, model = prepared(policy)
    optimizer = adamw(model)
    switches = []
    for step in range(7):
        if step == saved_at:
            saved = {
                **precision.state_dict(),
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            torch.save(saved, tmp_path / "state.pt")
            save_file(saved["tensors"], tmp_path / "fp8.safetensors")
            (tmp_path / "fp8.json").write_text(json.dumps(saved["meta"], allow_nan=False))
        switches.append(train_step(precision, model, optimizer, step).switch)
    assert any(switches), "the fallback acted"

    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    meta = json.loads((tmp_path / "fp8.json").read_text())
    for tensors in (loaded["tensors"], load_file(tmp_path / "fp8.safetensors")):
        state = {"tensors": tensors, "meta": meta}
        again, twin = prepared(policy, seed=9)
        twin.load_state_dict(loaded["model"])
        continued = adamw(twin)
        continued.load_state_dict(copy.deepcopy(loaded["optimizer"]))
        again.load_state_dict(state)
        assert differences(again.state_dict(), {key: loaded[key] for key in state}) == []
        assert [
            train_step(again, twin, continued, step).switch for step in range(saved_at, 7)
        ] == switches[saved_at:]
        assert (
            differences(snapshot(again, twin, continued), snapshot(precision, model, optimizer))
            == []
        )


@pytest.mark.parametrize("name", ["fp8_hybrid", "fp8_current", "fp16_scaler"])
def test_a_state_from_within_a_window_begins_that_window_anew(name: str) -> None:
    """What trainers save in the middle of an accumulation: it holds no gradients or amaxes of the open window."""
    precision, model = prepared(recipe(name))
    optimizer = adamw(model)
    for step in range(3):
        train_step(precision, model, optimizer, step)
    forward_backward(precision, model, 50)
    saved = precision.state_dict(within_window=True)

    again, twin = prepared(recipe(name), seed=9)
    twin.load_state_dict(model.state_dict())
    continued = adamw(twin)
    continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.load_state_dict(saved)
    precision.drop_window()
    model.zero_grad()
    for step in range(3, 6):
        train_step(precision, model, optimizer, step)
        train_step(again, twin, continued, step)
    before = snapshot(precision, model, optimizer)
    assert differences(snapshot(again, twin, continued), before) == []


def test_a_state_is_a_copy_and_a_rollback_drops_the_window() -> None:
    precision, model = prepared(recipe())
    optimizer = adamw(model)
    train_step(precision, model, optimizer, 0)
    saved = snapshot(precision, model, optimizer)
    kept = precision.state_dict()
    train_step(precision, model, optimizer, 1)
    forward_backward(precision, model, 2, poison=math.nan)
    assert differences(kept, {key: saved[key] for key in ("tensors", "meta")}) == []
    precision.load_state_dict(kept)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    model.zero_grad()
    assert differences(snapshot(precision, model, optimizer), saved) == []
    assert train_step(precision, model, optimizer, 1).was_applied, "the poison is gone"


@pytest.mark.parametrize(
    ("name", "section", "expected"),
    [
        ("bf16", {}, "written under native:fp8, this model runs under autocast:bf16"),
        ("fp8_hybrid", {"fp8": {"amax_history_len": 8}}, "history length 16"),
        ("fp8_hybrid", {"fallback": {"window": 4}}, "another fallback.window"),
        ("fp8_hybrid", {"layers": {"exclude": ["2"]}}, "6 slots"),
    ],
)
def test_a_state_of_another_run_is_refused(
    name: str, section: dict[str, Any], expected: str
) -> None:
    saved = prepared(recipe())[0].state_dict()
    other, _ = prepared(recipe(name, **section))
    with pytest.raises(CheckpointError, match=expected):
        other.load_state_dict(saved)


@pytest.mark.parametrize("half", ["tensors", "meta"])
def test_half_a_state_is_refused(half: str) -> None:
    precision, _ = prepared(recipe("fp16_scaler"))
    saved = precision.state_dict()
    with pytest.raises(CheckpointError, match="missing"):
        precision.load_state_dict({half: saved[half]})
    precision.load_state_dict(saved)


def test_a_state_without_the_figures_of_its_last_step_is_refused_before_anything_changes() -> None:
    precision, model = prepared(recipe())
    train_step(precision, model, adamw(model), 0)
    saved = precision.state_dict()
    assert saved["meta"]["last"] is not None
    del saved["tensors"]["last"]
    other, _ = prepared(recipe())
    before = other.state_dict()
    with pytest.raises(CheckpointError, match="last missing"):
        other.load_state_dict(saved)
    assert differences(other.state_dict(), before) == []


def test_statistics_are_of_the_tensors_that_went_through() -> None:
    precision, model = prepared(recipe(fp8={"stats_every": 2}))
    optimizer = adamw(model)
    assert precision.stats() is None
    for step in range(3):
        weight = model.get_parameter("0.weight").detach().clone()
        train_step(precision, model, optimizer, step)
        stats = precision.stats()
        assert stats is not None
        assert stats.names[:3] == ("00.input", "00.weight", "00.grad_output")
        assert stats.amax[0] == batch(step)[0].to(torch.bfloat16).abs().max().item()
        assert stats.amax[1] == weight.abs().max().item()
        assert stats.saturation[1] == pytest.approx(
            stats.amax[1] * stats.scale[1] / scaling.E4M3.max
        )
        assert math.isnan(stats.sqnr_db[0]) != is_sampled(0, step + 1, 2), (
            "the steps of a run of ours"
        )
    assert isinstance(model[0], NativeLinear)
    precision, model = prepared(recipe("bf16"))
    train_step(precision, model, adamw(model), 0)
    assert precision.stats() is None


@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_evaluation_leaves_no_trace(no_grad: Any) -> None:
    def evaluate() -> Tensor:
        with no_grad(), precision.context():
            return model(1000 * batch(99)[0]).float()

    states = []
    for evaluating in (False, True):
        precision, model = prepared(recipe())
        optimizer = adamw(model)
        for step in range(3):
            x, y = batch(step)
            for half in (slice(0, 8), slice(8, 16)):
                if evaluating:
                    evaluate()
                with precision.context():
                    loss = nn.functional.mse_loss(model(x[half]).float(), y[half]) / 2
                precision.backward(loss)
            precision.step(optimizer)
            optimizer.zero_grad()
            if evaluating:
                quantised = evaluate()
                with torch.no_grad():
                    assert not torch.equal(quantised, model(1000 * batch(99)[0])), (
                        "evaluation ran in the plan's precision"
                    )
        states.append(snapshot(precision, model, optimizer))
    assert differences(*states) == []
