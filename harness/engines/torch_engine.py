"""One process, or several under DistributedDataParallel: the step stays on the device from norm to zeroed gradients.

Model and optimizer are parts of the TrainState, by parameter name; every engine writes this layout.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from harness.core.collectives import Fingerprint
from harness.core.config import EngineConfig, RunConfig
from harness.core.errors import CheckpointError, ConfigError, Problem, some
from harness.core.protocols import Meta, Stateful, TensorDict
from harness.core.update import DynamicLossScale, TorchGradients, WindowBuffers, takes_found_inf
from harness.engines.process_group import ProcessGroup, join, leave, lost_rank_named, read_launch

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


def kept_state(model: nn.Module, known: Meta | None = None) -> tuple[TensorDict, Meta]:
    """What a checkpoint holds of `model`: `named_state`, and {"tied": {alias: key}}; "config", too, the hash of what
    the model was built from, if that is a file and the model has it as `config_sha256`.

    A model whose frozen weights come from a folder says so by an attribute `frozen_from`: they stay there, and the meta
    data has their fingerprint, {"frozen": {"from": folder, "count": n, "sha256": of their hashes}}. known: that of an
    earlier call, which spares reading all of them.
    """
    tensors, tied = named_state(model)
    meta: Meta = {"tied": tied}
    if described := getattr(model, "config_sha256", ""):
        meta["config"] = str(described)
    folder = getattr(model, "frozen_from", "")
    frozen = {
        name: each
        for name, each in tensors.items()
        if isinstance(each, nn.Parameter) and not each.requires_grad
    }
    if not folder or not frozen:
        return tensors, meta
    if known is None:
        hashes = Fingerprint(next(iter(frozen.values())).device).of(frozen.values()).tolist()
        sha256 = hashlib.sha256(
            json.dumps(list(zip(frozen, hashes, strict=True))).encode()
        ).hexdigest()
        known = {"from": str(folder), "count": len(frozen), "sha256": sha256}
    return {name: each for name, each in tensors.items() if name not in frozen}, {
        **meta,
        "frozen": known,
    }


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
    for side, names in (
        ("checkpoint", saved.keys() - here.keys()),
        ("run", here.keys() - saved.keys()),
    ):
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
        self._frozen: Meta | None = None

    def _kept(self) -> tuple[TensorDict, Meta]:
        tensors, meta = kept_state(self.model, self._frozen)
        self._frozen = meta.get("frozen")
        return tensors, meta

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """As `kept_state`: tensors by state_dict key, tied ones once."""
        tensors, meta = self._kept()
        return {name: tensor.detach() for name, tensor in tensors.items()}, meta

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Copy in place (identity is kept). Raises CheckpointError if names, shapes, dtypes or ties differ, or if the
        frozen weights that it leaves out are others."""
        here, own = self._kept()
        require_same_meta(own, meta)
        require_same("model", tensors, here)
        for name, tensor in here.items():
            if (
                0 in tensor.stride() and tensor.numel() > 1
            ):  # an expanded buffer has no memory of its own to copy into
                tensor.data = tensors[name].to(tensor.device, copy=True)
            else:
                tensor.copy_(tensors[name])


