"""`harness.Telemetry`: the record of a run, in our loop or in your own: journal, screen, MLflow and report.

The journal (journal.jsonl) is the truth. Everything else is made from it: a process of its own delivers its rows to
MLflow, so that no step waits for a server, and the report is drawn from it at the end.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from harness.capability.probe import probe
from harness.core.collectives import world_rank, world_size
from harness.core.config import FallbackConfig, TrackingConfig, TrainConfig
from harness.core.errors import (
    CheckpointError,
    ConfigError,
    ExitCode,
    HaltedError,
    HarnessError,
    MachineError,
    MisuseError,
    Problem,
    number_of,
)
from harness.core.facts import ROLES, Outcome, StepFacts
from harness.core.metrics import row
from harness.core.schema import validate
from harness.core.secrets import scrub_all, scrubbed
from harness.core.state import RunLedger
from harness.profiling.recorder import Profiled, StepProfiler, profiler_of
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


_HERE = "Telemetry.for_precision"


def undeliverable(config: TrackingConfig, off: str) -> list[Problem]:
    """Why rows cannot be delivered to MLflow from here; empty if they can, or if MLflow is not wanted.

    off: how the user switches MLflow off, for the fix.
    """
    mlflow = probe().libraries["mlflow"]
    if config.mlflow and (why := misplaced()):
        fix = f"start in another folder, or set MLFLOW_TRACKING_URI, or {off}"
        return [Problem("MLflow's database would not be in this folder", str(Path.cwd()), why, fix)]

    if not config.mlflow or mlflow.ok:
        return []
    install = "pip install -e '.[mlflow]' in the project's folder"
    fix = f"{install}, or {off}: journal.jsonl has every series"
    return [Problem("rows cannot be delivered to MLflow", "tracking.mlflow", mlflow.reason, fix)]


def _claimed(folder: Path, plan: Mapping[str, Any]) -> RunLock:
    """Claim the folder for a loop of the user's own, and write the plan into it; returns the lock.

    Raises CheckpointError or ConfigError, as `Telemetry.for_precision` does. The lock is released then.
    """
    lock = RunLock(folder)
    try:
        if (folder / "config.yaml").exists():
            what = "is a run of harness train, whose journal has one writer"
            fix = "give your loop a folder of its own"
            raise CheckpointError(Problem(what, str(folder), fix=fix))
        lock.acquire()
        write_plan(folder, plan)
        forget_outcome(folder)
    except (OSError, ValueError, CheckpointError) as error:
        lock.release()

        # RunLock's own message speaks of `harness train`. Take its cause, and say it in words for a loop of one's own.
        cause = error.__cause__ if isinstance(error, CheckpointError) else error
        if cause is None:
            raise
        if isinstance(cause, BlockingIOError):
            what = "another Telemetry writes this run"
            fix = "close the Telemetry that writes there, or give each loop a folder of its own"
            raise CheckpointError(Problem(what, str(folder), fix=fix)) from error
        what = f"the folder cannot be written: {cause}"
        fix = "check that the run folder is writable"
        raise ConfigError(Problem(what, str(folder), fix=fix)) from error
    return lock


class Telemetry:
    """Journal, screen, MLflow and report of one run; implements `core.protocols.Tracker`.

        with harness.Telemetry.for_precision("runs/mine", precision, steps=1000) as telemetry:
            guard = harness.Guard.for_precision(precision, optimizer, telemetry=telemetry)
            ...                                              # the loop, with guard.end_step() in every step

    `harness inspect`, `explain`, `report` and `sync` read the folder. Only rank 0 writes. Without a folder nothing is
    kept, and events are only printed.

    folder: of the run; None on ranks other than 0, and if nothing is kept.
    journal: where rows are written.
    screen: where lines for people are printed.
    config: the section `tracking` of a run's config.
    layers: how many FP8 layers the plan has.
    profiler: profiles some of the steps; None: none are profiled here.
    halt: what the guard of a loop of the user's own raised after the last step. A loop that catches it, and does no
        further step, has been halted all the same.
    """

    def __init__(
        self,
        folder: Path | None,
        journal: Journal,
        screen: Console,
        config: TrackingConfig,
        layers: int = 0,
    ) -> None:
        self.folder = folder
        self.journal = journal
        self.screen = screen
        self.config = config
        self.layers = layers
        self.profiler: StepProfiler | None = None
        self.halt: HaltedError | None = None
        self.slots = SlotSeries(config, folder)
        self._ship: shipper.ShipperHandle | None = None
        # The Precision of a loop of the user's own; None under `harness train`.
        self._precision: Precision | None = None
        self._lock: RunLock | None = None
        # /dev/null, to which ranks other than 0 print.
        self._nowhere: IO[str] | None = None
        # Attempt and step of the last row.
        self._last = (0, 0)
        # Applied and skipped updates, and rollbacks.
        self._counts: dict[str, int] = {}
        self._ended: Outcome | None = None
        # Added to the ledger's attempt to give the journal's; None until the first row. See the setter of `attempt`.
        self._attempt_offset: int | None = None
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
        profile_steps: tuple[int, int] | None = None,
        profile_ranks: Any = 0,
        **settings: Any,
    ) -> Telemetry:
        """The telemetry of a loop of your own. Call it after `prepare`. A folder that a run began in is continued.

        folder: for this run only, such as "runs/mine"; None: nothing is kept.
        precision: the one that prepared the model.
        steps: how many steps there will be, for the lines on the screen; None: only events are printed.
        params: parameters of the MLflow run, by name.
        tags: tags of the MLflow run, by name.
        profile_steps, profile_ranks: as `train.profile_steps` and `train.profile_ranks` of a run's config. Every step
          has to be recorded, by a guard or by `record`.
        settings: keys of the section `tracking` of a run's config: mlflow, experiment, fp8_every (steps), fp8_series,
          fp8_slots, report, drain_seconds.

        Raises:
          ConfigError: a setting is unknown or out of range, or the folder cannot be written.
          CheckpointError: the folder is one of `harness train`, or another Telemetry writes into it.
          MisuseError: the model has a guard already.
          MachineError: MLflow is wanted, and its library is missing.
        """
        config = validate(TrackingConfig, settings, _HERE)
        profiled = {"profile_steps": profile_steps, "profile_ranks": profile_ranks}
        train = validate(TrainConfig, profiled, _HERE)
        if folder is None and train.profile_steps is not None:
            fix = "give the Telemetry a folder"
            raise ConfigError(
                Problem("a profile has no place to go", f"{_HERE}: profile_steps", fix=fix)
            )
        if folder is not None and precision.prepared.guarded:
            what = "the model's guard has another Telemetry already"
            fix = "make the Telemetry first, then Guard.for_precision(..., telemetry=telemetry)"
            raise MisuseError(Problem(what, _HERE, fix=fix))

        # Only rank 0 prints and writes. Without a folder stdout belongs to the user's loop.
        lead = world_rank() == 0
        visible = sys.stderr if folder is None else sys.stdout
        nowhere = None if lead else open(os.devnull, "w")  # noqa: SIM115
        screen = Console(steps, stream=nowhere or visible)
        path = None
        if folder is not None and lead:
            path = Path(folder)
        if path is not None and (problems := undeliverable(config, "mlflow=False")):
            raise MachineError(problems)

        # The folder, and the journal in it, which a second start goes on with.
        plan = precision.plan
        lock: RunLock | None = None
        if path is None:
            journal = Journal(Path(os.devnull), resume_step=None)
        else:
            lock = _claimed(path, plan.as_dict())
            resumed = (path / JOURNAL).exists()
            journal = Journal(path / JOURNAL, resume_step=0 if resumed else None)
        telemetry = cls(path, journal, screen, config, len(plan.fp8_layers()))
        telemetry._precision = precision
        telemetry._lock = lock
        telemetry._nowhere = nowhere
        telemetry.watch(precision.recipe.fallback)
        if folder is not None:
            # From now on a guard without this telemetry is refused.
            precision.prepared.has_telemetry = True

        # What the run is, for MLflow.
        own_tags = {
            "precision.requested": plan.requested,
            "precision.resolved": plan.resolved,
            "tier": plan.tier,
            "ranks": str(world_size()),
            "recipe.sha256": plan.recipe_sha256,
            "loop": OWN_LOOP,
            "experiment": config.experiment,
        }
        own_params = {} if steps is None else {"steps": steps}
        telemetry.begin({**own_tags, **(tags or {})}, {**(params or {}), **own_params})
        telemetry.ship()
        telemetry.profiler = profiler_of(
            None if folder is None else Path(folder),
            train.profile_steps,
            precision.prepared.device,
            world_rank(),
            train.profile_ranks,
        )
        telemetry.step_begins(precision.prepared.state.step + 1)
        return telemetry

    def is_of(self, precision: Precision) -> bool:
        """Whether this is the open telemetry of the model that `precision` prepared."""
        return self._precision is precision and not self._closed

    @property
    def attempt(self) -> int:
        """The number of the attempt, which every row holds. A rollback begins the next one."""
        return self.journal.attempt

    @attempt.setter
    def attempt(self, number: int) -> None:
        """Set the attempt of the rows that follow.

        Readers take rows of a lower attempt for discarded ones, so new rows must not have a lower one than the rows in
        the folder. But a loop of the user's own can start from a state before a rollback, or from the beginning again.
        All of its attempts are then shifted above those in the folder, by an amount that is decided at the first row.
        """
        if self._attempt_offset is None:
            own = self._precision
            self._attempt_offset = 0
            if own is not None:
                existing = self.journal.existing_attempt
                from_the_beginning = bool(existing) and not own.prepared.loaded
                if number < existing or from_the_beginning:
                    self._attempt_offset = existing + 1 - number
        self.journal.attempt = number + self._attempt_offset

    def watch(self, limits: FallbackConfig) -> None:
        """Set the limits beyond which a slot gets series of its own, in a model with too many slots for all."""
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
        """Write the row that says what the run is.

        tags, params: of the MLflow run.
        data: what it trains on.
        """
        where: dict[str, str] = {}
        if self.folder is not None:
            where = {"host": socket.gethostname(), "folder": str(self.folder.absolute())}
        self.note("run", tags=dict(tags), params=dict(params), data=dict(data or {}), where=where)

    def ship(self) -> None:
        """Start the process that delivers the journal to MLflow. Call it after `begin`."""
        if self.folder is not None and self.config.mlflow:
            self._ship = shipper.start(
                self.folder, self.config.experiment, self.config.system_seconds
            )
            self.screen.say(self._ship.announcement)
        elif self.folder is not None:
            self.screen.say(f"figures go only to {self.folder / JOURNAL}: MLflow is switched off")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row of metrics."""
        self.journal.metrics(step, metrics)

    def event(self, step: int, code: str, **fields: Any) -> None:
        """Write an event to the journal, without printing it. code: what happened, such as "guard.rollback"."""
        self.journal.event(step, code, **scrub_all(fields))

    def tell(self, step: int, code: str, text: str, **fields: Any) -> None:
        """Write an event, and print it on the screen."""
        self.event(step, code, text=text, **fields)
        self.screen.event(scrubbed(f"step {step}: {code}: {text}"))

    def note(self, kind: str, **fields: Any) -> None:
        """Write a row of another kind: see `Journal.note`."""
        self.journal.note(kind, **scrub_all(fields))

    def flush(self) -> None:
        """Return when everything so far is on disk."""
        self.journal.flush()
        if self.slots.file is not None:
            self.slots.file.flush()

    def record(
        self, facts: StepFacts, ledger: RunLedger | None = None, judged: Judgement | None = None
    ) -> None:
        """Write down one step: its row, the events about it, and its line on the screen.

        A guard does this. In a loop without one, call `telemetry.record(precision.facts())` after every step. That
        waits for the figures of the step.

        facts: the figures of the step.
        ledger: of the run; None: that of the prepared model.
        judged: what the guard decided; None: nothing was judged. The step has then just ended.

        Raises MisuseError after `close`.
        """
        if self._closed:
            what = "the telemetry was closed: this step would not be kept"
            fix = "keep the whole loop inside of `with Telemetry.for_precision(...)`"
            raise MisuseError(Problem(what, "record()", fix=fix))
        # A guard says itself when a step ends: it records the one before.
        without_guard = self._precision is not None and judged is None
        if without_guard:
            self.step_ends(facts.step)
        if ledger is None and self._precision is not None:
            ledger = self._precision.prepared.state.ledger
        if ledger is None:
            ledger = RunLedger()
        if self._precision is not None:
            self.attempt = ledger.attempt
        else:
            # Only `harness train` has these counts in its outcome.
            self.count(facts.step, facts.applied_steps, ledger)
        self._last = (ledger.attempt, facts.step)

        # One row: the figures of the step, and those FP8 figures that have series.
        kept = self.slots.take(self.attempt, facts)
        self.journal.metrics(facts.step, row(facts, ledger) | kept.figures)
        self._log_slots(kept)

        if judged is not None:
            for verdict in judged.to_log:
                self.tell(facts.step, verdict.code, verdict.text, **verdict.evidence)

        # Counted by updates that were applied, as the summary at the end does.
        skipped = facts.step - facts.applied_steps
        in_fp8 = self.layers - len(facts.demoted)
        rollbacks = len(ledger.returned_to)
        self.screen.step(facts, in_fp8, self.layers, skipped, rollbacks)
        if without_guard:
            self.step_begins(facts.step + 1)

    def step_begins(self, step: int) -> None:
        """`step` is about to begin: a profile may begin with it, or end before it."""
        if self.profiler is not None:
            self._log_profile(step - 1, self.profiler.begins(step))

    def step_ends(self, step: int) -> None:
        """`step` has ended, and with it perhaps a profile."""
        if self.profiler is not None:
            self._log_profile(step, self.profiler.ends(step))

    def close_profile(self, step: int) -> None:
        """End a profile that has begun: no step follows `step`."""
        if self.profiler is not None:
            self._log_profile(step, self.profiler.close())

    def _log_profile(self, step: int, made: Profiled | None) -> None:
        """Write what became of a profile. made: None: nothing ended."""
        if made is None:
            return
        self.tell(step, "profile.written" if made.files else "profile.failed", made.text)
        for path in made.files:
            self.note("artifact", path=path)

    def count(self, step: int, applied: int, ledger: RunLedger) -> None:
        """Set the counts that go into the outcome of `harness train`. A resume needs this if no step is left to record.

        step: done so far.
        applied: updates that were applied so far.
        """
        self._counts = {
            "applied": applied,
            "skipped": step - applied,
            "rollbacks": len(ledger.returned_to),
        }

    def _log_slots(self, kept: Kept) -> None:
        """Write events about slots, and the tags that name the worst ones. Events with a text are printed as well."""
        for event in kept.events:
            write = self.tell if "text" in event else self.event
            write(kept.step, **event)
        if kept.worst:
            self.note("tags", tags=kept.worst)

    def validation(self, step: int, loss: float, accuracy: float | None = None) -> None:
        """Write a validation after `step` steps: the mean loss, and the share of labels that were right (0 to 1)."""
        hits = {} if accuracy is None else {"val/accuracy": accuracy}
        # MLflow sorts its charts by name: under the second name the loss comes first, beside Loss/train.
        self.metrics(step, {"val/loss": loss, "Loss/val": loss, **hits})
        if self._precision is None:
            self.screen.validation(step, loss, accuracy)
        else:
            text = f"validation after step {step}: {loss:.4g}"
            if accuracy is not None:
                text += f", accuracy {accuracy:.1%}"
            self.screen.say(text)

    def failed(self, step: int, error: BaseException) -> None:
        """Write that `error` ended the run after `step`."""
        code = error.exit_code if isinstance(error, HarnessError) else ExitCode.FAILED
        reason = scrubbed(f"{type(error).__name__}: {error}")
        self.event(step, "run.failed", text=reason)
        if self.folder is not None:
            self._write_outcome(Outcome("failed", code, reason, step))
        self.note("end", status="failed")

    def _write_outcome(self, outcome: Outcome) -> None:
        """Write outcome.json, with the counts of steps under `harness train`. If the disk refuses it, print it."""
        assert self.folder is not None
        self._ended = replace(outcome, reason=scrubbed(outcome.reason), **self._counts)
        try:
            write_outcome(self.folder, self._ended)
        except OSError as error:
            text = f"outcome.json could not be written to {self.folder}: {error}"
            self.screen.event(f"{text}; the run ends with {outcome.exit_code:d}: {outcome.reason}")

    def end(
        self,
        outcome: Outcome,
        plan: Mapping[str, Any],
        files: tuple[str, ...] = (),
    ) -> None:
        """Write what ends a run: outcome, effective precision, table of FP8 figures and report.

        MLflow gets them through the journal.

        outcome: how the run ended.
        plan: of `Plan.as_it_ran`.
        files: names in the run folder that MLflow keeps as artifacts.
        """
        if self.folder is None:
            return
        self._write_outcome(outcome)
        try:
            write_plan(self.folder, plan)
        except OSError as error:
            text = (
                f"plan.json could not be written again: it lacks the precision as it ran: {error}"
            )
            self.screen.event(text)

        # A stopped run is resumed later. Its journal must equal that of a run that never stopped: no extra last row.
        if outcome.status != "stopped":
            self._last_slots()
        tags = {"precision.effective": plan["effective"], "outcome": outcome.status}
        self.note("run", tags=tags, params={}, data={})
        self.flush()

        # These read the journal, and come after its rows. Failures are reported and change nothing.
        if self.config.report or self.config.mlflow:
            self._parquet(outcome.step)
        if self.config.report:
            self._report(outcome.step)
        for name in (*files, "plan.json", "outcome.json"):
            self.note("artifact", path=name)
        self.note("end", status=outcome.status)

    def _last_slots(self) -> None:
        """Write the FP8 figures of the last step, if tracking.fp8_every left it out: a short run has some, too."""
        kept = self.slots.rest(self.attempt)
        if kept is not None:
            self.journal.metrics(kept.step, kept.figures)
            self._log_slots(kept)

    def _parquet(self, step: int) -> None:
        """Write the table of all FP8 figures. The run does not need it: pyarrow may be missing, or the disk full."""
        assert self.folder is not None
        assert self.slots.file is not None
        if self.slots.file.lost:
            text = f"{self.slots.file.lost} steps are missing from {PARQUET}: {self.slots.file.trouble}"
            self.tell(step, "fp8.dropped", text, steps=self.slots.file.lost)
        try:
            written = write_parquet(self.folder)
        except (ImportError, OSError, ValueError) as error:
            text = f"no {PARQUET}: {error}; try again with harness report {self.folder}"
            self.tell(step, "fp8.no_table", text)
        else:
            if written is not None:
                self.note("artifact", path=written.name)

    def _report(self, step: int) -> None:
        """Draw the report. The training is done and saved: a picture must not fail it."""
        from harness.report.page import write

        assert self.folder is not None
        try:
            for path in write(self.folder):
                self.note("artifact", path=str(path.relative_to(self.folder)))
        except (OSError, ValueError) as error:
            self.event(step, "report.failed", text=str(error))
            self.screen.event(f"no report: {error}; try again with harness report {self.folder}")

    def farewell(self) -> None:
        """Wait for the delivery to MLflow, for at most tracking.drain_seconds, and print the summary of the run."""
        if self.folder is None:
            return
        from harness.report.inspect import summary

        # None: MLflow is switched off, and nothing is missing from it.
        delivered: bool | None = None
        if self._ship is not None:
            delivered = self._ship.drain(self.config.drain_seconds)
        ended = None if self._ended is None else asdict(self._ended)
        self.screen.say(summary(self.folder, ended))

        # What is missing from the record comes last, so that it is seen.
        if self.journal.dropped:
            rows = f"{self.journal.dropped} rows of {self.folder / JOURNAL}"
            text = f"journal.dropped: the disk refused {rows} to the end; training was not affected"
            self.screen.event(text)
        if delivered is False:
            command = f"harness sync {shlex.quote(str(self.folder))}"
            text = f"MLflow has not got everything yet; deliver the rest with: {command}"
            self.screen.event(text)

    def close(self, error: BaseException | None = None) -> None:
        """Close the files. In a loop of your own this first writes the outcome, and the report unless `error` ended it.

        Safe to call twice.

        error: what ended the loop; None: it ended as planned.
        """
        self.screen.close()
        if self._precision is not None and not self._closed:
            # sys.exit(0) ends a loop as planned.
            if isinstance(error, SystemExit) and not error.code:
                error = None
            try:
                self._end_own(self._precision, error or self.halt)
                self.journal.close()
                self.farewell()
            except (OSError, ConfigError) as trouble:
                # The training is done: a record that cannot be written must not fail it.
                text = f"the end of the run could not be written to {self.folder}: {trouble}"
                self.screen.event(text)
            self._precision.prepared.has_telemetry = False

        # Only a loop of the user's own can record after `close`, and is refused then.
        self._closed = self._closed or self._precision is not None
        self.journal.close()
        if self.slots.file is not None:
            self.slots.file.close()
        if self._lock is not None:
            self._lock.release()
        if self._nowhere is not None:
            self._nowhere.close()

    def _end_own(self, precision: Precision, error: BaseException | None) -> None:
        """Write the outcome of a loop of the user's own, and the report if it ended as planned or was halted.

        error: what ended it.
        """
        # The last step gets its row, though no guard will judge it.
        ready = precision.prepared
        self.close_profile(ready.state.step)
        self.profiler = None
        if error is None:
            for each in ready.pending:
                facts = each.facts()
                if (ready.state.ledger.attempt, facts.step) != self._last:
                    self.record(facts, ready.state.ledger)

        _, last = self._last
        if error is None:
            outcome = Outcome("done", ExitCode.DONE, number_of(last, "step"), last)
        elif isinstance(error, HaltedError):
            outcome = Outcome("halted", ExitCode.HALTED, str(error), last)
        else:
            self.failed(last, error)
            return
        self.end(outcome, precision.plan.as_it_ran(ready.backend))

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(error)
