"""A Llama-style GPT: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or untied head.

With `qk_norm` it is Qwen3's instead. What it costs in memory can be bought back: `recompute` keeps fewer activations,
`loss_chunk` never has the logits of all tokens at once. harness/models/llama.py gives its weights their names there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.core.errors import ConfigError, Problem, near_match
from harness.core.facts import IGNORED
from harness.models.room import require_room

ROPE_BASE = 10000.0
EPS = 1e-5
RECOMPUTE = ("none", "mlp", "block")
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Keys of `rope_scaling`, as Llama 3.1's config.json has them."""

Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a GPT is made of; see `build` for each."""

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    tied: bool
    qk_norm: bool = False
    rope_base: float = ROPE_BASE
    rope_scaling: Mapping[str, float] | None = None
    norm_eps: float = EPS
    z_loss: float = 0.0
    loss_chunk: int = 0
    recompute: str = "none"
    recompute_every: int = 1

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads


class Scores(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v over the past. A module, so that a recipe can keep it in fp32 by name."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """q: [batch, heads, time, head_dim]; k, v: the same with as many or fewer heads -> the shape of q.

        mask: [batch, 1, time, time], added to the scores in place of the plain causal one; in the dtype that they get.
        """
        grouped = q.shape[1] != k.shape[1]
        if grouped and not _fuses_groups(q, mask):
            k, v, grouped = spread(k, q.shape[1]), spread(v, q.shape[1]), False
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; `kv_heads` < `heads` is grouped-query attention."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        dim = settings.dim
        self.heads, self.kv_heads, self.head_dim = (
            settings.heads,
            settings.kv_heads,
            settings.head_dim,
        )
        self.qkv = nn.Linear(dim, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=settings.norm_eps) if settings.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=settings.norm_eps) if settings.qk_norm else None
        self.scores = Scores()
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None = None) -> Tensor:
        """x: [batch, time, dim] -> the same shape."""
        batch, time, dim = x.shape
        shape = (batch, time, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = (
            self.qkv(x)
            .view(shape)
            .transpose(1, 2)
            .split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q.float()).to(v.dtype), self.k_norm(k.float()).to(v.dtype)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        mixed = self.scores(q, k, v) if mask is None else self.scores(q, k, v, mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, dim))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)); gate and up are one matrix."""

    fusible_swiglu: ClassVar = {"gate_up": "down"}

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.gate_up = nn.Linear(settings.dim, 2 * settings.ffn, bias=False)
        self.down = nn.Linear(settings.ffn, settings.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim] -> the same shape."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm transformer block. recomputes_mlp: the feed-forward half keeps its input alone for backward."""

    fusible_norms: ClassVar = {"attn.qkv": "attn_norm", "mlp.gate_up": "mlp_norm"}

    def __init__(self, settings: Settings, recomputes_mlp: bool = False) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(settings.dim, eps=settings.norm_eps)
        self.attn = Attention(settings)
        self.mlp_norm = nn.RMSNorm(settings.dim, eps=settings.norm_eps)
        self.mlp = FeedForward(settings)
        self.recomputes_mlp = recomputes_mlp

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None = None) -> Tensor:
        """x: [batch, time, dim] -> the same shape."""
        x = x + self.attn(self.attn_norm(x), rotation, mask)
        if self.recomputes_mlp and torch.is_grad_enabled():
            return x + recomputed(self._feed_forward, x)
        return x + self._feed_forward(x)

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.mlp_norm(x))


class TokenLoss(nn.Module):
    """Mean cross-entropy in nats per token. A module, so that a recipe can keep it in fp32 by name.

    z_loss: what the mean of log(Z)^2, with Z the softmax's denominator, adds to the *gradient* (PaLM, arXiv 2204.02311,
    has 1e-4). The value stays the cross-entropy, so that losses with it and without compare.
    """

    def __init__(self, z_loss: float = 0.0) -> None:
        super().__init__()
        self.z_loss = z_loss

    def forward(self, logits: Tensor, targets: Tensor, counted: Tensor | None = None) -> Tensor:
        """logits: [..., vocab]; targets: int64 [...], -100 has no loss -> float32 0-d.

        counted: how many targets have a loss, where these are only some of the tokens: the result is their share.
        """
        rows, targets = logits.float().flatten(0, -2), targets.flatten()
        if counted is None:
            loss = F.cross_entropy(rows, targets)
        else:
            loss = F.cross_entropy(rows, targets, reduction="sum") / counted
        if not self.z_loss:
            return loss
        kept = targets != IGNORED
        squares = rows.logsumexp(-1).square()
        penalty = (
            self.z_loss
            * torch.where(kept, squares, 0.0).sum()
            / (kept.sum() if counted is None else counted)
        )
        return loss + (penalty - penalty.detach())


