"""Models whose state no rank can hold alone: built without memory, trained to DDP's bits, or refused by name.

Run as a script, this file is one rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.checkpoint.store import Store
from harness.core import deferred
from harness.core.errors import ConfigError
from harness.core.state import seed_everything
from harness.engines.process_group import join, read_launch
from harness.tracking.history import read_rows
from tests.dist.limited import limit
from tests.support.ranks import CPU, make_fsdp, run_ranks
from tests.support.runs import train_ranks

pytestmark = pytest.mark.dist

MODEL = "model.args={dim: 512, layers: 20, heads: 4, kv_heads: 4, ffn: 1536}"
# Bytes of the state: 68 million parameters, of 4 bytes of weight, 4 of gradient and 8 of moments.
STATE = 16 * 68_309_504
# More than half of it, and what a rank takes beside: bounded reads of small files ask for 256 MiB for a moment.
ROOM = 1_000_000_000
LAYERS, WIDTH = 32, 1024
WEIGHTS = 4 * LAYERS * WIDTH * WIDTH


class Deep(nn.Module):
    """Weights of 128 MiB, in matrices of 4 MiB, with ties, a 0-d parameter and buffers."""

    def __init__(self) -> None:
        super().__init__()
        made = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.blocks = nn.ModuleList(made)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mask", torch.tril(torch.ones(100, 100)), persistent=False)
        self.head = nn.Linear(3, 2)
        self.head.weight.requires_grad_(False)


def built(seed: int, small: int = deferred.SMALL) -> nn.Module:
    seed_everything(seed)
    return deferred.build(Deep, CPU, small)


def rank_main(folder: Path) -> None:
    join(read_launch(), CPU, timeout_seconds=60)
    rank = int(os.environ["RANK"])

    # What a rank has of a model that was built whole, and the generator afterwards.
    seed_everything(7)
    whole = Deep()
    after = torch.get_rng_state()
    expected = {
        name: t.clone() for name, t in make_fsdp(whole).parts()["model"].state_dict()[0].items()
    }
    del whole

    # Weights of ranks that were built from other seeds.
    try:
        make_fsdp(built(seed=rank))
        refused = ""
    except ConfigError as error:
        refused = str(error)

    # The same model without memory: every tensor of the first one, and the second where its weights would not fit.
    differ: list[str] = []
    for small in (0, deferred.SMALL):
        model = built(7, small)
        same_numbers = torch.equal(torch.get_rng_state(), after)
        if small:
            limit(WEIGHTS * 3 // 4)
        found = make_fsdp(model).parts()["model"].state_dict()[0]
        assert found.keys() == expected.keys()
        differ += [name for name in found if not torch.equal(found[name], expected[name])]
        del model, found
    try:
        Deep()
        fits = True
    except RuntimeError:
        fits = False
    result = {"differ": differ, "random": same_numbers, "refused": refused, "fits": fits}
    (folder / f"{rank}.json").write_text(json.dumps(result))


@pytest.mark.slow
def test_ranks_get_their_rows_where_the_weights_do_not_fit(tmp_path: Path) -> None:
    for result in run_ranks(__file__, tmp_path, 2):
        assert not result["fits"], "the limit holds"
        assert result["differ"] == []
        assert result["random"], "the generator is where it is after a model that is built whole"
        assert (
            "the ranks built the model with different weights: blocks.0.weight" in result["refused"]
        )


def ran(folder: Path, ranks: int, engine: str) -> Any:
    folder.mkdir()
    return train_ranks(
        folder,
        ranks,
        "--recipe",
        "fp32",
        "--name",
        "r",
        MODEL,
        f"engine.name={engine}",
        "train.steps=2",
        "train.global_batch=2",
        "train.micro_batch=1",
        "data.context=32",
        "checkpoint.background=false",
        "checkpoint.every=2",
        "guard.snapshot_every=0",
        program=Path(__file__).parent / "limited.py",
    )


@pytest.mark.slow
def test_a_rank_that_cannot_hold_the_state_alone_is_refused_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ROOM < STATE
    monkeypatch.setenv("ROOM", str(ROOM))
    alone = ran(tmp_path / "alone", 1, "fsdp")
    assert alone.returncode == 4, alone.stdout
    assert "needs at least 1.0 GiB to be trained, and this process may take" in alone.stdout
    assert "start more ranks, which share it" in alone.stdout
    assert not (tmp_path / "alone" / "runs" / "r" / "config.yaml").exists()


@pytest.mark.nightly
def test_a_state_that_no_rank_could_hold_is_trained_as_under_ddp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ddp = ran(tmp_path / "ddp", 2, "ddp")
    assert ddp.returncode == 0, ddp.stdout
    assert ROOM < STATE
    monkeypatch.setenv("ROOM", str(ROOM))
    fsdp = ran(tmp_path / "fsdp", 2, "fsdp")
    assert fsdp.returncode == 0, fsdp.stdout
    losses: list[list[float]] = []
    states: list[Any] = []
    for engine in ("ddp", "fsdp"):
        run = tmp_path / engine / "runs" / "r"
        rows = [row for row in read_rows(run / "journal.jsonl") if row["kind"] == "metrics"]
        losses.append(
            [row["metrics"]["train/loss"] for row in rows if "train/loss" in row["metrics"]]
        )
        states.append(Store(run / "checkpoints", readonly=True).load(2)[0]["model"])
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]
    assert [name for name in states[0] if not torch.equal(states[0][name], states[1][name])] == []


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
