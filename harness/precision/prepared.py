"""A model under its plan, for `harness.Precision`: what runs and judges it, and the state that a continuation needs."""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from harness.capability.cards import Tier, check_usable, tier_of
from harness.capability.probe import MachineFacts, probe
from harness.core.collectives import (
    ForwardClock,
    RankComparison,
    gather_texts,
    world_rank,
    world_size,
)
from harness.core.config import GuardConfig
from harness.core.errors import (
    CheckpointError,
    MachineError,
    MisuseError,
    Problem,
    near_match,
    some,
)
from harness.core.facts import Limits, RungVerdict, StepTerms, Switch, pad_numbers
from harness.core.metrics import SCALARS
from harness.core.protocols import Meta, Monitor, Stateful, TensorDict
from harness.core.sharded import StartWeights
from harness.core.state import RunLedger, TrainState
from harness.core.update import InFlight, TorchGradients, WindowBuffers
from harness.monitors.fallback import FallbackController, WholeRunFallback
from harness.monitors.fp8 import Fp8Monitor
from harness.monitors.registry import MonitorsPart
from harness.monitors.responder import Judge
from harness.precision.backend_choice import Trial, choose_backend
from harness.precision.compiling import compiles
from harness.precision.convert import build_backend, monitor_context
from harness.precision.loss_scale import build_loss_scale
from harness.precision.misuse import OfShards, OpenWindow, parameters_of, sharded_problems
from harness.precision.plan import NoFp8LayerError, Plan, make_plan, take_rung
from harness.precision.recipe import Recipe, Rung
from harness.precision.shape_probe import probe_layers
from harness.precision.sharding import (
    LoopShards,
    is_sharded,
    kept_copies,
    late_problem,
    other_calls,
)

_log = logging.getLogger("harness.precision")
# The package of every class that replaces a layer by one in FP8.
_FP8_LAYERS = "harness.precision.backends."
# A parameter's name, the dict and key that it is found under, its dtype and number of dimensions.
_Place = tuple[str, dict[str, nn.Parameter | None], str, torch.dtype, int]


class AboutLoop(NamedTuple):
    """What `fp8.backend: auto` asks of a loop, see `Precision.prepare`."""

    forward: Callable[[], object] | None = None
    compiled: bool = False
    saved: Mapping[str, Mapping[str, Any]] | None = None


