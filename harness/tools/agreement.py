"""What must be the same on every rank, and the refusal that names the rank where it is not.

Ranks that started from other configs, files or library versions would train on all the same: each would exchange
gradients that mean something else. So every rank lists its facts, and the lists are compared at two moments:

1. `agree_on_start`, when the ranks have met: config, recipe, command, the user's own code, versions.
2. `agree_on_job`, before anything is trained: data, plan, and the names and shapes of the parameters.

Each moment costs one exchange of a hash. Only ranks that differ exchange the lists themselves.

What may differ is not listed: host names, device numbers, threads, cards, drivers. A library that only some ranks have
may differ too: the recipe's ladder finds a rung that all of them can take (`agree_on_rung`).
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.build import Worker
from harness.capability.probe import MachineFacts
from harness.core.collectives import gather_texts
from harness.core.config import RunConfig, flat
from harness.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HarnessError,
    MachineError,
    Problem,
    clipped,
    some,
)
from harness.core.files import harness_version
from harness.core.schema import file_of_target
from harness.core.secrets import scrubbed
from harness.precision.plan import Plan
from harness.tools.start import Request

Facts = Mapping[str, Mapping[str, Any]]
"""Kind of fact (a key of _KINDS) -> name -> value, JSON-able."""

MISSING = "missing"
# Names that one message lists, ranks that it names, and characters of a value.
_LISTED, _NAMED, _SHOWN = 8, 8, 80
# Libraries that compute or exchange what is trained. Python's last number changes neither.
_LIBRARIES = ("transformer_engine", "torchao", "deepspeed")


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of fact. error: raised if ranks differ in it. why: what would follow. fix: what to do."""

    error: type[HarnessError]
    why: str
    fix: str


_KINDS: dict[str, _Kind] = {
    "config": _Kind(
        ConfigError,
        "each rank would train by its own config, and the ranks would mix their gradients",
        "start every rank with the same command, config file and overrides",
    ),
    "recipe": _Kind(
        ConfigError,
        "ranks would compute in different precisions",
        "give every machine the same recipe file",
    ),
    "command": _Kind(
        ConfigError,
        "ranks would begin differently",
        "start every rank with the same command",
    ),
    "code": _Kind(
        ConfigError,
        "ranks would train different models, or on different data",
        "copy the same file to every machine",
    ),
    "folder": _Kind(
        CheckpointError,
        "ranks would begin with different states",
        "put runs/ on a disk that all machines see, or copy the run's folder to every machine before the start",
    ),
    "version": _Kind(
        MachineError,
        "versions differ in their figures, or in what they exchange",
        "install the same versions on every machine",
    ),
    "data": _Kind(
        DataError,
        "ranks would train on different samples than the run records",
        "let data.target give the same samples on every rank; put data and run folder where all machines see them",
    ),
    "plan": _Kind(
        ConfigError,
        "what ranks exchange belongs to layers, and would go to the wrong ones",
        "build the same model on every rank: model.target must not look at the rank or the machine",
    ),
    "model": _Kind(
        ConfigError,
        "gradients would be added to those of other parameters",
        "build the same model on every rank: model.target must not look at the rank or the machine",
    ),
}


def agree_on_start(request: Request, config: RunConfig, worker: Worker) -> None:
    """Compare what the ranks were started with. Collective.

    Raises on every rank, if any differs: ConfigError; MachineError if only versions differ.
    """
    if worker.group.world_size == 1:
        return
    agree(
        {
            "config": flat(config.model_dump(mode="json")),
            "recipe": flat(request.recipe.model_dump(mode="json")),
            "command": {
                "engine": worker.engine,
                "--resume": request.resume,
                "--name": request.name,
                "--strict": request.strict,
                "--accept-changed": list(request.accepted),
                "--dry-run": request.dry,
            },
            "code": code_of(config),
            "version": versions(worker.facts),
        }
    )


def agree_on_run(folder: Path, resuming: bool) -> None:
    """Compare what the ranks found in the run folder. Collective. Raises CheckpointError on every rank.

    resuming: whether a run goes on there.
    """
    agree({"folder": {str(folder): "a run" if resuming else "no run"}})


