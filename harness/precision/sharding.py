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
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from harness.core.blocks import blocks_of
from harness.core.collectives import Fingerprint, world_size
from harness.core.errors import MisuseError, Problem, some
from harness.core.memory import size_text
from harness.core.sharded import LocalRows, StartWeights, local_of
from harness.precision.layers import is_linear
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
        # A forward may have left weights gathered: only as rows do they show how they are sharded.
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.reshard()
        problems = _unit_problems(call, units)
        problems += _parameter_problems(call, model, device)
        if problems:
            raise MisuseError(problems)

        self.gathered = _gathered(model, units)
        # The model itself is gathered first on every rank; only its blocks can come in another order.
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

        # Different weights do no harm where a checkpoint was loaded over them since `prepare`.
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

        # An optimizer that was made before fully_shard holds Parameters that the model no longer has.
        others = [p for p in parameters_of([optimizer]) if id(p) not in self._by_id]
        if others:
            what = f"{name} holds {len(others)} parameters that are not of the sharded model"
            why = "fully_shard has replaced the model's parameters, or nothing exchanges their gradients"
            fix = f"in this order: {_ORDER}"
            problems.append(Problem(what, call, why, fix))
        return problems

    def check(self) -> None:
        """After the first measurement: raises MisuseError if ranks would not train one model. Reads the device once."""
        if self._checked:
            return
        self._checked = True
        problems: list[Problem] = []
        if moved := self.local.moved():
            what = f"weights have new memory since the model was sharded: {some(moved, _NAMED)}"
            why = "norms would be those of the old memory"
            fix = "do not move or cast the model, or assign its .data, after fully_shard"
            problems.append(Problem(what, "step()", why, fix))

        # Ranks that gather in different orders do not hang: each takes the bytes of another block.
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
        both = before.keys() & now.keys()
        differs = [now[key] != before[key] for key in both]
        if not differs:
            return
        changed = int(torch.stack(differs).sum())
        if changed:
            raise changed_gradients(call, changed)

    def _hashed(self) -> dict[int, Tensor]:
        """A hash of each gradient that the optimizer would see."""
        places: list[int] = []
        gradients: list[Tensor] = []
        for place, param in enumerate(self.parameters):
            if param.grad is not None:
                places.append(place)
                gradients.append(local_of(param.grad))
        hashes = Fingerprint(self._device).of(gradients)
        return dict(zip(places, hashes, strict=True))

    def step_problems(self) -> list[Problem]:
        """What is wrong with a step now."""
        # FSDP2 moves gradients to the DTensors when it exchanges them. Until then the gathered Parameters have them.
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


def kept_copies(precision: str, model: nn.Module, setting: str | None = None) -> str:
    """What whole weights each rank keeps although the model is sharded, and how to free them; empty if none.

    Autocast casts the weights of a block to 16 bits, and autograd keeps the copies from forward to backward.

    precision: of the rung.
    setting: the override under which backward computes the blocks again; None: there is none.
    """
    if precision not in ("bf16", "fp16"):
        return ""
    # By their identity, as blocks may share weights. What has 16 bits already is not cast, and a lazy one has no size.
    cast: dict[int, int] = {}
    for block in blocks_of(model):
        for module in block.modules():
            if not is_linear(module) or is_lazy(module.weight):
                continue
            if module.weight.dtype == torch.float32:
                cast[id(module.weight)] = module.weight.numel()
    if not cast:
        return ""
    size = size_text(2 * sum(cast.values()))
    text = f"every rank keeps {precision} copies of all blocks' weights ({size}) from forward to backward"
    cost = "at the cost of a second forward of each block (about a third more arithmetic)"
    if setting is None:
        return f"{text}, unless the model recomputes its blocks (torch.utils.checkpoint), {cost}"
    return f"{text}: {setting} frees them, {cost}"


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
        # Torch has no public way to ask for the policy. cast_forward_inputs does nothing without a param_dtype.
        policy = unit._get_fsdp_state()._mp_policy
        if policy.param_dtype is not None:
            found.add(f"param_dtype={policy.param_dtype}")
        if policy.output_dtype is not None:
            found.add(f"output_dtype={policy.output_dtype}")
        if policy.reduce_dtype not in (None, torch.float32):
            found.add(f"reduce_dtype={policy.reduce_dtype}")
    if not found:
        return []
    listed = ", ".join(sorted(found))
    what = f"fully_shard got a MixedPrecisionPolicy with {listed}"
    why = "it casts weights, activations or gradients beside the plan: FP8 would quantise what was rounded before"
    fix = "fully_shard(module) without mp_policy: the recipe decides the precision"
    return [Problem(what, call, why, fix)]


def _parameter_problems(
    call: str,
    model: nn.Module,
    device: torch.device,
) -> list[Problem]:
    """What is wrong with how the parameters are sharded."""
    plain: list[str] = []
    other_layout: list[str] = []
    off_device: list[str] = []
    for name, param in model.named_parameters():
        # A scalar has no rows. `LocalRows` averages its gradient over ranks.
        if not isinstance(param, DTensor):
            if param.requires_grad and param.ndim:
                plain.append(name)
            continue

        # Rows of the first dimension over one mesh of all ranks. HSDP has a second dimension, of copies.
        mesh = param.device_mesh
        over_all = mesh.ndim == 1 and mesh.size() == world_size()
        in_rows = tuple(param.placements) == (Shard(0),)
        if not over_all or not in_rows:
            other_layout.append(f"{name} {param.placements} on {mesh.ndim}-D mesh of {mesh.size()}")
        if param.to_local().device.type != device.type:
            off_device.append(name)

    problems: list[Problem] = []
    if plain:
        what = f"{len(plain)} trainable parameters are not sharded: {some(plain, _NAMED)}"
        why = "nothing exchanges their gradients, and each rank would train its own"
        fix = "fully_shard(model) after its blocks"
        problems.append(Problem(what, call, why, fix))
    if other_layout:
        what = f"parameters are not cut into rows over all ranks: {some(other_layout, _NAMED)}"
        why = "norms and snapshots are made for rows of the first dimension"
        fix = "fully_shard(module) with a mesh of one dimension over all ranks, without shard_placement_fn"
        problems.append(Problem(what, call, why, fix))
    if off_device:
        what = f"the rows are not on the device that the model was prepared on: {some(off_device, _NAMED)}"
        why = "CPU offload was never tried with a prepared model"
        fix = "fully_shard(module) without offload_policy"
        problems.append(Problem(what, call, why, fix))
    return problems


def _gathered(model: nn.Module, units: Iterable[FSDPModule]) -> list[nn.Parameter]:
    """The Parameters that forwards compute with. Gathers one unit at a time. Collective."""
    found: dict[int, nn.Parameter] = {}
    before = {id(param) for param in model.parameters()}
    # One at a time: all weights together need not fit into one rank's memory.
    for unit in units:
        unit.unshard()
        for param in model.parameters():
            if id(param) not in before:
                found[id(param)] = param
        unit.reshard()
    return list(found.values())
