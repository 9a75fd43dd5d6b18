"""The result of a replay: the data of `replay.json`, the cause that follows from it, advice, and how it is printed.

`cause.judge` decides the cause by elimination. Of one step it can be *data*, *sound*, *not reproducible*, *model or
data*, and *numerics*: bad in low precision only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.core.errors import some
from harness.core.facts import (
    BAD_LABEL,
    NO_LABEL,
    NON_FINITE_INPUT,
    UNREADABLE,
    StepFacts,
    jsonable,
)
from harness.replay.cause import Evidence, judge
from harness.replay.flight import Difference, same
from harness.replay.origin import LOSS, Finding

SHOWN = 8
"""Parameters, and samples, that the terminal lists."""

DATA = {
    NON_FINITE_INPUT: "inputs that are not finite",
    BAD_LABEL: "ids out of range",
    NO_LABEL: "no label at all",
    UNREADABLE: "samples that cannot be read",
}
"""Words for the bits of `StepFacts.bad_data`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of the window, run alone and without an update.

    number: in the data.
    rank: the rank of the run that had it.
    micro_batch: that held it in this replay, counted from 1 over the whole step.
    first_token: where it begins in the run's training tokens; None in a data set of the user's own.
    text: how its bytes begin, or its tensors.
    loss, grad_norm, bad_data: as in StepFacts.
    """

    number: int
    rank: int
    micro_batch: int
    first_token: int | None
    text: str
    loss: float
    grad_norm: float
    bad_data: int

    @property
    def bad(self) -> bool:
        """Whether this sample alone cannot be trained on."""
        finite = math.isfinite(self.loss) and math.isfinite(self.grad_norm)
        return not finite or self.bad_data != 0


@dataclass(frozen=True, slots=True)
class Gradient:
    """One parameter's unscaled gradient.

    norm: L2 norm.
    largest: largest magnitude.
    bad: elements that are not finite.
    growth: norm over that of the step before; NaN if that step was not re-run.
    """

    parameter: str
    norm: float
    largest: float
    bad: int
    growth: float


@dataclass(frozen=True, slots=True)
class LayerHistory:
    """The gradient norms that the run itself measured of one layer in a hunt (`guard.hunt`).

    layer: name with padded numbers.
    norms: L2 norm of the unscaled gradient, by step.
    """

    layer: str
    norms: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that a replay found.

    run, step: which step was replayed.
    base: the step of the checkpoint started from; 0: the initial state.
    attempt: of the run; every rollback begins another.
    window: the step's place in the data order.
    codes: of the recorded verdicts.
    was_bad: the step was bad in the run.
    here: the step, with hooks.
    again: the step without hooks, from the same state; None where blocks were compiled.
    in_float32: the step in float32. None if the step was neither bad here nor a spike in the run, and if its data
        are at fault.
    loss_before: of the step before; None if that was not re-run.
    journal_loss: of this step, in the run.
    difference: the first figure that is not the journal's.
    setup_differences: why bits may differ from the run's; empty if they must not.
    finding, finding_in_float32: where the first NaN or Inf came from.
    gradients: by parameter, the largest growth first.
    hunted: of the layers of the first SHOWN gradients, what the journal has of this step and those before it.
    samples: each alone, if the step is bad.
    window_size: samples in the window.
    ranks: of the run.
    precision: in which the step ran.
    anomaly: what autograd's anomaly mode says; empty if not asked for.
    cause, why, advice: what follows from all of it.
    """

    run: str
    step: int
    base: int
    attempt: int
    window: int
    codes: list[str]
    was_bad: bool
    here: StepFacts
    again: StepFacts | None
    in_float32: StepFacts | None
    loss_before: float | None
    journal_loss: float
    difference: Difference | None
    setup_differences: list[str]
    finding: Finding | None
    finding_in_float32: Finding | None
    gradients: list[Gradient]
    hunted: list[LayerHistory]
    samples: list[Sample]
    window_size: int
    ranks: int
    precision: str
    anomaly: str = ""
    cause: str = field(init=False, default="")
    why: str = field(init=False, default="")
    advice: str = field(init=False, default="")

    def __post_init__(self) -> None:
        cause, why = _cause(self)
        object.__setattr__(self, "cause", cause)
        object.__setattr__(self, "why", why)
        object.__setattr__(self, "advice", _advice(self))

    def bad(self, facts: StepFacts) -> bool:
        """Whether these are the facts of a bad step, by the measure of this one.

        If the run's step was a spike, a loss over the middle between the usual loss and that spike is bad too. The loss
        of the step before is the usual one. If that step was not re-run, the spike less half of its magnitude is.
        """
        if stopped_by_gate(facts):
            return True
        spike = self.journal_loss
        if "loss.spike" not in self.codes or not math.isfinite(spike):
            return False
        usual = self.loss_before
        if usual is None:
            usual = spike - abs(spike) / 2

        # The middle is the geometric mean. Losses of zero and below have none: there it is the arithmetic mean.
        if min(usual, spike) > 0:
            return facts.loss > math.sqrt(usual * spike)
        return facts.loss > (usual + spike) / 2


