"""Every leaf of the GPT and of a ConvNet, spoiled once forward and once backward: the module named is that one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from harness.models.gpt import build
from harness.precision.convert import build_backend
from harness.precision.plan import make_plan, resolve
from harness.precision.recipe import load_recipe
from harness.replay.origin import tensors, watch
from tests.support.matrix import rest_nightly

pytestmark = pytest.mark.faults(10)
CPU = torch.device("cpu")
VALUES = (math.inf, -math.inf)
CHOSEN = 2
"""The micro-batch that is spoiled; the one before it is sound."""


class Spoil(torch.autograd.Function):
    """Identity whose backward puts one bad element into the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return with_one(gradient, ctx.value), None


def with_one(tensor: Tensor, value: float) -> Tensor:
    spoiled = tensor.clone(memory_format=torch.contiguous_format)
    spoiled.view(-1)[spoiled.numel() // 2] = value
    return spoiled


class Injection:
    """Spoils what one module returns, or the gradient that it gets, in one micro-batch. fired: how often."""

    def __init__(self, module: nn.Module, direction: str, value: float) -> None:
        self.direction, self.value, self.fired, self.armed = direction, value, 0, False
        self._handle = module.register_forward_hook(self._after)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        (tensor,) = [each for _, each in tensors(output)]
        if not self.armed:
            return None
        self.fired += 1
        return (
            with_one(tensor, self.value)
            if self.direction == "forward"
            else Spoil.apply(tensor, self.value)
        )

    def remove(self) -> None:
        self._handle.remove()


class Residual(nn.Module):
    def __init__(self, width: int, shared: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)
        self.mix = shared
        self.last = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y += x
        return self.last(self.mix(self.act(y))) + x


class ConvNet(nn.Module):
    """Residual blocks with batch norm, in-place activations and one convolution that two blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        shared = nn.Conv2d(8, 8, 1)
        self.blocks = nn.ModuleList(Residual(8, shared) for _ in range(2))
        self.act = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.pool(self.act(x)).flatten(1))


def gpt(tied: bool) -> nn.Module:
    return build(vocab=64, dim=64, layers=2, heads=2, kv_heads=1, ffn=64, tied=tied)


class Checkpointed(nn.Module):
    """A GPT that recomputes its blocks in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.gpt = gpt(tied=False)
        for block in self.gpt.get_submodule("blocks").children():
            run = block.forward
            block.forward = lambda *args, run=run: torch.utils.checkpoint.checkpoint(  # pyright: ignore
                run, *args, use_reentrant=reentrant
            )

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.gpt(inputs, targets)


Loss = Callable[[], Tensor]


def plain(model: nn.Module) -> tuple[nn.Module, Loss]:
    inputs, targets = torch.randint(0, 64, (2, 4, 16))
    return model, lambda: model(inputs, targets)


def in_recipe(model: nn.Module, name: str) -> tuple[nn.Module, Loss]:
    """Under a recipe's context, as in training; its own backward context is only needed by checkpointing."""
    recipe = load_recipe(name)
    from harness.capability.probe import probe

    facts = probe()
    rung, verdicts = resolve(recipe, facts)
    assert rung is not None
    backend = build_backend(make_plan(recipe, facts, rung, verdicts, model), recipe, model, CPU)
    backend.begin_window(sample=True)
    inputs, targets = torch.randint(0, 64, (2, 4, 16))

    def loss() -> Tensor:
        with backend.context():
            return model(inputs, targets)

    return model, loss


def images() -> tuple[nn.Module, Loss]:
    model, batch, labels = ConvNet(), torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))
    return model, lambda: F.cross_entropy(model(batch), labels)


CASES: dict[str, Callable[[], tuple[nn.Module, Loss]]] = {
    "gpt-fp32-tied": lambda: plain(gpt(tied=True)),
    "gpt-fp8": lambda: in_recipe(gpt(tied=False), "fp8_hybrid"),
    "gpt-bf16-tied": lambda: in_recipe(gpt(tied=True), "bf16"),
    "gpt-fp16": lambda: in_recipe(gpt(tied=False), "fp16_scaler"),
    "gpt-checkpoint": lambda: plain(Checkpointed(reentrant=False)),
    "gpt-checkpoint-reentrant": lambda: plain(Checkpointed(reentrant=True)),
    "convnet": images,
}


def leaves(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if next(module.children(), None) is None
    }


def sweep(model: nn.Module, loss: Loss) -> tuple[int, list[str]]:
    """(injections that fired, those whose module was not the one named)."""
    fired, missed = 0, []
    with watch(model) as well:
        loss().backward()
    model.zero_grad()
    assert well.first is None
    for name, module in leaves(model).items():
        for number, direction in enumerate(("forward", "backward") * 2):
            injection = Injection(module, direction, (math.nan, VALUES[len(name) % 2])[number // 2])
            with watch(model, known=well.usual) as origin:
                for micro_batch in (1, CHOSEN):
                    injection.armed = micro_batch == CHOSEN
                    loss().backward()
            injection.remove()
            model.zero_grad()
            fired += injection.fired > 0
            found = origin.first
            if found is None or (found.module, found.direction, found.micro_batch) != (
                name,
                direction,
                CHOSEN,
            ):
                missed.append(
                    f"{direction} at {name}: {found and (found.direction, found.module, found.operation)}"
                )
    return fired, missed


@pytest.mark.parametrize(
    "case",
    rest_nightly(CASES, "gpt-fp8", "convnet"),
)
@pytest.mark.slow
def test_the_module_named_is_the_one_that_was_spoiled(case: str) -> None:
    torch.manual_seed(0)
    model, loss = CASES[case]()
    fired, missed = sweep(model, loss)
    count = 4 * len(leaves(model))
    print(
        f"{case}: {fired} of {count} injections fired, {count - len(missed)} named exactly; missed: {missed}"
    )
    assert fired == count
    assert len(missed) <= 0.01 * count, missed
