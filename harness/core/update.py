"""The one update that ends every step, and the way of its facts to the host.

`finish_step` leads from a window's last backward to the step's facts. `run.train_step` and `harness.Precision.step`
both call it. `update` is the part that changes weights. It has five phases:

1. **Measure.** The loss and the global norm of the gradients say whether the update is sound. A NaN or an infinity in
   any gradient makes the norm non-finite, so one number checks all gradients.
2. **Gate.** Ranks must apply or skip an update together. Everything that they must agree on is packed into one small
   tensor: whether to skip, this rank's figures, and the amax of every FP8 slot. One all-reduce makes it the same on
   every rank. It takes the maximum: `skip` must be exactly 0.0 or 1.0, and a sum over two ranks would give 2.0.
3. **Unscale and clip.** Gradients are divided once, by `loss_scale * max(1, norm / max_norm)`. That undoes the loss
   scale and clips to `max_norm`.
4. **Apply.** The optimizer steps where `skip` is 0.0. Where it is 1.0, weights, moments and step counters stay
   bit-equal. `Gradients.apply` does it: for torch's optimizers with `gated_step`, for DeepSpeed's in
   `engines/deepspeed.py`.
5. **Roll.** The FP8 scales of the next window follow from the amaxes of this one. They too stay as they are in a
   skipped step.

With fused optimizers nothing here reads a value from the device. A read such as `skip.item()` makes the host wait until
the GPU has done all of its queued work, and the GPU then idles while the host queues more. So `skip` stays a tensor.
Fused Adam, AdamW, SGD and Adagrad take it as `found_inf`, and the divisor as `grad_scale`, the way torch's GradScaler
drives them: the kernel itself reads the flag and returns before it touches anything. Any other optimizer costs one host
read a step. The figures go to the host as one copy (`InFlight`) while the next step runs, and are judged one step
later.

Fused kernels write parameters without raising `Parameter._version`: do not key caches on it.
"""

from __future__ import annotations

import inspect
import math
import resource
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from harness.core.collectives import RankComparison, max_over_ranks, mean_over_ranks
from harness.core.facts import SLOT_ROWS, Limits, SlotStats, StepFacts, StepTerms
from harness.core.health import (
    GradHealth,
    by_device_and_dtype,
    grad_health,
    sum_of_squares,
    to_device,
)
from harness.core.layer_norms import LayerNorms
from harness.core.metrics import REDUCED, SCALARS, read
from harness.core.protocols import LAYER_NORMS, NO_LIMITS, Gradients, PrecisionBackend
from harness.core.sharded import LocalRows, local_of


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's kernel reads the skip flag itself, so that a step needs no host read."""
    claims_to = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    # A step that asks a GradScaler for the flag would never see ours.
    return claims_to and not _asks_a_scaler(type(optimizer))


@cache
def _asks_a_scaler(kind: type[torch.optim.Optimizer]) -> bool:
    return "grad_scaler" in inspect.signature(kind.step).parameters


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that Adam, AdamW and SGD would make lazily in their first step, as zeros.

    The first step would start from zeros as well (for SGD only with dampening 0; with dampening nothing is made). So a
    skipped first step leaves the state that an applied one starts from. Without this, a skipped first step of fused SGD
    would leave uninitialised memory as its momentum. Other optimizers are left alone.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            if state or not param.requires_grad:
                continue
            if isinstance(optimizer, torch.optim.Adam):
                _init_adam_state(state, param, group)
            elif isinstance(optimizer, torch.optim.SGD) and _starts_from_zero_momentum(group):
                state["momentum_buffer"] = torch.zeros_like(param, requires_grad=False)


def _starts_from_zero_momentum(group: Mapping[str, Any]) -> bool:
    return group["momentum"] != 0 and group["dampening"] == 0


def _init_adam_state(
    state: dict[str, Tensor],
    param: Tensor,
    group: Mapping[str, Any],
) -> None:
    """Fill `state` as the first step of Adam or AdamW would."""
    on_device = group["fused"] or group["capturable"]
    device = param.device if on_device else "cpu"
    state["step"] = torch.zeros((), dtype=torch.float32, device=device)
    state["exp_avg"] = torch.zeros_like(param, requires_grad=False)
    state["exp_avg_sq"] = torch.zeros_like(param, requires_grad=False)
    if group["amsgrad"]:
        state["max_exp_avg_sq"] = torch.zeros_like(param, requires_grad=False)


