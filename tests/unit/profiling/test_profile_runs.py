"""Profiled steps of real loops: the user's own and ours; which steps, which files, and no bit changed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness
from harness.core.config import RunConfig, left_out
from harness.core.errors import ConfigError
from harness.core.schema import validate
from harness.profiling.report import profiles
from harness.report.page import write
from harness.tracking.history import RunHistory
from tests.support.runs import train

WIDTH = 32


class Loop:
    """A loop of somebody else's, with or without a guard."""

    def __init__(self, folder: Path, guarded: bool = True, **settings: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.precision = harness.Precision.from_recipe("bf16")
        self.model = self.precision.prepare(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.telemetry = harness.Telemetry.for_precision(
            folder, self.precision, mlflow=False, report=False, **settings
        )
        self.guard: harness.Guard | None = None
        if guarded:
            self.guard = harness.Guard.for_precision(
                self.precision, self.optimizer, telemetry=self.telemetry
            )
        self.step = 0

    def steps(self, count: int, record: bool = True) -> None:
        for _ in range(count):
            x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(self.step))
            with self.precision.context():
                loss = nn.functional.mse_loss(self.model(x).float(), x.roll(1, 1))
            self.precision.backward(loss)
            self.precision.step(self.optimizer, max_grad_norm=1.0)
            self.optimizer.zero_grad()
            self.step += 1
            if self.guard is not None:
                self.guard.end_step()
            elif record:
                facts = self.precision.facts()
                assert facts is not None
                self.telemetry.record(facts)

    def weights(self) -> list[Tensor]:
        return [each.detach().clone() for each in self.model.parameters()]


def marks(run: Path) -> list[int]:
    """The steps that the traces of a run hold."""
    found: list[int] = []
    for path in sorted((run / "profile").glob("*.json.gz")):
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
            name = str(event.get("name"))
            if name.startswith("harness step ") and event.get("cat") == "user_annotation":
                found.append(int(name.removeprefix("harness step ")))
    return found


def codes(run: Path) -> list[str]:
    events = RunHistory.read(run).events
    return [event["code"] for event in events if event["code"].startswith("profile")]


@pytest.mark.parametrize("guarded", [True, False])
def test_a_loop_of_ones_own_is_profiled(tmp_path: Path, guarded: bool) -> None:
    run = tmp_path / "run"
    loop = Loop(run, guarded, profile_steps=(3, 4))
    plain = Loop(tmp_path / "plain", guarded)
    for each in (loop, plain):
        with each.telemetry:
            each.steps(6)
    for ours, theirs in zip(loop.weights(), plain.weights(), strict=True):
        assert torch.equal(ours, theirs)
    assert marks(run) == [3, 4]
    assert codes(run) == ["profile.written"]

    ((path, made),) = profiles(run)
    assert path.name == "steps-000003-000004.table.json"
    seconds = {kind: spent for kind, spent, _, _ in made.rows}
    calls = {kind: count for kind, _, count, _ in made.rows}
    assert sum(seconds.values()) == pytest.approx(made.seconds, rel=1e-9)
    # Two Linears: two GEMMs forward, two for the weights and one for the input backward.
    assert calls["GEMMs bf16"] == 2 * 5
    assert min(seconds[kind] for kind in ("norms", "casts", "optimizer")) > 0
    files = sorted(file.name for file in (run / "profile").iterdir())
    assert files == [f"steps-000003-000004.{end}" for end in ("json.gz", "md", "table.json")]
    write(run)
    assert "Profile of steps 3 to 4, rank 0, on a CPU" in (run / "report.html").read_text()


def test_a_profile_ends_with_the_loop(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run", profile_steps=(1, 9))
    with loop.telemetry:
        loop.steps(2)
    assert [made.steps for _, made in profiles(tmp_path / "run")] == [(1, 2)], "no third step"
    later = Loop(tmp_path / "later", profile_steps=(3, 9))
    with later.telemetry:
        later.steps(2)
    assert codes(tmp_path / "later") == []


def test_steps_that_were_not_recorded_are_no_profile(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run", guarded=False, profile_steps=(2, 9))
    with loop.telemetry:
        loop.steps(1)
        loop.steps(3, record=False)
        loop.steps(1)
    assert codes(tmp_path / "run") == ["profile.failed"]
    assert profiles(tmp_path / "run") == []


def test_a_profile_needs_a_folder() -> None:
    torch.manual_seed(0)
    precision = harness.Precision.from_recipe("bf16")
    precision.prepare(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ConfigError, match="profile_steps"):
        harness.Telemetry.for_precision(None, precision, profile_steps=(1, 2))


@pytest.mark.parametrize("steps", [[5, 4], [0, 3], [1, 21], [1], "5", [1.5, 2]])
def test_steps_that_cannot_be_are_refused(steps: Any) -> None:
    with pytest.raises(ConfigError, match="profile_steps"):
        validate(RunConfig, {"train": {"profile_steps": steps}}, "here")


@pytest.mark.parametrize(
    ("profiled", "expected"),
    [([3, 5], ""), ([4, 9], "no step after 5 profiled"), ([6, 9], "no step profiled")],
)
def test_a_run_that_is_too_short_says_so(profiled: list[int], expected: str) -> None:
    config = validate(RunConfig, {"train": {"steps": 5, "profile_steps": profiled}}, "here")
    found = left_out(config, None)
    assert ("train.profile_steps" in found) == bool(expected)
    assert expected in found


@pytest.mark.nightly
def test_our_loop_is_profiled_and_a_resume_goes_on_inside(tmp_path: Path) -> None:
    """The bits are those of a run without a profile, and a start behind the steps says that they were missed."""
    fixed = ("--recipe", "bf16", "train.schedule=constant", "checkpoint.every=3")
    plain = train(tmp_path, *fixed, "train.steps=6", "--name", "plain")
    assert plain.returncode == 0, plain.stdout
    for steps in (3, 6):
        steps_of = ("train.profile_steps=[2,5]", f"train.steps={steps}", "--name", "r")
        done = train(tmp_path, *fixed, *steps_of)
        assert done.returncode == 0, done.stdout
    run = tmp_path / "runs" / "r"
    assert marks(run) == [2, 3, 4, 5]
    assert [made.steps for _, made in profiles(run)] == [(2, 3), (4, 5)]
    ours, theirs = (RunHistory.read(tmp_path / "runs" / name) for name in ("r", "plain"))
    for name in ("train/loss", "train/grad_norm"):
        assert list(ours.points(name).items()) == list(theirs.points(name).items())
    assert "ms a step" in done.stdout
    assert "profiler_start" not in done.stdout, "a line of the profiler's library"

    # They have been profiled by now. Others that lie behind were missed.
    for steps, missed in (([3, 4], []), ([1, 1], ["profile.missed"])):
        extra = (f"train.profile_steps={steps}", f"train.steps={7 + len(missed)}", "--name", "r")
        assert train(tmp_path, *fixed, *extra).returncode == 0
        assert codes(run)[2:] == missed
