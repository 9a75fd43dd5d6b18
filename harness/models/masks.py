"""Tests whether a model's own loss leaves out labels of -100, before anything is trained.

Data mark labels that do not count with -100. A model that computes its own loss may count them all the same, and would
train on padding. This module finds out by asking the model for losses.

The method: keep the inputs as they are, and divide the n labels that count into two sets A and B. Ask for the loss of
all labels, of A alone (with B masked too), and of B alone. A correct loss satisfies one of two equations:

    n(A) L(A) + n(B) L(B) = n L(all)        the loss is a mean over the labels that count
    L(A) + L(B) = L(all)                    the loss is a sum over them; the same samples twice must double it

A term that does not depend on labels (a router's loss, a z-loss over all positions) cancels in the first equation. A
loss that counts masked labels as class 0, or that divides by all positions, satisfies neither.

Two other kinds of mean are correct as well: a mean weighted by class, and a mean over samples of the means over their
labels. `_weighted` accepts them under two conditions. Masking all labels of a sample must be the same as leaving the
sample out. And the losses of different sets of one sample's labels must imply the same weights.

If every label has the same loss, as with a head that begins at zero, the equations hold for any loss. `Masks.blind`
then asks for a second try with other weights. If that does not help either, the loss without any label has to be 0 or
not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from harness.core.facts import IGNORED
from harness.core.protocols import Batch

Ask = Callable[[Batch], "tuple[Tensor, Tensor | None]"]
"""Returns a model's loss of a batch, and its logits if the model returns them."""

# Relative difference between two sums of the same float32 numbers in another order. Losses of a lower precision may
# differ by this many of their own epsilons.
_ROUNDING = 2e-5
_COARSE = 8
# Differences between losses have to be this many times the rounding, or they show nothing.
_CONTRAST = 100
# Set A gets every second label, then every fourth: with equal halves alone, some errors would cancel.
_SHARES = (2, 4)
# For a weighted mean: number of tries, and how far the implied weights may differ.
_TRIES = 8
_CONSISTENT = 0.1
# Samples that are asked about: with many labels each, or with one.
_SAMPLES_OF_TOKENS, _SAMPLES_OF_ONE_LABEL = 2, 16


class Masks(NamedTuple):
    """The verdict on a loss.

    wrong: how masked labels enter the loss; empty if they do not.
    summed: whether the loss is a sum over labels.
    blind: whether these labels and weights show too little for a verdict.
    """

    wrong: str = ""
    summed: bool = False
    blind: bool = False


@torch.no_grad()
def judge(ask: Ask, batch: Batch, name: str) -> Masks:
    """Test what the loss does with masked labels. name: the labels, int64 [samples, ...]; some may be -100 or none.

    If the loss is right, this asks for seven losses of at most two samples (sixteen, if a sample has one label). A
    single sample is taken twice. A loss that cannot be judged is accepted: fewer than four labels, labels that do not
    fit the logits, or a loss that is not finite even without masks.
    """
    batch = _few(batch, name)
    labels = batch[name]
    counted = _counted(labels)
    if len(counted) < 4:
        return Masks(blind=True)

    # First without any mask. If this fails, something else is wrong, and the run reports it.
    some_label = labels.flatten()[counted[0]]
    plain = torch.where(labels == IGNORED, some_label, labels)
    try:
        whole, logits = ask({**batch, name: plain})
    except Exception:
        return Masks(blind=True)
    if not bool(torch.isfinite(whole)):
        return Masks(blind=True)
    if logits is not None and not _per_label(logits, labels):
        return Masks(blind=True)

    # From here on only masks can be the reason for a failure.
    try:
        return _judged(ask, batch, name, counted)
    except Exception as error:
        return Masks(f"forward fails on them: {type(error).__name__}: {str(error)[:200]}")


