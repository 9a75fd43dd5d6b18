"""Every tensor of a step in the order in which the step computes it, each as a hash of its bytes.

Two runs of one step agree to the bit if all hashes agree, and they part at the first hash that differs. A hash takes 16
bytes, so whole steps of two runs can be compared although no machine could hold the tensors of both.

    data -> for each micro-batch: outputs of modules, then gradients of these outputs and of parameters
         -> loss, gradient norm, limits, learning rate -> weights and optimizer -> FP8 histories and scales

Outputs and gradients need hooks on every module (`watched`), which see eager code only. Everything else is there
without hooks, and says already in which step two runs part.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from harness.core.facts import StepFacts, Window
from harness.core.protocols import Meta, TensorDict, Tensors
from harness.replay.origin import tensors

if TYPE_CHECKING:
    from harness.run import Share

# pyright: standard
# torch types hooks only in part, as in replay/origin.py.

STATE, DATA, FORWARD, BACKWARD, UPDATE, FP8 = (
    "state",
    "data",
    "forward",
    "backward",
    "update",
    "fp8",
)
"""Phases of a step; STATE is what it begins with."""
GENERATOR = "generator"
"""The kind of a random generator's state. Training draws anew in every step, from seed and window."""
FINGERPRINT = "fingerprint"
"""The kind of the hash of frozen weights that stay in a folder of their own. It names none of them: the first output
that differs does."""
_BESIDE = (GENERATOR, FINGERPRINT)
_DIGEST_BYTES = 16
_NUMBER = re.compile(r"(\d+)")


class Place(NamedTuple):
    """Which tensor of a step.

    phase: one of those above.
    tensor: a module, a parameter, an FP8 slot, or a figure such as the loss.
    kind: what of it: output, gradient, optimizer state, ...
    micro_batch: from 1 over all ranks' shares; 0: the tensor is one of the whole step.
    call: which call of the module in that micro-batch, from 1; 0: no module was called.
    """

    phase: str
    tensor: str
    kind: str
    micro_batch: int = 0
    call: int = 0


