"""TrainState: everything that a resume needs, in one object; and RunLedger, what a rollback must not undo.

Saves, snapshots and rollbacks all use this one object. The next step is a function of it and of the run's config and
data. State that is missing here breaks the test that resumes bit for bit.

The ledger (skipped windows, budgets, attempt) is not part of what a rollback restores. A rollback would otherwise
forget why it happened, and train on the same bad windows again.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from harness.core.errors import (
    CheckpointError,
    HarnessError,
    MisuseError,
    Problem,
    is_out_of_memory,
)
from harness.core.facts import Limits, SamplingSpan
from harness.core.protocols import Meta, Sharded, Stateful, TensorDict, Tensors
from harness.core.shards import Rows

_LOSS_SCALE = "loss_scale"
_BUDGETS = {"attempt", "skips", "switches", "lowered", "recent_skips"}
_LISTS = ("skipped_windows", "returned_to", "recent_skips", "recent_rollbacks")
_PRECISIONS = ("", "bf16", "fp32")
_RUN = "run:"
"""Begins the identity of a run at the head of a ledger's hashes."""
# Characters that are shown of another library's error.
_SHOWN = 400
# What code raises that is given contents of another shape than it expects.
_OF_ODD_CONTENTS = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)


@dataclass
class RunLedger:
    """What rollbacks must not undo.

    attempt: raised by every rollback.
    skipped_windows: places in the data order that are not trained on.
    rollbacks, skips: of the whole run.
    switches: moves of layers between precisions.
    return_to: the step of a rollback that has been decided but not carried out yet; 0: none.
    lowered: the precision that the whole run was downgraded to, or is about to be; empty: none.
    returned_to: for each rollback the step that it went back to, or that of a later one which went further back. In
        ascending order.
    recent_skips, recent_rollbacks: the windows at which they happened, as far back as their budgets look.
    hashes: how a checkpoint recognises its own ledger. First the identity of the run, then the SHA-256 of `attempt`,
        `skipped_windows` and `returned_to` after each change of them. A checkpoint holds the newest of its time. In a
        ledger of the same run that one still occurs, however many rollbacks came later. In loops that are not ours no
        run has an identity.
    """

    attempt: int = 1
    skipped_windows: list[int] = field(default_factory=list)
    rollbacks: int = 0
    skips: int = 0
    switches: int = 0
    return_to: int = 0
    lowered: str = ""
    returned_to: list[int] = field(default_factory=list)
    recent_skips: list[int] = field(default_factory=list)
    recent_rollbacks: list[int] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """A ledger that is not new begins with a hash of what it holds."""
        if not self.hashes and (self.attempt > 1 or self.skipped_windows):
            self._changed()

    def begin(self, run: str) -> None:
        """The run begins, with the identity `run`; a ledger that has begun keeps its own."""
        if not self.hashes:
            self.hashes = [_RUN + run]

    def go_back(self, step: int, bad: Iterable[int]) -> None:
        """A rollback to `step` begins the next attempt, which skips the windows `bad`."""
        self.attempt += 1
        self.skipped_windows = sorted({*self.skipped_windows, *bad})
        # The steps after `step` are no longer part of this branch, nor are rollbacks to them.
        self.returned_to = [min(earlier, step) for earlier in self.returned_to]
        self.returned_to.append(step)
        self._changed()

    def skipped(self, window: int, updates: int, within: int) -> None:
        """Count `updates` skipped at `window`; skips before the last `within` windows are forgotten."""
        self.skips += updates
        recent = _since(self.recent_skips, window, within)
        self.recent_skips = recent + [window] * updates

    def rolls_back(self, window: int, within: int) -> None:
        """Count a rollback decided at `window`; rollbacks before the last `within` windows are forgotten."""
        self.rollbacks += 1
        recent = _since(self.recent_rollbacks, window, within)
        self.recent_rollbacks = [*recent, window]

    def spent(self, window: int, within: int) -> tuple[int, int]:
        """How many skips and rollbacks the last `within` windows up to `window` had.

        After a rollback the run is at earlier windows; what was spent at later ones still counts.
        """
        skips = _since(self.recent_skips, window, within)
        rollbacks = _since(self.recent_rollbacks, window, within)
        return len(skips), len(rollbacks)

    def inherit(self, skipped_windows: Iterable[int]) -> None:
        """Skip what was skipped by the run whose checkpoint this one starts from."""
        self.skipped_windows = list(skipped_windows)
        self._changed()

    @property
    def newest_hash(self) -> str:
        """What a checkpoint keeps of this ledger; empty for one without an identity and without a rollback."""
        return self.hashes[-1] if self.hashes else ""

    def follows(self, newest_hash: str) -> bool:
        """Whether this ledger once had that newest hash; true for an empty one, which says nothing."""
        return not newest_hash or newest_hash in self.hashes

    def continues(self, newest_hash: str) -> bool:
        """`follows`, for a run that goes on from a checkpoint with that newest hash.

        incidents.json is written at the first change. Until then only the checkpoint knows the run's identity: a new
        ledger takes it from there.
        """
        if newest_hash.startswith(_RUN):
            self.begin(newest_hash.removeprefix(_RUN))
        return self.follows(newest_hash)

    def _changed(self) -> None:
        self.hashes = [*self.hashes, self._sha256()]

    def _identity(self) -> list[str]:
        if self.hashes and self.hashes[0].startswith(_RUN):
            return self.hashes[:1]
        return []

    def _sha256(self) -> str:
        # With the identity: two runs may have skipped the same windows.
        held = [*self._identity(), self.attempt, self.skipped_windows, self.returned_to]
        return hashlib.sha256(json.dumps(held).encode()).hexdigest()

    @classmethod
    def from_json(cls, raw: Any) -> RunLedger:
        """The ledger that is `raw` in JSON, as `asdict` gives it. Raises ValueError saying why it is not one."""
        raw = raw if isinstance(raw, dict) else {}

        # The keys, and the type of each value.
        keys = {each.name for each in fields(cls)}
        lists = [raw.get(key) for key in (*_LISTS, "hashes")]
        if set(raw) != keys or not _all_are(list, lists):
            raise ValueError("its keys are not those of this version")
        if not _all_are(str, raw["hashes"]):
            raise ValueError("its hashes are not text")
        if raw["lowered"] not in _PRECISIONS:
            raise ValueError(f"lowered is none of {', '.join(map(repr, _PRECISIONS))}")
        counts: list[Any] = []
        for key in keys - {"lowered", "hashes"}:
            if key in _LISTS:
                counts += raw[key]
            else:
                counts.append(raw[key])
        if not all(map(_is_count, counts)):
            raise ValueError("a value is not a whole number from 0 to 2^63")

        # The newest hash is of the contents. An identity alone is of a run that has changed nothing yet.
        ledger = cls(**raw)
        unchanged = ledger.hashes == ledger._identity()
        if not unchanged and ledger.hashes[-1] != ledger._sha256():
            raise ValueError("its contents do not match their hash")
        return ledger

    def take_over(self, other: RunLedger) -> None:
        """Become equal to `other`, in place: responder and state hold this object."""
        for each in fields(self):
            setattr(self, each.name, copy.copy(getattr(other, each.name)))

    def rollbacks_before(self, step: int) -> int:
        """How many rollbacks `step`, a step of the present branch, comes after."""
        return sum(target < step for target in self.returned_to)

    def rolled_back_before(self, step: int, within: int) -> bool:
        """Whether `step` is one of the first `within` steps after a rollback."""
        return any(target < step <= target + within for target in self.returned_to)

    def window_index(self, step: int) -> int:
        """The place in the data order that `step` consumes: that of the step-th window that is not skipped."""
        index = step
        for skipped in sorted(self.skipped_windows):
            if skipped <= index:
                index += 1
        return index