def _momentum_missing(optimizer: torch.optim.Optimizer) -> bool:
    """Whether fused SGD is about to allocate momentum, which a skipped step would leave uninitialised."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    for group in optimizer.param_groups:
        if group["momentum"] == 0:
            continue
        for param in group["params"]:
            has_momentum = optimizer.state[param].get("momentum_buffer") is not None
            if param.grad is not None and not has_momentum:
                return True
    return False


@torch.no_grad()
def gated_step(optimizer: torch.optim.Optimizer, skip: Tensor, divisor: Tensor) -> None:
    """`optimizer.step()` with gradients divided by `divisor`, only if `skip` is 0.0.

    skip: fp32 0-d, exactly 0.0 or 1.0. Any other value would apply the update and run the step counter backwards.
    divisor: fp32 0-d, see `clip_divisor`.
    Both are on the parameters' device.

    Gradients may be overwritten. After a skipped step weights, moments and step counters are bit-equal to what they
    were. State that torch makes lazily may appear, as zeros. No host read if `takes_found_inf(optimizer)`; else one.
    """
    # The fast way: the kernel reads both tensors on the device.
    if takes_found_inf(optimizer) and not _momentum_missing(optimizer):
        optimizer.found_inf = skip  # type: ignore[attr-defined]
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
        return

    # Any other optimizer: the host reads the flag, divides the gradients and steps.
    if skip.item():
        return
    gradients: list[Tensor] = []
    for group in optimizer.param_groups:
        found = [param.grad for param in group["params"]]
        gradients += [local_of(grad) for grad in found if grad is not None]
    # One operation divides all gradients of a device and dtype.
    for alike in by_device_and_dtype(gradients):
        torch._foreach_div_(alike, divisor.to(alike[0].device))
    optimizer.step()


def clip_divisor(norm: Tensor, max_norm: float, loss_scale: Tensor) -> Tensor:
    """What to divide scaled gradients by, so that they come out unscaled and with a norm of at most `max_norm`.

    norm: fp32 0-d, of the unscaled gradients.
    loss_scale: fp32 0-d.

    Returns loss_scale * max(1, norm / max_norm), fp32 0-d.
    """
    return loss_scale * torch.clamp(norm / max_norm, min=1.0)


class DynamicLossScale(Protocol):
    """A loss scale that lives on the device."""

    value: Tensor

    def update(self, overflow: Tensor, skip: Tensor) -> None:
        """Grow or back off, once per step. overflow, skip: fp32 0-d, 0.0 or 1.0."""
        ...


class TorchGradients:
    """Gradients that plain torch optimizers own: of one process, or averaged by DistributedDataParallel or FSDP2.

    parameters: whose gradients these are, each once.
    weights: whose norm is measured; None: `parameters`.
    max_norm: clip to this global L2 norm; infinity: do not clip.
    named: the model's weights by name, for their gradients' norms by layer; None: those are never asked for.
    overflow: only where gradients were already divided by the loss scale on their way. fp32 0-d, over 0 if a gradient
        was not finite before that division. The norm is then reported as infinite, whatever the gradients hold now.

    The reported learning rate is that of the first group of parameters, NaN where it has none.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Iterable[torch.nn.Parameter],
        max_norm: float,
        loss_scale: DynamicLossScale | None,
        device: torch.device,
        overflow: Tensor | None = None,
        weights: Iterable[torch.nn.Parameter] | None = None,
        local: LocalRows | None = None,
        named: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self.device = device
        self._local = local
        self._optimizers = optimizers
        self._parameters = list(parameters)
        weights = self._parameters if weights is None else weights
        self._weights = [weight for weight in weights if weight.requires_grad]
        self._max_norm = max_norm
        self._loss_scale = loss_scale
        self._overflow = overflow
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._named = named or {}
        self._layer_norms: LayerNorms | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """As `Gradients.layers`."""
        return self._by_layer.layers

    @property
    def _by_layer(self) -> LayerNorms:
        # Made for the first hunt: most runs have none.
        if self._layer_norms is None:
            self._layer_norms = LayerNorms(self._named)
        return self._layer_norms

    def with_gradient(self, weights: Mapping[str, Tensor]) -> tuple[str, ...]:
        """As `Gradients.with_gradient`; reads no values."""
        return tuple(name for name, weight in weights.items() if weight.grad is not None)

    def measure(self, thorough: bool, hunts: bool) -> dict[str, Tensor]:
        """As `Gradients.measure`; the shares are of scaled gradients, and NaN without a loss scale."""
        if self._local is not None:
            self._local.take_gradients()

        # A copy: `apply` moves the scale, and the step reports the one that its gradients were computed with.
        loss_scale = self._one
        if self._loss_scale is not None:
            loss_scale = self._loss_scale.value.clone()
        divided_by = None if self._overflow is None else loss_scale
        wants_shares = thorough and self._loss_scale is not None
        health = grad_health(self._parameters, wants_shares, divided_by)

        # Gradients, weights and layers in one sum over ranks.
        pieces = [health.sums.to(self.device)]
        if thorough:
            squares = sum_of_squares(weight.detach() for weight in self._weights)
            pieces.append(squares.to(self.device).reshape(1))
        if hunts:
            pieces.append(self._layer_squares())
        sums = self.sum(torch.cat(pieces))
        # The first five are `GradHealth.sums`, the sixth is of the weights, and the last ones are of the layers.
        health = GradHealth(sums[:5])

        figures = {
            "grad_norm": self._unscaled(health.norm, loss_scale),
            "loss_scale": loss_scale,
            "grad_zeros": health.zeros,
            "grad_near_limit": health.near_limit,
        }
        if thorough:
            figures["param_norm"] = sums[5].sqrt().float()
        if hunts:
            of_layers = sums[len(sums) - len(self.layers) :]
            norms = of_layers.sqrt().float()
            # Where gradients were divided on their way, they have the true size already.
            figures[LAYER_NORMS] = norms if self._overflow is not None else norms / loss_scale
        if self._local is not None:
            figures["other_calls"] = (~self._local.same_order).float()
        return figures

    def _layer_squares(self) -> Tensor:
        """Squares of the gradients as they are, by layer, of the weights that count on this rank: fp64 [layers]."""
        counted = self._named.values()
        if self._local is not None:
            counted = self._local.counted()
        return self._by_layer.squares(counted, self.device)

    def _unscaled(self, norm: Tensor, loss_scale: Tensor) -> Tensor:
        """The norm of the true gradients; norm: of the gradients as they are."""
        if self._overflow is None:
            return norm / loss_scale
        # Divided already. What overflowed before that may look finite by now.
        return torch.where(self._overflow > 0, math.inf, norm)

    def sum(self, values: Tensor) -> Tensor:
        """What each rank measured of its rows, summed over ranks: fp64, the same bits on each.

        Where every rank holds all gradients, `values` are what they are.
        """
        return values if self._local is None else self._local.sum(values)

    def max_(self, values: Tensor) -> Tensor:
        """As `Gradients.max_`."""
        return max_over_ranks(values)

    def mean(self, values: Tensor) -> Tensor:
        """As `Gradients.mean`."""
        return mean_over_ranks(values)

    def apply(
        self,
        skip: Tensor,
        overflow: Tensor,
        norm: Tensor,
        clip: float,
    ) -> dict[str, Tensor]:
        """As `Gradients.apply`. Gradients may be overwritten, and stay until the caller zeroes them."""
        # What still has to be divided out: nothing where the gradients were divided on their way.
        loss_scale = self._one
        if self._loss_scale is not None and self._overflow is None:
            loss_scale = self._loss_scale.value

        # One division does both: it unscales and, where there is a limit, clips.
        limit = min(self._max_norm, clip)
        divisor = loss_scale
        if math.isfinite(limit):
            divisor = clip_divisor(norm, limit, loss_scale)
        for optimizer in self._optimizers:
            gated_step(optimizer, skip, divisor)
        if self._loss_scale is not None:
            self._loss_scale.update(overflow, skip)
        return {"applied": 1.0 - skip, "lr": self._learning_rate(skip)}

    def _learning_rate(self, like: Tensor) -> Tensor:
        """The first group's, of dtype and shape of `like`; some optimizers find their own rate, and keep none."""
        lr = self._optimizers[0].param_groups[0].get("lr")
        if lr is None:
            lr = math.nan
        # A copy: the schedule writes into the tensor before the host has read this step's figures.
        if isinstance(lr, Tensor):
            return to_device(lr.clone(), self.device)
        return torch.full_like(like, lr).to(self.device)


