"""Which engine runs a run: what was named, or what the launcher suggests; what does not fit is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from harness.build import ENGINES, choose_engine
from harness.core.config import EngineConfig
from harness.core.errors import ConfigError
from harness.engines.process_group import Launch, read_launch


def launched(ranks: int) -> Launch:
    given = {
        "RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    return read_launch(given)


@pytest.mark.parametrize(
    ("launcher", "ranks", "chosen"),
    [
        ("python", 0, "single"),
        ("torchrun", 1, "single"),
        ("torchrun", 2, "ddp"),
        ("deepspeed", 1, "deepspeed"),
        ("deepspeed", 2, "deepspeed"),
    ],
)
def test_auto_looks_at_the_launcher(launcher: str, ranks: int, chosen: str) -> None:
    assert choose_engine("auto", launcher, launched(ranks) if ranks else read_launch({})) == chosen


@pytest.mark.parametrize(
    ("launcher", "name"), [("torchrun", "deepspeed"), ("deepspeed", "ddp"), ("torchrun", "ddp")]
)
def test_a_named_engine_runs_under_every_launcher(launcher: str, name: str) -> None:
    assert choose_engine(name, launcher, launched(2)) == name


def test_what_does_not_fit_the_processes_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="2 ranks were started") as caught:
        choose_engine("single", "torchrun", launched(2))
    assert caught.value.problems[0].where == "engine.name=single"
    for name in ("ddp", "deepspeed"):
        with pytest.raises(ConfigError, match="no launcher started this process"):
            choose_engine(name, "python", read_launch({}))


def test_engines_declare_what_they_own_and_refuse() -> None:
    assert [name for name, engine in ENGINES.items() if engine.owns_loss_scale] == ["deepspeed"]
    assert [name for name, engine in ENGINES.items() if not engine.snapshots] == ["deepspeed"]
    refused = EngineConfig(zero_stage=3)
    assert ENGINES["single"].refusals(refused, "fp8", "cpu") == []
    assert "ZeRO-3" in ENGINES["deepspeed"].refusals(refused, "fp8", "cpu")[0].what


def test_an_older_torch_is_told_what_fsdp_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 and 2.12 have no zeros for unused parameters: the run ended in an AttributeError."""
    engine = ENGINES["fsdp"]
    assert engine.lacking("cuda") == []
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    [problem] = engine.lacking("cuda")
    assert problem.what == f"torch {torch.__version__} lacks what engine fsdp needs of fully_shard"
    assert "torch 2.13" in problem.fix