class StepTensors:
    """The hashes of one step's tensors, or of a state, in the order of computation.

    hashes: by place.
    of_recipe: places of FP8 state and of the loss scale. Another recipe has none of them, or others.
    wanted: the one tensor whose values are kept, too; None: no values are kept.
    value: a copy of that tensor on the host, once it was seen.
    """

    def __init__(self, wanted: Place | None = None) -> None:
        self.hashes: dict[Place, bytes] = {}
        self.of_recipe: set[Place] = set()
        self.wanted = wanted
        self.value: Tensor | None = None

    def add(self, place: Place, tensor: Tensor) -> None:
        """Note a tensor. The first one at a place counts."""
        if place in self.hashes or tensor.layout != torch.strided:
            return
        self.hashes[place] = _hash(tensor)
        if place == self.wanted:
            self.value = tensor.detach().to("cpu", copy=True)

    def add_data(self, window: Window, shares: Sequence[Share]) -> None:
        """The samples of a window: their numbers, then what is in them."""
        numbers = [window.index, *window.samples.tolist()]
        self.add(Place(DATA, "window", "sample numbers"), torch.tensor(numbers, device="cpu"))
        micro_batch = 0
        for share in shares:
            for batch in share.batches:
                micro_batch += 1
                for name, values in batch.items():
                    self.add(Place(DATA, name, "samples", micro_batch), values)

    def add_figures(self, facts: StepFacts) -> None:
        """The step's figures. The loss is put where it is computed: before the last micro-batch's backward."""
        self._add_loss(facts.loss)
        # The step computed them in float32, torch's default here.
        limits = [facts.limits.loss, facts.limits.norm, facts.limits.clip]
        figures: dict[str, float | list[float]] = {
            "loss_scale": facts.loss_scale,
            "grad_norm": facts.grad_norm,
            "limits": limits,
            "applied": float(facts.applied),
            "lr": facts.lr,
        }
        for name, value in figures.items():
            self.add(Place(UPDATE, name, "figure"), torch.tensor(value, device="cpu"))

    def _add_loss(self, loss: float) -> None:
        last = max((place.micro_batch for place in self.hashes), default=0)
        before: dict[Place, bytes] = {}
        after: dict[Place, bytes] = {}
        for place, digest in self.hashes.items():
            is_after = place.phase == BACKWARD and place.micro_batch == last
            (after if is_after or after else before)[place] = digest
        self.hashes = before
        self.add(Place(FORWARD, "loss", "figure"), torch.tensor(loss, device="cpu"))
        self.hashes |= after

    def add_state(self, parts: Tensors, meta: Meta, *, after_update: bool) -> None:
        """A TrainState, as `TrainState.state_dict` gives it and as checkpoints hold it.

        after_update: it is what a step's update left; else it is what a step begins with.
        """
        phase = UPDATE if after_update else STATE
        for name, tensor in parts.get("model", {}).items():
            self.add(Place(phase, name, "weights"), tensor)
        if frozen := meta["parts"].get("model", {}).get("frozen"):
            digest = torch.tensor(
                list(bytes.fromhex(frozen["sha256"])), dtype=torch.uint8, device="cpu"
            )
            self.add(Place(phase, "frozen weights", FINGERPRINT), digest)
        optimizer = parts.get("optimizer", {})
        for name in sorted(optimizer, key=_natural):
            self.add(Place(phase, name, "optimizer state"), optimizer[name])
        slots = meta["parts"].get("fp8", {}).get("slots", ())
        self._add_slots(parts.get("fp8", {}), slots, FP8 if after_update else STATE)
        for name, tensor in parts.get("loss_scale", {}).items():
            self._add_of_recipe(Place(phase, f"loss scale {name}", "figure"), tensor)
        for name, tensor in parts.get("rng", {}).items():
            self.add(Place(phase, name, GENERATOR), tensor)

    def _add_slots(self, of_fp8: TensorDict, slots: Sequence[str], phase: str) -> None:
        """FP8 histories and scales, slot by slot: the tensors' last dimension is that of the slots."""
        for kind, tensor in of_fp8.items():
            if tensor.ndim and tensor.shape[-1] == len(slots):
                for number, slot in enumerate(slots):
                    self._add_of_recipe(Place(phase, slot, kind), tensor[..., number])
            else:
                self._add_of_recipe(Place(phase, kind, "FP8 state"), tensor)

    def _add_of_recipe(self, place: Place, tensor: Tensor) -> None:
        self.add(place, tensor)
        self.of_recipe.add(place)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts numbers in names as numbers: blocks.2 before blocks.10."""
    # Between two numbers there is always text, if only an empty one.
    parts = _NUMBER.split(name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _hash(tensor: Tensor) -> bytes:
    """Of dtype, shape and bytes: 0.0 and -0.0 differ."""
    on_host = tensor.detach().to("cpu").contiguous()
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    digest.update(f"{on_host.dtype} {tuple(on_host.shape)} ".encode())
    # A tensor of no dimension, or of complex numbers, has no view as bytes.
    flat = torch.view_as_real(on_host) if on_host.is_complex() else on_host
    digest.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def first_difference(a: StepTensors, b: StepTensors, *, shared: bool = False) -> Place | None:
    """The first place, in the order of computation, whose tensors differ; None if all agree.

    A tensor that only one of them has is a difference: of a module that the other has not, or of a micro-batch more.
    FP8 state and loss scales that only one has are none: they come with its recipe, and the tensors computed with them
    show what that changes. Generators are left out, as a step draws from its own, and so are fingerprints:
    `generators_differ` and `frozen_differ` compare these.

    shared: compare only what both have, such as a step noted with hooks and the same one noted without.
    """
    for place in _in_order(a, b):
        if place.kind in _BESIDE:
            continue
        digest, other = a.hashes.get(place), b.hashes.get(place)
        if digest is None or other is None:
            if not shared and place not in a.of_recipe and place not in b.of_recipe:
                return place
        elif digest != other:
            return place
    return None


def _in_order(a: StepTensors, b: StepTensors) -> Iterator[Place]:
    """Every place of either: A's order, and behind each place what only B has between that one and the next."""
    only_b: dict[Place | None, list[Place]] = {}
    before: Place | None = None
    for place in b.hashes:
        if place in a.hashes:
            before = place
        else:
            only_b.setdefault(before, []).append(place)

    yield from only_b.get(None, ())
    for place in a.hashes:
        yield place
        yield from only_b.get(place, ())


