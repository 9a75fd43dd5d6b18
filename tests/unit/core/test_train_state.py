"""TrainState: what is optional, what is not, limits through JSON; precision state where the precision is another."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.capability.probe import probe
from harness.core.errors import CheckpointError
from harness.core.facts import Limits
from harness.core.protocols import PrecisionBackend
from harness.core.state import RunLedger, TrainState, seed_torch
from harness.models.gpt import build
from harness.precision.backends.autocast import AutocastBackend
from harness.precision.convert import build_backend
from harness.precision.loss_scale import LossScale
from harness.precision.plan import make_plan, pad_numbers, resolve
from harness.precision.recipe import LossScaleConfig, load_recipe

CPU = torch.device("cpu")


class Part:
    def __init__(self, value: float) -> None:
        self.value = torch.tensor(value)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"value": self.value}, {}

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        self.value = tensors["value"].clone()


def state(**parts: float) -> TrainState:
    return TrainState({name: Part(value) for name, value in parts.items()})


def values(of: TrainState) -> dict[str, float]:
    return {name: part.state_dict()[0]["value"].item() for name, part in of.parts.items()}


def begun(run: str) -> TrainState:
    made = state(model=1.0)
    made.ledger.begin(run)
    return made


def test_a_run_that_goes_on_keeps_its_identity() -> None:
    here = state(model=2.0)
    here.resume(*begun("own").state_dict())
    assert here.ledger == begun("own").ledger


def test_a_ledger_that_is_newer_than_the_checkpoint_is_the_runs_own() -> None:
    saved = begun("own").state_dict()
    here = begun("own")
    here.ledger.go_back(20, [21])
    here.resume(*saved)
    assert here.ledger.skipped_windows == [21]


@pytest.mark.parametrize("run", ["other", ""])
def test_another_runs_ledger_is_refused(run: str) -> None:
    saved = begun("own").state_dict()
    here = begun(run) if run else state(model=1.0)
    here.ledger.go_back(20, [21])
    with pytest.raises(CheckpointError, match=r"incidents\.json"):
        here.resume(*saved)


def test_a_checkpoint_without_an_identity_follows_any_ledger() -> None:
    """As loops of other people save it, and version 0.1.0's tests/golden/checkpoint."""
    here = begun("own")
    here.ledger.go_back(20, [21])
    here.resume(*state(model=1.0).state_dict())
    assert here.ledger.skipped_windows == [21]


@pytest.mark.parametrize("saved", [{"model": 1.0}, {"model": 1.0, "loss_scale": 2.0}])
@pytest.mark.parametrize("here", [{"model": 7.0}, {"model": 7.0, "loss_scale": 8.0}])
def test_a_loss_scale_may_come_and_go(saved: dict[str, float], here: dict[str, float]) -> None:
    run = state(**here)
    run.load_state_dict(*state(**saved).state_dict())
    kept = (
        {"loss_scale": here["loss_scale"]}
        if "loss_scale" in here and "loss_scale" not in saved
        else {}
    )
    assert values(run) == {name: saved.get(name, kept.get(name)) for name in here}


def test_memory_that_is_lacking_is_not_taken_for_contents_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Part, "load_state_dict", full)
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        state(model=1.0).load_state_dict(*state(model=2.0).state_dict())
    assert not isinstance(caught.value, CheckpointError)


def test_any_other_part_must_be_on_both_sides() -> None:
    with pytest.raises(
        CheckpointError, match=r"only in the checkpoint \['fp8'\], only in this run \['rng'\]"
    ):
        state(model=1.0, rng=1.0).load_state_dict(*state(model=1.0, fp8=1.0).state_dict())


