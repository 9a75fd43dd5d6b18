from __future__ import annotations

import pytest

from harness.core.errors import CheckpointError, ConfigError
from harness.precision.fallback import FallbackController
from harness.precision.fallback_policy import FallbackPolicy


def test_state_of_other_layers_is_refused() -> None:
    state = FallbackController(FallbackPolicy(), ["a", "b"]).state_dict()
    with pytest.raises(CheckpointError, match="other FP8 layers"):
        FallbackController(FallbackPolicy(), ["a"]).load_state_dict(state)


def test_every_policy_value_out_of_range_is_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        FallbackPolicy(saturation_input=0.0, hits=5, window=4, cooldown_factor=0.5, underflow=2.0)
    assert [problem.where for problem in caught.value.problems] == [
        "fallback.saturation_input",
        "fallback.underflow",
        "fallback.window",
        "fallback.cooldown_factor",
    ]


@pytest.mark.parametrize(("share", "allowed"), [(0.0, 0), (0.1, 1), (0.5, 3), (1.0, 6)])
def test_how_many_layers_may_leave(share: float, allowed: int) -> None:
    assert FallbackPolicy(max_demoted_share=share).max_demoted(6) == allowed
