"""What the branches of a rehearsal show together: gaps in loss, which branches went bad, and whose fault it is.

Pure decisions over the figures of branches. Torch-free.

*Gap.* The mean loss of the last tenth of the steps that both branches did, less that of float32.

*Control.* Float32 again, with every weight one unit in the last place larger. Its gap shows how far apart two runs get
for no reason at all: a gap of that size says nothing about a precision.

*Bad.* A branch is bad if something went wrong in it (`branch.Fault`), or if it fell behind. It is behind if its gap is
over three times the control's, over a fifth of what float32 learnt in these steps, and over 1% of float32's loss.

*Doubtful.* Nothing need go wrong in a run that learns nothing. Float32 is run at a tenth of the learning rate if its
weights grew as those of a diverging run, or its loss did not fall. If it is behind that branch, the rate is at fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.core.errors import some
from harness.rehearse.branch import TAIL, Branch, tail_of
from harness.replay.cause import Cause, Evidence, judge

LOWER_RATE = 0.1
"""Factor on the learning rate in the branch that finds out whether the rate is at fault."""
MOST_WINDOWS = 16
"""Windows that are left out, at most, to find out whether they are at fault: with more it is no longer the same run."""

_GROWN = "parameters.growth"
_TIMES_CONTROL, _OF_PROGRESS, _OF_LOSS = 3.0, 0.2, 0.01
_SHOWN = 6


class Gap(NamedTuple):
    """Two branches over the same last steps.

    gap: difference of their mean losses. widest: largest difference of one step.
    """

    gap: float
    widest: float


def loss_gap(branch: Branch, reference: Branch) -> Gap | None:
    """The gap of `branch` to `reference`; None if they share no step with finite losses at the end."""
    shared = min(len(branch.losses), len(reference.losses))
    losses = tail_of(branch.losses[:shared])
    others = tail_of(reference.losses[:shared])
    gaps: list[float] = []
    for one, other in zip(losses, others, strict=True):
        if math.isfinite(one) and math.isfinite(other):
            gaps.append(one - other)
    if not gaps:
        return None
    return Gap(sum(gaps) / len(gaps), max(map(abs, gaps)))


def behind_limit(reference: Branch, control: Branch | None) -> float | None:
    """The gap over which a branch is behind `reference`; None if that did too few steps to tell."""
    if len(reference.losses) < TAIL:
        return None
    chance = None if control is None else loss_gap(control, reference)
    # The widest limit counts: a gap under any of them says nothing.
    first = reference.losses[0]
    last = reference.losses[-1]
    limits = [_OF_PROGRESS * abs(first - last), _OF_LOSS * abs(last)]
    if chance is not None:
        limits.append(_TIMES_CONTROL * chance.widest)
    return max(limits)


def is_behind(branch: Branch, reference: Branch, control: Branch | None) -> bool:
    """Whether the branch learnt clearly less than float32 did."""
    found = loss_gap(branch, reference)
    limit = behind_limit(reference, control)
    if found is None or limit is None:
        return False
    return found.gap > limit


def is_doubtful(reference: Branch) -> bool:
    """Whether float32 gives reason to try a lower learning rate."""
    if reference.fault is not None or _GROWN in reference.unhealthy:
        return True
    if len(reference.losses) < TAIL:
        return False
    # It has learnt nothing if its last losses are no lower than its first one.
    tail = tail_of(reference.losses)
    return sum(tail) / len(tail) >= reference.losses[0]


@dataclass(frozen=True)
class Branches:
    """All branches of one rehearsal.

    reference: float32. control: the same, one unit in the last place apart.
    others: of the precisions that were asked for.
    subject: the precision whose fault is sought; empty: whichever of `others` is bad.
    lower_rate, without: the experiments in float32; None if they were not made.
    incident: the step at which the run itself went bad; None if it did not, or it is not known.
    """

    reference: Branch
    control: Branch | None
    others: Sequence[Branch]
    subject: str = ""
    lower_rate: Branch | None = None
    without: Branch | None = None
    incident: int | None = None

    def is_bad(self, branch: Branch) -> bool:
        """Whether something went wrong in the branch, or it fell behind."""
        if branch is self.reference and self.is_too_fast:
            return True
        return branch.fault is not None or is_behind(branch, self.reference, self.control)

    @property
    def is_too_fast(self) -> bool:
        """Whether float32 learns clearly less than it does at a tenth of the learning rate.

        The control does not count here: a rate that is too high drives any two runs apart.
        """
        lower = self.lower_rate
        if lower is None or lower.fault is not None:
            return False
        return is_behind(self.reference, lower, None)

    @property
    def subjects(self) -> list[Branch]:
        """The branches whose fault is sought."""
        every = [self.reference, *self.others]
        chosen = [branch for branch in every if branch.precision == self.subject]
        return chosen or every

    def evidence(self) -> Evidence:
        """What the judge needs to know."""
        subjects = self.subjects
        # Float32 has the same samples. A branch that ended before them did not see them.
        seen = [*subjects, self.reference]
        unfit = any(_is_unfit(branch) for branch in seen)
        reached = all(branch.last_step >= (self.incident or 0) for branch in subjects)
        any_bad = any(self.is_bad(branch) for branch in subjects)
        return Evidence(
            unfit=unfit,
            was_bad=self.incident is not None and reached,
            is_bad=self.is_too_fast or any_bad,
            bad_in_float32=self.is_bad(self.reference),
            bad_at_lower_rate=_bad(self.lower_rate),
            bad_without_windows=_bad(self.without),
        )


def _is_unfit(branch: Branch) -> bool:
    return branch.fault is not None and branch.fault.kind == "unfit data"


def _bad(branch: Branch | None) -> bool | None:
    """Of an experiment; None if it was not made. It is not compared with float32, as it trains differently."""
    return None if branch is None else branch.fault is not None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whose fault it is.

    cause: in one word or two. why: what shows it. advice: what to do; empty if there is nothing to do.
    bad: names of the branches that went bad.
    """

    cause: Cause
    why: str
    advice: str
    bad: list[str] = field(default_factory=list[str])


