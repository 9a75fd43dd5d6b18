"""DeepSpeed at ZeRO 0, 1 and 2, behind the same interface as plain torch.

ZeRO 1 and 2 split the optimizer's state over the ranks: each rank steps a flat partition of all parameters. Model and
optimizer state are gathered and set by DeepSpeed's public accessors, so that checkpoints have the layout of
`parts`. Three things differ from plain torch:

- DeepSpeed reads its gradient norm on the host, so a step costs a few host reads.
- Its step at ZeRO 1 and 2 cannot be held back once it has begun. So the norm is computed before it as well.
- It casts for bf16 and FP8 by its torch_autocast section, and parameters stay fp32. Under fp16, at ZeRO 1 only, its
  fp16 section keeps half-precision weights with fp32 masters, and DeepSpeed owns the loss scale.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from harness.core.config import EngineConfig, RunConfig
from harness.core.errors import CheckpointError, ConfigError, MachineError, Problem
from harness.core.health import grad_norm, l2_norm
from harness.core.layer_norms import LayerNorms
from harness.core.protocols import LAYER_NORMS, Meta, Stateful
from harness.core.update import DynamicLossScale, WindowBuffers, init_optimizer_state
from harness.engines.buffers import follow_rank_0, shares_buffers
from harness.engines.deepspeed_setup import (
    PrecisionName,
    build_config,
    build_kernel,
    check,
    find_tools_of_this_python,
    preflight,
    release_shared_memory,
)
from harness.engines.first_use import FirstUse
from harness.engines.parts import (
    Group,
    ModelPart,
    OfParameter,
    OptimizerPart,
    StateAccess,
    WeightAccess,
)
from harness.engines.process_group import (
    ProcessGroup,
    join,
    leave,
    limit_every_group,
    lost_rank_named,
    read_launch,
)

if TYPE_CHECKING:
    from harness.core.protocols import MakeOptimizer

# Attributes of DeepSpeed's fp16 loss scaler that a resume needs.
_LOSS_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class ZeroWeightAccess(WeightAccess):
    """fp32 weights and buffers under ZeRO 1 and 2.

    Collective under fp16, as the fp32 masters are gathered from all ranks then.
    """

    def like(self, tensor: Tensor) -> Tensor:
        """As `WeightAccess.like`: a checkpoint holds the fp32 master, whatever DeepSpeed computes in."""
        # What has no master is what a checkpoint holds: a buffer, or a parameter in fp32.
        if not hasattr(tensor, "_hp_mapping"):
            return tensor
        return torch.empty_like(tensor, dtype=torch.float32, device="meta")

    def read(self, tensor: Tensor) -> Tensor:
        """As `WeightAccess.read`; parameters in fp32."""
        from deepspeed.utils import safe_get_full_fp32_param

        # Half-precision weights have an fp32 master. Buffers have none.
        master = None
        if tensor.dtype != torch.float32:
            master = safe_get_full_fp32_param(tensor)
        return super().read(tensor) if master is None else master

    def write(self, tensor: Tensor, value: Tensor) -> None:
        """As `WeightAccess.write`, into DeepSpeed's partition of the master as well."""
        from deepspeed.utils import safe_set_full_fp32_param

        super().write(tensor, value)
        safe_set_full_fp32_param(tensor, value.to(tensor.device))


