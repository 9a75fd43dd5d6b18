"""Guard and telemetry for a loop that belongs to a trainer: what the callbacks of each trainer call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.core.errors import MisuseError, Problem
from harness.guard import Guard
from harness.precision.api import Precision
from harness.precision.standard import WrappedOptimizer
from harness.telemetry import Telemetry

NO_SETTINGS: Mapping[str, Any] = {}


class Watch:
    """Begins with the training, judges after each step, and ends with the training.

    In a loop of yours: `with Watch(...) as watch`.

    folder: a folder for this run alone; None keeps nothing.
    guard: settings of the section `guard` of a run's config, and `healthy_steps`. None: no guard, and every step waits
        for its own figures.
    telemetry: arguments of `Telemetry.for_precision`.

    A rollback restores model, optimizers, FP8 state and schedulers. The trainer's step count and its data go on, past
    the batches that broke the run.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        guard: Mapping[str, Any] | None = NO_SETTINGS,
        **telemetry: Any,
    ) -> None:
        self._folder = folder
        self._settings = guard
        self._telemetry_settings = telemetry
        self.guard: Guard | None = None
        self.telemetry: Telemetry | None = None
        self._precision: Precision | None = None
        self._optimizers: list[WrappedOptimizer] = []
        self._seen: list[Any] = []

    @property
    def begun(self) -> bool:
        """Whether `begin` was called, and `end` was not."""
        return self.telemetry is not None

    def begin(
        self,
        precision: Precision,
        optimizers: Sequence[Any],
        keep: Sequence[Any] = (),
        max_grad_norm: float | None = None,
        steps: int | None = None,
    ) -> None:
        """Call it after the optimizers are wrapped, before the first step and before any state is loaded.

        keep: more state that a rollback restores, such as schedulers.
        steps: planned length of the run.

        Raises as `Telemetry.for_precision` and `Guard.for_precision`; MisuseError for an optimizer that is not wrapped,
        and if a training with a guard has begun before.
        """
        if precision.prepared.guarded:
            what = "training begins a second time, and its Precision has a guard already"
            why = "that guard restores optimizers and schedulers of the first time"
            fix = (
                "a new trainer, Precision and Watch, on a model that is not prepared, which resume from a checkpoint;"
                " or guard=None"
            )
            raise MisuseError(Problem(what, "harness.integrations", why, fix))
        if not all(isinstance(each, WrappedOptimizer) for each in optimizers):
            what = "an optimizer is not wrapped"
            fix = "precision.wrap(optimizer)"
            raise MisuseError(Problem(what, "harness.integrations", fix=fix))
        self._precision = precision
        self._optimizers = list(optimizers)
        self._seen = [each.outcome for each in self._optimizers]

        # The trainer's own settings are defaults: what the user set counts.
        settings = {"steps": steps, **self._telemetry_settings}
        telemetry = Telemetry.for_precision(self._folder, precision, **settings)
        try:
            if self._settings is not None:
                limits: dict[str, Any] = {}
                if max_grad_norm is not None:
                    limits["max_grad_norm"] = max_grad_norm
                # streams: a trainer's data go on after a rollback, they are not read again by number.
                settings = {**limits, "streams": True, **self._settings}
                self.guard = Guard.for_precision(
                    precision, optimizers, keep=keep, telemetry=telemetry, **settings
                )
        except BaseException as error:
            telemetry.close(error)
            raise
        self.telemetry = telemetry

    def step_ended(self) -> None:
        """Call it after everything that belongs to a step, schedulers too. Does nothing if no optimizer stepped.

        Raises HaltedError if the guard halts the run.
        """
        if self.telemetry is None or self._precision is None:
            return

        # Under gradient accumulation a trainer calls this after each micro-batch. Each step of an optimizer makes a new
        # outcome: if all are the same objects as before, no optimizer stepped.
        outcomes = [each.outcome for each in self._optimizers]
        if all(map(is_, outcomes, self._seen)):
            return
        self._seen = outcomes

        # A guard judges, and records the figures too.
        if self.guard is not None:
            self.guard.end_step()
        elif (facts := self._precision.facts()) is not None:
            self.telemetry.record(facts)

    def validated(self, loss: Any) -> None:
        """Report a validation's mean loss; None if the trainer has none."""
        if self.telemetry is None or self._precision is None or loss is None:
            return
        step = self._precision.prepared.state.step
        self.telemetry.validation(step, float(loss))

    def end(self, error: BaseException | None = None) -> None:
        """Write outcome, report and summary. error: what ended the training early."""
        telemetry, self.telemetry = self.telemetry, None
        if telemetry is not None:
            telemetry.close(error)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(error)
