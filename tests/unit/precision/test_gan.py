"""Two networks trained in turn by torch's standard loop, a Precision each: a GAN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from harness import Precision
from harness.core.errors import MisuseError
from harness.precision.recipe import Recipe, load_recipe

pytestmark = pytest.mark.usefixtures("cpu_on_purpose")

STEPS = 20
bce = nn.functional.binary_cross_entropy_with_logits


def recipe(name: str) -> Recipe:
    base = load_recipe(name).model_dump()
    base["layers"]["min_features"] = 16
    base["loss_scale"].update(init=1024.0, growth_interval=1000)
    return Recipe.model_validate(base)


class Gan:
    """With Precisions, or by torch alone. frozen: the critic is, in the other's step."""

    def __init__(self, name: str | None, frozen: bool = True) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32))
        self.critic = nn.Sequential(
            nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        )
        self.precisions: list[Precision] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        for model in (self.generator, self.critic):
            optimizer: torch.optim.Optimizer = torch.optim.Adam(
                model.parameters(), 1e-3, (0.5, 0.9), fused=True
            )
            if name is not None:
                precision = Precision(recipe(name))
                precision.prepare(model)
                optimizer = precision.wrap(optimizer)
                self.precisions.append(precision)
            self.optimizers.append(optimizer)
        self.frozen = frozen

    def step(self, number: int, spoilt: float = 1.0) -> tuple[float, float]:
        """Losses of critic and generator. spoilt: what the critic's is multiplied by."""
        numbers = torch.Generator().manual_seed(number)
        real, noise = (
            torch.randn(32, 32, generator=numbers) + 2,
            torch.randn(32, 16, generator=numbers),
        )
        optimizer_g, optimizer_c = self.optimizers
        fake: Tensor = self.generator(noise)
        optimizer_c.zero_grad()
        of_real, of_fake = self.critic(real), self.critic(fake.detach())
        first = bce(of_real, torch.ones_like(of_real)) + bce(of_fake, torch.zeros_like(of_fake))
        (first * spoilt).backward()
        optimizer_c.step()
        optimizer_g.zero_grad()
        self.critic.requires_grad_(not self.frozen)
        judged = self.critic(fake)
        second = bce(judged, torch.ones_like(judged))
        second.backward()
        optimizer_g.step()
        self.critic.requires_grad_(True)
        return first.item(), second.item()


@pytest.mark.parametrize(
    ("name", "off"), [("fp32", 0.0), ("bf16", 0.02), ("fp16_scaler", 0.005), ("fp8_hybrid", 0.05)]
)
def test_it_trains_as_without(name: str, off: float) -> None:
    plain, ours = Gan(None), Gan(name)
    expected = [plain.step(number) for number in range(STEPS)]
    found = [ours.step(number) for number in range(STEPS)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=off, atol=0)
    assert expected[-1][0] < 0.8 * expected[0][0], "something was learned"
    assert [precision.prepared.applied.item() for precision in ours.precisions] == [STEPS, STEPS]
    if name == "fp32":
        for model, other in ((ours.generator, plain.generator), (ours.critic, plain.critic)):
            assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("name", ["fp16_scaler", "fp8_hybrid"])
def test_a_step_that_is_skipped_is_one_networks_alone(name: str) -> None:
    gan = Gan(name)
    gan.step(0)
    before = [parameter.clone() for parameter in gan.critic.parameters()]
    gan.step(1, spoilt=math.nan)
    assert all(map(torch.equal, gan.critic.parameters(), before))
    assert [precision.prepared.applied.item() for precision in gan.precisions] == [2, 1]
    gan.step(2)
    assert [precision.prepared.applied.item() for precision in gan.precisions] == [3, 2]


def test_a_step_of_the_other_is_in_the_frozen_ones_open_window_alone() -> None:
    gan = Gan("fp8_hybrid")
    gan.step(0)
    critic, generator = gan.precisions[1], gan.optimizers[0]
    before = critic.state_dict()["tensors"]
    weights = [parameter.clone() for parameter in gan.critic.parameters()]
    generator.zero_grad()
    gan.critic.requires_grad_(False)
    gan.critic(gan.generator(torch.randn(32, 16))).mean().backward()
    generator.step()
    after = critic.state_dict()["tensors"]
    assert torch.equal(before["fp8.scale"], after["fp8.scale"])
    assert torch.equal(before["fp8.history"][1:], after["fp8.history"][1:])
    assert not torch.equal(before["fp8.history"][0], after["fp8.history"][0]), (
        "what it cast counts in its next step"
    )
    assert all(map(torch.equal, gan.critic.parameters(), weights))


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16_scaler", "fp8_hybrid"])
def test_a_critic_that_is_not_frozen_is_refused_with_the_way(name: str) -> None:
    with pytest.raises(
        MisuseError, match=r"reaches 2 prepared models[\s\S]*requires_grad_\(False\).*discriminator"
    ):
        Gan(name, frozen=False).step(0)


def test_one_precision_for_networks_in_turn_is_refused_with_the_way() -> None:
    torch.manual_seed(0)
    both = nn.ModuleDict({"generator": nn.Linear(16, 32), "critic": nn.Linear(32, 16)})
    precision = Precision(recipe("fp8_hybrid"))
    precision.prepare(both)
    critic, generator = (
        precision.wrap(torch.optim.Adam(both[name].parameters()))
        for name in ("critic", "generator")
    )
    critic.zero_grad()
    both["critic"](torch.randn(32, 32)).mean().backward()
    critic.step()
    generator.zero_grad()
    with pytest.raises(
        MisuseError, match=r"which was of a part of the model[\s\S]*one Precision each"
    ):
        both["critic"](both["generator"](torch.randn(32, 16))).mean().backward()
