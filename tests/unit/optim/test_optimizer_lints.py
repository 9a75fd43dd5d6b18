"""Adam's eps against what gradients of the precision are made of."""

from __future__ import annotations

import pytest

from harness.core.config import TrainConfig
from harness.optim.lints import epsilon_finding


@pytest.mark.parametrize(
    ("optimizer", "arguments", "loss_scale", "found"),
    [
        ("adamw", {}, 65536.0, False),
        ("adamw", {"eps": 1e-8}, 65536.0, False),
        ("adamw", {"eps": 1e-10}, 65536.0, True),
        ("adamw", {"eps": 1e-10}, None, False),
        ("adamw", {"eps": 0}, None, True),
        ("adamw8bit", {"eps": 1e-12}, 65536.0, True),
        ("sgd", {}, 65536.0, False),
    ],
)
def test_an_eps_under_the_smallest_gradient_is_named(
    optimizer: str, arguments: dict[str, float], loss_scale: float | None, found: bool
) -> None:
    train = TrainConfig(optimizer=optimizer, optimizer_args=arguments)
    finding = epsilon_finding(train, loss_scale)
    assert (finding is not None) == found
    if finding is not None:
        assert finding.code == "optimizer.eps"
        assert "train.optimizer_args.eps" in finding.where


def test_the_fix_is_an_eps_that_is_not_named_again() -> None:
    """Under a small loss scale torch's 1e-8 is too small itself."""
    train = TrainConfig(optimizer="adamw", optimizer_args={"eps": 1e-8})
    finding = epsilon_finding(train, 1024.0)
    assert finding is not None
    eps = float(finding.fix.split()[1])
    again = TrainConfig(optimizer="adamw", optimizer_args={"eps": eps})
    assert epsilon_finding(again, 1024.0) is None
