"""The loss adapter: `Task` computes the loss of a batch for any model.

A batch is a mapping from names to tensors. The adapter binds the names to the parameters of the model's `forward`, and
finds the loss in what `forward` returns.

How a batch is passed:

- `inputs` and `targets` (text, or pairs of a data set) go to forward(inputs, targets), which returns a loss, or to
  forward(inputs), which returns logits. The mean cross-entropy over logits is computed here.
- Any other batch goes to forward by its names. Labels are left out if forward has no parameter for them; then the
  cross-entropy is computed here too.

How a loss may be returned: as a 0-d tensor, as `.loss` or ["loss"] of the output, or beside the logits in a tuple.
Logits may be a tensor, `.logits`, ["logits"], or in a tuple.

Before training, `Task.try_on` tries one sample, and `Task.try_masks` finds out whether the model's own loss leaves out
labels of -100. `training_flops` counts the floating-point operations of a batch without computing anything.
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
from torch.utils.flop_counter import FlopCounterMode

from harness.core.deferred import device_of
from harness.core.errors import ConfigError, HarnessError, Problem, near_match
from harness.core.facts import IGNORED
from harness.core.health import LABELS, Flawed, count_targets, one_sample
from harness.core.protocols import Batch
from harness.core.state import left_alone
from harness.models import huggingface, masks
from harness.models.token_loss import sum_of_losses

NO_UNIT = "loss"
"""The unit of a loss whose unit is not known."""

# A second parameter with a default gets the targets only if it has one of these names. `labels` is not among them: a
# model that takes `labels` shifts them by one itself, and targets are already shifted.
_TARGETS = ("targets", "target", "label", "y")
# Padded samples have these. A model without such a parameter does not get them.
_OPTIONAL = ("attention_mask",)
# The loss of a fresh model is near ln(vocab_size). More than this many times that is most likely a sum.
_PLAUSIBLE = 10.0
# vocab_size of a model that does not say: bytes.
_BYTES = 256


class Judged(NamedTuple):
    """The figures of one validation batch.

    loss: mean over its targets, 0-d.
    right: for how many samples the largest logit is the label; None without logits, or if a sample has no single label.
    """

    loss: Tensor
    right: Tensor | None


@dataclass(frozen=True, slots=True)
class _Call:
    """How a batch is passed to forward.

    placed: names that are passed by position.
    named: names that are passed by keyword.
    labels: the labels for the cross-entropy that is computed here; empty if the model returns its own loss.
    """

    placed: tuple[str, ...]
    named: tuple[str, ...]
    labels: str


class Task:
    """The loss of a model on a batch, whatever wrapper (DDP, DeepSpeed) the model is called through.

    target: the config's `model.target`, for messages.
    unit: unit of the loss. The data promise one; `try_on` finds out.
    vocab_size: number of token ids; None if the model does not say.
    classes: number of classes of the labels; None if nothing says.
    summed: whether the model's own loss is a sum over labels. Then micro-batches are weighted by their samples.
    """

    def __init__(self, model: nn.Module, target: str, unit: str = NO_UNIT) -> None:
        self.target = target
        self.unit = unit
        self._causal_lm = huggingface.causal_lm(model)
        self.vocab_size = _whole(self._causal_lm or model, "vocab_size")
        self.classes = _whole(model, "num_classes")
        self.summed = False
        # Whether the model's own loss shifts the labels by one, as transformers' causal models do.
        self._shifts = False
        self._parameters = list(inspect.signature(model.forward).parameters.values())
        self._calls: dict[tuple[str, ...], _Call] = {}

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Mean loss over the targets that count, float 0-d. Raises ConfigError if the model's output has no loss."""
        if self._causal_lm is not None and "targets" in batch:
            return self._causal_lm.loss(module, batch)
        return self._loss(self._output(module, batch), batch)

    def count(self, batch: Batch) -> int:
        """The number of targets that the loss is a mean over: the weight of the batch.

        Without targets, or if the loss is a sum, it is the number of samples.
        """
        if self.summed:
            return len(next(iter(batch.values())))
        if self._shifts:
            return count_targets({"labels": batch["labels"][:, 1:]})
        return count_targets(batch)

    def judged(self, module: nn.Module, batch: Batch) -> Judged:
        """Loss and accuracy of a validation batch. Raises as `loss`."""
        if self._causal_lm is not None and "targets" in batch:
            return Judged(self._causal_lm.loss(module, batch), None)
        output = self._output(module, batch)
        loss = self._loss(output, batch)
        # Accuracy is of classes, one for each sample.
        _, logits = _parts(output)
        labels = _labels(batch)
        if labels is None or logits is None or labels.ndim != 1 or logits.ndim != 2:
            return Judged(loss, None)
        hits = (logits.argmax(1) == labels) & (labels != IGNORED)
        return Judged(loss, hits.sum())

    def try_on(self, model: nn.Module, batch: Batch, half: torch.dtype | None) -> str:
        """Run one forward on the first sample of `batch`, before training.

        Sets `unit`, `classes`, and whether the model shifts labels by itself.
        half: the dtype of the run's autocast, None for float32. The model and the random numbers stay as they are.
        Returns a warning if the loss is not in the promised unit, else an empty text.
        Raises ConfigError if forward does not take the batch, fails, or returns neither a loss nor logits.
        """
        # Lazy parameters get their shape in the first forward, and that one has to be the run's.
        if has_lazy(model):
            return ""
        device = device_of(model)
        one = _to(one_sample(batch, 0), device)

        # Who computes the loss: transformers' causal models (`CausalLM`), this adapter over `labels`, or the model.
        causal = self._causal_lm is not None and "targets" in one
        labels = "" if causal else self._call(one).labels
        own = not causal and not labels
        try:
            with left_alone(model, device), _autocast(device, half):
                # The own loss of a causal LM was checked when the model was built.
                if causal:
                    self.loss(model, one)
                    return ""
                output = self._output(model, one)
                # A label out of range is an error of the data, which the run reports.
                if labels:
                    one[labels] = torch.zeros_like(one[labels])
                loss = self._loss(output, one)
                self._learn(output, one, loss if own else None)
                if own and self.unit != NO_UNIT:
                    return self._implausible(model, one, float(loss))
                return ""
        except HarnessError:
            raise
        except Exception as error:
            raise self._failed(one, error) from error

    def try_masks(
        self, model: nn.Module, batches: Iterator[Batch], half: torch.dtype | None
    ) -> None:
        """Check that the model's own loss leaves out labels of -100; `masks` explains how. Sets `summed`.

        Nothing is tried if the loss is computed here, or if no batch has such labels (packed batches will).
        half: the dtype of the run's autocast, None for float32.
        Raises ConfigError if masked labels are counted.
        """
        # A batch with unreadable samples holds stand-ins, whose labels say nothing.
        batches = (batch for batch in batches if not isinstance(batch, Flawed))
        first = next(batches, None)
        if first is None or has_lazy(model):
            return

        # Only labels that are classes and that go to the model's own loss can be masked.
        name = next((name for name in LABELS if name in first), None)
        if name is None or first[name].is_floating_point():
            return
        causal = self._causal_lm is not None and "targets" in first
        if causal or self._call(first).labels:
            return
        batch = masks.with_masks(chain([first], batches), name, certain="segments" in first)
        if batch is None:
            return

        def ask(asked: Batch) -> tuple[Tensor, Tensor | None]:
            output = self._output(model, asked)
            loss = self._loss(output, asked)
            _, logits = _parts(output)
            return loss, logits

        # In float32 losses compare best. If the loss looks wrong there, or cannot run (some kernels take only half
        # precision), the verdict in the run's dtype counts.
        device = device_of(model)
        found = masks.Masks()
        with left_alone(model, device):
            moved = _to(batch, device)
            # A run in float32 has half=None: dict.fromkeys then leaves one try.
            for dtype in dict.fromkeys((None, half)):
                with _autocast(device, dtype):
                    found = masks.judge(ask, moved, name)
                    # A head of zeros gives the same loss to all labels: try again with other weights.
                    if found.blind:
                        with _no_zeros(model):
                            again = masks.judge(ask, moved, name)
                        if not again.blind:
                            found = again
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
        """Set `classes`, `unit` and `_shifts`, if the model returns logits.

        own: the model's own loss; None if it is ours.
        """
        _, logits = _parts(output)
        labels = _labels(one)
        if logits is None or labels is None:
            return
        class_dim = _class_dim(logits, labels)
        if class_dim is None:
            return

        # A loss of the model's own has to be the cross-entropy of its logits; otherwise its unit is unknown.
        if own is not None:
            may_shift = labels.ndim == 2 and "labels" in one
            self._shifts = may_shift and _alike(own, logits[:, :-1], labels[:, 1:])
            if not self._shifts and not _alike(own, logits, labels):
                return

        labels_are_tokens = self.vocab_size is not None and labels.ndim > 1
        if not labels_are_tokens:
            self.classes = logits.shape[class_dim]
        if self.unit == NO_UNIT:
            has_floats = any(values.is_floating_point() for values in one.values())
            of_tokens = labels.ndim == 2 and not has_floats
            self.unit = "nats per token" if of_tokens else "nats per label"

    def _implausible(self, model: nn.Module, one: Batch, loss: float) -> str:
        """Why the model's own loss cannot be in the promised unit; empty if it can. Then it also drops the unit.

        A mean does not grow with the batch, and a fresh model's loss is not far from that of a uniform guess.
        """
        doubled = {name: torch.cat([values, values]) for name, values in one.items()}
        twice = float(self.loss(model, doubled))
        vocab = self.vocab_size or _BYTES
        if loss and abs(twice - 2 * loss) <= 0.01 * abs(twice):
            why = f"one sample has {loss:.4g} and the same one twice {twice:.4g}, so it is a sum"
        elif loss > _PLAUSIBLE * math.log(vocab):
            why = f"at the start it is {loss:.4g}, and a uniform guess has ln({vocab}) = {math.log(vocab):.4g}"
        else:
            return ""
        promised = self.unit
        self.unit = NO_UNIT
        return f"the model's loss is not in {promised}: {why}; it is shown without a unit"

    def _output(self, module: nn.Module, batch: Batch) -> object:
        """What forward returns for the batch."""
        call = self._call(batch)
        args = [batch[name] for name in call.placed]
        kwargs = {name: batch[name] for name in call.named}
        return module(*args, **kwargs)

    def _loss(self, output: object, batch: Batch) -> Tensor:
        """The loss in `output`, or the cross-entropy of its logits. Raises ConfigError if it has no such thing."""
        call = self._call(batch)
        loss, logits = _parts(output)
        # For the messages.
        given = ", ".join([*call.placed, *call.named])
        returned = f"forward({given}) returned {_shape(output)}"

        # The model's own loss.
        if not call.labels:
            if loss is None:
                raise self._broken(f"{returned}, not a 0-d loss")
            return loss

        # The cross-entropy of its logits.
        labels = batch[call.labels]
        if logits is None or _class_dim(logits, labels) is None:
            raise self._broken(f"{returned}, not logits for {call.labels} {list(labels.shape)}")
        if labels.is_floating_point():
            what = f"{returned}, and {call.labels} are no classes, but of {labels.dtype}"
            raise self._broken(what)
        return _cross_entropy(logits, labels)

    def _call(self, batch: Batch) -> _Call:
        """How forward takes batches with these names; worked out once."""
        names = tuple(batch)
        if names not in self._calls:
            self._calls[names] = self._bind(names)
        return self._calls[names]

    def _bind(self, names: tuple[str, ...]) -> _Call:
        """Bind a batch's names to forward's parameters.

        Raises ConfigError naming every parameter that no name fills, and every name that forward does not take.
        """
        # forward's parameters: those with a position, those with a keyword, and whether it has **kwargs.
        positions: list[inspect.Parameter] = []
        keywords: dict[str, inspect.Parameter] = {}
        takes_any = False
        for parameter in self._parameters:
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                positions.append(parameter)
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                keywords[parameter.name] = parameter
            if parameter.kind is parameter.VAR_KEYWORD:
                takes_any = True

        # `inputs` goes first, whatever the parameter is called, unless a later one has this name. `targets` may follow.
        placed: list[str] = []
        is_first = not positions or positions[0].name == "inputs"
        if "inputs" in names and (is_first or "inputs" not in keywords):
            placed.append("inputs")
            if "targets" in names and self._takes_targets(positions, names):
                placed.append("targets")
        filled = {parameter.name for parameter in positions[: len(placed)]}

        # Labels that forward does not name are kept back for the cross-entropy that is computed here. forward(**kwargs)
        # gets them all the same, except `targets` beside `inputs`, as text has them.
        kept_back: Sequence[str] = LABELS
        if takes_any:
            kept_back = ("targets",) if placed else ()

        # All other names go by keyword.
        named: list[str] = []
        labels: list[str] = []
        unused: list[str] = []
        for name in names:
            if name in placed:
                continue
            if name in keywords and name not in filled:
                named.append(name)
            elif name in kept_back:
                labels.append(name)
            elif takes_any:
                named.append(name)
            elif name not in _OPTIONAL:
                unused.append(name)
        # The cross-entropy is over one set of labels.
        unused += labels[1:]

        problems: list[Problem] = []
        for name in unused:
            what = f'forward has no parameter "{name}", which the samples have'
            fix = f"{near_match(name, list(keywords))}; or leave it out of the samples"
            problems.append(Problem(what, self._where, fix=fix))
        for parameter in keywords.values():
            given = parameter.name in named or parameter.name in filled
            if parameter.default is parameter.empty and not given:
                fix = f"the samples have {', '.join(names)}: rename one"
                problems.append(Problem(f'forward wants "{parameter.name}"', self._where, fix=fix))
        if problems:
            raise ConfigError(problems)
        label = labels[0] if labels else ""
        return _Call(tuple(placed), tuple(named), label)

    def _takes_targets(self, positions: Sequence[inspect.Parameter], names: Sequence[str]) -> bool:
        """Whether forward's second position is for the targets: it is required, or has their name."""
        if len(positions) < 2:
            # forward(inputs, *args)
            return any(p.kind is p.VAR_POSITIONAL for p in self._parameters)
        second, *others = positions[1:]
        if second.name in _TARGETS:
            return True

        # A required parameter is not for the targets if the batch has its name, or a later one has theirs.
        taken = second.name in names or any(p.name in _TARGETS for p in others)
        return second.default is second.empty and not taken

    def _failed(self, one: Batch, error: Exception) -> ConfigError:
        """The error for a forward that raised `error` on the sample `one`."""
        cause = f"{type(error).__name__}: {str(error)[:300]}"
        what = f"forward fails on a sample of the data: {cause}"
        given: list[str] = []
        for name, values in one.items():
            given.append(f"{name}: {_shape(values)} of {values.dtype}")
        why = f"the sample is {', '.join(given)}"
        fix = "the model must take what the data give: call it on one sample alone"
        return ConfigError(Problem(what, self._where, why, fix))

    @property
    def _where(self) -> str:
        return f"model.target {self.target!r}"

    def _broken(self, what: str) -> ConfigError:
        fix = "return a 0-d mean loss from forward(inputs, targets), or logits from forward(inputs)"
        return ConfigError(Problem(what, self._where, fix=fix))