class Prepared:
    """Plan, backend, loss scale and judge of one converted model.

    device: the one device of all parameters.
    plan, backend, loss_scale: what the recipe became here. loss_scale: None unless fp16.
    context: what monitors are built from.
    window: refuses what must not happen between a window's first forward and its step.
    buffers: the model's persistent buffers, restored if an update is skipped.
    applied: updates applied so far, float32 0-d on the device.
    forward_clock: times forwards, where ranks are compared.
    pending: facts of steps that are not judged yet, oldest first.
    last: facts of the last step.
    guarded: a `harness.Guard` judges, not this class.
    optimizers: those that the guard restores on a rollback.
    has_telemetry: a `harness.Telemetry` records what happens.
    loaded: how often a state was loaded.
    shards: this rank's rows, once the loop has sharded the model; see `find_shards`.
    parts: names of the state owned here; a Guard adds model and optimizers.
    state: everything that a continuation needs. This object is a part of it itself ("own": `applied`, and the layers
      that the user keeps in BF16 by `precision.demote`).
    """

    def __init__(
        self, recipe: Recipe, model: nn.Module, seed: int = 0, about: AboutLoop | None = None
    ) -> None:
        # Decide: what the machine can do, and what runs where.
        facts = probe()
        if unusable := check_usable(facts):
            raise MachineError(unusable)
        self.device = _device_of(model, facts)
        self.plan = _plan(recipe, facts, self.device, model, about or AboutLoop())
        self._ranks = world_size()
        self._agreed = False

        # Convert. The plan finds the weights of FP8 layers in the model as it was before.
        self.loss_scale = build_loss_scale(self.plan, recipe, self.device)
        fp8_weights = self.plan.fp8_weights(model)
        self.backend = build_backend(self.plan, recipe, model, self.device, self.loss_scale)
        # What monitors must know of the run; a loss scale means that it may leave fp16.
        scaled = self.loss_scale is not None
        self.context = monitor_context(
            recipe, self.backend, facts, self.device, scaled, leaves_fp16=scaled
        )

        # Weights are kept by name: references to the whole ones would keep them in memory when the model is sharded.
        self._fp8_names = self.plan.names_of(fp8_weights, model)
        del fp8_weights
        self.shards: LoopShards | None = None
        self._start = StartWeights(model, self.device) if self._ranks > 1 else None

        self.model = model
        self._remember()
        self.owned: dict[int, nn.Parameter] = {}

        # What changes while the loop runs: the open window, steps that wait for a verdict, the guard.
        self.window = OpenWindow(self.owns_any)
        self.buffers = WindowBuffers(model)
        self.applied = torch.zeros((), dtype=torch.float32, device=self.device)
        self.forward_clock: ForwardClock | None = None
        self.pending: deque[InFlight] = deque()
        self.last: InFlight | None = None
        self.guarded = False
        self.has_telemetry = False
        self.optimizers: list[Optimizer] = []
        self.loaded = 0

        # Without a guard these monitors judge: of FP8's state, and the recipe's fallback.
        monitors: list[Monitor] = []
        for kind in (Fp8Monitor, FallbackController, WholeRunFallback):
            monitor = kind.build(self.context)
            if monitor is not None:
                monitors.append(monitor)

        # What `state_dict` saves. The loss scale is a part of its own, and only under fp16.
        parts: dict[str, Stateful] = {
            "fp8": self.backend,
            "monitors": MonitorsPart(monitors),
            "own": self,
        }
        if self.loss_scale is not None:
            parts["loss_scale"] = self.loss_scale
        self.parts = tuple(parts)
        self.state = TrainState(parts)
        self.judge = Judge(self.context.guard, self.state, self.backend, monitors, seed=seed)

    def watch(
        self,
        config: GuardConfig,
        monitors: Sequence[Monitor],
        comparison: RankComparison | None,
        optimizers: Sequence[Optimizer],
    ) -> Judge:
        """Let a guard's monitors judge from now on; before the first step. Returns the new judge."""
        self.guarded = True
        self.optimizers = list(optimizers)
        self.forward_clock = ForwardClock(self.device) if world_size() > 1 else None
        self.state.parts["monitors"] = MonitorsPart(monitors)
        self.judge = Judge(
            config, self.state, self.backend, monitors, self.judge.held, comparison, self.judge.seed
        )
        return self.judge

    def agree(self) -> None:
        """Before the first backward: raises MisuseError on every rank if they differ in what must be alike.

        With different plans amaxes would go to the wrong layers. With different seeds, steps or guards a rank would
        exchange something in a step in which the others do not, and all would wait. Collective, once.
        """
        if self._agreed or world_size() == 1:
            return
        self._agreed = True

        # Of the plan the first line is for the message, the others make equal texts mean equal plans.
        count = len(self.plan.fp8_layers())
        lines = [f"{self.plan.resolved}, {count} FP8 layers"]
        for row in self.plan.layers:
            line = f"{row.module} {row.precision} {row.backend}"
            lines.append(line)
        mine = {
            "plans": "\n".join(lines),
            "seeds": str(self.judge.seed),
            "numbers of steps done": str(self.state.step),
            "guards": f"on\n{self.judge.config}" if self.guarded else "none",
        }
        texts = gather_texts(json.dumps(mine))
        late = len(texts) != self._ranks
        self._ranks = len(texts)
        if problems := _differences(texts, late):
            raise MisuseError(problems)

    def find_shards(self, call: str, in_forward: bool = False) -> None:
        """Look whether the loop has sharded the model since `prepare`. The first call that finds it so is collective.

        in_forward: a forward of the model has begun.

        Raises MisuseError if it is sharded in a way that would give other numbers, or too late to look at it.
        """
        if self.shards is not None:
            return
        modules = [module for _, _, module in self._children]
        if not is_sharded([self.model, *modules]):
            return
        if in_forward:
            raise MisuseError(late_problem(call))
        if self._ranks != world_size():
            what = "the model is sharded, and prepare() came before the process group"
            why = "the ranks' weights and plans were never compared"
            fix = "call init_process_group() before prepare()"
            raise MisuseError(Problem(what, call, why, fix))
        if self.guarded:
            what = "the model was sharded after Guard.for_precision"
            why = "snapshots and rollbacks would be of parameters that it no longer has"
            raise MisuseError(Problem(what, call, why, "make the Guard after fully_shard"))

        shards = LoopShards(call, self.model, self.device, self._start)
        # No cast of a whole weight may be kept from here on; and nothing here holds the whole weights any longer.
        self.backend.gather_weights()
        if note := kept_copies(self.plan.rung.precision, self.model):
            self.plan = replace(self.plan, notes=(*self.plan.notes, note))
        self.shards, self._start = shards, None
        self.owned = {id(own): own for own in [*shards.parameters, *shards.gathered]}

    def parameters(self) -> list[nn.Parameter]:
        """The model's parameters; of a sharded one those that optimizers hold, whatever is gathered now."""
        if self.shards is not None:
            return self.shards.parameters
        return list(self.model.parameters())

    def fp8_weights(self) -> dict[str, Tensor]:
        """The weight of each FP8 layer, see `Plan.fp8_weights`. Empty after the first step, as nobody asks then."""
        if self.state.step:
            return {}
        weights: dict[str, Tensor] = dict(self.model.named_parameters())
        # While a unit is gathered, the model has other Parameters: the rows are found by the shards.
        if self.shards is not None:
            weights |= self.shards.local.sharded
        found: dict[str, Tensor] = {}
        for layer, name in self._fp8_names.items():
            if name in weights:
                found[layer] = weights[name]
        return found

    def of_shards(self) -> OfShards | None:
        """The check of an optimizer of the sharded model; None for a model that is not sharded."""
        return None if self.shards is None else self.shards.optimizer_problems

    def check_gradients(self, call: str) -> None:
        """Raises MisuseError if gradients are not as the last `backward` left them."""
        self.window.check_gradients(call)
        if self.shards is not None:
            self.shards.check_gradients(call)

    def moved(self) -> str:
        """How the model changed after it was prepared, in a way that breaks the plan; empty if it did not.

        Adapters may be added, and parts of the model may change their place in it. A part that the plan names must
        stay.
        """
        forward = vars(self.model).get("forward")
        if forward is not self._forward and not self._is_prepared_forward(forward):
            return "has changed since prepare(): its forward was replaced, as by another library's autocast"

        for name, store, key, dtype, ndim in self._places:
            value = store.get(key)
            if value is None:
                continue
            if value.ndim != ndim:
                return f"has another shape of {name}, as after FullyShardedDataParallel (FSDP1) or ZeRO 3"
            if value.device != self.device:
                return f"was prepared on {self.device} and is on {value.device} now ({name})"
            if value.dtype != dtype:
                return f"was prepared in {dtype} and is in {value.dtype} now ({name})"

        # Only if some module is no longer where it was, all modules are searched for those that the plan names.
        if any(store.get(key) is not module for store, key, module in self._children):
            here = set(self.model.modules())
            for name, module in self._planned:
                if module not in here:
                    planned = self._as_planned[name]
                    return f"has another module for {name}, which was to run {planned}"
            self._children = _children(self.model)
        return ""

    def _is_prepared_forward(self, forward: Any) -> bool:
        """Whether `forward` is the prepared one, a torch.compile of it, or the class's own, put back on the instance.

        torch keeps what it compiled, and inside of a wrapper of its own if that is a method of torch's.
        """
        compiled = getattr(forward, "_torchdynamo_orig_callable", None)
        forms = [forward, compiled, getattr(compiled, "__wrapped__", None)]
        if self._forward is not None:
            return any(form is self._forward for form in forms)
        # A bound method is a new object at each look-up; its function is not.
        of_class = type(self.model).forward
        return any(getattr(form, "__func__", None) is of_class for form in forms)

    def _remember(self) -> None:
        """Note what `moved` compares. It only looks up dicts, because every forward asks."""
        self._as_planned: dict[str, str] = {}
        for row in self.plan.layers:
            if row.shape:
                self._as_planned[row.module] = f"in {row.precision}"
        for name in self.plan.keep_fp32:
            self._as_planned[name] = "in fp32"

        # Shared modules have several names, and the plan may use any of them.
        modules = dict(self.model.named_modules(remove_duplicate=False))
        self._planned: list[tuple[str, nn.Module]] = []
        for name in self._as_planned:
            if name in modules:
                self._planned.append((name, modules[name]))
        self._children = _children(self.model)
        self._forward = vars(self.model).get("forward")

        self._places: list[_Place] = []
        for name, module in modules.items():
            store = module._parameters
            for key, value in store.items():
                if value is not None:
                    full = f"{name}.{key}" if name else key
                    self._places.append((full, store, key, value.dtype, value.ndim))

    def owns_any(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether one of them is the model's."""
        asked = {id(parameter) for parameter in parameters}
        # Adapters may have come since the last look.
        if asked.isdisjoint(self.owned) and self.shards is None:
            self.owned = {id(own): own for own in self.model.parameters()}
        return not asked.isdisjoint(self.owned)

    def guard_problems(self, optimizers: Iterable[object]) -> list[Problem]:
        """Why a guard refuses a step of these optimizers; empty without a guard."""
        problems: list[Problem] = []
        if not self.guarded:
            return problems
        for each in optimizers:
            if not any(each is other for other in self.optimizers):
                what = f"{type(each).__name__} is not known to the guard"
                why = "a rollback would not restore its state"
                fix = "give all of them to Guard.for_precision"
                problems.append(Problem(what, "step()", why, fix))
        if len(self.pending) > 1:
            fix = "call guard.end_step() once in every step, after optimizer.zero_grad()"
            problems.append(Problem("the guard has not judged the last step", "step()", fix=fix))
        return problems

    def terms(self) -> StepTerms:
        """What was decided about the next step. Only a guard asks for the figures that cost time."""
        terms = self.judge.terms()
        return terms if self.guarded else replace(terms, measures=False)

    def judge_earlier(self, facts: InFlight) -> Switch | None:
        """After a step, judge the one before it, whose figures have arrived by now. With a guard, the guard judges.

        facts: of the step that just ended. Returns what the recipe's fallback moved; the same on every rank. Raises
        MisuseError on every rank if they called other blocks of a sharded model in the step before.
        """
        self.last = facts
        self.pending.append(facts)
        self.state.advance()
        moved: Switch | None = None
        while len(self.pending) > 1 and not self.guarded:
            earlier = self.pending.popleft().facts()
            if earlier.other_calls:
                what = f"ranks called other blocks in step {earlier.step}"
                raise MisuseError(other_calls(what))
            judged = self.judge.observe(earlier)
            if world_rank() == 0:
                for verdict in judged.to_log:
                    _log.warning("step %d: %s: %s", verdict.step, verdict.code, verdict.text)
            for _, switch in self.judge.switch_due():
                # A move of the whole run names no layers.
                demoted = () if switch.whole_run_to else switch.demote
                reason = ""
                if isinstance(judged.action, Switch):
                    reason = judged.action.reason
                moved = Switch(demoted, switch.promote, reason, switch.whole_run_to)
        if moved and (moved.demote or moved.promote or moved.whole_run_to):
            return moved
        return None

    def select(self, call: str, layers: str | Iterable[str]) -> list[str]:
        """The FP8 layers that the patterns match, by padded names (blocks.3 as blocks.03).

        A pattern is matched with the names of the model. If none fits, it is matched with the padded ones.

        Raises MisuseError for a pattern that matches no Linear.
        """
        linears = [row.module for row in self.plan.layers if row.shape]
        patterns = [layers] if isinstance(layers, str) else layers
        chosen: set[str] = set()
        problems: list[Problem] = []
        for pattern in dict.fromkeys(patterns):
            names = [name for name in linears if fnmatchcase(name, pattern)]
            if not names:
                padded = {name: pad_numbers(name) for name in linears}
                names = [name for name in linears if fnmatchcase(padded[name], pattern)]
            if not names:
                what = f'pattern "{pattern}" matches no Linear'
                problems.append(Problem(what, call, fix=near_match(pattern, linears)))
            chosen.update(map(pad_numbers, names))
        if problems:
            raise MisuseError(problems)
        return [layer for layer in self.context.layers if layer in chosen]

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """The part "own": {"applied": fp32 0-d}, and the layers that the user keeps in BF16."""
        return {"applied": self.applied}, {"held": sorted(self.judge.held)}

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave. Steps that are not judged yet are dropped."""
        self.applied.copy_(tensors["applied"])
        self.judge.held.clear()
        self.judge.held.update(meta["held"])
        self.pending.clear()
        self.last = None

    def save(self) -> dict[str, dict[str, Any]]:
        """See `Precision.state_dict`."""
        tensors, meta = self.state.state_dict(self.parts)
        flat: dict[str, Tensor] = {}
        for part, named in tensors.items():
            for name, tensor in named.items():
                flat[f"{part}.{name}"] = tensor

        # The last step may still have to be judged: its facts go along.
        last: dict[str, Any] | None = None
        if self.last is not None:
            flat["last"] = self.last.arrived()
            last = _last(self.last, bool(self.pending))
        own = {
            "resolved": self.plan.resolved,
            "rollback_lr_factor": self.judge.config.rollback_lr_factor,
            "state": meta,
            "incidents": asdict(self.state.ledger),
            "last": last,
        }
        if self.plan.backend_choice is not None:
            own["backend_choice"] = dict(self.plan.backend_choice)
        copies = {name: value.detach().clone() for name, value in flat.items()}
        return {"tensors": copies, "meta": own}

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """See `Precision.load_state_dict`."""
        # Check before anything is changed. Each part still checks its own tensors as it loads them.
        tensors = state.get("tensors", {})
        meta = state.get("meta", {})
        if meta.get("resolved", self.plan.resolved) != self.plan.resolved:
            what = f"it was written under {meta['resolved']}, this model runs under {self.plan.resolved}"
            fix = "load it on a machine of the same tier, or train on without it"
            if self.plan.backend_choice is not None:
                fix = "give it to prepare(saved=...) first, which takes the same backend again"
            raise _bad_state(what, fix)

        # Only names are compared, with a state of this model as it is now. It is small: FP8 scales and no weights.
        mine = self.save()
        needed = mine["tensors"].keys() - {"last"}
        if meta.get("last") is not None:
            needed.add("last")
        missing_meta = mine["meta"].keys() - meta.keys() - {"backend_choice"}
        missing_tensors = needed - tensors.keys()
        missing = missing_meta | missing_tensors
        if missing:
            what = f"{', '.join(sorted(missing))} missing"
            raise _bad_state(what, "give what state_dict() returned, both halves of it")
        try:
            saved = RunLedger.from_json(meta["incidents"])
        except ValueError as error:
            what = f"its incidents cannot be read: {error}"
            raise _bad_state(what, "give what state_dict() returned") from error

        # Rates were lowered by this factor at each rollback: with another one the run would go on at other rates.
        factor = meta["rollback_lr_factor"]
        here = self.judge.config.rollback_lr_factor
        if saved.returned_to and factor != here:
            what = f"a run that was rolled back at rollback_lr_factor={factor:g} would go on at {here:g}"
            fix = f"make a Guard with rollback_lr_factor={factor:g} before loading it"
            raise _bad_state(what, fix)

        # An older ledger stays out: it would undo what a rollback since then has learned.
        if saved.attempt >= self.state.ledger.attempt:
            self.state.ledger.take_over(saved)
        by_part: dict[str, TensorDict] = {}
        for part in self.parts:
            by_part[part] = _part(tensors, part)
        self.state.resume(by_part, meta["state"], self.parts)
        self.loaded += 1

        # A step that was not judged when the state was saved is judged in this process.
        last = meta["last"]
        if last is not None:
            self.last = _restored(last, tensors["last"], self.backend.slot_names)
            if not last["judged"]:
                self.pending.append(self.last)


_ALIKE = {
    "plans": (
        "what ranks exchange belongs to layers, and would go to the wrong ones",
        "prepare the same model by the same recipe on every rank",
    ),
    "seeds": (
        "they would sample statistics in different steps, and wait for each other",
        "give Precision the same seed on every rank",
    ),
    "numbers of steps done": (
        "a state was loaded on only some ranks: scales, samples and decisions would differ",
        "load_state_dict() of the same state on every rank",
    ),
    "guards": (
        "a guard exchanges facts with the guards of all ranks",
        "Guard.for_precision on every rank, with the same settings; its telemetry writes only on rank 0",
    ),
}
"""What `Prepared.agree` compares -> why it must be alike, and what to do."""


def _differences(texts: Sequence[str], late: bool) -> list[Problem]:
    """One problem for each of _ALIKE in which ranks differ.

    texts: JSON of every rank.
    late: the ranks met after `prepare`.
    """
    # What another collective sent is no JSON object.
    elsewhere = [f"rank {rank}" for rank, text in enumerate(texts) if not text.startswith("{")]
    if elsewhere:
        what = f"{some(elsewhere, 3)} exchanged something else than this first backward()"
        why = "every rank must make the same calls in the same order"
        _, fix = _ALIKE["guards"]
        return [Problem(what, "backward()", why, fix)]

    problems: list[Problem] = []
    ranks = [json.loads(text) for text in texts]
    for name, (why, fix) in _ALIKE.items():
        values = [each[name] for each in ranks]
        if len(set(values)) == 1:
            continue
        summaries: list[str] = []
        for rank, value in enumerate(values):
            first_line, _, _ = value.partition("\n")
            summaries.append(f"rank {rank}: {first_line}")
        what = f"ranks have different {name} ({', '.join(summaries)})"
        if name == "plans" and late:
            why = "prepare() came before the process group, so that each rank decided alone"
            fix = "call init_process_group(), or make the Accelerator, before prepare()"
        problems.append(Problem(what, "backward()", why, fix))
    return problems


class LoopGradients(TorchGradients):
    """The gradients of one step in somebody else's loop. On top of torch's own it does what an engine of this project
    does.

    While the update is applied, learning rates are multiplied by the factor that rollbacks left. After a skipped update
    the model's persistent buffers are restored. Applied updates are counted.
    """

    def __init__(
        self,
        ready: Prepared,
        optimizers: Sequence[Optimizer],
        max_norm: float,
        overflow: Tensor | None,
    ) -> None:
        parameters: Iterable[nn.Parameter] = parameters_of(optimizers)
        weights: Iterable[nn.Parameter] = ready.parameters()
        # Of a sharded model every rank measures its own rows, and the sums over ranks are of all of them.
        shards = ready.shards
        local = None
        named: Mapping[str, nn.Parameter] = {}
        # Only a hunt reports norms by the names of weights.
        if ready.terms().hunts:
            named = dict(ready.model.named_parameters())
        if shards is not None:
            parameters = shards.counted(parameters)
            weights = shards.counted(weights)
            local = shards.local
            named = local.weights
        super().__init__(
            optimizers,
            parameters,
            max_norm,
            ready.loss_scale,
            ready.device,
            overflow,
            weights=weights,
            local=local,
            named=named,
        )
        self._ready = ready

    def measure(self, thorough: bool, hunts: bool) -> dict[str, Tensor]:
        """See `Gradients.measure`."""
        figures = super().measure(thorough, hunts)
        if self._ready.shards is not None:
            self._ready.shards.check()
        return figures

    def apply(
        self,
        skip: Tensor,
        overflow: Tensor,
        norm: Tensor,
        clip: float,
    ) -> dict[str, Tensor]:
        """See `Gradients.apply`. Adds `applied_steps` to the figures."""
        ready = self._ready
        with _lr_times(self._optimizers, ready.judge.lr_factor):
            figures = super().apply(skip, overflow, norm, clip)
        ready.buffers.settle(figures["applied"])
        if ready.shards is not None:
            ready.shards.update_done()
        ready.applied += figures["applied"]
        return {**figures, "applied_steps": ready.applied.clone()}


@contextmanager
def _lr_times(optimizers: Iterable[Optimizer], factor: float) -> Iterator[None]:
    """The optimizers' learning rates times `factor`, for one update."""
    groups: list[dict[str, Any]] = []
    if factor != 1:
        for optimizer in optimizers:
            groups += optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        # A new object: a rate may be a tensor that a scheduler holds.
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def _children(model: nn.Module) -> list[tuple[dict[str, nn.Module | None], str, nn.Module]]:
    """Every module, with the dict and key that it is found under."""
    found: list[tuple[dict[str, nn.Module | None], str, nn.Module]] = []
    for parent in model.modules():
        for key, child in parent._modules.items():
            if child is not None:
                found.append((parent._modules, key, child))
    return found


def _device_of(model: nn.Module, facts: MachineFacts) -> torch.device:
    """The one device of a trainable float32 model. Raises MisuseError with everything that is wrong with the model."""
    devices = sorted({parameter.device for parameter in model.parameters()}, key=str)
    problems = [
        *_wrapping_problems(model),
        *_parameter_problems(model),
        *_fp8_problems(model),
        *_device_problems(devices, facts),
    ]
    if problems:
        raise MisuseError(problems)
    return devices[0]


def _wrapping_problems(model: nn.Module) -> list[Problem]:
    """The model has to be bare: DDP, torch.compile and accelerate come after `prepare`."""
    problems = sharded_problems("prepare()", model.parameters())
    if isinstance(model, DistributedDataParallel | DataParallel):
        what = f"the model is wrapped in {type(model).__name__}"
        fix = "prepare the bare model, then wrap what prepare() returned"
        problems.append(Problem(what, "prepare()", fix=fix))
    # The model may be wrapped, or any module of it.
    compiled: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, OptimizedModule):
            compiled.append(name)
    if compiled:
        what = f"{compiled[0] or 'the model'} is wrapped in torch.compile"
        why = 'its layers would be planned and saved under other names, with "_orig_mod." in them'
        fix = "prepare the bare model first, then compile what prepare() returned, or its blocks (block.compile())"
        problems.append(Problem(what, "prepare()", why, fix))
    if hasattr(model, "_original_forward"):
        what = "the model's forward was replaced by accelerate"
        why = "its autocast would go against the plan"
        fix = 'prepare the model first, with Accelerator(mixed_precision="no")'
        problems.append(Problem(what, "prepare()", why, fix))
    return problems


