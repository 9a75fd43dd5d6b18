"""Health of what a step is made of: its samples, its gradients and the weights.

- **Gradients and weights**, on the device: norms, the share of exact zeros, the share of values near fp16's limit. Few
  fused operations do it, and nothing is read on the host.
- **Samples**, on the host: values that no update should come from. They are found before the forward pass, where a
  label out of range would end the process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from harness.core.facts import BAD_LABEL, IGNORED, NO_LABEL, NON_FINITE_INPUT, UNREADABLE
from harness.core.protocols import Batch

# About how many elements of each tensor the shares are estimated from, in evenly spread first-dim slices. All elements
# would cost ten times the norm, and masks as large as the largest gradient.
_SAMPLE = 1 << 16
# Elements that a CPU copies to fp64 at a time for a norm: 2 MiB, which stay in its cache.
_WIDENED = 1 << 18
# Half of fp16's largest value: the next doubling of the loss scale overflows.
_NEAR_LIMIT = 65504.0 / 2


class GradHealth:
    """What `grad_health` measures, on the gradients' device.

    sums: fp64 [5], which ranks that hold different rows can add up: squares, then as `_counts`. NaN where the shares
        were not measured.
    """

    def __init__(self, sums: Tensor) -> None:
        self.sums = sums

    # Computed when asked for: sums are added up over ranks first, and each operation is a launch on a GPU.

    @property
    def norm(self) -> Tensor:
        """L2 norm of the gradients as they are, fp32 0-d."""
        return self.sums[0].sqrt().float()

    @property
    def zeros(self) -> Tensor:
        """Share of exact zeros in [0, 1], fp32 0-d; see `grad_health`."""
        return (self.sums[1] / self.sums[2]).float()

    @property
    def near_limit(self) -> Tensor:
        """Share of values near fp16's limit in [0, 1], fp32 0-d; see `grad_health`."""
        return (self.sums[3] / self.sums[4]).float()


@torch.no_grad()
def grad_health(
    params: Iterable[nn.Parameter], scaled: bool, divided_by: Tensor | None = None
) -> GradHealth:
    """The norm of the gradients, and two shares that show whether a loss scale is right.

    Parameters without a gradient are ignored.

    scaled: measure the shares: the gradients are multiplied by a loss scale, or were until they were `divided_by` it.
    divided_by: fp32 0-d, what gradients were already divided by; the shares are of what they were before.

    `zeros` is the share of elements that are exactly 0. Under fp16 autocast the gradients of fp32 parameters are fp32,
    but were rounded to fp16 on their way: whatever was under its smallest value (6e-8) became 0. Only rows (first-dim
    slices) and columns with at least one other value are counted. Empty ones had no input: words that the batch does
    not have, units that are masked or inactive. A tensor of zeros alone is counted in full: no gradient reaches it.

    `near_limit` is the share of elements over half of fp16's largest value.

    Both are 0 / 0 = NaN without a gradient. Large tensors are sampled.
    """
    # A rank that holds no row of a sharded parameter has an empty gradient.
    found = [param.grad for param in params if param.grad is not None]
    gradients = [gradient for gradient in found if gradient.numel()]
    squares = sum_of_squares(gradients).reshape(1)
    if not scaled:
        return GradHealth(torch.cat([squares, squares.new_full((4,), math.nan)]))

    # Gradients that were divided already are compared with the limit divided by as much.
    limit: float | Tensor = _NEAR_LIMIT
    if divided_by is not None:
        limit = _NEAR_LIMIT / divided_by
    # Added in one operation: there are thousands of gradients. The first row is for a model without any.
    counts = [squares.new_zeros(4)]
    for gradient in gradients:
        counted = _counts(gradient, limit)
        counts.append(counted.to(squares.device))
    total = torch.stack(counts).sum(0)
    return GradHealth(torch.cat([squares, total]))


@torch.no_grad()
def grad_norm(params: Iterable[nn.Parameter]) -> Tensor:
    """Global L2 norm of the gradients, see `l2_norm`. Parameters without a gradient are ignored."""
    return l2_norm([param.grad for param in params if param.grad is not None])


def l2_norm(tensors: Iterable[Tensor]) -> Tensor:
    """L2 norm of all elements: fp32, 0-d, on the first tensor's device.

    Without a tensor it is 0 on the CPU. Non-finite if any element is. No host read.
    """
    return sum_of_squares(tensors).sqrt().float()


@torch.no_grad()
def sum_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    """Sum of the squares of all elements: fp64, 0-d, on the first tensor's device; 0 on the CPU without a tensor.

    In fp64 throughout. So ranks that hold rows of the tensors can add up their sums, and its root rounded to fp32 is
    what one process gets from whole tensors. In fp32 it would differ in the 7th digit. A norm that clips feeds that
    back into the weights: an FP8 run was off by 0.4% after 12 steps.
    """
    groups = by_device_and_dtype(tensor for tensor in tensors if tensor.numel())
    sums = [squares_of_each(group).sum() for group in groups]
    if not sums:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    device = sums[0].device
    return torch.stack([each.to(device) for each in sums]).sum()