def _parts(output: object) -> tuple[Tensor | None, Tensor | None]:
    """(loss, logits) in what a model returned; None for what is missing, or is no floating-point tensor."""
    loss: Any = None
    logits: Any = None
    if isinstance(output, Tensor):
        if output.ndim == 0:
            loss = output
        else:
            logits = output
    elif isinstance(output, Mapping):
        loss = output.get("loss")
        logits = output.get("logits")
    elif hasattr(output, "loss") or hasattr(output, "logits"):
        loss = getattr(output, "loss", None)
        logits = getattr(output, "logits", None)
    elif isinstance(output, tuple | list):
        # One scalar is the loss. If there are several, nobody knows which one is.
        tensors = [each for each in output if isinstance(each, Tensor)]
        scalars = [tensor for tensor in tensors if tensor.ndim == 0]
        others = [tensor for tensor in tensors if tensor.ndim]
        if len(scalars) == 1:
            loss = scalars[0]
        if others:
            logits = others[0]

    # The output of a user's model may have anything under these names.
    if not (isinstance(loss, Tensor) and loss.ndim == 0 and loss.is_floating_point()):
        loss = None
    if not (isinstance(logits, Tensor) and logits.is_floating_point()):
        logits = None
    return loss, logits


def _class_dim(logits: Tensor, labels: Tensor) -> int | None:
    """The dimension of logits that counts classes: the last, or the second, as torch has it for images; else None."""
    if logits.shape[:-1] == labels.shape:
        return logits.ndim - 1
    without_second = (*logits.shape[:1], *logits.shape[2:])
    if logits.ndim == labels.ndim + 1 and without_second == tuple(labels.shape):
        return 1
    return None


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labels that count, in nats, float32 0-d; NaN if none does."""
    of_tokens = labels.ndim > 1 and _class_dim(logits, labels) == logits.ndim - 1
    if of_tokens:
        logits = logits.flatten(0, -2)
        labels = labels.flatten()
    labels = labels.long()

    # The logits of a vocabulary are large: those in 16 bits get no float32 copy.
    if of_tokens and logits.element_size() == 2:
        return sum_of_losses(logits, labels) / (labels != IGNORED).sum()
    return F.cross_entropy(logits.float(), labels)


def _alike(loss: Tensor, logits: Tensor, labels: Tensor) -> bool:
    """Whether a model's loss is the mean cross-entropy of these. It is not if labels are out of range."""
    if not labels.numel():
        return False
    # torch's cross_entropy fails on a label out of range, on a GPU with an assertion that ends the process.
    out_of_range = (labels < 0) | (labels >= logits.shape[-1])
    counted = labels != IGNORED
    if bool((counted & out_of_range).any()):
        return False

    expected = _cross_entropy(logits, labels)
    difference = (expected - loss.float()).abs()
    return bool(difference <= 0.01 * expected.abs())


