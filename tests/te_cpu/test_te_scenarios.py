"""The same windows under the native backend and under TE's own Python, with either `roll`: equal in every bit.

Compared after every step: gradient norm, whether it was applied, amax, scale, saturation, clipped share, underflow and
SQNR of every slot, history and scale, weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from te_cpu_support import (
    BACKENDS,
    MLP,
    WIDTH,
    Trainer,
    disagreements,
    inputs,
    moved,
    plain,
    trained,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.precision.backends import te_library

te: Any = import_module("transformer_engine.pytorch")


class Frozen(MLP):
    """The first layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)


class SideBranch(MLP):
    """The forward's first FP8 layer is not in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.aside(x)
        return super().forward(x)


class Shared(MLP):
    """One layer under two names, called twice; its inputs differ by a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x) + self.again(3 * x)))


class Taught(MLP):
    """Its first layer is only called without gradients: BF16, once the first step has set the other's scales."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            known = self.a(x)
        return self.b(torch.tanh(known))


class Checkpointed(MLP):
    """Computes its layers again in backward. with_te: by te.checkpoint."""

    def __init__(self, with_te: bool, reentrant: bool) -> None:
        super().__init__()
        self.again: Callable[..., Any] = te.checkpoint if with_te else checkpoint
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_() if torch.is_grad_enabled() else x
        return self.again(super().forward, x, use_reentrant=self.reentrant)


def one(trainer: Trainer, number: int) -> None:
    """One micro-batch."""
    trainer.precision.backward(trainer.loss(inputs(number)))


def three_dimensions(trainer: Trainer, number: int) -> None:
    trainer.precision.backward(trainer.loss(inputs(number, rows=24).reshape(2, 12, WIDTH)))


def five_rows(trainer: Trainer, number: int) -> None:
    trainer.precision.backward(trainer.loss(inputs(number, rows=5)))


def poisoned(trainer: Trainer, number: int) -> None:
    """A loss that is not a number at step 3."""
    for half in range(2):
        loss = trainer.loss(inputs(2 * number + half), 0.5)
        trainer.precision.backward(loss + math.nan if number == 3 and half else loss)


def huge(trainer: Trainer, number: int) -> None:
    """Inputs of infinite amax at step 2."""
    x = inputs(number)
    if number == 2:
        x[0, 0] = torch.inf
    with trainer.precision.context():
        loss = torch.nan_to_num(trainer.model(x)).float().square().mean()
    trainer.precision.backward(loss)


def grown(trainer: Trainer, number: int) -> None:
    """Inputs grow a thousandfold at step 3: everything saturates once."""
    trainer.precision.backward(trainer.loss(inputs(number) * (1e3 if number == 3 else 1.0)))


def demoted(trainer: Trainer, number: int) -> None:
    """Layer a is in BF16 in steps 2 and 3."""
    if number == 2:
        trainer.precision.demote("a")
    if number == 4:
        trainer.precision.promote("a")
    plain(trainer, number)


def demoted_from_the_start(trainer: Trainer, number: int) -> None:
    if number == 0:
        trainer.precision.demote("a")
    if number == 3:
        trainer.precision.promote("a")
    plain(trainer, number)


def evaluated(trainer: Trainer, number: int) -> None:
    """As documented: no_grad first, then the context."""
    plain(trainer, number)
    with torch.no_grad(), trainer.precision.context():
        trainer.model(100 * inputs(99))


def evaluated_between(trainer: Trainer, number: int) -> None:
    """An evaluation between a forward and its backward."""
    for half in range(2):
        loss = trainer.loss(inputs(2 * number + half), 0.5)
        with torch.no_grad(), trainer.precision.context():
            trainer.model(100 * inputs(99))
        trainer.precision.backward(loss)


def no_grad_inside(trainer: Trainer, number: int) -> None:
    """A teacher's or sampler's forward without gradients beside the training one, in the same context."""
    for half in range(2):
        x = inputs(2 * number + half)
        with trainer.precision.context():
            with torch.no_grad():
                trainer.model(100 * x)
            loss = nn.functional.mse_loss(trainer.model(x).float(), x.roll(1, 1)) / 2
        trainer.precision.backward(loss)


def context_then_no_grad(trainer: Trainer, number: int) -> None:
    plain(trainer, number)
    with trainer.precision.context(), torch.no_grad():
        trainer.model(100 * inputs(99))


def dropped(trainer: Trainer, number: int) -> None:
    """A forward whose loss is thrown away."""
    trainer.loss(100 * inputs(77))
    plain(trainer, number)


def raised(trainer: Trainer, number: int) -> None:
    """A forward that fails halfway, and is done again with other samples."""
    with pytest.raises(RuntimeError, match="same size"):
        trainer.loss(7 * inputs(number), wrong=True)
    plain(trainer, number)


def two_forwards(trainer: Trainer, number: int) -> None:
    """Two forwards, then two backwards: the order of pipelines and of contrastive losses."""
    losses = [trainer.loss((half + 1) * inputs(2 * number + half), 0.5) for half in range(2)]
    for loss in losses:
        trainer.precision.backward(loss)


def called_three_times(trainer: Trainer, number: int) -> None:
    x = inputs(number)
    with trainer.precision.context():
        first, second, third = (trainer.model(factor * x).float() for factor in (1, 3, 0.5))
        loss = nn.functional.mse_loss(first, second) + third.square().mean()
    trainer.precision.backward(loss)


def autocast_off_inside(trainer: Trainer, number: int) -> None:
    x = inputs(number)
    with trainer.precision.context():
        h = trainer.model(x)
        with torch.autocast("cpu", enabled=False):
            h = h.float() + trainer.model(x.float()).float()
        loss = nn.functional.mse_loss(h, x.roll(1, 1))
    trainer.precision.backward(loss)


def gradient_of_the_input_first(trainer: Trainer, number: int) -> None:
    """A gradient is asked for inside the context, of a graph of its own."""
    x = inputs(number)
    with trainer.precision.context():
        probe = (2 * x).requires_grad_()
        (found,) = torch.autograd.grad(trainer.model(probe).float().sum(), probe)
        loss = nn.functional.mse_loss(trainer.model(x).float(), x.roll(1, 1)) + 0 * found.sum()
    trainer.precision.backward(loss)


class WithoutAutocast(MLP):
    """Autocast is off for every forward, the first one too."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


