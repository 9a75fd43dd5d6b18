"""Token ids of many texts, in the order of the texts, made in this process or by several workers.

Tokenizing takes most of the time of a preparation, so it alone is shared. Batches of texts go to the workers, some
ahead of the one whose ids are taken next, and come back in their order: the number of workers does not matter.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait

from harness.core.errors import DataError, Problem
from harness.data.arrays import Ints
from harness.data.documents import Piece
from harness.data.tokenizer import Encoder, load_encoder

Encoded = Ints | Problem
"""Ids of a text, int64 [tokens], or why the tokenizer fails on it."""

# Batches in flight for each worker.
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Texts that are tokenized together.

    pieces: of documents, with their splits.
    size: bytes of their texts.
    """

    pieces: list[tuple[Piece, str]]
    size: int


class Encoding:
    """Makes ids of batches of pieces. A context: at its end the workers are stopped."""

    def __init__(self, tokenizer: str | None, processes: int) -> None:
        """Begin the workers.

        tokenizer: as for `load_encoder`.
        processes: number of workers; 1: none, this process tokenizes.

        Raises ConfigError.
        """
        self.encoder = load_encoder(tokenizer)
        self._most_begun = _AHEAD * processes
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            # Not forked: this process may have threads, and a GPU.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(processes, context, _begin_worker, (tokenizer,))

    def __enter__(self) -> Encoding:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def encode(self, batches: Iterator[TextBatch]) -> Iterator[tuple[TextBatch, list[Encoded]]]:
        """Each batch with the ids of its pieces, in the order of `batches`.

        Raises BrokenProcessPool if a worker dies.
        """
        # The oldest first: results are given in the order of the batches, and only so many wait in memory.
        begun: deque[tuple[TextBatch, Future[list[Encoded]]]] = deque()
        for batch in batches:
            texts = [piece.text for piece, _ in batch.pieces]
            if self._pool is None:
                yield batch, _encode(self.encoder, texts)
                continue
            begun.append((batch, self._pool.submit(_work, texts)))
            if len(begun) > self._most_begun:
                first, made = begun.popleft()
                yield first, made.result()
        while begun:
            first, made = begun.popleft()
            yield first, made.result()


def _encode(encoder: Encoder, texts: Sequence[str | bytes]) -> list[Encoded]:
    """Ids of each text; if the tokenizer fails, one text at a time, to find on which."""
    try:
        return [*encoder.encode(texts)]
    except DataError as error:
        if len(texts) == 1:
            return [error.problems[0]]
        encoded: list[Encoded] = []
        for text in texts:
            encoded += _encode(encoder, [text])
        return encoded


_worker: list[Encoder] = []
"""In a worker's process: its tokenizer."""


def _begin_worker(tokenizer: str | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent
    _worker.append(load_encoder(tokenizer))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process with its parent; otherwise it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _work(texts: Sequence[str | bytes]) -> list[Encoded]:
    return _encode(_worker[0], texts)
