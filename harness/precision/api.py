"""`harness.Precision`: FP8 recipes, gated updates and per-layer fallback in somebody else's training loop.

The class checks every call and keeps the window's state. `Prepared` (prepared.py) holds what runs the model: plan,
backend, loss scale, judge. `Standard` (standard.py) makes torch's own loop work without explicit calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.core.collectives import max_over_ranks, mean_over_ranks
from harness.core.errors import MisuseError
from harness.core.facts import SlotStats, StepFacts, Switch
from harness.core.update import StepClock, finish_step
from harness.precision.misuse import Turn, misuse, optimizer_problems, step_problems
from harness.precision.plan import Plan
from harness.precision.prepared import AboutLoop, LoopGradients, Prepared
from harness.precision.recipe import Recipe, load_recipe
from harness.precision.standard import (
    Standard,
    WrappedOptimizer,
    leaves_of,
    own_backward,
    unwrapped,
    wrap_problems,
)

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of one step. The tensors are 0-d, on the model's device, and the host has not read them yet.

    applied: bool. False if loss or gradients were not finite on some rank; nothing was changed then.
    grad_norm: float32, of the unscaled gradients before clipping.
    loss_scale: float32, in use at this step (1 unless fp16).
    switch: what the recipe's fallback moved at the end of this step. Layers move between FP8 and BF16; the whole run
        may move to another precision for good. None if nothing moved, and under a `harness.Guard`, which reports moves
        itself.
    """

    applied: Tensor
    grad_norm: Tensor
    loss_scale: Tensor
    switch: Switch | None = None

    @property
    def was_applied(self) -> bool:
        """`applied` on the host; waits for the device."""
        return bool(self.applied.item())


