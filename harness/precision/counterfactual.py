"""What other ways of scaling would lose: measured on the tensors of a run that goes on under delayed scaling.

    with Counterfactual(model) as watch:
        ...                              # train for some steps
    for line in lines(watch.report()):
        say(line)

The model runs in FP8 under delayed scaling, on the native backend. While the watch is entered, hooks see each FP8
layer's input, weight and grad_output as the layer casts them. In a sampled step they are cast once more under every
scheme of `schemes.SCHEMES`, and what each cast loses is added up by slot. Nothing of the run changes: a hook only
reads, draws no random numbers, and casts into tensors of its own.

A scheme is judged by its gain: per-element SQNR (`even_db`) under it, less that under delayed scaling, in dB. The
SQNR of the whole tensor (`sqnr_db`) is beside it. It cannot judge: one hot channel is most of the signal, and it hides
what every other channel loses (docs/guide/concepts.md).

The figures are of tensors, not of losses. They say where a scale costs precision. They do not say whether the training
would be better for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from harness.core.errors import MisuseError, Problem, number_of, shown, some
from harness.core.facts import ROLES
from harness.precision import scaling
from harness.precision.backends.native import NativeLayer
from harness.precision.scaling import E4M3
from harness.precision.schemes import SCHEMES, cast_sums

DELAYED, *OTHERS = SCHEMES
EXACT_DB = 150.0
"""The SQNR of a cast without any error. Float32 itself has about 150 dB."""
HELPS_DB = 3.0
"""A scheme helps a slot from this gain on, in dB: the noise of its values is half as strong."""

_WHERE = "Counterfactual"
_BACKENDS = "harness.precision.backends."


@dataclass(frozen=True, slots=True)
class Loss:
    """What casts of one slot lose under one scheme, as in docs/guide/concepts.md.

    sqnr_db, even_db: SQNR of the tensor, and per element (of gradients: per row), in dB; EXACT_DB without any error.
    clipped, underflow: shares of the non-zero finite values that were cut off, and that became zero.
    """

    sqnr_db: float
    even_db: float
    clipped: float
    underflow: float


@dataclass(frozen=True, slots=True)
class SlotLosses:
    """One slot under every scheme.

    slot: `<layer>.<role>`, with padded numbers.
    format: the recipe's; `schemes.format_of` says which schemes have another.
    steps: how many steps it was measured in.
    in_bf16: whether its layer was in BF16 in any of them; the figures then say what FP8 would do.
    median, worst: over the steps, figure by figure, for each scheme.
    gain_db: median over the steps of even_db less that of delayed scaling, for each other scheme.
    best: the scheme with the largest gain, the first of equal ones; "delayed" if none gains.
    """

    slot: str
    role: str
    format: str
    steps: int
    in_bf16: bool
    median: Mapping[str, Loss]
    worst: Mapping[str, Loss]
    gain_db: Mapping[str, float]
    best: str


@dataclass(frozen=True, slots=True)
class SchemeGain:
    """What one scheme would do for all slots of one role.

    median_db: median over the slots of their gain.
    helped: slots that gain HELPS_DB or more, the largest gain first.
    worse: slots that lose HELPS_DB or more, the largest loss first.
    """

    role: str
    scheme: str
    slots: int
    median_db: float
    helped: tuple[str, ...]
    worse: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a watch measured.

    steps: how many steps were measured.
    slots: of each slot, the largest gain of its best scheme first.
    gains: for each role and each scheme but delayed.
    not_observed: why nothing is known of a layer or slot, by name.
    """

    steps: int
    slots: tuple[SlotLosses, ...]
    gains: tuple[SchemeGain, ...]
    not_observed: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """All of it as dicts, lists, texts and finite numbers."""
        return asdict(self)


