"""DeepSpeed at ZeRO 0, 1 and 2 behind the same interface as plain torch.

What differs: DeepSpeed reads its gradient norm on the host, so a step costs a few host reads, and at ZeRO 1 and 2 the
norm is computed twice: before its step, which cannot be held back afterwards, and in it. Parameters stay fp32 (bf16 and
FP8 rungs use its torch_autocast section); its fp16 section at ZeRO-1 is the one exception, and there DeepSpeed owns the
loss scale. Under ZeRO 1 and 2 model and optimizer are read and written by DeepSpeed's public accessors, in the layout
of `torch_engine`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any, ClassVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from harness.core.config import EngineConfig, RunConfig
from harness.core.errors import CheckpointError, ConfigError, MachineError, Problem
from harness.core.health import grad_norm
from harness.core.protocols import Meta, Stateful, TensorDict
from harness.core.update import DynamicLossScale, WindowBuffers, init_optimizer_state
from harness.engines.deepspeed_setup import (
    Precision,
    build_config,
    build_kernel,
    check,
    find_tools_of_this_python,
    preflight,
    release_shared_memory,
)
from harness.engines.process_group import (
    ProcessGroup,
    join,
    leave,
    limit_every_group,
    lost_rank_named,
    read_launch,
)
from harness.engines.torch_engine import (
    ModelPart,
    OptimizerPart,
    kept_state,
    optimizer_meta,
    require_same,
    require_same_meta,
    require_same_optimizer,
    shares_buffers,
)

_LOSS_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class ZeroModelPart:
    """fp32 weights and buffers under ZeRO 1 and 2. Collective where DeepSpeed's fp16 section keeps fp32 masters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """As `ModelPart.state_dict`; parameters in fp32, whatever DeepSpeed computes in."""
        from deepspeed.utils import safe_get_full_fp32_param

        tensors, meta = kept_state(self.model)
        full: TensorDict = {}
        for name, tensor in tensors.items():
            master = None if tensor.dtype == torch.float32 else safe_get_full_fp32_param(tensor)
            full[name] = tensor.detach() if master is None else master
        return full, meta

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """As `ModelPart.load_state_dict`, into the parameters and DeepSpeed's partitions of their masters."""
        from deepspeed.utils import safe_set_full_fp32_param

        here, own = kept_state(self.model)
        require_same_meta(own, meta)
        shapes = {
            name: torch.empty_like(tensor, dtype=torch.float32, device="meta")
            if hasattr(tensor, "_hp_mapping")
            else tensor
            for name, tensor in here.items()
        }
        require_same("model", tensors, shapes)
        for name, tensor in here.items():
            tensor.copy_(tensors[name])
            safe_set_full_fp32_param(tensor, tensors[name].to(tensor.device))


