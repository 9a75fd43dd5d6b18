"""Tell a run folder from any other."""

from __future__ import annotations

from pathlib import Path

from harness.core.errors import ConfigError, Problem, near_match
from harness.tracking.position import JOURNAL


def require_run(run_dir: Path) -> Path:
    """`run_dir`, resolved, if it is a run's folder. Raises ConfigError with the near match among its neighbours."""
    if (run_dir / JOURNAL).is_file():
        return run_dir.resolve()
    runs = [path.parent.name for path in run_dir.absolute().parent.glob(f"*/{JOURNAL}")]
    what = f"has no {JOURNAL}" if run_dir.is_dir() else "no such folder"
    hint = near_match(run_dir.name, runs) or "start one with: harness train --recipe fp8_hybrid"
    raise ConfigError(Problem(f"not a run: {what}", str(run_dir), fix=hint))
