"""The lints of a model: one planted defect each, and models without any."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from harness.capability.probe import MachineFacts
from harness.core.findings import Finding
from harness.core.protocols import Batch
from harness.models import Task
from harness.models.gpt import build as gpt
from harness.models.vision import convnet, vit
from harness.precision.lints.graph import Graph
from harness.precision.lints.model import lint_model
from harness.precision.plan import make_plan, resolve, take_rung
from harness.precision.recipe import load_recipe

DIM = 64
HERE = MachineFacts(torch_version="2.13.0", cpu_bf16_isa=("avx512_bf16",))
TOKENS: Batch = {
    "inputs": torch.zeros(2, 16, dtype=torch.int64),
    "targets": torch.zeros(2, 16, dtype=torch.int64),
}
VECTORS: Batch = {"inputs": torch.zeros(4, 16, DIM), "targets": torch.zeros(4, dtype=torch.int64)}


def findings(model: nn.Module, batch: Batch, recipe: str) -> list[Finding]:
    return examined(model, batch, recipe)[0]


def examined(model: nn.Module, batch: Batch, recipe: str) -> tuple[list[Finding], Graph]:
    policy = load_recipe(recipe)

    def plan_for(rung, verdicts):
        return make_plan(policy, HERE, rung, verdicts, model)

    plan = take_rung(policy, HERE, torch.device("cpu"), plan_for)
    rung, _ = resolve(policy, HERE)
    assert rung is not None
    return lint_model(model, Task(model, "mine:model").loss, batch, policy, rung, plan)


class Mine(nn.Module):
    """up -> `body` -> down -> head, as logits of 8 classes; every Linear but the head is fit for FP8."""

    def __init__(self, body: Callable[[Tensor], Tensor] | nn.Module, width: int = DIM) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, width)
        self.body = body
        self.down = nn.Linear(width, DIM)
        self.head = nn.Linear(DIM, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.down(self.body(self.up(inputs))).mean(1))


class Tail(nn.Module):
    """As `Mine`, with a loss of its own: `tail` of the logits [4, 8]."""

    def __init__(self, tail: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, 8)
        self.tail = tail

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.tail(self.head(F.relu(self.up(inputs)).mean(1))).float().mean()


class Words(nn.Module):
    """An embedding, a Linear and a head over `vocab` tokens."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.lm_head = nn.Linear(DIM, vocab, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.lm_head(self.mix(self.embed(inputs)))


