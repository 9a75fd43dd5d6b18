"""The end of a step: gate, unscale, clip, apply, roll the scales, and send the facts to the host.

`finish_step` is the one way from a window's last backward to its facts, for `run.train_step` and for
`harness.Precision.step` alike; `update` is the part of it that changes weights.

The host does not read the verdict: an update is applied, or leaves everything bit-equal, on the device. Fused Adam,
AdamW, SGD and Adagrad take `found_inf` and `grad_scale` tensors, the way torch's GradScaler drives them:
the kernel itself reads the flag and returns before touching weights or moments. Every other optimizer costs one host
read a step. Fused kernels write parameters without bumping `Parameter._version`: do not key caches on it.
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
from harness.core.health import by_device_and_dtype, grad_health, l2_norm
from harness.core.metrics import REDUCED, SCALARS, read
from harness.core.protocols import NO_LIMITS, Gradients, PrecisionBackend


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's kernel reads the skip flag itself, so that a step needs no host read.

    One whose step asks GradScaler itself for the flag would never see ours.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and not _asks_a_scaler(
        type(optimizer)
    )


@cache
def _asks_a_scaler(kind: type[torch.optim.Optimizer]) -> bool:
    return "grad_scaler" in inspect.signature(kind.step).parameters


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that Adam, AdamW and SGD would make lazily in their first step, as zeros.

    Zeros are what the first step starts from (for SGD only with dampening 0; with dampening nothing is made). A
    skipped first step then leaves the same state as an applied one starts from: fused SGD would otherwise keep
    uninitialised memory as its momentum. Other optimizers are left alone.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            if state or not param.requires_grad:
                continue
            if isinstance(optimizer, torch.optim.Adam):
                on_device = group["fused"] or group["capturable"]
                state["step"] = torch.zeros(
                    (), dtype=torch.float32, device=param.device if on_device else "cpu"
                )
                state["exp_avg"] = torch.zeros_like(param, requires_grad=False)
                state["exp_avg_sq"] = torch.zeros_like(param, requires_grad=False)
                if group["amsgrad"]:
                    state["max_exp_avg_sq"] = torch.zeros_like(param, requires_grad=False)
            elif (
                isinstance(optimizer, torch.optim.SGD)
                and group["momentum"] != 0
                and group["dampening"] == 0
            ):
                state["momentum_buffer"] = torch.zeros_like(param, requires_grad=False)


def _momentum_missing(optimizer: torch.optim.Optimizer) -> bool:
    """Whether fused SGD is about to allocate momentum that a skipped step would leave uninitialised."""
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["momentum"] != 0
        and param.grad is not None
        and optimizer.state[param].get("momentum_buffer") is None
        for group in optimizer.param_groups
        for param in group["params"]
    )


@torch.no_grad()
def gated_step(optimizer: torch.optim.Optimizer, skip: Tensor, divisor: Tensor) -> None:
    """`optimizer.step()` with gradients divided by `divisor`, only if `skip` is 0.0.

    skip: fp32 0-d, exactly 0.0 or 1.0 (any other value would apply the update and run the step counter backwards).
    divisor: fp32 0-d, see `clip_divisor`. Both on the parameters' device. Gradients may be overwritten. After a
    skipped step weights, moments and step counters are bit-equal to what they were (state that torch makes lazily
    may appear, as zeros). No host read if `takes_found_inf(optimizer)`; else one.
    """
    if takes_found_inf(optimizer) and not _momentum_missing(optimizer):
        optimizer.found_inf = skip  # type: ignore[attr-defined]
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
    elif not skip.item():
        params = (param for group in optimizer.param_groups for param in group["params"])
        for gradients in by_device_and_dtype(
            param.grad for param in params if param.grad is not None
        ):
            torch._foreach_div_(gradients, divisor.to(gradients[0].device))
        optimizer.step()


def clip_divisor(norm: Tensor, max_norm: float, loss_scale: Tensor) -> Tensor:
    """What to divide scaled gradients by, so that they come out unscaled and with a norm of at most `max_norm`.

    norm: fp32 0-d, of the unscaled gradients. loss_scale: fp32 0-d. Returns fp32 0-d
    loss_scale * max(1, norm / max_norm).
    """
    return loss_scale * torch.clamp(norm / max_norm, min=1.0)


class DynamicLossScale(Protocol):
    """A loss scale that lives on the device."""

    value: Tensor

    def update(self, overflow: Tensor, skip: Tensor) -> None:
        """Grow or back off, once per step. overflow, skip: fp32 0-d, 0.0 or 1.0."""
        ...


class TorchGradients:
    """Gradients that plain torch optimizers own: of one process, or averaged by DistributedDataParallel.

    parameters: each once. max_norm: clip to this global L2 norm; infinity: do not clip. The learning rate that is told
    is that of the first group of parameters, NaN where it has none. overflow: where gradients were divided by the loss
    scale on their way already, fp32 0-d, over 0 if one was not finite before that; the norm is infinite then, whatever
    was made of the gradients since.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Iterable[torch.nn.Parameter],
        max_norm: float,
        loss_scale: DynamicLossScale | None,
        device: torch.device,
        overflow: Tensor | None = None,
    ) -> None:
        self.device = device
        self._optimizers, self._parameters = optimizers, list(parameters)
        self._max_norm, self._loss_scale, self._overflow = max_norm, loss_scale, overflow
        self._one = torch.ones((), dtype=torch.float32, device=device)

    def measure(self, shares: bool) -> dict[str, Tensor]:
        """As `Gradients.measure`; the shares are of scaled gradients, and NaN without a loss scale."""
        loss_scale = self._one if self._loss_scale is None else self._loss_scale.value.clone()
        true = self._overflow is not None
        shared = shares and self._loss_scale is not None
        health = grad_health(self._parameters, shared, divided_by=loss_scale if true else None)
        norm = health.norm.to(self.device)
        norm = (
            torch.where(self._overflow > 0, math.inf, norm)
            if self._overflow is not None
            else norm / loss_scale
        )
        return {
            "grad_norm": norm,
            "loss_scale": loss_scale,
            "grad_zeros": health.zeros,
            "grad_near_limit": health.near_limit,
        }

    def max_(self, values: Tensor) -> Tensor:
        """As `Gradients.max_`."""
        return max_over_ranks(values)

    def mean(self, values: Tensor) -> Tensor:
        """As `Gradients.mean`."""
        return mean_over_ranks(values)

    def apply(self, skip: Tensor, overflow: Tensor, norm: Tensor, clip: float) -> dict[str, Tensor]:
        """As `Gradients.apply`. Gradients may be overwritten, and stay until the caller zeroes them."""
        scaled = self._loss_scale is not None and self._overflow is None
        loss_scale = self._loss_scale.value if scaled and self._loss_scale else self._one
        limit = min(self._max_norm, clip)
        divisor = clip_divisor(norm, limit, loss_scale) if math.isfinite(limit) else loss_scale
        for optimizer in self._optimizers:
            gated_step(optimizer, skip, divisor)
        if self._loss_scale is not None:
            self._loss_scale.update(overflow, skip)
        lr = self._optimizers[0].param_groups[0].get("lr")
        lr = math.nan if lr is None else lr  # some find their own rate, and keep none
        lr = lr.clone() if isinstance(lr, Tensor) else torch.full_like(skip, lr)
        return {"applied": 1.0 - skip, "lr": lr.to(self.device)}


