"""Runs `harness` with one weight of the model made NaN, once: the fault of the drill's exercise `rollback`.

    python -m harness.drill.nan_weight STEP EVIDENCE train --config ...

After optimizer step STEP all values of the first weight with a gradient become NaN, as if memory had failed. Then the
file EVIDENCE is written, by which the drill knows that the fault happened. This is a program of its own, so that no
option of `harness train` can damage a weight.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from harness.core.files import write_json


class Damage:
    """A hook that torch calls after every step of any optimizer. It damages a weight once, after an optimizer's `step`.

    Each optimizer has a count of its own. A run may step several optimizers in one training step, or try a copy of one
    before it trains, and a common count would reach `step` too early.
    """

    def __init__(self, step: int, evidence: Path) -> None:
        self.step = step
        self.evidence = evidence
        self._done = False
        # Weak keys: the hook must not keep an optimizer and its state alive.
        self._steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        count = self._steps.get(optimizer, 0) + 1
        self._steps[optimizer] = count
        if count != self.step or self._done:
            return
        import torch

        # A weight without a gradient is frozen, and may not be used at all: NaN in it would not show.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    with torch.no_grad():
                        parameter.fill_(float("nan"))
                    self._done = True
                    write_json(self.evidence, {"step": self.step, "shape": list(parameter.shape)})
                    return


def main() -> None:
    """Register the damage, then run the command line as `python -m harness.cli` does."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    step, evidence, *rest = sys.argv[1:]
    register_optimizer_step_post_hook(Damage(int(step), Path(evidence)))
    sys.argv[1:] = rest
    runpy.run_module("harness.cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
