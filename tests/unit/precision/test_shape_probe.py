"""Layers that FP8 slows down stay in bf16: the choice on given times, the timing itself (on a CPU), the cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.capability.probe import Device, LibraryFacts, MachineFacts
from harness.core.errors import ConfigError
from harness.precision.plan import Plan, make_plan, resolve
from harness.precision.recipe import Recipe, load_recipe
from harness.precision.shape_probe import (
    cache_file,
    contestants,
    keep_out,
    measure,
    probe_layers,
    slower,
    times_of,
)

pytestmark = pytest.mark.usefixtures("cpu_on_purpose")
CPU = torch.device("cpu")
H100 = MachineFacts(
    torch_version="2.13.0", cuda_available=True, devices=(Device("NVIDIA H100", (9, 0), 80 << 30),)
)
TOKENS = 128


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hopper-harness"


def recipe(**layers: object) -> Recipe:
    base = load_recipe("fp8_hybrid").model_dump()
    layers = {"min_features": 16, "probe": True, "probe_tokens": TOKENS, **layers}
    return Recipe.model_validate({**base, "layers": layers})


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 32),
        nn.Linear(32, 64),
        nn.Linear(64, 32),
        nn.Linear(32, 32),
        nn.Linear(32, 10),
    )


def plan_on(facts: MachineFacts, policy: Recipe) -> Plan:
    rung, verdicts = resolve(policy, facts)
    assert rung is not None
    return make_plan(policy, facts, rung, verdicts, model())


def remember(policy: Recipe, facts: MachineFacts, times: Mapping[str, tuple[float, float]]) -> Path:
    path = cache_file(policy, policy.ladder[1], facts, CPU)
    path.write_text(json.dumps(times))
    return path


def reasons(plan: Plan) -> dict[str, str]:
    return {row.module: row.reason for row in plan.layers}


def test_only_sizes_that_gain_are_in_fp8() -> None:
    ratios = {(32, 32): 1.234, (64, 32): 0.99, (16, 16): 1.0, (48, 48): 0.0}
    told = slower(ratios, "NVIDIA H100", 2048)
    assert told == {
        (32, 32): "slower in FP8 on NVIDIA H100: 1.23x of bf16 (2048 tokens)",
        (16, 16): "slower in FP8 on NVIDIA H100: 1.00x of bf16 (2048 tokens)",
    }


def test_the_plan_names_what_was_moved_and_leaves_the_rest() -> None:
    policy = recipe()
    before = plan_on(H100, policy)
    after = keep_out(before, policy, {(32, 32): "because"}, "a note")
    assert before.fp8_layers() == ("0", "1", "2", "3")
    assert after.fp8_layers() == ("1", "2")
    assert (after.layers[0].precision, after.layers[0].backend, after.layers[0].reason) == (
        "bf16",
        "autocast",
        "because",
    )
    assert after.layers[1:3] == before.layers[1:3]
    assert after.layers[4] == before.layers[4]
    assert after.notes == (*before.notes, "a note")
    with pytest.raises(ConfigError, match="FP8 makes no layer of this model faster") as caught:
        keep_out(before, policy, {(32, 32): "a", (64, 32): "b", (32, 64): "c"}, "")
    assert "the recipe bf16" in str(caught.value)


def test_times_in_the_cache_decide() -> None:
    policy = recipe()
    names = {
        "32x32, 128 tokens": (2e-5, 3e-5),
        "64x32, 128 tokens": (4e-5, 3e-5),
        "32x64, 128 tokens": (4e-5, 4.1e-5),
    }
    path = remember(policy, H100, names)
    plan = probe_layers(plan_on(H100, policy), policy, H100, CPU)
    assert plan.fp8_layers() == ("1",)
    assert reasons(plan)["0"] == "slower in FP8 on NVIDIA H100: 1.50x of bf16 (128 tokens)"
    assert reasons(plan)["2"] == "slower in FP8 on NVIDIA H100: 1.02x of bf16 (128 tokens)"
    assert plan.notes[-1] == f"layers.probe on NVIDIA H100: 0 sizes timed, 3 from {path}"


def test_tokens_come_from_recipe_then_caller_then_a_default() -> None:
    slow, fast = (1.0, 2.0), (2.0, 1.0)
    for key, caller, counted in ((None, None, 2048), (None, 300, 384), (500, 300, 512)):
        policy = recipe(probe_tokens=key)
        names = {f"{size}, {counted} tokens": fast for size in ("64x32", "32x64")}
        remember(policy, H100, {**names, f"32x32, {counted} tokens": slow})
        plan = probe_layers(plan_on(H100, policy), policy, H100, CPU, caller)
        assert f"2.00x of bf16 ({counted} tokens)" in reasons(plan)["0"]


def test_without_the_key_or_a_gpu_nothing_is_timed(cache: Path) -> None:
    off = recipe(probe=False)
    plan = plan_on(H100, off)
    assert probe_layers(plan, off, H100, CPU) is plan
    on = recipe()
    plan = probe_layers(plan_on(MachineFacts(), on), on, MachineFacts(), CPU)
    assert plan.fp8_layers() == ("0", "1", "2", "3")
    assert "layers.probe does nothing here: it times GPU kernels" in plan.notes[-1]
    a100 = replace(H100, devices=(Device("A100", (8, 0), 80 << 30),))
    assert (
        "does nothing here: this rung has no FP8"
        in probe_layers(plan_on(a100, on), on, a100, CPU).notes[-1]
    )
    assert not cache.exists()


def test_a_resumed_run_keeps_the_choice_of_its_beginning() -> None:
    """FP8 state belongs to layers: another card's times, or noise, must not change which they are."""
    policy = recipe()
    fast = {f"{size}, 128 tokens": (2.0, 1.0) for size in ("32x32", "64x32", "32x64")}
    remember(policy, H100, {**fast, "32x32, 128 tokens": (1.0, 2.0)})
    began = probe_layers(plan_on(H100, policy), policy, H100, CPU)
    remember(policy, H100, fast)
    earlier = json.loads(json.dumps(began.as_dict()))
    resumed = probe_layers(plan_on(H100, policy), policy, H100, CPU, earlier=earlier)
    assert resumed.layers == began.layers
    assert "as chosen when this run began" in resumed.notes[-1]
    other_rung = {**earlier, "resolved": "transformer_engine:fp8"}
    assert probe_layers(
        plan_on(H100, policy), policy, H100, CPU, earlier=other_rung
    ).fp8_layers() == (
        "0",
        "1",
        "2",
        "3",
    )


