"""Runs one of two compared runs again, step by step, from a checkpoint or from its start."""

from __future__ import annotations

from harness.checkpoint.store import Store
from harness.core.config import RunConfig
from harness.core.errors import CheckpointError, Problem
from harness.core.protocols import Meta, Tensors
from harness.replay.flight import Branches, Setting
from harness.replay.investigate import Builder, Rerun
from harness.replay.kept import Kept, keep, restore
from harness.replay.step_tensors import Place, StepTensors
from harness.report.divergence import Split, compare_rerun
from harness.tracking.history import RunHistory


class Replayed:
    """A run, and its re-run in this process.

    letter: A or B, for texts.
    history: the run's journal; branches: its attempts and checkpoints.
    last: the last step that may be run again. Where a rollback made several attempts, the one that ran this step is
        re-run.
    config: the run's present one, for one process.
    build: makes the run in its initial state.
    difference: the first figure in which the re-run's journal differs from the run's; None if there is none. Its `a` is
        the run's value, its `b` the re-run's.
    """

    def __init__(
        self,
        letter: str,
        history: RunHistory,
        branches: Branches,
        last: int,
        config: RunConfig,
        build: Builder,
    ) -> None:
        self.letter = letter
        self.history = history
        self.branches = branches
        self.last = last
        self.difference: Split | None = None
        self._config = config
        self._build = build
        # The re-run, and the setting with which it was built.
        self._rerun: Rerun | None = None
        self._setting: Setting | None = None

    @property
    def name(self) -> str:
        """The letter and the folder's name, for texts: `A (my-run)`."""
        return f"{self.letter} ({self.branches.folder.name})"

    @property
    def starts_afresh(self) -> bool:
        """Whether seed and config give the run's initial state."""
        return self.branches.started_from is None

    @property
    def rerun(self) -> Rerun:
        """The re-run. Only after `start` or `resume`."""
        assert self._rerun is not None
        return self._rerun

    @property
    def steps_done(self) -> int:
        """Number of the last step that the present state contains."""
        return self.rerun.run.state.step

    @property
    def compiled(self) -> bool:
        """Whether the run computes in compiled code, which hooks do not see into."""
        return self.rerun.compiled

    def saved_steps(self, last: int) -> set[int]:
        """Steps up to `last` after which there is a checkpoint. The checkpoints are not verified."""
        return {step for step, _ in self.branches.checkpoints(self.last) if step <= last}

    def saved(self, step: int, wanted: Place | None = None) -> StepTensors:
        """The state in the checkpoint of `step`. Raises CheckpointError if no copy of it verifies."""
        found = StepTensors(wanted)
        found.add_state(*self._read(step), after_update=False)
        return found

    def _stores(self, step: int) -> list[Store]:
        """The stores with a checkpoint of `step`. Raises CheckpointError if there is none, or no longer."""
        found = [store for each, store in self.branches.checkpoints(self.last) if each == step]
        if not found:
            where = str(self.branches.folder)
            fix = "call it again: a run that still trains deletes its older checkpoints"
            raise CheckpointError(Problem(f"the checkpoint of step {step} is gone", where, fix=fix))
        return found

    def _read(self, step: int) -> tuple[Tensors, Meta]:
        """The checkpoint of `step` from the first store whose copy verifies. Raises CheckpointError if none does."""
        problems: list[Problem] = []
        for store in self._stores(step):
            try:
                return store.load(step)
            except CheckpointError as error:
                problems += error.problems
        raise CheckpointError(problems)

    def start(self, base: int) -> None:
        """Go to the state after step `base`; 0: the initial state. Raises CheckpointError."""
        self._new(base + 1)
        if not base:
            return

        # Several stores may have the checkpoint: the run's own, and the bundles of its bad steps.
        problems: list[Problem] = []
        for store in self._stores(base):
            try:
                self.rerun.start(base, store)
                return
            except CheckpointError as error:
                problems += error.problems
        raise CheckpointError(problems)

    def resume(self, kept: Kept) -> None:
        """Go to a state that `replay.kept.keep` has copied."""
        self._new(int(kept.meta["step"]) + 1)
        self.rerun.resume(kept)

    def close(self) -> None:
        """Release the re-run, and compare the figures of its steps with those of the run (`difference`)."""
        if self._rerun is None:
            return

        # The re-run has written a journal and a file of FP8 figures, as the run has, into a folder of its own.
        folder = self._rerun.run.folder
        self._rerun.close()
        self._rerun = None

        # A step may have run several times. If the re-run follows the last attempt, its steps are those that count in
        # the end; else they are compared with what ran first.
        is_last_attempt = self.branches.attempt_of(self.last) == self.branches.ledger.attempt
        rerun = RunHistory.read(folder)
        compared = compare_rerun(self.history, rerun, counted=is_last_attempt)
        if compared.splits:
            first = compared.splits[0]
            if self.difference is None or first.step < self.difference.step:
                self.difference = first

    def state(self, wanted: Place | None = None) -> StepTensors:
        """The present state, with which the next step begins."""
        found = StepTensors(wanted)
        found.add_state(*self.rerun.run.state.state_dict(), after_update=False)
        return found

    def step(self) -> StepTensors:
        """Run the next step, without hooks."""
        self._follow_changes()
        found = StepTensors()
        facts = self.rerun.noted(found, every=False)
        self.rerun.judge(facts)
        return found

    def observed(self, kept: Kept, wanted: Place | None = None) -> StepTensors:
        """Run the step after `kept` with hooks on every module, then restore `kept`."""
        self._follow_changes()
        found = StepTensors(wanted)
        self.rerun.noted(found, every=True)
        restore(self.rerun.run, kept)
        return found

    def _new(self, step: int) -> None:
        """Build the run with the set-up that it had in `step`, in its initial state."""
        self.close()
        config, ranks = self._setting = self.branches.setting_of(step, self._config)
        ledger = self.branches.ledger_of(self.last)
        self._rerun = self._build(config, config.recipe, ledger, ranks)

    def _follow_changes(self) -> None:
        """Build the re-run anew if a resume of the run changed config or ranks before the next step."""
        step = self.steps_done + 1
        if self.branches.setting_of(step, self._config) == self._setting:
            return
        kept = keep(self.rerun.run)
        self.resume(kept)