def lost_ledger(where: str, why: str) -> Problem:
    """The problem of a ledger that is not the run's own, or not its newest."""
    what = "what rollbacks decided is missing: windows to skip, budgets spent"
    fix = (
        "restore the run's own incidents.json, the newest copy of it, or start over: --resume never"
    )
    return Problem(what, where, why, fix)


def unrelated_ledger(step: int, attempt: int) -> Problem:
    """The problem of a ledger with this `attempt` that does not belong to the checkpoint of `step`."""
    where = f"checkpoint of step {step} and incidents.json"
    why = f"the checkpoint was not saved beside this ledger (attempt {attempt})"
    why += ": it is another run's, or an older copy"
    return lost_ledger(where, why)


def _since(windows: Iterable[int], window: int, within: int) -> list[int]:
    return [each for each in windows if each > window - within]


def _all_are(kind: type, values: Iterable[object]) -> bool:
    return all(isinstance(value, kind) for value in values)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def state_bytes(model: nn.Module, optimizer: int) -> int:
    """About how many bytes the TrainState of `model` takes. optimizer: bytes of its optimizer's state.

    Frozen weights that come from a folder (`frozen_from`) are not part of it.
    """
    frozen_elsewhere = bool(getattr(model, "frozen_from", ""))
    size = 0
    for param in model.parameters():
        if param.requires_grad or not frozen_elsewhere:
            size += param.numel() * param.element_size()
    for buffer in model.buffers():
        size += buffer.numel() * buffer.element_size()
    # 2% and 4 MiB for everything else: histories, monitors, generators.
    return (size + optimizer) * 51 // 50 + (4 << 20)


