"""Optimizers for the gated update (see core/update.py).

The gate is a flag on the device that says whether an update is applied. AdamW and SGD are fused: their learning rate
and step counters live on the device too, and their kernels read the gate themselves, as `found_inf`. For any other
optimizer the host has to read it, which is one wait a step.
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

# torchao's class for each name. A quantised moment is a byte for each element and a float32 scale for each block. The
# 8-bit one also has a table of 256 float32. Small tensors and odd sizes stay in float32.
#
# Embeddings stay in float32 by our choice. While a token is absent from the batches, both moments of its row decay, and
# the second falls under FP8's smallest value before the first does. Their quotient then moved weights by 2.0 at a rate
# of 0.01. (32 bits for embeddings: Dettmers et al., 8-bit optimizers, arXiv 2110.02861.)
_TORCHAO = {"adamw8bit": "AdamW8bit", "adamw_fp8": "AdamWFp8"}
# torchao's: elements of a block, and elements of the smallest tensor that it quantises.
_BLOCK, _SMALLEST = 256, 4096
_TABLE_BYTES = {"adamw8bit": 4 * 256, "adamw_fp8": 0}
# Arguments that the config sets by keys of its own, and the key. They are refused in train.optimizer_args.
_OF_THE_CONFIG = {
    "params": "",
    "lr": "train.lr",
    "weight_decay": "train.weight_decay",
    "betas": "train.betas",
}
# Arguments that the harness chooses.
_FIXED = ("fused", "foreach", "capturable", "differentiable", "maximize")
# The key of train.optimizer_args with patterns of what Muon leaves to AdamW.
_MUON_OTHERS = "others"
_Maker = Callable[[nn.Module, list[Group], TrainConfig, torch.device], Optimizer]


def build_optimizer(
    model: nn.Module,
    train: TrainConfig,
    device: torch.device,
    weights: Mapping[str, nn.Parameter] | None = None,
) -> Optimizer:
    """The optimizer that `train.optimizer` names, over the trainable parameters of `model`.

    adamw, sgd: fused; sgd has momentum `train.betas[0]`.
    adamw8bit, adamw_fp8: torchao's.
    muon: see `MuonAdamW`.
    "pkg.mod:Class": any, made from the groups, `lr`, and `train.optimizer_args`.

    Weight decay goes to parameters with at least two dimensions, and to embeddings only if `train.decay_embeddings`. A
    tied parameter appears once. Every group has `params`, `param_names` (as `model.named_parameters()`) and `lr`. For
    fused ones and torchao's, `lr` is one shared 0-d fp32 tensor on `device`. adamw, sgd, adamw8bit, adamw_fp8 and muon
    have their state at once, as zeros.

    weights: what the optimizer trains in place of the model's parameters of the same names, such as this rank's rows of
        each. Only for adamw and sgd. None: the model's own.

    Raises ConfigError if nothing is trainable, for arguments that do not fit, or for an optimizer that a run cannot
    gate or save. Raises MachineError where torchao is missing.
    """
    groups = _decay_groups(model, train)
    if weights is not None:
        for group in groups:
            group["params"] = [weights[name] for name in group["param_names"]]
    make = _MAKERS.get(train.optimizer, _made_by_target)
    optimizer = make(model, groups, train, device)
    init_optimizer_state(optimizer)
    return optimizer


def optimizer_bytes(model: nn.Module, train: TrainConfig) -> int:
    """Bytes of the optimizer's state once every trainable parameter has been updated.

    Nothing is allocated, except for a class of the user's own: the state of one parameter of each group. Raises as
    `build_optimizer` does.
    """
    trained = [param for _, param in _trainable(model)]
    elements = _count(trained)
    # amsgrad keeps the largest second moment as well.
    adam_moments = 3 if train.optimizer_args.get("amsgrad") else 2

    if train.optimizer in _TORCHAO:
        whole = _embeddings(model)
        moment = 0
        for param in trained:
            moment += _torchao_moment(train, param, whole)
        return adam_moments * moment
    if train.optimizer == "adamw":
        return 4 * adam_moments * elements
    if train.optimizer == "sgd":
        momentum = train.optimizer_args.get("momentum", train.betas[0])
        return 4 * elements if momentum else 0
    if train.optimizer == "muon":
        # One moment for each element of the matrices, AdamW's two for the rest.
        matrices = _count(param for _, param in _muon_matrices(model, train))
        return 4 * matrices + 8 * (elements - matrices)

    # A class of the user's own may keep anything, so it is measured on one parameter of each group.
    cls = _load_class(train)
    size = 0
    for group in _decay_groups(model, train):
        size += _rehearse(cls, group, _own_arguments(cls, train), train)
    return size


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
    why = "a rank updates its share of each parameter: it has neither whole matrices nor whole blocks of moments"
    fix = "train.optimizer=adamw or sgd, or start with torchrun (engine ddp)"
    what = f"the engine {engine} does not take it"
    return [Problem(what, f"train.optimizer {train.optimizer!r}", why, fix)]


def _trainable(model: nn.Module) -> Named:
    named = model.named_parameters()
    return [(name, param) for name, param in named if param.requires_grad]


def _count(params: Iterable[nn.Parameter]) -> int:
    """Elements of all of them."""
    return sum(param.numel() for param in params)


def _decay_groups(model: nn.Module, train: TrainConfig) -> list[Group]:
    """Trainable parameters with weight decay, then those without."""
    named = _trainable(model)
    if not named:
        what = "the model has no trainable parameter"
        fix = "return a module with parameters that require gradients from model.target"
        raise ConfigError(Problem(what, type(model).__name__, fix=fix))

    # Vectors (norms, biases) set scales and offsets: pulling those to zero is not what weight decay is for.
    excluded: set[int] = set()
    if not train.decay_embeddings:
        excluded = _embeddings(model)
    decayed: Named = []
    others: Named = []
    for name, param in named:
        if param.ndim >= 2 and id(param) not in excluded:
            decayed.append((name, param))
        else:
            others.append((name, param))

    groups: list[Group] = []
    if decayed:
        groups.append(_group(decayed, train.weight_decay))
    if others:
        groups.append(_group(others, 0.0))
    return groups


def _embeddings(model: nn.Module) -> set[int]:
    """Ids of the embeddings' parameters, tied ones included."""
    return {id(each.weight) for each in _embedding_modules(model)}


