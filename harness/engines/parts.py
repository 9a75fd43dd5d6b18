"""Model and optimizer as parts of the TrainState, by parameter name; every engine writes the same layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harness.core.errors import CheckpointError, Problem, some
from harness.core.protocols import Meta, TensorDict

SCALAR_STATE = "step"
"""The one per-parameter optimizer state that is a counter, not a tensor of the parameter's shape."""


def named_state(model: nn.Module) -> tuple[TensorDict, dict[str, str]]:
    """Parameters and persistent buffers of `model` by state_dict key, and {alias: key} of what is tied.

    Pickled extra state (`_extra_state` of Transformer Engine) is not among them. A tensor that is reachable under
    several names is listed under the first.
    """
    tensors: TensorDict = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in _walk(model):
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            tensors[name] = tensor
    return tensors, tied


def _walk(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, tensor in module._parameters.items():
            if tensor is not None:
                yield prefix + name, tensor
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, tensor


def _named(names: set[str]) -> str:
    return some(sorted(names), 8)


def require_same(part: str, saved: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError naming every tensor that is missing on a side or differs in shape or dtype."""
    problems: list[Problem] = []
    fix = "resume with the model, recipe and version that wrote the checkpoint, or start anew with --resume never"
    for side, names in (("checkpoint", saved.keys() - here.keys()), ("run", here.keys() - saved.keys())):
        if names:
            problems.append(Problem(f"only in the {side}: {_named(set(names))}", part, fix=fix))
    for name in sorted(saved.keys() & here.keys()):
        a, b = saved[name], here[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            problems.append(
                Problem(
                    f"{name} is {a.dtype} {list(a.shape)} in the checkpoint, {b.dtype} {list(b.shape)} in the run",
                    part,
                    fix=fix,
                )
            )
    if problems:
        raise CheckpointError(problems)


class ModelPart:
    """Weights and persistent buffers. Tensors of `state_dict` are the live ones: copy before training goes on."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """tensors: by state_dict key, tied ones once; meta: {"tied": {alias: key}}."""
        tensors, tied = named_state(self.model)
        return {name: tensor.detach() for name, tensor in tensors.items()}, {"tied": tied}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Copy in place (identity is kept). Raises CheckpointError if names, shapes, dtypes or ties differ."""
        here, tied = named_state(self.model)
        require_tied(tied, meta)
        require_same("model", tensors, here)
        for name, tensor in here.items():
            if 0 in tensor.stride() and tensor.numel() > 1:  # an expanded buffer has no memory of its own to copy into
                tensor.data = tensors[name].to(tensor.device, copy=True)
            else:
                tensor.copy_(tensors[name])


def require_tied(here: Mapping[str, str], meta: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the checkpoint's ties are not those of the run."""
    saved = dict(meta.get("tied", {}))
    if saved != dict(here):
        raise CheckpointError(
            Problem(
                f"tied parameters differ: {saved or 'none'} in the checkpoint, {dict(here) or 'none'} in the run",
                "model",
                fix="resume with the model that wrote the checkpoint",
            )
        )


def optimizer_meta(optimizer: torch.optim.Optimizer) -> Meta:
    """What must match between checkpoint and run, whatever the engine."""
    return {"optimizer": type(optimizer).__name__}


def require_same_optimizer(optimizer: torch.optim.Optimizer, meta: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the checkpoint was written by another kind of optimizer."""
    saved, here = meta.get("optimizer"), optimizer_meta(optimizer)["optimizer"]
    if saved != here:
        raise CheckpointError(
            Problem(f"written by {saved}, this run has {here}", "optimizer", fix="resume with the same train.optimizer")
        )


class OptimizerPart:
    """Optimizer state by parameter name, and the count of applied updates. Tensors are the live ones."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, applied: Tensor) -> None:
        self.model = model
        self.optimizer = optimizer
        self.applied = applied

    def _owned(self) -> dict[str, tuple[nn.Parameter, dict[str, Any]]]:
        names = {id(param): name for name, param in self.model.named_parameters()}
        return {names[id(param)]: (param, group) for group in self.optimizer.param_groups for param in group["params"]}

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """tensors: `<parameter>.<state key>` and `applied`; meta: its class, and state that is no tensor."""
        tensors: TensorDict = {"applied": self.applied}
        plain: dict[str, Any] = {}
        for name, (param, _) in self._owned().items():
            for key, value in self.optimizer.state[param].items():
                if isinstance(value, Tensor):
                    tensors[f"{name}.{key}"] = value
                else:
                    plain[f"{name}.{key}"] = value
        return tensors, {**optimizer_meta(self.optimizer), "plain": plain}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore into a fresh or a live optimizer; tensors that exist are copied into.

        Raises CheckpointError if the optimizer's class differs, or a state belongs to no parameter or has another
        shape than the live one.
        """
        require_same_optimizer(self.optimizer, meta)
        owned = self._owned()
        incoming: dict[str, dict[str, Any]] = {name: {} for name in owned}
        strangers: set[str] = set()
        for full, value in [*tensors.items(), *meta.get("plain", {}).items()]:
            name, _, key = full.rpartition(".")
            if name in incoming:
                incoming[name][key] = value
            elif full != "applied":
                strangers.add(full)
        if strangers or "applied" not in tensors:
            what = f"state of no parameter of this run: {_named(strangers)}" if strangers else 'no "applied" count'
            raise CheckpointError(Problem(what, "optimizer", fix="resume with the same model"))
        state_of = self.optimizer.state
        live = {
            f"{n}.{k}": state_of[p][k]
            for n, (p, _) in owned.items()
            for k, v in incoming[n].items()
            if isinstance(v, Tensor) and isinstance(state_of[p].get(k), Tensor)
        }
        require_same("optimizer", {full: tensors[full] for full in live}, live)
        for name, (param, group) in owned.items():
            state = state_of[param]
            for key in state.keys() - incoming[name].keys():
                del state[key]
            for key, value in incoming[name].items():
                if f"{name}.{key}" in live:
                    state[key].copy_(value)
                elif isinstance(value, Tensor):
                    on_host = key == SCALAR_STATE and not (group.get("fused") or group.get("capturable"))
                    state[key] = value.detach().clone().to("cpu" if on_host else param.device)
                else:
                    state[key] = value
        self.applied.copy_(tensors["applied"])
