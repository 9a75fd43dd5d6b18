"""`fp8.backend`: a named backend, and `auto`, which times those with the same rule on a block and records the choice.

Native stands in for two backends: its own name, and "peer", which is the same under another name. Times are given where
the choice depends on them.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import Precision
from harness.build import build_data, build_plan, join_worker
from harness.capability.probe import Device, MachineFacts
from harness.core import deferred
from harness.core.config import load_config
from harness.core.errors import CheckpointError, ConfigError, MachineError
from harness.core.spread import Spread
from harness.precision import backend_choice
from harness.precision.backend_choice import decide, same_rule
from harness.precision.backends.native import NativeBackend
from harness.precision.backends.registry import BACKENDS, Backend
from harness.precision.plan import Plan, agree_on_rung, make_plan
from harness.precision.recipe import Recipe, load_recipe
from harness.tools.preflight import check_first_rung
from tests.support.runs import TEXT

CPU = torch.device("cpu")
H100 = MachineFacts(cuda_available=True, devices=(Device("NVIDIA H100", (9, 0), 80 << 30),))
A100 = MachineFacts(cuda_available=True, devices=(Device("NVIDIA A100", (8, 0), 80 << 30),))
WIDTH = 16

pytestmark = pytest.mark.usefixtures("cpu_on_purpose")


@pytest.fixture(autouse=True)
def peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "peer", BACKENDS["native"])


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Milliseconds that a step is said to take; each backend's step really runs. A clear `ran` means nothing was."""
    given = {"native:fp8": 3.0, "peer:fp8": 2.0}

    def in_turns(
        actions: Mapping[str, Callable[[], object]], *_: Any
    ) -> tuple[dict[str, list[float]], dict[str, str]]:
        found: dict[str, list[float]] = {}
        for name, action in actions.items():
            action()
            found[name] = [1e-3 * given[name]] * 5
        given["ran"] = len(found)
        return found, {}

    monkeypatch.setattr(backend_choice, "in_turns", in_turns)
    return given


def recipe(backend: str = "auto", *ladder: str, **sections: Mapping[str, Any]) -> Recipe:
    """Native above its peer, or the backends of `ladder`; for layers of 16 features and more."""
    base = load_recipe("fp8_hybrid").model_dump()
    names = ladder or ("native", "peer")
    rungs = [{"backend": each, "precision": "fp8", "tiers": ["CPU"]} for each in names]
    rungs.append({"backend": "autocast", "precision": "bf16", "tiers": ["CPU", "AMPERE"]})
    base |= {"name": "mine", "ladder": rungs}
    base["fp8"]["backend"] = backend
    base["layers"]["min_features"] = WIDTH
    for section, keys in sections.items():
        base[section].update(keys)
    return Recipe.model_validate(base)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return x + factor * self.down(self.drop(self.norm(self.up(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.get_submodule("blocks.1.norm").eval()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.factor)
        return x


def model() -> Model:
    torch.manual_seed(0)
    return Model()


X = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))


def prepared(policy: Recipe, made: Model | None = None, **more: Any) -> tuple[Precision, Model]:
    made = made or model()
    precision = Precision(policy)
    precision.prepare(made, forward=lambda: made(X), **more)
    return precision, made


# ---- A named backend


def test_a_named_backend_is_taken_though_another_comes_first() -> None:
    plan = prepared(recipe("peer"))[0].plan
    assert plan.resolved == "peer:fp8"
    assert plan.rungs[0].reason == "fp8.backend names peer"
    assert "backend_choice" not in plan.as_dict()


def test_a_name_that_the_ladder_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="names torchao, and the ladder has no FP8 rung of it"):
        recipe("torchao")
    with pytest.raises(ValueError, match="transformer_engine"):
        recipe("nativ")


def test_a_named_backend_that_does_not_run_here_is_refused_by_name() -> None:
    with pytest.raises(MachineError) as caught:
        agree_on_rung(recipe("peer"), A100, CPU)
    (problem,) = caught.value.problems
    assert "names peer for FP8, and it does not run on tier AMPERE" in problem.what
    assert problem.where.endswith("fp8.backend")
    assert "first or auto" in problem.fix
    assert agree_on_rung(recipe("first"), A100, CPU)[0].name == "autocast:bf16"