def decide(branches: Branches, replayable: str = "") -> Verdict:
    """The verdict. replayable: the command that finds module and sample of the bad step; empty if there is none."""
    evidence = branches.evidence()
    cause = judge(evidence)
    every = [branches.reference, *branches.others]
    bad = [branch.name for branch in every if branches.is_bad(branch)]
    of_fp32 = branches.reference.fault
    where = ""
    if of_fp32 is not None:
        where = f" at step {of_fp32.step}"
    more = ""
    if replayable:
        more = f"; {replayable} names module and sample"

    # Every cause has its sentence: what was seen, and what to do next.
    match cause:
        case "data" if evidence.unfit:
            seen = [*branches.subjects, branches.reference]
            faults = [each.fault for each in seen if each.fault is not None and _is_unfit(each)]
            steps = [fault.step for fault in faults]
            why = f"samples were found unfit at step {min(steps)}, before the model saw them"
            advice = "mend the samples that the table names, or leave them out"
        case "data":
            windows = of_fp32.windows if of_fp32 is not None else ()
            listed = some(windows, _SHOWN)
            why = f"fp32 goes bad{where} too, at a tenth of the learning rate as well, and not without window {listed}"
            advice = (
                f"look at the samples of that window, and at what the model does with them{more}"
            )
        case "sound":
            why = _sound(branches)
            advice = ""
        case "not reproducible":
            why = f"the run went bad at step {branches.incident}, and the same steps are well here"
            advice = "look for hardware, a race, another version, or state that no checkpoint holds"
        case "precision":
            names = [each.name for each in branches.subjects if branches.is_bad(each)]
            listed = ", ".join(names)
            why = f"fp32 is well on the same windows, from the same weights; bad: {listed}"
            advice = "take a precision that is well in the table, or the recipe that was written"
        case "learning rate" if of_fp32 is None:
            why = "nothing goes bad in fp32, but it learns clearly less than at a tenth of the learning rate"
            advice = "lower train.lr, or lengthen train.warmup_steps"
        case "learning rate":
            why = f"fp32 goes bad{where} too, and is well on the same windows at a tenth of the learning rate"
            advice = "lower train.lr, or lengthen train.warmup_steps"
        case "model":
            why = f"fp32 goes bad{where} too, at a tenth of the learning rate and without the windows at fault as well"
            advice = f"look at the model's own formulas and initial weights{more}"
        case "model or data":
            why = f"fp32 goes bad{where} too: no precision would have helped"
            advice = f"look at the samples and the model{more}"
    return Verdict(cause, why, advice, bad)


def _sound(branches: Branches) -> str:
    subject = ", ".join(branch.name for branch in branches.subjects)
    others = [each.name for each in branches.others if branches.is_bad(each)]
    text = f"nothing went bad in {subject}"
    if others:
        text += f"; {', '.join(others)} did, and the run does not compute in it"
    return text
