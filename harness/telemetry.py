"""`harness.Telemetry`: what is told of a run, in any loop: journal, screen, MLflow and report."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from harness.capability.probe import probe
from harness.core.collectives import world_rank
from harness.core.config import FallbackConfig, TrackingConfig
from harness.core.errors import (
    CheckpointError,
    ConfigError,
    ExitCode,
    HaltedError,
    HarnessError,
    MachineError,
    MisuseError,
    Problem,
)
from harness.core.facts import ROLES, Outcome, StepFacts
from harness.core.metrics import row
from harness.core.schema import validate
from harness.core.secrets import scrub_all, scrubbed
from harness.core.state import RunLedger
from harness.run_folder import RunLock, forget_outcome, write_outcome, write_plan
from harness.tracking import shipper
from harness.tracking.console import Console
from harness.tracking.history import OWN_LOOP
from harness.tracking.journal import JOURNAL, Journal, misplaced
from harness.tracking.slot_file import PARQUET, write_parquet
from harness.tracking.slot_series import Kept, SlotLimits, SlotSeries

if TYPE_CHECKING:
    from harness.monitors.responder import Judgement
    from harness.precision.api import Precision


def undeliverable(config: TrackingConfig, off: str) -> list[Problem]:
    """Why rows cannot be delivered to MLflow from here, though that is wanted. off: how its user switches it off."""
    mlflow = probe().libraries["mlflow"]
    if config.mlflow and (why := misplaced()):
        fix = f"start in another folder, or set MLFLOW_TRACKING_URI, or {off}"
        return [Problem("MLflow's database would not be in this folder", str(Path.cwd()), why, fix)]
    if not config.mlflow or mlflow.ok:
        return []
    fix = f"pip install 'hopper-harness[mlflow]', or {off}: journal.jsonl has every series"
    return [Problem("rows cannot be delivered to MLflow", "tracking.mlflow", mlflow.reason, fix)]


def _taken(folder: Path, plan: Mapping[str, Any]) -> RunLock:
    """The right to write into a folder of a loop that is not ours, with its plan there. Raises as `for_precision`."""
    lock = RunLock(folder)
    try:
        if (folder / "config.yaml").exists():
            what = "is a run of harness train, whose journal has one writer"
            raise CheckpointError(
                Problem(what, str(folder), fix="give your loop a folder of its own")
            )
        lock.acquire()
        write_plan(folder, plan)
        forget_outcome(folder)
    except (OSError, ValueError, CheckpointError) as error:
        lock.release()
        cause = error.__cause__ if isinstance(error, CheckpointError) else error
        if cause is None:
            raise
        if isinstance(cause, BlockingIOError):
            fix = "close the Telemetry that writes there, or give each loop a folder of its own"
            raise CheckpointError(
                Problem("another Telemetry writes this run", str(folder), fix=fix)
            ) from error
        fix = "check that the run folder is writable"
        raise ConfigError(
            Problem(f"the folder cannot be written: {cause}", str(folder), fix=fix)
        ) from error
    return lock


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
        self,
        folder: Path | None,
        journal: Journal,
        screen: Console,
        config: TrackingConfig,
        layers: int = 0,
    ) -> None:
        self.folder, self.journal, self.screen, self.config = folder, journal, screen, config
        self.layers = layers
        self.slots = SlotSeries(config, folder)
        self._ship: shipper.ShipperHandle | None = None
        self._precision: Precision | None = None
        self._lock: RunLock | None = None
        self._last = (0, 0)
        self._counts: dict[str, int] = {}
        self._ended: Outcome | None = None
        self._ahead: int | None = None
        self._closed = False

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
        of a run's config (mlflow, experiment, fp8_every, fp8_series, fp8_slots, report, drain_seconds).

        Raises ConfigError for settings or a folder that cannot be written, CheckpointError for one of a run of
        `harness train` or one that something else writes into, MisuseError after a guard was made, MachineError where
        MLflow is wanted and cannot be reached for want of its library.
        """
        config = validate(TrackingConfig, settings, "Telemetry.for_precision")
        if folder is not None and precision.prepared.guarded:
            fix = "make the Telemetry first, then Guard.for_precision(..., telemetry=telemetry)"
            raise MisuseError(
                Problem(
                    "the model's guard tells elsewhere already", "Telemetry.for_precision", fix=fix
                )
            )
        lead = world_rank() == 0
        spoken = sys.stderr if folder is None else sys.stdout
        screen = Console(steps, stream=spoken if lead else open(os.devnull, "w"))  # noqa: SIM115
        path = None if folder is None or not lead else Path(folder)
        if path is not None and (problems := undeliverable(config, "mlflow=False")):
            raise MachineError(problems)
        plan = precision.plan
        lock = None if path is None else _taken(path, plan.as_dict())
        resumed = path is not None and (path / JOURNAL).exists()
        journal = Journal(
            Path(os.devnull) if path is None else path / JOURNAL, resume_step=0 if resumed else None
        )
        telemetry = cls(path, journal, screen, config, len(plan.fp8_layers()))
        telemetry._precision, telemetry._lock = precision, lock
        telemetry.watch(precision.recipe.fallback)
        precision.prepared.told = precision.prepared.told or folder is not None
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

    def is_of(self, precision: Precision) -> bool:
        """Whether it tells of the model that `precision` prepared, and still does."""
        return self._precision is precision and not self._closed

    @property
    def attempt(self) -> int:
        """Raised by a rollback, part of every row."""
        return self.journal.attempt

    @attempt.setter
    def attempt(self, number: int) -> None:
        """In a loop of your own that goes on from before a rollback, or afresh, in a folder that knows of it, rows come
        under an attempt after those that stand there: readers take a lower one for what was thrown away.
        """
        if self._ahead is None:
            own = self._precision
            standing = 0 if own is None else self.journal.standing_attempt
            afresh = own is not None and not own.prepared.loaded
            self._ahead = standing + 1 - number if number < standing or (standing and afresh) else 0
        self.journal.attempt = number + self._ahead

    def watch(self, limits: FallbackConfig) -> None:
        """In a model with too many slots for all of them, those beyond `limits` get series of their own."""
        saturation = tuple(getattr(limits, f"saturation_{role}") for role in ROLES)
        underflow = (limits.underflow, limits.underflow, limits.underflow_grad_output)
        even_db = (limits.even_db_input, limits.even_db_weight, limits.even_db_grad_output)
        self.slots.limits = SlotLimits(
            saturation,
            limits.clipped,
            underflow,
            limits.sqnr_db,
            limits.warmup_steps,
            even_db,
            limits.centred_db,
        )

    def begin(
        self,
        tags: Mapping[str, str],
        params: Mapping[str, Any],
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """What the run is."""
        where = (
            {}
            if self.folder is None
            else {"host": socket.gethostname(), "folder": str(self.folder.absolute())}
        )
        self.note("run", tags=dict(tags), params=dict(params), data=dict(data or {}), where=where)

    def ship(self) -> None:
        """Deliver the journal to MLflow from now on, in a process of its own; after the row of `begin` is written."""
        if self.folder is not None and self.config.mlflow:
            self._ship = shipper.start(
                self.folder, self.config.experiment, self.config.system_seconds
            )
            self.screen.say(self._ship.choice.told)
        elif self.folder is not None:
            self.screen.say(f"figures go to {self.folder / JOURNAL} alone: MLflow is switched off")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of metrics."""
        self.journal.metrics(step, metrics)

    def event(self, step: int, code: str, **fields: Any) -> None:
        """Something happened at `step`; kept, not said."""
        self.journal.event(step, code, **scrub_all(fields))

    def tell(self, step: int, code: str, text: str, **fields: Any) -> None:
        """Something happened at `step` that the user should see."""
        self.event(step, code, text=text, **fields)
        self.screen.event(scrubbed(f"step {step}: {code}: {text}"))

    def note(self, kind: str, **fields: Any) -> None:
        """One row of another kind, see `Journal.note`."""
        self.journal.note(kind, **scrub_all(fields))

    def flush(self) -> None:
        """Everything so far is on disk."""
        self.journal.flush()
        if self.slots.file is not None:
            self.slots.file.flush()

    def record(
        self, facts: StepFacts, ledger: RunLedger | None = None, judged: Judgement | None = None
    ) -> None:
        """Write down one step, in order: its row, the events about it, and its line on the screen.

        In a loop without a guard: `telemetry.record(precision.facts())` after every step, which waits for its figures.
        Raises MisuseError after `close`.
        """
        if self._closed:
            fix = "keep the whole loop inside of `with Telemetry.for_precision(...)`"
            raise MisuseError(
                Problem(
                    "the telemetry was closed: this step would not be kept", "record()", fix=fix
                )
            )
        if ledger is None:
            ledger = (
                RunLedger() if self._precision is None else self._precision.prepared.state.ledger
            )
        if self._precision is not None:
            self.attempt = ledger.attempt
        else:
            self.count(facts.step, facts.applied_steps, ledger)
        self._last = (ledger.attempt, facts.step)

        # One row: the figures of the step, and those FP8 figures that have series.
        kept = self.slots.take(self.attempt, facts)
        self.journal.metrics(facts.step, row(facts, ledger) | kept.figures)
        self._tell_slots(kept)

        for verdict in judged.told if judged is not None else ():
            self.tell(facts.step, verdict.code, verdict.text, **verdict.evidence)
        skipped = facts.step - facts.applied_steps
        self.screen.step(
            facts, self.layers - len(facts.demoted), self.layers, skipped, len(ledger.returned_to)
        )

    def count(self, step: int, applied: int, ledger: RunLedger) -> None:
        """What the outcome says of the run's steps: a resume may have none left to record."""
        self._counts = {
            "applied": applied,
            "skipped": step - applied,
            "rollbacks": len(ledger.returned_to),
        }

    def _tell_slots(self, kept: Kept) -> None:
        """Events about slots, those with a text on the screen too, and the tags that name the worst slots."""
        for event in kept.events:
            write = self.tell if "text" in event else self.event
            write(kept.step, **event)
        if kept.worst:
            self.note("tags", tags=kept.worst)

    def validation(self, step: int, loss: float, accuracy: float | None = None) -> None:
        """A validation after `step` steps: the mean loss, and the share of labels that were hit."""
        hits = {} if accuracy is None else {"val/accuracy": accuracy}
        self.metrics(step, {"val/loss": loss, "Loss/val": loss, **hits})
        if self._precision is None:
            self.screen.validation(step, loss, accuracy)
        else:
            hits = "" if accuracy is None else f", accuracy {accuracy:.1%}"
            self.screen.say(f"validation after step {step}: {loss:.4g}{hits}")

    def failed(self, step: int, error: BaseException) -> None:
        """The run ended by an error."""
        code = error.exit_code if isinstance(error, HarnessError) else ExitCode.FAILED
        reason = scrubbed(f"{type(error).__name__}: {error}")
        self.event(step, "run.failed", text=reason)
        if self.folder is not None:
            self._write_outcome(Outcome("failed", code, reason, step))
        self.note("end", status="failed")

    def _write_outcome(self, outcome: Outcome) -> None:
        """outcome.json with what the state says of the steps; a folder that does not even take that is told."""
        assert self.folder is not None
        self._ended = replace(outcome, reason=scrubbed(outcome.reason), **self._counts)
        try:
            write_outcome(self.folder, self._ended)
        except OSError as error:
            text = f"outcome.json could not be written to {self.folder}: {error}"
            self.screen.event(f"{text}; the run ends with {outcome.exit_code:d}: {outcome.reason}")

    def end(self, outcome: Outcome, plan: Mapping[str, Any], files: tuple[str, ...] = ()) -> None:
        """Outcome, effective precision, plots and report; told to MLflow through the journal.

        plan: of `Plan.as_it_ran`. files: of the run folder, to be kept with it in MLflow.
        """
        if self.folder is None:
            return
        self._write_outcome(outcome)
        try:
            write_plan(self.folder, plan)
        except OSError as error:
            self.screen.event(
                f"plan.json could not be written again, without the precision as it ran: {error}"
            )
        if outcome.status != "stopped":  # which goes on, as if it had never been stopped
            self._last_slots()
        tags = {"precision.effective": plan["effective"], "outcome": outcome.status}
        self.note("run", tags=tags, params={}, data={})
        self.flush()
        if self.config.report or self.config.mlflow:
            self._parquet(outcome.step)
        if self.config.report:
            self._report(outcome.step)
        for name in (*files, "plan.json", "outcome.json"):
            self.note("artifact", path=name)
        self.note("end", status=outcome.status)

    def _last_slots(self) -> None:
        """FP8 figures of a last step that is no multiple of tracking.fp8_every: a short run has some too."""
        kept = self.slots.rest(self.attempt)
        if kept is not None:
            self.journal.metrics(kept.step, kept.figures)
            self._tell_slots(kept)

    def _parquet(self, step: int) -> None:
        """The table of all FP8 figures; without pyarrow, or a disk that takes it, the run ends as well as without."""
        assert self.folder is not None
        assert self.slots.file is not None
        if self.slots.file.lost:
            text = f"{self.slots.file.lost} steps are missing from {PARQUET}: {self.slots.file.trouble}"
            self.tell(step, "fp8.dropped", text, steps=self.slots.file.lost)
        try:
            written = write_parquet(self.folder)
        except (ImportError, OSError, ValueError) as error:
            self.tell(
                step,
                "fp8.no_table",
                f"no {PARQUET}: {error}; try again with harness report {self.folder}",
            )
        else:
            if written is not None:
                self.note("artifact", path=written.name)

    def _report(self, step: int) -> None:
        from harness.report.page import write

        assert self.folder is not None
        try:
            for path in write(self.folder):
                self.note("artifact", path=str(path.relative_to(self.folder)))
        except (
            OSError,
            ValueError,
        ) as error:  # the training is done and saved: a picture must not fail it
            self.event(step, "report.failed", text=str(error))
            self.screen.event(f"no report: {error}; try again with harness report {self.folder}")

    def farewell(self) -> None:
        """Wait for the delivery, within tracking.drain_seconds, and say how the run went."""
        if self.folder is None:
            return
        from harness.report.inspect import summary

        delivered = self._ship.drain(self.config.drain_seconds) if self._ship else None
        self.screen.say(
            summary(self.folder, asdict(self._ended) if self._ended is not None else None)
        )
        if self.journal.dropped:
            self.screen.event(
                f"journal.dropped: the disk refused {self.journal.dropped} rows of {self.folder / JOURNAL} to the end; "
                "training was not affected"
            )
        if delivered is False:
            self.screen.event(
                f"MLflow has not got everything yet; deliver the rest with: harness sync {self.folder}"
            )

    def close(self, error: BaseException | None = None) -> None:
        """End the record of a loop of your own: outcome, report, delivery, summary. Safe to call twice.

        error: what ended the loop, if it did not end as planned.
        """
        self.screen.close()
        if self._precision is not None and not self._closed:
            if isinstance(error, SystemExit) and not error.code:
                error = None
            try:
                self._end_own(self._precision, error)
                self.journal.close()
                self.farewell()
            except (
                OSError,
                ConfigError,
            ) as trouble:  # the training is done: what tells of it must not undo that
                self.screen.event(
                    f"the end of the run could not be written to {self.folder}: {trouble}"
                )
            self._precision.prepared.told = False
        self._closed = self._closed or self._precision is not None
        self.journal.close()
        if self.slots.file is not None:
            self.slots.file.close()
        if self._lock is not None:
            self._lock.release()

    def _end_own(self, precision: Precision, error: BaseException | None) -> None:
        """Outcome and report of a loop that is not ours."""
        ready = precision.prepared
        if (
            error is None
        ):  # the loop is over: what is still on its way gets its row, though nobody judges it
            for facts in (each.facts() for each in ready.pending):
                if (ready.state.ledger.attempt, facts.step) != self._last:
                    self.record(facts, ready.state.ledger)
        _, last = self._last
        if error is None or isinstance(error, HaltedError):
            status, code = ("done", ExitCode.DONE) if error is None else ("halted", ExitCode.HALTED)
            reason = f"{last} steps" if error is None else str(error)
            self.end(Outcome(status, code, reason, last), precision.plan.as_it_ran(ready.backend))
        else:
            self.failed(last, error)

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(error)