class InPlace(MLP):
    """What follows a layer works in place on its output."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        hidden.mul_(2)
        hidden[:, :4] = 0
        return self.b(hidden.relu_()).add_(1)


SCENARIOS: dict[str, dict[str, Any]] = {
    "two micro-batches": {"window": plain},
    "one micro-batch": {"window": one},
    "biases that are not trained": {"make": lambda: MLP(bias=True)},
    "most recent amax, margin": {"fp8": {"amax_compute_algo": "most_recent", "margin": 2}},
    "E4M3 throughout": {"fp8": {"format": "e4m3"}},
    "three dimensions": {"window": three_dimensions},
    "five rows": {"window": five_rows},
    "NaN loss, skipped": {"window": poisoned},
    "infinite amax, scrubbed": {"window": huge},
    "infinite amax, kept": {"window": huge, "fp8": {"scrub_inf": False}},
    "inputs grow a thousandfold": {"window": grown},
    "demoted and promoted": {"window": demoted},
    "demoted from the start": {"window": demoted_from_the_start},
    "demoted before and with one micro-batch": {
        "window": demoted_from_the_start,
        "fp8": {"margin": 1},
    },
    "frozen first layer": {"make": Frozen},
    "first layer not in the loss": {"make": SideBranch},
    "first layer without gradients": {"make": Taught},
    "one layer under two names": {"make": Shared},
    "evaluation": {"window": evaluated},
    "evaluation between forward and backward": {"window": evaluated_between},
    "no_grad inside a training context": {"window": no_grad_inside},
    "context, then no_grad": {"window": context_then_no_grad},
    "a forward whose loss is dropped": {"window": dropped},
    "a forward that raises": {"window": raised},
    "two forwards, two backwards": {"window": two_forwards},
    "called three times in a context": {"window": called_three_times},
    "autocast off inside": {"window": autocast_off_inside},
    "autocast off everywhere": {"make": WithoutAutocast},
    "changed in place": {"make": InPlace},
    "changed in place, five rows": {"make": InPlace, "window": five_rows},
    "changed in place, demoted": {"make": InPlace, "window": demoted_from_the_start},
    "a gradient asked for inside": {"window": gradient_of_the_input_first},
    "torch.utils.checkpoint": {"make": lambda: Checkpointed(False, reentrant=False)},
    "torch.utils.checkpoint, reentrant": {"make": lambda: Checkpointed(False, reentrant=True)},
}
MAIN = (
    "two micro-batches",
    "three dimensions",
    "NaN loss, skipped",
    "demoted and promoted",
    "evaluation",
    "first layer not in the loss",
    "no_grad inside a training context",
    "two forwards, two backwards",
)

# A weight's shares are means over its casts: native casts it once for each scale, TE at every forward.
CAST_AGAIN = {"a forward whose loss is dropped", "a forward that raises"}
SAMPLED = {"clipped", "underflow", "sqnr_db"}


@pytest.mark.parametrize("roll", ["step", "micro_batch"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.every_version] if name in MAIN else [])
        for name in SCENARIOS
    ],
)
def test_the_same_bits(name: str, roll: str) -> None:
    scenario = {**SCENARIOS[name], "fp8": {**SCENARIOS[name].get("fp8", {}), "roll": roll}}
    native, transformer_engine = (trained(backend, **scenario) for backend in BACKENDS)
    found = disagreements(native, transformer_engine)
    if name in CAST_AGAIN and roll == "micro_batch":
        for entry in (one for log in (native, transformer_engine) for one in log):
            entry.update({row: entry[row][torch.arange(6) % 3 != 1] for row in SAMPLED})
        assert found, "this difference is gone: take it out of the docs"
        found = disagreements(native, transformer_engine)
    assert found == []
    never = {  # no gradient comes there
        "first layer not in the loss": [8],
        "frozen first layer": [2],
        "first layer without gradients": [0, 1, 2],
    }.get(name, [])
    assert moved(transformer_engine) == [
        slot not in never for slot in range(len(transformer_engine[0]["amax"]))
    ]


class OfBlocks(nn.Module):
    """A Linear that block scaling takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(128, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


@pytest.mark.parametrize("rows", [1, 16, 100, 128, 130])
def test_block_scaling_gets_whole_blocks_of_tokens_and_the_rows_added_change_nothing(
    rows: int,
) -> None:
    """TE on its stand-in refuses blocks that are not whole, by its own rule: 16 tokens are too few."""
    fp8 = {"scaling": "block", "roll": "step", "amax_history_len": 16}
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(1))
    found: list[list[Tensor | None]] = []
    for given in (x, nn.functional.pad(x, (0, 0, 0, -rows % 128))):
        trainer = Trainer("transformer_engine", OfBlocks, {"fp8": fp8})
        with trainer.precision.context():
            out = trainer.model(given)[:rows].float()
            loss = out.square().sum()
        trainer.precision.backward(loss)
        found.append([out.detach(), *(parameter.grad for parameter in trainer.model.parameters())])
    for mine, filled in zip(*found, strict=True):
        assert mine is not None
        assert filled is not None
        assert mine.abs().sum() > 0
        assert torch.equal(mine, filled)