def test_the_cache_is_of_one_card_torch_backend_and_policy() -> None:
    policy = recipe()
    native, te = policy.ladder[1], policy.ladder[0]
    te_2_20 = replace(H100, libraries={"transformer_engine": LibraryFacts("2.20.2", True, "")})
    te_2_21 = replace(H100, libraries={"transformer_engine": LibraryFacts("2.21.0", True, "")})
    e4m3 = policy.model_copy(update={"fp8": policy.fp8.model_copy(update={"format": "e4m3"})})
    files = [
        cache_file(policy, native, H100, CPU),
        cache_file(policy, native, replace(H100, devices=(Device("NVIDIA H200", (9, 0), 1),)), CPU),
        cache_file(policy, native, replace(H100, torch_version="2.14.0"), CPU),
        cache_file(policy, te, te_2_20, CPU),
        cache_file(policy, te, te_2_21, CPU),
        cache_file(e4m3, native, H100, CPU),
    ]
    assert len(set(files)) == len(files)
    assert cache_file(recipe(min_features=32), native, te_2_20, CPU) == files[0]


def test_the_fp8_bench_really_runs_fp8_and_the_other_does_not() -> None:
    policy = recipe(exclude=["*"], min_features=999, keep_fp32=["no.such"])
    bf16, fp8 = contestants((32, 64), TOKENS, policy, policy.ladder[1], CPU)
    for bench in (fp8, bf16):
        start, stop = bench.window()
        assert stop > start
        assert all(parameter.grad is not None for parameter in bench.model.parameters())
    assert fp8.backend.layers == ("0", "1", "2", "3")
    assert (fp8.backend.state_dict()[0]["history"].amax(0) > 0).all(), (
        "input, weight and gradient of each were cast"
    )
    assert bf16.backend.layers == ()
    assert bf16.backend.note == "torch.autocast"
    assert fp8.seconds([(0.0, 8.0), (1.0, 5.0), (2.0, 99.0)]) == 2.0, (
        "median of 8, 4 and 97 over four layers"
    )