def squares_of_each(group: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of each tensor: fp64 [tensors], on their device.

    group: of `by_device_and_dtype`, none of them empty.
    """
    # On a GPU one fused operation reads all tensors. On a CPU it copies each to fp64 first: large ones are cut.
    pieces: list[Tensor] = []
    counts: list[int] = []
    for tensor in group:
        is_large = tensor.device.type == "cpu" and tensor.numel() > _WIDENED
        parts = tensor.reshape(-1).split(_WIDENED) if is_large else (tensor,)
        pieces += parts
        counts.append(len(parts))
    found = torch.stack(torch._foreach_norm(pieces, 2, dtype=torch.float64)).square()
    if len(pieces) == len(group):
        return found
    return torch.stack([each.sum() for each in found.split(counts)])


def by_device_and_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors in groups that one fused operation can take."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`. From pinned memory, so that the host need not wait until the copy is made."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _counts(gradient: Tensor, limit: float | Tensor) -> Tensor:
    """float64 [4]: zeros, elements they are a share of, elements near the limit, elements; see `grad_health`."""
    # Every `step`-th slice, as a matrix. A vector is one row: each of its zeros is an empty column.
    if gradient.ndim == 0:
        gradient = gradient.reshape(1)
    slices = gradient.shape[0]
    step = max(1, min(slices, gradient.numel() // _SAMPLE))
    sample = gradient[::step].float()
    rows = sample.shape[0] if sample.ndim > 1 else 1
    sample = sample.reshape(rows, -1)

    # Zeros in rows and columns that have another value. Comparisons go into 0.0 and 1.0: on a CPU, into bools, and sums
    # of bools, take five times as long.
    other = torch.ne(sample, 0.0, out=torch.empty_like(sample))
    in_rows = other.sum(1, dtype=torch.float64)
    in_columns = other.sum(0)
    inside = in_rows.count_nonzero() * in_columns.count_nonzero().double()
    inside = torch.where(inside == 0, float(sample.numel()), inside)

    if isinstance(limit, Tensor):
        limit = limit.to(sample.device)
    near = torch.gt(sample.abs(), limit, out=other).sum(dtype=torch.float64)
    elements = torch.full_like(inside, sample.numel())
    zeros = inside - in_rows.sum()
    # Each slice stands for `step` of them.
    return torch.stack([zeros, inside, near, elements]) * step


TOKENS, LABELS = ("inputs", "input_ids"), ("targets", "labels", "label")
"""Names in a batch: of tensors whose whole numbers are token ids, and of tensors whose whole numbers are labels."""
# Dtypes that can be compared on every device.
_ORDERED = {
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one sample.

    row: its place in the batch; None for the batch as a whole.
    bit: of `StepFacts.bad_data`.
    text: for people.
    """

    row: int | None
    bit: int
    text: str


class Flawed(Batch):
    """A batch with samples that could not be read; its source has replaced them by something harmless.

    faults: what is wrong, of the bit UNREADABLE. No update is made from such a batch.
    """

    def __init__(self, batch: Batch, faults: Sequence[Fault]) -> None:
        super().__init__(batch)
        self.faults = tuple(faults)


def check_batch(
    batch: Batch,
    vocab_size: int | None = None,
    classes: int | None = None,
) -> int:
    """What is wrong with a batch, as bits of `StepFacts.bad_data`; 0: nothing. Meant for tensors on the host.

    Floating-point values must be finite. Integers of TOKENS must be in [0, vocab_size). Integers of LABELS must be
    IGNORED or in [0, classes), or in [0, vocab_size) where `classes` is None. Where neither is known, integers must not
    be negative. Labels of which none counts are NO_LABEL.

    One pass over each tensor, two over labels of which some are ignored.
    """
    found = UNREADABLE if isinstance(batch, Flawed) else 0
    for name, values in batch.items():
        labels = name in LABELS
        if not values.numel():
            if labels:
                found |= NO_LABEL
            continue
        values = _ordered(values)
        # Other integers, such as masks and numbers of segments, may be anything.
        if not values.is_floating_point() and not labels and name not in TOKENS:
            continue

        bounds = torch.aminmax(values)
        low, high = bounds.min.item(), bounds.max.item()
        # IGNORED is negative: it hides the least of the labels that count.
        if labels and low == IGNORED and not values.is_floating_point():
            if high == IGNORED:
                found |= NO_LABEL
                continue
            low = values.where(values != IGNORED, 0).min().item()
        found |= _judge(values, low, high, _bound(labels, vocab_size, classes))
    return found


def name_faults(
    batch: Batch, vocab_size: int | None = None, classes: int | None = None
) -> list[Fault]:
    """What `check_batch` found, sample by sample: the first wrong value of each and where in the sample it is.

    Slow: for batches that are known to be bad.
    """
    faults: list[Fault] = []
    if isinstance(batch, Flawed):
        faults += batch.faults
    for name, values in batch.items():
        labels = name in LABELS
        values = _ordered(values)
        floating = values.is_floating_point()
        if not floating:
            values = values.to(torch.int64)
            if not labels and name not in TOKENS:
                continue

        ignored = (values == IGNORED) & (labels and not floating)
        if labels and ignored.all():  # true for an empty tensor, too
            faults.append(Fault(None, NO_LABEL, "no target has a label"))
            continue

        kind = name
        if labels:
            kind = "label"
        elif name in TOKENS:
            kind = "input"
        faults += _name(kind, values, _bound(labels, vocab_size, classes), ignored)
    return faults


def harmless(batch: Batch) -> Batch:
    """A batch of the same shapes that any model can compute; it replaces one whose update will be skipped."""
    found: Batch = {}
    for name, values in batch.items():
        # Attention that may look at nothing is 0 / 0.
        if name == "attention_mask":
            found[name] = torch.ones_like(values)
        else:
            found[name] = torch.zeros_like(values)
    return found


def one_sample(batch: Batch, row: int) -> Batch:
    """The sample at `row` of a batch, as a batch."""
    one = {name: values[row : row + 1] for name, values in batch.items()}
    if not isinstance(batch, Flawed):
        return one

    # Its own faults, and those of the whole batch; in the new batch its row is 0.
    own = [fault for fault in batch.faults if fault.row in (row, None)]
    if not own:
        return one
    return Flawed(one, [replace(fault, row=0) for fault in own])


def count_targets(batch: Batch) -> int:
    """Targets that have a loss; without labels, samples."""
    for name in LABELS:
        if name not in batch:
            continue
        labels = batch[name]
        if labels.is_floating_point():
            return labels.numel()
        return int((labels != IGNORED).sum())
    return len(next(iter(batch.values())))


def _bound(labels: bool, vocab_size: int | None, classes: int | None) -> int | None:
    if labels and classes is not None:
        return classes
    return vocab_size


def _ordered(values: Tensor) -> Tensor:
    """The values in a dtype that can be compared on every device.

    Real and imaginary parts are put side by side. Other floats, such as FP8, become float32.
    """
    if values.dtype in _ORDERED:
        return values
    if values.is_complex():
        return torch.view_as_real(values)
    if values.is_floating_point():
        return values.float()
    return values.to(torch.int64)


def _judge(values: Tensor, low: float, high: float, vocab_size: int | None) -> int:
    """Bits for a tensor with these bounds. A NaN among the values makes both bounds NaN."""
    if values.is_floating_point():
        finite = -torch.inf < low and high < torch.inf
        return 0 if finite else NON_FINITE_INPUT
    if low < 0:
        return BAD_LABEL
    if vocab_size is not None and high >= vocab_size:
        return BAD_LABEL
    return 0


def _name(
    kind: str,
    values: Tensor,
    vocab_size: int | None,
    ignored: Tensor,
) -> list[Fault]:
    """Faults of a float or int64 tensor; ignored: bool, of its shape."""
    # Which values are wrong, and what would be allowed.
    if values.is_floating_point():
        wrong = ~torch.isfinite(values)
        allowed, bit = "", NON_FINITE_INPUT
    else:
        wrong = (values < 0) & ~ignored
        allowed, bit = ", not in [0, ...)", BAD_LABEL
        if vocab_size is not None:
            wrong |= values >= vocab_size
            allowed = f", not in [0, {vocab_size})"

    # Report the first wrong value of each sample. A tensor without a dimension is one sample.
    samples: Iterable[tuple[Tensor, Tensor]] = [(values, wrong)]
    if values.ndim:
        samples = zip(values, wrong, strict=True)
    faults: list[Fault] = []
    for row, (sample, bad) in enumerate(samples):
        # A sample may be a single number, which has no index. As a vector of one it has the index 0.
        places = bad.reshape(-1, 1).nonzero() if bad.ndim < 2 else bad.nonzero()
        if not len(places):
            continue
        index = places[0].tolist()[: bad.ndim]
        where = ""
        if len(index) == 1:
            where = f" at position {index[0]}"
        elif index:
            where = f" at position {index}"
        more = ""
        if len(places) > 1:
            more = f" ({len(places)} such values)"
        text = f"{kind} {sample[tuple(index)].item()}{where}{allowed}{more}"
        faults.append(Fault(row, bit, text))
    return faults
