"""A backend is a class and an entry in the registry: one that nobody else knows of trains, and is asked what it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from harness import Precision
from harness.capability.cards import Tier
from harness.capability.probe import MachineFacts
from harness.core.errors import ConfigError
from harness.estimate.roofline import find_card
from harness.estimate.trace import facts_of
from harness.precision.backends.autocast import AutocastBackend
from harness.precision.backends.registry import BACKENDS, Backend
from harness.precision.compiling import check_compile
from harness.precision.layers import shallow_copy, swap_linears
from harness.precision.plan import Plan, make_plan, resolve
from harness.precision.recipe import Recipe, load_recipe
from harness.tracking.history import RunHistory

CPU = torch.device("cpu")
LR = 0.5


def coarse(values: Tensor) -> Tensor:
    """As E4M3 holds them, unscaled."""
    return values.to(torch.float8_e4m3fn).float()


class CoarseLinear(nn.Linear):
    """Multiplies what E4M3 holds of its operands; gradients pass as if nothing was rounded."""

    def forward(self, input: Tensor) -> Tensor:
        held = self.weight + (coarse(self.weight.detach()) - self.weight.detach())
        return F.linear(coarse(input.detach()), held, self.bias)


class CoarseBackend(AutocastBackend):
    """Made up: the planned layers are coarse, the rest is float32."""

    def __init__(self, plan: Plan, recipe: Recipe, model: nn.Module, device: torch.device) -> None:
        super().__init__("fp32", device)
        swap_linears(model, plan.fp8_layers(), lambda linear: shallow_copy(linear, CoarseLinear))


def by_cores(facts: MachineFacts, tier: Tier, scaling: str) -> tuple[bool, str]:
    return facts.cpu_cores != 1, f"{scaling} on {facts.cpu_cores} cores"


COARSE = Backend(
    place=f"{__name__}:CoarseBackend",
    computes={"fp8": by_cores},
    scalings=("current",),
    multiples={"current": 32},
    not_compiled="it is made up",
)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "coarse", COARSE)


def policy(
    tmp_path: Path, rung: str = "{backend: coarse, precision: fp8, tiers: [CPU]}", **fp8: Any
) -> str:
    """The path of a recipe with that first rung, and bf16 under it."""
    ladder = [yaml.safe_load(rung), {"backend": "autocast", "precision": "bf16", "tiers": ["CPU"]}]
    text = {
        "name": "mine",
        "ladder": ladder,
        "fp8": {"scaling": "current", **fp8},
        "layers": {"min_features": 16},
    }
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(text))
    return str(path)


def model() -> nn.Sequential:
    """The last layer's 48 features are no multiple of 32."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 48))


def after_one_step(made: nn.Sequential, x: Tensor, y: Tensor, rounded: bool) -> Tensor:
    """The first layer's weights after SGD, by the chain rule: mean squared error, tanh, two products."""
    first, _, last = made
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        held, weight = (coarse(x), coarse(first.weight)) if rounded else (x, first.weight)
        hidden = (held @ weight.T + first.bias).tanh()
        error = 2 * (hidden @ last.weight.T + last.bias - y) / y.numel()
        return first.weight - LR * ((error @ last.weight) * (1 - hidden**2)).T @ held


@pytest.mark.usefixtures("cpu_on_purpose", "registered")
def test_a_backend_that_is_registered_trains_by_its_name(tmp_path: Path) -> None:
    made = model()
    x, y = torch.randn(8, 32), torch.randn(8, 48)
    expected, plain = (after_one_step(made, x, y, rounded) for rounded in (True, False))
    precision = Precision.from_recipe(policy(tmp_path))
    precision.prepare(made)
    optimizer = torch.optim.SGD(made.parameters(), lr=LR)
    with precision.context():
        loss = F.mse_loss(made(x), y)
    precision.backward(loss)
    assert precision.step(optimizer).was_applied
    found = made.get_parameter("0.weight").detach()
    torch.testing.assert_close(found, expected)
    assert (plain - expected).abs().max() > 100 * (found - expected).abs().max()
    assert precision.plan.resolved == "coarse:fp8"
    assert precision.plan.rungs[0].reason.startswith("current on ")
    told = {row.module: (row.precision, row.backend, row.reason) for row in precision.plan.layers}
    assert told["0"] == ("fp8", "coarse", "converted")
    assert told["2"][:2] == ("bf16", "autocast")
    assert "32" in told["2"][2]


def test_a_name_that_is_not_registered_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(policy(tmp_path))
    (problem,) = caught.value.problems
    assert problem.what == "'coarse' is not one of transformer_engine, native, torchao, autocast"
    assert problem.where.endswith("ladder[0].backend")