def _parameter_problems(model: nn.Module) -> list[Problem]:
    """There have to be trainable parameters, all of them in float32."""
    problems: list[Problem] = []
    trainable: list[str] = []
    odd: list[str] = []
    lazy: list[str] = []
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            lazy.append(name)
        if not parameter.requires_grad:
            continue
        trainable.append(name)
        if parameter.dtype != torch.float32:
            odd.append(f"{name} ({parameter.dtype})")
    if lazy:
        what = f"{len(lazy)} parameters have no size yet, such as {lazy[0]}"
        why = "a lazy module gets its size in its first call, and the plan depends on it"
        fix = "call the model once on a batch, under torch.no_grad(), before prepare()"
        problems.append(Problem(what, "prepare()", why, fix))
    if not trainable:
        what = "the model has no trainable parameter"
        problems.append(Problem(what, "prepare()", fix="give the model to train"))
    if odd:
        what = f"{len(odd)} trainable parameters are not float32, such as {odd[0]}"
        why = "autocast and the FP8 casts start from float32 weights; low-precision weights lose small updates"
        problems.append(Problem(what, "prepare()", why, "call model.float() first"))
    return problems


def _fp8_problems(model: nn.Module) -> list[Problem]:
    """No layer may be converted already."""
    fp8: list[str] = []
    for name, module in model.named_modules():
        if type(module).__module__.startswith(_FP8_LAYERS):
            fp8.append(name)
    if fp8:
        what = f"the model has {len(fp8)} FP8 layers of another Precision, such as {fp8[0] or 'itself'}"
        why = "their scales belong to that one; under this one they would compute without FP8"
        fix = "give prepare() a model that was never prepared: build it anew, or copy it before"
        return [Problem(what, "prepare()", why, fix)]
    return []