def seed_everything(seed: int) -> None:
    """Start torch's, numpy's and Python's generators from `seed`."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_torch(seed: int) -> None:
    """Seed the generators of the CPU and of every GPU (0 to 2^64 - 1); the same numbers as `torch.manual_seed`.

    Faster than that one where CUDA has not started: `torch.manual_seed` then formats a traceback of its caller at every
    call, for a message about the seed that it keeps until CUDA starts. A process without a GPU does not need that.
    """
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)
    elif _gpus():  # CUDA starts later: torch keeps the seed until then
        torch.manual_seed(seed)
    torch.default_generator.manual_seed(seed)


@cache
def _gpus() -> int:
    return torch.cuda.device_count()


class RandomState:
    """RNG of every kind: torch CPU, each CUDA device, numpy, Python."""

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """tensors: uint8 torch generators, uint32 [624] numpy key; meta: the rest of numpy's and Python's state."""
        tensors = {"torch": torch.get_rng_state()}
        for index in range(torch.cuda.device_count()):
            tensors[f"cuda.{index}"] = torch.cuda.get_rng_state(index)
        _, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
        tensors["numpy"] = torch.from_numpy(np.asarray(key).astype(np.int64))
        version, words, gauss_next = random.getstate()
        meta = {
            "numpy": [int(position), int(has_gauss), float(gauss)],
            "python": [version, list(words), gauss_next],
        }
        return tensors, meta

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        # Copies: torch reads a generator's state from where a tensor's memory begins, even if the tensor is a view.
        torch.set_rng_state(tensors["torch"].cpu().clone())
        for index in range(torch.cuda.device_count()):
            saved = tensors.get(f"cuda.{index}")
            if saved is not None:
                torch.cuda.set_rng_state(saved.cpu().clone(), index)
        position, has_gauss, gauss = meta["numpy"]
        key = tensors["numpy"].cpu().numpy().astype(np.uint32)
        np.random.set_state(("MT19937", key, position, has_gauss, gauss))
        version, words, gauss_next = meta["python"]
        random.setstate((version, tuple(words), gauss_next))


@contextmanager
def random_numbers_apart(device: torch.device | None = None) -> Iterator[None]:
    """Restore the host's generators of torch, numpy and Python afterwards, whatever is drawn or seeded inside.

    device: if it is a GPU, its generator too.
    """
    of_torch = torch.get_rng_state()
    of_numpy = np.random.get_state()
    of_python = random.getstate()
    gpu = device if device is not None and device.type == "cuda" else None
    of_gpu = None if gpu is None else torch.cuda.get_rng_state(gpu)
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)
        if gpu is not None and of_gpu is not None:
            torch.cuda.set_rng_state(of_gpu, gpu)


@contextmanager
def left_alone(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Eval mode without gradients. Afterwards modes, buffers and random numbers are as before.

    device: where the model computes.
    """
    modes = [(module, module.training) for module in model.modules()]
    # Some buffers count forwards.
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.eval()
    try:
        with torch.no_grad(), random_numbers_apart(device):
            yield
    finally:
        for module, training in modes:
            module.training = training
        for buffer, before in kept:
            buffer.copy_(before)


