"""A rehearsal as JSON, and as the text that the terminal shows. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from harness.core.errors import clipped, number_of, some
from harness.core.facts import jsonable
from harness.core.plan_text import aligned
from harness.rehearse.branch import Branch, tail_of
from harness.rehearse.verdict import Branches, Verdict, behind_limit, is_behind, loss_gap

if TYPE_CHECKING:
    from harness.rehearse.rehearsal import Rehearsed

_SLOTS_SHOWN = 12
_NAMES_SHOWN = 8
_SCALINGS_SHOWN = 6
_LONGEST = 160
_MISSING = "-"


def as_json(made: Rehearsed, verdict: Verdict, subject: str, machine: str) -> dict[str, Any]:
    """What `harness rehearse --json` prints, without the paths of what was written.

    Losses and gaps are in the unit of the run's loss: nats a target, for the losses of harness. Not finite numbers are
    texts. What is not known is null.

    subject: the run or config. machine: where it ran.
    """
    begin = made.begin
    found = made.branches
    fp8 = made.fp8
    return {
        "verdict": verdict.cause,
        "why": verdict.why,
        "advice": verdict.advice,
        "predicted_demotions": [] if fp8 is None else list(fp8.predicted),
        "predicted_steps": {} if fp8 is None else dict(fp8.predicted),
        "subject": subject,
        "own_precision": found.subject,
        "begin": {
            "step": begin.step,
            "checkpoint": None if begin.store is None else str(begin.store.path(begin.step)),
            "steps": begin.steps,
            "incident": begin.incident,
            "ranks": begin.ranks,
        },
        "machine": machine,
        "bad": verdict.bad,
        "evidence": asdict(found.evidence()),
        "gaps": [_gap_json(branch, found) for branch in found.others],
        "branches": [_branch_json(branch, found) for branch in every_branch(made)],
        "left_out": dict(made.left_out),
        "slots": [] if fp8 is None else [row.as_json() for row in fp8.slots],
        "scalings": None if fp8 is None or fp8.scalings is None else fp8.scalings.as_json(),
        "recipe": None if made.recommended is None else made.recommended.as_json(),
        "notes": list(made.notes),
    }


def every_branch(made: Rehearsed) -> list[Branch]:
    """All branches that ran, in their order."""
    found = made.branches
    more = [found.control, *found.others, found.lower_rate, found.without, made.trial]
    ran = [branch for branch in more if branch is not None]
    return [found.reference, *ran]


def _branch_json(branch: Branch, found: Branches) -> dict[str, Any]:
    """The figures of one branch, with those of its row in the table.

    loss_first, loss_last: of the first step, and the mean of the last tenth of the steps.
    gap: mean loss of the last tenth less fp32's. outcome: in words.
    """
    gap = None if branch is found.reference else loss_gap(branch, found.reference)
    losses = branch.losses
    return {
        **branch.as_json(),
        "loss_first": jsonable(losses[0]) if losses else None,
        "loss_last": jsonable(_last_loss(branch)) if losses else None,
        "gap": None if gap is None else gap.gap,
        "bad": found.is_bad(branch),
        "outcome": _outcome(branch, found),
    }


def _gap_json(branch: Branch, found: Branches) -> dict[str, Any]:
    """How far a precision is from fp32, beside chance: fp32 whose weights begin one unit in the last place larger.

    gap: mean loss of the last tenth of the steps less fp32's. widest: largest difference of one of these steps.
    control_gap, control_widest: the same of the control. limit: the gap over which a branch is behind fp32.
    """
    gap = loss_gap(branch, found.reference)
    chance = None if found.control is None else loss_gap(found.control, found.reference)
    limit = behind_limit(found.reference, found.control)
    return {
        "precision": branch.precision,
        "gap": None if gap is None else gap.gap,
        "widest": None if gap is None else gap.widest,
        "control_gap": None if chance is None else chance.gap,
        "control_widest": None if chance is None else chance.widest,
        "limit": None if limit is None else jsonable(limit),
        "behind": is_behind(branch, found.reference, found.control),
    }


def lines(made: Rehearsed, verdict: Verdict, subject: str, machine: str) -> list[str]:
    """The rehearsal in words. The verdict comes first, then the table that shows it."""
    begin = made.begin
    shown = [f"rehearsed {subject}: {number_of(begin.steps, 'step')} from {begin.text}"]
    if begin.incident is not None:
        shown[0] += f"; the run went bad at step {begin.incident}"
    shown.append(f"verdict: {verdict.cause}: {verdict.why}")
    if verdict.advice:
        shown.append(f"what to do: {verdict.advice}")
    shown += ["", *_branch_lines(made, machine)]
    if made.fp8 is not None:
        shown += ["", *_fp8_lines(made.fp8)]
        if made.fp8.scalings is not None:
            # It loads torch, which whoever has such figures has loaded.
            from harness.precision.counterfactual import lines as scaling_lines

            shown += ["", *scaling_lines(made.fp8.scalings, _SCALINGS_SHOWN)]
    shown += [f"note: {note}" for note in made.notes]
    return shown


def _branch_lines(made: Rehearsed, machine: str) -> list[str]:
    """The table that shows whose fault it is, and what each precision costs on this machine."""
    found = made.branches
    rows = [
        ("branch", "runs in", "steps", "loss", "gap to fp32", "skipped", "s/step", "peak GiB", "")
    ]
    for branch in every_branch(made):
        # fp32 has no gap to itself.
        gap = None if branch is found.reference else loss_gap(branch, found.reference)
        row = (
            branch.name,
            branch.resolved,
            str(len(branch.losses)),
            _loss(branch),
            _MISSING if gap is None else f"{gap.gap:+.4f}",
            str(branch.skipped),
            _figure(branch.seconds),
            _figure(branch.peak),
            _outcome(branch, found),
        )
        rows.append(row)
    text = aligned(rows)
    text += [f"{name}: left out: {why}" for name, why in made.left_out.items()]
    text.append(
        f"loss and gap: mean of the last tenth of the steps. Speed and memory: {machine}, one branch after the other"
    )
    return text


def _loss(branch: Branch) -> str:
    """From the first step to the mean of the last tenth."""
    if not branch.losses:
        return _MISSING
    return f"{branch.losses[0]:.4f} -> {_last_loss(branch):.4f}"


def _last_loss(branch: Branch) -> float:
    """The mean loss of the last tenth of the steps, of a branch that did some."""
    tail = tail_of(branch.losses)
    return sum(tail) / len(tail)


def _outcome(branch: Branch, found: Branches) -> str:
    fault = branch.fault
    if fault is not None:
        return clipped(f"{fault.kind} at step {fault.step}: {fault.why}", _LONGEST)
    if found.is_bad(branch):
        return "behind fp32"
    return "well"


def _figure(value: float) -> str:
    return _MISSING if math.isnan(value) else f"{value:.3g}"


def _fp8_lines(fp8: Branch) -> list[str]:
    """What FP8 would demote, clip and flush."""
    text = ["FP8 would keep every layer"]
    if fp8.predicted:
        leaving = [f"{layer} (step {step})" for layer, step in fp8.predicted.items()]
        text = [f"FP8 would move to BF16: {some(leaving, _NAMES_SHOWN)}"]
    if not fp8.slots:
        return [
            *text,
            "no tensor was measured, as this backend measures none or the steps were too few: nothing more is known",
        ]
    rows = [
        ("slot, worst first", "saturation", "clipped", "flushed", "SQNR dB", "each dB", "beyond")
    ]
    for row in fp8.slots[:_SLOTS_SHOWN]:
        beyond = _MISSING
        if not math.isnan(row.beyond):
            beyond = f"{row.worst} {row.beyond:+.1f}"
        cells = (
            f"{row.layer}.{row.role}",
            _figure(row.saturation),
            _share(row.clipped),
            _share(row.underflow),
            _figure(row.sqnr_db),
            _figure(row.even_db),
            beyond,
        )
        rows.append(cells)
    text += aligned(rows)
    # The terminal shows the worst slots.
    rest = len(fp8.slots) - _SLOTS_SHOWN
    if rest > 0:
        text.append(f"and {rest} more: --json lists them")
    text.append(
        "beyond: octaves (factors of two) over the recipe's limit; one bad step alone demotes no layer"
    )
    return text


def _share(value: float) -> str:
    return _MISSING if math.isnan(value) else f"{value:.2%}"


def recipe_lines(reasons: Mapping[str, Any]) -> list[str]:
    """What the written recipe changes. reasons: `Recommended.as_json` with the recipe's `path`."""
    text = [f"recipe: {reasons['path']}"]
    text += [f"  {reason}" for reason in reasons["reasons"]]
    if not reasons["reasons"]:
        text.append("  nothing to change: it is the recipe that was rehearsed")
    return text
