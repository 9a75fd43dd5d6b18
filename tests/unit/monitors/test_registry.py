"""Which monitors watch a run, and their windows in checkpoints: of this version, of one to come."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fallback_support import LAYERS
from fallback_support import make_facts as fp8_facts

from harness.core.config import FallbackConfig, GuardConfig
from harness.core.errors import CheckpointError
from harness.core.facts import Limits, StepFacts, Verdict, Window
from harness.core.protocols import Monitor
from harness.monitors.base import MonitorContext
from harness.monitors.registry import MONITORS, MonitorsPart, build_monitors

MakeFacts = Callable[..., StepFacts]
ALWAYS = [
    "gradients",
    "underflow",
    "clipping",
    "parameters",
    "loss",
    "loss_rise",
    "lr",
    "data",
    "ranks",
    "plateau",
]
OF_FP16 = ["scaler", "scale_moves"]
ALL = [*ALWAYS, "first_loss", *OF_FP16, "fp8", "fp8_storm", "fallback", "fp8_frozen", "whole_run"]


class NoData:
    """A data source that no monitor has reason to read."""

    name, tokens_per_sample, masked, unit = "none", 1, False, "loss"

    def window(self, index: int) -> Window:
        raise AssertionError("not to be read")

    def micro_batches(self, window: Window, rank: int, world_size: int) -> Sequence[Any]:
        raise AssertionError("not to be read")

    def validation(self, rank: int, world_size: int) -> Sequence[Any]:
        raise AssertionError("not to be read")


def context(**changed: Any) -> MonitorContext:
    return replace(MonitorContext(GuardConfig(), FallbackConfig(), data=NoData()), **changed)


FP8 = {"layers": LAYERS, "amax_history": 16}
FP16 = {"scales_loss": True, "fallback_precision": lambda: "bf16"}


def keys(monitors: Sequence[Monitor]) -> list[str]:
    return [monitor.key for monitor in monitors]


def driven(given: MonitorContext) -> list[Monitor]:
    """Monitors with something in every window: 40 steps, a skip, a rise of the loss, FP8 slots if there are any."""
    monitors = build_monitors(given)
    for step in range(1, 41):
        facts = replace(
            fp8_facts(step, saturation={"blocks.02.mlp.down.input": 1.6}),
            loss=math.nan if step == 20 else 3.0 + step / 10,
            applied=step != 20,
            loss_scale=512.0 if given.scales_loss else 1.0,
            param_norm=1.0 + step,
            grad_zeros=0.1,
            grad_near_limit=0.0,
        )
        for monitor in monitors:
            monitor.observe(facts if given.layers else replace(facts, slots=None))
    return monitors


def stored(part: MonitorsPart) -> dict[str, Any]:
    """As a checkpoint keeps it."""
    tensors, meta = part.state_dict()
    assert tensors == {}
    return json.loads(json.dumps(meta, allow_nan=False))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (FP8, [*ALWAYS, "fp8", "fp8_storm", "fallback", "fp8_frozen"]),
        ({**FP8, "amax_history": None}, [*ALWAYS, "fp8", "fp8_storm", "fallback"]),
        (FP16, [*ALWAYS[:7], *OF_FP16, *ALWAYS[7:], "whole_run"]),
        ({**FP16, "fallback": FallbackConfig(enabled=False)}, [*ALWAYS[:7], *OF_FP16, *ALWAYS[7:]]),
        ({"scales_loss": True}, [*ALWAYS[:7], *OF_FP16, *ALWAYS[7:]]),
        ({}, ALWAYS),
    ],
    ids=["fp8", "fp8 not delayed", "fp16", "fp16 without fallback", "fp16 of DeepSpeed", "bf16"],
)
def test_a_run_is_watched_by_what_it_needs_in_a_fixed_order(
    given: dict[str, Any], expected: list[str]
) -> None:
    assert keys(build_monitors(context(**given))) == expected


def test_with_the_guard_off_nothing_watches() -> None:
    off = GuardConfig(enabled=False)
    assert build_monitors(context(guard=off, **FP8)) == []


def test_every_monitor_has_a_key_of_its_own_and_none_changes() -> None:
    assert sorted(monitor.key for monitor in MONITORS) == sorted(ALL)


@pytest.mark.parametrize("given", [FP8, FP16], ids=["fp8", "fp16"])
def test_windows_come_back_from_a_checkpoint(given: dict[str, Any]) -> None:
    meta = stored(MonitorsPart(driven(context(**given))))
    fresh = MonitorsPart(build_monitors(context(**given)))
    assert stored(fresh) != meta
    fresh.load_state_dict({}, meta)
    assert stored(fresh) == meta


def test_an_unknown_monitors_window_is_refused_by_name_nothing_is_loaded() -> None:
    meta = stored(MonitorsPart(driven(context(**FP8))))
    fresh = MonitorsPart(build_monitors(context(**FP8)))
    before = stored(fresh)
    with pytest.raises(
        CheckpointError, match="does not have: TomorrowsMonitor, tomorrow"
    ) as caught:
        fresh.load_state_dict({}, meta | {"tomorrow": {}, "TomorrowsMonitor": {}})
    assert "version that wrote it" in caught.value.problems[0].fix
    assert stored(fresh) == before


@pytest.mark.parametrize(("wrote", "reads"), [(FP8, {}), (FP16, {}), (FP16, FP8), ({}, FP16)])
def test_a_resume_with_another_recipe_takes_windows_of_what_still_watches(
    wrote: dict[str, Any], reads: dict[str, Any]
) -> None:
    meta = stored(MonitorsPart(driven(context(**wrote))))
    resumed = MonitorsPart(build_monitors(context(**reads)))
    fresh = stored(resumed)
    resumed.load_state_dict({}, meta)
    assert stored(resumed) == {key: meta.get(key, window) for key, window in fresh.items()}


def verdict_of(key: str, facts: StepFacts) -> Verdict:
    return next(m.observe(facts) for m in driven(context(**FP8)) if m.key == key)


@pytest.mark.parametrize(
    ("key", "fields", "code", "skip", "suspect"),
    [
        ("gradients", {"applied": False, "loss": math.nan}, "nonfinite.skip", True, None),
        (
            "gradients",
            {"applied": False, "grad_norm": math.inf, "loss_scale": 2048.0},
            "scaler.calibration",
            False,
            False,
        ),
        (
            "gradients",
            {"applied": False, "grad_norm": 9.0, "limits": Limits(norm=5.0)},
            "gradient.skip",
            True,
            None,
        ),
        (
            "loss",
            {"applied": False, "loss": 1e4, "limits": Limits(loss=50.0)},
            "loss.skip",
            True,
            True,
        ),
        ("loss", {"loss": 1e6}, "loss.spike", False, True),
        ("loss", {}, "loss.ok", False, None),
    ],
)
def test_a_verdict_says_whether_it_is_a_skip_and_its_step_suspect(
    make_facts: MakeFacts,
    key: str,
    fields: dict[str, Any],
    code: str,
    skip: bool,
    suspect: bool | None,
) -> None:
    verdict = verdict_of(key, make_facts(41, **fields))
    assert (verdict.code, verdict.skip, verdict.suspect) == (code, skip, suspect)
    assert verdict.ok == (code == "loss.ok")
