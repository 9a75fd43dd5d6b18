"""Layers of Transformer Engine in a loop that shards its model with FSDP2: the bits of the same loop under DDP.

Layers leave FP8 on the way, some by the fallback and one by hand. Run as a script, this file is one rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import te_install
import te_wheels
import torch.distributed as dist

from harness.precision.recipe import Recipe
from tests.dist import test_fsdp_loops as loops
from tests.support.ranks import run_ranks

RECIPES = ["fp8_hybrid", "fp8_current"]
usual_recipe = loops.recipe


def on_transformer_engine(name: str) -> Recipe:
    """The recipe of the other loops, on one rung."""
    base = usual_recipe(name).model_dump()
    base["ladder"] = [{"backend": "transformer_engine", "precision": "fp8", "tiers": ["CPU"]}]
    return Recipe.model_validate(base)


def rank_main(folder: Path) -> None:
    te_install.install(te_wheels.unpacked(os.environ.get("TE_VERSION", te_wheels.NEWEST)))
    te_install.as_on_a_card()
    loops.recipe = on_transformer_engine
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = {name: loops.beside_ddp(name) for name in RECIPES}
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(results))


@pytest.mark.dist
@pytest.mark.every_version
def test_layers_that_leave_fp8_have_the_bits_of_ddp(tmp_path: Path) -> None:
    for result in run_ranks(__file__, tmp_path, 2):
        for name in RECIPES:
            found = result[name]
            assert found["resolved"] == "transformer_engine:fp8"
            assert found["figures"]
            assert found["state"] == []
            assert not found["applied"][2], "the fault fired"
            assert any(found["switched"]), "the fallback acted"
            assert "blocks.02.up" in found["demoted"]


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