def test_first_is_the_default_and_leaves_hashes_as_they_were() -> None:
    base = recipe("first").model_dump()
    del base["fp8"]["backend"]
    plain = Recipe.model_validate(base)
    assert plain == recipe("first")
    assert '"backend":"first"' not in plain.sha256() + "x"
    assert len({plain.sha256(), recipe("auto").sha256(), recipe("peer").sha256()}) == 3


# ---- Which rungs are compared


def test_candidates_stand_side_by_side_and_have_the_same_rule() -> None:
    ladder = recipe("auto", "native", "peer", "torchao", "native").ladder

    def after(number: int, policy: Recipe) -> list[str]:
        return [rung.backend for rung in same_rule(policy, ladder[number])]

    policy = recipe("auto", "native", "peer", "torchao", "native")
    assert after(0, policy) == ["peer"]
    assert after(1, policy) == []
    assert after(2, policy) == [], "torchao has a rule of its own"
    shipped = load_recipe("fp8_hybrid")
    assert [rung.name for rung in same_rule(shipped, shipped.ladder[0])] == ["native:fp8"]
    block = load_recipe("fp8_block")
    assert same_rule(block, block.ladder[0]) == []


def spread(low: float, median: float, high: float) -> Spread:
    return Spread(low, median, high)


@pytest.mark.parametrize(
    ("times", "taken", "why"),
    [
        ({"a": (3, 3, 3), "b": (2, 2, 2)}, "b", "the fastest"),
        ({"a": (2, 2, 2), "b": (3, 3, 3)}, "a", "the fastest"),
        ({"a": (2.0, 2.2, 2.5), "b": (1.9, 2.1, 2.3)}, "a", "a tie of a, b"),
        # One slow turn of the fastest does not make the other as fast.
        ({"a": (2.5, 2.6, 2.7), "b": (2.0, 2.1, 3.0)}, "b", "the fastest"),
        ({"a": (3, 3, 3)}, "a", "nothing to compare"),
        ({"b": (1, 1, 1)}, "a", "nothing to compare"),
        ({}, "a", "nothing to compare"),
        ({"a": (9, 9, 9), "b": (2.0, 2.2, 2.5), "c": (1.9, 2.1, 2.3)}, "b", "a tie of b, c"),
    ],
)
def test_the_fastest_is_taken_and_a_tie_takes_the_first(
    times: dict[str, tuple[float, float, float]], taken: str, why: str
) -> None:
    found = decide(["a", "b", "c"], {name: spread(*each) for name, each in times.items()})
    assert found[0] == taken
    assert why in found[1]


@pytest.mark.parametrize(
    ("times", "failed", "taken", "why"),
    [
        ({"b": (1, 1, 1)}, {"a", "c"}, "b", "the only one of these that ran"),
        ({"b": (3, 3, 3), "c": (2, 2, 2)}, {"a"}, "c", "the fastest"),
        # Too slow to be timed is no failure, and nothing shows that another one is faster.
        ({"c": (1, 1, 1)}, {"a"}, "b", "the first that did not fail"),
        ({"c": (1, 1, 1)}, {"b"}, "a", "nothing to compare"),
        # The block itself, or its copy: the backends are not to blame.
        ({}, {"a", "b", "c"}, "a", "nothing to compare"),
    ],
)
def test_what_failed_is_not_taken_unless_all_did(
    times: dict[str, tuple[float, float, float]], failed: set[str], taken: str, why: str
) -> None:
    spreads = {name: spread(*each) for name, each in times.items()}
    found = decide(["a", "b", "c"], spreads, failed)
    assert found[0] == taken
    assert why in found[1]


# ---- The choice in a plan


