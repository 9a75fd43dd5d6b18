"""The loss: spikes, a first loss that cannot be right, and whether the run has stopped learning.

How `LossMonitor` tells a spike from a usual loss:

1. *What is usual.* `base.level` takes the level and the spread (sigma) of the last `spike_window` losses, from medians
   and the MAD (median absolute deviation): a minority of outliers does not move them. The level follows a fall.
2. *The bound.* A loss spikes when it is over the level by spike_sigma sigmas, and by half of what the loss has fallen
   since its start. The second condition is for quiet stretches, in which sigma is tiny. Only differences of losses
   count: a constant added to every loss changes no decision, so losses of zero and below are judged like others.
3. *The limit.* The bound for the step two ahead is a limit that the device compares with: facts arrive one step late,
   and the update of a spike must not reach the weights.
4. *Spikes in a row.* A single spike is due to its samples, and its update is skipped. `spike_steps` in a row propose a
   rollback past their windows.
5. *Losses that are right.* Some samples are harder than others, and data may change for good. Losses that recur with
   usual ones between, and steps up that a rollback did not cure, are accepted (see `LossMonitor`).

`FirstLossMonitor` compares the first loss with that of blind guessing. `PlateauMonitor` reports a loss that no longer
falls. A slow rise is the subject of `rise`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from itertools import islice
from statistics import median

from harness.core.errors import in_a_row
from harness.core.facts import Continue, Limits, Rollback, StepFacts, Verdict, jsonable
from harness.monitors.base import (
    AHEAD,
    ARMED_AFTER,
    RECURRING_SPAN,
    ROUNDING,
    KeptWindow,
    Level,
    MonitorContext,
    level,
    mark,
    recurring,
    why_skipped,
)

JUDGED_AFTER = 16
"""Losses needed before spikes are reported. A limit, which acts by itself, needs twice as many."""
HALF = 0.5
"""Share of the fall since the first median: a smaller rise is no spike, however quiet the losses are."""
HIGH_FIRST, LOW_FIRST = 1.5, 0.3
"""The first loss of an untrained model lies between these multiples of ln(vocabulary)."""
_OF_TOKENS = ("nats per token", "nats per byte")
PLATEAU_WINDOW = 128
"""Applied steps that a look for a plateau or a vanished gradient compares, in two halves."""
VANISHED = 1e-3
"""A gradient norm under this share of its largest counts as vanished."""
LOOK_EVERY = 16
"""Applied steps between two looks for a plateau."""
FIRST_MARK = 512
"""The applied step at which the loss is first compared with that of half as many steps."""
NOISE = 0.35
"""Sigmas of single losses: a smaller fall of the median is no fall. Two medians of 64 differ by 0.22 by chance."""


class LossMonitor(KeptWindow):
    """Finds losses far above the recent ones, and sets a limit for those to come.

    spike_window: losses that say what is usual: applied, finite, and not spikes.
    spike_sigma: sigmas over the usual loss that make a spike.
    spike_steps: spikes in a row that propose a rollback.
    skip_growth: a gradient norm over this many times its limit is never accepted.

    A loss spikes when it is over centre + room, of `base.level`. room is the larger of spike_sigma * sigma and half of
    what the loss has fallen since its first median. Spikes are judged after 16 losses (or `spike_window`, if less).
    After 32 (or `spike_window`) every verdict carries that bound as the limit for the update two steps ahead.

    Losses over the limit are not kept as usual ones. Two kinds of them are let through from then on, each reported as
    `loss.accepted`:
    - Losses that *recur* with usual ones between them (see `base.recurring`), for as long as they do.
    - A *step that lasts*: `spike_steps` of them in a row, at usual norms, right behind windows that a rollback skipped.
      Going back to sound weights did not help. If the loss had fallen, it may be over its first median by no more than
      it had fallen under it.
    Anything else rolls back, and at last halts with a text that names the key to raise.

    Verdicts:
    - `loss.skip`, unhealthy: over the limit, not applied.
    - `loss.accepted`, unhealthy: the same, and the limit is raised for what comes.
    - `loss.spike`, unhealthy: a spike that was applied, where no limit was in force.
    - `loss.ok`: nothing to report.

    A step skipped for another reason neither extends nor ends a row of spikes: it left the weights as they were.
    """

    key = "loss"
    kept = (
        "losses", "spiking", "row", "marks", "recurs", "first", "best", "ceiling", "window", "follows",
    )  # fmt: skip

    def __init__(
        self, spike_window: int, spike_sigma: float, spike_steps: int, skip_growth: float = 5.0
    ) -> None:
        self.spike_sigma = spike_sigma
        self.spike_steps = spike_steps
        self.skip_growth = skip_growth
        self._losses: deque[float] = deque(maxlen=spike_window)

        # The present row of spikes: their windows and losses. None for a loss whose norm was over its limit, too.
        self._spiking: list[int] = []
        self._row: list[float | None] = []
        # The newest window, and whether the present row follows windows that were skipped.
        self._window: int | None = None
        self._follows = False

        # What `base.recurring` looks at, and whether large losses recur by it.
        self._marks: deque[float] = deque(maxlen=RECURRING_SPAN)
        self._recurs = False
        # Losses up to here were accepted as a step that lasts.
        self._ceiling: float | None = None

        # The first and the lowest median of JUDGED_AFTER losses.
        self._first: float | None = None
        self._best: float | None = None

    @classmethod
    def build(cls, context: MonitorContext) -> LossMonitor:
        """For every run."""
        guard = context.guard
        return cls(guard.spike_window, guard.spike_sigma, guard.spike_steps, guard.skip_growth)

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step, with the limit for the step two on. Deterministic."""
        usual = self._level(1, JUDGED_AFTER)
        why = why_skipped(facts)

        # A gap in the windows: a rollback skipped some of them.
        gap = self._window is not None and facts.window > self._window + 1
        self._window = facts.window
        if not self._spiking:
            self._follows = gap

        # An applied loss is usual, and then part of the past to compare with, or a spike that no limit stopped.
        skipped = why == "loss"
        spiked = False
        if not why and math.isfinite(facts.loss):
            bound = math.inf if usual is None else self._bound(usual)
            spiked = facts.loss > bound
            if usual is not None:
                self._marks.extend(mark(facts.loss - usual.centre, self._room(usual)))
            if not spiked:
                self._learn(facts.loss)
                self._forget_row()

        verdict = Verdict("loss.ok", facts.step)
        if skipped or spiked:
            verdict = self._spike(facts, skipped, usual)

        # The limit comes last, since an accepted loss raises it.
        expected = self._level(AHEAD, ARMED_AFTER)
        limits = Limits() if expected is None else Limits(loss=self._bound(expected))
        return replace(verdict, limits=limits)

    def _learn(self, loss: float) -> None:
        """Keep a usual loss."""
        self._losses.append(loss)
        newest = list(self._losses)[-JUDGED_AFTER:]
        if len(newest) < min(JUDGED_AFTER, self._losses.maxlen or JUDGED_AFTER):
            return
        now = median(newest)
        if self._first is None or self._best is None:
            self._first = now
            self._best = now
        self._best = min(self._best, now)

    def _forget_row(self) -> None:
        """End the row of spikes."""
        self._spiking.clear()
        self._row.clear()

    def _level(self, ahead: int, armed_after: int) -> Level | None:
        """The usual loss `ahead` steps on; None while too few losses are known.

        Its sigma is at least what rounding to float32 hides. It is 0 if all losses are exactly 0.
        """
        if len(self._losses) < min(armed_after, self._losses.maxlen or armed_after):
            return None
        found = level(list(self._losses), ahead)
        rounding = ROUNDING * max(map(abs, self._losses))
        sigma = max(rounding, found.sigma)
        # Losses that were 0 from the start do not say how far one may vary.
        if not sigma and not self._fall:
            return None
        return Level(found.centre, sigma)

    @property
    def _fall(self) -> float:
        """How far the loss has fallen since its first median."""
        if self._first is None or self._best is None:
            return 0.0
        return self._first - self._best

    def _room(self, usual: Level) -> float:
        """How far over the usual one a loss may be."""
        return max(self.spike_sigma * usual.sigma, HALF * self._fall)

    def _bound(self, usual: Level) -> float:
        """The loss over which one is a spike, with what was accepted. Notes when losses no longer recur."""
        found = recurring(self._marks) if self._recurs else None
        self._recurs = found is not None
        bound = usual.centre + max(self._room(usual), found or 0.0)
        return bound if self._ceiling is None else max(bound, self._ceiling)

    def _spike(self, facts: StepFacts, skipped: bool, usual: Level | None) -> Verdict:
        """Extend the row by this spike; accept it, or propose a rollback once the row is long enough."""
        # A row is only accepted if every gradient in it was within its limit.
        near = facts.grad_norm <= facts.limits.norm
        self._spiking.append(facts.window)
        self._row.append(facts.loss if near else None)
        run = len(self._spiking)

        # How far from the usual it is, in words and for the record.
        expected, sigmas = math.nan, math.nan
        if usual is not None:
            expected = usual.centre
            sigmas = math.inf
            if usual.sigma:
                sigmas = (facts.loss - usual.centre) / usual.sigma
        what = f"loss {facts.loss:.4g} against {expected:.4g} ({sigmas:.1f} sigmas), window {facts.window}"
        evidence = {
            "loss": facts.loss,
            "expected": jsonable(expected),
            "sigmas": jsonable(sigmas),
            "limit": jsonable(facts.limits.loss),
            "grad_norm": jsonable(facts.grad_norm),
            "window": facts.window,
            "consecutive": run,
        }

        # Losses that recur, and a step that lasts, come from the data: no rollback would help.
        accepted = ""
        if skipped and usual is not None:
            accepted = self._accepts(facts, usual, run)
        if accepted:
            self._forget_row()
            text = f"update skipped, weights unchanged: {what}. {accepted}"
            return Verdict(
                "loss.accepted",
                facts.step,
                text,
                healthy=False,
                evidence=evidence,
                skip=True,
                suspect=True,
            )

        # One spike is a bad batch. Several in a row are a run that diverges, or a part of the data that is bad.
        proposal: Continue | Rollback = Continue()
        if run >= self.spike_steps:
            reason = (
                f"the loss spiked in {in_a_row(run, 'step')} (last: {what}); if losses like this are right, raise "
                f"guard.spike_sigma ({self.spike_sigma:g})"
            )
            proposal = Rollback(reason, tuple(self._spiking))
        code, text = "loss.spike", what
        if skipped:
            code, text = "loss.skip", f"update skipped, weights unchanged: {what}"
        return Verdict(
            code,
            facts.step,
            text,
            healthy=False,
            proposal=proposal,
            evidence=evidence,
            skip=skipped,
            suspect=True,
        )

    def _accepts(self, facts: StepFacts, usual: Level, run: int) -> str:
        """Why losses of this size are let through from now on; empty if they are not. Raises the bound if they are."""
        # Large losses that recur come from the samples.
        if not self._recurs and facts.grad_norm <= self.skip_growth * facts.limits.norm:
            self._marks.append(max(facts.loss - usual.centre, usual.sigma))
            found = recurring(self._marks)
            if found is not None:
                self._recurs = True
                over = sum(value > 0 for value in self._marks)
                return (
                    f"Of the last {len(self._marks)} losses {over} were over their limit, with usual ones between "
                    f"them: some of the samples are harder than others. Losses up to {found:.4g} over the usual one "
                    "are let through, as long as they recur. If those samples should not be there, look at the windows "
                    "that these events name"
                )

        # A row right behind a rollback comes from the data: sound weights give such losses too.
        row = [loss for loss in self._row if loss is not None]
        if run < self.spike_steps or not self._follows or len(row) < run:
            return ""
        # Too far above the start of a run that had learned something: a fault, whatever the data is.
        fell = self._fall > self.spike_sigma * usual.sigma
        if fell and self._first is not None and median(row) > self._first + self._fall:
            return ""
        # With some room over the highest: the next losses are not all under it.
        highest = max(row)
        self._ceiling = highest + (highest - usual.centre) / 4
        return (
            f"The last {run} in a row were like this right behind windows that a rollback skipped, with norms "
            f"within their limit: the data have changed, not the weights. Losses up to {self._ceiling:.4g} are let "
            "through from now on. Look at the windows that these events name"
        )