@torch.no_grad()
def update(
    gradients: Gradients,
    backend: PrecisionBackend,
    own: Mapping[str, float | Tensor],
    limits: Limits = NO_LIMITS,
    thorough: bool = False,
    hunts: bool = False,
) -> tuple[dict[str, Tensor], Tensor]:
    """Gate, unscale, clip, apply and roll: the end of a window, the same for every loop and engine.

    own: what this rank measured, by the names of StepFacts; what is missing was not measured. Numbers of the host or
        fp32 0-d. `loss` is already the mean over ranks.
    limits: the update is skipped where loss or norm is over them.
    thorough, hunts: see `Gradients.measure`.

    The update is applied unless, on any rank, loss or gradient norm is not finite or over `limits`, or the window's
    samples are unfit (`bad_data`). No value is read on the host, unless the owner of the gradients says that it does.

    Returns every figure of the step by name, fp32 on the device, and what `PrecisionBackend.end_window` gave. Figures
    are 0-d, but LAYER_NORMS are [layers].
    """
    # Measure what this rank can judge by itself.
    measured = gradients.measure(thorough, hunts)
    own = {**own, **measured}
    figures = _not_reduced(own, gradients.device)
    loss, norm = figures["loss"], figures["grad_norm"]
    overflow = ~torch.isfinite(norm)
    # "Not at most" rather than "over": a NaN is over every limit.
    bad_loss = ~(loss <= limits.loss) | ~torch.isfinite(loss)
    over = bad_loss | overflow | (norm > limits.norm)

    # Agree, in the one MAX over ranks: the flags, this rank's figures, and the window's amax of every slot.
    flags = torch.stack([over | bool(own.get("bad_data")), overflow]).float()
    local = _pack_local(own, gradients.device)
    amax = backend.amax()
    reduced = gradients.max_(torch.cat([flags, local, amax]))
    flags, local, amax = reduced.split([len(flags), len(local), len(amax)])
    skip, overflow = flags[0].clone(), flags[1].clone()
    figures |= _unpack_reduced(local)

    # Weights first, then the scales: both stay as they are in a skipped step.
    figures |= gradients.apply(skip, overflow, norm, limits.clip)
    slots = backend.end_window(amax, 1.0 - figures["applied"], gradients.mean)
    figures["scrubbed"] = backend.scrubbed()
    return figures, slots


