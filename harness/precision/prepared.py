"""A model under its plan, for `harness.Precision`: what runs it, and everything that a continuation needs."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from harness.capability.probe import MachineFacts, probe
from harness.capability.tier import Tier, check_usable, tier_of
from harness.core.collectives import world_rank
from harness.core.errors import CheckpointError, MachineError, MisuseError, Problem, near_match
from harness.core.facts import CloserLook, Switch
from harness.core.metrics import SCALARS
from harness.core.update import InFlight, StepClock
from harness.monitors.fallback import FallbackController, WholeRunFallback
from harness.precision.convert import build_backend, build_loss_scale
from harness.precision.misuse import OpenWindow
from harness.precision.plan import agree_on_refuge, agree_on_rung, make_plan, pad_numbers
from harness.precision.recipe import Recipe
from harness.precision.shape_probe import probe_layers

_log = logging.getLogger("harness.precision")

# What states of version 0.x without a list of figures hold; "applied" is "skipped" there.
_FIGURES_BEFORE = ("applied", "applied_steps", "grad_norm", "loss_scale", "scrubbed", "loss")


class Prepared:
    """Plan, backend, loss scale and fallback of one converted model.

    applied: updates applied so far, float32 0-d on the device. steps: windows so far, skipped ones included. held:
    layers (padded names) that the user demoted, which the fallback leaves alone. last: facts of the last step.
    """

    def __init__(self, recipe: Recipe, model: nn.Module) -> None:
        facts = probe()
        unusable = check_usable(facts)
        if unusable:
            raise MachineError(unusable)
        self.device = _device_of(model, facts)
        rung, verdicts = agree_on_rung(recipe, facts, self.device)
        self.plan = probe_layers(make_plan(recipe, facts, rung, verdicts, model), recipe, facts, self.device)
        self.loss_scale = build_loss_scale(self.plan, recipe, self.device)
        self.backend = build_backend(self.plan, recipe, model, self.device, self.loss_scale)
        self._fp8 = [pad_numbers(layer) for layer in self.backend.layers]
        policy = recipe.fallback
        self.controller: FallbackController | WholeRunFallback | None = None
        if self._fp8 and policy.enabled:
            self.controller = FallbackController(policy, self._fp8)
        elif self.loss_scale is not None and policy.enabled:
            self.controller = WholeRunFallback(policy.failed_steps, agree_on_refuge(facts, self.device))
        self.model = model
        self._owned: dict[int, nn.Parameter] = {}
        self.window = OpenWindow(self.owns_any)
        self.applied = torch.zeros((), dtype=torch.float32, device=self.device)
        self.steps = 0
        self.held: set[str] = set()
        self.closer_look = CloserLook()
        self.last: InFlight | None = None

    def moved(self) -> torch.device | None:
        """The device that the model went to after it was prepared, None if it stayed."""
        device = next(self.model.parameters()).device
        return None if device == self.device else device

    def owns_any(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether one of them is the model's: looked up again if none is, as adapters may have come since `prepare`."""
        asked = {id(parameter) for parameter in parameters}
        if asked.isdisjoint(self._owned):
            self._owned = {id(own): own for own in self.model.parameters()}
        return not asked.isdisjoint(self._owned)

    def fall_back(self) -> Switch | None:
        """Judge the last step's facts and switch as the recipe's fallback says; every rank does the same."""
        if self.controller is None or self.last is None:
            return None
        verdict = self.controller.observe(self.last.facts())
        if verdict.look_closer:
            self.closer_look = self.closer_look.extended(self.steps + 1, verdict.look_closer)
        if not verdict.ok and world_rank() == 0:
            _log.warning("step %d: %s: %s", verdict.step, verdict.code, verdict.text)
        if not isinstance(verdict.proposal, Switch):
            return None
        if verdict.proposal.lower:
            self.backend.lower(verdict.proposal.lower)
            return verdict.proposal
        promote = tuple(layer for layer in verdict.proposal.promote if layer not in self.held)
        switch = Switch(verdict.proposal.demote, promote, verdict.proposal.reason)
        self.backend.switch(switch.demote, switch.promote)
        return switch if switch.demote or switch.promote else None

    def remember(self, figures: Mapping[str, Tensor], slots: Tensor, clock: StepClock, ran: Mapping[str, Any]) -> None:
        """Send the facts of the step that just ended to the host.

        figures, slots: what `core.update.update` gave. ran: which layers were demoted in it, what the run was lowered
        to.
        """
        names = self.backend.slot_names
        self.last = InFlight.send(
            figures, slots, clock, step=self.steps, window=self.steps - 1, slot_names=names, **ran
        )

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
            Problem(f'pattern "{pattern}" matches no Linear', call, fix=near_match(pattern, linears))
            for pattern, names in found.items()
            if not names
        ]
        if problems:
            raise MisuseError(problems)
        chosen = {pad_numbers(name) for names in found.values() for name in names}
        return [layer for layer in self._fp8 if layer in chosen]

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """As `Precision.state_dict`."""
        parts = {"fp8": self.backend.state_dict()}
        if self.loss_scale is not None:
            parts["loss_scale"] = self.loss_scale.state_dict()
        tensors = {f"{part}.{name}": value for part, (values, _) in parts.items() for name, value in values.items()}
        tensors["applied"] = self.applied
        if self.last is not None:
            tensors["last"] = self.last.arrived()
        meta = {
            "resolved": self.plan.resolved,
            "steps": self.steps,
            "held": sorted(self.held),
            "closer_look": [self.closer_look.first, self.closer_look.last],
            "fp8": parts["fp8"][1],
            "loss_scale": parts["loss_scale"][1] if "loss_scale" in parts else None,
            "fallback": None if self.controller is None else self.controller.state_dict(),
            "last": None if self.last is None else _last(self.last),
        }
        return {"tensors": {name: value.detach().clone() for name, value in tensors.items()}, "meta": meta}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """As `Precision.load_state_dict`."""
        tensors, meta = state.get("tensors", {}), state.get("meta", {})
        if meta.get("resolved", self.plan.resolved) != self.plan.resolved:
            what = f"it was written under {meta['resolved']}, this model runs under {self.plan.resolved}"
            raise _bad_state(what, "load it on a machine of the same tier, or train on without it")
        mine = self.state_dict()
        missing = sorted((mine["meta"].keys() - meta.keys()) | (mine["tensors"].keys() - {"last"} - tensors.keys()))
        if missing:
            raise _bad_state(f"{', '.join(missing)} missing", "give what state_dict() returned, both halves of it")
        self.backend.load_state_dict(_part(tensors, "fp8"), meta["fp8"])
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(_part(tensors, "loss_scale"), meta["loss_scale"])
        if self.controller is not None and meta["fallback"] is not None:
            self.controller.load_state_dict(meta["fallback"])
        self.applied.copy_(tensors["applied"])
        self.steps, self.held = int(meta["steps"]), set(meta["held"])
        self.closer_look = CloserLook(*meta["closer_look"])
        self.last = None
        if meta["last"] is not None:
            self.last = _restored(meta["last"], tensors["last"], self.backend.slot_names)