class ZeroStateAccess(StateAccess):
    """Optimizer state under ZeRO 1 and 2, gathered from all ranks. Collective.

    optimizer: the one whose parameter groups DeepSpeed has replaced by flat partitions.
    members: the parameters of each group, before DeepSpeed replaced them.
    names: of the parameters, by id.
    loss_scaler: DeepSpeed's.
    """

    must_fit = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        members: list[list[nn.Parameter]],
        names: Mapping[int, str],
        loss_scaler: Any,
    ) -> None:
        super().__init__(optimizer)
        self._members = members
        self._names = names
        self._loss_scaler = loss_scaler
        # The number of each parameter's group.
        self._numbers: dict[int, int] = {}
        for number, group in enumerate(members):
            self._numbers |= {id(param): number for param in group}

    def owned(self) -> list[tuple[nn.Parameter, Group]]:
        """As `StateAccess.owned`; the groups have the flat partitions."""
        owned: list[tuple[nn.Parameter, Group]] = []
        for members, group in zip(self._members, self.optimizer.param_groups, strict=True):
            owned += [(param, group) for param in members]
        return owned

    def _flat(self, group: Group) -> dict[str, Tensor]:
        """The state of a group's flat partition. Counters are 0-d; the rest has the partition's shape."""
        return self.optimizer.state[group["params"][0]]

    def _flat_of(self, param: nn.Parameter) -> dict[str, Tensor]:
        """The state of the flat partition that holds `param`."""
        return self._flat(self.optimizer.param_groups[self._numbers[id(param)]])

    def like(self, param: nn.Parameter) -> OfParameter:
        """As `StateAccess.like`; nothing is gathered."""
        found: OfParameter = {}
        for key, value in self._flat_of(param).items():
            found[key] = value
            if value.ndim > 0:
                found[key] = torch.empty_like(param, dtype=value.dtype, device="meta")
        return found

    def read(self, param: nn.Parameter) -> OfParameter:
        """As `StateAccess.read`."""
        from deepspeed.utils import safe_get_full_optimizer_state

        found: OfParameter = {}
        for key, value in self._flat_of(param).items():
            if value.ndim == 0:
                found[key] = value.detach().clone()
                continue
            full = safe_get_full_optimizer_state(param, key)
            assert full is not None, f"DeepSpeed does not know parameter {self._names[id(param)]}"
            found[key] = full
        return found

    def require_fit(self, saved: Mapping[str, OfParameter]) -> None:
        """Raise CheckpointError if parameters of one group have different counters: a partition has one for all."""
        for members, group in zip(self._members, self.optimizer.param_groups, strict=True):
            counters = [key for key, value in self._flat(group).items() if value.ndim == 0]
            for key in counters:
                incoming = [saved[self._names[id(param)]][key] for param in members]
                if any(not torch.equal(other, incoming[0]) for other in incoming):
                    what = f'parameters have different "{key}" counters'
                    why = "ZeRO steps all parameters of a group together"
                    fix = "resume with torchrun or a single process"
                    raise CheckpointError(Problem(what, "optimizer", why, fix))

    def write(self, param: nn.Parameter, group: Group, saved: OfParameter) -> None:
        """As `StateAccess.write`, into the partitions."""
        from deepspeed.utils import safe_set_full_optimizer_state

        for key, value in self._flat(group).items():
            if value.ndim == 0:
                value.copy_(saved[key])
            else:
                safe_set_full_optimizer_state(param, saved[key].to(param.device), key)

    def meta(self) -> Meta:
        """DeepSpeed's loss scaler."""
        scaler: dict[str, Any] = {}
        for key in _LOSS_SCALER_STATE:
            if hasattr(self._loss_scaler, key):
                scaler[key] = getattr(self._loss_scaler, key)
        return {"loss_scaler": scaler}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Restore the loss scaler. A checkpoint of another engine has none."""
        for key, value in meta.get("loss_scaler", {}).items():
            setattr(self._loss_scaler, key, value)


def _initialized(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],
    user_config: str | None,
) -> Any:
    """DeepSpeed's own engine. Raises ConfigError with every key of the user's JSON that DeepSpeed refuses."""
    import deepspeed

    try:
        made = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
    except ValidationError as error:
        refused: list[Problem] = []
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            what = f"DeepSpeed refuses {key}: {item['msg']}"
            where = f"engine.deepspeed={user_config}"
            refused.append(Problem(what, where, fix="correct or remove the key"))
        raise ConfigError(refused) from error
    return made[0]


# DeepSpeed's section of the config by the precision of the run. FP8 layers cast for themselves: the rest runs in bf16.
_SECTIONS: dict[str, PrecisionName] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "bf16",
}


class DeepSpeedEngine(ProcessGroup):
    """Engine for the deepspeed launcher (see `core.protocols.Engine`).

    Raises ConfigError for combinations that are refused, MachineError if DeepSpeed cannot start here.

    model, optimizer: new, and on `device`.
    schedule: learning rate by the count of applied updates.
    max_grad_norm: clip to this norm.
    zero_stage: 0, 1 or 2.
    micro_batch: samples in one forward on one rank.
    accumulation: micro-batches in one step.
    autocast_dtype: bfloat16 for the bf16 and FP8 rungs, float16 for DeepSpeed's fp16 section (CUDA, ZeRO 1), None for
      fp32.
    user_config: path or shipped name of a DeepSpeed JSON. Our keys override it.
    timeout_seconds: after which a collective gives up on a rank.
    """

    name = "deepspeed"
    owns_loss_scale: ClassVar = True
    # ZeRO would have to gather its partitions for every snapshot.
    snapshots: ClassVar = False
    sharded: ClassVar = False
    # Flat partitions have no matrices, which some optimizers need. The gathers take no tensor subclasses.
    any_optimizer: ClassVar = False

    @classmethod
    def lacking(cls, device: str) -> list[Problem]:
        """What DeepSpeed needs and this machine lacks. device: "cpu" or "cuda"."""
        return preflight(device)

    @classmethod
    def refusals(cls, config: EngineConfig, precision: str, device: str) -> list[Problem]:
        """Why DeepSpeed cannot train in `precision` ("fp32" | "bf16" | "fp16" | "fp8"); empty if it can."""
        return check(config.zero_stage, _SECTIONS[precision], device)

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
    ) -> DeepSpeedEngine:
        """The engine of a run. loss_scale: unused, as DeepSpeed has its own under fp16."""
        train, engine = config.train, config.engine
        optimizer = make_optimizer(dict(model.named_parameters()))
        # DeepSpeed wants the micro-batches of one rank, the config has those of all.
        micro_batches = train.global_batch // train.micro_batch
        return cls(
            model,
            optimizer,
            schedule,
            train.max_grad_norm,
            zero_stage=engine.zero_stage,
            micro_batch=train.micro_batch,
            accumulation=micro_batches // read_launch().world_size,
            autocast_dtype=autocast_dtype,
            user_config=engine.deepspeed,
            device=device,
            timeout_seconds=engine.timeout_seconds,
        )

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[int], float],
        max_grad_norm: float,
        *,
        zero_stage: int,
        micro_batch: int,
        accumulation: int,
        autocast_dtype: torch.dtype | None = None,
        user_config: str | None = None,
        device: torch.device,
        timeout_seconds: float = 600.0,
    ) -> None:
        # Refuse what cannot work, before anything starts.
        precision: PrecisionName = "bf16"
        if autocast_dtype is None:
            precision = "fp32"
        elif autocast_dtype == torch.float16:
            precision = "fp16"
        if problems := check(zero_stage, precision, device.type):
            raise ConfigError(problems)
        if missing := preflight(device.type):
            raise MachineError(missing)
        launch = read_launch()
        if not launch.launched:
            fix = "deepspeed launch/train.py ..., or TorchEngine alone"
            raise ConfigError(Problem("not started by a launcher", "deepspeed", fix=fix))
        config = build_config(
            zero_stage=zero_stage,
            micro_batch=micro_batch,
            accumulation=accumulation,
            max_grad_norm=max_grad_norm,
            precision=precision,
            tested_optimizer=isinstance(optimizer, (torch.optim.Adam, torch.optim.Adagrad)),
            user=user_config,
        )

        # Meet the other ranks. DeepSpeed prints banners and logs to stdout, where our lines are.
        def say(text: str) -> None:
            if launch.local_rank == 0:
                print(text, file=sys.stderr, flush=True)

        find_tools_of_this_python()
        with redirect_stdout(sys.stderr):
            import deepspeed

            join(launch, device, timeout_seconds)
            build_kernel(say)
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        super().__init__(device)
        # After the barrier every rank has opened the shared memory, and its name is no longer needed.
        self.barrier()
        release_shared_memory(self.rank)

        self._model = model
        self._schedule = schedule
        self._sharded = zero_stage > 0
        self._max_grad_norm = max_grad_norm
        self._members = [list(group["params"]) for group in optimizer.param_groups]
        self._optimizer = optimizer
        self.lr_factor = 1.0
        self._applied = torch.zeros((), dtype=torch.float32, device=device)
        self._buffers = WindowBuffers(model)
        # DDP broadcasts buffers by itself, DeepSpeed does not.
        if self.world_size > 1 and shares_buffers(model):
            follow_rank_0(model)

        self._first_use = FirstUse(model)
        self._by_layer = LayerNorms(dict(model.named_parameters()))

        # ZeRO makes a new state for its flat partitions.
        if self._sharded:
            optimizer.state.clear()
        self._engine: Any = _initialized(model, optimizer, config, user_config)
        limit_every_group(timeout_seconds)

        # A checkpoint needs the optimizer's state before the first step: make it as that step would.
        init_optimizer_state(optimizer)
        if self._sharded:
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()
        self.module: nn.Module = self._engine

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Context for forward and backward of one micro-batch. ZeRO 0 and 1 exchange gradients in the last one only."""
        self._buffers.begin()
        self._engine.set_gradient_accumulation_boundary(last)
        with lost_rank_named():
            yield

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of `loss`. Under fp16 DeepSpeed multiplies by its own loss scale."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def with_gradient(self, weights: Mapping[str, Tensor]) -> tuple[str, ...]:
        """As `core.protocols.Gradients.with_gradient`."""
        used: set[int] = set()
        for name, param in self._model.named_parameters():
            if name in self._first_use.names:
                used.add(id(param))
        return tuple(name for name, weight in weights.items() if id(weight) in used)

    @property
    def layers(self) -> tuple[str, ...]:
        """As `core.protocols.Gradients.layers`: none from ZeRO 1 on, which cuts gradients in a way of its own."""
        return () if self._sharded else self._by_layer.layers

    @lost_rank_named()
    def measure(self, thorough: bool, hunts: bool) -> dict[str, Tensor]:
        """As `core.protocols.Gradients.measure`, but never with the shares: DeepSpeed owns the scaled gradients."""
        loss_scale = torch.tensor(self._loss_scale(), dtype=torch.float32, device=self.device)
        norm = self._sharded_norm() if self._sharded else grad_norm(self._weights())
        figures = {"grad_norm": norm.to(self.device) / loss_scale, "loss_scale": loss_scale}
        if thorough:
            figures["param_norm"] = l2_norm(weight.detach() for weight in self._weights())
        if hunts and not self._sharded:
            squares = self._by_layer.squares(self._model.parameters(), self.device)
            figures[LAYER_NORMS] = squares.sqrt().float() / loss_scale
        return figures

    def _weights(self) -> list[nn.Parameter]:
        """What the optimizer trains, before DeepSpeed replaced its groups by flat partitions; whole on every rank."""
        return [param for group in self._members for param in group]

    @lost_rank_named()
    def apply(
        self,
        skip: Tensor,
        overflow: Tensor,
        norm: Tensor,
        clip: float,
    ) -> dict[str, Tensor]:
        """As `core.protocols.Gradients.apply`; then the gradients are zeroed.

        A bad update must not reach the weights. At ZeRO 0 DeepSpeed checks nothing, so its step is not called. At ZeRO
        1 and 2 one gradient is set to infinity, and DeepSpeed's own overflow check drops the update on every rank.
        """
        # Who got a gradient is asked before the first update, and never again.
        self._first_use.end()

        lr = self._set_lr()
        bad = bool(skip.item())
        if self._sharded:
            # Gradients are cut over ranks in a way of DeepSpeed's own: it clips them, and drops bad ones.
            self._engine.optimizer.clip_grad = min(self._max_grad_norm, clip)
            if bad:
                self._poison()
            self._engine.step()
            bad = not self._engine.was_step_applied()
        elif bad:
            self._engine.zero_grad()
        else:
            self._clip(norm, clip)
            self._engine.step()

        applied = torch.full_like(skip, float(not bad))
        self._buffers.settle(applied)
        self._applied += applied
        return {"applied": applied, "lr": lr, "applied_steps": self._applied.clone()}

    def _sharded_norm(self) -> Tensor:
        """L2 norm of the averaged gradients, still scaled: float32 0-d, the same on every rank."""
        measured = self._engine.optimizer.scaled_global_norm()
        norm = torch.as_tensor(measured, dtype=torch.float32, device=self.device)
        # DeepSpeed returns -1 for a norm that is not finite.
        return torch.where(norm < 0, torch.inf, norm)

    def _clip(self, norm: Tensor, limit: float) -> None:
        """Clip to `limit`. DeepSpeed's step clips to the run's own limit afterwards."""
        if not math.isfinite(limit):
            return
        gradients: list[Tensor] = []
        for group in self._members:
            gradients += [param.grad for param in group if param.grad is not None]
        torch._foreach_mul_(gradients, torch.clamp(limit / norm, max=1.0))

    def _set_lr(self) -> Tensor:
        """Set the learning rate of the next update, and return it."""
        lr = self._schedule(int(self._applied.item())) * self.lr_factor
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        return torch.tensor(lr, dtype=torch.float32, device=self.device)

    def _loss_scale(self) -> float:
        """What the present gradients are multiplied by."""
        return float(self._engine.optimizer.cur_scale) if self._sharded else 1.0

    def _poison(self) -> None:
        """Set one gradient to infinity, so that DeepSpeed drops the update."""
        from deepspeed.utils import safe_set_full_grad

        param = self._members[0][0]
        safe_set_full_grad(param, torch.full_like(param, float("inf"), dtype=torch.float32))

    def parts(self) -> dict[str, Stateful]:
        """`model` and `optimizer`, in the layout of the plain torch engine."""
        weights = dict(self._model.named_parameters())
        weight_access: WeightAccess | None = None
        state_access: StateAccess | None = None
        if self._sharded:
            names = {id(param): name for name, param in weights.items()}
            scaler = self._engine.optimizer.loss_scaler
            weight_access = ZeroWeightAccess()
            state_access = ZeroStateAccess(self._optimizer, self._members, names, scaler)
        optimizer = OptimizerPart(weights, self._optimizer, self._applied, access=state_access)
        return {"model": ModelPart(self._model, access=weight_access), "optimizer": optimizer}

    def close(self) -> None:
        """Leave the process group; safe to call twice."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
        leave()
