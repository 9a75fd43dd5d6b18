"""What a replay found, as lines for the terminal."""

from __future__ import annotations

import math

from harness.core.errors import some
from harness.monitors.nonfinite import LOSS, Finding
from harness.tools.replay_answer import DATA, Answer, Sample

SHOWN = 8
"""Parameters, and samples, that the terminal lists."""


def lines(answer: Answer) -> list[str]:
    """The answer in words."""
    ranks = [f"ranks: the run had {answer.ranks}; here their micro-batches run one after the other, rank by rank"]
    return [
        *(ranks if answer.ranks > 1 else []),
        _bits(answer),
        *_figures(answer),
        *([f"origin: {described(answer.finding)}"] if answer.finding else _without_origin(answer)),
        *_gradients(answer),
        *_samples(answer),
        *_float32(answer),
        *(["anomaly mode:", *(f"  {line}" for line in answer.anomaly.splitlines())] if answer.anomaly else []),
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
    steps = f"steps {answer.base + 1} to {answer.step}" if answer.base + 1 < answer.step else f"step {answer.step}"
    if answer.difference is None:
        return f"bits: {steps} reproduced bit for bit (loss, gradient norm, loss scale)"
    found = answer.difference
    text = f"bits: step {found.step} differs: {found.metric} {found.here!r} here, {found.journal!r} in the journal"
    return text + (f" (to be expected: {'; '.join(answer.strangers)})" if answer.strangers else "")


def _figures(answer: Answer) -> list[str]:
    here = answer.here
    found = [
        f"step {answer.step}: loss {here.loss:g}, gradient norm {here.grad_norm:g}, loss scale {here.loss_scale:g}, "
        f"{'applied' if here.applied else 'skipped'}; window {answer.window}, {answer.precision}"
    ]
    if here.over_limits:
        limits = here.limits
        found.append(f"limits: loss {limits.loss:g}, gradient norm {limits.norm:g}; the step is over them")
    return found


def _without_origin(answer: Answer) -> list[str]:
    if not (math.isfinite(answer.here.loss) and math.isfinite(answer.here.grad_norm)) and not answer.here.bad_data:
        return [
            "origin: no module's tensor is NaN or Inf, only their sum: the gradients below are too large for a norm"
        ]
    return ["origin: no tensor is NaN or Inf"] if answer.was_bad and not answer.here.bad_data else []


def _gradients(answer: Answer) -> list[str]:
    bad = [each for each in answer.gradients if each.bad]
    if bad:
        named = some([each.parameter for each in bad], SHOWN)
        return [f"gradients not finite in the end: {len(bad)} of {len(answer.gradients)} parameters: {named}"]
    if not answer.bad(answer.here) or answer.here.bad_data:
        return []
    found = ["gradient norms, largest growth against the step before first:"]
    for each in answer.gradients[:SHOWN]:
        ratio = "" if math.isnan(each.growth) else f"  {each.growth:8.3g}x"
        found.append(f"  {each.norm:10.4g}{ratio}  {each.parameter} (largest element {each.largest:.4g})")
    return found


def _samples(answer: Answer) -> list[str]:
    if not answer.samples:
        return []
    bad = [sample for sample in answer.samples if sample.bad]
    if bad:
        head = f"samples: {len(bad)} of {answer.window_size} are bad alone:"
        return [head, *(f"  {_sample(sample)}" for sample in bad[:SHOWN])]
    # What went over its limit in the window is what to look for in its samples.
    by_norm = answer.here.grad_norm > answer.here.limits.norm and not answer.here.loss > answer.here.limits.loss
    worst = sorted(answer.samples, key=lambda sample: -(sample.grad_norm if by_norm else sample.loss))[:SHOWN]
    what = "gradient norms" if by_norm else "losses"
    head = f"samples: none is bad alone; largest {what} of {answer.window_size}:"
    return [head, *(f"  {_sample(sample)}" for sample in worst)]


def _sample(sample: Sample) -> str:
    where = f"rank {sample.rank}, micro-batch {sample.micro_batch}"
    text = f"sample {sample.number} ({where}, training token {sample.first_token} on)"
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
