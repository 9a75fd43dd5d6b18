"""The gated update: apply an optimizer step, or leave everything bit-equal, without the host reading the verdict.

Fused Adam, AdamW, SGD and Adagrad take `found_inf` and `grad_scale` tensors, the way torch's GradScaler drives them:
the kernel itself reads the flag and returns before touching weights or moments. Every other optimizer costs one host
read a step. Fused kernels write parameters without bumping `Parameter._version`: do not key caches on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.core.gradients import by_device_and_dtype


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's kernel reads the skip flag itself, so that a step needs no host read."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def materialise(optimizer: torch.optim.Optimizer) -> None:
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
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if on_device else "cpu")
                state["exp_avg"] = torch.zeros_like(param, requires_grad=False)
                state["exp_avg_sq"] = torch.zeros_like(param, requires_grad=False)
                if group["amsgrad"]:
                    state["max_exp_avg_sq"] = torch.zeros_like(param, requires_grad=False)
            elif isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0 and group["dampening"] == 0:
                state["momentum_buffer"] = torch.zeros_like(param, requires_grad=False)


def _momentum_missing(optimizer: torch.optim.Optimizer) -> bool:
    """Whether fused SGD is about to allocate momentum that a skipped step would leave uninitialised."""
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["momentum"] != 0 and param.grad is not None and optimizer.state[param].get("momentum_buffer") is None
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
        for gradients in by_device_and_dtype(param.grad for param in params if param.grad is not None):
            torch._foreach_div_(gradients, divisor.to(gradients[0].device))
        optimizer.step()


def clip_divisor(norm: Tensor, max_norm: float, loss_scale: Tensor) -> Tensor:
    """What to divide scaled gradients by, so that they come out unscaled and with a norm of at most `max_norm`.

    norm: fp32 0-d, of the unscaled gradients. loss_scale: fp32 0-d. Returns fp32 0-d
    loss_scale * max(1, norm / max_norm).
    """
    return loss_scale * torch.clamp(norm / max_norm, min=1.0)
