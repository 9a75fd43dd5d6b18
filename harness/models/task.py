"""What the loop asks of a model: the loss of a batch. Binds a batch's names to the model's forward, and reads what it
returns.

A batch of `inputs` and `targets` (text, or pairs of a data set) goes to forward(inputs, targets), which returns a loss,
or to forward(inputs), which returns logits: the mean cross-entropy over them is taken here. Any other batch goes to
forward by its names; without the labels if forward has no parameter for them. A loss may come as a 0-d tensor, as
`.loss` or ["loss"] of the output, or beside the logits in a tuple; logits as a tensor, as `.logits`, ["logits"], or in
a tuple. What the loss of a batch costs in floating-point operations is counted here too, without computing anything.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.random import fork_rng
from torch.utils.flop_counter import FlopCounterMode

from harness.core.errors import ConfigError, HarnessError, Problem, near_match
from harness.core.facts import IGNORED
from harness.core.health import LABELS, Flawed, count_targets, one_sample
from harness.core.protocols import Batch
from harness.core.state import random_numbers_apart
from harness.models import huggingface, masks

NO_UNIT = "loss"
"""The unit of a loss that is nothing in particular."""

# A second parameter with a default gets the targets only under one of these names. `labels` is not among them: a model
# that takes those shifts them by one itself, and targets are shifted already.
_TARGETS = ("targets", "target", "label", "y")
# What padding leaves behind; a model that has no use for it is not given it.
_OPTIONAL = ("attention_mask",)
# A fresh model spreads its bets: its loss is near ln(vocab_size). A sum over samples or tokens is far over it.
_PLAUSIBLE = 10.0
_BYTES = 256


class Judged(NamedTuple):
    """Of one validation batch. loss: mean over its targets, 0-d. right: how many of its labels the largest logit hits;
    None where labels are not one class a sample, or there are no logits."""

    loss: Tensor
    right: Tensor | None


@dataclass(frozen=True, slots=True)
class _Call:
    """How forward takes a batch: names by place, names by keyword. labels: what is left for our cross-entropy."""

    placed: tuple[str, ...]
    named: tuple[str, ...]
    labels: str


class Task:
    """The loss of a model on a batch, whatever wrapper (DDP, DeepSpeed) it is called through.

    unit: what the loss is in; at first what the data promise, `try_on` finds out. vocab_size: of its tokens, classes:
    of its labels; None where nothing tells. summed: the model's own loss is a sum over labels, so that micro-batches
    weigh by their samples.
    """

    def __init__(self, model: nn.Module, target: str, unit: str = NO_UNIT) -> None:
        self.target, self.unit = target, unit
        self._causal_lm = huggingface.causal_lm(model)
        self.vocab_size = _whole(self._causal_lm or model, "vocab_size")
        self.classes = _whole(model, "num_classes")
        self._shifts = self.summed = False
        self._parameters = list(inspect.signature(model.forward).parameters.values())
        self._calls: dict[tuple[str, ...], _Call] = {}

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Mean loss over the targets that have one, float 0-d. Raises ConfigError if the model's output is no such."""
        if self._causal_lm is not None and "targets" in batch:
            return self._causal_lm.loss(module, batch)
        return self._loss(self._output(module, batch), batch)

    def count(self, batch: Batch) -> int:
        """Targets that the loss is a mean over; samples, where there are none, or where it is a sum."""
        if self.summed:
            return len(next(iter(batch.values())))
        return count_targets({"labels": batch["labels"][:, 1:]} if self._shifts else batch)

    def judged(self, module: nn.Module, batch: Batch) -> Judged:
        """What a validation wants to know of a batch; raises as `loss`."""
        if self._causal_lm is not None and "targets" in batch:
            return Judged(self._causal_lm.loss(module, batch), None)
        output = self._output(module, batch)
        loss, logits = self._loss(output, batch), _parts(output)[1]
        labels = _labels(batch)
        if labels is None or logits is None or labels.ndim != 1 or logits.ndim != 2:
            return Judged(loss, None)
        return Judged(loss, ((logits.argmax(1) == labels) & (labels != IGNORED)).sum())

    def try_on(self, model: nn.Module, batch: Batch, half: torch.dtype | None) -> str:
        """One forward of the first sample of `batch`, before anything is trained: whether the model returns a loss, in
        which unit, and of how many classes.

        half: what the run's autocast computes in, None for float32. Model and random numbers stay as they are. Returns
        what to tell if the loss is not in the unit that was promised. Raises ConfigError if forward does not take the
        batch, fails, or returns something else.
        """
        if any(is_lazy(parameter) for parameter in model.parameters()):
            return ""  # its parameters are made by the first forward, which is the run's
        device = next(model.parameters()).device
        one = {name: values.to(device) for name, values in one_sample(batch, 0).items()}
        causal = self._causal_lm is not None and "targets" in one
        own = not causal and not self._call(one).labels
        try:
            with _left_alone(model, device), _autocast(device, half):
                if causal:  # whose own loss was looked at when it was built
                    self.loss(model, one)
                    return ""
                output = self._output(model, one)
                if not own:  # a label that is out of range is for the run to name
                    one[self._call(one).labels] = torch.zeros_like(one[self._call(one).labels])
                loss = self._loss(output, one)
                self._learn(output, one, loss if own else None)
                return (
                    self._implausible(model, one, float(loss))
                    if own and self.unit != NO_UNIT
                    else ""
                )
        except HarnessError:
            raise
        except Exception as error:
            what = (
                f"forward fails on a sample of the data: {type(error).__name__}: {str(error)[:300]}"
            )
            given = ", ".join(
                f"{name}: {_shape(values)} of {values.dtype}" for name, values in one.items()
            )
            fix = "the model must take what the data give: call it on one sample alone"
            raise ConfigError(Problem(what, self._where, f"the sample is {given}", fix)) from error

    def try_masks(
        self, model: nn.Module, batches: Iterator[Batch], half: torch.dtype | None
    ) -> None:
        """Whether the model's own loss leaves out labels of -100: see `masks`. Where the loss is ours, or no batch has
        such labels (packed ones will), nothing is tried. Sets `summed`.

        half: what the run's autocast computes in, None for float32; asked first is in float32, as all are compared.
        Raises ConfigError if masked labels are counted.
        """
        batches = (batch for batch in batches if not isinstance(batch, Flawed))
        first = next(batches, None)
        if first is None or any(is_lazy(parameter) for parameter in model.parameters()):
            return
        name = next((name for name in LABELS if name in first), None)
        causal = self._causal_lm is not None and "targets" in first
        if name is None or first[name].is_floating_point() or causal or self._call(first).labels:
            return
        batch = masks.with_masks(chain([first], batches), name, certain="segments" in first)
        if batch is None:
            return
        device = next(model.parameters()).device
        found = masks.Masks()

        def ask(asked: Batch) -> tuple[Tensor, Tensor | None]:
            output = self._output(model, asked)
            return self._loss(output, asked), _parts(output)[1]

        with _left_alone(model, device):
            moved = {key: values.to(device) for key, values in batch.items()}
            for dtype in dict.fromkeys(
                (None, half)
            ):  # some kernels take nothing but half precision
                with _autocast(device, dtype):
                    found = masks.judge(ask, moved, name)
                    if found.blind:
                        with _no_zeros(model):
                            again = masks.judge(ask, moved, name)
                        found = found if again.blind else again
                if not found.wrong:
                    break
        self.summed = found.summed
        if found.wrong:
            why = f"the data mark what does not count with {IGNORED}, and the model's loss counts it: {found.wrong}"
            fix = (
                f"take the mean over {name} that are not {IGNORED}, as cross_entropy(..., ignore_index={IGNORED}) does;"
                " or return logits from forward(inputs): the loss over them is taken here"
            )
            raise ConfigError(Problem(f"masked {name} are trained on", self._where, why, fix))

    def _learn(self, output: object, one: Batch, own: Tensor | None) -> None:
        """Classes and unit, where a model's logits tell. own: the model's own loss; None: it is ours."""
        logits, labels = _parts(output)[1], _labels(one)
        place = None if logits is None or labels is None else _class_dim(logits, labels)
        if logits is None or labels is None or place is None:
            return
        known = self.vocab_size is not None and labels.ndim > 1
        if own is not None:
            self._shifts = (
                labels.ndim == 2 and "labels" in one and _alike(own, logits[:, :-1], labels[:, 1:])
            )
            if not self._shifts and not _alike(own, logits, labels):
                return
        self.classes = self.classes if known else logits.shape[place]
        if self.unit == NO_UNIT:
            of_tokens = labels.ndim == 2 and not any(
                values.is_floating_point() for values in one.values()
            )
            self.unit = "nats per token" if of_tokens else "nats per label"

    def _implausible(self, model: nn.Module, one: Batch, loss: float) -> str:
        """The model's own loss must not grow with the batch, nor be far from that of a model that knows nothing."""
        twice = float(
            self.loss(model, {name: torch.cat([values, values]) for name, values in one.items()})
        )
        vocab = self.vocab_size or _BYTES
        if loss and abs(twice - 2 * loss) <= 0.01 * abs(twice):
            why = (
                f"one sample has {loss:.4g} and the same one twice {twice:.4g}, so that it is a sum"
            )
        elif loss > _PLAUSIBLE * math.log(vocab):
            why = f"at the start it is {loss:.4g}, where ln({vocab}) = {math.log(vocab):.4g} is what knows nothing"
        else:
            return ""
        promised, self.unit = self.unit, NO_UNIT
        return f"the model's loss is not in {promised}: {why}; it is shown without a unit"

    def _output(self, module: nn.Module, batch: Batch) -> object:
        call = self._call(batch)
        return module(
            *(batch[name] for name in call.placed), **{name: batch[name] for name in call.named}
        )

    def _loss(self, output: object, batch: Batch) -> Tensor:
        call = self._call(batch)
        loss, logits = _parts(output)
        told = f"forward({', '.join([*call.placed, *call.named])}) returned {_shape(output)}"
        if not call.labels:
            if loss is None:
                raise self._broken(f"{told}, not a 0-d loss")
            return loss
        labels = batch[call.labels]
        if logits is None or _class_dim(logits, labels) is None:
            raise self._broken(f"{told}, not logits for {call.labels} {list(labels.shape)}")
        if labels.is_floating_point():
            raise self._broken(f"{told}, and {call.labels} are no classes, but of {labels.dtype}")
        return _cross_entropy(logits, labels)

    def _call(self, batch: Batch) -> _Call:
        names = tuple(batch)
        if names not in self._calls:
            self._calls[names] = self._bind(names)
        return self._calls[names]

    def _bind(self, names: tuple[str, ...]) -> _Call:
        """Raises ConfigError naming everything that forward lacks, and everything that it does not take."""
        places = [
            p for p in self._parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        known = {
            p.name: p
            for p in self._parameters
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        anything = any(p.kind is p.VAR_KEYWORD for p in self._parameters)
        placed: list[str] = []
        if "inputs" in names and (
            not places or places[0].name == "inputs" or "inputs" not in known
        ):
            placed.append("inputs")
            if "targets" in names and self._takes_targets(places, names):
                placed.append("targets")
        filled = {p.name for p in places[: len(placed)]}
        rest = [name for name in names if name not in placed]
        named = [name for name in rest if name in known and name not in filled]
        extra = [name for name in rest if name not in named]
        labels = [
            name
            for name in extra
            if name in LABELS and (not anything or (name == "targets" and placed))
        ]
        extra = [name for name in extra if name not in labels]
        if anything:
            named, extra = [name for name in rest if name not in labels], []
        problems = [
            Problem(
                f'forward has no parameter "{name}", which the samples have',
                self._where,
                fix=f"{near_match(name, list(known))}; or leave it out of the samples",
            )
            for name in [*(name for name in extra if name not in _OPTIONAL), *labels[1:]]
        ]
        problems += [
            Problem(
                f'forward wants "{p.name}"',
                self._where,
                fix=f"the samples have {', '.join(names)}: rename one",
            )
            for p in known.values()
            if p.default is p.empty and p.name not in (*named, *filled)
        ]
        if problems:
            raise ConfigError(problems)
        return _Call(tuple(placed), tuple(named), labels[0] if labels else "")

    def _takes_targets(self, places: Sequence[inspect.Parameter], names: Sequence[str]) -> bool:
        """Whether forward's second place is for targets: it must be filled, or has their name."""
        if len(places) < 2:
            return any(p.kind is p.VAR_POSITIONAL for p in self._parameters)
        second, *others = places[1:]
        if second.name in _TARGETS:
            return True
        taken = second.name in names or any(p.name in _TARGETS for p in others)
        return second.default is second.empty and not taken

    @property
    def _where(self) -> str:
        return f"model.target {self.target!r}"

    def _broken(self, what: str) -> ConfigError:
        fix = "return a 0-d mean loss from forward(inputs, targets), or logits from forward(inputs)"
        return ConfigError(Problem(what, self._where, fix=fix))


def _parts(output: object) -> tuple[Tensor | None, Tensor | None]:
    """(loss, logits) of what a model returned, None for what is not there."""
    loss: Any = None
    logits: Any = None
    if isinstance(output, Tensor):
        loss, logits = (output, None) if output.ndim == 0 else (None, output)
    elif isinstance(output, Mapping):
        loss, logits = output.get("loss"), output.get("logits")
    elif hasattr(output, "loss") or hasattr(output, "logits"):
        loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    elif isinstance(output, tuple | list):
        tensors = [each for each in output if isinstance(each, Tensor)]
        scalars, others = [t for t in tensors if t.ndim == 0], [t for t in tensors if t.ndim]
        loss = scalars[0] if len(scalars) == 1 else None
        logits = others[0] if others else None
    loss = (
        loss if isinstance(loss, Tensor) and loss.ndim == 0 and loss.is_floating_point() else None
    )
    return loss, logits if isinstance(logits, Tensor) and logits.is_floating_point() else None


def _class_dim(logits: Tensor, labels: Tensor) -> int | None:
    """Which dimension of logits counts classes: the last, or, of images, torch's own second; None if neither fits."""
    if logits.shape[:-1] == labels.shape:
        return logits.ndim - 1
    if logits.ndim == labels.ndim + 1 and (*logits.shape[:1], *logits.shape[2:]) == tuple(
        labels.shape
    ):
        return 1
    return None


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    if _class_dim(logits, labels) == logits.ndim - 1:
        logits, labels = logits.flatten(0, -2), labels.flatten()
    return F.cross_entropy(logits.float(), labels.long())


def _alike(loss: Tensor, logits: Tensor, labels: Tensor) -> bool:
    """Whether a model's loss is the mean cross-entropy of these. Labels that are no classes are unlike any."""
    if not labels.numel() or bool(
        ((labels != IGNORED) & ((labels < 0) | (labels >= logits.shape[-1]))).any()
    ):
        return False
    own = _cross_entropy(logits, labels)
    return bool((own - loss.float()).abs() <= 0.01 * own.abs())


def _labels(batch: Batch) -> Tensor | None:
    """The batch's labels, if they are whole numbers."""
    found = next((batch[name] for name in LABELS if name in batch), None)
    return None if found is None or found.is_floating_point() else found


@contextmanager
def _left_alone(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Eval mode without gradients; mode, buffers and random numbers are afterwards as they were."""
    was_training = model.training
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]  # some count their forwards
    model.eval()
    try:
        with (
            torch.no_grad(),
            random_numbers_apart(),
            fork_rng([device] if device.type == "cuda" else []),
        ):
            yield
    finally:
        model.train(was_training)
        for buffer, before in kept:
            buffer.copy_(before)


@contextmanager
def _no_zeros(model: nn.Module) -> Iterator[None]:
    """Parameters that are zero throughout, as a head may begin, hold random numbers meanwhile."""
    zeros = [parameter for parameter in model.parameters() if not bool(parameter.any())]
    try:
        for parameter in zeros:
            parameter.normal_()
        yield
    finally:
        for parameter in zeros:
            parameter.zero_()


def _autocast(device: torch.device, half: torch.dtype | None) -> torch.autocast:
    return torch.autocast(device.type, dtype=half, enabled=half is not None)


def _whole(model: object, name: str) -> int | None:
    value = getattr(model, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _shape(value: object) -> str:
    return (
        f"a tensor {list(value.shape)}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
    )


class _OnMeta(nn.Module):
    """The model, with every parameter and buffer on torch's meta device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._held = (model,)
        self._state = {
            name: torch.empty_like(tensor, device="meta")
            for named in (model.named_parameters(), model.named_buffers())
            for name, tensor in named
        }

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return torch.func.functional_call(self._held[0], self._state, inputs, named)


def training_flops(model: nn.Module, task: Task, batch: Batch) -> float:
    """FLOPs of the matrix products (convolutions, attention) of forward and backward on `batch`.

    Of the model, not of how it is computed: recomputed activations count once, and causal attention as if nothing were
    masked, which for a Transformer gives 6 N + 12 L H Q T for a token (Chowdhery et al., PaLM, arXiv 2204.02311,
    appendix B, N without embeddings). Forward is counted by torch's `FlopCounterMode` on the meta device. Backward is
    twice that: one product for the input and one for the weight; none for weights that are frozen. NaN for a model
    that cannot run without values.
    """
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            task.loss(_OnMeta(model), {name: values.to("meta") for name, values in batch.items()})
        forward = counter.get_total_flops()
    except Exception:
        return (
            math.nan
        )  # it reads values, or computes what has no meta kernel: its MFU is not known
    matrices: list[Tensor] = [param for param in model.parameters() if param.ndim >= 2]
    elements = sum(param.numel() for param in matrices)
    trained = sum(param.numel() for param in matrices if param.requires_grad)
    return float(forward * (2 + trained / elements)) if elements else math.nan