def _device_problems(devices: Sequence[torch.device], facts: MachineFacts) -> list[Problem]:
    """All parameters have to be on one device, the current GPU if there is one."""
    kinds = {device.type for device in devices}
    if len(devices) > 1 or not kinds <= {"cpu", "cuda"}:
        names = ", ".join(map(str, devices))
        what = f"the parameters are on {names}"
        fix = "put the whole model on one cuda device, or on the CPU"
        return [Problem(what, "prepare()", fix=fix)]
    if devices and devices[0].type == "cpu" and tier_of(facts)[0] is not Tier.CPU:
        what = f"the model is on the CPU, but this machine has a GPU ({facts.devices[0].name})"
        fix = 'move the model first; to train on the CPU on purpose, set CUDA_VISIBLE_DEVICES=""'
        return [Problem(what, "prepare()", fix=fix)]
    if devices and devices[0].type == "cuda" and devices[0].index != torch.cuda.current_device():
        current = torch.cuda.current_device()
        what = f"the model is on {devices[0]}, and this process's current GPU is cuda:{current}"
        why = "events, Triton's and Transformer Engine's kernels go to the current GPU, whatever their tensors are on"
        fix = f"call torch.cuda.set_device({devices[0].index}) before, in every process for its own GPU"
        return [Problem(what, "prepare()", why, fix)]
    return []