class Precision:
    """Everything between a recipe and an optimizer step, for one model in any training loop.

        precision = Precision.from_recipe("fp8_hybrid")
        model = precision.prepare(model)                 # on its device already, not yet wrapped by DDP or sharded
        for x, y in batches:
            with precision.context():
                loss = loss_function(model(x), y)
            precision.backward(loss)
            precision.step(optimizer, max_grad_norm=1.0)
            optimizer.zero_grad()

    Or torch's own loop, with a wrapped optimizer:

        optimizer = precision.wrap(optimizer, max_grad_norm=1.0)
        for x, y in batches:
            loss_function(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    The contract is torch's own: you divide the loss by the number of micro-batches, zero the gradients and step the
    schedulers. Evaluate inside `evaluating()`, which leaves no trace in the FP8 state. Without `wrap`, do not clip or
    read gradients between `backward` and `step`: under fp16 they are scaled. Pass `max_grad_norm` instead.
    docs/guide/api.md has the details.

    seed: decides in which steps FP8 statistics are sampled. The same on every rank; `harness train` takes `train.seed`.
    """

    def __init__(self, recipe: Recipe, seed: int = 0) -> None:
        if not isinstance(recipe, Recipe):  # pyright: ignore[reportUnnecessaryIsInstance]
            fix = 'Precision.from_recipe("fp8_hybrid"), or the path of a recipe\'s file'
            raise misuse("Precision()", f"{recipe!r:.60} is no Recipe", fix=fix)
        self.recipe = recipe
        self.seed = seed
        self._prepared: Prepared | None = None
        self._standard: Standard | None = None

        # Where the loop is now. `_training`: the mode of the window's first forward.
        self._inside = False
        self.in_backward = False
        self.is_evaluating = False
        self._training = False
        self.turn = Turn()

        # The current window: its clock (None before its first forward) and the sum of its losses.
        self._clock: StepClock | None = None
        self._loss = torch.zeros((), device="cpu")

    @classmethod
    def from_recipe(cls, name_or_path: str, seed: int = 0) -> Precision:
        """Load a shipped recipe by name, or your own by path. Raises ConfigError with every problem in it."""
        return cls(load_recipe(name_or_path), seed)

    def prepare(
        self,
        model: M,
        forward: Callable[[], object] | None = None,
        compiled: bool = False,
        saved: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> M:
        """Decide the precision of every module of `model`, convert the model in place and return it.

        Parameters keep their identity, so optimizers and tied weights survive. Nothing moves between devices: the
        device of the model is used. torch's float32 matmul precision is set for the whole process, as the recipe says.

        Under an initialised process group every rank must call it, and the weakest rank decides. Ranks that meet later
        must have the same plan.

        An FP8 rung on which no layer of the model can run is skipped. The plan gives the reason, and the logger
        `harness.precision` a warning.

        The other arguments are for a recipe with `fp8.backend: auto`, which times backends on a block of the model.
        Without `forward` nothing is timed, and the ladder's first is taken. Every rank has to give the same.

        forward: calls `model` once, on a micro-batch as in training: `lambda: model(x)`. It runs in eval mode, without
            gradients, and leaves no trace.
        compiled: whether the loop will compile the blocks, where the backend can be compiled.
        saved: what `state_dict` returned in the run that goes on: its choice holds, and nothing is timed.

        Raises MisuseError (second call, wrapped model, parameters not float32 or not on one usable device),
        MachineError (a GPU that torch cannot use, no rung that runs here) and ConfigError (a pattern that matches
        nothing; no layer that can run in FP8, and no other rung in the recipe).
        """
        if self._prepared is not None:
            fix = "make one Precision for each model"
            raise misuse("prepare()", "it was called before", fix=fix)
        about = AboutLoop(forward, compiled, saved)
        self._prepared = Prepared(self.recipe, model, self.seed, about)
        self._standard = Standard(self, self._prepared)
        self._end_window(self._prepared)
        return model

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to copy or pickle a prepared one: it belongs to one model, with hooks, windows and optimizers."""
        if self._prepared is not None:
            what = "a Precision, or an optimizer that it wrapped, is copied or pickled"
            why = "it belongs to one model, whose hooks and scales a copy would share or lose"
            fix = "save and load state_dict(); a second model is copied before prepare(), with its own Precision"
            raise misuse("copy", what, why, fix)
        return super().__reduce_ex__(protocol)

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare` was called."""
        return self._prepared is not None

    @property
    def prepared(self) -> Prepared:
        """What stands behind the interface, for `harness.Guard` and `harness.Telemetry`. Raises as `plan` does."""
        return self._ready("prepared")

    def drop_window(self) -> None:
        """Forget a window that has begun, for example after an error in it. Zero the gradients too."""
        ready = self._ready("drop_window()")
        if ready.shards is not None:
            ready.shards.drop_window()
        self._end_window(ready)

    @property
    def plan(self) -> Plan:
        """What runs where and why, per module. Raises MisuseError before `prepare`."""
        return self._ready("plan").plan

    @property
    def demoted(self) -> tuple[str, ...]:
        """FP8 layers that run in BF16 now, numbers padded as in `stats().names`."""
        return self._ready("demoted").backend.demoted

    def wrap(
        self,
        optimizers: Optimizer | Sequence[Optimizer],
        max_grad_norm: float | None = None,
        tokens: int = 0,
    ) -> WrappedOptimizer:
        """An optimizer for torch's own loop: `loss.backward(); optimizer.step(); optimizer.zero_grad()`.

        Calls `standard_loop`, and returns an optimizer whose `step()` is `Precision.step`.

        optimizers: one, or all of them as one when several share the model.
        max_grad_norm, tokens: as for `step`.

        Raises MisuseError naming everything that is wrong with the call.
        """
        ready = self._ready("wrap()")
        ready.find_shards("wrap()")
        chosen = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
        of_shards = ready.of_shards()
        problems = optimizer_problems("wrap()", chosen, max_grad_norm, ready.owns_any, of_shards)
        problems += wrap_problems(chosen)
        if problems:
            raise MisuseError(problems)
        self.standard_loop()
        return WrappedOptimizer(self, chosen, max_grad_norm, tokens)

    def standard_loop(self) -> None:
        """From now on torch's own calls mean the precision's.

        Each call of the model, or of a module of it, is a `context()` of its own, and its outputs come in float32.
        `backward()` of a loss that reaches the model is `Precision.backward`. Under fp16 gradients come out unscaled,
        so torch's own clipping, logging and hooks are right. `context`, `backward` and `step` still work.
        """
        self._between_steps("standard_loop()").find_shards("standard_loop()")
        if not self._hooks.begun:
            self._hooks.begin()

    @contextmanager
    def passing_over(self, module: nn.Module) -> Iterator[None]:
        """Around one call of `module` that is not a forward but a whole step, as Lightning makes of `DDP.forward`.

        Call it after `standard_loop`. This call of `module` is not a `context()`; the calls inside of it are.
        """
        standard = self._hooks
        assert standard.begun, "before standard_loop()"
        standard.skipped = module
        try:
            yield
        finally:
            standard.skipped = None

    @property
    def busy(self) -> bool:
        """Whether it is inside of `context()`, or in a backward, which may run forwards again."""
        return self._inside or self.in_backward

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around any number of forwards for evaluation: eval mode, no gradients, the plan's precision, no trace.

        Each call of the model, or of a module of it, is a `context()` of its own, and its outputs come in float32.
        Everything else in here computes as it would anywhere. Afterwards every module has its mode back.

        Raises MisuseError inside of `context()`, and while another thread works with the model.
        """
        ready = self._outside("evaluating()")
        ready.find_shards("evaluating()")
        before = self.is_evaluating
        with self.turn.hold("evaluating()"), torch.no_grad():
            modes = [(module, module.training) for module in ready.model.modules()]
            self.is_evaluating = True
            try:
                ready.model.eval()
                yield
            finally:
                self.is_evaluating = before
                for module, training in modes:
                    module.training = training
                # Between two windows: torch's checkpoints do not find parameters that an evaluation left gathered.
                if ready.shards is not None and not ready.window.begun:
                    ready.shards.local.reshard()

    @contextmanager
    def context(self) -> Iterator[None]:
        """Around every forward, loss included. With gradients off nothing is recorded.

        Forwards with gradients on in eval mode may be an evaluation. They leave no trace if the model goes back to
        train mode without a backward.

        Raises MisuseError if it is nested, if the model is no longer what was prepared, and for such an evaluation
        after a training forward that no step has followed yet.
        """
        ready = self._outside("context()")
        ready.find_shards("context()")
        moved = ready.moved()
        if moved:
            why = "the plan was made for the model as it was; weights in less than float32 lose small updates"
            fix = "move and cast the model first, then call prepare()"
            raise misuse("context()", f"the model {moved}", why, fix)

        # The first forward with gradients begins the window. A change of mode within it shows an evaluation.
        recording = torch.is_grad_enabled()
        if recording:
            if self._clock is not None and self._training is not ready.model.training:
                self._mode_changed(ready)
            if self._clock is None:
                self._begin_window(ready)

        # Inside an autocast of the caller (a disabled one too) torch would use weights cast before the last update.
        torch.clear_autocast_cache()
        with self.turn.hold("context()"):
            self._inside = True
            try:
                timed: AbstractContextManager[None] = nullcontext()
                if recording and ready.forward_clock is not None:
                    timed = ready.forward_clock.forward()
                with timed, ready.backend.context():
                    yield
            finally:
                self._inside = False

    def _mode_changed(self, ready: Prepared) -> None:
        """The model's mode is not that of the window's first forward: one of the two is an evaluation."""
        if self._training:
            what = "in the middle of a window the model is in eval() mode, and gradients are on"
            why = "an evaluation would enter the window's amaxes, as if it trained"
            fix = "evaluate in precision.evaluating(), or torch.no_grad(); to train stay in one mode for a window"
            raise misuse("context()", what, why, fix)
        # Without a backward the earlier forwards were an evaluation: what they left is dropped with the window.
        if not ready.window.backwards:
            self._end_window(ready)

    def _begin_window(self, ready: Prepared) -> None:
        self._training = ready.model.training
        ready.window.begun = True
        ready.backend.begin_window(sample=ready.judge.samples(self.recipe.fp8.stats_every))
        self._clock = StepClock(ready.device)
        ready.buffers.begin()

    @torch.compiler.disable(reason="Precision.backward() is no part of a graph")
    def backward(self, loss: Tensor, **options: Any) -> None:
        """`loss.backward(**options)` under the loss scale, after leaving `context()`; once per micro-batch.

        loss: one element, already divided by the number of micro-batches.

        Raises MisuseError
        - without a forward in `context()` since the last step, and inside of it;
        - for a loss without a graph;
        - if the gradients of earlier micro-batches are gone, or those of the last window were not zeroed;
        - in the first window if ranks differ in plan, seed, steps done or guard.
        """
        ready = self._outside("backward()")
        self._check_loss(loss)
        self._check_window(ready)

        # Whether gradients will carry a scale that nobody must touch: in torch's own loop the hooks divide it out.
        scales = ready.loss_scale is not None and not ready.loss_scale.retired
        carry_scale = scales and not self._hooks.begun
        # Found now: backward frees the graph.
        reached = list(leaves_of([loss])) if scales else []

        # Activation checkpoints run forwards again in here, so the backend's state has to be that of the forward.
        with self.turn.hold("backward()"):
            self.in_backward = True
            try:
                unscaling = self._hooks.true_gradients(reached)
                with (
                    _no_autocast(ready.device),
                    ready.backend.backward_context(),
                    unscaling,
                    own_backward(),
                ):
                    scaled = loss if ready.loss_scale is None else loss * ready.loss_scale.value
                    scaled.backward(**options)
            finally:
                self.in_backward = False

        self._loss += loss.detach().float().reshape(()).to(ready.device)
        ready.window.backward_done(ready.parameters(), carry_scale)
        ready.window.reached_others(self._hooks.beside(reached), carry_scale)
        if ready.shards is not None:
            ready.shards.backward_done(carry_scale)
        ready.backend.end_micro_batch(lambda values: max_over_ranks(values.clone()))

    def _check_loss(self, loss: Tensor) -> None:
        """Raises MisuseError if `loss` cannot be that of a forward in this window."""
        if self._clock is None:
            why = "outside of context() the model runs in plain precision, against the plan"
            fix = "with precision.context(): loss = ..."
            if self._hooks.begun:
                why = "a model that was traced, scripted or exported runs in plain precision, past the hooks of wrap()"
                fix = "call the prepared model itself, or a torch.compile of it, once for every loss.backward()"
            raise misuse("backward()", "no forward in context() since the last step", why, fix)
        if loss.numel() != 1 or not loss.requires_grad:
            what = "does not require grad"
            if loss.numel() != 1:
                what = f"has shape {list(loss.shape)}, not one element"
            fix = "compute a mean loss with gradients enabled"
            raise misuse("backward()", f"the loss {what}", fix=fix)

    def _check_window(self, ready: Prepared) -> None:
        """Raises MisuseError if the gradients are not what this backward may be added to."""
        if not ready.window.backwards:
            ready.agree()
            ready.window.check_zeroed(ready.parameters())
        elif ready.window.gradients_are_gone(ready.parameters()):
            count = ready.window.backwards
            what = f"the gradients of {count} backward() since the last step are gone"
            why = "the window's loss and FP8 statistics would be those of micro-batches that train nothing"
            fix = "zero_grad() only after step(); to give up a window, for example after an error, drop_window() too"
            raise misuse("backward()", what, why, fix)
        ready.check_gradients("backward()")

    @torch.compiler.disable(reason="Precision.step() is no part of a graph")
    @torch.no_grad()
    def step(
        self,
        optimizers: Optimizer | Sequence[Optimizer],
        max_grad_norm: float | None = None,
        tokens: int = 0,
    ) -> StepOutcome:
        """Gate, unscale, clip, apply, then roll the FP8 scales.

        optimizers: one, or all of them when several share the model: a window has one verdict and one norm.
        max_grad_norm: clip to this global L2 norm over all their parameters; None does not clip.
        tokens: of the window over all ranks, for the speed in the telemetry; 0: not known.

        The gate: if a loss or gradient of the window is not finite on any rank, `applied` is False. Weights, persistent
        buffers (BatchNorm's means), optimizer state and FP8 state stay bit for bit as they were; an fp16 loss scale
        backs off. Gradients may be overwritten. Fused Adam, AdamW, SGD and Adagrad need no host read for the gate; any
        other optimizer costs one. Under a process group amax and verdict travel in one MAX reduction.

        The fallback: the recipe's fallback judges the previous step, whose figures have arrived by now, and moves
        layers at the end of this one. So the first window that can react to a window is the one after the next. Under a
        `harness.Guard`, `guard.end_step()` does all of that, and the update keeps to the guard's limits.

        Raises MisuseError naming everything that is wrong with the call.
        """
        # Refuse before anything is changed: half a step cannot be taken back.
        ready = self._outside("step()")
        chosen = unwrapped(optimizers)
        problems = step_problems(chosen, ready.window.backwards)
        # Gradients that were not exchanged explain why the optimizer's parameters have none.
        if ready.shards is not None:
            problems = ready.shards.step_problems() or problems
        of_shards = ready.of_shards()
        problems += optimizer_problems("step()", chosen, max_grad_norm, ready.owns_any, of_shards)
        problems += ready.guard_problems(chosen)
        if problems:
            raise MisuseError(problems)
        ready.check_gradients("step()")
        ready.window.step_begins()

        # What only this process can measure of the window.
        own: dict[str, float | Tensor] = {"loss": mean_over_ranks(self._loss)}
        if ready.forward_clock is not None:
            own["forward_fastest"] = own["forward_slowest"] = ready.forward_clock.step()
        if max_grad_norm is None:
            max_grad_norm = math.inf
        # torch's own loop has divided the gradients already, and noted what was not finite before.
        unscaled = self._hooks.gradients
        overflow = None if unscaled is None else unscaled.found
        gradients = LoopGradients(ready, chosen, max_grad_norm, overflow)

        # Gate and update, then the facts leave for the host. `harness train` makes the same call.
        window = ready.state.ledger.window_index(ready.state.step)
        clock = self._clock or StepClock(ready.device)
        with self.turn.hold("step()"):
            figures, facts = finish_step(
                gradients,
                ready.backend,
                own,
                ready.terms(),
                ready.judge.comparison,
                clock,
                fp8_weights=ready.fp8_weights(),
                window=window,
                tokens=tokens,
            )

        # The window is over. Its figures are still on their way, so what is judged now is the step before.
        self._end_window(ready)
        ready.window.stepped(chosen)
        switch = ready.judge_earlier(facts)
        applied = figures["applied"] > 0
        return StepOutcome(applied, figures["grad_norm"], figures["loss_scale"], switch)

    def facts(self) -> StepFacts | None:
        """What the last step did, read to the host now; None before the first step.

        `seconds` go from the window's first `context()` to the end of `step()`.
        """
        last = self._ready("facts()").last
        return None if last is None else last.facts()

    def stats(self) -> SlotStats | None:
        """Per-slot statistics of the last step, read to the host now; None before the first step and without FP8
        layers.

        underflow, clipped and sqnr_db are NaN except in one of `fp8.stats_every` steps, and for a while after a bad
        one.
        """
        facts = self.facts()
        return None if facts is None else facts.slots

    def demote(self, layers: str | Iterable[str]) -> tuple[str, ...]:
        """Run FP8 layers in BF16 from the next step on, until `promote`. Call it between steps, on every rank.

        layers: shell patterns on module names, as in the model or, if none matches, zero-padded.

        Returns the padded names of the layers that moved. Layers that the plan keeps out of FP8 anyway are not among
        them. Raises MisuseError for a pattern that matches no Linear.
        """
        ready = self._between_steps("demote()")
        # Held: the fallback would bring a layer back as soon as its tensors look harmless.
        names = ready.select("demote()", layers)
        ready.judge.held |= set(names)
        moved = tuple(name for name in names if name not in ready.backend.demoted)
        ready.backend.switch(moved, ())
        return moved

    def promote(self, layers: str | Iterable[str]) -> tuple[str, ...]:
        """Bring demoted layers back to FP8, with the scale that was kept warm. Otherwise as `demote`."""
        ready = self._between_steps("promote()")
        if ready.backend.fell_back_to:
            what = f"the whole run went to {ready.backend.fell_back_to}, for good"
            fix = "raise fallback.max_demoted_share, or load an earlier state"
            raise misuse("promote()", what, fix=fix)
        names = ready.select("promote()", layers)
        ready.judge.held -= set(names)
        moved = tuple(name for name in names if name in ready.backend.demoted)
        ready.backend.switch((), moved)
        return moved

    def state_dict(self, within_window: bool = False) -> dict[str, dict[str, Any]]:
        """Copies of what a bit-identical continuation needs beside model, optimizer and schedulers.

        within_window: also between `backward` and `step`, for trainers that save in the middle of an accumulation, and
            no gradients. The continuation begins that window anew.

        {"tensors": {name: Tensor}, "meta": JSON-able}. torch.save and torch.load(weights_only=True) take all of it,
        safetensors takes "tensors". Raises MisuseError between `backward` and `step`, unless `within_window`.
        """
        allowed = self._outside if within_window else self._between_steps
        ready = allowed("state_dict()")
        if ready.guarded and len(ready.pending) > 1:
            what = "the guard has not judged the last step"
            raise misuse("state_dict()", what, fix="call guard.end_step() first")
        return ready.save()

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue from `state`, after `prepare` or to roll back. A window that has begun is dropped.

        After a rollback zero the gradients. Raises CheckpointError if `state` is not whole, is of another rung, or of
        other FP8 layers.
        """
        ready = self._outside("load_state_dict()")
        ready.load(state)
        self.drop_window()

    def _ready(self, call: str) -> Prepared:
        """What was prepared. Raises MisuseError before `prepare`."""
        if self._prepared is None:
            fix = "model = precision.prepare(model) first"
            raise misuse(call, "no model was prepared", fix=fix)
        return self._prepared

    @property
    def _hooks(self) -> Standard:
        assert self._standard is not None, "before prepare()"
        return self._standard

    def _outside(self, call: str) -> Prepared:
        """What was prepared. Raises MisuseError if `call` may not come now, above all inside of `context()`."""
        ready = self._ready(call)
        self.turn.check(call)
        if self.is_evaluating and call in ("backward()", "step()"):
            what, why = "called inside evaluating()", "nothing trains in there"
            raise misuse(call, what, why, f"leave it before {call}")
        if self._inside:
            self._hooks.leave_interrupted()
        if self._inside:
            what = "called inside context(), which is for one forward and its loss"
            fix = f"leave context() before {call}"
            if call == "context()":
                fix = "leave the first context before the next"
            raise misuse(call, what, fix=fix)
        return ready

    def _between_steps(self, call: str) -> Prepared:
        """As `_outside`. Raises MisuseError between `backward()` and `step()`, too."""
        ready = self._outside(call)
        if ready.window.backwards:
            what = "called between backward() and step()"
            why = "scales and amax of a window are settled in step()"
            raise misuse(call, what, why, f"call {call} right after step()")
        return ready

    def _end_window(self, ready: Prepared) -> None:
        """Forget the window: it was stepped, dropped, or was an evaluation."""
        self._clock = None
        ready.window.close()
        ready.buffers.drop()
        if ready.shards is not None:
            ready.shards.local.calls.value = 0
        if self._hooks.gradients is not None:
            self._hooks.gradients.forget()
        self._loss = torch.zeros((), dtype=torch.float32, device=ready.device)


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Switch off the caller's autocast: backward would run in its dtype, whatever the plan says."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