def _embedding_modules(model: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return [each for each in model.modules() if isinstance(each, kinds)]


def _group(members: Named, decay: float) -> Group:
    names, params = zip(*members, strict=True)
    return {"params": list(params), "param_names": list(names), "weight_decay": decay}


def _fused(
    model: nn.Module, groups: list[Group], train: TrainConfig, device: torch.device
) -> Optimizer:
    lr = _shared_rate(train, device)
    cls: Any
    if train.optimizer == "adamw":
        cls = torch.optim.AdamW
        given = _named_arguments(cls, train, {"betas": train.betas})
    else:
        cls = torch.optim.SGD
        # train.optimizer_args may set another momentum.
        given = {"momentum": train.betas[0], **_named_arguments(cls, train, {})}
    optimizer = _construct(cls, groups, {"lr": lr, "fused": True, **given}, train)
    # The same tensor in every group: the schedule writes into it once.
    for group in optimizer.param_groups:
        group["lr"] = lr
    return optimizer


def _shared_rate(train: TrainConfig, device: torch.device) -> Tensor:
    """The learning rate on the device, where a kernel reads it without the host."""
    return torch.tensor(train.lr, dtype=torch.float32, device=device)


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
    lr = _shared_rate(train, device)
    given = _named_arguments(cls, train, {"betas": train.betas})
    optimizer: Any = _construct(cls, groups, {"lr": lr, **given}, train)

    # torchao would make its state in the first step. A checkpoint before that step needs it, so it is made here, with
    # float32 moments for embeddings.
    whole = _embeddings(model)
    for group in optimizer.param_groups:
        group["lr"] = lr
        signed = {"exp_avg": True, "exp_avg_sq": False}
        if group["amsgrad"]:
            signed["max_exp_avg_sq"] = False
        for param in group["params"]:
            state: dict[str, Tensor] = {"step": torch.tensor(0.0, device="cpu")}
            for key, is_signed in signed.items():
                if id(param) in whole:
                    state[key] = torch.zeros_like(param)
                else:
                    state[key] = optimizer._new_buffer(param, is_signed)
            optimizer.state[param] = state
    return optimizer


def _steps_on(cls: Any, device: torch.device) -> Any:
    """`cls` with its update eager on a CPU and on a GPU without Triton; `cls` itself, which compiles it, elsewhere.

    torchao compiles the update, which takes half a minute on a CPU. Results differ by rounding only.
    """
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return cls

    def step(self: Any, closure: Any = None) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return cls.step(self, closure)

    return type(cls.__name__, (cls,), {"step": step})


def _torchao_moment(train: TrainConfig, param: nn.Parameter, whole: set[int]) -> int:
    """Bytes of one moment of `param`. whole: ids of parameters whose moments stay in float32."""
    elements = param.numel()
    block = int(train.optimizer_args.get("block_size", _BLOCK))
    if elements < _SMALLEST or elements % block or id(param) in whole:
        return 4 * elements
    return elements + 4 * elements // block + _TABLE_BYTES[train.optimizer]


class MuonAdamW(Optimizer):
    """Muon for the hidden matrices, fused AdamW for the rest: embeddings, output layer, norms, biases, convolutions.

    Muon orthogonalises the momentum of a matrix by five Newton-Schulz iterations (Jordan et al.,
    kellerjordan.github.io/posts/muon). Its rate is scaled by 0.2 * sqrt(max(rows, columns)), unless
    `train.optimizer_args` says otherwise. Updates then have AdamW's RMS, and one learning rate serves both (Liu et al.,
    Moonlight, arXiv 2502.16982).

    From outside it is one optimizer, with the groups and the state of both.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        groups: list[Group] = []
        for part in self.parts:
            groups += part.param_groups
        super().__init__(groups, {})
        for part in self.parts:
            self.state.update(part.state)
        self._share()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. That one makes new groups and a new state, so the parts get them again."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Let the parts work on this optimizer's groups and state."""
        first = 0
        for part in self.parts:
            last = first + len(part.param_groups)
            part.param_groups = self.param_groups[first:last]
            part.state = self.state
            first = last

    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient."""
        for part in self.parts:
            part.step()


def _muon(
    model: nn.Module, groups: list[Group], train: TrainConfig, device: torch.device
) -> Optimizer:
    # Each group is split in two, so that both keep its weight decay.
    chosen = {id(param) for _, param in _muon_matrices(model, train)}
    muon: list[Group] = []
    adamw: list[Group] = []
    for group in groups:
        matrices: Named = []
        others: Named = []
        for name, param in zip(group["param_names"], group["params"], strict=True):
            part = matrices if id(param) in chosen else others
            part.append((name, param))
        if matrices:
            muon.append(_group(matrices, group["weight_decay"]))
        if others:
            adamw.append(_group(others, group["weight_decay"]))

    # torch.optim.Muon does not know the key that says what AdamW takes.
    args = dict(train.optimizer_args)
    args.pop(_MUON_OTHERS, None)
    own = train.model_copy(update={"optimizer_args": args})
    given = _named_arguments(torch.optim.Muon, own, {})
    given = {"lr": train.lr, "adjust_lr_fn": "match_rms_adamw", **given}
    parts = [_construct(torch.optim.Muon, muon, given, train)]
    if adamw:
        parts.append(torch.optim.AdamW(adamw, lr=train.lr, betas=train.betas, fused=True))

    # State as the first step would make it, as zeros: a checkpoint may be saved before that step.
    for group in parts[0].param_groups:
        for param in group["params"]:
            momentum = torch.zeros_like(param, requires_grad=False)
            parts[0].state[param]["momentum_buffer"] = momentum
    for part in parts[1:]:
        init_optimizer_state(part)
    return MuonAdamW(parts)


def _muon_matrices(model: nn.Module, train: TrainConfig) -> Named:
    """What Muon updates: the hidden matrices.

    Not among them are embeddings, the output layer (the last Linear with as many outputs as an embedding has rows), and
    what `train.optimizer_args.others` names. Raises ConfigError for a pattern that matches nothing, or if no matrix is
    left.
    """
    named = _trainable(model)
    patterns = _muon_patterns(train, [name for name, _ in named])

    # The output layer is known by its size: it gives one number for each row of an embedding.
    vocabularies = {each.num_embeddings for each in _embedding_modules(model)}
    head: nn.Linear | None = None
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features in vocabularies:
            head = module
    excluded = _embeddings(model)
    if head is not None:
        excluded.add(id(head.weight))

    found: Named = []
    for name, param in named:
        if param.ndim != 2 or id(param) in excluded:
            continue
        if not _matches(name, patterns):
            found.append((name, param))
    if not found:
        what = "the model has no hidden matrix for Muon"
        raise ConfigError(Problem(what, "train.optimizer muon", fix="train.optimizer=adamw"))
    return found


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _muon_patterns(train: TrainConfig, names: Sequence[str]) -> list[str]:
    """Patterns in `train.optimizer_args.others`. Raises ConfigError for one that matches none of `names`."""
    where = f"train.optimizer_args.{_MUON_OTHERS}"
    given = train.optimizer_args.get(_MUON_OTHERS, [])
    patterns = cast("list[Any]", given)
    is_list = isinstance(given, list)
    if not is_list or not all(isinstance(each, str) for each in patterns):
        what = f"{given!r} is no list of patterns"
        raise ConfigError(Problem(what, where, fix='such as ["head.*"]'))

    # A misspelt pattern would leave its matrices to Muon without a word.
    unmatched: list[str] = []
    for pattern in patterns:
        matched = any(fnmatchcase(name, pattern) for name in names)
        if not matched:
            unmatched.append(pattern)
    if unmatched:
        what = f"matches no parameter: {', '.join(unmatched)}"
        raise ConfigError(Problem(what, where, fix=near_match(unmatched[0], names)))
    return patterns


def _made_by_target(
    model: nn.Module, groups: list[Group], train: TrainConfig, device: torch.device
) -> Optimizer:
    cls = _load_class(train)
    arguments = _own_arguments(cls, train)
    for group in groups:
        _rehearse(cls, group, arguments, train)
    if "weight_decay" not in inspect.signature(cls).parameters:
        for group in groups:
            del group["weight_decay"]
    return _construct(cls, groups, arguments, train)


def _load_class(train: TrainConfig) -> Any:
    """The class that `train.optimizer` names. Raises ConfigError if it is missing, or not an optimizer."""
    where = f"train.optimizer {train.optimizer!r}"
    cls = find_target(where, train.optimizer, "optimizers")
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        fix = "name a class derived from it"
        raise ConfigError(Problem("is no torch.optim.Optimizer", where, fix=fix))

    # LBFGS is such a class.
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        what = f"{cls.__name__}.step needs a closure, which would compute the loss anew, ungated"
        fix = "an optimizer that steps by the gradients alone"
        raise ConfigError(Problem(what, where, fix=fix))
    return cls


def _own_arguments(cls: Any, train: TrainConfig) -> dict[str, Any]:
    """Arguments of a class of the user's own; `train.betas` only if it takes them.

    Raises ConfigError for every key of the config that would have no effect.
    """
    taken = inspect.signature(cls).parameters
    betas = {"betas": train.betas} if "betas" in taken else {}
    given = _named_arguments(cls, train, betas, fixed=())

    # Keys without effect, and the fix for each. A default cannot be told from a value that was set to the same.
    default_betas = TrainConfig.model_fields["betas"].default
    changed_betas = tuple(train.betas) != tuple(default_betas)
    idle: list[tuple[str, str]] = []
    if train.weight_decay != 0 and "weight_decay" not in taken:
        idle.append(("train.weight_decay", "train.weight_decay=0"))
    if changed_betas and "betas" not in taken:
        idle.append(("train.betas", "leave train.betas out"))
    if "lr" not in taken:
        idle.append(("train.lr", "an optimizer that takes lr"))

    problems: list[Problem] = []
    for key, fix in idle:
        what = f"{key} has no effect: {cls.__name__} does not take it"
        problems.append(Problem(what, f"train.optimizer {train.optimizer!r}", fix=fix))
    if problems:
        raise ConfigError(problems)
    return {"lr": train.lr, **given}


def _named_arguments(
    cls: Any, train: TrainConfig, given: Mapping[str, Any], fixed: Sequence[str] = _FIXED
) -> dict[str, Any]:
    """`given` and `train.optimizer_args`.

    Raises ConfigError for a key that the class does not take, that the config sets elsewhere, or that the harness
    chooses (`fixed`).
    """
    # What the class takes, as far as its signature says. With **kwargs it may take anything.
    taken: list[str] = []
    takes_all = False
    for name, parameter in inspect.signature(cls).parameters.items():
        if name not in _OF_THE_CONFIG and name not in fixed:
            taken.append(name)
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_all = True

    problems: list[Problem] = []
    for key in train.optimizer_args:
        where = f"train.optimizer_args.{key}"
        if key in _OF_THE_CONFIG:
            config_key = _OF_THE_CONFIG[key]
            fix = f"set {config_key}" if config_key else "leave it out"
            problems.append(Problem("is not an argument here", where, fix=fix))
        elif key in fixed:
            problems.append(Problem("is chosen by the harness", where, fix="leave it out"))
        elif key not in taken and not takes_all:
            what = f"{cls.__name__} does not take it"
            problems.append(Problem(what, where, fix=near_match(key, taken)))
    if problems:
        raise ConfigError(problems)
    return {**given, **train.optimizer_args}


def _construct(
    cls: Any, groups: Iterable[Group], arguments: Mapping[str, Any], train: TrainConfig
) -> Optimizer:
    try:
        # Copies: an optimizer writes its defaults into the groups that it gets.
        return cls([dict(group) for group in groups], **arguments)
    except HarnessError:
        raise
    except Exception as error:
        what = f"{cls.__name__} failed: {_in_one_line(error)}"
        where = f"train.optimizer {train.optimizer!r}"
        fix = "check train.optimizer_args"
        if cls is getattr(torch.optim, "Muon", None):
            fix = "use train.optimizer=muon: it gives everything but matrices to AdamW"
        raise ConfigError(Problem(what, where, fix=fix)) from error


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@torch.no_grad()
def _rehearse(
    cls: Any,
    group: Group,
    arguments: Mapping[str, Any],
    train: TrainConfig,
) -> int:
    """Try a class of the user's own: two steps at most, on a copy of one parameter of `group`.

    Returns about how many bytes of state it keeps for the group.

    Raises ConfigError if a step fails, for state that a checkpoint could not hold, or for a class that claims to read
    `found_inf` and updates although it is set.
    """
    # The smallest parameter that is not tiny: quantised state differs for tiny ones.
    by_size = sorted(group["params"], key=nn.Parameter.numel)
    chosen = by_size[-1]
    for param in by_size:
        if param.numel() >= _SMALLEST:
            chosen = param
            break
    copy = nn.Parameter(chosen.detach().clone())
    alone: Group = {"params": [copy], "param_names": ["copy"]}
    if "weight_decay" in inspect.signature(cls).parameters:
        alone["weight_decay"] = group["weight_decay"]
    optimizer = _construct(cls, [alone], arguments, train)
    where = f"train.optimizer {train.optimizer!r}"
    name = cls.__name__

    # An applied step, and a gated one if it claims to read the gate. fork_rng: no random number of the run is used up.
    devices: list[int] = []
    if copy.device.type == "cuda":
        devices.append(copy.device.index)
    try:
        with torch.random.fork_rng(devices):
            copy.grad = torch.full_like(copy, 1e-3)
            optimizer.step()
            before = copy.detach().clone()
            if takes_found_inf(optimizer):
                one = torch.ones((), dtype=torch.float32, device=copy.device)
                optimizer.found_inf = one  # type: ignore[attr-defined]
                optimizer.grad_scale = one.clone()  # type: ignore[attr-defined]
                optimizer.step()
    except Exception as error:
        what = f"a step of {name} failed: {_in_one_line(error)}"
        raise ConfigError(Problem(what, where, fix="try it on one parameter, alone")) from error
    if takes_found_inf(optimizer) and not torch.equal(before, copy):
        what = f"{name} says that it takes found_inf, and updates although it is set"
        fix = "take _step_supports_amp_scaling away from the class"
        raise ConfigError(Problem(what, where, fix=fix))

    # Its state must be something that a checkpoint can hold.
    state: dict[str, Any] = optimizer.state[copy]
    odd = _not_saved(state, optimizer.param_groups)
    if odd:
        what = f"{name} keeps what a checkpoint cannot hold: {some(odd, 4)}"
        fix = "keep tensors, numbers and text in optimizer.state"
        raise ConfigError(Problem(what, where, fix=fix))

    # Of the whole group: as many bytes for each element as here.
    size = 0
    for value in state.values():
        if isinstance(value, Tensor):
            size += value.numel() * value.element_size()
    per_element = size / copy.numel()
    return math.ceil(per_element * _count(group["params"]))


def _not_saved(state: Mapping[str, Any], groups: Sequence[Group]) -> list[str]:
    """Entries of an optimizer that a checkpoint cannot hold: odd types in the state, and tensors in groups but `lr`."""
    odd: list[str] = []
    for key, value in state.items():
        if not _can_be_saved(value):
            odd.append(f"{key} ({type(value).__name__})")
    for group in groups:
        for key, value in group.items():
            if isinstance(value, Tensor) and key != "lr":
                odd.append(f"{key} (a tensor of a group)")
    return odd


def _can_be_saved(value: object) -> bool:
    if type(value) in (Tensor, nn.Parameter):
        return True
    return value is None or isinstance(value, bool | int | float | str)


_MAKERS: dict[str, _Maker] = {
    "adamw": _fused,
    "sgd": _fused,
    "adamw8bit": _torchao,
    "adamw_fp8": _torchao,
    "muon": _muon,
}
OPTIMIZERS = tuple(_MAKERS)
"""Names of `train.optimizer`, besides a class of the user's own."""
