"""FSDP2 (torch's `fully_shard`) behind the same interface as plain torch: every rank holds its rows of each parameter.

What FSDP2 does: it cuts each parameter along its first dimension, one piece a rank. Before a block's forward and
backward the ranks gather the block's whole parameters; afterwards they free them. Gradients are summed and cut in one
operation (reduce-scatter), so each rank gets the gradient of its own rows.

`fully_shard` puts DTensors in the place of the model's Parameters. Nothing else in the harness sees one. For each there
is a plain Parameter over the same memory, this rank's rows (`Shards.weights`). Optimizer, gate, norms, snapshots and
checkpoints use those, so they work as they do under DDP, fused kernels and the gate on the device included. What is
measured of rows is summed over ranks in fp64 (`LocalRows.sum`).

On two ranks every loss, weight and moment equals DDP's, bit for bit. With more ranks collectives may add in another
order. On a CPU one more thing differs: fused AdamW rounds the last elements of a tensor otherwise, those that do not
fill a vector register. A piece whose size is not a multiple of 16 has other last elements than the whole tensor.

Traps that this file takes care of, beside those of core/sharded.py:

- Values that are loaded into the rows after a validation would not be seen by the next forward, as the root of the
  model stays gathered. So a load reshards every module (`Shards.loaded`).
- Ranks that were built with different weights would each keep their own rows, and train a patchwork. DDP starts from
  rank 0's weights; here the ranks' weights are compared (engines/initial_weights.py).
- Tied parameters must lie in one group. A block that shares a parameter with another module is left to the root's.
- Ranks that call blocks in another order end the run with an error in the first step. Later the gate skips the update,
  and the guard halts the run, naming the step (`monitors/ranks.py`). A rank that calls fewer blocks than another may
  hang before that, until `timeout_seconds`. Calls of a validation are compared at the next step, those of the last one
  are not.
- The optimizer works on the memory that FSDP2 gathers from. The first step checks that it still is the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from harness.core.blocks import blocks_of
from harness.core.collectives import max_over_ranks
from harness.core.config import RunConfig
from harness.core.errors import ConfigError, Problem, some
from harness.core.protocols import Stateful
from harness.core.sharded import LocalRows
from harness.core.update import DynamicLossScale, TorchGradients
from harness.engines.buffers import follow_rank_0, shares_buffers
from harness.engines.first_use import FirstUse
from harness.engines.initial_weights import InitialWeights
from harness.engines.own_update import OwnUpdate, without_gradient
from harness.engines.parts import ModelPart, OptimizerPart, Shards, kept_state
from harness.engines.process_group import join, leave, lost_rank_named, read_launch

if TYPE_CHECKING:
    from harness.core.protocols import MakeOptimizer

_WHERE = "engine.name=fsdp"
_NAMED = 3


class FsdpEngine(OwnUpdate):
    """Engine for models that are sharded over ranks (see `core.protocols.Engine` and `OwnUpdate`).

    Raises ConfigError if the ranks hold different weights, or for parameters that FSDP2 cannot put into one group.

    model: with the same weights on every rank: whole on `device`, or without memory (`core.deferred`). It is sharded in
        place, and gets memory for this rank's rows alone.
    make_optimizer: makes a fused AdamW or SGD over this rank's rows.
    schedule: learning rate by the count of applied updates, both 0-d tensors.
    max_grad_norm: clip to this norm.
    loss_scale: of fp16; None: no loss scale.
    every_micro_batch: exchange gradients after every micro-batch. That needs memory for this rank's rows only, and the
        sum over micro-batches is rounded differently from DDP. False: in the window's last one, as DDP does.
    timeout_seconds: after which a collective gives up on a rank.
    """

    name = "fsdp"
    sharded: ClassVar = True
    # An optimizer sees rows alone: no whole matrices for Muon, and blocks of 8-bit moments would be cut.
    any_optimizer: ClassVar = False

    @classmethod
    def lacking(cls, device: str) -> list[Problem]:
        """As `OwnUpdate.lacking`: FSDP2 must exchange zeros for parameters that some rank does not use."""
        if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            return []
        what = f"torch {torch.__version__} lacks what engine fsdp needs of fully_shard"
        why = "it has no FSDPModule.set_reduce_scatter_unused_params"
        fix = "take torch 2.13 or later, or start with torchrun alone (engine ddp)"
        return [Problem(what, _WHERE, why, fix)]

    @classmethod
    def build(
        cls,
        config: RunConfig,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        schedule: Any,
        loss_scale: DynamicLossScale | None,
        autocast_dtype: torch.dtype | None,
        device: torch.device,
    ) -> FsdpEngine:
        """The engine of a run. autocast_dtype: unused, as the precision backend casts here."""
        return cls(
            model,
            make_optimizer,
            schedule,
            config.train.max_grad_norm,
            loss_scale=loss_scale,
            every_micro_batch=config.engine.gradient_sync == "micro_batch",
            device=device,
            timeout_seconds=config.engine.timeout_seconds,
        )

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        schedule: Callable[[Tensor], Tensor],
        max_grad_norm: float,
        *,
        loss_scale: DynamicLossScale | None = None,
        every_micro_batch: bool = False,
        device: torch.device,
        timeout_seconds: float = 600.0,
    ) -> None:
        join(read_launch(), device, timeout_seconds)
        initial = InitialWeights(model, device, _WHERE)
        scalars = {param for param in model.parameters() if param.ndim == 0}
        blocks = _shard(model, device, scalars)
        self._first_use = FirstUse(model, blocks)

        # A model that was built without memory gets that of this rank's rows now.
        initial.give()
        frozen = kept_state(model, hashes=initial.hashes)[1].get("frozen")
        self._local = LocalRows(model, blocks)
        self._every_micro_batch = every_micro_batch
        self._checked = False

        # What everybody else sees: plain Parameters over this rank's rows.
        weights = self._local.weights
        self._shards = Shards(weights, self._local.rows, frozen, self._local.reshard)
        optimizer = make_optimizer(weights)
        gradients = TorchGradients(
            [optimizer],
            self._local.counted(),
            max_grad_norm,
            loss_scale,
            device,
            local=self._local,
            named=weights,
        )
        super().__init__(model, optimizer, gradients, schedule, loss_scale, device)
        self.module = model

        # As under DDP, the later micro-batches of a window go on with each rank's own buffers.
        self._window_begun = False
        if self.world_size > 1 and shares_buffers(model):
            follow_rank_0(model, now=lambda: not self._window_begun)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Context for forward and backward of one micro-batch."""
        self._buffers.begin()
        root = self._model
        assert isinstance(root, FSDPModule)
        root.set_requires_gradient_sync(last or self._every_micro_batch)
        with lost_rank_named():
            yield
        self._window_begun = not last

    @lost_rank_named()
    def measure(self, thorough: bool, hunts: bool) -> dict[str, Tensor]:
        """As `core.protocols.Gradients.measure`."""
        if not self._checked:
            self._first_use.end()
            self._require_gradients()

        figures = self._gradients.measure(thorough, hunts)

        # The host reads this once. In later steps it is one of the step's facts.
        if not self._checked:
            self._checked = True
            self._require_same_memory()
            self._require_same_order()
        return figures

    def _require_gradients(self) -> None:
        """Raise ConfigError naming parameters that no rank used. Collective.

        Their gradients of zero would let the optimizer decay them. Under DDP such a model is refused, too.
        """
        weights = self._local.weights
        trained = [name for name, weight in weights.items() if weight.requires_grad]
        # 0-d parameters are not gathered: their gradients are where they always are.
        used = set(self._first_use.names)
        for name in trained:
            if weights[name].ndim == 0 and weights[name].grad is not None:
                used.add(name)
        flags = torch.tensor([float(name in used) for name in trained], device=self.device)
        anywhere = max_over_ranks(flags).tolist()
        unused = [name for name, flag in zip(trained, anywhere, strict=True) if not flag]
        if unused:
            why = "FSDP2 would give them gradients of zero, and the optimizer would decay them"
            raise ConfigError(without_gradient(unused, why))

    def _require_same_memory(self) -> None:
        """Raise ConfigError if the optimizer's weights are not those that FSDP2 gathers."""
        if moved := self._local.moved():
            what = f"weights have new memory since the model was sharded: {some(moved, _NAMED)}"
            why = "the optimizer would update the old one, and the model would not change"
            fix = "do not move or cast the model, or assign its .data, once training begins"
            raise ConfigError(Problem(what, _WHERE, why, fix))

    def _require_same_order(self) -> None:
        """Raise ConfigError if the ranks called different blocks in this window."""
        if not self._local.same_order.item():
            what = "the ranks called different blocks of the model, or in another order"
            why = "each would gather halves of other weights"
            fix = "call every block on every rank, or start with torchrun alone (engine ddp)"
            raise ConfigError(Problem(what, _WHERE, why, fix))

    def apply(self, skip: Tensor, overflow: Tensor, norm: Tensor, clip: float) -> dict[str, Tensor]:
        """As `core.protocols.Gradients.apply`; then the gradients are zeroed."""
        figures = super().apply(skip, overflow, norm, clip)
        # The optimizer dropped those of its own weights.
        for param in self._local.sharded.values():
            param.grad = None
        return figures

    def parts(self) -> dict[str, Stateful]:
        """`model` and `optimizer`: this rank's rows."""
        shards = self._shards
        optimizer = OptimizerPart(
            shards.weights, self.optimizer, self._applied, self._initial, shards.rows
        )
        return {"model": ModelPart(self._model, shards), "optimizer": optimizer}

    def close(self) -> None:
        """Leave the process group; safe to call twice."""
        leave()


