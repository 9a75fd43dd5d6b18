"""`engine.deterministic` proves itself at the start: two steps, run twice from one state, must give the same bits.

Before the first step of a start or a resume:

1. Copy the whole state: weights, moments, FP8 histories and scales, loss scale, generators, monitors, buffers.
2. Run one step, so that everything that is made at the first use is there, such as DDP's final buckets. Restore.
3. Run two steps with the loop's own `train_step`, and hash samples, loss, gradients and the state after each. Restore.
4. Run them again and compare. Restore, and training begins as if nothing had been.

If something differs, both passes are run again with every operation recorded (`operations`), and the run ends before
its first step with the name of the first operation that gave other bits. Ranks agree on every answer.

It is a proof for this process and these two steps. Another machine, another version or number of threads may still give
other bits, and so may an operation that these steps did not reach.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from harness.core.collectives import gather_texts, ranks_here
from harness.core.errors import ConfigError, Problem
from harness.core.facts import Window
from harness.core.memory import free_memory, size_text
from harness.core.protocols import Batch
from harness.replay.investigate import eager
from harness.replay.kept import Kept, keep, restore
from harness.replay.operations import Hashes, Operation, Recording, recorded_operations
from harness.run import Run, Share, next_window, train_step

STEPS = 2
"""Steps that are compared. The second one runs from moments and FP8 scales that the first one made."""
_TRIES = 3
"""How often the second pass is repeated under observation until the difference comes again."""
_WHERE = "engine.deterministic"
_FIX = "replace what is named by something deterministic, or train with engine.deterministic=false"
# A copy of the state may take this share of the free memory.
_SHARE = 2
# Figures of a step that are no times or sizes of memory.
_FIGURES = ("loss", "grad_norm", "loss_scale", "lr", "applied")
# Begins the names of what the data source gave.
_SAMPLES = "samples'"
# Of torch's error for an operation that has no deterministic kernel.
_NO_KERNEL = "does not have a deterministic implementation"

Seen = list[tuple[str, int]]
"""(what it is, hash of its bits), in the order in which a pass computes it."""


class _Stopped(Exception):
    """Some rank was asked to stop."""


def prove(run: Run) -> None:
    """Prove that steps of `run` repeat bit for bit, and leave its state as it was. Collective.

    Logs what was proven, or why nothing could be. Raises ConfigError, on every rank, naming what differs.
    """
    # What the loop does before its first step belongs to the state that the passes start from.
    run.guard.judge.stay_fallen_back()
    next_window(run)
    step = run.state.step
    if text := _no_room(run):
        run.telemetry.tell(step, "deterministic.unproven", text)
        return

    kept = keep(run)
    try:
        with _kernels_named():
            _run_steps(run, 1)
            restore(run, kept)
            first = _run_steps(run, STEPS)
            restore(run, kept)
            again = _run_steps(run, STEPS)
            restore(run, kept)
    except _Stopped:
        restore(run, kept)
        text = "asked to stop before two steps had run twice"
        run.telemetry.tell(step, "deterministic.unproven", text)
        return

    # One rank that differs is enough. All ranks raise the error of the first of them.
    found = _first_difference(first, again)
    texts = gather_texts(found)
    differing = [rank for rank, text in enumerate(texts) if text]
    if not differing:
        _log_proven(run, first)
        return
    rank = differing[0]
    what = texts[rank] if len(texts) == 1 else f"{texts[rank]} on rank {rank}"

    # Samples that differ are the source's doing. Of anything else the operation is looked for.
    if texts[rank].startswith(_SAMPLES):
        culprit = "the data source gives other samples each time it is read"
    else:
        culprit = _named(run, kept)
    run.telemetry.event(step, "deterministic.differs", text=culprit, first_seen=what)
    why = f"{STEPS} steps were run twice from one state; first seen in: {what}"
    raise ConfigError(Problem(f"the same step gives other bits: {culprit}", _WHERE, why, _FIX))


def _no_room(run: Run) -> str:
    """Why the state cannot be copied on some rank; empty if it can. Collective."""
    size = 0
    for of_part in run.state.state_dict()[0].values():
        size += sum(tensor.numel() * tensor.element_size() for tensor in of_part.values())
    # Every rank of a machine makes one.
    ranks = ranks_here()
    text = ""
    if size * ranks > free_memory() / _SHARE:
        text = f"a copy of the state ({size_text(size)}) would take over half of the free memory"
        if ranks > 1:
            text += f", with those of the {ranks} ranks here"
    found = [each for each in gather_texts(text) if each]
    return f"not proven that steps repeat: {found[0]}" if found else ""


@contextmanager
def _kernels_named() -> Iterator[None]:
    """Context around steps: torch's refusal of an operation without a deterministic kernel becomes a ConfigError."""
    try:
        yield
    except RuntimeError as error:
        if _NO_KERNEL not in str(error):
            raise
        name = str(error).partition(_NO_KERNEL)[0].strip()
        what = f"{name} {_NO_KERNEL}"
        raise ConfigError(
            Problem(what, _WHERE, "torch refused it in the first step", _FIX)
        ) from error