_WITHOUT_COPY = "leave it out, or switch snapshots off: snapshot_every=0"


class ExternalState:
    """Makes a part of anything with torch's `state_dict` and `load_state_dict`, such as an optimizer or a scheduler.

    Its state may nest dicts, Counters, lists and tuples of tensors, numbers and text, under keys that are numbers or
    text. `state_dict` takes that tree apart: tensors get a number each, and the rest becomes JSON that refers to them.

    A tensor subclass made of tensors, such as torchao's quantised moments or a DTensor, is taken apart into those. Its
    class and shape are remembered in this object alone, so its state can be loaded only where it came from.
    """

    def __init__(self, name: str, owner: Any) -> None:
        self.name, self.owner = name, owner
        self._kinds: list[_Kind] = []

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """tensors: by number; meta: {"tree": the rest}. Raises MisuseError naming what cannot be copied."""
        try:
            state = self.owner.state_dict()
        except RuntimeError as error:
            # Of ZeroRedundancyOptimizer most of the state is on other ranks.
            what = f"{type(self.owner).__name__} gives no state: {error}"
            raise MisuseError(Problem(what, self.name, fix=_WITHOUT_COPY)) from error
        tensors: TensorDict = {}
        return tensors, {"tree": self._taken_apart(state, "", tensors)}

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Give the owner copies of what was saved, as some owners keep what they are given.

        Two things of an optimizer stay that torch's own load would change. A learning rate that is a tensor stays that
        tensor object. The state keeps its dtypes, which torch would make those of the parameters.
        """
        saved = _put_together(meta["tree"], tensors, self._kinds)
        if not isinstance(self.owner, torch.optim.Optimizer):
            self.owner.load_state_dict(saved)
            return

        # torch's load makes new groups, so their tensors are taken out before.
        held = [_tensors_in(group) for group in self.owner.param_groups]
        self.owner.load_state_dict(saved)
        self._restore_dtypes(saved.get("state", {}))
        for group, before in zip(self.owner.param_groups, held, strict=True):
            for key, tensor in before.items():
                group[key] = tensor.copy_(group[key])

    def _restore_dtypes(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace values whose dtype the optimizer's own load has changed. saved: state by number of the parameter."""
        params: list[Tensor] = []
        for group in self.owner.param_groups:
            params += group["params"]
        for index, param in enumerate(params):
            loaded = self.owner.state.get(param, {})
            for key, value in saved.get(index, {}).items():
                now = loaded.get(key)
                both_tensors = isinstance(value, Tensor) and isinstance(now, Tensor)
                if both_tensors and now.dtype != value.dtype:
                    loaded[key] = value.to(now.device)

    def _taken_apart(self, value: Any, place: str, tensors: TensorDict) -> Any:
        """`value` as JSON; its tensors go into `tensors`. place: where in the owner's state it is, for an error."""
        if isinstance(value, Mapping):
            return self._mapping_apart(cast("Mapping[Any, Any]", value), place, tensors)

        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            items: list[Any] = []
            for number, each in enumerate(cast("Sequence[Any]", value)):
                items.append(self._taken_apart(each, f"{place}.{number}", tensors))
            return {kind: items}

        if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
            names, context = value.__tensor_flatten__()
            inner: dict[str, Tensor] = {}
            others: dict[str, Any] = {}
            for name in names:
                part = getattr(value, name)
                found = inner if isinstance(part, Tensor) else others
                found[name] = part

            # The tensors are saved. What cannot be, such as a mesh of processes, waits here.
            kind = (type(value), context, others, value.shape, value.stride())
            if kind not in self._kinds:
                self._kinds.append(kind)
            number = self._kinds.index(kind)
            apart = self._taken_apart(inner, place, tensors)
            return {"wrapped": [number, apart]}

        if type(value) in (Tensor, nn.Parameter):
            # By number, not by place: two places may be spelled alike, as 1 and "1", or a key with a dot in it.
            number = str(len(tensors))
            tensors[number] = value.detach()
            return {"tensor": [number, str(value.device)]}

        if _is_plain(value):
            return value
        raise self._not_copied(f"a {type(value).__name__}", place)

    def _mapping_apart(
        self,
        value: Mapping[Any, Any],
        place: str,
        tensors: TensorDict,
    ) -> Any:
        for key in value:
            if not _is_plain(key):
                raise self._not_copied(f"the key {key!r}", place)
        # A milestone schedule calls methods of its Counter that no dict has.
        kind = "counter" if isinstance(value, Counter) else "dict"
        items: list[list[Any]] = []
        for key, each in value.items():
            items.append([key, self._taken_apart(each, f"{place}.{key}", tensors)])
        return {kind: items}

    def _not_copied(self, what: str, place: str) -> MisuseError:
        where = place.strip(".") or "its top"
        text = f"{type(self.owner).__name__} keeps {what} at {where}, which is not copied"
        return MisuseError(Problem(text, self.name, fix=_WITHOUT_COPY))