@pytest.mark.parametrize("name", ["3", "null", "[native]", "{a: native}", "true"])
def test_what_is_no_name_is_refused_at_its_place(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(policy(tmp_path, f"{{backend: {name}, precision: fp8, tiers: [CPU]}}"))
    assert [problem.where.rpartition(": ")[2] for problem in caught.value.problems] == [
        "ladder[0].backend"
    ]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("rung", "scaling", "expected"),
    [
        ("{backend: coarze, precision: fp8, tiers: [CPU]}", "current", 'did you mean "coarse"?'),
        (
            "{backend: coarse, precision: bf16, tiers: [CPU]}",
            "current",
            "backend coarse computes fp8, not bf16",
        ),
        (
            "{backend: coarse, precision: fp8, tiers: [CPU]}",
            "delayed",
            "coarse rungs compute current scaling only, fp8.scaling is delayed: take them out",
        ),
        (
            "{backend: native, precision: fp8, tiers: [CPU]}",
            "block",
            "native rungs compute delayed scaling only, fp8.scaling is block: take them out",
        ),
        (
            "{backend: torchao, precision: fp8, tiers: [CPU]}",
            "current",
            "fp8.scaling current needs a transformer_engine or coarse rung",
        ),
    ],
)
def test_a_recipe_is_held_to_what_its_backends_declare(
    tmp_path: Path, rung: str, scaling: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(policy(tmp_path, rung, scaling=scaling))
    assert expected in str(caught.value)


@pytest.mark.usefixtures("registered")
def test_a_machine_that_it_does_not_support_takes_the_next_rung(tmp_path: Path) -> None:
    rung, verdicts = resolve(load_recipe(policy(tmp_path)), MachineFacts(cpu_cores=1))
    assert rung is not None
    assert rung.name == "autocast:bf16"
    assert verdicts[0].reason == "current on 1 cores"


@pytest.mark.usefixtures("registered")
def test_what_it_says_of_the_compiler_is_told(tmp_path: Path) -> None:
    rung = load_recipe(policy(tmp_path)).ladder[0]
    problem = check_compile(rung, nn.Sequential(nn.ModuleList([nn.Linear(2, 2)])), CPU)[0]
    assert (problem.what, problem.why) == ("the coarse backend does not compile", "it is made up")
    assert "whose rung here is transformer_engine, native, torchao or autocast" in problem.fix


@pytest.mark.parametrize(
    ("fuses", "note"),
    [
        ((), "coarse:fp8 has no fused blocks (transformer_engine has)"),
        (("delayed",), "fp8.scaling current measures the norm's output"),
        (("current",), "no module of the model declares"),
    ],
)
def test_what_it_can_fuse_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fuses: tuple[str, ...], note: str
) -> None:
    monkeypatch.setitem(BACKENDS, "coarse", replace(COARSE, fuses=fuses))
    recipe = load_recipe(policy(tmp_path))
    recipe = recipe.model_copy(update={"layers": recipe.layers.model_copy(update={"fuse": True})})
    assert note in make_plan(recipe, MachineFacts(), recipe.ladder[0], (), model()).notes[-1]


@pytest.mark.parametrize("others", [True, False])
def test_a_library_that_cannot_run_on_paper_is_taken_to_be_installed_there(
    monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    monkeypatch.setitem(
        BACKENDS, "coarse", replace(COARSE, library="coarse_kernels", stand_in="native")
    )
    monkeypatch.setitem(BACKENDS, "fine", replace(COARSE, library="fine_kernels"))
    libraries = facts_of(find_card("H100"), others).libraries
    assert libraries["coarse_kernels"].ok is others
    assert "fine_kernels" not in libraries


def expected_slots(folder: Path, plan: dict[str, Any]) -> set[str]:
    """Of a run with that plan.json."""
    (folder / "journal.jsonl").write_text("")
    (folder / "plan.json").write_text(json.dumps(plan))
    return RunHistory.read(folder).expected_slots()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_run_says_itself_whether_its_amaxes_prove_fp8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    monkeypatch.setitem(BACKENDS, "coarse", replace(COARSE, keeps_amax=keeps))
    recipe = load_recipe(policy(tmp_path))
    plan = make_plan(recipe, MachineFacts(), recipe.ladder[0], (), model()).as_dict()
    monkeypatch.delitem(BACKENDS, "coarse")
    assert expected_slots(tmp_path, plan) == (
        {"0.input", "0.weight", "0.grad_output"} if keeps else set()
    )


def test_every_declaration_holds_together() -> None:
    for name, backend in BACKENDS.items():
        assert callable(backend.load()), name
        assert {*backend.fuses, *backend.multiples} <= set(backend.scalings), name
        if backend.stand_in:
            other = BACKENDS[backend.stand_in]
            assert other.computes.keys() >= backend.computes.keys(), (
                "it stands in for every precision"
            )
            assert "delayed" in other.scalings, "what the recipe's scaling is estimated as"
            assert not other.stand_in
