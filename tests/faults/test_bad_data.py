"""Samples that are unfit to train on, on real runs: rows 8 and 9 of the fault matrix."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file
from torch import Tensor

import harness.build
from harness.core.config import RunConfig, load_config
from harness.core.errors import ExitCode
from harness.core.facts import Window
from harness.core.protocols import Batch
from harness.data.batches import TokenBatches
from harness.data.tokens import prepare
from harness.precision.recipe import load_recipe
from harness.tools.start import Request
from harness.tools.train import train
from tests.support.runs import TEXT, events, metrics

pytestmark = pytest.mark.faults(8, 9)

# A GPT that is given its tokens as floats, as a model of images or signals would be.
MODEL = """
from torch import nn
from harness.models.gpt import build
class FloatGPT(nn.Module):
    vocab_size = 256
    def __init__(self):
        super().__init__()
        self.gpt = build(dim=64, layers=1, heads=2, ffn=176, tied=True)
    def forward(self, inputs, targets):
        return self.gpt(inputs.long(), targets)
def floats(): return FloatGPT()
"""
POSITION = 7
Damage = Callable[[Tensor, Tensor], None]


def value_at(which: str, value: float) -> Damage:
    """Put `value` into the first sample of a micro-batch."""

    def damage(inputs: Tensor, targets: Tensor) -> None:
        (inputs if which == "input" else targets)[0, POSITION] = value

    return damage


def ignore_all(inputs: Tensor, targets: Tensor) -> None:
    targets[:] = -100


NAN = value_at("input", math.nan)
LABEL = value_at("label", 256)
FAULTS: Mapping[int, tuple[Damage, str, str]] = {
    2: (NAN, "data.nonfinite", f"input nan at position {POSITION}"),
    4: (value_at("input", -math.inf), "data.nonfinite", f"input -inf at position {POSITION}"),
    5: (LABEL, "data.label", f"label 256 at position {POSITION}, not in [0, 256)"),
    7: (value_at("label", -2), "data.label", f"label -2 at position {POSITION}, not in [0, 256)"),
    9: (ignore_all, "data.empty", "no target has a label"),
}
"""By window: what happens to its second micro-batch, the code, and what the event says."""


def in_floats(batch: Batch) -> Batch:
    return {**batch, "inputs": batch["inputs"].float()}


class Damaged(TokenBatches):
    """Float inputs; some windows are damaged, in their second micro-batch, whoever reads them."""

    damage: Mapping[int, Damage]
    fired: list[int]

    def micro_batches(self, window: Window, rank: int, world_size: int) -> list[Batch]:
        batches = [in_floats(batch) for batch in super().micro_batches(window, rank, world_size)]
        if window.index in self.damage:
            self.fired.append(window.index)
            self.damage[window.index](batches[1]["inputs"], batches[1]["targets"])
        return batches

    def validation(self, rank: int, world_size: int) -> list[Batch]:
        return [in_floats(batch) for batch in super().validation(rank, world_size)]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "float_gpt.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    with contextlib.chdir(tmp_path):
        yield tmp_path
    sys.modules.pop("float_gpt", None)


def run(
    monkeypatch: pytest.MonkeyPatch, damage: Mapping[int, Damage], *arguments: str, resume: str = "never",
    name: str = "r",
) -> tuple[int, list[int]]:  # fmt: skip
    """Train on damaged data in this process: the exit code, and the damaged windows that were read, in order."""
    fired: list[int] = []
    monkeypatch.setattr(
        harness.build,
        "TokenBatches",
        type("Source", (Damaged,), {"damage": damage, "fired": fired}),
    )
    fixed = [
        f"data.path={TEXT}", "tracking.mlflow=false", "model.target=float_gpt:floats", "model.args={}",
        "train.lr=1e-3", "data.context=32",
    ]  # fmt: skip
    config = load_config("tiny", [*fixed, *arguments], "fp8_hybrid")
    code = train(Request(config, load_recipe("fp8_hybrid"), "tiny", name, resume, False, "python"))
    return code, fired


def same(one: Path, other: Path) -> bool:
    """Whether weights, optimizer and FP8 state of two checkpoints are the same, bit for bit."""
    parts = ("model.safetensors", "optimizer.safetensors", "fp8.safetensors")
    pairs = [(load_file(one / name), load_file(other / name)) for name in parts]
    return all(
        a.keys() == b.keys() and all(a[k].tobytes() == b[k].tobytes() for k in a) for a, b in pairs
    )


def second_micro_batch(folder: Path, window: int) -> list[int]:
    """Its samples, from the run's own snapshot of the text."""
    config = RunConfig.model_validate(yaml.safe_load((folder / "config.yaml").read_text()))
    sizes = config.train
    source = TokenBatches(
        prepare(config.data, folder, sizes.global_batch), sizes.seed, config.data.context, sizes.global_batch,
        sizes.micro_batch, config.data.val_samples,
    )  # fmt: skip
    return [int(number) for number in source.window(window).samples[2:4]]