class Counterfactual:
    """A context manager that measures what other schemes would lose. See the module's docstring.

    model: converted by a plan; wrappers such as DDP may be around it.
    every: measure one optimizer step in so many, the run's first among them. 0: the steps that the run samples itself
        (`fp8.stats_every`).

    It measures training forwards inside the precision context, and their backwards. A step's micro-batches and
    recomputed forwards are added up. Infinite and NaN values are in no figure but `clipped`. Ranks measure their own
    tensors, and nothing is exchanged.

    It costs time, and keeps 320 bytes a slot and step. It is for hundreds of steps rather than for a whole run. A model
    can be copied while it is watched (copies are not measured), but not pickled.

    Raises MisuseError if nothing of the model runs in FP8, if its FP8 layers are not of the native backend, or if they
    belong to several models.
    """

    def __init__(self, model: nn.Module, every: int = 0) -> None:
        if every < 0:
            fix = "0 measures the steps that the run samples, 1 measures all"
            raise MisuseError(Problem(f"every={every} is negative", _WHERE, fix=fix))
        self._every = every
        self._layers = _native_layers(model)
        self._compiled = _compiled_modules(model)
        self._buffers = self._layers[0].slot_buffers
        self._handles: list[RemovableHandle] = []
        # By optimizer step (the buffers' `window`): float64 [slots, schemes, SUMS].
        self._sums: dict[int, Tensor] = {}
        # The step in which a slot was last measured. Of a weight the first cast of a step counts.
        self._last: dict[int, int] = {}
        self._in_bf16: set[int] = set()

    def __enter__(self) -> Self:
        if self._handles:
            fix = "leave the first `with` before the next"
            raise MisuseError(Problem("it is entered already", _WHERE, fix=fix))
        for layer in self._layers:
            if layer not in self._compiled:
                self._handles.append(self._watch(layer))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def report(self) -> Comparison:
        """What was measured so far. On a GPU it waits for the device."""
        # For each slot its losses in every measured step.
        by_slot: dict[int, list[list[Loss]]] = {}
        for sums in self._sums.values():
            for slot, losses in _losses(sums.cpu()).items():
                by_slot.setdefault(slot, []).append(losses)

        # Every slot of every layer has a row, or a reason why it has none.
        rows: list[SlotLosses] = []
        not_observed: dict[str, str] = {}
        names = self._buffers.names
        for layer in self._layers:
            for slot in range(layer.slot, layer.slot + len(ROLES)):
                if slot in by_slot:
                    in_bf16 = layer.slot in self._in_bf16
                    fmt = self._buffers.formats[slot]
                    rows.append(_slot_losses(names[slot], fmt, in_bf16, by_slot[slot]))
                else:
                    not_observed[names[slot]] = self._why_not(layer, slot)
        rows.sort(key=lambda row: (-max(row.gain_db.values()), row.slot))
        return Comparison(len(self._sums), tuple(rows), tuple(_gains(rows)), not_observed)

    def _watch(self, layer: NativeLayer) -> RemovableHandle:
        """Let a forward hook see every call of `layer`."""

        # A function is not copied with the layer: a deep copy of the model calls this one, which passes over copies.
        def called(
            module: NativeLayer, args: tuple[Any, ...], given: dict[str, Any], output: Any
        ) -> None:
            # The compiler traces hooks as well. A traced call has no values to measure.
            if torch.compiler.is_compiling() or module is not layer or not self._measures():
                return
            x = args[0] if args else given["input"]
            self._take(module, x, output)

        # Before all other hooks: one of them may replace the output.
        return layer.register_forward_hook(called, prepend=True, with_kwargs=True)

    def _measures(self) -> bool:
        """Whether a forward of now is measured."""
        if not self._buffers.active or not torch.is_grad_enabled():
            return False
        if self._every == 0:
            return self._buffers.sampling
        # The first step is window 1.
        return (self._buffers.window - 1) % self._every == 0

    def _take(self, layer: NativeLayer, x: Tensor, output: Tensor) -> None:
        """Measure what `layer` casts in this call: input and gradient are rounded to bfloat16 before, as there."""
        if not x.is_floating_point():
            return
        slot = layer.slot
        if layer.demoted:
            self._in_bf16.add(slot)
        self._add(slot, x.detach().to(torch.bfloat16))

        # The weight is cast once a step.
        measured = self._last.get(slot + 1) == self._buffers.window
        if not is_parametrized(layer) and not measured:
            self._add(slot + 1, layer.matrix().detach())

        # The gradient is there when backward reaches the output.
        if output.requires_grad:
            output.register_hook(lambda grad: self._add(slot + 2, grad.detach().to(torch.bfloat16)))

    @torch.no_grad()
    def _add(self, slot: int, x: Tensor) -> None:
        """Add up what every scheme loses of x [..., c], the tensor of `slot`."""
        # A backward may come after the watch was left.
        if not self._handles:
            return
        buffers = self._buffers
        window = buffers.window
        self._last[slot] = window
        if window not in self._sums:
            shape = (len(buffers.names), len(SCHEMES), scaling.SUMS)
            sums = torch.zeros(shape, dtype=torch.float64, device=buffers.device)
            self._sums[window] = sums
        if not x.numel():
            return
        rows = x.reshape(-1, x.shape[-1])
        fmt = buffers.formats[slot]
        in_use = buffers.scale[slot]
        for index, scheme in enumerate(SCHEMES):
            lost = cast_sums(scheme, rows, slot, fmt, in_use)
            self._sums[window][slot, index] += lost

    def _why_not(self, layer: NativeLayer, slot: int) -> str:
        """Why there are no figures of a slot."""
        role = ROLES[slot - layer.slot]
        if layer in self._compiled:
            return "torch.compile runs its layer, where no hook sees a tensor"
        if not self._sums:
            return "no step was measured"
        if slot in self._last:
            return "it held nothing but zeros, infinities and NaN"
        if role == "weight" and is_parametrized(layer):
            return "a parametrization computes it anew whenever it is looked at"
        if role == "grad_output" and layer.slot in self._last:
            return "no gradient reached it in a measured step"
        return "its layer was not called in a measured step"


