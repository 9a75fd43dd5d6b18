"""Ranks that share a Hugging Face model read their rows of its folder alone, and refuse a folder that is not the same.

Run as a script, this file is one rank: of `rank_main`, or of `launch/train.py` with a home folder of its own, which
counts the bytes of weights that it reads.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.core.config import ModelConfig, TrainConfig
from harness.core.errors import ConfigError, ExitCode
from harness.core.sharded import local_of
from harness.core.state import seed_everything
from harness.engines.fsdp import FsdpEngine
from harness.engines.process_group import join, read_launch
from harness.models import build_deferred, build_model
from harness.models.stored import StoredTensor
from harness.optim.schedule import too_high
from harness.tracking.history import read_rows
from tests.dist.limited import limit
from tests.extras.tiny_models import save
from tests.support import warm
from tests.support.ranks import CPU, make_fsdp, run_ranks
from tests.support.runs import TRAIN, command, rank_logs, start_ranks, train_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow]

LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 2048}
# Far too high for these weights.
LR = TrainConfig.model_validate({"lr": 3})
LORA = {"r": 4, "targets": ["q_proj", "v_proj", "c_attn"]}
# Folder: what is saved in it, and the run's model.args.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"kind": "llama", "shard": "50KB"}, {}),
    "tied": ({"kind": "llama", "dtype": torch.bfloat16, "tie_word_embeddings": True}, {}),
    # Adapters of more elements than small tensors have: they are computed, and the base is read.
    "lora": ({"kind": "llama", "dtype": torch.bfloat16}, {"lora": {"r": 80}}),
    "gpt2": ({"kind": "gpt2", "dtype": torch.bfloat16}, {"lora": LORA}),
    "mixtral": ({"kind": "mixtral", "dtype": torch.bfloat16, "shard": "50KB"}, {}),
    # Frozen weights have no moments, which would take more memory than the weights.
    "large": ({"kind": "llama", "dtype": torch.bfloat16, **LARGE}, {"lora": LORA}),
}


def bytes_read() -> int:
    """Bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def state(model: Any) -> tuple[dict[str, torch.Tensor], Any, int]:
    """What a rank has of the model that it shards: its rows and meta data, and the bytes that it read for them."""
    before = bytes_read()
    engine = make_fsdp(model)
    read = bytes_read() - before
    here = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    rows = {name: local_of(tensor).detach().clone() for name, tensor in here.items()}
    return rows, engine.parts()["model"].state_dict()[1], read


def alike(config: ModelConfig, room: float = 0.0) -> tuple[list[str], int]:
    """Tensors that differ if the model is built without memory, and the bytes that were read as it was sharded.

    room: the memory that there is for that, as a share of the weights; 0: no limit.
    """
    seed_everything(7)
    whole = build_model(config)
    weights = sum(param.nbytes for param in whole.parameters())
    expected, meta, _ = state(whole)
    del whole
    gc.collect()
    if room:
        limit(int(room * weights))
    seed_everything(7)
    found, found_meta, read = state(build_deferred(config, CPU))
    assert list(found) == list(expected)
    assert found_meta == meta
    return [name for name in found if not torch.equal(found[name], expected[name])], read


def refused(config: ModelConfig) -> str:
    try:
        make_fsdp(build_deferred(config, CPU))
    except ConfigError as error:
        return str(error)
    return ""


def rank_main(folder: Path) -> None:
    join(read_launch(), CPU, timeout_seconds=300)
    rank = int(os.environ["RANK"])
    result: dict[str, Any] = {"differ": {}}
    for name, (_, args) in CASES.items():
        if name != "large":
            config = ModelConfig(target=f"hf:{folder / name}", args=args)
            result["differ"][name], _ = alike(config)

    # Each rank has a copy of its own, as on two machines.
    config = ModelConfig(target=f"hf:{folder}/copy-{rank}")
    result["differ"]["copies"], _ = alike(config)
    result["refused"] = refused(ModelConfig(target=f"hf:{folder}/other-{rank}"))

    # The last one, as memory stays limited.
    large = ModelConfig(target=f"hf:{folder}/large", args=CASES["large"][1])
    result["differ"]["large"], result["read"] = alike(large, room=0.75)
    result["whole"] = ""
    try:
        build_model(large)
    except (ConfigError, RuntimeError) as error:
        result["whole"] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(result))


