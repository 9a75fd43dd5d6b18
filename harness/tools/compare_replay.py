"""`harness compare --replay`: two runs, run again until the first tensor that differs; and what that means."""

from __future__ import annotations

import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.errors import ConfigError, Problem
from harness.core.facts import jsonable
from harness.core.screen import say
from harness.report import short, typed
from harness.report.divergence import Compared
from harness.tools.replay import rebuild, refuse_foreign_scale
from harness.tools.restored import check_recipe
from harness.tracking.history import RunHistory

if TYPE_CHECKING:
    from harness.core.config import RunConfig
    from harness.core.state import RunLedger
    from harness.replay.flight import Branches
    from harness.replay.investigate import Rerun
    from harness.replay.parting import Parted, Parting
    from harness.replay.replayed import Replayed

_LETTERS = ("A", "B")
_MOST_NAMED = 8
# What the first difference says, by the phase of the step that computes it.
_MEANINGS = {
    "state": "the states before this step differ",
    "data": "the states agree, and the samples do not: the data, or their order",
    "forward": "states and samples agree: this is the first tensor computed of them that does not",
    "backward": "the forward pass agrees: this is the first gradient that does not",
    "update": "the gradients agree: this is the first thing in the update that does not",
    "fp8": "the update agrees: the FP8 scales roll differently, as margin or history of the recipe say",
}
# The same of an output, where weights that are not trained and that no checkpoint holds differ.
_FROZEN = "samples and trained weights agree, frozen weights do not: this is the first tensor that shows it"


@dataclass(frozen=True)
class Replay:
    """What running both runs again showed.

    compared: their recorded figures.
    parting: the search's result.
    elsewhere: by letter, what the run was computed with that is not here.
    """

    compared: Compared
    parting: Parting
    elsewhere: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])

    @property
    def meaning(self) -> str:
        """What follows, in words."""
        parting = self.parting
        if parting.strangers:
            return self._not_reproduced()
        if parting.changed:
            whose = " and ".join(parting.changed)
            return (
                f"the steps of both runs give the same bits, and the checkpoint of step {parting.last} of {whose} does "
                "not have them: it was changed after it was computed, by a disk, memory, or somebody"
            )
        if parting.parted is not None:
            return self._first_tensor(parting.parted)
        if not self.compared.splits:
            if not parting.last:
                return "recorded figures agree, and no checkpoint is left of both runs to compare"
            return f"recorded figures agree, and the states after step {parting.last} to the bit"
        first = self.compared.splits[0]
        return (
            f"up to step {parting.last} both runs give the same bits, and those of their journals; what differs is "
            f"recorded beside the step: {first.tensor} {first.kind}"
        )

    def _first_tensor(self, parted: Parted) -> str:
        """What it says that this tensor is the first one that differs."""
        parting = self.parting
        is_forward = parted.place.phase == "forward"
        text = _MEANINGS[parted.place.phase]
        if parting.frozen and is_forward:
            text = _FROZEN
        if parted.apart.only:
            text += (
                f"; only {parted.apart.only} has it: a module, an optimizer or a call is its own"
            )
        if parting.at_latest:
            text += "; nothing older is left of both runs, so they may have parted earlier"
        elif parting.generators and is_forward:
            text += f"; generators differ too: {', '.join(parting.generators)}"
        return text

    def _not_reproduced(self) -> str:
        names = " and ".join(self.parting.strangers)
        if self.parting.parted is not None:
            return f"{names} cannot be reproduced here: where the re-runs part, the runs need not"
        text = (
            f"the re-runs agree to the bit, and {names} did not compute that: the difference lies outside of what "
            "config and data say"
        )
        if any(self.elsewhere.get(letter) for letter in self.parting.strangers):
            return f"{text}; see what the run was computed with that is not here"
        return f"{text}: in code, a library, the machine, or an error of the hardware"

    @property
    def first_divergence(self) -> dict[str, Any] | None:
        """The first difference of the runs themselves, for --json; None if the re-runs do not show it."""
        parted = self.parting.parted
        if parted is None or not self.parting.holds:
            return None
        return _parted_json(parted)

    def as_json(self) -> dict[str, Any]:
        """from_step, last_step, first_difference, ..."""
        parting = self.parting
        found: dict[str, Any] = {}
        for letter, text in parting.strangers.items():
            elsewhere = list(self.elsewhere.get(letter, ()))
            found[letter.lower()] = {"why": text, "elsewhere": elsewhere}
        return {
            "from_step": parting.base,
            "last_step": parting.last,
            "first_difference": None if parting.parted is None else _parted_json(parting.parted),
            "at_the_latest": parting.at_latest,
            "changed_checkpoints": [letter.lower() for letter in parting.changed],
            "not_reproduced": found,
            "generators": list(parting.generators),
            "frozen_weights_differ": parting.frozen,
            "meaning": self.meaning,
        }

    def lines(self) -> list[str]:
        """The result as text."""
        parting = self.parting
        begin = "compared as saved"
        if parting.base is not None:
            begin = "from the start"
        if parting.base:
            begin = f"from the checkpoints of step {parting.base}"
        lines = [f"replay, {begin}: no tensor differs up to step {parting.last}"]
        if parting.base is None and not parting.last:
            lines = ["replay: nothing was run or compared"]
        if parting.parted is not None:
            lines = [f"replay, {begin}: {_parted_text(parting.parted)}"]
        lines.append(f"  {self.meaning}")
        for letter, text in parting.strangers.items():
            lines.append(f"  {letter} does not repeat: {text}")
            for each in self.elsewhere.get(letter, ())[:_MOST_NAMED]:
                lines.append(f"    {each}")
        return lines


