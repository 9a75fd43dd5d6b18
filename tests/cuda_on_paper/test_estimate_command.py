"""`harness estimate`, as a user calls it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import paper, runs, warm
from tests.support.matrix import rest_nightly
from tests.support.runs import ROOT

QUICK = ("--config", "tiny")
LAUNCHED = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@cache
def run(
    *arguments: str, anew: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """anew: in a new interpreter, as a user's, which loads the card itself."""
    variables = {"PYTHONPATH": str(ROOT), "COLUMNS": "200", **environment}
    if not anew:
        return paper.estimate(*arguments, folder=ROOT, **variables)
    line = [*runs.ANEW, "-m", "harness.cli", "estimate", *arguments]
    return subprocess.run(
        line,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=runs.environment(**variables),
        timeout=warm.PATIENCE,
        check=False,
    )


def answer(*arguments: str) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_llama_on_an_h100() -> None:
    found = answer("--card", "H100", "--config", "llama3_8b_8layers", "--recipe", "fp8_hybrid")
    assert found["calibrated"] is False
    block = 4096 * (6144 + 4096 + 2 * 14336 + 14336) + 2 * 4096
    assert found["parameters"] == 8 * block + 2 * 256 * 4096 + 4096
    # fp32 weights and two moments are 12 bytes for each parameter, and a gradient of 4 lives at some time.
    assert found["peak_gib"] > 12 * found["parameters"] / 2**30
    assert 25 < found["bf16_peak_gib"] < 35
    assert found["ratio_vs_bf16"] == pytest.approx(
        found["step_ms"] / found["bf16_step_ms"], rel=1e-3
    )
    assert found["tokens_per_second"] == pytest.approx(4096 / found["step_ms"] * 1e3, rel=1e-3)
    assert found["fits"] is True
    assert found["waits"] == []
    assert (found["rung"], found["estimated"]) == ("transformer_engine:fp8", "native:fp8")
    assert any(
        "transformer_engine:fp8 is estimated as native:fp8" in note for note in found["notes"]
    )

    # Transformer Engine's blocks are not compiled, and those of bf16 are.
    assert (found["compiled"], found["bf16_compiled"]) == (False, True)
    assert found["eager_step_ms"] == found["step_ms"]
    assert any("--recipe fp8_native" in note for note in found["notes"])


@pytest.mark.slow
def test_a_compiled_llama_is_faster_by_what_its_blocks_fuse() -> None:
    """Of the profile of one H100: 1,258 kernels eager and 1,170 compiled in FP8, 1,136 and 776 in bf16."""
    asked = ("--card", "H100", "--config", "llama3_8b_8layers", "--recipe", "fp8_native")
    found, eager = answer(*asked), answer(*asked, "engine.compile=none")
    assert (found["compiled"], found["bf16_compiled"]) == (True, True)
    assert (eager["compiled"], eager["bf16_compiled"]) == (False, False)
    assert found["eager_step_ms"] == eager["step_ms"]
    for key in ("step_ms", "bf16_step_ms"):
        assert found[key] < 0.92 * eager[key]
    assert found["kernels"] < eager["kernels"]
    for same in ("flops", "parameters"):
        assert found[same] == eager[same]
    # Weights, moments and what products read stay. 8 blocks of bf16 took 29.36 GiB eager and 28.13 compiled.
    for key in ("peak_gib", "bf16_peak_gib"):
        assert 0.94 * eager[key] < found[key] < 0.98 * eager[key]
    assert not any("eager" in note for note in (*found["notes"], *eager["notes"]))


def test_text_for_people() -> None:
    done = run("--card", "A100", *QUICK, anew=True)
    assert done.returncode == 0, done.stderr
    assert "A prediction (uncalibrated)" in done.stdout
    assert "autocast:bf16" in done.stdout
    assert re.search(r"step +[\d.]+ ms compiled, ", done.stdout)
    assert re.search(r"[\d.]+ ms in eager mode \(engine.compile=none\)", done.stdout)
    assert "not native:fp8" in done.stdout
    assert "Nothing ran on a GPU" in done.stdout
    assert "the host never waits for the card" in done.stdout


