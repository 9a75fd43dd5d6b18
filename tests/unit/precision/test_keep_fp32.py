"""Modules kept in fp32: what they compute in, on every rung, under everything that wraps a model."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from harness import Precision
from harness.core.errors import ConfigError
from harness.models.gpt import build
from harness.precision.recipe import Recipe, load_recipe

pytestmark = pytest.mark.usefixtures("cpu_on_purpose")
LOW = {
    "fp8_hybrid": torch.bfloat16,
    "fp8_dynamic": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp16_scaler": torch.float16,
}


def precision_for(recipe: str, *keep: str) -> Precision:
    base = load_recipe(recipe).model_dump()
    return Precision(
        Recipe.model_validate({**base, "layers": {"min_features": 16, "keep_fp32": list(keep)}})
    )


class Scores(nn.Module):
    """Attention with its scores written out, as many models have it: q k^T is not divided before it is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2)
        self.seen.append(scores.dtype)
        return (scores / q.shape[-1]).softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.scores = Scores()
        self.out = nn.Linear(16, 16)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.reentrant is None:
            return self.out(self.scores(q, k, v))
        return self.out(
            cast("Tensor", checkpoint(self.scores, q, k, v, use_reentrant=self.reentrant))
        )


def loud(reentrant: bool | None = None) -> nn.Sequential:
    """Its scores are about 500,000, which float16 cannot hold (65504) and float32 and bfloat16 can.

    reentrant: recompute the scores in backward, by that kind of checkpoint; None: keep them.
    """
    torch.manual_seed(0)
    model = nn.Sequential(Attention(reentrant), nn.Linear(16, 16))
    with torch.no_grad():
        model[0].get_parameter("qkv.weight")[:32] *= 300
    return model


def x() -> Tensor:
    return torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1))


def step(
    precision: Precision, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[float, bool]:
    with precision.context():
        loss = model(x()).float().square().mean()
    precision.backward(loss)
    outcome = precision.step(optimizer)
    optimizer.zero_grad()
    return loss.item(), outcome.was_applied


def test_scores_that_overflow_fp16_survive_in_fp32() -> None:
    expected = loud()(x()).square().mean().item()
    for keep in ((), ("*.scores",)):
        precision = precision_for("fp16_scaler", *keep)
        model = precision.prepare(loud())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        steps = [step(precision, model, optimizer) for _ in range(3)]
        if not keep:
            assert not any(applied or loss == loss for loss, applied in steps), "the fault fired"
            continue
        assert all(applied for _, applied in steps)
        # The scores' inputs were rounded to float16: a sharp softmax makes much of that.
        assert steps[0][0] == pytest.approx(expected, rel=0.05)
        assert steps[2][0] < steps[0][0]


def test_a_head_that_overflows_fp16_survives_in_fp32() -> None:
    tokens = torch.arange(33)[None] % 64
    losses: list[float] = []
    for keep in ((), ("lm_head",)):
        torch.manual_seed(0)
        precision = precision_for("fp16_scaler", *keep)
        model = precision.prepare(build(vocab=64, dim=32, layers=1, heads=2))
        with torch.no_grad():
            model.lm_head.weight *= 1e6
        with precision.context():
            losses.append(model(tokens[:, :-1], tokens[:, 1:]).item())
            if keep:
                assert model(tokens).abs().max() > 65504
    assert losses[0] != losses[0], "the fault fired"
    assert losses[1] == losses[1] < 1e7


@pytest.mark.parametrize("recipe", LOW)
def test_every_low_rung_computes_it_in_fp32_and_the_rest_as_planned(recipe: str) -> None:
    for keep, inside in (((), LOW[recipe]), (("0.scores",), torch.float32)):
        precision = precision_for(recipe, *keep)
        model = precision.prepare(nn.Sequential(Attention(), nn.Linear(16, 16)))
        with precision.context():
            assert model(x()).dtype == LOW[recipe]
        assert model.get_submodule("0.scores").seen == [inside]
    row = next(row for row in precision.plan.layers if row.module == "0.scores")
    assert (row.precision, row.reason) == ("fp32", "kept in fp32 (0.scores)")


def test_the_fp32_rung_is_left_alone() -> None:
    precision = precision_for("fp32", "0.scores")
    model = precision.prepare(nn.Sequential(Attention()))
    assert type(model.get_submodule("0.scores")) is Scores


def test_linears_named_or_inside_are_not_converted() -> None:
    precision = precision_for("fp8_hybrid", "0", "*.out")
    model = precision.prepare(nn.Sequential(Attention(), Attention(), nn.Linear(16, 16)))
    reasons = {row.module: (row.precision, row.reason) for row in precision.plan.layers}
    assert precision.plan.fp8_layers() == ("1.qkv", "2")
    assert reasons["0"] == ("fp32", "kept in fp32 (0)")
    assert reasons["0.qkv"] == ("fp32", "inside 0, which is kept in fp32")
    assert reasons["1.out"] == ("fp32", "kept in fp32 (*.out)")
    with precision.context():
        first = model[0](x().bfloat16())
        assert model[1](x()).dtype == torch.float32, "its last layer, out, is kept"
    assert first.dtype == torch.float32
    assert torch.equal(first, model[0](x().bfloat16().float())), (
        "as outside of every precision context"
    )


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("0.scroes", 'did you mean "0.scores"?'),
        ("blocks", 'pattern "blocks" matches no module that is called'),
        ("mha.out_proj", 'pattern "mha.out_proj" matches no module that is called'),
        ("wrapped", "wrapped had its forward replaced on the object"),
    ],
)
def test_what_cannot_be_kept_is_an_error_on_every_rung(pattern: str, expected: str) -> None:
    for recipe in ("fp8_hybrid", "bf16"):
        wrapped = nn.Linear(16, 16)
        wrapped.forward = lambda input: input
        parts = {"0": Attention(), "blocks": nn.ModuleList([nn.Linear(16, 16)]), "wrapped": wrapped}
        with pytest.raises(ConfigError) as caught:
            precision_for(recipe, pattern, "nothing.*").prepare(
                nn.ModuleDict({**parts, "mha": nn.MultiheadAttention(16, 2)})
            )
        assert expected in str(caught.value)
        assert len(caught.value.problems) == 2
        assert "layers.keep_fp32" in caught.value.problems[0].where


