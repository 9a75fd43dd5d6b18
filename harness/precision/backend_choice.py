"""`fp8.backend: auto`: times FP8 backends with the same rule on a block of the user's model, and takes the fastest.

A ladder may hold FP8 rungs side by side that set scales and round alike, and differ in their kernels only, such as
Transformer Engine's and native's under delayed scaling. Which one is faster depends on card, model and torch.compile.

1. `choose_backend` makes a plan for each of these rungs that all ranks can take.
2. `time_backends` copies one repeated block of the model, converts a copy by each plan, and trains the copies in turns
   on an input that the block really got.
3. The slowest rank's times count, on all ranks. A tie takes the first of the ladder. A rung whose copy fails on any
   rank is not taken, unless all fail.
4. The plan keeps the choice and its times. A run that goes on, or is run again, takes what was chosen, untimed.

It is timed in the training process: the block's class may exist only there. Model and random numbers stay as they are.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from harness.capability.probe import MachineFacts
from harness.core.blocks import blocks_of
from harness.core.collectives import gather_over_ranks, gather_texts, world_size
from harness.core.deferred import computing, recording_of
from harness.core.errors import ConfigError, one_line
from harness.core.spread import Spread, as_fast, spread_of
from harness.core.state import left_alone, random_numbers_apart
from harness.core.timing import in_turns, wait
from harness.precision.backends.registry import BACKENDS
from harness.precision.convert import build_backend
from harness.precision.plan import Plan
from harness.precision.recipe import Recipe, Rung

_HEAD = "fp8.backend auto"
# Arguments of transformers' blocks for generation.
_CACHES = ("past_key_values", "past_key_value", "use_cache")
# Each backend's turn in seconds, the rounds of turns, and the seconds after which no other round begins.
_TURN, _ROUNDS, _LIMIT = 0.1, 9, 8.0
# With fewer rounds their spread says nothing.
_LEAST_ROUNDS = 3

# ---- Choosing


class Trial(NamedTuple):
    """What backends are timed on.

    model: not converted yet.
    forward: calls a model once, on a micro-batch as in training.
    device: where it computes.
    facts: of this machine.
    """

    model: nn.Module
    forward: Callable[[nn.Module], object]
    device: torch.device
    facts: MachineFacts

    @property
    def card(self) -> str:
        """The name of the device."""
        if self.device.type == "cpu":
            return "this CPU"
        return self.facts.card(self.device.index)


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, for plan.json.

    taken: name of the rung.
    why: the reason, with the times.
    candidates: names of the rungs that could have been taken, in the ladder's order.
    block: name of the block that was timed; empty if none was.
    card: where.
    seconds: of one training step of the block, by rung: lower quartile, median, upper quartile.
    failed: names of the rungs that raised while the block was timed.
    """

    taken: str
    why: str
    candidates: Sequence[str]
    block: str = ""
    card: str = ""
    seconds: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    failed: Sequence[str] = ()


