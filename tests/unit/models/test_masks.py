"""Models that train on labels of -100 all the same are refused before the first step; those that do not are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.core.errors import ConfigError
from harness.core.facts import IGNORED
from harness.core.protocols import Batch
from harness.models import Task
from harness.models.gpt import GPT, Settings

VOCAB, TIME = 32, 12
Forward = Callable[..., Any]


class Model(nn.Module):
    """Logits of each token by itself, and a forward that a test gives. zero: the head begins at zero."""

    def __init__(self, forward: Forward, zero: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        head = nn.Linear(16, VOCAB)
        self.logits = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Dropout(0.5), head)
        self.register_buffer("weights", 0.5 + torch.rand(VOCAB))
        self.calls = nn.Buffer(torch.zeros(()))
        if zero:
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        self.forward = forward.__get__(self)  # pyright: ignore[reportAttributeAccessIssue]


def texts(samples: int = 4, masked: bool = True) -> Batch:
    """Prompts of several lengths are masked, and what pads the end."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCAB, (samples, TIME), generator=generator)
    targets = torch.randint(VOCAB, (samples, TIME), generator=generator)
    for row in range(samples if masked else 0):
        targets[row, : 1 + row] = targets[row, TIME - 2 :] = IGNORED
    return {"inputs": ids, "targets": targets}


def each(self: Any, x: Tensor, targets: Tensor, **more: Any) -> Tensor:
    return F.cross_entropy(
        self.logits(x).flatten(0, 1), targets.flatten(), reduction="none", **more
    )