# Python reads `sitecustomize` before anything else: no import and no metadata finds these modules from then on.
HIDE = """
import importlib.metadata, sys
HIDDEN = {names}
sys.modules.update(dict.fromkeys(HIDDEN))
known = importlib.metadata.version
def version(name):
    if name.replace("-", "_") in HIDDEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)
importlib.metadata.version = version
"""


@pytest.mark.parametrize("recipe", rest_nightly(["fp8_hybrid", "fp8_dynamic"], "fp8_hybrid"))
def test_a_cards_own_software_is_assumed_there_whatever_is_installed_here(
    recipe: str, tmp_path: Path
) -> None:
    """Triton comes with torch's CUDA builds, not with the CPU's: without it FP8 was 1.11 of bf16 in place of 0.77."""
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(names={"triton", "transformer_engine"}))
    asked = ("--card", "H100", *QUICK, "--recipe", recipe)
    bare = run(*asked, "--json", anew=True, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert bare.returncode == 0, bare.stderr
    assert "run in PyTorch, slower" not in bare.stderr
    found = json.loads(bare.stdout)
    assert found == answer(*asked)
    assert any("triton" in note and "assumed" in note for note in found["notes"])


def test_in_bf16_nothing_is_assumed() -> None:
    assert not any("assumed" in note for note in answer("--card", "A100", *QUICK)["notes"])


def test_a_t4_trains_in_fp16_and_has_no_bf16_to_compare_with() -> None:
    found = answer("--card", "t4", *QUICK, "--recipe", "auto")
    assert found["rung"] == "autocast:fp16"
    assert found["bf16_peak_gib"] is None
    assert found["ratio_vs_bf16"] is None


def test_overrides_and_ranks() -> None:
    """Four micro-batches on one process are two on each of two: half the work, the same memory."""
    one = answer("--card", "A100", *QUICK, "train.global_batch=16", "train.micro_batch=4")
    two = answer(
        "--card", "A100", *QUICK, "train.global_batch=16", "train.micro_batch=4", "--ranks", "2"
    )
    assert two["peak_gib"] == one["peak_gib"]
    assert two["kernels"] < one["kernels"]
    assert any("time of communication" in note and "left out" in note for note in two["notes"])
    assert one["collectives"] == []
    reduced = sum(each["bytes"] for each in two["collectives"])
    assert {each["what"] for each in two["collectives"]} == {"all-reduce"}
    assert reduced == 4 * two["parameters"]


@pytest.mark.nightly
def test_snapshots_that_training_does_not_wait_for_take_a_copy_of_the_state() -> None:
    asked = ("--card", "H100", *QUICK, "model.args={vocab: 8192, dim: 256, layers: 2}")
    waits = answer(*asked)
    text = run(*asked, "guard.snapshot_copy=overlapped").stdout
    assert waits["snapshots_gib"] == 0
    # Weights and two moments in fp32, and FP8's scales.
    (size,) = re.findall(r"at the peak \+ ([\d.]+) MiB for snapshots", text)
    assert float(size) == pytest.approx(12 * waits["parameters"] / 2**20, rel=0.02)


def test_a_sharded_run_on_eight_ranks() -> None:
    """Two blocks and the rest: gathered in forward and backward of each micro-batch, reduced once a window."""
    large = ("model.args={vocab: 8192, dim: 256, layers: 2}", "train.global_batch=16")
    asked = ("--card", "H100", *QUICK, *large, "train.micro_batch=1", "--ranks", "8")
    ddp, fsdp = answer(*asked), answer(*asked, "engine.name=fsdp")
    assert fsdp["parameters"] == ddp["parameters"]
    assert fsdp["peak_gib"] < ddp["peak_gib"]
    assert fsdp["at_peak_gib"]["optimizer state"] == pytest.approx(
        ddp["at_peak_gib"]["optimizer state"] / 8, abs=2e-3
    )
    found = {(each["what"], each["phase"]): each for each in fsdp["collectives"]}
    whole = 4 * fsdp["parameters"]
    # The root stays gathered between forward and backward.
    counts = {"forward": 2 * 3, "backward": 2 * 2}
    for phase, count in counts.items():
        assert found["all-gather", phase]["count"] == count
    assert found["all-gather", "forward"]["bytes"] == pytest.approx(2 * whole, rel=1e-3)
    assert found["reduce-scatter", "backward"]["count"] == 3
    assert found["reduce-scatter", "backward"]["bytes"] == pytest.approx(whole, rel=1e-3)


def test_under_fsdp_and_autocast_recomputing_is_advised() -> None:
    """As in the plan of the run."""
    asked = ("--card", "A100", *QUICK, "--ranks", "2", "engine.name=fsdp")
    found = answer(*asked)
    notes = [note for note in found["notes"] if "model.args.recompute=block frees them" in note]
    assert len(notes) == 1
    less = answer(*asked, "model.args.recompute=block")
    assert not any("recompute" in note for note in less["notes"])


def test_what_an_engine_refuses_is_refused_here() -> None:
    done = run("--card", "H100", *QUICK, "engine.name=fsdp", "train.optimizer=muon")
    assert done.returncode == 2
    assert "the engine fsdp does not take it" in done.stderr


def test_recomputed_blocks_and_a_loss_in_chunks_need_less() -> None:
    """Forward again in backward takes the same attention kernel, or PyTorch would refuse what it saved."""
    large = ("--card", "H100", *QUICK, "train.micro_batch=4", "data.context=512")
    plain = answer(*large, "model.args={vocab: 8192}")
    less = answer(*large, "model.args={vocab: 8192, recompute: block, loss_chunk: 64}")
    assert less["peak_gib"] < plain["peak_gib"] / 2
    assert less["kernels"] > plain["kernels"]


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    wrong = tmp_path / "proof.json"
    wrong.write_text("{}")
    done = run(
        "--card", "H1000", "--config", "quickstart", "--recipe", "fp8_hybrd", "train.stepz=3"
    )
    assert done.returncode == 2
    assert "no datasheet of such a card" in done.stderr
    assert "A100-80GB" in done.stderr
    assert 'no recipe "fp8_hybrd"' in done.stderr
    assert "stepz" in done.stderr
    done = run("--card", "H100", "--calibration", str(wrong), "train.stepz=3")
    assert done.returncode == 2
    assert 'has no section "roofline"' in done.stderr
    assert "stepz" in done.stderr


def test_a_batch_that_does_not_divide_is_refused_as_in_training() -> None:
    done = run("--card", "H100", *QUICK, "--ranks", "3")
    assert done.returncode == 2
    assert "the batch does not divide over the ranks" in done.stderr


def test_a_launcher_is_refused_by_name() -> None:
    """It would estimate once for each rank, and join a group that has nothing to say."""
    done = run("--card", "H100", *QUICK, **LAUNCHED)
    assert done.returncode == 2
    assert "--ranks" in done.stderr


@pytest.mark.parametrize("optimizer", ["adamw_fp8", "torch.optim:RMSprop"])
def test_an_optimizer_that_fake_tensors_cannot_take_is_refused(optimizer: str) -> None:
    done = run("--card", "H100", *QUICK, f"train.optimizer={optimizer}")
    assert done.returncode == 2
    assert f"train.optimizer '{optimizer}': its update is not estimated" in done.stderr


@pytest.mark.parametrize(
    ("asked", "engine"),
    [
        ("engine.deepspeed=configs/deepspeed/nowhere.json", "DeepSpeed"),
        ("engine.name=deepspeed", "DeepSpeed"),
    ],
)
def test_engines_that_share_the_state_are_refused_by_name(asked: str, engine: str) -> None:
    done = run("--card", "H100", *QUICK, asked)
    assert done.returncode == 2
    assert f"the engine {engine} is not estimated" in done.stderr


@pytest.mark.nightly
def test_a_compiler_that_links_its_library_in_does_no_harm(tmp_path: Path) -> None:
    # What an H100's machine had: torch took that library's symbols for its own, and crashed.
    compiler = tmp_path / "static"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -static-libstdc++ -static-libgcc\n')
    compiler.chmod(0o755)
    fresh = {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path)}
    done = run("--card", "H100", *QUICK, anew=True, **fresh)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("paper_device-*.so"))


