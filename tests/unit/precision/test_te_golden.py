"""The native backend against records of Transformer Engine, and the comparison itself against the oracle.

Real records (benchmarks/te_golden.py) belong in tests/golden/te; all that are there are compared. What the comparison
finds and what it lets pass is tested on a record of the same form that the independent oracle makes.
"""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import fp8_oracle as oracle
import numpy as np
import pytest

from benchmarks import te_golden
from harness.core.files import write_json

ROOT = Path(__file__).resolve().parents[3]
CASES = te_golden.CASES
# Amaxes (input, weight, grad_output) that touch every branch of the rule.
AMAXES = [
    (1.0, 1.0, 1.0),
    (500.0, 1.1, 0.0),
    (1.0, 1.2, 1e-38),
    (math.inf, 0.0, 3e38),
    (2.0, 1e-45, math.inf),
    (0.0, 1e-45, 5e-324),
    *[(0.5, 1e-45, 1e-3)] * 5,
]


def synthetic_sequence(case: dict[str, Any]) -> dict[str, Any]:
    fp8_max = [448.0, 448.0, 57344.0 if case["format"] == "hybrid" else 448.0]
    history, scale = [[0.0] * 3 for _ in range(case["amax_history_len"])], [1.0] * 3
    scales, histories = [], []
    amaxes = [[float(np.float32(value)) for value in row] for row in AMAXES]
    for row in amaxes:
        history = [list(row), *history[1:]]
        history, scale = oracle.update(
            history, scale, fp8_max, case["margin"], case["amax_compute_algo"]
        )
        scales.append(scale)
        histories.append(history)
    parts = {"amax": amaxes, "scale": scales, "history": histories}
    return {**case, **{name: te_golden.numbers(values) for name, values in parts.items()}}


def synthetic_cast(fmt: str, scale: float) -> dict[str, Any]:
    """The byte of every bfloat16, found by the oracle's tables."""
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    codes = {value: code for code in range(128) if math.isfinite(value := oracle.decode(code, fmt))}
    quantized = [float(value) for value in oracle.quantize(values, scale, fmt)]
    found = [
        (codes[abs(value)] | (0x80 if math.copysign(1, value) < 0 else 0))
        if math.isfinite(value)
        else 0x7F
        for value in quantized
    ]
    return {
        "format": fmt,
        "scale": scale,
        "runs": te_golden.to_runs(np.array(found, dtype=np.uint8)),
    }


@cache
def made_by_the_oracle() -> dict[str, Any]:
    casts = [
        synthetic_cast(fmt, scale)
        for fmt in ("e4m3", "e5m2")
        for scale in (1.0, 0.0137, te_golden.SCALES[-1])
    ]
    return {"sequences": [synthetic_sequence(case) for case in CASES], "casts": casts}


def test_every_record_agrees_with_the_native_backend(tmp_path: Path) -> None:
    path = tmp_path / "oracle.json"
    write_json(path, made_by_the_oracle())
    files = [path, *sorted(te_golden.FOLDER.glob("*.json"))]
    said: list[str] = []
    code = te_golden.main(["--check", *map(str, files)], show=said.append)
    assert code == 0, "\n".join(said)
    assert "agrees bit for bit" in said[0]
    assert all(path.name in said[0] for path in files)


@pytest.mark.parametrize("part", ["scale", "history"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_one_ulp_in_a_sequence_is_found(part: str, case: int) -> None:
    golden = copy.deepcopy(made_by_the_oracle())
    sequence = golden["sequences"][case]
    row = sequence[part][-1] if part == "scale" else sequence[part][-1][-1]
    row[2] = float(np.nextafter(np.float32(row[2]), np.float32(0)))
    (line,) = te_golden.disagreements(golden)
    assert f"first at step {len(AMAXES) - 1}, {part} of grad_output: native" in line
    assert str({"margin": CASES[case]["margin"]})[1:-1] in line


@pytest.mark.parametrize("number", range(6))
def test_one_byte_of_a_cast_is_found_and_named(number: int, tmp_path: Path) -> None:
    golden = copy.deepcopy(made_by_the_oracle())
    cast = golden["casts"][number]
    codes = te_golden.from_runs(cast["runs"])
    codes[0x3F81] += 1
    cast["runs"] = te_golden.to_runs(codes)
    path = tmp_path / "wrong.json"
    write_json(path, golden)
    said: list[str] = []
    assert te_golden.main(["--check", str(path)], show=said.append) == 1
    assert f"{cast['format']} at scale {cast['scale']:g}: 1 of 65536 bytes differ" in said[0]
    assert "0x3f81" in said[0]


def test_the_sign_of_a_nan_does_not_count_but_nan_does() -> None:
    golden = copy.deepcopy(made_by_the_oracle())
    cast = golden["casts"][0]
    codes = te_golden.from_runs(cast["runs"])
    nan = int(np.float32(np.nan).view(np.uint32) >> 16)
    codes[nan] = 0xFF
    cast["runs"] = te_golden.to_runs(codes)
    assert te_golden.disagreements(golden) == []
    codes[nan] = 0x7E
    cast["runs"] = te_golden.to_runs(codes)
    assert len(te_golden.disagreements(golden)) == 1


def test_runs_are_the_bytes_and_broken_ones_are_refused() -> None:
    codes = np.random.default_rng(0).integers(0, 256, 1 << 16).astype(np.uint8)
    codes[:100] = 7
    assert np.array_equal(te_golden.from_runs(te_golden.to_runs(codes)), codes)
    for runs in ([], [[1, 0]], [[0, 1], [5, 2], [4, 3]], [[0, 1], [1 << 16, 2]]):
        with pytest.raises(ValueError, match="start at pattern 0"):
            te_golden.from_runs(runs)


@pytest.mark.slow
def test_a_machine_that_cannot_record_says_so(tmp_path: Path) -> None:
    """In a process of its own, whose only machine is this one without its cards."""
    command = [sys.executable, "-m", "benchmarks.te_golden", "--out", str(tmp_path / "none")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 4, done.stderr
    assert "compute capability 8.9" in done.stderr
    assert not (tmp_path / "none").exists()


def test_a_missing_part_of_a_record_is_an_error() -> None:
    with pytest.raises(KeyError):
        te_golden.disagreements(json.loads("{}"))