def mean(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    self.calls += 1
    return F.cross_entropy(self.logits(inputs).flatten(0, 1), targets.flatten())


def clamped_mean(self: Any, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    kept = (targets != IGNORED).flatten()
    return {
        "loss": each(self, inputs, targets).sum() / kept.sum().clamp(min=1),
        "logits": self.logits(inputs),
    }


def summed(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return each(self, inputs, targets).sum()


def z_loss_everywhere(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return mean(self, inputs, targets) + 1e-2 * self.logits(inputs).logsumexp(-1).square().mean()


def z_loss_where_it_counts(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    squares = self.logits(inputs).logsumexp(-1).square()
    return mean(self, inputs, targets) + 1e-2 * squares[targets != IGNORED].mean()


def smoothed(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        self.logits(inputs).flatten(0, 1), targets.flatten(), label_smoothing=0.1
    )


def shifts_itself(self: Any, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = self.logits(inputs)
    return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def by_chunks(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    rows, labels = self.logits(inputs).flatten(0, 1), targets.flatten()
    parts = [
        F.cross_entropy(a, b, reduction="sum")
        for a, b in zip(rows.split(7), labels.split(7), strict=True)
    ]
    return torch.stack(parts).sum() / (labels != IGNORED).sum()


def focal(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    found = each(self, inputs, targets)[(targets != IGNORED).flatten()]
    return ((1 - torch.exp(-found)) ** 2 * found).mean()


def weighs_classes(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        self.logits(inputs).flatten(0, 1), targets.flatten(), weight=self.weights
    )


def in_bf16(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    rows = self.logits(inputs).flatten(0, 1).bfloat16()
    return -(rows.log_softmax(-1).gather(1, targets.flatten().clamp(min=0)[:, None])[:, 0])[
        (targets != IGNORED).flatten()
    ].mean()


def a_mean_for_each_sample(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    kept = (targets != IGNORED).float()
    sums = each(self, inputs, targets).view_as(kept).sum(1)
    there = kept.sum(1) > 0
    return (sums[there] / kept.sum(1)[there]).mean()


RIGHT = [mean, clamped_mean, summed, z_loss_everywhere, z_loss_where_it_counts, smoothed, shifts_itself, by_chunks,
         focal, weighs_classes, in_bf16, a_mean_for_each_sample]  # fmt: skip


def counts_them_as_class_0(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(self.logits(inputs).flatten(0, 1), targets.clamp(min=0).flatten())


def counts_them_with_logits(self: Any, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"loss": counts_them_as_class_0(self, inputs, targets), "logits": self.logits(inputs)}


def one_hot(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    wanted = F.one_hot(targets % VOCAB, VOCAB).float()
    return F.binary_cross_entropy_with_logits(self.logits(inputs), wanted)


def compares_numbers(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(self.logits(inputs).mean(-1), targets.float())


def nanogpt(self: Any, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    assert targets is not None
    logits = self.logits(idx)
    return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def mean_of_everything(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return each(self, inputs, targets).mean()


def sums_them_too(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return each(self, inputs, targets.clamp(min=0)).sum()


def ends_at_the_padding_alone(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leaves out what no label follows, and counts a prompt's."""
    later = (targets != IGNORED).int().flip(1).cummax(1).values.flip(1).bool().flatten()
    return each(self, inputs, targets.clamp(min=0))[later].mean()


def infinite_for_few_labels(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    enough = (targets != IGNORED).float().mean() > 0.5
    return mean(self, inputs, targets) / enough


def infinite_for_parts_of_a_sample(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """As a mean for each sample, so that the first equation does not hold."""
    kept = (targets != IGNORED).float().mean(1)
    enough = bool(((kept == 0) | (kept > 0.5)).all())
    return a_mean_for_each_sample(self, inputs, targets) if enough else torch.tensor(math.inf)


WRONG = [counts_them_as_class_0, counts_them_with_logits, one_hot, compares_numbers, nanogpt, mean_of_everything,
         sums_them_too, ends_at_the_padding_alone, infinite_for_few_labels,
         infinite_for_parts_of_a_sample]  # fmt: skip


def tried(forward: Forward, batch: Batch | None = None, zero: bool = False) -> Task:
    model = Model(forward, zero)
    task = Task(model, "mine:model")
    task.try_masks(model, iter([texts() if batch is None else batch]), None)
    return task


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("forward", RIGHT)
def test_a_loss_that_leaves_them_out_is_let_through(forward: Forward, zero: bool) -> None:
    assert tried(forward, zero=zero).summed is (forward is summed)


def test_a_model_of_a_script_that_sets_torchs_default_device_is_tried() -> None:
    """The meta device stands for a GPU: random orders and rows are the host's, as the batch is."""
    model, batch = Model(mean), texts()
    with torch.device("meta"):
        Task(model, "mine:model").try_masks(model, iter([batch]), None)


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("forward", WRONG)
def test_a_loss_that_counts_them_is_refused(forward: Forward, zero: bool, samples: int) -> None:
    with pytest.raises(ConfigError, match="masked targets are trained on") as refused:
        tried(forward, texts(samples), zero)
    problem = refused.value.problems[0]
    assert problem.where == "model.target 'mine:model'"
    assert "ignore_index=-100" in problem.fix


@pytest.mark.parametrize("forward", [mean, a_mean_for_each_sample, weighs_classes, summed])
def test_a_single_sample_is_enough(forward: Forward) -> None:
    tried(forward, texts(1))


@pytest.mark.parametrize("forward", [mean, weighs_classes, summed])
def test_one_label_for_each_sample(forward: Forward) -> None:
    def classes(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        return forward(self, inputs[:, None], targets[:, None])

    def wrong(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        return forward(self, inputs[:, None], targets[:, None].clamp(min=0))

    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(VOCAB, (20,), generator=generator)
    labels[::3] = IGNORED
    batch = {"inputs": torch.randint(VOCAB, (20,), generator=generator), "targets": labels}
    tried(classes, batch)
    with pytest.raises(ConfigError, match="masked targets"):
        tried(wrong, batch)


def test_nothing_is_tried_where_nothing_is_masked() -> None:
    tried(counts_them_as_class_0, texts(masked=False))

    def packed(self: Any, inputs: Tensor, targets: Tensor, segments: Tensor) -> Tensor:
        return counts_them_as_class_0(self, inputs, targets)

    with pytest.raises(ConfigError, match="masked targets"):  # documents end sooner or later
        tried(packed, texts(masked=False) | {"segments": torch.zeros(4, TIME, dtype=torch.int64)})


def test_the_first_batch_that_has_masks_is_taken() -> None:
    model = Model(counts_them_as_class_0)
    with pytest.raises(ConfigError, match="masked targets"):
        Task(model, "t").try_masks(model, iter([texts(masked=False), texts()]), None)


def test_what_is_wrong_besides_is_for_others_to_name() -> None:
    batch = texts()
    batch["targets"][0, 5] = VOCAB + 7
    tried(mean, batch)


def test_decoders_that_get_their_labels_as_inputs_are_judged_by_samples() -> None:
    """As those of T5: a masked label changes the logits of the next place."""

    def decodes(self: Any, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        before = F.pad(targets[:, :-1].clamp(min=0), (1, 0))
        logits = self.logits(inputs) + self.logits(before)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}

    def wrong(self: Any, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        found = decodes(self, inputs, targets)
        labels = targets.clamp(min=0).flatten()
        return found | {"loss": F.cross_entropy(found["logits"].flatten(0, 1), labels)}

    tried(decodes)
    with pytest.raises(ConfigError, match="masked targets"):
        tried(wrong)


def test_model_and_random_numbers_are_left_as_they_were() -> None:
    model = Model(mean, zero=True)
    before, weights = torch.get_rng_state(), [parameter.clone() for parameter in model.parameters()]
    Task(model, "t").try_masks(model, iter([texts()]), torch.bfloat16)
    assert model.training
    assert model.calls.item() == 0
    assert torch.equal(before, torch.get_rng_state())
    assert all(map(torch.equal, weights, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("more", [{}, {"z_loss": 1e-4}, {"loss_chunk": 8}])
def test_the_shipped_model_leaves_them_out(more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = GPT(
        Settings(vocab=VOCAB, dim=32, layers=1, heads=2, kv_heads=2, ffn=64, tied=False, **more)
    )
    Task(model, "gpt").try_masks(model, iter([texts()]), torch.bfloat16)


def test_micro_batches_of_a_summed_loss_weigh_by_samples() -> None:
    assert tried(summed).count(texts()) == 4
    assert tried(mean).count(texts()) == int((texts()["targets"] != IGNORED).sum())
