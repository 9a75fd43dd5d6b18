"""Names the cause of a bad step or a bad run, for `harness replay` and `harness rehearse` alike.

It decides by elimination, in this order:

1. *data*: samples were found unfit before the model saw them.
2. *sound*: nothing was bad in the run, and nothing is bad in the re-run.
3. *not reproducible*: bad in the run but well in the re-run, or the re-run is known to differ from the run. Then it
   proves nothing about the run, and the steps below do not apply.
4. *precision*: well in float32, so only low precision is bad.
5. Bad in float32 too, so no precision would have helped. Two more experiments in float32, where they were made, tell
   the remaining causes apart:
   - well at a lower learning rate, on the same windows: *learning rate*
   - well at the same rate, without the windows at fault: *data*
   - bad in both: *model*
   - not tried: *model or data*

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Cause = Literal[
    "data",
    "sound",
    "not reproducible",
    "precision",
    "learning rate",
    "model",
    "model or data",
]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen of a step or a run. None stands for an experiment that was not made.

    unfit: samples were found unfit before the model saw them.
    was_bad: the run itself was bad.
    is_bad: the re-run, in the run's own precision, is bad.
    unlike: the re-run differs from the run although it has the same set-up.
    bad_in_float32: it is bad in float32.
    bad_at_lower_rate: it is bad in float32 at a lower learning rate.
    bad_without_windows: it is bad in float32 without the windows at fault.
    """

    unfit: bool
    was_bad: bool
    is_bad: bool
    unlike: bool = False
    bad_in_float32: bool | None = None
    bad_at_lower_rate: bool | None = None
    bad_without_windows: bool | None = None


def judge(evidence: Evidence) -> Cause:
    """The cause that is left when all others are ruled out."""
    if evidence.unfit:
        return "data"
    if not evidence.is_bad:
        return "not reproducible" if evidence.was_bad else "sound"
    if evidence.unlike:
        return "not reproducible"
    if not evidence.bad_in_float32:
        return "precision"

    # If both experiments end well, the learning rate is named: to lower it costs no data.
    if evidence.bad_at_lower_rate is False:
        return "learning rate"
    if evidence.bad_without_windows is False:
        return "data"
    # The model is the cause only if both experiments were made and both end badly.
    if evidence.bad_at_lower_rate and evidence.bad_without_windows:
        return "model"
    return "model or data"