def _judged(ask: Ask, batch: Batch, name: str, counted: Tensor) -> Masks:
    """`judge` on labels that can be judged. counted: their places in the flattened labels."""

    def ask_of(places: Tensor) -> tuple[Tensor, Tensor | None]:
        """Loss and logits with all labels masked but those at `places`."""
        return ask({**batch, name: _only(batch[name], places)})

    # The loss of all labels, and of the two sets for each way to divide them.
    total, logits = ask_of(counted)
    everything = float(total)
    tolerance = _tolerance(total)
    losses: list[tuple[float, float]] = []
    is_mean = True
    is_sum = True
    # Whether labels change the logits: then they are an input of the model too, as in a decoder.
    moved = False
    for share in _SHARES:
        first, second = _divided(counted, share)
        loss_of_first, logits_of_first = ask_of(first)
        loss_of_second, logits_of_second = ask_of(second)
        one, other = float(loss_of_first), float(loss_of_second)
        losses.append((one, other))

        moved = moved or _differ(logits, logits_of_first) or _differ(logits, logits_of_second)
        mean = (len(first) * one + len(second) * other) / len(counted)
        is_mean = is_mean and _close(mean, everything, tolerance)
        is_sum = is_sum and _close(one + other, everything, tolerance)
    loss_of_none, _ = ask_of(counted[:0])
    none = float(loss_of_none)

    # If all losses are alike, the equation of the mean holds for any loss. The loss of no label decides.
    contrast = 0.0
    for one, other in losses:
        contrast = max(contrast, abs(one - everything), abs(other - everything))
    if is_mean and contrast <= _CONTRAST * tolerance * abs(everything):
        if math.isfinite(none) and abs(none) > abs(everything) / 2:
            wrong = f"it is {none:.4g} where no label counts, and {everything:.4g} where {len(counted)} do"
            return Masks(wrong, blind=True)
        return Masks(blind=True)
    if is_mean:
        return Masks()

    # A sum doubles with the samples. A loss that is divided by the number of all labels, masked or not, does not.
    if is_sum:
        samples = _all(batch, name, counted)
        twice = {key: torch.cat([values, values]) for key, values in samples.items()}
        doubled = float(ask(twice)[0])
        if _close(doubled, 2 * everything, tolerance):
            return Masks(summed=True)
        wrong = "masked or not, all labels are in the number that it is divided by"
        return Masks(f"{wrong}: {_compared(everything, losses)}")

    if _weighted(ask, batch, name, counted, tolerance, moved):
        return Masks()
    return Masks(_compared(everything, losses))


def _weighted(
    ask: Ask, batch: Batch, name: str, counted: Tensor, tolerance: float, moved: bool
) -> bool:
    """Whether the loss is a correct mean of another kind. moved: whether labels are an input of the model too."""
    labels = batch[name]
    half = len(labels) // 2

    # To mask all labels of the second half of the samples must be the same as to leave these samples out.
    with_labels = _all(batch, name, counted)
    masked = with_labels[name].clone()
    masked[half:] = IGNORED
    if not bool((masked != IGNORED).any()):
        return False
    first_half = {key: values[:half] for key, values in with_labels.items()}
    here = float(ask({**with_labels, name: masked})[0])
    alone = float(ask(first_half)[0])
    if not _close(here, alone, tolerance):
        return False
    # Labels that are inputs change the losses of other labels, so weights cannot be compared.
    if moved:
        return True

    # Within one sample (or all, if each has one label) random sets of labels must imply the same weights.
    samples = torch.zeros_like(counted)
    if labels.ndim > 1:
        samples = counted // labels[0].numel()
    # Of the sample with the most labels.
    places = counted[samples == samples.mode().values]
    if len(places) < 3:
        return True

    # With a seed of its own: the run's random numbers stay as they are, and every start has the same verdict.
    generator = torch.Generator().manual_seed(0)
    for _ in range(_TRIES):
        order = torch.randperm(len(places), generator=generator, device="cpu").to(places.device)
        p, q, r = (places[part] for part in order.tensor_split(3))
        losses: list[float] = []
        for sets in ([p], [q], [r], [p, q], [q, r], [p, r]):
            loss, _ = ask({**batch, name: _only(labels, torch.cat(sets))})
            losses.append(float(loss))
        if not all(map(math.isfinite, losses)):
            return False
        of_p, of_q, of_r, of_pq, of_qr, of_pr = losses

        # For a weighted mean, w(P) / w(Q) = (L(PQ) - L(Q)) / (L(P) - L(PQ)). The three ratios must agree.
        parts = [
            (of_pq - of_q, of_p - of_pq),
            (of_qr - of_r, of_q - of_qr),
            (of_pr - of_r, of_p - of_pr),
        ]
        smallest = min(map(abs, chain.from_iterable(parts)))
        if smallest <= _CONTRAST * tolerance * abs(of_p):
            continue
        pq, qr, pr = [above / below for above, below in parts]
        if not abs(pq * qr / pr - 1) <= _CONSISTENT:
            return False
    return True