class FirstLossMonitor(KeptWindow):
    """Compares the first loss of a fresh language model with ln(vocabulary), the loss of blind guessing.

    An untrained model gives about the same probability to every token, so its first loss is near that, in nats per
    token. Over HIGH_FIRST times it, or under LOW_FIRST times, something is not what the user takes it for.

    Verdict, healthy: `loss.first`, at step 1 alone; else `loss.ok`.
    """

    key = "first_loss"

    def __init__(self, vocab_size: int, tokens_per_sample: int) -> None:
        self.vocab_size = vocab_size
        self.tokens_per_sample = tokens_per_sample

    @classmethod
    def build(cls, context: MonitorContext) -> FirstLossMonitor | None:
        """For runs on tokens whose vocabulary is known: the model's, else the data's."""
        data = context.data
        vocab_size = context.vocab_size or 0
        # `ids` is 0 for data sets of the user's own, whose samples need not be tokens.
        if not vocab_size and getattr(data, "ids", 0):
            vocab_size = getattr(data, "vocab", 0)
        if data is None or vocab_size < 2 or getattr(data, "unit", "") not in _OF_TOKENS:
            return None
        return cls(vocab_size, data.tokens_per_sample)

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        blind = math.log(self.vocab_size)
        plausible = LOW_FIRST * blind <= facts.loss <= HIGH_FIRST * blind
        if facts.step != 1 or not math.isfinite(facts.loss) or plausible:
            return Verdict("loss.ok", facts.step)

        times = facts.loss / blind
        if times > self.tokens_per_sample / 2:
            why = f"probably the sum over the {self.tokens_per_sample} tokens of a sample, or of a batch, not the mean"
        elif times > 1:
            why = "probably a sum instead of a mean, or weights whose logits are far too large"
        else:
            why = (
                "probably targets that the model can see (not shifted by one, or no causal mask), or weights that "
                "were trained before: then all is well"
            )
        text = f"the first loss is {facts.loss:.4g}, {times:.3g} times ln({self.vocab_size}) = {blind:.4g}: {why}"
        evidence = {"loss": facts.loss, "expected": blind, "vocab_size": self.vocab_size}
        return Verdict("loss.first", facts.step, text, evidence=evidence)


