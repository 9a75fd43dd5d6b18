"""One config, three ways to start it, one and two ranks; the same losses.

What only needs ranks has them without a launcher (`train_ranks`).
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.checkpoint.store import Store
from harness.tracking.journal import read_rows
from tests.support import warm
from tests.support.runs import BIN, events, metrics, start, train, train_ranks, wait_for_step

STEPS = ("train.steps=12", "checkpoint.every=6")
DEEPSPEED = str(BIN / "deepspeed")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun(ranks: int) -> list[str]:
    port = f"--master-port={free_port()}"
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", port]


def deepspeed(ranks: int) -> list[str]:
    return [DEEPSPEED, "--num_accelerators", str(ranks), "--master_port", str(free_port())]


def losses(
    folder: Path, *arguments: str, launcher: list[str] | None = None, ranks: int = 1
) -> list[tuple[int, float]]:
    """Of a run of 12 steps under a launcher, or as so many ranks without one."""
    wanted = ("--name", "r", *STEPS, *arguments)
    if ranks > 1:
        done = train_ranks(folder, ranks, *wanted)
    else:
        done = train(folder, *wanted, launcher=launcher or [sys.executable])
    assert done.returncode == 0, done.stdout
    found = metrics(folder / "runs" / "r")
    assert [step for step, _ in found] == list(range(1, 13))
    store = Store(folder / "runs" / "r" / "checkpoints", readonly=True)
    assert store.steps() == [6, 12]
    assert store.verify(12) == []
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    return losses(tmp_path_factory.mktemp("alone"), "--recipe", "fp32")


def assert_close(
    one: list[tuple[int, float]], other: list[tuple[int, float]], relative: float
) -> None:
    worst = max(abs(a - b) / abs(b) for (_, a), (_, b) in zip(one, other, strict=True))
    assert worst <= relative, f"largest relative difference {worst:.2e}"


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(torchrun(1), marks=pytest.mark.nightly),
        torchrun(2),
        # test_sigterm_to_the_launcher_saves compares the losses of two ranks of deepspeed, too.
        pytest.param(deepspeed(1), marks=pytest.mark.nightly),
        pytest.param(deepspeed(2), marks=pytest.mark.nightly),
    ],
    ids=["torchrun-1", "torchrun-2", "deepspeed-1", "deepspeed-2"],
)
def test_every_launcher_gives_the_same_fp32_losses(
    alone: list[tuple[int, float]], tmp_path: Path, launcher: list[str]
) -> None:
    assert_close(losses(tmp_path, "--recipe", "fp32", launcher=launcher), alone, 1e-4)
    assert shared_memory(launcher) == []


def shared_memory(launcher: list[str]) -> list[str]:
    """What DeepSpeed's ranks left: they share memory by names with the port."""
    return [path.name for path in Path("/dev/shm").glob(f"deepspeed*_{launcher[-1]}_*")]


@pytest.mark.nightly
@pytest.mark.dist
@pytest.mark.parametrize(("kind", "engine"), [(torchrun, "deepspeed"), (deepspeed, "ddp")])
def test_the_engine_can_be_named_whatever_the_launcher(
    alone: list[tuple[int, float]], tmp_path: Path, kind: object, engine: str
) -> None:
    found = losses(tmp_path, "--recipe", "fp32", f"engine.name={engine}", launcher=kind(2))  # pyright: ignore[reportCallIssue]
    assert_close(found, alone, 1e-4)
    rows = read_rows(tmp_path / "runs" / "r" / "journal.jsonl")
    started = next(row for row in rows if row["kind"] == "run")
    assert started["tags"]["engine"] == engine


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"ranks": 2}, id="ranks"),
        pytest.param({}, id="deepspeed", marks=pytest.mark.nightly),
    ],
)
def test_fp8_on_two_ranks_stays_close_to_one(tmp_path: Path, how: dict[str, int]) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = losses(tmp_path / "one")
    two = losses(tmp_path / "two", **(how or {"launcher": deepspeed(2)}))  # pyright: ignore[reportArgumentType]
    # Per-rank weight gradients are bf16 before they are summed, so not bit for bit; scales are shared.
    assert_close(two, one, 2e-2)
    amax_one = metrics(tmp_path / "one" / "runs" / "r", "fp8_amax/blocks.00.attn.qkv.weight")
    amax_two = metrics(tmp_path / "two" / "runs" / "r", "fp8_amax/blocks.00.attn.qkv.weight")
    assert amax_one[0] == amax_two[0], (
        "the first step's weights are the same on every number of ranks"
    )