def test_without_a_compiler_it_says_so(tmp_path: Path) -> None:
    """An empty cache and an empty PATH: no compiler can be found to build the fake device."""
    fresh = {"PATH": "", "CXX": "", "XDG_CACHE_HOME": str(tmp_path)}
    done = run("--card", "H100", *QUICK, anew=True, **fresh)
    assert done.returncode == 4
    assert "there is no C++ compiler" in done.stderr
    assert "Traceback" not in done.stderr


def planted(fault: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    target = ("model.target=planted_models:build", f"model.args={{fault: {fault}}}")
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return run("--card", "A100", *QUICK, *target, *arguments, PYTHONPATH=path)


@pytest.mark.parametrize("fault", ["mask", "recurrent"])
def test_a_model_that_cannot_run_on_fake_tensors_is_named(fault: str) -> None:
    done = planted(fault)
    assert done.returncode == 2, done.stderr
    assert "cannot run on fake tensors" in done.stderr
    assert "planted_models" in done.stderr


def test_a_change_that_the_model_cannot_take_does_not_lose_the_prediction() -> None:
    """Batch normalisation raises ValueError of one sample, which is the first change that is tried."""
    large = ("data.context=65536", "train.global_batch=1024", "train.micro_batch=512")
    done = planted("one_sample", *large, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] is False
    assert found["would_fit"] == []
    assert done.stderr.count("would it fit") > 1, "other changes were tried, too"
    text = "--ranks 1 train.micro_batch=1 is left out: it raised ValueError: expected more than 1"
    assert text in done.stderr


def test_what_a_model_prints_is_not_in_the_answer() -> None:
    done = planted("prints", "--json")
    assert json.loads(done.stdout)["card"].startswith("NVIDIA A100")
    assert "loss is near" in done.stderr


def test_what_a_model_made_on_the_cpu_comes_to_the_card() -> None:
    found = json.loads(planted("elsewhere", "--json").stdout)
    assert found["parameters"] == 2 * 64 * 256 + 256 + 64 * 64 + 2 * 64, "a tie stays one"
    assert found["waits"] == []


def test_a_model_may_convert_its_parameters() -> None:
    done = planted("converted", "--json")
    assert done.returncode == 0, done.stderr
    # A head tied to the embedding, and two layers that share a weight.
    assert json.loads(done.stdout)["parameters"] == 64 * 256 + 256 + 64 * 64 + 2 * 64


def test_a_calibrated_prediction_follows_the_measurements(tmp_path: Path) -> None:
    """A card that is half as fast in everything that was measured makes a step that takes twice as long."""
    base = answer("--card", "A100", *QUICK, "data.context=2048", "train.micro_batch=4")
    measured = {
        "card": "NVIDIA A100-SXM4-80GB",
        "capability": [8, 0],
        "gemm_bf16": 117e12,
        "gemm_fp8": None,
    }
    measured |= {
        "attention": 78e12,
        "bandwidth": 2.039e12 * 0.85 / 2,
        "launch_seconds": 1e-9,
        "context_bytes": 1 << 29,
    }
    path = tmp_path / "proof.json"
    path.write_text(json.dumps({"roofline": measured}))
    arguments = (
        "--card",
        "A100",
        *QUICK,
        "data.context=2048",
        "train.micro_batch=4",
        "--calibration",
        str(path),
    )
    found = answer(*arguments)
    assert found["context_gib"] == 0.5
    assert found["step_ms"] > base["step_ms"]
    assert found["calibrated"]
    assert not any("gemm_fp8" in note for note in found["notes"]), (
        "a card without FP8 units has no such rate"
    )