class GPT(nn.Module):
    """Token ids in, mean cross-entropy (nats per token) or logits out."""

    fusible_norms: ClassVar = {"lm_head": "norm"}

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.head_dim = settings.head_dim
        self.vocab_size = settings.vocab
        self.embed = nn.Embedding(settings.vocab, settings.dim)
        self.blocks = nn.ModuleList(
            Block(settings, recomputes_mlp=settings.recompute == "mlp" and self._recomputes(index))
            for index in range(settings.layers)
        )
        self.norm = nn.RMSNorm(settings.dim, eps=settings.norm_eps)
        self.lm_head = nn.Linear(settings.dim, settings.vocab, bias=False)
        self.loss = TokenLoss(settings.z_loss)
        self._initialise(settings.layers, settings.tied)
        if settings.tied:
            self.lm_head.weight = self.embed.weight

    def _initialise(self, layers: int, tied: bool) -> None:
        """Normal(0, 0.02); the two projections into the residual stream scaled by 1/sqrt(2 * layers), as GPT-2.

        An untied embedding starts at unit variance: the first RMSNorm divides by its size, and at 0.02 the gradient of
        the embedding would be 50 times that of everything else.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                into_residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
                nn.init.normal_(
                    parameter, std=0.02 / math.sqrt(2 * layers) if into_residual else 0.02
                )
        if not tied:
            nn.init.normal_(self.embed.weight)

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """int64 [batch, time] in. With targets: float32 0-d mean loss; without: logits [batch, time, vocab].

        targets: -100 has no loss. segments: the number of the document that each token is of. Attention stays within a
        document, and its positions begin at 0, as if it were alone.
        """
        x = self.embed(inputs)
        rotation, mask = self._rotation(inputs.shape[1], x.device), None
        if segments is not None:
            position, mask = documents(segments)
            rotation = (rotation[0][position][:, None], rotation[1][position][:, None])
            # Autocast casts queries, keys and values, but not a mask: one tensor, which all blocks keep for backward.
            mask = mask.to(autocast_dtype(x.device.type) or x.dtype)
        whole = self.settings.recompute == "block" and torch.is_grad_enabled()
        for index, block in enumerate(self.blocks):
            again = whole and self._recomputes(index)
            x = recomputed(block, x, rotation, mask) if again else block(x, rotation, mask)
        if targets is None:
            return self.lm_head(self.norm(x))
        chunk = self.settings.loss_chunk
        if not 0 < chunk < targets.numel():
            return self.loss(self.lm_head(self.norm(x)), targets)
        return self._chunked(x.flatten(0, 1), targets.flatten(), chunk)

    def _recomputes(self, index: int) -> bool:
        return index % self.settings.recompute_every == 0

    def _rotation(self, time: int, device: torch.device) -> Rotation:
        return rotary(
            time, self.head_dim, device, self.settings.rope_base, self.settings.rope_scaling
        )

    def _chunked(self, x: Tensor, targets: Tensor, chunk: int) -> Tensor:
        """The same loss, with the logits of `chunk` tokens at a time, which backward computes again.

        x: [tokens, dim]; targets: [tokens].
        """
        counted = (targets != IGNORED).sum()
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        dtype = autocast_dtype(x.device.type)
        # Autocast's cache would give all chunks one copy of the weight in 16 bits, and its gradients, one for each
        # chunk, would be added up in 16 bits.
        uncached = (
            torch.autocast(x.device.type, dtype=dtype, cache_enabled=False)
            if dtype
            else nullcontext()
        )
        with uncached:
            for rows, labels in zip(x.split(chunk), targets.split(chunk), strict=True):
                if torch.is_grad_enabled():
                    loss = loss + recomputed(self._share, rows, labels, counted)
                else:
                    loss = loss + self._share(rows, labels, counted)
        return loss

    def _share(self, x: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
        # The norm within the chunk, too: a recipe may have it computed in one with the head.
        return self.loss(self.lm_head(self.norm(x)), targets, counted)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast casts to now; None where it is off, or unknown to the device."""
    known = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if known else None