def _not_reduced(own: Mapping[str, float | Tensor], device: torch.device) -> dict[str, Tensor]:
    """Figures that are the same on all ranks, each as a tensor: a number of the host becomes fp32 0-d on `device`."""
    reduced = {name for name, _ in REDUCED}
    figures: dict[str, Tensor] = {}
    for name, value in own.items():
        if name in reduced:
            continue
        if not isinstance(value, Tensor):
            value = to_device(torch.tensor(value, dtype=torch.float32, device="cpu"), device)
        figures[name] = value
    return figures


def _pack_local(own: Mapping[str, float | Tensor], device: torch.device) -> Tensor:
    """This rank's figures for the MAX over ranks, fp32 [REDUCED]: -inf for what was not measured.

    A minimum is the negated maximum of negated values. A mask of bits takes one place for each bit: the maximum of each
    bit is their "or".
    """
    on_host = [-math.inf] * len(REDUCED)
    on_device: dict[int, Tensor] = {}
    for place, (name, bit) in enumerate(REDUCED):
        value = own.get(name)
        over_ranks = SCALARS[name].over_ranks
        if value is None:
            continue
        if isinstance(value, Tensor):
            signed = -value if over_ranks == "min" else value
            # NaN is not defined under MAX; as infinity it is kept.
            on_device[place] = torch.nan_to_num(signed, nan=math.inf, posinf=math.inf)
        elif math.isnan(value):
            # A number of the host is NaN where it was not measured, such as the memory of a GPU that was not used.
            continue
        elif over_ranks == "any bit":
            on_host[place] = float(int(value) >> bit & 1)
        elif over_ranks == "min":
            on_host[place] = -value
        else:
            on_host[place] = value

    # One copy for all numbers of the host; tensors that are on the device already follow there.
    local = to_device(torch.tensor(on_host, dtype=torch.float32, device="cpu"), device)
    for place, value in on_device.items():
        local[place] = value
    return local


