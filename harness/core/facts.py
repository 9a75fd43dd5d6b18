"""Pure data that flows through the loop: facts of a step, verdicts of monitors, and the action that follows.

It is torch-free, so that every decision can be tested, replayed and shown without a device.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

ROLES = ("input", "weight", "grad_output")
"""The quantised tensors of a layer, in the order of its slots `<layer>.<role>`."""


def pad_numbers(name: str) -> str:
    """Zero-pad the numeric parts of a dotted name: blocks.3.mlp -> blocks.03.mlp. Charts then sort by number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", lambda match: match.group().zfill(2), name)


SWITCH_DELAY = 2
"""Steps from the evidence for a switch or a limit to its effect.

It is the same whether or not the lag was drained in between: a run that was stopped and resumed must switch at the same
step as one that was not."""


@dataclass(frozen=True, slots=True)
class Window:
    """The samples of one optimizer step, over all ranks.

    index: its place in the data order, from 0 (one less than the number of its step until windows are skipped).
    samples: int64 [global_batch], sample numbers in reading order.
    """

    index: int
    samples: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a step's update, decided from earlier steps; infinity: no limit. Compared in float32.

    loss: mean training loss, in nats, over which the update is skipped.
    norm: L2 norm of the gradient before clipping over which the update is skipped.
    clip: norm to which gradients are clipped, if it is under `train.max_grad_norm`.
    """

    loss: float = math.inf
    norm: float = math.inf
    clip: float = math.inf

    def stricter(self, other: Limits) -> Limits:
        """The stricter of each pair of limits."""
        return Limits(
            min(self.loss, other.loss), min(self.norm, other.norm), min(self.clip, other.clip)
        )

    def as_json(self) -> list[float | None]:
        """[loss, norm, clip], None for infinity, which JSON does not have."""
        limits = (self.loss, self.norm, self.clip)
        return [limit if math.isfinite(limit) else None for limit in limits]

    @classmethod
    def from_json(cls, limits: Sequence[float | None]) -> Limits:
        """The limits that `as_json` gave."""
        loss, norm, clip = [math.inf if limit is None else limit for limit in limits]
        return cls(loss, norm, clip)


@dataclass(frozen=True, slots=True)
class StepTerms:
    """What earlier steps decided about this one.

    step: its number, from 1.
    limits: of its update.
    measures: whether to measure expensive figures: the weights' norm, and shares of gradients near fp16's limits.
    hunts: whether to measure the gradient norm of every layer (`guard.hunt`).
    """

    step: int
    limits: Limits
    measures: bool
    hunts: bool = False


Over = Literal["ranks agree", "max", "min", "any bit"]
EVERY_STEP = "every step"


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a step. The annotation of its field below is its only declaration (see `core.metrics`).

    about: what it is.
    unit: empty for a count or a share.
    key: its name in the journal and the tracker; a slot's figure has `/<slot>` appended. Empty: it is not logged.
    over_ranks: how values of several ranks become one. "max", "min" and "any bit" are part of the update's one
        reduction. "ranks agree": every rank measures the same value, which is not reduced.
    often: when it is measured. A figure that was not measured is NaN, or the field's default.
    """

    about: str
    unit: str = ""
    key: str = ""
    over_ranks: Over = "ranks agree"
    often: str = EVERY_STEP