@pytest.mark.parametrize("kind", ["delayed", "current", "block"])
@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128)])
def test_an_expert_without_tokens_has_gradients_of_zero_and_te_casts_rows(
    kind: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of no rows at all TE's casts are skipped, and what goes with them is whatever was in memory."""
    given: list[int] = []
    forward = te.Linear.forward

    def counted(self: Any, rows: Tensor, *args: Any, **options: Any) -> Tensor:
        given.append(len(rows))
        return forward(self, rows, *args, **options)

    fp8 = {"scaling": kind, "roll": "step", "amax_history_len": 16}
    trainer = Trainer("transformer_engine", OfBlocks, {"fp8": fp8})
    monkeypatch.setattr(te.Linear, "forward", counted)
    x = torch.zeros(shape, requires_grad=True)
    with trainer.precision.context():
        out = trainer.model(x)
    trainer.precision.backward(out.float().sum())
    assert out.shape == (*shape[:-1], 256)
    assert given
    assert all(given)
    (weight,) = trainer.model.parameters()
    for gradient, of in ((x.grad, x), (weight.grad, weight)):
        assert gradient is not None
        assert gradient.shape == of.shape
        assert not gradient.any()


@pytest.mark.every_version
@pytest.mark.parametrize(
    "window", [plain, demoted, evaluated, evaluated_between, no_grad_inside, raised, two_forwards]
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_computing_again_with_te_checkpoint_changes_nothing(
    window: Callable[[Trainer, int], None], reentrant: bool
) -> None:
    if window is no_grad_inside and te_library.load().version < "2.20":
        pytest.skip(
            "before 2.20 te.checkpoint looks the same without gradients, and what runs in it is recorded"
        )
    straight = trained("transformer_engine", window)
    again = trained("transformer_engine", window, lambda: Checkpointed(True, reentrant))
    assert disagreements(straight, again) == []


@pytest.mark.every_version
@pytest.mark.parametrize("roll", ["step", "micro_batch"])
def test_torchs_standard_loop_is_the_explicit_one(roll: str) -> None:
    """What `precision.wrap` hangs on the model and on backward, on TE's own modules."""

    def standard(trainer: Trainer, number: int) -> None:
        trainer.precision.standard_loop()
        for half in range(2):
            x = inputs(2 * number + half)
            (torch.nn.functional.mse_loss(trainer.model(x), x.roll(1, -1)) * 0.5).backward()

    explicit = trained("transformer_engine", fp8={"roll": roll})
    found = trained("transformer_engine", standard, fp8={"roll": roll})
    assert disagreements(explicit, found) == []
    assert all(moved(found))