class ZeroOptimizerPart:
    """Optimizer state under ZeRO 1 and 2, by parameter name as `OptimizerPart` has it. Collective: every rank calls."""

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
        """State of each group's flat partition: counters are 0-d, the rest has the partition's shape."""
        return [self.optimizer.state[group["params"][0]] for group in self.optimizer.param_groups]

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """As `OptimizerPart.state_dict`, gathered from all ranks; DeepSpeed's fp16 loss scaler goes into meta."""
        from deepspeed.utils import safe_get_full_optimizer_state

        tensors: TensorDict = {"applied": self.applied}
        for members, flat in zip(self.groups, self._flat_states(), strict=True):
            for name, param in members:
                for key, value in flat.items():
                    full = (
                        value.detach().clone()
                        if value.ndim == 0
                        else safe_get_full_optimizer_state(param, key)
                    )
                    assert full is not None, f"DeepSpeed does not know parameter {name}"
                    tensors[f"{name}.{key}"] = full
        scaler = {
            key: getattr(self.loss_scaler, key)
            for key in _LOSS_SCALER_STATE
            if hasattr(self.loss_scaler, key)
        }
        return tensors, {**optimizer_meta(self.optimizer), "plain": {}, "loss_scaler": scaler}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore into a fresh or live engine. Raises CheckpointError if names, shapes or the optimizer differ, or if
        parameters that ZeRO steps together have different step counters."""
        from deepspeed.utils import safe_set_full_optimizer_state

        require_same_optimizer(self.optimizer, meta)
        flats = self._flat_states()
        here: TensorDict = {"applied": self.applied}
        for members, flat in zip(self.groups, flats, strict=True):
            for name, param in members:
                for key, value in flat.items():
                    like = (
                        value
                        if value.ndim == 0
                        else torch.empty_like(param, dtype=value.dtype, device="meta")
                    )
                    here[f"{name}.{key}"] = like
        require_same("optimizer", tensors, here)
        for members, flat in zip(self.groups, flats, strict=True):
            for key, value in flat.items():
                incoming = [tensors[f"{name}.{key}"] for name, _ in members]
                if value.ndim == 0:
                    if any(not torch.equal(other, incoming[0]) for other in incoming):
                        raise CheckpointError(
                            Problem(
                                f'parameters have different "{key}" counters',
                                "optimizer",
                                why="ZeRO steps all parameters of a group together",
                                fix="resume with torchrun or a single process",
                            )
                        )
                    value.copy_(incoming[0])
                    continue
                for (_, param), tensor in zip(members, incoming, strict=True):
                    safe_set_full_optimizer_state(param, tensor.to(param.device), key)
        self.applied.copy_(tensors["applied"])
        for key, value in meta.get("loss_scaler", {}).items():
            setattr(self.loss_scaler, key, value)


# FP8 layers cast their own weights: to DeepSpeed such a run is one in bf16.
_SECTIONS: dict[str, Precision] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}


def _take_buffers(model: nn.Module, _: object) -> None:
    """Take rank 0's buffers, before a forward of any kind."""
    for buffer in model.buffers():
        torch.distributed.broadcast(buffer, 0)