_KEPT = "tracking.fp8_every"
SAMPLED = "tracking.fp8_every, sampled"
_SCALED = "guard.measure_every, under a loss scale"
_OWN_LOOP = "every step, not in loops of your own"
_HUNTED = "guard.hunt"
HUNT_STEPS = 50
"""Steps after a rollback in which `guard.hunt: auto` measures the gradient norm of every layer."""
_PerSlot = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SlotStats:
    """FP8 statistics of one step by slot; each array is float32 [slots] in the order of `names`.

    The arrays are the rows of what `PrecisionBackend.end_window` returns, in this order. An array that is left out was
    not measured, and becomes NaN.
    """

    names: tuple[str, ...]
    amax: Annotated[
        _PerSlot,
        Metric("largest magnitude of the tensor, before scaling", "", "fp8_amax", "max", _KEPT),
    ]
    scale: Annotated[
        _PerSlot,
        Metric("scale that the step used, before scales roll", "", "fp8_scale", often=_KEPT),
    ]
    saturation: Annotated[
        _PerSlot,
        Metric(
            "amax * scale / largest FP8 value; over 1, values were clipped",
            "",
            "fp8_saturation",
            "max",
            _KEPT,
        ),
    ]
    clipped: Annotated[
        _PerSlot,
        Metric("share of values over the largest FP8 value", "", "fp8_clipped", often=SAMPLED),
    ]
    underflow: Annotated[
        _PerSlot,
        Metric("share of non-zero values flushed to zero", "", "fp8_underflow", often=SAMPLED),
    ]
    sqnr_db: Annotated[
        _PerSlot,
        Metric(
            "SQNR (signal over quantisation noise) of the tensor",
            "dB",
            "fp8_sqnr_db",
            often=SAMPLED,
        ),
    ]
    even_db: Annotated[
        _PerSlot,
        Metric(
            "per-element SQNR (of gradients: per row)",
            "dB",
            "fp8_even_db",
            often=SAMPLED,
        ),
    ] = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    centred_db: Annotated[
        _PerSlot,
        Metric(
            "SQNR without each channel's mean",
            "dB",
            "fp8_centred_db",
            often=SAMPLED,
        ),
    ] = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    scrubbed: Annotated[int, Metric("number of infinite amaxes dropped from the histories")] = 0

    def __post_init__(self) -> None:
        # What was left out was not measured.
        for name in ("even_db", "centred_db"):
            if len(getattr(self, name)) != len(self.names):
                not_measured = np.full(len(self.names), np.nan, dtype=np.float32)
                object.__setattr__(self, name, not_measured)

    def stacked(self) -> _PerSlot:
        """float32 [figures, slots] in the order of SLOT_ROWS."""
        figures = [getattr(self, name) for name in SLOT_ROWS]
        return np.stack([np.asarray(each, dtype=np.float32) for each in figures])


