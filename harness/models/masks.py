"""Whether a model's own loss leaves out labels of -100: found by asking it, before anything is trained.

With the inputs as they are, the labels that count are dealt out to two sets, the rest of the labels masked. With n
labels of a loss L each:

    n(A) L(A) + n(B) L(B) = n L(all)        a mean over the labels that count
    L(A) + L(B) = L(all)                    a sum over them, which the same samples twice must double

What a loss adds that labels do not change (a router's, a z-loss over all positions) cancels in the first line, not in
the second. A model that counts masked labels as those of class 0, or that divides by all positions, keeps neither.

A loss may be a mean with weights (of classes), or one over samples of means over their labels. That is accepted where
samples without a label can as well be left out, and where losses of one sample's labels agree on their weights.

Where every label has the same loss, as before the first step of a head that begins at zero, nothing can be told apart:
`Masks.blind` asks for another try with other weights. If that is in vain too, the loss of no label at all has to be 0
or no number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from harness.core.facts import IGNORED
from harness.core.protocols import Batch

Ask = Callable[[Batch], "tuple[Tensor, Tensor | None]"]
"""A model's loss of a batch, and its logits where it returns them."""

# Between sums of the same float32 numbers in another order; losses in less are compared as coarsely as they come.
_ROUNDING = 2e-5
_COARSE = 8
# Losses of sets of labels that differ by less tell of rounding alone.
_CONTRAST = 100
_SHARES = (2, 4)
"""Every so many-th label goes to the first set: equal halves alone would let some errors cancel."""
_DEALS, _CONSISTENT = 8, 0.1
"""Tries with weights, and how far ratios of differences may be off, where these are so many times the rounding."""
_SAMPLES_OF_TOKENS, _SAMPLES_OF_ONE_LABEL = 2, 16


class Masks(NamedTuple):
    """wrong: how masked labels enter the loss; empty if they do not. summed: it is a sum over labels. blind: little
    can be said of these labels and weights."""

    wrong: str = ""
    summed: bool = False
    blind: bool = False


@torch.no_grad()
def judge(ask: Ask, batch: Batch, name: str) -> Masks:
    """What becomes of the labels `name` (int64 [samples, ...]) of a batch that are -100, whether it has some or not.

    Asks for the loss of at most two samples (sixteen, if a sample has one label) seven times, in the good case; a
    single sample is taken twice. A loss that cannot be judged is taken for right: fewer than four labels, labels that
    logits have no place for, a loss that is not finite without any mask.
    """
    batch = _few(batch, name)
    labels = batch[name]
    counted = _counted(labels)
    if len(counted) < 4:
        return Masks(blind=True)
    # A wrong label, or a batch that does not fit the model, is for others to name.
    plain = torch.where(labels == IGNORED, labels.flatten()[counted[0]], labels)
    try:
        whole, logits = ask({**batch, name: plain})
    except Exception:
        return Masks(blind=True)
    if not bool(torch.isfinite(whole)) or (logits is not None and not _per_label(logits, labels)):
        return Masks(blind=True)
    try:
        return _judged(ask, batch, name, counted)
    except Exception as error:
        return Masks(f"forward fails on them: {type(error).__name__}: {str(error)[:200]}")


def _judged(ask: Ask, batch: Batch, name: str, counted: Tensor) -> Masks:
    losses: list[tuple[float, float]] = []
    total, logits = ask({**batch, name: _only(batch[name], counted)})
    everything, tolerance, moved, means, sums = float(total), _tolerance(total), False, True, True
    for share in _SHARES:
        first, second = _dealt(counted, share)
        found = [ask({**batch, name: _only(batch[name], chosen)}) for chosen in (first, second)]
        one, other = (float(loss) for loss, _ in found)
        moved = moved or any(_differ(logits, others) for _, others in found)
        losses.append((one, other))
        mean = (len(first) * one + len(second) * other) / len(counted)
        means = means and _close(mean, everything, tolerance)
        sums = sums and _close(one + other, everything, tolerance)
    none = float(ask({**batch, name: _only(batch[name], counted[:0])})[0])
    contrast = max(abs(one - everything) for pair in losses for one in pair)
    if means and contrast <= _CONTRAST * tolerance * abs(everything):
        if math.isfinite(none) and abs(none) > abs(everything) / 2:
            wrong = f"it is {none:.4g} where no label counts, and {everything:.4g} where {len(counted)} do"
            return Masks(wrong, blind=True)
        return Masks(blind=True)
    if means:
        return Masks()
    if sums:
        doubled = float(
            ask(
                {
                    key: torch.cat([values, values])
                    for key, values in _all(batch, name, counted).items()
                }
            )[0]
        )
        if _close(doubled, 2 * everything, tolerance):
            return Masks(summed=True)
        return Masks(
            f"masked or not, all labels are in the number that it is divided by: {_told(everything, losses)}"
        )
    if _weighted(ask, batch, name, counted, tolerance, moved):
        return Masks()
    return Masks(_told(everything, losses))


