"""The command line among files of an attacker. Row 24 of the fault matrix."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import JSON, SCREEN, SECONDS, YAML, Trap

from harness.core.errors import ExitCode
from tests.support.runs import ROOT, TRAIN, environment, metrics, train

pytestmark = [pytest.mark.faults(24), pytest.mark.slow]

MEMORY = 2 << 30


def commands(folder: Path) -> list[list[str]]:
    """Command lines that an attacker would like to see run, each with a file of his."""
    canary = str(folder / "canary").encode()
    names = ("apply", "bomb", "deep flow", "hexadecimal", "many keys")
    for name in names:
        (folder / f"{name}.yaml").write_bytes(YAML[name][0].replace(b"CANARY", canary))
    with (folder / "large.yaml").open("wb") as stream:
        stream.truncate(100 << 20)
    os.mkfifo(folder / "pipe.yaml")
    files = [str(folder / f"{name}.yaml") for name in (*names, "large", "pipe")]
    return [
        *(["--config", file] for file in files),
        *(["--recipe", file] for file in files[:1]),
        [
            f"model.args={YAML['apply'][0].decode().removeprefix('train: ').replace('CANARY', canary.decode())}"
        ],
        ["--config", "tiny", "data.path=\x1b[2J"],
    ]


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def test_the_command_line_survives_hostile_files(
    tmp_path: Path, figure: Callable[..., None]
) -> None:
    lines, worst = commands(tmp_path), 0.0
    for line in lines:
        before = os.times()
        done = subprocess.run(
            [sys.executable, str(TRAIN), *line], cwd=tmp_path, env=environment(), capture_output=True, text=True,
            timeout=60, check=False, preexec_fn=limited,
        )  # fmt: skip
        after = os.times()
        used = (
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
        worst = max(worst, used)
        assert done.returncode == ExitCode.USAGE, (line, done.stderr[-2000:])
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) <= SCREEN
        assert used < SECONDS
    assert not (tmp_path / "canary").exists()
    assert not (tmp_path / "runs").exists(), "refused before anything is written"
    figure(
        24,
        "hostile configs, recipes and overrides refused with exit 2, no traceback",
        (len(lines), len(lines)),
    )
    figure(
        24,
        "processor time to refuse a hostile file, start-up included",
        f"{worst:.1f} s at most",
        len(lines),
    )


ADVICE = (
    "outcome.json",
    "plan.json",
    "checkpoints/good.json",
    "flight/step-00000003/record.json",
    "shipper.json",
)


def test_a_run_resumes_among_hostile_advice(tmp_path: Path, figure: Callable[..., None]) -> None:
    undisturbed, attacked = tmp_path / "a", tmp_path / "b"
    for folder in (undisturbed, attacked):
        folder.mkdir()
        assert (
            train(
                folder, "--name", "r", "--recipe", "fp32", "train.steps=4", "checkpoint.every=2"
            ).returncode
            == 0
        )
    run, canary = attacked / "runs" / "r", attacked / "canary"
    contents = [*JSON.values(), pickle.dumps(Trap(canary))]
    for number, name in enumerate(ADVICE):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(contents[number])
    with (run / "journal.jsonl").open("ab") as journal:
        journal.writelines(content + b"\n" for content in contents)
    (run / "flight" / "step-..").mkdir()
    (run / "checkpoints" / "step-00000009").symlink_to("/etc")
    (run / "plan.json").unlink()
    os.mkfifo(run / "plan.json")
    for folder in (undisturbed, attacked):
        done = train(
            folder, "--name", "r", "--recipe", "fp32", "train.steps=6", "checkpoint.every=2"
        )
        assert done.returncode == ExitCode.DONE, done.stdout
        assert "Traceback" not in done.stdout
    assert metrics(run) == metrics(undisturbed / "runs" / "r")
    assert json.loads((run / "outcome.json").read_text())["step"] == 6
    assert not canary.exists()
    told = "hostile files that a resume ignores, to end as if undisturbed"
    figure(24, told, (len(ADVICE), len(ADVICE)))


@pytest.mark.nightly
def test_the_tools_survive_a_hostile_run_folder(tmp_path: Path) -> None:
    assert train(tmp_path, "--name", "r", "--recipe", "fp8_hybrid", "train.steps=3").returncode == 0
    run, canary = tmp_path / "runs" / "r", tmp_path / "canary"
    names = (
        "outcome.json",
        "plan.json",
        "incidents.json",
        "checkpoints/good.json",
        "data/corpus.json",
    )
    for name in names:
        for content in (*JSON.values(), pickle.dumps(Trap(canary))):
            (run / name).write_bytes(content)
        (run / name).write_bytes(b'{"layers": [5], "status": {}, "reason": []}')
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    (checkpoint / "fp8.safetensors").unlink()
    os.mkfifo(checkpoint / "fp8.safetensors")
    for line in (["inspect"], ["explain"], ["report"], ["verify"], ["replay", "--step", "2"]):
        done = subprocess.run(
            [sys.executable, "-m", "harness.cli", line[0], str(run), *line[1:]], cwd=tmp_path,
            env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode in (0, 1, 2), (line, done.stderr)
        assert "Traceback" not in done.stderr, (line, done.stderr)
    assert not canary.exists()


def test_a_hostile_checkpoint_is_refused_as_a_start(tmp_path: Path) -> None:
    assert train(tmp_path, "--name", "r", "--recipe", "fp32", "train.steps=2").returncode == 0
    (good,) = (tmp_path / "runs" / "r" / "checkpoints").glob("step-*")
    canary = tmp_path / "canary"
    (good / "model.safetensors").write_bytes(pickle.dumps(Trap(canary)))
    (good / "model.pt").write_bytes(pickle.dumps(Trap(canary)))
    for target in (good, Path("/dev/zero"), Path("../../../etc"), tmp_path / "pipe"):
        done = train(tmp_path, "--name", "other", "--recipe", "fp32", "--resume", str(target))
        assert done.returncode == ExitCode.USAGE, done.stdout
        assert "Traceback" not in done.stdout
    assert not canary.exists()
