"""A prepared model that the user's loop shards over ranks with FSDP2 (torch's `fully_shard`), after `prepare`.

The order is: `prepare` the whole model, `fully_shard` its blocks and then the model, make the optimizer. The first call
after that finds the model sharded (`Prepared.find_shards`) and makes a `LoopShards` of it. Whatever would give other
numbers than the same loop under DDP is refused here by name.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from harness.core.collectives import Fingerprint, world_size
from harness.core.errors import MisuseError, Problem, some
from harness.core.sharded import LocalRows, StartWeights, local_of
from harness.precision.misuse import changed_gradients, parameters_of

_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Optimizers (and their subclasses, such as AdamW) that update elements one by one, from their own gradients alone."""
_NAMED = 3
_ORDER = "prepare(model), fully_shard(...), then the optimizer from model.parameters()"


class LoopShards:
    """This rank's part of a model that the loop has sharded.

    Raises MisuseError naming everything about the sharding that would give other numbers. Collective.

    call: of the interface, for messages.
    model: outside of any forward.
    device: that it was prepared on.
    start: its weights' hashes from `prepare`; None with one rank.

    local: its rows.
    parameters: what optimizers hold: DTensors, and parameters that every rank has whole.
    gathered: what forwards compute with. FSDP2 makes one Parameter for each DTensor and uses it again and again.
    """

    def __init__(
        self, call: str, model: nn.Module, device: torch.device, start: StartWeights | None
    ) -> None:
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.reshard()
        if problems := [*_unit_problems(call, units), *_parameter_problems(call, model, device)]:
            raise MisuseError(problems)

        self.gathered = _gathered(model, units)
        blocks = [unit for unit in units if unit is not model]
        self.local = LocalRows(model, blocks)
        self.parameters = list(model.parameters())
        self._by_id: dict[int, nn.Parameter] = {}
        for param, weight in zip(self.parameters, self.local.weights.values(), strict=True):
            self._by_id[id(param)] = weight
        self._counted = {id(weight) for weight in self.local.counted()}
        self._checked = False
        self._device = device
        self._hashes: dict[int, Tensor] = {}

        names = [] if start is None else start.differing(self.local)
        if names:
            what = f"the ranks gave prepare() different weights: {some(names, _NAMED)}"
            why = "each rank would keep its own rows of them, and the loop would train a patchwork"
            fix = "torch.manual_seed() before the model is built, or load the same weights on every rank"
            raise MisuseError(Problem(what, call, why, fix))

    def counted(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """What this rank measures of these parameters of the model: its rows."""
        weights = [self._by_id[id(param)] for param in parameters]
        return [weight for weight in weights if id(weight) in self._counted]

    def optimizer_problems(self, call: str, optimizer: Optimizer) -> list[Problem]:
        """Why `optimizer` cannot train this model."""
        name = type(optimizer).__name__
        problems: list[Problem] = []
        if not isinstance(optimizer, _ELEMENTWISE):
            why = "each rank holds rows alone, and only updates of single elements are the same for rows"
            fix = (
                "torch.optim.AdamW, SGD or another of torch's that work element by element; or DDP"
            )
            problems.append(Problem(f"{name} on a sharded model", call, why, fix))
        others = [p for p in parameters_of([optimizer]) if id(p) not in self._by_id]
        if others:
            what = f"{name} holds {len(others)} parameters that are not of the sharded model"
            why = "fully_shard has replaced the model's parameters, or nothing exchanges their gradients"
            problems.append(Problem(what, call, why, f"in this order: {_ORDER}"))
        return problems

    def check(self) -> None:
        """After the first measurement: raises MisuseError if ranks would not train one model. Reads the device once."""
        if self._checked:
            return
        self._checked = True
        problems: list[Problem] = []
        if moved := self.local.moved():
            what = f"weights have new memory since the model was sharded: {some(moved, _NAMED)}"
            fix = "do not move or cast the model, or assign its .data, after fully_shard"
            problems.append(Problem(what, "step()", "norms would be those of the old memory", fix))
        if not self.local.same_order.item():
            problems.append(other_calls("the ranks called different blocks of the model"))
        if problems:
            raise MisuseError(problems)

    def update_done(self) -> None:
        """The rows have changed: the next forward gathers them, also where an evaluation left the old ones gathered."""
        self.local.return_gradients()
        self.local.reshard()

    def backward_done(self, scaled: bool) -> None:
        """Note the gradients as a backward left them, in the first window. scaled: they carry a loss scale.

        Operations on a DTensor leave no trace in the versions of its rows, so their bits are compared. A loop that
        clips by itself does so in its first window.
        """
        self._hashes = self._hashed() if scaled and not self._checked else {}

    def check_gradients(self, call: str) -> None:
        """Raises MisuseError if gradients of the first window changed since. Reads the device, in that window alone."""
        before, self._hashes = self._hashes, {}
        if not before:
            return
        # Gradients that are gone are looked for elsewhere.
        now = self._hashed()
        differs = [now[key] != before[key] for key in before.keys() & now.keys()]
        changed = int(torch.stack(differs).sum()) if differs else 0
        if changed:
            raise changed_gradients(call, changed)

    def _hashed(self) -> dict[int, Tensor]:
        """A hash of each gradient that the optimizer would see."""
        keys = [number for number, param in enumerate(self.parameters) if param.grad is not None]
        found: list[Tensor] = []
        for number in keys:
            grad = self.parameters[number].grad
            assert grad is not None
            found.append(local_of(grad))
        return dict(zip(keys, Fingerprint(self._device).of(found), strict=True))

    def step_problems(self) -> list[Problem]:
        """What is wrong with a step now."""
        waiting = sum(param.grad is not None for param in self.gathered)
        if not waiting:
            return []
        what = f"the gradients of {waiting} parameters are each rank's own"
        why = "they were never exchanged, and would be added to those of the next window"
        fix = "model.set_requires_gradient_sync(True) before the last micro-batch of a window"
        return [Problem(what, "step()", why, fix)]

    def drop_window(self) -> None:
        """Drop the gradients of micro-batches that were not exchanged yet. `zero_grad` of an optimizer misses them."""
        for param in self.gathered:
            param.grad = None


def other_calls(what: str) -> Problem:
    """The problem of ranks that called other blocks than each other. what: with the step, where it is known."""
    why = "each gathered halves of other weights, and the update was skipped"
    fix = "call every block on every rank as often and in the same order, or wrap the model in DistributedDataParallel"
    return Problem(f"{what}, or in another order", "step()", why, fix)


def is_sharded(modules: Iterable[nn.Module]) -> bool:
    """Whether `fully_shard` was called for one of them."""
    return any(isinstance(module, FSDPModule) for module in modules)


def late_problem(call: str) -> Problem:
    """The problem of a model whose first call after `fully_shard` came by itself, from torch's standard loop."""
    what = (
        "the model was sharded after wrap() or standard_loop(), and this forward has begun already"
    )
    why = "its weights are gathered by now, and nothing can be checked or prepared for that"
    fix = f"in this order: {_ORDER}, then precision.wrap(optimizer) or precision.standard_loop()"
    return Problem(what, call, why, fix)


def _unit_problems(call: str, units: Iterable[FSDPModule]) -> list[Problem]:
    """A problem for each kind of MixedPrecisionPolicy that changes what is computed."""
    found: set[str] = set()
    for unit in units:
        policy = unit._get_fsdp_state()._mp_policy
        if policy.param_dtype is not None:
            found.add(f"param_dtype={policy.param_dtype}")
        if policy.output_dtype is not None:
            found.add(f"output_dtype={policy.output_dtype}")
        if policy.reduce_dtype not in (None, torch.float32):
            found.add(f"reduce_dtype={policy.reduce_dtype}")
    if not found:
        return []
    what = f"fully_shard got a MixedPrecisionPolicy with {', '.join(sorted(found))}"
    why = "it casts weights, activations or gradients beside the plan: FP8 would quantise what was rounded before"
    fix = "fully_shard(module) without mp_policy: the recipe decides the precision"
    return [Problem(what, call, why, fix)]


def _parameter_problems(call: str, model: nn.Module, device: torch.device) -> list[Problem]:
    """What is wrong with how the parameters are sharded."""
    plain: list[str] = []
    otherwise: list[str] = []
    elsewhere: list[str] = []
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor):
            if param.requires_grad and param.ndim:
                plain.append(name)
            continue
        mesh = param.device_mesh
        is_rows = mesh.ndim == 1 and mesh.size() == world_size()
        if not is_rows or tuple(param.placements) != (Shard(0),):
            otherwise.append(f"{name} {param.placements} on {mesh.ndim}-D mesh of {mesh.size()}")
        if param.to_local().device.type != device.type:
            elsewhere.append(name)

    problems: list[Problem] = []
    if plain:
        what = f"{len(plain)} trainable parameters are not sharded: {some(plain, _NAMED)}"
        why = "nothing exchanges their gradients, and each rank would train its own"
        problems.append(Problem(what, call, why, "fully_shard(model) after its blocks"))
    if otherwise:
        what = f"parameters are not cut into rows over all ranks: {some(otherwise, _NAMED)}"
        why = "norms and snapshots are made for rows of the first dimension"
        fix = "fully_shard(module) with a mesh of one dimension over all ranks, without shard_placement_fn"
        problems.append(Problem(what, call, why, fix))
    if elsewhere:
        what = f"the rows are not on the device that the model was prepared on: {some(elsewhere, _NAMED)}"
        why = "CPU offload was never tried with a prepared model"
        problems.append(Problem(what, call, why, "fully_shard(module) without offload_policy"))
    return problems


def _gathered(model: nn.Module, units: Iterable[FSDPModule]) -> list[nn.Parameter]:
    """The Parameters that forwards compute with. Gathers one unit at a time. Collective."""
    found: dict[int, nn.Parameter] = {}
    before = {id(param) for param in model.parameters()}
    for unit in units:
        unit.unshard()
        for param in model.parameters():
            if id(param) not in before:
                found[id(param)] = param
        unit.reshard()
    return list(found.values())
