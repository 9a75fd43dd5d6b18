"""The hashes of a step's tensors: in which order, what they tell apart, and how far two tensors are from each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.core.facts import StepFacts
from harness.replay.step_tensors import (
    BACKWARD,
    FORWARD,
    GENERATOR,
    STATE,
    UPDATE,
    Place,
    StepLog,
    StepTensors,
    apart,
    first_difference,
    frozen_differ,
    generators_differ,
    watched,
)


class Twice(nn.Module):
    """Calls one of its layers twice, and returns a whole number beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.shared = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.shared(self.shared(self.first(x)))
        return x, x.argmax()


def step(model: nn.Module, into: StepTensors, batches: int = 1) -> None:
    x = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)
    with watched(model, into):
        for _ in range(batches):
            model(x)[0].sum().backward()


def facts(loss: float = 1.0, **changed: Any) -> StepFacts:
    figures: dict[str, Any] = {"grad_norm": 2.0, "lr": 0.1, "loss_scale": 1.0, "applied": True}
    figures |= changed
    return StepFacts(1, 0, loss, applied_steps=1, tokens=8, seconds=0.0, **figures)


def test_tensors_are_noted_in_the_order_of_computation() -> None:
    torch.manual_seed(0)
    model, seen = Twice(), StepTensors()
    step(model, seen)
    seen.add_figures(facts())
    order = [(each.phase, each.tensor, each.kind, each.call) for each in seen.hashes]
    assert order[:7] == [
        (FORWARD, "first", "output", 1),
        (FORWARD, "shared", "output", 1),
        (FORWARD, "shared", "output", 2),
        (FORWARD, "(the model)", "output.0", 1),
        (FORWARD, "(the model)", "output.1", 1),
        (FORWARD, "loss", "figure", 0),
        (BACKWARD, "shared", "gradient of output", 2),
    ]
    names = [each[1:3] for each in order]
    backward = [("shared", "gradient of output"), ("first", "gradient of output")]
    assert names.index(backward[1]) < names.index(("first.weight", "gradient"))
    assert order[-5:] == [
        (UPDATE, name, "figure", 0)
        for name in ("loss_scale", "grad_norm", "limits", "applied", "lr")
    ]


def test_hooks_change_no_bit_and_are_taken_off() -> None:
    torch.manual_seed(0)
    model = Twice()
    x = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)
    model(x)[0].sum().backward()
    bare = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    step(model, StepTensors())
    for parameter, before in zip(model.parameters(), bare, strict=True):
        assert before is not None
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, before)
    later = StepTensors()
    step(model, later)
    count = len(later.hashes)
    model(x)[0].sum().backward()
    assert len(later.hashes) == count


def test_the_second_micro_batch_is_one_of_its_own_and_its_gradient_is_the_sum() -> None:
    torch.manual_seed(0)
    model, seen = Twice(), StepTensors()
    step(model, seen, batches=2)
    outputs = [seen.hashes[Place(FORWARD, "first", "output", number, 1)] for number in (1, 2)]
    assert outputs[0] == outputs[1]
    gradients = [seen.hashes[Place(BACKWARD, "first.weight", "gradient", n)] for n in (1, 2)]
    assert gradients[0] != gradients[1], "the second is added to the first"


def only(tensor: Tensor) -> StepTensors:
    seen = StepTensors()
    seen.add(Place(UPDATE, "x", "weights"), tensor)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_a_bit_a_dtype_and_a_shape_are_told_apart(dtype: torch.dtype) -> None:
    one = torch.arange(6).reshape(2, 3).to(dtype)
    assert first_difference(only(one), only(one.t().contiguous().t())) is None, "not by strides"
    other = one.clone()
    other.view(torch.uint8)[1, 2] ^= 1
    assert first_difference(only(one), only(other)) == Place(UPDATE, "x", "weights")
    assert first_difference(only(one), only(one.reshape(3, 2))) is not None
    assert first_difference(only(one), only(one.double())) is not None


def test_zeros_of_two_signs_differ_by_no_ulp() -> None:
    zero, negative = torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0])
    assert first_difference(only(zero), only(negative)) is not None
    found = apart(zero, negative)
    assert (found.differing, found.ulps, found.at, found.largest) == (1, 0, 1, 0.0)