def _few(batch: Batch, name: str) -> Batch:
    """A few samples, those with the most labels that count. A single sample is taken twice."""
    labels = batch[name]
    if labels.ndim > 1:
        counts = (labels != IGNORED).flatten(1).sum(1)
        rows = counts.argsort(descending=True, stable=True)[:_SAMPLES_OF_TOKENS]
    else:
        rows = torch.arange(len(labels), device="cpu")[:_SAMPLES_OF_ONE_LABEL]
    if len(rows) == 1:
        rows = rows.repeat(2)
    return {key: values[rows] for key, values in batch.items()}


def _counted(labels: Tensor) -> Tensor:
    """Places of the labels that count, in the flattened labels.

    The ends of a row are left out: a model that shifts labels by itself drops one of them.
    """
    kept = labels != IGNORED
    if labels.ndim > 1 and labels.shape[-1] > 2:
        kept[..., 0] = False
        kept[..., -1] = False
    return kept.flatten().nonzero().flatten()


def _only(labels: Tensor, places: Tensor) -> Tensor:
    """The labels at `places`, with all others masked."""
    chosen = torch.full_like(labels, IGNORED).flatten()
    chosen[places] = labels.flatten()[places]
    return chosen.view_as(labels)


def _all(batch: Batch, name: str, counted: Tensor) -> dict[str, Tensor]:
    """The batch with all labels that count."""
    return {**batch, name: _only(batch[name], counted)}


def _divided(places: Tensor, share: int) -> tuple[Tensor, Tensor]:
    """Two sets: every `share`-th place, and the others."""
    first = torch.arange(len(places), device="cpu") % share == 0
    return places[first], places[~first]


def _per_label(logits: Tensor, labels: Tensor) -> bool:
    """Whether there are logits for each label, with the classes in the last dimension or in the second."""
    if logits.shape[:-1] == labels.shape:
        return True
    return (*logits.shape[:1], *logits.shape[2:]) == tuple(labels.shape)


def _tolerance(loss: Tensor) -> float:
    """How far two losses of this dtype may differ by rounding, as a share of the larger one."""
    if loss.dtype in (torch.float32, torch.float64):
        return _ROUNDING
    return max(_ROUNDING, _COARSE * torch.finfo(loss.dtype).eps)


def _close(one: float, other: float, tolerance: float) -> bool:
    """Whether two losses are finite and equal but for rounding."""
    difference = abs(one - other)
    largest = max(abs(one), abs(other))
    return math.isfinite(difference) and difference <= tolerance * largest


def _differ(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two logits differ by more than rounding."""
    if one is None or other is None:
        return False
    return bool((one - other).abs().max() > _ROUNDING * one.abs().max())


def _compared(everything: float, losses: list[tuple[float, float]]) -> str:
    """The losses, for the message."""
    first, second = losses[0]
    return f"it is {everything:.5g} for all labels, {first:.5g} and {second:.5g} for the halves of them"


def with_masks(batches: Iterator[Batch], name: str, certain: bool) -> Batch | None:
    """The first batch with a masked label; None if there is none. certain: masks will come, so any batch will do."""
    for batch in batches:
        if certain or bool((batch[name] == IGNORED).any()):
            return batch
    return None
