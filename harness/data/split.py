"""Divide documents between training and validation: whole files first, in an order that only their names decide."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from harness.data.text import Document


def split_documents(documents: Sequence[Document], val_fraction: float) -> tuple[list[Document], list[Document]]:
    """(train, validation), each in the order of `documents`.

    Files are held out in the order of a hash of their names until `val_fraction` of the bytes is reached, passing
    over those that would hold out over half as much again. If whole files cannot give at least half of it (one file,
    or a few large ones), the tail of the largest remaining file is held out instead, cut at a line end. Neither the
    run's seed nor the contents matter, so that runs are validated on the same files.
    """
    total = sum(len(document.content) for document in documents)
    target = val_fraction * total
    most = min(1.5 * target, (target + total) / 2)
    chosen: set[str] = set()
    held = 0
    for document in sorted(documents, key=_hash_order):
        if held < target and held + len(document.content) <= most:
            chosen.add(document.name)
            held += len(document.content)
    train = [document for document in documents if document.name not in chosen]
    val = [document for document in documents if document.name in chosen]
    if held < target / 2:
        largest = max(train, key=lambda document: len(document.content))
        cut = _line_cut(largest.content, round(target - held))
        train[train.index(largest)] = Document(largest.name, largest.content[:cut])
        val.append(Document(largest.name, largest.content[cut:]))
    return train, val


def _hash_order(document: Document) -> bytes:
    return hashlib.sha256(document.name.encode()).digest()


def _line_cut(content: bytes, tail: int) -> int:
    """Where to cut so that about `tail` bytes follow: after the line end nearest to there, if one is near."""
    wanted = len(content) - tail
    reach = min(tail, wanted) // 2
    before = content.rfind(b"\n", wanted - reach, wanted) + 1
    after = content.find(b"\n", wanted, wanted + reach) + 1
    near = [cut for cut in (before, after) if cut]
    return min(near, key=lambda cut: abs(cut - wanted)) if near else max(1, min(wanted, len(content) - 1))