@torch.no_grad()
def update(
    gradients: Gradients,
    backend: PrecisionBackend,
    own: Mapping[str, float | Tensor],
    limits: Limits = NO_LIMITS,
    shares: bool = False,
) -> tuple[dict[str, Tensor], Tensor]:
    """Gate, unscale, clip, apply and roll: the end of a window, the same for every loop and engine.

    own: what this rank measured, by the names of StepFacts; `loss`, fp32 0-d, is the mean over ranks already, what is
    missing was not measured. The update is applied unless, on any rank, loss or gradient norm is not finite or over
    `limits`, or the window's samples are unfit (`bad_data`). shares: see `Gradients.measure`. Nothing is read on the
    host but by owners that say so.

    Returns every figure of the step by name, fp32 0-d on the device, and what `PrecisionBackend.end_window` gave.
    """
    figures = {**own, **gradients.measure(shares)}
    loss, norm = figures["loss"], figures["grad_norm"]
    assert isinstance(loss, Tensor)
    overflow = ~torch.isfinite(norm)
    over = (
        ~(loss <= limits.loss) | ~torch.isfinite(loss) | overflow | (norm > limits.norm)
    )  # NaN is over every limit
    local = _pack_local(own, gradients.device)
    flags = torch.stack([over | bool(own.get("bad_data")), overflow]).float()

    # The one MAX over ranks: flags, this rank's figures, and the window's amax of every slot.
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


