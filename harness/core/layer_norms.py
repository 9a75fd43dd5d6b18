"""Gradient norms by layer, for the hunt (`guard.hunt`): which layer made the gradient large.

A layer is a module that owns trained parameters, under its name in the model. A parameter of the model itself is a
layer of its own. A model of very many such modules, such as a mixture of experts, is measured by the modules around
them.

The squares of all gradients come from one fused operation for each dtype. They leave as one vector, which ranks that
hold different rows add up together with the step's other sums. So the hunt costs no collective and no host read.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from harness.core.facts import pad_numbers
from harness.core.health import by_device_and_dtype, squares_of_each, to_device

MOST_LAYERS = 512
"""More layers than this are joined: each is a series in the journal and in MLflow, in every step of a hunt."""


def layers_of(parameters: Sequence[str], most: int = MOST_LAYERS) -> list[str]:
    """The layer of each parameter, with padded numbers.

    With more than `most` layers, names are cut to as many parts as leave at most that many, though to one at least.
    """
    owners: list[list[str]] = []
    for parameter in parameters:
        owner, _, own_name = parameter.rpartition(".")
        owners.append((owner or own_name).split("."))

    depth = max((len(parts) for parts in owners), default=1)
    layers = [".".join(parts) for parts in owners]
    while len(set(layers)) > most and depth > 1:
        depth -= 1
        layers = [".".join(parts[:depth]) for parts in owners]
    return [pad_numbers(layer) for layer in layers]


def layer_of(parameter: str, layers: Container[str]) -> str:
    """The one of `layers`, which `layers_of` gave, that a parameter belongs to; empty if it is none of them."""
    parts = pad_numbers(parameter).split(".")
    for count in range(len(parts), 0, -1):
        layer = ".".join(parts[:count])
        if layer in layers:
            return layer
    return ""


class LayerNorms:
    """Which layers a model's trained weights belong to, and the squares of their gradients.

    weights: the trained weights by their names in the model, the same names on every rank.
    layers: in the order of the model.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        self._weights = {name: each for name, each in weights.items() if each.requires_grad}
        of_each = layers_of(list(self._weights))
        self.layers = tuple(dict.fromkeys(of_each))

        # Each weight has a cell of its own in a table with one row for each layer, so that sums are of rows. Adding
        # into one number for each layer would add in any order on a GPU.
        rows = {layer: row for row, layer in enumerate(self.layers)}
        used = [0] * len(self.layers)
        self._cells: list[tuple[int, int]] = []
        for layer in of_each:
            row = rows[layer]
            self._cells.append((row, used[row]))
            used[row] += 1
        self._width = max(used, default=1)

    @torch.no_grad()
    def squares(self, counted: Iterable[nn.Parameter], device: torch.device) -> Tensor:
        """Sum of the squares of each layer's gradients as they are: fp64 [layers], on `device`. No host read.

        counted: the weights whose gradients count on this rank; see `LocalRows.counted`. A weight without a gradient
            counts as zero.
        """
        here = {id(each) for each in counted}
        places: dict[int, int] = {}
        gradients: list[Tensor] = []
        for weight, (row, column) in zip(self._weights.values(), self._cells, strict=True):
            gradient = weight.grad
            if id(weight) in here and gradient is not None and gradient.numel():
                places[id(gradient)] = row * self._width + column
                gradients.append(gradient)

        # Each weight has a cell of its own, so no two kernels add to the same one.
        table = torch.zeros(len(self.layers) * self._width, dtype=torch.float64, device=device)
        for group in by_device_and_dtype(gradients):
            cells = torch.tensor([places[id(gradient)] for gradient in group], device="cpu")
            table[to_device(cells, device)] = squares_of_each(group).to(device)
        return table.reshape(len(self.layers), self._width).sum(dim=1)