def _data_words(bits: int, between: str) -> str:
    """What is wrong with data, in words. bits: of `StepFacts.bad_data`."""
    return between.join(text for bit, text in DATA.items() if bits & bit)


def stopped_by_gate(facts: StepFacts) -> bool:
    """Whether the gate stops the update: not finite, over its limits, or on data that cannot be trained on."""
    finite = math.isfinite(facts.loss) and math.isfinite(facts.grad_norm)
    return not finite or facts.over_limits or facts.bad_data != 0


Measured = Mapping[str, tuple[float, float, int]]
"""`Origin.gradients`: by parameter the norm, the largest magnitude, and how many elements are not finite."""


def growth(
    now: Measured,
    before: Measured,
    scale: float,
    scale_before: float,
) -> list[Gradient]:
    """Gradients by parameter, the largest growth first.

    now, before: of the step and of the one before it.
    scale, scale_before: what those gradients were multiplied by.
    """
    # Unscaled, so that a change of the loss scale between the two steps is no growth.
    found: list[Gradient] = []
    for name, (scaled_norm, scaled_largest, bad) in now.items():
        norm = scaled_norm / scale
        largest = scaled_largest / scale
        ratio = math.nan
        if name in before:
            usual = before[name][0] / scale_before
            if usual > 0:
                ratio = norm / usual
        found.append(Gradient(name, norm, largest, bad, ratio))

    # A parameter without a usual norm comes last, and among equals one that is not finite comes first.
    def order(each: Gradient) -> tuple[float, float]:
        ratio = -math.inf if math.isnan(each.growth) else each.growth
        norm = each.norm if math.isfinite(each.norm) else math.inf
        return -ratio, -norm

    return sorted(found, key=order)


def _cause(answer: Answer) -> tuple[str, str]:
    """The cause and its reason."""
    here, again = answer.here, answer.again
    repeats = again is None or (
        same(here.loss, again.loss) and same(here.grad_norm, again.grad_norm)
    )
    # A difference from the journal that the set-up explains says nothing.
    differs = answer.difference is not None and not answer.setup_differences
    exact = answer.in_float32
    cause = judge(
        Evidence(
            unfit=here.bad_data != 0,
            was_bad=answer.was_bad,
            is_bad=answer.bad(here),
            unlike=not repeats or differs,
            bad_in_float32=None if exact is None else answer.bad(exact),
        )
    )

    match cause:
        case "data":
            what = _data_words(here.bad_data, " and ")
            return (
                cause,
                f"samples of this window have {what}: they were found before the model saw them",
            )
        case "sound":
            return cause, "the step was well in the run, and is well here"
        case "not reproducible":
            return cause, _why_not_reproducible(answer, repeats)
        case "precision":
            # The name that replay.json has always had for it.
            return (
                "numerics",
                f"well in float32: only bad in low precision ({answer.precision})",
            )
        case _:
            return cause, "bad in float32 too: no precision would have helped"


def _why_not_reproducible(answer: Answer, repeats: bool) -> str:
    """repeats: the step gave the same bits twice."""
    here, again = answer.here, answer.again
    if not answer.bad(here):
        return (
            "the step was bad in the run and is well here: hardware, a race, another machine, or something that no "
            "checkpoint holds, such as a counter in the model"
        )
    if again is not None and not repeats:
        return (
            f"twice from the same state the step gave loss {here.loss:g} and {again.loss:g}, gradient norm "
            f"{here.grad_norm:g} and {again.grad_norm:g}: a race, hardware, or something that no checkpoint holds"
        )
    assert answer.difference is not None
    return (
        f"from step {answer.difference.step} on the re-run differs from the journal: hardware, a race, or another "
        "machine or version; what is said above is of the re-run"
    )


