"""A model under its plan, for `harness.Precision`: what runs it, and everything that a continuation needs."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DataParallel, DistributedDataParallel
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
from harness.core.errors import CheckpointError, MachineError, MisuseError, Problem, near_match
from harness.core.facts import Limits, RungVerdict, StepTerms, Switch
from harness.core.metrics import SCALARS
from harness.core.protocols import Meta, Monitor, Stateful, TensorDict
from harness.core.state import RunLedger, TrainState
from harness.core.update import InFlight, TorchGradients, WindowBuffers
from harness.monitors.fallback import FallbackController, WholeRunFallback
from harness.monitors.registry import MonitorsPart
from harness.monitors.responder import Judge
from harness.monitors.scales import Fp8Monitor
from harness.precision.convert import build_backend, monitor_context
from harness.precision.loss_scale import build_loss_scale
from harness.precision.misuse import OpenWindow, parameters_of
from harness.precision.plan import NoFp8LayerError, Plan, make_plan, pad_numbers, take_rung
from harness.precision.recipe import Recipe, Rung
from harness.precision.shape_probe import probe_layers

_log = logging.getLogger("harness.precision")
_FP8_LAYERS = "harness.precision.backends."


class Prepared:
    """Plan, backend, loss scale and judge of one converted model.

    A part of its own state (`held` and `applied`). applied: updates applied so far, float32 0-d on the device. pending:
    steps that are not judged yet. last: facts of the last step. guarded: a `harness.Guard` judges; known: the
    optimizers that it puts back; told: a `harness.Telemetry` keeps what happens; context: what its
    monitors are built from; loaded: how often a state was loaded. forward_clock: where ranks are compared. state: what
    a continuation needs; parts: what is ours of it, as a guard adds model and optimizers.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, seed: int = 0) -> None:
        facts = probe()
        if unusable := check_usable(facts):
            raise MachineError(unusable)
        self.device = _device_of(model, facts)
        self.plan = _plan(recipe, facts, self.device, model)
        self._ranks = world_size()
        self.loss_scale = build_loss_scale(self.plan, recipe, self.device)
        self.fp8_weights = self.plan.fp8_weights(model)
        self.backend = build_backend(self.plan, recipe, model, self.device, self.loss_scale)
        scaled = self.loss_scale is not None
        self.context = monitor_context(
            recipe, self.backend, facts, self.device, scaled, leaves_fp16=scaled
        )
        self.model = model
        self._remember()
        self.owned: dict[int, nn.Parameter] = {}
        self.window = OpenWindow(self.owns_any)
        self.buffers = WindowBuffers(model)
        self.applied = torch.zeros((), dtype=torch.float32, device=self.device)
        self.forward_clock: ForwardClock | None = None
        self.pending: deque[InFlight] = deque()
        self.last: InFlight | None = None
        self.guarded = self.told = False
        self.known: list[Optimizer] = []
        self.loaded = 0
        built = (
            kind.build(self.context) for kind in (Fp8Monitor, FallbackController, WholeRunFallback)
        )
        monitors = [monitor for monitor in built if monitor is not None]
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
        """Have these monitors judge from now on, when a guard asks for it; before the first step."""
        self.guarded, self.known = True, list(optimizers)
        self.forward_clock = ForwardClock(self.device) if world_size() > 1 else None
        self.state.parts["monitors"] = MonitorsPart(monitors)
        self.judge = Judge(
            config, self.state, self.backend, monitors, self.judge.held, comparison, self.judge.seed
        )
        return self.judge

    def agree(self) -> None:
        """Before a window's first backward: raises MisuseError where ranks that met after `prepare` have other plans.

        What they exchange belongs to layers, and would go to wrong ones. Collective, once.
        """
        if world_size() == self._ranks:
            return
        rows = [f"{row.module} {row.precision} {row.backend}" for row in self.plan.layers]
        short = f"{self.plan.resolved}, {len(self.plan.fp8_layers())} FP8 layers"
        told = gather_texts("\n".join([short, *rows]))
        self._ranks = len(told)
        if len(set(told)) > 1:
            kinds = ", ".join(
                f"rank {rank}: {text.partition(chr(10))[0]}" for rank, text in enumerate(told)
            )
            why = "prepare() came before the process group, so that each rank decided alone"
            fix = "call init_process_group(), or make the Accelerator, before prepare()"
            raise MisuseError(
                Problem(f"ranks have different plans ({kinds})", "prepare()", why, fix)
            )

    def moved(self) -> str:
        """Where the model went, or what it was turned into, after it was prepared; empty if it stayed as it was.

        Adapters may come, and parts of the model may move within it; a part that the plan is about may not go.
        """
        forward = vars(self.model).get("forward")
        if forward is not self._forward and not self._is_prepared_forward(forward):
            return "is another: its forward was replaced after it was prepared, as by another library's autocast"
        for name, store, key, dtype in self._places:
            value = store.get(key)
            if value is None:
                continue
            if value.device != self.device:
                return f"was prepared on {self.device} and is on {value.device} now ({name})"
            if value.dtype != dtype:
                return f"was prepared in {dtype} and is in {value.dtype} now ({name})"
        if any(store.get(key) is not module for store, key, module in self._children):
            here = set(self.model.modules())
            for name, module in self._planned:
                if module not in here:
                    return (
                        f"has another module for {name}, which was to run {self._as_planned[name]}"
                    )
            self._children = _children(self.model)
        return ""

    def _is_prepared_forward(self, forward: Any) -> bool:
        """Whether `forward` is a torch.compile of the one that was prepared, or the class's own, put back after a call.

        torch keeps what it compiled, within a wrapper of its own where that is a method of torch's.
        """
        compiled = getattr(forward, "_torchdynamo_orig_callable", None)
        forms = [forward, compiled, getattr(compiled, "__wrapped__", None)]
        if self._forward is not None:
            return any(form is self._forward for form in forms)
        return any(getattr(form, "__func__", None) is type(self.model).forward for form in forms)

    def _remember(self) -> None:
        """What `moved` compares: looked up in dicts, as it is asked in every forward."""
        rows = {row.module: row for row in self.plan.layers}
        kept = dict.fromkeys(self.plan.keep_fp32, "in fp32")
        self._as_planned = {
            name: f"in {rows[name].precision}" for name in rows if rows[name].shape
        } | kept
        modules = dict(self.model.named_modules(remove_duplicate=False))
        self._planned = [(name, modules[name]) for name in self._as_planned if name in modules]
        self._children, self._forward = _children(self.model), vars(self.model).get("forward")
        self._places = [
            (f"{name}.{key}" if name else key, module._parameters, key, value.dtype)
            for name, module in modules.items()
            for key, value in module._parameters.items()
            if value is not None
        ]

    def owns_any(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether one of them is the model's: looked up again if none is, as adapters may have come since `prepare`."""
        asked = {id(parameter) for parameter in parameters}
        if asked.isdisjoint(self.owned):
            self.owned = {id(own): own for own in self.model.parameters()}
        return not asked.isdisjoint(self.owned)

    def guard_problems(self, optimizers: Iterable[object]) -> list[Problem]:
        """What a guard has against a step of these optimizers."""
        if not self.guarded:
            return []
        why, fix = (
            "a rollback would not put its state back",
            "give all of them to Guard.for_precision",
        )
        strangers = [each for each in optimizers if not any(each is known for known in self.known)]
        problems = [
            Problem(f"{type(each).__name__} is not known to the guard", "step()", why, fix)
            for each in strangers
        ]
        if len(self.pending) > 1:
            fix = "call guard.end_step() once in every step, after optimizer.zero_grad()"
            problems.append(Problem("the guard has not judged the last step", "step()", fix=fix))
        return problems

    def terms(self) -> StepTerms:
        """What is decided about the next step. Figures that cost time are for a guard alone."""
        terms = self.judge.terms()
        return terms if self.guarded else replace(terms, measures=False)

    def judge_earlier(self, facts: InFlight) -> Switch | None:
        """After a step: without a guard the step before it is judged, whose figures have arrived by now.

        facts: of the step. Returns what the recipe's fallback moved; the same on every rank.
        """
        self.last = facts
        self.pending.append(facts)
        self.state.advance()
        moved: Switch | None = None
        while len(self.pending) > 1 and not self.guarded:
            judged = self.judge.observe(self.pending.popleft().facts())
            for verdict in judged.told if world_rank() == 0 else ():
                _log.warning("step %d: %s: %s", verdict.step, verdict.code, verdict.text)
            for _, switch in self.judge.switch_due():
                reason = judged.action.reason if isinstance(judged.action, Switch) else ""
                moved = Switch(
                    () if switch.whole_run_to else switch.demote,
                    switch.promote,
                    reason,
                    switch.whole_run_to,
                )
        return moved if moved and (moved.demote or moved.promote or moved.whole_run_to) else None

    def select(self, call: str, layers: str | Iterable[str]) -> list[str]:
        """FP8 layers (padded names) that the patterns mean: names as in the model come before padded ones.

        Raises MisuseError for a pattern that matches no Linear.
        """
        linears = [row.module for row in self.plan.layers if row.shape]
        found = {
            pattern: [name for name in linears if fnmatchcase(name, pattern)]
            or [name for name in linears if fnmatchcase(pad_numbers(name), pattern)]
            for pattern in ([layers] if isinstance(layers, str) else layers)
        }
        problems = [
            Problem(
                f'pattern "{pattern}" matches no Linear', call, fix=near_match(pattern, linears)
            )
            for pattern, names in found.items()
            if not names
        ]
        if problems:
            raise MisuseError(problems)
        chosen = {pad_numbers(name) for names in found.values() for name in names}
        return [layer for layer in self.context.layers if layer in chosen]

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """Our own part: {"applied": fp32 0-d} and what the user holds in BF16."""
        return {"applied": self.applied}, {"held": sorted(self.judge.held)}

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """What `state_dict` gave; steps on their way are dropped."""
        self.applied.copy_(tensors["applied"])
        self.judge.held.clear()
        self.judge.held.update(meta["held"])
        self.pending.clear()
        self.last = None

    def save(self) -> dict[str, dict[str, Any]]:
        """As `Precision.state_dict`."""
        tensors, meta = self.state.state_dict(self.parts)
        flat = {
            f"{part}.{name}": tensor
            for part, named in tensors.items()
            for name, tensor in named.items()
        }
        if self.last is not None:
            flat["last"] = self.last.arrived()
        own = {
            "resolved": self.plan.resolved,
            "rollback_lr_factor": self.judge.config.rollback_lr_factor,
            "state": meta,
            "incidents": asdict(self.state.ledger),
            "last": None if self.last is None else _last(self.last, bool(self.pending)),
        }
        return {
            "tensors": {name: value.detach().clone() for name, value in flat.items()},
            "meta": own,
        }

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """As `Precision.load_state_dict`."""
        tensors, meta = state.get("tensors", {}), state.get("meta", {})
        if meta.get("resolved", self.plan.resolved) != self.plan.resolved:
            what = f"it was written under {meta['resolved']}, this model runs under {self.plan.resolved}"
            raise _bad_state(what, "load it on a machine of the same tier, or train on without it")
        mine = self.save()
        missing = sorted(
            (mine["meta"].keys() - meta.keys())
            | (mine["tensors"].keys() - {"last"} - tensors.keys())
        )
        if missing:
            raise _bad_state(
                f"{', '.join(missing)} missing",
                "give what state_dict() returned, both halves of it",
            )
        try:
            saved = RunLedger.from_json(meta["incidents"])
        except ValueError as error:
            raise _bad_state(
                f"its incidents cannot be read: {error}", "give what state_dict() returned"
            ) from error
        factor, here = meta["rollback_lr_factor"], self.judge.config.rollback_lr_factor
        if saved.returned_to and factor != here:
            what = f"a run that was rolled back at rollback_lr_factor={factor:g} would go on at {here:g}"
            raise _bad_state(
                what, f"make a Guard with rollback_lr_factor={factor:g} before loading it"
            )
        if saved.attempt >= self.state.ledger.attempt:  # a rollback since then must not be undone
            self.state.ledger.take_over(saved)
        by_part: dict[str, TensorDict] = {part: _part(tensors, part) for part in self.parts}
        self.state.resume(by_part, meta["state"], self.parts)
        self.loaded += 1
        last = meta["last"]
        if last is not None:
            self.last = _restored(last, tensors["last"], self.backend.slot_names)
            if not last["judged"]:
                self.pending.append(self.last)


class LoopGradients(TorchGradients):
    """The gradients of one step in somebody else's loop; beside torch's own it does what an engine of ours does.

    Applying multiplies the learning rates by what rollbacks left of them, restores the model's persistent buffers where
    the update was skipped, and counts the updates that were applied.
    """

    def __init__(
        self,
        ready: Prepared,
        optimizers: Sequence[Optimizer],
        max_norm: float,
        overflow: Tensor | None,
    ) -> None:
        super().__init__(
            optimizers,
            parameters_of(optimizers),
            max_norm,
            ready.loss_scale,
            ready.device,
            overflow,
        )
        self._ready = ready

    def apply(self, skip: Tensor, overflow: Tensor, norm: Tensor, clip: float) -> dict[str, Tensor]:
        """As `Gradients.apply`; `applied_steps` among the figures."""
        ready = self._ready
        with _lr_times(self._optimizers, ready.judge.lr_factor):
            figures = super().apply(skip, overflow, norm, clip)
        ready.buffers.settle(figures["applied"])
        ready.applied += figures["applied"]
        return {**figures, "applied_steps": ready.applied.clone()}


@contextmanager
def _lr_times(optimizers: Iterable[Optimizer], factor: float) -> Iterator[None]:
    """The optimizers' learning rates times `factor`, for one update."""
    groups = (
        [group for optimizer in optimizers for group in optimizer.param_groups]
        if factor != 1
        else []
    )
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def _children(model: nn.Module) -> list[tuple[dict[str, nn.Module | None], str, nn.Module]]:
    """Every module with the place that it is at."""
    return [
        (parent._modules, key, child)
        for parent in model.modules()
        for key, child in parent._modules.items()
        if child is not None
    ]


def _device_of(model: nn.Module, facts: MachineFacts) -> torch.device:
    """The one device of a trainable float32 model. Raises MisuseError with everything that is wrong with it."""
    problems: list[Problem] = []
    if isinstance(model, DistributedDataParallel | DataParallel):
        fix = "prepare the bare model, then wrap what prepare() returned"
        problems.append(
            Problem(f"the model is wrapped in {type(model).__name__}", "prepare()", fix=fix)
        )
    compiled = [
        name for name, module in model.named_modules() if isinstance(module, OptimizedModule)
    ]
    if compiled:
        what = f"{compiled[0] or 'the model'} is wrapped in torch.compile"
        why = 'its layers would be planned and saved under other names, with "_orig_mod." in them'
        fix = "prepare the bare model first, then compile what prepare() returned, or its blocks (block.compile())"
        problems.append(Problem(what, "prepare()", why, fix))
    if hasattr(model, "_original_forward"):
        why, fix = (
            "its autocast would go against the plan",
            'prepare the model first, with Accelerator(mixed_precision="no")',
        )
        problems.append(
            Problem("the model's forward was replaced by accelerate", "prepare()", why, fix)
        )
    devices = sorted({parameter.device for parameter in model.parameters()}, key=str)
    trainable = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    if not trainable:
        problems.append(
            Problem(
                "the model has no trainable parameter", "prepare()", fix="give the model to train"
            )
        )
    odd = [
        f"{name} ({parameter.dtype})"
        for name, parameter in trainable
        if parameter.dtype != torch.float32
    ]
    if odd:
        what = f"{len(odd)} trainable parameters are not float32, such as {odd[0]}"
        why = "autocast and the FP8 casts start from float32 weights; low-precision weights lose small updates"
        problems.append(Problem(what, "prepare()", why, "call model.float() first"))
    fp8 = [
        name
        for name, module in model.named_modules()
        if type(module).__module__.startswith(_FP8_LAYERS)
    ]
    if fp8:
        what = f"the model has {len(fp8)} FP8 layers of another Precision, such as {fp8[0] or 'itself'}"
        why = "their scales are that one's: under this one they would compute without FP8"
        fix = "give prepare() a model that was never prepared: build it anew, or copy it before"
        problems.append(Problem(what, "prepare()", why, fix))
    if len(devices) > 1 or any(device.type not in ("cpu", "cuda") for device in devices):
        what = f"the parameters are on {', '.join(map(str, devices))}"
        problems.append(
            Problem(what, "prepare()", fix="put the whole model on one cuda device, or on the CPU")
        )
    elif devices and devices[0].type == "cpu" and tier_of(facts)[0] is not Tier.CPU:
        what = f"the model is on the CPU, but this machine has a GPU ({facts.devices[0].name})"
        fix = 'move the model first; to train on the CPU on purpose, set CUDA_VISIBLE_DEVICES=""'
        problems.append(Problem(what, "prepare()", fix=fix))
    if problems:
        raise MisuseError(problems)
    return devices[0]


def _plan(recipe: Recipe, facts: MachineFacts, device: torch.device, model: nn.Module) -> Plan:
    """The model's plan, on the first rung that it can use; each one passed over is told to the logger, too."""

    def on(rung: Rung, told: list[RungVerdict]) -> Plan:
        try:
            return probe_layers(make_plan(recipe, facts, rung, told, model), recipe, facts, device)
        except NoFp8LayerError as error:
            if world_rank() == 0:
                problem = error.problems[0]
                _log.warning("%s is not taken: %s (%s)", rung.name, problem.what, problem.why)
            raise

    return take_rung(recipe, facts, device, on)


def _last(facts: InFlight, pending: bool) -> dict[str, Any]:
    """JSON-able; `_restored` wants it beside the packed copy."""
    return {
        "step": facts.step,
        "window": facts.window,
        "limits": facts.limits.as_json(),
        "judged": not pending,
        "demoted": list(facts.demoted),
        "lowered": facts.fell_back_to,
        "figures": list(SCALARS),
    }


def _restored(meta: Mapping[str, Any], packed: Tensor, slot_names: tuple[str, ...]) -> InFlight:
    """The facts that were saved. Figures are found by their names in `meta`; one that is not there is NaN."""
    names = meta["figures"]
    found = dict(zip(names, packed.tolist(), strict=False))
    scalars = torch.tensor([found.get(name, math.nan) for name in SCALARS])
    return InFlight(
        meta["step"],
        meta["window"],
        torch.cat([scalars, packed[len(names) :].detach().cpu()]),
        None,
        slot_names,
        demoted=tuple(meta["demoted"]),
        fell_back_to=meta["lowered"],
        limits=Limits.from_json(meta["limits"]),
    )


def _part(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(f"{part}."): value
        for name, value in tensors.items()
        if name.startswith(f"{part}.")
    }


def _bad_state(what: str, fix: str) -> CheckpointError:
    return CheckpointError(Problem(what, "Precision.load_state_dict", fix=fix))
