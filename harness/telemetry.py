"""`harness.Telemetry`: what is told of a run, in any loop: journal, screen, MLflow and report."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from harness.capability.probe import probe
from harness.core.collectives import world_rank
from harness.core.config import TrackingConfig
from harness.core.errors import CheckpointError, ExitCode, HaltedError, HarnessError, MachineError, Problem
from harness.core.facts import Outcome, StepFacts
from harness.core.metrics import row
from harness.core.schema import validate
from harness.core.state import RunLedger
from harness.run_folder import forget_outcome, write_outcome, write_plan
from harness.tracking import shipper
from harness.tracking.console import Console
from harness.tracking.history import OWN_LOOP
from harness.tracking.journal import JOURNAL, Journal

if TYPE_CHECKING:
    from harness.monitors.responder import Judgement
    from harness.precision.api import Precision


def undeliverable(config: TrackingConfig) -> list[Problem]:
    """Why rows cannot be delivered to MLflow from here, though that is wanted."""
    mlflow = probe().libraries["mlflow"]
    if not config.mlflow or mlflow.ok:
        return []
    fix = "pip install 'hopper-harness[mlflow]', or tracking.mlflow=false: journal.jsonl has every series"
    return [Problem("rows cannot be delivered to MLflow", "tracking.mlflow", mlflow.reason, fix)]


class Telemetry:
    """Journal, screen, MLflow and report of one run; implements `core.protocols.Tracker`.

        with harness.Telemetry.for_precision("runs/mine", precision, steps=1000) as telemetry:
            guard = harness.Guard.for_precision(precision, optimizer, telemetry=telemetry)
            ...                                              # the loop, with guard.end_step() in every step

    The folder is a run's: `harness inspect`, `explain`, `report` and `sync` read it. Only rank 0 writes. Without a
    folder nothing is kept, and what happens is only said.

    folder: None on ranks other than 0 and where nothing is kept. screen: what is said. layers: FP8 layers of the plan.
    """

    def __init__(
        self, folder: Path | None, journal: Journal, screen: Console, config: TrackingConfig, layers: int = 0
    ) -> None:
        self.folder, self.journal, self.screen, self.config = folder, journal, screen, config
        self.layers = layers
        self._ship: shipper.ShipperHandle | None = None
        self._precision: Precision | None = None
        self._last = 0

    @classmethod
    def for_precision(
        cls,
        folder: str | Path | None,
        precision: Precision,
        *,
        steps: int | None = None,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Telemetry:
        """For a loop of your own, after `prepare`. A folder that a run has begun in goes on with it.

        folder: of this run alone, such as "runs/mine"; None keeps nothing. steps: how many there will be, for the
        screen's lines; None prints none but events. params, tags: for MLflow. settings: keys of the section `tracking`
        of a run's config (mlflow, experiment, fp8_every, report, drain_seconds).

        Raises ConfigError for settings or a folder that cannot be written, CheckpointError for one of a run of
        `harness train`, MachineError where MLflow is wanted and cannot be reached for want of its library.
        """
        config = validate(TrackingConfig, settings, "Telemetry.for_precision")
        lead = world_rank() == 0
        spoken = sys.stderr if folder is None else sys.stdout
        screen = Console(steps, stream=spoken if lead else open(os.devnull, "w"))  # noqa: SIM115
        path = None if folder is None or not lead else Path(folder)
        if path is not None and (problems := undeliverable(config)):
            raise MachineError(problems)
        if path is not None and (path / "config.yaml").exists():
            what = "is a run of harness train, whose journal has one writer"
            raise CheckpointError(Problem(what, str(path), fix="give your loop a folder of its own"))
        resumed = path is not None and (path / JOURNAL).exists()
        journal = Journal(Path(os.devnull) if path is None else path / JOURNAL, resume_step=0 if resumed else None)
        telemetry = cls(path, journal, screen, config, len(precision.plan.fp8_layers()))
        telemetry._precision = precision
        plan = precision.plan
        if path is not None:
            write_plan(path, plan.as_dict())
            forget_outcome(path)
        telemetry.begin(
            tags={
                "precision.requested": plan.requested,
                "precision.resolved": plan.resolved,
                "tier": plan.tier,
                "recipe.sha256": plan.recipe_sha256,
                "loop": OWN_LOOP,
                "experiment": config.experiment,
                **(tags or {}),
            },
            params=dict(params or {}) | ({} if steps is None else {"steps": steps}),
        )
        telemetry.ship()
        return telemetry

    @property
    def attempt(self) -> int:
        """Raised by a rollback, part of every row."""
        return self.journal.attempt

    @attempt.setter
    def attempt(self, number: int) -> None:
        self.journal.attempt = number

    def begin(self, tags: Mapping[str, str], params: Mapping[str, Any], data: Mapping[str, Any] | None = None) -> None:
        """What the run is."""
        self.journal.note("run", tags=dict(tags), params=dict(params), data=dict(data or {}))

    def ship(self) -> None:
        """Deliver the journal to MLflow from now on, in a process of its own; after the row of `begin` is written."""
        if self.folder is not None and self.config.mlflow:
            self._ship = shipper.start(self.folder, self.config.experiment)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of metrics."""
        self.journal.metrics(step, metrics)

    def event(self, step: int, code: str, **fields: Any) -> None:
        """Something happened at `step`; kept, not said."""
        self.journal.event(step, code, **fields)

    def tell(self, step: int, code: str, text: str, **fields: Any) -> None:
        """Something happened at `step` that the user should see."""
        self.journal.event(step, code, text=text, **fields)
        self.screen.event(f"step {step}: {code}: {text}")

    def note(self, kind: str, **fields: Any) -> None:
        """One row of another kind, see `Journal.note`."""
        self.journal.note(kind, **fields)

    def flush(self) -> None:
        """Everything so far is on disk."""
        self.journal.flush()

    def record(self, facts: StepFacts, ledger: RunLedger | None = None, judged: Judgement | None = None) -> None:
        """One step, in order: its row, what was said of it, and the line on the screen.

        In a loop without a guard: `telemetry.record(precision.facts())` after every step, which waits for its figures.
        """
        ledger = ledger or RunLedger()
        self._last = facts.step
        self.metrics(facts.step, row(facts, ledger, facts.step % self.config.fp8_every == 0))
        for verdict in judged.told if judged is not None else ():
            self.tell(facts.step, verdict.code, verdict.text, **verdict.evidence)
        self.screen.step(facts, self.layers - len(facts.demoted), self.layers, ledger.skips, ledger.rollbacks)

    def validation(self, step: int, loss: float) -> None:
        """A validation after `step` steps; the mean loss, in our own loop in nats per token."""
        self.metrics(step, {"val/loss": loss})
        if self._precision is None:
            self.screen.validation(step, loss)
        else:
            self.screen.say(f"validation after step {step}: {loss:.4g}")

    def failed(self, step: int, error: BaseException) -> None:
        """The run ended by an error."""
        code = error.exit_code if isinstance(error, HarnessError) else ExitCode.FAILED
        reason = f"{type(error).__name__}: {error}"
        self.event(step, "run.failed", text=reason)
        if self.folder is not None:
            write_outcome(self.folder, Outcome("failed", code, reason, step))
        self.note("end", status="failed")

    def end(self, outcome: Outcome, plan: Mapping[str, Any], files: tuple[str, ...] = ()) -> None:
        """Outcome, effective precision, plots and report; told to MLflow through the journal.

        plan: of `Plan.as_it_ran`. files: of the run folder, to be kept with it in MLflow.
        """
        if self.folder is None:
            return
        write_outcome(self.folder, outcome)
        write_plan(self.folder, plan)
        tags = {"precision.effective": plan["effective"], "outcome": outcome.status}
        self.note("run", tags=tags, params={}, data={})
        self.flush()
        if self.config.report:
            self._report(outcome.step)
        for name in (*files, "plan.json", "outcome.json"):
            self.note("artifact", path=name)
        self.note("end", status=outcome.status)

    def _report(self, step: int) -> None:
        from harness.report.page import write

        assert self.folder is not None
        try:
            for path in write(self.folder):
                self.note("artifact", path=str(path.relative_to(self.folder)))
        except (OSError, ValueError) as error:  # the training is done and saved: a picture must not fail it
            self.event(step, "report.failed", text=str(error))
            self.screen.event(f"no report: {error}; try again with harness report {self.folder}")

    def farewell(self) -> None:
        """Wait for the delivery, within tracking.drain_seconds, and say how the run went."""
        if self.folder is None:
            return
        from harness.report.summary import summary

        delivered = self._ship.drain(self.config.drain_seconds) if self._ship else None
        self.screen.say(summary(self.folder))
        if self.journal.dropped:
            self.screen.event(
                f"journal.dropped: the disk refused {self.journal.dropped} rows of {self.folder / JOURNAL}; "
                "training was not affected"
            )
        if delivered is False:
            self.screen.event(f"MLflow has not got everything yet; deliver the rest with: harness sync {self.folder}")

    def close(self, error: BaseException | None = None) -> None:
        """End the record of a loop of your own: outcome, report, delivery, summary. Safe to call twice.

        error: what ended the loop, if it did not end as planned.
        """
        self.screen.close()
        if self._precision is not None:
            precision, self._precision = self._precision, None
            if error is None:  # the loop is over: what is still on its way gets its row, though nobody judges it
                for facts in (each.facts() for each in precision.prepared.pending):
                    self.record(facts, precision.prepared.state.ledger)
            if error is None or isinstance(error, HaltedError):
                status, code = ("done", ExitCode.DONE) if error is None else ("halted", ExitCode.HALTED)
                reason = f"{self._last} steps" if error is None else str(error)
                self.end(
                    Outcome(status, code, reason, self._last), precision.plan.as_it_ran(precision.prepared.backend)
                )
            else:
                self.failed(self._last, error)
            self.journal.close()
            self.farewell()
        self.journal.close()

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)
