"""Model and optimizer under ZeRO 1 and 2, through DeepSpeed's public accessors, in the layout of `parts`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harness.core.errors import CheckpointError, Problem
from harness.core.protocols import Meta, TensorDict
from harness.engines.parts import named_state, optimizer_meta, require_same, require_same_optimizer, require_tied

_LOSS_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class ZeroModelPart:
    """fp32 weights and buffers under ZeRO 1 and 2. Collective where DeepSpeed's fp16 section keeps fp32 masters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """As `ModelPart.state_dict`; parameters in fp32, whatever DeepSpeed computes in."""
        from deepspeed.utils import safe_get_full_fp32_param

        tensors, tied = named_state(self.model)
        full: TensorDict = {}
        for name, tensor in tensors.items():
            master = None if tensor.dtype == torch.float32 else safe_get_full_fp32_param(tensor)
            full[name] = tensor.detach() if master is None else master
        return full, {"tied": tied}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """As `ModelPart.load_state_dict`, into the parameters and DeepSpeed's partitions of their masters."""
        from deepspeed.utils import safe_set_full_fp32_param

        here, tied = named_state(self.model)
        require_tied(tied, meta)
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
                    full = value.detach().clone() if value.ndim == 0 else safe_get_full_optimizer_state(param, key)
                    assert full is not None, f"DeepSpeed does not know parameter {name}"
                    tensors[f"{name}.{key}"] = full
        scaler = {key: getattr(self.loss_scaler, key) for key in _LOSS_SCALER_STATE if hasattr(self.loss_scaler, key)}
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
                    like = value if value.ndim == 0 else torch.empty_like(param, dtype=value.dtype, device="meta")
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