def _unpack_reduced(reduced: Tensor) -> dict[str, Tensor]:
    """Figures by name of what `_pack_local` gave, reduced; NaN for what no rank measured."""
    values = torch.where(reduced == -math.inf, math.nan, reduced)
    figures: dict[str, Tensor] = {}
    for place, (name, bit) in enumerate(REDUCED):
        over_ranks = SCALARS[name].over_ranks
        if over_ranks == "min":
            figures[name] = -values[place]
        elif over_ranks == "any bit" and bit:
            figures[name] = figures[name] + values[place] * 2**bit
        else:
            figures[name] = values[place]
    return figures


class WindowBuffers:
    """Persistent buffers of a model, such as BatchNorm's running means, as they were before the window.

    A forward pass writes them before it is known whether the window is fit. A NaN in one batch would stay in a running
    mean for good, where training never reads it and evaluation does. So `settle` restores them after a skipped update.
    Buffers that are registered after this object was made are not covered.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[nn.Module, str]] = []
        for module in model.modules():
            for name in module._buffers:
                if name not in module._non_persistent_buffers_set:
                    self._places.append((module, name))
        self._before: list[Tensor | None] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Before a forward that may write them; only a window's first call counts."""
        if self._before:
            return
        for module, name in self._places:
            buffer = module._buffers.get(name)
            self._before.append(None if buffer is None else buffer.detach().clone())

    def drop(self) -> None:
        """The window is over: what is there now stays."""
        self._before = []

    @torch.no_grad()
    def settle(self, applied: Tensor) -> None:
        """After the update: unless it was applied, the buffers become what they were before the window.

        applied: fp32 0-d, 1.0 or 0.0; not read on the host. A buffer that was replaced by one of another shape stays.
        """
        places = self._places if self._before else ()
        for (module, name), before in zip(places, self._before, strict=True):
            now = module._buffers.get(name)
            if now is None or before is None or now.shape != before.shape:
                continue
            # An expanded buffer has no memory of its own to write to.
            if 0 in now.stride():
                continue
            before = before.to(now.device, now.dtype)
            keeps = (applied > 0).to(now.device)
            now.copy_(torch.where(keeps, now, before))
        self.drop()


def peak_memory(device: torch.device) -> float:
    """Largest memory of this process so far, GiB: what torch allocated on a GPU, or all of it (resident) on a CPU.

    Costs microseconds, and asks the device for nothing. NaN on a GPU that has not allocated anything.
    """
    if device.type == "cuda":
        allocated = torch.cuda.memory_stats_as_nested_dict(device).get("allocated_bytes", {})
        return allocated.get("all", {}).get("peak", math.nan) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts kibibytes


