"""Values of integers on fake tensors: those that follow from shapes, and from evenly spread choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from harness.estimate.routing import Routing


class Routed(TorchDispatchMode):
    """Hands every operation to a Routing, as the recorder does."""

    def __init__(self) -> None:
        super().__init__()
        self.routing = Routing()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        return self.routing.call(func, name, args, kwargs or {})


@pytest.fixture
def routed() -> Iterator[Routed]:
    with FakeTensorMode(), Routed() as mode:
        yield mode


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.zeros_like(x, dtype=torch.bool),
        lambda x: torch.ones_like(x, dtype=torch.int64),
        lambda x: torch.full_like(x.T, 7, dtype=torch.int32),
        lambda x: x.new_zeros((2, 5), dtype=torch.int64),
        lambda x: x.new_ones(3, dtype=torch.bool),
        lambda x: x.new_full((4,), 9, dtype=torch.int64),
    ],
)
def test_what_is_made_like_a_tensor_depends_on_its_shape_alone(
    routed: Routed, make: Callable[[Tensor], Tensor]
) -> None:
    found = routed.routing.value(make(torch.empty(6, 4)))
    with _disable_current_modes():
        expected = make(torch.empty(6, 4))
        assert found is not None
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


def test_a_mask_scattered_from_choices_counts_rows(routed: Routed) -> None:
    scores = torch.empty(6, 4)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(2).indices, True)
    chosen = scores[mask[:, 0]]
    assert chosen.shape == (3, 4), "2 of 4 experts each: expert 0 gets half of the 6 tokens"


@pytest.mark.parametrize("dim", [0, 1])
def test_a_stable_sort_takes_its_dimension_by_name(routed: Routed, dim: int) -> None:
    places = routed.routing.value(torch.empty(3, 4).sort(stable=True, dim=dim).indices)
    with _disable_current_modes():
        assert places is not None
        sizes = torch.arange((3, 4)[dim])
        expected = sizes[:, None].expand(3, 4) if dim == 0 else sizes.expand(3, 4)
        assert torch.equal(places.sort(dim=dim).values, expected), "each place once"