def _labels(batch: Batch) -> Tensor | None:
    """The batch's labels; None if it has none, or if they are not whole numbers."""
    for name in LABELS:
        if name in batch:
            found = batch[name]
            return None if found.is_floating_point() else found
    return None


@contextmanager
def _no_zeros(model: nn.Module) -> Iterator[None]:
    """In this context, parameters that are all zeros (as a head may begin) hold random numbers."""
    parameters = model.parameters()
    zeros = [parameter for parameter in parameters if not bool(parameter.any())]
    try:
        for parameter in zeros:
            parameter.normal_()
        yield
    finally:
        for parameter in zeros:
            parameter.zero_()


def _autocast(device: torch.device, half: torch.dtype | None) -> torch.autocast:
    # Without the cache: it would keep copies of all weights, and there may be no memory for them (`core/deferred.py`).
    return torch.autocast(device.type, dtype=half, enabled=half is not None, cache_enabled=False)


def _whole(model: object, name: str) -> int | None:
    """The attribute `name` if it is an int, else None."""
    value = getattr(model, name, None)
    # bool is a kind of int in Python, and no size.
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value


def has_lazy(model: nn.Module) -> bool:
    """Whether some parameters get their shapes in the first forward only."""
    return any(is_lazy(parameter) for parameter in model.parameters())