@pytest.mark.dist
def test_a_run_moves_between_world_sizes(alone: list[tuple[int, float]], tmp_path: Path) -> None:
    half = train_ranks(
        tmp_path, 2, "--name", "r", "train.steps=6", "checkpoint.every=6", "--recipe", "fp32"
    )
    assert half.returncode == 0, half.stdout
    shutil.rmtree(tmp_path / "runs" / "r" / "plots", ignore_errors=True)
    rest = losses_after(tmp_path, "--recipe", "fp32")
    # The first half ran a cosine of 6 steps: only the data order and the state must carry over.
    assert [step for step, _ in rest] == list(range(1, 13))
    assert all(math.isfinite(loss) for _, loss in rest)
    assert_close(rest[:2], alone[:2], 1e-4)


def losses_after(folder: Path, *arguments: str) -> list[tuple[int, float]]:
    done = train(folder, "--name", "r", *STEPS, *arguments)
    assert done.returncode == 0, done.stdout
    assert "resumed at step 6" in done.stdout
    return metrics(folder / "runs" / "r")


@pytest.mark.slow
@pytest.mark.dist
def test_a_batch_that_ranks_cannot_share_is_refused_with_one_that_works(tmp_path: Path) -> None:
    done = train_ranks(tmp_path, 2, "--name", "r", "train.global_batch=2")
    assert done.returncode == 2
    assert "train.micro_batch=1" in done.stdout
    assert not (tmp_path / "runs" / "r" / "checkpoints").exists()


@pytest.mark.dist
def test_deepspeed_combinations_that_are_broken_name_the_alternative(tmp_path: Path) -> None:
    fp16 = train_ranks(tmp_path, 1, "--recipe", "fp16_scaler", kind="deepspeed")
    assert fp16.returncode == 2
    assert "torchrun" in fp16.stdout


@pytest.mark.nightly
@pytest.mark.dist
@pytest.mark.faults(6)
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        (torchrun, 2),
        (deepspeed, 1),
        # Its ranks spin while they wait for each other: minutes of processor time on a busy machine.
        (deepspeed, 2),
    ],
    ids=["torchrun", "deepspeed-1", "deepspeed"],
)
def test_sigterm_to_the_launcher_saves(tmp_path: Path, kind: object, ranks: int) -> None:
    """And until then the losses are those of one process: a started launcher is dear, one is enough for both."""
    arguments = ("--name", "r", "--recipe", "fp32", "train.steps=4000", "checkpoint.every=0")
    launcher = kind(ranks)  # pyright: ignore[reportCallIssue]
    found = []
    for name, before in (("launched", launcher), ("alone", [sys.executable])):
        run = tmp_path / name / "runs" / "r"
        (tmp_path / name).mkdir()
        process = start(tmp_path / name, *arguments, launcher=before)
        wait_for_step(run, 12, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=warm.PATIENCE) != 0
        # A launcher may end before its ranks have saved.
        wait_until((run / "outcome.json").exists, "the outcome")
        outcome = json.loads((run / "outcome.json").read_text())
        assert outcome["status"] == "stopped", outcome
        assert outcome["exit_code"] == 75
        assert Store(run / "checkpoints", readonly=True).verify(outcome["step"]) == []
        assert events(run, "run.stopped")
        found.append(metrics(run)[:12])
    assert [step for step, _ in found[0]] == list(range(1, 13))
    assert_close(found[0], found[1], 1e-4)
    wait_until(lambda: shared_memory(launcher) == [], "the ranks have ended and left no memory")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + warm.PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