def _plan(
    recipe: Recipe,
    facts: MachineFacts,
    device: torch.device,
    model: nn.Module,
    about: AboutLoop,
) -> Plan:
    """The model's plan, on the first rung that it can use, or as fp8.backend says. Every skipped rung is logged."""

    def plan_on(rung: Rung, rungs: list[RungVerdict]) -> Plan:
        try:
            compiled = about.compiled and compiles(rung, recipe.layers.fuse)
            plan = make_plan(recipe, facts, rung, rungs, model)
            plan = replace(plan, compiled=compiled)
            return probe_layers(plan, recipe, facts, device)
        except NoFp8LayerError as error:
            if world_rank() == 0:
                problem = error.problems[0]
                _log.warning("%s is not taken: %s (%s)", rung.name, problem.what, problem.why)
            raise

    def trial() -> Trial | str:
        forward = about.forward
        if forward is None:
            return "prepare() got no forward to time a block with"
        return Trial(model, lambda _: forward(), device, facts)

    earlier = None
    if about.saved is not None:
        earlier = about.saved.get("meta", {}).get("backend_choice")
    return choose_backend(
        recipe, partial(take_rung, recipe, facts, device, plan_on), trial, earlier
    )


def _last(facts: InFlight, pending: bool) -> dict[str, Any]:
    """What `_restored` needs beside the packed figures of the last step; JSON-able."""
    return {
        "step": facts.step,
        "window": facts.window,
        "limits": facts.limits.as_json(),
        "judged": not pending,
        "demoted": list(facts.demoted),
        "lowered": facts.fell_back_to,
        "figures": list(SCALARS),
        "layers": list(facts.layers),
        "compared": list(facts.compared),
    }


