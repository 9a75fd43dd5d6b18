"""Batches of token ids by sample number: the data source of the loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from harness.core.errors import ConfigError, DataError, Problem
from harness.core.facts import Window
from harness.data.token_file import TokenFile
from harness.data.tokens import TokenData
from harness.data.windows import sample_numbers

Batch = tuple[Tensor, Tensor]


def check_world(global_batch: int, micro_batch: int, world_size: int) -> None:
    """Raises ConfigError, naming a value that works, unless every rank gets equally many whole micro-batches."""
    if global_batch % (micro_batch * world_size) == 0:
        return
    why = f"{global_batch} samples in micro-batches of {micro_batch} cannot be shared equally by {world_size} ranks"
    per_rank, rest = divmod(global_batch, world_size)
    if rest:
        whole = micro_batch * world_size
        fix = f"set train.global_batch={-(-global_batch // whole) * whole}"
    else:
        fits = max(size for size in range(1, min(micro_batch, per_rank) + 1) if per_rank % size == 0)
        fix = f"set train.micro_batch={fits}"
    raise ConfigError(
        Problem("the batch does not divide over the ranks", "train.global_batch, train.micro_batch", why, fix)
    )


class TokenBatches:
    """Samples of `context` tokens and their successors, cut side by side from a snapshot; holds no state.

    Sample n is tokens [n * context, (n + 1) * context] of the split: inputs are all but the last, targets all but the
    first. Raises DataError if the snapshot is shorter than one sample.
    """

    def __init__(
        self, data: TokenData, seed: int, context: int, global_batch: int, micro_batch: int, val_samples: int
    ) -> None:
        self.tokens_per_sample = context
        self.name = f"bytes of {data.info['source']}"
        self.n_samples = (len(data.train) - 1) // context
        self._available = (len(data.val) - 1) // context
        self._data = data
        self._seed = seed
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._val_samples = min(val_samples, self._available)
        if self.n_samples < 1 or self._available < 1:
            raise DataError(
                Problem("too short for one sample", self.name, fix=f"give more text, or lower data.context ({context})")
            )

    def window(self, index: int) -> Window:
        """The window at place `index` of the data order: samples int64 [global_batch]."""
        return Window(index, sample_numbers(self._seed, index, self._global_batch, self.n_samples))

    def micro_batches(self, window: Window, rank: int, world_size: int) -> list[Batch]:
        """This rank's (inputs, targets), each int64 [micro_batch, context] on the CPU: micro-batches `rank`,
        `rank + world_size`, ... of the window, so that the window's samples do not depend on the number of ranks.

        Raises ConfigError if they do not divide evenly, DataError if the snapshot cannot be read any longer.
        """
        check_world(self._global_batch, self._micro_batch, world_size)
        rows = window.samples.reshape(-1, self._micro_batch)
        return [self._batch(self._data.train, row) for row in rows[rank::world_size]]

    def validation(self, rank: int, world_size: int) -> list[Batch]:
        """This rank's validation batches, (inputs, targets) int64 [size, context], the same at every call.

        All batches of all ranks have one size, at most micro_batch, and every rank has equally many, so that a mean
        of means weighs every token alike; the few samples that this leaves over are dropped. The samples are spread
        evenly over the split. With fewer samples than ranks, every rank evaluates all of them.
        """
        if self._val_samples < world_size:
            rank, world_size = 0, 1
        per_rank = self._val_samples // world_size
        batches = -(-per_rank // self._micro_batch)
        size = per_rank // batches
        count = size * batches * world_size
        samples = np.arange(count, dtype=np.int64) * self._available // count
        return [self._batch(self._data.val, row) for row in samples.reshape(-1, size)[rank::world_size]]

    def facts(self) -> dict[str, Any]:
        """What this run trains on, JSON-able, for the journal; sizes in bytes."""
        info = self._data.info
        return {
            "source": info["source"],
            "files": len({file["name"] for file in info["files"]}),
            "train_bytes": info["train"]["bytes"],
            "val_bytes": info["val"]["bytes"],
            "train_samples": self.n_samples,
            "val_samples": self._val_samples,
            "sha256": info["sha256"],
            "unigram_bits_per_byte": info["unigram_bits_per_byte"],
            "skipped": _readable(info["skipped"]),
        }

    def _batch(self, tokens: TokenFile | npt.NDArray[np.uint8], samples: npt.NDArray[np.int64]) -> Batch:
        context = self.tokens_per_sample
        rows = tokens[samples[:, None] * context + np.arange(context + 1)]
        batch = torch.from_numpy(rows.astype(np.int64))
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def _readable(skipped: Iterable[dict[str, str]]) -> list[str]:
    return [f"{skip['name']} ({skip['reason']})" for skip in skipped]
