"""How `benchmarks.cost` computes a Linear's operands and products, with each piece of FP8 as a switch.

FP8 is emulated: values are rounded to FP8 and multiplied exactly, sums are fp32, an output is rounded once to bf16. On
a CPU that is the product's own emulation to the last bit. On a card the rounded values ride in float32 through TF32
GEMMs, which hold each of them exactly, so that the scales can stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.precision import scaling
from harness.precision.recipe import Fp8Config

GEMMS = ("fprop", "dgrad", "wgrad")
ROLES = ("input", "weight", "grad_output")
KINDS = ("qkv", "out", "gate_up", "down")
USED_BY = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}
BLOCK = 128
RESIDUAL_BITS = 4
"""E4M3 leaves at most 2^-4 of a value: the residual's scale is that many powers of two above the weight's."""
_EXPONENT_MASK = 0x7F800000


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute the blocks' Linears; the default is the recipe fp8_hybrid.

    gemms: those that take FP8 operands; none of them: bf16. roles: the tensors that are rounded to FP8, in those GEMMs.
    kinds: the Linears. edges: the first and the last block, too. gradient: the format of grad_output. stochastic:
    grad_output is rounded up or down by chance, without bias. smooth: the input of `down` is multiplied by a power of
    two a channel that brings its largest value to [1, 2), the weight divided by it (after Smooth-SwiGLU, arXiv
    2409.12517). weight_residual: W is q(W) + q(W - q(W)). bf16_steps: so many first steps compute in bf16, with amaxes
    recorded. coin: over 0, initial weights are moved by one fp32 ulp, up or down by coins of that number.
    """

    gemms: tuple[str, ...] = GEMMS
    roles: tuple[str, ...] = ROLES
    kinds: tuple[str, ...] = KINDS
    edges: bool = True
    scaling: str = "delayed"
    history: int = 16
    algo: str = "max"
    margin: int = 0
    gradient: str = "e5m2"
    stochastic: bool = False
    smooth: bool = False
    weight_residual: bool = False
    bf16_steps: int = 0
    coin: int = 0


@dataclass(frozen=True, slots=True)
class Operand:
    """A GEMM's operand for each seed. parts: [S, r, c], whose sum it is, times `inverse` float32 [S] (None: 1)."""

    parts: tuple[Tensor, ...]
    inverse: Tensor | None = None


def round_fp8(x: Tensor, scale: Tensor, fmt: str, card: bool) -> Tensor:
    """FP8 values of x * scale, saturated, to nearest even: the product's own way on a CPU (in bfloat16); on a card the
    hardware's cast (in float32). scale: float32, broadcastable, with as many dimensions."""
    if not card:
        return scaling.quantize(x, scale, fmt)
    spec = scaling.FORMATS[fmt]
    return (x.detach() * scale).clamp_(-spec.max, spec.max).to(spec.dtype).float()


def round_by_chance(x: Tensor, scale: Tensor, fmt: str, generator: torch.Generator) -> Tensor:
    """FP8 values of x * scale in float32, saturated; one of the two neighbours, the nearer one more often, so that the
    mean is x * scale."""
    spec = scaling.FORMATS[fmt]
    value = (x.detach().float() * scale).clamp_(-spec.max, spec.max)
    ulp = power_of_two(value.abs()).clamp_min_(2.0**spec.min_exponent).mul_(2.0**-spec.mantissa_bits)
    chance = torch.rand(value.shape, generator=generator, device=value.device)
    return torch.floor(value / ulp + chance).mul_(ulp).clamp_(-spec.max, spec.max)


def amax(x: Tensor, card: bool) -> Tensor:
    """Largest magnitude of each seed, float32 [S], of x [S, r, c]."""
    if card:  # one pass; on a CPU the norm is ten times slower
        return torch.linalg.vector_norm(x, ord=math.inf, dim=(1, 2), dtype=torch.float32)
    return x.abs().amax((1, 2)).float()


def power_of_two(x: Tensor) -> Tensor:
    """The largest power of two that is at most x, of a positive normal float32; 0 of 0."""
    return (x.contiguous().view(torch.int32) & _EXPONENT_MASK).view(torch.float32)


def in_blocks(x: Tensor, fmt: str, rows: int, columns: int, card: bool) -> Tensor:
    """x [S, r, c] rounded to FP8 with a power of two as scale for every block of rows x columns (the last ones may be
    smaller), unscaled again: bfloat16, which holds each value exactly, as TE's block scaling by default."""
    spec = scaling.FORMATS[fmt]
    seeds, r, c = x.shape
    padded = F.pad(x.detach().float(), (0, -c % columns, 0, -r % rows))
    blocks = padded.view(seeds, padded.shape[1] // rows, rows, padded.shape[2] // columns, columns)
    largest = blocks.abs().amax((2, 4), keepdim=True)
    scale = power_of_two(torch.where(largest > 0, spec.max / largest, 1.0).clamp(2.0**-126, 2.0**126))
    values = round_fp8(blocks, scale, fmt, card).float() / scale
    return values.reshape(padded.shape)[:, :r, :c].to(torch.bfloat16).contiguous()


def product(left: Operand, right: Operand, gemm: str, card: bool) -> Tensor:
    """bfloat16: fprop: left right^T; dgrad: left right; wgrad: left^T right. Exact products, rounded once.

    left has one part; where right has two, both are one GEMM of twice the common dimension.
    """
    a, parts = left.parts[0], right.parts
    b = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2 if gemm == "fprop" else 1)
    a = a if len(parts) == 1 else torch.cat([a] * len(parts), dim=2)
    a, b = (a.mT if gemm == "wgrad" else a), (b.mT if gemm == "fprop" else b)
    inverses = [each.inverse for each in (left, right) if each.inverse is not None]
    if not card:
        alphas = [math.prod(float(inverse[seed]) for inverse in inverses) for seed in range(len(a))]
        return torch.stack([_addmm(*each) for each in zip(a, b, alphas, strict=True)])
    if not inverses:
        return torch.bmm(a.to(torch.bfloat16), b.to(torch.bfloat16))
    scale = torch.stack(inverses).prod(0)
    sums = torch.bmm(a.float(), b.float())
    return torch.mul(sums, scale[:, None, None], out=torch.empty_like(sums, dtype=torch.bfloat16))