def _advice(answer: Answer) -> str:
    """What to do about `answer.cause`; empty if nothing is to be done."""
    # If more than half of the window is bad alone, it is no fault of single samples.
    bad = sum(sample.bad for sample in answer.samples)
    few = 0 < bad <= answer.window_size // 2
    finding = answer.finding
    place = "the module named"
    if finding is not None and finding.module:
        place = f'"{finding.module}"'
    match answer.cause:
        case "data":
            what = "mend the samples listed, or leave them out"
            return f"{what}; until then their windows are skipped"
        case "not reproducible":
            return (
                "replay once more, here and on another machine: what differs each time is hardware or a race, what is "
                "the same each time is state that no checkpoint holds. On a GPU small differences are usual: kernels "
                "add up in any order unless engine.deterministic=true chose others"
            )
        case "numerics" if finding is None:
            return "take a recipe with more range or precision (bf16 for fp16 and FP8), or lower train.lr"
        case "numerics":
            return (
                f"keep {place} in float32 (layers.keep_fp32 in the recipe), or, if it is a Linear in FP8, out of FP8 "
                "(layers.exclude); or take a recipe with more range: bf16"
            )
        case "model or data" if few:
            what = "look at the samples that are bad alone"
            return f"{what}, and at what {place} does with such input"
        case "model or data" if finding is not None:
            what = "it is no single sample"
            return f"{what}: look at the formula in {place}, its weights and train.lr"
        case "model or data":
            return "lower train.lr or lengthen train.warmup_steps; look at the samples listed first"
        case _:
            return ""


def plain(answer: Answer) -> dict[str, Any]:
    """The answer as strict JSON takes it. Slots are left out: a model has thousands, and the journal has them."""
    values = asdict(answer)
    for name in ("here", "again", "in_float32"):
        if values[name] is not None:
            del values[name]["slots"]
    # asdict leaves properties out, and whoever reads the file wants this one.
    for sample, fields in zip(answer.samples, values["samples"], strict=True):
        fields["bad"] = sample.bad
    return _jsonable(values)


