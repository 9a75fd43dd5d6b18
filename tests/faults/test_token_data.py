"""Token ids on disk that change, rot, or hang, and a preparation that is killed: before a run, between runs, within."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from harness.core.errors import ExitCode
from harness.data.batches import TokenBatches
from harness.data.blocks import BLOCK, SAMPLED
from harness.data.prefetch import Prefetched, Watch
from harness.data.tokens import prepare
from tests.support.runs import ROOT, environment, events, metrics, train
from tests.unit.data.token_files import config, headerless, some_ids

pytestmark = pytest.mark.faults(23)

BLOCKS = 40


def run(
    folder: Path, *arguments: str, name: str = "r", steps: int = 8
) -> subprocess.CompletedProcess[str]:
    fixed = [
        "--recipe",
        "fp8_hybrid",
        "--name",
        name,
        "data.path=train.bin",
        f"train.steps={steps}",
        "checkpoint.every=4",
    ]
    return train(folder, *fixed, "data.val_samples=2", "train.lr=1e-3", *arguments)


def corpus(folder: Path) -> Path:
    """BLOCKS blocks of ids, and a short validation split."""
    headerless(folder / "val.bin", some_ids(500))
    some_ids(BLOCKS * BLOCK // 2).astype("<u2").tofile(folder / "train.bin")
    return folder / "train.bin"


def rot(path: Path, blocks: set[int]) -> None:
    """Flip a bit in each of `blocks`, as a disk does it: with neither the time nor the inode changed."""
    status = path.stat()
    with path.open("r+b") as stream:
        for number in blocks:
            place = number * BLOCK + 4321
            stream.seek(place)
            byte = stream.read(1)[0]
            stream.seek(place)
            stream.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def looked_at() -> set[int]:
    """Blocks that a start hashes of an untouched file."""
    return {place * (BLOCKS - 1) // (SAMPLED - 1) for place in range(SAMPLED)}


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    headerless(tmp_path / "train.bin", some_ids(9000))
    whole = run(tmp_path)
    assert whole.returncode == ExitCode.DONE, whole.stdout
    runs = tmp_path / "runs"
    shutil.copytree(runs / "r", runs / "s")
    shutil.rmtree(runs / "s" / "checkpoints" / "step-00000008")
    for name in ("outcome.json", "report.html"):
        (runs / "s" / name).unlink(missing_ok=True)
    again = run(tmp_path, name="s")
    assert again.returncode == ExitCode.DONE, again.stdout
    assert metrics(runs / "s")[-4:] == metrics(runs / "r")[-4:]
    assert [step for step, _ in metrics(runs / "s")][-4:] == [5, 6, 7, 8]
    for name in ("model.safetensors", "optimizer.safetensors", "fp8.safetensors"):
        one, other = (
            (runs / each / "checkpoints" / "step-00000008" / name).read_bytes() for each in "rs"
        )
        assert one == other, name


@pytest.mark.slow
def test_a_resume_refuses_larger_ids_and_another_vocabulary(tmp_path: Path) -> None:
    headerless(tmp_path / "train.bin", some_ids(9000))
    small = run(tmp_path, "model.args.vocab=32")
    assert small.returncode == ExitCode.USAGE
    assert "a vocabulary of 32 is too small" in small.stdout
    assert "token ids up to 56" in small.stdout
    assert run(tmp_path, steps=4).returncode == ExitCode.DONE
    assert "vocab: 64" in (tmp_path / "runs" / "r" / "config.yaml").read_text()
    headerless(tmp_path / "train.bin", some_ids(9000, 90))
    refused = run(tmp_path)
    assert refused.returncode == ExitCode.USAGE
    assert "train.bin: is not what this run began with" in refused.stdout
    assert "blocks of 262144 bytes differ: 0" in refused.stdout
    start = ["--resume", str(tmp_path / "runs" / "r" / "checkpoints" / "step-00000004")]
    other = run(tmp_path, *start, name="new")
    assert other.returncode == ExitCode.USAGE
    assert "a vocabulary of 64 is too small" in other.stdout


@pytest.mark.slow
@pytest.mark.parametrize("bad", ["skip", "fail"])
def test_blocks_that_rot_are_named_and_skipped_or_halt(tmp_path: Path, bad: str) -> None:
    path = corpus(tmp_path)
    settings = (f"data.bad={bad}", "guard.max_consecutive_skips=50")
    assert run(tmp_path, *settings, steps=4).returncode == ExitCode.DONE
    rotten = set(range(BLOCKS)) - looked_at()
    rot(path, rotten)
    done = run(tmp_path, *settings)
    folder = tmp_path / "runs" / "r"
    found = events(folder, "data.unreadable")
    assert found, f"the fault fired\n{done.stdout}"
    assert str(path) in found[0]["text"]
    assert "differ from their hash" in found[0]["text"]
    number = found[0]["samples"][0]
    assert f"sample {number}" in found[0]["text"] or f"samples {number}" in found[0]["text"]
    begin = number * 64 * 2
    assert {begin // BLOCK, (begin + 129) // BLOCK} & rotten
    if bad == "fail":
        assert done.returncode == ExitCode.HALTED
        return
    assert done.returncode == ExitCode.DONE, done.stdout
    applied = dict(metrics(folder, "train/step_applied"))
    assert {event["step"] for event in found} == {
        step for step, value in applied.items() if value == 0.0
    }


@pytest.mark.slow
def test_a_rotten_validation_split_ends_the_run_by_name(tmp_path: Path) -> None:
    headerless(tmp_path / "train.bin", some_ids(9000))
    some_ids(BLOCKS * BLOCK // 2).astype("<u2").tofile(tmp_path / "val.bin")
    assert run(tmp_path, steps=4).returncode == ExitCode.DONE
    rot(tmp_path / "val.bin", set(range(BLOCKS)) - looked_at())
    done = run(tmp_path, "data.val_samples=32", steps=4, name="new")
    assert done.returncode == ExitCode.DONE, "a new run hashes what there is"
    rot(tmp_path / "val.bin", set(range(BLOCKS)) - looked_at())
    again = run(tmp_path, "data.val_samples=32", steps=6, name="new")
    assert again.returncode == ExitCode.USAGE, again.stdout
    assert str(tmp_path / "val.bin") in again.stdout


def test_a_read_that_hangs_is_named(tmp_path: Path) -> None:
    watch = Watch()
    headerless(tmp_path / "train.bin", some_ids(9000))
    data = prepare(config(tmp_path / "train.bin"), tmp_path / "run", reading=watch)
    release = threading.Event()

    class Hanging(TokenBatches):
        def micro_batches(self, window, rank, world_size):
            if window.index == 3:
                watch(str(tmp_path / "train.bin"))
                release.wait(60)
                watch(None)
            return super().micro_batches(window, rank, world_size)

    source = Prefetched(Hanging(data, 0, 16, 8, 4, 8), watch)
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        release.set()

    source.report, source.first_report = tell, 0.2
    plain = TokenBatches(data, 0, 16, 8, 4, 8)
    for index in range(6):
        made = source.micro_batches(source.window(index), 0, 1)
        wanted = plain.micro_batches(plain.window(index), 0, 1)
        assert all(
            (one["inputs"] == other["inputs"]).all()
            for one, other in zip(made, wanted, strict=True)
        )
    assert told, "the fault fired"
    assert "window 3 has been waited for" in told[0]
    assert str(tmp_path / "train.bin") in told[0]


PREPARE = [
    sys.executable,
    "-m",
    "harness.cli",
    "data",
    "prepare",
    "docs.jsonl",
    "--processes",
    "2",
    "--out",
]


def documents(folder: Path) -> None:
    random = np.random.default_rng(0)
    words = ["".join(map(chr, random.integers(97, 123, 6))) for _ in range(500)]
    with (folder / "docs.jsonl").open("w") as stream:
        for _ in range(60_000):
            stream.write(json.dumps({"text": " ".join(random.choice(words, 120))}) + "\n")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".idx")
    }


@pytest.mark.nightly
def test_a_killed_preparation_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    documents(tmp_path)
    variables = environment(PYTHONPATH=str(ROOT))
    whole = subprocess.run([*PREPARE, "whole"], cwd=tmp_path, env=variables, capture_output=True)
    assert whole.returncode == 0, whole.stderr
    kills, output = 0, ""
    for _ in range(50):
        process = subprocess.Popen(
            [*PREPARE, "killed"], cwd=tmp_path, env=variables, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        before = len(list((tmp_path / "killed").glob("done-*.json")))
        while (
            process.poll() is None
            and len(list((tmp_path / "killed").glob("done-*.json"))) <= before
        ):
            time.sleep(0.01)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        output, _ = process.communicate()
        if process.returncode == 0:
            break
    assert kills >= 2, "the fault fired"
    assert "shards are done already" in output
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    described = [
        json.loads((tmp_path / name / "dataset.json").read_bytes()) for name in ("killed", "whole")
    ]
    assert described[0]["sha256"] == described[1]["sha256"]
    assert not list((tmp_path / "killed").glob(".*"))