class StepLog:
    """The hashes of many steps. Steps have the same places, so a step takes little more than its hashes."""

    def __init__(self) -> None:
        self._places: list[tuple[Place, ...]] = []
        self._hashes: list[bytes] = []
        self._of_recipe: set[Place] = set()

    def append(self, step: StepTensors) -> None:
        """Add the next step."""
        places = tuple(step.hashes)
        if self._places and places == self._places[-1]:
            places = self._places[-1]
        self._places.append(places)
        self._hashes.append(b"".join(step.hashes.values()))
        self._of_recipe |= step.of_recipe

    def difference(self, number: int, other: StepTensors, *, shared: bool = False) -> Place | None:
        """`first_difference` of the step of that number, from 1, and another one."""
        whole = self._hashes[number - 1]
        step = StepTensors()
        step.of_recipe = self._of_recipe
        for at, place in enumerate(self._places[number - 1]):
            step.hashes[place] = whole[at * _DIGEST_BYTES : (at + 1) * _DIGEST_BYTES]
        return first_difference(step, other, shared=shared)


def generators_differ(a: StepTensors, b: StepTensors) -> list[str]:
    """Names of the random generators whose states differ, or that only one run has."""
    places = [place for place in _in_order(a, b) if place.kind == GENERATOR]
    return [each.tensor for each in places if a.hashes.get(each) != b.hashes.get(each)]


def frozen_differ(a: StepTensors, b: StepTensors) -> bool:
    """Whether both have frozen weights that no checkpoint holds, and other ones."""
    places = [place for place in a.hashes if place.kind == FINGERPRINT and place in b.hashes]
    return any(a.hashes[place] != b.hashes[place] for place in places)


@contextmanager
def watched(model: nn.Module, into: StepTensors) -> Iterator[None]:
    """Note the output of every module, and the gradients of these outputs and of parameters, inside of the block."""
    hooks = _Hooks(model, into)
    try:
        yield
    finally:
        hooks.remove()