@pytest.mark.nightly
def test_measured_times_are_of_one_layer_and_grow_with_its_size() -> None:
    policy = recipe()
    small = measure((64, 64), TOKENS, policy, policy.ladder[1], CPU)
    large = measure((1024, 1024), TOKENS, policy, policy.ladder[1], CPU)
    assert 0 < small.bf16 < large.bf16
    assert 0 < small.fp8 < large.fp8


@pytest.mark.slow
def test_sizes_are_timed_in_another_process_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU as if it were the card: with a damaged cache, with a good one, and without a Python to start."""
    policy = recipe()
    native = policy.ladder[1]
    path = cache_file(policy, native, H100, CPU)
    path.write_text('{"32x32, 128 tokens": [1.0')
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    times, note = times_of([(32, 32), (64, 32)], TOKENS, policy, native, H100, CPU)
    assert torch.equal(torch.rand(1), expected), "the run's random numbers are its own"
    assert set(times) == {(32, 32), (64, 32)}
    assert "2 sizes timed, 0 from" in note
    assert f"ignored the damaged {path}" in note
    assert set(json.loads(path.read_text())) == {"32x32, 128 tokens", "64x32, 128 tokens"}
    assert [name for name in os.listdir(cache) if not name.startswith("native_kernel")] == [
        path.name
    ]
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    again, note = times_of([(32, 32)], TOKENS, policy, native, H100, CPU)
    assert again == {(32, 32): times[32, 32]}
    assert "0 sizes timed, 1 from" in note
    some, note = times_of([(32, 32), (96, 96)], TOKENS, policy, native, H100, CPU)
    assert set(some) == {(32, 32)}
    assert "1 sizes could not be timed and stay in FP8: " in note
    assert "/no/such/python" in note


def test_timing_ends_before_the_ranks_that_wait_for_it_give_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float] = []

    def run(command: list[str], timeout: float, **_: object) -> None:
        limits.append(timeout)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    policy = recipe()
    for collective_timeout in (60.0, 600.0):
        plan = probe_layers(
            plan_on(H100, policy), policy, H100, CPU, collective_timeout=collective_timeout
        )
    assert limits == [48.0, 300.0]
    assert plan.fp8_layers() == ("0", "1", "2", "3")
    assert "3 sizes could not be timed and stay in FP8" in plan.notes[-1]


@pytest.mark.parametrize(
    "text", ["[]", '{"32x32": [1.0]}', '{"32x32": ["a", 1.0]}', '{"32x32": [1.0, 0.0]}', "\xff"]
)
def test_a_damaged_cache_is_ignored_and_said(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = recipe()
    path = cache_file(policy, policy.ladder[1], H100, CPU)
    path.write_bytes(text.encode("latin-1"))
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    times, note = times_of([(32, 32)], TOKENS, policy, policy.ladder[1], H100, CPU)
    assert times == {}
    assert f"ignored the damaged {path}" in note


@pytest.mark.nightly
def test_a_bench_that_fails_says_why_in_the_plan() -> None:
    policy = recipe()
    te = policy.model_copy(update={"ladder": policy.ladder[:1]})
    facts = replace(
        H100,
        libraries={
            "transformer_engine": LibraryFacts("2.20.2", True, "it is not, but the plan thinks so")
        },
    )
    plan = probe_layers(plan_on(facts, te), te, facts, CPU)
    assert plan.fp8_layers() == ("0", "1", "2", "3")
    assert re.search(r"; 3 sizes could not be timed and stay in FP8: \S+Error: \S", plan.notes[-1])
