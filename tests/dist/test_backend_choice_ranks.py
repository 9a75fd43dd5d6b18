"""Two ranks that measure the opposite of each other take the same backend, by the times of the slower one.

Run as a script, this file is one rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness import Precision
from harness.precision import backend_choice
from harness.precision.backends.registry import BACKENDS
from harness.precision.recipe import Recipe, load_recipe
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.dist
# Milliseconds by rank; None: it fails there.
CASES: list[list[dict[str, float | None]]] = [
    [{"native:fp8": 3, "peer:fp8": 1}, {"native:fp8": 2, "peer:fp8": 4}],
    [{"native:fp8": 5, "peer:fp8": 1}, {"native:fp8": 2, "peer:fp8": 4}],
    [{"native:fp8": 5, "peer:fp8": 1}, {"native:fp8": 5, "peer:fp8": None}],
    [{"native:fp8": 1, "peer:fp8": 5}, {"native:fp8": None, "peer:fp8": 5}],
]


def recipe() -> Recipe:
    base = load_recipe("fp8_hybrid").model_dump()
    names = ("native", "peer")
    base["ladder"] = [{"backend": name, "precision": "fp8", "tiers": ["CPU"]} for name in names]
    base["fp8"]["backend"] = "auto"
    base["layers"]["min_features"] = 16
    return Recipe.model_validate(base)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def rank_main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    BACKENDS["peer"] = BACKENDS["native"]
    answers: list[dict[str, Any]] = []
    for case in CASES:

        def in_turns(
            actions: Mapping[str, Callable[[], object]],
            *_: Any,
            own: Mapping[str, Any] = case[rank],
        ) -> tuple[dict[str, list[float]], dict[str, str]]:
            failed = {name: "no such kernel" for name in actions if own[name] is None}
            return {name: [own[name] / 1e3] * 5 for name in actions if name not in failed}, failed

        backend_choice.in_turns = in_turns
        model = Model()
        precision = Precision(recipe())
        precision.prepare(model, forward=lambda model=model: model(torch.randn(16, 16)))
        assert precision.plan.backend_choice is not None
        answers.append(dict(precision.plan.backend_choice))
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(answers))


@pytest.mark.slow
def test_both_ranks_take_the_same_by_the_slowest(tmp_path: Path) -> None:
    first, second = run_ranks(__file__, tmp_path, 2)
    assert first == second
    taken = [answer["taken"] for answer in first]
    assert taken == ["native:fp8", "peer:fp8", "native:fp8", "peer:fp8"]
    assert first[0]["seconds"]["native:fp8"][1] == pytest.approx(0.003)
    assert first[0]["seconds"]["peer:fp8"][1] == pytest.approx(0.004)
    assert "peer:fp8 was not timed: no such kernel" in first[2]["why"]
    assert "native:fp8 was not timed: no such kernel" in first[3]["why"]


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
