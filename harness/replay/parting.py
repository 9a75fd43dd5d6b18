"""Finds where two runs part, to the bit, by running both again.

1. *Where to begin.* The newest checkpoint that both runs have from before their first recorded difference. If its
   states differ already, bisection finds the last one whose states agree, and the first that differs ends the search.
   If none agrees, the search begins at the start of both runs.
2. *Which step.* Run A again, then B, step by step with the loop's own code, and compare hashes of samples, figures,
   weights, optimizer and FP8 state after each step (`step_tensors`).
3. *Which tensor.* Run the first step that differs once more, with hooks on every module.
4. *Whose fault.* The figures of each step must be the journal's. A run whose figures do not come back cannot be
   reproduced here, and what its re-run shows is not said of the run.

One run is in memory at a time, so a run that fits can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.core.errors import CheckpointError, Problem
from harness.replay.kept import Kept, keep
from harness.replay.replayed import Replayed
from harness.replay.step_tensors import (
    Apart,
    Place,
    StepLog,
    StepTensors,
    apart,
    first_difference,
    frozen_differ,
    generators_differ,
)

_PROGRESS_SECONDS = 5.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Parted:
    """The first tensor that differs.

    step: the step that computes it; where the place is of a state, the step that begins with it.
    apart: its values in both runs.
    """

    step: int
    place: Place
    apart: Apart


@dataclass(frozen=True)
class Parting:
    """What running both again showed.

    base: the step of the state that both were started from; 0: the initial state. None: nothing was run again.
    last: the last step whose state or tensors were compared; 0: none.
    parted: where they part; None if nothing differs.
    changed: letters of the runs whose checkpoint is not what their steps give: the re-runs agree, and the checkpoints
        before `parted` do not.
    at_latest: the states differ in the oldest checkpoint that both have, so the runs may have parted earlier.
    strangers: letter of a run -> why its re-run does not give the figures of its journal.
    generators: random generators whose states differ where the re-runs began.
    frozen: whether frozen weights that no checkpoint holds differ.
    """

    base: int | None
    last: int
    parted: Parted | None = None
    changed: Sequence[str] = ()
    at_latest: bool = False
    strangers: Mapping[str, str] = field(default_factory=dict[str, str])
    generators: Sequence[str] = ()
    frozen: bool = False

    @property
    def holds(self) -> bool:
        """Whether `parted` is where the runs themselves part, and not just their re-runs."""
        return self.parted is not None and not self.strangers


class Search:
    """The search for the first tensor in which two runs differ.

    differs_at: the first step with a recorded difference; 0 if all recorded figures agree.
    last: the last step that both runs have.
    """

    def __init__(self, a: Replayed, b: Replayed, differs_at: int, last: int, say: Say) -> None:
        self._a, self._b = a, b
        self._differs_at = differs_at
        self._last = last
        self._say = say
        self._reported = time.monotonic()

    def parting(self) -> Parting:
        """Where the runs part. Raises CheckpointError if there is no state that both can be started from."""
        try:
            return self._parting()
        finally:
            self._a.close()
            self._b.close()

    def _parting(self) -> Parting:
        # States that both have from before the first recorded difference.
        before = self._differs_at - 1 if self._differs_at else self._last
        saved = sorted(self._a.saved_steps(before) & self._b.saved_steps(before))
        equal, different = self._bisected(saved)
        if different is None and not self._differs_at:
            return Parting(base=None, last=equal or 0)

        # From a state that agrees, or else from the start.
        end = self._differs_at if different is None else different
        afresh = self._a.starts_afresh and self._b.starts_afresh
        if equal is not None or afresh:
            return self._run_both(equal or 0, end, different)

        # Both began from another run's checkpoint, and nothing older than the difference is left.
        if different is None:
            what = f"no state from before step {end} is left of both runs"
            why = "one of them began from another run's checkpoint, and has none of its own before that step"
            fix = (
                "compare runs that kept their checkpoints (checkpoint.keep), or leave --replay out"
            )
            raise CheckpointError(Problem(what, f"{self._a.name}, {self._b.name}", why, fix))
        parted = self._saved_difference(different)
        return Parting(base=None, last=different, parted=parted, at_latest=True)

    def _bisected(self, saved: Sequence[int]) -> tuple[int | None, int | None]:
        """The last checkpoint whose states agree, and the first after it whose states do not; None if there is none.

        saved: steps of checkpoints that both have, ascending. One that does not verify is left out.
        """
        steps = list(saved)
        # Up to `low` they agree, from `high` on they differ. The newest is looked at first: usually it agrees.
        low, high, at = -1, len(steps), len(steps) - 1
        while high - low > 1:
            step = steps[at]
            try:
                differs = first_difference(self._a.saved(step), self._b.saved(step)) is not None
            except CheckpointError as error:
                self._say(f"checkpoint of step {step} left out: {error}")
                del steps[at]
                high -= 1
                at = min(at, high - 1)
                continue
            self._say(f"checkpoints of step {step} {'differ' if differs else 'agree'}")
            if differs:
                high = at
            else:
                low = at
            at = (low + high) // 2
        agreeing = steps[low] if low >= 0 else None
        differing = steps[high] if high < len(steps) else None
        return agreeing, differing

    def _saved_difference(self, step: int) -> Parted | None:
        """Where the checkpoints of `step` differ."""
        place = first_difference(self._a.saved(step), self._b.saved(step))
        if place is None:
            return None
        values = self._a.saved(step, place).value, self._b.saved(step, place).value
        return Parted(step + 1, place, apart(*values))

    def _run_both(self, base: int, end: int, different: int | None) -> Parting:
        """Run the steps after `base` again, up to `end`. different: the step of checkpoints that differ."""
        a, b = self._a, self._b
        begin = f"the checkpoints of step {base}" if base else "the initial states"
        self._say(f"from {begin} of both runs, up to step {end}")

        # A's steps, as hashes.
        a.start(base)
        began = a.state()
        log = StepLog()
        for step in range(base + 1, end + 1):
            log.append(a.step())
            self._progress(a, step, end)
        ended = {a.letter: a.state()}
        a.close()

        # B's, compared with them one by one.
        b.start(base)
        here = b.state()
        generators = generators_differ(began, here)
        frozen = frozen_differ(began, here)
        place = first_difference(began, here)
        if place is not None:
            values_b = b.state(place).value
            b.close()
            a.start(base)
            parted = Parted(base + 1, place, apart(a.state(place).value, values_b))
            return Parting(base, base, parted)
        for step in range(base + 1, end + 1):
            kept = keep(b.rerun.run)
            taken = b.step()
            self._progress(b, step, end)
            place = log.difference(step - base, taken)
            if place is not None:
                b.close()
                strangers = self._strangers(step)
                parted = self._observed(base, step, place, log, taken, kept, strangers)
                return Parting(
                    base, step, parted, strangers=strangers, generators=generators, frozen=frozen
                )
        ended[b.letter] = b.state()
        b.close()

        # The same steps, to the bit. So checkpoints that differ were changed, or not written as they were.
        strangers = self._strangers(end)
        if different is None or strangers:
            return Parting(base, end, strangers=strangers, generators=generators)
        changed = [each.letter for each in (a, b) if _other(ended[each.letter], each, different)]
        parted = self._saved_difference(different)
        return Parting(base, end, parted, changed=changed, generators=generators)

    def _observed(
        self,
        base: int,
        step: int,
        place: Place,
        log: StepLog,
        taken: StepTensors,
        kept: Kept,
        strangers: dict[str, str],
    ) -> Parted:
        """The first tensor of `step` that differs, by running it again with hooks.

        place: the first that differs without hooks, in hashes `log` of A and `taken` of B.
        kept: B's state before the step.
        strangers: runs whose re-run does not repeat itself are added.
        """
        # Each run does the step with hooks. One that gives other bits than before does not repeat itself.
        a, b = self._a, self._b
        self._say(f"step {step}: under observation")
        b.resume(kept)
        of_b = b.observed(kept)
        # Noted with hooks, the step has more tensors than without.
        b_repeats = b.compiled or first_difference(taken, of_b, shared=True) is None
        b.close()

        a.start(base)
        while a.steps_done < step - 1:
            a.step()
            self._progress(a, a.steps_done, step)
        kept_a = keep(a.rerun.run)
        of_a = a.observed(kept_a)
        a_repeats = a.compiled or log.difference(step - base, of_a, shared=True) is None

        # So far hashes were compared. The values come from doing the step once more.
        found = first_difference(of_a, of_b) or place
        value_a = a.observed(kept_a, found).value
        a.close()
        b.resume(kept)
        value_b = b.observed(kept, found).value
        for side, repeats in ((a, a_repeats), (b, b_repeats)):
            if not repeats:
                text = f"step {step} gives other bits each time that it is run: its operations are not deterministic"
                strangers.setdefault(side.letter, text)
        return Parted(step, found, apart(value_a, value_b))

    def _strangers(self, last: int) -> dict[str, str]:
        """Why a run's figures, up to step `last`, are not those of its journal."""
        found: dict[str, str] = {}
        for side in (self._a, self._b):
            each = side.difference
            if each is not None and each.step <= last:
                figure = each.kind
                if each.tensor != each.kind:
                    figure = f"{each.tensor} {each.kind}"
                text = f"step {each.step}, {figure}: {each.a!r} in the run, {each.b!r} here"
                found[side.letter] = text
        return found

    def _progress(self, side: Replayed, step: int, end: int) -> None:
        if time.monotonic() - self._reported > _PROGRESS_SECONDS:
            self._reported = time.monotonic()
            self._say(f"{side.name}: step {step} of {end}")


def _other(state: StepTensors, side: Replayed, step: int) -> bool:
    """Whether the run's checkpoint of `step` does not hold that state."""
    return first_difference(state, side.saved(step)) is not None
