"""Optimizers for the gated update.

AdamW and SGD are fused, with a learning rate and step counters that live on the device; the gate is read by their
kernel. Every other optimizer costs one wait of the host a step.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.core.config import TrainConfig
from harness.core.errors import ConfigError, HarnessError, MachineError, Problem, near_match, some
from harness.core.schema import find_target
from harness.core.update import init_optimizer_state, takes_found_inf

Group = dict[str, Any]
Named = list[tuple[str, nn.Parameter]]

# torchao's class for each name. A quantised moment is a byte for each element and a float32 scale for each block; the
# 8-bit one has a table of 256 float32 besides. Smaller tensors and odd sizes stay in float32, and embeddings by our
# choice: of a row whose token was not in the batch the second moment sinks under FP8's smallest value before the first
# does, and the quotient moved weights by 2.0 at a rate of 0.01. (32 bits for embeddings: Dettmers et al., 8-bit
# optimizers, arXiv 2110.02861.)
_TORCHAO = {"adamw8bit": "AdamW8bit", "adamw_fp8": "AdamWFp8"}
_BLOCK, _SMALLEST = 256, 4096
_TABLE_BYTES = {"adamw8bit": 4 * 256, "adamw_fp8": 0}
# Keys of the config, not arguments.
_OF_THE_CONFIG = {
    "params": "",
    "lr": "train.lr",
    "weight_decay": "train.weight_decay",
    "betas": "train.betas",
}
_FIXED = ("fused", "foreach", "capturable", "differentiable", "maximize")
_MUON_OTHERS = "others"


def build_optimizer(model: nn.Module, train: TrainConfig, device: torch.device) -> Optimizer:
    """The optimizer that `train.optimizer` names, over the trainable parameters of `model`.

    adamw, sgd: fused; sgd has momentum `train.betas[0]`. adamw8bit, adamw_fp8: torchao's. muon: see `MuonAdamW`.
    "pkg.mod:Class": any, made from the groups, `lr`, and `train.optimizer_args`.

    Weight decay goes to parameters with at least two dimensions, to embeddings only if `train.decay_embeddings`; a tied
    parameter appears once. Every group has `params`, `param_names` (as `model.named_parameters()`) and `lr`, for fused
    ones and torchao's one shared 0-d fp32 tensor on `device`. State of the named ones is made at once, as zeros. Raises
    ConfigError if nothing is trainable, for arguments that do not fit, or an optimizer that a run cannot gate or save;
    MachineError where torchao is missing.
    """
    groups = _decay_groups(model, train)
    make = _MAKERS.get(train.optimizer, _made_by_target)
    optimizer = make(model, groups, train, device)
    init_optimizer_state(optimizer)
    return optimizer


def optimizer_bytes(model: nn.Module, train: TrainConfig) -> int:
    """Bytes of the optimizer's state once every trainable parameter has been updated; nothing is allocated for the
    named ones, one parameter's state for any other.

    Raises as `build_optimizer` does.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    elements = sum(param.numel() for param in trained)
    if train.optimizer in _TORCHAO:
        moments = 3 if train.optimizer_args.get("amsgrad") else 2
        whole = _embeddings(model)
        return moments * sum(_torchao_moment(train, param, whole) for param in trained)
    moments = {"adamw": 3 if train.optimizer_args.get("amsgrad") else 2, "sgd": 1}.get(
        train.optimizer
    )
    if moments is not None:
        return 4 * moments * elements
    if train.optimizer == "muon":
        chosen = sum(param.numel() for _, param in _muon_matrices(model, train))
        return 4 * chosen + 8 * (elements - chosen)
    cls = _load_class(train)
    groups = _decay_groups(model, train)
    return sum(_rehearse(cls, group, _own_arguments(cls, train), train) for group in groups)


def waits_for(optimizer: Optimizer) -> str:
    """What the host waits for in every step with this optimizer; empty if nothing."""
    if takes_found_inf(optimizer):
        return ""
    name = type(optimizer).__name__
    return f"{name} does not read the gate on the device: the host waits for it once a step"


def refused_by(engine: str, train: TrainConfig) -> list[Problem]:
    """Why an engine that takes only fused AdamW and SGD cannot train with `train.optimizer`; empty if it can."""
    if train.optimizer in ("adamw", "sgd"):
        return []
    why = "it keeps the optimizer's state in flat partitions, which hold neither matrices nor quantised moments"
    fix = "train.optimizer=adamw or sgd, or start with torchrun (engine ddp)"
    return [
        Problem(
            f"the engine {engine} does not take it",
            f"train.optimizer {train.optimizer!r}",
            why,
            fix,
        )
    ]


