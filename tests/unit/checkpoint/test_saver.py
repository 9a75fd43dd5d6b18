"""Saves in the background: what is on disk is the state of the moment, and no decision depends on the disk's speed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from harness.checkpoint import manifest
from harness.checkpoint import store as store_module
from harness.checkpoint.failures import cannot_save, is_of_the_disk
from harness.checkpoint.policy import Retention, RollbackTargets
from harness.checkpoint.saver import Saver
from harness.checkpoint.staging import Staging
from harness.checkpoint.store import Store
from harness.core.errors import CheckpointError, Problem
from harness.core.protocols import Tensors
from harness.tracking.journal import Journal
from tests.support.recoveries import pin_nothing, small_recovery
from tests.support.runs import events


class SlowStore(Store):
    """Waits for `go` before it writes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go = threading.Event()
        self.threads: list[tuple[int, int]] = []

    def save(
        self, step: int, tensors: Any, meta: Any, metrics: Mapping[str, float] | None = None
    ) -> Path:
        self.threads.append(
            (threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        )
        assert self.go.wait(300)
        return super().save(step, tensors, meta, metrics)


def state(value: float) -> Tensors:
    return {
        "model": {"weight": torch.full((300,), value), "half": torch.full((3,), value).bfloat16()},
        "rng": {},
    }


def keep_all(good: object) -> list[int]:
    return []


def test_training_goes_on_and_what_is_saved_is_the_state_of_the_moment(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    saver = Saver(store, keep_all, Staging())
    live = state(1.0)
    saver.begin(5, live, {"step": 5}, {"val_loss": 2.5, "train_loss": float("nan")})
    live["model"]["weight"].fill_(9.0)
    live["model"]["half"].fill_(9.0)
    assert saver.finished() == []
    assert store.steps() == []
    assert saver.committed(5) is None
    store.go.set()
    saver.wait()
    assert saver.committed(5) is True
    (saved,) = saver.finished()
    assert (saved.step, saved.path, saved.error, saved.metrics["val_loss"]) == (
        5,
        store.path(5),
        "",
        2.5,
    )
    tensors, meta = store.load(5)
    assert tensors["model"]["weight"].tolist() == [1.0] * 300
    assert tensors["model"]["half"].tolist() == [1.0] * 3
    assert meta == {"step": 5}
    assert store.metrics(5) == {"val_loss": 2.5}
    assert saver.finished() == []


def test_the_thread_is_another_and_of_lower_priority(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    store.go.set()
    for staging in (Staging(), None):
        saver = Saver(store, keep_all, staging)
        saver.begin(len(store.threads) + 1, state(1.0), {}, {})
        saver.wait()
    (background, nice), (inline, normal) = store.threads
    assert inline == threading.get_native_id() != background
    assert normal == os.getpriority(os.PRIO_PROCESS, 0)
    assert nice == min(normal + 3, 19)


def test_saves_come_one_after_the_other_and_reuse_the_memory(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    store.go.set()
    saver = Saver(store, keep_all, Staging())
    for step in range(1, 6):
        saver.begin(step, state(float(step)), {}, {})
    saver.wait()
    assert [saved.step for saved in saver.finished()] == [1, 2, 3, 4, 5]
    for step in range(1, 6):
        assert store.load(step)[0]["model"]["weight"][0] == step


@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_fails_is_told_and_never_becomes_good(tmp_path: Path, background: bool) -> None:
    store = Store(tmp_path)
    saver = Saver(store, keep_all, Staging() if background else None)
    targets = RollbackTargets(store, 1, saver.committed)
    saver.begin(5, state(1.0), {"no JSON": {1, 2}}, {})
    assert targets.saved(5) == []
    saver.wait()
    assert targets.observe(5, True) == []
    (saved,) = saver.finished()
    assert saved.path is None
    assert "not written" in saved.error
    assert manifest.read_marks(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    saver.begin(6, state(1.0), {}, {})
    assert targets.saved(6) == []
    saver.wait()
    assert targets.observe(6, True) == [6]


def test_a_mark_waits_for_its_save_and_training_does_not(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    saver = Saver(store, keep_all, Staging())
    targets = RollbackTargets(store, 2, saver.committed)
    saver.begin(5, state(1.0), {}, {})
    targets.saved(5)
    assert targets.observe(5, True) == []
    # The store writes when it is told to, which is below: what waits for it here waits for ever.
    assert targets.observe(6, True) == []
    # It was earned before this step: when the disk is done does not decide whether it counts.
    assert targets.observe(7, False) == []
    assert (store.steps(), manifest.read_marks(tmp_path)) == ([], [])
    store.go.set()
    saver.wait()
    assert targets.settled() == [5]
    assert manifest.read_marks(tmp_path) == [5]
    assert targets.waiting() == {}


def test_retention_sees_the_marks_of_the_moment_of_the_save(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    store.go.set()
    saver = Saver(store, Retention(store, 2).prune, Staging())
    for step in (1, 2):
        saver.begin(step, state(1.0), {}, {})
    saver.wait()
    store.go.clear()
    saver.begin(3, state(1.0), {}, {})
    manifest.add_mark(
        tmp_path, 1
    )  # too late: without a thread, step 1 would have been deleted by now
    store.go.set()
    saver.wait()
    assert [list(saved.deleted) for saved in saver.finished()] == [[], [], [1]]
    assert store.steps() == [2, 3]


@pytest.mark.parametrize("staging", [Staging(), None])
@pytest.mark.parametrize("error", [ZeroDivisionError("a defect"), MemoryError()])
def test_an_error_that_is_not_of_the_disk_is_a_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, staging: Staging | None
) -> None:
    def broken(*given: object, **named: object) -> None:
        raise error

    # After the commit, in which case the checkpoint counts.
    saver = Saver(Store(tmp_path), broken, staging)  # type: ignore[arg-type]
    saver.begin(5, state(1.0), {}, {})
    saver.wait()
    (pruned,) = saver.finished()
    assert pruned.path == tmp_path / "step-00000005"
    assert pruned.defect is not None

    # And while its files are written.
    monkeypatch.setattr(store_module, "_write_tensors", broken)
    saver = Saver(Store(tmp_path), keep_all, staging)
    saver.begin(6, state(1.0), {}, {})
    saver.wait()
    (saved,) = saver.finished()
    assert saved.path is None
    assert saved.defect is not None
    text = str(saved.defect)
    assert "step-00000006" in text
    if isinstance(error, MemoryError):
        assert "no more memory" in text
        assert "checkpoint.background=false" in text
    else:
        assert "not because of the disk" in text
        assert f"ZeroDivisionError: a defect ({__file__}, line " in text
    assert saver.committed(6) is False
    assert Store(tmp_path, readonly=True).steps() == [5]


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(number, "") for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)),
        SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
        CheckpointError(Problem("differs from its SHA-256")),
    ],
)
def test_an_error_of_the_disk_is_no_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*given: object) -> None:
        raise error

    monkeypatch.setattr(store_module, "sync_folder", broken)
    saver = Saver(Store(tmp_path), keep_all)
    saver.begin(5, state(1.0), {}, {})
    (saved,) = saver.finished()
    assert saved.error
    assert saved.defect is None


def test_a_limit_of_open_files_is_not_of_the_disk() -> None:
    assert not is_of_the_disk(OSError(errno.EMFILE, "Too many open files"))
    assert is_of_the_disk(TimeoutError("no answer"))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: out of memory"),  # of pinned memory
        SafetensorError("Error while serializing: I/O error: Cannot allocate memory (os error 12)"),
    ],
)
def test_memory_that_is_lacking_is_named_however_it_is_worded(error: Exception) -> None:
    assert not is_of_the_disk(error)
    assert "no more memory" in str(cannot_save(Path("there"), error))


