"""When a layer leaves FP8 and when it returns: the figures, and the statistics that they are about. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from harness.core.errors import ConfigError, Problem
from harness.core.facts import ROLES


@dataclass(frozen=True, slots=True)
class Statistic:
    """One kind of evidence. sampled: measured every `fp8.stats_every` steps only. below: bad under its limit."""

    name: str
    sampled: bool = False
    below: bool = False


STATISTICS = (
    Statistic("saturation"),
    Statistic("nonfinite"),
    Statistic("amax_growth"),
    Statistic("amax_over"),
    Statistic("clipped", sampled=True),
    Statistic("underflow", sampled=True),
    Statistic("sqnr_db", sampled=True, below=True),
)


@dataclass(frozen=True, slots=True)
class FallbackPolicy:
    """When a layer leaves FP8 and when it returns.

    A slot is bad at a step when saturation (amax * scale / fp8_max) is over its role's limit; clipped or underflow
    (shares of all, of non-zero values, flushed to zero) are over theirs; sqnr_db is under its limit; its amax is
    infinite; or, unless None, its amax is over amax_over or amax_growth times what it was a window before.

    hits of the last window observations demote. dwell_steps: least stay in BF16, multiplied by cooldown_factor at each
    further demotion of the layer. warmup_steps: applied steps at the start without evidence, while scales are still 1.
    max_demoted_share: of the FP8 layers, but at least one layer unless 0. over_budget: when more want to leave, the
    whole run goes to "bf16", or they "stay". failed_steps: see `WholeRunFallback`.

    Healthy runs of a 3M-parameter GPT reach ratios of 1.38 (input), 1.02 (weight), 4.5 (grad_output) and an underflow
    of 0.007 (benchmarks/results/clean_cpu.json); the first steps of tiny models at high learning rates clip 1.5% of an
    input for a dozen steps, and have gradients at 3.3 dB for one. The defaults let all of that pass.

    Raises ConfigError that lists every value out of range.
    """

    enabled: bool = True
    saturation_input: float = 1.5
    saturation_weight: float = 1.25
    saturation_grad_output: float = 8.0
    clipped: float = 0.05
    underflow: float = 0.25
    sqnr_db: float = 5.0
    amax_growth: float | None = None
    amax_over: float | None = None
    hits: int = 3
    window: int = 8
    dwell_steps: int = 50
    cooldown_factor: float = 2.0
    warmup_steps: int = 2
    max_demoted_share: float = 0.5
    over_budget: str = "bf16"
    failed_steps: int | None = 3

    def __post_init__(self) -> None:
        rules = (
            *((f"saturation_{role}", getattr(self, f"saturation_{role}") > 0, "over 0") for role in ROLES),
            ("clipped", 0 < self.clipped <= 1, "over 0 and at most 1"),
            ("underflow", 0 < self.underflow <= 1, "over 0 and at most 1"),
            ("amax_growth", self.amax_growth is None or self.amax_growth > 1, "over 1, or null"),
            ("amax_over", self.amax_over is None or self.amax_over > 0, "over 0, or null"),
            ("hits", self.hits >= 1, "at least 1"),
            ("window", self.window >= self.hits, f"at least hits ({self.hits})"),
            ("dwell_steps", self.dwell_steps >= 1, "at least 1"),
            ("cooldown_factor", self.cooldown_factor >= 1, "at least 1"),
            ("warmup_steps", self.warmup_steps >= 0, "at least 0"),
            ("max_demoted_share", 0 <= self.max_demoted_share <= 1, "between 0 and 1"),
            ("over_budget", self.over_budget in ("bf16", "stay"), "of bf16, stay"),
            ("failed_steps", self.failed_steps is None or self.failed_steps >= 1, "of at least 1, or null"),
        )
        problems = [
            Problem(f"{getattr(self, name)!r} is out of range", f"fallback.{name}", fix=f"give a value {wanted}")
            for name, ok, wanted in rules
            if not ok
        ]
        if problems:
            raise ConfigError(problems)

    def limits(self) -> npt.NDArray[np.float32]:
        """Limit of each statistic and role, float32 [statistics, 1, 3]; NaN, which no value is beyond, where off."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given["nonfinite"] = 0.5  # observed as 0 or 1
        rows = [[given.get(f"{kind.name}_{role}", given.get(kind.name)) for role in ROLES] for kind in STATISTICS]
        return np.array(rows, dtype=np.float32)[:, None, :]

    def max_demoted(self, layers: int) -> int:
        """How many of `layers` may be in BF16 at once."""
        return max(1, int(self.max_demoted_share * layers)) if self.max_demoted_share > 0 else 0

    def dwell(self, demotions: int) -> float:
        """Steps that a layer stays in BF16 after its demotion number `demotions` (from 1)."""
        return self.dwell_steps * self.cooldown_factor ** (demotions - 1)
