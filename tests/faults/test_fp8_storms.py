"""FP8 state that is damaged, and tensors that outrun their scales, on real runs: rows 15 and 16 of the fault matrix."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from harness.core.config import load_config
from harness.core.facts import SWITCH_DELAY
from harness.core.files import find
from harness.precision import scaling
from harness.precision.backends.native import NativeBackend
from harness.precision.backends.slot_buffers import SlotBuffers
from harness.precision.recipe import load_recipe
from harness.tools.start import Request
from harness.tools.train import train
from tests.support.matrix import rest_nightly
from tests.support.runs import TEXT, events, metrics

pytestmark = pytest.mark.faults(15, 16)

AT = 8
GUILTY = "blocks.00.mlp.down"
MAX = {"input": 448.0, "weight": 448.0, "grad_output": 57344.0}
POLICY = load_recipe("fp8_hybrid").fallback


def run(
    folder: Path,
    name: str,
    model: Mapping[str, Any],
    steps: int,
    recipe: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """Train in this process with one micro-batch a step; the run folder. No update is skipped for its norm: a storm
    that FP8 cuts off distorts gradients, and here it is FP8's own protection that is looked at."""
    given = yaml.safe_load(find("recipes", "fp8_hybrid").read_text())
    for section, values in (recipe or {}).items():
        given[section] = {**given.get(section, {}), **values}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(given))
    fixed = [
        f"data.path={TEXT}", "tracking.mlflow=false", "train.global_batch=2", "train.micro_batch=2",
        "checkpoint.every=0", "model.target=scaled_models:scaled", f"model.args={json.dumps(dict(model))}",
        f"train.steps={steps}", "train.lr=1e-3", "guard.skip_growth=1.0e+9",
    ]  # fmt: skip
    with contextlib.chdir(folder):
        config = load_config("tiny", fixed, f"{name}.yaml")
        assert (
            train(
                Request(config, load_recipe(f"{name}.yaml"), "tiny", name, "never", False, "python")
            )
            == 0
        )
    return folder / "runs" / name


CALM = {"kind": "jump", "layers": [GUILTY], "at": 1, "bits": 0}


def scales(folder: Path, slot: str) -> dict[int, float]:
    """The scale in use at every step."""
    return dict(metrics(folder, f"fp8_scale/{slot}"))


def fitting(folder: Path, slot: str, until: int, without: int = 0) -> float:
    """The scale that the amaxes up to step `until` ask for, leaving one step out."""
    amaxes = [
        amax
        for step, amax in metrics(folder, f"fp8_amax/{slot}")
        if step <= until and step != without
    ]
    return MAX[slot.rpartition(".")[2]] / max(amaxes[-16:])


Damage = Callable[[Tensor, int], None]