def recomputed(function: Any, *args: Any) -> Any:
    """function(*args), of whose activations nothing is kept: backward calls it again. Nothing in it may be random."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def _fuses_groups(q: Tensor, mask: Tensor | None = None) -> bool:
    """Whether PyTorch has a fused attention kernel for grouped queries of this dtype on this device.

    On CUDA that is FlashAttention alone: 16 bits, compute capability 8.0, no mask. Without it grouped queries fall to
    plain mathematics, which keeps the scores of every pair of tokens.
    """
    if q.device.type != "cuda":
        return True
    return (
        mask is None
        and q.dtype != torch.float32
        and torch.cuda.get_device_properties(q.device).major >= 8
    )


def spread(x: Tensor, heads: int) -> Tensor:
    """[batch, kv_heads, time, head_dim] -> [batch, heads, time, head_dim]: each head repeated for its group of queries,
    side by side, as `enable_gqa` shares them."""
    batch, kv_heads, time, width = x.shape
    return (
        x[:, :, None]
        .expand(batch, kv_heads, heads // kv_heads, time, width)
        .reshape(batch, heads, time, width)
    )


def rotary(
    time: int,
    head_dim: int,
    device: torch.device,
    base: float = ROPE_BASE,
    scaling: Mapping[str, float] | None = None,
) -> Rotation:
    """cos and sin, float32 [time, head_dim / 2], of RoFormer's rotary embedding (arXiv 2104.09864).

    scaling: see `build`.
    """
    frequency = float(base) ** (
        -torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    )
    if scaling is not None:
        frequency = _stretched(frequency, scaling)
    angle = torch.outer(torch.arange(time, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def _stretched(frequency: Tensor, scaling: Mapping[str, float]) -> Tensor:
    """Llama 3.1's rule for long contexts (arXiv 2407.21783, and the reference code that came with it): waves of which
    few fit into the original context turn `factor` times slower, those of which many fit stay, in between it blends."""
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / scaling["factor"])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (first half, second half) of the last dimension; computed in float32, returned in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def documents(segments: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's position in its document, int64 [batch, time], and who may attend to whom, float32
    [batch, 1, time, time]: 0 for itself and earlier tokens of the same document, -inf for all others.

    segments: int64 [batch, time]. A document is a run of equal numbers.
    """
    place = torch.arange(segments.shape[1], device=segments.device)
    begins = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=False)
    position = place - torch.where(begins, place, 0).cummax(1).values
    document = begins.cumsum(1)
    allowed = (document[:, :, None] == document[:, None, :]) & (place[:, None] >= place)
    mask = torch.zeros(allowed.shape, device=segments.device).masked_fill(~allowed, -math.inf)
    return position, mask[:, None]


