"""Runs the branches of a rehearsal, one after the other: the same windows and seed in every precision.

1. Float32, the reference.
2. Float32 again with every weight one unit in the last place larger: the control.
3. Every other precision that was asked for. FP8 runs with its fallback, whose proposals are the predicted demotions.
4. If float32 is doubtful: once at a tenth of the learning rate. If it went bad: once without the windows at fault.
5. If another recipe is recommended: FP8 with that recipe.

Every branch is a run of its own, built as `harness train` builds it, with the training step of `harness train`. It
writes into a scratch folder. `verdict` draws the conclusion.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from harness.core.config import RunConfig
from harness.core.errors import HarnessError, number_of
from harness.core.facts import SamplingSpan
from harness.core.memory import peak_resident, restart_peak
from harness.core.state import RunLedger, random_numbers_apart
from harness.monitors.fallback import FallbackController
from harness.precision.counterfactual import Counterfactual
from harness.precision.plan import pad_numbers
from harness.precision.recipe import PrecisionName, Recipe, load_recipe
from harness.rehearse.begin import Beginning
from harness.rehearse.branch import Branch, Record
from harness.rehearse.recommended import Recommended, recommend
from harness.rehearse.slots import SlotRecord
from harness.rehearse.verdict import LOWER_RATE, MOST_WINDOWS, Branches, is_doubtful
from harness.replay.flight import Difference
from harness.replay.investigate import Rerun

PRECISIONS: tuple[PrecisionName, ...] = ("fp32", "bf16", "fp16", "fp8")
DEFAULT_FP8 = "fp8_hybrid"
"""The recipe of the FP8 branch for a run whose own recipe has no FP8."""

# Between two lines of progress.
_PROGRESS_SECONDS = 5.0

Build = Callable[[RunConfig, Recipe, RunLedger], Rerun]
"""(config, recipe, ledger) -> the run at its initial state, in one process."""
Say = Callable[[str], None]


def recipes_for(own: Recipe, fp8: Recipe | None) -> dict[PrecisionName, Recipe]:
    """The recipe of each precision.

    Each has the rungs of its precision alone. So a branch that cannot run is an error, and not a branch in a lower
    precision under the wrong name.

    own: the run's. Its layers, loss scale, fallback and float32 products hold in bf16 and fp16 as well.
    fp8: as for `whole_fp8`.
    """
    taken = {"layers": own.layers, "loss_scale": own.loss_scale, "fallback": own.fallback}
    taken["float32_matmul"] = own.float32_matmul
    half = load_recipe("bf16").model_copy(update=taken)
    return {
        "fp32": load_recipe("fp32"),
        "bf16": only(half, "bf16"),
        "fp16": only(load_recipe("fp16_scaler").model_copy(update=taken), "fp16"),
        "fp8": only(whole_fp8(own, fp8), "fp8"),
    }


def whole_fp8(own: Recipe, fp8: Recipe | None) -> Recipe:
    """The recipe of the FP8 branch, with all of its rungs: `fp8`, else `own` if it has FP8, else DEFAULT_FP8."""
    if fp8 is not None:
        return fp8
    has_fp8 = any(rung.precision == "fp8" for rung in own.ladder)
    return own if has_fp8 else load_recipe(DEFAULT_FP8)


def only(recipe: Recipe, precision: PrecisionName) -> Recipe:
    """`recipe` with its rungs of `precision` alone."""
    rungs = [rung for rung in recipe.ladder if rung.precision == precision]
    return recipe.model_copy(update={"ladder": rungs})


@dataclass(frozen=True)
class Rehearsed:
    """Everything that a rehearsal found.

    branches: the evidence for the verdict.
    left_out: precision -> why it was not rehearsed.
    recommended: the recipe to write; None without an FP8 branch.
    trial: the branch that tried this recipe; None if it equals the rehearsed one, or could not be tried.
    fp8: the FP8 branch; None without one.
    notes: caveats for the reader.
    """

    begin: Beginning
    branches: Branches
    left_out: Mapping[str, str]
    recommended: Recommended | None = None
    trial: Branch | None = None
    fp8: Branch | None = None
    notes: Sequence[str] = field(default_factory=tuple)


class Rehearsal:
    """The branches of one rehearsal.

    begin: where they begin.
    own: precisions that the run would compute in, the best first. The verdict is about the first that can run.
    repeated: the precision whose branch repeats the run's own steps with the run's own recipe; empty: none does.
    recipes: one for each precision that is rehearsed, in this order.
    fp8: the recipe of the FP8 branch with all of its rungs; the recommended recipe is made from it.
    build: makes the run of a branch.
    say: prints progress.
    """

    def __init__(
        self,
        begin: Beginning,
        own: Sequence[str],
        repeated: str,
        recipes: Mapping[PrecisionName, Recipe],
        fp8: Recipe,
        build: Build,
        say: Say,
    ) -> None:
        self.begin = begin
        self.own = own
        self.repeated = repeated
        self.recipes = recipes
        self.fp8 = fp8
        self.build = build
        self.say = say
        # Padded name -> name in the model, of the FP8 branch.
        self._names: dict[str, str] = {}

    def run(self) -> Rehearsed:
        """Run all branches. Raises HarnessError if the float32 branch cannot be built, or no other one either."""
        with random_numbers_apart():
            return self._run()

    def _run(self) -> Rehearsed:
        begin = self.begin
        # The gap between these two is what rounding alone does; the verdict compares all other gaps with it.
        reference = self._branch("fp32", "fp32", self.recipes["fp32"])
        control = self._branch("fp32, one ulp apart", "fp32", self.recipes["fp32"], nudged=True)

        others: list[Branch] = []
        left_out: dict[str, str] = {}
        for precision, recipe in self.recipes.items():
            if precision == "fp32":
                continue
            try:
                others.append(self._branch(precision, precision, recipe))
            except HarnessError as error:
                # The card may lack the precision, or the model a layer for FP8.
                problem = error.problems[0]
                left_out[precision] = (
                    f"{problem.what}: {problem.why}" if problem.why else problem.what
                )
                self.say(f"{precision}: left out: {left_out[precision]}")

        # Experiments that tell a learning rate, data and model apart where float32 itself goes bad.
        lower_rate = without = None
        if is_doubtful(reference):
            lower_rate = self._at_lower_rate()
        if reference.fault is not None:
            without = self._without_windows(reference.fault.windows)

        # The verdict is about `subject`. If its branch has another recipe than the run, a good end says nothing about
        # whether the run's incident can be reproduced: then the verdict does not get the incident.
        ran = [branch.precision for branch in (reference, *others)]
        subject = next((precision for precision in self.own if precision in ran), "")
        incident = begin.incident if subject == self.repeated else None
        branches = Branches(reference, control, others, subject, lower_rate, without, incident)

        # The recipe that FP8 would need, and a branch that tries it if it is not the rehearsed one.
        fp8 = next((branch for branch in others if branch.precision == "fp8"), None)
        if fp8 is None or fp8.record is None:
            return Rehearsed(begin, branches, left_out)
        recommended = recommend(self.fp8, list(fp8.predicted), self._names, fp8.record)
        trial: Branch | None = None
        notes: list[str] = []
        if recommended.changed:
            recipe = only(recommended.recipe, "fp8")
            try:
                trial = self._branch("fp8, recipe written", "fp8", recipe)
            except HarnessError as error:
                # The recipe may leave no layer in FP8, or exclude layers whose FP8 state is in the checkpoint.
                notes.append(f"the recipe written was not tried: {error.problems[0].what}")
        return Rehearsed(begin, branches, left_out, recommended, trial, fp8, notes)

    def _at_lower_rate(self) -> Branch:
        train = self.begin.config.train
        lower = train.model_copy(update={"lr": train.lr * LOWER_RATE})
        config = self.begin.config.model_copy(update={"train": lower})
        return self._branch("fp32, lr / 10", "fp32", self.recipes["fp32"], config=config)

    def _without_windows(self, windows: Sequence[int]) -> Branch | None:
        """Float32 without `windows`; None if there are none, or too many for it to be the same run."""
        if not 0 < len(windows) <= MOST_WINDOWS:
            return None
        return self._branch("fp32, without windows", "fp32", self.recipes["fp32"], skipped=windows)

    def _branch(
        self,
        name: str,
        precision: PrecisionName,
        recipe: Recipe,
        nudged: bool = False,
        config: RunConfig | None = None,
        skipped: Sequence[int] = (),
    ) -> Branch:
        """Run one branch. Raises HarnessError if it cannot be built here.

        nudged: begin with every weight one unit in the last place larger.
        config: replaces the run's. skipped: windows to leave out.
        """
        begin = self.begin
        # The branch gets a ledger of its own: it must not count its windows and rollbacks for the next branch.
        ledger = copy.deepcopy(begin.ledger)
        if skipped:
            ledger.inherit(sorted({*ledger.skipped_windows, *skipped}))

        # Runs hold themselves in circles. Those of earlier branches, failed ones too, would take memory from this one
        # and count in its peak.
        gc.collect()
        restart_peak()
        rerun = self.build(config or begin.config, recipe, ledger)
        on_gpu = rerun.run.engine.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(rerun.run.engine.device)

        # Only an unchanged branch can be compared with the run's journal, figure by figure.
        repeats = precision == self.repeated and not (nudged or config or skipped)
        try:
            if begin.store is not None:
                rerun.start(begin.step, begin.store, keeps_precision=repeats)
            if nudged:
                nudge(rerun.model)
            record = self._record(rerun, precision, recipe)
            watch = _scalings(rerun)
            with watch or nullcontext():
                difference = self._steps(name, rerun, record, repeats)
            peak = _peak(rerun, on_gpu)
        finally:
            rerun.close()

        if precision == "fp8":
            self._names = {pad_numbers(each): each for each, _ in rerun.model.named_modules()}
        return Branch(
            name=name,
            precision=precision,
            resolved=rerun.resolved,
            begin=begin.step,
            losses=tuple(record.losses),
            skipped=record.skipped,
            fault=record.fault,
            seconds=record.step_seconds,
            peak=peak,
            difference=difference,
            predicted=record.predicted,
            slots=tuple(record.slots.rows()) if record.slots is not None else (),
            record=record.slots,
            fell_back_to=record.fell_back_to,
            unhealthy=tuple(record.unhealthy),
            scalings=None if watch is None else watch.report(),
        )

    def _record(self, rerun: Rerun, precision: PrecisionName, recipe: Recipe) -> Record:
        """An empty record; that of an FP8 branch also collects its slots."""
        if precision != "fp8":
            return Record()
        slots = rerun.run.precision.slot_names
        layers = list(dict.fromkeys(slot.rpartition(".")[0] for slot in slots))
        observer = None
        if not recipe.fallback.enabled and layers:
            # The recipe's own fallback is off and predicts no demotions. This one predicts them and moves no layer.
            policy = recipe.fallback.model_copy(update={"enabled": True})
            observer = FallbackController(policy, layers)
        return Record(SlotRecord(recipe.fallback), observer)

    def _steps(self, name: str, rerun: Rerun, record: Record, repeats: bool) -> Difference | None:
        """Run the steps of one branch, to the last one or to the fault that ends it.

        repeats: whether the branch repeats the run. Then the first figure is returned that differs from its journal.
        """
        begin = self.begin
        difference: Difference | None = None
        reported = time.monotonic()
        self.say(f"{name}: {number_of(begin.steps, 'step')} from {begin.text} ({rerun.resolved})")
        for done in range(1, begin.steps + 1):
            # Most steps do not sample SQNR and underflow, and a short branch may never do so. So the last step always
            # does. One sample more is too few to demote a layer.
            if done == begin.steps:
                last = begin.step + done
                rerun.run.state.dense_sampling = SamplingSpan(last, last + 1)
            judged = rerun.advance()
            record.take(judged)
            if repeats and begin.history is not None and difference is None:
                difference = begin.history.difference(judged.facts, begin.attempt)
            if record.ended:
                self.say(f"{name}: ends at step {judged.facts.step}")
                break
            if time.monotonic() - reported > _PROGRESS_SECONDS:
                reported = time.monotonic()
                self.say(f"{name}: step {done} of {begin.steps}, loss {judged.facts.loss:.4f}")
        return difference


def _scalings(rerun: Rerun) -> Counterfactual | None:
    """Measures other scalings on the sampled tensors of a branch; None where its layers cannot be watched."""
    if rerun.resolved != "native:fp8":
        return None
    return Counterfactual(rerun.model)


def _peak(rerun: Rerun, on_gpu: bool) -> float:
    """Most memory that the branch took, GiB; NaN if it is not known.

    On a GPU it is that of torch's allocations; on a CPU that of this process.
    """
    if on_gpu:
        return torch.cuda.max_memory_allocated(rerun.run.engine.device) / 2**30
    return peak_resident() / 2**30 or math.nan


@torch.no_grad()
def nudge(model: torch.nn.Module) -> None:
    """Make every trained weight one unit in the last place larger.

    A weight of zero stays: the next number is 1e-45, which is no rounding error of anything.
    """
    for parameter in model.parameters():
        if not (parameter.requires_grad and parameter.is_floating_point()):
            continue
        up = torch.nextafter(parameter, torch.full_like(parameter, math.inf))
        parameter.copy_(torch.where(parameter == 0, parameter, up))