def test_a_disk_that_fails_outside_the_write_is_an_event_too(tmp_path: Path) -> None:
    def refused(good: object) -> list[int]:
        raise OSError(5, "Input/output error")

    saver = Saver(Store(tmp_path), refused, Staging())
    saver.begin(5, state(1.0), {}, {})
    saver.wait()
    (saved,) = saver.finished()
    assert saved.path is not None
    assert "Input/output error" in saved.error


def test_without_memory_for_a_copy_training_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Staging, size: int) -> None:
        raise MemoryError

    monkeypatch.setattr(Staging, "_allocate", full)
    staging = Staging()
    staging.reserve(1000)
    saver = Saver(Store(tmp_path), keep_all, staging)
    for step in (1, 2):
        saver.begin(step, state(1.0), {}, {})
        assert Store(tmp_path, readonly=True).steps()[-1] == step, (
            "written before the call returned"
        )
    first, second = saver.finished()
    assert first.error == second.error == ""
    assert "MemoryError" in first.uncopied
    assert second.uncopied == "", "logged once"


def test_memory_for_a_copy_that_cannot_be_pinned_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin_nothing(monkeypatch)
    store = Store(tmp_path / "checkpoints")
    saver = Saver(store, keep_all, Staging(pinned=True))
    with Journal(tmp_path / "journal.jsonl") as journal:
        recovery = small_recovery(store, saver, journal)
        for step in (1, 2, 3):
            recovery.state.step = step
            recovery.keep({})
            recovery.wait()
    (event,) = events(tmp_path, "checkpoint.pageable")
    assert "RuntimeError: CUDA error: out of memory" in event["text"]
    assert len(store.steps()) == 3


@pytest.mark.nightly
def test_a_job_that_is_nicer_already_saves_all_the_same() -> None:
    """Without the right to raise its priority, a thread at 15 may not be set to 10."""
    script = (
        "import os, sys, torch; from pathlib import Path; os.nice(15)\n"
        "from harness.checkpoint.saver import Saver; from harness.checkpoint.staging import Staging\n"
        "from harness.checkpoint.store import Store\n"
        "saver = Saver(Store(Path(sys.argv[1])), lambda good: [], Staging())\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "saver.begin(5, {'model': {'weight': torch.ones(3)}}, {}, {}); saver.wait()\n"
        "(saved,) = saver.finished(); assert saved.path is not None, saved\n"
    )
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        Path(folder).chmod(0o777)
        command = [sys.executable, "-c", script, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