def lines(comparison: Comparison, most: int = 20) -> list[str]:
    """The comparison as lines of text: the slots that gain most, the gains by role, and what was not observed.

    most: slots and names that are listed at most. Show the lines by `core.screen.say`.
    """
    if not comparison.slots:
        text = [f"other scalings: nothing was measured in {number_of(comparison.steps, 'step')}"]
        return text + _not_observed_lines(comparison.not_observed, most)

    steps = number_of(comparison.steps, "step")
    text = [
        f"Other scalings, measured on the tensors of {steps}: dB are per element (of gradients: per row), medians.",
        "delayed: its SQNR, the worst step, and the largest share flushed to zero; the others: gain over it",
        "",
    ]
    # One line for each slot. The comparison has those first that gain most.
    shown_slots = comparison.slots[:most]
    width = max(len(shown(row.slot)) for row in shown_slots)
    header = f"{'slot':<{width}}  delayed  worst  flushed"
    for scheme in OTHERS:
        header += f"  {scheme:>9}"
    text.append(header)
    for row in shown_slots:
        usual, worst = row.median[DELAYED], row.worst[DELAYED]
        slot = f"{shown(row.slot):<{width}}"
        line = f"{slot}  {_db(usual.even_db):>7}  {_db(worst.even_db):>5}"
        line += f"  {worst.underflow:>7.1%}"
        for scheme in OTHERS:
            line += f"  {_gain(row.gain_db[scheme]):>9}"
        text.append(line + ("  in BF16" if row.in_bf16 else ""))
    if len(comparison.slots) > most:
        text.append(f"and {len(comparison.slots) - most} slots that gain less")

    # One line for each role and scheme, over all slots of the role.
    text += [
        "",
        f"{'role':<11}  {'scheme':<9}  median gain  slots that gain {HELPS_DB:g} dB or more",
    ]
    for gain in comparison.gains:
        line = f"{gain.role:<11}  {gain.scheme:<9}  {_gain(gain.median_db):>11}"
        line += f"  {len(gain.helped)} of {gain.slots}"
        if gain.worse:
            line += f"; {len(gain.worse)} lose as much"
        text.append(line)
    if any(row.format != E4M3.name for row in comparison.slots):
        text.append(
            "About 6 dB of a gain on E5M2 tensors is the format: blocks are E4M3, with one more bit of mantissa."
        )
    return text + _not_observed_lines(comparison.not_observed, most)


