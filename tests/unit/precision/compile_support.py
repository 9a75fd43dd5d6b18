"""Windows through compiled and eager models, and everything that they leave behind, for every backend that compiles."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
from native_support import APPLY, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.core.blocks import blocks_of
from harness.core.protocols import PrecisionBackend
from harness.models.gpt import GPT, build

State = dict[str, Tensor]


def step(
    backend: PrecisionBackend, model: nn.Module, *inputs: Tensor, sample: bool = False
) -> Tensor:
    """One window of as many micro-batches as there are inputs; the last one's outputs."""
    model.zero_grad()
    backend.begin_window(sample)
    out = torch.empty(0)
    for x in inputs:
        with backend.context():
            out = model(x)
            loss = out.float().square().mean()
        with backend.backward_context():
            loss.backward()
        backend.end_micro_batch(same)
    return out


def state_after(backend: PrecisionBackend, model: nn.Module) -> State:
    """Everything a step leaves behind: gradients, statistics, scales and histories."""
    stats = backend.end_window(backend.amax(), APPLY, same)
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {
        **grads,
        "stats": stats,
        **{name: t.clone() for name, t in backend.state_dict()[0].items()},
    }


def assert_same_bits(mine: State, theirs: State) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0, equal_nan=True, msg=name)


def windows(
    backend: PrecisionBackend,
    model: nn.Module,
    draw: Callable[[], Sequence[Tensor]],
    count: int,
    sampled: Container[int] = (),
) -> list[State]:
    """What each of `count` windows leaves behind. draw: the inputs of one's micro-batches. sampled: their numbers."""
    states: list[State] = []
    for number in range(count):
        step(backend, model, *draw(), sample=number in sampled)
        states.append(state_after(backend, model))
    return states


def switched_linear(
    make_backend: Callable[[nn.Module], PrecisionBackend],
    compiled: bool,
    bias: bool,
    dtype: torch.dtype,
) -> list[State]:
    """Four windows of one layer, demoted in the second, sampled in the third; compiled: by the default compiler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=bias))
    backend = make_backend(model)
    if compiled:
        model[0].compile(fullgraph=True)
    found: list[State] = []
    for number in range(4):
        backend.switch(*([["00"], []] if number == 1 else [[], ["00"]]))
        x = torch.randn(2, 24, 64, dtype=dtype, requires_grad=True)
        out = step(backend, model, x, sample=number == 2)
        assert x.grad is not None
        found.append({"out": out.detach(), "x": x.grad, **state_after(backend, model)})
    return found


def switched_gpt(
    make_backend: Callable[[nn.Module], PrecisionBackend],
    compiler: Callable[..., object] | None,
    draw: Callable[[], Sequence[Tensor]],
    count: int,
) -> list[State]:
    """`count` windows of 12 blocks: two layers leave FP8 after one and return after the next, one in five is sampled.

    compiler: a backend of torch.compile for every block; None: eager. draw: the inputs of a window's micro-batches.
    """
    model = small_gpt(layers=12)
    backend = make_backend(model)
    if compiler is not None:
        for block in blocks_of(model):
            block.compile(backend=compiler, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    layers = [name.removesuffix(".input") for name in backend.slot_names if name.endswith(".input")]
    found: list[State] = []
    for number in range(count):
        torch.manual_seed(number)
        step(backend, model, *draw(), sample=number % 5 == 2)
        found.append(state_after(backend, model))
        optimizer.step()
        moving = [layers[number % 3], layers[-1]]
        backend.switch(*([moving, []] if number % 2 == 0 else [[], moving]))
    return found


def small_gpt(layers: int) -> GPT:
    torch.manual_seed(0)
    return build(vocab=32, dim=32, layers=layers, heads=2, ffn=48)


class Recomputing(nn.Module):
    """Calls `block` again in backward."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)  # pyright: ignore[reportReturnType]


class Residual(nn.Module):
    """Activations that are recomputed inside of what is compiled, and written to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32))

    def forward(self, x: Tensor) -> Tensor:
        recomputed: Tensor = checkpoint(self.inner, x, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        return x + recomputed.relu_()


class Widening(nn.Module):
    """A layer whose gradient becomes bfloat16 in the same breath as it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).float()


class Odd(nn.Module):
    """A layer called twice, two with one weight, one whose weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.b.weight = self.a.weight
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.frozen(self.b(self.a(x))))
