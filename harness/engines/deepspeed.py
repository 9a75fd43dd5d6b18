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
from harness.core.protocols import Meta, Stateful, TensorDict
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
from harness.engines.parts import (
    ModelPart,
    OptimizerPart,
    kept_state,
    optimizer_meta,
    require_same,
    require_same_meta,
    require_same_optimizer,
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


class ZeroModelPart:
    """fp32 weights and buffers under ZeRO 1 and 2, as a part of the TrainState.

    Collective under fp16, as the fp32 masters are gathered from all ranks then.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """As `ModelPart.state_dict`; parameters in fp32, whatever DeepSpeed computes in."""
        from deepspeed.utils import safe_get_full_fp32_param

        tensors, meta = kept_state(self.model)
        full: TensorDict = {}
        for name, tensor in tensors.items():
            # Half-precision weights have an fp32 master. Buffers have none.
            master = None
            if tensor.dtype != torch.float32:
                master = safe_get_full_fp32_param(tensor)
            full[name] = tensor.detach() if master is None else master
        return full, meta

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """As `ModelPart.load_state_dict`, into the parameters and into DeepSpeed's partitions of their masters."""
        from deepspeed.utils import safe_set_full_fp32_param

        here, own = kept_state(self.model)
        require_same_meta(own, meta)

        # The checkpoint holds the fp32 master of a parameter, whatever DeepSpeed computes in.
        shapes: TensorDict = {}
        for name, tensor in here.items():
            has_master = hasattr(tensor, "_hp_mapping")
            shapes[name] = tensor
            if has_master:
                shapes[name] = torch.empty_like(tensor, dtype=torch.float32, device="meta")
        require_same("model", tensors, shapes)
        for name, tensor in here.items():
            tensor.copy_(tensors[name])
            safe_set_full_fp32_param(tensor, tensors[name].to(tensor.device))


class ZeroOptimizerPart:
    """Optimizer state under ZeRO 1 and 2, by parameter name as in `OptimizerPart`. Collective.

    model: for the names of the parameters.
    optimizer: the one whose parameter groups DeepSpeed has replaced by flat partitions.
    members: the parameters of each group, before DeepSpeed replaced them.
    applied: the count of applied updates, 0-d.
    loss_scaler: DeepSpeed's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        members: list[list[nn.Parameter]],
        applied: Tensor,
        loss_scaler: Any,
    ) -> None:
        names = {id(param): name for name, param in model.named_parameters()}
        self.optimizer = optimizer
        self.groups = [[(names[id(param)], param) for param in group] for group in members]
        self.applied = applied
        self.loss_scaler = loss_scaler

    def _flat_states(self) -> list[dict[str, Tensor]]:
        """The state of each group's flat partition. Counters are 0-d; the rest has the partition's shape."""
        return [self.optimizer.state[group["params"][0]] for group in self.optimizer.param_groups]

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """As `OptimizerPart.state_dict`, gathered from all ranks. The meta data hold DeepSpeed's loss scaler, too."""
        from deepspeed.utils import safe_get_full_optimizer_state

        tensors: TensorDict = {"applied": self.applied}
        for members, flat in zip(self.groups, self._flat_states(), strict=True):
            for name, param in members:
                for key, value in flat.items():
                    if value.ndim == 0:
                        tensors[f"{name}.{key}"] = value.detach().clone()
                        continue
                    full = safe_get_full_optimizer_state(param, key)
                    assert full is not None, f"DeepSpeed does not know parameter {name}"
                    tensors[f"{name}.{key}"] = full

        scaler: dict[str, Any] = {}
        for key in _LOSS_SCALER_STATE:
            if hasattr(self.loss_scaler, key):
                scaler[key] = getattr(self.loss_scaler, key)
        return tensors, {**optimizer_meta(self.optimizer), "plain": {}, "loss_scaler": scaler}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore into a fresh or a live engine.

        Raises CheckpointError if names, shapes or the optimizer differ, or if parameters that ZeRO steps together have
        different step counters.
        """
        from deepspeed.utils import safe_set_full_optimizer_state

        # Compare names and shapes with what this engine would save.
        require_same_optimizer(self.optimizer, meta)
        flats = self._flat_states()
        here: TensorDict = {"applied": self.applied}
        for members, flat in zip(self.groups, flats, strict=True):
            for name, param in members:
                for key, value in flat.items():
                    like = value
                    if value.ndim > 0:
                        like = torch.empty_like(param, dtype=value.dtype, device="meta")
                    here[f"{name}.{key}"] = like
        require_same("optimizer", tensors, here)

        # A flat partition has one counter for all of its parameters.
        for members, flat in zip(self.groups, flats, strict=True):
            for key, value in flat.items():
                incoming = [tensors[f"{name}.{key}"] for name, _ in members]
                if value.ndim == 0:
                    if any(not torch.equal(other, incoming[0]) for other in incoming):
                        what = f'parameters have different "{key}" counters'
                        why = "ZeRO steps all parameters of a group together"
                        fix = "resume with torchrun or a single process"
                        raise CheckpointError(Problem(what, "optimizer", why, fix))
                    value.copy_(incoming[0])
                    continue
                for (_, param), tensor in zip(members, incoming, strict=True):
                    safe_set_full_optimizer_state(param, tensor.to(param.device), key)

        self.applied.copy_(tensors["applied"])
        for key, value in meta.get("loss_scaler", {}).items():
            setattr(self.loss_scaler, key, value)


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
        return cls(
            model,
            make_optimizer(dict(model.named_parameters())),
            schedule,
            train.max_grad_norm,
            zero_stage=engine.zero_stage,
            micro_batch=train.micro_batch,
            accumulation=train.global_batch // train.micro_batch // read_launch().world_size,
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

        # ZeRO makes a new state for its flat partitions.
        if self._sharded:
            optimizer.state.clear()
        try:
            self._engine: Any = deepspeed.initialize(
                model=model, optimizer=optimizer, config=config, dist_init_required=False
            )[0]
        except ValidationError as error:
            refused: list[Problem] = []
            for item in error.errors():
                key = ".".join(str(part) for part in item["loc"])
                what = f"DeepSpeed refuses {key}: {item['msg']}"
                where = f"engine.deepspeed={user_config}"
                refused.append(Problem(what, where, fix="correct or remove the key"))
            raise ConfigError(refused) from error
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

    @lost_rank_named()
    def measure(self, thorough: bool) -> dict[str, Tensor]:
        """As `core.protocols.Gradients.measure`, but never with the shares: DeepSpeed owns the scaled gradients."""
        loss_scale = torch.tensor(self._loss_scale(), dtype=torch.float32, device=self.device)
        norm = self._sharded_norm() if self._sharded else grad_norm(self._weights())
        figures = {"grad_norm": norm.to(self.device) / loss_scale, "loss_scale": loss_scale}
        if thorough:
            figures["param_norm"] = l2_norm(weight.detach() for weight in self._weights())
        return figures

    def _weights(self) -> list[nn.Parameter]:
        """What the optimizer trains, before DeepSpeed replaced its groups by flat partitions; whole on every rank."""
        return [param for group in self._members for param in group]

    @lost_rank_named()
    def apply(self, skip: Tensor, overflow: Tensor, norm: Tensor, clip: float) -> dict[str, Tensor]:
        """As `core.protocols.Gradients.apply`; then the gradients are zeroed.

        A bad update must not reach the weights. At ZeRO 0 DeepSpeed checks nothing, so its step is not called. At ZeRO
        1 and 2 one gradient is set to infinity, and DeepSpeed's own overflow check drops the update on every rank.
        """
        lr = self._set_lr()
        bad = bool(skip.item())
        if self._sharded:
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
        if not self._sharded:
            weights = dict(self._model.named_parameters())
            optimizer = OptimizerPart(weights, self._optimizer, self._applied)
            return {"model": ModelPart(self._model), "optimizer": optimizer}
        zero = self._engine.optimizer
        return {
            "model": ZeroModelPart(self._model),
            "optimizer": ZeroOptimizerPart(
                self._model, self._optimizer, self._members, self._applied, zero.loss_scaler
            ),
        }

    def close(self) -> None:
        """Leave the process group; safe to call twice."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
        leave()
