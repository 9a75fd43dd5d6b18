"""Training data that is missing, corrupt, cut short or gone: before a run, between runs, in the middle of one. Row 23.

There are no data worker processes that could die or hang: each rank reads the run's own copy of its text by itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import harness.build
from harness.core.config import DataConfig, load_config
from harness.core.errors import DataError, ExitCode
from harness.core.facts import Window
from harness.core.protocols import Batch
from harness.data.batches import TokenBatches
from harness.data.text import read_text
from harness.data.tokens import prepare
from harness.precision.recipe import load_recipe
from harness.tools.start import Request
from harness.tools.train import train as train_here
from tests.support.runs import ROOT, TEXT, command, environment, events, metrics, train

pytestmark = pytest.mark.faults(23)

ACCIDENTS: dict[str, Callable[[Path], None]] = {
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "all but 40 bytes": lambda path: os.truncate(path, 40),
}


def config(path: Path, bad: str = "auto") -> DataConfig:
    return DataConfig.model_validate({"path": str(path), "context": 32, "bad": bad})


def batches(folder: Path) -> TokenBatches:
    return TokenBatches(prepare(config(TEXT), folder), 0, 32, 8, 2, 16)


def everything(source: TokenBatches) -> list[Batch]:
    """One epoch and the validation samples."""
    windows = [source.window(step) for step in range(-(-source.n_samples // 8))]
    return [
        batch for window in windows for batch in source.micro_batches(window, 0, 1)
    ] + source.validation(0, 1)


def test_batches_are_the_bytes_of_the_snapshot(tmp_path: Path) -> None:
    source = batches(tmp_path)
    text = np.fromfile(tmp_path / "data" / "train.bin", dtype=np.uint8)
    for index in range(5):
        window = source.window(index)
        for number, batch in enumerate(source.micro_batches(window, 0, 1)):
            for row, sample in enumerate(window.samples[2 * number : 2 * number + 2]):
                wanted = text[sample * 32 : sample * 32 + 33]
                assert batch["inputs"][row].tolist() == wanted[:-1].tolist()
                assert batch["targets"][row].tolist() == wanted[1:].tolist()


@pytest.mark.parametrize("accident", ACCIDENTS)
@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_a_snapshot_that_shrinks_under_a_run_is_named(
    tmp_path: Path, name: str, accident: str
) -> None:
    source = batches(tmp_path)
    everything(source)
    path = tmp_path / "data" / name
    ACCIDENTS[accident](path)
    with pytest.raises(DataError, match="cannot be read any longer") as caught:
        everything(source)
    (problem,) = caught.value.problems
    assert problem.where == str(path)
    assert "it had" in problem.why
    assert problem.fix


@pytest.mark.parametrize("how", ["deleted", "replaced", "folder moved"])
def test_a_snapshot_that_goes_away_does_not_hurt_a_run(tmp_path: Path, how: str) -> None:
    source = batches(tmp_path)
    before = everything(source)
    folder = tmp_path / "data"
    if how == "deleted":
        shutil.rmtree(folder)
    elif how == "replaced":
        (folder / "new").write_bytes(b"other")
        (folder / "new").replace(folder / "train.bin")
    else:
        folder.rename(tmp_path / "elsewhere")
    after = everything(source)
    assert all(
        (one[name] == two[name]).all()
        for one, two in zip(before, after, strict=True)
        for name in one | two
    )


class Shrinking(TokenBatches):
    """Its train.bin loses its second half when the window after `at` is read."""

    at = 5
    path: Path

    def micro_batches(self, window: Window, rank: int, world_size: int) -> list[Batch]:
        if window.index >= self.at:
            os.truncate(self.path, 40)
        return super().micro_batches(window, rank, world_size)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_here(*arguments: str) -> int:
    fixed = [f"data.path={TEXT}", "tracking.mlflow=false", "tracking.report=false"]
    resolved = load_config("tiny", [*fixed, *arguments], "fp32")
    return train_here(Request(resolved, load_recipe("fp32"), "tiny", "r", "auto", False, "python"))


def test_a_run_whose_text_shrinks_ends_by_name_and_goes_on_when_it_is_back(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = work / "runs" / "r"
    path = run / "data" / "train.bin"
    steps = ("train.steps=8", "checkpoint.every=2")
    with monkeypatch.context() as patch:
        patch.setattr(Shrinking, "path", path, raising=False)
        patch.setattr(harness.build, "TokenBatches", Shrinking)
        with pytest.raises(DataError, match=r"train\.bin"):
            run_here(*steps)
    assert path.stat().st_size == 40, "the fault fired"
    outcome = json.loads((run / "outcome.json").read_text())
    assert (outcome["status"], outcome["exit_code"]) == ("failed", ExitCode.USAGE)
    (failed,) = events(run, "run.failed")
    assert "it ends at byte 40" in failed["text"]
    with pytest.raises(DataError, match="40 bytes"):
        run_here(*steps)
    prepare(load_config("tiny", [f"data.path={TEXT}"]).data, work / "copy")
    shutil.copy(work / "copy" / "data" / "train.bin", path)
    assert run_here(*steps) == ExitCode.DONE
    assert [step for step, _ in metrics(run)] == list(range(1, 9))


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "corpus.json"])
def test_a_snapshot_file_that_is_gone_is_named_at_the_next_start(tmp_path: Path, name: str) -> None:
    prepare(config(TEXT), tmp_path)
    (tmp_path / "data" / name).unlink()
    if name == "corpus.json":
        assert prepare(config(TEXT), tmp_path).sha256, "an unfinished snapshot is made again"
        return
    with pytest.raises(DataError) as caught:
        prepare(config(TEXT), tmp_path)
    assert str(tmp_path / "data" / name) in str(caught.value)


FOLDER = {"good.txt": b"some text\n" * 200, "also.txt": b"more text\n" * 200}
BAD = {"nul.bin": b"a\0b", "latin.txt": b"\xe9t\xe9", "empty.txt": b"", "cut.txt": "é".encode()[:1]}


def source_folder(root: Path) -> Path:
    folder = root / "texts"
    folder.mkdir()
    for name, content in {**FOLDER, **BAD}.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("bad", ["auto", "skip", "fail"])
def test_files_that_are_no_text_are_skipped_and_recorded_or_fail_by_name(
    tmp_path: Path, bad: str
) -> None:
    folder = source_folder(tmp_path)
    if bad == "fail":
        with pytest.raises(DataError) as caught:
            prepare(config(folder, bad), tmp_path)
        assert {Path(problem.where).name for problem in caught.value.problems} == set(BAD)
        assert all("data.bad=skip" in problem.fix for problem in caught.value.problems)
        return
    data = prepare(config(folder, bad), tmp_path)
    assert {skip["name"] for skip in data.info["skipped"]} == set(BAD)
    assert {file["name"] for file in data.info["files"]} == set(FOLDER)
    assert len(TokenBatches(data, 0, 32, 8, 2, 16).facts()["skipped"]) == len(BAD)


@pytest.mark.parametrize("bad", ["auto", "skip", "fail"])
def test_files_that_cannot_be_read_fail_unless_told_to_skip(tmp_path: Path, bad: str) -> None:
    folder = source_folder(tmp_path)
    (tmp_path / "secret").write_text("not yours")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "inside").symlink_to(folder / "good.txt")
    if bad == "skip":
        text = read_text(folder, "skip")
        assert {document.name for document in text.documents} == set(FOLDER)
        assert {skip.name for skip in text.skipped} == {*BAD, "dangling", "loop", "out", "inside"}
        return
    with pytest.raises(DataError) as caught:
        read_text(folder, bad)  # pyright: ignore[reportArgumentType]
    names = {Path(problem.where).name for problem in caught.value.problems}
    assert names == {"dangling", "loop", "out"} | (set(BAD) if bad == "fail" else set())


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_closed_folders_are_named_or_skipped(public: Path) -> None:
    """As a user who is not root: root may enter everything."""
    folder = source_folder(public)
    (folder / "closed").mkdir()
    (folder / "closed" / "a.txt").write_text("unseen")
    (folder / "closed").chmod(0)
    script = (
        "import os, sys; from pathlib import Path; from harness.core.errors import DataError\n"
        "from harness.data.text import read_text\n"
        "os.getuid() or os.setuid(65534)\n"
        "print(sorted(skip.name for skip in read_text(Path(sys.argv[1]), 'skip').skipped))\n"
        "try: read_text(Path(sys.argv[1]))\n"
        "except DataError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], env=environment(PYTHONPATH=str(ROOT)), text=True,
        capture_output=True, timeout=300, check=True, cwd="/",
    )  # fmt: skip
    (folder / "closed").chmod(0o755)
    skipped, *message = done.stdout.splitlines()
    assert "'closed'" in skipped
    assert f"data.path: {folder / 'closed'}: cannot be read: Permission denied" in message[0]


def test_very_many_bad_files_fit_on_one_screen(tmp_path: Path) -> None:
    for number in range(500):
        (tmp_path / f"{number:03}.bin\x1b[2J").write_bytes(b"\0")
    with pytest.raises(DataError) as caught:
        read_text(tmp_path, "fail")
    text = str(caught.value)
    assert "480 more like these" in text
    assert len(text.splitlines()) < 70
    assert "\x1b" not in text


@pytest.mark.slow
def test_a_running_process_survives_the_loss_of_its_text_and_says_which(
    tmp_path: Path, figure: Callable[..., None]
) -> None:
    """The kernel kills who reads a map of a file that was cut (SIGBUS): no message, no outcome.json."""
    process = subprocess.Popen(
        command("--name", "r", "--recipe", "fp32", "train.steps=100000", "checkpoint.every=5"), cwd=tmp_path,
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    run = tmp_path / "runs" / "r"
    deadline = time.monotonic() + 120
    while not list((run / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    os.truncate(run / "data" / "train.bin", 40)
    begin = time.monotonic()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == ExitCode.USAGE, output
    assert "train.bin: the run's copy of its text cannot be read any longer" in output
    assert "Traceback" not in output
    assert json.loads((run / "outcome.json").read_text())["status"] == "failed"
    figure(
        23,
        "from the text's loss until the run ended with its name",
        f"{time.monotonic() - begin:.1f} s",
    )
    again = train(tmp_path, "--name", "r", "--recipe", "fp32", "train.steps=100000")
    assert again.returncode == ExitCode.USAGE
    assert "train.bin: the run's copy of its text is damaged" in again.stdout
