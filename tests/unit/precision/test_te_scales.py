"""Amax and scale under Transformer Engine: the state its casts use, the roll, current and block scaling.

TE's casts are played on layers laid out as TE's: its own Python runs in tests/te_cpu, all of it in tests/gpu.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import fp8_oracle as oracle
import numpy as np
import pytest
import torch
from torch import Tensor

from harness.core.config import FallbackConfig
from harness.core.errors import MachineError
from harness.core.facts import SlotStats, StepFacts, Switch
from harness.monitors.fallback import FallbackController
from harness.precision.backends.te_library import DelayedScales, TensorScales
from harness.precision.recipe import Fp8Config

LENGTH, LAYERS = 4, 3
FP8_MAX = torch.tensor([448.0, 448.0, 57344.0] * LAYERS)
APPLY, SKIP = torch.zeros(()), torch.ones(())
NOTHING = torch.zeros(3 * LAYERS)


@dataclass
class State:
    amax_history: Tensor
    scale: Tensor

    def make_quantizers(self) -> list[SimpleNamespace]:
        """Views, as TE's: one scale and one staging amax each."""
        pairs = zip(self.scale, self.amax_history[0], strict=True)
        return [SimpleNamespace(scale=scale, amax=amax.reshape(1)) for scale, amax in pairs]


