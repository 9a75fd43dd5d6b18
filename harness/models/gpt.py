"""The built-in GPT: Llama's architecture, or Qwen3's with `qk_norm`.

A pre-norm decoder with RMSNorm, rotary positions, grouped-query attention, SwiGLU, and a tied or untied head. From
token ids to a loss:

    x = embed(ids)
    for each block:
        x = x + attn(attn_norm(x))        queries, keys and values come from one matrix, `qkv`
        x = x + mlp(mlp_norm(x))          gate and up come from one matrix, `gate_up`
    loss = cross_entropy(lm_head(norm(x)), targets)

Attention scores and the loss are modules of their own, so that a recipe can keep them in float32 by name. Two options
save memory: `recompute` keeps fewer activations for backward, and `loss_chunk` never holds the logits of all tokens at
once, nor any of them in float32 (`token_loss.py`). `llama.py` converts weights from and to Llama's and Qwen3's names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.core.errors import ConfigError, Problem, near_match
from harness.core.facts import IGNORED
from harness.models.room import require_room
from harness.models.token_loss import (
    autocast_dtype,
    draws,
    dtype_of_head,
    loss_in_chunks,
    loss_of_head,
    recomputed,
    sum_of_losses,
)

ROPE_BASE = 10000.0
EPS = 1e-5
RECOMPUTE = ("none", "mlp", "block")
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Keys of `rope_scaling`, as in Llama 3.1's config.json."""

