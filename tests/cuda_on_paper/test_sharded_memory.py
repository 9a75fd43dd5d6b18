"""The estimate of a sharded run: storages counted with imagined ranks, against two real ones over gloo.

Run as a script, this file is one rank, of the runs of the model after which its folder is called.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tests.support.ranks import run_ranks

# As in test_memory: real runs, slow where the CPU has no bf16 instructions.
pytestmark = [pytest.mark.nightly, pytest.mark.dist]

RANKS, MICRO_BATCHES = 2, 2
# The built-in GPT, and Llama's shapes: grouped queries, an untied head. Few blocks, as fakes are slow.
GPT = {"vocab": 512, "dim": 256, "layers": 2, "heads": 4, "ffn": 704, "tied": True}
LLAMA = {"vocab": 2048, "dim": 192, "layers": 3, "heads": 6, "kv_heads": 2, "ffn": 512}
# name -> (arguments, samples of a micro-batch, tokens of a sample)
MODELS = {
    "gpt": (GPT, 2, 64),
    "llama": (LLAMA | {"recompute": "block"}, 1, 64),
}
RECIPES = {
    "fp32": "autocast:fp32",
    "bf16": "autocast:bf16",
    "fp8_hybrid": "native:fp8",
}
SYNCS = ("window", "micro_batch")
RUNS = [(model, recipe, sync) for model in MODELS for recipe in RECIPES for sync in SYNCS]
IDS = [", ".join(each) for each in RUNS]


def measured(model: str, recipe_name: str, sync: str, fake: bool) -> dict[str, Any]:
    """Rank 0's bytes at the peak and between steps, and the collectives of one step."""
    import torch
    from memory_runs import allocated
    from paper_driver import config_of, rung_of
    from torch._subclasses.fake_tensor import FakeTensorMode

    from harness.capability.probe import MachineFacts
    from harness.engines.process_group import join, read_launch
    from harness.estimate.ranks import imagined
    from harness.estimate.recorder import Recorder
    from harness.estimate.trace import built
    from harness.precision.recipe import load_recipe

    args, samples, tokens = MODELS[model]
    train = {"global_batch": samples * MICRO_BATCHES * RANKS, "micro_batch": samples}
    engine = {"name": "fsdp", "gradient_sync": sync, "timeout_seconds": 120}
    config = config_of(args, train=train, data={"context": tokens}, engine=engine)
    recipe, rung = load_recipe(recipe_name), rung_of(RECIPES[recipe_name])
    cpu = torch.device("cpu")
    if not fake:
        join(read_launch(), cpu, 120)
    profiler = torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    )
    recorder = Recorder("cpu")
    found: dict[str, Any] = {}
    with (
        imagined(RANKS) if fake else profiler,
        FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext(),
        recorder,
        built(config, recipe, MachineFacts(), cpu, rung, MICRO_BATCHES, recorder, "fsdp") as made,
    ):
        for number in (1, 2):
            made.step(number, str(number))
        found["recorded"], found["static"] = recorder.peak().bytes, recorder.live
        found["kinds"] = recorder.peak().kinds.most_common(8)
        usual = [each for each in recorder.collectives if each.step == "2"]
        counts = Counter(f"{each.name}, {each.phase}" for each in usual)
        sizes: Counter[str] = Counter()
        for each in usual:
            sizes[f"{each.name}, {each.phase}"] += each.bytes
        found["collectives"] = {name: [counts[name], sizes[name]] for name in counts}
        found["largest"] = max(each.bytes for each in usual)
    if not fake:
        found["allocator"] = allocated(profiler)
    return found


def rank_main(folder: Path) -> None:
    # No compiler: the fused CPU kernel reads addresses, which fakes do not have.
    os.environ["PATH"] = ""
    from harness.engines.process_group import leave

    runs = [run for run in RUNS if run[0] == folder.name]
    found: dict[str, Any] = {}
    found["real"] = {", ".join(run): measured(*run, fake=False) for run in runs}
    leave()
    rank = os.environ["RANK"]
    if rank == "0":
        found["imagined"] = {", ".join(run): measured(*run, fake=True) for run in runs}
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def first_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {"real": {}, "imagined": {}}
    for model in MODELS:
        part = run_ranks(__file__, tmp_path_factory.mktemp(model, numbered=False), RANKS)[0]
        for kind in found:
            found[kind] |= part[kind]
    return found


@pytest.mark.parametrize("name", IDS)
def test_the_estimate_is_within_a_tenth_of_real_storages(
    first_rank: dict[str, Any], name: str
) -> None:
    imagined, real = first_rank["imagined"][name], first_rank["real"][name]
    assert imagined["recorded"] == pytest.approx(real["recorded"], rel=0.10)
    assert imagined["static"] == pytest.approx(real["static"], rel=1e-2)
    # The allocator also counts copies that gloo makes of what it reduces: of the reduction that runs, and of those
    # before it that its two threads have not let go of yet. On a busy machine that takes them a while.
    assert real["allocator"] > 0.9 * imagined["recorded"]
    assert real["allocator"] < 1.1 * imagined["recorded"] + 3 * imagined["largest"]


@pytest.mark.parametrize("model", MODELS)
def test_nothing_of_the_whole_weights_lives_between_steps(
    first_rank: dict[str, Any], model: str
) -> None:
    """In FP8 a rank once held the whole weights of its FP8 layers, to see which of them got a gradient."""
    in_fp8 = first_rank["real"][f"{model}, fp8_hybrid, window"]["static"]
    assert in_fp8 < 1.1 * first_rank["real"][f"{model}, fp32, window"]["static"]


@pytest.mark.parametrize("name", IDS)
def test_the_collectives_are_those_of_real_ranks(first_rank: dict[str, Any], name: str) -> None:
    imagined, real = first_rank["imagined"][name], first_rank["real"][name]
    assert imagined["collectives"] == real["collectives"]


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
