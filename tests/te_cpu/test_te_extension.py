"""The stand-in of TE's compiled part against oracles that share nothing with it: casts, layouts, GEMMs, roll."""

from __future__ import annotations

import itertools
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import te_extension as tex
import torch
from torch import Tensor

from harness.precision import scaling

oracle: Any = import_module("fp8_oracle")
te: Any = import_module("transformer_engine.pytorch")
general_gemm: Any = import_module("transformer_engine.pytorch.cpp_extensions").general_gemm

pytestmark = pytest.mark.every_version
FORMATS = {"e4m3": tex.DType.kFloat8E4M3, "e5m2": tex.DType.kFloat8E5M2}
SCALES = (1.0, 448.0 / 3.0, 0.0137, 7.3e5, 2.0**-20, 2.0**20, float(torch.finfo(torch.float32).max))


def every_bfloat16() -> Tensor:
    return (
        torch.arange(65536, dtype=torch.int32)
        .to(torch.int16)
        .view(torch.bfloat16)
        .reshape(512, 128)
    )


def quantizer(fmt: str, scale: float, columnwise: bool = False) -> Any:
    made = te.Float8Quantizer(torch.full((1,), scale), torch.zeros(1), FORMATS[fmt])
    made.set_usage(rowwise=True, columnwise=columnwise)
    return made


def values(tensor: Any) -> Tensor:
    """Raw FP8 values of a Float8Tensor as float32."""
    fmt = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}[int(tensor._fp8_dtype)]
    return tensor._data.view(fmt).float()


def same(actual: Tensor, expected: Tensor) -> bool:
    """Bit for bit, signs of zeros included; a NaN is a NaN."""
    a, b = actual.float(), expected.float()
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize(("fmt", "scale"), list(itertools.product(FORMATS, SCALES)))
def test_every_bfloat16_is_cast_as_by_the_rule(fmt: str, scale: float) -> None:
    x = every_bfloat16()
    made = quantizer(fmt, scale, columnwise=True)
    cast = made(x)
    assert same(values(cast), scaling.quantize(x, scale, fmt))
    assert torch.equal(cast._transpose, cast._data.t())
    assert cast._scale_inv.item() == np.float32(1) / np.float32(scale)
    assert made.amax.item() == float("inf")