def test_the_fastest_is_taken_and_the_plan_has_both_times(timed: dict[str, float]) -> None:
    plan = prepared(recipe())[0].plan
    assert plan.resolved == "peer:fp8"
    assert {row.backend for row in plan.layers if row.precision == "fp8"} == {"peer"}
    found = json.loads(json.dumps(plan.as_dict()))["backend_choice"]
    assert found["taken"] == "peer:fp8"
    assert found["candidates"] == ["native:fp8", "peer:fp8"]
    assert found["block"] == "blocks.0"
    assert found["seconds"]["native:fp8"] == pytest.approx([0.003] * 3)
    assert found["seconds"]["peer:fp8"] == pytest.approx([0.002] * 3)
    text = str(plan)
    assert "native:fp8: not taken: fp8.backend auto takes peer:fp8" in text
    assert "native:fp8 3 ms (3 to 3); peer:fp8 2 ms (2 to 2); the fastest" in text


def test_a_tie_takes_the_first_of_the_ladder(timed: dict[str, float]) -> None:
    timed["peer:fp8"] = timed["native:fp8"]
    plan = prepared(recipe())[0].plan
    assert plan.resolved == "native:fp8"
    assert "a tie of native:fp8, peer:fp8" in str(plan)


def test_the_block_with_the_most_fp8_layers_is_timed(timed: dict[str, float]) -> None:
    policy = recipe(layers={"exclude": ["blocks.0.up"]})
    chosen = prepared(policy)[0].plan.backend_choice
    assert chosen is not None
    assert chosen["block"] == "blocks.1"


@pytest.mark.slow
def test_real_times_are_positive_and_those_of_both() -> None:
    chosen = prepared(recipe())[0].plan.backend_choice
    assert chosen is not None
    assert chosen["seconds"].keys() == {"native:fp8", "peer:fp8"}
    for low, median, high in chosen["seconds"].values():
        assert 0 < low <= median <= high < math.inf


def state_of(made: Model) -> dict[str, Any]:
    return {
        "weights": {name: each.clone() for name, each in made.state_dict().items()},
        "modes": [module.training for module in made.modules()],
        "grads": [each.grad for each in made.parameters()],
        "hooks": [len(module._forward_pre_hooks) for module in made.modules()],
        "classes": [type(module) for module in made.modules()],
    }


def test_the_model_and_the_random_numbers_stay_as_they_are(timed: dict[str, float]) -> None:
    plain, chosen = model(), model()
    prepared(recipe("peer"), plain)
    torch.manual_seed(3)
    before, random = state_of(chosen), torch.get_rng_state()
    precision, _ = prepared(recipe(), chosen)
    assert timed["ran"] == 2
    assert torch.equal(torch.get_rng_state(), random)
    after = state_of(chosen)
    for name, value in before["weights"].items():
        assert torch.equal(value, after["weights"][name]), name
    for part in ("modes", "grads"):
        assert before[part] == after[part], part
    # What prepare() itself adds is there, and nothing else.
    for part in ("hooks", "classes"):
        assert after[part] == state_of(plain)[part], part
    tensors = precision.state_dict()["tensors"]
    assert not tensors["fp8.history"].any(), "no amax of the timing"


def losses(precision: Precision, made: Model, steps: int = 3) -> list[float]:
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    found: list[float] = []
    for _ in range(steps):
        with precision.context():
            loss = (made(X) - 1).square().mean()
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def test_training_is_that_of_the_backend_by_name(timed: dict[str, float]) -> None:
    assert losses(*prepared(recipe())) == losses(*prepared(recipe("peer")))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_blocks_that_will_be_compiled_are_timed_compiled(timed: dict[str, float]) -> None:
    compiled: list[str] = []
    real = nn.Module.compile

    def note(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        compiled.append(type(self).__name__)
        kwargs["backend"] = "eager"
        real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nn.Module, "compile", note)
        patched.setitem(BACKENDS, "peer", _not_compiled())
        plan = prepared(recipe(), compiled=True)[0].plan
    assert compiled == ["Block"], "of native alone"
    assert "native:fp8 3 ms (3 to 3, compiled); peer:fp8 2 ms (2 to 2)" in str(plan)


