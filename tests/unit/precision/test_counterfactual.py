"""What other scalings would lose on a run's own tensors: the figures, and that measuring leaves no trace."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from api_support import adamw, batch, forward_backward, mlp, prepared, recipe, train_step
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from harness import Precision
from harness.core.errors import MisuseError
from harness.precision.counterfactual import (
    DELAYED,
    EXACT_DB,
    OTHERS,
    Comparison,
    Counterfactual,
    SlotLosses,
    lines,
)

pytestmark = pytest.mark.usefixtures("cpu_on_purpose")
EVERY_STEP = {"stats_every": 1}


def of(comparison: Comparison, slot: str) -> SlotLosses:
    return {row.slot: row for row in comparison.slots}[slot]


def watched(
    precision: Precision, model: nn.Module, steps: int, every: int = 0, micro_batches: int = 1
) -> Comparison:
    """Train under a watch."""
    optimizer = adamw(model)
    with Counterfactual(model, every) as watch:
        for step in range(steps):
            forward_backward(precision, model, step, micro_batches)
            precision.step(optimizer)
            model.zero_grad()
    return watch.report()


class Hot(nn.Module):
    """Its second Linear has one input channel far over the others; zero weights keep it from mattering."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 256), nn.Linear(256, 16)
        self.register_buffer("extra", torch.zeros(256))
        self.extra: Tensor
        self.extra[7] = value

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) + self.extra)


def hot_model(value: float) -> tuple[Precision, Hot]:
    torch.manual_seed(0)
    precision = Precision(recipe(fp8=EVERY_STEP))
    return precision, precision.prepare(Hot(value))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_delayed_is_what_the_run_itself_measures(micro_batches: int) -> None:
    precision, model = prepared(recipe(fp8=EVERY_STEP))
    # One step, after two without the watch: the scales are no longer 1.
    optimizer = adamw(model)
    for step in range(2):
        train_step(precision, model, optimizer, step)
    comparison = watched(precision, model, 1, micro_batches=micro_batches)
    stats = precision.stats()
    assert stats is not None
    assert comparison.steps == 1
    assert {row.slot for row in comparison.slots} == set(stats.names)
    for index, name in enumerate(stats.names):
        row = of(comparison, name)
        found = row.median[DELAYED]
        assert row.worst[DELAYED] == found
        measured = [found.clipped, found.underflow, found.sqnr_db, found.even_db]
        own = [stats.clipped, stats.underflow, stats.sqnr_db, stats.even_db]
        assert measured == pytest.approx([figure[index] for figure in own], rel=1e-4)


def everything(precision: Precision, model: nn.Module, facts: list[Any]) -> list[Any]:
    """All that a later step depends on, and what the steps reported."""
    state = precision.state_dict()
    weights = [value.clone() for value in model.state_dict().values()]
    return [*weights, *state["tensors"].values(), torch.get_rng_state(), *facts]


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad.clone()


def run(watch: Callable[[nn.Module], Any] | None, checkpointed: bool) -> list[Any]:
    precision, model = prepared(recipe(fp8={**EVERY_STEP, "amax_history_len": 3}))
    optimizer = adamw(model)
    facts: list[Any] = []
    hooks = [list(module._forward_hooks) for module in model.modules()]
    entered = watch(model).__enter__() if watch else None
    for step in range(4):
        x, y = batch(step)
        with precision.context():
            dropped = nn.functional.dropout(x, 0.1)
            out = (
                checkpoint(model, dropped, use_reentrant=False) if checkpointed else model(dropped)
            )
            loss = nn.functional.mse_loss(out.float(), y)
        precision.backward(loss)
        facts += [loss.detach(), *[_gradient(each) for each in model.parameters()]]
        precision.step(optimizer)
        stats = precision.stats()
        assert stats is not None
        facts += [torch.from_numpy(stats.amax), torch.from_numpy(stats.even_db)]
        model.zero_grad()
        with torch.no_grad(), precision.context():
            facts.append(model(y))
    if entered is not None:
        entered.__exit__(None, None, None)
        assert entered.report().steps == 4
        assert [list(module._forward_hooks) for module in model.modules()] == hooks
    return everything(precision, model, facts)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_it_leaves_no_trace(checkpointed: bool) -> None:
    without = run(None, checkpointed)
    with_watch = run(lambda model: Counterfactual(model), checkpointed)
    assert len(without) == len(with_watch)
    for one, other in zip(without, with_watch, strict=True):
        bits = [each.detach().reshape(-1).view(torch.uint8) for each in (one, other)]
        assert torch.equal(*bits)


