"""Windows through compiled and eager models, and everything that they leave behind, for every backend that compiles."""

from __future__ import annotations

import torch
from native_support import APPLY, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.core.protocols import PrecisionBackend
from harness.models.gpt import GPT, build

State = dict[str, Tensor]


def step(backend: PrecisionBackend, model: nn.Module, *inputs: Tensor, sample: bool = False) -> Tensor:
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
    return {**grads, "stats": stats, **{name: t.clone() for name, t in backend.state_dict()[0].items()}}


def assert_same_bits(mine: State, theirs: State) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0, equal_nan=True, msg=name)


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


class Odd(nn.Module):
    """A layer called twice, two with one weight, one whose weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.b.weight = self.a.weight
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.frozen(self.b(self.a(x))))