def _jsonable(value: Any) -> Any:
    if isinstance(value, float):
        return jsonable(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value


def lines(answer: Answer) -> list[str]:
    """The answer in words, as the terminal shows it."""
    found: list[str] = []
    if answer.ranks > 1:
        found.append(
            f"ranks: the run had {answer.ranks}; here their micro-batches run one after the other, rank by rank"
        )

    # The step itself: does it repeat, what are its figures, where did it go bad?
    found.append(_bits(answer))
    found += _figures(answer)
    if answer.finding:
        found.append(f"origin: {described(answer.finding)}")
    else:
        found += _without_origin(answer)
    found += _gradients(answer)
    found += _hunted(answer)

    # The experiments: sample by sample, in float32, under anomaly mode.
    found += _samples(answer)
    found += _float32(answer)
    if answer.anomaly:
        found.append("anomaly mode:")
        found += [f"  {line}" for line in answer.anomaly.splitlines()]

    # What follows.
    found.append(f"verdict: {answer.cause}: {answer.why}")
    if answer.advice:
        found.append(f"what to do: {answer.advice}")
    return found


def described(finding: Finding) -> str:
    """One finding as a sentence."""
    # Where, in which tensor, and how much of it.
    module = finding.module or "(the model itself)"
    place = f"module {module} ({finding.kind})"
    if finding.module == LOSS:
        place = "what follows the model's output: the loss"
    shape = "x".join(map(str, finding.shape)) or "scalar"
    counts = f"{finding.nan} NaN and {finding.inf} Inf of {finding.elements} elements"
    counts += f" ({shape}, {finding.dtype})"
    text = f"{finding.direction}, {place}, {finding.tensor}: {counts}"
    text += f", micro-batch {finding.micro_batch}"

    # What else is known of it.
    if finding.call > 1:
        text += f", call {finding.call}"
    if finding.operation:
        text += f"; operation {finding.operation}"
    if finding.parameters:
        own = "not finite themselves" if finding.direction == "forward" else "the gradient of"
        text += f"; {own}: {', '.join(finding.parameters)}"
    if finding.into:
        text += f"; computed by the module itself, and first given to {finding.into}"
    if finding.where:
        text += f"; {finding.where}"
    return text


def _bits(answer: Answer) -> str:
    """Whether the re-run has the journal's figures."""
    steps = f"step {answer.step}"
    if answer.base + 1 < answer.step:
        steps = f"steps {answer.base + 1} to {answer.step}"
    if answer.difference is None:
        return f"bits: {steps} reproduced bit for bit (loss, gradient norm, loss scale)"
    found = answer.difference
    text = f"bits: step {found.step} differs: {found.metric} {found.here!r} here, {found.journal!r} in the journal"
    if answer.setup_differences:
        text += f" (to be expected: {'; '.join(answer.setup_differences)})"
    return text


def _figures(answer: Answer) -> list[str]:
    here = answer.here
    outcome = "applied" if here.applied else "skipped"
    found = [
        f"step {answer.step}: loss {here.loss:g}, gradient norm {here.grad_norm:g}, loss scale {here.loss_scale:g}, "
        f"{outcome}; window {answer.window}, {answer.precision}"
    ]
    if here.over_limits:
        limits = f"loss {here.limits.loss:g}, gradient norm {here.limits.norm:g}"
        found.append(f"limits: {limits}; the step is over them")
    return found


def _without_origin(answer: Answer) -> list[str]:
    """What to say where no module's tensor was found to be NaN or Inf."""
    here = answer.here
    if here.bad_data:  # the model never saw them
        return []
    if not (math.isfinite(here.loss) and math.isfinite(here.grad_norm)):
        what = "no module's tensor is NaN or Inf, only their sum"
        return [f"origin: {what}: the gradients below are too large for a norm"]
    if answer.was_bad:
        return ["origin: no tensor is NaN or Inf"]
    return []


def _gradients(answer: Answer) -> list[str]:
    bad = [each.parameter for each in answer.gradients if each.bad]
    if bad:
        count = f"{len(bad)} of {len(answer.gradients)} parameters"
        return [f"gradients not finite in the end: {count}: {some(bad, SHOWN)}"]
    if not answer.bad(answer.here) or answer.here.bad_data:
        return []
    found = ["gradient norms, largest growth against the step before first:"]
    for each in answer.gradients[:SHOWN]:
        ratio = "" if math.isnan(each.growth) else f"  {each.growth:8.3g}x"
        name = f"{each.parameter} (largest element {each.largest:.4g})"
        found.append(f"  {each.norm:10.4g}{ratio}  {name}")
    return found


def _hunted(answer: Answer) -> list[str]:
    """The gradient norms of the layers named, step by step, as the run measured them."""
    if not answer.hunted:
        return []
    found = ["gradient norms by layer in the run (guard.hunt):"]
    for each in answer.hunted:
        norms = [f"{norm:.3g} at step {step}" for step, norm in each.norms.items()]
        found.append(f"  {each.layer}: {', '.join(norms)}")
    return found


def _samples(answer: Answer) -> list[str]:
    """The samples that are bad alone; if none is, those that contributed most."""
    if not answer.samples:
        return []
    bad = [sample for sample in answer.samples if sample.bad]
    if bad:
        lines = [f"samples: {len(bad)} of {answer.window_size} are bad alone:"]
        lines += [f"  {_sample(sample)}" for sample in bad[:SHOWN]]
        if len(bad) > SHOWN:
            lines.append(f"  and {len(bad) - SHOWN} more: replay.json lists them")
        return lines

    # Look in the samples for the figure that went over its limit in the whole window.
    here = answer.here
    by_norm = here.grad_norm > here.limits.norm and not here.loss > here.limits.loss

    def size(sample: Sample) -> float:
        return sample.grad_norm if by_norm else sample.loss

    largest = sorted(answer.samples, key=lambda sample: -size(sample))[:SHOWN]
    what = "gradient norms" if by_norm else "losses"
    head = f"samples: none is bad alone; largest {what} of {answer.window_size}:"
    return [head, *(f"  {_sample(sample)}" for sample in largest)]


def _sample(sample: Sample) -> str:
    where = f"rank {sample.rank}, micro-batch {sample.micro_batch}"
    if sample.first_token is not None:
        where += f", training token {sample.first_token} on"
    text = f"sample {sample.number} ({where}): loss {sample.loss:g}, gradient norm {sample.grad_norm:g}"
    if sample.bad_data:
        text += f", {_data_words(sample.bad_data, ', ')}"
    return f"{text}: {sample.text!r}"


def _float32(answer: Answer) -> list[str]:
    exact = answer.in_float32
    if exact is None:
        return []
    state = "bad too" if answer.bad(exact) else "well"
    text = f"in float32: {state}: loss {exact.loss:g}, gradient norm {exact.grad_norm:g}"
    if answer.finding_in_float32 is not None:
        text += f"; {described(answer.finding_in_float32)}"
    return [text]
