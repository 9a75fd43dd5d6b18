"""Gradient norms by layer (`guard.hunt`): which layers there are, their norms, when they are measured, who is named."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness
from harness.core.config import GuardConfig
from harness.core.errors import ConfigError
from harness.core.facts import HUNT_STEPS, Rollback
from harness.core.layer_norms import LayerNorms, layer_of, layers_of
from harness.core.schema import validate
from harness.core.state import RunLedger, TrainState
from harness.core.update import TorchGradients
from harness.monitors.responder import Judge
from harness.report.hunt import hunt_line, hunted
from harness.report.page import write
from harness.tracking.history import RunHistory
from harness.tracking.journal import Journal
from tests.support.pages import content_of

CPU = torch.device("cpu")


def gradients_of(module: nn.Module) -> Tensor:
    """All gradients of a module, [elements]."""
    found: list[Tensor] = []
    for parameter in module.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad.flatten())
    return torch.cat(found)


class Odd(nn.Module):
    """Parameters of the model itself, tied ones, a frozen one, one that no gradient reaches, and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.embed = nn.Embedding(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(self.frozen(x)))
        return self.head(x).square().sum() * self.scale + self.nothing.sum()


def test_layers_are_the_modules_that_own_parameters() -> None:
    names = ["scale", "blocks.3.mlp.up.weight", "blocks.3.mlp.up.bias", "blocks.12.norm.weight"]
    layers = layers_of(names)
    assert layers == ["scale", "blocks.03.mlp.up", "blocks.03.mlp.up", "blocks.12.norm"]
    assert [layer_of(name, layers) for name in names] == layers
    assert layer_of("other.weight", layers) == ""


def test_very_many_layers_are_joined() -> None:
    names = [f"blocks.{block}.experts.{expert}.{part}.weight" for block in range(4) for expert in range(9)
             for part in ("up", "down")]  # fmt: skip
    assert len(set(layers_of(names, most=72))) == 72
    assert len(set(layers_of(names, most=71))) == 36, "whole experts"
    joined = layers_of(names, most=10)
    assert joined[0] == "blocks.00.experts", "the experts of a block"
    assert layer_of(names[0], joined) == joined[0]
    assert set(layers_of(names, most=0)) == {"blocks"}, "one part of a name is always left"


def test_norms_are_those_of_each_layers_own_parameters() -> None:
    torch.manual_seed(0)
    model = Odd()
    model(torch.randn(3, 4)).backward()
    of = LayerNorms(dict(model.named_parameters()))
    assert of.layers == ("scale", "nothing", "blocks.00", "blocks.01", "embed", "unused")

    found = dict(zip(of.layers, of.squares(model.parameters(), CPU).tolist(), strict=True))
    expected = {
        "scale": model.scale.grad,
        "embed": model.embed.weight.grad,
        "blocks.00": gradients_of(model.blocks[0]),
        "blocks.01": gradients_of(model.blocks[1]),
    }
    for layer, gradient in expected.items():
        assert found[layer] == pytest.approx(float(gradient.double().square().sum()), rel=1e-12)
    assert found["unused"] == found["nothing"] == 0.0

    # A rank that holds no row of a layer counts nothing of it.
    only = of.squares([model.embed.get_parameter("weight")], CPU).tolist()
    assert only == [0.0, 0.0, 0.0, 0.0, found["embed"], 0.0]


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_norms_are_unscaled_and_add_up_to_the_gradients(scale: float) -> None:
    class Scale:
        value = torch.tensor(scale)

        def update(self, overflow: Tensor, skip: Tensor) -> None: ...

    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    (model(torch.randn(3, 4)) * scale).backward()
    named = dict(model.named_parameters())
    loss_scale = None if scale == 1.0 else Scale()
    ours = TorchGradients([optimizer], named.values(), math.inf, loss_scale, CPU, named=named)
    figures = ours.measure(thorough=True, hunts=True)
    total = figures["layer_norms"].double().square().sum().sqrt()
    assert float(figures["grad_norm"]) == pytest.approx(float(total), rel=1e-6)

    # Nothing else is measured otherwise than without a hunt, to the last bit.
    plain = ours.measure(thorough=True, hunts=False)
    assert set(figures) - set(plain) == {"layer_norms"}
    for name, figure in plain.items():
        assert torch.equal(figure, figures[name]) or figure.isnan()