@pytest.fixture
def damage(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Write into a slot's history, or over its staged amax, in step AT; what was written is listed."""

    def install(history: Mapping[str, float], staged: Mapping[str, float]) -> list[str]:
        fired: list[str] = []
        begin, amax = SlotBuffers.begin_window, NativeBackend.amax

        def begin_window(self: SlotBuffers, sample: bool) -> None:
            begin(self, sample)
            if self.window == AT:
                for slot, value in history.items():
                    self.history[3, self.names.index(slot)] = value  # a row that is still empty
                    fired.append(slot)

        def stage(self: NativeBackend) -> Tensor:
            values = amax(self)
            if self.slot_buffers.window == AT:
                for slot, value in staged.items():
                    values[self.slot_names.index(slot)] = value
                    fired.append(slot)
            return values

        monkeypatch.setattr(SlotBuffers, "begin_window", begin_window)
        monkeypatch.setattr(NativeBackend, "amax", stage)
        return fired

    return install


@pytest.mark.nightly
def test_damaged_histories_keep_their_scale_and_recover_at_the_next_update(
    tmp_path: Path, damage: Callable[..., list[str]]
) -> None:
    clean = run(tmp_path, "clean", CALM, AT + 4)
    moving = [
        slot
        for slot in (name.removeprefix("fp8_scale/") for name in names(clean))
        if len({scales(clean, slot)[step] for step in (AT, AT + 1, AT + 2)}) == 3
    ]
    unused, infinite, *others = moving[:4]
    history = dict(zip(others, (math.inf, math.nan), strict=True))
    fired = damage(history, {unused: 0.0, infinite: math.inf})
    folder = run(tmp_path, "damaged", CALM, AT + 4)
    assert sorted(fired) == sorted([*history, unused, infinite])
    assert dict(metrics(folder, f"fp8_amax/{unused}"))[AT] == 0.0
    for slot in (unused, infinite):
        used = scales(folder, slot)
        assert used[AT + 1] == used[AT], "kept"
        assert used[AT + 2] == pytest.approx(fitting(folder, slot, AT + 1, without=AT), rel=1e-6), (
            "recovered"
        )
        assert scales(clean, slot)[AT + 1] != used[AT + 1], "the update did not happen"
    for slot in history:
        used = scales(folder, slot)
        assert used[AT + 1] == pytest.approx(fitting(folder, slot, AT), rel=1e-6), (
            "the entry had no say"
        )
        assert used[AT + 1] != used[AT], "a frozen scale would be noticed"
    assert all(math.isfinite(loss) for _, loss in metrics(folder))
    (event,) = events(folder, "fp8.scrubbed")
    assert (event["step"], event["scrubbed"], event["slots"]) == (AT, 2, [infinite])


def names(folder: Path) -> list[str]:
    rows = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [
        name
        for name in next(r for r in rows if r["kind"] == "metrics")["metrics"]
        if name.startswith("fp8_scale/")
    ]


@pytest.mark.nightly
def test_without_scrubbing_an_infinite_amax_freezes_its_scale(
    tmp_path: Path, damage: Callable[..., list[str]]
) -> None:
    slot = f"{GUILTY}.weight"
    damage({}, {slot: math.inf})
    folder = run(
        tmp_path, "frozen", CALM, AT + 7, {"fp8": {"scrub_inf": False, "amax_history_len": 5}}
    )
    used = scales(folder, slot)
    assert len({used[step] for step in range(AT, AT + 6)}) == 1
    assert used[AT + 6] != used[AT], "the infinity has left the history"


@pytest.mark.slow
def test_a_scale_that_is_no_longer_updated_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = scaling.update

    def broken(history: Tensor, scale: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        history, fresh = update(history, scale, *given)
        return history, torch.cat([fresh[:-1], scale[-1:]])

    monkeypatch.setattr(scaling, "update", broken)
    off = {"fp8": {"amax_history_len": 4}, "fallback": {"enabled": False}}
    folder = run(tmp_path, "r", CALM, 14, off)
    last = names(folder)[-1].removeprefix("fp8_scale/")
    assert set(scales(folder, last).values()) == {1.0}
    (event,) = events(folder, "fp8.frozen")
    assert list(event["slots"]) == [last]
    assert event["step"] == 2 * 4 + 1


STORMS = {
    "up": {"kind": "ramp", "at": 21, "bits": 4},
    "down": {"kind": "jump", "at": 21, "bits": -30},
    "oscillating": {"kind": "oscillate", "at": 21, "bits": 13, "low": -30},
}


def over_limits(folder: Path) -> list[int]:
    """Steps in which the layer's input is beyond what FP8 can hold."""
    ratio = dict(metrics(folder, f"fp8_saturation/{GUILTY}.input"))
    flushed = dict(metrics(folder, f"fp8_underflow/{GUILTY}.input"))
    return [
        step
        for step in ratio
        if ratio[step] > POLICY.saturation_input or flushed.get(step, 0.0) > POLICY.underflow
    ]


@pytest.mark.slow
@pytest.mark.parametrize("storm", rest_nightly(["up", "down", "oscillating"], "oscillating"))
def test_a_layer_in_a_storm_leaves_fp8_within_two_windows(tmp_path: Path, storm: str) -> None:
    folder = run(tmp_path, "r", {"layers": ["blocks.0.mlp.down"], **STORMS[storm]}, 44)
    assert over_limits(folder), "the fault fired"
    (switch,) = events(folder, "precision.switched")
    assert switch["demote"] == [GUILTY], "the guilty layer and no other"
    assert 21 < switch["step"] <= 21 + 2 * POLICY.window + SWITCH_DELAY
    assert all(math.isfinite(loss) for _, loss in metrics(folder))


@pytest.mark.nightly
@pytest.mark.parametrize("storm", STORMS)
def test_without_the_fallback_the_layer_stays_in_the_storm(tmp_path: Path, storm: str) -> None:
    off = {"fallback": {"enabled": False}, "fp8": {"stats_every": 1}}
    folder = run(tmp_path, "r", {"layers": ["blocks.0.mlp.down"], **STORMS[storm]}, 44, off)
    assert len(over_limits(folder)) >= POLICY.hits
    assert events(folder, "precision.switched") == []


@pytest.mark.slow
def test_one_jump_is_clipped_once_and_then_followed(tmp_path: Path) -> None:
    folder = run(
        tmp_path, "r", {"kind": "jump", "layers": ["blocks.0.mlp.down"], "at": 21, "bits": 13}, 30
    )
    ratio = dict(metrics(folder, f"fp8_saturation/{GUILTY}.input"))
    assert [step for step, value in ratio.items() if value > POLICY.saturation_input] == [21]
    assert ratio[21] > 4000, "2^13 times as large, under the old scale"
    assert events(folder, "precision.switched") == []


@pytest.mark.nightly
def test_a_cause_that_comes_and_goes_moves_the_layer_ever_more_rarely(tmp_path: Path) -> None:
    dwell, steps = 8, 150
    model = {
        "kind": "oscillate",
        "layers": ["blocks.0.mlp.down"],
        "at": 21,
        "bits": 13,
        "low": -30,
        "on": 12,
        "off": 28,
    }
    recipe = {"fallback": {"dwell_steps": dwell}, "fp8": {"stats_every": 1}}
    folder = run(tmp_path, "r", model, steps, recipe)
    switches = events(folder, "precision.switched")
    down = [event["step"] for event in switches if event["demote"]]
    up = [event["step"] for event in switches if event["promote"]]
    assert len(down) >= 2, "it flaps"
    assert len(down) <= 1 + math.log2((steps - 21) / dwell), (
        "each stay in BF16 is twice as long as the one before"
    )
    for number, (left, back) in enumerate(zip(down, up, strict=False)):
        assert back - left >= dwell * 2**number


@pytest.mark.nightly
def test_storms_of_the_whole_run_are_told_once(tmp_path: Path) -> None:
    off = {"fallback": {"enabled": False}, "fp8": {"stats_every": 1}}
    folder = run(tmp_path, "r", {"layers": [], **STORMS["up"]}, 30, off)
    (event,) = events(folder, "fp8.saturation")
    assert event["step"] in (23, 24), "in the ramp's first step some peaks of before are larger"
    assert f"{GUILTY}.input" in event["slots"]
    assert not any(slot.endswith(".weight") for slot in event["slots"])
    assert events(folder, "fp8.underflow") == []
    # Not so far down that nothing is left: a layer fed with zeros has no values that could be lost.
    folder = run(tmp_path, "s", {"layers": [], "kind": "jump", "at": 21, "bits": -17}, 26, off)
    (event,) = events(folder, "fp8.underflow")
    assert event["step"] == 23
    assert {slot.rpartition(".")[2] for slot in event["slots"]} == {"input"}
    assert events(folder, "fp8.saturation") == [], "gradients were clipped in one step only"
