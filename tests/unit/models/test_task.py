"""How a batch's names reach a model's forward, and what is read from what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.core.errors import ConfigError
from harness.core.facts import IGNORED
from harness.core.protocols import Batch
from harness.models import Task
from tests.support.wide import Wide

CLASSES, PLACES = 5, 4


class Model(nn.Module):
    """A Linear, and a forward that a test gives; its signature is that function's."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, CLASSES)
        self.forward = forward.__get__(self)  # pyright: ignore[reportAttributeAccessIssue]


def a_class(**more: Tensor) -> Batch:
    """Four samples of three numbers, with a class each."""
    generator = torch.Generator().manual_seed(1)
    return {
        "inputs": torch.randn(4, 3, generator=generator),
        "targets": torch.tensor([0, 4, IGNORED, 2]),
        **more,
    }


def named(batch: Batch, inputs: str = "pixels", targets: str = "labels") -> Batch:
    return {inputs: batch["inputs"], targets: batch["targets"]}


def expected(model: Model, batch: Batch) -> Tensor:
    return F.cross_entropy(model.linear(batch["inputs"]), batch["targets"])


def only_x(self: Any, x: Tensor) -> Tensor:
    return self.linear(x)


def a_mask_is_no_target(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    assert mask is None
    return self.linear(x)


def with_targets(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(self.linear(x), y)


def nanogpt(self: Any, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    logits = self.linear(idx)
    return logits, None if targets is None else F.cross_entropy(logits, targets)


def keyword_only(self: Any, x: Tensor, *, targets: Tensor) -> Tensor:
    return F.cross_entropy(self.linear(x), targets)


def later_targets(
    self: Any, x: Tensor, scale: float = 1.0, targets: Tensor | None = None
) -> dict[str, Tensor]:
    assert targets is not None
    return {"loss": F.cross_entropy(scale * self.linear(x), targets), "logits": self.linear(x)}


def as_dict(self: Any, x: Tensor) -> dict[str, Tensor]:
    return {"logits": self.linear(x)}


def of_transformers(self: Any, pixels: Tensor, labels: Tensor | None = None, **more: Any) -> Any:
    logits = self.linear(pixels)
    return SimpleNamespace(
        logits=logits, loss=None if labels is None else F.cross_entropy(logits, labels)
    )


def anything(self: Any, **batch: Tensor) -> Tensor:
    return F.cross_entropy(self.linear(batch["pixels"]), batch["labels"])


def pixels_alone(self: Any, pixels: Tensor) -> Tensor:
    return self.linear(pixels)


@pytest.mark.parametrize("forward", [only_x, a_mask_is_no_target, with_targets, nanogpt, keyword_only, later_targets,
                                     as_dict])  # fmt: skip
def test_pairs(forward: Callable[..., Any]) -> None:
    model, batch = Model(forward), a_class()
    torch.testing.assert_close(Task(model, "t").loss(model, batch), expected(model, batch))


@pytest.mark.parametrize(
    ("forward", "labels"),
    [
        (of_transformers, "labels"),
        (anything, "labels"),
        (pixels_alone, "labels"),
        (pixels_alone, "label"),
    ],
)
def test_names_of_the_data_set(forward: Callable[..., Any], labels: str) -> None:
    model, batch = Model(forward), a_class()
    torch.testing.assert_close(
        Task(model, "t").loss(model, named(batch, targets=labels)), expected(model, batch)
    )


def test_a_mask_of_ours_goes_only_to_who_takes_it() -> None:
    batch = a_class(attention_mask=torch.ones(4, 3))
    model = Model(only_x)
    torch.testing.assert_close(Task(model, "t").loss(model, batch), expected(model, batch))

    def masked(self: Any, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.linear(x * attention_mask)

    model = Model(masked)
    torch.testing.assert_close(Task(model, "t").loss(model, batch), expected(model, batch))


def test_images_have_their_classes_in_the_second_dimension() -> None:
    logits, labels = torch.randn(2, CLASSES, 3, 6), torch.randint(CLASSES, (2, 3, 6))

    def forward(self: Any, x: Tensor) -> Tensor:
        return logits

    model = Model(forward)
    found = Task(model, "t").loss(model, {"inputs": torch.zeros(2, 1, 3, 6), "targets": labels})
    torch.testing.assert_close(found, F.cross_entropy(logits, labels))


@pytest.mark.parametrize(
    ("forward", "batch", "told"),
    [
        (pixels_alone, {"image": 0, "pixels": 0, "labels": 0}, ['forward has no parameter "image"']),
        (of_transformers, {"image": 0, "labels": 0}, ['forward wants "pixels"', "the samples have image, labels"]),
        (pixels_alone, {"pixel": 0, "labels": 0},
         ['forward has no parameter "pixel"', 'did you mean "pixels"?', 'forward wants "pixels"']),
    ],
)  # fmt: skip
def test_names_that_do_not_fit_are_all_told(
    forward: Callable[..., Any], batch: dict[str, int], told: list[str]
) -> None:
    model = Model(forward)
    with pytest.raises(ConfigError) as caught:
        Task(model, "mine:build").loss(model, {name: torch.zeros(4, 3) for name in batch})
    for words in ["model.target 'mine:build'", *told]:
        assert words in str(caught.value)


def gives(value: Any) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor) -> Any:
        return value

    return forward


def gives_for_pairs(value: Any) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor, targets: Tensor) -> Any:
        return value

    return forward


def fails(self: Any, x: Tensor) -> Tensor:
    return x @ torch.zeros(7, 2)


@pytest.mark.parametrize(
    ("forward", "told"),
    [
        (
            gives(torch.zeros(4, 2, CLASSES)),
            "forward(inputs) returned a tensor [4, 2, 5], not logits for targets [1]",
        ),
        (gives("logits"), "forward(inputs) returned a str, not logits for targets [1]"),
        (
            gives_for_pairs(torch.zeros(4)),
            "forward(inputs, targets) returned a tensor [4], not a 0-d loss",
        ),
        (
            gives_for_pairs(torch.tensor(3)),
            "forward(inputs, targets) returned a tensor [], not a 0-d loss",
        ),
        (fails, "forward fails on a sample of the data: RuntimeError"),
    ],
)
def test_a_model_that_returns_something_else_is_told_beforehand(
    forward: Callable[..., Any], told: str
) -> None:
    model = Model(forward)
    with pytest.raises(ConfigError) as caught:
        Task(model, "mine:build").try_on(model, a_class(), None)
    assert told in str(caught.value)
    if forward is fails:
        assert "the sample is inputs: a tensor [1, 3] of torch.float32" in str(caught.value)


def test_targets_that_are_no_classes_are_refused() -> None:
    model = Model(only_x)
    batch = {"inputs": torch.zeros(4, 3), "targets": torch.zeros(4)}
    with pytest.raises(ConfigError, match=r"targets are no classes, but of torch.float32"):
        Task(model, "t").try_on(model, batch, None)


def test_a_trial_tells_classes_and_unit_and_leaves_the_model_as_it_was() -> None:
    def counting(self: Any, x: Tensor) -> Tensor:
        self.seen += 1
        return self.linear(self.drop(x))

    model = Model(counting)
    model.drop = nn.Dropout(0.5)
    model.register_buffer("seen", torch.zeros(()))
    before, batch = torch.get_rng_state(), a_class()
    batch["targets"][0] = 99  # for the run to name, not for the trial to fall over
    task = Task(model, "t")
    assert task.try_on(model, batch, torch.bfloat16) == ""
    assert (task.classes, task.unit) == (CLASSES, "nats per label")
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert model.get_buffer("seen") == 0
    assert batch["targets"][0] == 99


def test_the_unit_of_a_loss_of_the_models_own() -> None:
    """Its own kind; the cross-entropy of its logits; the same, shifted by one as transformers do."""
    tokens = torch.randint(CLASSES, (2, PLACES + 1), generator=torch.Generator().manual_seed(0))
    logits = torch.randn(2, PLACES + 1, CLASSES, generator=torch.Generator().manual_seed(2))

    def unit(of: Callable[[Tensor, Tensor], Tensor]) -> tuple[str, int]:
        def forward(self: Any, input_ids: Tensor, labels: Tensor) -> Any:
            rows = logits[: len(input_ids)]
            return {"loss": of(rows, labels), "logits": rows}

        model = Model(forward)
        task, batch = Task(model, "t"), {"input_ids": tokens, "labels": tokens}
        task.try_on(model, batch, None)
        return task.unit, task.count(batch)

    every, shifted = 2 * (PLACES + 1), 2 * PLACES
    assert unit(lambda rows, labels: F.cross_entropy(rows.flatten(0, 1), labels.flatten())) == (
        "nats per token",
        every,
    )
    assert unit(lambda rows, labels: F.cross_entropy(rows[:, :-1].flatten(0, 1), labels[:, 1:].flatten())) == (
        "nats per token", shifted
    )  # fmt: skip
    assert unit(lambda rows, labels: rows.square().mean()) == ("loss", every)


@pytest.mark.parametrize(
    ("reduce", "unit", "told"),
    [
        ("mean", "nats per byte", ""),
        ("sum", "loss", "so it is a sum"),
        ("tokens", "loss", "a uniform guess has ln(256) = 5.545"),
    ],
)
def test_a_sum_is_not_shown_as_nats_per_token(reduce: str, unit: str, told: str) -> None:
    vocab, time = 256, 32

    def forward(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = torch.zeros(*inputs.shape, vocab)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return {"mean": losses.mean(), "sum": losses.sum(), "tokens": losses.sum() / len(inputs)}[
            reduce
        ]

    model = Model(forward)
    task = Task(model, "t", "nats per byte")
    tokens = torch.zeros(3, time, dtype=torch.int64)
    found = task.try_on(model, {"inputs": tokens, "targets": tokens}, None)
    assert task.unit == unit
    assert (told in found) == (found != "") or not told
    assert bool(found) == bool(told)
    if told:
        assert told in found
        assert math.isclose(
            float(task.loss(model, {"inputs": tokens, "targets": tokens})) % math.log(vocab),
            0,
            abs_tol=6,
        )


def test_labels_that_are_hit_are_counted_but_those_that_do_not_count() -> None:
    for forward in (only_x, nanogpt):
        model, batch = Model(forward), a_class()
        hits = (model.linear(batch["inputs"]).argmax(1) == batch["targets"]).sum()
        loss, right = Task(model, "t").judged(model, batch)
        assert right == hits
        torch.testing.assert_close(loss, expected(model, batch))
    text = torch.zeros(2, PLACES, dtype=torch.int64)
    model = Model(gives(torch.zeros(2, PLACES, CLASSES)))
    assert Task(model, "t").judged(model, {"inputs": text, "targets": text})[1] is None, (
        "tokens are no classes"
    )


class Reader(nn.Module):
    """Logits of token ids."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(vocab, 8), nn.Linear(8, vocab)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.embed(inputs))


@pytest.mark.slow
def test_logits_of_tokens_have_no_float32_copy() -> None:
    """Of 256 tokens, 64 are in float32 at a time; the loss and its gradient are torch's."""
    vocab = 2**16
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randint(0, vocab, (2, 2, 128), generator=generator)
    targets[0, :9] = IGNORED
    model = Reader(vocab)
    with Wide(vocab) as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = Task(model, "own").loss(model, {"inputs": inputs, "targets": targets})
        (found,) = torch.autograd.grad(loss, model.head.bias)
    assert 0 < seen.largest <= 2**22

    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(inputs).float().flatten(0, 1)
        expected = F.cross_entropy(logits, targets.flatten())
        (right,) = torch.autograd.grad(expected, model.head.bias)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-9)
