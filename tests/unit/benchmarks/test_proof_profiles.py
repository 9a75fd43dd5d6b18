"""The proof's row of profiles: what it records of a contender, and that one which fails leaves the others."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.proof import page, profiles
from benchmarks.proof.profiles import Setup
from benchmarks.proof.registry import Task
from benchmarks.proof.training import not_as_named
from harness.profiling.kinds import KINDS
from harness.profiling.report import Profile
from harness.tracking.journal import JOURNAL, Journal

MACHINE: dict[str, Any] = {
    "card": None,
    "libraries": {"transformer_engine": "transformer_engine: not installed", "torchao": ""},
    "no_compiling": "",
    "packages": [],
}


@pytest.mark.parametrize(
    ("note", "wrong"),
    [
        ("fused FP8 casts by triton 3.7.1", False),
        ("FP8 casts in PyTorch: no GPU", False),
        ("fused FP8 casts by triton 3.7.1; FP8 statistics in PyTorch: it does not compile", True),
        ("FP8 casts in PyTorch: the fused kernel differs: bytes of something", True),
    ],
)
def test_a_kernel_that_fell_back_fails_the_row_that_timed_it(note: str, wrong: bool) -> None:
    facts = {"fp8": {"note": note, "left_fp8": [], "fell_back_to_eager": ""}}
    assert not_as_named(facts) == (
        [f"kernels that do not work here (fp8: {note})"] if wrong else []
    )


def task(folder: Path, seconds: float = 600.0, **more: Any) -> Task:
    deadline = time.monotonic() + seconds
    return Task(True, deadline, folder, folder, earlier={"machine": MACHINE}, **more)


def test_one_that_fails_or_is_not_here_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setups = {
        "fails": Setup("no such backend"),
        "te": Setup("transformer_engine", needs=("fp8", "transformer_engine")),
        "native": Setup("native", needs=("fp8",)),
    }
    monkeypatch.setattr(profiles, "SETUPS", setups)
    noted: list[str] = []
    answer = profiles.profiles(
        task(tmp_path, note=lambda figures: noted.append(json.dumps(figures)))
    )

    figures = answer.figures
    assert figures["reasons"]["te"] == "transformer_engine: not installed"
    assert "no such backend" in figures["reasons"]["fails"]
    assert answer.failed == f"fails: {figures['reasons']['fails']}"
    assert list(figures["contenders"]) == ["native"]
    assert json.loads(noted[-1]) == figures, "it stays if the row is killed later"

    # Every instant of the three steps is of one kind.
    found = figures["contenders"]["native"]
    assert found["rung"] == "native:fp8"
    assert found["kinds"].keys() <= set(KINDS)
    assert sum(row["ms"] for row in found["kinds"].values()) == pytest.approx(found["profiled_ms"])
    assert found["kinds"]["casts"]["ms"] > 0
    assert found["kinds"]["GEMMs bf16"]["calls"] == 3 * (2 * 4 + 1), "two blocks, and the head"
    assert found["step_ms"] > 0
    assert found["largest"] == [], "a CPU has no kernels"
    assert found["steps"] == 6, "the last three are profiled"
    assert f"native {found['profiled_ms']:.4g}" in answer.summary


def test_without_time_nothing_is_started_and_the_row_can_be_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "SETUPS", {"bf16": Setup("16 bit")})
    answer = profiles.profiles(task(tmp_path, seconds=-1.0))
    assert answer.figures["contenders"] == {}
    assert answer.figures["reasons"] == {"bf16": "no time left"}
    assert answer.failed, "a row that passed is not asked again by --resume"


def of_a_card() -> dict[str, Any]:
    """Two steps of 100 ms each."""
    rows = (
        ("GEMMs fp8", 0.120, 400, "nvjet_qqtst"),
        ("casts", 0.060, 200, "quantize"),
        ("host waits", 0.004, 0, ""),
        ("between steps", 0.010, 0, ""),
        ("gaps", 0.006, 0, ""),
    )
    return profiles.of_profile(Profile((16, 17), "cuda", 0, 0.2, rows, 4, 0.02))


def test_a_profile_is_recorded_for_one_step() -> None:
    found = of_a_card()
    assert found["profiled_ms"] == pytest.approx(100)
    assert found["kinds"]["casts"] == {"ms": 30.0, "calls": 100, "mostly": "quantize"}
    assert found["idle_ms"] == pytest.approx(5), "gaps and waits, without time between steps"
    assert found["kernels"] == 300
    assert found["host_waits"] == 2


def event(
    category: str, name: str, microseconds: float, number: int, **more: Any
) -> dict[str, Any]:
    arguments = {"External id": number, **more}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": 0,
        "dur": microseconds,
        "args": arguments,
    }


def test_the_largest_kernels_are_named_with_their_operation_and_shapes(tmp_path: Path) -> None:
    events = [
        event("cpu_op", "aten::mm", 9e6, 7, **{"Input Dims": [[4096, 4096], [4096, 6144], []]}),
        event("kernel", "nvjet_tst", 3000, 7),
        event("kernel", "nvjet_tst", 6000, 7),
        event("gpu_memcpy", "Memcpy DtoD", 30, 8),
        {"ph": "M", "name": "process_name", "args": {}},
    ]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    product, copy = profiles.largest_kernels(path)
    shapes = "[[4096, 4096], [4096, 6144]]"
    assert product.items() >= {"name": "nvjet_tst", "by": "aten::mm", "shapes": shapes}.items()
    assert product["ms"] == pytest.approx(3), "9 ms in three steps"
    assert product["calls"] == pytest.approx(2 / 3)
    assert (copy["by"], copy["shapes"]) == ("", "")


def test_a_profile_without_kernels_is_none_of_a_card(tmp_path: Path) -> None:
    """As where the profiler may not read the card: the host's operations must not pass for it."""
    host = Profile((4, 5), "cpu", 0, 0.2, (("gaps", 0.2, 0, ""),), 0, 0.0)
    folder = tmp_path / "profile"
    folder.mkdir()
    (folder / "steps-000004-000005.table.json").write_text(json.dumps(host.as_dict()))
    assert profiles.profile_in(tmp_path, "cpu") == host
    with pytest.raises(RuntimeError, match="no kernel of the card"):
        profiles.profile_in(tmp_path, "cuda")


