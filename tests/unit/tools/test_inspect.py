"""`harness inspect` on runs made up here."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from harness.cli import app
from harness.core.errors import ConfigError
from harness.core.screen import Screen
from harness.report.inspect import fp8_proof, inspect, sparkline
from harness.tracking.history import RunHistory
from harness.tracking.journal import Journal

REPO = Path(__file__).resolve().parents[3]
SLOTS = [
    f"blocks.{i:02d}.up.{role}" for i in (0, 10) for role in ("input", "weight", "grad_output")
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "r"
    with Journal(folder / "journal.jsonl") as journal:
        for step in (1, 2, 3):
            row = {f"fp8_amax/{slot}": float(step + place) for place, slot in enumerate(SLOTS)}
            row |= {f"fp8_saturation/{slot}": 0.5 + step / 8 for slot in SLOTS}
            row |= {f"fp8_scale/{slot}": 448.0 / step for slot in SLOTS}
            if step == 2:
                row |= {f"fp8_underflow/{slot}": 0.0025 for slot in SLOTS}
            row |= {f"fp8_sqnr_db/{slot}": 31.6 if step == 2 else math.nan for slot in SLOTS}
            journal.metrics(step, row)
        journal.event(
            2,
            "precision.demote",
            text="blocks.10.up to BF16 (input saturation 2.1)",
            demote={},
            promote={},
        )
        journal.event(3, "precision.switched", demote=["blocks.10.up"], promote=["blocks.00.up"])
    return folder


def shown(run_dir: Path, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    assert inspect(run_dir, Screen(file=stream, width=140)) == 0
    stream.flush()
    return raw.getvalue().decode(encoding).splitlines()


def save_checkpoint(run_dir: Path, step: int, history: np.ndarray, names: list[str]) -> Path:
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    save_file(
        {"history": history, "scale": np.ones(history.shape[1], np.float32)},
        folder / "fp8.safetensors",
    )
    (folder / "state.json").write_text(
        json.dumps({"step": step, "parts": {"fp8": {"slots": names}}})
    )
    return folder


def test_every_slot_has_its_last_measured_figures(run_dir: Path) -> None:
    lines = shown(run_dir)
    rows = [line.split() for line in lines if line.startswith("blocks.")]
    assert [row[0] for row in rows] == SLOTS
    assert rows[0][1:6] == ["3", "149.3", "0.875", "0.25%", "31.6"], (
        "underflow and SQNR: the last step that had them"
    )
    assert rows[0][6] == "▁▅█"
    assert "step 2: blocks.10.up to BF16 (input saturation 2.1)" in lines
    assert "step 3: blocks.10.up now in BF16; blocks.00.up back in FP8" in lines


def test_histories_come_from_the_newest_readable_checkpoint(run_dir: Path) -> None:
    # L=6 with two updates yet to come: row 0 gathers the next amax, rows 1 to 5 run from oldest to newest.
    history = np.zeros((6, 6), np.float32)
    history[0] = 9.0
    history[3:, :] = np.array([1.0, 3.0, 2.0], np.float32)[:, None]
    save_checkpoint(run_dir, 20, history, list(reversed(SLOTS)))
    damaged = save_checkpoint(run_dir, 30, history * 2, SLOTS)
    (damaged / "fp8.safetensors").write_bytes(b"damaged")
    lines = shown(run_dir)
    assert "checkpoint of step 20 (cannot be read: step-00000030)" in " ".join(lines[:2])
    assert {line.split()[-1] for line in lines if line.startswith("blocks.")} == {"▁█▅"}


def test_a_terminal_without_block_characters(run_dir: Path) -> None:
    rows = [line.split() for line in shown(run_dir, "ascii") if line.startswith("blocks.")]
    assert rows[0][6] == "_+@"


def test_a_run_without_fp8_says_so(tmp_path: Path) -> None:
    with Journal(tmp_path / "r" / "journal.jsonl") as journal:
        journal.metrics(1, {"train/loss": 1.0})
    assert shown(tmp_path / "r")[0].startswith("No FP8 slots")


def test_a_silent_gradient_is_right_only_for_a_frozen_layer(tmp_path: Path) -> None:
    """The field says so, not the word: a layer called "frozen" may be one that is trained."""
    silent = [f"{layer}.grad_output" for layer in ("a.frozen", "b")]
    layers: list[dict[str, object]] = []
    for name, frozen in (("a.frozen", False), ("b", True)):
        layers.append(
            {
                "module": name,
                "precision": "fp8",
                "backend": "native",
                "reason": f"converted, also known as {name}",
                "frozen": frozen,
            }
        )
    with Journal(tmp_path / "r" / "journal.jsonl") as journal:
        row: dict[str, float] = {}
        for layer in ("a.frozen", "b"):
            for role in ("input", "weight", "grad_output"):
                slot = f"{layer}.{role}"
                row[f"fp8_amax/{slot}"] = 0.0 if slot in silent else 1.0
        journal.metrics(1, row)
    plan = {"requested": "r", "resolved": "native:fp8", "keeps_amax": True, "layers": layers}
    (tmp_path / "r" / "plan.json").write_text(json.dumps(plan))

    proof = fp8_proof(RunHistory.read(tmp_path / "r"))
    assert "4 of 6 FP8 slots saw a nonzero amax; none seen by: a.frozen.grad_output;" in proof
    assert "no gradient goes back to b.grad_output: frozen" in proof


def test_no_run_names_the_near_match(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r'did you mean "r"'):
        inspect(run_dir.parent / "rr", Screen(file=io.StringIO()))


def test_a_name_that_harness_runs_lists_is_answered_with_its_folder(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_dir.parent)
    (run_dir.parent / "runs").mkdir()
    run_dir.rename(run_dir.parent / "runs" / "mine")
    with pytest.raises(ConfigError, match=r"fix: give its folder: runs/mine$"):
        inspect(Path("mine"), Screen(file=io.StringIO()))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([1.0, 2.0, 3.0], "▁▅█"),
        ([2.0, 2.0], "▄▄"),
        ([0.0, math.inf, 7.0], "▁ █"),
        ([math.nan], ""),
    ],
)
def test_sparkline(values: list[float], expected: str) -> None:
    assert sparkline(values) == expected


def test_a_pipe_has_room_for_names(tmp_path: Path) -> None:
    slot = f"model.layers.00.{'mlp.' * 4}down_proj.grad_output"
    with Journal(tmp_path / "r" / "journal.jsonl") as journal:
        for step in range(1, 5):
            row = {f"fp8_{name}/{slot}": float(step) for name in ("amax", "scale", "saturation")}
            journal.metrics(step, row)
    told = CliRunner().invoke(app, ["inspect", str(tmp_path / "r")])
    (line,) = [line for line in told.stdout.splitlines() if line.startswith("model.")]
    assert line.split()[0] == slot
    assert line.split()[-1] == sparkline([1, 2, 3, 4])


def test_it_starts_without_torch(run_dir: Path) -> None:
    code = (
        "import sys, pathlib, rich.console; from harness.report.inspect import inspect;"
        "inspect(pathlib.Path(sys.argv[1]), rich.console.Console());"
        "print('torch' in sys.modules, 'mlflow' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run_dir)], cwd=REPO, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "False False", done.stderr
