"""Run the real `harness train` in warm processes that die where they are told to.

As a program (`python resume_driver.py FAULTS ARGUMENTS...`): such a run.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import warm
from tests.support.runs import LOADED

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_SECONDS = warm.PATIENCE


@dataclass(frozen=True)
class Ended:
    """How a run ended. code: its exit code, None if a signal ended it. output: what it printed."""

    code: int | None
    killed: bool
    output: str


class Driver:
    """Runs that die where they are told to."""

    def train(
        self,
        folder: Path,
        *arguments: str,
        kill_at: int = 0,
        kill_after: float = 0.0,
        without: str = "",
        tier: str = "",
        kill_at_end: bool = False,
    ) -> Ended:
        """`harness train --config tiny <arguments>` in `folder`.

        kill_at: SIGKILL itself as soon as the state first counts this many steps: the update is in the weights, not
        judged, not in the journal, not saved. kill_after: be killed after so many seconds, whatever it is doing.
        kill_at_end: SIGKILL itself when all is saved but the outcome. without: a library that this machine lacks.
        tier: the cards that this CPU stands in for, as a plan sees them.
        """
        fixed = ["--config", "tiny", "tracking.mlflow=false", "tracking.report=false"]
        environment = {
            k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
        }
        environment |= {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        }
        given = {"at": kill_at, "at_end": kill_at_end, "without": without, "tier": tier}
        faults = json.dumps(given)
        log = folder / "output.log"
        with log.open("wb") as output:
            program = [__file__, faults, *fixed, *arguments]
            told = output.fileno()
            process = warm.start(program, folder, environment, told, told, modules=LOADED)
        try:
            code = process.wait(kill_after or LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
            assert kill_after, log.read_text(errors="replace")
        return Ended(
            None if code < 0 else code, code == -signal.SIGKILL, log.read_text(errors="replace")
        )


@functools.cache
def shared_driver() -> Driver:
    """One for all tests of this process."""
    return Driver()


def main(faults: dict[str, Any]) -> None:
    """Become the command, with its faults in place."""
    from harness import cli, telemetry
    from harness import run as loop
    from harness.capability import probe
    from harness.capability.cards import Tier
    from harness.precision import plan

    if faults["at_end"]:
        telemetry.write_outcome = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    find = probe.find_spec
    probe.find_spec = lambda name: None if name == faults["without"] else find(name)
    if faults["tier"]:
        plan.tier_of = lambda _: (Tier[faults["tier"]], "a CPU stands in for it")
    if faults["at"]:
        original = loop.next_step

        def deadly(run: Any) -> Any:
            pending = original(run)
            if run.state.step == faults["at"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return pending

        loop.next_step = deadly
    cli.train_main()


if __name__ == "__main__":
    _faults = json.loads(sys.argv.pop(1))
    main(_faults)
