"""A rank's memory in a save and in a load is that of its own rows. Run as a script, this file is one rank of four."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from harness.checkpoint.meeting import Writers
from harness.checkpoint.saver import Saver
from harness.checkpoint.staging import Staging
from harness.checkpoint.store import Store
from harness.core.protocols import Tensors
from harness.core.shards import Rows

RANKS, RANK = 4, 1
MIB = 1 << 20
SHAPE = (1024, 4096)  # 16 MiB
NAMES = [f"blocks.{index}.weight" for index in range(12)]
WHOLE = len(NAMES) * 16
# MiB: what Python and torch allocate on the way.
SLACK = 8


def anonymous() -> float:
    """MiB of this process that are no file's. A staging block counts as shared memory."""
    kib = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            kib += int(line.split()[1])
    return kib / 1024


class Peak:
    """The most memory in use while the block runs, in MiB above that before it."""

    def __enter__(self) -> Peak:
        self._before = anonymous()
        self.mib = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.mib = max(self.mib, anonymous() - self._before)

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()
        self.mib = max(self.mib, anonymous() - self._before)


def rank_main(folder: Path) -> None:
    rows = {"model": {name: Rows.of_rank(SHAPE, RANK, RANKS) for name in NAMES}}
    meeting = Writers(RANK, RANKS, "start", 30.0).next_try()
    temporary = folder / f".tmp-step-00000003-{meeting.name}"
    temporary.mkdir()  # as rank 0 does

    with Peak() as saving:
        live: Tensors = {"model": {name: torch.ones(rows["model"][name].local_shape) for name in NAMES}}  # fmt: skip
        saver = Saver(Store(folder, readonly=True), lambda good: [], Staging())
        saver.begin(3, live, {}, {}, rows=rows, meeting=meeting)
        until = time.monotonic() + 30
        while not (temporary / f"entry-{RANK:05d}.json").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        meeting.give_up("that is all")
        saver.wait()
    del live, saver

    with Peak() as loading:
        found, _ = Store(folder, readonly=True).load(9, rows=rows, verified=True)
    assert found["model"][NAMES[0]].shape == (256, 4096)
    print(json.dumps({"saving": saving.mib, "loading": loading.mib}))


@pytest.mark.slow
def test_a_rank_of_four_needs_two_quarters_to_save_and_one_to_load(tmp_path: Path) -> None:
    Store(tmp_path).save(9, {"model": {name: torch.ones(SHAPE) for name in NAMES}}, {})
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    # The rows themselves and, in a background save, their copy.
    assert 1.5 * WHOLE / RANKS < peaks["saving"] < 2 * WHOLE / RANKS + SLACK
    assert peaks["loading"] < WHOLE / RANKS + SLACK


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