Rotation = tuple[Tensor, Tensor]
"""cos and sin of the rotary angles, float32 [time, head_dim / 2]; with a batch dimension for packed documents."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes and options of a GPT. `build` explains each."""

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
    """Causal attention: softmax(q k^T / sqrt(head_dim)) v. A module, so that a recipe can keep it in fp32 by name."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """q: [batch, heads, time, head_dim]; k, v: the same with as many or fewer heads -> the shape of q.

        mask: [batch, 1, time, time], added to the scores instead of the causal mask; in their dtype.
        """
        grouped = q.shape[1] != k.shape[1]
        if grouped and not _fuses_groups(q, mask):
            # Without a fused kernel for groups, copies of the heads take less memory than unfused attention.
            k = spread(k, q.shape[1])
            v = spread(v, q.shape[1])
            grouped = False
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


class Attention(nn.Module):
    """Causal self-attention with rotary positions. With `kv_heads` < `heads` it is grouped-query attention."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        dim = settings.dim
        self.heads = settings.heads
        self.kv_heads = settings.kv_heads
        self.head_dim = settings.head_dim
        # Queries, keys and values in one product.
        outputs = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(dim, outputs, bias=False)
        self.q_norm: nn.RMSNorm | None = None
        self.k_norm: nn.RMSNorm | None = None
        if settings.qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=settings.norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=settings.norm_eps)
        self.scores = Scores()
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None = None) -> Tensor:
        """x: [batch, time, dim] -> the same shape."""
        batch, time, dim = x.shape
        shape = (batch, time, self.heads + 2 * self.kv_heads, self.head_dim)
        # Split first, then transposed: so backward joins the gradients in the layout that the GEMMs read.
        parts = self.qkv(x).view(shape).split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        q, k, v = (part.transpose(1, 2) for part in parts)

        # In float32 by hand: CUDA's autocast does that for norms, a CPU's does not.
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q.float()).to(v.dtype)
            k = self.k_norm(k.float()).to(v.dtype)
        q = rotate(q, *rotation)
        k = rotate(k, *rotation)

        mixed = self.scores(q, k, v) if mask is None else self.scores(q, k, v, mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, dim))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). Gate and up are one matrix."""

    # For recipes with layers.fuse: first Linear -> second Linear. See precision/layers.py.
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
    """Pre-norm transformer block.

    recomputes_mlp: of the feed-forward half, only the input is kept for backward; the rest is computed again.
    """

    # For recipes with layers.fuse: Linear -> the norm whose output it reads.
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
            # A compiler restores random numbers by itself.
            random = not torch.compiler.is_compiling() and draws(self.mlp)
            return x + recomputed(self._feed_forward, x, random=random)
        return x + self._feed_forward(x)

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.mlp_norm(x))


class TokenLoss(nn.Module):
    """Mean cross-entropy in nats per token. A module, so that a recipe can keep it in fp32 by name.

    z_loss: weight of the mean of log(Z)^2, where Z is the softmax's denominator (PaLM, arXiv 2204.02311, takes 1e-4).
    It changes only the gradient. The value stays the cross-entropy, so losses with and without z_loss are comparable.
    """

    def __init__(self, z_loss: float = 0.0) -> None:
        super().__init__()
        self.z_loss = z_loss

    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        counted: Tensor | None = None,
    ) -> Tensor:
        """logits: [..., vocab]; targets: int64 [...], -100 has no loss -> float32 0-d.

        counted: number of targets with a loss in the whole micro-batch, if `logits` is one chunk of it. The chunk's sum
            is divided by it, so that the results of all chunks add up to the mean.
        """
        targets = targets.flatten()
        if counted is not None:
            return sum_of_losses(logits.flatten(0, -2), targets, self.z_loss) / counted
        rows = logits.float().flatten(0, -2)
        loss = F.cross_entropy(rows, targets)
        if not self.z_loss:
            return loss

        # Only targets that count: padding would pull on Z as well.
        kept = targets != IGNORED
        squares = rows.logsumexp(-1).square()
        penalty = self.z_loss * torch.where(kept, squares, 0.0).sum() / kept.sum()
        # The value of this difference is 0; its gradient is the penalty's.
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
        self.blocks = nn.ModuleList()
        for index in range(settings.layers):
            recomputes_mlp = settings.recompute == "mlp" and self._recomputes(index)
            self.blocks.append(Block(settings, recomputes_mlp))
        self.norm = nn.RMSNorm(settings.dim, eps=settings.norm_eps)
        self.lm_head = nn.Linear(settings.dim, settings.vocab, bias=False)
        self.loss = TokenLoss(settings.z_loss)
        self._initialise(settings.layers, settings.tied)
        if settings.tied:
            self.lm_head.weight = self.embed.weight

    def _initialise(self, layers: int, tied: bool) -> None:
        """Fill all matrices from Normal(0, 0.02), as GPT-2 does.

        The two projections into the residual stream are scaled by 1/sqrt(2 * layers). An untied embedding starts at
        unit variance. The first RMSNorm divides by its size, so at 0.02 its gradient would be 50 times that of
        everything else.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            std = 0.02
            if name.endswith(("attn.out.weight", "mlp.down.weight")):
                std = 0.02 / math.sqrt(2 * layers)
            nn.init.normal_(parameter, std=std)
        if not tied:
            nn.init.normal_(self.embed.weight)

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """inputs: int64 [batch, time]. With targets: float32 0-d mean loss; without: logits [batch, time, vocab].

        targets: int64 [batch, time]; -100 has no loss.
        segments: int64 [batch, time], the number of each token's document. Attention stays within a document, and
        positions begin at 0 in each, as if it were alone.
        """
        x = self.embed(inputs)

        # Rotary angles, the same for all blocks. Packed documents have positions of their own, and a mask between them.
        rotation = self._rotation(inputs.shape[1], x.device)
        mask = None
        if segments is not None:
            position, mask = documents(segments)
            cos, sin = rotation
            rotation = (cos[position][:, None], sin[position][:, None])
            # Autocast casts queries, keys and values but no mask. Cast here, it is one tensor that all blocks share.
            mask = mask.to(autocast_dtype(x.device.type) or x.dtype)

        # The blocks. A recomputed block keeps only its input for backward; without a backward that saves nothing.
        whole = self.settings.recompute == "block" and torch.is_grad_enabled()
        for index, block in enumerate(self.blocks):
            again = whole and self._recomputes(index)
            if not again:
                x = block(x, rotation, mask)
                continue
            x = recomputed(block, x, rotation, mask, random=draws(block))

        # Head and loss, for all tokens at once or in chunks.
        if targets is None:
            return self.lm_head(self.norm(x))
        chunk = self.settings.loss_chunk
        if not chunk:
            return self.loss(self.lm_head(self.norm(x)), targets)
        x, targets = x.flatten(0, 1), targets.flatten()
        dtype = dtype_of_head(self.lm_head, x) if type(self.loss) is TokenLoss else None
        if dtype is None:
            counted = (targets != IGNORED).sum()
            random = draws(self.lm_head)
            return loss_in_chunks(self._share, x, targets, counted, chunk, random)
        weight, z_loss = self.lm_head.weight, self.loss.z_loss
        return loss_of_head(self.norm(x), weight, targets, chunk, z_loss, dtype)

    def _recomputes(self, index: int) -> bool:
        """Whether block `index` is one of those that `recompute` applies to."""
        return index % self.settings.recompute_every == 0

    def _rotation(self, time: int, device: torch.device) -> Rotation:
        return rotary(
            time, self.head_dim, device, self.settings.rope_base, self.settings.rope_scaling
        )

    def _share(self, x: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
        # The norm is part of the chunk: a recipe may fuse it with the head.
        return self.loss(self.lm_head(self.norm(x)), targets, counted)


def _fuses_groups(q: Tensor, mask: Tensor | None = None) -> bool:
    """Whether PyTorch has a fused attention kernel for grouped queries of this dtype on this device.

    On CUDA only FlashAttention has one: 16 bits, compute capability 8.0 or higher, no mask. Without it, PyTorch takes
    unfused attention for grouped queries, which keeps the scores of every pair of tokens.
    """
    if q.device.type != "cuda":
        return True
    if mask is not None or q.dtype == torch.float32:
        return False
    return torch.cuda.get_device_properties(q.device).major >= 8


def spread(x: Tensor, heads: int) -> Tensor:
    """Repeat each key or value head for the queries of its group, side by side, as `enable_gqa` shares them.

    x: [batch, kv_heads, time, head_dim] -> [batch, heads, time, head_dim].
    """
    batch, kv_heads, time, width = x.shape
    repeated = x[:, :, None].expand(batch, kv_heads, heads // kv_heads, time, width)
    return repeated.reshape(batch, heads, time, width)


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
    # In float32 throughout: in bf16 positions over 256 would be rounded.
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    frequency = float(base) ** (-pairs / head_dim)
    if scaling is not None:
        frequency = _stretched(frequency, scaling)
    position = torch.arange(time, device=device, dtype=torch.float32)
    angle = torch.outer(position, frequency)
    return angle.cos(), angle.sin()


def _stretched(frequency: Tensor, scaling: Mapping[str, float]) -> Tensor:
    """Llama 3.1's frequencies for long contexts (arXiv 2407.21783 and its reference code).

    Short wavelengths (many turns in the original context) keep their frequency. Long ones (few turns) become `factor`
    times slower. In between, the two are blended.
    """
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / scaling["factor"])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (first half, second half) of the last dimension; computed in float32, returned in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)


