"""A branch of a rehearsal has the memory to itself, whatever became of the one before."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from harness.core.config import load_config
from harness.core.errors import ConfigError, Problem
from harness.precision.recipe import load_recipe
from harness.rehearse.begin import of_config
from harness.rehearse.rehearsal import Rehearsal, recipes_for


class Model:
    """It holds itself in a circle, as a model with hooks does."""

    def __init__(self) -> None:
        self.itself = self


def test_what_a_failed_branch_left_is_gone_before_the_next_is_built() -> None:
    alive: weakref.WeakSet[Model] = weakref.WeakSet()
    before: list[int] = []

    def build(*_: object) -> Any:
        before.append(len(alive))
        alive.add(Model())
        raise ConfigError(Problem("the card lacks it", "here"))

    config, bf16 = load_config("tiny"), load_recipe("bf16")
    recipes = recipes_for(bf16, None)
    begin = of_config(config, 4)
    rehearsal = Rehearsal(begin, ["bf16"], "", recipes, bf16, build, lambda text: None)
    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(ConfigError):
                rehearsal._branch("bf16", "bf16", recipes["bf16"])
    finally:
        gc.enable()
    assert before == [0, 0, 0]