def _not_observed_lines(not_observed: Mapping[str, str], most: int) -> list[str]:
    """One line for each reason, with the slots that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for name, why in not_observed.items():
        by_reason.setdefault(why, []).append(shown(name))
    text: list[str] = []
    for why, names in by_reason.items():
        text.append(f"not observed: {some(names, most)}: {why}")
    return text


def _db(value: float) -> str:
    return "exact" if value >= EXACT_DB else f"{value:.1f}"


def _gain(value: float) -> str:
    # Rounded first, and no -0.0.
    return f"{round(value, 1) + 0.0:+.1f}"


def _native_layers(model: nn.Module) -> list[NativeLayer]:
    """The FP8 layers of `model` in the order of their slots. Raises MisuseError if they cannot be watched."""
    found: list[NativeLayer] = []
    others: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, NativeLayer):
            # A deep copy records nothing, so it is no layer of the run.
            if not module.follows:
                found.append(module)
        elif any(kind.__module__.startswith(_BACKENDS) for kind in type(module).__mro__):
            others.append(f"{shown(name) or 'the model'} ({type(module).__name__})")

    problems: list[Problem] = []
    if others:
        what = f"FP8 layers that are not of the native backend: {some(others, 3)}"
        why = "the library chooses their scales, and there is no scale in use to compare with"
        fix = "measure it on the native backend: recipe fp8_hybrid on a CPU, or a recipe with the rung native:fp8"
        problems.append(Problem(what, _WHERE, why, fix))
    elif not found:
        what = "no layer of the model runs in FP8"
        fix = (
            "give the model that Precision.prepare or a plan has converted, under a recipe with FP8"
        )
        problems.append(Problem(what, _WHERE, fix=fix))
    # Layers of one Precision share their buffers.
    if len({id(layer.slot_buffers) for layer in found}) > 1:
        what = "the model has FP8 layers of several Precisions"
        problems.append(Problem(what, _WHERE, fix="give one of the models"))
    if problems:
        raise MisuseError(problems)
    return sorted(found, key=lambda layer: layer.slot)


def _compiled_modules(model: nn.Module) -> set[nn.Module]:
    """All modules that torch.compile runs: compiled ones, and what is in them."""
    found: set[nn.Module] = set()
    for module in model.modules():
        forward = vars(module).get("forward")
        is_compiled = (
            isinstance(module, OptimizedModule)
            or module._compiled_call_impl is not None
            or hasattr(forward, "_torchdynamo_orig_callable")
        )
        if is_compiled:
            found.update(module.modules())
    return found


def _losses(sums: Tensor) -> dict[int, list[Loss]]:
    """What each scheme lost in one step, by slot, for the slots that had values to lose.

    sums: float64 [slots, schemes, SUMS], on the CPU.
    """
    found: dict[int, list[Loss]] = {}
    for slot, by_scheme in enumerate(sums):
        # The same values are cast under every scheme: all have them, or none.
        nonzero, noise = by_scheme[:, 1], by_scheme[:, 4]
        if not nonzero.any():
            continue
        clipped, underflow, sqnr, even, _ = scaling.shares(by_scheme)
        # A cast without error has no ratio to its noise.
        sqnr = torch.where(noise > 0, sqnr, EXACT_DB).clamp_max(EXACT_DB)
        even = torch.where(noise > 0, even, EXACT_DB).clamp_max(EXACT_DB)
        columns = [column.tolist() for column in (sqnr, even, clipped, underflow)]
        found[slot] = [Loss(*figures) for figures in zip(*columns, strict=True)]
    return found


def _slot_losses(name: str, fmt: str, in_bf16: bool, steps: list[list[Loss]]) -> SlotLosses:
    """The figures of one slot over its steps. steps: for each, the losses in the order of SCHEMES."""
    medians: dict[str, Loss] = {}
    worst: dict[str, Loss] = {}
    gains: dict[str, float] = {}
    for index, scheme in enumerate(SCHEMES):
        losses = [step[index] for step in steps]
        medians[scheme] = _over(losses, median, median)
        worst[scheme] = _over(losses, min, max)
        if scheme != DELAYED:
            differences = [step[index].even_db - step[0].even_db for step in steps]
            gains[scheme] = median(differences)

    best = max(OTHERS, key=lambda scheme: gains[scheme])
    if gains[best] <= 0:
        best = DELAYED
    _, _, role = name.rpartition(".")
    return SlotLosses(name, role, fmt, len(steps), in_bf16, medians, worst, gains, best)


def _over(
    losses: list[Loss],
    of_db: Callable[[list[float]], float],
    of_share: Callable[[list[float]], float],
) -> Loss:
    return Loss(
        of_db([loss.sqnr_db for loss in losses]),
        of_db([loss.even_db for loss in losses]),
        of_share([loss.clipped for loss in losses]),
        of_share([loss.underflow for loss in losses]),
    )


def _gains(rows: list[SlotLosses]) -> list[SchemeGain]:
    """For each role and scheme. rows: of all slots."""
    found: list[SchemeGain] = []
    for role in ROLES:
        of_role = [row for row in rows if row.role == role]
        if not of_role:
            continue
        for scheme in OTHERS:
            # Of slots that gain, the largest gain is first; of those that lose, the largest loss.
            gains = {row.slot: row.gain_db[scheme] for row in of_role}
            by_gain = sorted(gains, key=lambda slot: gains[slot], reverse=True)
            helped = [slot for slot in by_gain if gains[slot] >= HELPS_DB]
            worse = [slot for slot in reversed(by_gain) if gains[slot] <= -HELPS_DB]
            middle = median(gains.values())
            found.append(SchemeGain(role, scheme, len(gains), middle, tuple(helped), tuple(worse)))
    return found
