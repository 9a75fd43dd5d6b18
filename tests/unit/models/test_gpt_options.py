"""What the GPT can be asked for, against formulas and itself without it: norms, positions, documents, losses."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.core.config import ModelConfig
from harness.core.errors import ConfigError
from harness.core.facts import IGNORED
from harness.models import Task, build_model
from harness.models.gpt import GPT, build, documents, rotary

SMALL: dict[str, Any] = {"vocab": 96, "dim": 32, "layers": 2, "heads": 4, "ffn": 48}
LLAMA_31 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def small(**args: Any) -> GPT:
    torch.manual_seed(0)
    return build(**SMALL | args)


def tokens(batch: int, time: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 96, (batch, time + 1), generator=torch.Generator().manual_seed(seed))
    return drawn[:, :-1], drawn[:, 1:]


def gradients(model: GPT, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_options_leave_the_initial_weights_as_they_are() -> None:
    plain = small().state_dict()
    asked = small(
        qk_norm=True,
        rope_base=5e5,
        rope_scaling=LLAMA_31,
        z_loss=1e-4,
        loss_chunk=7,
        recompute="block",
    ).state_dict()
    assert {name for name in asked if name not in plain} == {
        f"blocks.{block}.attn.{kind}_norm.weight" for block in (0, 1) for kind in "qk"
    }
    for name, tensor in plain.items():
        assert torch.equal(tensor, asked[name]), name


def test_residual_projections_start_smaller() -> None:
    model = build(vocab=64, dim=128, layers=8, heads=2)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and name != "embed.weight":
            into = name.endswith(("out.weight", "down.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / (4 if into else 1), rel=0.03), (
                name
            )


def test_frequencies_follow_base_and_scaling() -> None:
    """Llama 3.1's reference rule, one frequency at a time, in double precision."""
    cos, _ = rotary(2, 128, torch.device("cpu"), 500000, LLAMA_31)
    kinds = set()
    for pair in range(64):
        frequency = 500000.0 ** (-2 * pair / 128)
        length = 2 * math.pi / frequency
        if length < 8192 / 4:
            kinds.add("kept")
        elif length > 8192 / 1:
            kinds.add("stretched")
            frequency /= 8
        else:
            kinds.add("between")
            smooth = (8192 / length - 1) / (4 - 1)
            frequency = (1 - smooth) * frequency / 8 + smooth * frequency
        assert cos[1, pair].item() == pytest.approx(math.cos(frequency), abs=1e-6)
    assert kinds == {"kept", "stretched", "between"}


def test_queries_and_keys_are_normed_per_head() -> None:
    """With its norms' weights at 1, a large query weight changes nothing; without them it does."""
    inputs, _ = tokens(2, 12)
    for normed in (True, False):
        model = small(qk_norm=normed)
        before = model(inputs)
        with torch.no_grad():
            model.blocks[0].attn.qkv.weight[:32].mul_(50.0)  # type: ignore[union-attr, index, operator]
        same = torch.allclose(model(inputs), before, atol=1e-4)
        assert same is normed


@pytest.mark.parametrize(
    "args", [{}, {"kv_heads": 2, "qk_norm": True}, {"recompute": "block"}, {"loss_chunk": 5}]
)
def test_documents_in_one_sample_are_as_each_alone(args: dict[str, Any]) -> None:
    model = small(**args)
    inputs, targets = tokens(2, 24)
    cuts = [[0, 9, 10, 24], [0, 24]]
    segments = torch.zeros(2, 24, dtype=torch.int64)
    for row, ends in enumerate(cuts):
        for number, (begin, end) in enumerate(pairwise(ends)):
            segments[row, begin:end] = number
    packed = model(inputs, segments=segments)
    total = torch.zeros(())
    for row, ends in enumerate(cuts):
        for begin, end in pairwise(ends):
            alone = model(inputs[row : row + 1, begin:end])
            torch.testing.assert_close(packed[row, begin:end], alone[0], rtol=1e-5, atol=1e-6)
            total = total + F.cross_entropy(alone[0], targets[row, begin:end], reduction="sum")
    loss = model(inputs, targets, segments)
    torch.testing.assert_close(loss, total / 48, rtol=1e-6, atol=1e-6)
    found, expected = gradients(model, loss), gradients(model, total / 48)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert not torch.allclose(model(inputs), packed, atol=1e-3), (
        "without segments documents see each other"
    )


