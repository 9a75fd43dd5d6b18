"""Run one row of a proof as on a card, on fake CUDA tensors: python proof_on_paper.py CARD MODULE:FUNCTION FOLDER.

Prints the row's answer as one line of JSON. What only a card can tell is made up: free memory, clocks, a step's facts.
"""

from __future__ import annotations

import json
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

from harness.core.facts import SlotStats, StepFacts  # noqa: E402
from harness.core.protocols import Tensors  # noqa: E402
from harness.estimate.paper import on_paper  # noqa: E402
from harness.estimate.recorder import Recorder  # noqa: E402
from harness.estimate.roofline import find_card  # noqa: E402


def made_up(pending: Any) -> StepFacts:
    """A healthy step."""
    assert pending.packed.device.type == "cpu"
    names = pending.slot_names
    ones = np.ones(len(names), dtype=np.float32)
    return StepFacts(
        step=pending.step, window=pending.window, loss=5.0, grad_norm=1.0, lr=1e-4, loss_scale=1.0, applied=True,
        applied_steps=pending.step, tokens=pending.tokens, seconds=0.1,
        slots=SlotStats(names, *[ones] * 6) if names else None,
    )  # fmt: skip


def staged(_: Any, tensors: Tensors) -> Tensors:
    """Real zeros in place of the copy of fakes in host memory."""
    with unset_fake_temporarily():
        return {
            part: {name: torch.zeros(each.shape, dtype=each.dtype, device="cpu") for name, each in named.items()}
            for part, named in tensors.items()
        }


def main(card_name: str, target: str, folder: Path) -> None:
    card = find_card(card_name)
    recorder = Recorder()
    modes: list[str] = []
    told = {
        "mem_get_info": lambda *_: (card.memory - 2**29 - recorder.live, card.memory),
        "memory_allocated": lambda *_: recorder.live,
        "memory_reserved": lambda *_: recorder.live,
        "max_memory_allocated": lambda *_: recorder.peak,
        "reset_peak_memory_stats": lambda *_: recorder.forget(),
        "empty_cache": lambda: None,
        "set_sync_debug_mode": modes.append,
    }
    with on_paper(card), ExitStack() as stack:
        for name, answer in told.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        module, _, function = target.partition(":")
        rows = import_module(module)
        if hasattr(rows, "to_host"):
            stack.enter_context(mock.patch.object(rows, "to_host", made_up))
        from benchmarks.proof import training
        from benchmarks.proof.registry import NotHere, Task

        stack.enter_context(mock.patch.object(training, "to_host", made_up))
        stack.enter_context(mock.patch("harness.step.check_batch", lambda *_: 0))
        # Fake parameters cannot be moved and stay the same objects; they are made where they belong.
        stack.enter_context(mock.patch.object(torch.nn.Module, "to", lambda module, *_: module))
        stack.enter_context(mock.patch.object(torch.cuda, "get_rng_state", lambda *_: torch.zeros(16).byte()))
        stack.enter_context(mock.patch("harness.checkpoint.staging.Staging.copy", staged))
        stack.enter_context(mock.patch("benchmarks.proof.saves.SIZE", training.SMALL))
        if function == "machine":
            stack.enter_context(mock.patch.object(torch.Tensor, "item", lambda _: 8.0))
        stack.enter_context(recorder)
        task = Task(rehearsal=False, deadline=time.monotonic() + 20, folder=folder, keep=folder)
        try:
            answer = getattr(rows, function)(task)
        except NotHere as error:
            print(json.dumps({"not_run": str(error)}))
            return
    seen = {"waits": len(recorder.waits), "sync_modes": modes}
    print(json.dumps({"summary": answer.summary, "figures": answer.figures, "failed": answer.failed, **seen}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
