"""accelerate: a loop with `accelerator.prepare`, `backward`, `accumulate` and `clip_grad_norm_` under a Precision.

    accelerator = Accelerator(mixed_precision="no", gradient_accumulation_steps=2)
    model, optimizer, batches, scheduler = prepare(accelerator, precision, model, optimizer, batches, scheduler)

For accelerate 1.15: one process, or DDP. Nothing of accelerate is imported here: the Accelerator is yours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from harness.core.errors import MisuseError, Problem
from harness.precision.api import Precision
from harness.precision.standard import WrappedOptimizer

if TYPE_CHECKING:
    from accelerate import Accelerator

_DISTRIBUTED = ("NO", "MULTI_CPU", "MULTI_GPU")


def prepare(
    accelerator: Accelerator,
    precision: Precision,
    *objects: Any,
    max_grad_norm: float | None = None,
) -> Any:
    """`accelerator.prepare(*objects)`, after it has prepared the one model among them and wrapped its optimizer.

    The model is moved to the accelerator's device and prepared, unless it is prepared. The optimizer is wrapped, unless
    it is wrapped; several optimizers of one model must be wrapped as one before. `save_state` and `load_state` include
    the precision's state.

    max_grad_norm: clips in the update; `accelerator.clip_grad_norm_` works, too.

    Raises MisuseError if accelerate would also change the precision (mixed_precision, dynamo), or owns gradients and
    the step (DeepSpeed, FSDP, Megatron, XLA).
    """
    models: list[nn.Module] = []
    optimizers: list[Optimizer] = []
    for each in objects:
        if isinstance(each, nn.Module):
            models.append(each)
        elif isinstance(each, Optimizer):
            optimizers.append(each)

    problems = _problems(accelerator)
    for kind, found in (("models", models), ("optimizers", optimizers)):
        if len(found) != 1:
            fix = "one model, and its optimizer; several optimizers as one: precision.wrap([first, second])"
            problems.append(Problem(f"{len(found)} {kind}", "prepare()", fix=fix))
    if problems:
        raise MisuseError(problems)

    # Ours before accelerate's: DDP must be put around layers that are converted already.
    model = models[0].to(accelerator.device)
    if not precision.is_prepared:
        precision.prepare(model)
    given = optimizers[0]
    wrapped = given
    if not isinstance(given, WrappedOptimizer):
        wrapped = precision.wrap(given, max_grad_norm)
    accelerator.register_for_checkpointing(_State(precision))

    # In the order of the call, which is the order of what accelerate returns.
    replaced = [wrapped if each is given else each for each in objects]
    return accelerator.prepare(*replaced)


class _State:
    """The precision in the form in which accelerate saves it."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision

    def state_dict(self) -> dict[str, Any]:
        """The precision's state; also in the middle of an accumulation, where accelerate's users may save."""
        return dict(self._precision.state_dict(within_window=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._precision.load_state_dict(state)


def _problems(accelerator: Accelerator) -> list[Problem]:
    problems: list[Problem] = []
    if accelerator.mixed_precision != "no":
        what = f"mixed_precision is {accelerator.mixed_precision}"
        why = "its autocast and scaler would go against the plan"
        fix = 'Accelerator(mixed_precision="no")'
        problems.append(Problem(what, "Accelerator", why, fix))

    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind not in _DISTRIBUTED:
        what = f"distributed_type is {kind}"
        why = "it owns gradients and the step"
        fix = "one process, or DDP; FSDP2 in a loop of your own (docs/guide/api.md); launch/deepspeed.sh runs DeepSpeed"
        problems.append(Problem(what, "Accelerator", why, fix))

    # Accelerator has the plugin in every case; its backend says whether it compiles.
    dynamo = accelerator.state.dynamo_plugin
    backend = getattr(dynamo, "backend", None)
    if getattr(backend, "value", "NO") != "NO":
        why = "the Accelerator would compile the model by itself, which was never tried with a prepared one"
        fix = "compile block by block, after prepare()"
        problems.append(Problem("dynamo_backend is set", "Accelerator", why, fix))
    return problems