def _not_compiled() -> Backend:
    return replace(BACKENDS["native"], not_compiled="it is made up")


# ---- When nothing is timed


def why_untimed(plan: Plan) -> str:
    assert plan.backend_choice is not None
    assert plan.backend_choice["taken"] == plan.resolved == "native:fp8"
    assert plan.backend_choice["seconds"] == {}
    return plan.backend_choice["why"]


def test_a_single_candidate_is_taken_and_said_to_be_one(timed: dict[str, float]) -> None:
    plan = prepared(recipe("auto", "native"))[0].plan
    assert "no other FP8 rung" in why_untimed(plan)
    assert "ran" not in timed


def test_without_a_forward_the_first_is_taken(timed: dict[str, float]) -> None:
    precision = Precision(recipe())
    precision.prepare(model())
    assert "got no forward" in why_untimed(precision.plan)


def test_without_blocks_the_first_is_taken(timed: dict[str, float]) -> None:
    made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    precision = Precision(recipe())
    precision.prepare(made, forward=lambda: made(X))
    assert "no nn.ModuleList with FP8 layers" in why_untimed(precision.plan)
    assert "ran" not in timed


def test_a_deterministic_run_does_not_go_by_a_clock(timed: dict[str, float]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        plan = prepared(recipe())[0].plan
    finally:
        torch.use_deterministic_algorithms(False)
    assert "deterministic" in why_untimed(plan)
    assert "ran" not in timed


def test_a_forward_that_fails_takes_the_first_and_says_why() -> None:
    made = model()

    def fails() -> None:
        raise RuntimeError("no batch today")

    precision = Precision(recipe())
    precision.prepare(made, forward=fails)
    assert "RuntimeError: no batch today" in why_untimed(precision.plan)
    modes = {name: module.training for name, module in made.named_modules()}
    assert [name for name, training in modes.items() if not training] == ["blocks.1.norm"]


def test_unfit_samples_never_reach_the_device(
    timed: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU an id out of range ends the process, before the run could name the sample."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = load_config("tiny", [f"data.path={TEXT}"])
    worker = join_worker(config, "python")
    data = build_data(config, tmp_path, worker)
    sound = data.micro_batches

    def unfit(*about: Any) -> list[Any]:
        batches = list(sound(*about))
        batches[0]["inputs"][0, 0] = 300
        return batches

    monkeypatch.setattr(data, "micro_batches", unfit)
    plan, _ = build_plan(config, recipe(), worker, data=data)
    assert "samples of the first micro-batch are unfit" in why_untimed(plan)
    assert "ran" not in timed


class Cached(Block):
    """As a transformers block: it keeps what it has seen in a cache that it is given."""

    def forward(self, x: Tensor, factor: Tensor, past_key_values: Any = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if past_key_values is not None:
            past_key_values.append(x)
            assert len(past_key_values) == 1, "each call finds what the one before left"
        return super().forward(x, factor)


def test_a_cache_for_generation_is_left_out(timed: dict[str, float]) -> None:
    made = model()
    made.blocks[0] = Cached()
    precision = Precision(recipe())
    precision.prepare(made, forward=lambda: made.blocks[0](X, made.factor, past_key_values=[]))
    assert precision.plan.resolved == "peer:fp8"
    assert "was not timed" not in str(precision.plan)


class InPlace(nn.Module):
    """Its residual is added in place, which a leaf that wants a gradient would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(x.detach().sum()))
        x += self.up(x)
        return x


def test_a_block_that_writes_to_its_input_is_timed_on_the_same_one_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = nn.ModuleList([InPlace()])
    made = nn.ModuleDict({"blocks": blocks})
    seen: list[float] = []

    def in_turns(actions: Mapping[str, Callable[[], object]], *_: Any) -> Any:
        for action in actions.values():
            action()
        return {name: [1e-3] * 5 for name in actions}, {}

    monkeypatch.setattr(backend_choice, "in_turns", in_turns)
    monkeypatch.setattr(
        InPlace, "__deepcopy__", lambda self, _: _sharing(self, seen), raising=False
    )
    precision = Precision(recipe())
    precision.prepare(made, forward=lambda: blocks[0](X.clone()))
    assert "was not timed" not in str(precision.plan)
    assert len(seen) == 4
    assert len(set(seen)) == 1


def _sharing(block: InPlace, seen: list[float]) -> InPlace:
    made = InPlace()
    made.load_state_dict(block.state_dict())
    made.seen = seen
    return made


def test_the_forward_ends_at_the_block_that_is_timed(timed: dict[str, float]) -> None:
    """What comes after it may have weights that are not in memory."""
    made = model()
    called: list[int] = []
    made.blocks[1].register_forward_pre_hook(lambda *_: called.append(1))
    precision = Precision(recipe())
    precision.prepare(made, forward=lambda: made(X))
    assert precision.plan.resolved == "peer:fp8"
    assert called == []


def test_blocks_that_reduce_over_ranks_are_known() -> None:
    """Ranks time them another number of times, and would wait for each other."""
    assert not backend_choice.has_collectives(Block())
    assert backend_choice.has_collectives(nn.SyncBatchNorm.convert_sync_batchnorm(Block()))


class Fails(nn.Module):
    def __init__(self, *_: Any) -> None:
        super().__init__()
        raise RuntimeError("no such kernel")


def test_a_backend_that_fails_is_not_taken_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(BACKENDS["native"], place=f"{__name__}:Fails")
    monkeypatch.setitem(BACKENDS, "peer", broken)
    plan = prepared(recipe())[0].plan
    assert plan.resolved == "native:fp8"
    assert "peer:fp8 was not timed: RuntimeError: no such kernel" in str(plan)


class FailsWhenCalled(NativeBackend):
    def context(self) -> Any:
        raise RuntimeError("no such kernel")


@pytest.mark.slow
@pytest.mark.parametrize("broken", [Fails, FailsWhenCalled])
def test_a_first_rung_that_fails_is_not_taken_either(
    monkeypatch: pytest.MonkeyPatch, broken: type
) -> None:
    place = f"{__name__}:{broken.__name__}"
    monkeypatch.setitem(BACKENDS, "native", replace(BACKENDS["native"], place=place))
    plan = prepared(recipe())[0].plan
    assert plan.resolved == "peer:fp8"
    text = str(plan)
    assert "native:fp8 was not timed: RuntimeError: no such kernel" in text
    assert "native:fp8: not taken: fp8.backend auto takes peer:fp8" in text


def test_where_all_fail_the_first_is_taken_and_each_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = model()
    for block in made.blocks:
        monkeypatch.setattr(block, "__deepcopy__", _uncopied, raising=False)
    plan = prepared(recipe(), made)[0].plan
    why = why_untimed(plan)
    assert "native:fp8 was not timed: TypeError: it holds a lock" in why
    assert "peer:fp8 was not timed: TypeError: it holds a lock" in why


def _uncopied(_: Any) -> Any:
    raise TypeError("it holds a lock")


def test_without_fp8_there_is_nothing_to_choose(timed: dict[str, float]) -> None:
    made = nn.Sequential(nn.Linear(8, 8))
    precision = Precision(recipe())
    precision.prepare(made)
    assert precision.plan.resolved == "autocast:bf16"
    assert precision.plan.backend_choice is None


# ---- A run that goes on


def test_a_loop_that_goes_on_takes_what_was_chosen(timed: dict[str, float]) -> None:
    first, made = prepared(recipe())
    before = losses(first, made)
    assert all(map(math.isfinite, before))
    saved = copy.deepcopy(first.state_dict())
    timed |= {"native:fp8": 1.0, "ran": 0.0}
    again, made = prepared(recipe(), saved=saved)
    assert again.plan.resolved == "peer:fp8"
    assert timed["ran"] == 0
    assert "as when this run began" in str(again.plan)
    again.load_state_dict(saved)
    assert again.state_dict()["meta"]["backend_choice"] == saved["meta"]["backend_choice"]

    # Without it another backend may be taken, and the state is refused with what to do.
    other, _ = prepared(recipe())
    assert other.plan.resolved == "native:fp8"
    with pytest.raises(CheckpointError, match=r"prepare\(saved=...\)"):
        other.load_state_dict(saved)


def test_what_cannot_be_taken_any_more_goes_down_the_ladder(timed: dict[str, float]) -> None:
    saved = prepared(recipe())[0].state_dict()
    plan = prepared(recipe("auto", "native"), saved=saved)[0].plan
    assert plan.resolved == "native:fp8"
    assert "took peer:fp8 when this run began, which cannot be taken here" in str(plan)
    assert plan.backend_choice is not None
    assert plan.backend_choice["taken"] == "peer:fp8", "it holds where it can be taken again"


def test_states_of_other_recipes_have_no_such_key() -> None:
    assert "backend_choice" not in prepared(recipe("first"))[0].state_dict()["meta"]


# ---- harness train


def test_strict_takes_a_timed_choice_for_the_first_rung_and_no_named_one(
    timed: dict[str, float],
) -> None:
    check_first_rung(prepared(recipe())[0].plan, "mine")
    with pytest.raises(MachineError, match="--strict"):
        check_first_rung(prepared(recipe("peer"))[0].plan, "mine")


@pytest.mark.slow
def test_strict_refuses_a_choice_whose_first_rung_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"{__name__}:{FailsWhenCalled.__name__}"
    monkeypatch.setitem(BACKENDS, "native", replace(BACKENDS["native"], place=place))
    plan = prepared(recipe())[0].plan
    assert plan.resolved == "peer:fp8"
    with pytest.raises(MachineError, match="native:fp8 was not timed: RuntimeError: no such kern"):
        check_first_rung(plan, "mine")


def test_a_run_times_a_block_on_its_data_and_a_resume_does_not(
    timed: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = load_config("tiny", [f"data.path={TEXT}"])
    worker = join_worker(config, "python")
    data = build_data(config, tmp_path, worker)
    plan, made = build_plan(config, recipe(), worker, data=data)
    assert plan.resolved == "peer:fp8"
    written = json.loads(json.dumps(plan.as_dict()))
    assert written["backend_choice"]["seconds"].keys() == {"native:fp8", "peer:fp8"}

    # The same weights as without: nothing of the timing reached the model or the random numbers.
    _, plain = build_plan(config, recipe("peer"), worker)
    for (name, one), (_, other) in zip(
        made.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name

    timed |= {"native:fp8": 1.0, "ran": 0.0}
    resumed, _ = build_plan(config, recipe(), worker, written, data=data)
    assert (resumed.resolved, timed["ran"]) == ("peer:fp8", 0)
    untimed, _ = build_plan(config, recipe(), worker)
    assert "no data" in why_untimed(untimed)


def test_a_model_without_its_weights_memory_is_timed_too(
    timed: dict[str, float],
) -> None:
    """As engine.name=fsdp builds it: the block's weights are computed for the copy alone."""
    made = deferred.build(model, CPU, small=8)
    assert made.get_parameter("blocks.0.up.weight").is_meta
    facts = MachineFacts()
    timing = backend_choice.time_backends(
        [_plan_of("native", made, facts), _plan_of("peer", made, facts)],
        recipe(),
        backend_choice.Trial(made, lambda each: each(X), CPU, facts),
        "blocks.0",
    )
    assert timing.missing == ""
    assert timing.times.keys() == {"native:fp8", "peer:fp8"}
    assert made.get_parameter("blocks.0.up.weight").is_meta


def _plan_of(backend: str, made: nn.Module, facts: MachineFacts) -> Plan:
    policy = recipe(backend)
    rung = next(each for each in policy.ladder if each.backend == backend)
    return make_plan(policy, facts, rung, [], made)


def test_errors_of_the_first_rung_are_raised_as_ever() -> None:
    policy = recipe(layers={"exclude": ["blocks.9.*"]})
    with pytest.raises(ConfigError, match="matches no"):
        prepared(policy)
