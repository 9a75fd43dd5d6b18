"""Amax and scale under Transformer Engine: packing of its tensors, roll of layers in BF16, current and block scaling.

TE's own part (casting, rolling) is played by the oracle, on tensors laid out as TE's: see tests/gpu for the real one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import fp8_oracle as oracle
import numpy as np
import pytest
import torch
from torch import Tensor

from harness.core.errors import MachineError
from harness.core.facts import SlotStats, StepFacts, Switch
from harness.precision.backends.te_scales import DelayedScales, TensorScales
from harness.precision.fallback import FallbackController
from harness.precision.fallback_policy import FallbackPolicy
from harness.precision.recipe import Fp8Config

LENGTH, LAYERS = 4, 3
FP8_MAX = torch.tensor([448.0, 448.0, 57344.0] * LAYERS)
APPLY, SKIP = torch.zeros(()), torch.ones(())
NOTHING = torch.zeros(3 * LAYERS)
IN_FP8 = torch.zeros(3 * LAYERS, dtype=torch.bool)


@dataclass
class State:
    amax_history: Tensor
    scale: Tensor


@dataclass
class Layer:
    """Where a te.Linear keeps its state: three columns forward, two backward, the last of each unused."""

    length: int = LENGTH
    fp8_meta: dict[str, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, columns in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            self.fp8_meta[key] = State(torch.zeros(self.length, columns), torch.ones(columns))

    def columns(self) -> list[tuple[State, int, float]]:
        forward, backward = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
        return [(forward, 0, 448.0), (forward, 1, 448.0), (backward, 0, 57344.0)]

    def roll(self, amaxes: list[float]) -> None:
        """What TE does in one micro-batch."""
        for (state, column, fp8_max), amax in zip(self.columns(), amaxes, strict=True):
            history = [[value] for value in state.amax_history[:, column].tolist()]
            history[0] = [amax]
            rolled, scale = oracle.update(history, [state.scale[column].item()], [fp8_max], 0, "max")
            state.amax_history[:, column] = torch.tensor(rolled)[:, 0]
            state.scale[column] = scale[0]


def make(**config: object) -> tuple[DelayedScales, list[Layer]]:
    fp8 = Fp8Config.model_validate({"amax_history_len": LENGTH, **config})
    layers = [Layer() for _ in range(LAYERS)]
    return DelayedScales(layers, fp8, FP8_MAX, "2.20.2"), layers


def window(scales: DelayedScales, layers: list[Layer], amaxes: list[list[float]], skip: Tensor = APPLY) -> Tensor:
    scales.begin()
    for layer, row in zip(layers, amaxes, strict=True):
        layer.roll(row)
    scales.after_backward(IN_FP8)
    return scales.finish(NOTHING, skip)


def test_state_is_read_and_written_in_place() -> None:
    scales, layers = make()
    tensors = scales.tensors()
    assert tensors["history"].shape == (LENGTH, 3 * LAYERS)
    kept = [(state, state.amax_history, state.scale) for layer in layers for state in layer.fp8_meta.values()]
    history = torch.arange(1.0, 1 + LENGTH * 3 * LAYERS).reshape(LENGTH, -1)
    scale = torch.arange(1.0, 1 + 3 * LAYERS)
    scales.load({"history": history, "scale": scale})
    for state, amax_history, own_scale in kept:
        assert state.amax_history is amax_history
        assert state.scale is own_scale
        assert not amax_history[:, -1].any(), "the unused column"
        assert own_scale[-1] == 1
    assert torch.equal(layers[1].fp8_meta["scaling_bwd"].amax_history[:, 0], history[:, 5])
    assert layers[2].fp8_meta["scaling_fwd"].scale[1] == scale[7]
    assert all(
        torch.equal(tensor, {"history": history, "scale": scale}[name]) for name, tensor in scales.tensors().items()
    )


def test_what_te_rolled_is_reported_under_the_scale_in_use() -> None:
    scales, layers = make()
    rows = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 0.0]]
    first = window(scales, layers, rows)
    assert first[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0]
    assert first[1].tolist() == [1.0] * 9
    second = window(scales, layers, [[10 * value for value in row] for row in rows])
    assert second[1, 0].item() == 448.0
    assert second[2, :8].tolist() == pytest.approx([10.0] * 8)


def test_micro_batches_show_the_largest_and_the_saturation_of_each_under_its_own_scale() -> None:
    scales, layers = make()
    scales.begin()
    for amax in (4.0, 16.0, 1.0):
        for layer in layers:
            layer.roll([amax] * 3)
        scales.after_backward(IN_FP8)
    stats = scales.finish(NOTHING, APPLY)
    assert stats[0].tolist() == [16.0] * 9
    assert stats[2, 0].item() == pytest.approx(16 * (448 / 4) / 448), "the second, under the first one's scale"


def test_a_layer_in_bf16_rolls_its_measured_amax_by_the_same_rule() -> None:
    scales, layers = make()
    window(scales, layers, [[1.0, 2.0, 3.0]] * LAYERS)
    twin = Layer()
    twin.roll([1.0, 2.0, 3.0])
    demoted = IN_FP8.clone()
    demoted[3:6] = True
    measured = torch.zeros(9)
    measured[3:6] = torch.tensor([5.0, 0.0, 7.0])
    scales.begin()
    for index in (0, 2):
        layers[index].roll([2.0, 2.0, 2.0])
    scales.after_backward(demoted)
    stats = scales.finish(measured, APPLY)
    twin.roll([5.0, 0.0, 7.0])
    for (state, column, _), (other, _, _) in zip(layers[1].columns(), twin.columns(), strict=True):
        assert torch.equal(state.amax_history[:, column], other.amax_history[:, column])
        assert state.scale[column] == other.scale[column]
    assert stats[0].tolist() == [2, 2, 2, 5, 0, 7, 2, 2, 2]
    assert stats[2, 3].item() == pytest.approx(5.0)


def test_a_skipped_window_leaves_every_bit() -> None:
    scales, layers = make()
    window(scales, layers, [[1.0, 2.0, 3.0]] * LAYERS)
    before = scales.tensors()
    window(scales, layers, [[100.0, math.inf, 300.0]] * LAYERS, SKIP)
    for name, tensor in scales.tensors().items():
        assert torch.equal(tensor, before[name]), name
    window(scales, layers, [[100.0, math.inf, 300.0]] * LAYERS)
    assert not torch.equal(scales.tensors()["scale"], before["scale"])


@pytest.mark.parametrize("scrub", [True, False])
def test_infinite_amaxes_are_dropped_and_counted_unless_told_otherwise(scrub: bool) -> None:
    scales, layers = make(scrub_inf=scrub)
    window(scales, layers, [[1.0, 1.0, 1.0]] * LAYERS)
    stats = window(scales, layers, [[math.inf, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, math.inf]])
    assert stats[0, 0].item() == math.inf, "it is still told"
    assert scales.scrubbed.item() == (2 if scrub else 0)
    assert bool(scales.tensors()["history"].isfinite().all()) is scrub
    window(scales, layers, [[4.0, 1.0, 1.0]] * LAYERS)
    assert scales.tensors()["scale"][0].item() == (112.0 if scrub else 448.0), "not scrubbed, the scale is frozen"


def test_evaluation_can_be_taken_back() -> None:
    scales, layers = make()
    window(scales, layers, [[1.0, 2.0, 3.0]] * LAYERS)
    before = scales.tensors()
    put_back = scales.held()
    layers[1].fp8_meta["scaling_fwd"].amax_history[0, 0] = 1e4
    put_back()
    assert torch.equal(scales.tensors()["history"], before["history"])


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


def test_under_block_scaling_the_fallback_demotes_for_an_infinite_amax_and_promotes_again() -> None:
    """NaN for the scale says nothing; NaN for the saturation would keep a layer out of FP8 for good."""
    names = ("a.input", "a.weight", "a.grad_output", "b.input", "b.weight", "b.grad_output")
    policy = FallbackPolicy(**{"hits": 1, "window": 2, "dwell_steps": 2, "warmup_steps": 1, "max_demoted_share": 1.0})
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
        facts = StepFacts(step, step, 1.0, 1.0, 1e-3, 1.0, True, step, 1, 1.0, demoted=demoted, slots=stats)
        proposal = controller.observe(facts).proposal
        if isinstance(proposal, Switch):
            moves.append((proposal.demote, proposal.promote))
            demoted = tuple((set(demoted) | set(proposal.demote)) - set(proposal.promote))
    assert moves == [(("a",), ()), ((), ("a",))]
