"""`python -m benchmarks.proof` as a user starts it: without a card, as a rehearsal, and its rows on fake cards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_proof_page import check

from benchmarks.proof import page
from benchmarks.proof.children import ROOT
from benchmarks.proof.registry import ROWS
from benchmarks.proof.training import SIZES
from harness.core.config import load_config
from tests.support import paper

HERE = Path(__file__).parent
MINUTES = 600


def start(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | environ
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.proof", *arguments],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def proof(*arguments: str, **environ: str) -> tuple[int, str]:
    process = start(*arguments, **environ)
    output, _ = process.communicate(timeout=MINUTES)
    return process.returncode, output


@pytest.mark.slow
def test_without_a_card_it_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    out, temporary = tmp_path / "out", tmp_path / "tmp"
    temporary.mkdir()
    code, output = proof("--out", str(out), TMPDIR=str(temporary))
    assert code == 4, output
    assert "no card that can be used" in output
    assert "why: CUDA_VISIBLE_DEVICES hides every card" in output
    assert "--rehearse" in output
    assert list(out.iterdir()) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_short_rehearsal(tmp_path: Path) -> None:
    """In an old locale, from a terminal that knows ASCII alone."""
    out = tmp_path / "a folder"
    rows = ["machine", "launch", "kernels"]
    code, output = proof(
        "--rehearse",
        "--only",
        *rows,
        "--out",
        str(out),
        LC_ALL="C",
        PYTHONIOENCODING="ascii",
        PYTHONUTF8="0",
    )
    assert code == 0, output
    assert page.REHEARSAL in output
    assert [path.name for path in sorted(out.iterdir())] == [
        "rehearsal_cpu.json",
        "rehearsal_cpu.md",
    ]
    found = json.loads((out / "rehearsal_cpu.json").read_text())
    check(found)
    assert found["rehearsal"] is True
    assert found["complete"] is False, "only some rows"
    assert found["card"] is None
    assert {row["name"]: row["status"] for row in found["rows"]} == dict(
        zip(rows, ("passed", "passed", "not run"), strict=True)
    )
    assert "needs a card" in found["rows"][2]["reason"]
    assert page.REHEARSAL in (out / "rehearsal_cpu.md").read_text()
    text = (out / "rehearsal_cpu.json").read_text() + (out / "rehearsal_cpu.md").read_text()
    assert str(ROOT) not in text
    assert str(tmp_path) not in text, "the folder was on the command line"


@pytest.mark.nightly
def test_a_record_goes_on_with_the_rows_that_it_lacks(tmp_path: Path) -> None:
    code, output = proof("--rehearse", "--only", "launch", "--out", str(tmp_path))
    assert code == 0, output
    record = tmp_path / "rehearsal_cpu.json"
    first = json.loads(record.read_text())

    more = ("--rehearse", "--out", str(tmp_path), "--resume", str(record), "--only", "kernels")
    code, output = proof(*more)
    assert code == 0, output
    second = json.loads(record.read_text())
    check(second)
    found = {row["name"]: row for row in second["rows"]}
    assert list(found) == ["machine", "launch", "kernels"]
    assert found["launch"] == first["rows"][1], "it did not run again"
    assert [each["command"] for each in second["earlier"]] == [first["command"]]

    record.write_text(json.dumps(first | {"source": first["source"] | {"sha256": "0" * 64}}))
    before = record.read_bytes()
    code, output = proof(*more)
    assert code == 2, output
    assert "another code" in output
    assert record.read_bytes() == before


@pytest.mark.nightly
def test_an_interrupted_resume_keeps_the_rows_that_had_passed(tmp_path: Path) -> None:
    code, output = proof("--rehearse", "--only", "launch", "--out", str(tmp_path))
    assert code == 0, output
    record = tmp_path / "rehearsal_cpu.json"
    launch = json.loads(record.read_text())["rows"][1]

    process = start("--rehearse", "--out", str(tmp_path), "--resume", str(record))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("machine"):
            break
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=MINUTES)
    assert process.returncode == 1, rest
    found = json.loads(record.read_text())
    assert not found["complete"]
    assert launch in found["rows"]


@pytest.mark.nightly
def test_a_whole_rehearsal(tmp_path: Path) -> None:
    code, output = proof("--rehearse", "--minutes", "60", "--out", str(tmp_path))
    assert code == 0, output
    found = json.loads((tmp_path / "rehearsal_cpu.json").read_text())
    check(found)
    assert found["complete"]
    status = {row["name"]: row["status"] for row in found["rows"]}
    assert list(status) == [row.name for row in ROWS]
    run = {
        "machine",
        "profiles",
        "as_shipped",
        "long_step",
        "vocabulary",
        "gemm",
        "bandwidth",
        "attention",
        "launch",
        "native",
        "native_compiled",
        "watching",
        "snapshots",
        "saves",
        "recovery",
    }
    assert {name for name in run if status[name] != "passed"} == set()
    assert {name for name, each in status.items() if each == "failed"} == set()
    rows = {row["name"]: row for row in found["rows"]}
    assert all(row["reason"] for row in rows.values() if row["status"] == "not run")
    assert "needs an NVIDIA GPU" in rows["tests"]["reason"], "pytest's own reason"
    contenders = rows["native"]["figures"]["contenders"]
    assert (contenders["fp8"]["rung"], contenders["16 bit"]["rung"]) == (
        "native:fp8",
        "autocast:bf16",
    )
    assert 0 < contenders["fp8"]["ratio"]["min"] <= contenders["fp8"]["ratio"]["median"]
    profiled = rows["profiles"]["figures"]
    assert {"bf16", "bf16 compiled", "native", "native compiled"} <= profiled["contenders"].keys()
    assert "transformer_engine" in profiled["reasons"]["te"]
    for name in ("watching", "snapshots"):
        assert rows[name]["figures"]["snapshots"], "what is timed as shipped takes snapshots"


def test_nowhere_to_write_is_said_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, output = proof("--rehearse", "--out", str(tmp_path / "file" / "under"))
    assert code == 2
    assert "--out" in output
    assert "machine" not in output


def test_unknown_rows_and_times_are_refused() -> None:
    for arguments in (["--only", "gem"], ["--minutes", "0"], ["--minutes", "nan"]):
        code, output = proof(*arguments)
        assert code == 2, output


@pytest.mark.slow
def test_an_interrupt_ends_the_row_and_keeps_what_there_is(tmp_path: Path) -> None:
    process = start("--rehearse", "--out", str(tmp_path))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("machine"):
            break
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=MINUTES)
    assert process.returncode == 1, rest
    found = json.loads((tmp_path / "rehearsal_cpu.json").read_text())
    assert not found["complete"]
    assert len(found["rows"]) < len(ROWS)


def on_paper(card: str, row: str, folder: Path) -> dict[str, Any]:
    target = next(each.target for each in ROWS if each.name == row)
    return paper.measured([str(HERE / "proof_on_paper.py"), card, target, str(folder)], folder)


@pytest.mark.nightly
def test_what_a_card_is_called_on_paper(tmp_path: Path) -> None:
    found = on_paper("H100", "machine", tmp_path)
    card = found["figures"]["card"]
    assert (card["name"], card["capability"], card["mig"]) == (
        "NVIDIA H100 80GB HBM3",
        [9, 0],
        False,
    )
    assert not found["figures"]["problem"]


@pytest.mark.parametrize(
    ("card", "kinds"),
    [
        ("H100", {"bf16", "fp16", "fp8", "fp8_precise", "fp8_gradient"}),
        pytest.param("A100-80GB", {"bf16", "fp16"}, marks=pytest.mark.nightly),
        pytest.param("T4", {"fp16"}, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.slow
def test_gemms_on_paper(card: str, kinds: set[str], tmp_path: Path) -> None:
    found = on_paper(card, "gemm", tmp_path)["figures"]
    assert set(found["flops"]) == kinds
    assert set(found["reasons"]) == {"bf16", "fp16", "fp8", "fp8_precise", "fp8_gradient"} - kinds
    assert found["size"] == 8192


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("card", "kernel"), [("H100", "FLASH_ATTENTION"), ("T4", "EFFICIENT_ATTENTION")]
)
def test_attention_on_paper(card: str, kernel: str, tmp_path: Path) -> None:
    assert on_paper(card, "attention", tmp_path)["figures"]["kernel"] == kernel


@pytest.mark.nightly
@pytest.mark.parametrize("row", ["bandwidth", "launch", "copies"])
def test_the_rest_of_the_card_on_paper(row: str, tmp_path: Path) -> None:
    assert on_paper("H100", row, tmp_path)["summary"]


@pytest.mark.parametrize(
    ("card", "row", "width"),
    [("H100", "native", 4096), ("L4", "native", 2048), ("T4", "watching", 1024)],
)
@pytest.mark.nightly
def test_steps_on_paper(card: str, row: str, width: int, tmp_path: Path) -> None:
    """The largest size whose states fit the card, through the trainer's own path."""
    found = on_paper(card, row, tmp_path)
    assert not found["failed"]
    assert f"width {width}" in found["figures"]["size"]
    if row != "watching":
        peaks = {
            name: contender["peak"] / 2**30
            for name, contender in found["figures"]["contenders"].items()
        }
        state = 16 * SIZES[0 if width == 4096 else 1].parameters / 2**30
        assert all(state < peak < 1.6 * state for peak in peaks.values()), peaks