def _weighted(
    ask: Ask, batch: Batch, name: str, counted: Tensor, tolerance: float, moved: bool
) -> bool:
    """Whether the loss is a mean of some other kind. moved: labels are an input of the model too (a decoder's)."""
    labels, half = batch[name], len(batch[name]) // 2
    with_labels = _all(batch, name, counted)
    masked = torch.cat(
        [with_labels[name][:half], torch.full_like(with_labels[name][half:], IGNORED)]
    )
    if not bool((masked != IGNORED).any()):
        return False
    here = float(ask({**with_labels, name: masked})[0])
    alone = float(ask({key: values[:half] for key, values in with_labels.items()})[0])
    if not _close(here, alone, tolerance):
        return False
    if moved:
        return True
    samples = counted // labels[0].numel() if labels.ndim > 1 else torch.zeros_like(counted)
    places = counted[samples == samples.mode().values]
    generator = torch.Generator().manual_seed(0)
    for _ in range(_DEALS if len(places) >= 3 else 0):
        order = torch.randperm(len(places), generator=generator).to(places.device)
        p, q, r = (places[part] for part in order.tensor_split(3))
        losses = [float(ask({**batch, name: _only(labels, torch.cat(sets))})[0]) for sets in
             ([p], [q], [r], [p, q], [q, r], [p, r])]  # fmt: skip
        # Of a mean with weights, w(P) / w(Q) follows from P and Q and both; Q and R, and P and R, must agree with it.
        parts = [
            (losses[3] - losses[1], losses[0] - losses[3]),
            (losses[4] - losses[2], losses[1] - losses[4]),
            (losses[5] - losses[2], losses[0] - losses[5]),
        ]
        if min(abs(each) for pair in parts for each in pair) <= _CONTRAST * tolerance * abs(
            losses[0]
        ):
            continue
        pq, qr, pr = (above / below for above, below in parts)
        if not abs(pq * qr / pr - 1) <= _CONSISTENT:
            return False
    return True


def _few(batch: Batch, name: str) -> Batch:
    """Some samples, those with most labels that count; one is taken twice."""
    labels = batch[name]
    order = (
        (labels != IGNORED).flatten(1).sum(1).argsort(descending=True, stable=True)
        if labels.ndim > 1
        else None
    )
    few = _SAMPLES_OF_TOKENS if order is not None else _SAMPLES_OF_ONE_LABEL
    rows = (torch.arange(len(labels)) if order is None else order)[:few]
    rows = rows.repeat(2) if len(rows) == 1 else rows
    return {key: values[rows] for key, values in batch.items()}


def _counted(labels: Tensor) -> Tensor:
    """Places of labels that count. Not the ends of a row: a model that shifts labels by itself leaves one out."""
    kept = labels != IGNORED
    if labels.ndim > 1 and labels.shape[-1] > 2:
        kept[..., 0] = kept[..., -1] = False
    return kept.flatten().nonzero().flatten()


def _only(labels: Tensor, places: Tensor) -> Tensor:
    chosen = torch.full_like(labels, IGNORED).flatten()
    chosen[places] = labels.flatten()[places]
    return chosen.view_as(labels)


def _all(batch: Batch, name: str, counted: Tensor) -> dict[str, Tensor]:
    return {**batch, name: _only(batch[name], counted)}


def _dealt(places: Tensor, share: int) -> tuple[Tensor, Tensor]:
    first = torch.arange(len(places)) % share == 0
    return places[first], places[~first]


def _per_label(logits: Tensor, labels: Tensor) -> bool:
    """Whether logits have a place for each label, in torch's or in everybody else's order."""
    return logits.shape[:-1] == labels.shape or (*logits.shape[:1], *logits.shape[2:]) == tuple(
        labels.shape
    )


def _tolerance(loss: Tensor) -> float:
    return max(
        _ROUNDING,
        0.0
        if loss.dtype in (torch.float32, torch.float64)
        else _COARSE * torch.finfo(loss.dtype).eps,
    )


def _close(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def _differ(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return False
    return bool((one - other).abs().max() > _ROUNDING * one.abs().max())


def _told(everything: float, losses: list[tuple[float, float]]) -> str:
    return f"it is {everything:.5g} for all labels, {losses[0][0]:.5g} and {losses[0][1]:.5g} for the halves of them"


def with_masks(batches: Iterator[Batch], name: str, certain: bool) -> Batch | None:
    """The first batch that has a masked label, or any where masks are `certain` to come; None if there is none."""
    for batch in batches:
        if certain or bool((batch[name] == IGNORED).any()):
            return batch
    return None
