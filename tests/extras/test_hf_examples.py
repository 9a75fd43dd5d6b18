"""The examples with Hugging Face's libraries run as they are, and learn."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import ROOT

EXAMPLES = [ROOT / "examples" / f"with_{name}.py" for name in ("huggingface", "lora", "tokenizer")]


def shown(example: Path, folder: Path) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    # Whatever asks the hub for something fails.
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(folder / "home")}
    done = subprocess.run(
        [sys.executable, str(example)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1000,  # a busy machine: it takes less than a minute
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "peak memory" in done.stdout
    return done.stdout


@pytest.mark.nightly
def test_a_model_of_a_folder_is_tuned_and_loaded_back(tmp_path: Path) -> None:
    told = shown(EXAMPLES[0], tmp_path)
    losses = [float(found) for found in re.findall(r"^step .*loss (\S+)", told, re.MULTILINE)]
    assert losses[0] > 6
    assert losses[-1] < 4
    assert "42 of 42 FP8 slots saw a nonzero amax" in told
    assert re.search(r"^native:fp8 +\d\.\d+", told, re.MULTILINE)
    assert "\nimport " in told
    assert "loaded back: Qwen3ForCausalLM, qwen3" in told


@pytest.mark.nightly
def test_adapters_beside_a_frozen_base_learn(tmp_path: Path) -> None:
    told = shown(EXAMPLES[1], tmp_path)
    assert "fp8_hybrid runs as native:fp8: 14 FP8 layers, 14 frozen" in told
    losses = [float(found) for found in re.findall(r"loss (\S+)", told)]
    assert losses[-1] < losses[0] - 0.5
    assert "adapters loaded back: the same logits" in told


@pytest.mark.nightly
def test_a_folder_of_ones_own_becomes_samples(tmp_path: Path) -> None:
    told = shown(EXAMPLES[2], tmp_path)
    assert re.search(r"^loss +validation (\d\.\d+) nats per token", told, re.MULTILINE)
    assert "24 of 24 FP8 slots saw a nonzero amax" in told
    assert "\nimport " in told


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each.stem)
def test_an_example_is_short(example: Path) -> None:
    # Statements, as the formatter decides how many lines they take.
    tree = ast.parse(example.read_text(encoding="utf-8"))
    assert sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) <= 55
