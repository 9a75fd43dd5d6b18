"""What a replay found: the data of `replay.json`, the cause that follows from it, what to do, and how it is shown."""

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
from harness.replay.flight import Difference, same
from harness.replay.origin import LOSS, Finding

SHOWN = 8
"""Parameters, and samples, that the terminal lists."""

DATA = {NON_FINITE_INPUT: "inputs that are not finite", BAD_LABEL: "ids out of range", NO_LABEL: "no label at all",
        UNREADABLE: "samples that cannot be read"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of the window, run alone without an update. number: in the data. first_token: where it begins in the
    run's training tokens, None in a data set of the user's own. rank: that had it. micro_batch: which of the step's it
    is in here, from 1. text: how its bytes begin, or what it has."""

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
        return (
            not (math.isfinite(self.loss) and math.isfinite(self.grad_norm)) or self.bad_data != 0
        )


@dataclass(frozen=True, slots=True)
class Gradient:
    """One parameter's unscaled gradient: L2 norm, largest magnitude, elements that are not finite, and its norm over
    that of the step before (NaN if that one was not re-run)."""

    parameter: str
    norm: float
    largest: float
    bad: int
    growth: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that was found. base: the checkpoint started from, 0: the initial state. codes: of the recorded
    verdicts. was_bad: in the run. here, again: the step with and without hooks, both from the same state; again is None
    where blocks were compiled. in_float32: the step in float32, None if it was not bad here. loss_before: of the step
    before, None if that was not re-run. difference: the first figure that is not the journal's. setup_differences: why
    bits cannot be expected to agree, empty if they must."""

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
        """Whether these are the facts of a bad step, by the measure of this one."""
        if unfit(facts):
            return True
        if "loss.spike" not in self.codes or not math.isfinite(self.journal_loss):
            return False
        usual = self.loss_before or self.journal_loss / 2
        return facts.loss > math.sqrt(usual * self.journal_loss)


def unfit(facts: StepFacts) -> bool:
    """Not finite, over its limits, or on data that cannot be trained on."""
    finite = math.isfinite(facts.loss) and math.isfinite(facts.grad_norm)
    return not finite or facts.over_limits or facts.bad_data != 0


def growth(
    now: Mapping[str, tuple[float, float, int]], before: Mapping[str, tuple[float, float, int]], scale: float,
    scale_before: float,
) -> list[Gradient]:  # fmt: skip
    """Gradients by parameter, from `Origin.gradients` and what they were scaled by; largest growth first."""
    found: list[Gradient] = []
    for name, (norm, largest, bad) in now.items():
        usual = before[name][0] / scale_before if name in before else math.nan
        ratio = (norm / scale) / usual if usual > 0 else math.nan
        found.append(Gradient(name, norm / scale, largest / scale, bad, ratio))

    def rank(each: Gradient) -> tuple[float, float]:
        ratio = -math.inf if math.isnan(each.growth) else each.growth
        return -ratio, -each.norm if math.isfinite(each.norm) else -math.inf

    return sorted(found, key=rank)


def _cause(answer: Answer) -> tuple[str, str]:
    here, again = answer.here, answer.again
    bad = answer.bad(here)
    if here.bad_data:
        what = " and ".join(text for bit, text in DATA.items() if here.bad_data & bit)
        return (
            "data",
            f"samples of this window have {what}: they were found before the model saw them",
        )
    if not bad and not answer.was_bad:
        return "sound", "the step was well in the run, and is well here"
    if not bad:
        return "not reproducible", (
            "the step was bad in the run and is well here: hardware, a race, another machine, or something that no "
            "checkpoint holds, such as a counter in the model"
        )
    if again is not None and not (
        same(here.loss, again.loss) and same(here.grad_norm, again.grad_norm)
    ):
        return "not reproducible", (
            f"twice from the same state the step gave loss {here.loss:g} and {again.loss:g}, gradient norm "
            f"{here.grad_norm:g} and {again.grad_norm:g}: a race, hardware, or something that no checkpoint holds"
        )
    if answer.difference is not None and not answer.setup_differences:
        return "not reproducible", (
            f"from step {answer.difference.step} on the re-run differs from the journal: hardware, a race, or another "
            "machine or version; what is said above is of the re-run"
        )
    if answer.in_float32 is not None and answer.bad(answer.in_float32):
        return "model or data", "bad in float32 too: no precision would have helped"
    return "numerics", f"well in float32: only bad in low precision ({answer.precision})"


def _advice(answer: Answer) -> str:
    """What to do about `answer.cause`; empty if nothing is to be done."""
    bad = sum(sample.bad for sample in answer.samples)
    few = 0 < bad <= answer.window_size // 2
    finding = answer.finding
    place = f'"{finding.module}"' if finding is not None and finding.module else "the module named"
    match answer.cause:
        case "data":
            return (
                "mend the samples listed, or leave them out; until then their windows are skipped"
            )
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
            return (
                f"look at the samples that are bad alone, and at what {place} does with such input"
            )
        case "model or data" if finding is not None:
            return (
                f"it is no single sample: look at the formula in {place}, its weights and train.lr"
            )
        case "model or data":
            return "lower train.lr or lengthen train.warmup_steps; look at the samples listed first"
        case _:
            return ""


def plain(answer: Answer) -> dict[str, Any]:
    """The answer as strict JSON takes it; slots, of which a model has thousands, are left to the journal."""
    values = asdict(answer)
    for name in ("here", "again", "in_float32"):
        if values[name] is not None:
            values[name] = {key: value for key, value in values[name].items() if key != "slots"}
    values["samples"] = [{**asdict(sample), "bad": sample.bad} for sample in answer.samples]
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
    """The answer in words."""
    ranks = [
        f"ranks: the run had {answer.ranks}; here their micro-batches run one after the other, rank by rank"
    ]
    return [
        *(ranks if answer.ranks > 1 else []),
        _bits(answer),
        *_figures(answer),
        *([f"origin: {described(answer.finding)}"] if answer.finding else _without_origin(answer)),
        *_gradients(answer),
        *_samples(answer),
        *_float32(answer),
        *(
            ["anomaly mode:", *(f"  {line}" for line in answer.anomaly.splitlines())]
            if answer.anomaly
            else []
        ),
        f"verdict: {answer.cause}: {answer.why}",
        *([f"what to do: {answer.advice}"] if answer.advice else []),
    ]


def described(finding: Finding) -> str:
    """One finding as a sentence."""
    place = f"module {finding.module or '(the model itself)'} ({finding.kind})"
    if finding.module == LOSS:
        place = "what follows the model's output: the loss"
    shape = "x".join(map(str, finding.shape)) or "scalar"
    counts = f"{finding.nan} NaN and {finding.inf} Inf of {finding.elements} elements ({shape}, {finding.dtype})"
    text = f"{finding.direction}, {place}, {finding.tensor}: {counts}, micro-batch {finding.micro_batch}"
    if finding.call > 1:
        text += f", call {finding.call}"
    if finding.operation:
        text += f"; operation {finding.operation}"
    if finding.parameters:
        own = "not finite themselves" if finding.direction == "forward" else "the gradient of"
        text += f"; {own}: {', '.join(finding.parameters)}"
    if finding.into:
        text += f"; computed by the module itself, and first given to {finding.into}"
    return text + (f"; {finding.where}" if finding.where else "")


def _bits(answer: Answer) -> str:
    steps = (
        f"steps {answer.base + 1} to {answer.step}"
        if answer.base + 1 < answer.step
        else f"step {answer.step}"
    )
    if answer.difference is None:
        return f"bits: {steps} reproduced bit for bit (loss, gradient norm, loss scale)"
    found = answer.difference
    text = f"bits: step {found.step} differs: {found.metric} {found.here!r} here, {found.journal!r} in the journal"
    return text + (
        f" (to be expected: {'; '.join(answer.setup_differences)})"
        if answer.setup_differences
        else ""
    )


def _figures(answer: Answer) -> list[str]:
    here = answer.here
    found = [
        f"step {answer.step}: loss {here.loss:g}, gradient norm {here.grad_norm:g}, loss scale {here.loss_scale:g}, "
        f"{'applied' if here.applied else 'skipped'}; window {answer.window}, {answer.precision}"
    ]
    if here.over_limits:
        limits = here.limits
        found.append(
            f"limits: loss {limits.loss:g}, gradient norm {limits.norm:g}; the step is over them"
        )
    return found


def _without_origin(answer: Answer) -> list[str]:
    if (
        not (math.isfinite(answer.here.loss) and math.isfinite(answer.here.grad_norm))
        and not answer.here.bad_data
    ):
        return [
            "origin: no module's tensor is NaN or Inf, only their sum: the gradients below are too large for a norm"
        ]
    return (
        ["origin: no tensor is NaN or Inf"] if answer.was_bad and not answer.here.bad_data else []
    )


def _gradients(answer: Answer) -> list[str]:
    if bad := [each for each in answer.gradients if each.bad]:
        named = some([each.parameter for each in bad], SHOWN)
        return [
            f"gradients not finite in the end: {len(bad)} of {len(answer.gradients)} parameters: {named}"
        ]
    if not answer.bad(answer.here) or answer.here.bad_data:
        return []
    found = ["gradient norms, largest growth against the step before first:"]
    for each in answer.gradients[:SHOWN]:
        ratio = "" if math.isnan(each.growth) else f"  {each.growth:8.3g}x"
        found.append(
            f"  {each.norm:10.4g}{ratio}  {each.parameter} (largest element {each.largest:.4g})"
        )
    return found


def _samples(answer: Answer) -> list[str]:
    if not answer.samples:
        return []
    if bad := [sample for sample in answer.samples if sample.bad]:
        head = f"samples: {len(bad)} of {answer.window_size} are bad alone:"
        return [head, *(f"  {_sample(sample)}" for sample in bad[:SHOWN])]
    # What went over its limit in the window is what to look for in its samples.
    by_norm = (
        answer.here.grad_norm > answer.here.limits.norm
        and not answer.here.loss > answer.here.limits.loss
    )
    worst = sorted(
        answer.samples, key=lambda sample: -(sample.grad_norm if by_norm else sample.loss)
    )[:SHOWN]
    what = "gradient norms" if by_norm else "losses"
    head = f"samples: none is bad alone; largest {what} of {answer.window_size}:"
    return [head, *(f"  {_sample(sample)}" for sample in worst)]


def _sample(sample: Sample) -> str:
    where = f"rank {sample.rank}, micro-batch {sample.micro_batch}"
    begins = "" if sample.first_token is None else f", training token {sample.first_token} on"
    text = f"sample {sample.number} ({where}{begins})"
    text += f": loss {sample.loss:g}, gradient norm {sample.grad_norm:g}"
    what = ", ".join(text for bit, text in DATA.items() if sample.bad_data & bit)
    return text + (f", {what}" if what else "") + f": {sample.text!r}"


def _float32(answer: Answer) -> list[str]:
    exact = answer.in_float32
    if exact is None:
        return []
    state = "bad too" if answer.bad(exact) else "well"
    text = f"in float32: {state}: loss {exact.loss:g}, gradient norm {exact.grad_norm:g}"
    if answer.finding_in_float32 is not None:
        text += f"; {described(answer.finding_in_float32)}"
    return [text]