def _parted_json(parted: Parted) -> dict[str, Any]:
    place, apart = parted.place, parted.apart
    a, b = apart.shapes or (jsonable(apart.a), jsonable(apart.b))
    # The run that has no such tensor has no value.
    if apart.only:
        a, b = a or None, b or None
    return {
        "step": parted.step,
        "tensor": place.tensor,
        "kind": place.kind,
        "a": a,
        "b": b,
        "phase": place.phase,
        "micro_batch": place.micro_batch or None,
        "call": place.call or None,
        "only": apart.only.lower() or None,
        "elements": apart.elements,
        "differing": None if apart.shapes else apart.differing,
        "at": None if apart.shapes else apart.at,
        "ulps": apart.ulps,
        "largest": None if apart.shapes else jsonable(apart.largest),
    }


def _parted_text(parted: Parted) -> str:
    """Step, phase, tensor, and how far apart."""
    place = parted.place
    apart = parted.apart
    text = f"step {parted.step}, {place.phase}, {place.tensor}"
    if place.kind != "figure":
        text += f", {place.kind}"
    if place.micro_batch:
        text += f", micro-batch {place.micro_batch}"
    if place.call > 1:
        text += f", call {place.call}"
    # How far apart. Tensors of different shapes have no values to compare.
    if apart.only:
        return f"{text}: only {apart.only} has it ({''.join(apart.shapes)})"
    if apart.shapes:
        return f"{text}: A {apart.shapes[0]}, B {apart.shapes[1]}"
    if apart.elements > 1:
        text += f": {apart.differing:,} of {apart.elements:,} values differ"
        text += f", the most at {apart.at:,}: A {apart.a!r}, B {apart.b!r}"
    else:
        text += f": A {apart.a!r}, B {apart.b!r}"
    if apart.ulps is not None:
        text += f" ({apart.ulps:,} ulps, {apart.largest:.3g})"
    return text