def _shard(model: nn.Module, device: torch.device, ignored: set[nn.Parameter]) -> list[nn.Module]:
    """Shard the blocks of `model` one by one, and with the model itself what no block holds; returns the blocks."""
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    blocks = _blocks_without_ties(model)
    groups = [*blocks, model]
    problems: list[Problem] = []
    names = {id(param): name for name, param in model.named_parameters()}
    taken: set[nn.Parameter] = set(ignored)
    for module in groups:
        own = [param for param in module.parameters() if param not in taken]
        taken.update(own)
        problems += _mixed_dtypes((names[id(param)], param) for param in own)
    if problems:
        raise ConfigError(problems)

    for module in groups:
        sharded = fully_shard(module, mesh=mesh, ignored_params=ignored)
        # A parameter that some rank's samples do not use gets a gradient of zero: the ranks' exchanges stay alike.
        sharded.set_reduce_scatter_unused_params(True, recurse=False)
    return blocks


def _mixed_dtypes(named: Iterable[tuple[str, nn.Parameter]]) -> list[Problem]:
    """Why FSDP2 cannot put these parameters into one group: their gradients travel together, in one dtype."""
    first: dict[torch.dtype, str] = {}
    for name, param in named:
        if param.requires_grad:
            first.setdefault(param.dtype, name)
    if len(first) < 2:
        return []
    listed = ", ".join(
        f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in first.items()
    )
    what = f"trainable parameters of one block have different dtypes: {listed}"
    fix = "keep trainable parameters in float32, or start with torchrun alone (engine ddp)"
    return [Problem(what, _WHERE, "FSDP2 exchanges the gradients of a block in one dtype", fix)]


def _blocks_without_ties(model: nn.Module) -> list[nn.Module]:
    """The blocks of `model` that share no parameter with a module outside of them."""
    uses: dict[int, int] = {}
    for _, param in model.named_parameters(remove_duplicate=False):
        uses[id(param)] = uses.get(id(param), 0) + 1

    found: list[nn.Module] = []
    for block in blocks_of(model):
        inside: dict[int, int] = {}
        for _, param in block.named_parameters(remove_duplicate=False):
            inside[id(param)] = inside.get(id(param), 0) + 1
        if inside and all(uses[key] == count for key, count in inside.items()):
            found.append(block)
    return found
