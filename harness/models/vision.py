"""Small image classifiers as targets: `model.target: harness.models.vision:convnet` or `:vit`.

forward(images float [batch, channels, height, width]) -> logits [batch, classes]. Neither has BatchNorm: the loss of a
sample does not depend on the others of its micro-batch, so that it is the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.core.errors import ConfigError, Problem
from harness.models.room import require_room


class ConvNet(nn.Module):
    """3 x 3 convolutions with GroupNorm, each after the first at half the resolution of the one before; then the mean
    over places and one Linear. Its convolutions have no FP8 kernel, and the Linear is too small for one."""

    def __init__(self, channels: int, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number, (into, out) in enumerate(zip([channels, *widths], widths, strict=False)):
            layers += [
                nn.Conv2d(into, out, 3, 2 if number else 1, 1),
                nn.GroupNorm(8, out),
                nn.GELU(),
            ]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((2, 3)))


class Block(nn.Module):
    """Pre-norm attention and MLP. Four Linears, which become FP8 layers where the width is a multiple of 16."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, places, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, places, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, places, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Vision Transformer (Dosovitskiy et al., 2021) with learned places and the mean over them in place of a class
    token, so that the number of tokens stays a multiple of 16 where that of patches is."""

    def __init__(
        self, channels: int, size: int, patch: int, dim: int, layers: int, heads: int, classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, dim, patch, patch)
        self.places = nn.Parameter(torch.randn((size // patch) ** 2, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def convnet(channels: int = 1, widths: Sequence[int] = (32, 64), classes: int = 10) -> ConvNet:
    """Raises ConfigError for widths that GroupNorm's 8 groups do not divide, and for a model that exceeds memory."""
    if not widths or any(width % 8 for width in widths):
        raise ConfigError(
            Problem(
                f"widths {list(widths)} are not multiples of 8",
                "model.args",
                fix="such as [32, 64]",
            )
        )
    kernels = sum(9 * into * out for into, out in zip([channels, *widths], widths, strict=False))
    require_room(
        kernels + widths[-1] * classes, 3 * len(widths), {"classes": classes, "widths": max(widths)}
    )
    return ConvNet(channels, widths, classes)


def vit(
    channels: int = 1,
    size: int = 8,
    patch: int = 2,
    dim: int = 64,
    layers: int = 2,
    heads: int = 4,
    classes: int = 10,
) -> ViT:
    """size: pixels of a side. Raises ConfigError where patches do not tile the image, or heads the width, and for a
    model that exceeds this machine's memory."""
    problems: list[Problem] = []
    if size % patch:
        problems.append(
            Problem(
                f"patches of {patch} do not tile {size} pixels", "model.args", fix="change patch"
            )
        )
    if dim % heads:
        problems.append(
            Problem(
                f"dim {dim} is not a multiple of heads {heads}", "model.args", fix="change heads"
            )
        )
    if problems:
        raise ConfigError(problems)
    matrices = dim * (channels * patch**2 + (size // patch) ** 2 + 12 * layers * dim + classes)
    sizes = {"dim": dim, "layers": layers, "size": size, "classes": classes}
    require_room(matrices, 7 * layers, sizes)
    return ViT(channels, size, patch, dim, layers, heads, classes)
