"""Plain torch, with one process or with several under DistributedDataParallel (DDP).

A step stays on the device: the gradient norm, the decision whether the update is applied, and the update itself never
wait for the host. The learning rate is a tensor for the same reason.

This file also defines the layout of model and optimizer in a checkpoint: tensors by the name of their parameter. Every
engine writes this layout, so a run can resume under another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
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
    """Parameters and persistent buffers of `model` by state_dict key, and {alias: key} for tied ones.

    A tensor with several names is listed under the first. Pickled extra state (`_extra_state` of Transformer Engine) is
    left out.
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


def kept_state(model: nn.Module, frozen_meta: Meta | None = None) -> tuple[TensorDict, Meta]:
    """What a checkpoint holds of `model`: tensors as `named_state` gives them, and meta data.

    Frozen weights that come from a folder stay there, if the model names that folder in an attribute `frozen_from`. The
    checkpoint then holds their fingerprint only. Keys of the meta data:

    tied: {alias: key}.
    config: hash of the file that describes the model, if the model has it as `config_sha256`.
    frozen: {"from": folder, "count": of tensors, "sha256": of their hashes}, if frozen weights are left out.

    frozen_meta: `frozen` of an earlier call. The frozen weights are not read again then.
    """
    tensors, tied = named_state(model)
    meta: Meta = {"tied": tied}
    if described := getattr(model, "config_sha256", ""):
        meta["config"] = str(described)

    folder = getattr(model, "frozen_from", "")
    trained: TensorDict = {}
    frozen: TensorDict = {}
    for name, tensor in tensors.items():
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        (frozen if is_frozen else trained)[name] = tensor
    if not folder or not frozen:
        return tensors, meta

    # Reading gigabytes of weights takes seconds: the fingerprint is made once.
    if frozen_meta is None:
        device = next(iter(frozen.values())).device
        hashes = Fingerprint(device).of(frozen.values()).tolist()
        listed = json.dumps(list(zip(frozen, hashes, strict=True)))
        sha256 = hashlib.sha256(listed.encode()).hexdigest()
        frozen_meta = {"from": str(folder), "count": len(frozen), "sha256": sha256}
    return trained, {**meta, "frozen": frozen_meta}


