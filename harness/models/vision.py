"""Small image classifiers as targets: `model.target: harness.models.vision:convnet` or `:vit`.

forward(images: float [batch, channels, height, width]) -> logits [batch, classes]. Neither has BatchNorm. So the loss
of a sample does not depend on the others of its micro-batch, and is the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.core.errors import ConfigError, Problem
from harness.models.room import require_room


class ConvNet(nn.Module):
    """3 x 3 convolutions with GroupNorm and GELU, then the mean over positions and one Linear.

    Each convolution after the first halves the resolution. Nothing here runs in FP8: convolutions have no FP8 kernel,
    and the Linear is too small for one.
    """

    def __init__(self, channels: int, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        into = channels
        for number, out in enumerate(widths):
            stride = 2 if number else 1
            convolution = nn.Conv2d(into, out, kernel_size=3, stride=stride, padding=1)
            layers += [convolution, nn.GroupNorm(8, out), nn.GELU()]
            into = out
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((2, 3)))


class Block(nn.Module):
    """Pre-norm attention and MLP. Its four Linears can become FP8 layers if the width is a multiple of 16."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape

        # Attention: [batch, tokens, 3, heads, head_dim] -> three of [batch, heads, tokens, head_dim].
        qkv = self.qkv(self.norm1(x))
        qkv = qkv.view(batch, tokens, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        mixed = mixed.transpose(1, 2).reshape(batch, tokens, dim)
        x = x + self.out(mixed)

        # MLP.
        hidden = F.gelu(self.up(self.norm2(x)))
        return x + self.down(hidden)


class ViT(nn.Module):
    """Vision Transformer (Dosovitskiy et al., 2021) with learned positions.

    It has no class token but takes the mean over positions. So the number of tokens is that of the patches, and stays a
    multiple of 16 if that is one.
    """

    def __init__(
        self, channels: int, size: int, patch: int, dim: int, layers: int, heads: int, classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, dim, patch, patch)
        self.places = nn.Parameter(torch.randn((size // patch) ** 2, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        # [batch, dim, rows, columns] -> [batch, tokens, dim]
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = patches + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def convnet(
    channels: int = 1,
    widths: Sequence[int] = (32, 64),
    classes: int = 10,
) -> ConvNet:
    """A fresh ConvNet. widths: channels of each convolution's output.

    Raises ConfigError for widths that are not multiples of 8 (GroupNorm has 8 groups), and for a model that exceeds
    this machine's memory.
    """
    if not widths or any(width % 8 for width in widths):
        what = f"widths {list(widths)} are not multiples of 8"
        raise ConfigError(Problem(what, "model.args", fix="such as [32, 64]"))

    # 3 x 3 weights for each pair of channels; biases and norms are left out.
    weights = 0
    into = channels
    for out in widths:
        weights += 9 * into * out
        into = out
    weights += widths[-1] * classes
    sizes = {"classes": classes, "widths": max(widths)}
    require_room(weights, 3 * len(widths), sizes)
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
    """A fresh ViT. size, patch: pixels of a side of the image, and of a patch.

    Raises ConfigError if patches do not tile the image, if `dim` is not a multiple of `heads`, and for a model that
    exceeds this machine's memory.
    """
    problems: list[Problem] = []
    if size % patch:
        what = f"patches of {patch} do not tile {size} pixels"
        problems.append(Problem(what, "model.args", fix="change patch"))
    if dim % heads:
        what = f"dim {dim} is not a multiple of heads {heads}"
        problems.append(Problem(what, "model.args", fix="change heads"))
    if problems:
        raise ConfigError(problems)

    # Patches, positions, 12 dim^2 weights of each block, head; biases and norms are left out.
    tokens = (size // patch) ** 2
    weights = dim * (channels * patch**2 + tokens + 12 * layers * dim + classes)
    sizes = {"dim": dim, "layers": layers, "size": size, "classes": classes}
    require_room(weights, 7 * layers, sizes)
    return ViT(channels, size, patch, dim, layers, heads, classes)
