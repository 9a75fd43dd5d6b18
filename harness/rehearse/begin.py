"""Where a rehearsal begins: initial weights, a checkpoint, or just before the run broke."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.checkpoint.manifest import read_marks
from harness.checkpoint.policy import load_ledger
from harness.checkpoint.store import Store
from harness.core.config import RunConfig
from harness.core.errors import CheckpointError, ConfigError, Problem, number_of, some
from harness.core.state import RunLedger
from harness.replay.flight import Branches, Setting
from harness.tracking.history import RunHistory

_ENDINGS = ("guard.rollback", "guard.halt")
_SHOWN = 8


@dataclass(frozen=True)
class Beginning:
    """The state that every branch begins with.

    config: of the run, as it was at that time.
    ledger: of the run at that time; a branch changes a copy.
    ranks: of the run.
    step: after which the branches begin; 0: initial weights, which the seed gives.
    store: holds the checkpoint of `step`; None for initial weights.
    steps: how many steps the branches do.
    incident: the step at which the run went bad; None: it did not, or that is not known.
    attempt: of the run, for its journal.
    history: the run's attempts, with their checkpoints and configs; None for a config.
    """

    config: RunConfig
    ledger: RunLedger
    ranks: int
    step: int
    store: Store | None
    steps: int
    incident: int | None = None
    attempt: int = 1
    history: Branches | None = None

    @property
    def text(self) -> str:
        """In words."""
        if self.store is None:
            return "the initial weights"
        return f"the checkpoint of step {self.step}"


def of_config(config: RunConfig, steps: int) -> Beginning:
    """Initial weights of a run that does not exist yet."""
    steps = min(steps, config.train.steps)
    return Beginning(config, RunLedger(), 1, 0, None, steps)


def of_run(
    folder: Path, config: RunConfig, steps: int, from_step: int | None, before: int | None
) -> Beginning:
    """The beginning in the run of `folder`.

    from_step: the checkpoint to begin with; 0: initial weights.
    before: a step at which the run went bad. The newest good checkpoint before it is taken.

    With neither it is the step at which the run first rolled back or halted. If it did neither, the newest checkpoint
    that leaves `steps` steps to the run's end is taken, or else the initial weights.

    Raises ConfigError for a step that the run has not done, and if `steps` would not get to the incident.
    Raises CheckpointError if there is no such checkpoint, or none is left.
    """
    history = Branches(folder)
    if from_step is not None:
        return _from_step(history, config, steps, from_step)
    incident = before if before is not None else _first_incident(history)
    if incident is not None:
        return _before(history, config, steps, incident)

    # Nothing happened. Of a schedule that has ended nothing can be learnt, so steps must be left before its end.
    store = Store(history.folder / "checkpoints", readonly=True)
    for step in reversed(store.steps()):
        last = _as_done(history, config, step).config.train.steps
        if step + steps <= last and store.is_whole(step):
            return _at(history, config, steps, step, store)
    return _initial(history, config, steps)


def _first_incident(history: Branches) -> int | None:
    """The first step at which the guard rolled back or halted, of those whose attempt can still be run again."""
    for event in RunHistory.read(history.folder).events:
        if event["code"] not in _ENDINGS:
            continue
        # A step that a later attempt did again, and whose repro bundle is gone, would be found well.
        step = int(event["step"])
        with suppress(ConfigError):
            if history.attempt_of(step) == event["attempt"]:
                return step
    return None


def _from_step(history: Branches, config: RunConfig, steps: int, step: int) -> Beginning:
    if step == 0:
        return _initial(history, config, steps)
    store = Store(history.folder / "checkpoints", readonly=True)
    there = store.steps()
    if step not in there:
        fix = "the run has no checkpoint"
        if there:
            fix = f"there are steps {some(there, _SHOWN)}"
        what = f"there is no checkpoint of step {step}"
        raise CheckpointError(Problem(what, str(store.root), fix=fix))
    if problems := store.verify(step):
        raise CheckpointError(problems)
    if step >= _as_done(history, config, step).config.train.steps:
        what = f"step {step} is the run's last one: its schedule has ended"
        fix = "give an earlier --from-step"
        raise ConfigError(Problem(what, "--from-step", fix=fix))
    return _at(history, config, steps, step, store)


def _initial(history: Branches, config: RunConfig, steps: int) -> Beginning:
    """Begin with the initial weights, on the run's present branch. Raises CheckpointError as `_require_initial`."""
    _require_initial(history)
    done = _as_done(history, config, 0)
    ledger = _unspent(_ledger(history))
    steps = min(steps, done.config.train.steps)
    return Beginning(
        done.config, ledger, done.ranks, 0, None, steps, attempt=ledger.attempt, history=history
    )


