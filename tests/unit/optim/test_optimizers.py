"""What build_optimizer hands out: groups, names, decay, ties, a learning rate on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness.core.config import TrainConfig
from harness.core.errors import ConfigError
from harness.core.update import takes_found_inf
from harness.optim.optimizers import build_optimizer

CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.norm = nn.LayerNorm(4)
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.head = nn.Linear(4, 11)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_groups_names_and_decay(kind: str) -> None:
    model = Tied()
    optimizer = build_optimizer(
        model, TrainConfig.model_validate({"optimizer": kind, "weight_decay": 0.3, "lr": 0.02}), CPU
    )
    assert [(group["param_names"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (["embed.weight"], 0.3),
        (["norm.weight", "norm.bias", "head.bias"], 0.0),
    ]
    by_name = dict(model.named_parameters())
    for group in optimizer.param_groups:
        assert all(
            by_name[name] is p
            for name, p in zip(group["param_names"], group["params"], strict=True)
        )
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates[0] is rates[1]
    assert rates[0].dtype == torch.float32
    assert rates[0].item() == torch.tensor(0.02).item()
    assert takes_found_inf(optimizer)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_the_learning_rate_tensor_is_what_the_step_uses(kind: str) -> None:
    moved = []
    for lr in (0.01, 0.03):
        torch.manual_seed(0)
        model = Tied()
        optimizer = build_optimizer(
            model, TrainConfig.model_validate({"optimizer": kind, "weight_decay": 0.0}), CPU
        )
        optimizer.param_groups[0]["lr"].fill_(lr)
        before = model.embed.weight.detach().clone()
        model(torch.arange(11)).square().mean().backward()
        optimizer.step()
        moved.append(before - model.embed.weight.detach())
    assert moved[0].abs().max() > 0
    torch.testing.assert_close(moved[1], moved[0] * 3, rtol=1e-3, atol=1e-7)


def test_betas_reach_the_optimizer() -> None:
    adamw = build_optimizer(Tied(), TrainConfig.model_validate({"betas": (0.8, 0.9)}), CPU)
    sgd = build_optimizer(
        Tied(), TrainConfig.model_validate({"optimizer": "sgd", "betas": (0.8, 0.9)}), CPU
    )
    assert adamw.param_groups[0]["betas"] == (0.8, 0.9)
    assert sgd.param_groups[0]["momentum"] == 0.8


def test_nothing_to_train_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no trainable parameter"):
        build_optimizer(nn.ReLU(), TrainConfig.model_validate({}), CPU)