def require_same_meta(here: Meta, meta: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the checkpoint's ties, the file that describes its model, or the frozen weights that it
    leaves out, are not the run's."""
    saved, tied = dict(meta["tied"]), here["tied"]
    problems: list[Problem] = []
    if saved != tied:
        what = f"tied parameters differ: {saved or 'none'} in the checkpoint, {tied or 'none'} in the run"
        problems.append(
            Problem(what, "model", fix="resume with the model that wrote the checkpoint")
        )
    if meta.get("config", here.get("config")) != here.get("config", meta.get("config")):
        what = "the model is described otherwise than when the checkpoint was written"
        why = "its config.json has changed since, and the same weights would compute something else"
        problems.append(
            Problem(what, "model", why, "put the folder of model.target back as it was")
        )
    theirs, ours = meta.get("frozen"), here.get("frozen")
    if theirs and ours and theirs["sha256"] != ours["sha256"]:
        what = f"the frozen weights of {ours['from']} are not those that the checkpoint was trained beside"
        fix = "put the folder back as it was when the run began"
        problems.append(
            Problem(what, "model", f"those were {theirs['count']} of {theirs['from']}", fix)
        )
    if problems:
        raise CheckpointError(problems)


def optimizer_meta(optimizer: torch.optim.Optimizer) -> Meta:
    """What must match between checkpoint and run, whatever the engine."""
    return {"optimizer": type(optimizer).__name__}


def require_same_optimizer(optimizer: torch.optim.Optimizer, meta: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the checkpoint was written by another kind of optimizer."""
    saved, here = meta["optimizer"], optimizer_meta(optimizer)["optimizer"]
    if saved != here:
        raise CheckpointError(
            Problem(
                f"written by {saved}, this run has {here}",
                "optimizer",
                fix="resume with the same train.optimizer",
            )
        )


_INNER = "/"
"""Between a state's key and the name of a tensor that a tensor subclass, such as torchao's quantised moments, is made
of: files of checkpoints hold plain tensors."""


def _inner(value: Tensor) -> dict[str, Tensor]:
    """The plain tensors that `value` is made of, by name: "" for one that is plain itself."""
    if not is_traceable_wrapper_subclass(value):
        return {"": value}
    names, _ = value.__tensor_flatten__()
    return {_INNER + name: getattr(value, name) for name in names}


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer may count in its groups and attributes, beside its state: plain values by `<group>.<name>`, and
    by `.<name>` for its own.
    """
    found = {
        f".{name}": value for name, value in vars(optimizer).items() if not name.startswith("_")
    }
    for number, group in enumerate(optimizer.param_groups):
        found |= {f"{number}.{name}": value for name, value in group.items() if name != "lr"}
    return {
        name: value for name, value in found.items() if isinstance(value, bool | int | float | str)
    }


class OptimizerPart:
    """Optimizer state by parameter name, and the count of applied updates. Tensors are the live ones.

    initial: the optimizer's `_settings` when it was new; those that it has changed since are part of its state.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        applied: Tensor,
        initial: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.applied = applied
        self._initial = _settings(optimizer) if initial is None else dict(initial)

    def _owned(self) -> dict[str, tuple[nn.Parameter, dict[str, Any]]]:
        names = {id(param): name for name, param in self.model.named_parameters()}
        return {
            names[id(param)]: (param, group)
            for group in self.optimizer.param_groups
            for param in group["params"]
        }

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """tensors: `<parameter>.<state key>` and `applied`; meta: its class, and state that is no tensor.

        A tensor subclass is there as the tensors that it is made of, `<parameter>.<state key>/<name>`.
        """
        tensors: TensorDict = {"applied": self.applied}
        plain: dict[str, Any] = {}
        for name, (param, _) in self._owned().items():
            for key, value in self.optimizer.state[param].items():
                if isinstance(value, Tensor):
                    tensors |= {
                        f"{name}.{key}{inner}": tensor for inner, tensor in _inner(value).items()
                    }
                else:
                    plain[f"{name}.{key}"] = value
        counted = {
            key: now
            for key, now in _settings(self.optimizer).items()
            if self._initial.get(key) != now
        }
        moved = {"counted": counted} if counted else {}
        return tensors, {**optimizer_meta(self.optimizer), "plain": plain, **moved}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore into a fresh or a live optimizer; tensors that exist are copied into.

        Raises CheckpointError if the optimizer's class differs, or a state belongs to no parameter or has another
        shape than the live one.
        """
        require_same_optimizer(self.optimizer, meta)
        owned = self._owned()
        incoming: dict[str, dict[str, Any]] = {name: {} for name in owned}
        unknown: set[str] = set()
        for full, value in [*tensors.items(), *meta["plain"].items()]:
            name, _, key = full.rpartition(".")
            if name in incoming:
                incoming[name][key] = value
            elif full != "applied":
                unknown.add(full)
        if unknown or "applied" not in tensors:
            what = (
                f"state of no parameter of this run: {_named(unknown)}"
                if unknown
                else 'no "applied" count'
            )
            raise CheckpointError(Problem(what, "optimizer", fix="resume with the same model"))
        state_of = self.optimizer.state
        live = {
            f"{name}.{key}{inner}": tensor
            for name, (param, _) in owned.items()
            for key, now in state_of[param].items()
            if isinstance(now, Tensor)
            for inner, tensor in _inner(now).items()
        }
        known = live.keys() & tensors.keys()
        require_same(
            "optimizer",
            {full: tensors[full] for full in known},
            {full: live[full] for full in known},
        )
        if odd := {
            full for full in live.keys() ^ tensors.keys() if _INNER in full.rpartition(".")[2]
        }:
            fix = (
                "resume with the train.optimizer, the optimizer_args and the library that wrote it"
            )
            raise CheckpointError(
                Problem(f"quantised on one side only: {_named(odd)}", "optimizer", fix=fix)
            )
        for name, (param, group) in owned.items():
            state = state_of[param]
            for key in state.keys() - {key.partition(_INNER)[0] for key in incoming[name]}:
                del state[key]
            for key, value in incoming[name].items():
                if f"{name}.{key}" in live:
                    live[f"{name}.{key}"].copy_(value)
                elif isinstance(value, Tensor):
                    on_host = key == SCALAR_STATE and not (
                        group.get("fused") or group.get("capturable")
                    )
                    state[key] = value.detach().clone().to("cpu" if on_host else param.device)
                else:
                    state[key] = value
        self.applied.copy_(tensors["applied"])
        self._count(meta.get("counted", {}))

    def _count(self, counted: Mapping[str, Any]) -> None:
        """Set what an optimizer counts in its groups and attributes: to what it was, or to its beginning."""
        for place, now in _settings(self.optimizer).items():
            wanted = counted.get(place, self._initial.get(place, now))
            number, _, name = place.partition(".")
            if wanted != now and number:
                self.optimizer.param_groups[int(number)][name] = wanted
            elif wanted != now:
                setattr(self.optimizer, name, wanted)


# torch renamed the argument, and warns of the old name.
_ARGUMENTS = signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers"
)


class TorchEngine(ProcessGroup):
    """Engine for plain torch (see `core.protocols.Engine`).

    model and optimizer are on `device`; schedule maps applied updates (0-d tensor) to a learning rate (0-d tensor).
    With an optimizer that takes `found_inf` a step reads nothing on the host; the learning rate is then one 0-d tensor
    shared by all parameter groups.
    """

    owns_loss_scale: ClassVar = False
    snapshots: ClassVar = True
    any_optimizer: ClassVar = True

    @classmethod
    def lacking(cls, device: str) -> list[Problem]:
        """What it needs on this machine and does not find: nothing. device: "cpu" or "cuda"."""
        return []

    @classmethod
    def refusals(cls, config: EngineConfig, precision: str, device: str) -> list[Problem]:
        """Why it cannot train in `precision` ("fp32" | "bf16" | "fp16" | "fp8"): it always can."""
        return []

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
    ) -> TorchEngine:
        """The engine of a run. autocast_dtype: what the backend casts to, which is not the engine's business."""
        limit, timeout = config.train.max_grad_norm, config.engine.timeout_seconds
        return cls(
            model,
            optimizer,
            schedule,
            limit,
            loss_scale=loss_scale,
            device=device,
            timeout_seconds=timeout,
        )

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[Tensor], Tensor],
        max_grad_norm: float,
        *,
        loss_scale: DynamicLossScale | None = None,
        device: torch.device,
        timeout_seconds: float = 600.0,
    ) -> None:
        join(read_launch(), device, timeout_seconds)
        super().__init__(device)
        self.name = "ddp" if self.world_size > 1 else "single"
        self.optimizer = optimizer
        self.lr_factor = 1.0
        self._model = model
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._gradients = TorchGradients([optimizer], params, max_grad_norm, loss_scale, device)
        self._buffers = WindowBuffers(model)
        self._schedule = schedule
        self._loss_scale = loss_scale
        self._applied = torch.zeros((), dtype=torch.float32, device=device)
        self._lr = torch.zeros((), dtype=torch.float32, device=device)
        # torchao's take no other rate than a tensor either.
        self._lr_on_device = all(
            isinstance(group.get("lr"), Tensor) for group in optimizer.param_groups
        )
        self._lr_on_device |= takes_found_inf(optimizer)
        self._initial = _settings(optimizer)
        if self._lr_on_device:
            for group in optimizer.param_groups:
                group["lr"] = self._lr
        self._ddp: DistributedDataParallel | None = None
        self._checked = False
        if self.world_size > 1:
            buffers: dict[str, Any] = {_SYNC_BUFFERS: shares_buffers(model)}
            self._ddp = DistributedDataParallel(
                model,
                device_ids=[device.index] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                **buffers,
            )
        self.module: nn.Module = model if self._ddp is None else self._ddp

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch; ranks exchange gradients in the last one only."""
        self._buffers.begin()
        with lost_rank_named(), nullcontext() if last or self._ddp is None else self._ddp.no_sync():
            yield

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of `loss`, times the loss scale if there is one."""
        (loss if self._loss_scale is None else loss * self._loss_scale.value).backward()

    def measure(self, shares: bool) -> dict[str, Tensor]:
        """As `core.protocols.Gradients.measure`. Raises ConfigError for parameters that DDP would wait for in vain."""
        if self._ddp is not None and not self._checked:
            self._checked = True
            _require_gradients(self._model)
        return self._gradients.measure(shares)

    def apply(self, skip: Tensor, overflow: Tensor, norm: Tensor, clip: float) -> dict[str, Tensor]:
        """As `core.protocols.Gradients.apply`; then the gradients are zeroed."""
        self._set_lr()
        figures = self._gradients.apply(skip, overflow, norm, clip)
        self._buffers.settle(figures["applied"])
        self._applied += figures["applied"]
        self.optimizer.zero_grad(set_to_none=True)
        return {**figures, "applied_steps": self._applied.clone()}

    def _set_lr(self) -> None:
        self._lr.copy_(self._schedule(self._applied) * self.lr_factor)
        if not self._lr_on_device:
            for group in self.optimizer.param_groups:
                group["lr"] = self._lr.item()

    def parts(self) -> dict[str, Stateful]:
        """`model` and `optimizer`; the loss scale is a part of its own."""
        optimizer = OptimizerPart(self._model, self.optimizer, self._applied, self._initial)
        return {"model": ModelPart(self._model), "optimizer": optimizer}

    def close(self) -> None:
        """Leave the process group; safe to call twice.

        DDP's wrapper goes first: if it were the last to hold the group, the group would end its threads while this
        thread has Python's lock, which one of them may be waiting for (pytorch issue 190489: the rank never exits).
        """
        self._ddp, self.module = None, self._model
        leave()


def shares_buffers(model: nn.Module) -> bool:
    """Whether forward must take rank 0's buffers: it may write into some that a checkpoint holds, such as BatchNorm's.

    Each rank would go on from its own otherwise: a checkpoint has rank 0's alone, and a resume could not be exact.
    Other models are spared the exchange.
    """
    saved = model.state_dict().keys()
    return any(
        name in saved and buffer.is_floating_point() for name, buffer in model.named_buffers()
    )


def _require_gradients(model: nn.Module) -> None:
    """Raise ConfigError naming parameters that the first step left without a gradient: DDP would stop at the next."""
    if unused := [
        name for name, p in model.named_parameters() if p.requires_grad and p.grad is None
    ]:
        raise ConfigError(
            Problem(
                f"{len(unused)} parameters took no part in the loss, such as {unused[0]}",
                "model",
                why="DistributedDataParallel waits for the gradient of every parameter",
                fix="freeze them (requires_grad_(False)), use them, or train on one process",
            )
        )