def test_blocks_win_where_one_channel_is_hot() -> None:
    precision, model = hot_model(2.0**24)
    comparison = watched(precision, model, 4)
    best = next(row for row in comparison.slots if row.role == "input")
    assert best.slot == "second.input"
    assert best.best in ("mxfp8", "mxfp8_ocp")
    # 255 of 256 values are lost under one scale; 127 with blocks of 128, 31 with blocks of 32.
    assert best.median["current"].underflow > 0.99
    assert best.median["block"].underflow == pytest.approx(127 / 256, abs=0.01)
    assert best.median["mxfp8"].underflow == pytest.approx(31 / 256, abs=0.01)
    assert best.gain_db["mxfp8"] > best.gain_db["block"] > 2 > best.gain_db["current"]
    # SQNR of the tensor does not see it: the hot channel is all of the signal.
    assert best.median[DELAYED].sqnr_db > 100 > 1 > best.median[DELAYED].even_db

    gains = {(gain.role, gain.scheme): gain for gain in comparison.gains}
    assert gains["input", "mxfp8"].helped == ("second.input",)
    assert gains["input", "current"].helped == ()
    quiet, calm = hot_model(0.0)
    assert of(watched(quiet, calm, 4), "second.input").gain_db["block"] < 2


def test_median_and_worst_are_over_the_steps() -> None:
    precision, model = prepared(recipe(fp8=EVERY_STEP))
    comparison = watched(precision, model, 5)
    assert comparison.steps == 5
    row = of(comparison, "00.weight")
    assert row.steps == 5
    # Step 0 casts with the scale 1, which fits nothing.
    assert row.worst[DELAYED].even_db < row.median[DELAYED].even_db - 3
    assert row.worst[DELAYED].underflow >= row.median[DELAYED].underflow
    assert row.worst["current"].even_db > row.median["current"].even_db - 1
    # A gain is within a step: its median does not follow from the two medians' steps.
    assert abs(row.gain_db["current"]) < 1


def test_it_follows_the_sampled_steps_or_its_own_count() -> None:
    precision, model = prepared(recipe(fp8={"stats_every": 10_000}))
    watch = Counterfactual(model)
    optimizer = adamw(model)
    with watch:
        sampled = 0
        for step in range(6):
            train_step(precision, model, optimizer, step)
            facts = precision.facts()
            assert facts is not None
            assert facts.slots is not None
            sampled += int(facts.slots.even_db[0] == facts.slots.even_db[0])
    assert watch.report().steps == sampled

    for every, steps in ((1, 6), (2, 3), (4, 2)):
        precision, model = prepared(recipe())
        assert watched(precision, model, 6, every).steps == steps


def test_only_training_forwards_inside_the_context_count() -> None:
    precision, model = prepared(recipe())
    x, _ = batch(0)
    with Counterfactual(model, every=1) as watch:
        model(x).sum().backward()
        with torch.no_grad(), precision.context():
            model(x)
    report = watch.report()
    assert report.steps == 0
    assert report.slots == ()
    assert set(report.not_observed.values()) == {"no step was measured"}
    assert "nothing was measured" in lines(report)[0]


def test_copies_and_late_backwards_are_not_measured() -> None:
    precision, model = prepared(recipe())
    x, y = batch(0)
    with Counterfactual(model, every=1) as watch:
        average = copy.deepcopy(model)
        with precision.context():
            average(x)
            assert watch.report().steps == 0
            loss = nn.functional.mse_loss(model(x).float(), y)
    precision.backward(loss)
    report = watch.report()
    assert {row.role for row in report.slots} == {"input", "weight"}
    assert report.not_observed["00.grad_output"] == "no gradient reached it in a measured step"


