"""The layout of model and optimizer in a checkpoint: tensors by the name of their parameter.

Every engine writes this layout, so a run can resume under another one. An engine that shards the model over ranks
gives this rank's rows of each parameter in its place, and says which rows they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from harness.core.collectives import Fingerprint
from harness.core.errors import CheckpointError, Problem, some
from harness.core.protocols import Meta, TensorDict
from harness.core.shards import Rows

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


def kept_state(
    model: nn.Module,
    frozen_meta: Meta | None = None,
    weights: Mapping[str, Tensor] | None = None,
    hashes: Mapping[str, Tensor] | None = None,
) -> tuple[TensorDict, Meta]:
    """What a checkpoint holds of `model`: tensors as `named_state` gives them, and meta data.

    Frozen weights that come from a folder stay there, if the model names that folder in an attribute `frozen_from`. The
    checkpoint then holds their fingerprint only. Keys of the meta data:

    tied: {alias: key}.
    config: hash of the file that describes the model, if the model has it as `config_sha256`.
    frozen: {"from": folder, "count": of tensors, "sha256": of their hashes}, if frozen weights are left out.

    frozen_meta: `frozen` of an earlier call. The frozen weights are not read again then.
    weights: by name, what is here of each parameter of a sharded model.
    hashes: by name, of whole parameters, where they are known; int64 0-d.
    """
    tensors, tied = named_state(model)
    if weights is not None:
        # Between two steps the model may hold whole parameters, left by a validation. Its names and ties count.
        tensors = {name: weights.get(name, tensor) for name, tensor in tensors.items()}
    meta: Meta = {"tied": tied}
    if described := getattr(model, "config_sha256", ""):
        meta["config"] = str(described)

    # Without a folder to find frozen weights in, the checkpoint must hold them.
    folder = getattr(model, "frozen_from", "")
    trained: TensorDict = {}
    frozen: TensorDict = {}
    for name, tensor in tensors.items():
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        kind = frozen if is_frozen else trained
        kind[name] = tensor
    if not folder or not frozen:
        return tensors, meta

    # Reading gigabytes of weights takes seconds: the fingerprint is made once.
    if frozen_meta is None:
        if hashes is None:
            device = next(iter(frozen.values())).device
            of_frozen = Fingerprint(device, portable=True).of(frozen.values())
        else:
            of_frozen = torch.stack([hashes[name] for name in frozen])
        pairs = list(zip(frozen, of_frozen.tolist(), strict=True))
        listed = json.dumps(pairs).encode()
        sha256 = hashlib.sha256(listed).hexdigest()
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


def require_same(
    part: str,
    saved: Mapping[str, Tensor],
    here: Mapping[str, Tensor],
) -> None:
    """Raise CheckpointError that names every tensor that is missing on one side, or differs in shape or dtype.

    part: "model" or "optimizer", for the message.
    saved: tensors of the checkpoint.
    here: tensors of the run.
    """
    problems: list[Problem] = []
    fix = "resume with the model, recipe and version that wrote the checkpoint, or begin again with --resume never"
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


@dataclass(frozen=True, slots=True)
class Shards:
    """How a rank holds the parameters of a model that is sharded over ranks.

    weights: by name, a plain Parameter over the memory of this rank's rows.
    rows: by name, which rows these are.
    frozen: the meta data of frozen weights, as `kept_state` gave it before the model was sharded. None: as it gives it
        of this rank's rows, which fits a copy in memory.
    loaded: called after new values were copied into `weights`.
    """

    weights: Mapping[str, nn.Parameter]
    rows: Mapping[str, Rows]
    frozen: Meta | None
    loaded: Callable[[], None]


class WeightAccess:
    """How `ModelPart` reads and writes a tensor of the model: here the tensor itself is all there is.

    An engine that keeps a weight elsewhere as well derives from this.
    """

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the shape and dtype that a checkpoint has for `tensor`, without its values."""
        return tensor

    def read(self, tensor: Tensor) -> Tensor:
        """What a checkpoint holds for `tensor`."""
        return tensor.detach()

    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Copy what a checkpoint holds into `tensor`, which stays the same object."""
        # The elements of an expanded buffer share memory: nothing can be copied into it.
        expanded = 0 in tensor.stride() and tensor.numel() > 1
        if expanded:
            tensor.data = value.to(tensor.device, copy=True)
        else:
            tensor.copy_(value)


class ModelPart:
    """Weights and persistent buffers, as a part of the TrainState.

    `state_dict` gives the live tensors: copy them before training goes on.

    shards: this rank's rows of each parameter, for a model that is sharded over ranks; None: the model's own tensors.
    access: how a tensor is read and written.
    """

    def __init__(
        self, model: nn.Module, shards: Shards | None = None, access: WeightAccess | None = None
    ) -> None:
        self.model = model
        self._shards = shards
        self._access = access or WeightAccess()
        self._frozen: Meta | None = None if shards is None else shards.frozen

    def _kept(self) -> tuple[TensorDict, Meta]:
        weights = None if self._shards is None else self._shards.weights
        tensors, meta = kept_state(self.model, self._frozen, weights)
        self._frozen = meta.get("frozen")
        return tensors, meta

    def rows(self) -> dict[str, Rows]:
        """The rows that this rank holds of each sharded tensor; empty if every rank holds all."""
        if self._shards is None:
            return {}
        # Frozen weights that stay in their folder are sharded, and no part of the checkpoint.
        kept, _ = self._kept()
        sharded = self._shards.rows
        return {name: rows for name, rows in sharded.items() if name in kept}

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """Tensors by state_dict key, tied ones once, and meta data: see `kept_state`."""
        kept, meta = self._kept()
        tensors = {name: self._access.read(tensor) for name, tensor in kept.items()}
        return tensors, meta

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Copy `tensors` into the live ones, which stay the same objects.

        Raises CheckpointError if names, shapes, dtypes or ties differ, or if the frozen weights beside it are others.
        """
        here, own = self._kept()
        require_same_meta(own, meta)
        expected = {name: self._access.like(tensor) for name, tensor in here.items()}
        require_same("model", tensors, expected)
        # All of it fits: nothing below can stop half-way.
        for name, tensor in here.items():
            self._access.write(tensor, tensors[name])
        if self._shards is not None:
            self._shards.loaded()


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
        what = "the description of the model has changed since the checkpoint was written"
        why = "its config.json has changed since, and the same weights would compute something else"
        fix = "put the folder of model.target back as it was"
        problems.append(Problem(what, "model", why, fix))

    # Frozen weights are not in the checkpoint, so only their hash can tell.
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
    saved = meta["optimizer"]
    here = optimizer_meta(optimizer)["optimizer"]
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


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
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
    # Tensors, objects and None are no counters.
    plain = (bool, int, float, str)
    return {name: value for name, value in found.items() if isinstance(value, plain)}


