"""What the update of a step needs of a model that FSDP2 (torch's `fully_shard`) has sharded.

For our engine, and for loops of the user's own.

`fully_shard` puts DTensors in the place of the model's Parameters. Each rank holds its rows of them. For every DTensor
there is a plain Parameter over the same memory here (`LocalRows.weights`). Norms, shares and snapshots are taken from
those. What is measured of rows is summed over ranks in fp64, in rank order (`LocalRows.sum`), so every rank has the
same bits, and they are those of whole tensors.

Traps that this file takes care of:

- The root of the model stays gathered after a forward without backward, such as a validation. Rows that change while
  it is gathered would not be seen by the next forward. `LocalRows.reshard` drops what is gathered.
- Ranks that call blocks in another order gather halves of different weights, and nothing fails if the sizes agree. So
  the order of calls travels with the sums: where ranks differ the norm is infinite, and the update is skipped. The
  step's facts say so (`StepFacts.other_calls`), and its judge names it one step later. Calls without gradients count
  too: they gather as well.
- 0-d parameters cannot be cut. Every rank holds them, and their gradients are averaged here.
- Ranks that start with different weights would each keep their own rows, and train a patchwork (`StartWeights`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from harness.core.collectives import (
    Fingerprint,
    differing,
    gather_over_ranks,
    mean_over_ranks,
    world_rank,
    world_size,
)
from harness.core.shards import Rows


def local_of(tensor: Tensor) -> Tensor:
    """This rank's rows of a DTensor, the same memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class CallOrder:
    """The order in which this rank called the blocks of a model since the last window, as one number under 2^40.

    Calls with and without gradients count as different ones.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self.value = 0
        for number, block in enumerate(blocks, start=1):
            # Compiled code must not take the number for a constant.
            note: Any = torch.compiler.disable(partial(self._note, number))
            block.register_forward_pre_hook(note)

    def _note(self, number: int, module: nn.Module, args: object) -> None:
        called = 2 * number + torch.is_grad_enabled()
        self.value = (self.value * 1_000_003 + called) % 2**40


class LocalRows:
    """This rank's rows of every parameter of a sharded model.

    model: sharded; nothing of it is gathered now.
    blocks: whose order of calls is compared between ranks.

    sharded: the DTensors by name.
    weights: by name, what an update sees: a Parameter over the memory of this rank's rows, or the parameter itself
        where every rank holds it whole.
    rows: by name, which rows of a sharded parameter are here.
    calls: the order of calls in this window.
    same_order: 0-d bool, whether all ranks had the same one in the last window; set by `sum`.
    """

    same_order: Tensor

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        self.model = model
        self.calls = CallOrder(blocks)
        self.sharded: dict[str, DTensor] = {}
        self.weights: dict[str, nn.Parameter] = {}
        self.rows: dict[str, Rows] = {}
        self._scalars: list[nn.Parameter] = []
        for name, param in model.named_parameters():
            self.weights[name] = param
            if isinstance(param, DTensor):
                self.sharded[name] = param
                local = param.to_local().detach()
                self.weights[name] = nn.Parameter(local, requires_grad=param.requires_grad)
                self.rows[name] = rows_of(param)
            elif param.ndim == 0 and param.requires_grad:
                self._scalars.append(param)

    def counted(self) -> list[nn.Parameter]:
        """The trained weights of which this rank's figures count in a sum over ranks.

        Rank 0 alone counts what every rank holds whole, or a sum would count it once for each rank.
        """
        counted: list[nn.Parameter] = []
        for name, weight in self.weights.items():
            is_ours = name in self.rows or world_rank() == 0
            if is_ours and weight.requires_grad:
                counted.append(weight)
        return counted

    def take_gradients(self) -> None:
        """Before a measurement: give `weights` the gradients of the DTensors. Collective.

        The gradients of 0-d parameters are averaged over ranks; a rank without one counts as zero.
        """
        for name, param in self.sharded.items():
            # A parameter that no rank has used has none.
            local = None
            if isinstance(param.grad, DTensor):
                local = param.grad.to_local()
            self.weights[name].grad = local
        self._average_scalars()

    def _average_scalars(self) -> None:
        if not self._scalars:
            return
        found: list[Tensor] = []
        for param in self._scalars:
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            found.append(grad.detach())
        mean = mean_over_ranks(torch.stack(found))
        for param, grad in zip(self._scalars, mean.unbind(), strict=True):
            param.grad = grad.clone()

    def return_gradients(self) -> None:
        """After the update: `weights` let go of the gradients, which are the DTensors' again."""
        for name in self.sharded:
            self.weights[name].grad = None

    def sum(self, values: Tensor) -> Tensor:
        """What each rank measured of its rows, summed over ranks: fp64, the same bits on each. One collective.

        The first value, the squares of the gradients, is infinite if ranks called different blocks since the last sum.
        """
        # A whole number under 2^40 is exact in fp64.
        order = values.new_full((1,), float(self.calls.value))
        self.calls.value = 0
        gathered = gather_over_ranks(torch.cat([values, order]))
        total = gathered[:, :-1].sum(dim=0)
        orders = gathered[:, -1]
        self.same_order = (orders == orders[0]).all()
        total[0] = torch.where(self.same_order, total[0], math.inf)
        return total

    def moved(self) -> list[str]:
        """Names of weights whose DTensor has other memory by now.

        FSDP2 may give a piece new memory if the model was moved or cast after it was sharded.
        """
        names: list[str] = []
        for name, param in self.sharded.items():
            local = param.to_local()
            weight = self.weights[name]
            # A rank that holds no row has no memory to compare.
            if local.numel() and local.data_ptr() != weight.data_ptr():
                names.append(name)
        return names

    def reshard(self) -> None:
        """Drop what is gathered: the next forward gathers it anew. Between a forward and its backward it does harm."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def rows_of(param: DTensor) -> Rows:
    """Which rows of `param` are here."""
    rows = Rows.of_rank(tuple(param.shape), world_rank(), param.device_mesh.size())
    assert tuple(param.to_local().shape) == rows.local_shape, "FSDP2 cuts as torch.chunk does"
    return rows


class StartWeights:
    """Hashes of a model's parameters before it is sharded, to find ranks that would train a patchwork.

    model: whole, on `device`.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._fingerprint = Fingerprint(device)
        self._names: list[str] = []
        whole: list[Tensor] = []
        pieces: list[Tensor] = []
        for name, param in model.named_parameters():
            piece = param.detach()
            if param.ndim:
                rows = Rows.of_rank(tuple(param.shape), world_rank(), world_size())
                piece = piece[rows.begin : rows.end]
            self._names.append(name)
            whole.append(param)
            pieces.append(piece)
        self._whole = self._fingerprint.of(whole)
        self._rows = self._fingerprint.of(pieces)

    def differing(self, local: LocalRows) -> list[str]:
        """Names of parameters that differed between ranks, if several still have the rows that they had. Collective.

        Ranks whose rows have changed since then have loaded them, perhaps from a rank that kept its own.
        """
        differs = differing(self._whole).tolist()
        names: list[str] = []
        kept: list[Tensor] = []
        for place, name in enumerate(self._names):
            if not differs[place] or name not in local.weights:
                continue
            weight = local.weights[name].detach()
            now = self._fingerprint.of([weight])[0]
            here = now == self._rows[place]
            names.append(name)
            # A rank that holds no row has kept none.
            kept.append(here & (weight.numel() > 0))
        if not names:
            return []
        by_rank = gather_over_ranks(torch.stack(kept).float())
        ranks = by_rank.sum(dim=0).tolist()
        return [name for name, count in zip(names, ranks, strict=True) if count > 1]