class StepClock:
    """Times one step: by events on a GPU's own stream, by the wall on a CPU (where a step ends when it returns)."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._started = time.perf_counter()
        self._ended = self._started
        if self._events:
            self._events[0].record()

    def stop(self) -> None:
        """The step's last work, the copy to the host included, has been queued."""
        self._ended = time.perf_counter()
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        """Duration of the step; waits until it is over."""
        if self._events:
            self._events[1].synchronize()
            return self._events[0].elapsed_time(self._events[1]) / 1000
        return self._ended - self._started


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step's facts on their way to the host: one packed float32 copy, made while the next step already runs.

    packed: one figure for each of SCALARS, then [SLOT_ROWS, slots] row by row, then the gradient norm of each of
        `layers`, then for each parameter in `compared` 1.0 if it differs between ranks and 0.0 if not.
    clock: knows when the copy has arrived and how long the step took; None for facts that were restored.
    slot_names, layers, compared: names of the slots, layers and parameters in `packed`.

    Other fields as in StepFacts.
    """

    step: int
    window: int
    packed: Tensor
    clock: StepClock | None
    slot_names: tuple[str, ...]
    tokens: int = 0
    demoted: tuple[str, ...] = ()
    fell_back_to: str = ""
    trained: tuple[str, ...] = ()
    limits: Limits = NO_LIMITS
    layers: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()
    ideal_seconds: float = math.nan

    @classmethod
    def send(
        cls,
        figures: Mapping[str, Tensor],
        slots: Tensor,
        clock: StepClock,
        differs: Tensor | None = None,
        **more: Any,
    ) -> InFlight:
        """Queue the copy of what `update` returned, without waiting.

        differs: float32 [n], as `RankComparison.after` gave it; None: nothing was compared.
        more: the other fields, by name.
        """
        not_measured = slots.new_full((), math.nan)
        scalars: list[Tensor] = []
        for name in SCALARS:
            figure = figures.get(name, not_measured)
            scalars.append(figure.float().reshape(()))
        # One tensor, so that one copy takes everything to the host.
        pieces = [torch.stack(scalars), slots.flatten()]
        if LAYER_NORMS in figures:
            pieces.append(figures[LAYER_NORMS])
        if differs is not None:
            pieces.append(differs)
        packed = torch.cat(pieces).to("cpu", non_blocking=True)
        clock.stop()
        return cls(packed=packed, clock=clock, **more)

    def arrived(self) -> Tensor:
        """`packed`; waits until the step is over."""
        if self.clock is not None:
            self.clock.seconds()
        return self.packed

    def facts(self) -> StepFacts:
        """The step's facts; waits until it is over."""
        packed = self.arrived()
        slot_values = len(SLOT_ROWS) * len(self.slot_names)
        lengths = [len(SCALARS), slot_values, len(self.layers), len(self.compared)]
        scalars, by_slot, by_layer, differs = packed.split(lengths)

        # The figures of the whole step, and those of each slot.
        values = read(scalars.tolist())
        scrubbed = values.pop("scrubbed")
        slots = None
        if self.slot_names:
            table = by_slot.reshape(len(SLOT_ROWS), -1).numpy()
            rows = dict(zip(SLOT_ROWS, table, strict=True))
            slots = SlotStats(self.slot_names, **rows, scrubbed=scrubbed)

        diverged: list[str] = []
        for name, flag in zip(self.compared, differs.tolist(), strict=True):
            if flag:
                diverged.append(name)

        # A step that was restored from a checkpoint has no clock.
        seconds = 0.0
        if self.clock is not None:
            seconds = self.clock.seconds()
        return StepFacts(
            step=self.step,
            window=self.window,
            tokens=self.tokens,
            seconds=seconds,
            demoted=self.demoted,
            fell_back_to=self.fell_back_to,
            trained=self.trained,
            limits=self.limits,
            ideal_seconds=self.ideal_seconds,
            slots=slots,
            layer_norms=dict(zip(self.layers, by_layer.tolist(), strict=True)),
            diverged=tuple(diverged),
            **values,
        )


@torch.no_grad()
def finish_step(
    gradients: Gradients,
    backend: PrecisionBackend,
    own: Mapping[str, float | Tensor],
    terms: StepTerms,
    comparison: RankComparison | None,
    clock: StepClock,
    *,
    fp8_weights: Mapping[str, Tensor],
    window: int,
    tokens: int,
    ideal_seconds: float = math.nan,
) -> tuple[dict[str, Tensor], InFlight]:
    """From a window's last backward to its facts on their way to the host.

    own: as for `update`.
    comparison: of the ranks' weights; None where there is nothing to compare.
    clock: started with the window.
    fp8_weights: see `Plan.fp8_weights`.
    window, tokens, ideal_seconds: as in StepFacts.

    Collective. Nothing is read on the host but what `update` reads.

    Returns the step's figures as `update` does, and the facts.
    """
    # Which FP8 weights got a gradient. Asked before the update, in which engines drop the gradients.
    trained: tuple[str, ...] = ()
    if terms.step == 1:
        trained = gradients.with_gradient(fp8_weights)

    # Gate, clip and apply, or leave everything as it was; then the scales roll.
    figures, slots = update(gradients, backend, own, terms.limits, terms.measures, terms.hunts)
    layers = gradients.layers if LAYER_NORMS in figures else ()

    # Ranks that drifted apart show in the weights after the update.
    compared: tuple[str, ...] = ()
    differs: Tensor | None = None
    if comparison is not None:
        compared, differs = comparison.after(terms.step)

    # The copy to the host runs beside the next step; its judge reads it one step later.
    facts = InFlight.send(
        figures,
        slots,
        clock,
        differs,
        step=terms.step,
        window=window,
        tokens=tokens,
        demoted=backend.demoted,
        fell_back_to=backend.fell_back_to,
        trained=trained,
        limits=terms.limits,
        slot_names=backend.slot_names,
        layers=layers,
        compared=compared,
        ideal_seconds=ideal_seconds,
    )
    return figures, facts