class DeepSpeedEngine(ProcessGroup):
    """Engine for the deepspeed launcher (see `core.protocols.Engine`).

    model and optimizer are fresh and on `device`; schedule maps applied updates to a learning rate. micro_batch:
    samples per forward on one rank; accumulation: micro-batches per step. autocast_dtype: bfloat16 for the bf16 and
    FP8 rungs, float16 for DeepSpeed's fp16 section (CUDA, ZeRO-1), None for fp32. user_config: a DeepSpeed JSON to
    merge under ours. Raises ConfigError for combinations that are refused, MachineError if DeepSpeed cannot start here.
    """

    name = "deepspeed"
    owns_loss_scale: ClassVar = True
    snapshots: ClassVar = False  # ZeRO would have to gather its partitions for every copy
    any_optimizer: ClassVar = (
        False  # its flat partitions have no matrices, and its gathers no tensor subclasses
    )

    @classmethod
    def lacking(cls, device: str) -> list[Problem]:
        """What it needs on this machine and does not find. device: "cpu" or "cuda"."""
        return preflight(device)

    @classmethod
    def refusals(cls, config: EngineConfig, precision: str, device: str) -> list[Problem]:
        """Why it cannot train in `precision` ("fp32" | "bf16" | "fp16" | "fp8"); empty if it can."""
        return check(config.zero_stage, _SECTIONS[precision], device)

    @classmethod
    def build(
        cls,
        config: RunConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Any,
        loss_scale: DynamicLossScale | None,
        autocast_dtype: torch.dtype | None,
        device: torch.device,
    ) -> DeepSpeedEngine:
        """The engine of a run. loss_scale: the recipe's, which stays unused: under fp16 it has its own."""
        train, engine = config.train, config.engine
        return cls(
            model,
            optimizer,
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
        precision: Precision = (
            "fp16"
            if autocast_dtype == torch.float16
            else "fp32"
            if autocast_dtype is None
            else "bf16"
        )
        if problems := check(zero_stage, precision, device.type):
            raise ConfigError(problems)
        if missing := preflight(device.type):
            raise MachineError(missing)
        launch = read_launch()
        if not launch.launched:
            raise ConfigError(
                Problem(
                    "not started by a launcher",
                    "deepspeed",
                    fix="deepspeed launch/train.py ..., or TorchEngine alone",
                )
            )
        config = build_config(
            zero_stage=zero_stage,
            micro_batch=micro_batch,
            accumulation=accumulation,
            max_grad_norm=max_grad_norm,
            precision=precision,
            tested_optimizer=isinstance(optimizer, (torch.optim.Adam, torch.optim.Adagrad)),
            user=user_config,
        )
        find_tools_of_this_python()
        with redirect_stdout(sys.stderr):  # its banners and its log do not belong into our lines
            import deepspeed

            join(launch, device, timeout_seconds)
            build_kernel(
                lambda text: (
                    print(text, file=sys.stderr, flush=True) if launch.local_rank == 0 else None
                )
            )
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        super().__init__(device)
        self.barrier()  # now every rank has opened what it shares with the others
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
        if self.world_size > 1 and shares_buffers(model):
            model.register_forward_pre_hook(_take_buffers)  # DDP does, DeepSpeed does not
        if self._sharded:
            optimizer.state.clear()  # ZeRO keeps the state of its own flat partitions
        try:
            self._engine: Any = deepspeed.initialize(
                model=model, optimizer=optimizer, config=config, dist_init_required=False
            )[0]
        except ValidationError as error:
            raise ConfigError(
                [
                    Problem(
                        f"DeepSpeed refuses {'.'.join(str(part) for part in item['loc'])}: {item['msg']}",
                        f"engine.deepspeed={user_config}",
                        fix="correct or remove the key",
                    )
                    for item in error.errors()
                ]
            ) from error
        limit_every_group(timeout_seconds)
        init_optimizer_state(optimizer)
        if self._sharded:
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()  # as after a first step
        self.module: nn.Module = self._engine

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch; ZeRO 0 and 1 exchange gradients in the last one only."""
        self._buffers.begin()
        self._engine.set_gradient_accumulation_boundary(last)
        with lost_rank_named():
            yield

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of `loss`; DeepSpeed applies its own loss scale in fp16."""
        self._engine.backward(loss, scale_wrt_gas=False)

    @lost_rank_named()
    def measure(self, shares: bool) -> dict[str, Tensor]:
        """As `core.protocols.Gradients.measure`; DeepSpeed owns the scaled gradients: `shares` has no effect."""
        loss_scale = torch.tensor(self._loss_scale(), dtype=torch.float32, device=self.device)
        if self._sharded:
            norm = self._sharded_norm() / loss_scale
        else:
            norm = grad_norm(param for group in self._members for param in group).to(self.device)
        return {"grad_norm": norm, "loss_scale": loss_scale}

    @lost_rank_named()
    def apply(self, skip: Tensor, overflow: Tensor, norm: Tensor, clip: float) -> dict[str, Tensor]:
        """As `core.protocols.Gradients.apply`; then the gradients are zeroed.

        At ZeRO 0, where DeepSpeed would write NaN into the weights, a bad update never reaches it. At ZeRO 1 and 2 a
        bad flag is turned into an infinite gradient, which DeepSpeed's own overflow check then drops on every rank.
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
        """L2 norm of the averaged, still scaled gradients, float32 0-d, the same on every rank."""
        norm = torch.as_tensor(
            self._engine.optimizer.scaled_global_norm(), dtype=torch.float32, device=self.device
        )
        return torch.where(
            norm < 0, torch.inf, norm
        )  # -1 is DeepSpeed's word for a norm that is not finite

    def _clip(self, norm: Tensor, limit: float) -> None:
        """Clip to `limit`; DeepSpeed's own limit follows in its step."""
        if math.isfinite(limit):
            gradients = [
                param.grad for group in self._members for param in group if param.grad is not None
            ]
            torch._foreach_mul_(gradients, torch.clamp(limit / norm, max=1.0))

    def _set_lr(self) -> Tensor:
        lr = self._schedule(int(self._applied.item())) * self.lr_factor
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        return torch.tensor(lr, dtype=torch.float32, device=self.device)

    def _loss_scale(self) -> float:
        return float(self._engine.optimizer.cur_scale) if self._sharded else 1.0

    def _poison(self) -> None:
        from deepspeed.utils import safe_set_full_grad

        param = self._members[0][0]
        safe_set_full_grad(param, torch.full_like(param, float("inf"), dtype=torch.float32))

    def parts(self) -> dict[str, Stateful]:
        """`model` and `optimizer`, in the layout of the plain torch engine."""
        if not self._sharded:
            optimizer = OptimizerPart(self._model, self._optimizer, self._applied)
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