def _with_gradient(weights: Mapping[str, Tensor], step: int) -> tuple[str, ...]:
    """Names of the weights that got a gradient in the window of `step`, if that is a run's first; reads no values."""
    return tuple(name for name, weight in weights.items() if step == 1 and weight.grad is not None)


def _pack_local(own: Mapping[str, float | Tensor], device: torch.device) -> Tensor:
    """This rank's figures for the MAX over ranks, fp32 [REDUCED]: -inf for what was not measured."""
    values = [-math.inf] * len(REDUCED)
    late: dict[int, Tensor] = {}
    for place, (name, bit) in enumerate(REDUCED):
        value, over = own.get(name), SCALARS[name].over_ranks
        if isinstance(value, Tensor):
            late[place] = torch.nan_to_num(
                -value if over == "min" else value, nan=math.inf, posinf=math.inf
            )
        elif value is not None:
            values[place] = (
                float(int(value) >> bit & 1)
                if over == "any bit"
                else -value
                if over == "min"
                else value
            )
    local = to_device(torch.tensor(values, dtype=torch.float32), device)
    for place, value in late.items():
        local[place] = value
    return local


def _unpack_reduced(reduced: Tensor) -> dict[str, Tensor]:
    """Figures by name of what `_pack_local` gave, reduced; NaN for what no rank measured."""
    known = torch.where(reduced == -math.inf, math.nan, reduced)
    found: dict[str, Tensor] = {}
    for place, (name, bit) in enumerate(REDUCED):
        over = SCALARS[name].over_ranks
        if over == "any bit":
            found[name] = found[name] + known[place] * 2**bit if bit else known[place]
        else:
            found[name] = -known[place] if over == "min" else known[place]
    return found


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`. From pinned memory, so that the host need not wait until the copy is made."""
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.to(device)
    )


class WindowBuffers:
    """Persistent buffers of a model, such as BatchNorm's running means, as they were before the window.

    Forward writes them before anybody knows whether the window is fit: a NaN in one batch would stay in a running mean
    for good, where training never reads it and evaluation does. Those registered later are not known here.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name)
            for module in model.modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        self._before: list[Tensor | None] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Before a forward that may write them; only a window's first call counts."""
        if not self._before:
            found = (module._buffers.get(name) for module, name in self._places)
            self._before = [None if buffer is None else buffer.detach().clone() for buffer in found]

    def drop(self) -> None:
        """The window is over: what is there now stays."""
        self._before = []

    @torch.no_grad()
    def settle(self, applied: Tensor) -> None:
        """After the update: unless it was applied they are what they were. applied: fp32 0-d, 1.0 or 0.0; not read.

        One that was replaced by a tensor of another shape stays.
        """
        for (module, name), before in zip(
            self._places if self._before else (), self._before, strict=True
        ):
            now = module._buffers.get(name)
            # An expanded one has no memory of its own to write to.
            if now is None or before is None or now.shape != before.shape or 0 in now.stride():
                continue
            now.copy_(
                torch.where((applied > 0).to(now.device), now, before.to(now.device, now.dtype))
            )
        self.drop()


def peak_memory(device: torch.device) -> float:
    """Largest memory of this process so far, GiB: what torch allocated on a GPU, or all of it (resident) on a CPU.

    Costs microseconds, and asks the device for nothing. NaN on a GPU that has not allocated anything.
    """
    if device.type == "cuda":
        found = (
            torch.cuda.memory_stats_as_nested_dict(device).get("allocated_bytes", {}).get("all", {})
        )
        return found.get("peak", math.nan) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts kibibytes


class StepClock:
    """Times one step: by events on a GPU's own stream, by the wall on a CPU (where a step ends when it returns)."""

    def __init__(self, device: torch.device) -> None:
        self._events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            if device.type == "cuda"
            else []
        )
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

    packed: one figure for each of SCALARS, then [SLOT_ROWS, slots] row by row, then 1.0 for each parameter in
    `compared` that differs between ranks and 0.0 for the others. clock: tells when it has arrived and how long the
    step took; None for facts that were restored. Other fields as in StepFacts.
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
        """Queue the copy of what `update` returned, without waiting. more: the other fields, by name."""
        unknown = slots.new_full((), math.nan)
        scalars = torch.stack([figures.get(name, unknown).float().reshape(()) for name in SCALARS])
        packed = torch.cat([scalars, slots.flatten(), *([] if differs is None else [differs])])
        packed = packed.to("cpu", non_blocking=True)
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
        count = len(SLOT_ROWS) * len(self.slot_names)
        scalars, of_slots, differs = packed.split([len(SCALARS), count, len(self.compared)])
        values = read(scalars.tolist())
        scrubbed = values.pop("scrubbed")
        slots = None
        if self.slot_names:
            rows = dict(zip(SLOT_ROWS, of_slots.reshape(len(SLOT_ROWS), -1).numpy(), strict=True))
            slots = SlotStats(self.slot_names, **rows, scrubbed=scrubbed)
        return StepFacts(
            step=self.step,
            window=self.window,
            tokens=self.tokens,
            seconds=self.clock.seconds() if self.clock is not None else 0.0,
            demoted=self.demoted,
            fell_back_to=self.fell_back_to,
            trained=self.trained,
            limits=self.limits,
            ideal_seconds=self.ideal_seconds,
            slots=slots,
            diverged=tuple(
                name for name, one in zip(self.compared, differs.tolist(), strict=True) if one
            ),
            **values,
        )


@torch.no_grad()
def finish_step(
    gradients: Gradients,
    backend: PrecisionBackend,
    parameters: Iterable[nn.Parameter],
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

    parameters: of the model, for its norm.
    own: as for `update`.
    comparison: of the ranks' weights; None where there is nothing to compare.
    clock: started with the window.
    fp8_weights: see `Plan.fp8_weights`.
    window, tokens, ideal_seconds: as in StepFacts.

    Collective. Nothing is read on the host but what `update` reads.

    Returns the step's figures by name, fp32 0-d on the device, and the facts.
    """
    # Norm of the weights that this window's gradients were computed with.
    if terms.measures:
        norm = l2_norm([parameter.detach() for parameter in parameters if parameter.requires_grad])
        own = {**own, "param_norm": norm}

    # Engines drop the gradients in the update.
    trained = _with_gradient(fp8_weights, terms.step)

    # Gate, clip and apply, or leave everything as it was; then the scales roll.
    figures, slots = update(gradients, backend, own, terms.limits, terms.measures)

    # Ranks that drifted apart show in the weights after the update.
    compared, differs = comparison.after(terms.step) if comparison is not None else ((), None)

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
        compared=compared,
        ideal_seconds=ideal_seconds,
    )
    return figures, facts
