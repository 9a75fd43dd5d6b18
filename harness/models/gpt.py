"""A Llama-style GPT: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or untied head."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.core.errors import ConfigError, Problem

ROPE_BASE = 10000.0
EPS = 1e-5


class Scores(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v over the past. A module, so that a recipe can keep it in fp32 by name."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [batch, heads, time, head_dim]; k, v: the same with as many or fewer heads -> the shape of q."""
        grouped = q.shape[1] != k.shape[1]
        if grouped and not _fuses_groups(q):
            k, v, grouped = spread(k, q.shape[1]), spread(v, q.shape[1]), False
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; `kv_heads` < `heads` is grouped-query attention."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.scores = Scores()
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """x: [batch, time, dim] -> the same shape."""
        batch, time, dim = x.shape
        shape = (batch, time, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = self.qkv(x).view(shape).transpose(1, 2).split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        mixed = self.scores(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, dim))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)); gate and up are one matrix."""

    fusible_swiglu: ClassVar = {"gate_up": "down"}

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim] -> the same shape."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm transformer block."""

    fusible_norms: ClassVar = {"attn.qkv": "attn_norm", "mlp.gate_up": "mlp_norm"}

    def __init__(self, dim: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(dim, eps=EPS)
        self.attn = Attention(dim, heads, kv_heads)
        self.mlp_norm = nn.RMSNorm(dim, eps=EPS)
        self.mlp = FeedForward(dim, ffn)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """x: [batch, time, dim] -> the same shape."""
        x = x + self.attn(self.attn_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class TokenLoss(nn.Module):
    """Mean cross-entropy in nats per token. A module, so that a recipe can keep it in fp32 by name."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits: [batch, time, vocab]; targets: int64 [batch, time] -> float32 0-d."""
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class GPT(nn.Module):
    """Token ids in, mean cross-entropy (nats per token) or logits out."""

    fusible_norms: ClassVar = {"lm_head": "norm"}

    def __init__(self, vocab: int, dim: int, layers: int, heads: int, kv_heads: int, ffn: int, tied: bool) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.vocab_size = vocab
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, ffn) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=EPS)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.loss = TokenLoss()
        self._initialise(layers, tied)
        if tied:
            self.lm_head.weight = self.embed.weight

    def _initialise(self, layers: int, tied: bool) -> None:
        """Normal(0, 0.02); the two projections into the residual stream scaled by 1/sqrt(2 * layers), as GPT-2.

        An untied embedding starts at unit variance: the first RMSNorm divides by its size, and at 0.02 the gradient of
        the embedding would be 50 times that of everything else.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                into_residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if into_residual else 0.02)
        if not tied:
            nn.init.normal_(self.embed.weight)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """int64 [batch, time] in. With targets: float32 0-d mean loss; without: logits [batch, time, vocab]."""
        x = self.embed(inputs)
        rotation = rotary(inputs.shape[1], self.head_dim, x.device)
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.lm_head(self.norm(x))
        return logits if targets is None else self.loss(logits, targets)


def _fuses_groups(q: Tensor) -> bool:
    """Whether PyTorch has a fused attention kernel for grouped queries of this dtype on this device.

    On CUDA that is FlashAttention alone: 16 bits, compute capability 8.0. Without it grouped queries fall to plain
    mathematics, which keeps the scores of every pair of tokens.
    """
    if q.device.type != "cuda":
        return True
    return q.dtype != torch.float32 and torch.cuda.get_device_properties(q.device).major >= 8


def spread(x: Tensor, heads: int) -> Tensor:
    """[batch, kv_heads, time, head_dim] -> [batch, heads, time, head_dim]: each head repeated for its group of queries,
    side by side, as `enable_gqa` shares them."""
    batch, kv_heads, time, width = x.shape
    return x[:, :, None].expand(batch, kv_heads, heads // kv_heads, time, width).reshape(batch, heads, time, width)


def rotary(time: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [time, head_dim / 2], of RoFormer's rotary embedding (arXiv 2104.09864)."""
    frequency = ROPE_BASE ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(time, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (first half, second half) of the last dimension; computed in float32, returned in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def build(
    vocab: int = 256,
    dim: int = 256,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int | None = None,
    ffn: int | None = None,
    tied: bool = False,
) -> GPT:
    """A GPT with freshly initialised fp32 weights.

    dim: width. kv_heads: default `heads`. ffn: hidden width of the SwiGLU, default 8/3 dim rounded up to a multiple of
    16. tied: the head shares the embedding's weight. Raises ConfigError naming every size that cannot be.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    ffn = max(16, -(-8 * dim // 3 // 16) * 16) if ffn is None else ffn
    problems = []
    sizes = {"vocab": vocab, "dim": dim, "layers": layers, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    for key, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            problems.append(Problem(f"{value!r} is not a positive integer", f"model.args.{key}", fix="give a size"))
    if not problems and dim % (2 * heads):
        near = max(2 * heads, round(dim / (2 * heads)) * 2 * heads)
        problems.append(
            Problem(
                f"dim {dim} does not divide into {heads} heads of even size", "model.args.dim", fix=f"use dim: {near}"
            )
        )
    if not problems and heads % kv_heads:
        problems.append(
            Problem(
                f"{heads} heads are not a multiple of {kv_heads} kv_heads", "model.args.kv_heads", fix="use a divisor"
            )
        )
    if problems:
        raise ConfigError(problems)
    return GPT(vocab, dim, layers, heads, kv_heads, ffn, tied)
