"""The GPT against independent formulas, and the bring-your-own contract."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.core.config import ModelConfig
from harness.core.errors import ConfigError
from harness.models import Task, build_model
from harness.models.gpt import Scores, build, rotary, rotate, spread


def test_size_ties_and_first_loss() -> None:
    torch.manual_seed(0)
    model = build()
    assert 3.0e6 < sum(p.numel() for p in model.parameters()) < 3.5e6
    tokens = torch.randint(0, 256, (2, 65))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    assert loss.shape == ()
    assert abs(loss.item() - math.log(256)) < 0.2, "a fresh model knows nothing"
    tied = build(dim=64, layers=1, heads=2, tied=True)
    assert tied.lm_head.weight is tied.embed.weight


def test_rotation_matches_complex_multiplication() -> None:
    x = torch.randn(1, 1, 5, 8, dtype=torch.float64)
    ours = rotate(x.float(), *rotary(5, 8, torch.device("cpu"))).double()
    frequency = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    phase = torch.polar(
        torch.ones(5, 4, dtype=torch.float64), torch.outer(torch.arange(5.0).double(), frequency)
    )
    turned = torch.complex(x[..., :4], x[..., 4:]) * phase
    torch.testing.assert_close(
        ours, torch.cat([turned.real, turned.imag], -1), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_model_is_causal(kv_heads: int) -> None:
    torch.manual_seed(0)
    model = build(dim=64, layers=2, heads=4, kv_heads=kv_heads, ffn=176)
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :9], b[:, :9])
    assert not torch.equal(a[:, 9:], b[:, 9:])


def test_impossible_sizes_are_named_together() -> None:
    with pytest.raises(ConfigError) as caught:
        build(dim=-1, layers=0)
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="does not divide into 3 heads"):
        build(dim=64, heads=3)
    with pytest.raises(ConfigError, match="kv_heads"):
        build(dim=64, heads=4, kv_heads=3)


def test_targets_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_models.py").write_text(
        "from torch import nn\n"
        "def logits(width): return nn.Sequential(nn.Embedding(256, width), nn.Linear(width, 256))\n"
        "def nothing(): return 3\n"
        "def hollow(): return nn.Identity()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = build_model(ModelConfig(target="mine_models:logits", args={"width": 16}))
    tokens = torch.randint(0, 256, (2, 8))
    loss = Task(model, "mine").loss(model, {"inputs": tokens, "targets": tokens})
    expected = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert torch.equal(loss, expected)
    for target, args, expected_text in (
        ("mine_models:logit", {}, 'did you mean "logits"'),
        ("mine_modles:logits", {}, "cannot import"),
        ("mine_models:logits", {"wdth": 16}, "it takes: width"),
        ("mine_models:nothing", {}, "returned a int"),
        ("mine_models:hollow", {}, "without parameters"),
    ):
        with pytest.raises(ConfigError, match=expected_text):
            build_model(ModelConfig(target=target, args=args))


def test_a_model_that_breaks_the_loss_contract_is_told_so() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return self.weight

    tokens = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"returned a tensor \[3\], not a 0-d loss"):
        Task(Wrong(), "wrong").loss(Wrong(), {"inputs": tokens, "targets": tokens})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_spread_heads_attend_as_grouped_ones(dtype: torch.dtype, kv_heads: int) -> None:
    """Output bit for bit; the gradients of shared heads are sums over their group, in another order."""
    generator = torch.Generator().manual_seed(kv_heads)
    shapes = ((2, 8, 33, 16), (2, kv_heads, 33, 16), (2, kv_heads, 33, 16))
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes
    )
    grouped = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    spread_out = F.scaled_dot_product_attention(q, spread(k, 8), spread(v, 8), is_causal=True)
    assert torch.equal(grouped, spread_out)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for expected, found in zip(
        torch.autograd.grad(grouped.square().sum(), (q, k, v)),
        torch.autograd.grad(spread_out.square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_cpu_shares_heads_as_before() -> None:
    """Spreading is for cards without a fused kernel: elsewhere a run's losses stay bit for bit as they were."""
    scores, q, k = Scores(), torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    assert torch.equal(
        scores(q, k, k), F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    )