def declared_metrics(facts: type) -> dict[str, tuple[type, Metric]]:
    """(type, metric) of every field of a class of facts that is annotated with a Metric."""
    found: dict[str, tuple[type, Metric]] = {}
    for name, hint in get_type_hints(facts, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, metric = get_args(hint)
            found[name] = (kind, metric)
    return found


SLOT_ROWS: dict[str, Metric] = {
    name: metric for name, (kind, metric) in declared_metrics(SlotStats).items() if kind is not int
}
"""The figures of a slot by their field in SlotStats, in the order of the rows of `PrecisionBackend.end_window`."""


IGNORED = -100
"""A target that has no loss, as in torch's cross-entropy."""

NON_FINITE_INPUT, BAD_LABEL, NO_LABEL, UNREADABLE = 1, 2, 4, 8
"""Bits of `StepFacts.bad_data`."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What one step did, identical on every rank. Fields with a Metric are described there.

    step: number of the step just done; a run's first step is 1.
    window: its place in the data order.
    tokens: tokens (targets) of the window, over all ranks.
    seconds: wall time of the step.
    demoted: FP8 layers that ran in BF16.
    slots: FP8 statistics; None without FP8 slots.
    fell_back_to: the precision that the whole run was downgraded to; empty: as planned.
    trained: FP8 layers whose own weight got a gradient; in a run's first step only.
    limits: those in force in this step.
    ideal_seconds: time of the step's matrix products at the card's peak; NaN if the peak is not known.
    diverged: of the parameters compared in this step, those whose bits differ between ranks.
    """

    step: int
    window: int
    loss: Annotated[
        float,
        Metric(
            "mean loss of the step's samples, all ranks",
            "nats per token",
            "train/loss",
        ),
    ]
    grad_norm: Annotated[
        float, Metric("L2 norm of the unscaled gradient, before clipping", "", "train/grad_norm")
    ]
    lr: Annotated[float, Metric("learning rate", "", "train/lr")]
    loss_scale: Annotated[
        float,
        Metric("factor on the loss before backward; 1 except in fp16", "", "train/loss_scale"),
    ]
    applied: Annotated[
        bool, Metric("1 if the update was applied, 0 if it was skipped", "", "train/step_applied")
    ]
    applied_steps: Annotated[int, Metric("updates applied so far, this one included")]
    tokens: int
    seconds: float
    stop: Annotated[bool, Metric("whether some rank was asked to stop", over_ranks="max")] = False
    demoted: tuple[str, ...] = ()
    slots: SlotStats | None = None
    fell_back_to: str = ""
    trained: tuple[str, ...] = ()
    limits: Limits = Limits()
    bad_data: Annotated[
        int,
        Metric(
            "what is wrong with the samples: bits NON_FINITE_INPUT, BAD_LABEL, NO_LABEL, UNREADABLE",
            over_ranks="any bit",
        ),
    ] = 0
    grad_zeros: Annotated[
        float,
        Metric(
            "share of the scaled gradient that is exactly 0",
            "",
            "train/grad_zeros",
            often=_SCALED,
        ),
    ] = math.nan
    grad_near_limit: Annotated[
        float,
        Metric(
            "share of the scaled gradient over half of fp16's largest value",
            "",
            "train/grad_near_limit",
            often=_SCALED,
        ),
    ] = math.nan
    param_norm: Annotated[
        float,
        Metric(
            "L2 norm of trainable parameters before the update; infinite if one is NaN",
            key="train/param_norm",
            over_ranks="max",
            often="guard.measure_every",
        ),
    ] = math.nan
    forward_fastest: Annotated[
        float, Metric("time of the fastest rank's forward passes", "s", over_ranks="min")
    ] = 0.0
    forward_slowest: Annotated[
        float, Metric("time of the slowest rank's forward passes", "s", over_ranks="max")
    ] = 0.0
    peak_memory: Annotated[
        float,
        Metric(
            "peak memory so far: torch's on a GPU, the process's on a CPU",
            "GiB",
            "train/peak_memory_gib",
            "max",
            _OWN_LOOP,
        ),
    ] = math.nan
    other_calls: Annotated[
        bool,
        Metric("whether ranks called other blocks of a sharded model; the update is then skipped"),
    ] = False
    ideal_seconds: float = math.nan
    diverged: tuple[str, ...] = ()
    layer_norms: Annotated[
        Mapping[str, float],
        Metric(
            "L2 norm of the unscaled gradients of one layer's own parameters, unclipped",
            key="grad_norm",
            often=_HUNTED,
        ),
    ] = field(default_factory=dict[str, float])

    @property
    def over_limits(self) -> bool:
        """Whether the update was skipped because loss or gradient norm, both finite, were over the limits in force."""
        if not (math.isfinite(self.loss) and math.isfinite(self.grad_norm)):
            return False
        # The device compared in float32, in which a large limit is none.
        with np.errstate(over="ignore"):
            loss_limit = float(np.float32(self.limits.loss))
            norm_limit = float(np.float32(self.limits.norm))
        return self.loss > loss_limit or self.grad_norm > norm_limit


@dataclass(frozen=True, slots=True)
class Continue:
    """Nothing to do."""


@dataclass(frozen=True, slots=True)
class Switch:
    """Move layers between FP8 and BF16, or the whole run to `whole_run_to` ("bf16" | "fp32"), for good."""

    demote: tuple[str, ...] = ()
    promote: tuple[str, ...] = ()
    reason: str = ""
    whole_run_to: str = ""


@dataclass(frozen=True, slots=True)
class Rollback:
    """Go back to the last good checkpoint, and skip some windows.

    bad: the windows to skip, by their place in the data order.
    from_disk: restore a checkpoint that all ranks read from the same file, not the copy in each rank's own memory.
    """

    reason: str
    bad: tuple[int, ...] = ()
    from_disk: bool = False


@dataclass(frozen=True, slots=True)
class Halt:
    """Stop the run, which would only get worse. fix: what the user can do about it."""

    reason: str
    fix: str = ""

    @property
    def text(self) -> str:
        """Reason and fix."""
        return f"{self.reason}. {self.fix}" if self.fix else self.reason


Action = Continue | Switch | Rollback | Halt


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one monitor says of one step.

    code: stable name, such as `nonfinite.skip`.
    text: for people.
    healthy: False keeps a checkpoint from becoming a rollback target.
    proposal: what the monitor would do; the responder decides, within budgets.
    evidence: figures, JSON-able.
    sample_steps: number of next steps in which expensive statistics should be measured, whatever their usual cadence.
    limits: of the next updates, until the monitor gives others.
    skip: the update was skipped, and counts against guard.max_skips.
    suspect: whether to keep what is needed to run the step again; None: if its update was skipped.
    """

    code: str
    step: int
    text: str = ""
    healthy: bool = True
    proposal: Action = field(default_factory=Continue)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    sample_steps: int = 0
    limits: Limits = Limits()
    skip: bool = False
    suspect: bool | None = None

    @property
    def ok(self) -> bool:
        """Whether the monitor has nothing to report: its code ends in `.ok`."""
        return self.code.endswith(".ok")


@dataclass(frozen=True, slots=True)
class SamplingSpan:
    """Steps [first, last) in which every statistic is measured; empty if first == last."""

    first: int = 0
    last: int = 0

    def __contains__(self, step: int) -> bool:
        return self.first <= step < self.last

    def extended(self, first: int, steps: int) -> SamplingSpan:
        """The span with `steps` more steps from `first` on; one that ends before `first` is dropped."""
        begin = first
        if self.last >= first:
            begin = self.first
        return SamplingSpan(begin, max(self.last, first + steps))


_SET_AFTER = 2
"""Steps after which FP8 scales fit their tensors; samples before that teach nothing."""


def sampled_step(seed: int, block: int, every: int) -> int:
    """The step (from 1) to sample in block number `block` (from 0) of `every` steps: one step in each block.

    The place in the block is drawn by a hash of block and seed. With a fixed period, a fault that comes every so many
    steps could hide between the samples. Samples are up to 2 * every - 1 steps apart. The first sample is in the first
    half of its block, so that a short run has one, but not before the third step.
    """
    # A hash, not a generator: ranks and resumed runs draw the same place without any state.
    hashed = hashlib.blake2b(b"%d:%d" % (seed, block), digest_size=8)
    drawn = int.from_bytes(hashed.digest())
    if block:
        return block * every + drawn % every + 1

    # The first block: after the scales have settled, and in its first half.
    places = max(1, every // 2 - _SET_AFTER)
    return min(every, _SET_AFTER + drawn % places + 1)


def is_sampled(seed: int, step: int, every: int) -> bool:
    """Whether `step` is the `sampled_step` of its block."""
    return step == sampled_step(seed, (step - 1) // every, every)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended; written to `outcome.json`.

    status: done | stopped | halted | failed.
    step: the last step.
    val_loss: of the last validation.
    applied, skipped: updates of the steps that count. They come from the state, so rows missing in the journal do not
        change them.
    rollbacks: of the whole run.

    None: not known, because no step was done.
    """

    status: str
    exit_code: int
    reason: str
    step: int
    val_loss: float | None = None
    applied: int | None = None
    skipped: int | None = None
    rollbacks: int | None = None


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One row of the plan: a module, the precision it runs in, the backend that does it, and why.

    norm: name of the norm that is fused with it; empty if none is.
    first: name of the first Linear of a fused MLP, if this is its second.
    frozen: it runs in FP8 and its weight is not trained. No gradient reaches it unless something before it is trained.
    """

    module: str
    kind: str
    precision: str
    backend: str
    reason: str
    shape: tuple[int, ...] = ()
    norm: str = ""
    first: str = ""
    frozen: bool = False


def as_it_ran(planned: str, fell_to: str, demoted: bool, silent: bool) -> str:
    """The precision that a module ran in.

    planned: its precision by the plan.
    fell_to: precision that the whole run was downgraded to; empty if it was not.
    demoted: whether the layer is in BF16.
    silent: whether none of its slots saw an amax; an FP8 module is then "unused".
    """
    if fell_to and planned.startswith(("fp8", "fp16")):
        return fell_to
    if planned != "fp8":
        return planned
    if demoted:
        return "bf16"
    return "unused" if silent else "fp8"


@dataclass(frozen=True, slots=True)
class RungVerdict:
    """One rung of a recipe's ladder and why it was taken or not."""

    rung: str
    taken: bool
    reason: str


def jsonable(value: float) -> float | str:
    """The value, as text if it is not finite: JSON has no NaN or Inf, and strict readers would stop at one."""
    return value if math.isfinite(value) else str(value)