class PlateauMonitor(KeptWindow):
    """Reports a loss that no longer falls, from the last PLATEAU_WINDOW applied steps in two halves.

    - *Vanished gradient.* The later half's median loss is not under the earlier one's by NOISE, and its median norm is
      under VANISHED times the largest such median of the run, or 0. Medians, so single spikes do not count.
    - *Plateau.* At applied step 512, 1024, 2048, ... their median loss is compared with the one at half as many
      steps. A run on a plateau has gained nothing from all of them.

    Only differences of losses count: a constant added to every loss changes nothing.

    Verdicts, healthy: `gradient.vanished`, once until the norm is ten times over the limit again; `loss.plateau`, once
    until a later doubling brought the loss down; else `loss.ok`.
    """

    key = "plateau"
    kept = ("losses", "norms", "peak", "gone", "mark", "flat")

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=PLATEAU_WINDOW)
        self._norms: deque[float] = deque(maxlen=PLATEAU_WINDOW // 2)
        self._peak = 0.0
        self._gone = False
        self._mark: float | None = None
        self._flat = False

    @classmethod
    def build(cls, context: MonitorContext) -> PlateauMonitor:
        """For every run."""
        return cls()

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic; a step that was not applied counts for nothing."""
        quiet = Verdict("loss.ok", facts.step)
        finite = math.isfinite(facts.loss) and math.isfinite(facts.grad_norm)
        if not facts.applied or not finite:
            return quiet
        self._losses.append(facts.loss)
        self._norms.append(facts.grad_norm)
        if facts.applied_steps % LOOK_EVERY or len(self._losses) < (self._losses.maxlen or 0):
            return quiet
        # Both keep a state, so both look at every such step, whichever has something to say.
        plateau = self._doubled(facts)
        return self._vanishing(facts) or plateau or quiet

    def _vanishing(self, facts: StepFacts) -> Verdict | None:
        """The verdict on a gradient that vanished; None if it did not, or that was reported before."""
        # A norm must rise to ten times the threshold before it can vanish again: no report for every wobble.
        norm = median(self._norms)
        self._peak = max(self._peak, norm)
        if self._gone:
            self._gone = norm == 0 or norm < 10 * VANISHED * self._peak
            return None

        # A small gradient alone may mean that the model has learned all there is, as long as the loss still falls.
        half = len(self._losses) // 2
        before = median(islice(self._losses, half))
        now = median(self._later())
        is_small = norm == 0 or norm < VANISHED * self._peak
        self._gone = is_small and self._stands(before, now)
        if not self._gone:
            return None
        what = f"the gradient norm is 0 (median of {half} steps)"
        if self._peak:
            what = (
                f"the gradient norm fell to {norm:.3g}, {norm / self._peak:.1g} of its largest ({self._peak:.3g}, "
                f"medians of {half} steps)"
            )
        text = f"{what}, and the loss no longer falls ({before:.4g}, then {now:.4g})"
        evidence = {"grad_norm": norm, "largest": self._peak, "loss_before": before, "loss": now}
        return Verdict("gradient.vanished", facts.step, text, evidence=evidence)

    def _doubled(self, facts: StepFacts) -> Verdict | None:
        """The verdict on a loss that a doubling of the steps did not lower; None otherwise."""
        # After a doubling: a run on a plateau has gained nothing from as many steps as all before.
        steps = facts.applied_steps
        is_power_of_two = steps & (steps - 1) == 0
        if steps < FIRST_MARK // 2 or not is_power_of_two:
            return None

        # Reported when a plateau begins, and not again while it lasts.
        before = self._mark
        now = median(self._losses)
        self._mark = now
        was_flat = self._flat
        self._flat = before is not None and self._stands(before, now)
        if before is None or not self._flat or was_flat:
            return None
        text = (
            f"the loss did not fall between updates {steps // 2} and {steps}: {before:.4g}, then {now:.4g} "
            f"(medians of {len(self._losses)} steps)"
        )
        evidence = {
            "loss_before": before,
            "loss": now,
            "from_update": steps // 2,
            "to_update": steps,
        }
        return Verdict("loss.plateau", facts.step, text, evidence=evidence)

    def _later(self) -> list[float]:
        """The later half of the losses kept."""
        return list(islice(self._losses, len(self._losses) // 2, None))

    def _stands(self, before: float, now: float) -> bool:
        """Whether a fall from `before` to `now` is within the noise of medians."""
        return before - now <= NOISE * level(self._later(), 0).sigma