def choose_backend(
    recipe: Recipe,
    take: Callable[[str], Plan],
    trial: Callable[[], Trial | str],
    earlier: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan on the rung that `fp8.backend` means.

    take: makes the plan on the rung of this name, if all ranks can take it. Otherwise, and for an empty name, it takes
        the first rung that they can.
    trial: what to time, or why nothing can be timed. Called after `take`.
    earlier: the `backend_choice` of the run that goes on, or is run again.

    Collective, and raises as `take` does.
    """
    if recipe.fp8.backend != "auto":
        return take("")
    if earlier and isinstance(earlier.get("taken"), str):
        return _as_before(take(earlier["taken"]), earlier)
    first = take("")
    if first.rung.precision != "fp8":
        return first

    # Plans of the other candidates. Some may not run here, or not with this model or engine.
    plans = [first]
    for rung in same_rule(recipe, first.rung):
        try:
            plan = take(rung.name)
        except ConfigError:
            continue
        if plan.resolved not in [other.resolved for other in plans]:
            plans.append(plan)

    chosen = _choose(plans, recipe, trial)
    (plan,) = [each for each in plans if each.resolved == chosen.taken]
    notes = (*plan.notes, f"{_HEAD} takes {chosen.taken}: {chosen.why}")
    return replace(plan, notes=notes, backend_choice=asdict(chosen))


def _as_before(plan: Plan, earlier: Mapping[str, Any]) -> Plan:
    """`plan` with the choice of an earlier run, which holds for later ones too, whatever this machine can run."""
    taken, why = earlier["taken"], earlier.get("why", "")
    note = f"{_HEAD} takes {taken} as when this run began: {why}"
    if plan.resolved != taken:
        note = f"{_HEAD} took {taken} when this run began, which cannot be taken here"
    return replace(plan, notes=(*plan.notes, note), backend_choice=dict(earlier))


def same_rule(recipe: Recipe, taken: Rung) -> list[Rung]:
    """The FP8 rungs that follow `taken` in the ladder without a gap, and compute by the same rule."""

    def by_the_rule(rung: Rung) -> bool:
        scalings = BACKENDS[rung.backend].scalings
        return rung.precision == "fp8" and recipe.fp8.scaling in scalings

    found: list[Rung] = []
    if not by_the_rule(taken):
        return found
    after = recipe.ladder.index(taken) + 1
    for rung in recipe.ladder[after:]:
        if not by_the_rule(rung):
            break
        found.append(rung)
    return found


def _choose(plans: Sequence[Plan], recipe: Recipe, trial: Callable[[], Trial | str]) -> Choice:
    """Time the candidates and decide, or say why the ladder's first is taken untimed."""
    # Reasons not to time at all. The ladder's first is taken then.
    names = [plan.resolved for plan in plans]
    if len(plans) == 1:
        return Choice(names[0], "no other FP8 rung that runs here computes by the same rule", names)
    what = f"the ladder's first of {', '.join(names)}, not timed"
    if torch.are_deterministic_algorithms_enabled():
        why = "the bits of a deterministic run must not depend on a clock"
        return Choice(names[0], f"{what}: {why}", names)
    asked = trial()
    if isinstance(asked, str):
        return Choice(names[0], f"{what}: {asked}", names)
    block = _block_of(plans[0], asked.model)
    if not block:
        why = f"{type(asked.model).__name__} has no nn.ModuleList with FP8 layers in it"
        return Choice(names[0], f"{what}: {why}", names)

    if world_size() > 1 and has_collectives(asked.model.get_submodule(block)):
        return Choice(names[0], f"{what}: {block} has layers that reduce over ranks", names)

    # Every rank times, and all decide by the times of the slowest, and by the failures of all.
    own = time_backends(plans, recipe, asked, block)
    untimed = Spread(math.inf, math.inf, math.inf)
    rows: list[list[float]] = []
    for name in names:
        spread = own.times.get(name, untimed)
        failed_here = float(name in own.failed)
        rows.append([*spread, failed_here])
    ranks = gather_over_ranks(torch.tensor(rows, device=asked.device)).tolist()
    failures = [each for each in gather_texts(own.missing) if each]
    slowest: dict[str, Spread] = {}
    failed: set[str] = set()
    for index, name in enumerate(names):
        answers = [rank[index] for rank in ranks]
        spreads = [Spread(*answer[:3]) for answer in answers]
        slowest[name] = max(spreads, key=lambda each: each.median)
        if any(answer[3] for answer in answers):
            failed.add(name)
    timed = {name: each for name, each in slowest.items() if math.isfinite(each.median)}

    # The decision, and its reason for the plan: each time, each failure, and what follows from them.
    taken, why = decide(names, timed, failed)
    compiled = [plan.resolved for plan in plans if plan.compiled]
    texts: list[str] = []
    for name, each in timed.items():
        text = _text(each, name in compiled)
        texts.append(f"{name} {text}")
    why = "; ".join([*texts, *failures, why])
    why = f"a training step of {block} on {asked.card}: {why}"
    seconds = {name: list(each) for name, each in timed.items()}
    return Choice(taken, why, names, block, asked.card, seconds, sorted(failed))


def decide(
    names: Sequence[str], times: Mapping[str, Spread], failed: Collection[str] = ()
) -> tuple[str, str]:
    """Which of `names`, in the ladder's order, to take by these times, and why.

    failed: rungs that raised while the block was timed. None of them is taken, unless all failed: then the block cannot
        be copied or called, whatever the rung.

    Of the others, one without times is not taken, unless it is the first: then nothing shows that another is faster.
    """
    able = [name for name in names if name not in failed] or list(names)
    if len(able) == 1 and len(names) > 1:
        return able[0], "the only one of these that ran"
    if able[0] not in times or len(times) == 1:
        which = "the ladder's first" if able[0] == names[0] else "the first that did not fail"
        return able[0], f"{which}, with nothing to compare it with"
    fastest = min(times.values(), key=lambda each: each.median)
    tied = [name for name in names if name in times and as_fast(times[name], fastest)]
    if len(tied) > 1:
        return tied[0], f"a tie of {', '.join(tied)}, which takes the ladder's first"
    return tied[0], "the fastest"


def has_collectives(block: nn.Module) -> bool:
    """Whether a forward of the block waits for other ranks, which call it another number of times while it is timed."""
    return any(isinstance(each, nn.SyncBatchNorm) for each in block.modules())


def _text(times: Spread, compiled: bool) -> str:
    low, median, high = (1e3 * each for each in times)
    how = ", compiled" if compiled else ""
    return f"{median:.3g} ms ({low:.3g} to {high:.3g}{how})"


def _block_of(plan: Plan, model: nn.Module) -> str:
    """Name of the first of the repeated blocks with the most FP8 layers; empty if there is none with any."""
    blocks = set(blocks_of(model))
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        if module in blocks:
            counts[name] = len(_inside(plan, name).fp8_layers())
    best = max(counts, key=lambda name: counts[name], default="")
    return best if counts.get(best) else ""


def _inside(plan: Plan, block: str) -> Plan:
    """`plan` without what is not in the block of that name."""

    def inside(name: str) -> bool:
        return name == block or name.startswith(f"{block}.")

    layers = tuple(row for row in plan.layers if inside(row.module))
    keep = tuple(name for name in plan.keep_fp32 if inside(name))
    return replace(plan, layers=layers, keep_fp32=keep)


# ---- Timing


class Call(NamedTuple):
    """The arguments of one call of a module."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class BlockBench:
    """A copy of one block, converted by `plan`, and training steps of it.

    Raises whatever a block that cannot be copied, converted or called raises.
    """

    def __init__(self, plan: Plan, recipe: Recipe, trial: Trial, name: str, call: Call) -> None:
        # The copy lies under its own name, by which the plan knows its layers.
        inner = _copy_of(name, trial.model)
        for part in reversed(name.split(".")):
            around = nn.Module()
            around.add_module(part, inner)
            inner = around
        self._whole = inner
        self.backend = build_backend(_inside(plan, name), recipe, inner, trial.device)
        self._block = inner.get_submodule(name)
        if plan.compiled:
            self._block.compile()

        self._call = tree_map_only(Tensor, Tensor.clone, call)
        # The hidden state, which comes first, wants a gradient as in the model. Masks and positions do not.
        floats: list[Tensor] = []
        for each in tree_leaves(self._call):
            if not isinstance(each, Tensor) or not each.is_floating_point():
                continue
            floats.append(each)
        self._inputs = [each.requires_grad_() for each in floats[:1]]
        self._not_skipped = torch.zeros((), device=trial.device)
        self._grads: list[Tensor] = []

    def step(self) -> None:
        """A window of one micro-batch: forward, backward, and the end of the window without an update."""
        for tensor in (*self._whole.parameters(), *self._inputs):
            tensor.grad = None
        backend = self.backend
        backend.begin_window(sample=False)
        # A block may write to its input. A copy of a leaf may be written to, and leaves the leaf as it is.
        given = tree_map_only(Tensor, _for_one_call, self._call)
        with backend.context():
            out = self._block(*given.args, **given.kwargs)
        outputs: list[Tensor] = []
        for leaf in tree_leaves(out):
            if not isinstance(leaf, Tensor) or not leaf.requires_grad:
                continue
            outputs.append(leaf)
        if not self._grads:
            self._grads = [torch.randn_like(each) for each in outputs]
        with backend.backward_context(last=True):
            torch.autograd.backward(outputs, self._grads)
        backend.end_micro_batch(_same)
        backend.end_window(backend.amax(), self._not_skipped, _same)


def _copy_of(name: str, model: nn.Module) -> nn.Module:
    """A deep copy of the module of that name; where it has no memory for its weights yet, with their values."""
    module = model.get_submodule(name)
    recording = recording_of(model)
    if recording is None:
        return copy.deepcopy(module)
    copies: dict[int, Any] = {}
    for each in (*module.parameters(), *module.buffers()):
        if not recording.holds(each):
            continue
        value = recording.value(recording.view(each)).to(recording.device)
        if isinstance(each, nn.Parameter):
            value = nn.Parameter(value, each.requires_grad)
        copies[id(each)] = value
    return copy.deepcopy(module, copies)


class Timing(NamedTuple):
    """What came of timing a block, by rung.

    times: seconds of a step, of each that could be timed.
    failed: those that raised.
    missing: which have no times, and why; empty if all have.
    """

    times: Mapping[str, Spread]
    failed: Collection[str]
    missing: str


def time_backends(plans: Sequence[Plan], recipe: Recipe, trial: Trial, block: str) -> Timing:
    """Time a training step of the block under each plan.

    Takes some seconds, and the time of compiling the block once. What stays in memory are workspaces that a library
    keeps for the process.
    """
    with _no_trace(plans, trial.device):
        times, failures = _time(plans, recipe, trial, block)
    reasons = dict(failures)
    found: dict[str, Spread] = {}
    for name, values in times.items():
        if len(values) < _LEAST_ROUNDS:
            reasons[name] = f"under {_LEAST_ROUNDS} rounds in {_LIMIT:g} s"
        else:
            found[name] = spread_of(values)
    texts = [f"{name} was not timed: {why}" for name, why in reasons.items()]
    return Timing(found, failures.keys(), "; ".join(texts))


def _time(
    plans: Sequence[Plan], recipe: Recipe, trial: Trial, block: str
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of each round by rung, and why a rung has none."""
    try:
        call = _call_of(block, trial)
    except Exception as error:
        # Of the user's model, which would raise it in training, or for want of memory.
        return {}, {plan.resolved: one_line(error) for plan in plans}
    if call is None:
        return {}, {plan.resolved: f"the model does not call {block}" for plan in plans}

    # The first step compiles, which is no part of the time.
    steps: dict[str, Callable[[], None]] = {}
    failures: dict[str, str] = {}
    for plan in plans:
        try:
            step = BlockBench(plan, recipe, trial, block, call).step
            step()
            wait(trial.device)
        except Exception as error:
            # Whatever a copy, a compiler or a kernel raises is an answer about this backend.
            failures[plan.resolved] = one_line(error)
        else:
            steps[plan.resolved] = step
    # The limit is for the rounds alone: by now everything is compiled.
    deadline = time.monotonic() + _LIMIT
    times, more = in_turns(steps, trial.device, _TURN, _ROUNDS, deadline)
    return times, failures | more


@contextmanager
def _no_trace(plans: Sequence[Plan], device: torch.device) -> Iterator[None]:
    """Restore random numbers afterwards, and drop memory and compiled code."""
    try:
        with random_numbers_apart(device), torch.enable_grad():
            yield
    finally:
        # What was compiled for the copies must not count as a variant of the model's blocks.
        if any(plan.compiled for plan in plans):
            torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


class _Reached(BaseException):
    """The block was called. No Exception: the model could catch that."""


def _call_of(block: str, trial: Trial) -> Call | None:
    """The arguments of the block's first call in a forward of the model, copied; None if it is not called.

    The forward ends there: what follows may have weights that are not in memory.
    """
    calls: list[Call] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A cache for generation grows at every call, and is no part of training.
        given = {name: value for name, value in kwargs.items() if name not in _CACHES}
        call = Call(args, given)
        calls.append(tree_map_only(Tensor, lambda each: each.detach().clone(), call))
        raise _Reached

    model, device = trial.model, trial.device
    handle = model.get_submodule(block).register_forward_pre_hook(note, with_kwargs=True)
    in_bf16 = torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)
    try:
        with left_alone(model, device), computing(model), in_bf16:
            trial.forward(model)
    except _Reached:
        pass
    finally:
        handle.remove()
    return calls[0] if calls else None


def _for_one_call(argument: Tensor) -> Tensor:
    return argument.clone() if argument.requires_grad else argument


def _same(values: Tensor) -> Tensor:
    """Stands for the reduction over ranks: there is one."""
    return values