def judge(ledger: RunLedger, **settings: Any) -> Judge:
    class Backend:
        demoted = ()

    config = validate(GuardConfig, settings, "here")
    return Judge(config, TrainState({}, ledger), Backend(), ())  # type: ignore[arg-type]


def hunts(of: Judge, steps: range) -> list[int]:
    found: list[int] = []
    for step in steps:
        of.state.step = step - 1
        if of.terms().hunts:
            found.append(step)
    return found


def test_a_hunt_follows_a_rollback_and_is_known_by_the_ledger() -> None:
    ledger = RunLedger()
    assert hunts(judge(ledger), range(1, 200)) == []
    assert hunts(judge(ledger, hunt=True), range(1, 4)) == [1, 2, 3]

    ledger.go_back(100, [105])
    hunted_steps = list(range(101, 101 + HUNT_STEPS))
    assert hunts(judge(ledger), range(1, 300)) == hunted_steps
    assert hunts(judge(ledger, hunt=False), range(1, 300)) == []

    # A resume reads the ledger: what is left of the hunt does not depend on it.
    restored = RunLedger.from_json(vars(replace(ledger)))
    assert hunts(judge(restored), range(1, 300)) == hunted_steps
    # An earlier state: the steps behind it are done again, and hunted again.
    restored.go_back(80, [])
    assert hunts(judge(restored), range(1, 300)) == list(range(81, 81 + HUNT_STEPS))


def test_other_values_are_refused() -> None:
    for value in ("yes", 2, "true"):
        with pytest.raises(ConfigError, match="hunt"):
            validate(GuardConfig, {"hunt": value}, "here")


WIDTH, BAD = 16, "2"
"""The name of the layer whose gradient storms."""


