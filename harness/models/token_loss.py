"""Cross-entropy over a large vocabulary without a float32 copy of the logits.

The loss of a token with logits x and target t, and its gradient:

    loss      = log Z - x[t],  Z = sum(exp(x))
    d loss/dx = softmax(x) - onehot(t)

Both need float32, but only for as long as a row is worked on. Here a block of rows at a time is in float32
(`_BLOCK_ELEMENTS`). The logits and their gradient stay in the dtype of the head's GEMM. Rounding is as usual: the
logits once by the GEMM, their gradient once from float32.

- `sum_of_losses` takes logits. Its backward writes the gradient into a tensor of its own.
- `loss_of_head` takes the head's input and weight. It computes the logits of a chunk of tokens, overwrites them with
  their gradient, multiplies that into the gradients of input and weight, and goes on to the next chunk. So all three
  GEMMs of the head are in forward, and none is computed twice. Backward only multiplies by the gradient of the loss.
  `dtype_of_head` says for which heads.
- `loss_in_chunks` is for every other head. It calls the head for one chunk after the other, and backward does so again.

z_loss adds z_loss * (log Z)^2 to the gradient of a token, and nothing to its loss: d/dx = 2 z_loss log Z softmax(x).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from harness.core.facts import IGNORED

_BLOCK_ELEMENTS = 2**22
"""Logits that are in float32 at a time: 16 MiB, which an H100's L2 cache (50 MiB) holds while they are worked on."""


def sum_of_losses(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """Sum of the cross-entropies in nats, float32 0-d.

    logits: [tokens, vocab] of any float dtype; targets: int64 [tokens], -100 has no loss.
    """
    return _SumOfLosses.apply(logits, targets, z_loss)


def loss_of_head(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int, z_loss: float, dtype: torch.dtype
) -> Tensor:
    """Mean cross-entropy in nats of the logits x weight^T, float32 0-d.

    x: [tokens, dim]; weight: [vocab, dim]; targets: int64 [tokens], -100 has no loss.
    chunk: tokens whose logits are in memory at a time.
    dtype: that of the GEMMs. float16 loses small gradients: they are computed here before the loss scale is known.

    The weight's gradient is summed over chunks in float32. A second backward through the result raises RuntimeError.
    """
    # Autograd asks for gradients wherever a Parameter is trained, in an evaluation too.
    if not torch.is_grad_enabled():
        x, weight = x.detach(), weight.detach()
    return _LossOfHead.apply(x, weight, targets, chunk, z_loss, dtype)


def dtype_of_head(head: nn.Module, x: Tensor) -> torch.dtype | None:
    """The dtype in which `loss_of_head` computes what `head` would; None where it cannot stand for it.

    It can if the head is an nn.Linear without bias that nobody has replaced, and computes in float32 or bfloat16. This
    rank must hold the whole weight: a sharded one may be whole in the Linear's own forward alone. Under a compiler the
    head runs, as it is fused with the loss there. Hooks on the head do not see `loss_of_head`.

    x: what the head would be called with.
    """
    if type(head) is not nn.Linear or head.bias is not None:
        return None
    # A DTensor holds this rank's rows alone.
    weight = head.weight
    whole = isinstance(weight, nn.Parameter) and not hasattr(weight, "to_local")
    if not whole or torch.compiler.is_compiling():
        return None
    dtype = autocast_dtype(x.device.type)
    if dtype is None and x.dtype == weight.dtype:
        dtype = x.dtype
    return dtype if dtype in (torch.float32, torch.bfloat16) else None


def loss_in_chunks(
    share: Callable[[Tensor, Tensor, Tensor], Tensor],
    x: Tensor,
    targets: Tensor,
    counted: Tensor,
    chunk: int,
    random: bool = False,
) -> Tensor:
    """Mean cross-entropy with the logits of only `chunk` tokens at a time, float32 0-d. Backward computes them again.

    random: whether `share` may draw random numbers, see `draws`.
    share: from rows of `x`, their targets and `counted`: the sum of their losses divided by `counted`.
    x: [tokens, dim]; targets: int64 [tokens].
    counted: 0-d, the number of targets with a loss.
    """
    loss = torch.zeros((), dtype=torch.float32, device=x.device)

    # With autocast's cache, all chunks would share one copy of the weight in 16 bits. The gradients of the chunks would
    # then be added up in 16 bits.
    dtype = autocast_dtype(x.device.type)
    uncached: AbstractContextManager[Any] = nullcontext()
    if dtype:
        uncached = torch.autocast(x.device.type, dtype=dtype, cache_enabled=False)
    with uncached:
        for rows, labels in zip(x.split(chunk), targets.split(chunk), strict=True):
            if torch.is_grad_enabled():
                loss = loss + recomputed(share, rows, labels, counted, random=random)
            else:
                loss = loss + share(rows, labels, counted)
    return loss


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast casts to now; None where it is off, or where the device has none."""
    if not torch.amp.is_autocast_available(device_type):
        return None
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def recomputed(function: Any, *args: Any, random: bool = False) -> Any:
    """function(*args) under activation checkpointing: backward calls it again.

    random: whether the second call has to draw the random numbers of the first, see `draws`. It costs host time.
    """
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=random)


def draws(module: nn.Module) -> bool:
    """Whether a forward of `module` drops elements at random. Our models do not, but LoRA within them may."""
    return any(
        isinstance(each, _DropoutNd) and each.p and each.training for each in module.modules()
    )


class _SumOfLosses(torch.autograd.Function):
    """`sum_of_losses`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, z_loss: float) -> Tensor:
        ctx.z_loss = z_loss
        ctx.save_for_backward(logits, targets)
        return -_log_p_and_gradient(logits, targets).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, targets = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        _log_p_and_gradient(logits, targets, gradient, grad, ctx.z_loss)
        return gradient, None, None