def _decay_groups(model: nn.Module, train: TrainConfig) -> list[Group]:
    """Trainable parameters with weight decay, then those without."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if not named:
        raise ConfigError(
            Problem(
                "the model has no trainable parameter",
                type(model).__name__,
                fix="return a module with parameters that require gradients from model.target",
            )
        )
    spared = set[int]() if train.decay_embeddings else _embeddings(model)
    decays = {name: param.ndim >= 2 and id(param) not in spared for name, param in named}
    found = [
        _group([pair for pair in named if decays[pair[0]]], train.weight_decay),
        _group([pair for pair in named if not decays[pair[0]]], 0.0),
    ]
    return [group for group in found if group["params"]]


def _embeddings(model: nn.Module) -> set[int]:
    """Ids of the embeddings' parameters, tied ones too."""
    return {
        id(each.weight)
        for each in model.modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag)
    }


def _group(members: Named, decay: float) -> Group:
    names = [name for name, _ in members]
    return {"params": [param for _, param in members], "param_names": names, "weight_decay": decay}


def _fused(
    model: nn.Module, groups: list[Group], train: TrainConfig, device: torch.device
) -> Optimizer:
    lr = torch.tensor(train.lr, dtype=torch.float32, device=device)
    cls: Any = torch.optim.AdamW if train.optimizer == "adamw" else torch.optim.SGD
    given = _named_arguments(cls, train, {"betas": train.betas} if cls is torch.optim.AdamW else {})
    if cls is torch.optim.SGD:
        given = {"momentum": train.betas[0], **given}
    optimizer = _construct(cls, groups, {"lr": lr, "fused": True, **given}, train)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return optimizer


def _torchao(
    model: nn.Module, groups: list[Group], train: TrainConfig, device: torch.device
) -> Optimizer:
    name = _TORCHAO[train.optimizer]
    where = f"train.optimizer {train.optimizer}"
    try:
        library = importlib.import_module("torchao.optim")
    except ImportError as error:
        fix = "pip install torchao, or another train.optimizer"
        raise MachineError(Problem("torchao is not installed", where, str(error), fix)) from error
    cls = _steps_on(getattr(library, name), device)
    lr = torch.tensor(train.lr, dtype=torch.float32, device=device)
    given = _named_arguments(cls, train, {"betas": train.betas})
    optimizer: Any = _construct(cls, groups, {"lr": lr, **given}, train)
    whole = _embeddings(model)
    for group in optimizer.param_groups:
        group["lr"] = lr
        for param in group["params"]:  # as its first step would make it
            moments = {
                "exp_avg": True,
                "exp_avg_sq": False,
                **({"max_exp_avg_sq": False} if group["amsgrad"] else {}),
            }
            state = {
                key: torch.zeros_like(param)
                if id(param) in whole
                else optimizer._new_buffer(param, signed)
                for key, signed in moments.items()
            }
            optimizer.state[param] = {"step": torch.tensor(0.0), **state}
    return optimizer


def _steps_on(cls: Any, device: torch.device) -> Any:
    """torchao compiles its update. A CPU, and a GPU without Triton, takes it as it stands, equal but for rounding:
    compiled for a CPU it would need half a minute.
    """
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return cls

    def step(self: Any, closure: Any = None) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return cls.step(self, closure)

    return type(cls.__name__, (cls,), {"step": step})


def _torchao_moment(train: TrainConfig, param: nn.Parameter, whole: set[int]) -> int:
    elements, block = param.numel(), int(train.optimizer_args.get("block_size", _BLOCK))
    if elements < _SMALLEST or elements % block or id(param) in whole:
        return 4 * elements
    return elements + 4 * elements // block + _TABLE_BYTES[train.optimizer]


class MuonAdamW(Optimizer):
    """Muon for the hidden matrices, fused AdamW for everything else: embeddings, the output layer, norms, biases,
    convolutions.

    Muon orthogonalises the momentum of a matrix by five Newton-Schulz iterations (Jordan et al.,
    kellerjordan.github.io/posts/muon). Its rate is scaled by 0.2 * sqrt(max(rows, columns)), unless
    `train.optimizer_args` says otherwise, so that updates have AdamW's RMS and one learning rate serves both (Liu et
    al., Moonlight, arXiv 2502.16982). One optimizer to the outside: groups and state of both.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        state = {param: values for part in self.parts for param, values in part.state.items()}
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self.state.update(state)
        self._share()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which puts new groups and a new state in the place of those that the parts work on."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        first = 0
        for part in self.parts:
            last = first + len(part.param_groups)
            part.state, part.param_groups = self.state, self.param_groups[first:last]
            first = last

    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient."""
        for part in self.parts:
            part.step()


