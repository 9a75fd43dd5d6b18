"""What of a machine will trouble a run though it can start: disk, clock, NCCL. Pure functions of facts. Torch-free."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from harness.capability.cards import GIB, check_usable
from harness.capability.probe import MachineFacts
from harness.core.findings import Finding, refused, warning
from harness.core.memory import size_text

LOW_DISK_GIB = 5
"""Under this much free disk a run of any size is likely to fill it."""
_SKEW_SECONDS = 2.0
_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Clocks:
    """Times in seconds since 1970.

    before, after: of this machine, before and after it wrote a file. A busy disk may take long in between.
    written: what the file system gave that file; None if nothing could be written.
    installed: when torch was installed here; None if that is not known.
    """

    before: float
    after: float
    written: float | None = None
    installed: float | None = None


def read_clocks(folder: Path) -> Clocks:
    """The clocks of this machine and of the file system of `folder`."""
    written = None
    before = time.time()
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            file.write(b"now")
            file.flush()
            written = os.stat(file.name).st_mtime
    except OSError:
        # A folder that cannot be written is reported by what wants to write there.
        pass
    after = time.time()
    found = find_spec("torch")
    installed = os.stat(found.origin).st_ctime if found and found.origin else None
    return Clocks(before, after, written, installed)


def machine_findings(facts: MachineFacts, clocks: Clocks) -> list[Finding]:
    """Errors for cards that torch cannot use, and warnings for the rest."""
    found = refused("machine.card", check_usable(facts))
    if facts.disk_free_bytes < LOW_DISK_GIB * GIB:
        what = f"{size_text(facts.disk_free_bytes)} free"
        why = "a run keeps three checkpoints and writes a fourth, of 12 bytes for each parameter"
        fix = "free space, or let runs be a link to a folder on a larger disk"
        found.append(warning("machine.disk", "folder of runs", what, why, fix))
    if len(facts.devices) > 1 and facts.torch_cuda and facts.nccl is None:
        why = "ranks on several GPUs exchange gradients through NCCL"
        fix = "install a build of torch for CUDA on Linux, which brings NCCL along"
        found.append(warning("machine.nccl", "torch", "this build has no NCCL", why, fix))
    return [*found, *_clock_findings(clocks)]


def _clock_findings(clocks: Clocks) -> list[Finding]:
    found: list[Finding] = []
    skew = ""
    if clocks.written is not None and clocks.written > clocks.after + _SKEW_SECONDS:
        skew = f"{clocks.written - clocks.after:.0f} s ahead of"
    elif clocks.written is not None and clocks.written < clocks.before - _SKEW_SECONDS:
        skew = f"{clocks.before - clocks.written:.0f} s behind"
    if skew:
        what = f"the file system's clock is {skew} this machine's"
        why = "which file is newer decides about caches and about changed data"
        fix = "set both clocks by NTP"
        found.append(warning("machine.clock", "folder of runs", what, why, fix))
    if clocks.installed is not None and clocks.after < clocks.installed - _DAY:
        what = "the clock is behind the day on which torch was installed here"
        why = "certificates of servers are not valid yet, and MLflow shows the run in the past"
        fix = "set the clock: timedatectl set-ntp true"
        found.append(warning("machine.clock", "this machine", what, why, fix))
    return found