@pytest.mark.nightly
@pytest.mark.parametrize("row", ["long_step", "vocabulary"])
def test_two_contenders_of_a_larger_step_fit_an_h100_on_paper(row: str, tmp_path: Path) -> None:
    """At the largest size, while the other one keeps its weights and moments."""
    figures = on_paper("H100", row, tmp_path)["figures"]
    assert figures["size"].startswith("8 layers of width 4096")
    assert figures["too_large"] == []
    at_rest = 12 * figures["model"]["parameters"]
    for contender in figures["contenders"].values():
        assert contender["peak"] + at_rest < 72 * 2**30


@pytest.mark.nightly
def test_no_step_waits_on_paper_and_the_detector_is_put_back(tmp_path: Path) -> None:
    found = on_paper("H100", "syncs", tmp_path)
    ran = {name for name, why in found["figures"]["rungs"].items() if not why}
    assert {
        "16 bit, statistics at every step",
        "native, statistics at every step",
        "native, statistics off",
    } <= ran
    assert found["sync_modes"] == ["error", "default"] * len(ran)
    assert not found["failed"]


@pytest.mark.nightly
def test_saves_on_paper(tmp_path: Path) -> None:
    assert on_paper("H100", "saves", tmp_path)["figures"]["saves"] >= 2


def test_the_largest_size_is_the_shipped_config() -> None:
    config = load_config("llama3_8b_8layers")
    assert config.model.args == {**SIZES[0].args, "tied": False}
    assert config.data.context == SIZES[0].context