def build(
    vocab: int = 256,
    dim: int = 256,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int | None = None,
    ffn: int | None = None,
    tied: bool = False,
    qk_norm: bool = False,
    rope_base: float = ROPE_BASE,
    rope_scaling: Mapping[str, float] | None = None,
    norm_eps: float = EPS,
    z_loss: float = 0.0,
    loss_chunk: int = 0,
    recompute: str = "none",
    recompute_every: int = 1,
) -> GPT:
    """A GPT with freshly initialised fp32 weights.

    dim: width. kv_heads: default `heads`. ffn: hidden width of the SwiGLU, default 8/3 dim rounded up to a multiple of
    16. tied: the head shares the embedding's weight. qk_norm: RMSNorm over each head of queries and keys, before they
    are rotated. rope_base: the rotary embedding's (Llama 3: 500000). rope_scaling: Llama 3.1's for long contexts, with
    the keys in SCALING. norm_eps: of every RMSNorm. z_loss: weight of log(Z)^2 in the gradient (PaLM: 1e-4).
    loss_chunk: tokens whose logits are in memory at a time, 0: all of a micro-batch. recompute: "mlp" or "block": that
    part of every `recompute_every`-th block keeps its input alone and is computed again in backward; "none".
    Raises ConfigError naming every argument that cannot be, and for a model that exceeds this machine's memory.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    if ffn is None and isinstance(dim, int):
        ffn = max(16, -(-8 * dim // 3 // 16) * 16)
    sizes = {
        "vocab": vocab,
        "dim": dim,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
    }
    problems = [
        Problem(f"{value!r} is not a positive integer", f"model.args.{key}", fix="give a size")
        for key, value in {**sizes, "recompute_every": recompute_every}.items()
        if not _whole(value) or value < 1
    ]
    if not problems and dim % (2 * heads):
        near = max(2 * heads, round(dim / (2 * heads)) * 2 * heads)
        problems.append(
            Problem(
                f"dim {dim} does not divide into {heads} heads of even size",
                "model.args.dim",
                fix=f"use dim: {near}",
            )
        )
    if not problems and heads % kv_heads:
        problems.append(
            Problem(
                f"{heads} heads are not a multiple of {kv_heads} kv_heads",
                "model.args.kv_heads",
                fix="use a divisor",
            )
        )
    for key, value in {"tied": tied, "qk_norm": qk_norm}.items():
        if not isinstance(value, bool):
            problems.append(
                Problem(
                    f"{value!r} is not true or false",
                    f"model.args.{key}",
                    fix="write true or false",
                )
            )
    for key, value, least in (("rope_base", rope_base, 1.0), ("norm_eps", norm_eps, 0.0)):
        if not _number(value) or value <= least:
            problems.append(
                Problem(
                    f"{value!r} is not over {least:g}", f"model.args.{key}", fix="give a larger one"
                )
            )
    if not _number(z_loss) or z_loss < 0:
        problems.append(
            Problem(
                f"{z_loss!r} is not 0 or more", "model.args.z_loss", fix="try 1e-4, or 0 for none"
            )
        )
    if not _whole(loss_chunk) or loss_chunk < 0:
        fix = "give a number of tokens, such as 1024, or 0 for all at once"
        problems.append(
            Problem(f"{loss_chunk!r} is not 0 or more", "model.args.loss_chunk", fix=fix)
        )
    if recompute not in RECOMPUTE:
        fix = near_match(str(recompute), RECOMPUTE)
        problems.append(
            Problem(f"{recompute!r} is nothing to recompute", "model.args.recompute", fix=fix)
        )
    problems += _wrong_scaling(rope_scaling)
    if problems:
        raise ConfigError(problems)
    assert ffn is not None
    settings = Settings(
        vocab=vocab,
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        tied=tied,
        qk_norm=qk_norm,
        rope_base=float(rope_base),
        rope_scaling=rope_scaling,
        norm_eps=norm_eps,
        z_loss=z_loss,
        loss_chunk=loss_chunk,
        recompute=recompute,
        recompute_every=recompute_every,
    )
    require_room(*size_of(settings), sizes)
    return GPT(settings)


def size_of(settings: Settings) -> tuple[int, int]:
    """Parameters and modules of a GPT, without building it."""
    dim, head_dim = settings.dim, settings.head_dim
    attention = dim * (settings.heads + 2 * settings.kv_heads) * head_dim + dim * dim
    norms, modules = 2 * dim, 10
    if settings.qk_norm:
        norms, modules = norms + 2 * head_dim, modules + 2
    block = attention + 3 * dim * settings.ffn + norms
    ends = settings.vocab * dim * (1 if settings.tied else 2) + dim
    return settings.layers * block + ends, settings.layers * modules + 6


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _wrong_scaling(scaling: object) -> list[Problem]:
    """What is wrong with `rope_scaling`, which may be None; empty if nothing is."""
    where, fix = (
        "model.args.rope_scaling",
        f"give {', '.join(SCALING)}, as in Llama 3.1's config.json",
    )
    if scaling is None:
        return []
    if not isinstance(scaling, Mapping) or set(scaling) != set(SCALING):
        return [Problem(f"{scaling!r} is not a mapping with the keys of Llama 3.1", where, fix=fix)]
    if odd := [key for key in SCALING if not _number(scaling[key]) or scaling[key] <= 0]:
        return [Problem(f"{key} {scaling[key]!r} is not over 0", where, fix=fix) for key in odd]
    if scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        return [Problem("high_freq_factor is not over low_freq_factor", where, fix=fix)]
    return []