@dataclass
class Layer:
    """Where a te.Linear keeps its state: three columns forward, two backward, the last of each unused."""

    length: int = LENGTH
    fp8_meta: dict[str, State] = field(default_factory=dict)
    quantizers: dict[str, list[SimpleNamespace]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, columns in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            self.fp8_meta[key] = State(torch.zeros(self.length, columns), torch.ones(columns))

    def used(self) -> list[SimpleNamespace]:
        """Quantizers of input, weight and grad_output."""
        return [*self.quantizers["scaling_fwd"][:2], self.quantizers["scaling_bwd"][0]]

    def cast(self, amaxes: list[float]) -> None:
        """What TE's casts do in one micro-batch."""
        for quantizer, amax in zip(self.used(), amaxes, strict=True):
            quantizer.amax.copy_(torch.maximum(quantizer.amax, torch.tensor([amax])))


def make(**config: object) -> tuple[DelayedScales, list[Layer]]:
    fp8 = Fp8Config.model_validate({"amax_history_len": LENGTH, "roll": "micro_batch", **config})
    layers = [Layer() for _ in range(LAYERS)]
    return DelayedScales(layers, fp8, FP8_MAX, "2.20.2"), layers


def same(values: Tensor) -> Tensor:
    return values


def window(
    scales: DelayedScales,
    layers: list[Layer],
    *micro_batches: list[list[float]],
    skip: Tensor = APPLY,
    reduce: Callable[[Tensor], Tensor] = same,
) -> Tensor:
    scales.begin_window()
    for amaxes in micro_batches:
        for layer, row in zip(layers, amaxes, strict=True):
            layer.cast(row)
        scales.end_micro_batch(reduce)
    return scales.finish(reduce(scales.staged()), skip)


def test_quantizers_are_views_of_one_state() -> None:
    scales, layers = make()
    tensors = scales.tensors()
    assert tensors["history"].shape == (LENGTH, 3 * LAYERS)
    assert not tensors["history"].any()
    kept = [layer.used() for layer in layers]
    history = torch.arange(1.0, 1 + LENGTH * 3 * LAYERS).reshape(LENGTH, -1)
    scale = torch.arange(1.0, 1 + 3 * LAYERS)
    scales.load({"history": history, "scale": scale})
    assert [q.scale.item() for own in kept for q in own] == scale.tolist()
    assert [q.amax.item() for own in kept for q in own] == history[0].tolist()
    for layer in layers:
        for state in layer.fp8_meta.values():
            assert not state.amax_history[:, -1].any(), "the unused column"
            assert state.scale[-1] == 1
    assert torch.equal(layers[1].fp8_meta["scaling_bwd"].amax_history[:, 0], history[:, 5])
    assert all(
        torch.equal(tensor, {"history": history, "scale": scale}[name])
        for name, tensor in scales.tensors().items()
    )


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_every_micro_batch_rolls_by_the_rule(algo: str) -> None:
    scales, layers = make(amax_compute_algo=algo, margin=1)
    history, scale = [[0.0] * 9 for _ in range(LENGTH)], [1.0] * 9
    torch.manual_seed(0)
    for _ in range(6):
        amaxes = (10 ** torch.empty(2, LAYERS, 3).uniform_(-3, 3)).tolist()
        amaxes[1][2][2] = 0.0
        stats = window(scales, layers, *amaxes)
        assert stats[1].tolist() == scale, "in use when the window began"
        for micro_batch in amaxes:
            history[0] = [amax for row in micro_batch for amax in row]
            history, scale = oracle.update(history, scale, FP8_MAX.tolist(), 1, algo)
        assert torch.equal(scales.tensors()["history"], torch.tensor(history))
        assert scales.tensors()["scale"].tolist() == scale


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_under_roll_step_a_window_rolls_once_with_its_largest_amaxes(algo: str) -> None:
    scales, layers = make(amax_compute_algo=algo, margin=1, roll="step")
    history, scale = [[0.0] * 9 for _ in range(LENGTH)], [1.0] * 9
    torch.manual_seed(0)
    for _ in range(6):
        amaxes = 10 ** torch.empty(2, LAYERS, 3).uniform_(-3, 3)
        stats = window(scales, layers, *amaxes.tolist())
        assert stats[1].tolist() == scale, "in use when the window began"
        history[0] = amaxes.amax(0).flatten().tolist()
        history, scale = oracle.update(history, scale, FP8_MAX.tolist(), 1, algo)
        assert torch.equal(scales.tensors()["history"], torch.tensor(history))
        assert scales.tensors()["scale"].tolist() == scale


@pytest.mark.parametrize("roll", ["step", "micro_batch"])
def test_amaxes_are_those_of_all_ranks(roll: str) -> None:
    scales, layers = make(roll=roll)
    stats = window(scales, layers, [[1.0, 2.0, 3.0]] * LAYERS, reduce=lambda values: 2 * values)
    assert stats[0].tolist() == [2.0, 4.0, 6.0] * LAYERS
    assert scales.tensors()["history"][-1].tolist() == [2.0, 4.0, 6.0] * LAYERS


def test_micro_batches_show_the_largest_saturation_under_its_own_scale() -> None:
    scales, layers = make()
    stats = window(scales, layers, *([[amax] * 3] * LAYERS for amax in (4.0, 16.0, 1.0)))
    assert stats[0].tolist() == [16.0] * 9
    assert stats[2, 0].item() == pytest.approx(16 * (448 / 4) / 448), (
        "the second, under the first one's scale"
    )


def test_what_was_staged_without_a_backward_ends_with_its_window() -> None:
    scales, layers = make()
    window(scales, layers, [[1.0, 2.0, 3.0]] * LAYERS)
    layers[1].cast([1e4, 1e4, 1e4])
    stats = window(scales, layers, [[1.0, 2.0, 3.0]] * LAYERS)
    assert stats[0].tolist() == [1.0, 2.0, 3.0] * LAYERS


def test_a_skipped_window_leaves_every_bit() -> None:
    scales, layers = make()
    window(scales, layers, [[1.0, 2.0, 3.0]] * LAYERS)
    before = scales.tensors()
    window(scales, layers, [[100.0, math.inf, 300.0]] * LAYERS, skip=SKIP)
    for name, tensor in scales.tensors().items():
        assert torch.equal(tensor, before[name]), name
    window(scales, layers, [[100.0, math.inf, 300.0]] * LAYERS)
    assert not torch.equal(scales.tensors()["scale"], before["scale"])


@pytest.mark.parametrize("scrub", [True, False])
def test_infinite_amaxes_are_dropped_and_counted_unless_told_otherwise(scrub: bool) -> None:
    scales, layers = make(scrub_inf=scrub)
    window(scales, layers, [[1.0, 1.0, 1.0]] * LAYERS)
    stats = window(scales, layers, [[math.inf, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, math.inf]])
    assert stats[0, 0].item() == math.inf, "it is still reported"
    assert scales.scrubbed.item() == (2 if scrub else 0)
    assert bool(scales.tensors()["history"].isfinite().all()) is scrub
    window(scales, layers, [[4.0, 1.0, 1.0]] * LAYERS)
    assert scales.scrubbed.item() == 0, "counted from window to window"
    assert scales.tensors()["scale"][0].item() == (112.0 if scrub else 448.0), (
        "not scrubbed, the scale is frozen"
    )


@pytest.mark.parametrize("change", ["columns", "length", "dtype", "missing"])
def test_another_layout_is_refused_and_names_both_versions(change: str) -> None:
    layers = [Layer(), Layer(length=LENGTH + 1) if change == "length" else Layer()]
    if change == "columns":
        layers[1].fp8_meta["scaling_bwd"].scale = torch.ones(3)
    elif change == "dtype":
        layers[1].fp8_meta["scaling_fwd"].scale = torch.ones(3, dtype=torch.float64)
    elif change == "missing":
        del layers[1].fp8_meta["scaling_bwd"]
    with pytest.raises(MachineError) as caught:
        DelayedScales(layers, Fp8Config(amax_history_len=LENGTH), FP8_MAX[:6], "9.9")
    (problem,) = caught.value.problems
    assert "Transformer Engine 9.9 keeps scaling_" in problem.what
    assert "2.20" in problem.fix


AMAXES = [2.0, 3.0, 5.0, 0.0, math.inf, 1e-45]


@pytest.mark.parametrize("blocks", [False, True])
def test_scales_of_the_tensor_at_hand(blocks: bool) -> None:
    amax = torch.tensor(AMAXES)
    stats = TensorScales(FP8_MAX[:6], amax, blocks).finish(amax, APPLY)
    assert torch.equal(stats[0], amax)
    limits = FP8_MAX[:6].numpy()
    with np.errstate(over="ignore"):
        expected = [limits[index] / np.float32(value) for index, value in enumerate(AMAXES[:3])]
    expected += [1.0, 1.0, np.finfo(np.float32).max]
    if blocks:
        assert stats[1].isnan().all(), "a tensor has no single scale"
    else:
        assert stats[1].tolist() == [float(np.float32(value)) for value in expected]
    assert stats[2, :3].tolist() == pytest.approx([1.0] * 3)
    assert stats[2, 3:5].tolist() == [0.0, math.inf]


def test_the_last_amaxes_are_the_state() -> None:
    amax = torch.tensor([1.0, 2.0, 3.0])
    scales = TensorScales(FP8_MAX[:3], amax, blocks=False)
    saved = scales.tensors()
    assert saved["history"].shape == (1, 3)
    amax.zero_()
    scales.load(saved)
    assert amax.tolist() == [1.0, 2.0, 3.0]


def test_block_scaling_demotes_for_an_infinite_amax_and_promotes_again() -> None:
    """NaN for the scale says nothing; NaN for the saturation would keep a layer out of FP8 for good."""
    names = ("a.input", "a.weight", "a.grad_output", "b.input", "b.weight", "b.grad_output")
    policy = FallbackConfig(
        **{"hits": 1, "window": 2, "dwell_steps": 2, "warmup_steps": 1, "max_demoted_share": 1.0}
    )
    controller = FallbackController(policy, ["a", "b"])
    amax = torch.ones(6)
    scales = TensorScales(FP8_MAX[:6], amax, blocks=True)
    demoted: tuple[str, ...] = ()
    moves: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    for step in range(1, 20):
        amax[0] = math.inf if step == 3 else 1.0
        rows = scales.finish(amax, APPLY).numpy()
        unknown = np.full(6, np.nan, dtype=np.float32)
        stats = SlotStats(names, rows[0], rows[1], rows[2], unknown, unknown, unknown)
        facts = StepFacts(
            step, step, 1.0, 1.0, 1e-3, 1.0, True, step, 1, 1.0, demoted=demoted, slots=stats
        )
        proposal = controller.observe(facts).proposal
        if isinstance(proposal, Switch):
            moves.append((proposal.demote, proposal.promote))
            demoted = tuple((set(demoted) | set(proposal.demote)) - set(proposal.promote))
    assert moves == [(("a",), ()), ((), ("a",))]