def documents(segments: Tensor) -> tuple[Tensor, Tensor]:
    """Positions and attention mask of packed documents.

    segments: int64 [batch, time]. A document is a run of equal numbers.
    position: int64 [batch, time], each token's position in its document.
    mask: float32 [batch, 1, time, time]; 0 for the token itself and earlier ones of its document, else -inf.
    """
    place = torch.arange(segments.shape[1], device=segments.device)

    # A token's position is its place minus the place at which its document begins.
    begins = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=False)
    position = place - torch.where(begins, place, 0).cummax(1).values

    # Documents are numbered anew, because two runs in one sample may have the same number.
    document = begins.cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    allowed = same & (place[:, None] >= place)
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

    vocab: number of token ids.
    dim: width.
    layers, heads: numbers of blocks, and of attention heads in each.
    kv_heads: heads of keys and values; default `heads`.
    ffn: hidden width of the SwiGLU; default 8/3 dim, rounded up to a multiple of 16.
    tied: whether the head shares the embedding's weight.
    qk_norm: whether each head of queries and keys gets an RMSNorm before the rotation.
    rope_base: base of the rotary embedding (Llama 3: 500000).
    rope_scaling: Llama 3.1's scaling for long contexts, with the keys in SCALING.
    norm_eps: epsilon of every RMSNorm.
    z_loss: weight of log(Z)^2 in the gradient (PaLM: 1e-4).
    loss_chunk: tokens whose logits are in memory at a time; 0: all of a micro-batch.
    recompute: "mlp" or "block": this part keeps only its input and is computed again in backward; "none".
    recompute_every: apply `recompute` to every so many-th block.

    Raises ConfigError naming every argument that is invalid, and for a model that exceeds this machine's memory.
    """
    # Defaults that depend on other sizes. A wrong `dim` is reported below, with everything else.
    if kv_heads is None:
        kv_heads = heads
    if ffn is None and isinstance(dim, int):
        ffn = max(16, -(-8 * dim // 3 // 16) * 16)

    # All arguments come from a config: report everything that is wrong with them at once.
    sizes = {
        "vocab": vocab,
        "dim": dim,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
    }
    problems = [
        *_wrong_sizes(sizes, recompute_every),
        *_wrong_flags({"tied": tied, "qk_norm": qk_norm}),
        *_wrong_numbers(rope_base, norm_eps, z_loss),
        *_wrong_savings(loss_chunk, recompute),
        *_wrong_scaling(rope_scaling),
    ]
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
    # Before a weight is made: the kernel would end the process without a word.
    require_room(*size_of(settings), sizes)
    return GPT(settings)


def size_of(settings: Settings) -> tuple[int, int]:
    """The numbers of parameters and of modules of a GPT, without building it."""
    dim, head_dim = settings.dim, settings.head_dim
    qkv = dim * (settings.heads + 2 * settings.kv_heads) * head_dim
    attention = qkv + dim * dim
    norms = 2 * dim
    # The block itself, its two norms, attention and its three parts, feed-forward and its two Linears.
    modules = 10
    if settings.qk_norm:
        norms += 2 * head_dim
        modules += 2
    block = attention + 3 * dim * settings.ffn + norms
    matrices = 1 if settings.tied else 2
    ends = matrices * settings.vocab * dim + dim
    # Outside of the blocks: the GPT itself, embedding, list of blocks, last norm, head and loss.
    outside = 6
    return settings.layers * block + ends, settings.layers * modules + outside


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> TypeGuard[float]:
    # A bool is an int to Python, and no number to people.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def _wrong_sizes(sizes: Mapping[str, Any], recompute_every: int) -> list[Problem]:
    """Problems of the sizes, by themselves and together."""
    problems: list[Problem] = []
    for key, value in {**sizes, "recompute_every": recompute_every}.items():
        if not _whole(value) or value < 1:
            what = f"{value!r} is not a positive integer"
            problems.append(Problem(what, f"model.args.{key}", fix="give a size"))
    if problems:
        return problems

    # Only valid sizes can be held against each other. Rotation needs heads of even size.
    dim, heads, kv_heads = sizes["dim"], sizes["heads"], sizes["kv_heads"]
    if dim % (2 * heads):
        near = max(2 * heads, round(dim / (2 * heads)) * 2 * heads)
        what = f"dim {dim} does not divide into {heads} heads of even size"
        return [Problem(what, "model.args.dim", fix=f"use dim: {near}")]
    if heads % kv_heads:
        what = f"{heads} heads are not a multiple of {kv_heads} kv_heads"
        return [Problem(what, "model.args.kv_heads", fix="use a divisor")]
    return []


def _wrong_flags(flags: Mapping[str, object]) -> list[Problem]:
    problems: list[Problem] = []
    for key, value in flags.items():
        if not isinstance(value, bool):
            what = f"{value!r} is not true or false"
            problems.append(Problem(what, f"model.args.{key}", fix="write true or false"))
    return problems


def _wrong_numbers(rope_base: object, norm_eps: object, z_loss: object) -> list[Problem]:
    problems: list[Problem] = []
    limits = (("rope_base", rope_base, 1.0), ("norm_eps", norm_eps, 0.0))
    for key, value, least in limits:
        if not _number(value) or value <= least:
            what = f"{value!r} is not over {least:g}"
            problems.append(Problem(what, f"model.args.{key}", fix="give a larger one"))
    if not _number(z_loss) or z_loss < 0:
        what = f"{z_loss!r} is not 0 or more"
        problems.append(Problem(what, "model.args.z_loss", fix="try 1e-4, or 0 for none"))
    return problems


def _wrong_savings(loss_chunk: object, recompute: object) -> list[Problem]:
    """Problems of the options that save memory."""
    problems: list[Problem] = []
    if not _whole(loss_chunk) or loss_chunk < 0:
        what = f"{loss_chunk!r} is not 0 or more"
        fix = "give a number of tokens, such as 1024, or 0 for all at once"
        problems.append(Problem(what, "model.args.loss_chunk", fix=fix))
    if recompute not in RECOMPUTE:
        what = f"{recompute!r} cannot be recomputed"
        fix = near_match(str(recompute), RECOMPUTE)
        problems.append(Problem(what, "model.args.recompute", fix=fix))
    return problems


def _wrong_scaling(scaling: object) -> list[Problem]:
    """Problems of `rope_scaling`, which may be None."""
    if scaling is None:
        return []
    where = "model.args.rope_scaling"
    fix = f"give {', '.join(SCALING)}, as in Llama 3.1's config.json"
    if not isinstance(scaling, Mapping) or set(scaling) != set(SCALING):
        return [Problem(f"{scaling!r} is not a mapping with the keys of Llama 3.1", where, fix=fix)]
    problems: list[Problem] = []
    for key in SCALING:
        value = scaling[key]
        if not _number(value) or value <= 0:
            problems.append(Problem(f"{key} {value!r} is not over 0", where, fix=fix))
    if problems:
        return problems
    if scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        return [Problem("high_freq_factor is not over low_freq_factor", where, fix=fix)]
    return []