def test_limits_of_the_steps_to_come_survive_json() -> None:
    run = state(model=1.0)
    run.step = 10
    run.limits = {11: Limits(loss=3.5), 12: Limits(norm=0.25, clip=1e30)}
    tensors, meta = run.state_dict()
    other = state(model=2.0)
    other.load_state_dict(tensors, json.loads(json.dumps(meta, allow_nan=False)))
    assert other.limits == run.limits
    assert other.limits[11].norm == math.inf
    other.advance()
    assert list(other.limits) == [12], "a step that is over needs no limits"


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1])
def test_seeds_start_the_numbers_that_they_start_in_torch(seed: int) -> None:
    """Uniform, normal and dropout draws, of a generator that had drawn before."""

    def draw() -> list[Tensor]:
        return [
            torch.rand(5),
            torch.randn(33),
            torch.nn.functional.dropout(torch.ones(100)),
            torch.randperm(20),
        ]

    torch.manual_seed(seed)
    expected = [*draw(), torch.get_rng_state()]
    torch.manual_seed(seed + 1)
    seed_torch(seed)
    assert all(map(torch.equal, [*draw(), torch.get_rng_state()], expected))


def test_every_gpu_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = [torch.Generator(), torch.Generator()]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    seed_torch(7)
    assert [generator.initial_seed() for generator in (torch.default_generator, *generators)] == [
        7,
        7,
        7,
    ]


def test_gpus_that_have_not_started_get_their_seed_when_they_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[int] = []
    monkeypatch.setattr("harness.core.state._gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", kept.append)
    seed_torch(7)
    assert kept == [7]


def test_rollbacks_before_a_step_are_those_of_its_branch() -> None:
    ledger = RunLedger(returned_to=[40, 60])
    assert [ledger.rollbacks_before(step) for step in (40, 41, 60, 61)] == [0, 1, 1, 2]


@pytest.fixture
def precision_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Recipes set torch's matmul precision, which other tests must not inherit; GPUs would give other plans."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def trained_in_fp8(name: str) -> tuple[PrecisionBackend, dict[str, Tensor]]:
    """A backend after one window, with its first layer in BF16, and its tensors when it was new."""
    recipe, facts = load_recipe(name), probe()
    rung, verdicts = resolve(recipe, facts)
    assert rung is not None
    model = build(dim=64, layers=1, heads=2, ffn=96)
    backend = build_backend(make_plan(recipe, facts, rung, verdicts, model), recipe, model, CPU)
    new = {key: tensor.clone() for key, tensor in backend.state_dict()[0].items()}
    backend.begin_window(sample=False)
    tokens = torch.arange(64).reshape(2, 32)
    with backend.context():
        loss = model(tokens, tokens)
    with backend.backward_context():
        loss.backward()
    backend.end_window(backend.amax(), torch.zeros(()), lambda values: values)
    backend.switch([pad_numbers(backend.layers[0])], [])
    return backend, new


@pytest.mark.usefixtures("precision_kept")
@pytest.mark.parametrize("name", ["fp8_hybrid", "fp8_dynamic"])
def test_what_a_run_without_fp8_saved_makes_fp8_state_new(name: str) -> None:
    backend, new = trained_in_fp8(name)
    assert not all(torch.equal(tensor, new[key]) for key, tensor in backend.state_dict()[0].items())
    assert backend.demoted
    elsewhere = AutocastBackend("fp16", CPU, LossScale(LossScaleConfig(), CPU))
    elsewhere.fall_back("bf16")
    backend.load_state_dict(*elsewhere.state_dict())
    assert all(torch.equal(tensor, new[key]) for key, tensor in backend.state_dict()[0].items())
    assert (backend.demoted, backend.fell_back_to) == ((), "")


@pytest.mark.usefixtures("precision_kept")
def test_what_a_run_fell_to_is_for_runs_of_its_own_rung() -> None:
    half = AutocastBackend("fp16", CPU, LossScale(LossScaleConfig(), CPU))
    half.fall_back("fp32")
    for precision, lowered, dtype in (
        ("fp16", "fp32", None),
        ("bf16", "", torch.bfloat16),
        ("fp32", "", None),
    ):
        backend = AutocastBackend(precision, CPU)
        backend.load_state_dict(*half.state_dict())
        assert (backend.fell_back_to, backend.dtype) == (lowered, dtype)
    eighth, _ = trained_in_fp8("fp8_hybrid")
    eighth.fall_back("bf16")
    backend = AutocastBackend("fp16", CPU, LossScale(LossScaleConfig(), CPU))
    backend.load_state_dict(*eighth.state_dict())
    assert (backend.fell_back_to, backend.dtype) == ("", torch.float16)
