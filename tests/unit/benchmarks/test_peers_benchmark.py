"""The benchmark of other libraries' loops: all train the same thing, and one that does not gets no figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.peers import __main__ as command
from benchmarks.peers import loops
from benchmarks.peers.agreement import disagreement
from benchmarks.peers.loops import LOOPS, PLAIN, SHIPPED, Job, Step, code_lines
from benchmarks.peers.report import HEAD, cells, figures, losses
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.turn import take_turn
from harness.core.files import read_json
from harness.core.protocols import Batch

ROOT = Path(__file__).resolve().parents[3]
TINY = SHAPES["tiny"]
BARE = "harness.Precision"


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes minutes here, and changes the losses in their last bits alone."""
    monkeypatch.setattr(nn.Module, "compile", lambda self: None)


def turn(folder: Path, setup: str | Callable[[Job], Step], steps: int = 2, **args: Any) -> Any:
    """A turn of the tiny shape. setup: a loop's name, or what replaces the setup of plain PyTorch."""
    folder.mkdir()
    loop = LOOPS[setup] if isinstance(setup, str) else replace(LOOPS[PLAIN], setup=setup)
    return take_turn(loop, replace(TINY, args={**TINY.args, **args}), steps, 1, folder)


def on_other_samples(job: Job) -> Step:
    """Plain PyTorch that trains on the targets of the sample beside."""
    step = loops.plain(job)
    return lambda batch: step({**batch, "targets": batch["targets"].roll(1, 0)})