class _Hooks:
    """The hooks of `watched` on one model."""

    def __init__(self, model: nn.Module, into: StepTensors) -> None:
        self._model = model
        self._into = into
        self._micro_batch = 0
        # How often each module was called in this micro-batch, and how often it was recomputed.
        self._calls: dict[nn.Module, int] = {}
        self._again: dict[nn.Module, int] = {}
        self._handles: list[Any] = [model.register_forward_pre_hook(self._begin)]
        self._names: dict[nn.Module, str] = {}
        for name, module in model.named_modules():
            self._names[module] = name
            self._handles.append(module.register_forward_hook(self._leave))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = partial(self._accumulated, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A forward of the whole model begins a micro-batch."""
        self._micro_batch += 1
        self._calls.clear()
        self._again.clear()

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A module returns its output. Children return before their parents do."""
        # A call in backward recomputes an earlier one. Only its gradients are new, where that one recorded no graph.
        recomputes = torch._C._current_graph_task_id() >= 0
        calls = self._again if recomputes else self._calls
        call = calls.get(module, 0) + 1
        calls[module] = call
        name = self._names[module] or "(the model)"
        for path, tensor in tensors(output, "output", whole_numbers=True):
            if not recomputes:
                self._into.add(Place(FORWARD, name, path, self._micro_batch, call), tensor)
            if tensor.requires_grad and not tensor.is_leaf:
                place = Place(BACKWARD, name, f"gradient of {path}", self._micro_batch, call)
                tensor.register_hook(partial(self._into.add, place))

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        """A micro-batch's gradient was added to a parameter's."""
        if parameter.grad is not None:
            place = Place(BACKWARD, name, "gradient", self._micro_batch)
            self._into.add(place, parameter.grad)


class Apart(NamedTuple):
    """How far two tensors of one place are apart.

    elements: of A's tensor, or of the only one.
    differing: how many of them differ, to the bit.
    at: flat index of the largest difference.
    a, b: the values there.
    largest: the largest absolute difference; NaN if it is one of something that is not finite.
    ulps: the largest number of representable values between two; None for whole numbers.
    shapes: dtype and shape of both, where these differ, and then nothing else is compared; else empty.
    only: "A" or "B" if no other run has the tensor. Its own dtype and shape are in `shapes`, beside an empty text.
    """

    elements: int
    differing: int = 0
    at: int = 0
    a: float = 0.0
    b: float = 0.0
    largest: float = 0.0
    ulps: int | None = None
    shapes: tuple[str, str] | tuple[()] = ()
    only: Literal["", "A", "B"] = ""


def apart(a: Tensor | None, b: Tensor | None) -> Apart:
    """Compare the values of two tensors on the host, which were kept as `StepTensors.wanted`. None: a run has none."""
    if b is None:
        assert a is not None
        return Apart(a.numel(), shapes=(_described(a), ""), only="A")
    if a is None:
        return Apart(b.numel(), shapes=("", _described(b)), only="B")
    if a.dtype != b.dtype or a.shape != b.shape:
        return Apart(a.numel(), shapes=(_described(a), _described(b)))
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    a, b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    # Every dtype's values are exact in float64, but for whole numbers over 2^53.
    wide_a, wide_b = a.double(), b.double()
    distance = (wide_a - wide_b).abs()
    ulps: Tensor | None = None
    if a.is_floating_point():
        ulps = _between(_ordinal(a), _ordinal(b))
        differs = a.view(_BITS[a.element_size()]) != b.view(_BITS[b.element_size()])
        # The largest in ulps: of NaN and infinities a distance says nothing. 0.0 and -0.0 are 0 ulps apart.
        at = int(ulps.argmax() if ulps.any() else differs.int().argmax())
    else:
        differs = a != b
        at = int(distance.argmax())
    return Apart(
        elements=a.numel(),
        differing=int(differs.sum()),
        at=at,
        a=float(wide_a[at]),
        b=float(wide_b[at]),
        largest=float(distance.max()),
        ulps=None if ulps is None else int(ulps[at]),
    )


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _ordinal(values: Tensor) -> Tensor:
    """int64: the place of each value among all of its dtype, so that neighbours are 1 apart; 0.0 and -0.0 are 0.

    Floats of one sign are ordered as their bits are: IEEE 754-2019, 5.10.
    """
    size = values.element_size()
    bits = values.view(_BITS[size]).long()
    if size == 1:
        # uint8 has no sign of its own.
        bits = torch.where(bits >= 128, bits - 256, bits)
    smallest = -(1 << (8 * size - 1))
    return torch.where(bits < 0, smallest - bits, bits)


def _between(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| of int64, at most its largest value."""
    sum_of_sizes = a.abs() + b.abs()
    # Across zero a distance of two float64 may be too large for int64, and wraps around to a negative number.
    largest = torch.iinfo(torch.int64).max
    across = torch.where(sum_of_sizes < 0, largest, sum_of_sizes)
    return torch.where((a < 0) != (b < 0), across, (a - b).abs())


def _described(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"