def _restored(
    meta: Mapping[str, Any],
    packed: Tensor,
    slot_names: tuple[str, ...],
) -> InFlight:
    """The facts that were saved. Figures are found by their names in `meta`; one that is not there is NaN."""
    # Figures of the whole step come first in `packed`; those of slots, layers and parameters are behind them.
    names = meta["figures"]
    found = dict(zip(names, packed.tolist(), strict=False))
    values = [found.get(name, math.nan) for name in SCALARS]
    scalars = torch.tensor(values, device="cpu")
    others = packed[len(names) :].detach().cpu()
    return InFlight(
        meta["step"],
        meta["window"],
        torch.cat([scalars, others]),
        None,
        slot_names,
        demoted=tuple(meta["demoted"]),
        fell_back_to=meta["lowered"],
        # States from before the hunt have neither name: they measured no layers.
        layers=tuple(meta.get("layers", ())),
        compared=tuple(meta.get("compared", ())),
        limits=Limits.from_json(meta["limits"]),
    )


def _part(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """The tensors of one part, without the part's name."""
    prefix = f"{part}."
    own: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.startswith(prefix):
            own[name.removeprefix(prefix)] = value
    return own


def _bad_state(what: str, fix: str) -> CheckpointError:
    return CheckpointError(Problem(what, "Precision.load_state_dict", fix=fix))