def replay_pair(pair: tuple[RunHistory, RunHistory], compared: Compared) -> Replay:
    """Run both runs again, and find the first tensor that differs. Progress goes to standard error.

    Raises ConfigError, DataError or MachineError for a run that cannot be run again. Raises CheckpointError if no state
    is left that both can be started from. Nothing is written into the runs' folders.
    """
    from harness.replay.parting import Search

    # If no recorded figure differs, all steps that both have are run again.
    differs_at = compared.splits[0].step if compared.splits else 0
    last = differs_at or compared.last
    tell = partial(say, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="harness-compare-") as scratch:
        sides: list[Replayed] = []
        problems: list[Problem] = []
        for letter, history in zip(_LETTERS, pair, strict=True):
            try:
                sides.append(_side(letter, history, last, compared, Path(scratch)))
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
        a, b = sides
        parting = Search(a, b, differs_at, last, tell).parting()

    # A run that does not come to its own figures again was computed with something else.
    elsewhere: dict[str, Sequence[str]] = {}
    for side, history in zip(sides, pair, strict=True):
        if side.letter in parting.strangers:
            elsewhere[side.letter] = _elsewhere(side, history, last)
    return Replay(compared, parting, elsewhere)


def _side(
    letter: str, history: RunHistory, last: int, compared: Compared, scratch: Path
) -> Replayed:
    """One of the two runs. Raises ConfigError for one that cannot be run again, DataError without its data."""
    import torch

    from harness.core.config import load_config
    from harness.replay.flight import Branches
    from harness.replay.replayed import Replayed
    from harness.tools.rebuilt import require_data

    folder = history.run_dir
    where = short(folder)
    if not (folder / "config.yaml").is_file():
        why = "it was deleted, or a loop of your own trained the run: only that loop can run its steps"
        fix = "leave --replay out: the recorded figures are compared without it"
        raise ConfigError(Problem("the run has no config.yaml", where, why, fix))
    branches = Branches(folder)
    # The first time that a step was executed is what the recorded figures are of, unless only later times differ.
    is_first, is_last = branches.is_first_or_last(last)
    wanted = is_last if compared.again or not compared.splits else is_first
    if not wanted or not (is_last or branches.attempt_of(last) == 1):
        what = f"step {last} ran several times, and the time that was compared cannot be run again"
        why = "a rollback discarded it, and states of it are not kept"
        fix = f"look at that step alone: harness replay {typed(folder)} --step {last}"
        raise ConfigError(Problem(what, where, why, fix))
    # One process plays all ranks, whatever engine the run had.
    config = load_config(str(folder / "config.yaml"), ["engine.name=auto"])
    check_recipe(folder, config.recipe)
    refuse_foreign_scale(branches, last)
    require_data(folder, config)
    build = partial(_build, branches, scratch, torch.get_num_threads())
    return Replayed(letter, history, branches, last, config, build)


def _build(
    branches: Branches,
    scratch: Path,
    threads: int,
    config: RunConfig,
    recipe_name: str,
    ledger: RunLedger,
    ranks: int,
) -> Rerun:
    """Build a run with the settings of this process that it would have alone. threads: of this process by itself."""
    import torch

    from harness.build import join_worker
    from harness.engines.deterministic import release_deterministic

    # The other run may have changed them.
    torch.set_num_threads(threads)
    release_deterministic()
    worker = join_worker(config, "python")
    # The number of threads decides the order in which sums are rounded.
    records = list(branches.records.values())
    if records:
        torch.set_num_threads(records[-1].threads)
    return rebuild(branches.folder, scratch, worker, config, recipe_name, ledger, ranks)


def _elsewhere(side: Replayed, history: RunHistory, step: int) -> list[str]:
    """What the run was computed with that is not here."""
    from harness.capability.probe import probe
    from harness.tools.agreement import versions

    tags = history.run["tags"]
    facts = probe()
    here = {f"version.{name}": text for name, text in versions(facts).items() if text}
    here["card"] = facts.devices[0].name if facts.devices else ""
    found: list[str] = []

    # A version that the run did not record is no difference. A card is one even if it is missing.
    for name, now in here.items():
        was = tags.get(name, "")
        if was != now and (was or name == "card"):
            label = name.removeprefix("version.")
            found.append(f"{label}: {was or 'none'} in the run, {now or 'none'} here")
    ranks, _ = side.branches.ranks_of(step)
    if ranks > 1:
        found.append(
            f"ranks: {ranks} in the run; here one after the other, so sums are rounded in another order"
        )
    host = history.run["where"].get("host")
    if host and host != platform.node():
        found.append(f"host: {host} in the run, {platform.node()} here")
    return found
