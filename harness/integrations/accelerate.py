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
    """`accelerator.prepare(*objects)`, with the one model among them prepared and its optimizers wrapped before.

    The model is moved to the accelerator's device, and prepared unless it was; the optimizer is wrapped unless it was,
    as several must be that share the model. `save_state` and `load_state` carry the precision's state. max_grad_norm:
    clips in the update; `accelerator.clip_grad_norm_` is right, too.

    Raises MisuseError where accelerate would change the precision besides (mixed_precision, dynamo), or own gradients
    and the step (DeepSpeed, FSDP, Megatron, XLA).
    """
    models = [each for each in objects if isinstance(each, nn.Module)]
    optimizers = [each for each in objects if isinstance(each, Optimizer)]
    problems = _problems(accelerator)
    for kind, found in (("models", models), ("optimizers", optimizers)):
        if len(found) != 1:
            fix = "one model, and its optimizer; several optimizers as one: precision.wrap([first, second])"
            problems.append(Problem(f"{len(found)} {kind}", "prepare()", fix=fix))
    if problems:
        raise MisuseError(problems)
    model = models[0].to(accelerator.device)
    if not precision.is_prepared:
        precision.prepare(model)
    given = optimizers[0]
    wrapped = given if isinstance(given, WrappedOptimizer) else precision.wrap(given, max_grad_norm)
    accelerator.register_for_checkpointing(_State(precision))
    return accelerator.prepare(*(wrapped if each is given else each for each in objects))


class _State:
    """The precision as accelerate keeps it."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision

    def state_dict(self) -> dict[str, Any]:
        """Of the precision."""
        return dict(self._precision.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave."""
        self._precision.load_state_dict(state)


def _problems(accelerator: Accelerator) -> list[Problem]:
    problems: list[Problem] = []
    if accelerator.mixed_precision != "no":
        why, fix = (
            "its autocast and scaler would go against the plan",
            'Accelerator(mixed_precision="no")',
        )
        problems.append(
            Problem(f"mixed_precision is {accelerator.mixed_precision}", "Accelerator", why, fix)
        )
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind not in _DISTRIBUTED:
        why, fix = (
            "it owns gradients and the step",
            "one process, or DDP; launch/deepspeed.sh runs DeepSpeed",
        )
        problems.append(Problem(f"distributed_type is {kind}", "Accelerator", why, fix))
    dynamo = accelerator.state.dynamo_plugin
    if getattr(getattr(dynamo, "backend", None), "value", "NO") != "NO":
        why = "the Accelerator would compile the model by itself, which was never tried with a prepared one"
        problems.append(
            Problem(
                "dynamo_backend is set",
                "Accelerator",
                why,
                "compile block by block, after prepare()",
            )
        )
    return problems