def test_ranks_read_their_rows_of_a_folder(tmp_path: Path) -> None:
    for name, (saved, _) in CASES.items():
        save(tmp_path / name, **saved)
    for rank in range(2):
        shutil.copytree(tmp_path / "llama", tmp_path / f"copy-{rank}")
        shutil.copytree(tmp_path / "tied", tmp_path / f"other-{rank}")
    # One element, of a row that rank 1 would keep.
    file = tmp_path / "other-1" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][-1, 3] += 1
    save_file(weights, file, {"format": "pt"})

    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    for result in run_ranks(__file__, tmp_path, 2):
        assert {name: differ for name, differ in result["differ"].items() if differ} == {}
        named = "different weights: model.layers.1.mlp.up_proj.weight"
        assert named in result["refused"]
        # Half of the file, and its header for each tensor.
        assert result["read"] < 0.6 * size
        # By what was allocated before, the weights do not fit, or the file cannot be mapped.
        out_of_memory = ("cannot be built", "Cannot allocate memory")
        assert any(text in result["whole"] for text in out_of_memory), "the limit holds"


def test_a_folder_that_one_rank_cannot_use_ends_all_of_them(tmp_path: Path) -> None:
    for rank in range(2):
        save(tmp_path / f"home-{rank}" / "model", "llama")
    file = tmp_path / "home-1" / "model" / "model.safetensors"
    weights = load_file(file)
    del weights["lm_head.weight"]
    save_file(weights, file, {"format": "pt"})

    words = ["--recipe", "fp32", "--name", "r", "model.target=hf:~/model", "engine.name=fsdp"]
    line = [__file__, *command(*words, "data.context=32")[2:]]
    processes = start_ranks(tmp_path, 2, line, PYTHONPATH=str(Path(__file__).parents[2]))
    try:
        codes = [process.wait(warm.PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
    first, second = (log.read_text() for log in rank_logs(tmp_path, 2))
    assert codes == [ExitCode.USAGE, ExitCode.USAGE], first + second
    assert "1 weight missing: lm_head.weight" in second
    assert "rank 1 cannot build the model" in first
    assert "lm_head.weight" in first
    assert not list(tmp_path.rglob("journal.jsonl")), "nothing was trained"


@pytest.mark.nightly
def test_a_run_reads_no_matrix_before_the_model_is_sharded_and_then_its_rows_once(
    tmp_path: Path,
) -> None:
    save(tmp_path / "model", "llama", **LARGE)
    (tmp_path / "home-0").mkdir()
    (tmp_path / "home-1").mkdir()
    model = f"model.target=hf:{tmp_path / 'model'}"
    ran = train_ranks(
        tmp_path,
        2,
        *("--recipe", "fp32", "--name", "r", model, "engine.name=fsdp", "data.context=32"),
        *("train.steps=1", "train.global_batch=2", "train.micro_batch=1", "train.lr=3"),
        program=Path(__file__),
    )
    assert ran.returncode == 0, ran.stdout
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    for rank in range(2):
        counted = json.loads((tmp_path / f"read-{rank}.json").read_text())
        assert 0 < counted["before"] < 0.01 * size
        assert 0.4 * size < counted["all"] < 0.6 * size
    # A warning about the initial weights is one of rows, summed over ranks.
    expected = too_high(build_model(ModelConfig(target=f"hf:{tmp_path / 'model'}")), LR)
    rows = read_rows(tmp_path / "runs" / "r" / "journal.jsonl")
    told = [row["text"] for row in rows if row.get("code") == "train.lr_high"]
    assert told == [expected]


def count_reads() -> None:
    """From now on count the bytes of weights that this process reads: before the model is sharded, and in all."""
    counted = {"before": 0, "all": 0}
    real, shard = StoredTensor.rows, FsdpEngine.__init__

    def rows(self: StoredTensor, begin: int, end: int) -> torch.Tensor:
        found = real(self, begin, end)
        counted["all"] += found.nbytes
        return found

    def begin(self: FsdpEngine, *args: Any, **named: Any) -> None:
        counted["before"] = counted["all"]
        shard(self, *args, **named)
        Path(f"read-{os.environ['RANK']}.json").write_text(json.dumps(counted))

    StoredTensor.rows = rows
    FsdpEngine.__init__ = begin


if __name__ == "__main__":
    if len(sys.argv) == 2:
        rank_main(Path(sys.argv[1]))
    else:
        os.environ["HOME"] = str(Path.cwd() / f"home-{os.environ['RANK']}")
        count_reads()
        runpy.run_path(str(TRAIN), run_name="__main__")