def _device_of(model: nn.Module, facts: MachineFacts) -> torch.device:
    """The one device of a trainable float32 model. Raises MisuseError with everything that is wrong with it."""
    problems: list[Problem] = []
    if isinstance(model, DistributedDataParallel | DataParallel):
        fix = "prepare the bare model, then wrap what prepare() returned"
        problems.append(Problem(f"the model is wrapped in {type(model).__name__}", "prepare()", fix=fix))
    devices = sorted({parameter.device for parameter in model.parameters()}, key=str)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        problems.append(Problem("the model has no trainable parameter", "prepare()", fix="give the model to train"))
    odd = [f"{name} ({parameter.dtype})" for name, parameter in trainable if parameter.dtype != torch.float32]
    if odd:
        what = f"{len(odd)} trainable parameters are not float32, such as {odd[0]}"
        why = "autocast and the FP8 casts start from float32 weights; low-precision weights lose small updates"
        problems.append(Problem(what, "prepare()", why, "call model.float() first"))
    if len(devices) > 1 or any(device.type not in ("cpu", "cuda") for device in devices):
        what = f"the parameters are on {', '.join(map(str, devices))}"
        problems.append(Problem(what, "prepare()", fix="put the whole model on one cuda device, or on the CPU"))
    elif devices and devices[0].type == "cpu" and tier_of(facts)[0] is not Tier.CPU:
        what = f"the model is on the CPU, but this machine has a GPU ({facts.devices[0].name})"
        fix = 'move the model first; to train on the CPU on purpose, set CUDA_VISIBLE_DEVICES=""'
        problems.append(Problem(what, "prepare()", fix=fix))
    if problems:
        raise MisuseError(problems)
    return devices[0]


def _last(facts: InFlight) -> dict[str, Any]:
    """JSON-able; `_restored` wants it beside the packed copy."""
    return {
        "step": facts.step,
        "demoted": list(facts.demoted),
        "lowered": facts.lowered,
        "figures": list(SCALARS),
    }


def _restored(meta: Mapping[str, Any], packed: Tensor, slot_names: tuple[str, ...]) -> InFlight:
    """The facts that were saved. The figures that a version packs, and their order, are its own: named in `meta`."""
    names = meta.get("figures", _FIGURES_BEFORE)
    found = dict(zip(names, packed.tolist(), strict=False))
    if "figures" not in meta:
        found["applied"] = 1.0 - found["applied"]
    scalars = torch.tensor([found.get(name, math.nan) for name in SCALARS])
    packed = torch.cat([scalars, packed[len(names) :].detach().cpu()])
    step, demoted = meta["step"], tuple(meta["demoted"])
    return InFlight(step, step - 1, packed, None, slot_names, demoted=demoted, lowered=meta["lowered"])


def _part(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{part}."): value for name, value in tensors.items() if name.startswith(f"{part}.")}


def _bad_state(what: str, fix: str) -> CheckpointError:
    return CheckpointError(Problem(what, "Precision.load_state_dict", fix=fix))