def _addmm(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    return torch.addmm(a.new_zeros(1), a, b, beta=0, alpha=alpha)


class Numbers:
    """The state of a job's `layers` Linears in FP8. active: FP8 is on; warming: first steps in bf16; card: compute
    as a card does, not as the product's emulation on a CPU, which gives the same but for the order of sums.

    A slot is a role of a layer, and has a column of history and a scale for each of the S seeds.
    """

    def __init__(self, variant: Variant, layers: int, seeds: int, device: torch.device, card: bool) -> None:
        self.variant, self.layers, self.seeds, self.card = variant, layers, seeds, card
        self.active = self.warming = False
        formats = ("e4m3", "e4m3", variant.gradient)
        largest = [scaling.FORMATS[fmt].max for _ in range(layers) for fmt in formats for _ in range(seeds)]
        self.state: scaling.ScalingState | None = None
        if variant.scaling == "delayed" and layers:
            config = Fp8Config.model_validate(
                {
                    "amax_history_len": variant.history,
                    "margin": variant.margin,
                    "amax_compute_algo": variant.algo,
                }
            )
            self.state = scaling.ScalingState(config, torch.tensor(largest, device=device))
        self.generator = torch.Generator(device)
        self._nobody = torch.zeros((), device=device)

    def begin_step(self, step: int) -> None:
        """step: counted from 0."""
        self.warming = step < self.variant.bf16_steps
        if self.state is not None:
            self.state.begin_window()

    def end_step(self) -> None:
        """Roll the amaxes in."""
        if self.state is not None:
            self.state.end_window(self.state.staged(), self._nobody)

    def operands(self, x: Tensor, layer: int, role: str, record: bool) -> Callable[[str], Operand]:
        """What each GEMM that uses `x` [S, r, c] takes of it; record: its amax counts."""
        variant = self.variant
        plain, shared = x.detach().to(torch.bfloat16), None
        chosen = [gemm for gemm in USED_BY[role] if gemm in variant.gemms] if role in variant.roles else []
        source = x.detach() if role == "weight" else plain
        if chosen and variant.scaling != "block":
            scale = self._scale(source, layer, role, record)
            shared = None if self.warming else self._cast(source, scale, role)

        def operand(gemm: str) -> Operand:
            if gemm not in chosen or self.warming:
                return Operand((plain,))
            if shared is not None:
                return shared
            common_is_last = gemm == "fprop" or (gemm == "dgrad" and role == "grad_output")
            rows, columns = (1, BLOCK) if common_is_last else (BLOCK, 1)
            shape = (BLOCK, BLOCK) if role == "weight" else (rows, columns)
            return Operand((in_blocks(source, self._format(role), *shape, self.card),))

        return operand

    def _scale(self, x: Tensor, layer: int, role: str, record: bool) -> Tensor:
        """float32 [S]: in use now. Delayed: from earlier steps, and this one's amax is staged."""
        largest = scaling.FORMATS[self._format(role)].max * 2.0**-self.variant.margin
        if self.state is None:
            found = amax(x, self.card)
            return torch.where(found > 0, torch.full_like(found, largest) / found, 1.0)
        first = (3 * layer + ROLES.index(role)) * self.seeds
        if record:
            staged = self.state.history[0, first : first + self.seeds]
            torch.maximum(staged, amax(x, self.card), out=staged)
        return self.state.scale[first : first + self.seeds]

    def _cast(self, x: Tensor, scale: Tensor, role: str) -> Operand:
        wide, inverse = scale[:, None, None], torch.ones_like(scale) / scale
        if role == "grad_output" and self.variant.stochastic:
            return Operand((round_by_chance(x, wide, self._format(role), self.generator),), inverse)
        values = round_fp8(x, wide, self._format(role), self.card)
        if role == "weight" and self.variant.weight_residual:
            left_over = x.float() * wide - values.float()
            more = round_fp8(left_over, torch.full_like(wide, 2.0**RESIDUAL_BITS), "e4m3", self.card)
            return Operand((values, more * 2.0**-RESIDUAL_BITS), inverse)
        return Operand((values,), inverse)

    def _format(self, role: str) -> str:
        return self.variant.gradient if role == "grad_output" else "e4m3"
