"""The summary says what the journal shows, the uncomfortable parts too."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.report import tool
from harness.report.inspect import summary
from harness.tracking.journal import Journal, Position

LAYERS = ("blocks.0.up", "blocks.1.up")
SLOTS = [f"blocks.0{i}.up.{role}" for i in (0, 1) for role in ("input", "weight", "grad_output")]


def plan(backend: str = "native") -> dict[str, Any]:
    layers = [
        {
            "module": name,
            "kind": "Linear",
            "precision": "fp8",
            "backend": backend,
            "reason": "",
            "shape": [32, 32],
        }
        for name in LAYERS
    ]
    return {
        "recipe": "fp8_hybrid",
        "tier": "CPU",
        "requested": "fp8",
        "resolved": f"{backend}:fp8",
        "effective": "fp8: 2 modules",
        "keeps_amax": backend != "torchao",
        "rungs": [],
        "layers": layers,
    }


def make_run(
    run_dir: Path, slots: list[str], silent: tuple[str, ...] = (), backend: str = "native"
) -> Path:
    with Journal(run_dir / "journal.jsonl") as journal:
        journal.note("run", tags={}, params={}, data={"unigram_bits_per_byte": 4.0})
        for step in range(1, 11):
            rate = 1000.0 * step
            applied = float(step not in (4, 5))
            journal.metrics(
                step,
                {
                    "train/step_applied": applied,
                    "train/tokens_per_second": rate,
                    "guard/rollbacks": 1.0,
                },
            )
            journal.metrics(
                step, {f"fp8_amax/{slot}": 0.0 if slot in silent else 1.0 for slot in slots}
            )
        journal.event(4, "nonfinite.skip")
        journal.event(5, "nonfinite.skip")
        journal.event(8, "precision.switched", demote=["blocks.01.up"], promote=[])
        journal.metrics(10, {"val/loss": 3.0 * math.log(2)})
    (run_dir / "plan.json").write_text(json.dumps(plan(backend)))
    (run_dir / "outcome.json").write_text(
        json.dumps({"status": "done", "reason": "10 steps", "step": 10})
    )
    return run_dir


def told(run_dir: Path) -> dict[str, str]:
    stream = io.StringIO()
    Console(file=stream, width=300).print(summary(run_dir))
    pairs = [line.split("  ", 1) for line in stream.getvalue().splitlines() if line.strip()]
    return {label: text.strip() for label, text in pairs}


def test_loss_against_the_unigram_entropy_and_counts(tmp_path: Path) -> None:
    lines = told(make_run(tmp_path / "r", SLOTS))
    assert lines["outcome"] == "done at step 10: 10 steps"
    assert lines["loss"] == (
        "validation 3.0000 bits per byte (2.0794 nats); unigram entropy of the corpus 4.0000, ratio 0.750"
    )
    assert lines["precision"] == "requested fp8, resolved native:fp8, effective fp8: 2 modules"
    assert lines["steps"] == "10: 8 applied, 2 skipped; rollbacks 1; demotions 1 (blocks.1.up)"
    assert lines["speed"] == "5,500 tokens/s (median)"
    assert lines["events"] == "nonfinite.skip x 2, precision.switched x 1"


def test_memory_and_mfu_stand_beside_the_speed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", SLOTS)
    with Journal(run / "journal.jsonl") as journal:
        for step, size, mfu in ((11, 1.5, 0.30), (12, 2.25, 0.42), (13, 2.25, 0.40)):
            journal.metrics(step, {"train/peak_memory_gib": size, "train/mfu": mfu})
    expected = (
        "5,500 tokens/s (median), MFU 40.0% (median), peak memory 2.25 GiB (of the whole process)"
    )
    assert told(run)["speed"] == expected
    (run / "plan.json").write_text(json.dumps(plan("native") | {"tier": "HOPPER"}))
    assert told(run)["speed"].endswith("peak memory 2.25 GiB")


def test_the_speed_is_that_of_the_machine_a_run_is_on_now(tmp_path: Path) -> None:
    """Two cards, one rank on each, then a rollback to a step of the first."""
    run = tmp_path / "r"
    with Journal(run / "journal.jsonl") as journal:
        journal.note(
            "run", tags={"card": "L4", "ranks": "1"}, params={}, data={}, where={"host": "a"}
        )
        for step in range(1, 9):
            journal.metrics(step, {"train/tokens_per_second": 100.0, "train/peak_memory_gib": 20.0})
    with Journal(run / "journal.jsonl") as journal:
        journal.note(
            "run", tags={"card": "H100", "ranks": "1"}, params={}, data={}, where={"host": "b"}
        )
        journal.event(8, "run.resumed", to_step=8)
        for step in (9, 10):
            journal.metrics(step, {"train/tokens_per_second": 900.0, "train/peak_memory_gib": 8.0})
    (run / "plan.json").write_text(json.dumps(plan() | {"tier": "HOPPER"}))
    expected = "900 tokens/s (median), peak memory 8.00 GiB; since step 8, 1 rank on H100"
    assert told(run)["speed"] == expected

    with Journal(run / "journal.jsonl") as journal:
        journal.attempt = 2
        journal.event(10, "guard.rollback", to_step=6)
        journal.metrics(7, {"train/tokens_per_second": 800.0, "train/peak_memory_gib": 9.0})
    expected = "800 tokens/s (median), peak memory 9.00 GiB; since step 6, 1 rank on H100"
    assert told(run)["speed"] == expected


def test_the_proof_counts_planned_slots_and_names_the_silent(tmp_path: Path) -> None:
    assert (
        told(make_run(tmp_path / "a", SLOTS))["FP8 proof"] == "6 of 6 FP8 slots saw a nonzero amax"
    )
    silent = told(make_run(tmp_path / "b", SLOTS, silent=("blocks.01.up.weight",)))["FP8 proof"]
    assert silent == "5 of 6 FP8 slots saw a nonzero amax; none seen by: blocks.01.up.weight"
    missing = told(make_run(tmp_path / "c", SLOTS[:4]))["FP8 proof"]
    assert missing.startswith(
        "4 of 6 FP8 slots saw a nonzero amax; none seen by: blocks.1.up.grad_output, blocks.1.up.w"
    )
    assert (
        told(make_run(tmp_path / "d", [], backend="torchao"))["FP8 proof"]
        == "none: dynamic scaling keeps no amax"
    )


def test_delivery_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run_dir = make_run(tmp_path / "runs" / "r", SLOTS)
    assert told(run_dir)["MLflow"] == "off"
    (run_dir / "shipper.log").touch()
    assert told(run_dir)["MLflow"].endswith("sync runs/r")
    Position("id", (run_dir / "journal.jsonl").stat().st_size, "key").save(run_dir)
    assert told(run_dir)["MLflow"].endswith(
        f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow.db"
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    assert told(run_dir)["MLflow"] == "delivered to http://tracker:5000"
    assert told(run_dir)["FP8 slots"].endswith("harness inspect runs/r")
    spaced = run_dir.rename(run_dir.parent / "my run")
    assert told(spaced)["FP8 slots"].endswith("harness inspect 'runs/my run'")
    spaced.rename(run_dir)
    assert "report" not in told(run_dir)
    (run_dir / "report.html").touch()
    assert told(run_dir)["report"] == "runs/r/report.html"


def test_a_run_with_next_to_nothing_in_it(tmp_path: Path) -> None:
    Journal(tmp_path / "r" / "journal.jsonl").close()
    lines = told(tmp_path / "r")
    assert lines["outcome"].startswith("not ended")
    assert lines["loss"] == "no validation"
    assert lines["precision"] == "no plan.json"
    assert lines["speed"] == "not measured"
    assert lines["events"] == "none"
    assert "FP8 proof" not in lines


def test_commands_work_from_a_shell_without_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    assert tool("harness") == ".venv/bin/harness"
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / ".venv"))
    assert tool("harness") == "harness"


TOKENS = {
    "source": "train.bin", "kind": "tokens", "files": 2, "train_tokens": 64_001, "val_tokens": 5000, "vocab": 64,
    "train_samples": 1000, "unigram_nats": 4.0, "unit": "nats per token",
    "skipped": [f"file{number} (not a .bin)" for number in range(10)],
}  # fmt: skip
PARAMS = {"train.steps": 500, "train.global_batch": 4}


def token_run(run_dir: Path, data: dict[str, Any], loss: float) -> str:
    with Journal(run_dir / "journal.jsonl") as journal:
        journal.note("run", tags={}, params=PARAMS, data=data)
        journal.metrics(500, {"val/loss": loss})
    stream = io.StringIO()
    Console(file=stream, width=400).print(summary(run_dir))
    return stream.getvalue()


def test_what_is_trained_on_files_tokens_epochs_and_what_was_left_out(tmp_path: Path) -> None:
    text = token_run(tmp_path / "r", TOKENS, 3.0)
    assert (
        "train.bin (tokens): 2 files, 64,001 tokens to train on, 5,000 to validate on, 64 token ids"
        in text
    )
    assert "500 steps are 2 epochs" in text
    assert "left out 10: file0 (not a .bin), " in text
    assert "and 2 more" in text


def test_losses_per_token_stand_beside_the_unigram_entropy_not_in_bits(tmp_path: Path) -> None:
    text = token_run(tmp_path / "r", TOKENS, 3.0)
    assert (
        "validation 3.0000 nats per token; unigram entropy of the corpus 4.0000, ratio 0.750"
        in text
    )
    assert "bits" not in text


def test_each_source_of_a_mixture_has_its_share_and_epochs(tmp_path: Path) -> None:
    parts = [
        {"source": name, "share": share, "train_tokens": tokens, "train_samples": tokens // 64}
        for name, share, tokens in (("web", 0.75, 96_000), ("code", 0.25, 6400))
    ]
    text = token_run(
        tmp_path / "r", {**TOKENS, "kind": "mixture", "mixture": parts, "skipped": []}, 3.0
    )
    assert "75.0% of web: 96,000 tokens, 1 epoch" in text
    assert "25.0% of code: 6,400 tokens, 5 epochs" in text
    assert "left out" not in text