@pytest.mark.slow
def test_bad_batches_are_named_and_skipped_and_leave_no_trace(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage = {window: fault[0] for window, fault in FAULTS.items()}
    steps = ("train.steps=11", "checkpoint.every=1", "checkpoint.keep=12")
    code, fired = run(monkeypatch, damage, "data.bad=skip", *steps)
    assert code == ExitCode.DONE
    assert sorted(fired) == sorted([*FAULTS, *FAULTS]), (
        "every fault fired, and its window was read again"
    )
    folder = work / "runs" / "r"
    applied = dict(metrics(folder, "train/step_applied"))
    assert [step - 1 for step, value in applied.items() if value == 0.0] == list(FAULTS)
    assert all(math.isfinite(loss) for _, loss in metrics(folder))
    assert metrics(folder, "guard/skipped")[-1][1] == len(FAULTS)
    assert events(folder, "nonfinite.skip") == [], "reported once, by its own code"
    for window, (_, code, what) in FAULTS.items():
        (event,) = [event for event in events(folder, code) if event["window"] == window]
        samples = second_micro_batch(folder, window)
        assert event["step"] == window + 1
        assert event["samples"] == (samples if code == "data.empty" else samples[:1])
        assert f"{samples[0]}" in event["text"]
        assert what in event["text"]
        before, bad, after = (
            folder / "checkpoints" / f"step-{window + more:08}" for more in (0, 1, 2)
        )
        assert same(before, bad)
        assert not same(bad, after) or window + 1 in FAULTS


@pytest.mark.slow
def test_a_label_out_of_range_halts_with_its_sample_and_the_way_on_works(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, steps = {5: LABEL}, "train.steps=8"
    assert run(monkeypatch, damage, steps) == (ExitCode.HALTED, [5, 5])
    folder = work / "runs" / "r"
    reason = json.loads((folder / "outcome.json").read_text())["reason"]
    number = second_micro_batch(folder, 5)[0]
    for text in (reason, capsys.readouterr().out):
        assert f"sample {number}: label 256 at position {POSITION}, not in [0, 256)" in " ".join(
            text.split()
        )
    assert "data.bad=skip" in reason
    checkpoint = str(folder / "checkpoints" / "step-00000005")
    assert (
        run(monkeypatch, damage, steps, "data.bad=skip", resume=checkpoint, name="new")[0]
        == ExitCode.DONE
    )
    assert dict(metrics(work / "runs" / "new", "train/step_applied")) == {6: 0.0, 7: 1.0, 8: 1.0}


@pytest.mark.slow
def test_bad_data_without_end_halts_within_budget(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage = dict.fromkeys(range(2, 100), NAN)
    assert run(monkeypatch, damage, "train.steps=100", "guard.max_skips=3")[0] == ExitCode.HALTED
    folder = work / "runs" / "r"
    assert "guard.max_skips (3)" in json.loads((folder / "outcome.json").read_text())["reason"]
    assert [event["step"] for event in events(folder, "data.nonfinite")] == [3, 4, 5, 6]
    assert events(folder, "guard.rollback") == [], (
        "the state is sound: there is nothing to go back for"
    )