class Pair(NamedTuple):
    left: Tensor
    right: Any


class Report(nn.Module):
    """Returns the dtypes of all that it was given."""

    def forward(
        self, pair: Pair, *rest: Any, mask: Tensor, more: dict[str, list[Tensor]]
    ) -> list[torch.dtype]:
        given = [pair.left, pair.right[0], *rest, mask, *more["a"]]
        return [value.dtype for value in given]


def test_inputs_of_every_form_are_widened_and_nothing_else_is() -> None:
    precision = precision_for("bf16", "report")
    model = precision.prepare(nn.ModuleDict({"report": Report(), "linear": nn.Linear(16, 16)}))
    half, brain = torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16)
    whole, wide, flag = (
        torch.ones(2, dtype=torch.int64),
        torch.ones(2).double(),
        torch.ones(2).bool(),
    )
    with precision.context():
        dtypes = model["report"](
            Pair(half, (brain,)), whole, wide, mask=flag, more={"a": [half, brain]}
        )
    fp32 = torch.float32
    assert dtypes == [fp32, fp32, torch.int64, torch.float64, torch.bool, fp32, fp32]
    assert half.dtype == torch.float16


def test_activation_checkpointing_recomputes_the_same() -> None:
    grads: list[list[Tensor]] = []
    for reentrant in (None, False, True):
        precision = precision_for("fp16_scaler", "*.scores")
        model = precision.prepare(loud(reentrant))
        with precision.context():
            loss = model(x()).float().square().mean()
        precision.backward(loss)
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
        assert model.get_submodule("0.scores").seen == [torch.float32] * (
            1 if reentrant is None else 2
        )
    assert len(grads[0]) == 6
    for kept, *recomputed in zip(*grads, strict=True):
        assert all(torch.equal(kept, grad) for grad in recomputed)


def test_ddp_and_state_dict_see_the_same_model(tmp_path: Any) -> None:
    keys = list(build(dim=32, layers=2, heads=2).state_dict())
    precision = precision_for("bf16", "*.scores", "loss", "lm_head")
    model = precision.prepare(build(dim=32, layers=2, heads=2))
    assert list(model.state_dict()) == keys
    model.load_state_dict(build(dim=32, layers=2, heads=2).state_dict())
    tokens = torch.arange(33)[None]
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        with precision.context():
            loss, alone = (
                called(tokens[:, :-1], targets=tokens[:, 1:]) for called in (wrapped, model)
            )
        precision.backward(loss)
        del wrapped  # before its group, whose threads may wait for Python's lock: else this process hangs now and then
    finally:
        dist.destroy_process_group()
    assert torch.equal(loss, alone)
    assert model.lm_head.weight.grad is not None
    assert model.lm_head.weight.grad.dtype == torch.float32


def test_a_deep_copy_is_kept_too_and_a_pickle_is_of_the_own_class() -> None:
    precision = precision_for("fp16_scaler", "*.scores")
    model = precision.prepare(loud())
    scores = model.get_submodule("0.scores")
    assert isinstance(scores, Scores)
    assert type(scores).__name__ == "Scores"
    twin = copy.deepcopy(model)
    with precision.context():
        assert torch.equal(twin(x()), model(x()))
    assert twin.get_submodule("0.scores").seen == [torch.float32]
    assert twin.get_submodule("0.scores") is not scores
    assert type(pickle.loads(pickle.dumps(scores))) is Scores
    assert type(pickle.loads(pickle.dumps(twin)).get_submodule("0.scores")) is Scores


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.slow
def test_compiled_blocks_share_one_graph_and_compute_the_same() -> None:
    torch.manual_seed(0)
    precision = precision_for("bf16", "*.scores")
    model = precision.prepare(build(vocab=64, dim=32, layers=3, heads=2))
    tokens = torch.arange(17)[None]
    with precision.context():
        eager = model(tokens)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    with precision.context():
        compiled = model(tokens)
    torch._dynamo.reset()
    assert counter.frame_count == 1
    assert torch.equal(compiled, eager)