class Storm:
    """A loop of somebody else's whose layer BAD has a gradient that is far too large in some forwards."""

    def __init__(self, folder: Path | None, forwards: set[int], **settings: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.precision = harness.Precision.from_recipe("fp32")
        self.model = self.precision.prepare(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.telemetry = harness.Telemetry.for_precision(
            folder, self.precision, mlflow=False, report=False
        )
        self.guard = harness.Guard.for_precision(
            self.precision, self.optimizer, telemetry=self.telemetry, **settings
        )
        self.forwards, self.forward = forwards, 0
        self.model.get_submodule(BAD).get_parameter("weight").register_hook(self.spoil)
        self.rollbacks: list[int] = []
        self.norms: list[Any] = []

    def spoil(self, gradient: Tensor) -> Tensor:
        return gradient * 1e5 if self.forward in self.forwards else gradient

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.forward += 1
            generator = torch.Generator().manual_seed(self.guard.window)
            x = torch.randn(8, WIDTH, generator=generator)
            with self.precision.context():
                loss = nn.functional.mse_loss(self.model(x), x.roll(1, 1))
            self.precision.backward(loss)
            self.precision.step(self.optimizer)
            facts = self.precision.facts()
            assert facts is not None
            self.norms.append(facts.layer_norms)
            self.optimizer.zero_grad()
            if isinstance(self.guard.end_step(), Rollback):
                self.rollbacks.append(self.guard.step)

    def weights(self) -> list[Tensor]:
        return [each.detach().clone() for each in self.model.parameters()]


@pytest.mark.slow
def test_after_a_rollback_the_bad_layer_is_named_first(tmp_path: Path) -> None:
    loop = Storm(tmp_path / "run", {*range(45, 52), 60, 61})
    with loop.telemetry:
        loop.steps(70)
    assert len(loop.rollbacks) == 1
    measured = [bool(norms) for norms in loop.norms]
    first = measured.index(True)
    assert not any(measured[:first]), "from the rollback on"
    assert all(measured[first:])

    history = RunHistory.read(tmp_path / "run")
    found = hunted(history)
    assert found[0].layer == BAD.zfill(2)
    assert found[0].growth > 1e3 > 10 > found[1].growth
    assert f"grew most: {BAD.zfill(2)} " in hunt_line(history)
    pictures = [path.name for path in write(tmp_path / "run")]
    assert "grad_norms.png" in pictures
    report = (tmp_path / "run" / "report.html").read_text()
    assert report.index(f'["{BAD.zfill(2)}",') < report.index('["00",')


def test_a_layer_with_a_nan_is_named_first(tmp_path: Path) -> None:
    loop = Storm(tmp_path / "run", set(), hunt=True)
    with loop.telemetry:
        loop.steps(5)
        loop.model.get_submodule("3").get_parameter("weight").register_hook(
            lambda gradient: gradient * math.nan
        )
        loop.steps(2)
    first = hunted(RunHistory.read(tmp_path / "run"))[0]
    assert (first.layer, first.largest, first.at, first.steps) == ("03", math.inf, 6, 7)


def of_norms(folder: Path, *attempts: dict[int, dict[str, float]]) -> Path:
    """A run whose journal has these norms: {step: {layer: norm}}, a mapping for each attempt."""
    with Journal(folder / "journal.jsonl") as journal:
        for attempt, steps in enumerate(attempts, start=1):
            journal.attempt = attempt
            for step, norms in steps.items():
                row = {f"grad_norm/{layer}": norm for layer, norm in norms.items()}
                journal.metrics(step, {"train/loss": 1.0, **row})
    return folder


def test_layers_that_were_never_finite_have_not_grown(tmp_path: Path) -> None:
    never = {step: {"a": 1.0, "b": math.nan, "c": math.inf} for step in (3, 4)}
    run = of_norms(tmp_path, never)
    history = RunHistory.read(run)
    assert [each.layer for each in hunted(history)] == ["b", "c", "a"]
    line = "gradient norms of 3 layers in 2 steps; not finite: b at step 3, c at step 3"
    assert hunt_line(history) == f"{line}; grew most: a 1 at step 3, usually 1"
    write(run)
    tables = content_of(run / "report.html")["runs"][0]["measured"]
    (table,) = [each for each in tables if each["title"] == "Gradient norms by layer"]
    assert table["rows"][0] == ["b", "2", "-", "inf", "3", "inf"]


def test_a_step_without_a_finite_gradient_names_no_layer(tmp_path: Path) -> None:
    usual = {step: {"a": 1.0, "b": 2.0} for step in (1, 2)}
    history = RunHistory.read(of_norms(tmp_path, {**usual, 3: {"a": math.nan, "b": math.nan}}))
    text = "gradient norms of 2 layers in 3 steps; not finite: every layer, at step 3"
    assert hunt_line(history) == text


def test_a_norm_that_a_later_attempt_discarded_as_well_counts(tmp_path: Path) -> None:
    discarded = {step: {"a": 1.0} for step in (1, 2, 3)}
    history = RunHistory.read(
        of_norms(tmp_path, {**discarded, 4: {"a": 90.0}}, {3: {"a": 1.0}, 4: {"a": 2.0}}, discarded)
    )
    (found,) = hunted(history)
    assert (found.largest, found.at, found.steps) == (90.0, 4, 9)


def test_a_run_without_a_hunt_has_nothing_of_it(tmp_path: Path) -> None:
    loop = Storm(tmp_path / "run", set())
    with loop.telemetry:
        loop.steps(3)
    assert hunt_line(RunHistory.read(tmp_path / "run")) == ""
    assert "grad_norms.png" not in [path.name for path in write(tmp_path / "run")]


def test_a_hunt_changes_no_bit() -> None:
    plain = Storm(None, {45, 46}, hunt=False)
    hunting = Storm(None, {45, 46}, hunt=True)
    for loop in (plain, hunting):
        loop.steps(50)
    for ours, theirs in zip(hunting.weights(), plain.weights(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_that_waits_to_be_judged_keeps_its_norms(tmp_path: Path) -> None:
    """A state is saved with the last step's figures: they enter the journal of the process that goes on."""
    loop = Storm(None, set(), hunt=True)
    loop.steps(3)
    saved = loop.precision.state_dict()
    after = Storm(tmp_path / "run", set(), hunt=True)
    with after.telemetry:
        after.model.load_state_dict(loop.model.state_dict())
        after.precision.load_state_dict(saved)
        after.steps(1)
    points = RunHistory.read(tmp_path / "run").points("grad_norm/03")
    assert list(points) == [3, 4]
    assert points[3] == loop.norms[-1]["03"]
