"""What a replay found: the data of `replay.json`, the cause that follows from it, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.core.facts import BAD_LABEL, NO_LABEL, NON_FINITE_INPUT, StepFacts, jsonable
from harness.monitors.nonfinite import Finding
from harness.tools.replay_history import Difference, same

DATA = {NON_FINITE_INPUT: "inputs that are not finite", BAD_LABEL: "ids out of range", NO_LABEL: "no label at all"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of the window, run alone without an update. number: in the data. first_token: where it begins in the
    run's training tokens. rank: that had it. micro_batch: which of the step's it is in here, from 1. text: how its
    bytes begin."""

    number: int
    rank: int
    micro_batch: int
    first_token: int
    text: str
    loss: float
    grad_norm: float
    bad_data: int

    @property
    def bad(self) -> bool:
        """Whether this sample alone cannot be trained on."""
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm)) or self.bad_data != 0


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
    before, None if that was not re-run. difference: the first figure that is not the journal's. strangers: why bits
    cannot be expected to agree, empty if they must."""

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
    strangers: list[str]
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
        return "data", f"samples of this window have {what}: they were found before the model saw them"
    if not bad and not answer.was_bad:
        return "sound", "the step was well in the run, and is well here"
    if not bad:
        return "not reproducible", (
            "the step was bad in the run and is well here: hardware, a race, another machine, or something that no "
            "checkpoint holds, such as a counter in the model"
        )
    if again is not None and not (same(here.loss, again.loss) and same(here.grad_norm, again.grad_norm)):
        return "not reproducible", (
            f"twice from the same state the step gave loss {here.loss:g} and {again.loss:g}, gradient norm "
            f"{here.grad_norm:g} and {again.grad_norm:g}: a race, hardware, or something that no checkpoint holds"
        )
    if answer.difference is not None and not answer.strangers:
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
            return "mend the samples listed, or leave them out; until then their windows are skipped"
        case "not reproducible":
            return (
                "replay once more, here and on another machine: what differs each time is hardware or a race, what is "
                "the same each time is state that no checkpoint holds"
            )
        case "numerics" if finding is None:
            return "take a recipe with more range or precision (bf16 for fp16 and FP8), or lower train.lr"
        case "numerics":
            return (
                f"keep {place} in float32 (layers.keep_fp32 in the recipe), or, if it is a Linear in FP8, out of FP8 "
                "(layers.exclude); or take a recipe with more range: bf16"
            )
        case "model or data" if few:
            return f"look at the samples that are bad alone, and at what {place} does with such input"
        case "model or data" if finding is not None:
            return f"it is no single sample: look at the formula in {place}, its weights and train.lr"
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