class Parts(nn.Module):
    """Blocks, a layer that is never called, one that sees only zeros, and a frozen one at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(16, 16).requires_grad_(False)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16)) for _ in range(2)])
        self.unused = nn.Linear(16, 16)
        self.zeros = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return x + self.zeros(torch.zeros_like(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_slots_that_cannot_be_seen_are_named_with_the_reason() -> None:
    precision = Precision(recipe())
    model = precision.prepare(Parts())
    model.blocks[1].compile(backend="eager")
    report = watched(precision, model, 2, every=1)
    why = report.not_observed
    assert "torch.compile" in why["blocks.01.00.input"]
    assert "torch.compile" in why["blocks.01.00.grad_output"]
    assert "not called" in why["unused.weight"]
    assert "nothing but zeros" in why["zeros.input"]
    assert "no gradient" in why["start.grad_output"]
    seen = {row.slot for row in report.slots}
    assert {"start.input", "start.weight", "blocks.00.00.input", "zeros.weight"} <= seen
    assert seen.isdisjoint(why)
    names = [layer.module for layer in precision.plan.layers if layer.precision == "fp8"]
    assert len(seen) + len(why) == 3 * len(names)


def test_a_model_compiled_around_the_watch_computes_the_same() -> None:
    losses: list[list[float]] = []
    for on in (False, True):
        precision, model = prepared(recipe())
        optimizer = adamw(model)
        compiled: Any = torch.compile(model, backend="eager")
        watch = Counterfactual(model, every=1)
        if on:
            watch.__enter__()
        found: list[float] = []
        for step in range(2):
            found.append(forward_backward(precision, compiled, step))
            precision.step(optimizer)
            model.zero_grad()
        losses.append(found)
        if on:
            report = watch.report()
            assert report.slots == ()
            assert set(report.not_observed.values()) == {"no step was measured"}
    assert losses[0] == losses[1]


def test_a_layer_in_bf16_is_measured_and_marked() -> None:
    precision, model = prepared(recipe())
    train_step(precision, model, adamw(model), 0)
    precision.demote("0")
    report = watched(precision, model, 1, every=1)
    assert of(report, "00.input").in_bf16
    assert not of(report, "02.input").in_bf16
    assert any("in BF16" in line for line in lines(report))


def test_looking_at_a_parametrized_weight_would_change_it() -> None:
    precision = Precision(recipe())
    torch.manual_seed(0)
    model = precision.prepare(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)))
    spectral_norm(model[0])
    x, _ = batch(0)
    norm: Any = model[0]
    with precision.context():
        model(x)
    before = norm.parametrizations.weight[0]._u.clone()
    with Counterfactual(model, every=1) as watch, torch.no_grad(), precision.context():
        model(x)
    once = norm.parametrizations.weight[0]._u.clone()
    assert not torch.equal(before, once), "each look is a step of the power iteration"
    again: Any = copy.deepcopy(norm.parametrizations.weight[0])
    again(norm.parametrizations.weight.original)
    with watch, precision.context():
        model(x)
    assert torch.equal(again._u, norm.parametrizations.weight[0]._u), "the forward's own look alone"
    assert "parametrization" in watch.report().not_observed["00.weight"]


def test_the_report_is_plain_data_and_its_lines_are_safe() -> None:
    model = nn.Sequential()
    model.add_module("a\x1b[31m", nn.Linear(16, 16))
    precision = Precision(recipe(fp8=EVERY_STEP))
    precision.prepare(model)
    report = watched(precision, model, 3)
    again = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert again["steps"] == 3
    row = again["slots"][0]
    assert set(row["median"]) == {DELAYED, *OTHERS}
    assert set(row["gain_db"]) == set(OTHERS)
    text = "\n".join(lines(report))
    assert "\x1b" not in text
    assert "a\\x1b[31m.input" in text
    # The slots are sorted by what the best scheme gains, and the list can be cut.
    best = [max(slot["gain_db"].values()) for slot in again["slots"]]
    assert best == sorted(best, reverse=True)
    assert "and 2 slots that gain less" in lines(report, most=1)


def test_a_cast_without_error_is_exact() -> None:
    precision = Precision(recipe(fp8=EVERY_STEP))
    linear = nn.Linear(16, 16, bias=False)
    nn.init.constant_(linear.weight, 0.5)
    model = precision.prepare(nn.Sequential(linear))
    report = watched(precision, model, 1)
    row = of(report, "00.weight")
    assert row.median[DELAYED].even_db == row.median["mxfp8"].sqnr_db == EXACT_DB
    assert row.gain_db["block"] == 0
    assert row.best == DELAYED
    assert any(line.split()[:2] == ["00.weight", "exact"] for line in lines(report))


def test_what_cannot_be_watched_is_refused() -> None:
    with pytest.raises(MisuseError, match="no layer of the model runs in FP8"):
        Counterfactual(mlp())
    _, model = prepared(recipe())
    _, other = prepared(recipe())
    with pytest.raises(MisuseError, match="several Precisions"):
        Counterfactual(nn.Sequential(model, other))
    with pytest.raises(MisuseError, match="every=-1 is negative"):
        Counterfactual(model, every=-1)
    watch = Counterfactual(model)
    with watch, pytest.raises(MisuseError, match="entered already"), watch:
        pass


@pytest.mark.slow  # torchao's import
def test_layers_of_a_library_are_refused_by_name() -> None:
    pytest.importorskip("torchao")
    precision = Precision(recipe("fp8_current"))
    model = precision.prepare(mlp())
    with pytest.raises(MisuseError, match=r"not of the native backend: 0 \(WatchedLinear\)"):
        Counterfactual(model)