Group = dict[str, Any]
"""A parameter group of an optimizer."""
OfParameter = dict[str, Any]
"""The state of one parameter, by key; that of a tensor subclass by `<key>/<inner name>`."""


class StateAccess:
    """How `OptimizerPart` reads and writes the state of a parameter: here in `optimizer.state`, as torch keeps it.

    An engine that keeps it elsewhere derives from this.
    """

    must_fit = False
    """Whether the state is there for good, so that a checkpoint must have exactly its names."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def owned(self) -> list[tuple[nn.Parameter, Group]]:
        """Each parameter that the optimizer trains, with its group."""
        owned: list[tuple[nn.Parameter, Group]] = []
        for group in self.optimizer.param_groups:
            owned += [(param, group) for param in group["params"]]
        return owned

    def like(self, param: nn.Parameter) -> OfParameter:
        """Shapes and dtypes of what `read` gives, without the values."""
        return self.read(param)

    def read(self, param: nn.Parameter) -> OfParameter:
        """The state of `param`: live tensors of its shape, counters, and what is no tensor."""
        found: OfParameter = {}
        for key, value in self.optimizer.state[param].items():
            if not isinstance(value, Tensor):
                found[key] = value
                continue
            for inner, tensor in _inner(value).items():
                found[f"{key}{inner}"] = tensor
        return found

    def require_fit(self, saved: Mapping[str, OfParameter]) -> None:
        """Raise CheckpointError if the state of some parameters, by name, cannot be restored together."""

    def write(self, param: nn.Parameter, group: Group, saved: OfParameter) -> None:
        """Restore the state of `param`. Tensors that exist are copied into."""
        state, live = self.optimizer.state[param], self.read(param)
        saved_keys = {key.partition(_INNER)[0] for key in saved}
        for key in state.keys() - saved_keys:
            del state[key]
        for key, value in saved.items():
            if isinstance(live.get(key), Tensor):
                live[key].copy_(value)
            elif isinstance(value, Tensor):
                # Like torch itself: step counters are on the host, unless a kernel reads them.
                on_device = group.get("fused") or group.get("capturable")
                on_host = key == SCALAR_STATE and not on_device
                state[key] = value.detach().clone().to("cpu" if on_host else param.device)
            else:
                state[key] = value

    def meta(self) -> Meta:
        """More of the engine's own that a resume needs."""
        return {}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Restore what `meta` gave. meta: all of the part's."""