class Attend(nn.Module):
    """Attention over the features themselves, with `heads` heads; `by_hand` if it is given."""

    def __init__(self, heads: int, by_hand: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dim = x.shape
        heads = x.view(batch, time, self.heads, dim // self.heads).transpose(1, 2)
        if self.by_hand is None:
            mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        else:
            scores = heads @ heads.transpose(-1, -2) / math.sqrt(dim // self.heads)
            mixed = self.by_hand(scores) @ heads
        return mixed.transpose(1, 2).reshape(batch, time, dim)


class Within(nn.Module):
    """A Linear with something around it."""

    def __init__(self, around: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self.inner, x)


class Raw(nn.Module):
    """A matrix that no Linear owns."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


class Own(nn.Linear):
    """A Linear that does something else besides."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def without_autocast(inner: nn.Linear, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return inner(x.float())


def without_autocast_of_a_gpu(inner: nn.Linear, x: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False):
        return inner(x.float())


class Double(torch.autograd.Function):
    """2 x, with a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * 2


def unsafe_softmax(scores: Tensor) -> Tensor:
    weights = torch.exp(scores)
    return weights / weights.sum(-1, keepdim=True)


def safe_softmax(scores: Tensor) -> Tensor:
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return weights / (weights.sum(-1, keepdim=True) + 1e-3)


def safe_forms(x: Tensor) -> Tensor:
    """Near to each planted defect, and safe."""
    wide = x.float()
    shifted = x - x.amax(-1, keepdim=True)
    logs = [
        shifted.exp().sum(-1, keepdim=True).log(),
        torch.log1p(torch.exp(-x.abs())),
        torch.log(x.square() + 1e-3),
        torch.log(x.abs().clamp_min(1e-3)),
    ]
    scaled = [
        wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6),
        x / (x.norm(dim=-1, keepdim=True) + 1e-3),
        F.normalize(x, dim=-1),
        (x * x + 1e-3).sqrt(),
        torch.exp(-x.square()),
    ]
    # A cast that a sum in float32 needs.
    return wide + F.gelu(wide) + sum(logs) + sum(scaled)


def far_below(scores: Tensor) -> Tensor:
    mask = torch.ones(16, 16, dtype=torch.bool).triu(1)
    return scores.masked_fill(mask, -1e9).softmax(-1)


def rms_in_half(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def wide_scale(x: Tensor) -> Tensor:
    return x * torch.from_numpy(np.full(x.shape[-1], 0.5))


PLANTED: dict[str, tuple[Callable[[], nn.Module], Batch, str, str]] = {
    # name: model, batch, recipe, code
    "odd width": (lambda: Mine(F.gelu, width=100), VECTORS, "bf16", "model.size"),
    "odd vocabulary": (lambda: Words(1001), TOKENS, "bf16", "model.vocabulary"),
    "odd heads": (lambda: Mine(Attend(16)), VECTORS, "bf16", "model.head_size"),
    "width for bf16 only": (lambda: Mine(F.gelu, width=72), VECTORS, "fp8_hybrid", "model.fp8_kept_out"),
    "weight norm": (
        lambda: Mine(nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM))),
        VECTORS, "fp8_hybrid", "model.fp8_kept_out",
    ),
    "own Linear": (lambda: Mine(Own(DIM, DIM)), VECTORS, "fp8_hybrid", "model.fp8_kept_out"),
    "raw matrix": (lambda: Mine(Raw()), VECTORS, "fp8_hybrid", "model.fp8_outside"),
    "norm's eps in fp16": (lambda: Mine(rms_in_half), VECTORS, "fp16_scaler", "numerics.eps"),
    "LayerNorm's eps under fp16": (
        lambda: Mine(nn.LayerNorm(DIM, eps=1e-12)), VECTORS, "fp16_scaler", "numerics.norm_eps",
    ),
    "mask of -1e9": (lambda: Mine(Attend(4, far_below)), VECTORS, "fp16_scaler", "numerics.constant"),
    "softmax by hand": (lambda: Mine(Attend(4, unsafe_softmax)), VECTORS, "bf16", "numerics.softmax"),
    "log of softmax": (lambda: Tail(lambda x: -(x.softmax(-1) + 1e-9).log()), VECTORS, "bf16", "numerics.log_softmax"),
    "log of sigmoid": (lambda: Tail(lambda x: -x.sigmoid().log()), VECTORS, "bf16", "numerics.log_sigmoid"),
    "logsumexp by hand": (lambda: Tail(lambda x: x.exp().sum(-1).log()), VECTORS, "bf16", "numerics.logsumexp"),
    "softplus by hand": (lambda: Tail(lambda x: torch.log(1 + torch.exp(x))), VECTORS, "bf16", "numerics.softplus"),
    "log of zero": (lambda: Mine(lambda x: F.relu(x).log()), VECTORS, "bf16", "numerics.log_zero"),
    "exp of a layer": (lambda: Mine(lambda x: x * (0.5 * x).exp()), VECTORS, "bf16", "numerics.exp"),
    "root of zero": (lambda: Mine(lambda x: x + (x * x).sum(-1, True).sqrt()), VECTORS, "bf16", "numerics.sqrt_zero"),
    "division by a norm": (lambda: Mine(lambda x: x / x.norm(2, -1, True)), VECTORS, "bf16", "numerics.division"),
    "autocast off": (lambda: Mine(Within(without_autocast)), VECTORS, "bf16", "casts.autocast_off"),
    "autocast off on a GPU": (
        lambda: Mine(Within(without_autocast_of_a_gpu)), VECTORS, "bf16", "casts.autocast_off",
    ),
    "behind a Function": (lambda: Mine(lambda x: F.relu(Double.apply(x)).log()), VECTORS, "bf16", "numerics.log_zero"),
    "in a reentrant checkpoint": (
        lambda: Mine(lambda x: checkpoint(lambda y: F.relu(y).log(), x, use_reentrant=True)),
        VECTORS, "bf16", "numerics.log_zero",
    ),
    "in another checkpoint": (
        lambda: Mine(lambda x: checkpoint(lambda y: F.relu(y).log(), x, use_reentrant=False)),
        VECTORS, "bf16", "numerics.log_zero",
    ),
    "useless cast": (lambda: Mine(lambda x: F.gelu(x.float())), VECTORS, "bf16", "casts.useless"),
    "other half": (lambda: Mine(lambda x: x.half()), VECTORS, "bf16", "casts.other_half"),
    "float64": (lambda: Mine(wide_scale), VECTORS, "bf16", "casts.float64"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_found_and_nothing_else(name: str) -> None:
    build, batch, recipe, code = PLANTED[name]
    found = findings(build(), batch, recipe)
    assert {finding.code for finding in found} == {code}
    for finding in found:
        assert finding.where
        assert finding.what
        assert finding.why
        assert finding.fix


IMAGES: Batch = {"images": torch.zeros(2, 1, 8, 8), "labels": torch.zeros(2, dtype=torch.int64)}
CLEAN: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "gpt": (lambda: gpt(vocab=256, dim=64, layers=2, heads=2, ffn=176, tied=True), TOKENS),
    "gpt with every option": (
        lambda: gpt(
            vocab=256, dim=64, layers=2, heads=4, kv_heads=2, ffn=176, tied=False, qk_norm=True,
            z_loss=1e-4, loss_chunk=8, recompute="block",
        ),
        TOKENS,
    ),
    "vit": (vit, IMAGES),
    "convnet": (convnet, IMAGES),
    "safe softmax": (lambda: Mine(Attend(4, safe_softmax)), VECTORS),
    "safe forms": (lambda: Mine(safe_forms), VECTORS),
}  # fmt: skip


@pytest.mark.parametrize("recipe", ["fp8_hybrid", "bf16", "fp16_scaler", "fp32"])
@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_model_has_no_finding(name: str, recipe: str) -> None:
    build, batch = CLEAN[name]
    assert findings(build(), batch, recipe) == []


class Positions(nn.Module):
    """64 positions, two segments and 1,000 words, looked up in that order. values: whether forward reads them."""

    def __init__(self, values: bool = False) -> None:
        super().__init__()
        self.values = values
        self.positions = nn.Embedding(64, DIM)
        self.kinds = nn.Embedding(2, DIM)
        self.words = nn.Embedding(1000, DIM)
        self.head = nn.Linear(DIM, 1000)
        self.register_buffer("place", torch.arange(64))

    def forward(self, inputs: Tensor, token_type_ids: Tensor) -> Tensor:
        if self.values and inputs.sum() < 0:
            raise ValueError
        place: Tensor = self.get_buffer("place")[: inputs.shape[1]]
        other = self.positions(place) + self.kinds(token_type_ids)
        return self.head(other + self.words(inputs))


@pytest.mark.parametrize("values", [False, True])
def test_the_bound_of_token_ids_is_the_table_that_looks_them_up(values: bool) -> None:
    batch = {**TOKENS, "token_type_ids": torch.zeros(2, 16, dtype=torch.int64)}
    graph = examined(Positions(values), batch, "fp32")[1]
    assert not graph.error
    assert graph.embedded == 1000
    # One tensor with two names.
    batch["targets"] = batch["inputs"]
    graph = examined(Positions(values), batch, "fp32")[1]
    assert (graph.embedded, graph.classes) == (1000, 1000)


class Coarse(nn.Module):
    """Two losses: of 3 groups of labels, which it makes itself, and of the 8 labels."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.Linear(DIM, 3)
        self.head = nn.Linear(DIM, 8)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = inputs.mean(1)
        coarse = F.cross_entropy(self.groups(x), targets // 3)
        return coarse + F.cross_entropy(self.head(x), targets)


def test_the_bound_of_labels_is_the_loss_that_they_reach() -> None:
    assert examined(Coarse(), VECTORS, "fp32")[1].classes == 8


class Normed(nn.Module):
    """Reads values, and has a BatchNorm: one sample has no variance."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)
        self.head = nn.Linear(DIM, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.isnan().any():
            raise ValueError
        return self.head(self.norm(inputs.mean(1)))


def test_a_model_that_reads_values_may_have_a_batch_norm() -> None:
    assert findings(Normed(), VECTORS, "fp32") == []


def test_torch_is_afterwards_as_it_was() -> None:
    begin = torch.autocast.__init__
    findings(Mine(F.gelu), VECTORS, "bf16")
    assert torch.autocast.__init__ is begin
    assert "apply" not in vars(CheckpointFunction)
