"""How `benchmarks.cost` trains: the project's GPT for several seeds at once, with each piece of FP8 as a switch.

A run is small and a card is large, so S seeds of one variant train side by side as one model. The seeds' weights are
stacked, [S, ...], and their batches lie one after the other; what the GPT does between its Linears, norms and embedding
it does to each sample alone. No seed sees another: losses, gradient norms, clipping, amaxes and scales are one a seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cost_numerics import Numbers, Variant, power_of_two, product
from benchmarks.parity import perturbed_gpt
from harness.core.health import l2_norm
from harness.data.batches import sample_numbers
from harness.models import gpt
from harness.optim.schedule import Schedule

VALIDATION_TOKENS = 1 << 14


@dataclass(frozen=True, slots=True)
class Size:
    """A model and its training: AdamW and schedule as the shipped configs have them. batch: samples a step, of
    `context` tokens (bytes) each. validation: samples that are held out."""

    dim: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    warmup: int
    lr: float
    validation: int

    def model(self) -> dict[str, Any]:
        """Arguments of `gpt.build`."""
        return {"dim": self.dim, "layers": self.layers, "heads": self.heads, "tied": False}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes to train on and to validate on, uint8 [n]."""

    train: Tensor
    val: Tensor

    @classmethod
    def cut(cls, data: bytes, size: Size) -> Corpus:
        """The validation split is the end: so many samples, and a byte for the last one's target."""
        held_out = size.validation * size.context + 1
        both = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
        return cls(both[:-held_out], both[-held_out:])

    def to(self, device: torch.device) -> Corpus:
        """The same on a device."""
        return Corpus(self.train.to(device), self.val.to(device))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one seed: nats per byte of the whole validation split with the final weights, computed as in training (loss)
    and in bf16 (loss_bf16), and the mean training loss of the last 20 steps."""

    loss: float
    loss_bf16: float
    train_loss: float


class OutOfTimeError(Exception):
    """The deadline passed within a run."""


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: SeedsLinear, record: bool) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            ctx.layer, ctx.record = layer, record
            ctx.left = layer.numbers.operands(x, layer.slot, "input", record)
            ctx.right = layer.numbers.operands(weight, layer.slot, "weight", record)
            return product(ctx.left("fprop"), ctx.right("fprop"), "fprop", layer.numbers.card)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layer: SeedsLinear = ctx.layer
        with torch.autocast(grads[0].device.type, enabled=False):
            grad = layer.numbers.operands(grads[0].contiguous(), layer.slot, "grad_output", ctx.record)
            grad_x = product(grad("dgrad"), ctx.right("dgrad"), "dgrad", layer.numbers.card)
            grad_weight = product(grad("wgrad"), ctx.left("wgrad"), "wgrad", layer.numbers.card)
        return grad_x, grad_weight, None, None


class SeedsLinear(nn.Module):
    """A Linear without bias for S seeds, weight [S, out, in]: FP8 if it has a slot and FP8 is on, else bf16."""

    def __init__(self, weight: Tensor, numbers: Numbers, slot: int | None, smooth: bool) -> None:
        super().__init__()
        self.weight, self.numbers, self.smooth = nn.Parameter(weight), numbers, smooth
        self.slot = -1 if slot is None else slot

    def forward(self, x: Tensor) -> Tensor:
        """x: [S * batch, time, in] -> bfloat16 [S * batch, time, out]."""
        rows, weight = x.reshape(len(self.weight), -1, x.shape[-1]), self.weight
        if self.slot < 0 or not self.numbers.active:
            out = self._in_bf16(rows.to(torch.bfloat16), weight.to(torch.bfloat16))
        else:
            if self.smooth:
                largest = power_of_two(rows.detach().abs().amax(1, keepdim=True).float())
                factor = torch.where(largest > 0, 1.0 / largest, 1.0)
                rows, weight = (rows * factor).to(rows.dtype), weight / factor
            out: Any = _Matmul.apply(rows, weight, self, torch.is_grad_enabled())
        return out.view(*x.shape[:-1], out.shape[-1])

    def _in_bf16(self, rows: Tensor, weight: Tensor) -> Tensor:
        if not self.numbers.card:  # as the product's Linear, bit for bit
            return torch.stack([F.linear(*pair) for pair in zip(rows, weight, strict=True)])
        return torch.bmm(rows, weight.mT)


class SeedsNorm(nn.Module):
    """RMSNorm, weight [S, dim]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight), eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [S * batch, time, dim] -> the same shape."""
        seeds, dim = self.weight.shape
        normed = F.rms_norm(x, (dim,), None, self.eps)
        return (normed.view(seeds, -1, dim) * self.weight[:, None]).view(x.shape)


class SeedsEmbedding(nn.Module):
    """Embedding, weight [S, vocab, dim]."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: int64 [S * batch, time] -> [S * batch, time, dim]."""
        seeds, vocab, dim = self.weight.shape
        first = torch.arange(seeds, device=ids.device).repeat_interleave(len(ids) // seeds) * vocab
        return F.embedding(ids + first[:, None], self.weight.view(-1, dim))


class SeedsLoss(nn.Module):
    """Mean cross-entropy of each seed."""

    def __init__(self, seeds: int) -> None:
        super().__init__()
        self.seeds = seeds

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits: [S * batch, time, vocab]; targets: int64 [S * batch, time] -> float32 [S]."""
        rows = logits.float().flatten(0, -2)
        return F.cross_entropy(rows, targets.flatten(), reduction="none").view(self.seeds, -1).mean(1)


def initial_models(variant: Variant, size: Size, seeds: Sequence[int]) -> list[gpt.GPT]:
    """The GPT of each seed, made on the CPU: the same weights for all variants and devices, but for a coin's ulp."""
    models: list[Any] = []
    for seed in seeds:
        torch.manual_seed(seed)
        coins = 1_000 * variant.coin + seed
        models.append(perturbed_gpt(coins, **size.model()) if variant.coin else gpt.build(**size.model()))
    return models


def side_by_side(
    models: Sequence[gpt.GPT], variant: Variant, device: torch.device, card: bool
) -> tuple[nn.Module, Numbers]:
    """One GPT that computes all of `models` (which it takes apart), and the FP8 state of its Linears."""
    host = models[0]
    chosen = {name: slot for slot, name in enumerate(fp8_layers(host, variant))}
    numbers = Numbers(variant, len(chosen), len(models), device, card)
    for name, module in list(host.named_modules()):
        if not isinstance(module, nn.Linear | nn.RMSNorm | nn.Embedding | gpt.TokenLoss):
            continue
        twins: list[Any] = [model.get_submodule(name) for model in models]
        parent, _, leaf = name.rpartition(".")
        if isinstance(module, gpt.TokenLoss):
            made: nn.Module = SeedsLoss(len(models))
        else:
            weight = torch.stack([twin.weight.detach() for twin in twins])
            if isinstance(module, nn.RMSNorm):
                made = SeedsNorm(weight, gpt.EPS if module.eps is None else module.eps)
            elif isinstance(module, nn.Embedding):
                made = SeedsEmbedding(weight)
            else:
                made = SeedsLinear(weight, numbers, chosen.get(name), variant.smooth and leaf == "down")
        setattr(host.get_submodule(parent), leaf, made)
    return host.to(device), numbers


def fp8_layers(model: gpt.GPT, variant: Variant) -> list[str]:
    """Names of the Linears that a variant converts."""
    if not variant.gemms or not variant.roles:
        return []
    blocks = range(len(model.blocks))
    inner = blocks if variant.edges else blocks[1:-1]
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.rpartition(".")[2] in variant.kinds
        and name.startswith("blocks.")
        and int(name.split(".")[1]) in inner
    ]


