"""Guard and telemetry of a run whose loop belongs to a trainer: what its callbacks call, the same for each."""

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
    """Begins with the training, judges after each step, ends with it. In a loop of yours: `with Watch(...) as watch`.

    folder: of this run alone, None keeps nothing. guard: settings of the section `guard` of a run's config and
    `healthy_steps`; None: no guard, and every step waits for its own figures. telemetry: arguments of
    `Telemetry.for_precision`.

    A rollback puts model, optimizers, FP8 state and schedulers back. The trainer's step count and its data go on: the
    batches that broke the run are behind it.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        guard: Mapping[str, Any] | None = NO_SETTINGS,
        **telemetry: Any,
    ) -> None:
        self._folder, self._settings, self._telemetry_settings = folder, guard, telemetry
        self.guard: Guard | None = None
        self.telemetry: Telemetry | None = None
        self._precision: Precision | None = None
        self._optimizers: list[WrappedOptimizer] = []
        self._seen: list[Any] = []

    @property
    def begun(self) -> bool:
        """Between `begin` and `end`."""
        return self.telemetry is not None

    def begin(
        self,
        precision: Precision,
        optimizers: Sequence[Any],
        keep: Sequence[Any] = (),
        max_grad_norm: float | None = None,
        steps: int | None = None,
    ) -> None:
        """After the optimizers were wrapped, before the first step and before any state is loaded. steps: planned.

        Raises as `Telemetry.for_precision` and `Guard.for_precision`, MisuseError for an optimizer that is not wrapped.
        """
        if not all(isinstance(each, WrappedOptimizer) for each in optimizers):
            fix = "precision.wrap(optimizer)"
            raise MisuseError(
                Problem("an optimizer is not wrapped", "harness.integrations", fix=fix)
            )
        self._precision, self._optimizers = precision, list(optimizers)
        self._seen = [each.outcome for each in self._optimizers]
        telemetry = Telemetry.for_precision(
            self._folder, precision, **{"steps": steps, **self._telemetry_settings}
        )
        try:
            if self._settings is not None:
                limit = {} if max_grad_norm is None else {"max_grad_norm": max_grad_norm}
                settings = {**limit, "streams": True, **self._settings}
                self.guard = Guard.for_precision(
                    precision, optimizers, keep=keep, telemetry=telemetry, **settings
                )
        except BaseException as error:
            telemetry.close(error)
            raise
        self.telemetry = telemetry

    def step_ended(self) -> None:
        """After everything that belongs to a step, schedulers too. Nothing happens where no optimizer stepped.

        Raises HaltedError where going on would only be worse.
        """
        outcomes = [each.outcome for each in self._optimizers]
        if self.telemetry is None or self._precision is None or all(map(is_, outcomes, self._seen)):
            return
        self._seen = outcomes
        if self.guard is not None:
            self.guard.end_step()
        elif (facts := self._precision.facts()) is not None:
            self.telemetry.record(facts)

    def validated(self, loss: Any) -> None:
        """A validation's mean loss; None where the trainer has none."""
        if self.telemetry is not None and self._precision is not None and loss is not None:
            self.telemetry.validation(self._precision.prepared.state.step, float(loss))

    def end(self, error: BaseException | None = None) -> None:
        """Outcome, report, summary. error: what ended the training, if it did not end as planned."""
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
