from __future__ import annotations

import pytest

from harness.core.config import FallbackConfig
from harness.core.errors import CheckpointError, ConfigError
from harness.core.schema import validate
from harness.monitors.fallback import FallbackController


def test_state_of_other_layers_is_refused() -> None:
    state = FallbackController(FallbackConfig(), ["a", "b"]).state_dict()
    with pytest.raises(CheckpointError, match="other FP8 layers"):
        FallbackController(FallbackConfig(), ["a"]).load_state_dict(state)


def test_every_value_out_of_range_is_reported_together() -> None:
    wrong = {
        "saturation_input": 0.0,
        "underflow": 2.0,
        "sqnr_db": float("nan"),
        "amax_growth": 1.0,
        "hits": 0,
        "cooldown_factor": 0.5,
        "warmup_steps": 0,
        "max_demoted_share": 0.0,
        "over_budget": "fp32",
        "failed_steps": 0,
    }
    with pytest.raises(ConfigError) as caught:
        validate(FallbackConfig, wrong, "fallback")
    assert {problem.where for problem in caught.value.problems} == {
        f"fallback: {key}" for key in wrong
    }


def test_more_hits_than_a_window_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"hits \(5\) is more than window \(4\)"):
        validate(FallbackConfig, {"hits": 5, "window": 4}, "fallback")


@pytest.mark.parametrize(("share", "allowed"), [(0.01, 1), (0.1, 1), (0.5, 3), (1.0, 6)])
def test_how_many_layers_may_leave(share: float, allowed: int) -> None:
    assert FallbackConfig(max_demoted_share=share).max_demoted(6) == allowed