def of(*names: str, last: float = 1.0) -> StepTensors:
    """Tensors of ones with these names, but for the last one's value."""
    seen = StepTensors()
    for name in names:
        value = last if name == names[-1] else 1.0
        seen.add(Place(UPDATE, name, "weights"), torch.full((2,), value))
    return seen


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (of("x", "y"), of("x", "mine", "y", last=2.0), "mine"),
        (of("x", "y"), of("mine", "x", "y"), "mine"),
        (of("x", "y"), of("x", "y", "mine"), "mine"),
        (of("x"), of("x", "mine", last=2.0), "mine"),
        (of("x", "y", last=2.0), of("x", "y", "mine"), "y"),
        (of("x", "y"), of("y", "x"), None),
        (of("x"), of("a", "b"), "a"),
    ],
)
def test_what_only_one_run_has_is_a_difference_at_its_place(
    one: StepTensors, other: StepTensors, expected: str | None
) -> None:
    for a, b in ((one, other), (other, one)):
        found = first_difference(a, b)
        log = StepLog()
        log.append(a)
        assert log.difference(1, b) == found
        if expected == "a":
            assert found is not None, "either run's first one"
        else:
            assert (None if found is None else found.tensor) == expected


def test_a_step_with_hooks_is_compared_in_what_the_other_has() -> None:
    bare, hooked = of("x", "y"), of("x", "mine", "y")
    log = StepLog()
    log.append(bare)
    assert first_difference(bare, hooked, shared=True) is None
    assert log.difference(1, hooked, shared=True) is None
    assert first_difference(bare, of("x", "mine", "y", last=2.0), shared=True) == Place(
        UPDATE, "y", "weights"
    )


def test_what_a_recipe_alone_brings_is_no_difference() -> None:
    weights = {"model": {"w": torch.ones(2)}}
    bare, with_fp8 = StepTensors(), StepTensors()
    bare.add_state(weights, {"parts": {}}, after_update=False)
    fp8 = {"history": torch.zeros(4, 1), "scale": torch.ones(1)}
    parts = {**weights, "fp8": fp8, "loss_scale": {"scale": torch.ones(())}}
    with_fp8.add_state(parts, {"parts": {"fp8": {"slots": ["w.input"]}}}, after_update=False)
    for a, b in ((bare, with_fp8), (with_fp8, bare)):
        assert first_difference(a, b) is None
        log = StepLog()
        log.append(a)
        assert log.difference(1, b) is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_layer_is_noted_as_one_that_is_not(reentrant: bool) -> None:
    class Recomputing(Twice):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            # A reentrant checkpoint passes no gradient where no input wants one.
            x = (x + 0.0).requires_grad_()
            first: Tensor = checkpoint(self.first, x, use_reentrant=reentrant)
            first = self.shared(self.shared(first))
            return first, first.argmax()

    noted: list[StepTensors] = []
    for kind in (Twice, Recomputing):
        torch.manual_seed(0)
        noted.append(StepTensors())
        step(kind(), noted[-1])
    assert first_difference(*noted) is None
    assert set(noted[0].hashes) == set(noted[1].hashes)


def test_a_tensor_of_one_run_is_described() -> None:
    tensor = torch.zeros(2, 3)
    assert apart(tensor, None)[-2:] == (("float32 2x3", ""), "A")
    assert apart(None, tensor)[-2:] == (("", "float32 2x3"), "B")


def test_a_log_of_steps_finds_what_single_steps_find() -> None:
    log = StepLog()
    steps = [only(torch.full((2,), float(number))) for number in range(4)]
    for each in steps:
        log.append(each)
    for number, each in enumerate(steps, start=1):
        assert log.difference(number, each) is None
        assert log.difference(number, only(torch.full((2,), 9.0))) == Place(UPDATE, "x", "weights")


def state(scale: float = 1.0, seed: int = 0) -> StepTensors:
    parts = {
        "model": {"b.weight": torch.ones(2), "a.weight": torch.ones(2)},
        "optimizer": {"l.10.m": torch.ones(2), "l.2.m": torch.ones(2)},
        "fp8": {"history": torch.zeros(16, 2), "scale": torch.tensor([1.0, scale])},
        "rng": {"torch": torch.tensor([seed])},
    }
    seen = StepTensors()
    seen.add_state(
        parts, {"parts": {"fp8": {"slots": ["x.input", "x.weight"]}}}, after_update=False
    )
    return seen


