"""`layers.fuse` in the plan: what is fused, and by name what is not and why. What native computes; TE: tests/te_cpu."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from compile_support import State, assert_same_bits, state_after, step
from native_support import CPU
from torch import Tensor, nn

from harness.capability.probe import probe
from harness.core.errors import ConfigError
from harness.core.plan_text import fold
from harness.models.gpt import FeedForward, Settings, build
from harness.precision.backends import native_triton
from harness.precision.backends.native import NativeBackend
from harness.precision.layers import DECLARATION
from harness.precision.plan import Plan, make_plan
from harness.precision.recipe import Recipe, Rung

TE = Rung(backend="transformer_engine", precision="fp8", tiers=["CPU"])


def plan_for(
    model: nn.Module, rung: Rung = TE, fuse: bool = True, **sections: dict[str, Any]
) -> Plan:
    layers = {"min_features": 16, "fuse": fuse, **sections.pop("layers", {})}
    recipe = Recipe.model_validate(
        {"name": "r", "ladder": [rung.model_dump()], "layers": layers, **sections}
    )
    return make_plan(recipe, probe(), rung, [], model)


def reason(plan: Plan, module: str) -> str:
    return next(row.reason for row in plan.layers if row.module == module)


def tiny() -> nn.Module:
    return build(vocab=64, dim=32, layers=2, heads=2, ffn=64)


def test_the_shipped_model_declares_its_norms_and_the_plan_tells() -> None:
    plan = plan_for(tiny())
    assert plan.fused_norms() == {
        "blocks.0.attn.qkv": "blocks.0.attn_norm",
        "blocks.0.mlp.gate_up": "blocks.0.mlp_norm",
        "blocks.1.attn.qkv": "blocks.1.attn_norm",
        "blocks.1.mlp.gate_up": "blocks.1.mlp_norm",
    }
    assert plan.fused_mlps() == {
        f"blocks.{index}.mlp.down": f"blocks.{index}.mlp.gate_up" for index in range(2)
    }
    assert plan.notes[-1] == (
        "layers.fuse: 4 of 5 declared pairs are fused, see their rows; 2 of 2 declared SwiGLU MLPs are one block"
    )
    assert reason(plan, "blocks.0.mlp.down") == "converted, one MLP with gate_up"
    assert reason(plan, "blocks.0.attn.qkv") == "converted, fused with attn_norm"
    assert "in one with attn.qkv" in reason(plan, "blocks.0.attn_norm")
    assert "excluded by name" in reason(plan, "lm_head")
    assert reason(plan, "norm") == "not a Linear: fp32 weights, autocast decides per op"
    rows = {row["module"]: row for row in plan.as_dict()["layers"]}
    assert rows["blocks.1.mlp.gate_up"]["norm"] == "blocks.1.mlp_norm"
    assert len(fold(plan.as_dict()["layers"])) == 9, "equal blocks are one row of the table"
    with_head = plan_for(tiny(), layers={"exclude_if_present": []})
    assert with_head.fused_norms()["lm_head"] == "norm"


def test_off_by_default_nothing_is_fused_and_nothing_is_said() -> None:
    for plan in (
        plan_for(tiny(), fuse=False),
        plan_for(nn.Sequential(nn.Linear(16, 16)), fuse=False),
    ):
        assert plan.fused_norms() == {}
        assert "fuse" not in str(plan.as_dict())


@pytest.mark.parametrize(
    ("rung", "fp8", "why"),
    [
        (
            Rung(backend="torchao", precision="fp8", tiers=["CPU"]),
            {},
            "torchao:fp8 has no fused blocks",
        ),
        (
            Rung(backend="autocast", precision="bf16", tiers=["CPU"]),
            {},
            "autocast:bf16 has no fused blocks",
        ),
        (TE, {"scaling": "current"}, "fp8.scaling current measures the norm's output"),
        (TE, {"scaling": "block"}, "fp8.scaling block measures the norm's output"),
    ],
)
def test_what_fuses_nothing_is_named_with_the_reason(
    rung: Rung, fp8: dict[str, Any], why: str
) -> None:
    model = build(vocab=128, dim=128, layers=1, heads=2, ffn=128)
    plan = plan_for(model, rung, fp8=fp8)
    assert plan.fused_norms() == {}
    assert plan.notes[-1].startswith(f"layers.fuse: nothing is fused, {why}")
    assert plan.layers == plan_for(model, rung, fuse=False, fp8=fp8).layers


def test_native_fuses_casts_without_a_declaration_and_says_where_not() -> None:
    rung = Rung(backend="native", precision="fp8", tiers=["CPU"])
    model = nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 16))
    plan = plan_for(model, rung)
    assert plan.notes[-1] == (
        "layers.fuse: native:fp8 casts in blocks compiled for a GPU, by the kernel that makes a tensor; "
        "not in sampled steps, or beside a layer in BF16"
    )
    assert plan.layers == plan_for(model, rung, fuse=False).layers


class NormAndMlp(nn.Module):
    """Where casts can be fused: after a norm and SwiGLU, and after the gradient of each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32, eps=1e-5)
        self.mlp = FeedForward(
            Settings(8, dim=32, layers=1, heads=1, kv_heads=1, ffn=48, tied=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def hostile() -> list[Tensor]:
    """Inputs of 20 rows, which no GEMM on FP8 units takes as they are."""
    torch.manual_seed(1)
    usual = torch.randn(20, 32)
    some_zero = torch.where(usual > 0, usual, 0.0)
    overflowing, broken = usual.clone(), usual.clone()
    overflowing[3] = 3e38
    broken[0, 0], broken[7, 5] = torch.nan, torch.inf
    return [usual, 1e6 * usual, some_zero, 0.0 * usual, 1e-39 * usual, overflowing, broken]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_fused_casts_have_the_bits_of_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the default compiler: outputs, gradients, scales and histories, with NaN, infinities and subnormal values.

    A layer is demoted in one window and another one is sampled: there nothing is fused.
    """
    turns: list[torch.Size] = []

    def turn(rows: Tensor) -> Tensor:
        turns.append(rows.shape)
        return native_triton.turned(rows)

    kernel = partial(native_triton.quantize_pair)
    monkeypatch.setattr(native_triton, "load", lambda _: (kernel, "in the place of the kernel"))
    monkeypatch.setattr(native_triton, "load_turn", lambda _: turn)

    def run(fuse: bool) -> list[State]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = NormAndMlp()
        backend = native(model, fuse)
        model.compile(fullgraph=True)
        found: list[State] = []
        for number, x in enumerate([*hostile(), *hostile()]):
            backend.switch(*([["mlp.down"], []] if number == 2 else [[], ["mlp.down"]]))
            out = step(backend, model, x.requires_grad_(), sample=number == 4)
            assert x.grad is not None
            found.append({"out": out.detach(), "x": x.grad, **state_after(backend, model)})
        return found

    apart = run(fuse=False)
    assert not turns, "our kernel writes the transpose"
    fused = run(fuse=True)
    assert len(turns) == 4 * (len(fused) - 2), "of two layers an input and a gradient"
    for mine, theirs in zip(fused, apart, strict=True):
        assert_same_bits(mine, theirs)


def test_without_a_kernel_that_transposes_casts_stay_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = partial(native_triton.quantize_pair)
    monkeypatch.setattr(native_triton, "load", lambda _: (kernel, "ours"))
    assert native(NormAndMlp(), fuse=True).note == "ours"
    monkeypatch.setattr(native_triton, "load_turn", lambda _: partial(native_triton.turned))
    assert native(NormAndMlp(), fuse=False).note == "ours"
    assert native(NormAndMlp(), fuse=True).note == "ours, in compiled blocks by the compiler"


def native(model: nn.Module, fuse: bool) -> NativeBackend:
    """As on a GPU with FP8 units."""
    rung = Rung(backend="native", precision="fp8", tiers=["CPU"])
    layers = {"min_features": 16, "fuse": fuse}
    recipe = Recipe.model_validate({"name": "r", "ladder": [rung.model_dump()], "layers": layers})
    return NativeBackend(make_plan(recipe, probe(), rung, [], model), recipe, model, CPU, True)


def test_a_model_that_declares_nothing_is_told() -> None:
    plan = plan_for(nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 16)))
    assert (
        plan.notes[-1]
        == f"layers.fuse: nothing is fused, no module of the model declares {DECLARATION}"
    )


class Odd(nn.Module):
    """A pair for each way in which one does not fit."""

    fusible_norms: ClassVar = {
        "fits": "norm",
        "subclass": "own",
        "sizes": "wide",
        "weightless": "bare",
        "biasless": "partial",
        "anyeps": "eps",
        "replaced": "patched",
        "q": "shared",
        "k": "shared",
        "kept": "precise",
    }

    def __init__(self) -> None:
        super().__init__()

        class Own(nn.RMSNorm):
            pass

        self.norm, self.own, self.shared = nn.LayerNorm(16), Own(16, eps=1e-5), nn.LayerNorm(16)
        self.wide, self.bare = nn.LayerNorm([2, 16]), nn.LayerNorm(16, elementwise_affine=False)
        self.partial, self.eps = nn.LayerNorm(16, bias=False), nn.RMSNorm(16)
        self.patched, self.precise = nn.LayerNorm(16), nn.LayerNorm(16)
        self.patched.forward = lambda input: input  # type: ignore[method-assign]
        for name in self.fusible_norms:
            setattr(self, name, nn.Linear(16, 16))


def test_a_pair_that_does_not_fit_is_named_with_the_reason() -> None:
    plan = plan_for(nn.Sequential(Odd()), layers={"keep_fp32": ["0.precise"]})
    assert plan.fused_norms() == {"0.fits": "0.norm"}
    assert plan.notes[-1] == "layers.fuse: 1 of 10 declared pairs are fused, see their rows"
    expected = {
        "subclass": "not fused with own: Own is neither RMSNorm nor LayerNorm",
        "sizes": "not fused with wide: it normalises (2, 16), the layer takes 16",
        "weightless": "not fused with bare: it has no weight or no bias of its own",
        "biasless": "not fused with partial: it has no weight or no bias of its own",
        "anyeps": "not fused with eps: eps None depends on the dtype",
        "replaced": "not fused with patched: its forward was replaced on the instance",
        "q": "not fused with shared: it feeds 2 Linears",
        "k": "not fused with shared: it feeds 2 Linears",
        "kept": "not fused with precise: it is kept in fp32",
    }
    assert {
        name: reason(plan, f"0.{name}").removeprefix("converted, ") for name in expected
    } == expected


class OddMlp(nn.Module):
    """An MLP, and what is odd about it."""

    fusible_norms: ClassVar = {"first": "norm"}
    fusible_swiglu: ClassVar = {"first": "second"}

    def __init__(
        self, inner: int = 32, outer: int = 16, biases: tuple[bool, bool] = (True, True)
    ) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16, eps=1e-5)
        self.first = nn.Linear(16, 64, bias=biases[0])
        self.second = nn.Linear(inner, outer, bias=biases[1])

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.first(self.norm(x)).chunk(2, dim=-1)
        out: Tensor = self.second(F.silu(gate) * up)
        return out


def gelu() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.first(self.norm(x)).chunk(2, dim=-1)
        out: Tensor = self.second(F.gelu(gate) * up)
        return out

    made: nn.Module = type("Gelu", (OddMlp,), {"forward": forward})()
    return made


def declared(norms: dict[str, str], swiglu: dict[str, str]) -> nn.Module:
    made = OddMlp()
    made.inner_norm, made.third = nn.RMSNorm(32, eps=1e-5), nn.Linear(32, 16)
    made.fusible_norms, made.fusible_swiglu = norms, swiglu  # type: ignore[misc]
    return made


NORM = {"first": "norm"}


@pytest.mark.parametrize(
    ("model", "layers", "why"),
    [
        (OddMlp(inner=64), {}, "16 to 64 and 64 to 16 features make no MLP with two halves"),
        (OddMlp(outer=32), {}, "16 to 64 and 32 to 32 features make no MLP with two halves"),
        (OddMlp(biases=(True, False)), {}, "one of them has a bias, and the other has none"),
        (OddMlp(), {"exclude": ["first"]}, "that does not run in FP8"),
        (declared({"third": "norm"}, {"first": "second"}), {}, "no norm is fused with that"),
        (
            declared({**NORM, "second": "inner_norm"}, {"first": "second"}),
            {},
            "inner_norm is fused with this one",
        ),
        (
            declared(NORM, {"first": "second", "third": "second"}),
            {},
            "a Linear is declared in several",
        ),
        (OddMlp(), {"keep_fp32": ["norm"]}, "no norm is fused with that"),
        (gelu(), {}, "its forward calls torch.nn.functional.gelu"),
    ],
)
def test_an_mlp_that_does_not_fit_is_named_with_the_reason(
    model: nn.Module, layers: dict[str, Any], why: str
) -> None:
    plan = plan_for(model, layers=layers)
    assert plan.fused_mlps() == {}
    assert (
        f", not one MLP with first: {why}" in reason(plan, "second")
        or why == "a Linear is declared in several"
    )
    assert f": {why}" in reason(plan, "second")
    assert "0 of" in plan.notes[-1]


def test_an_mlp_that_fits_is_one_block_unless_its_second_is_not_fp8() -> None:
    assert plan_for(OddMlp()).fused_mlps() == {"second": "first"}
    rows = {row["module"]: row for row in plan_for(OddMlp()).as_dict()["layers"]}
    assert rows["second"]["first"] == "first"
    plan = plan_for(OddMlp(), layers={"exclude": ["second"]})
    assert plan.fused_mlps() == {}
    assert plan.fused_norms() == {"first": "norm"}
    assert reason(plan, "second") == "excluded by name (second)"


def test_a_norm_inside_of_what_is_kept_in_fp32_is_apart() -> None:
    class Around(nn.Module):
        fusible_norms: ClassVar = {"linear": "before.norm"}

        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Sequential()
            self.before.add_module("norm", nn.LayerNorm(16))
            self.linear = nn.Linear(16, 16)

    plan = plan_for(Around(), layers={"keep_fp32": ["before"]})
    assert reason(plan, "linear") == "converted, not fused with before.norm: it is kept in fp32"


def test_two_norms_for_one_layer_are_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.linear = nn.LayerNorm(16), nn.LayerNorm(16), nn.Linear(16, 16)
            self.again = self.linear
            self.fusible_norms = {"linear": "one", "again": "two"}

    plan = plan_for(Twice())
    assert "2 norms are declared to feed it" in reason(plan, "linear")
    assert plan.fused_norms() == {}


def test_declarations_that_mean_nothing_are_all_named() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16))
    model.fusible_norms = {"0": "norm", "linear": "2", "": "2"}  # type: ignore[assignment]
    model[1].fusible_norms = ["norm"]  # type: ignore[assignment]
    model.fusible_swiglu = {"0": "down"}  # type: ignore[assignment]
    with pytest.raises(ConfigError) as caught:
        plan_for(model)
    assert [(problem.where, problem.what) for problem in caught.value.problems] == [
        ("Sequential.fusible_norms", "has no part 'norm'"),
        ("Sequential.fusible_norms", "has no part 'linear'"),
        ("Sequential.fusible_norms", "has no part ''"),
        ("1.fusible_norms", "is a list, not a mapping"),
        ("Sequential.fusible_swiglu", "has no part 'down'"),
    ]
    plan_for(model, fuse=False)