class _LossOfHead(torch.autograd.Function):
    """`loss_of_head`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        z_loss: float,
        dtype: torch.dtype,
    ) -> Tensor:
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        counted = (targets != IGNORED).sum()
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        grad_x = torch.empty(x.shape, dtype=dtype, device=x.device) if wants_x else None
        grad_weight = None

        with _no_autocast(x.device.type):
            # Cast once for all chunks.
            matrix = weight.to(dtype)
            pieces = zip(x.split(chunk), targets.split(chunk), strict=True)
            for number, (part, labels) in enumerate(pieces):
                rows = part.to(dtype)
                logits = F.linear(rows, matrix)
                into = logits if wants_x or wants_weight else None
                total -= _log_p_and_gradient(logits, labels, into, z_loss=z_loss).sum()

                # The logits are their gradient now, not yet divided by the number of targets.
                if grad_x is not None:
                    first = number * chunk
                    torch.mm(logits, matrix, out=grad_x[first : first + chunk])
                if wants_weight:
                    product = logits.t() @ rows
                    if grad_weight is None:
                        grad_weight = product.float()
                    else:
                        grad_weight += product

        ctx.dtypes = x.dtype, weight.dtype
        ctx.save_for_backward(grad_x, grad_weight, counted)
        return total / counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_x, grad_weight, counted = ctx.saved_tensors
        # Without a target the loss is NaN and its gradient 0, as torch's.
        share = grad / counted.clamp(min=1)
        of_x, of_weight = ctx.dtypes
        if grad_x is not None:
            grad_x = (grad_x.float() * share).to(of_x)
        # In place: it is as large as the weight. Autograd refuses to use it a second time.
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(share).to(of_weight)
        return grad_x, grad_weight, None, None, None, None


def _log_p_and_gradient(
    logits: Tensor,
    targets: Tensor,
    into: Tensor | None = None,
    scale: Tensor | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """log p of each target, float32 [tokens]; 0 for targets without a loss.

    into: takes the gradient of the sum of losses by the logits, times `scale` (0-d; None: 1). It may be `logits`.
    """
    kept = targets != IGNORED
    # Any other negative target is an error, which gather raises.
    index = torch.where(kept, targets, 0)[:, None]
    at_target = logits.gather(1, index).float()
    log_p = torch.empty_like(at_target)
    # Factors of the softmax and of the onehot, by row.
    of_onehot = kept[:, None].float()
    if scale is not None:
        # The scale is infinite where no target has a loss.
        of_onehot = torch.where(kept[:, None], scale, 0.0)
    of_softmax = of_onehot.clone()

    rows = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    for first in range(0, len(logits), rows):
        block = slice(first, first + rows)
        log_softmax = torch.log_softmax(logits[block], dim=-1, dtype=torch.float32)
        torch.gather(log_softmax, 1, index[block], out=log_p[block])
        if into is None:
            continue
        if z_loss:
            log_z = at_target[block] - log_p[block]
            of_softmax[block] *= 1 + 2 * z_loss * log_z
        torch.mul(log_softmax.exp_(), of_softmax[block], out=into[block])

    # At the target the two are subtracted before they are rounded.
    if into is not None:
        difference = log_p.exp() * of_softmax - of_onehot
        into.scatter_(1, index, difference.to(into.dtype))
    return torch.where(kept, log_p[:, 0], 0.0)


def _no_autocast(device_type: str) -> AbstractContextManager[Any]:
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
