"""The weights that a sharded run begins with: each rank gets its rows, and the ranks' weights are compared.

Ranks that began with different weights would each keep their own rows, and train a patchwork. So every tensor is hashed
as a whole, and the hashes are compared. How a rank gets its rows depends on where the tensor's values are:

- In memory: the model was built whole. The hash is taken before the model is sharded.
- In what a constructor does (`core/deferred.py`): the rank computes the whole tensor, and keeps its rows.
- In files: the rank reads its rows alone. A hash is a sum over the tensor's bytes, so each rank hashes what it reads,
  and the parts are added up. Ranks that read the same files cannot differ. Ranks of several machines may read copies:
  the ranks of one copy hash all of it together, each a share, and the copies are compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.core.collectives import (
    Fingerprint,
    differing,
    gather_over_ranks,
    gather_texts,
    rows_to_hash,
    world_rank,
)
from harness.core.deferred import Recording, forget, recording_of
from harness.core.errors import ConfigError, Problem, some
from harness.core.sharded import rows_of
from harness.core.shards import Rows

_NAMED = 3


class InitialWeights:
    """Gives a model that is sharded over ranks its weights, one tensor after the other.

    model: not sharded yet: whole on `device`, or without memory (`core.deferred`).
    where: the config key that an error names.

    hashes: by name, int64 0-d, of every whole parameter and buffer; complete after `give`.
    """

    def __init__(self, model: nn.Module, device: torch.device, where: str) -> None:
        self._model = model
        self._device = device
        self._where = where
        # Checkpoints keep the hashes of frozen weights.
        self._fingerprint = Fingerprint(device, portable=True)
        self._recording = recording_of(model)
        # What the recording knows of each tensor without memory. Sharding puts other tensors in their places.
        self._views: dict[str, Any] = {}
        here: dict[str, Tensor] = {}
        for name, tensor in _tensors(model).items():
            if self._recording is not None and self._recording.holds(tensor):
                self._views[name] = self._recording.view(tensor)
            else:
                here[name] = tensor
        hashes = self._fingerprint.of(here.values()).unbind()
        self.hashes: dict[str, Tensor] = dict(zip(here, hashes, strict=True))

    @torch.no_grad()
    def give(self) -> None:
        """Give the sharded model memory for this rank's rows, and their values. Collective.

        Raises ConfigError naming parameters and buffers that are not the same on every rank.
        """
        copies, by_rows = self._readers()
        parts: dict[str, Tensor] = {}
        if self._recording is not None:
            _allocate(self._model, self._device)
            for name, tensor in _tensors(self._model).items():
                if name in by_rows:
                    parts[name] = self._read_rows(self._recording, name, tensor, copies)
                elif name in self._views:
                    self.hashes[name] = self._compute(self._recording, name, tensor)
            forget(self._model)
        self._require_same(self._differing() + self._differing_copies(parts, copies))

    def _readers(self) -> tuple[list[list[int]], set[str]]:
        """Which ranks read which copy of the files, and the names of the tensors that are read by rows. Collective.

        The first value has a list of ranks for each copy.
        """
        by_rows: set[str] = set()
        places: set[str] = set()
        if self._recording is not None:
            places = self._recording.places
            for name, tensor in _tensors(self._model).items():
                is_cut = isinstance(tensor, DTensor) and name in self._views
                if is_cut and self._recording.has_rows(self._views[name]):
                    by_rows.add(name)

        mine = json.dumps([_digest(places), _digest(by_rows)])
        found = [json.loads(text) for text in gather_texts(mine)]
        copies: dict[str, list[int]] = {}
        for rank, (place, _) in enumerate(found):
            copies.setdefault(place, []).append(rank)
        # Files with other dtypes may be read differently. Parts of a hash add up only if every rank adds one.
        if len({names for _, names in found}) > 1:
            by_rows = set()
        return list(copies.values()), by_rows

    def _read_rows(
        self, recording: Recording, name: str, tensor: Tensor, copies: list[list[int]]
    ) -> Tensor:
        """Read this rank's rows. Returns what this rank adds to the hash of the whole tensor in its copy of the files.

        copies: as `_readers` returns them.
        """
        assert isinstance(tensor, DTensor)
        view, own = self._views[name], rows_of(tensor)
        data = self._read(recording, view, own)
        tensor.to_local().copy_(data[: own.end - own.begin])

        # Its own rows, if all ranks read one copy.
        readers = next(ranks for ranks in copies if world_rank() in ranks)
        share = Rows.of_rank(own.shape, readers.index(world_rank()), len(readers))
        if share != own:
            data = self._read(recording, view, share)
        return self._fingerprint.of_rows(data, share)

    def _read(self, recording: Recording, view: Any, rows: Rows) -> Tensor:
        """The rows, and those after them that are needed to hash them."""
        return recording.rows(view, rows.begin, rows_to_hash(rows, view.dtype)).to(self._device)

    def _compute(self, recording: Recording, name: str, tensor: Tensor) -> Tensor:
        """Compute the whole tensor, and keep what is held here; returns its hash."""
        whole = recording.value(self._views[name]).to(self._device)
        if isinstance(tensor, DTensor):
            rows = rows_of(tensor)
            tensor.to_local().copy_(whole[rows.begin : rows.end])
        else:
            tensor.copy_(whole)
        return self._fingerprint.of([whole])[0]

    def _differing(self) -> list[str]:
        """Names of tensors that the ranks have hashed as a whole, with different hashes. Collective."""
        # In one order, whichever of them had memory first.
        order = sorted(self.hashes)
        if not order:
            return []
        flags = differing(torch.stack([self.hashes[name] for name in order])).tolist()
        return [name for name, differs in zip(order, flags, strict=True) if differs]

    def _differing_copies(self, parts: Mapping[str, Tensor], copies: list[list[int]]) -> list[str]:
        """Names of tensors that are not the same in all copies of the files; completes `hashes`. Collective."""
        order = sorted(parts)
        if not order:
            return []
        # [ranks, tensors], and then [copies, tensors]: sums of whole numbers, modulo 2^64, are the same in any order.
        gathered = gather_over_ranks(torch.stack([parts[name] for name in order]))
        sums = torch.stack([gathered[ranks].sum(dim=0) for ranks in copies])
        self.hashes |= dict(zip(order, sums[0].unbind(), strict=True))
        flags = (sums != sums[0]).any(dim=0).tolist()
        return [name for name, differs in zip(order, flags, strict=True) if differs]

    def _require_same(self, differ: list[str]) -> None:
        if not differ:
            return
        what = f"the ranks built the model with different weights: {some(sorted(differ), _NAMED)}"
        why = "each rank would keep its own rows of them, and the run would train a patchwork"
        fix = "let model.target depend on train.seed alone, or load the same weights on every rank"
        raise ConfigError(Problem(what, self._where, why, fix))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Give every tensor of the meta device memory on `device`, without values."""

    def allocated(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    model._apply(allocated)


def _digest(names: Iterable[str]) -> str:
    return hashlib.sha256(json.dumps(sorted(names)).encode()).hexdigest()