def _at(history: Branches, config: RunConfig, steps: int, step: int, store: Store) -> Beginning:
    """Begin with the checkpoint of `step`, on the run's present branch."""
    done = _as_done(history, config, step)
    ledger = _ledger(history)
    steps = min(steps, done.config.train.steps - step)
    return Beginning(
        done.config,
        ledger,
        done.ranks,
        step,
        store,
        steps,
        attempt=ledger.attempt,
        history=history,
    )


def _as_done(history: Branches, config: RunConfig, step: int) -> Setting:
    """How the run did the step after `step`, the last time that it did it.

    A resume may have changed the config since: then that step had another one than `config`, the present one. A step
    that was not done yet would be done with the present config, on as many ranks as the step before it.
    """
    attempt = history.last_attempt_of(step + 1)
    if attempt is not None:
        return history.setting_of(step + 1, config, attempt)
    attempt = history.last_attempt_of(step)
    ranks = 1
    if attempt is not None:
        ranks, _ = history.ranks_of(step, attempt)
    return Setting(config, ranks)


def _before(history: Branches, config: RunConfig, steps: int, incident: int) -> Beginning:
    """Begin with the newest good checkpoint before `incident`; else the newest that verifies; else initial weights."""
    # Raises an error for a step that the run does not have.
    attempt = history.attempt_of(incident)
    config, ranks = history.setting_of(incident, config)
    step = 0
    store = None
    for base, holder in _candidates(history, incident):
        if holder.is_whole(base):
            step, store = base, holder
            break
    if store is None:
        _require_initial(history)

    # A rehearsal that ends before the incident would find everything well.
    least = incident - step
    if steps < least:
        ends = "ends" if steps == 1 else "end"
        what = f"{number_of(steps, 'step')} from step {step} on {ends} before step {incident}, where the run went bad"
        raise ConfigError(Problem(what, "--steps", fix=f"give at least {least}"))
    # No further than to the run's planned end, but at least to the incident.
    steps = min(steps, max(least, config.train.steps - step))
    ledger = copy.deepcopy(history.ledger_of(incident))
    if store is None:
        ledger = _unspent(ledger)
    return Beginning(
        config, ledger, ranks, step, store, steps, incident, attempt=attempt, history=history
    )


def _candidates(history: Branches, incident: int) -> Iterator[tuple[int, Store]]:
    """Checkpoints before `incident` on its branch: good ones first, as the others may hold the fault already."""
    found = list(history.bases(incident))
    good = set(read_marks(history.folder / "checkpoints"))
    good_ones = [each for each in found if each[0] in good]
    yield from sorted(good_ones, key=_newest_first)
    yield from (each for each in found if each[0] not in good)


def _newest_first(candidate: tuple[int, Store]) -> int:
    return -candidate[0]


def _require_initial(history: Branches) -> None:
    """Raises CheckpointError for a run whose initial state was another run's checkpoint: the seed does not give it."""
    if history.started_from is None:
        return
    what = "no checkpoint to begin with is left, and the run began from another's"
    fix = "give --from-step with a step that it has a checkpoint of, or restore its checkpoints"
    raise CheckpointError(Problem(what, str(history.folder), fix=fix))


def _ledger(history: Branches) -> RunLedger:
    return copy.deepcopy(load_ledger(history.folder))


def _unspent(ledger: RunLedger) -> RunLedger:
    """`ledger` for the steps from the first one on, which spend their budgets again. A checkpoint has its own."""
    return replace(ledger, skips=0, switches=0, lowered="", recent_skips=[])