def test_a_state_is_weights_then_optimizer_then_each_slot() -> None:
    assert [(each.tensor, each.kind) for each in state().hashes] == [
        ("b.weight", "weights"),
        ("a.weight", "weights"),
        ("l.2.m", "optimizer state"),
        ("l.10.m", "optimizer state"),
        ("x.input", "history"),
        ("x.weight", "history"),
        ("x.input", "scale"),
        ("x.weight", "scale"),
        ("torch", GENERATOR),
    ]
    assert {each.phase for each in state().hashes} == {STATE}
    assert first_difference(state(), state(scale=2.0)) == Place(STATE, "x.weight", "scale")


def test_frozen_weights_that_no_checkpoint_holds_are_told_apart() -> None:
    seen: list[StepTensors] = []
    for digest in ("ab", "ab", "ac"):
        seen.append(StepTensors())
        meta = {"parts": {"model": {"frozen": {"from": "base", "count": 1, "sha256": digest * 32}}}}
        seen[-1].add_state({"model": {"lora": torch.ones(1)}}, meta, after_update=False)
    assert not frozen_differ(seen[0], seen[1])
    assert frozen_differ(seen[1], seen[2])
    assert not frozen_differ(seen[1], state()), "which has none"
    # They say nothing of where: the first tensor that is computed with them does.
    assert first_difference(seen[1], seen[2]) is None


def test_a_generator_alone_is_no_difference_and_is_named() -> None:
    assert first_difference(state(), state(seed=1)) is None
    assert generators_differ(state(), state(seed=1)) == ["torch"]
    assert generators_differ(state(), state()) == []


def test_a_generator_that_only_one_run_has_is_named() -> None:
    more = state()
    more.add(Place(STATE, "cuda", GENERATOR), torch.tensor([1]))
    assert generators_differ(state(), more) == ["cuda"]
    assert generators_differ(more, state()) == ["cuda"]
    assert first_difference(state(), more) is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("value", [1.0, -1.0, 1e-3, -2.5])
def test_ulps_are_the_values_in_between(dtype: type[np.floating[Any]], value: float) -> None:
    array = np.full(5, value, dtype)
    other = array.copy()
    for _ in range(3):
        other[2] = np.nextafter(other[2], dtype(math.inf))
    found = apart(torch.from_numpy(array), torch.from_numpy(other))
    assert (found.elements, found.differing, found.at, found.ulps) == (5, 1, 2, 3)
    assert (found.a, found.b) == (float(array[2]), float(other[2]))
    assert found.largest == abs(float(array[2]) - float(other[2]))


def test_ulps_across_zero_are_counted_from_both_sides() -> None:
    smallest = np.nextafter(np.float32(0), np.float32(1))
    a, b = torch.tensor([float(smallest)]), torch.tensor([-float(smallest)])
    assert apart(a, b).ulps == 2
    largest = torch.finfo(torch.float64).max
    one, other = torch.tensor([largest]).double(), -torch.tensor([largest]).double()
    assert apart(one, other).ulps == torch.iinfo(torch.int64).max, "more than int64 can count"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_ulps_of_small_formats(dtype: torch.dtype) -> None:
    bits = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    a = torch.tensor([1.0, 2.0]).to(dtype)
    b = a.clone()
    b.view(bits)[1] += 2
    found = apart(a, b)
    assert (found.differing, found.at, found.ulps, found.a) == (1, 1, 2, 2.0)
    assert found.b > 2.0


def test_other_shapes_and_dtypes_are_named_and_not_compared() -> None:
    found = apart(torch.zeros(2, 3), torch.zeros(3, dtype=torch.bfloat16))
    assert found.shapes == ("float32 2x3", "bfloat16 3")
    assert found.ulps is None


def test_whole_numbers_have_no_ulps() -> None:
    found = apart(torch.tensor([1, 5, 9]), torch.tensor([1, 4, 2]))
    assert (found.differing, found.at, found.a, found.b, found.ulps) == (2, 2, 9.0, 2.0, None)


def test_the_wanted_tensor_is_kept_as_it_was() -> None:
    place = Place(UPDATE, "x", "weights")
    seen = StepTensors(place)
    tensor = torch.ones(2)
    seen.add(place, tensor)
    tensor.zero_()
    assert seen.value is not None
    assert seen.value.tolist() == [1.0, 1.0]