def _tensors_in(group: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in group.items() if isinstance(value, Tensor)}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


# What a tensor subclass is made of beside its tensors: its class, its context (what torch needs), other parts such as a
# DTensor's mesh, shape and stride.
_Kind = tuple[Any, Any, dict[str, Any], tuple[int, ...], tuple[int, ...]]


def _put_together(
    tree: Any,
    tensors: Mapping[str, Tensor],
    kinds: Sequence[_Kind],
) -> Any:
    """The state that `ExternalState._taken_apart` made `tree` and `tensors` of."""
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = cast("dict[str, Any]", tree).items()

    # A tensor of its own, on the device that it had.
    if kind == "tensor":
        number, device = value
        return tensors[number].to(device, copy=True)

    # A tensor subclass: its inner tensors first, then the class around them.
    if kind == "wrapped":
        number, inner = value
        cls, context, others, shape, stride = kinds[number]
        parts = {**_put_together(inner, tensors, kinds), **others}
        return cls.__tensor_unflatten__(parts, context, shape, stride)

    # Containers, from the inside out.
    if kind in ("dict", "counter"):
        found = {key: _put_together(each, tensors, kinds) for key, each in value}
        return Counter(found) if kind == "counter" else found

    items = [_put_together(each, tensors, kinds) for each in value]
    return tuple(items) if kind == "tuple" else items