class OptimizerPart:
    """Optimizer state by parameter name, and the count of applied updates, as a part of the TrainState.

    `state_dict` gives the live tensors: copy them before training goes on.

    weights: the model's parameters by name; of a sharded model, this rank's rows.
    optimizer: whose state it is.
    applied: the count of applied updates, 0-d.
    initial: `settings_of` of the optimizer when it was new; None: it is new now, take them here. Settings that differ
        from these are part of the state.
    rows: which rows of its parameter this rank holds, for each weight that is sharded.
    access: how the state of a parameter is read and written.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        applied: Tensor,
        initial: Mapping[str, Any] | None = None,
        rows: Mapping[str, Rows] | None = None,
        access: StateAccess | None = None,
    ) -> None:
        self._names = {id(weight): name for name, weight in weights.items()}
        self._rows = rows or {}
        self._access = access or StateAccess(optimizer)
        self.optimizer = optimizer
        self.applied = applied
        self._initial = settings_of(optimizer) if initial is None else dict(initial)

    def _owned(self) -> dict[str, tuple[nn.Parameter, Group]]:
        """Each parameter that the optimizer trains, with its group, by name."""
        owned: dict[str, tuple[nn.Parameter, Group]] = {}
        for param, group in self._access.owned():
            name = self._names[id(param)]
            owned[name] = (param, group)
        return owned

    def rows(self) -> dict[str, Rows]:
        """The rows that this rank holds of each sharded tensor: those that have the shape of a sharded weight."""
        found: dict[str, Rows] = {}
        for name, (param, _) in self._owned().items():
            rows = self._rows.get(name)
            if rows is None:
                continue
            for key, value in self._access.like(param).items():
                if isinstance(value, Tensor) and value.shape == param.shape:
                    found[f"{name}.{key}"] = rows
        return found

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
            for key, value in self._access.read(param).items():
                kind = tensors if isinstance(value, Tensor) else plain
                kind[f"{name}.{key}"] = value
        meta: Meta = {**optimizer_meta(self.optimizer), "plain": plain, **self._access.meta()}

        now = settings_of(self.optimizer)
        counted = {key: now[key] for key in now if self._initial.get(key) != now[key]}
        if counted:
            meta["counted"] = counted
        return tensors, meta

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore into a fresh or a live optimizer. Tensors that exist are copied into.

        Raises CheckpointError if the optimizer's class differs, if a state belongs to no parameter or has another shape
        than the live one, if only one side is quantised, or if parameters that are stepped together have different
        counters.
        """
        # Sort what is saved by parameter, and refuse what does not fit before anything changes.
        require_same_optimizer(self.optimizer, meta)
        owned = self._owned()
        incoming = self._by_parameter(owned.keys(), tensors, meta["plain"])
        live = self._live_tensors(owned)
        # A fresh optimizer has no state yet: only what both sides have must be alike.
        compared = live.keys() & tensors.keys()
        saved = {full: tensors[full] for full in compared}
        here = {full: live[full] for full in compared}
        require_same("optimizer", saved, here)
        self._require_same_quantisation(live, tensors)
        if self._access.must_fit:
            require_same("optimizer", tensors, {"applied": self.applied, **live})
        self._access.require_fit(incoming)

        # Set the state of each parameter.
        for name, (param, group) in owned.items():
            self._access.write(param, group, incoming[name])
        self._access.load_meta(meta)
        self.applied.copy_(tensors["applied"])
        self._restore_settings(meta.get("counted", {}))

    def _by_parameter(
        self, names: Collection[str], tensors: Mapping[str, Tensor], plain: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Saved state by parameter and key. Raises CheckpointError for state of no parameter in `names`."""
        # A parameter that nothing was saved of has an empty state: it starts as a new one.
        incoming: dict[str, dict[str, Any]] = {name: {} for name in names}
        unknown: set[str] = set()
        for full, value in [*tensors.items(), *plain.items()]:
            # Names of parameters have dots in them, keys of a state have none.
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
            for key, now in self._access.like(param).items():
                if isinstance(now, Tensor):
                    live[f"{name}.{key}"] = now
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
        for key, now in settings_of(self.optimizer).items():
            wanted = counted.get(key, self._initial.get(key, now))
            if wanted == now:
                continue
            number, _, name = key.partition(".")
            if number:
                self.optimizer.param_groups[int(number)][name] = wanted
            else:
                setattr(self.optimizer, name, wanted)
