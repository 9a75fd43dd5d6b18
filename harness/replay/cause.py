"""Whose fault a bad step or a bad run is: the one judge behind `harness replay` and `harness rehearse`.

It decides by elimination, in this order:

1. *data*: samples were found unfit before the model saw them.
2. *sound*: nothing was bad in the run, and nothing is bad here.
3. *not reproducible*: bad in the run but well here, or the re-run is not the run. Nothing that it shows can be trusted
   further.
4. *precision*: well in float32, so only low precision is bad.
5. Bad in float32 too, so no precision would have helped. Two experiments divide what remains, where they were made:
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
    """What was seen of a step or a run. None: that experiment was not made.

    unfit: samples were found unfit before the model saw them.
    was_bad: the run itself was bad there.
    is_bad: it is bad here, in its own precision.
    unlike: the re-run is known not to be the run, though the set-up is the same.
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

    # Where both experiments end well, the smaller step is the cure that needs no data to be left out.
    if evidence.bad_at_lower_rate is False:
        return "learning rate"
    if evidence.bad_without_windows is False:
        return "data"
    # One experiment alone cannot tell the model from what the other would have found.
    if evidence.bad_at_lower_rate and evidence.bad_without_windows:
        return "model"
    return "model or data"
