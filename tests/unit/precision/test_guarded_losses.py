"""The guard in a real loop: losses below zero, norms that come back, targets that grow without end."""

from __future__ import annotations

import math
from typing import Any

import pytest
from api_support import adamw, batch, mlp, recipe
from torch import Tensor, nn

from harness import Guard, Precision
from harness.core.errors import HaltedError
from harness.core.facts import Action, Continue
from tests.support.matrix import rest_nightly

STEPS = 120


class Run:
    """A small regression under the guard, up to `steps` updates or its halt.

    shift: added to every loss. strong: windows whose gradients are ten times what they would be, at the same loss.
    growth: of the targets, from one window to the next.
    """

    def __init__(
        self,
        steps: int = STEPS,
        shift: float = 0.0,
        strong: range = range(0),
        growth: float = 0.0,
        **settings: Any,
    ) -> None:
        precision = Precision(recipe("bf16"))
        model = precision.prepare(mlp())
        optimizer = adamw(model, lr=1e-3)
        guard = Guard.for_precision(precision, optimizer, **settings)
        self.losses: list[float] = []
        self.applied: list[tuple[int, bool]] = []
        self.actions: list[tuple[int, type[Action]]] = []
        self.reason = ""
        for _ in range(steps):
            window = guard.window
            inputs, targets = batch(window)
            with precision.context():
                outputs: Tensor = model(inputs).float()
            if window in strong:
                outputs = outputs + 9 * (outputs - outputs.detach())
            loss = nn.functional.mse_loss(outputs, targets * math.exp(growth * window)) + shift
            precision.backward(loss)
            outcome = precision.step(optimizer, max_grad_norm=1.0)
            optimizer.zero_grad()
            self.losses.append(loss.item())
            self.applied.append((window, outcome.was_applied))
            try:
                self.actions.append((window, type(guard.end_step())))
            except HaltedError as error:
                self.reason = str(error)
                return


STRONG = range(60, 69)


@pytest.mark.slow
@pytest.mark.parametrize("shift", rest_nightly([-8.0, -1.0, 1024.0], -8.0))
def test_a_shift_of_the_loss_changes_no_decision(shift: float) -> None:
    """Nine windows in a row give large norms: five are skipped, and one that was on its way; then they are accepted."""
    plain, moved = Run(strong=STRONG), Run(strong=STRONG, shift=shift)
    assert [window for window, applied in plain.applied if not applied] == [*range(60, 66)]
    assert plain.reason == ""
    assert (moved.applied, moved.actions, moved.reason) == (
        plain.applied,
        plain.actions,
        plain.reason,
    )


@pytest.mark.slow
@pytest.mark.parametrize("growth", [0.01, 0.02])
def test_targets_that_grow_without_end_do_not_train_to_the_end(growth: float) -> None:
    run = Run(1500, growth=growth)
    assert run.reason, f"trained on to a loss of {run.losses[-1]:.3g}, {run.losses[0]:.3g} at first"
    assert "guard.max_rollbacks" in run.reason
    assert run.applied[-1][0] < 700, "within 700 windows"


@pytest.mark.slow
def test_a_rise_is_only_reported_where_that_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    """Targets grow by half a percent a step: slow enough for every single loss to be within its limit."""
    run = Run(600, growth=0.005, loss_rise="report", spike_sigma=1e6)
    assert run.reason == ""
    assert {kind for _, kind in run.actions} == {Continue}
    said = capfd.readouterr().err
    assert said.count("loss.rise: the loss is") == 1
    assert "guard.loss_rise: report" in said