@pytest.mark.parametrize("fmt", FORMATS)
def test_casts_agree_with_a_table_too(fmt: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 16) * 10 ** torch.empty(64, 16).uniform_(-6, 3)
    x[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    for scale in (1.0, 3.7, 1e4):
        table = torch.from_numpy(oracle.quantize(x.numpy(), scale, fmt)).float()
        assert same(values(quantizer(fmt, scale)(x)), table)


def test_amax_gathers_over_casts_passes_over_nan_and_keeps_infinity() -> None:
    made = quantizer("e4m3", 1.0)
    for x, expected in (
        ([1.0, -3.0], 3.0),
        ([2.0, 0.5], 3.0),
        ([torch.nan, 4.0], 4.0),
        ([-torch.inf, 0.0], torch.inf),
    ):
        made(torch.tensor([x] * 16))
        assert made.amax.item() == expected


@pytest.mark.parametrize("amax", [0.0, 3.0, 1e-45, torch.inf, torch.nan, 448.0, 1e30])
def test_a_scale_from_the_tensor_itself(amax: float) -> None:
    expected = 1.0
    if amax > 0 and amax < np.inf:
        with np.errstate(over="ignore"):
            expected = float(min(np.float32(448.0) / np.float32(amax), np.finfo(np.float32).max))
    found = tex.scale_from_amax(torch.tensor(amax), 448.0, False, 0.0, tex.FLT_MAX)
    assert found.item() == expected
    power = tex.scale_from_amax(torch.tensor(amax), 448.0, True, 0.0, tex.FLT_MAX).item()
    assert np.frexp(power)[0] == 0.5
    assert power <= expected < 2 * power


def test_blocks_have_scales_of_their_own_both_ways() -> None:
    torch.manual_seed(0)
    x = (torch.randn(256, 384) * 10 ** torch.empty(256, 384).uniform_(-3, 3)).bfloat16()
    for dimension in (1, 2):
        made = te.Float8BlockQuantizer(
            FORMATS["e4m3"], rowwise=True, columnwise=True, block_scaling_dim=dimension
        )
        cast = made(x)
        assert tuple(cast._rowwise_scale_inv.shape) == tuple(
            made.get_scale_shape(x.shape, columnwise=False)
        )
        assert tuple(cast._columnwise_scale_inv.shape) == tuple(
            made.get_scale_shape(x.shape, columnwise=True)
        )
        high = 1 if dimension == 1 else 128
        for i, j in ((0, 0), (3, 1), (200, 2)):
            tile = x[i // high * high : i // high * high + high, 128 * j : 128 * j + 128].float()
            scale = 2.0 ** np.floor(np.log2(np.float32(448.0) / np.float32(tile.abs().max())))
            where = (j, i) if dimension == 1 else (i // high, j)
            assert cast._rowwise_scale_inv[where].item() == 1 / scale
            here = (i, slice(128 * j, 128 * j + 128))
            table = oracle.quantize(x[here].float().numpy(), scale, "e4m3")
            assert same(
                cast._rowwise_data.view(torch.float8_e4m3fn)[here].float(), torch.from_numpy(table)
            )
        back = cast.dequantize()
        assert (
            (back.float() - x.float()).abs() <= x.float().abs() / 16 + 1e-4 * x.float().abs().max()
        ).all()


def operands(tokens: int = 32) -> tuple[Any, Any, Tensor, Tensor]:
    """Weight [48, 64] and input [tokens, 64], quantised both ways, and what they stand for in float64."""
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, 64), torch.randn(48, 64)
    a, b = quantizer("e4m3", 100.0, True)(weight), quantizer("e4m3", 50.0, True)(x)
    return a, b, values(a).double() / 100, values(b).double() / 50


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_gemms_multiply_what_the_operands_stand_for(layout: str) -> None:
    weight, x, exact_weight, exact_x = operands()
    torch.manual_seed(1)
    grad = quantizer("e5m2", 20.0, True)(torch.randn(32, 48))
    exact_grad = values(grad).double() / 20
    bias = torch.randn(48).bfloat16()
    first, second, expected = {
        "TN": (weight, x, exact_x @ exact_weight.t() + bias.double()),
        "NN": (weight, grad, exact_grad @ exact_weight),
        "NT": (x, grad, exact_grad.t() @ exact_x),
    }[layout]
    forward = layout == "TN"
    options = {"layout": layout, "grad": not forward, "bias": bias if forward else None}
    out = general_gemm(first, second, out_dtype=torch.bfloat16, **options)[0]
    assert out.dtype == torch.bfloat16
    assert ((out.double() - expected).abs() <= expected.abs() / 256 + 1e-5).all(), "rounded once"


def test_a_gemm_on_plain_operands_gives_the_bias_gradient_too() -> None:
    torch.manual_seed(0)
    x, grad, bias = (
        torch.randn(32, 64).bfloat16(),
        torch.randn(32, 48).bfloat16(),
        torch.zeros(48).bfloat16(),
    )
    wgrad, bias_grad, *_ = general_gemm(
        x, grad, out_dtype=torch.bfloat16, layout="NT", grad=True, bias=bias
    )
    torch.testing.assert_close(
        wgrad.double(), grad.double().t() @ x.double(), rtol=2**-8, atol=1e-5
    )
    torch.testing.assert_close(bias_grad.double(), grad.double().sum(0), rtol=2**-8, atol=1e-5)


def test_a_copy_that_is_not_there_is_missed() -> None:
    rowwise = quantizer("e4m3", 1.0)(torch.randn(48, 64))
    with pytest.raises(RuntimeError, match="no columnwise data"):
        general_gemm(
            rowwise,
            quantizer("e5m2", 1.0)(torch.randn(32, 48)),
            out_dtype=torch.bfloat16,
            layout="NN",
        )


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_the_roll_is_the_shared_rule(algo: str, margin: int) -> None:
    torch.manual_seed(0)
    length, layers = 5, 7
    states = [(torch.zeros(length, 3), torch.ones(3)) for _ in range(layers)]
    history, scale = torch.zeros(length, 3 * layers), torch.ones(3 * layers)
    for step in range(20):
        amax = 10 ** torch.empty(3 * layers).uniform_(-44, 38)
        amax[torch.rand(3 * layers) < 0.2] = 0.0
        amax[torch.rand(3 * layers) < 0.05] = torch.inf
        for layer, (own, _) in enumerate(states):
            own[0] = amax[3 * layer : 3 * layer + 3]
        buffer = torch.cat([own[0] for own, _ in states])
        tex.fused_amax_and_scale_update_after_reduction(
            buffer,
            [own for own, _ in states],
            [own for _, own in states],
            algo,
            tex.DType.kFloat8E4M3,
            margin,
        )
        history[0] = amax
        history, scale = scaling.update(history, scale, 448.0, margin, algo)
        assert torch.equal(torch.cat([own for own, _ in states], dim=1), history), step
        assert torch.equal(torch.cat([own for _, own in states]), scale), step


def test_te_itself_rolls_a_linear_of_its_own_by_the_shared_rule() -> None:
    """te.Linear, te.autocast and TE's global state as they are: what the harness' rule was read from."""
    manager: Any = import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager
    manager.reset()
    torch.manual_seed(0)
    linear = te.Linear(64, 32, bias=True, params_dtype=torch.float32)
    recipe = import_module("transformer_engine.common.recipe").DelayedScaling(
        amax_history_len=4, margin=1
    )
    history, scale = torch.zeros(4, 3), torch.ones(3)
    for step in range(12):
        x = (torch.randn(32, 64) * (step % 5 + 0.1)).bfloat16().requires_grad_()
        grad = torch.randn(32, 32).bfloat16() * 10.0**-step
        history[0] = torch.stack(
            [tensor.detach().abs().amax().float() for tensor in (x, linear.weight, grad)]
        )
        with torch.autocast("cpu", torch.bfloat16), te.autocast(True, recipe=recipe):
            out = linear(x)
        out.backward(grad)
        history, scale = scaling.update(
            history, scale, torch.tensor([448.0, 448.0, 57344.0]), 1, "max"
        )
        forward, backward = linear.fp8_meta["scaling_fwd"], linear.fp8_meta["scaling_bwd"]
        assert torch.equal(
            torch.cat([forward.amax_history[:, :2], backward.amax_history[:, :1]], 1), history
        ), step
        assert torch.equal(torch.cat([forward.scale[:2], backward.scale[:1]]), scale), step
        with torch.no_grad():
            linear.weight.mul_(1.01)
    manager.reset()


def test_what_is_not_played_is_refused_when_it_is_used() -> None:
    with pytest.raises(
        NotImplementedError, match=r"transformer_engine_torch\.fused_attn_fwd has no stand-in"
    ):
        import_module("transformer_engine_torch").fused_attn_fwd()
    with pytest.raises(NotImplementedError, match="MXFP8Quantizer has no stand-in"):
        te.MXFP8Quantizer(FORMATS["e4m3"])(torch.randn(32, 32))