def agree_on_job(data: Mapping[str, Any], plan: Plan, model: nn.Module) -> None:
    """Compare what the ranks made of the config. Collective. Raises DataError or ConfigError on every rank.

    data: what the data say of themselves.
    """
    of_data = {key: data.get(key) for key in ("sha256", "train_samples", "val_samples")}
    of_plan = {"rung": plan.resolved}
    for row in plan.layers:
        of_plan[row.module] = f"{row.precision} by {row.backend}"
    # Ranks add up gradients by the order of parameters, whatever their names are.
    of_model: dict[str, str] = {}
    for name, param in model.named_parameters():
        frozen = "" if param.requires_grad else ", frozen"
        of_model[name] = f"{list(param.shape)} {param.dtype}{frozen}"
    agree({"data": of_data, "plan": of_plan, "model": of_model})


def agree(facts: Facts) -> None:
    """Raise the same error on every rank unless all have the same `facts`. Collective."""
    # Hashes first: the texts are long, and nearly always equal.
    text = json.dumps(facts, sort_keys=True)
    hashes = gather_texts(hashlib.sha256(text.encode()).hexdigest())
    if len(set(hashes)) == 1:
        return
    texts = gather_texts(text)
    problems = differences([json.loads(each) for each in texts])

    # Code 4 says that the machine is at fault. It is not, if the ranks differ in anything else.
    kinds = [_KINDS[kind].error for kind in problems]
    others = [each for each in kinds if each is not MachineError]
    error = others[0] if others else MachineError
    raise error(list(problems.values()))


def differences(ranks: Sequence[Facts]) -> dict[str, Problem]:
    """One problem for each kind in which ranks differ. ranks: the facts of each rank."""
    problems: dict[str, Problem] = {}
    for kind, about in _KINDS.items():
        each = [facts.get(kind, {}) for facts in ranks]
        names = sorted({name for facts in each for name in facts})
        found: list[str] = []
        odd: set[int] = set()
        for name in names:
            values: list[str] = []
            for facts in each:
                value = _text(facts[name]) if name in facts else MISSING
                values.append(value)
            # A library that is not installed is the ladder's affair.
            if kind == "version":
                installed = next((value for value in values if value), "")
                values = [value or installed for value in values]
            # Whatever most ranks have is taken for right, and the others are named.
            usual = _usual(values)
            others = {rank for rank, value in enumerate(values) if value != usual}
            if others:
                odd |= others
                label = f"{kind} " if kind not in ("config", "command") else ""
                found.append(f"{label}{name}: {_by_value(values)}")
        if found:
            what = f"{_who(sorted(odd), len(ranks))}: {some(found, _LISTED)}"
            problems[kind] = Problem(what, "start of the ranks", about.why, about.fix)
    return problems


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _usual(values: Sequence[str]) -> str:
    """What most ranks have; what rank 0 has, where no value is more frequent than its."""
    counted = Counter(values)
    (most_common, most), *_ = counted.most_common(1)
    if counted[values[0]] == most:
        return values[0]
    return most_common


def _who(odd: Sequence[int], ranks: int) -> str:
    named = some(odd, _NAMED)
    if ranks == 2:
        return "rank 1 differs from rank 0"
    if len(odd) == 1:
        return f"rank {named} differs from the other {ranks - 1} ranks"
    return f"ranks {named} differ from the other {ranks - len(odd)} ranks"


def _by_value(values: Sequence[str]) -> str:
    """Every value and who has it: `0.001 on rank 0, 0.002 on rank 1`."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(rank)
    parts: list[str] = []
    for value, ranks in ranks_of.items():
        word = "rank" if len(ranks) == 1 else "ranks"
        parts.append(f"{clipped(scrubbed(value), _SHOWN)} on {word} {some(ranks, _NAMED)}")
    return ", ".join(parts)


def code_of(config: RunConfig) -> dict[str, str]:
    """The files that the config names functions of, and the SHA-256 of each."""
    named = {
        "model.target": config.model.target,
        "data.target": config.data.target,
        "train.optimizer": config.train.optimizer,
    }
    found: dict[str, str] = {}
    for key, target in named.items():
        if target is None or ":" not in target:
            continue
        file = file_of_target(target)
        digest = ""
        if file is not None:
            digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        name = file.name if file is not None else target
        found[key] = f"{name} with SHA-256 {digest}" if digest else f"{name} not found"
    return found


def versions(facts: MachineFacts) -> dict[str, str]:
    """Versions of what trains on this machine; empty for a library that is not installed."""
    found = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "harness": f"{harness_version()}, source {_own_source()}",
    }
    for name in _LIBRARIES:
        library = facts.libraries.get(name)
        found[name] = (library.version or "") if library is not None else ""
    return found


def _own_source() -> str:
    """A hash of this package's own files: an installation from a source tree may be of any commit."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