def test_a_profile_that_could_not_be_made_says_why(tmp_path: Path) -> None:
    journal = Journal(tmp_path / JOURNAL)
    journal.event(4, "profile.failed", text="the profiler does not start: busy")
    journal.close()
    with pytest.raises(RuntimeError, match="does not start: busy"):
        profiles.profile_in(tmp_path, "cpu")


def test_the_page_shows_kinds_beside_each_other() -> None:
    native = of_a_card() | {"step_ms": 97.0}
    plain = native | {"kinds": {"GEMMs bf16": {"ms": 90.0, "calls": 1, "mostly": ""}}}
    figures = {"size": "8 layers", "contenders": {"bf16": plain, "native": native}}
    lines = page.profile_table(figures)
    assert "| | bf16 | native |" in lines
    assert "| GEMMs fp8 |  | 60.00 |" in lines
    assert "| GEMMs bf16 | 90.00 |  |" in lines
    assert lines.index("| GEMMs fp8 |  | 60.00 |") < lines.index("| casts |  | 30.00 |")
    assert "| without the profiler | 97.00 | 97.00 |" in lines
    assert page.profile_table({}) == [], "the row did not run"


def test_each_contender_of_the_row_has_a_recipe() -> None:
    for name, setup in profiles.SETUPS.items():
        recipe = profiles.recipe_of(setup.backend, fuse=setup.fuse)
        assert recipe.layers.fuse == ("fused" in name)
        assert (setup.compile == "blocks") == ("compiled" in name) == ("compiling" in setup.needs)