def _muon(
    model: nn.Module, groups: list[Group], train: TrainConfig, device: torch.device
) -> Optimizer:
    chosen = {id(param) for _, param in _muon_matrices(model, train)}
    muon: list[Group] = []
    adamw: list[Group] = []
    for group in groups:
        named = list(zip(group["param_names"], group["params"], strict=True))
        for kind, wanted in ((muon, True), (adamw, False)):
            if members := [pair for pair in named if (id(pair[1]) in chosen) is wanted]:
                kind.append(_group(members, group["weight_decay"]))
    args = {key: value for key, value in train.optimizer_args.items() if key != _MUON_OTHERS}
    given = _named_arguments(
        torch.optim.Muon, train.model_copy(update={"optimizer_args": args}), {}
    )
    parts = [
        _construct(
            torch.optim.Muon,
            muon,
            {"lr": train.lr, "adjust_lr_fn": "match_rms_adamw", **given},
            train,
        )
    ]
    if adamw:
        parts.append(torch.optim.AdamW(adamw, lr=train.lr, betas=train.betas, fused=True))
    for group in parts[0].param_groups:
        for param in group["params"]:
            parts[0].state[param]["momentum_buffer"] = torch.zeros_like(param, requires_grad=False)
    for part in parts[1:]:
        init_optimizer_state(part)
    return MuonAdamW(parts)


def _muon_matrices(model: nn.Module, train: TrainConfig) -> Named:
    """What Muon updates: matrices that are neither embeddings, nor the output layer (the last Linear with as many
    outputs as an embedding has rows), nor named in `train.optimizer_args.others`. Raises ConfigError for a pattern that
    matches nothing, or if no matrix is left.
    """
    where = f"train.optimizer_args.{_MUON_OTHERS}"
    patterns = train.optimizer_args.get(_MUON_OTHERS, [])
    if not isinstance(patterns, list) or not all(
        isinstance(each, str) for each in cast("list[Any]", patterns)
    ):
        raise ConfigError(
            Problem(f"{patterns!r} is no list of patterns", where, fix='such as ["head.*"]')
        )
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if vain := [each for each in patterns if not any(fnmatchcase(name, each) for name, _ in named)]:
        known = [name for name, _ in named]
        raise ConfigError(
            Problem(
                f"matches no parameter: {', '.join(vain)}", where, fix=near_match(vain[0], known)
            )
        )
    apart = _embeddings(model)
    rows = {
        each.num_embeddings
        for each in model.modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag)
    }
    heads = [
        each
        for each in model.modules()
        if isinstance(each, nn.Linear) and each.out_features in rows
    ]
    apart |= {id(each.weight) for each in heads[-1:]}
    found = [
        (name, param)
        for name, param in named
        if param.ndim == 2
        and id(param) not in apart
        and not any(fnmatchcase(name, each) for each in patterns)
    ]
    if not found:
        fix = "train.optimizer=adamw"
        raise ConfigError(
            Problem("the model has no hidden matrix for Muon", "train.optimizer muon", fix=fix)
        )
    return found


def _made_by_target(
    model: nn.Module, groups: list[Group], train: TrainConfig, device: torch.device
) -> Optimizer:
    cls = _load_class(train)
    arguments = _own_arguments(cls, train)
    for group in groups:
        _rehearse(cls, group, arguments, train)
    if "weight_decay" not in inspect.signature(cls).parameters:
        groups = [
            {key: value for key, value in group.items() if key != "weight_decay"}
            for group in groups
        ]
    return _construct(cls, groups, arguments, train)


def _load_class(train: TrainConfig) -> Any:
    """The class that `train.optimizer` names. Raises ConfigError if it is missing, or is no optimizer."""
    where = f"train.optimizer {train.optimizer!r}"
    cls = find_target(where, train.optimizer, "optimizers")
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise ConfigError(
            Problem("is no torch.optim.Optimizer", where, fix="name a class derived from it")
        )
    name = cls.__name__
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        what = f"{name}.step needs a closure, which would compute the loss anew, ungated"
        raise ConfigError(
            Problem(what, where, fix="an optimizer that steps by the gradients alone")
        )
    return cls


def _own_arguments(cls: Any, train: TrainConfig) -> dict[str, Any]:
    """Arguments of a class of the user's own: `train.betas` if it takes them. Raises ConfigError for a key of the
    config that would have no effect.
    """
    taken = inspect.signature(cls).parameters
    given = _named_arguments(
        cls, train, {"betas": train.betas} if "betas" in taken else {}, fixed=()
    )
    changed = tuple(train.betas) != tuple(TrainConfig.model_fields["betas"].default)
    problems = [
        Problem(
            f"{key} has no effect: {cls.__name__} does not take it",
            f"train.optimizer {train.optimizer!r}",
            fix=fix,
        )
        for key, idle, fix in (
            (
                "train.weight_decay",
                train.weight_decay != 0 and "weight_decay" not in taken,
                "train.weight_decay=0",
            ),
            ("train.betas", changed and "betas" not in taken, "leave train.betas out"),
            ("train.lr", "lr" not in taken, "an optimizer that takes lr"),
        )
        if idle
    ]
    if problems:
        raise ConfigError(problems)
    return {"lr": train.lr, **given}