@dataclass
class TrainState:
    """Everything that a resume needs.

    parts: named pieces of the run: model, optimizer, FP8 state, loss scale, monitors, random generators.
    ledger: what a rollback must not undo.
    step: windows consumed so far.
    dense_sampling: the steps in which all statistics are measured.
    switches: decided but not yet due, (step, demote, promote, whole_run_to), as in `facts.Switch`.
    limits: of the steps to come, by step; a step that is not named has none.
    """

    parts: dict[str, Stateful]
    ledger: RunLedger = field(default_factory=RunLedger)
    step: int = 0
    dense_sampling: SamplingSpan = field(default_factory=SamplingSpan)
    switches: list[tuple[int, list[str], list[str], str]] = field(default_factory=list)
    limits: dict[int, Limits] = field(default_factory=dict)

    def advance(self) -> None:
        """One window was consumed."""
        self.step += 1
        self.limits.pop(self.step, None)

    def drop_fallback(self) -> None:
        """Drop a downgrade of the whole run that was not yet due when this state was saved.

        The ledger knows it by now, as rollbacks do not undo it.
        """
        self.switches = [switch for switch in self.switches if not switch[3]]

    def state_dict(self, parts: Iterable[str] | None = None) -> tuple[Tensors, Meta]:
        """(tensors by part and name, JSON-able meta). parts: names of those wanted, None for all.

        Collective: every rank must call it.
        """
        # JSON has neither tuples nor numbers as keys: a state just saved and one just read must be equal.
        tensors: Tensors = {}
        budgets = {key: getattr(self.ledger, key) for key in sorted(_BUDGETS)}
        switches = [list(switch) for switch in self.switches]
        limits = {str(step): limits.as_json() for step, limits in self.limits.items()}
        sampling = self.dense_sampling
        meta: Meta = {
            "step": self.step,
            # The key of released checkpoints: it names what is called dense sampling now.
            "closer_look": [sampling.first, sampling.last],
            "budgets": budgets,
            "ledger": self.ledger.newest_hash,
            "switches": switches,
            "limits": limits,
            "parts": {},
        }
        for name in self.parts if parts is None else parts:
            tensors[name], meta["parts"][name] = self.parts[name].state_dict()
        return tensors, meta

    def rows(self) -> dict[str, Mapping[str, Rows]]:
        """The rows that this rank holds of the tensors in `state_dict`, for parts that are sharded over ranks."""
        found: dict[str, Mapping[str, Rows]] = {}
        for name, part in self.parts.items():
            if isinstance(part, Sharded):
                found[name] = part.rows()
        return found

    def load_state_dict(
        self,
        tensors: Mapping[str, TensorDict],
        meta: Mapping[str, Any],
        parts: Iterable[str] | None = None,
    ) -> None:
        """Restore every part, or those named.

        Raises CheckpointError naming parts that are missing on either side, or if a part's contents are of another
        shape. The loss scale may be missing on one side, as it is not learned. A run that leaves fp16 drops it. A run
        that comes to fp16 starts with its own.
        """
        try:
            self._load(tensors, meta, set(self.parts if parts is None else parts))
        except HarnessError:
            raise
        except _OF_ODD_CONTENTS as error:
            # Most errors of memory are RuntimeErrors, too, and say nothing about the contents.
            if is_out_of_memory(error):
                raise
            text = " ".join(str(error).split())
            why = f"{type(error).__name__}: {text}"[:_SHOWN]
            fix = "resume with the model, recipe and version that wrote it"
            problem = Problem("does not fit this run", "the checkpoint", why, fix)
            raise CheckpointError(problem) from error

    def resume(
        self,
        tensors: Mapping[str, TensorDict],
        meta: Mapping[str, Any],
        parts: Iterable[str] | None = None,
    ) -> None:
        """`load_state_dict`, to run the steps after it again.

        Those steps spend their budgets again, so what was spent is taken from the state. If a rollback came since, the
        ledger has what it wrote, and that stays.

        Raises CheckpointError as `load_state_dict` does. Also raises it if the ledger is not the one that this state
        was saved beside, or a later one of the same run: other windows would be trained on.
        """
        self.load_state_dict(tensors, meta, parts)
        ledger, budgets = self.ledger, meta["budgets"]

        if not ledger.continues(meta["ledger"]):
            raise CheckpointError(unrelated_ledger(int(meta["step"]), ledger.attempt))

        # The same attempt: no rollback has come since. The ledger on disk holds what later steps spent.
        if budgets["attempt"] == ledger.attempt:
            ledger.skips = budgets["skips"]
            ledger.switches = budgets["switches"]
            ledger.recent_skips = list(budgets["recent_skips"])
            ledger.lowered = budgets["lowered"]
        else:
            self.drop_fallback()

    def _load(
        self, tensors: Mapping[str, TensorDict], meta: Mapping[str, Any], here: set[str]
    ) -> None:
        # Check the parts before any is loaded: half a state is worse than none.
        saved = set(meta["parts"])
        if (saved ^ here) - {_LOSS_SCALE}:
            where = f"checkpoint of step {meta['step']}"
            what = f"parts differ: only in the checkpoint {sorted(saved - here)}, "
            what += f"only in this run {sorted(here - saved)}"
            fix = "resume with the recipe and version that wrote it"
            raise CheckpointError(Problem(what, where, fix=fix))
        for name, part in self.parts.items():
            if name in saved & here:
                part.load_state_dict(tensors.get(name, {}), meta["parts"][name])

        # The state's own fields.
        if set(meta["budgets"]) != _BUDGETS or not isinstance(meta["ledger"], str):
            raise ValueError("its budgets are not those of this version")
        self.step = int(meta["step"])
        self.dense_sampling = SamplingSpan(*meta["closer_look"])
        self.switches = []
        for step, demote, promote, whole_run_to in meta["switches"]:
            self.switches.append((step, demote, promote, whole_run_to))
        self.limits = {}
        for step, values in meta["limits"].items():
            self.limits[int(step)] = Limits.from_json(values)
