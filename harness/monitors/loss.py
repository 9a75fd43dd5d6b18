"""The loss: spikes, by the median and MAD of recent losses, and whether the run has stopped learning."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from itertools import islice
from statistics import median

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
"""Losses until spikes are told; a limit, which acts by itself, needs twice as many."""
HALF = 0.5
"""Of what the loss has fallen since its first median: a rise by less is no spike, however quiet the window is."""
HIGH_FIRST, LOW_FIRST = 1.5, 0.3
"""Times ln(vocabulary), between which the first loss of an untrained model lies."""
_OF_TOKENS = ("nats per token", "nats per byte")
LOOK_EVERY = 16
FIRST_MARK = 512
NOISE = 0.35
"""Sigmas of single losses: a fall of the median by less is none. Two medians of 64 differ by 0.22 by chance."""


class LossMonitor(KeptWindow):
    """Finds losses far above the recent ones, and limits those to come. Differences of losses alone decide: what is
    added to every loss changes nothing, so losses of zero and below are judged like all others.

    A loss spikes when it is over centre + room, both from the last `spike_window` losses that were applied, finite and
    not spikes (see `base.level`). room: spike_sigma * sigma, or half of what the loss has fallen since its first
    median, whichever is more. Judged after 16 losses (or `spike_window`, if less). After 32 (or `spike_window`) every
    verdict carries that bound as the limit for the update two steps on, which is skipped if it is over.

    What is over the limit stays out of the window. Two kinds of it are let through, each told as `loss.accepted`:
    losses that recur with usual ones between them (see `base.recurring`), for as long as they do; and a step that
    lasts: `spike_steps` of them in a row at usual norms, right behind windows that a rollback passed over, since going
    back to sound weights did not help; but none that is further over the first median than a loss had fallen under
    it. Anything else rolls back, and halts with a text that names the key to raise.

    Verdicts: `loss.skip` (over the limit, not applied), `loss.accepted` (the same, and the limit was raised for what
    comes) and `loss.spike` (a spike that was applied, where no limit was in force), all unhealthy; `spike_steps` of
    them in a row propose a rollback past their windows. Else `loss.ok`. A step skipped for another reason neither
    extends nor ends a row: it left the weights as they were.
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
        self._spiking: list[int] = []
        # The losses of that row; None where the norm was over its limit, too.
        self._row: list[float | None] = []
        self._marks: deque[float] = deque(maxlen=RECURRING_SPAN)
        self._recurs = False
        self._first: float | None = None
        self._best: float | None = None
        # Losses up to here were accepted as a step that lasts.
        self._ceiling: float | None = None
        # The newest window, and whether the present row follows windows that were passed over.
        self._window: int | None = None
        self._follows = False

    @classmethod
    def build(cls, context: MonitorContext) -> LossMonitor:
        """For every run."""
        guard = context.guard
        return cls(guard.spike_window, guard.spike_sigma, guard.spike_steps, guard.skip_growth)

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step, with the limit for the step two on. Deterministic."""
        usual, why = self._level(1, JUDGED_AFTER), why_skipped(facts)
        behind = self._window is not None and facts.window > self._window + 1
        self._window = facts.window
        if not self._spiking:
            self._follows = behind
        skipped, spiked = why == "loss", False
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
        expected = self._level(AHEAD, ARMED_AFTER)
        limits = Limits() if expected is None else Limits(loss=self._bound(expected))
        return replace(verdict, limits=limits)

    def _learn(self, loss: float) -> None:
        self._losses.append(loss)
        newest = list(self._losses)[-JUDGED_AFTER:]
        if len(newest) < min(JUDGED_AFTER, self._losses.maxlen or JUDGED_AFTER):
            return
        now = median(newest)
        self._first = now if self._first is None else self._first
        self._best = now if self._best is None else min(self._best, now)

    def _forget_row(self) -> None:
        self._spiking.clear()
        self._row.clear()

    def _level(self, ahead: int, armed_after: int) -> Level | None:
        """None while too few losses are known. sigma: what rounding to float32 makes of them, or more."""
        if len(self._losses) < min(armed_after, self._losses.maxlen or armed_after):
            return None
        found = level(list(self._losses), ahead)
        return Level(found.centre, max(ROUNDING * max(map(abs, self._losses)), found.sigma))

    @property
    def _fall(self) -> float:
        return 0.0 if self._first is None or self._best is None else self._first - self._best

    def _room(self, usual: Level) -> float:
        return max(self.spike_sigma * usual.sigma, HALF * self._fall)

    def _bound(self, usual: Level) -> float:
        found = recurring(self._marks) if self._recurs else None
        self._recurs = found is not None
        bound = usual.centre + max(self._room(usual), found or 0.0)
        return bound if self._ceiling is None else max(bound, self._ceiling)

    def _spike(self, facts: StepFacts, skipped: bool, usual: Level | None) -> Verdict:
        near = facts.grad_norm <= facts.limits.norm
        self._spiking.append(facts.window)
        self._row.append(facts.loss if near else None)
        run = len(self._spiking)
        expected, sigmas = math.nan, math.nan
        if usual is not None:
            expected, sigmas = usual.centre, (facts.loss - usual.centre) / usual.sigma
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
        if skipped and usual is not None and (accepted := self._accepts(facts, usual, run)):
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
        proposal: Continue | Rollback = Continue()
        if run >= self.spike_steps:
            reason = (
                f"the loss spiked {run} steps in a row (last: {what}); if losses like this are right, raise "
                f"guard.spike_sigma ({self.spike_sigma:g})"
            )
            proposal = Rollback(reason, tuple(self._spiking))
        return Verdict(
            "loss.skip" if skipped else "loss.spike",
            facts.step,
            f"update skipped, weights unchanged: {what}" if skipped else what,
            healthy=False,
            proposal=proposal,
            evidence=evidence,
            skip=skipped,
            suspect=True,
        )

    def _accepts(self, facts: StepFacts, usual: Level, run: int) -> str:
        """Why losses of this size are let through from now on, and notes it; empty if they are not."""
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
        row = [loss for loss in self._row if loss is not None]
        if run < self.spike_steps or not self._follows or len(row) < run:
            return ""
        fell = self._fall > self.spike_sigma * usual.sigma
        if fell and self._first is not None and median(row) > self._first + self._fall:
            return ""
        self._ceiling = max(row) + (max(row) - usual.centre) / 4
        return (
            f"The last {run} in a row were like this right behind windows that a rollback passed over, with norms "
            f"within their limit: the data have changed, not the weights. Losses up to {self._ceiling:.4g} are let "
            "through from now on. Look at the windows that these events name"
        )


class FirstLossMonitor(KeptWindow):
    """Holds the first loss of a fresh language model against ln(vocabulary), which guessing blindly costs.

    An untrained model gives about the same probability to every token, so its first loss is near that, in nats per
    token. Over HIGH_FIRST times it, or under LOW_FIRST: something is not what it is taken for. Verdict, healthy:
    `loss.first`, at step 1 alone; else `loss.ok`.
    """

    key = "first_loss"

    def __init__(self, vocab_size: int, tokens_per_sample: int) -> None:
        self.vocab_size, self.tokens_per_sample = vocab_size, tokens_per_sample

    @classmethod
    def build(cls, context: MonitorContext) -> FirstLossMonitor | None:
        """For runs on tokens whose vocabulary is known: the model's, else the data's."""
        data = context.data
        known = context.vocab_size or (getattr(data, "vocab", 0) if getattr(data, "ids", 0) else 0)
        if data is None or known < 2 or getattr(data, "unit", "") not in _OF_TOKENS:
            return None
        return cls(known, data.tokens_per_sample)

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        blind = math.log(self.vocab_size)
        if (
            facts.step != 1
            or not math.isfinite(facts.loss)
            or LOW_FIRST * blind <= facts.loss <= HIGH_FIRST * blind
        ):
            return Verdict("loss.ok", facts.step)
        times = facts.loss / blind
        if times > self.tokens_per_sample / 2:
            why = f"probably the sum over the {self.tokens_per_sample} tokens of a sample, or of a batch, not the mean"
        elif times > 1:
            why = "probably a sum instead of a mean, or weights whose logits are far too large"
        else:
            why = "probably targets that the model can see (not shifted by one, or no causal mask), or weights that "
            why += "were trained before: then all is well"
        text = f"the first loss is {facts.loss:.4g}, {times:.3g} times ln({self.vocab_size}) = {blind:.4g}: {why}"
        evidence = {"loss": facts.loss, "expected": blind, "vocab_size": self.vocab_size}
        return Verdict("loss.first", facts.step, text, evidence=evidence)


class PlateauMonitor(KeptWindow):
    """Looks at the loss and the gradient norm of the last `window` applied steps, in two halves.

    The loss stands still if the later half's median is not under the earlier one's by NOISE. Differences alone decide:
    a shift of the loss changes nothing. The gradient has vanished if, besides, its median norm in the later half is
    under `vanished` times the largest such median of the run so far (single spikes do not count). At applied step 512,
    1024, 2048, ... the window's median loss is compared with the one at half as many steps: a run on a plateau has
    gained nothing from all of them.

    Verdicts, healthy: `gradient.vanished`, once until the norm is ten times over the limit again; `loss.plateau`, once
    until a later doubling brought the loss down; else `loss.ok`.
    """

    key = "plateau"
    kept = ("losses", "norms", "peak", "gone", "mark", "flat")

    def __init__(self, window: int = 128, vanished: float = 1e-3) -> None:
        self.vanished = vanished
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window // 2)
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
        if not facts.applied or not math.isfinite(facts.loss) or not math.isfinite(facts.grad_norm):
            return quiet
        self._losses.append(facts.loss)
        self._norms.append(facts.grad_norm)
        if facts.applied_steps % LOOK_EVERY or len(self._losses) < (self._losses.maxlen or 0):
            return quiet
        plateau = self._doubled(facts)
        return self._vanishing(facts) or plateau or quiet

    def _vanishing(self, facts: StepFacts) -> Verdict | None:
        norm = median(self._norms)
        self._peak = max(self._peak, norm)
        if self._gone:
            self._gone = norm < 10 * self.vanished * self._peak
            return None
        half = len(self._losses) // 2
        before, now = median(islice(self._losses, half)), median(self._later())
        self._gone = norm < self.vanished * self._peak and self._stands(before, now)
        if not self._gone:
            return None
        text = (
            f"the gradient norm fell to {norm:.3g}, {norm / self._peak:.1g} of its largest ({self._peak:.3g}, medians "
            f"of {half} steps), and the loss no longer falls ({before:.4g}, then {now:.4g})"
        )
        evidence = {"grad_norm": norm, "largest": self._peak, "loss_before": before, "loss": now}
        return Verdict("gradient.vanished", facts.step, text, evidence=evidence)

    def _doubled(self, facts: StepFacts) -> Verdict | None:
        steps = facts.applied_steps
        if steps < FIRST_MARK // 2 or steps & (steps - 1):
            return None
        before, now = self._mark, median(self._losses)
        self._mark = now
        was_flat, self._flat = self._flat, before is not None and self._stands(before, now)
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
        return list(islice(self._losses, len(self._losses) // 2, None))

    def _stands(self, before: float, now: float) -> bool:
        return before - now <= NOISE * level(self._later(), 0).sigma
