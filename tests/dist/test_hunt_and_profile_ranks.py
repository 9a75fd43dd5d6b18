"""A hunt and a profile on two ranks: the norms of one process, no collective more, and files for each rank.

Run as a script, this file is one rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.engines.process_group import join, read_launch
from harness.profiling.report import profiles
from tests.support.ranks import CPU, backward_of_a_step, make_engine, make_fsdp, run_ranks
from tests.support.runs import train_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        # Odd sizes: the ranks' rows differ in number, and one rank has no row of the last bias.
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList([nn.Linear(6, 17), nn.Linear(17, 3)])

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.tanh(self.blocks[0](inputs))
        return (self.blocks[1](hidden) * self.scale - targets).square().mean()


def counted(call: Callable[[], Any]) -> tuple[Any, int]:
    """What `call` returns, and how many collectives it took."""
    count = 0

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def counts(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return real(*args, **kwargs)

        return counts

    names = ("all_reduce", "all_gather", "all_gather_object", "broadcast")
    real = {name: getattr(dist, name) for name in names}
    for name, function in real.items():
        setattr(dist, name, counting(function))
    try:
        return call(), count
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def measured(engine: Any) -> dict[str, Any]:
    """The norms of one window by layer, and the collectives with and without them."""
    backward_of_a_step(engine, 0)
    # A first measurement also checks the model.
    engine.measure(True, False)
    plain, without = counted(lambda: engine.measure(True, False))
    figures, with_norms = counted(lambda: engine.measure(True, True))
    return {
        "norms": dict(zip(engine.layers, figures["layer_norms"].tolist(), strict=True)),
        "total": figures["grad_norm"].item(),
        "same": plain["grad_norm"].item() == figures["grad_norm"].item(),
        "collectives": [without, with_norms],
    }


def test_norms_are_those_of_one_process(tmp_path: Path) -> None:
    results = run_ranks(__file__, tmp_path, 2)
    alone = measured(make_engine(Net(), None))
    assert list(alone["norms"]) == ["scale", "blocks.00", "blocks.01"]
    for result in results:
        for engine in ("ddp", "fsdp"):
            found = result[engine]
            assert found["norms"] == pytest.approx(alone["norms"], rel=1e-5)
            assert found["same"], "the norm of the whole gradient keeps its bits"
            without, with_norms = found["collectives"]
            assert with_norms == without, "a hunt costs no collective"
    assert results[0]["ddp"]["norms"] == results[1]["ddp"]["norms"]
    assert results[0]["fsdp"]["norms"] == results[1]["fsdp"]["norms"]


def test_every_rank_is_profiled_if_asked(tmp_path: Path) -> None:
    settings = ("train.profile_steps=[2,3]", "train.profile_ranks=all", "train.steps=4")
    done = train_ranks(tmp_path, 2, "--recipe", "bf16", *settings, "--name", "r")
    assert done.returncode == 0, done.stdout
    found = profiles(tmp_path / "runs" / "r")
    names = [path.name for path, _ in found]
    assert names == ["steps-000002-000003-rank-1.table.json", "steps-000002-000003.table.json"]
    for rank, (_, made) in zip((1, 0), found, strict=True):
        assert (made.rank, made.steps) == (rank, (2, 3))
        kinds = {kind: seconds for kind, seconds, _, _ in made.rows}
        assert kinds["communication"] > 0, "gloo works on a thread of its own"


def rank_main(folder: Path) -> None:
    join(read_launch(), CPU, timeout_seconds=60)
    result = {"ddp": measured(make_engine(Net(), None)), "fsdp": measured(make_fsdp(Net()))}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
