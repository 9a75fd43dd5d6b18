"""Run one row of a proof as on a card, on fake CUDA tensors: python proof_on_paper.py CARD MODULE:FUNCTION FOLDER.

Prints the row's answer as one line of JSON. Measurements of a card are made up: free memory, clocks, a step's facts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from harness.estimate import device

device.load()

import torch  # noqa: E402
from torch._subclasses.fake_tensor import unset_fake_temporarily  # noqa: E402

from harness.capability.probe import MachineFacts  # noqa: E402
from harness.core.errors import MachineError, Problem  # noqa: E402
from harness.core.facts import SLOT_ROWS, RungVerdict, SlotStats, StepFacts  # noqa: E402
from harness.core.protocols import Tensors  # noqa: E402
from harness.core.update import InFlight  # noqa: E402
from harness.estimate.recorder import Recorder  # noqa: E402
from harness.estimate.roofline import find_card  # noqa: E402
from harness.estimate.trace import fake_card  # noqa: E402
from harness.precision.plan import resolve  # noqa: E402
from harness.precision.recipe import Recipe, Rung  # noqa: E402


def made_up(pending: Any) -> StepFacts:
    """A healthy step."""
    assert pending.packed.device.type == "cpu"
    names = pending.slot_names
    stats = SlotStats(names, *np.ones((len(SLOT_ROWS), len(names)), dtype=np.float32))  # type: ignore[arg-type]
    return StepFacts(
        step=pending.step, window=pending.window, loss=5.0, grad_norm=1.0, lr=1e-4, loss_scale=1.0, applied=True,
        applied_steps=pending.step, tokens=pending.tokens, seconds=0.1,
        slots=stats if names else None,
    )  # fmt: skip


def alone(recipe: Recipe, facts: MachineFacts) -> tuple[Rung, list[RungVerdict]]:
    """The rung that this machine takes."""
    rung, verdicts = resolve(recipe, facts)
    if rung is None:
        raise MachineError(
            Problem(f"no rung of {recipe.name}", why="; ".join(each.reason for each in verdicts))
        )
    return rung, verdicts


def staged(_: Any, tensors: Tensors) -> Tensors:
    """Real zeros in place of the copy of fakes in host memory."""
    with unset_fake_temporarily():
        return {
            part: {
                name: torch.zeros(each.shape, dtype=each.dtype, device="cpu")
                for name, each in named.items()
            }
            for part, named in tensors.items()
        }


def main(card_name: str, target: str, folder: Path) -> None:
    card = find_card(card_name)
    recorder = Recorder()
    modes: list[str] = []
    from benchmarks.proof import saves, training
    from benchmarks.proof.registry import NotHere, Task
    from harness import run
    from harness.checkpoint.staging import Staging
    from harness.precision import plan

    cuda, warm = torch.cuda, training.warm
    told: list[tuple[Any, str, Any]] = [
        (cuda, "mem_get_info", lambda *_: (card.memory - 2**29 - recorder.live, card.memory)),
        (cuda, "memory_allocated", lambda *_: recorder.live),
        (cuda, "memory_reserved", lambda *_: recorder.live),
        (cuda, "max_memory_allocated", lambda *_: recorder.peak().bytes),
        (cuda, "reset_peak_memory_stats", lambda *_: recorder.forget()),
        (cuda, "empty_cache", lambda: None),
        (cuda, "set_sync_debug_mode", modes.append),
        (cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8)),
        (run, "check_batch", lambda *_: 0),
        (InFlight, "facts", made_up),
        # Fake parameters cannot be moved and stay the same objects; they are made where they belong.
        (torch.nn.Module, "to", lambda module, *_: module),
        (
            torch,
            "_fused_sdp_choice",
            lambda *_, **__: 1 if card.capability >= (8, 0) else 2,
        ),  # flash, or efficient
        # The tensor that ranks vote with is a fake, and says yes to everything.
        (plan, "agree_on_rung", lambda recipe, facts, *_: alone(recipe, facts)),
        (Staging, "copy", staged),
        (saves, "SIZE", training.SMALL),
        # One step after the first is as good as ten: nothing here grows warm.
        (training, "warm", lambda contender, _: warm(contender, 1)),
    ]
    module, _, function = target.partition(":")
    if function == "machine":
        told.append((torch.Tensor, "item", lambda _: 8.0))
    row = getattr(import_module(module), function)
    with fake_card(card), ExitStack() as stack:
        for owner, name, answer in told:
            stack.enter_context(mock.patch.object(owner, name, answer))
        stack.enter_context(recorder)
        task = Task(rehearsal=False, deadline=time.monotonic(), folder=folder, keep=folder)
        try:
            answer = row(task)
        except NotHere as error:
            print(json.dumps({"not_run": str(error)}))
            return
    seen = {"waits": len(recorder.waits), "sync_modes": modes}
    print(
        json.dumps(
            {"summary": answer.summary, "figures": answer.figures, "failed": answer.failed, **seen}
        )
    )
    sys.stdout.flush()
    os._exit(0)  # threads that autograd started for a device that is none do not end


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