def _run_steps(run: Run, count: int) -> Seen:
    """Train for `count` steps as the loop does, but for what follows a step: no judging, no row, no save. Collective.

    Returns the hashes of all that was computed. Raises _Stopped on every rank if some rank was asked to stop.
    """
    # In the order of computation: the first hash that differs shows where the difference began.
    hashes, seen = Hashes(), Seen()
    for _ in range(count):
        step = f"step {run.state.step + 1}"
        window = run.data.window(run.guard.window)
        shares = _read(run, window)
        for number, batch in enumerate(shares[0].batches, start=1):
            for name, values in batch.items():
                label = f"{_SAMPLES} {name} of micro-batch {number} of {step}"
                seen.append((label, hashes.of(values)))

        with _gradients(run, step, hashes, seen):
            in_flight = train_step(run, window, shares)
        run.state.advance()
        facts = in_flight.facts()
        if facts.stop:
            raise _Stopped
        for name in _FIGURES:
            seen.append((f"{name} of {step}", _hash(struct.pack("<d", getattr(facts, name)))))
        if facts.slots is not None:
            seen.append((f"FP8 figures of {step}", _hash(facts.slots.stacked().tobytes())))

        # The state after the step, which the next one starts from.
        tensors, meta = run.state.state_dict()
        for part, of_part in tensors.items():
            for name, tensor in of_part.items():
                seen.append((f"{part} {name} after {step}", hashes.of(tensor)))
        text = json.dumps(meta, sort_keys=True, default=str)
        seen.append((f"counters after {step}", _hash(text.encode())))
    return seen


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8])


def _read(run: Run, window: Window) -> list[Share]:
    """This rank's share of a window, read anew."""
    engine = run.engine
    batches: Sequence[Batch] = run.data.micro_batches(window, engine.rank, engine.world_size)
    return [Share(engine.rank, batches)]


@contextmanager
def _gradients(run: Run, step: str, hashes: Hashes, seen: Seen) -> Iterator[None]:
    """Around a step: hash each gradient as the optimizer gets it, before it is unscaled and clipped.

    Weights alone would not do: with a small learning rate a difference in a gradient is lost when they are rounded.
    """
    names = {id(param): name for name, param in run.engine.module.named_parameters()}

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        number = 0
        for group in optimizer.param_groups:
            for param in group["params"]:
                number += 1
                name = names.get(id(param), f"number {number}")
                if param.grad is not None and param.grad.layout == torch.strided:
                    seen.append((f"gradient of {name} in {step}", hashes.of(param.grad)))

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _first_difference(first: Seen, again: Seen) -> str:
    """The first thing that differs between two passes; empty if nothing does."""
    for one, other in zip(first, again, strict=False):
        if one != other:
            return one[0]
    return "" if len(first) == len(again) else "the number of gradients"


def _log_proven(run: Run, seen: Seen) -> None:
    numbers = f"{len(seen)} hashes of samples, gradients, figures and state"
    text = f"{STEPS} steps gave the same bits twice from one state ({numbers}, on each rank)"
    run.telemetry.event(run.state.step, "deterministic.proven", text=text)
    run.telemetry.screen.say(f"engine.deterministic: {text}")


def _named(run: Run, kept: Kept) -> str:
    """The first operation that gives other bits, found by running the passes again under observation. Collective."""
    # Memory that nothing wrote has other contents each time. Filled, it is no reason for a difference, unless it is
    # the only one.
    for filled in (True, False):
        found = _search(run, kept, filled)
        if found:
            note = "" if filled else "; it reads memory that nothing has written"
            return found + note
    compiled = " in compiled code, or" if run.watch is not None else ""
    return f"its operation is not known. It lies{compiled} in something rare, such as a race of threads"


def _search(run: Run, kept: Kept, filled: bool) -> str:
    """One recording, and up to _TRIES that are compared with it; the earliest difference of any rank. Collective."""
    expected = _record(run, kept, filled, ()).operations
    for _ in range(_TRIES):
        recording = _record(run, kept, filled, expected)
        own = ""
        if recording.first is not None:
            own = json.dumps([recording.place, str(recording.first)])
        places: list[tuple[int, int, str]] = []
        for rank, text in enumerate(gather_texts(own)):
            if text:
                number, operation = json.loads(text)
                places.append((number, rank, operation))
        if places:
            _, rank, operation = min(places)
            return operation if run.engine.world_size == 1 else f"{operation} (rank {rank})"
    return ""


def _record(run: Run, kept: Kept, filled: bool, expected: Sequence[Operation]) -> Recording:
    """One pass under observation, as eager code, and back to the state before it. Collective."""
    model = getattr(run.state.parts["model"], "model", run.engine.module)
    settings: Any = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = filled
    try:
        with eager(run.watch is not None), recorded_operations(model, expected) as recording:
            for _ in range(STEPS):
                window = run.data.window(run.guard.window)
                train_step(run, window, _read(run, window)).facts()
                run.state.advance()
    finally:
        settings.fill_uninitialized_memory = before
    restore(run, kept)
    return recording