def test_one_document_is_as_none() -> None:
    model = small(kv_heads=2)
    inputs, _ = tokens(2, 16)
    whole = model(inputs, segments=torch.zeros(2, 16, dtype=torch.int64))
    torch.testing.assert_close(whole, model(inputs), rtol=1e-5, atol=1e-6)


def test_a_number_that_returns_is_another_document() -> None:
    position, mask = documents(torch.tensor([[0, 0, 1, 1, 0]]))
    assert position.tolist() == [[0, 1, 0, 1, 0]]
    open_to = [[column for column in range(5) if mask[0, 0, row, column] == 0] for row in range(5)]
    assert open_to == [[0], [0, 1], [2], [2, 3], [4]]


def test_the_task_hands_segments_over() -> None:
    model = build_model(ModelConfig(args=SMALL))
    inputs, targets = tokens(2, 16)
    segments = (torch.arange(16) // 5).expand(2, 16).contiguous()
    loss = Task(model, "gpt").loss(
        model, {"inputs": inputs, "targets": targets, "segments": segments}
    )
    assert torch.equal(loss, model(inputs, targets, segments))
    assert not torch.equal(loss, model(inputs, targets))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("chunk", [1, 7, 46])
def test_loss_in_chunks_is_the_plain_one(chunk: int, z_loss: float, masked: bool) -> None:
    inputs, targets = tokens(2, 24)
    if masked:
        targets = targets.clone()
        targets[0, :11] = IGNORED  # a whole chunk without one that counts, too
    plain, chunked = small(z_loss=z_loss), small(z_loss=z_loss, loss_chunk=chunk)
    expected, found = plain(inputs, targets), chunked(inputs, targets)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    wanted, had = gradients(plain, expected), gradients(chunked, found)
    assert wanted.keys() == had.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(
            had[name], gradient, rtol=1e-6, atol=1e-6 * gradient.abs().max().item(), msg=name
        )
    with torch.no_grad():
        torch.testing.assert_close(chunked(inputs, targets), expected, rtol=1e-6, atol=0)


def test_chunks_sum_gradients_in_fp32_under_autocast() -> None:
    """Summed in bf16, 48 chunks of one token would be off by some of bf16's roundings of 2^-9 each."""
    inputs, targets = tokens(2, 24)
    exact = small(dim=64)
    reference = gradients(exact, exact(inputs, targets))["lm_head.weight"]

    def error(chunk: int) -> float:
        model = small(dim=64, loss_chunk=chunk)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(inputs, targets)
        found = gradients(model, loss)["lm_head.weight"]
        return ((found - reference).norm() / reference.norm()).item()

    assert error(1) < 1.1 * error(0)


def test_z_loss_is_in_the_gradient_alone() -> None:
    inputs, targets = tokens(2, 12)
    model, plain = small(z_loss=0.03), small()
    loss = model(inputs, targets)
    assert torch.equal(loss, plain(inputs, targets)), "the value stays the cross-entropy"
    logits = plain(inputs)
    expected = (
        F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        + 0.03 * logits.exp().sum(-1).log().pow(2).mean()
    )
    wanted = gradients(plain, expected)
    for name, gradient in gradients(model, loss).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6, msg=name)


def test_impossible_options_are_named_together() -> None:
    with pytest.raises(ConfigError) as caught:
        build(
            rope_base=0.5,
            norm_eps=0.0,
            z_loss=-1.0,
            loss_chunk=-3,
            recompute="blocks",
            recompute_every=0,
            tied="no",  # type: ignore[arg-type]
            rope_scaling={"factor": 8.0},
        )
    named = {problem.where.removeprefix("model.args.") for problem in caught.value.problems}
    assert named == {
        "rope_base",
        "norm_eps",
        "z_loss",
        "loss_chunk",
        "recompute",
        "recompute_every",
        "tied",
        "rope_scaling",
    }
    assert 'did you mean "block"' in str(caught.value)