def _walk(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and persistent buffer with its state_dict key, tied ones under each of their names."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, tensor in module._parameters.items():
            if tensor is not None:
                yield prefix + name, tensor
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, tensor


def _named(names: set[str]) -> str:
    """The first eight of `names`, for a message."""
    return some(sorted(names), 8)


def require_same(part: str, saved: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError that names every tensor that is missing on one side, or differs in shape or dtype.

    part: "model" or "optimizer", for the message.
    saved: tensors of the checkpoint.
    here: tensors of the run.
    """
    problems: list[Problem] = []
    fix = "resume with the model, recipe and version that wrote the checkpoint, or start anew with --resume never"
    if missing := saved.keys() - here.keys():
        problems.append(Problem(f"only in the checkpoint: {_named(missing)}", part, fix=fix))
    if added := here.keys() - saved.keys():
        problems.append(Problem(f"only in the run: {_named(added)}", part, fix=fix))
    for name in sorted(saved.keys() & here.keys()):
        a, b = saved[name], here[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            theirs, ours = f"{a.dtype} {list(a.shape)}", f"{b.dtype} {list(b.shape)}"
            what = f"{name} is {theirs} in the checkpoint, {ours} in the run"
            problems.append(Problem(what, part, fix=fix))
    if problems:
        raise CheckpointError(problems)


class ModelPart:
    """Weights and persistent buffers, as a part of the TrainState.

    `state_dict` gives the live tensors: copy them before training goes on.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._frozen: Meta | None = None

    def _kept(self) -> tuple[TensorDict, Meta]:
        tensors, meta = kept_state(self.model, self._frozen)
        self._frozen = meta.get("frozen")
        return tensors, meta

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """Tensors by state_dict key, tied ones once, and meta data: see `kept_state`."""
        tensors, meta = self._kept()
        return {name: tensor.detach() for name, tensor in tensors.items()}, meta

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Copy `tensors` into the live ones, which stay the same objects.

        Raises CheckpointError if names, shapes, dtypes or ties differ, or if the frozen weights beside it are others.
        """
        here, own = self._kept()
        require_same_meta(own, meta)
        require_same("model", tensors, here)
        for name, tensor in here.items():
            # The elements of an expanded buffer share memory: nothing can be copied into it.
            expanded = 0 in tensor.stride() and tensor.numel() > 1
            if expanded:
                tensor.data = tensors[name].to(tensor.device, copy=True)
            else:
                tensor.copy_(tensors[name])


def require_same_meta(here: Meta, meta: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the meta data of a model part do not fit the run's model.

    Three things must be the same: ties, the file that describes the model, and frozen weights outside the checkpoint.

    here: of the run's model, by `kept_state`.
    meta: of the checkpoint.
    """
    problems: list[Problem] = []
    saved, tied = dict(meta["tied"]), here["tied"]
    if saved != tied:
        what = f"tied parameters differ: {saved or 'none'} in the checkpoint, {tied or 'none'} in the run"
        fix = "resume with the model that wrote the checkpoint"
        problems.append(Problem(what, "model", fix=fix))

    # Compared only where both sides have it.
    described = meta.get("config"), here.get("config")
    if None not in described and described[0] != described[1]:
        what = "the model is described otherwise than when the checkpoint was written"
        why = "its config.json has changed since, and the same weights would compute something else"
        fix = "put the folder of model.target back as it was"
        problems.append(Problem(what, "model", why, fix))

    theirs, ours = meta.get("frozen"), here.get("frozen")
    if theirs and ours and theirs["sha256"] != ours["sha256"]:
        what = f"the frozen weights of {ours['from']} are not those that the checkpoint was trained beside"
        why = f"those were {theirs['count']} of {theirs['from']}"
        fix = "put the folder back as it was when the run began"
        problems.append(Problem(what, "model", why, fix))
    if problems:
        raise CheckpointError(problems)


def optimizer_meta(optimizer: torch.optim.Optimizer) -> Meta:
    """What must be the same in checkpoint and run, whatever the engine: the optimizer's class."""
    return {"optimizer": type(optimizer).__name__}


def require_same_optimizer(optimizer: torch.optim.Optimizer, meta: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the checkpoint was written by another kind of optimizer."""
    saved, here = meta["optimizer"], optimizer_meta(optimizer)["optimizer"]
    if saved != here:
        what = f"written by {saved}, this run has {here}"
        fix = "resume with the same train.optimizer"
        raise CheckpointError(Problem(what, "optimizer", fix=fix))


_INNER = "/"
"""Separates a state's key from the name of an inner tensor.

A checkpoint holds plain tensors only. A tensor subclass, such as torchao's quantised moments, is saved as the plain
tensors that it is made of.
"""


def _inner(value: Tensor) -> dict[str, Tensor]:
    """The plain tensors that `value` is made of, by the ending of their key; {"": value} for a plain one."""
    if not is_traceable_wrapper_subclass(value):
        return {"": value}
    names, _ = value.__tensor_flatten__()
    return {_INNER + name: getattr(value, name) for name in names}


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Plain values in the groups and attributes of `optimizer`: some optimizers count steps there, not in their state.

    Keys are `<group number>.<name>`, and `.<name>` for attributes of the optimizer itself. The learning rate is left
    out, as the schedule sets it.
    """
    found: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        if not name.startswith("_"):
            found[f".{name}"] = value
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "lr":
                found[f"{number}.{name}"] = value
    return {
        name: value for name, value in found.items() if isinstance(value, bool | int | float | str)
    }


class OptimizerPart:
    """Optimizer state by parameter name, and the count of applied updates, as a part of the TrainState.

    `state_dict` gives the live tensors: copy them before training goes on.

    model: for the names of the parameters.
    optimizer: whose state it is.
    applied: the count of applied updates, 0-d.
    initial: `_settings` of the optimizer when it was new; None: it is new now, take them here. Settings that differ
        from these are part of the state.
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
        """Each parameter that the optimizer trains, with its group, by name."""
        names = {id(param): name for name, param in self.model.named_parameters()}
        owned: dict[str, tuple[nn.Parameter, dict[str, Any]]] = {}
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                owned[names[id(param)]] = (param, group)
        return owned

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """The live tensors, and meta data.

        Tensors are `applied` and `<parameter>.<state key>`; those of a tensor subclass are
        `<parameter>.<state key>/<inner name>`. Keys of the meta data:

        optimizer: the class.
        plain: state that is no tensor, by the same keys.
        counted: settings that have changed since the optimizer was new, if any.
        """
        tensors: TensorDict = {"applied": self.applied}
        plain: dict[str, Any] = {}
        for name, (param, _) in self._owned().items():
            for key, value in self.optimizer.state[param].items():
                if not isinstance(value, Tensor):
                    plain[f"{name}.{key}"] = value
                    continue
                for inner, tensor in _inner(value).items():
                    tensors[f"{name}.{key}{inner}"] = tensor
        meta: Meta = {**optimizer_meta(self.optimizer), "plain": plain}

        now = _settings(self.optimizer)
        counted = {key: now[key] for key in now if self._initial.get(key) != now[key]}
        if counted:
            meta["counted"] = counted
        return tensors, meta

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore into a fresh or a live optimizer. Tensors that exist are copied into.

        Raises CheckpointError if the optimizer's class differs, if a state belongs to no parameter or has another shape
        than the live one, or if only one side is quantised.
        """
        # Sort what is saved by parameter, and refuse what does not fit before anything changes.
        require_same_optimizer(self.optimizer, meta)
        owned = self._owned()
        incoming = self._by_parameter(owned.keys(), tensors, meta["plain"])
        live = self._live_tensors(owned)
        shared = live.keys() & tensors.keys()
        saved = {full: tensors[full] for full in shared}
        require_same("optimizer", saved, {full: live[full] for full in shared})
        self._require_same_quantisation(live, tensors)

        # Set the state of each parameter.
        for name, (param, group) in owned.items():
            state = self.optimizer.state[param]
            saved_keys = {key.partition(_INNER)[0] for key in incoming[name]}
            for key in state.keys() - saved_keys:
                del state[key]
            for key, value in incoming[name].items():
                if f"{name}.{key}" in live:
                    live[f"{name}.{key}"].copy_(value)
                elif isinstance(value, Tensor):
                    # Like torch itself: step counters are on the host, unless a kernel reads them.
                    on_device = group.get("fused") or group.get("capturable")
                    on_host = key == SCALAR_STATE and not on_device
                    state[key] = value.detach().clone().to("cpu" if on_host else param.device)
                else:
                    state[key] = value

        self.applied.copy_(tensors["applied"])
        self._restore_settings(meta.get("counted", {}))

    def _by_parameter(
        self, names: Collection[str], tensors: Mapping[str, Tensor], plain: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Saved state by parameter and key. Raises CheckpointError for state of no parameter in `names`."""
        incoming: dict[str, dict[str, Any]] = {name: {} for name in names}
        unknown: set[str] = set()
        for full, value in [*tensors.items(), *plain.items()]:
            name, _, key = full.rpartition(".")
            if name in incoming:
                incoming[name][key] = value
            elif full != "applied":
                unknown.add(full)
        what = ""
        if unknown:
            what = f"state of no parameter of this run: {_named(unknown)}"
        elif "applied" not in tensors:
            what = 'no "applied" count'
        if what:
            raise CheckpointError(Problem(what, "optimizer", fix="resume with the same model"))
        return incoming

    def _live_tensors(
        self, owned: Mapping[str, tuple[nn.Parameter, dict[str, Any]]]
    ) -> dict[str, Tensor]:
        """Tensors of the present state by the keys of `state_dict`; empty for a fresh optimizer."""
        live: dict[str, Tensor] = {}
        for name, (param, _) in owned.items():
            for key, now in self.optimizer.state[param].items():
                if not isinstance(now, Tensor):
                    continue
                for inner, tensor in _inner(now).items():
                    live[f"{name}.{key}{inner}"] = tensor
        return live

    def _require_same_quantisation(
        self, live: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
    ) -> None:
        """Raise CheckpointError if a state is a tensor subclass in the run or in the checkpoint only."""
        one_sided = live.keys() ^ tensors.keys()
        if odd := {full for full in one_sided if _INNER in full.rpartition(".")[2]}:
            what = f"quantised on one side only: {_named(odd)}"
            fix = (
                "resume with the train.optimizer, the optimizer_args and the library that wrote it"
            )
            raise CheckpointError(Problem(what, "optimizer", fix=fix))

    def _restore_settings(self, counted: Mapping[str, Any]) -> None:
        """Set the optimizer's settings to the saved ones, and those that are not saved to what they were when new."""
        for key, now in _settings(self.optimizer).items():
            wanted = counted.get(key, self._initial.get(key, now))
            if wanted == now:
                continue
            number, _, name = key.partition(".")
            if number:
                self.optimizer.param_groups[int(number)][name] = wanted
            else:
                setattr(self.optimizer, name, wanted)


# torch renamed this argument of DDP, and warns about the old name.
_ARGUMENTS = signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers"
)


class TorchEngine(ProcessGroup):
    """Engine for plain torch (see `core.protocols.Engine`).

    A step reads nothing on the host if the optimizer takes `found_inf`. The learning rate is then one 0-d tensor that
    all parameter groups share.

    model, optimizer: on `device`.
    schedule: learning rate by the count of applied updates, both 0-d tensors.
    max_grad_norm: clip to this norm.
    loss_scale: of fp16; None: no loss scale.
    timeout_seconds: after which a collective gives up on a rank.
    """

    owns_loss_scale: ClassVar = False
    snapshots: ClassVar = True
    sharded: ClassVar = False
    any_optimizer: ClassVar = True

    @classmethod
    def lacking(cls, device: str) -> list[Problem]:
        """What this engine needs and this machine lacks: nothing. device: "cpu" or "cuda"."""
        return []

    @classmethod
    def refusals(cls, config: EngineConfig, precision: str, device: str) -> list[Problem]:
        """Why this engine cannot train in `precision` ("fp32" | "bf16" | "fp16" | "fp8"): it always can."""
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
        """The engine of a run. autocast_dtype: unused, as the precision backend casts here."""
        return cls(
            model,
            optimizer,
            schedule,
            config.train.max_grad_norm,
            loss_scale=loss_scale,
            device=device,
            timeout_seconds=config.engine.timeout_seconds,
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

        # A tensor as learning rate is read by kernels on the device. torchao's optimizers accept nothing else.
        self._lr = torch.zeros((), dtype=torch.float32, device=device)
        rates = [group.get("lr") for group in optimizer.param_groups]
        has_tensors = all(isinstance(rate, Tensor) for rate in rates)
        self._lr_on_device = has_tensors or takes_found_inf(optimizer)
        self._initial = _settings(optimizer)
        if self._lr_on_device:
            for group in optimizer.param_groups:
                group["lr"] = self._lr

        # DDP averages the gradients of all ranks during backward.
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
        """Context for forward and backward of one micro-batch. Ranks exchange gradients in the last one only."""
        self._buffers.begin()
        exchange = nullcontext() if last or self._ddp is None else self._ddp.no_sync()
        with lost_rank_named(), exchange:
            yield

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of `loss`, times the loss scale if there is one."""
        if self._loss_scale is not None:
            loss = loss * self._loss_scale.value
        loss.backward()

    def measure(self, thorough: bool) -> dict[str, Tensor]:
        """As `core.protocols.Gradients.measure`. Raises ConfigError for parameters without a gradient under DDP."""
        if self._ddp is not None and not self._checked:
            self._checked = True
            _require_gradients(self._model)
        return self._gradients.measure(thorough)

    def apply(self, skip: Tensor, overflow: Tensor, norm: Tensor, clip: float) -> dict[str, Tensor]:
        """As `core.protocols.Gradients.apply`; then the gradients are zeroed."""
        self._set_lr()
        figures = self._gradients.apply(skip, overflow, norm, clip)
        self._buffers.settle(figures["applied"])
        self._applied += figures["applied"]
        self.optimizer.zero_grad(set_to_none=True)
        return {**figures, "applied_steps": self._applied.clone()}

    def _set_lr(self) -> None:
        """Set the learning rate of the next update."""
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

        DDP's wrapper goes first. If it held the last reference to the group, the group would join its threads while
        this thread holds Python's lock. If one of them waits for that lock, the rank never exits (pytorch issue
        190489).
        """
        self._ddp = None
        self.module = self._model
        leave()


def shares_buffers(model: nn.Module) -> bool:
    """Whether every forward must begin with rank 0's buffers.

    It must if forward may write into a buffer that a checkpoint holds, such as BatchNorm's averages. A checkpoint holds
    rank 0's buffers only: if each rank went on with its own, a resume would not be exact.
    """
    saved = model.state_dict().keys()
    buffers = model.named_buffers()
    return any(name in saved and buffer.is_floating_point() for name, buffer in buffers)


def _require_gradients(model: nn.Module) -> None:
    """Raise ConfigError naming parameters without a gradient in the first step.

    DDP finishes the exchange of gradients only when every parameter has one. Its next forward would fail, with a
    message that gives numbers for names.
    """
    unused: list[str] = []
    for name, param in model.named_parameters():
        if param.requires_grad and param.grad is None:
            unused.append(name)
    if unused:
        what = f"{len(unused)} parameters took no part in the loss, such as {unused[0]}"
        why = "DistributedDataParallel needs a gradient of every parameter, and would fail at the next forward"
        fix = "freeze them (requires_grad_(False)), use them, or train on one process"
        raise ConfigError(Problem(what, "model", why, fix))