def without_updates(job: Job) -> Step:
    def step(batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return job.loss(job.model, batch)

    return step


def with_a_head_of_its_own(job: Job) -> Step:
    """What a library does that replaces each Linear by itself."""
    head: Any = job.model.get_submodule("lm_head")
    head.weight = nn.Parameter(head.weight.detach().clone())
    return loops.plain(job)


def test_loops_train_the_same_tokens_and_losses(tmp_path: Path) -> None:
    plain, bare, shipped = (
        turn(tmp_path / name.replace(" ", "-"), name) for name in (PLAIN, BARE, SHIPPED)
    )
    assert plain["tokens"] == bare["tokens"] == shipped["tokens"] == 256
    assert plain["samples"] == bare["samples"] == shipped["samples"]
    assert bare["losses"] == shipped["losses"]
    assert bare["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert not disagreement("fp8", bare, plain)
    found = figures({PLAIN: [plain, plain], BARE: [bare, bare], SHIPPED: [shipped, shipped]})
    assert found[PLAIN]["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert found[BARE]["loss"] == bare["losses"][-1]
    assert found[BARE]["tokens_per_second"] == pytest.approx(256 / bare["seconds"])
    assert found[SHIPPED]["model_tflops"] == pytest.approx(
        plain["flops"] / shipped["seconds"] / 1e12
    )
    assert len(cells(BARE, found[BARE])) == len(HEAD)


@pytest.mark.slow
def test_a_loop_that_trains_on_other_samples_is_refused(tmp_path: Path) -> None:
    plain = turn(tmp_path / "plain", PLAIN)
    other = turn(tmp_path / "other", on_other_samples)
    assert other["samples"] == plain["samples"], "it was given the same"
    assert "it trains something else: loss" in disagreement("bf16", other, plain)
    rows = figures({PLAIN: [plain], "accelerate": [other]})
    assert "loss" not in rows["accelerate"]
    assert "bf16 explains 0.1%" in rows["accelerate"]["error"]
    assert rows["accelerate"]["error"] in cells("accelerate", rows["accelerate"])


@pytest.mark.slow
def test_a_loop_that_does_not_train_is_refused(tmp_path: Path) -> None:
    plain = turn(tmp_path / "plain", PLAIN, steps=12)
    still = turn(tmp_path / "still", without_updates, steps=12)
    assert "it trains something else" in disagreement("fp8", still, plain)


def test_a_loop_that_unties_the_head_is_refused(tmp_path: Path) -> None:
    plain = turn(tmp_path / "plain", PLAIN, steps=1, tied=True)
    untied = turn(tmp_path / "untied", with_a_head_of_its_own, steps=1, tied=True)
    assert untied["losses"] == plain["losses"]
    more = plain["parameters"] + 256 * 64
    told = f"it trains other parameters than {PLAIN}: {more}, not {plain['parameters']}"
    assert disagreement("bf16", untied, plain) == told


@pytest.mark.parametrize("key", ["tokens", "samples"])
def test_other_tokens_and_other_hashes_are_refused(key: str) -> None:
    same = {"tokens": 1, "samples": "a", "parameters": 2, "losses": [1.0]}
    assert not disagreement("bf16", same, same)
    assert f"it trains other {key}" in disagreement("bf16", {**same, key: 7}, same)
    assert "it trains something else" in disagreement(
        "fp8", {**same, "losses": [float("nan")]}, same
    )


def test_a_loop_without_its_reference_has_no_figures() -> None:
    assert figures({PLAIN: ["killed"], BARE: [{}]})[BARE] == {"error": f"{PLAIN}: killed"}


@pytest.mark.nightly
def test_a_turn_that_fails_says_why() -> None:
    if not LOOPS["Transformer Engine"].lacks():
        pytest.skip("Transformer Engine is installed")
    told = command.turn_of("Transformer Engine", "tiny", 1, 1)
    assert told == "exit code 1: ModuleNotFoundError: No module named 'transformer_engine'"


def test_the_command_takes_turns_and_fails_with_a_loop_that_trains_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def turn_of(loop: str, shape: str, steps: int, timed: int) -> dict[str, Any]:
        asked.append(loop)
        good = {"tokens": 8, "samples": "a", "parameters": 1, "seconds": 1.0, "flops": 2e12}
        losses = [1.0 if loop != "torchao float8" else 2.0] * steps
        return {**good, "losses": losses, "peak_bytes": 2**30, "lines": 3}

    monkeypatch.setattr(command, "turn_of", turn_of)
    out = tmp_path / "peers.json"
    chosen = ["--loops", BARE, "torchao float8", "Transformer Engine", "--shapes", "tiny"]
    assert command.main([*chosen, "--steps", "2", "--rounds", "3", "--json", str(out)]) == 1
    assert asked[:3] == [PLAIN, BARE, "torchao float8"]
    assert asked[3:6] == [BARE, "torchao float8", PLAIN]
    record = json.loads(out.read_text())
    rows = record["results"]["shapes"]["tiny"]
    assert rows[BARE]["model_tflops"] == 2.0
    assert list(rows["torchao float8"]) == ["error"]
    assert list(rows["Transformer Engine"]) == ["absent"]
    printed = capsys.readouterr().out
    assert "6 N + 12 L H Q T" in printed
    assert f"| {BARE} | fp8 | 8 | 1.00 (1.00 to 1.00) | 1.00 | 2 |" in printed
    assert command.main([*chosen[:2], *chosen[4:]]) == 0


def test_the_list_names_every_loop_with_its_guide_and_every_shape(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["--list"]) == 0
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / "studies" / "peers.md").read_text()
    for loop in LOOPS.values():
        assert f"  {loop.name} ({loop.precision}): {loop.what}\n    {loop.guide}\n" in printed
        assert re.sub("^docs/", "../", loop.guide) in page
        assert f"| {loop.name} |" in page
    for name in SHAPES:
        assert f"  {name}: " in printed
        assert f"`{name}`" in page


def test_lines_of_user_code_are_those_with_code() -> None:
    def setup(job: Job) -> Step:
        """Not counted,

        nor this.
        """
        # nor this
        step = loops.plain(job)

        return lambda batch: step(
            batch,
        )

    assert code_lines(setup) == 4


def test_the_page_has_the_figures_of_the_record() -> None:
    page = (ROOT / "docs" / "studies" / "peers.md").read_text()
    record = read_json(ROOT / "benchmarks" / "results" / "peers_cpu.json")
    results = record["results"]
    assert record["command"] in page
    assert record["machine"] in page
    assert results["card"] == "no GPU"
    for package, version in results["versions"].items():
        assert f"{package} {version}" in page
    assert losses(results["shapes"]) in page
    assert not any("error" in row for rows in results["shapes"].values() for row in rows.values())
