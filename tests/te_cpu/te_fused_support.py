"""Models and training for the tests of `layers.fuse`."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from te_cpu_support import WIDTH, Trainer, inputs
from torch import Tensor, nn

from harness.models.gpt import GPT, build

te: Any = import_module("transformer_engine.pytorch")

VOCAB, TIME = 64, 16
BF16 = 2.0**-8
# FP8 values of three bits (gradients: two) that a rounding before the cast moves to the next one.
CLOSE = 0.08
Window = Callable[[Trainer, int], None]


def tiny() -> GPT:
    return build(vocab=VOCAB, dim=32, layers=2, heads=2, ffn=64)


class Unseen(torch.autograd.Function):
    """Hands on what it gets, past PyTorch's Python functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Training(Trainer):
    """Of a GPT on random tokens."""

    def loss(self, x: Any, factor: float = 1.0, wrong: bool = False) -> Tensor:
        """x: the number of a batch of two sequences."""
        tokens = torch.randint(0, VOCAB, (2, TIME + 1), generator=torch.Generator().manual_seed(x))
        with self.precision.context():
            loss: Tensor = self.model(tokens[:, :-1], tokens[:, 1:]) * factor
        return loss


def training(fuse: bool = True, make: Callable[[], nn.Module] = tiny, **fp8: Any) -> Training:
    return Training("transformer_engine", make, {"layers": {"fuse": fuse}, "fp8": fp8})


def plain(trainer: Trainer, number: int) -> None:
    """Two micro-batches."""
    for half in range(2):
        trainer.precision.backward(trainer.loss(2 * number + half, 0.5))  # type: ignore[arg-type]


def trained(
    fuse: bool = True, window: Window = plain, make: Callable[[], nn.Module] = tiny, steps: int = 6
) -> Training:
    made = training(fuse, make)
    for number in range(steps):
        window(made, number)
        made.step()
    return made


def blocks(model: nn.Module) -> set[str]:
    """Layers that ran as a te.LayerNormLinear at least once."""
    return {
        name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "fused", None), te.LayerNormLinear)
    }


NORMED = {f"blocks.{index}.{layer}" for index in range(2) for layer in ("attn.qkv", "mlp.gate_up")}


class Pair(nn.Module):
    """A norm and the layer it feeds."""

    fusible_norms: ClassVar = {"linear": "norm"}

    def __init__(self, kind: type[Any] = nn.RMSNorm, bias: bool = False, eps: float = 1e-3) -> None:
        super().__init__()
        self.norm, self.linear = kind(WIDTH, eps=eps), nn.Linear(WIDTH, WIDTH, bias=bias)
        with torch.no_grad():
            self.norm.weight.copy_(1 + inputs(7, 1)[0] / 3)
            if kind is nn.LayerNorm:
                self.norm.bias.copy_(inputs(8, 1)[0])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.norm(x))
        return out


def gradients(make: Callable[[], nn.Module], fuse: bool, x: Tensor) -> tuple[Trainer, list[Tensor]]:
    """Output and gradients, of the input first, of a second window, whose scales fit."""
    trainer = Trainer("transformer_engine", make, {"layers": {"fuse": fuse}}, lr=0.0)
    found: list[Tensor] = []
    for _ in range(2):
        x = x.detach().requires_grad_()
        with trainer.precision.context():
            out = trainer.model(x)
            loss = (out.float() * inputs(3, out.numel() // WIDTH).reshape(out.shape)).sum()
        trainer.precision.backward(loss)
        grads = [
            each.grad.clone() for each in (x, *trainer.model.parameters()) if each.grad is not None
        ]
        found = [out.detach().float(), *grads]
        trainer.step()
    return trainer, found


class FeedForward(nn.Module):
    """A norm, and SwiGLU between the two layers of an MLP."""

    fusible_norms: ClassVar = {"gate_up": "norm"}
    fusible_swiglu: ClassVar = {"gate_up": "down"}

    def __init__(self, kind: type[Any] = nn.RMSNorm, bias: bool = False) -> None:
        super().__init__()
        self.norm = kind(WIDTH, eps=1e-3)
        self.gate_up, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH, bias=bias),
            nn.Linear(2 * WIDTH, WIDTH, bias=bias),
        )
        with torch.no_grad():
            self.norm.weight.copy_(1 + inputs(7, 1)[0] / 3)
            if kind is nn.LayerNorm:
                self.norm.bias.copy_(inputs(8, 1)[0])

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


def without_mlp(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same with norm and first layer fused alone."""

    def made() -> nn.Module:
        model = make()
        for module in model.modules():
            if getattr(module, "fusible_swiglu", None):
                module.fusible_swiglu = {}  # type: ignore[assignment]
        return model

    return made


def after_a_window(make: Callable[[], nn.Module] = FeedForward, x: Tensor | None = None) -> Trainer:
    """Scales fit, and the next step's casts are not sampled."""
    trainer = Trainer("transformer_engine", make, {"layers": {"fuse": True}}, lr=0.0)
    window(trainer, inputs(1, 32) if x is None else x)
    trainer.step()
    return trainer


def window(trainer: Trainer, x: Tensor) -> list[Tensor]:
    """Output and all gradients, the input's first."""
    x = x.detach().requires_grad_()
    with trainer.precision.context():
        out = trainer.model(x)
        loss = (out.float() * inputs(3, out.numel() // WIDTH).reshape(out.shape)).sum()
    trainer.precision.backward(loss)
    return [
        out.detach().float(),
        *(p.grad.clone() for p in (x, *trainer.model.parameters()) if p.grad is not None),
    ]