def _to(batch: Batch, device: torch.device | str) -> Batch:
    return {name: values.to(device) for name, values in batch.items()}


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return f"a {type(value).__name__}"


class _OnMeta(nn.Module):
    """The model, with every parameter and buffer on torch's meta device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # In a tuple, or the model would become a submodule.
        self._held = (model,)
        self._state: dict[str, Tensor] = {}
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            self._state[name] = torch.empty_like(tensor, device="meta")

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return torch.func.functional_call(self._held[0], self._state, inputs, named)


def training_flops(model: nn.Module, task: Task, batch: Batch) -> float:
    """FLOPs of the matrix products (convolutions and attention too) of forward and backward on `batch`.

    These are the FLOPs of the model, not of how it is computed. Recomputed activations count once. Causal attention
    counts as if nothing were masked. For a Transformer this gives 6 N + 12 L H Q T for a token (Chowdhery et al., PaLM,
    arXiv 2204.02311, appendix B, N without embeddings).

    Forward is counted by torch's `FlopCounterMode` on the meta device. Backward is twice that: one product for the
    gradient of the input, and one for that of the weight. Frozen weights have no gradient.
    NaN for a model that cannot run without values.
    """
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            task.loss(_OnMeta(model), _to(batch, "meta"))
        forward = counter.get_total_flops()
    except Exception:
        # The model reads values, or an operation has no meta kernel. Its MFU stays unknown.
        return math.nan

    # The share of the weights that are trained is the share of backward that computes their gradients.
    elements = 0
    trained = 0
    for param in model.parameters():
        if param.ndim < 2:
            continue
        elements += param.numel()
        if param.requires_grad:
            trained += param.numel()
    if not elements:
        return math.nan
    return float(forward * (2 + trained / elements))