def _named_arguments(
    cls: Any, train: TrainConfig, given: Mapping[str, Any], fixed: Sequence[str] = _FIXED
) -> dict[str, Any]:
    """`given` and `train.optimizer_args`. Raises ConfigError for keys that the class does not take, or are ours."""
    parameters = inspect.signature(cls).parameters
    taken = [name for name in parameters if name not in (*_OF_THE_CONFIG, *fixed)]
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    problems: list[Problem] = []
    for key in train.optimizer_args:
        where = f"train.optimizer_args.{key}"
        if key in _OF_THE_CONFIG:
            ours = _OF_THE_CONFIG[key]
            problems.append(
                Problem(
                    "is not an argument here", where, fix=f"set {ours}" if ours else "leave it out"
                )
            )
        elif key in fixed:
            problems.append(Problem("is chosen by the harness", where, fix="leave it out"))
        elif key not in taken and not takes_all:
            problems.append(
                Problem(f"{cls.__name__} does not take it", where, fix=near_match(key, taken))
            )
    if problems:
        raise ConfigError(problems)
    return {**given, **train.optimizer_args}


def _construct(
    cls: Any, groups: Iterable[Group], arguments: Mapping[str, Any], train: TrainConfig
) -> Optimizer:
    try:
        return cls([dict(group) for group in groups], **arguments)
    except HarnessError:
        raise
    except Exception as error:
        what = f"{cls.__name__} failed: {type(error).__name__}: {' '.join(str(error).split())}"
        where = f"train.optimizer {train.optimizer!r}"
        fix = "check train.optimizer_args"
        if cls is getattr(torch.optim, "Muon", None):
            fix = "train.optimizer=muon, which leaves what is no matrix to AdamW"
        raise ConfigError(Problem(what, where, fix=fix)) from error


@torch.no_grad()
def _rehearse(cls: Any, group: Group, arguments: Mapping[str, Any], train: TrainConfig) -> int:
    """Two steps of an optimizer that nobody knows, over a copy of one parameter of `group`; about how many bytes of
    state it keeps for the group.

    Raises ConfigError for state that a checkpoint could not hold, a step that fails, or one that says that it reads the
    gate and does not.
    """
    by_size = sorted(group["params"], key=lambda param: param.numel())
    chosen = next((param for param in by_size if param.numel() >= _SMALLEST), by_size[-1])
    copy = nn.Parameter(chosen.detach().clone())
    rest = {"params": [copy], "param_names": ["copy"], "weight_decay": group["weight_decay"]}
    if "weight_decay" not in inspect.signature(cls).parameters:
        del rest["weight_decay"]
    optimizer = _construct(cls, [rest], arguments, train)
    where = f"train.optimizer {train.optimizer!r}"
    name = cls.__name__
    devices = [copy.device.index] if copy.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            copy.grad = torch.full_like(copy, 1e-3)
            optimizer.step()
            before = copy.detach().clone()
            if takes_found_inf(optimizer):
                one = torch.ones((), dtype=torch.float32, device=copy.device)
                optimizer.found_inf, optimizer.grad_scale = one, one.clone()  # type: ignore[attr-defined]
                optimizer.step()
    except Exception as error:
        what = f"a step of {name} failed: {type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(Problem(what, where, fix="try it on one parameter, alone")) from error
    if takes_found_inf(optimizer) and not torch.equal(before, copy):
        what = f"{name} says that it takes found_inf, and updates although it is set"
        raise ConfigError(
            Problem(what, where, fix="take _step_supports_amp_scaling away from the class")
        )
    state: dict[str, Any] = optimizer.state[copy]
    odd = [
        f"{key} ({type(value).__name__})"
        for key, value in state.items()
        if not _can_be_saved(value)
    ]
    odd += [
        f"{key} (a tensor of a group)"
        for each in optimizer.param_groups
        for key, value in each.items()
        if isinstance(value, Tensor) and key != "lr"
    ]
    if odd:
        what = f"{name} keeps what a checkpoint cannot hold: {some(odd, 4)}"
        raise ConfigError(
            Problem(what, where, fix="keep tensors, numbers and text in optimizer.state")
        )
    size = sum(
        value.numel() * value.element_size()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    return math.ceil(size / copy.numel() * sum(param.numel() for param in group["params"]))


def _can_be_saved(value: object) -> bool:
    return (
        type(value) in (Tensor, nn.Parameter)
        or value is None
        or isinstance(value, bool | int | float | str)
    )


_MAKERS: dict[str, Callable[[nn.Module, list[Group], TrainConfig, torch.device], Optimizer]] = {
    "adamw": _fused,
    "sgd": _fused,
    "adamw8bit": _torchao,
    "adamw_fp8": _torchao,
    "muon": _muon,
}