def train(
    variant: Variant,
    size: Size,
    corpus: Corpus,
    seeds: Sequence[int],
    device: torch.device,
    deadline: float = math.inf,
    card: bool | None = None,
    trace: Callable[[nn.Module, Tensor], None] | None = None,
) -> list[Outcome]:
    """Train `seeds` side by side; an outcome each. deadline: of `time.monotonic`, after which OutOfTimeError is raised.

    card: see `Numbers`; default: whether `device` is one. trace: gets the model and each step's losses, float32 [S].
    corpus: on `device`.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, which holds FP8 and bf16 values exactly
    card = device.type == "cuda" if card is None else card
    model, numbers = side_by_side(initial_models(variant, size, seeds), variant, device, card)
    parameters = list(model.parameters())
    matrices = [each for each in parameters if each.ndim > 2]  # stacked: a dimension more than the GPT's own
    vectors = [each for each in parameters if each.ndim <= 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=size.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    schedule = Schedule(size.lr, size.warmup, size.steps, 0.0)
    order = sample_order(size, corpus, seeds).to(device)
    losses: list[Tensor] = []
    numbers.active = True
    numbers.generator.manual_seed(seeds[0])
    for step in range(size.steps):
        if time.monotonic() > deadline:
            raise OutOfTimeError
        inputs, targets = windows(corpus.train, order[step], size.context)
        numbers.begin_step(step)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(inputs, targets)
        loss.sum().backward()
        clip(parameters, len(seeds))
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        numbers.end_step()
        losses.append(loss.detach())
        if trace is not None:
            trace(model, losses[-1])
    numbers.warming = False
    own = validate(model, corpus.val, size.context, len(seeds), device)
    numbers.active = False
    plain = validate(model, corpus.val, size.context, len(seeds), device) if numbers.layers else own
    last = torch.stack(losses[-20:]).mean(0)
    return [Outcome(*each) for each in torch.stack([own, plain, last], dim=1).tolist()]


@torch.no_grad()
def clip(parameters: Sequence[nn.Parameter], seeds: int, largest: float = 1.0) -> None:
    """Divide each seed's gradients [S, ...] so that their L2 norm is at most `largest`."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    norms = torch.stack([l2_norm([gradient[seed] for gradient in gradients]) for seed in range(seeds)])
    divisor = torch.clamp(norms / largest, min=1.0)
    for gradient in gradients:
        gradient.div_(divisor.view(-1, *[1] * (gradient.ndim - 1)))


def sample_order(size: Size, corpus: Corpus, seeds: Sequence[int]) -> Tensor:
    """Which samples each step has: int64 [steps, S * batch], as the product's order for each seed."""
    samples = (len(corpus.train) - 1) // size.context
    every = [
        [sample_numbers(seed, step, size.batch, samples) for step in range(size.steps)] for seed in seeds
    ]  # [S][steps][batch]
    return torch.from_numpy(np.stack(every, axis=1).reshape(size.steps, -1))


def windows(data: Tensor, samples: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of samples, int64 [n, context] each."""
    places = samples[:, None] * context + torch.arange(context + 1, device=data.device)
    tokens = data[places].long()
    return tokens[:, :-1], tokens[:, 1:]


@torch.no_grad()
def validate(model: nn.Module, data: Tensor, context: int, seeds: int, device: torch.device) -> Tensor:
    """Mean loss of each seed over all whole samples of `data`, float32 [S]."""
    samples = (len(data) - 1) // context
    total = torch.zeros(seeds, dtype=torch.float64, device=device)
    for rows in torch.arange(samples, device=device).split(VALIDATION_TOKENS // context):
        inputs, targets = windows(data, rows, context)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(inputs.repeat(seeds, 1), targets.repeat(seeds, 1))
        total += loss.double() * len(rows)
    return (total / samples).float()
