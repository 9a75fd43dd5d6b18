"""The Transformer Engine backend where TE is missing: what is refused, and what needs no GPU. See also tests/gpu."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from harness.capability.probe import probe
from harness.core.errors import ConfigError, ExitCode, MachineError
from harness.precision.backends import te_library
from harness.precision.backends.te_linear import check_convertible, filled_up, observe
from harness.precision.convert import build_backend
from harness.precision.plan import make_plan
from harness.precision.recipe import Recipe, Rung


@pytest.mark.skipif(
    find_spec("transformer_engine") is not None, reason="Transformer Engine is installed"
)
@pytest.mark.parametrize("scaling", ["delayed", "current", "block"])
def test_without_transformer_engine_the_error_says_what_to_do(scaling: str) -> None:
    rung = Rung(backend="transformer_engine", precision="fp8", tiers=["HOPPER"])
    recipe = Recipe.model_validate(
        {"name": "te", "ladder": [rung.model_dump()], "fp8": {"scaling": scaling}}
    )
    model = nn.Sequential(nn.Linear(128, 128))
    plan = make_plan(recipe, probe(), rung, [], model)
    with pytest.raises(MachineError) as caught:
        build_backend(plan, recipe, model, torch.device("cpu"))
    (problem,) = caught.value.problems
    assert "Transformer Engine does not import" in problem.what
    assert "transformer_engine" in problem.what
    assert problem.where == "backend transformer_engine"
    assert "make setup" in problem.fix
    assert "bf16" in problem.fix
    assert caught.value.exit_code == ExitCode.MACHINE
    assert type(model[0]) is nn.Linear, "the model is left as it was"


def test_environment_variables_that_change_the_numbers_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "high_precision")
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0")
    with pytest.raises(MachineError) as caught:
        te_library.load()
    assert [problem.what.split()[0] for problem in caught.value.problems] == [
        "NVTE_BACKWARD_OVERRIDE",
        "NVTE_UNFUSED_FP8_UPDATE",
    ]
    assert all(problem.fix.startswith("unset NVTE_") for problem in caught.value.problems)


def test_layers_that_could_not_be_replaced_are_all_named() -> None:
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    weight_norm(model[1])
    weight_norm(model[3])
    with pytest.raises(ConfigError) as caught:
        check_convertible(model, ["0", "1", "2", "3"])
    found = {problem.where: problem for problem in caught.value.problems}
    assert set(found) == {"layer 1", "layer 3"}
    assert "weight" in found["layer 3"].what
    assert found["layer 3"].fix == 'add "3" to layers.exclude in the recipe'
    check_convertible(model, ["0", "2"])


def test_a_layer_with_further_parameters_of_its_own_is_named() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    model[0].register_parameter("gain", nn.Parameter(torch.ones(1)))
    with pytest.raises(ConfigError, match="gain"):
        check_convertible(model, ["0"])


@pytest.mark.parametrize(
    "shape", [(32, 8), (3, 16, 8), (1, 8), (5, 3, 8), (8,), (2, 2, 2, 8), (0, 8), (2, 0, 8)]
)
@pytest.mark.parametrize("multiple", [16, 128])
def test_rows_are_filled_up_without_a_trace(shape: tuple[int, ...], multiple: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    counts: list[int] = []

    def run(rows: Tensor) -> Tensor:
        counts.append(rows.numel() // rows.shape[-1])
        return F.linear(rows, weight)

    out = filled_up(run, x, multiple)
    expected = F.linear(x, weight)
    assert counts[0] % multiple == 0
    assert counts[0] > 0
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    for actual, wanted in zip(
        torch.autograd.grad(out, (x, weight), grad),
        torch.autograd.grad(expected, (x, weight), grad),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_amaxes_are_the_largest_magnitudes_ever_seen(dtype: torch.dtype) -> None:
    amax = torch.zeros(3)
    first, second = (torch.randn(7, 5).to(dtype) for _ in range(2))
    first[3, 2] = -9.5
    for x in (first, second, torch.zeros(0, 5, dtype=dtype)):
        observe(amax[1], x)
    assert amax.tolist() == [0.0, 9.5, 0.0]
    observe(amax[1], torch.full((2, 2), torch.nan, dtype=dtype))
    assert amax[1].item() == 9.5, "NaN is no amax"
    observe(amax[1], torch.tensor([1.0, -torch.inf]).to(dtype))
    assert amax[1].item() == torch.inf
